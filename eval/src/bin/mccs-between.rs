//! `mccs-between`: bytes that hosts send each other by a schedule, to put beside the kernel's
//! counters. Asks no service.

use anyhow::ensure;
use clap::{Parser, ValueEnum};
use mccs_collective::{CostModel, Problem, Strategy, build};
use mccs_config::service::AlgorithmChoice;
use mccs_ipc::types::CollectiveKind;
use mccs_telemetry::bandwidth::Traffic;

/// Prints the bytes that each host sends to each other one in a collective, as JSON.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[arg(long, default_value = "all_reduce")]
    operation: CollectiveKind,
    /// Size, as mccs-perf counts it.
    #[arg(long)]
    bytes: u64,
    /// Bytes of an element.
    #[arg(long, default_value_t = 4)]
    element_bytes: usize,
    /// Hosts in the order of their names, each by its ranks: `0,1/2,3` are two of two.
    #[arg(long)]
    hosts: String,
    #[arg(long, value_enum, default_value = "auto")]
    algorithm: Named,
    /// `strategy.channels` of service.toml.
    #[arg(long, default_value_t = 2)]
    channels: u32,
    #[arg(long, default_value_t = 0)]
    root: u32,
}

/// `strategy.algorithm` of service.toml.
#[derive(Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Named {
    Auto,
    Ring,
    Tree,
    HostRing,
    HostTree,
    OneShot,
}

impl Named {
    fn choice(self) -> AlgorithmChoice {
        match self {
            Named::Auto => AlgorithmChoice::Auto,
            Named::Ring => AlgorithmChoice::Ring,
            Named::Tree => AlgorithmChoice::Tree,
            Named::HostRing => AlgorithmChoice::HostRing,
            Named::HostTree => AlgorithmChoice::HostTree,
            Named::OneShot => AlgorithmChoice::OneShot,
        }
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let ranks = |host: &str| host.split(',').map(str::parse).collect::<Result<Vec<u32>, _>>();
    let hosts = arguments.hosts.split('/').map(ranks).collect::<Result<Vec<_>, _>>()?;
    let nranks = hosts.iter().map(Vec::len).sum::<usize>() as u32;
    let per_count = Traffic::new(arguments.operation, 1, u64::from(nranks)).payload_bytes;
    let element_bytes = arguments.element_bytes as u64;
    ensure!(element_bytes > 0 && per_count > 0, "a collective without data has no bytes to count");
    let count = (arguments.bytes / per_count).div_ceil(element_bytes);
    let problem = Problem {
        kind: arguments.operation,
        nranks,
        root: arguments.root,
        count,
        premultiply: false,
        leaves_own: false,
        one_hop: false,
    };
    // As a service does for a new communicator.
    let strategy = Strategy::initial(arguments.algorithm.choice(), nranks, arguments.channels, &hosts);
    let algorithm = CostModel::for_hosts(&hosts).choose(&problem, arguments.element_bytes, &strategy)?;
    let counts = build(&problem, algorithm, &strategy)?.counts_between(&hosts);
    let bytes: Vec<Vec<u64>> =
        counts.into_iter().map(|row| row.into_iter().map(|count| count * element_bytes).collect()).collect();
    println!("{}", serde_json::json!({ "algorithm": algorithm, "bytes_between": bytes }));
    Ok(())
}
