//! Records of the control channel: offer and answer of queue pairs, ready, broken, bye. Pure;
//! everything that comes in is checked here.
//!
//! ```text
//! sender                                          receiver
//!    | -- Offer: queue pairs, where credits go ----> |   makes queue pairs, ready to receive
//!    | <-- Answer: queue pairs, what has come ------ |
//!    | -- Ready ------------------------------------>|   may write credits
//!    |  (credits and messages by RDMA writes, short messages into an inbox) |
//!    | <-- Again: my side of the connection is broken ----- |
//!    | -- Offer, on other queue pairs -------------->|
//!    | -- TooLong, or Bye: how many have gone ------>|
//!    | <-- or Bye: how many have come -------------- |
//! ```
//!
//! Records travel in messages of two TCP flows, one each way, which tell whether the other side lives: when one breaks, the flow is
//! over. Each begins with [`MAGIC`] and [`VERSION`], which never change their place.

use serde::{Deserialize, Serialize};

use crate::options::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN};
use crate::rdma::verbs::Gid;
use crate::{CONNECTIONS_MAX, Fault, HANDLE_BYTES_MAX, ListenerHandle, REQUESTS_MAX, TransportError};

/// Version of the protocol; both sides must have the same.
pub(in crate::rdma) const VERSION: u32 = 6;
const MAGIC: [u8; 4] = *b"rdma";
const HEAD_BYTES: usize = 8;
/// Numbers of queue pairs and packets have 24 bits.
const NUMBER_MAX: u32 = 0xff_ffff;
/// Longest record: an offer of as many queue pairs as there can be.
pub(in crate::rdma) const RECORD_BYTES_MAX: usize = 512;

/// A queue pair, as its peer needs to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::rdma) struct QpAddress {
    pub(in crate::rdma) qp: u32,
    /// First packet number.
    pub(in crate::rdma) psn: u32,
}

/// One side of the connection: a port and its queue pairs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::rdma) struct SideAddress {
    pub(in crate::rdma) gid: [u8; 16],
    pub(in crate::rdma) lid: u16,
    pub(in crate::rdma) is_ethernet: bool,
    /// Code of the path MTU.
    pub(in crate::rdma) mtu: u8,
    pub(in crate::rdma) qps: Vec<QpAddress>,
}

impl SideAddress {
    pub(in crate::rdma) fn gid(&self) -> Gid {
        Gid(self.gid)
    }
}

/// Address at which one side writes into the other's memory: the receiver credits, the sender short messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::rdma) struct RingAddress {
    pub(in crate::rdma) address: u64,
    pub(in crate::rdma) rkey: u32,
    pub(in crate::rdma) slots: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::rdma) enum Record {
    Offer {
        /// Counts the connections of this flow, from 1.
        connection: u32,
        /// Place of the sender's port among its own; the receiver prefers its counterpart, counted round.
        home: u32,
        /// Rounds of the sender's ports that were tried in vain before: so many places further is the receiver's.
        turn: u32,
        side: SideAddress,
        ring: RingAddress,
        /// Longest part of a message.
        part_bytes: u32,
        /// The sender's listener for the flow the other way, and its number there.
        back: (Vec<u8>, u64),
    },
    Answer {
        connection: u32,
        /// The receiver's port is the one that it prefers.
        is_home: bool,
        side: SideAddress,
        /// Messages that have come, all of them in order.
        received: u64,
        /// Those of them for which there was a buffer: credits count from there.
        taken: u64,
        /// Address for short messages, if there is one.
        inbox: Option<RingAddress>,
    },
    Ready {
        connection: u32,
    },
    /// The receiver's side of this connection is broken, as the code of a completion says, or a better one is there (0).
    Again {
        connection: u32,
        status: u32,
    },
    /// A message does not fit its buffer; it is not sent.
    TooLong {
        message: u64,
        bytes: u64,
    },
    /// One side closes. So many messages have gone, or have come.
    Bye {
        messages: u64,
    },
}

