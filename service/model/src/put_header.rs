//! Header of what port channels send to a rank of another host: where a put goes, and whether it
//! signals. Frames have it.

use mccs_ipc::types::Handle;

/// See the module's documentation. Its bytes are in its frame, or follow as a message behind that. A header is as another host's service
/// wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PutHeader {
    /// Tag of the connection.
    pub tag: u32,
    /// Whether a signal comes behind the put.
    pub signals: bool,
    /// The sender's port channel, for messages to persons.
    pub channel: u32,
    /// The receiver's memory.
    pub memory: Handle,
    /// First byte there.
    pub offset: u64,
    /// Bytes of the put; 0: there is none.
    pub bytes: u64,
    /// Whether the bytes are behind it in its frame.
    pub is_inline: bool,
}

impl PutHeader {
    /// Length of a header.
    pub const BYTES: usize = 40;

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let flags = u32::from(self.signals) | u32::from(self.is_inline) << 1;
        let short = [self.tag, flags, self.channel, self.memory.index, self.memory.generation];
        for (place, value) in bytes.chunks_exact_mut(4).zip(short) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        for (place, value) in bytes[24..].chunks_exact_mut(8).zip([self.offset, self.bytes]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// The header in these bytes.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let short = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(short(at + 4)) << 32 | u64::from(short(at));
        PutHeader {
            tag: short(0),
            signals: short(4) & 1 != 0,
            channel: short(8),
            memory: Handle { index: short(12), generation: short(16) },
            offset: long(24),
            bytes: long(32),
            is_inline: short(4) & 2 != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_back_from_its_bytes() {
        let memory = Handle { index: 7, generation: u32::MAX };
        let (offset, bytes) = (u64::MAX - 3, 1 << 40 | 5);
        let header =
            PutHeader { tag: 0xdead_beef, signals: true, channel: 16383, memory, offset, bytes, is_inline: false };
        assert_eq!(PutHeader::decode(&header.encode()), header);
        let none = PutHeader { signals: false, bytes: 0, is_inline: true, ..header };
        assert_eq!(PutHeader::decode(&none.encode()), none);
    }
}
