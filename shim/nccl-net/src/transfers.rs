//! Requests of a connection: sends or receives that NCCL has begun and not yet found done.

use std::collections::VecDeque;

/// Requests of a connection at once, as NCCL has them.
pub(crate) const REQUESTS_MAX: usize = 32;

/// A send, or a receive.
#[derive(Clone, Copy)]
pub(crate) struct Transfer {
    /// The caller's memory, which is the transfer's until it has been found done.
    pub(crate) data: *mut u8,
    /// Bytes of the message, or of the room for it.
    pub(crate) bytes: u64,
    /// Bytes copied.
    pub(crate) moved: u64,
    pub(crate) tag: i32,
}

// SAFETY: the caller leaves the memory to the transfer, whichever thread moves it.
unsafe impl Send for Transfer {}

#[derive(Clone, Copy)]
enum Slot {
    Free,
    Active(Transfer),
    Ended { bytes: u64 },
}

/// See the module's documentation. They end in the order in which they began.
pub(crate) struct Transfers {
    slots: [Slot; REQUESTS_MAX],
    active: VecDeque<usize>,
}

impl Transfers {
    pub(crate) fn new() -> Self {
        Transfers { slots: [Slot::Free; REQUESTS_MAX], active: VecDeque::with_capacity(REQUESTS_MAX) }
    }

    /// Begins one. Returns its slot; none while all are taken.
    pub(crate) fn begin(&mut self, transfer: Transfer) -> Option<usize> {
        let slot = self.slots.iter().position(|slot| matches!(slot, Slot::Free))?;
        self.slots[slot] = Slot::Active(transfer);
        self.active.push_back(slot);
        Some(slot)
    }

    /// The oldest that has not ended.
    pub(crate) fn oldest(&mut self) -> Option<&mut Transfer> {
        match &mut self.slots[*self.active.front()?] {
            Slot::Active(transfer) => Some(transfer),
            Slot::Free | Slot::Ended { .. } => None,
        }
    }

    /// The oldest has ended, with so many bytes.
    pub(crate) fn end_oldest(&mut self, bytes: u64) {
        if let Some(slot) = self.active.pop_front() {
            self.slots[slot] = Slot::Ended { bytes };
        }
    }

    /// Takes one that has ended. Returns its bytes.
    pub(crate) fn take_ended(&mut self, slot: usize) -> Option<u64> {
        match self.slots[slot] {
            Slot::Ended { bytes } => {
                self.slots[slot] = Slot::Free;
                Some(bytes)
            }
            Slot::Free | Slot::Active(_) => None,
        }
    }

    /// Whether it is a request at all.
    pub(crate) fn is_begun(&self, slot: usize) -> bool {
        !matches!(self.slots[slot], Slot::Free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_end_in_order_and_a_slot_is_used_again_when_it_has_been_taken() {
        let mut transfers = Transfers::new();
        let some = |tag| Transfer { data: std::ptr::null_mut(), bytes: 8, moved: 0, tag };
        let slots: Vec<_> = (0..REQUESTS_MAX as i32).map(|tag| transfers.begin(some(tag)).expect("room")).collect();
        assert!(transfers.begin(some(0)).is_none(), "as many as there may be");
        for (tag, slot) in slots.iter().enumerate() {
            assert_eq!(transfers.oldest().map(|oldest| oldest.tag), Some(tag as i32));
            assert_eq!(transfers.take_ended(*slot), None);
            transfers.end_oldest(tag as u64);
        }
        assert!(transfers.oldest().is_none() && transfers.begin(some(0)).is_none(), "none has been taken");
        assert_eq!(transfers.take_ended(slots[7]), Some(7));
        assert!(transfers.take_ended(slots[7]).is_none() && !transfers.is_begun(slots[7]));
        assert_eq!(transfers.begin(some(1)), Some(slots[7]));
    }
}
