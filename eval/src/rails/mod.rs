//! Rails simulator: one collective of GPUs of several hosts, at the level of kernels and messages.
//!
//! ```text
//! mccs_rails::Plan -> tasks: a rank's streams, in order --+
//! mccs_collective::build -> a move's schedule ------------+-> engine: events in time -> Outcome
//! Machine: what things take --------------------------------+
//! ```
//!
//! Stages are those that the tenant's library carries out, and schedules of rails are those that services run: the simulator only says
//! how long they take. A lane (stream, copy engine) does one task after another. NVLink, and each NIC in each direction, carry so many
//! bytes in a nanosecond, first come first served.
//!
//! Hosts are alike, and so are a host's ranks and rails: one rank of each host and its rail stand for all.
//!
//! Invariants: same call, same time; nothing is faster than its [`floor`].
//!
//! Deliberately absent: switches, which never are the limit; what a call takes the caller's thread; uneven hosts; other jobs.

mod agenda;
mod engine;
mod machine;
mod network;
pub mod report;
mod tasks;

use mccs_collective::ScheduleError;
use mccs_ipc::layout::Layout;
use mccs_ipc::protocol::HostRun;
use mccs_ipc::types::CollectiveKind;
use mccs_rails::{Forks, Plan, SLOTS_BYTES, Sizes};
use mccs_telemetry::bandwidth::Traffic;
use serde::Serialize;

pub use machine::{CopyTimes, Machine, RailTimes, TeamTimes};

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// A table of results that does not say how long collectives take.
    #[error("no table of collectives: {0}")]
    Results(String),
    /// The table has none of such.
    #[error("the table of results has no {0}: give one that has, as eval/cuda.py makes them")]
    NoTimes(CollectiveKind),
    /// A rail has none.
    #[error("a rail's move has no schedule: {0}")]
    Schedule(#[from] ScheduleError),
    /// Simulated are calls of 2 to 256 hosts, whose schedules move data only.
    #[error("{0} hosts: rails have 2 to 256")]
    Hosts(u32),
    /// A bug of plans or schedules.
    #[error("hosts wait for each other for ever")]
    Stuck,
}

/// A collective of float32, out of place.
#[derive(Debug, Clone, Copy)]
pub struct Call {
    /// The collective, without a root.
    pub kind: CollectiveKind,
    /// Payload as nccl-tests counts it; rounded down to whole elements of each rank.
    pub payload_bytes: u64,
    /// Hosts, with [`Machine::gpus`] each.
    pub hosts: u32,
}

/// How long slices are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Slices {
    /// Four of a call, of 256 KiB a rail at least: before decision 090.
    Four,
    /// Those with which a call takes least, by the library's model.
    ByModel,
}

/// How calls are carried out, as far as that may differ.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Design {
    /// How long slices are.
    pub slices: Slices,
    /// Whether segments of slices have streams of their own where the library's model says that it pays.
    pub forks: bool,
    /// Moves of a rail that run at a time.
    pub moves_at_a_time: usize,
    /// A move tells all its senders at its begin where messages go; otherwise each step does, when the move has come to it.
    pub receives_ahead: bool,
    /// Kernels are for all hosts at once: those of a team's batches, and those that combine parts.
    pub joins_kernels: bool,
    /// Slices under way; `None`: by the call, as the library has them.
    pub slots: Option<u64>,
    /// Bytes of a rank's slots.
    pub slots_bytes: u64,
}

impl Design {
    /// Library and service as they were before decision 090, when the measurements were taken.
    #[must_use]
    pub fn measured() -> Self {
        Design {
            slices: Slices::Four,
            slots: Some(4),
            forks: false,
            moves_at_a_time: 1,
            receives_ahead: false,
            joins_kernels: false,
            slots_bytes: SLOTS_BYTES,
        }
    }

    /// As before decision 098.
    #[must_use]
    pub fn in_one_stream() -> Self {
        Design { slices: Slices::ByModel, moves_at_a_time: 8, receives_ahead: true, ..Self::measured() }
    }

    /// As before decision 101. Slices are those of today.
    #[must_use]
    pub fn with_kernels_for_each_host() -> Self {
        Design { forks: true, ..Self::in_one_stream() }
    }

    /// As before decision 107.
    #[must_use]
    pub fn with_four_slots() -> Self {
        Design { joins_kernels: true, ..Self::with_kernels_for_each_host() }
    }

    /// The behaviour that is built. With more than two hosts, moves overlap less than here: at their ends alone.
    #[must_use]
    pub fn built() -> Self {
        Design { slots: None, ..Self::with_four_slots() }
    }

    /// With twice the memory.
    #[must_use]
    pub fn with_more_memory() -> Self {
        Design { slots: Some(8), slots_bytes: 2 * SLOTS_BYTES, ..Self::built() }
    }

