//! Device-initiated communicators, the service's side: control page, strategies, memory held, times
//! of calls, faults.
//!
//! Kernels in the ranks' own streams do the work, by the strategy that the service publishes on the group's page. The service allocates
//! what they meet in, reads how far they are, and stops them. Large operations go by the group's copy engines, which the service runs.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use mccs_ipc::device_initiated::{CommPart, ControlPage, DEVICE_INITIATED_RANKS_MAX, SymmetricBufferHandle};
use mccs_ipc::types::{ErrorClass, Handle, WorkDone};
use mccs_kernels::cuda::SymmetricBufferCounts;
use mccs_model::SetupError;

use crate::cuda::{CopyEngines, GpuRegion, PauseMeter, Strategies};
use crate::durations::{Reading, Times};

/// The memory in which ranks of a group meet: kept until all ranks have left.
pub trait SymmetricBuffers: Send + Sync {
    /// Reads how far each rank is, as soon as may be, and [tells](Ended::tell). Returns at once.
    fn read(&self, ended: &Arc<Ended>);

    /// The same, and calls `then` behind it, on whatever thread.
    fn read_at_last(&self, ended: &Arc<Ended>, then: Box<dyn FnOnce() + Send>) {
        self.read(ended);
        then();
    }

    /// All ranks have left in order: nothing of theirs runs, and what is here may be used again when this is dropped.
    fn left(&self) {}

    /// Descriptors that are made for a rank which opens a part, at most.
    fn descriptors_of(&self, _part: CommPart) -> u64 {
        0
    }

    /// Makes memory that a rank uses first, and answers on whatever thread. Returns at once.
    fn open(&self, part: OpenPart) {
        let message = "the communicator has no memory that is made at first use".into();
        (part.reply)(Err(SetupError { class: ErrorClass::InvalidArgument, message }));
    }

    /// Opens a rank's memory where the communicator's ranks copy from it and to it, and answers on whatever thread. Returns at once.
    fn open_memory(&self, memory: OpenMemory) {
        let message = "the communicator has no GPUs".into();
        (memory.reply)(Err(SetupError { class: ErrorClass::InvalidArgument, message }));
    }

    /// GPU memory that a rank's part of the communicator takes now.
    fn held_bytes(&self, _rank: usize) -> HeldBytes {
        HeldBytes::default()
    }
}

/// A rank's wish to open memory that is made at first use.
pub struct OpenPart {
    /// The communicator, which ends where there is no room.
    pub comm: Handle,
    /// The caller.
    pub rank: usize,
    /// For what.
    pub part: CommPart,
    /// Told once.
    pub reply: Box<dyn FnOnce(Result<OpenedPart, SetupError>) + Send>,
}

/// A rank's memory that port channels are to put from and into.
pub struct OpenMemory {
    /// It.
    pub region: Arc<GpuRegion>,
    /// Told once.
    pub reply: Box<dyn FnOnce(Result<(), SetupError>) + Send>,
}

/// How a rank opens a part of its communicator's memory.
#[derive(Debug)]
pub struct OpenedPart {
    /// One for each symmetric buffer.
    pub handles: Vec<SymmetricBufferHandle>,
    /// Descriptors of those that are opened by them.
    pub fds: Vec<OwnedFd>,
}

/// GPU memory of one rank's part of a communicator, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeldBytes {
    /// Its symmetric buffer.
    pub buffers: u64,
    /// Its own slots of copy engines.
    pub own_slots: u64,
    /// Slots that it shares with the tenant's other communicators on that GPU.
    pub shared_slots: u64,
    /// Between so many communicators.
    pub sharing: u32,
}

impl HeldBytes {
    /// All of it, with this communicator's share of shared slots.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.buffers + self.own_slots + self.shared_slots / u64::from(self.sharing.max(1))
    }
}

/// Counts of one rank's GPU: operations, and groups of sends and receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted {
    /// Collectives that have ended.
    pub operations: u64,
    /// Groups that have ended.
    pub groups: u64,
    /// Payload of the collectives.
    pub payload_bytes: u64,
    /// Messages that it has sent, itself included, and their bytes.
    pub sent: WorkDone,
    /// Most messages that it has sent to one other rank; 0 while they cannot be more than [`NUMBERS_MAX`].
    pub messages: u64,
}

/// Operations that the kernels of a rank do, and messages that they send to another, before the communicator has to end: they are numbered by 32 bits, and
/// graphs that are replayed go on between two looks. At a third of a microsecond each these are 40 seconds.
pub const NUMBERS_MAX: u64 = (1 << 32) - (1 << 27);

