//! `mccs-fabric`: builds, checks and removes an emulated spine-leaf network in network namespaces
//! (`docs/FABRIC.md`).
//!
//! Exit status: 0 where all went well, 1 where a check found something wrong, 2 where nothing could be done; `run` and
//! `exec` have their command's.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, Subcommand};
use mccs_config::DurationText;
use mccs_eval::fabric::state::{self, Claim, Listed};
use mccs_eval::fabric::topology_file::topology_file;
use mccs_eval::fabric::{FabricError, FabricSpec, Topology, check, guard, lifecycle, plan, run};

/// A check found something wrong.
const EXIT_WRONG: u8 = 1;
/// Nothing could be done: the file, the command line, the kernel or the machine is at fault.
const EXIT_REFUSED: u8 = 2;

/// Builds, checks and removes emulated spine-leaf networks in network namespaces of this machine.
#[derive(Parser)]
#[command(name = "mccs-fabric", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build a fabric; it stays until `down`.
    Up {
        /// The fabric's file.
        file: PathBuf,
    },
    /// Remove a fabric and whatever runs in it. Nothing to remove is no error.
    Down {
        /// The fabric's name.
        name: String,
    },
    /// Check a fabric by real flows; one that is not up is built for the check.
    Check {
        /// The fabric's file.
        file: PathBuf,
        /// Measure what links carry, too.
        #[arg(long)]
        rates: bool,
        /// How long each rate is measured.
        #[arg(long, default_value = "2s")]
        time: DurationText,
    },
    /// Show what is up: hosts, addresses, and the source ports that lead over each spine.
    List {
        /// For programs.
        #[arg(long)]
        json: bool,
    },
    /// Run a command on a node of a fabric that is up.
    Exec {
        /// The fabric's name.
        name: String,
        /// The host, leaf or spine.
        node: String,
        /// Program and arguments.
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Only show the commands that would build a fabric.
    Plan {
        /// The fabric's file.
        file: PathBuf,
    },
    /// Print the topology.toml of a fabric, for the controller of a cluster on it.
    Topology {
        /// The fabric's file.
        file: PathBuf,
    },
    /// Build a fabric, run a command beside it, and remove the fabric, however the command or this program ends.
    Run {
        /// The fabric's file.
        file: PathBuf,
        /// Program and arguments; it finds the fabric's name in MCCS_FABRIC.
        #[arg(last = true, required = true)]
        command: Vec<OsString>,
    },
    /// Internal: removes a fabric when its builder is gone.
    #[command(hide = true)]
    Guard {
        /// The fabric's name.
        name: String,
        /// Number that tells it from a later one.
        inode: u64,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Up { file } => FabricSpec::load(&file).map_err(FabricError::from).and_then(|spec| up(&spec)),
        Command::Down { name } => down(&name),
        Command::Check { file, rates, time } => {
            FabricSpec::load(&file).map_err(FabricError::from).and_then(|spec| checked(&spec, rates.then_some(time)))
        }
        Command::List { json } => list(json),
        Command::Exec { name, node, command } => lifecycle::exec(&name, &node, &command).map(|never| match never {}),
        Command::Plan { file } => FabricSpec::load(&file).map_err(FabricError::from).map(|spec| show(&spec)),
        Command::Topology { file } => FabricSpec::load(&file).map_err(FabricError::from).map(|spec| {
            print!("{}", topology_file(&spec).to_toml());
            0
        }),
        Command::Run { file, command } => {
            FabricSpec::load(&file).map_err(FabricError::from).and_then(|spec| run::run(&spec, &command))
        }
        Command::Guard { name, inode } => guard::watch(&Claim { name, inode }).map(|()| 0),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("mccs-fabric: {error}");
            ExitCode::from(EXIT_REFUSED)
        }
    }
}

fn up(spec: &FabricSpec) -> Result<u8, FabricError> {
    let start = Instant::now();
    lifecycle::up(spec)?;
    let nodes = Topology::new(spec).nodes().count();
    println!("{}: up, {nodes} namespaces in {:.2} s", spec.name, start.elapsed().as_secs_f64());
    Ok(0)
}

fn down(name: &str) -> Result<u8, FabricError> {
    println!("{name}: {}", if lifecycle::down(name)? { "removed" } else { "nothing to remove" });
    Ok(0)
}

fn checked(spec: &FabricSpec, time: Option<DurationText>) -> Result<u8, FabricError> {
    let report = lifecycle::with(spec, || check::check(spec, time.map(|time| time.0)))?;
    print!("{report}");
    match report.faults() {
        0 => {
            println!("{}: all well", spec.name);
            Ok(0)
        }
        faults => {
            println!("{}: {faults} WRONG", spec.name);
            Ok(EXIT_WRONG)
        }
    }
}

fn show(spec: &FabricSpec) -> u8 {
    for step in plan::build(spec, &Topology::new(spec)) {
        print!("{step}");
    }
    0
}

fn list(json: bool) -> Result<u8, FabricError> {
    let all = state::list()?;
    if json {
        println!("{}", serde_json::to_string_pretty(&all).expect("invariant: plain structs are JSON"));
    } else {
        all.iter().for_each(print_listed);
    }
    Ok(0)
}

fn print_listed(fabric: &Listed) {
    println!("{}: {}", fabric.name, fabric.phase);
    let Some(topology) = &fabric.topology else { return };
    for host in &topology.hosts {
        let addresses: Vec<String> = host.addresses.iter().map(ToString::to_string).collect();
        println!("  {:<8} {:<8} {}", host.name, topology.leaves[host.leaf].name, addresses.join(" "));
    }
    for path in &topology.paths {
        println!("  {:<8} source ports {} to {}", path.spine, path.first_port, path.last_port);
    }
}
