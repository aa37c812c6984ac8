//! The operator's tool.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use mccs_config::change::StrategyChange;
use mccs_config::service::{FlowPath, Ports};
use mccs_service::control::{CommView, ControlAnswer, ControlRequest, HostView, SessionView, call};
use mccs_service::exchange::keys;
use mccs_service::runtime::{EngineId, EngineInfo, RuntimeInfo};
use mccs_service::telemetry::stuck::{StuckClass, StuckReport};

/// Shows and steers a running mccs-service.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The service's control socket.
    #[arg(long, env = "MCCS_CONTROL_SOCKET", default_value = "/run/mccs/mccs-control.sock")]
    socket: PathBuf,
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Hosts, sessions, communicators and engines.
    Show,
    /// Hosts of the cluster, and whether their services can be reached.
    Hosts,
    /// Connected processes.
    Sessions,
    /// Communicators and their counters.
    Communicators,
    /// Engines and the runtimes they are on.
    Engines,
    /// Change the number of transport engines, while work runs.
    ScaleTransports {
        /// How many to have.
        count: usize,
    },
    /// Move an engine to another runtime, while it works.
    MoveEngine {
        /// Number of the engine.
        engine: u64,
        /// Number of the runtime.
        runtime: u32,
    },
    /// Say who or what a communicator waits for, asking all its hosts.
    WhyStuck {
        /// Number of the communicator, as `communicators` shows it.
        communicator: u64,
    },
    /// Change the strategy of a communicator, while its job runs. Returns when all its hosts have agreed.
    Reconfigure(Reconfigure),
    /// Make keys to try a cluster with: an authority, and a certificate and a key for each host. Asks no service.
    Keys {
        /// The hosts' names.
        #[arg(long, required = true, value_delimiter = ',', value_name = "HOST,...")]
        hosts: Vec<String>,
        /// Where to write authority.crt, HOST.crt and HOST.key; made if it is missing.
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
        /// Replace keys that are there.
        #[arg(long)]
        force: bool,
    },
}

#[derive(clap::Args)]
struct Reconfigure {
    /// Number of the communicator, as `communicators` shows it on the host of its root.
    communicator: u64,
    /// File with the change; see config/examples/change.toml. Options below come on top.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// How collectives are carried out: auto, ring, tree, host_ring, host_tree, one_shot or direct.
    #[arg(long)]
    algorithm: Option<String>,
    /// So many channels, with rings as a new communicator has them.
    #[arg(long, conflicts_with = "ring")]
    channels: Option<u32>,
    /// Order of ranks of a channel's ring, such as 0,2,1,3; once for each channel.
    #[arg(long, value_name = "RANK,...")]
    ring: Vec<String>,
    /// Source ports of a way through the network, such as 21000-21999; once for each.
    #[arg(long, value_name = "PORTS")]
    path: Vec<Ports>,
    /// Collectives that may start while hosts agree; chosen by their length, if not given.
    #[arg(long)]
    window: Option<u32>,
}

impl Reconfigure {
    fn request(&self) -> anyhow::Result<ControlRequest> {
        let mut change = self.file.as_deref().map(StrategyChange::load).transpose()?.unwrap_or_default();
        if let Some(name) = &self.algorithm {
            let text = format!("algorithm = {name:?}");
            change.algorithm = StrategyChange::parse(&text, "--algorithm")?.algorithm;
        }
        if self.channels.is_some() {
            (change.channels, change.rings) = (self.channels, None);
        }
        if !self.ring.is_empty() {
            let ring = |text: &String| text.split(',').map(|rank| rank.trim().parse()).collect::<Result<Vec<u32>, _>>();
            let rings = self.ring.iter().map(|text| ring(text).with_context(|| format!("--ring {text}")));
            (change.rings, change.channels) = (Some(rings.collect::<anyhow::Result<_>>()?), None);
        }
        if !self.path.is_empty() {
            let path = |ports: &Ports| FlowPath { source_ports: Some(*ports), ..FlowPath::default() };
            change.paths = Some(self.path.iter().map(path).collect());
        }
        anyhow::ensure!(!change.is_empty(), "nothing is to change: see --help");
        Ok(ControlRequest::Reconfigure { communicator: self.communicator, change, window: self.window })
    }
}

