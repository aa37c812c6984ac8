//! A trigger: 16 bytes that ask the service for a put, a signal, a flush, or several of these in
//! this order.
//!
//! ```text
//!         63      62 .. 24                    23 .. 0
//! word 0  parity  offset in the source        low 24 bits of the length
//!         63      62 .. 24                    23 .. 17              16 .. 3   2 .. 0
//! word 1  parity  offset in the destination   high 7 of the length  channel   kinds
//! ```
//!
//! A kernel writes a trigger with one store of 16 bytes, a processor with two of 8. Each word carries the parity of its lap, so that a reader
//! who finds both has the whole trigger, in whichever order they came.

/// Longest put of a trigger: 2 GiB less one byte. Longer ones are several.
pub const PUT_BYTES_MAX: u64 = (1 << LENGTH_BITS) - 1;
/// Largest offset in a memory: 512 GiB less one byte.
pub const OFFSET_MAX: u64 = (1 << OFFSET_BITS) - 1;
/// Port channels of a rank in a communicator.
pub const CHANNELS_MAX: u32 = 1 << CHANNEL_BITS;

const LENGTH_BITS: u32 = 31;
const OFFSET_BITS: u32 = 39;
const CHANNEL_BITS: u32 = 14;
/// Bits of the length in the first word.
const LOW_BITS: u32 = 24;
const OFFSET_SHIFT: u32 = 24;
const CHANNEL_SHIFT: u32 = 3;
const HIGH_SHIFT: u32 = CHANNEL_SHIFT + CHANNEL_BITS;

/// The bit of a word that says of which lap it is.
pub(super) const PARITY: u64 = 1 << 63;

const _: () = {
    assert!(OFFSET_SHIFT + OFFSET_BITS == 63 && HIGH_SHIFT + LENGTH_BITS - LOW_BITS == OFFSET_SHIFT);
};

/// Kinds of a trigger: any of the three, none of which is no trigger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kinds(u8);

impl Kinds {
    /// Nothing, which no library asks for.
    pub const NONE: Kinds = Kinds(0);
    /// Copy from the source to the destination.
    pub const PUT: Kinds = Kinds(1);
    /// Raise the peer's word of the connection, behind all puts before.
    pub const SIGNAL: Kinds = Kinds(2);
    /// Tell the rank when all before, and this trigger's put and signal, have ended.
    pub const FLUSH: Kinds = Kinds(4);

    const ALL: u8 = 7;

    /// Both.
    #[must_use]
    pub const fn and(self, other: Kinds) -> Kinds {
        Kinds(self.0 | other.0)
    }

    /// Whether `other` is among these.
    #[must_use]
    pub const fn has(self, other: Kinds) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether it asks for nothing.
    #[must_use]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// See the module's documentation. Triggers are read as a tenant wrote them: nothing of one is valid until checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trigger {
    /// A resource that is asked for.
    pub kinds: Kinds,
    /// Number of the port channel, below [`CHANNELS_MAX`].
    pub channel: u32,
    /// Bytes of the put, at most [`PUT_BYTES_MAX`].
    pub bytes: u64,
    /// Offset in the channel's own memory, at most [`OFFSET_MAX`].
    pub source_offset: u64,
    /// Offset in the channel's memory of the peer, at most [`OFFSET_MAX`].
    pub destination_offset: u64,
}

impl Trigger {
    /// The words of a trigger, of a lap of this parity. Bits beyond a field's are cut.
    #[must_use]
    pub(super) fn encode(&self, parity: u64) -> [u64; 2] {
        let low = self.bytes & ((1 << LOW_BITS) - 1);
        let high = (self.bytes & PUT_BYTES_MAX) >> LOW_BITS;
        let channel = u64::from(self.channel & (CHANNELS_MAX - 1));
        let offset = |offset: u64| (offset & OFFSET_MAX) << OFFSET_SHIFT;
        [
            parity | offset(self.source_offset) | low,
            parity
                | offset(self.destination_offset)
                | high << HIGH_SHIFT
                | channel << CHANNEL_SHIFT
                | u64::from(self.kinds.0),
        ]
    }

    /// The trigger in two words.
    #[must_use]
    pub(super) fn decode([first, second]: [u64; 2]) -> Self {
        let offset = |word: u64| (word >> OFFSET_SHIFT) & OFFSET_MAX;
        let high = (second >> HIGH_SHIFT) & ((1 << (LENGTH_BITS - LOW_BITS)) - 1);
        Trigger {
            kinds: Kinds(second as u8 & Kinds::ALL),
            channel: (second >> CHANNEL_SHIFT) as u32 & (CHANNELS_MAX - 1),
            bytes: high << LOW_BITS | (first & ((1 << LOW_BITS) - 1)),
            source_offset: offset(first),
            destination_offset: offset(second),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_trigger_comes_back_as_it_was_written() {
        let ends = |most: u64| [0, 1, most / 2, most - 1, most];
        for kinds in 0..=Kinds::ALL {
            for (channel, bytes) in ends((CHANNELS_MAX - 1).into()).into_iter().zip(ends(PUT_BYTES_MAX)) {
                for (source_offset, destination_offset) in
                    ends(OFFSET_MAX).into_iter().zip(ends(OFFSET_MAX).into_iter().rev())
                {
                    let channel = channel as u32;
                    let trigger = Trigger { kinds: Kinds(kinds), channel, bytes, source_offset, destination_offset };
                    for parity in [0, PARITY] {
                        let words = trigger.encode(parity);
                        assert!(words.iter().all(|word| word & PARITY == parity), "{words:x?}");
                        assert_eq!(Trigger::decode(words), trigger);
                    }
                }
            }
        }
    }

    #[test]
    fn fields_that_are_too_large_change_no_other() {
        let large = Trigger {
            kinds: Kinds::PUT,
            channel: u32::MAX,
            bytes: u64::MAX,
            source_offset: u64::MAX,
            destination_offset: 0,
        };
        let (bytes, source_offset) = (PUT_BYTES_MAX, OFFSET_MAX);
        let cut = Trigger { channel: CHANNELS_MAX - 1, bytes, source_offset, ..large };
        assert_eq!(Trigger::decode(large.encode(0)), cut);
    }

    #[test]
    fn kinds_are_joined_and_found() {
        let both = Kinds::PUT.and(Kinds::FLUSH);
        assert!(both.has(Kinds::PUT) && both.has(Kinds::FLUSH) && !both.has(Kinds::SIGNAL) && !both.is_none());
        assert!(Kinds(0).is_none());
    }
}
