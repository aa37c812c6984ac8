//! Wire format of TCP flows: hello, chunk headers, resumption. Pure; everything that comes in is
//! checked here.
//!
//! ```text
//! connector -> listener   Hello, once a socket
//! listener -> connector   Verdict, once a socket, when the flow is accepted and all its sockets are there
//! connector -> listener   (ChunkHeader, bytes of the chunk) *
//!
//! the same over another path, when the one before is dead:
//! connector -> listener   Hello of the same connection and attempt, with a higher `resumption`
//! listener -> connector   Resumed: a Verdict, and how many bytes of that connection's chunks have come
//! connector -> listener   the bytes from there on
//! ```
//!
//! Integers are little-endian. The first twelve bytes of [`Hello`] and [`Verdict`] never change between versions.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use mccs_ipc::types::Handle;

use crate::options::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN};
use crate::{CONNECTIONS_MAX, Fault, ListenerHandle, MESSAGE_BYTES_MAX, TransportError};

/// Version of the protocol; both sides must have the same.
pub(super) const VERSION: u32 = 2;
const MAGIC: [u8; 8] = *b"mccs-tcp";

/// A secret that only those have whom the listener's side gave its handle.
pub(super) type Cookie = [u8; 16];

/// Compares in a time that does not depend on where the two differ.
pub(super) fn same_cookie(a: &Cookie, b: &Cookie) -> bool {
    a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    if let Some(part) = bytes.get(at..at + N) {
        array.copy_from_slice(part);
    }
    array
}

fn encode_handle(handle: Handle) -> [u8; 8] {
    (u64::from(handle.generation) << 32 | u64::from(handle.index)).to_le_bytes()
}

fn decode_handle(bytes: &[u8], at: usize) -> Handle {
    let word = u64::from_le_bytes(array(bytes, at));
    Handle { index: word as u32, generation: (word >> 32) as u32 }
}

/// Address of a listener, its number among those on this port, and its cookie.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) address: SocketAddr,
    pub(super) listener: Handle,
    pub(super) cookie: Cookie,
}

impl std::fmt::Debug for Address {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Address({}, {:?})", self.address, self.listener)
    }
}

/// "tcp", the version, an IPv6 address (IPv4 mapped into it), a port, the listener, the cookie.
const ADDRESS_BYTES: usize = 4 + 4 + 16 + 2 + 8 + 16;

impl Address {
    pub(super) fn to_handle(self) -> ListenerHandle {
        let ip = match self.address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let mut bytes = Vec::with_capacity(ADDRESS_BYTES);
        bytes.extend_from_slice(b"tcp\0");
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&ip.octets());
        bytes.extend_from_slice(&self.address.port().to_le_bytes());
        bytes.extend_from_slice(&encode_handle(self.listener));
        bytes.extend_from_slice(&self.cookie);
        ListenerHandle(bytes)
    }

    pub(super) fn from_handle(handle: &ListenerHandle) -> Result<Self, TransportError> {
        let bytes = handle.as_bytes();
        if bytes.len() != ADDRESS_BYTES || !bytes.starts_with(b"tcp\0") {
            return Err(TransportError::BadHandle("it is none of tcp's"));
        }
        if u32::from_le_bytes(array(bytes, 4)) != VERSION {
            return Err(TransportError::BadHandle("it was made by another version"));
        }
        let ip = Ipv6Addr::from(array::<16>(bytes, 8)).to_canonical();
        let port = u16::from_le_bytes(array(bytes, 24));
        if port == 0 || ip.is_unspecified() || ip.is_multicast() {
            return Err(TransportError::BadHandle("nobody can listen at its address"));
        }
        let address = SocketAddr::new(ip, port);
        Ok(Address { address, listener: decode_handle(bytes, 26), cookie: array(bytes, 34) })
    }
}

/// Purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    /// Which of the listeners on this port.
    pub(super) listener: Handle,
    pub(super) cookie: Cookie,
    pub(super) flow: u64,
    /// Which of the flow's sockets this is.
    pub(super) connection: u16,
    /// How many there are.
    pub(super) connections: u16,
    pub(super) chunk_bytes: u32,
    /// The same on all sockets of one attempt to connect.
    pub(super) attempt: u64,
    /// How many sockets the connection had before: 0 on its first.
    pub(super) resumption: u32,
}

pub(super) const HELLO_BYTES: usize = 64;
/// Bytes of a hello that say whose it is and of which version.
pub(super) const PREFIX_BYTES: usize = 12;