    /// A plan in slices.
    fn cut<'a>(&self, plan: Plan<'a>) -> Plan<'a> {
        let plan = match self.slots {
            Some(slots) => plan.in_slots(slots, self.slots_bytes, ELEMENT_BYTES),
            None => plan.in_best_slots(self.slots_bytes, ELEMENT_BYTES),
        };
        match self.slices {
            Slices::ByModel => {
                let forks = if self.forks { Forks::WhereItPays } else { Forks::Never };
                plan.in_best_cut(ELEMENT_BYTES, forks)
            }
            Slices::Four => {
                let slice = plan.moved_by_rail().div_ceil(4).max((256 << 10) / ELEMENT_BYTES);
                Plan { sizes: Sizes { slice, ..plan.sizes }, ..plan }
            }
        }
    }
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// From its first task until the last rank's last one.
    pub ns: f64,
    /// The least that it can take.
    pub floor_ns: f64,
    /// Bus bandwidth, as nccl-tests counts it.
    pub busbw_gb_per_s: f64,
    /// Parts of the time in which a host's NIC sends, its NVLink is busy, and the caller's stream runs kernels.
    pub nic: f64,
    /// As `nic`.
    pub nvlink: f64,
    /// As `nic`. Time of the busiest stream.
    pub stream: f64,
}

impl Outcome {
    /// The resource that a call mostly waits for.
    #[must_use]
    pub fn binds(&self) -> &'static str {
        // Nothing that is busy for less than that is the limit.
        const MOSTLY: f64 = 0.8;
        let parts = [(self.nic, "NIC"), (self.nvlink, "NVLink"), (self.stream, "kernels")];
        let busiest = parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
        busiest.filter(|(part, _)| *part >= MOSTLY).map_or("latency", |(_, name)| name)
    }
}

const ELEMENT_BYTES: u64 = 4;

/// Carries a call out.
///
/// # Errors
/// The machine lacks figures for it, or the call is none that rails have.
pub fn simulate(machine: &Machine, design: &Design, call: &Call) -> Result<Outcome, SimulationError> {
    let runs: Vec<_> = (0..call.hosts).map(|host| HostRun { host, ranks: machine.gpus }).collect();
    let layout = Layout::new(&runs).map_err(|_| SimulationError::Hosts(call.hosts))?;
    let count = tasks::count_of(call.kind, call.payload_bytes, ELEMENT_BYTES, layout.nranks());
    let sizes = Sizes::new(design.slots_bytes, ELEMENT_BYTES);
    let plan = |host: u32| {
        let seat = layout.seat(layout.first_rank(host));
        design.cut(Plan { layout: &layout, seat, kind: call.kind, count, root: 0, sizes, ring: None })
    };
    let scripts = (0..call.hosts).map(|host| tasks::script(machine, design, &plan(host), ELEMENT_BYTES));
    let scripts = scripts.collect::<Result<Vec<_>, _>>()?;
    let ran = engine::run(machine, design, scripts, ELEMENT_BYTES)?;
    let bus_bytes = Traffic::new(call.kind, count * ELEMENT_BYTES, u64::from(layout.nranks())).bus_bytes;
    Ok(Outcome {
        ns: ran.ns,
        floor_ns: floor(machine, call),
        busbw_gb_per_s: bus_bytes as f64 / ran.ns,
        nic: ran.nic_ns / ran.ns,
        nvlink: ran.nvlink_ns / ran.ns,
        stream: ran.stream_ns / ran.ns,
    })
}

/// The least that a collective can take: the bytes that each NIC and each GPU's NVLink must carry, at their rates.
///
/// Least time of all-reduces, all-gathers and reduce-scatters; others have none, which is 0.
#[must_use]
pub fn floor(machine: &Machine, call: &Call) -> f64 {
    let nranks = call.hosts * machine.gpus;
    let count = tasks::count_of(call.kind, call.payload_bytes, ELEMENT_BYTES, nranks);
    let bytes = (call.kind.payload_count(count, nranks) * ELEMENT_BYTES) as f64;
    let times = match call.kind {
        CollectiveKind::AllReduce => 2.0,
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter => 1.0,
        _ => return 0.0,
    };
    let others = |of: u32| f64::from(of - 1) / f64::from(of);
    // A host's missing data comes by its NICs, and a GPU's missing data then by NVLink.
    let nic_ns = times * others(call.hosts) * bytes / f64::from(machine.gpus) / machine.rail.link_bytes_per_ns;
    let nvlink_ns = times * others(machine.gpus) * bytes / machine.nvlink_bytes_per_ns;
    nic_ns.max(nvlink_ns)
}

#[cfg(test)]
mod tests;