/// Executor of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CarriedOutBy {
    /// Ranks' kernels.
    Kernels,
    /// The service's copy engines, and kernels that combine what they bring.
    CopyEngines,
}

/// How many operations have begun, which are launched or handed out, and how many of them have ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OperationCounts {
    /// So many have begun.
    pub begun: u64,
    /// So many have ended.
    pub ended: u64,
}

impl OperationCounts {
    /// Whether something has begun and not ended.
    #[must_use]
    pub fn are_open(self) -> bool {
        self.begun > self.ended
    }
}

/// Launches of ranks, and ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seen {
    /// Collectives, by rank.
    pub operations: [OperationCounts; DEVICE_INITIATED_RANKS_MAX as usize],
    /// Groups of sends and receives, by rank.
    pub groups: [OperationCounts; DEVICE_INITIATED_RANKS_MAX as usize],
}

/// How many operations of a group had ended when that was last read, which somebody has to ask for.
#[derive(Debug, Default)]
pub struct Ended {
    /// Its communicator's number, for records; 0 before it has one.
    communicator: AtomicU64,
    by_rank: [AtomicU64; DEVICE_INITIATED_RANKS_MAX as usize],
    payload_by_rank: [AtomicU64; DEVICE_INITIATED_RANKS_MAX as usize],
    groups_by_rank: [AtomicU64; DEVICE_INITIATED_RANKS_MAX as usize],
    messages_by_rank: [AtomicU64; DEVICE_INITIATED_RANKS_MAX as usize],
    sent_by_rank: [[AtomicU64; 2]; DEVICE_INITIATED_RANKS_MAX as usize],
    is_asked: AtomicBool,
    fault: OnceLock<String>,
    taken: Mutex<Taken>,
}

/// How long operations took.
#[derive(Debug)]
struct Taken {
    times: Times,
    read_at: Instant,
    /// Times that nobody has looked at yet.
    new: Reading,
    pauses: PauseMeter,
}

impl Default for Taken {
    fn default() -> Self {
        Taken {
            times: Times::default(),
            read_at: Instant::now(),
            new: Reading::default(),
            pauses: PauseMeter::default(),
        }
    }
}

impl Ended {
    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its communicator's number, for records; 0 before it has one.
    pub(crate) fn communicator(&self) -> u64 {
        self.communicator.load(Ordering::Relaxed)
    }

    /// Counts of ranks, by number, at `now`, and when a rank called its long collective of a number, as far as it told.
    pub fn note_times(
        &self,
        ranks: &[SymmetricBufferCounts],
        called_ns: impl Fn(u32, u64) -> Option<u64>,
        now: Instant,
    ) {
        let mut taken = self.taken();
        let within = now.saturating_duration_since(taken.read_at);
        let reading = taken.times.read(ranks, within);
        taken.read_at = now;
        taken.pauses.read(ranks, called_ns);
        taken.new.add(reading);
    }

    /// An answer: by rank, or why the GPU does not say.
    pub fn tell(&self, read: Result<Vec<Counted>, String>) {
        match read {
            Ok(read) => {
                for (rank, ended) in read.into_iter().enumerate().take(DEVICE_INITIATED_RANKS_MAX as usize) {
                    self.by_rank[rank].store(ended.operations, Ordering::Relaxed);
                    self.payload_by_rank[rank].store(ended.payload_bytes, Ordering::Relaxed);
                    self.groups_by_rank[rank].store(ended.groups, Ordering::Relaxed);
                    self.messages_by_rank[rank].store(ended.messages, Ordering::Relaxed);
                    let [messages, bytes] = &self.sent_by_rank[rank];
                    messages.store(ended.sent.operations, Ordering::Relaxed);
                    bytes.store(ended.sent.bytes, Ordering::Relaxed);
                }
            }
            Err(fault) => {
                let _ = self.fault.set(fault);
            }
        }
        self.is_asked.store(false, Ordering::Release);
    }
}

/// A group of ranks that run collectives themselves, in streams of their own, as the page says.
pub struct DeviceInitiatedGroup {
    strategies: Strategies,
    ended: Arc<Ended>,
    /// For what is too large for the ranks alone.
    large: Option<Arc<CopyEngines>>,
    buffers: Box<dyn SymmetricBuffers>,
}