/// Why a hello is no good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BadHello {
    /// Not ours at all.
    Garbage,
    /// A hello of this version.
    Version(u32),
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.connection.to_le_bytes());
        bytes[14..16].copy_from_slice(&self.connections.to_le_bytes());
        bytes[16..24].copy_from_slice(&encode_handle(self.listener));
        bytes[24..40].copy_from_slice(&self.cookie);
        bytes[40..48].copy_from_slice(&self.flow.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.attempt.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.chunk_bytes.to_le_bytes());
        bytes[60..64].copy_from_slice(&self.resumption.to_le_bytes());
        bytes
    }

    /// Whether it begins as a hello of this version: those of others may be shorter.
    pub(super) fn check_prefix(bytes: &[u8; PREFIX_BYTES]) -> Result<(), BadHello> {
        if !bytes.starts_with(&MAGIC) {
            return Err(BadHello::Garbage);
        }
        let version = u32::from_le_bytes(array(bytes, 8));
        if version == VERSION { Ok(()) } else { Err(BadHello::Version(version)) }
    }

    pub(super) fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, BadHello> {
        Self::check_prefix(&array(bytes, 0))?;
        let hello = Hello {
            listener: decode_handle(bytes, 16),
            cookie: array(bytes, 24),
            flow: u64::from_le_bytes(array(bytes, 40)),
            connection: u16::from_le_bytes(array(bytes, 12)),
            connections: u16::from_le_bytes(array(bytes, 14)),
            chunk_bytes: u32::from_le_bytes(array(bytes, 56)),
            attempt: u64::from_le_bytes(array(bytes, 48)),
            resumption: u32::from_le_bytes(array(bytes, 60)),
        };
        let right = (1..=CONNECTIONS_MAX).contains(&hello.connections)
            && hello.connection < hello.connections
            && (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&hello.chunk_bytes);
        if right { Ok(hello) } else { Err(BadHello::Garbage) }
    }

    pub(super) fn grid(&self) -> Grid {
        Grid::new(self.connections, self.chunk_bytes)
    }

    /// Whether another hello is of the same flow, at least as far as that can be said from here.
    pub(super) fn is_of_same_flow(&self, other: &Hello) -> bool {
        let flow = |hello: &Hello| (hello.attempt, hello.connections, hello.chunk_bytes);
        flow(self) == flow(other)
    }
}

/// Whether the listener takes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Welcome,
    OtherVersion,
    TooMany,
    Taken,
}

pub(super) const VERDICT_BYTES: usize = 16;

impl Verdict {
    pub(super) fn encode(self) -> [u8; VERDICT_BYTES] {
        let code: u32 = match self {
            Verdict::Welcome => 0,
            Verdict::OtherVersion => 1,
            Verdict::TooMany => 2,
            Verdict::Taken => 3,
        };
        let mut bytes = [0; VERDICT_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&code.to_le_bytes());
        bytes
    }

    /// Reads a verdict as the connector does: anything but a welcome is a fault.
    pub(super) fn check(bytes: &[u8; VERDICT_BYTES]) -> Result<(), Fault> {
        if !bytes.starts_with(&MAGIC) {
            return Err(Fault::Protocol("its answer is no answer of a transport"));
        }
        let theirs = u32::from_le_bytes(array(bytes, 8));
        match (theirs, u32::from_le_bytes(array(bytes, 12))) {
            (VERSION, 0) => Ok(()),
            (VERSION, 2) => Err(Fault::Refused("its listener has as many flows as it may have")),
            (VERSION, 3) => Err(Fault::Refused("the flow of this number was connected before")),
            (VERSION, _) => Err(Fault::Protocol("its answer has an unknown code")),
            (theirs, _) => Err(Fault::Version { theirs, ours: VERSION }),
        }
    }
}

/// Answer to a hello that goes on: a welcome, and how many bytes have come.
pub(super) const RESUMED_BYTES: usize = VERDICT_BYTES + 8;

pub(super) fn encode_resumed(received: u64) -> [u8; RESUMED_BYTES] {
    let mut bytes = [0; RESUMED_BYTES];
    bytes[..VERDICT_BYTES].copy_from_slice(&Verdict::Welcome.encode());
    bytes[VERDICT_BYTES..].copy_from_slice(&received.to_le_bytes());
    bytes
}

/// How many bytes have come; anything but a welcome is a fault.
pub(super) fn check_resumed(bytes: &[u8; RESUMED_BYTES]) -> Result<u64, Fault> {
    Verdict::check(&array(bytes, 0))?;
    Ok(u64::from_le_bytes(array(bytes, VERDICT_BYTES)))
}

/// How a flow's messages are cut into chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grid {
    chunk_bytes: u64,
}

impl Grid {
    /// One connection carries messages whole.
    pub(super) fn new(connections: u16, chunk_bytes: u32) -> Self {
        Grid { chunk_bytes: if connections == 1 { u64::MAX } else { u64::from(chunk_bytes.max(1)) } }
    }

    /// Number of chunks of a message; an empty one has one, too.
    pub(super) fn chunks(self, message_bytes: u64) -> u64 {
        message_bytes.div_ceil(self.chunk_bytes).max(1)
    }

    /// Place of a message's chunk in it.
    pub(super) fn chunk(self, chunk: u64, message_bytes: u64) -> ChunkRange {
        let offset = chunk.saturating_mul(self.chunk_bytes).min(message_bytes);
        ChunkRange { offset, bytes: (message_bytes - offset).min(self.chunk_bytes) }
    }
}

/// Part of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChunkRange {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// In front of every chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChunkHeader {
    /// Low bits of the message's number in its flow.
    pub(super) message: u32,
    /// Number of the chunk in the message.
    pub(super) chunk: u32,
    /// Length of the whole message.
    pub(super) message_bytes: u64,
    /// The sender's, the same in all chunks of a message.
    pub(super) tag: u32,
}

