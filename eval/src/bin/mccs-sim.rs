//! Runs scenarios on the simulator: `mccs-sim run eval/scenarios/qos.toml --out eval/results`; measures policies:
//! `mccs-sim decide --jobs 1000`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use clap::{Parser, Subcommand};
use mccs_eval::simulator::{Scenario, report};
use mccs_service::policy::random::Random;
use mccs_service::policy::{self, Job, Placed, Profile, Rules, TenantTerms, View};
use mccs_service::topology::{Clos, HostId, Topology};

#[derive(Parser)]
#[command(about = "Simulates jobs that share a network, under the service's own policies")]
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
    /// Measures how long policies take: hosts of eight devices in racks of 20, three tiers.
    Decide {
        /// Jobs.
        #[arg(long, default_value_t = 1_000)]
        jobs: u32,
        /// Hosts, a multiple of 1000.
        #[arg(long, default_value_t = 10_000)]
        hosts: u32,
        /// Folder for `sim-decide.md`.
        #[arg(long)]
        out: Option<PathBuf>,
    },
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().what {
        What::Run { scenarios, out } => scenarios.iter().try_for_each(|path| run(path, out.as_deref())),
        What::Decide { jobs, hosts, out } => decide(jobs, hosts, out.as_deref()),
    }
}

fn run(path: &Path, out: Option<&Path>) -> anyhow::Result<()> {
    let scenario = Scenario::load(path)?;
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
        "uncommitted_changes": git(&["status", "--porcelain"]).is_some_and(|text| !text.is_empty()),
        "command": format!("mccs-sim {}", command.join(" ")),
    })
}

fn provenance_line() -> String {
    let from = provenance();
    let commit = from["commit"].as_str().unwrap_or("unknown");
    let changed = if from["uncommitted_changes"] == true { " and uncommitted changes" } else { "" };
    format!("`{}`, commit {commit}{changed}.\n", from["command"].as_str().unwrap_or_default())
}

fn decide(jobs: u32, hosts: u32, out: Option<&Path>) -> anyhow::Result<()> {
    anyhow::ensure!(
        hosts.is_multiple_of(1_000) && jobs > 0 && jobs <= hosts,
        "hosts come in thousands, jobs have one at least"
    );
    let spec = Clos {
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
    };
    let topology = Topology::clos(&spec)?;
    let mut random = Random::new(1);
    let mut order: Vec<u32> = (0..hosts).collect();
    random.shuffle(&mut order);
    let rank = |number: u32, host: &u32| Placed {
        host: HostId(*host),
        ranks: (0..8).map(|device| (number * 8 + device, device)).collect(),
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
    };
    let all: Vec<Job> = (0..).zip(order.chunks((hosts / jobs) as usize)).map(job).collect();
    let tenant = |(number, priority): (u32, u32)| TenantTerms {
        priority,
        weight: Some(1.0),
        ..TenantTerms::new(format!("t{number}"))
    };
    let mut rules =
        Rules { tenants: (0..10).zip([2, 1, 0].into_iter().cycle()).map(tenant).collect(), ..Rules::default() };
    rules.tenants[0].spines = vec![0];
    let view = View { topology: &topology, capacities: topology.rates(), jobs: &all, rules: &rules };
    let mut text = format!(
        "How long do policies take to decide about {} jobs of 80 devices on {hosts} hosts with eight NICs, placed at random?\n\n\
         | policy | flows | CPU time, best of 3, ms |\n| --- | --- | --- |\n",
        all.len()
    );
    for policy in policy::ALL {
        let mut best_ms = f64::INFINITY;
        let mut flows = 0;
        for _ in 0..3 {
            let began_s = report::cpu_s();
            flows = policy.decide(&view).0.iter().map(|decision| decision.flows.len()).sum();
            best_ms = best_ms.min((report::cpu_s() - began_s) * 1e3);
        }
        text += &format!("| {} | {flows} | {best_ms:.0} |\n", policy.name());
    }
    text += &format!("\n{}", provenance_line());
    println!("{text}");
    out.map_or(Ok(()), |out| write(out, "sim-decide.md", &text))
}
