//! Shared-memory exchange: slots in which a communicator's ranks on one host hand each other small
//! contributions, and the signature of their call. The exchange has no process hop.
//!
//! A *round* is one small collective. Every rank posts its contribution under the round's number, waits until all have,
//! and makes its own result from what the others posted. A rank plays its part itself, in the caller's thread, or has the
//! service play it; the others cannot tell the difference.
//!
//! ```text
//! header | rank 0: progress, post (even rounds), post (odd rounds), stamps | rank 1: ...
//! ```
//!
//! Two posts a rank suffice: who posts round n + 1 has ended round n, so all had posted n, so all had ended n - 1, whose
//! posts are the ones now overwritten. Rounds are numbered from 1.
//!
//! In one round of sixteen each rank says when it posted and when it had its result, in a *stamp*: to look at the clock in all of them
//! would cost some percents of the shortest.
//!
//! Content of a shared-memory exchange was written by processes of one tenant, and can be anything: readers get numbers and bytes, never
//! an address or a length to rely on.

use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use crate::shm::{Mapping, ShmError};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use crate::types::{CollectiveKind, DataType, RedOp, WorkDone};

/// Most ranks of a shared-memory exchange: every rank reads what all others post, so the work grows with the square.
pub const SHM_EXCHANGE_RANKS_MAX: u32 = 16;
/// A rank leaves stamps of rounds whose numbers are multiples of this, as all ranks do.
const STAMPED_EVERY: u64 = 16;
/// Stamps of a rank: the last ones.
const STAMPS: u64 = 32;
/// First cache line of a post: its numbers, and contributions that fit beside them. Longer ones follow behind.
const LINE_BYTES: usize = 64;
/// Longest contribution beside the numbers.
const INLINE_BYTES: usize = LINE_BYTES - size_of::<Post>();

/// Shape of a shared-memory exchange, as tenants learn it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShmExchangeLayout {
    /// Ranks.
    pub nranks: u32,
    /// Most bytes of a contribution.
    pub slot_bytes: u32,
}

/// A collective as all ranks must call it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectiveSignature {
    /// The collective.
    pub kind: CollectiveKind,
    /// Element type.
    pub dtype: DataType,
    /// Reduction; [`RedOp::Sum`] where the collective has none.
    pub redop: RedOp,
    /// Root; 0 where the collective has none.
    pub root: u32,
    /// Elements, by the collective's rule.
    pub count: u64,
}

impl ShmExchangeLayout {
    fn post_bytes(self) -> u64 {
        (LINE_BYTES as u64 + u64::from(self.slot_bytes)).next_multiple_of(128)
    }

    fn rank_bytes(self) -> u64 {
        self.stamps_offset() + STAMPS * size_of::<StampWords>() as u64
    }

    fn stamps_offset(self) -> u64 {
        size_of::<Progress>() as u64 + 2 * self.post_bytes()
    }

    /// Size of the whole shared-memory exchange.
    #[must_use]
    pub fn bytes(self) -> u64 {
        size_of::<Header>() as u64 + u64::from(self.nranks) * self.rank_bytes()
    }

    /// Whether a collective is a round of the shared-memory exchange. All ranks, and the service, decide alike.
    #[must_use]
    pub fn takes(self, call: &CollectiveSignature) -> bool {
        // The root's contribution is the longest.
        let count = call.kind.send_count(call.count, self.nranks, call.root, call.root);
        let bytes = count.and_then(|count| count.checked_mul(call.dtype.size_bytes() as u64));
        bytes.is_some_and(|bytes| bytes <= u64::from(self.slot_bytes))
    }
}

impl CollectiveSignature {
    /// A call, without what does not matter for its collective.
    #[must_use]
    pub fn new(kind: CollectiveKind, dtype: DataType, redop: RedOp, root: u32, count: u64) -> Self {
        let redop = if kind.reduces() { redop } else { RedOp::Sum };
        let root = if kind.has_root() { root } else { 0 };
        CollectiveSignature { kind, dtype, redop, root, count }
    }

