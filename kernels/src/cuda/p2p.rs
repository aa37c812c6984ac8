//! Sends and receives of a group as one kernel launch: lanes, slots and message lists. The host's
//! side of cuda/include/p2p.cuh, which says how they work.
//!
//! ```text
//! behind what collectives use: words of lanes [peer][lane] | packets [peer][lane][slot] | chunks [peer][lane][slot]
//! ```
//!
//! Lanes are matched by order alone, and their counters lie in symmetric buffers: a launch holds no number, and may be replayed.

use mccs_ipc::types::DataType;

use super::abi::RANKS_MAX;
use super::{Launch, SymmetricBufferLayout};

/// Most messages of a group on one communicator: what a kernel's parameter has room for.
pub const MESSAGES_MAX: usize = 1024;
/// Messages that the short parameter has room for.
const MESSAGES_FEW: usize = 32;
/// Words of a lane: two lines of 64 bytes, the second written by the peer.
const LANE_BYTES: u64 = 128;
/// Most lanes of a pair.
pub(super) const LANES_MAX: u32 = 64;
/// Steps of a lane that may be on their way.
const SLOTS: u32 = 4;
/// The longest chunk is at least as long.
const SLOT_BYTES_MIN: u32 = 32 << 10;
/// Most data of a step of packets.
const PART_BYTES: u32 = 16 << 10;
/// Shorter parts of a message are not worth a lane.
const SPREAD_BYTES: u32 = 2 << 10;
const HEADER_BYTES: u64 = 16;
const PAGE_BYTES: u64 = 4096;
/// A header has seven bytes for a message's length.
const MESSAGE_BYTES_MAX: u64 = 1 << 56;

/// Threads where every part is short.
const THREADS_SHORT: u32 = 256;
const THREADS: u32 = 640;

/// A send or a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct P2pMessage {
    /// Whether it is a send.
    pub is_send: bool,
    /// To or from whom.
    pub peer: u32,
    /// First element.
    pub buffer: u64,
    /// Length.
    pub bytes: u64,
    /// Element type: both ends have the same.
    pub dtype: DataType,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct Message {
    buffer: u64,
    header: u64,
}

/// The parameter without its list: the mirror of `P2pHead`. [`P2pLaunch::new`] fills everything but the public fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct P2pHead {
    /// Every rank's symmetric buffer, as mapped for this GPU.
    pub symmetric: [u64; RANKS_MAX],
    /// A word in pinned host memory that ends the kernel when it is not 0, and that the kernel sets when two ends of a message
    /// contradict each other.
    pub abort_word: u64,
    /// Three words in pinned host memory that then tell: the sender's number plus 1, this rank's header, the sender's
    /// ([`header_parts`]).
    pub fault: u64,
    lanes_offset: u64,
    ll_offset: u64,
    simple_offset: u64,
    sent_bytes: u64,
    rank: u32,
    nranks: u32,
    lanes: u32,
    slots: u32,
    slot_bytes: u32,
    part_bytes: u32,
    spread_bytes: u32,
    reserved: u32,
    first: [u32; 2 * RANKS_MAX + 2],
    blocks: [u32; RANKS_MAX],
}

/// The parameter of a kernel of sends and receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct P2pArgs<const COUNT: usize> {
    /// Everything but the list.
    pub head: P2pHead,
    messages: [Message; COUNT],
}

const _: () = assert!(size_of::<P2pHead>() == 248 && std::mem::offset_of!(P2pHead, first) == 144);
// Most bytes of a kernel's parameters since CUDA 12.1.
const _: () = assert!(size_of::<P2pArgs<MESSAGES_MAX>>() <= 32_764);

/// Length and element type of a message, as a header has them: `None` for what is no header.
#[must_use]
pub fn header_parts(header: u64) -> Option<(u64, DataType)> {
    Some((header % MESSAGE_BYTES_MAX, DataType::from_wire((header >> 56) as u32)?))
}