impl Command {
    fn requests(&self) -> anyhow::Result<Vec<ControlRequest>> {
        Ok(match *self {
            Command::Show => vec![
                ControlRequest::Hosts,
                ControlRequest::Sessions,
                ControlRequest::Communicators,
                ControlRequest::Engines,
            ],
            Command::Hosts => vec![ControlRequest::Hosts],
            Command::Sessions => vec![ControlRequest::Sessions],
            Command::Communicators => vec![ControlRequest::Communicators],
            Command::Engines => vec![ControlRequest::Engines],
            Command::ScaleTransports { count } => vec![ControlRequest::ScaleTransports { count }],
            Command::MoveEngine { engine, runtime } => {
                vec![ControlRequest::MoveEngine { engine: EngineId(engine), runtime }]
            }
            Command::WhyStuck { communicator } => vec![ControlRequest::WhyStuck { communicator }],
            Command::Reconfigure(ref reconfigure) => vec![reconfigure.request()?],
            Command::Keys { .. } => Vec::new(),
        })
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Command::Keys { hosts, dir, force } = &arguments.command {
        return match keys::make(hosts, dir, *force) {
            Ok(()) => {
                println!("keys of {} hosts are in {}, good for {} days", hosts.len(), dir.display(), keys::VALID_DAYS);
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("mccsctl: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let asked = arguments
        .command
        .requests()
        .and_then(|requests| requests.iter().try_for_each(|request| ask(&arguments.socket, arguments.json, request)));
    if let Err(error) = asked {
        eprintln!("mccsctl: {error:#}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn ask(socket: &Path, json: bool, request: &ControlRequest) -> anyhow::Result<()> {
    let answer = call(socket, request)?;
    if let ControlAnswer::Refused(reason) = &answer {
        anyhow::bail!("refused: {reason}");
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&answer)?);
        return Ok(());
    }
    match answer {
        ControlAnswer::Sessions(sessions) => print_sessions(&sessions),
        ControlAnswer::Communicators(comms) => print_comms(&comms),
        ControlAnswer::Engines { runtimes, engines } => print_engines(&runtimes, &engines),
        ControlAnswer::Hosts(hosts) => print_hosts(&hosts),
        ControlAnswer::Reconfigured { epoch, cut } => println!("strategy {epoch} holds from collective {cut} on"),
        ControlAnswer::Stuck(report) => print_stuck(&report),
        ControlAnswer::Done => println!("done"),
        ControlAnswer::Refused(_) => {}
    }
    Ok(())
}

fn print_stuck(report: &StuckReport) {
    let verdict = match report.class {
        StuckClass::NotStuck => "nobody waits",
        StuckClass::Rank => "waits for ranks that have not called",
        StuckClass::Flow => "waits for data that does not come",
        StuckClass::Host => "hosts do not answer",
        StuckClass::Failed => "has failed",
    };
    println!("communicator {}: {verdict}", report.communicator);
    for culprit in &report.culprits {
        let rank = culprit.rank.map_or_else(String::new, |rank| format!(" rank {rank}"));
        let pid = culprit.pid.map_or_else(String::new, |pid| format!(" (process {pid})"));
        println!("  {}{rank}{pid}: {}", culprit.host, culprit.what);
    }
    for (host, account) in &report.hosts {
        let Some(account) = account else { continue };
        let last = if account.last.is_empty() { String::new() } else { format!(", last {}", account.last) };
        let state = if account.is_running { "runs" } else { "idle" };
        println!(
            "  {host}: {} collectives started{last}; {state}, nothing moved for {} ms",
            account.started, account.idle_ms
        );
        for rank in account.ranks.iter().filter(|rank| !rank.waits_in.is_empty()) {
            println!("    rank {} (process {}) waits in {}", rank.rank, rank.pid, rank.waits_in.join(", "));
        }
    }
}

fn print_hosts(hosts: &[HostView]) {
    if hosts.is_empty() {
        println!("a single host: service.toml has no [exchange]\n");
        return;
    }
    println!("{:<24} {:<24} {:<5} {:>10}  last error", "host", "address", "state", "since");
    for h in hosts {
        let state = if h.own {
            "own"
        } else if h.up {
            "up"
        } else {
            "down"
        };
        let since = format!("{} s", h.since_seconds);
        println!(
            "{:<24} {:<24} {state:<5} {since:>10}  {}",
            h.host,
            h.address.to_string(),
            h.last_error.as_deref().unwrap_or("-")
        );
    }
    println!();
}

fn print_sessions(sessions: &[SessionView]) {
    println!(
        "{:>8} {:<16} {:>8} {:>6} {:>11} {:>10} {:>7}",
        "session", "tenant", "pid", "uid", "operations", "in flight", "failed"
    );
    for s in sessions {
        println!(
            "{:>8} {:<16} {:>8} {:>6} {:>11} {:>10} {:>7}",
            s.session, s.tenant, s.pid, s.uid, s.operations, s.in_flight, s.failed
        );
    }
    println!();
}

fn print_comms(comms: &[CommView]) {
    println!(
        "{:>6} {:<12} {:<8} {:>6} {:>11} {:>12} {:>9} {:>7} {:>6}  last enqueued/started/completed by rank",
        "comm", "tenant", "device", "ranks", "operations", "MiB", "busbw", "failed", "epoch"
    );
    for c in comms {
        let progress: Vec<_> =
            c.ranks.iter().map(|rank| format!("{}/{}/{}", rank.enqueued, rank.started, rank.completed)).collect();
        println!(
            "{:>6} {:<12} {:<8} {:>6} {:>11} {:>12.1} {:>9.2} {:>7} {:>6}  {}",
            c.communicator,
            c.tenant,
            c.device,
            c.ranks.len(),
            c.operations,
            c.bytes as f64 / (1 << 20) as f64,
            c.busbw_gbps,
            c.failed,
            c.epoch,
            progress.join(" ")
        );
    }
    println!();
}

fn print_engines(runtimes: &[RuntimeInfo], engines: &[EngineInfo]) {
    println!("{:>8} {:<14} {:>8} {:>14} {:>10}  engines", "runtime", "thread", "tid", "rounds", "sleeps");
    for runtime in runtimes {
        let here = engines.iter().filter(|engine| engine.runtime == runtime.index);
        let names: Vec<_> = here.map(|engine| format!("{}: {}", engine.id, engine.name)).collect();
        println!(
            "{:>8} {:<14} {:>8} {:>14} {:>10}  {}",
            runtime.index,
            runtime.name,
            runtime.tid,
            runtime.rounds,
            runtime.parks,
            names.join(", ")
        );
    }
}
