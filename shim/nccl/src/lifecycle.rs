//! `NCCL_DEBUG=INFO` lines of a communicator's life: init, its ranks and GPUs, abort, destroy.

use std::fmt;

use mccs::Error;
use mccs_cuda::{Context, Gpu};

use super::communicators::{Member, Name};
use super::debug::{self, DESTROY, INIT, Level, info, trace_call};

/// By which lines name a communicator that is being made.
#[derive(Clone, Copy)]
pub(crate) struct Label {
    /// The handle, as programs print it.
    pub(crate) handle: u64,
    /// The function that makes it.
    pub(crate) made_by: &'static str,
}

/// A rank's place and GPU, as all lines tell them.
struct Place<'a> {
    handle: u64,
    rank: u32,
    nranks: u32,
    gpu: &'a Gpu,
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Place { handle, rank, nranks, gpu } = self;
        let (device, bus) = (gpu.ordinal(), bus_number(&gpu.pci_bus_id));
        write!(
            f,
            "comm {handle:#x} rank {rank} nranks {nranks} cudaDev {device} nvmlDev {} busId {bus:x}",
            host_number(gpu)
        )
    }
}

/// `0000:17:00.0` as the number 0x17000.
fn bus_number(id: &str) -> u64 {
    let digits: String = id.chars().filter(char::is_ascii_hexdigit).collect();
    u64::from_str_radix(&digits, 16).unwrap_or(0)
}

/// The GPU's number among all of the host, by bus id, as the driver lists them; else the process' own number.
fn host_number(gpu: &Gpu) -> i32 {
    let Ok(folder) = std::fs::read_dir("/proc/driver/nvidia/gpus") else { return gpu.ordinal() };
    let mut all: Vec<_> = folder.flatten().map(|entry| bus_number(&entry.file_name().to_string_lossy())).collect();
    all.sort_unstable();
    all.binary_search(&bus_number(&gpu.pci_bus_id)).map_or_else(|_| gpu.ordinal(), |number| number as i32)
}

/// The communicator's id, as a number that all ranks print alike.
pub(crate) fn id_number(name: &Name) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&name.id.0[..8]);
    u64::from_le_bytes(bytes)
}

/// A rank is about to join.
pub(crate) fn begins(label: Label, name: &Name, rank: u32, nranks: u32, context: &Context) {
    debug::version(rank as i32);
    let Label { handle, made_by } = label;
    let place = Place { handle, rank, nranks, gpu: context.gpu() };
    info!(INIT, "{made_by} {place} commId {:#x} - Init START", id_number(name));
    let (id, device) = (id_number(name), context.gpu().ordinal());
    trace_call!("ncclCommInitRank({handle:#x}, {nranks}, {id:#x}, {rank}, {device})");
}

/// A rank has joined, or could not.
pub(crate) fn is_made(label: Label, made: &Result<Member, Error>) {
    if !debug::is_on(Level::Info, INIT) {
        return;
    }
    let Label { handle, made_by } = label;
    match made {
        Ok(member) => {
            let (place, id) = (place_of(handle, member), id_number(&member.name));
            info!(INIT, "{made_by} {place} commId {id:#x} - Init COMPLETE");
        }
        Err(error) => info!(INIT, "{made_by} comm {handle:#x} - Init FAILED: {error}"),
    }
}

/// A rank has left: `how` is `Destroy`, `Abort`, `Finalize` or `Revoke`.
pub(crate) fn has_ended(handle: u64, member: &Member, how: &str) {
    info!(INIT | DESTROY, "{} - {how} COMPLETE", place_of(handle, member));
}

fn place_of(handle: u64, member: &Member) -> Place<'_> {
    Place { handle, rank: member.rank, nranks: member.nranks, gpu: member.context.gpu() }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_bus_id_is_a_number() {
        assert_eq!(super::bus_number("0000:17:00.0"), 0x17000);
        assert_eq!(super::bus_number("0001:CA:1F.1"), 0x1_ca1f1);
        assert_eq!(super::bus_number(""), 0);
    }
}