/// In words, what two headers say that were to be the same.
#[must_use]
pub fn contradiction(sender: u32, sent: u64, receiver: u32, expected: u64) -> String {
    let of = |header: u64| match header_parts(header) {
        Some((bytes, dtype)) => format!("{} elements of {dtype}", bytes / dtype.size_bytes() as u64),
        None => format!("what is no message ({header:#x})"),
    };
    format!("rank {sender} sends {} to rank {receiver}, which receives {}", of(sent), of(expected))
}

/// Why a group cannot be launched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum P2pError {
    /// A peer that does not exist.
    #[error("rank {peer} of a communicator of {nranks}")]
    NoPeer {
        /// Named so.
        peer: u32,
        /// Ranks that exist.
        nranks: u32,
    },
    /// Longer than memory.
    #[error("a message of {bytes} bytes is longer than memory")]
    TooLong {
        /// Its length.
        bytes: u64,
    },
    /// More than a kernel is told at a time.
    #[error("a group has {count} sends and receives on one communicator; at most {MESSAGES_MAX} go together")]
    TooMany {
        /// So many.
        count: usize,
    },
    /// Not every send to oneself has a receive in the same group, or the other way round.
    #[error(
        "sends to and receives from oneself must be in one group, in the same order, with the same count and type: \
         there are {sends} and {recvs}, and number {number} differs"
    )]
    OwnUnmatched {
        /// Sends to oneself.
        sends: usize,
        /// Receives from oneself.
        recvs: usize,
        /// The first that has no match, from 1.
        number: usize,
    },
}

/// Layout of a communicator's lanes in its symmetric buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct P2pLayout {
    pub(crate) lanes: u32,
    /// The longest chunk.
    pub(crate) slot_bytes: u32,
    pub(crate) lanes_offset: u64,
    pub(crate) ll_offset: u64,
    pub(crate) simple_offset: u64,
    pub(crate) end: u64,
}

impl P2pLayout {
    /// Offset of the words of a rank's first lane with another: with the steps of packets that it has sent there, of which every message
    /// has one.
    pub(crate) fn first_lane_of(&self, peer: u32) -> u64 {
        self.lanes_offset + u64::from(peer) * u64::from(LANES_MAX) * LANE_BYTES
    }

    /// Behind `begin`, for so many ranks, whose collectives have slots of so many bytes.
    pub(crate) fn new(begin: u64, nranks: u32, lanes: u32, slot_bytes: u32) -> Self {
        let slot_bytes = slot_bytes.max(SLOT_BYTES_MIN);
        let peers = nranks.max(2) - 1;
        let slots = u64::from(peers) * u64::from(lanes) * u64::from(SLOTS);
        let lanes_offset = begin.next_multiple_of(PAGE_BYTES);
        let ll_offset = lanes_offset + RANKS_MAX as u64 * u64::from(LANES_MAX) * LANE_BYTES;
        let packets_bytes = slots * (HEADER_BYTES + 2 * u64::from(PART_BYTES));
        let simple_offset = (ll_offset + packets_bytes).next_multiple_of(PAGE_BYTES);
        let end = simple_offset + slots * u64::from(slot_bytes);
        P2pLayout { lanes, slot_bytes, lanes_offset, ll_offset, simple_offset, end }
    }
}

/// The part of a message that goes through a lane, and how: the mirror of `Share` in p2p.cuh, for as much as the host
/// must know of it.
fn lanes_of(bytes: u64, lanes: u32) -> u32 {
    if bytes > u64::from(lanes) * u64::from(PART_BYTES) {
        return lanes;
    }
    (bytes.div_ceil(u64::from(SPREAD_BYTES)) as u32).clamp(1, lanes)
}

