//! The operator's tool `mccsctl`: subcommands and options of its command line.

#[macro_use]
mod out;
mod cluster;
mod diff;
mod doctor;
mod drain;
mod paths;
mod policy;
mod reconfigure;
mod schema;
mod show;
mod steering;
mod stuck;
mod tenant;
mod token;
mod trace;
mod upgrade;
mod view;
mod watch;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use mccs_config::cpus::CpuChoice;
use mccs_config::error::in_words;
use mccs_config::service::ServiceConfig;
use mccs_control::documents::{CONTROLLER_ANSWERS_WITHIN, Document};
use mccs_control::{ControlAnswer, ControlRequest, call, call_within};
use mccs_controller::messages::answer::ControllerRequest;
use mccs_exchange::keys;
use mccs_runtime::EngineId;

use crate::doctor::Doctor;
use crate::drain::Drain;
use crate::policy::{Link, PolicyCommand};
use crate::reconfigure::Reconfigure;
use crate::schema::Schema;
use crate::steering::SteeringCommand;
use crate::tenant::TenantCommand;
use crate::token::TokenCommand;
use crate::trace::{MergeTraces, Trace};
use crate::upgrade::Upgrade;
use crate::watch::Watch;

/// Shows and steers a running mccs-service.
#[derive(Parser)]
#[command(name = "mccsctl", version = mccs_exchange::version())]
struct Arguments {
    /// The service's control socket. Default: the one of this user's service.
    #[arg(
        long,
        global = true,
        env = "MCCS_CONTROL_SOCKET",
        default_value_os_t = ServiceConfig::default().control_socket()
    )]
    socket: PathBuf,
    /// Print JSON instead of tables.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Hosts, GPUs, sessions, communicators and engines.
    Show,
    /// Hosts of the cluster, and whether their services can be reached.
    Hosts,
    /// All hosts of the cluster, from any of them: sessions, communicators, certificates, failures. Needs
    /// `[controller]` in service.toml.
    Cluster,
    /// Stuck communicators of the whole cluster, and the culprits; of this host without `[controller]` in
    /// service.toml. Fails if there is one, or if a host could not be asked.
    Stuck,
    /// GPUs of this service, and whether they work.
    Gpus,
    /// Connected processes.
    Sessions,
    /// Communicators and their counters.
    Communicators,
    /// Communicators that failed within the last hour, and why.
    Failed,
    /// Communicators that wait for ranks to join, from ten seconds on, and the missing ranks. On the
    /// host of rank 0.
    Joining,
    /// Flows to and from other hosts: bytes, round trips, packets sent again.
    Flows,
    /// Paths to and from other hosts: the same, summed over their flows.
    Links,
    /// Tenants: of service.toml, and those that were added while the service ran.
    Tenants,
    #[command(subcommand)]
    Tenant(TenantCommand),
    #[command(subcommand)]
    Token(TokenCommand),
    /// Engines and the runtimes they are on.
    Engines,
    /// Change the number of transport engines while jobs run.
    ScaleTransports {
        /// The new number.
        count: usize,
    },
    /// Move an engine to another runtime while jobs run.
    MoveEngine {
        /// Number of the engine.
        engine: u64,
        /// Number of the runtime.
        runtime: u32,
    },
    /// Have a runtime's thread run on the CPUs of a NUMA node, on others, or anywhere, while jobs run.
    BindRuntime {
        /// Number of the runtime.
        runtime: u32,
        /// "any", "node 1", or CPUs such as "0-7,16".
        to: CpuChoice,
    },
    Drain(Drain),
    Doctor(Doctor),
    Upgrade(Upgrade),
    /// Read service.toml anew while jobs run: the service goes on as a new process of its program.
    Reload,
    /// Name the rank, link or host that a communicator waits for. Asks all its hosts.
    WhyStuck {
        /// Number of the communicator, as `communicators` shows it.
        communicator: u64,
    },
    /// Change the strategy of a communicator while its job runs. Returns when all its hosts have agreed. The
    /// strategy is pinned then: the controller leaves it alone until --unpin.
    Reconfigure(Reconfigure),
    /// Show which host is the controller, and whether the cluster's store can be used, as this host knows.
    Controller,
    /// Check, compare and apply policies of the whole cluster. On the controller's host.
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Mark a link as down, up, or of another rate. Flows take other paths. On the controller's host.
    Link(Link),
    Steering(SteeringCommand),
    Watch(Watch),
    Trace(Trace),
    MergeTraces(MergeTraces),
    Schema(Schema),
    /// Print completions for a shell. Asks no service.
    Completions {
        /// Which shell.
        shell: Shell,
    },
    /// Make keys to try a cluster with: an authority, and a certificate and key for each host. Asks no
    /// service.
    Keys {
        /// The hosts' names.
        #[arg(long, required = true, value_delimiter = ',', value_name = "HOST,...")]
        hosts: Vec<String>,
        /// Folder for authority.crt, HOST.crt and HOST.key; made if it is missing.
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
        /// Replace keys that are there.
        #[arg(long)]
        force: bool,
    },
}

