//! Tables of simulated collectives of GPUs of several hosts.

use mccs_ipc::types::CollectiveKind;
use serde::Serialize;

use super::{Call, Design, Machine, Outcome, SimulationError, simulate};

/// Number of the built design.
const BUILT: usize = 6;
/// Payloads, from 8 B to 4 GiB.
pub const PAYLOADS: [u64; 11] =
    [8, 256, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20, 1 << 30, 4 << 30];

/// A call in several designs.
#[derive(Debug, Serialize)]
pub struct Place {
    /// Name of the collective.
    pub operation: &'static str,
    /// With [`Machine::gpus`] each.
    pub hosts: u32,
    /// As nccl-tests counts them.
    pub payload_bytes: u64,
    /// By design, in the order of [`designs`].
    pub outcomes: Vec<Outcome>,
}

/// Designs that are compared, each with its name: what was measured, each further change with the ones before it, the last one with all.
/// Those up to slots by the call are built. Messages and channels are today's.
#[must_use]
pub fn designs() -> Vec<(&'static str, Design)> {
    let (measured, one, streams) = (Design::measured(), Design::in_one_stream(), Design::with_kernels_for_each_host());
    let built = Design::built();
    let ahead = Design { receives_ahead: built.receives_ahead, ..measured };
    let several = Design { moves_at_a_time: built.moves_at_a_time, ..ahead };
    vec![
        ("before 090", measured),
        ("receives ahead", ahead),
        ("8 moves at a time", several),
        ("slices by the model", one),
        ("streams", streams),
        ("kernels for all hosts", Design::with_four_slots()),
        ("slots by the call: built", built),
        ("8 slots of 8 MiB", Design::with_more_memory()),
    ]
}

/// Simulates a collective of every payload on so many hosts.
///
/// # Errors
/// As [`simulate`].
pub fn places(machine: &Machine, kind: CollectiveKind, hosts: u32) -> Result<Vec<Place>, SimulationError> {
    let place = |payload_bytes: u64| {
        let call = Call { kind, payload_bytes, hosts };
        let outcomes =
            designs().iter().map(|(_, design)| simulate(machine, design, &call)).collect::<Result<_, _>>()?;
        Ok(Place { operation: kind.name(), hosts, payload_bytes, outcomes })
    };
    PAYLOADS.into_iter().map(place).collect()
}

/// Tables of one collective on so many hosts: times and bandwidth of what is built and of all changes, and bandwidth change by change.
#[must_use]
pub fn tables(places: &[Place]) -> String {
    let Some(Place { operation, hosts, .. }) = places.first() else { return String::new() };
    let mut text = format!("\n## {operation}, {hosts} hosts\n\n");
    text += "| bytes | built, us | GB/s | binds | all changes, us | GB/s | binds | floor, us | GB/s | floor / all |\n";
    text += "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";
    for place in places {
        let (Some(built), Some(all)) = (place.outcomes.get(BUILT), place.outcomes.last()) else { continue };
        let at_floor = all.busbw_gb_per_s * all.ns / all.floor_ns;
        text += &format!(
            "| {} | {} | {:.1} | {} | {} | {:.1} | {} | {} | {at_floor:.1} | {:.2} |\n",
            place.payload_bytes,
            us(built.ns),
            built.busbw_gb_per_s,
            built.binds(),
            us(all.ns),
            all.busbw_gb_per_s,
            all.binds(),
            us(all.floor_ns),
            all.floor_ns / all.ns
        );
    }
    let names = designs().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    text += &format!("\nTimes in us, each change with those before it:\n\n| bytes | {} |\n", names.join(" | "));
    text += &format!("| --- |{}\n", " --- |".repeat(names.len()));
    for place in places {
        let times: Vec<_> = place.outcomes.iter().map(|outcome| us(outcome.ns)).collect();
        text += &format!("| {} | {} |\n", place.payload_bytes, times.join(" | "));
    }
    text
}

fn us(ns: f64) -> String {
    let us = ns / 1e3;
    if us < 100.0 { format!("{us:.1}") } else { format!("{us:.0}") }
}
