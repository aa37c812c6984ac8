//! Faults of emulated NICs, as words of a device's page that whoever has the folder writes.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use crate::bell::Bell;
use crate::files::{Listed, Port, read_list};

/// A fault of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The port goes down: packets to and from it are lost.
    Down,
    /// It comes back.
    Up,
    /// So many packets in a million are lost on their way out.
    LossPpm(u32),
    /// The port's rate, in Mbit/s.
    Rate(u64),
    /// Time to another device, in ns.
    Latency(u64),
    /// Completions are told so many ns later.
    CompletionDelay(u64),
    /// A queue pair fails.
    QueuePair(u32),
    /// The device is lost to those who have opened it.
    Fatal,
    /// Whether memory of GPUs can be registered by dma-buf.
    DmaBuf(bool),
    /// Whether it can be registered by address, as with the peer-memory module.
    PeerMemory(bool),
}

/// Bytes that a device has sent and taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Carried {
    /// Sent, lost ones included.
    pub out_bytes: u64,
    /// Taken.
    pub in_bytes: u64,
    /// Bytes among those sent that were read from memory of GPUs, but for answers to peers' reads.
    pub out_gpu_bytes: u64,
    /// Bytes among those taken that were written to memory of GPUs.
    pub in_gpu_bytes: u64,
    /// Bytes among those sent that have gone by slots on GPUs.
    pub twin_bytes: u64,
}

fn listed(folder: &Path, host: &str, device: &str) -> io::Result<Listed> {
    let listed = read_list(folder)?.into_iter().find(|listed| listed.host == host && listed.name == device);
    let none = || io::Error::new(io::ErrorKind::NotFound, format!("{host} has no device {device}"));
    listed.ok_or_else(none)
}

/// Makes a fault.
///
/// # Errors
/// There is no such device, or its page cannot be opened.
pub fn make(folder: &Path, host: &str, device: &str, fault: Fault) -> io::Result<()> {
    let listed = listed(folder, host, device)?;
    let port = Port::open(folder, &listed)?;
    let words = port.words();
    let order = Ordering::SeqCst;
    match fault {
        Fault::Down => words.is_down.store(1, order),
        Fault::Up => words.is_down.store(0, order),
        Fault::LossPpm(ppm) => words.loss_ppm.store(ppm, order),
        Fault::Rate(mbit_per_s) => words.mbit_per_s.store(mbit_per_s.max(1), order),
        Fault::Latency(ns) => words.latency_ns.store(ns, order),
        Fault::CompletionDelay(ns) => words.completion_delay_ns.store(ns, order),
        Fault::QueuePair(number) => words.failing_qp.store(number, order),
        Fault::Fatal => drop(words.fatal.fetch_add(1, order)),
        Fault::DmaBuf(is_taken) => words.refuses_dma_buf.store(u32::from(!is_taken), order),
        Fault::PeerMemory(is_taken) => words.refuses_peer_memory.store(u32::from(!is_taken), order),
    }
    Bell::ring_all(folder, listed.gid())
}

/// Counters of a device.
///
/// # Errors
/// There is no such device, or its page cannot be opened.
pub fn carried(folder: &Path, host: &str, device: &str) -> io::Result<Carried> {
    let port = Port::open(folder, &listed(folder, host, device)?)?;
    let words = port.words();
    let read = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::Relaxed);
    Ok(Carried {
        out_bytes: read(&words.out_bytes),
        in_bytes: read(&words.in_bytes),
        out_gpu_bytes: read(&words.out_gpu_bytes),
        in_gpu_bytes: read(&words.in_gpu_bytes),
        twin_bytes: read(&words.twin_bytes),
    })
}
