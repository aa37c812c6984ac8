//! Objects of a fake fabric: devices, registered memory, completion queues, queue pairs.
//! [`World`](super::world::World) has them.

use std::collections::VecDeque;
use std::time::Instant;

use nix::sys::eventfd::EventFd;

use super::super::driver::{Access, AsyncEvent, Completion, Gid, GidKind, QpPath, QpShape, QpTimers, Raw, Write};

#[derive(Debug)]
pub(super) struct Device {
    pub(super) host: u32,
    pub(super) name: String,
    /// Its place among its host's.
    pub(super) place: u8,
    pub(super) is_up: bool,
    /// Nothing comes through, though its link is up.
    pub(super) is_silent: bool,
    pub(super) is_gone: bool,
    pub(super) gids: Vec<(Gid, GidKind)>,
    pub(super) lid: u16,
    /// Written to a GPU's memory, and still on the bus.
    pub(super) on_the_bus: Vec<(u64, Vec<u8>)>,
}

impl Device {
    pub(super) fn new(host: u32, place: u8, gids: Vec<(Gid, GidKind)>) -> Self {
        let (is_silent, is_gone, on_the_bus) = (false, false, Vec::new());
        Device { host, name: format!("fake{place}"), place, is_up: true, is_silent, is_gone, gids, lid: 0, on_the_bus }
    }
}

#[derive(Debug)]
pub(super) struct OpenDevice {
    pub(super) device: usize,
    pub(super) events: VecDeque<AsyncEvent>,
    pub(super) fd: EventFd,
    /// The device that was opened is no more.
    pub(super) is_dead: bool,
}

/// Events of completion queues.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) events: VecDeque<Raw>,
    pub(super) fd: EventFd,
}

#[derive(Debug)]
pub(super) struct Region {
    pub(super) pd: Raw,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) access: Access,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) completion: Completion,
    pub(super) qp: Raw,
    /// Send work requests that are over with this completion; of a receive `None`.
    pub(super) sends_done: Option<u64>,
    /// Number of the poll that sees it.
    pub(super) visible_at: u64,
}

#[derive(Debug)]
pub(super) struct Cq {
    pub(super) channel: Raw,
    pub(super) entries: u32,
    pub(super) waiting: VecDeque<Entry>,
    pub(super) polls: u64,
    pub(super) is_armed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(super) enum State {
    Reset,
    Init,
    Receives,
    Sends,
    Failed,
}

#[derive(Debug)]
pub(super) struct Posted {
    pub(super) write: Write,
    pub(super) inline: Option<Vec<u8>>,
    pub(super) is_read: bool,
    pub(super) index: u64,
}

#[derive(Debug)]
pub(super) struct Qp {
    pub(super) number: u32,
    pub(super) context: Raw,
    pub(super) pd: Raw,
    pub(super) cq: Raw,
    pub(super) shape: QpShape,
    pub(super) state: State,
    pub(super) path: Option<QpPath>,
    pub(super) timers: Option<QpTimers>,
    pub(super) sends: VecDeque<Posted>,
    pub(super) posted: u64,
    /// Send work requests whose places are free again: a signaled completion at or after them was polled.
    pub(super) retired: u64,
    /// Bytes of the first send that have moved.
    pub(super) moved: u64,
    pub(super) receives: VecDeque<u64>,
    /// Receives whose places are taken: posted, and their completions not polled.
    pub(super) receives_held: u32,
    pub(super) stuck_since: Option<Instant>,
    pub(super) source_port: Option<u16>,
}