    /// One number for a call that a shared-memory exchange takes: different calls have different numbers.
    #[must_use]
    pub fn to_wire(&self) -> u64 {
        let fields = [self.kind.to_wire(), self.dtype.to_wire(), self.redop.to_wire()];
        let head = fields.iter().fold(0, |bits, field| bits << 4 | u64::from(field & 15));
        head << 52 | u64::from(self.root & 0xffff) << 36 | (self.count & 0xf_ffff_ffff)
    }

    /// The call with a number, or `None` where it names none.
    #[must_use]
    pub fn from_wire(bits: u64) -> Option<Self> {
        let field = |shift: u32| (bits >> shift & 15) as u32;
        let (kind, dtype) = (CollectiveKind::from_wire(field(60))?, DataType::from_wire(field(56))?);
        let (redop, root) = (RedOp::from_wire(field(52))?, (bits >> 36 & 0xffff) as u32);
        Some(CollectiveSignature { kind, dtype, redop, root, count: bits & 0xf_ffff_ffff })
    }

    /// Payload as nccl-tests counts it.
    #[must_use]
    pub fn payload_bytes(&self, nranks: u32) -> u64 {
        self.kind.payload_count(self.count, nranks).saturating_mul(self.dtype.size_bytes() as u64)
    }
}

#[repr(C, align(128))]
struct Header {
    /// Rounds up to this number may be played by the ranks themselves. Written by the service.
    allowed: AtomicU64,
    /// 1 while the service waits for a post and wants to be told of it.
    news_wanted: AtomicU32,
}

/// How far a rank is, for the operator. Written by whoever plays the rank, read by nobody else on the data path.
#[repr(C, align(128))]
struct Progress {
    completed: AtomicU64,
    payload_bytes: AtomicU64,
}

/// Numbers of a contribution.
#[repr(C)]
struct Post {
    round: AtomicU64,
    call: AtomicU64,
    scalar_bits: AtomicU64,
}

/// When a round was a rank's. The word that is written last is the end.
#[repr(C)]
struct StampWords {
    round: AtomicU64,
    call: AtomicU64,
    posted_ns: AtomicU64,
    ended_ns: AtomicU64,
}

const _: () = assert!(size_of::<Header>() == 128 && size_of::<Progress>() == 128 && size_of::<StampWords>() == 32);

/// When a rank posted to a round, and when it had its result: one clock's nanoseconds, the same for all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundStamp {
    /// [`CollectiveSignature::to_wire`] of its call.
    pub call: u64,
    /// When others could see what it posted.
    pub posted_ns: u64,
    /// When it had its result.
    pub ended_ns: u64,
}

