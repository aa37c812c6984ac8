//! Streams of a session, as far as their commands are checked.

use std::sync::Arc;

use mccs_handover::{StreamState, TableState};
use mccs_ipc::protocol::Response;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::handles::HandleTable;
use mccs_tenants::SessionResource;

use crate::proxy::{SessionMessage, StreamSemaphore};
use crate::session::outlets::{Outlets, Place};

/// A stream.
#[derive(Debug)]
pub(crate) struct StreamSlot {
    next_ticket: u64,
    /// Operations of the group that has not been closed.
    group_length: u64,
    /// Whether its collectives run beside each other.
    overlaps: bool,
    /// Whether its operations wait for a semaphore.
    is_ordered: bool,
}

/// An operation does not have the ticket that comes next.
pub(crate) struct WrongTicket {
    /// Ticket of the next operation.
    pub(crate) expected: u64,
}

impl StreamSlot {
    /// The next operation has this ticket.
    pub(crate) fn take_ticket(&mut self, ticket: u64) -> Result<(), WrongTicket> {
        if ticket != self.next_ticket {
            return Err(WrongTicket { expected: self.next_ticket });
        }
        self.next_ticket += 1;
        Ok(())
    }

    /// The next operation is in a group that goes on behind it, or not. Returns how many the open group has.
    pub(crate) fn lengthen_group(&mut self, continues: bool) -> u64 {
        self.group_length = if continues { self.group_length + 1 } else { 0 };
        self.group_length
    }

    pub(crate) fn overlaps(&self) -> bool {
        self.overlaps
    }
}

/// See the module's documentation.
pub(crate) struct Streams {
    slots: HandleTable<StreamSlot>,
}

impl Streams {
    /// Room for so many.
    pub(crate) fn new(capacity: u32) -> Self {
        Streams { slots: HandleTable::new(capacity) }
    }

    pub(crate) fn get_mut(&mut self, stream: Handle) -> Option<&mut StreamSlot> {
        self.slots.get_mut(stream)
    }

    /// Those that another program has made; `None` where they are more than may be.
    pub(crate) fn resumed(capacity: u32, state: &TableState<StreamState>) -> Option<Self> {
        let slot = |StreamState { ended }: StreamState| StreamSlot {
            next_ticket: ended.wrapping_add(1),
            group_length: 0,
            overlaps: false,
            is_ordered: false,
        };
        let slots = state.0.iter().map(|(generation, stream)| (*generation, stream.map(slot)));
        Some(Streams { slots: HandleTable::resume(capacity, slots)? })
    }

    /// Whether one waits for a GPU.
    pub(crate) fn await_gpus(&self) -> bool {
        self.slots.iter().any(|(_, slot)| slot.is_ordered)
    }

    /// State with which another program goes on, if none waits for a GPU. When operations have ended is known later.
    pub(crate) fn hand_over(&self) -> TableState<StreamState> {
        TableState(self.slots.slots().map(|(of, slot)| (of, slot.map(|_| StreamState { ended: 0 }))).collect())
    }

    /// Whether there is such a stream.
    pub(crate) fn has(&self, stream: Handle) -> bool {
        self.slots.get(stream).is_some()
    }

    pub(crate) fn create(&mut self, out: &mut Outlets, id: u64) {
        if let Some(stream) = self.add(out, id, false, false) {
            out.answers.answer(id, Response::Stream { stream, word: stream.index }, &[]);
        }
    }

    /// A new stream, unless there are too many, which is answered.
    fn add(&mut self, out: &mut Outlets, id: u64, overlaps: bool, is_ordered: bool) -> Option<Handle> {
        let stream = self.slots.insert(StreamSlot { next_ticket: 1, group_length: 0, overlaps, is_ordered });
        if stream.is_err() {
            let message = out.session.tenant.session_is_full(SessionResource::Streams);
            out.answers.refuse(id, ErrorClass::InvalidUsage, message);
        }
        stream.ok()
    }

    /// A new stream whose operations wait for a semaphore.
    pub(crate) fn create_ordered(&mut self, out: &mut Outlets, id: u64, semaphore: StreamSemaphore, overlaps: bool) {
        let Some(stream) = self.add(out, id, overlaps, true) else { return };
        let session = Arc::clone(&out.session);
        out.outbox.send(Place::Host, SessionMessage::StreamOrdered { session, stream, semaphore });
        out.answers.answer(id, Response::Stream { stream, word: stream.index }, &[]);
    }

    pub(crate) fn destroy(&mut self, out: &mut Outlets, id: u64, stream: Handle) {
        // Told, not only ended: between the two an engine still raises the word, which would be another stream's.
        let reset = |slot: &StreamSlot| out.session.reset_word(stream.index, slot.next_ticket - 1);
        match self.slots.get(stream).map(reset) {
            None => out.answers.refuse(id, ErrorClass::InvalidArgument, format!("there is no stream {stream:?}")),
            Some(false) => {
                let message = "the stream has work in flight: synchronize it before destroying it";
                out.answers.refuse(id, ErrorClass::InvalidUsage, message);
            }
            Some(true) => {
                self.slots.remove(stream);
                let session = out.session.id;
                for place in [Place::Host, Place::Gpus] {
                    out.outbox.send(place, SessionMessage::StreamClosed { session, stream: stream.index });
                }
                out.answers.answer(id, Response::Done, &[]);
            }
        }
    }
}