impl Command {
    fn requests(&self, json: bool) -> anyhow::Result<Vec<ControlRequest>> {
        Ok(match *self {
            Command::Show => vec![
                ControlRequest::Hosts,
                ControlRequest::Gpus,
                ControlRequest::Sessions,
                ControlRequest::Communicators,
                ControlRequest::Joining,
                ControlRequest::Failed,
                ControlRequest::Engines,
            ],
            Command::Hosts => vec![ControlRequest::Hosts],
            Command::Gpus => vec![ControlRequest::Gpus],
            Command::Sessions => vec![ControlRequest::Sessions],
            Command::Communicators => vec![ControlRequest::Communicators],
            Command::Joining => vec![ControlRequest::Joining],
            Command::Failed => vec![ControlRequest::Failed],
            Command::Tenants => vec![ControlRequest::Tenants],
            Command::Engines => vec![ControlRequest::Engines],
            Command::ScaleTransports { count } => vec![ControlRequest::ScaleTransports { count }],
            Command::MoveEngine { engine, runtime } => {
                vec![ControlRequest::MoveEngine { engine: EngineId(engine), runtime }]
            }
            Command::BindRuntime { runtime, ref to } => vec![ControlRequest::BindRuntime { runtime, to: to.clone() }],
            Command::WhyStuck { communicator } => vec![ControlRequest::WhyStuck { communicator }],
            Command::Reconfigure(ref reconfigure) => vec![reconfigure.request()?],
            Command::Controller => vec![ControlRequest::Controller { request: ControllerRequest::Office }],
            Command::Policy(ref policy) => policy.request(json)?.into_iter().collect(),
            Command::Link(ref link) => vec![link.request()],
            Command::Token(ref token) => vec![token.request()],
            Command::Drain(_)
            | Command::Doctor(_)
            | Command::Upgrade(_)
            | Command::Reload
            | Command::Cluster
            | Command::Stuck
            | Command::Flows
            | Command::Links
            | Command::Steering(_)
            | Command::Tenant(_)
            | Command::Watch(_)
            | Command::Trace(_)
            | Command::MergeTraces(_)
            | Command::Schema(_)
            | Command::Completions { .. }
            | Command::Keys { .. } => Vec::new(),
        })
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Command::Keys { hosts, dir, force } = &arguments.command {
        return match keys::make(hosts, dir, *force) {
            Ok(()) => {
                say!("keys of {} hosts are in {}, good for {} days", hosts.len(), dir.display(), keys::VALID_DAYS);
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("mccsctl: {error}");
                ExitCode::FAILURE
            }
        };
    }
    if let Command::Completions { shell } = &arguments.command {
        let mut text = Vec::new();
        clap_complete::generate(*shell, &mut Arguments::command(), "mccsctl", &mut text);
        say!("{}", String::from_utf8_lossy(&text).trim_end());
        return ExitCode::SUCCESS;
    }
    let (socket, json) = (&arguments.socket, arguments.json);
    let asked = match &arguments.command {
        Command::Drain(drain) => drain.run(socket, json),
        Command::Doctor(doctor) => doctor.run(socket, json),
        Command::Upgrade(upgrade) => upgrade.run(socket, json),
        Command::Reload => Upgrade::default().run(socket, json),
        Command::Cluster => cluster::cluster(socket, json),
        Command::Stuck => cluster::stuck(socket, json),
        Command::Flows => paths::flows(socket, json),
        Command::Links => paths::links(socket, json),
        Command::Steering(steering) => steering.run(json),
        Command::Tenant(tenant) => tenant.run(socket, json),
        Command::Watch(watch) => watch.run(socket, json),
        Command::Trace(trace) => trace.run(socket),
        Command::MergeTraces(merge) => merge.run(),
        Command::Schema(schema) => schema.run(),
        Command::Show if json => Document::Show.pretty(socket).map(|text| say!("{text}")).map_err(Into::into),
        Command::WhyStuck { communicator } if !json => stuck::why_stuck(socket, *communicator),
        command => {
            let requests = command.requests(json);
            requests.and_then(|requests| requests.iter().try_for_each(|request| ask(socket, json, request)))
        }
    };
    if let Err(error) = asked {
        eprintln!("mccsctl: {}", in_words(error.as_ref()));
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn ask(socket: &Path, json: bool, request: &ControlRequest) -> anyhow::Result<()> {
    let answer = match request {
        ControlRequest::Controller { .. } => call_within(socket, request, CONTROLLER_ANSWERS_WITHIN)?,
        _ => call(socket, request)?,
    };
    if let ControlAnswer::Refused(reason) = &answer {
        anyhow::bail!("refused: {reason}");
    }
    if json {
        say!("{}", serde_json::to_string_pretty(&answer)?);
    }
    if let ControlAnswer::Controller(answer) = &answer
        && let Some(reason) = policy::failure(answer)
    {
        anyhow::bail!("{reason}");
    }
    if json {
        return Ok(());
    }
    match answer {
        ControlAnswer::Sessions(sessions) => show::sessions(&sessions),
        ControlAnswer::Communicators(comms) => show::comms(&comms),
        ControlAnswer::Joining(joining) => show::joining(&joining),
        ControlAnswer::Failed(failed) => show::failed(&failed),
        ControlAnswer::Tenants(tenants) => tenant::print(&tenants),
        ControlAnswer::Token(made) => say!("{}", made.token),
        ControlAnswer::Tokens(tokens) => token::print(&tokens),
        ControlAnswer::Engines { runtimes, engines } => show::engines(&runtimes, &engines),
        ControlAnswer::Hosts(hosts) => show::hosts(&hosts),
        ControlAnswer::Gpus(gpus) => show::gpus(&gpus),
        ControlAnswer::Reconfigured { epoch, cut } => say!("strategy {epoch} holds from collective {cut} on"),
        ControlAnswer::Stuck(report) => stuck::print(&report),
        ControlAnswer::Controller(answer) => policy::print(&answer),
        ControlAnswer::Done => say!("done"),
        // Asked for by commands that show them themselves.
        ControlAnswer::Cluster(_)
        | ControlAnswer::NoController
        | ControlAnswer::Drain(_)
        | ControlAnswer::Upgraded(_)
        | ControlAnswer::Overview(_)
        | ControlAnswer::Tracing(_)
        | ControlAnswer::TenantAdded { .. }
        | ControlAnswer::NoTenant
        | ControlAnswer::ActRefused(_)
        | ControlAnswer::TraceRing => {}
        ControlAnswer::Refused(_) | ControlAnswer::TryAgain(_) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `mccsctl` commands in code blocks of the documents, without comments, prompts, and what the shell does with them.
    fn commands_of_pages() -> Vec<String> {
        let root =
            Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find(|folder| folder.join("docs/README.md").exists());
        let pages = std::fs::read_dir(root.expect("the repository").join("docs")).expect("a folder");
        let texts = pages.filter_map(|page| std::fs::read_to_string(page.expect("an entry").path()).ok());
        let mut commands = Vec::new();
        for text in texts {
            for block in text.split("```").skip(1).step_by(2) {
                let lines = block.lines().map(|line| line.strip_prefix("$ ").unwrap_or(line));
                let commands_here = lines.filter(|line| line.starts_with("mccsctl "));
                let ends = |line: &str| ["#", "&&", "|", ";"].iter().filter_map(|end| line.find(end)).min();
                commands.extend(commands_here.map(|line| line[..ends(line).unwrap_or(line.len())].to_owned()));
            }
        }
        commands
    }

    #[test]
    fn commands_that_pages_show_are_understood() {
        let commands = commands_of_pages();
        assert!(commands.len() > 20, "only {commands:?}");
        for command in commands {
            let words = command.split_whitespace().map(|word| if word == "$ID" { "7" } else { word });
            if let Err(error) = Arguments::try_parse_from(words) {
                panic!("a page shows `{command}`: {error}");
            }
        }
    }

    #[test]
    fn what_holds_for_all_commands_is_understood_before_and_behind_them() {
        for words in
            ["--json --socket /s policy show", "policy --json show --socket /s", "policy show --socket /s --json"]
        {
            let words = std::iter::once("mccsctl").chain(words.split(' '));
            let Arguments { socket, json, command } =
                Arguments::try_parse_from(words).unwrap_or_else(|error| panic!("{error}"));
            assert!(json && socket == Path::new("/s") && matches!(command, Command::Policy(PolicyCommand::Show)));
        }
    }

    #[test]
    fn arguments_contradict_nothing() {
        Arguments::command().debug_assert();
    }
}