fn clock_ns() -> u64 {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

/// A rank's contribution. Whoever wrote it may be changing it.
#[derive(Debug, Clone, Copy)]
pub struct Contribution {
    /// [`CollectiveSignature::to_wire`] of its call.
    pub call: u64,
    /// Its scalar of a pre-multiplied sum.
    pub scalar_bits: u64,
    /// First byte; as many may be read from there as the reader said.
    pub data: *const u8,
}

/// A mapped shared-memory exchange.
#[derive(Debug)]
pub struct ShmExchange {
    mapping: Mapping,
    layout: ShmExchangeLayout,
}

impl ShmExchange {
    /// A new shared-memory exchange.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn create(layout: ShmExchangeLayout) -> Result<(OwnedFd, Self), ShmError> {
        let (fd, mapping) = Mapping::create("mccs-shm-exchange", layout.bytes())?;
        let shm_exchange = ShmExchange { mapping, layout };
        shm_exchange.allow(u64::MAX);
        Ok((fd, shm_exchange))
    }

    /// Gives its pages back, whoever else has them mapped: there it is a shared-memory exchange that allows nothing from now on.
    pub fn give_back(&self) {
        self.mapping.give_back();
    }

    /// Maps a shared-memory exchange that somebody else made.
    ///
    /// # Errors
    /// As [`Mapping::map`].
    pub fn map(fd: BorrowedFd<'_>, layout: ShmExchangeLayout) -> Result<Self, ShmError> {
        Ok(ShmExchange { mapping: Mapping::map(fd, layout.bytes())?, layout })
    }

    /// Its shape.
    #[must_use]
    pub fn layout(&self) -> ShmExchangeLayout {
        self.layout
    }

    fn at<T>(&self, offset_bytes: u64) -> &T {
        let ptr = self.mapping.as_ptr().wrapping_add(offset_bytes as usize).cast::<T>();
        debug_assert!(ptr.is_aligned() && offset_bytes + size_of::<T>() as u64 <= self.layout.bytes());
        // SAFETY: private callers name header, progress and posts of ranks below `nranks`: aligned, inside the mapping,
        // and made of atomics.
        unsafe { &*ptr }
    }

    fn header(&self) -> &Header {
        self.at(0)
    }

    fn rank_offset(&self, rank: u32) -> u64 {
        assert!(rank < self.layout.nranks, "rank {rank} of a shared-memory exchange of {}", self.layout.nranks);
        size_of::<Header>() as u64 + u64::from(rank) * self.layout.rank_bytes()
    }

    fn progress(&self, rank: u32) -> &Progress {
        self.at(self.rank_offset(rank))
    }

    fn post_offset(&self, rank: u32, round: u64) -> u64 {
        self.rank_offset(rank) + size_of::<Progress>() as u64 + (round & 1) * self.layout.post_bytes()
    }

    fn post_of(&self, rank: u32, round: u64) -> &Post {
        self.at(self.post_offset(rank, round))
    }

    fn stamp_words(&self, rank: u32, round: u64) -> &StampWords {
        let place = round / STAMPED_EVERY % STAMPS * size_of::<StampWords>() as u64;
        self.at(self.rank_offset(rank) + self.layout.stamps_offset() + place)
    }

    fn data(&self, rank: u32, round: u64, bytes: usize) -> *mut u8 {
        assert!(bytes <= self.layout.slot_bytes as usize, "{bytes} bytes in a slot");
        let behind = if bytes <= INLINE_BYTES { size_of::<Post>() } else { LINE_BYTES };
        self.mapping.as_ptr().wrapping_add(self.post_offset(rank, round) as usize + behind)
    }

    /// Rounds up to this number may be played by the ranks themselves.
    #[must_use]
    pub fn allowed(&self) -> u64 {
        self.header().allowed.load(Ordering::Acquire)
    }

    /// Sets how far ranks may go by themselves; 0 closes the shared-memory exchange. Called by the service.
    pub fn allow(&self, rounds: u64) {
        self.header().allowed.store(rounds, Ordering::Release);
    }

    /// Posts a rank's contribution to a round: `bytes` from `src` on. Returns whether the service wants to be told, which
    /// it then counts on.
    ///
    /// # Safety
    /// `src` must be readable for `bytes`.
    ///
    /// # Panics
    /// If `bytes` is more than a slot holds, or the shared-memory exchange has no such rank.
    #[must_use = "the service waits for the news"]
    pub unsafe fn post(
        &self,
        rank: u32,
        round: u64,
        call: &CollectiveSignature,
        scalar_bits: u64,
        src: *const u8,
        bytes: usize,
    ) -> bool {
        // SAFETY: the caller vouches for the source, and the slot has room.
        unsafe { std::ptr::copy_nonoverlapping(src, self.data(rank, round, bytes), bytes) };
        let post = self.post_of(rank, round);
        post.call.store(call.to_wire(), Ordering::Relaxed);
        post.scalar_bits.store(scalar_bits, Ordering::Relaxed);
        post.round.store(round, Ordering::Release);
        if round.is_multiple_of(STAMPED_EVERY) {
            let stamp = self.stamp_words(rank, round);
            stamp.ended_ns.store(0, Ordering::Relaxed);
            stamp.call.store(call.to_wire(), Ordering::Relaxed);
            stamp.posted_ns.store(clock_ns(), Ordering::Relaxed);
            stamp.round.store(round, Ordering::Relaxed);
        }
        self.is_news()
    }

    fn is_news(&self) -> bool {
        notice(&self.header().news_wanted)
    }

    /// Asks to be told of the next post. The caller then looks at the posts once more. Called by the service.
    pub fn want_news(&self) {
        want(&self.header().news_wanted);
    }

    /// A rank's contribution to a round in which that rank has `bytes`.
    ///
    /// # Panics
    /// If `bytes` is more than a slot holds, or the shared-memory exchange has no such rank.
    #[must_use]
    pub fn contribution(&self, rank: u32, round: u64, bytes: usize) -> Option<Contribution> {
        let post = self.post_of(rank, round);
        (post.round.load(Ordering::Acquire) == round).then(|| Contribution {
            call: post.call.load(Ordering::Relaxed),
            scalar_bits: post.scalar_bits.load(Ordering::Relaxed),
            data: self.data(rank, round, bytes),
        })
    }

    /// Whether a rank has posted to a round.
    ///
    /// # Panics
    /// If the shared-memory exchange has no such rank.
    #[must_use]
    pub fn has_posted(&self, rank: u32, round: u64) -> bool {
        self.post_of(rank, round).round.load(Ordering::Acquire) == round
    }

    /// The last round that a rank has posted to.
    ///
    /// # Panics
    /// If the shared-memory exchange has no such rank.
    #[must_use]
    pub fn posted(&self, rank: u32) -> u64 {
        let round = |round| self.post_of(rank, round).round.load(Ordering::Relaxed);
        round(0).max(round(1))
    }

    /// A rank has ended a round.
    ///
    /// # Panics
    /// If the shared-memory exchange has no such rank.
    pub fn complete(&self, rank: u32, round: u64, payload_bytes: u64) {
        let progress = self.progress(rank);
        let bytes = progress.payload_bytes.load(Ordering::Relaxed).wrapping_add(payload_bytes);
        progress.payload_bytes.store(bytes, Ordering::Relaxed);
        if round.is_multiple_of(STAMPED_EVERY) {
            self.stamp_words(rank, round).ended_ns.store(clock_ns(), Ordering::Release);
        }
        progress.completed.store(round, Ordering::Relaxed);
    }

    /// When a round was a rank's, if it has ended there, is one of those with stamps, and among the last of them.
    ///
    /// # Panics
    /// If the shared-memory exchange has no such rank.
    #[must_use]
    pub fn stamp(&self, rank: u32, round: u64) -> Option<RoundStamp> {
        let StampWords { round: of, call, posted_ns, ended_ns } = self.stamp_words(rank, round);
        let ended_ns = ended_ns.load(Ordering::Acquire);
        let stamp =
            RoundStamp { call: call.load(Ordering::Relaxed), posted_ns: posted_ns.load(Ordering::Relaxed), ended_ns };
        (of.load(Ordering::Relaxed) == round && ended_ns != 0).then_some(stamp)
    }

    /// Rounds whose stamps may be there, of those after `seen`, when so many have ended.
    pub fn stamped(seen: u64, ended: u64) -> impl Iterator<Item = u64> {
        let last = ended / STAMPED_EVERY;
        let first = (seen / STAMPED_EVERY).max(last.saturating_sub(STAMPS)) + 1;
        (first..=last).map(|place| place * STAMPED_EVERY)
    }

    /// Rounds that a rank has ended, and their payload.
    ///
    /// # Panics
    /// If the shared-memory exchange has no such rank.
    #[must_use]
    pub fn completed(&self, rank: u32) -> WorkDone {
        let Progress { completed, payload_bytes } = self.progress(rank);
        WorkDone { operations: completed.load(Ordering::Relaxed), bytes: payload_bytes.load(Ordering::Relaxed) }
    }
}

