//! The receiving side of a connection: copies pieces that have come to where messages are awaited, and gives their
//! place back.

use mccs::{Error, ErrorClass};

use crate::link::Link;
use crate::ring::{HEADER_BYTES, Header, Incoming};
use crate::side::{Copies, Side};
use crate::transfers::Transfers;

/// See the module's documentation. Messages go to receives in the order of both.
pub(crate) type Receiver = Side<Incoming>;

impl Copies for Incoming {
    fn copy(&mut self, link: &mut Link, receives: &mut Transfers) -> Result<bool, Error> {
        let mut has_moved = false;
        while let Some(receive) = receives.oldest() {
            if !link.channel().poll()? {
                break;
            }
            let mut header = [0; HEADER_BYTES as usize];
            // SAFETY: a header is in the ring, and its piece has come.
            unsafe { link.copy_out(self.offset(), header.as_mut_ptr(), HEADER_BYTES) };
            let header = Header::from_bytes(header);
            let end = receive.moved.checked_add(header.payload_bytes.into());
            let Some(place) = self.place(header).filter(|_| end.is_some_and(|end| end <= header.message_bytes)) else {
                let message = format!("the peer has sent a piece that is none: {header:?}");
                return Err(Error::refused(ErrorClass::Remote, message));
            };
            if header.message_bytes > receive.bytes {
                let (theirs, ours) = (header.message_bytes, receive.bytes);
                let message =
                    format!("the peer sends {theirs} bytes with tag {}, the receive has room for {ours}", header.tag);
                return Err(Error::refused(ErrorClass::InvalidUsage, message));
            }
            let to = receive.data.wrapping_add(receive.moved as usize);
            // SAFETY: the piece has come, and the room for the message has its bytes.
            unsafe { link.copy_out(place.offset + HEADER_BYTES, to, place.payload_bytes) };
            if self.end(place) {
                link.channel().signal()?;
            }
            receive.moved += place.payload_bytes;
            has_moved = true;
            if receive.moved == header.message_bytes {
                receives.end_oldest(header.message_bytes);
            }
        }
        Ok(has_moved)
    }

    fn is_busy(&self) -> bool {
        false
    }
}
