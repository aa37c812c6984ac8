//! Tags on messages between hosts: a digest of the call, by which ranks' mismatched calls are
//! found.

use mccs_ipc::types::DataType;

use crate::proxy::calls::describe::signature;
use crate::proxy::communicator::comm::Comm;
use crate::transport::Tag;

/// Tag of messages of the communicator's collective that has started last.
pub(crate) fn collective_tag(live: &Comm) -> Tag {
    let call = live.running.newest().first().and_then(signature).map_or(0, |call| call.to_wire());
    tag(live.next_number(), call)
}

/// Tag of frames of port channels, of which the receiver waits for the longest.
pub(crate) const FRAME_TAG: Tag = Tag::of_at_most(0x7075_7473);

/// Sends and receives match in order; both sides have to mean the same type and length, however it is cut into messages.
pub(crate) fn p2p_tag(dtype: DataType, bytes: u64) -> Tag {
    tag(u64::MAX, bytes << 8 | dtype as u64)
}

/// Tag of the bytes of a long put, which come behind its frame.
pub(crate) fn long_put_tag(bytes: u64) -> Tag {
    tag(u64::MAX - 1, bytes)
}

/// Mixes a place in the order of calls and a call: equal for equal ones, and hardly ever for others.
fn tag(place: u64, call: u64) -> Tag {
    // The finalizer of MurmurHash3 (public domain), which spreads every bit.
    let mut mixed = place.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ call;
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    Tag::of((mixed ^ (mixed >> 33)) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_tell_places_and_calls_apart() {
        let mut seen = std::collections::HashSet::new();
        for place in 0..100 {
            for call in 0..100 {
                assert!(seen.insert(tag(place, call).value), "{place} {call}");
            }
        }
        assert_eq!(tag(3, 4), tag(3, 4));
    }
}
