//! The sending side of a connection: copies messages into the ring as it has room, and puts each piece.

use mccs::Error;

use crate::link::Link;
use crate::ring::{HEADER_BYTES, Header, Outgoing};
use crate::side::{Copies, Side};
use crate::transfers::Transfers;

/// See the module's documentation. A send is done when its message is in the ring: NCCL may then write its memory again.
pub(crate) type Sender = Side<Outgoing>;

impl Copies for Outgoing {
    fn copy(&mut self, link: &mut Link, sends: &mut Transfers) -> Result<bool, Error> {
        while self.awaits_room() && link.channel().poll()? {
            self.end_batch();
        }
        let mut has_moved = false;
        while let Some(send) = sends.oldest() {
            let Some(place) = self.place(send.bytes - send.moved) else { break };
            let header = Header { message_bytes: send.bytes, payload_bytes: place.payload_bytes as u32, tag: send.tag }
                .to_bytes();
            // SAFETY: the place is free, and what is left of the message has as many bytes.
            unsafe {
                link.copy_in(place.offset, header.as_ptr(), HEADER_BYTES);
                let from = send.data.wrapping_add(send.moved as usize);
                link.copy_in(place.offset + HEADER_BYTES, from, place.payload_bytes);
            }
            self.begin(place);
            link.channel().put_with_signal(place.offset, place.offset, place.bytes())?;
            send.moved += place.payload_bytes;
            has_moved = true;
            if send.moved == send.bytes {
                let bytes = send.bytes;
                sends.end_oldest(bytes);
            }
        }
        Ok(has_moved)
    }

    fn is_busy(&self) -> bool {
        Outgoing::is_busy(self)
    }
}