impl DeviceInitiatedGroup {
    /// Takes charge of a page and the memory that goes with it.
    #[must_use]
    pub fn new(strategies: Strategies, large: Option<Arc<CopyEngines>>, buffers: Box<dyn SymmetricBuffers>) -> Self {
        DeviceInitiatedGroup { strategies, ended: Arc::default(), large, buffers }
    }

    /// The page that service and ranks share.
    #[must_use]
    pub fn page(&self) -> &ControlPage {
        self.strategies.page()
    }

    /// By what ranks run their operations.
    #[must_use]
    pub fn strategies(&self) -> &Strategies {
        &self.strategies
    }

    /// Asks how many operations have ended. [`DeviceInitiatedGroup::ended`] says so in a moment.
    pub fn ask(&self) {
        if !self.ended.is_asked.swap(true, Ordering::AcqRel) {
            self.buffers.read(&self.ended);
        }
    }

    /// Asks for the last time, when nothing of it runs any more: `then` is called when what it says is known.
    pub fn ask_at_last(&self, then: Box<dyn FnOnce() + Send>) {
        self.buffers.read_at_last(&self.ended, then);
    }

    /// Whether all that was asked has been answered.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        !self.ended.is_asked.load(Ordering::Acquire)
    }

    /// How many operations of a rank had ended when it was last asked.
    #[must_use]
    pub fn ended(&self, rank: u32) -> u64 {
        self.ended.by_rank.get(rank as usize).map_or(0, |ended| ended.load(Ordering::Relaxed))
    }

    /// The payload of these.
    #[must_use]
    pub fn payload_bytes(&self, rank: u32) -> u64 {
        self.ended.payload_by_rank.get(rank as usize).map_or(0, |bytes| bytes.load(Ordering::Relaxed))
    }

    /// Its communicator has this number.
    pub fn set_communicator(&self, number: u64) {
        self.ended.communicator.store(number, Ordering::Relaxed);
    }

    /// Chooses what carries long collectives out, where the operator leaves it open, by what was last known of how they come. Returns the number of a
    /// new strategy, if one was published.
    pub fn adapt(&self, now: Instant) -> Option<u64> {
        let pattern = self.ended.taken().pauses.verdict();
        self.strategies.adapt(pattern, now).map(|cut| cut.epoch)
    }

    /// Hands over what nobody has looked at yet of how long collectives took, of ranks' kernels and of copy engines. One caller at a time.
    pub fn take_times(&self, mut count: impl FnMut(&Reading, CarriedOutBy)) {
        let mut taken = self.ended.taken();
        count(&std::mem::take(&mut taken.new), CarriedOutBy::Kernels);
        self.large.iter().for_each(|large| count(&large.take_times(), CarriedOutBy::CopyEngines));
    }

    /// The same of groups of sends and receives.
    #[must_use]
    pub fn groups_ended(&self, rank: u32) -> u64 {
        self.ended.groups_by_rank.get(rank as usize).map_or(0, |ended| ended.load(Ordering::Relaxed))
    }

    /// Messages that a rank had sent then, itself included, and their bytes.
    #[must_use]
    pub fn sent(&self, rank: u32) -> WorkDone {
        let load = |of: &AtomicU64| of.load(Ordering::Relaxed);
        let done = |[messages, bytes]: &[AtomicU64; 2]| WorkDone { operations: load(messages), bytes: load(bytes) };
        self.ended.sent_by_rank.get(rank as usize).map(done).unwrap_or_default()
    }

    /// The same of messages to one other rank, as [`Counted::messages`] says.
    #[must_use]
    pub fn messages_sent(&self, rank: u32) -> u64 {
        self.ended.messages_by_rank.get(rank as usize).map_or(0, |sent| sent.load(Ordering::Relaxed))
    }

    /// Operations, and groups of sends and receives, that ranks have launched and that had ended when they were last asked.
    #[must_use]
    pub fn seen(&self, nranks: u32) -> Seen {
        let mut seen = Seen::default();
        for (rank, (operations, groups)) in (0..nranks).zip(seen.operations.iter_mut().zip(&mut seen.groups)) {
            *operations = OperationCounts { begun: self.page().launched(rank), ended: self.ended(rank) };
            *groups = OperationCounts { begun: self.page().p2p_launched(rank).groups, ended: self.groups_ended(rank) };
        }
        seen
    }

    /// Why a GPU does not say how far it is, if one does not.
    #[must_use]
    pub fn fault(&self) -> Option<&str> {
        self.ended.fault.get().map(String::as_str)
    }

    /// Copy engines for large operations, where there are some.
    #[must_use]
    pub fn large(&self) -> Option<&Arc<CopyEngines>> {
        self.large.as_ref()
    }

    /// Descriptors that are made for a rank which opens a part, at most: to be charged before.
    #[must_use]
    pub fn descriptors_of(&self, part: CommPart) -> u64 {
        self.buffers.descriptors_of(part)
    }

    /// Makes memory that a rank uses first, and answers on whatever thread.
    pub fn open(&self, part: OpenPart) {
        self.buffers.open(part);
    }

    /// Opens a rank's memory where the communicator's ranks copy from it and to it, and answers on whatever thread.
    pub fn open_memory(&self, memory: OpenMemory) {
        self.buffers.open_memory(memory);
    }

    /// GPU memory that a rank's part of the communicator takes now.
    #[must_use]
    pub fn held_bytes(&self, rank: u32) -> HeldBytes {
        self.buffers.held_bytes(rank as usize)
    }

    /// All ranks have left in order, and nothing has failed.
    pub fn left(&self) {
        self.buffers.left();
    }

    /// Ends what runs, and lets nothing begin. For good.
    pub fn abort(&self) {
        self.page().abort();
        if let Some(large) = &self.large {
            large.release();
        }
    }
}

