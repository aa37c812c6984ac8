//! `mccs-sim`: simulates policies on scenarios, and collectives of GPUs of many hosts; sizes RDMA
//! devices. `mccs-sim run eval/scenarios/qos.toml --out eval/results` runs scenarios; `mccs-sim
//! decide --jobs 1000` measures policies; `mccs-sim rdma --nics 8 --gbit-per-s 400` says what RDMA
//! devices need; `mccs-sim rails --hosts 2,8,64` simulates collectives of GPUs of several hosts.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use mccs_collective::{CHANNELS_MAX, CostModel, Problem, RdmaHost, Strategy, build};
use mccs_config::service::AlgorithmChoice;
use mccs_eval::planning::{Planning, Took};
use mccs_eval::rails;
use mccs_eval::simulator::{Scenario, report};
use mccs_ipc::types::CollectiveKind;
use mccs_policy::random::Random;
use mccs_policy::topology::{Clos, HostId, Topology};
use mccs_policy::{Job, Placed, PlacedRank, Policy, Profile, Rules, TenantTerms, View};
use mccs_telemetry::bandwidth::Traffic;

#[derive(Parser)]
#[command(name = "mccs-sim", version, about = "Simulates jobs that share a network, under the service's own policies")]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Runs every variant of scenarios, and prints tables.
    Run {
        /// Scenario files.
        #[arg(required = true)]
        scenarios: Vec<PathBuf>,
        /// Folder for `sim-NAME.json` and `sim-NAME.md`.
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Measures how long policies take: hosts of eight devices in racks of 20, three tiers; and how long the controller does to put one in
    /// force, on two tiers.
    Decide {
        /// Jobs.
        #[arg(long, default_value_t = 1_000)]
        jobs: u32,
        /// Hosts, a multiple of 1000.
        #[arg(long, default_value_t = 10_000)]
        hosts: u32,
        /// Folder for `sim-decide.json` and `sim-decide.md`.
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Simulates collectives of GPUs of several hosts by rails: hosts of eight H100s with a NIC of 400 Gbit/s each.
    Rails {
        /// Numbers of hosts.
        #[arg(long, value_delimiter = ',', default_values_t = [2, 8, 64])]
        hosts: Vec<u32>,
        /// Folder for `sim-rails.json` and `sim-rails.md`.
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// On paper: what a host's RDMA devices need, and what collectives take over them by the cost model.
    Rdma(Rdma),
}

#[derive(Args)]
struct Rdma {
    /// Devices of a host, with a link each.
    #[arg(long, default_value_t = 8)]
    nics: u32,
    /// Rate of a link.
    #[arg(long, default_value_t = 400.0)]
    gbit_per_s: f64,
    /// Queue pairs of a flow.
    #[arg(long, default_value_t = 4)]
    qps: u32,
    /// Unfinished writes of a queue pair.
    #[arg(long, default_value_t = 64)]
    outstanding: u32,
    /// Longest part of a message, in KiB.
    #[arg(long, default_value_t = 256)]
    part_kib: u32,
    /// Between two hosts and back, in microseconds, without queues.
    #[arg(long, default_value_t = 22.0)]
    round_trip_us: f64,
    /// GB/s of a host's memory.
    #[arg(long, default_value_t = 614.4)]
    memory_gb_per_s: f64,
    /// GB/s that a core reduces.
    #[arg(long, default_value_t = 10.0)]
    reduce_gb_per_s: f64,
    /// Hosts of the collectives, with a rank each.
    #[arg(long, default_value_t = 16)]
    hosts: u32,
    /// Folder for `sim-rdma.md`.
    #[arg(long)]
    out: Option<PathBuf>,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().what {
        What::Run { scenarios, out } => scenarios.iter().try_for_each(|path| run(path, out.as_deref())),
        What::Decide { jobs, hosts, out } => decide(jobs, hosts, out.as_deref()),
        What::Rails { hosts, out } => simulate_rails(&hosts, out.as_deref()),
        What::Rdma(rdma) => rdma.run(),
    };
    mccs_eval::arguments::exit("mccs-sim", outcome)
}

fn run(path: &Path, out: Option<&Path>) -> anyhow::Result<()> {
    let scenario = Scenario::load(path)?;
    if !scenario.moments.is_empty() {
        println!(
            "# {}\n\nNot simulated: its moments are of the emulated fabric, where eval/scenario.py runs it.\n",
            scenario.name
        );
        return Ok(());
    }
    let figures = report::run(&scenario).with_context(|| path.display().to_string())?;
    let cpu_s: f64 = figures.iter().map(|variant| variant.cpu_s).sum();
    let table =
        format!("{}Simulated in {cpu_s:.1} s of CPU time.\n{}", report::table(&scenario, &figures), provenance_line());
    println!("# {}\n\n{table}", scenario.name);
    let Some(out) = out else { return Ok(()) };
    let json = serde_json::json!({ "provenance": provenance(), "scenario": scenario, "variants": figures });
    write(out, &format!("sim-{}.json", scenario.name), &(serde_json::to_string_pretty(&json)? + "\n"))?;
    write(out, &format!("sim-{}.md", scenario.name), &table)
}

fn write(folder: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let path = folder.join(name);
    std::fs::write(&path, text).with_context(|| path.display().to_string())
}

fn provenance() -> serde_json::Value {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success());
        output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let command: Vec<String> = std::env::args().skip(1).collect();
    serde_json::json!({
        "commit": git(&["rev-parse", "HEAD"]),
        // Other results change none.
        "uncommitted_changes": git(&["status", "--porcelain", "--untracked-files=no", "--", ":(top,exclude)eval/results"])
            .is_some_and(|text| !text.is_empty()),
        "command": format!("mccs-sim {}", command.join(" ")),
    })
}

fn provenance_line() -> String {
    let from = provenance();
    let commit = from["commit"].as_str().unwrap_or("unknown");
    let changed = if from["uncommitted_changes"] == true { " and uncommitted changes" } else { "" };
    format!("`{}`, commit {commit}{changed}.\n", from["command"].as_str().unwrap_or_default())
}

/// A network of two tiers, with eight NICs a host.
fn two_tiers(hosts: u32) -> Clos {
    Clos {
        pods: hosts / 1_000,
        racks_per_pod: 50,
        hosts_per_rack: 20,
        devices_per_host: 8,
        nics_per_host: 8,
        spines_per_pod: 8,
        cores_per_spine: 8,
        leaf_spine_bps: 1_600e9,
        spine_core_bps: 1_600e9,
        ..Clos::testbed(400e9)
    }
}

/// Jobs of eight devices a host, on hosts at random.
fn placed_at_random(jobs: u32, hosts: u32) -> Vec<Job> {
    let mut random = Random::new(1);
    let mut order: Vec<u32> = (0..hosts).collect();
    random.shuffle(&mut order);
    let rank = |number: u32, host: &u32| Placed {
        host: HostId(*host),
        ranks: (0..8).map(|device| PlacedRank { rank: number * 8 + device, device }).collect(),
    };
    let job = |(comm, hosts): (u32, &[u32])| Job {
        comm: u64::from(comm),
        tenant: format!("t{}", comm % 10),
        hosts: (0..).zip(hosts).map(|(number, host)| rank(number, host)).collect(),
        channels: 8,
        ring_orders: Vec::new(),
        profile: Some(Profile {
            period_ns: 300_000_000 + 1_000_000 * u64::from(comm % 97),
            busy_ns: 90_000_000,
            phase_ns: 0,
        }),
        pinned: None,
    };
    (0..).zip(order.chunks((hosts / jobs) as usize)).map(job).collect()
}

/// Ten tenants of three priorities, one of which has a spine of its own.
fn rules_of_tenants() -> Rules {
    let tenant = |(number, priority): (u32, u32)| TenantTerms {
        priority,
        weight: Some(1.0),
        ..TenantTerms::new(format!("t{number}"))
    };
    let mut rules =
        Rules { tenants: (0..10).zip([2, 1, 0].into_iter().cycle()).map(tenant).collect(), ..Rules::default() };
    rules.tenants[0].spines = vec![0];
    rules
}

/// Times decisions of a policy, and its way through the controller: a row of the table, and the data.
fn time_policy(
    policy: &dyn Policy,
    view: &View<'_>,
    planning: &mut Planning,
) -> anyhow::Result<(String, serde_json::Value)> {
    let mut runs_ms = [0.0; 3];
    let mut flows: usize = 0;
    for run_ms in &mut runs_ms {
        let began_s = report::cpu_s();
        flows = policy.decide(view).0.iter().map(|decision| decision.flows.len()).sum();
        *run_ms = (report::cpu_s() - began_s) * 1e3;
    }
    let [best_ms, worst_ms] = [f64::min, f64::max].map(|pick| runs_ms.into_iter().reduce(pick).unwrap_or(0.0));
    let mut runs = Vec::new();
    for _ in 0..runs_ms.len() {
        // From another policy, so that all is told and ordered anew.
        planning.apply(if policy.name() == "ecmp" { "ffa" } else { "ecmp" })?;
        runs.push(planning.apply(policy.name())?);
    }
    let ms =
        |part: fn(&Took) -> f64, pick: fn(f64, f64) -> f64| 1e3 * runs.iter().map(part).reduce(pick).unwrap_or(0.0);
    let best = |part: fn(&Took) -> f64| ms(part, f64::min);
    let row = format!(
        "| {} | {flows} | {best_ms:.0} | {worst_ms:.0} | {:.0} | {:.0} | {:.0} | {:.0} |\n",
        policy.name(),
        best(|took| took.plan_s),
        best(|took| took.told_s),
        ms(|took| took.told_s, f64::max),
        best(|took| took.all_s)
    );
    let json = serde_json::json!({
        "policy": policy.name(), "flows": flows, "runs_cpu_ms": runs_ms, "controller_runs": runs
    });
    Ok((row, json))
}

fn decide(jobs: u32, hosts: u32, out: Option<&Path>) -> anyhow::Result<()> {
    anyhow::ensure!(
        hosts.is_multiple_of(1_000) && jobs > 0 && jobs <= hosts,
        "hosts come in thousands, jobs have one at least"
    );
    let topology = Topology::clos(&two_tiers(hosts))?;
    let all = placed_at_random(jobs, hosts);
    let rules = rules_of_tenants();
    let view = View { topology: &topology, capacities: topology.rates(), jobs: &all, rules: &rules };
    let mut planning = Planning::new(jobs, hosts)?;
    let mut text = format!(
        "How long do policies take to decide about {} jobs of 80 devices on {hosts} hosts with eight NICs, placed at random?\n\n\
         Plans, told and all are the controller's, on a network of two tiers: planning for all, from the operator's word until hosts are told of \
         paces and of the first orders, and until the last order is answered. CPU time in ms, best of 3. A topology is read and checked when \
         its file has changed, which took {:.0} ms.\n\n\
         | policy | flows | decide | worst | plans | told | worst | all |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n",
        all.len(),
        1e3 * planning.read_s
    );
    let mut policies = Vec::new();
    for policy in mccs_policy::ALL {
        let (row, json) = time_policy(*policy, &view, &mut planning)?;
        text += &row;
        policies.push(json);
    }
    text += &format!("\n{}", provenance_line());
    println!("{text}");
    let Some(out) = out else { return Ok(()) };
    let json = serde_json::json!({ "provenance": provenance(), "jobs": jobs, "hosts": hosts, "read_cpu_ms": 1e3 * planning.read_s, "policies": policies });
    write(out, "sim-decide.json", &(serde_json::to_string_pretty(&json)? + "\n"))?;
    write(out, "sim-decide.md", &text)
}

fn simulate_rails(hosts: &[u32], out: Option<&Path>) -> anyhow::Result<()> {
    let machine = rails::Machine::h100_400g()?;
    let mut text = format!(
        "Hosts of {} H100s with as many NICs of 400 Gbit/s, simulated; float32, out of place; busbw in GB/s.\n",
        machine.gpus
    );
    let mut all = Vec::new();
    for kind in [CollectiveKind::AllReduce, CollectiveKind::AllGather, CollectiveKind::ReduceScatter] {
        for &hosts in hosts {
            let places = rails::report::places(&machine, kind, hosts)?;
            text += &rails::report::tables(&places);
            all.extend(places);
        }
    }
    text += &format!("\n{}", provenance_line());
    println!("{text}");
    let Some(out) = out else { return Ok(()) };
    let json = serde_json::json!({ "provenance": provenance(), "designs": rails::report::designs(), "places": all });
    write(out, "sim-rails.json", &(serde_json::to_string_pretty(&json)? + "\n"))?;
    write(out, "sim-rails.md", &text)
}

impl Rdma {
    fn run(&self) -> anyhow::Result<()> {
        let all_positive =
            [self.nics, self.qps, self.outstanding, self.part_kib].iter().all(|count| (1..=1 << 16).contains(count));
        let rates = [self.gbit_per_s, self.round_trip_us, self.memory_gb_per_s, self.reduce_gb_per_s];
        anyhow::ensure!(
            all_positive && rates.iter().all(|rate| rate.is_finite() && *rate > 0.0),
            "counts and rates are above 0, counts at most 65536"
        );
        anyhow::ensure!((2..=256).contains(&self.hosts), "--hosts is from 2 to 256");
        let host = RdmaHost {
            qps: self.qps,
            outstanding: self.outstanding,
            part_bytes: self.part_kib << 10,
            round_trip_ns: 1e3 * self.round_trip_us,
            memory_bytes_per_ns: self.memory_gb_per_s,
            reduced_bytes_per_ns: self.reduce_gb_per_s,
            ..RdmaHost::new(self.nics, self.gbit_per_s)
        };
        let text = format!(
            "{} NICs of {} Gbit/s a host, on paper.\n\n{}\nCollectives of {} hosts with one rank, by the schedules' cost model, busbw in GB/s.\n\n{}\n{}",
            self.nics,
            self.gbit_per_s,
            sizing_table(&host),
            self.hosts,
            collectives_table(&host, self.hosts)?,
            provenance_line()
        );
        println!("{text}");
        self.out.as_deref().map_or(Ok(()), |out| write(out, "sim-rdma.md", &text))
    }
}

fn sizing_table(host: &RdmaHost) -> String {
    let sizing = host.sizing();
    let kib = host.part_bytes >> 10;
    let percent = |share: f64| format!("{:.0}%", 100.0 * share);
    let rows = [
        (format!("messages of {kib} KiB, one way, a NIC"), format!("{:.0} a second", sizing.messages_per_s)),
        (
            "work requests and completions for them, both ways".into(),
            format!("{:.2} million a second", sizing.verbs_per_s / 1e6),
        ),
        (format!("cores that these take, at {} ns each", host.verb_ns), format!("{:.2} a NIC", sizing.driving_cores)),
        (
            format!("packets at an MTU of {}, each way", host.mtu_bytes),
            format!("{:.1} million a second", sizing.packets_per_s / 1e6),
        ),
        (
            format!("bytes under way that fill a link, at {} us", host.round_trip_ns / 1e3),
            format!("{:.2} MB, {} parts", sizing.under_way_bytes / 1e6, sizing.under_way_parts),
        ),
        (
            format!(
                "a flow's window, {} queue pairs of {} writes, {} messages",
                host.qps, host.outstanding, host.requests
            ),
            format!("{:.1} MB, a round trip of {:.0} us", sizing.window_bytes / 1e6, sizing.window_ns / 1e3),
        ),
        (
            format!("least `outstanding` for queues of {} us", host.queued_round_trip_ns / 1e3),
            sizing.outstanding_least.to_string(),
        ),
        (
            "completions of a flow under way, at most".into(),
            format!("{}: {} flows a queue of {}", sizing.completions_most, sizing.flows_per_cq, host.cq_entries),
        ),
        (
            format!("cores that reduce, at {} GB/s each, all-reduce", host.reduced_bytes_per_ns),
            format!("{:.1} a NIC", sizing.reducing_cores),
        ),
        (
            "memory for an all-gather at line rate".into(),
            format!(
                "{:.0} GB/s; {:.0} GB/s allow {}",
                sizing.all_gather_memory_bytes_per_ns,
                host.memory_bytes_per_ns,
                percent(sizing.all_gather_share)
            ),
        ),
        (
            "memory for an all-reduce at line rate".into(),
            format!(
                "{:.0} GB/s; {:.0} GB/s allow {}",
                sizing.all_reduce_memory_bytes_per_ns,
                host.memory_bytes_per_ns,
                percent(sizing.all_reduce_share)
            ),
        ),
    ];
    let lines: String = rows.into_iter().map(|(what, value)| format!("| {what} | {value} |\n")).collect();
    format!("| | |\n| --- | --- |\n{lines}")
}

fn collectives_table(host: &RdmaHost, hosts: u32) -> anyhow::Result<String> {
    let ranks: Vec<Vec<u32>> = (0..hosts).map(|rank| vec![rank]).collect();
    let model = CostModel::over_rdma(&ranks, host);
    let strategy = Strategy::initial(AlgorithmChoice::Auto, hosts, host.nics.min(CHANNELS_MAX as u32), &ranks);
    let mut text = "| | bytes | algorithm | us | busbw |\n| --- | --- | --- | --- | --- |\n".to_owned();
    for (kind, ranks_each) in [(CollectiveKind::AllReduce, 1), (CollectiveKind::AllGather, u64::from(hosts))] {
        for bytes in [64 << 10, 1 << 20, 64 << 20, 1 << 30] {
            let problem = Problem {
                kind,
                nranks: hosts,
                root: 0,
                count: bytes / 4 / ranks_each,
                premultiply: false,
                leaves_own: false,
                one_hop: false,
            };
            let algorithm = model.choose(&problem, 4, &strategy)?;
            let ns = model.estimate_ns(&build(&problem, algorithm, &strategy)?, 4);
            let bus_bytes = Traffic::new(kind, problem.count * 4, u64::from(hosts)).bus_bytes;
            text += &format!(
                "| {} | {bytes} | {algorithm:?} | {:.0} | {:.1} |\n",
                kind.name(),
                ns / 1e3,
                bus_bytes as f64 / ns
            );
        }
    }
    Ok(text)
}