impl Record {
    pub(in crate::rdma) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        postcard::to_extend(self, bytes).expect("invariant: integers, bytes and lists of them can be written")
    }

    /// Reads a record as it came from a peer.
    pub(in crate::rdma) fn decode(bytes: &[u8]) -> Result<Self, Fault> {
        let (Some(head), Some(body)) = (bytes.first_chunk::<HEAD_BYTES>(), bytes.get(HEAD_BYTES..)) else {
            return Err(Fault::Protocol("a record is too short"));
        };
        let [m0, m1, m2, m3, v0, v1, v2, v3] = *head;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(Fault::Protocol("a record is none of rdma's"));
        }
        let theirs = u32::from_le_bytes([v0, v1, v2, v3]);
        if theirs != VERSION {
            return Err(Fault::Version { theirs, ours: VERSION });
        }
        let record: Record = match postcard::take_from_bytes(body) {
            Ok((record, [])) => record,
            Ok(_) | Err(_) => return Err(Fault::Protocol("a record is garbled")),
        };
        let is_side = |side: &SideAddress| {
            (1..=usize::from(CONNECTIONS_MAX)).contains(&side.qps.len())
                && (1..=5).contains(&side.mtu)
                && side.qps.iter().all(|qp| qp.qp <= NUMBER_MAX && qp.psn <= NUMBER_MAX)
        };
        let is_right = match &record {
            Record::Offer { side, ring, part_bytes, back: (handle, _), .. } => {
                is_side(side)
                    && (1..=REQUESTS_MAX).contains(&ring.slots)
                    && (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(part_bytes)
                    && handle.len() <= HANDLE_BYTES_MAX
            }
            Record::Answer { side, received, taken, inbox, .. } => {
                is_side(side)
                    && taken <= received
                    && inbox.is_none_or(|inbox| (2..=2 * REQUESTS_MAX).contains(&inbox.slots))
            }
            Record::Ready { .. } | Record::Again { .. } | Record::TooLong { .. } | Record::Bye { .. } => true,
        };
        if is_right { Ok(record) } else { Err(Fault::Protocol("a record's numbers are out of range")) }
    }
}

/// A listener's handle: that of its TCP listener behind a head.
pub(in crate::rdma) fn to_handle(tcp: &ListenerHandle) -> ListenerHandle {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(tcp.as_bytes());
    ListenerHandle(bytes)
}

/// The TCP listener's handle in a listener's.
pub(in crate::rdma) fn from_handle(handle: &ListenerHandle) -> Result<ListenerHandle, TransportError> {
    let bytes = handle.as_bytes();
    let (Some(head), Some(tcp)) = (bytes.first_chunk::<HEAD_BYTES>(), bytes.get(HEAD_BYTES..)) else {
        return Err(TransportError::BadHandle("it is none of rdma's"));
    };
    if !head.starts_with(&MAGIC) {
        return Err(TransportError::BadHandle("it is none of rdma's; do all hosts have the same `rdma.use`?"));
    }
    if head[4..] != VERSION.to_le_bytes() {
        return Err(TransportError::BadHandle("it was made by another version"));
    }
    ListenerHandle::from_bytes(tcp)
}

/// Room for the next message, as it lies in the sender's ring.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(in crate::rdma) struct Credit {
    pub(in crate::rdma) address: u64,
    pub(in crate::rdma) bytes: u64,
    pub(in crate::rdma) rkey: u32,
    /// Low bits of the message's number.
    pub(in crate::rdma) message: u32,
}

pub(in crate::rdma) const CREDIT_BYTES: usize = size_of::<Credit>();

/// Longest message that goes to the inbox: to copy one takes less time than a credit's way through the network.
pub(in crate::rdma) const SHORT_BYTES_MAX: u64 = 4096;

/// Head of a short message in the receiver's inbox: number n at slot n, counted round. The number tells the receiver that the
/// message is there, and not in the posted buffer.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(in crate::rdma) struct ShortHead {
    /// One more than the message's number, so that empty memory holds none.
    pub(in crate::rdma) number: u64,
    pub(in crate::rdma) bytes: u64,
}

pub(in crate::rdma) const SHORT_HEAD_BYTES: u64 = size_of::<ShortHead>() as u64;

/// A short message's slot. Only as much of it is written as has bytes.
pub(in crate::rdma) const SHORT_SLOT_BYTES: u64 = SHORT_HEAD_BYTES + SHORT_BYTES_MAX;

/// Messages by which a sender may be ahead of its credits: half of the inbox.
///
/// The receiver gives credits for as many messages at most as half of the inbox has slots, beyond those that it has taken. So when
/// message n is within this, message n - slots has been taken, and its slot is free.
pub(in crate::rdma) fn ahead(inbox: RingAddress) -> u64 {
    u64::from(inbox.slots / 2)
}

/// How messages are cut into parts, which go round the queue pairs.
///
/// A part shorter than the longest one ends its message, and so does one that fills the buffer: the receiver needs no
/// header, only the lengths of the writes. A message that does neither has an empty part behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rdma) struct Cut {
    pub(in crate::rdma) part_bytes: u32,
}

