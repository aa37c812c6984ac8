//! The sending side of a connection: copies messages into the ring as it has room, and puts each piece.

use std::sync::Mutex;

use mccs::Error;

use crate::link::Link;
use crate::ring::{HEADER_BYTES, Header, Outgoing};
use crate::transfers::{Transfer, Transfers};
use crate::{invalid_argument, locked};

/// See the module's documentation. A send is done when its message is in the ring: NCCL may then write its memory again.
pub(crate) struct Sender(Mutex<State>);

struct State {
    /// None once it has been closed.
    link: Option<Link>,
    outgoing: Outgoing,
    sends: Transfers,
    failure: Option<Error>,
}

impl Sender {
    pub(crate) fn new(link: Link) -> Self {
        let (outgoing, sends) = (Outgoing::default(), Transfers::new());
        Sender(Mutex::new(State { link: Some(link), outgoing, sends, failure: None }))
    }

    /// Begins a send. Returns its slot; none while all are taken.
    ///
    /// # Safety
    /// The memory stays as it is until the send has been found done.
    ///
    /// # Errors
    /// Why the connection has failed.
    pub(crate) unsafe fn begin(&self, send: Transfer) -> Result<Option<usize>, Error> {
        let mut state = locked(&self.0);
        let slot = state.sends.begin(send);
        state.go_on()?;
        Ok(slot)
    }

    /// Bytes of a send that is done; none if it is not yet.
    ///
    /// # Errors
    /// Why the connection has failed, or that it is no request.
    pub(crate) fn test(&self, slot: usize) -> Result<Option<u64>, Error> {
        let mut state = locked(&self.0);
        if let Some(bytes) = state.sends.take_ended(slot) {
            return Ok(Some(bytes));
        }
        if !state.sends.is_begun(slot) {
            return Err(invalid_argument("the request has been found done before"));
        }
        // What has ended counts, also before a failure.
        let gone_on = state.go_on();
        let ended = state.sends.take_ended(slot);
        if ended.is_none() { gone_on.map(|()| None) } else { Ok(ended) }
    }

    /// Ends the connection behind what is in the ring. Sends that are not are given up.
    pub(crate) fn close(&self) {
        let mut state = locked(&self.0);
        let is_busy = state.outgoing.is_busy();
        if let Some(link) = state.link.take() {
            link.close(is_busy);
        }
    }
}

impl State {
    fn go_on(&mut self) -> Result<(), Error> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let moved = self.copy();
        moved.inspect_err(|error| self.failure = Some(error.clone()))
    }

    /// Copies what the ring has room for.
    fn copy(&mut self) -> Result<(), Error> {
        let link = self.link.as_mut().ok_or_else(|| invalid_argument("the connection has been closed"))?;
        while self.outgoing.awaits_room() && link.channel().poll()? {
            self.outgoing.end_batch();
        }
        let mut has_moved = false;
        while let Some(send) = self.sends.oldest() {
            let Some(place) = self.outgoing.place(send.bytes - send.moved) else { break };
            let header = Header { message_bytes: send.bytes, payload_bytes: place.payload_bytes as u32, tag: send.tag }
                .to_bytes();
            // SAFETY: the place is free, and what is left of the message has as many bytes.
            unsafe {
                link.copy_in(place.offset, header.as_ptr(), HEADER_BYTES);
                let from = send.data.wrapping_add(send.moved as usize);
                link.copy_in(place.offset + HEADER_BYTES, from, place.payload_bytes);
            }
            self.outgoing.begin(place);
            link.channel().put_with_signal(place.offset, place.offset, place.bytes())?;
            send.moved += place.payload_bytes;
            has_moved = true;
            if send.moved == send.bytes {
                let bytes = send.bytes;
                self.sends.end_oldest(bytes);
            }
        }
        if has_moved { link.has_moved() } else { link.waits() }
    }
}