impl Drop for DeviceInitiatedGroup {
    fn drop(&mut self) {
        // A rank may have left while its stream never came to what it had called.
        if let Some(large) = &self.large {
            large.release();
        }
    }
}

impl std::fmt::Debug for DeviceInitiatedGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceInitiatedGroup").field("page", self.page()).finish_non_exhaustive()
    }
}

#[cfg(any(test, feature = "testing"))]
impl DeviceInitiatedGroup {
    /// One whose ranks run everything themselves, with a page of its own and nothing on any GPU.
    ///
    /// # Panics
    /// There is no memory for a page.
    #[must_use]
    pub fn for_tests(nranks: u32, buffers: Box<dyn SymmetricBuffers>) -> Self {
        use crate::cuda::Abilities;
        let (_fd, page) = ControlPage::create().expect("a page");
        let execution = mccs_ipc::device_initiated::Execution::Ranks;
        let abilities = Abilities {
            nranks,
            multiprocessors: 132,
            execution,
            copy_engines: false,
            ll128: false,
            opens_buffers: true,
        };
        let large_from = mccs_config::service::Crossover::Never.into();
        let first = mccs_model::GpuStrategy { large_from, ll128: false, max_ctas: None };
        DeviceInitiatedGroup::new(Strategies::begin(Arc::new(page), abilities, first), None, buffers)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Symmetric buffers that answer when the test does.
    #[derive(Default)]
    struct Asked(Arc<Mutex<Vec<Arc<Ended>>>>);

    impl SymmetricBuffers for Asked {
        fn read(&self, ended: &Arc<Ended>) {
            self.0.lock().expect("no panic").push(Arc::clone(ended));
        }
    }

    fn sent(messages: u64) -> WorkDone {
        WorkDone { operations: messages, bytes: 7 * messages }
    }

    #[test]
    fn gpus_are_asked_once_at_a_time_and_what_they_said_stays_known() {
        let asked = Asked::default();
        let questions = Arc::clone(&asked.0);
        let group = DeviceInitiatedGroup::for_tests(2, Box::new(asked));
        assert!(group.is_answered());
        group.ask();
        group.ask();
        let ended = questions.lock().expect("no panic").pop().expect("a question");
        assert_eq!((questions.lock().expect("no panic").len(), group.is_answered(), group.ended(1)), (0, false, 0));
        ended.tell(Ok([3, 4]
            .map(|n| Counted { operations: n, groups: 10 * n, payload_bytes: 100 * n, sent: sent(n), messages: 0 })
            .to_vec()));
        assert_eq!((group.is_answered(), group.ended(0), group.ended(1), group.ended(9)), (true, 3, 4, 0));
        assert_eq!([1, 9].map(|rank| group.groups_ended(rank)), [40, 0]);
        assert_eq!([1, 9].map(|rank| group.payload_bytes(rank)), [400, 0]);
        assert_eq!([1, 9].map(|rank| group.sent(rank)), [sent(4), WorkDone::default()]);
        group.ask();
        questions.lock().expect("no panic").pop().expect("another question").tell(Err("CUDA_ERROR_UNKNOWN".into()));
        assert_eq!((group.is_answered(), group.ended(1), group.fault()), (true, 4, Some("CUDA_ERROR_UNKNOWN")));
    }
}