impl Cut {
    /// Number of parts of a message for a buffer of `buffer_bytes`.
    pub(in crate::rdma) fn parts(self, message_bytes: u64, buffer_bytes: u64) -> u64 {
        let part_bytes = u64::from(self.part_bytes);
        let open = message_bytes.is_multiple_of(part_bytes) && message_bytes < buffer_bytes;
        message_bytes.div_ceil(part_bytes).max(1) + u64::from(open && message_bytes > 0)
    }

    /// Offset and length of a part.
    pub(in crate::rdma) fn part(self, part: u64, message_bytes: u64) -> (u64, u32) {
        let offset = part.saturating_mul(self.part_bytes.into()).min(message_bytes);
        (offset, (message_bytes - offset).min(self.part_bytes.into()) as u32)
    }

    /// Whether a message ends with a part of `bytes`, with which `got` have come.
    pub(in crate::rdma) fn ends(self, bytes: u32, got: u64, buffer_bytes: u64) -> bool {
        bytes < self.part_bytes || got == buffer_bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn side(qps: usize) -> SideAddress {
        let qp = QpAddress { qp: 0xff_ffff, psn: 0xff_ffff };
        SideAddress { gid: [7; 16], lid: 9, is_ethernet: true, mtu: 5, qps: vec![qp; qps] }
    }

    fn answer(slots: u16) -> Record {
        let inbox = Some(RingAddress { address: u64::MAX, rkey: u32::MAX, slots });
        let side = side(CONNECTIONS_MAX.into());
        Record::Answer { connection: u32::MAX, is_home: true, side, received: u64::MAX, taken: u64::MAX, inbox }
    }

    fn offer(qps: usize) -> Record {
        let side = side(qps);
        let ring = RingAddress { address: u64::MAX, rkey: u32::MAX, slots: REQUESTS_MAX };
        let back = (vec![1; HANDLE_BYTES_MAX], u64::MAX);
        Record::Offer {
            connection: u32::MAX,
            home: u32::MAX,
            turn: u32::MAX,
            side,
            ring,
            part_bytes: CHUNK_BYTES_MAX,
            back,
        }
    }

    #[test]
    fn records_come_as_they_went_and_fit() {
        let most = offer(CONNECTIONS_MAX.into());
        let rest =
            [Record::Ready { connection: 1 }, Record::TooLong { message: 3, bytes: 4 }, Record::Bye { messages: 5 }];
        for record in [most, answer(2 * REQUESTS_MAX)].into_iter().chain(rest) {
            let bytes = record.encode();
            assert!(bytes.len() <= RECORD_BYTES_MAX, "{}", bytes.len());
            assert_eq!(Record::decode(&bytes), Ok(record));
            assert!(matches!(Record::decode(&bytes[..bytes.len() - 1]), Err(Fault::Protocol(_))));
            let mut other = bytes.clone();
            other[4] = 9;
            assert_eq!(Record::decode(&other), Err(Fault::Version { theirs: 9, ours: VERSION }));
        }
        let mut long_number = offer(1);
        if let Record::Offer { side, .. } = &mut long_number {
            side.qps[0].qp += 1;
        }
        let lanes_max = usize::from(CONNECTIONS_MAX);
        for wrong in [offer(0), offer(lanes_max + 1), answer(1), answer(2 * REQUESTS_MAX + 1), long_number] {
            assert!(matches!(Record::decode(&wrong.encode()), Err(Fault::Protocol(_))));
        }
    }

    proptest! {
        #[test]
        fn garbage_is_refused_or_read(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Record::decode(&bytes);
            let _ = Record::decode(&[&MAGIC[..], &VERSION.to_le_bytes(), &bytes].concat());
        }

        /// The receiver finds the end of each message from the lengths alone.
        #[test]
        fn parts_end_where_messages_do(part_bytes in 1u32..50, message_bytes in 0u64..400, spare in 0u64..60) {
            let (cut, buffer_bytes) = (Cut { part_bytes }, message_bytes + spare);
            let (parts, mut got) = (cut.parts(message_bytes, buffer_bytes), 0);
            for part in 0..parts {
                let (offset, bytes) = cut.part(part, message_bytes);
                prop_assert_eq!(offset, got);
                got += u64::from(bytes);
                prop_assert_eq!(cut.ends(bytes, got, buffer_bytes), part + 1 == parts, "part {} of {}", part, parts);
            }
            prop_assert_eq!(got, message_bytes);
        }
    }
}
