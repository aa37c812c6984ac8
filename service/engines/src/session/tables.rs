//! Tables of a session: what its tenant's handles name.

mod memory;
pub(super) mod port_channels;
mod ranks;
mod seat;
mod streams;
pub(super) mod twins;

pub(super) use self::memory::{Deferred, HandedMemory, Memory};
pub(super) use self::port_channels::{Fifos, TriggersBefore};
pub(super) use self::ranks::{HandedRanks, JoinCall, Ranks, ReadyRank};
pub(super) use self::seat::SlotTwin;
pub(super) use self::streams::{Streams, WrongTicket};

/// Tables of a session.
pub(super) struct Tables {
    pub(super) memory: Memory,
    pub(super) streams: Streams,
    pub(super) ranks: Ranks,
    /// FIFOs of port channels.
    pub(super) fifos: Fifos,
}