/// A group's launch, with the shorter parameter where it does.
#[allow(clippy::large_enum_variant, reason = "the large one is what nearly all calls make, and must not allocate")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum P2pLaunch {
    /// Up to some messages.
    Few(Launch<P2pArgs<MESSAGES_FEW>>),
    /// Up to [`MESSAGES_MAX`].
    Many(Box<Launch<P2pArgs<MESSAGES_MAX>>>),
}

impl P2pLaunch {
    /// The launch of `rank` for a group. Messages of one direction and peer keep their order.
    ///
    /// # Errors
    /// [`P2pError`].
    pub fn new(p2p: &[P2pMessage], layout: &SymmetricBufferLayout, rank: u32, nranks: u32) -> Result<Self, P2pError> {
        if p2p.len() > MESSAGES_MAX {
            return Err(P2pError::TooMany { count: p2p.len() });
        }
        for message in p2p {
            if message.peer >= nranks.min(RANKS_MAX as u32) {
                return Err(P2pError::NoPeer { peer: message.peer, nranks });
            }
            if message.bytes >= MESSAGE_BYTES_MAX {
                return Err(P2pError::TooLong { bytes: message.bytes });
            }
        }
        pairs_with_oneself(p2p, rank)?;
        let Shaped { head, grid, block } = head(p2p, layout, rank, nranks);
        if p2p.len() <= MESSAGES_FEW {
            let args = P2pArgs { head, messages: messages(p2p) };
            return Ok(P2pLaunch::Few(Launch { function: FUNCTIONS[0], grid, block, args }));
        }
        let args = P2pArgs { head, messages: messages(p2p) };
        Ok(P2pLaunch::Many(Box::new(Launch { function: FUNCTIONS[1], grid, block, args })))
    }

    /// One that nobody launches, of the kernel for few messages: for what is made ready before there is a group.
    #[must_use]
    pub fn placeholder() -> Launch<P2pArgs<MESSAGES_FEW>> {
        let Shaped { head, grid, block } = head(&[], &SymmetricBufferLayout::initial(2), 0, 2);
        Launch { function: FUNCTIONS[0], grid, block, args: P2pArgs { head, messages: messages(&[]) } }
    }

    /// Fields to be filled in before the launch.
    pub fn head_mut(&mut self) -> &mut P2pHead {
        match self {
            P2pLaunch::Few(launch) => &mut launch.args.head,
            P2pLaunch::Many(launch) => &mut launch.args.head,
        }
    }
}

/// Names of the kernels, for few and for many messages.
pub(super) const FUNCTIONS: [&str; 2] = ["mccs_p2p_few", "mccs_p2p_many"];

/// In the order of the parameter: sends, then receives, each by peer.
fn place(message: &P2pMessage) -> usize {
    message.peer as usize + if message.is_send { 0 } else { RANKS_MAX }
}

fn header(message: &P2pMessage) -> u64 {
    message.bytes | u64::from(message.dtype as u32) << 56
}

/// A message of a rank to itself.
#[derive(Debug, Clone, Copy)]
pub struct OwnMessage {
    /// As it is sent.
    pub send: P2pMessage,
    /// As it is received.
    pub recv: P2pMessage,
}

/// The messages of a group that a rank sends to itself.
///
/// # Errors
/// [`P2pError::OwnUnmatched`].
pub fn pairs_with_oneself(p2p: &[P2pMessage], rank: u32) -> Result<Vec<OwnMessage>, P2pError> {
    let own = |is_send| p2p.iter().copied().filter(move |message| message.peer == rank && message.is_send == is_send);
    let (sends, recvs) = (own(true).count(), own(false).count());
    let pairs = own(true).zip(own(false)).map(|(send, recv)| OwnMessage { send, recv });
    let pairs: Vec<_> = pairs.take_while(|own| header(&own.send) == header(&own.recv)).collect();
    if pairs.len() == sends && pairs.len() == recvs {
        return Ok(pairs);
    }
    Err(P2pError::OwnUnmatched { sends, recvs, number: pairs.len() + 1 })
}