/// The service's half of telling it of posts: it asks, then looks at the posts once more.
fn want(flag: &AtomicU32) {
    flag.store(1, Ordering::Relaxed);
    // Pairs with the fence in `notice`: either the caller's next look sees the post, or the poster sees the wish.
    fence(Ordering::SeqCst);
}

/// The ranks' half: after a post, whether this rank is the one to tell the service.
fn notice(flag: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::Relaxed) != 0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LAYOUT: ShmExchangeLayout = ShmExchangeLayout { nranks: 3, slot_bytes: 1000 };

    #[test]
    fn calls_have_numbers_of_their_own() {
        let calls = [
            CollectiveSignature::new(CollectiveKind::AllReduce, DataType::F32, RedOp::Max, 0, 7),
            CollectiveSignature::new(CollectiveKind::AllReduce, DataType::F32, RedOp::Sum, 0, 7),
            CollectiveSignature::new(CollectiveKind::Broadcast, DataType::F8E5M2, RedOp::Sum, 15, 1 << 20),
            CollectiveSignature::new(CollectiveKind::Broadcast, DataType::F8E5M2, RedOp::Sum, 14, 1 << 20),
            CollectiveSignature::new(CollectiveKind::Barrier, DataType::U8, RedOp::Sum, 0, 0),
        ];
        for (i, call) in calls.iter().enumerate() {
            assert_eq!(CollectiveSignature::from_wire(call.to_wire()), Some(*call));
            assert!(calls[..i].iter().all(|other| other.to_wire() != call.to_wire()));
        }
        assert_eq!(CollectiveSignature::from_wire(u64::MAX), None);
    }

    #[test]
    fn what_does_not_matter_does_not_differ() {
        let broadcast = |redop| CollectiveSignature::new(CollectiveKind::Broadcast, DataType::I8, redop, 1, 3);
        assert_eq!(broadcast(RedOp::Max), broadcast(RedOp::Min));
        let gather = |root| CollectiveSignature::new(CollectiveKind::AllGather, DataType::I8, RedOp::Sum, root, 3);
        assert_eq!(gather(1), gather(2));
    }

    #[test]
    fn the_longest_contribution_decides() {
        let takes = |kind, count| LAYOUT.takes(&CollectiveSignature::new(kind, DataType::F32, RedOp::Sum, 2, count));
        assert!(takes(CollectiveKind::AllReduce, 250) && !takes(CollectiveKind::AllReduce, 251));
        assert!(takes(CollectiveKind::AllToAll, 83) && !takes(CollectiveKind::AllToAll, 84));
        assert!(takes(CollectiveKind::Broadcast, 250) && !takes(CollectiveKind::Broadcast, 251));
        assert!(takes(CollectiveKind::Barrier, 0));
        assert!(!takes(CollectiveKind::AllToAll, u64::MAX) && !takes(CollectiveKind::AllReduce, u64::MAX / 2));
    }

    #[test]
    fn contributions_are_seen_by_all_and_kept_for_two_rounds() {
        use std::os::fd::AsFd;
        let (fd, ours) = ShmExchange::create(LAYOUT).expect("a shared-memory exchange");
        let theirs = ShmExchange::map(fd.as_fd(), LAYOUT).expect("the same shared-memory exchange");
        let call = CollectiveSignature::new(CollectiveKind::AllReduce, DataType::U8, RedOp::Sum, 0, 1000);
        for (round, bytes) in [(1, 1000), (2, 40), (3, 41), (4, 0), (5, 1)] {
            for rank in 0..3 {
                assert!(!theirs.has_posted(rank, round) && theirs.contribution(rank, round, bytes).is_none());
                let data = vec![round as u8 * 16 + rank as u8; bytes];
                // SAFETY: the vector has that length.
                let news = unsafe { ours.post(rank, round, &call, round + 7, data.as_ptr(), bytes) };
                assert!(!news, "nobody asked");
                let posted = theirs.contribution(rank, round, bytes).expect("posted");
                assert_eq!((posted.call, posted.scalar_bits), (call.to_wire(), round + 7));
                // SAFETY: nobody writes meanwhile.
                assert_eq!(unsafe { std::slice::from_raw_parts(posted.data, bytes) }, data);
                assert!(round == 1 || theirs.has_posted(rank, round - 1));
                assert_eq!(theirs.posted(rank), round);
            }
        }
        ours.complete(1, 5, 100);
        ours.complete(1, 6, 11);
        let done = WorkDone { operations: 6, bytes: 111 };
        assert_eq!([1, 0].map(|rank| theirs.completed(rank)), [done, WorkDone::default()]);
        assert_eq!(theirs.allowed(), u64::MAX);
        ours.allow(0);
        assert_eq!(theirs.allowed(), 0);
    }

    #[test]
    fn one_round_in_sixteen_has_stamps() {
        let (_fd, shm_exchange) = ShmExchange::create(LAYOUT).expect("a shared-memory exchange");
        let call = CollectiveSignature::new(CollectiveKind::AllReduce, DataType::U8, RedOp::Sum, 0, 1);
        for round in 1..=1000 {
            for rank in 0..3 {
                // SAFETY: one byte is read.
                let _ = unsafe { shm_exchange.post(rank, round, &call, 0, b"1".as_ptr(), 1) };
            }
            assert_eq!(shm_exchange.stamp(1, round), None, "it has not ended");
            shm_exchange.complete(1, round, 1);
            let stamp = shm_exchange.stamp(1, round);
            assert_eq!(stamp.is_some(), round % 16 == 0);
            assert!(stamp.is_none_or(|stamp| stamp.call == call.to_wire() && stamp.posted_ns <= stamp.ended_ns));
        }
        assert_eq!(shm_exchange.stamp(1, 16), None, "others have its place");
        assert_eq!(shm_exchange.stamp(0, 992), None, "only rank 1 has ended any");
        assert_eq!(
            ShmExchange::stamped(0, 1000).collect::<Vec<_>>(),
            (31..=62).map(|place| place * 16).collect::<Vec<_>>()
        );
        assert!(ShmExchange::stamped(0, 1000).all(|round| shm_exchange.stamp(1, round).is_some()));
        assert_eq!(ShmExchange::stamped(40, 64).collect::<Vec<_>>(), [48, 64]);
        assert_eq!(
            ShmExchange::stamped(64, 70).count()
                + ShmExchange::stamped(0, 15).count()
                + ShmExchange::stamped(9, 0).count(),
            0
        );
    }

    #[test]
    fn the_service_is_told_once_of_what_it_asked_for() {
        let (_fd, shm_exchange) = ShmExchange::create(LAYOUT).expect("a shared-memory exchange");
        let call = CollectiveSignature::new(CollectiveKind::Barrier, DataType::U8, RedOp::Sum, 0, 0);
        // SAFETY: nothing is read.
        let post = |rank| unsafe { shm_exchange.post(rank, 1, &call, 0, std::ptr::dangling(), 0) };
        shm_exchange.want_news();
        assert!(post(0));
        assert!(!post(1));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;

    use super::*;

    /// A post that comes while the service goes to sleep: it sees it, or is told.
    #[test]
    fn loom_no_post_is_overlooked() {
        loom::model(|| {
            let cells = Arc::new((AtomicU64::new(0), AtomicU32::new(0)));
            let poster = {
                let cells = Arc::clone(&cells);
                loom::thread::spawn(move || {
                    cells.0.store(1, Ordering::Release);
                    notice(&cells.1)
                })
            };
            want(&cells.1);
            let seen = cells.0.load(Ordering::Acquire) == 1;
            let told = poster.join().expect("poster");
            assert!(seen || told);
        });
    }
}
