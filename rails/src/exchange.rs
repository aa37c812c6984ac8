//! Collectives of a team as stages: where blocks lie, and batches of them. Pure.

use mccs_ipc::types::CollectiveKind;

/// Somewhere in a rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the caller's send buffer.
    Send(u64),
    /// In the caller's receive buffer.
    Recv(u64),
    /// In the slot of one of the rank's rails.
    Slot {
        /// Which of the rank's own.
        rail: u32,
        /// First element.
        at: u64,
    },
}

impl Place {
    /// So many elements further.
    #[must_use]
    pub fn after(self, count: u64) -> Self {
        match self {
            Place::Send(at) => Place::Send(at + count),
            Place::Recv(at) => Place::Recv(at + count),
            Place::Slot { rail, at } => Place::Slot { rail, at: at + count },
        }
    }
}

/// A collective of a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// The collective.
    pub kind: CollectiveKind,
    /// A rank of the team.
    pub root: u32,
    /// Elements, by the collective's own rule.
    pub count: u64,
    /// First element that this rank sends.
    pub send: Place,
    /// From block to block of what it sends.
    pub send_stride: u64,
    /// First element that it receives.
    pub recv: Place,
    /// From block to block of what it receives.
    pub recv_stride: u64,
    /// How often at once.
    pub batch: Batch,
}

/// The same collective of a team several times at once: for each host, or for each of its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// How often.
    pub times: u32,
    /// From this one on they lie one place further: this host has no part in it. `times` where nothing is left out.
    pub skip: u32,
    /// From the first block of one to that of the next, of what a rank sends.
    pub send: u64,
    /// The same of what it receives.
    pub recv: u64,
}

impl Batch {
    /// A collective by itself.
    pub const ONE: Batch = Batch { times: 1, skip: 1, send: 0, recv: 0 };
}

impl Exchange {
    /// Those of the batch, each by itself.
    pub fn each(&self) -> impl ExactSizeIterator<Item = Exchange> + use<> {
        let Exchange { batch, send, recv, .. } = *self;
        let all = *self;
        (0..batch.times).map(move |time| {
            let place = u64::from(time + u32::from(time >= batch.skip));
            let (send, recv) = (send.after(place * batch.send), recv.after(place * batch.recv));
            Exchange { send, recv, batch: Batch::ONE, ..all }
        })
    }
}