pub(super) const HEADER_BYTES: usize = 20;

impl ChunkHeader {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&self.message.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.chunk.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.message_bytes.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.tag.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER_BYTES], grid: Grid) -> Result<Self, Fault> {
        let header = ChunkHeader {
            message: u32::from_le_bytes(array(bytes, 0)),
            chunk: u32::from_le_bytes(array(bytes, 4)),
            message_bytes: u64::from_le_bytes(array(bytes, 8)),
            tag: u32::from_le_bytes(array(bytes, 16)),
        };
        if header.message_bytes > MESSAGE_BYTES_MAX {
            return Err(Fault::Protocol("a message is longer than any message may be"));
        }
        if u64::from(header.chunk) >= grid.chunks(header.message_bytes) {
            return Err(Fault::Protocol("a chunk lies behind its message"));
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello() -> Hello {
        let listener = Handle { index: 3, generation: 4 };
        let (flow, attempt) = (u64::MAX - 1, 5);
        let (connection, connections, chunk_bytes) = (1, 2, 65_536);
        Hello { listener, cookie: [9; 16], flow, connection, connections, chunk_bytes, attempt, resumption: 7 }
    }

    #[test]
    fn hellos_of_strangers_are_told_apart() {
        let good = hello().encode();
        assert_eq!(Hello::decode(&good), Ok(hello()));
        let mut garbage = good;
        garbage[0] ^= 1;
        assert_eq!(Hello::decode(&garbage), Err(BadHello::Garbage));
        let mut other = good;
        other[8] = 99;
        assert_eq!(Hello::decode(&other), Err(BadHello::Version(99)));
        for wrong in [
            Hello { connection: 2, ..hello() },
            Hello { connections: 0, connection: 0, ..hello() },
            Hello { connections: 17, ..hello() },
            Hello { chunk_bytes: 0, ..hello() },
        ] {
            assert_eq!(Hello::decode(&wrong.encode()), Err(BadHello::Garbage), "{wrong:?}");
        }
    }

    #[test]
    fn handles_come_back_and_garbage_is_refused() {
        let listener = Handle { index: 1, generation: u32::MAX };
        for address in ["127.0.0.1:80", "[2001:db8::1]:65535"] {
            let address = Address { address: address.parse().expect("address"), listener, cookie: [3; 16] };
            assert!(Address::from_handle(&address.to_handle()).expect("handle") == address);
        }
        let nowhere = Address { address: "0.0.0.0:80".parse().expect("address"), listener, cookie: [3; 16] };
        assert!(Address::from_handle(&nowhere.to_handle()).is_err());
        assert!(Address::from_handle(&ListenerHandle::from_bytes(&[0; 42]).expect("short")).is_err());
        assert!(Address::from_handle(&ListenerHandle::from_bytes(&[]).expect("short")).is_err());
        assert!(ListenerHandle::from_bytes(&[0; 1000]).is_err());
    }

    #[test]
    fn verdicts_say_why() {
        assert_eq!(Verdict::check(&Verdict::Welcome.encode()), Ok(()));
        for verdict in [Verdict::OtherVersion, Verdict::TooMany, Verdict::Taken] {
            assert!(Verdict::check(&verdict.encode()).is_err());
        }
        let mut newer = Verdict::OtherVersion.encode();
        newer[8] = 99;
        assert_eq!(Verdict::check(&newer), Err(Fault::Version { theirs: 99, ours: VERSION }));
        assert!(matches!(Verdict::check(&[0; VERDICT_BYTES]), Err(Fault::Protocol(_))));
    }

    #[test]
    fn who_goes_on_is_told_from_where() {
        assert_eq!(check_resumed(&encode_resumed(u64::MAX - 3)), Ok(u64::MAX - 3));
        let mut refused = encode_resumed(5);
        refused[..VERDICT_BYTES].copy_from_slice(&Verdict::Taken.encode());
        assert!(matches!(check_resumed(&refused), Err(Fault::Refused(_))));
    }

    proptest! {
        #[test]
        fn chunks_cover_a_message_exactly(bytes in 0u64..10_000_000, connections in 1u16..4, chunk_bytes in 4096u32..1_000_000) {
            let grid = Grid::new(connections, chunk_bytes);
            let mut at = 0;
            for chunk in 0..grid.chunks(bytes) {
                let ChunkRange { offset, bytes: length } = grid.chunk(chunk, bytes);
                prop_assert_eq!(offset, at);
                at += length;
            }
            prop_assert_eq!(at, bytes);
        }

        #[test]
        fn any_header_is_decoded_or_refused(bytes: [u8; HEADER_BYTES], connections in 1u16..4) {
            let grid = Grid::new(connections, 4096);
            if let Ok(header) = ChunkHeader::decode(&bytes, grid) {
                let ChunkRange { offset, bytes: length } = grid.chunk(header.chunk.into(), header.message_bytes);
                prop_assert!(offset + length <= header.message_bytes);
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
