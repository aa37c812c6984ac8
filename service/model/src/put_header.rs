//! Header of what port channels send to a rank of another host: where a put goes, and whether it
//! signals.

use mccs_ipc::types::Handle;

/// See the module's documentation. If it has bytes, a message with these follows. What is read is as another host's service wrote it.
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
}

impl PutHeader {
    /// Length of a header.
    pub const BYTES: usize = 64;

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let short = [self.tag, u32::from(self.signals), self.channel, self.memory.index, self.memory.generation];
        for (place, value) in bytes.chunks_exact_mut(4).zip(short) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        for (place, value) in bytes[32..].chunks_exact_mut(8).zip([self.offset, self.bytes]) {
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
            signals: short(4) != 0,
            channel: short(8),
            memory: Handle { index: short(12), generation: short(16) },
            offset: long(32),
            bytes: long(40),
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
        let header = PutHeader { tag: 0xdead_beef, signals: true, channel: 16383, memory, offset, bytes };
        assert_eq!(PutHeader::decode(&header.encode()), header);
        let none = PutHeader { signals: false, bytes: 0, ..header };
        assert_eq!(PutHeader::decode(&none.encode()), none);
    }
}
