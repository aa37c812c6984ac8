//! Collectives of a team as stages: where blocks lie, and batches of them. Pure.

use mccs_ipc::strides::{Batch, Strides};
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
    /// First element that it receives.
    pub recv: Place,
    /// From block to block of what it sends and receives, and how often at once.
    pub strides: Strides,
}

impl Exchange {
    /// Those of the batch, each by itself.
    pub fn each(&self) -> impl ExactSizeIterator<Item = Exchange> + use<> {
        let all = *self;
        let batch = all.strides.batch;
        (0..batch.times).map(move |time| {
            let place = batch.place(time);
            let (send, recv) = (all.send.after(place * batch.send), all.recv.after(place * batch.recv));
            Exchange { send, recv, strides: Strides { batch: Batch::ONE, ..all.strides }, ..all }
        })
    }
}
