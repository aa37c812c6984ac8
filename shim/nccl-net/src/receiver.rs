//! The receiving side of a connection: copies pieces that have come to where messages are awaited, and gives their
//! place back.

use std::sync::Mutex;

use mccs::{Error, ErrorClass};

use crate::link::Link;
use crate::ring::{HEADER_BYTES, Header, Incoming};
use crate::transfers::{Transfer, Transfers};
use crate::{invalid_argument, locked};

/// See the module's documentation. Messages go to receives in the order of both.
pub(crate) struct Receiver(Mutex<State>);

struct State {
    /// None once it has been closed.
    link: Option<Link>,
    incoming: Incoming,
    receives: Transfers,
    failure: Option<Error>,
}

impl Receiver {
    pub(crate) fn new(link: Link) -> Self {
        let (incoming, receives) = (Incoming::default(), Transfers::new());
        Receiver(Mutex::new(State { link: Some(link), incoming, receives, failure: None }))
    }

    /// Begins a receive. Returns its slot; none while all are taken.
    ///
    /// # Safety
    /// The memory is nobody else's until the receive has been found done.
    ///
    /// # Errors
    /// Why the connection has failed.
    pub(crate) unsafe fn begin(&self, receive: Transfer) -> Result<Option<usize>, Error> {
        let mut state = locked(&self.0);
        let slot = state.receives.begin(receive);
        state.go_on()?;
        Ok(slot)
    }

    /// Bytes of a receive that is done; none if it is not yet.
    ///
    /// # Errors
    /// Why the connection has failed, or that it is no request.
    pub(crate) fn test(&self, slot: usize) -> Result<Option<u64>, Error> {
        let mut state = locked(&self.0);
        if let Some(bytes) = state.receives.take_ended(slot) {
            return Ok(Some(bytes));
        }
        if !state.receives.is_begun(slot) {
            return Err(invalid_argument("the request has been found done before"));
        }
        // What has ended counts, also before a failure.
        let gone_on = state.go_on();
        let ended = state.receives.take_ended(slot);
        if ended.is_none() { gone_on.map(|()| None) } else { Ok(ended) }
    }

    /// Ends the connection. Receives are given up.
    pub(crate) fn close(&self) {
        if let Some(link) = locked(&self.0).link.take() {
            link.close(false);
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

    /// Copies what has come for receives.
    fn copy(&mut self) -> Result<(), Error> {
        let link = self.link.as_mut().ok_or_else(|| invalid_argument("the connection has been closed"))?;
        let mut has_moved = false;
        while let Some(receive) = self.receives.oldest() {
            if !link.channel().poll()? {
                break;
            }
            let mut header = [0; HEADER_BYTES as usize];
            // SAFETY: a header is in the ring, and its piece has come.
            unsafe { link.copy_out(self.incoming.offset(), header.as_mut_ptr(), HEADER_BYTES) };
            let header = Header::from_bytes(header);
            let end = receive.moved.checked_add(header.payload_bytes.into());
            let Some(place) =
                self.incoming.place(header).filter(|_| end.is_some_and(|end| end <= header.message_bytes))
            else {
                let message = format!("the peer has sent a piece that is none: {header:?}");
                return Err(Error::Refused { class: ErrorClass::Remote, message });
            };
            if header.message_bytes > receive.bytes {
                let (theirs, ours) = (header.message_bytes, receive.bytes);
                let message =
                    format!("the peer sends {theirs} bytes with tag {}, the receive has room for {ours}", header.tag);
                return Err(Error::Refused { class: ErrorClass::InvalidUsage, message });
            }
            let to = receive.data.wrapping_add(receive.moved as usize);
            // SAFETY: the piece has come, and the room for the message has its bytes.
            unsafe { link.copy_out(place.offset + HEADER_BYTES, to, place.payload_bytes) };
            if self.incoming.end(place) {
                link.channel().signal()?;
            }
            receive.moved += place.payload_bytes;
            has_moved = true;
            if receive.moved == header.message_bytes {
                self.receives.end_oldest(header.message_bytes);
            }
        }
        if has_moved { link.has_moved() } else { link.waits() }
    }
}