fn messages<const COUNT: usize>(p2p: &[P2pMessage]) -> [Message; COUNT] {
    let mut messages = [Message { buffer: 0, header: 0 }; COUNT];
    let ordered = (0..2 * RANKS_MAX).flat_map(|at| p2p.iter().filter(move |message| place(message) == at));
    for (slot, message) in messages.iter_mut().zip(ordered) {
        *slot = Message { buffer: message.buffer, header: header(message) };
    }
    messages
}

/// A launch without its messages.
struct Shaped {
    head: P2pHead,
    grid: u32,
    block: u32,
}

fn head(p2p: &[P2pMessage], layout: &SymmetricBufferLayout, rank: u32, nranks: u32) -> Shaped {
    let lanes = layout.p2p();
    let mut head = P2pHead {
        symmetric: [0; RANKS_MAX],
        abort_word: 0,
        fault: 0,
        lanes_offset: lanes.lanes_offset,
        ll_offset: lanes.ll_offset,
        simple_offset: lanes.simple_offset,
        sent_bytes: p2p.iter().filter(|message| message.is_send).map(|message| message.bytes).sum(),
        rank,
        nranks,
        lanes: lanes.lanes,
        slots: SLOTS,
        slot_bytes: lanes.slot_bytes,
        part_bytes: PART_BYTES,
        spread_bytes: SPREAD_BYTES,
        reserved: 0,
        first: [0; 2 * RANKS_MAX + 2],
        blocks: [0; RANKS_MAX],
    };
    let mut is_short = true;
    for message in p2p {
        head.first[place(message) + 1] += 1;
        let wanted = lanes_of(message.bytes, lanes.lanes);
        let blocks = &mut head.blocks[message.peer as usize];
        *blocks = (*blocks).max(wanted);
        is_short &= message.bytes <= u64::from(wanted) * u64::from(SPREAD_BYTES);
    }
    for at in 1..head.first.len() {
        head.first[at] += head.first[at - 1];
    }
    let grid = head.blocks.iter().sum();
    Shaped { head, grid, block: if is_short { THREADS_SHORT } else { THREADS } }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(is_send: bool, peer: u32, bytes: u64) -> P2pMessage {
        P2pMessage { is_send, peer, buffer: 0x1000 + bytes, bytes, dtype: DataType::U8 }
    }

    fn few(p2p: &[P2pMessage], rank: u32, nranks: u32) -> Launch<P2pArgs<MESSAGES_FEW>> {
        match P2pLaunch::new(p2p, &SymmetricBufferLayout::initial(nranks), rank, nranks).expect("a launch") {
            P2pLaunch::Few(launch) => launch,
            P2pLaunch::Many(_) => panic!("many"),
        }
    }

    #[test]
    fn lists_are_by_direction_and_peer_and_keep_their_order() {
        let p2p =
            [message(false, 2, 5), message(true, 1, 3), message(true, 0, 1), message(true, 1, 2), message(false, 0, 4)];
        let launch = few(&p2p, 3, 4);
        let head = launch.args.head;
        let bytes = |from: usize, to: usize| -> Vec<u64> {
            launch.args.messages[head.first[from] as usize..head.first[to] as usize]
                .iter()
                .map(|m| m.buffer - 0x1000)
                .collect()
        };
        assert_eq!([bytes(0, 1), bytes(1, 2), bytes(2, 8)], [vec![1], vec![3, 2], vec![]]);
        assert_eq!([bytes(8, 9), bytes(9, 10), bytes(10, 11), bytes(11, 17)], [vec![4], vec![], vec![5], vec![]]);
        assert_eq!((launch.grid, launch.block, head.blocks), (3, THREADS_SHORT, [1, 1, 1, 0, 0, 0, 0, 0]));
        assert_eq!((head.first[RANKS_MAX], head.sent_bytes), (3, 6));
    }

    #[test]
    fn long_messages_take_all_lanes_and_short_ones_few() {
        for nranks in 2..=8 {
            let lanes = SymmetricBufferLayout::initial(nranks).p2p().lanes;
            assert_eq!(lanes, [64, 64, 43, 32, 26, 21, 18][nranks as usize - 2]);
            for power in 0..40 {
                let bytes = (1_u64 << power) + 3;
                let launch = few(&[message(true, 1, bytes)], 0, nranks);
                assert_eq!(launch.grid, lanes_of(bytes, lanes));
                assert!(launch.grid == lanes || u64::from(launch.grid) * u64::from(PART_BYTES) >= bytes);
            }
            assert_eq!(few(&[message(true, 1, 0)], 0, nranks).grid, 1, "a header goes in any case");
        }
    }

    #[test]
    fn what_lies_in_a_symmetric_buffer_does_not_overlap() {
        let layouts = (2..=8).map(SymmetricBufferLayout::initial);
        for layout in layouts.clone().chain(layouts.map(|layout| layout.with_chunk(64 << 10))) {
            let (p2p, nranks) = (layout.p2p(), layout.nranks);
            let rings = u64::from(nranks - 1) * u64::from(p2p.lanes) * u64::from(SLOTS);
            assert!(p2p.lanes_offset >= layout.simple_offset());
            assert!(p2p.ll_offset - p2p.lanes_offset >= 8 * u64::from(LANES_MAX) * LANE_BYTES);
            assert!(p2p.simple_offset - p2p.ll_offset >= rings * (HEADER_BYTES + 2 * u64::from(PART_BYTES)));
            assert_eq!(
                layout.bytes(),
                (p2p.simple_offset + rings * u64::from(p2p.slot_bytes)).next_multiple_of(2 << 20)
            );
            assert!(p2p.slot_bytes >= layout.slot_bytes && p2p.slot_bytes.is_multiple_of(128));
            assert!(SLOTS.is_power_of_two() && PART_BYTES.is_multiple_of(16));
        }
    }

    #[test]
    fn groups_that_cannot_be_are_refused() {
        let layout = SymmetricBufferLayout::initial(2);
        let launch = |p2p: &[P2pMessage]| P2pLaunch::new(p2p, &layout, 0, 2).map(drop);
        assert_eq!(launch(&[message(true, 2, 1)]), Err(P2pError::NoPeer { peer: 2, nranks: 2 }));
        assert_eq!(launch(&[message(true, 1, 1 << 56)]), Err(P2pError::TooLong { bytes: 1 << 56 }));
        assert_eq!(launch(&vec![message(true, 1, 1); 1025]), Err(P2pError::TooMany { count: 1025 }));
        assert_eq!(launch(&vec![message(true, 1, 1); 1024]), Ok(()));
        let unmatched = |sends, recvs, number| Err(P2pError::OwnUnmatched { sends, recvs, number });
        assert_eq!(launch(&[message(true, 0, 1)]), unmatched(1, 0, 1));
        assert_eq!(launch(&[message(true, 0, 1), message(false, 0, 1), message(false, 0, 2)]), unmatched(1, 2, 2));
        assert_eq!(launch(&[message(true, 0, 1), message(false, 0, 2)]), unmatched(1, 1, 1));
        assert_eq!(launch(&[message(false, 0, 7), message(true, 0, 7)]), Ok(()));
    }

    #[test]
    fn headers_are_read_back() {
        let of = P2pMessage { dtype: DataType::F8E5M2, ..message(true, 0, 123) };
        assert_eq!(header_parts(header(&of)), Some((123, DataType::F8E5M2)));
        assert_eq!(header_parts(u64::MAX), None);
        let float = header(&P2pMessage { dtype: DataType::F32, bytes: 40, ..of });
        let said = contradiction(1, header(&of), 0, float);
        assert_eq!(
            said,
            format!(
                "rank 1 sends 123 elements of {} to rank 0, which receives 10 elements of {}",
                DataType::F8E5M2,
                DataType::F32
            )
        );
    }
}
