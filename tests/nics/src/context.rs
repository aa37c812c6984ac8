//! An open emulated NIC: its queue pairs, its regions, and the thread that serves them. It serves
//! what no program serves itself.
//!
//! Whoever posts a request or looks for completions serves the queue pair, so that short messages need no switch of threads, and
//! nobody waits for a thread that has no processor. The thread serves the rest: data for programs that look at memory or sleep, timers,
//! faults. It looks on for [`spin_ns`] after it has moved something, then it sleeps at the device's bell.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;

use crate::abi::{self, AsyncEvent, Wc};
use crate::bell::{Bell, Places};
use crate::completions::{CompletionQueue, Events};
use crate::copiers;
use crate::files::{Listed, Port, now_ns};
use crate::gpu::Copies;
use crate::memory::Regions;
use crate::queue_pair::{Failed, Handle, Lent, QueuePair};
use crate::served::Served;
use crate::twins;

/// Shorter times are not slept: going to sleep and waking takes as long.
const SHORT_NS: u64 = 5_000;
/// A thread that waits for copies looks so often, when it has looked on for long enough.
const COPIES_NS: u64 = 20_000;

/// State of an open device.
#[derive(Debug)]
pub(crate) struct Nic {
    pub folder: PathBuf,
    pub listed: Listed,
    pub port: Port,
    pub bell: Bell,
    /// Number of the bell.
    pub bell_number: u32,
    pub copies: Mutex<Copies>,
    pub events: Events<AsyncEvent>,
    regions: RwLock<Regions>,
    queue_pairs: RwLock<BTreeMap<u32, Arc<Served>>>,
    places: Mutex<Places>,
    /// Completions that are not told yet, and when they are.
    later: Mutex<Vec<(u64, Due)>>,
    /// How many.
    late: AtomicUsize,
    ends: AtomicBool,
}

/// A completion for a queue, which outlives its queue pairs.
#[derive(Debug, Clone, Copy)]
struct Due(*const CompletionQueue, Wc);
// SAFETY: the queue is behind a lock of its own, and lives as long as a queue pair has completions for it.
unsafe impl Send for Due {}

// SAFETY: an address that is compared and handed on, not used.
unsafe impl Send for AsyncEvent {}

impl std::fmt::Debug for AsyncEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "event {}", self.event_type)
    }
}

impl std::fmt::Debug for Wc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "completion {} of queue pair {}: status {}", self.wr_id, self.qp_num, self.status)
    }
}

impl std::fmt::Debug for crate::abi::Sge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:#x}", self.length, self.addr)
    }
}

/// For so long a device's thread looks on after it has moved something: `MCCS_NICS_SPIN_US`, where there are processors for it.
fn spin_ns() -> u64 {
    let named = std::env::var("MCCS_NICS_SPIN_US").ok().and_then(|micros| micros.parse::<u64>().ok());
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    named.unwrap_or(if cores >= 16 { 20 } else { 0 }).saturating_mul(1000)
}

/// Has this thread run as soon as it is woken, for devices wait for no processor: sleeps end in time, and where the process may say so it
/// goes before other threads.
fn go_first() {
    // SAFETY: integers, of this thread alone.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, 1000_u64);
        libc::setpriority(libc::PRIO_PROCESS, libc::gettid() as libc::id_t, -20);
    }
}

/// Faults that the thread has seen.
#[derive(Debug)]
struct SeenFaults {
    was_down: bool,
    fatal: u32,
}

impl Nic {
    pub(crate) fn open(folder: PathBuf, listed: Listed) -> std::io::Result<Nic> {
        let events = Events::new()?;
        let port = Port::open(&folder, &listed)?;
        let bell_number = port.words().opened.fetch_add(1, Ordering::Relaxed) + 1;
        let bell = Bell::create(&folder, listed.gid(), bell_number)?;
        Ok(Nic {
            folder,
            listed,
            port,
            bell,
            bell_number,
            copies: Mutex::default(),
            events,
            regions: RwLock::default(),
            queue_pairs: RwLock::default(),
            places: Mutex::default(),
            later: Mutex::default(),
            late: AtomicUsize::new(0),
            ends: AtomicBool::new(false),
        })
    }

    /// The thread that serves it.
    pub(crate) fn serve(self: &Arc<Self>) -> std::io::Result<JoinHandle<()>> {
        let nic = Arc::clone(self);
        let words = self.port.words();
        let mut seen = SeenFaults {
            was_down: words.is_down.load(Ordering::SeqCst) != 0,
            fatal: words.fatal.load(Ordering::SeqCst),
        };
        std::thread::Builder::new().name(format!("nic {}", self.listed.name)).spawn(move || {
            go_first();
            let (spin_ns, mut moved, mut moved_ns) = (spin_ns(), 0, 0);
            while !nic.ends.load(Ordering::Acquire) {
                let rung = nic.bell.rung();
                nic.look_for_faults(&mut seen);
                let (next_ns, has_moved) = nic.turn();
                if std::mem::replace(&mut moved, has_moved) != has_moved {
                    moved_ns = now_ns();
                }
                nic.wait(rung, next_ns, moved_ns + spin_ns);
            }
        })
    }

    /// Serves all queue pairs that nobody else serves. Gives when this is to be done again, and how many packets have moved.
    fn turn(&self) -> (u64, u64) {
        let (mut next_ns, mut moved) = (self.tell_late(now_ns()), 0_u64);
        for served in self.queue_pairs().values() {
            let now = now_ns();
            if served.maps() {
                self.map_twin(served);
            }
            if served.is_due(now) && !self.step_if_free(served) {
                // Its holder may not look again.
                next_ns = next_ns.min(now + COPIES_NS);
            }
            next_ns = next_ns.min(served.next_ns());
            moved = moved.wrapping_add(served.moved());
        }
        (next_ns, moved)
    }

    /// Maps the twin of a peer's slots, without the queue pair's lock: programs go on meanwhile.
    fn map_twin(&self, served: &Served) {
        let gpu = self.copies().any_gpu();
        let handle = served.lock().unmapped_twin();
        if let Some((gpu, handle)) = gpu.zip(handle)
            && let Some(twin) = twins::map(gpu, handle)
        {
            served.lock().send_by(handle, twin);
        }
    }

    /// Waits until the bell has rung again, or something is due: looking on until `until_ns`, then asleep.
    fn wait(&self, rung: u32, next_ns: u64, until_ns: u64) {
        loop {
            let now = now_ns();
            // Copies under way: nobody rings for them.
            let is_due = next_ns <= now;
            if self.bell.rung() != rung || copiers::help() || (is_due && now < until_ns) {
                return;
            }
            if !is_due && (now < until_ns || next_ns - now < SHORT_NS) {
                (0..20).for_each(|_| std::hint::spin_loop());
                continue;
            }
            return self.bell.sleep(rung, if is_due { now + COPIES_NS } else { next_ns });
        }
    }

    pub(crate) fn end(&self) {
        self.ends.store(true, Ordering::Release);
        self.bell.ring();
    }

    pub(crate) fn queue_pairs(&self) -> RwLockReadGuard<'_, BTreeMap<u32, Arc<Served>>> {
        self.queue_pairs.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn regions(&self) -> RwLockWriteGuard<'_, Regions> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn copies(&self) -> MutexGuard<'_, Copies> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn later(&self) -> MutexGuard<'_, Vec<(u64, Due)>> {
        self.later.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn tell(&self, event_type: u32, element: *mut c_void) {
        self.events.tell(AsyncEvent { element, event_type });
    }

    pub(crate) fn add(&self, served: Arc<Served>) {
        self.queue_pairs.write().unwrap_or_else(PoisonError::into_inner).insert(served.number, served);
    }

    /// Has a queue pair go on, by a program that holds it.
    pub(crate) fn step(&self, served: &Served, queue_pair: &mut QueuePair) {
        served.note_seen();
        let mut completions = Vec::new();
        let stepped = self.with(&mut completions, |lent| queue_pair.step(lent));
        let next_ns = match stepped {
            Ok(next_ns) => next_ns,
            Err(Failed { by_peer }) => {
                if by_peer {
                    self.tell(abi::EVENT_QP_ACCESS_ERR, queue_pair.handle.0);
                }
                u64::MAX
            }
        };
        served.note(next_ns, queue_pair.moved());
        // Under the queue pair's lock: its completions stay in order.
        self.hand_on(completions);
    }

    /// Has a queue pair go on until nothing has come meanwhile. `false`: somebody holds it.
    fn step_if_free(&self, served: &Served) -> bool {
        while let Some(mut queue_pair) = served.try_lock() {
            self.step(served, &mut queue_pair);
            drop(queue_pair);
            if !served.is_rung() {
                return true;
            }
        }
        false
    }

    /// Serves those of a program's queue pairs for which something has come.
    pub(crate) fn look<'a>(&self, queue_pairs: impl Iterator<Item = &'a Arc<Served>>, now_ns: u64) {
        for served in queue_pairs.filter(|served| served.is_due(now_ns)) {
            self.step_if_free(served);
            self.leave(served);
        }
        if self.late.load(Ordering::Relaxed) > 0 {
            self.tell_late(now_ns);
        }
    }

    /// Tells the thread what is still to be done for a queue pair, unless the program looks again.
    pub(crate) fn leave(&self, served: &Served) {
        if served.next_ns() != u64::MAX || served.is_rung() {
            self.bell.ring_for(served.places());
        }
    }

    fn with<R>(&self, completions: &mut Vec<(*const CompletionQueue, Wc)>, work: impl FnOnce(&mut Lent<'_>) -> R) -> R {
        let regions = self.regions.read().unwrap_or_else(PoisonError::into_inner);
        work(&mut Lent {
            regions: &regions,
            copies: &self.copies,
            port: self.port.words(),
            now_ns: now_ns(),
            completions,
        })
    }

    /// Puts completions into their queues, at once or when the device's delay is over.
    fn hand_on(&self, completions: Vec<(*const CompletionQueue, Wc)>) {
        let delay = self.port.words().completion_delay_ns.load(Ordering::Relaxed);
        if completions.is_empty() {
            return;
        }
        if delay == 0 && self.late.load(Ordering::Acquire) == 0 {
            // SAFETY: completion queues outlive their queue pairs, and this one's is locked.
            return completions.iter().for_each(|(queue, wc)| unsafe { &**queue }.push(*wc));
        }
        let mut later = self.later();
        later.extend(completions.into_iter().map(|(queue, wc)| (now_ns() + delay, Due(queue, wc))));
        self.late.store(later.len(), Ordering::Release);
        drop(later);
        // The thread tells them when their time has come.
        self.bell.ring();
    }

    /// Tells completions whose time has come, and gives the next one's.
    fn tell_late(&self, now: u64) -> u64 {
        if self.late.load(Ordering::Acquire) == 0 {
            return u64::MAX;
        }
        let mut later = self.later();
        later.retain(|(at, Due(queue, wc))| {
            let is_due = *at <= now;
            if is_due {
                // SAFETY: `remove` forgets, under this lock, what is still to come for a queue.
                unsafe { &**queue }.push(*wc);
            }
            !is_due
        });
        self.late.store(later.len(), Ordering::Release);
        later.iter().map(|(at, _)| *at).min().unwrap_or(u64::MAX)
    }

    /// Forgets a queue pair, its events, and its completions that are still to come.
    pub(crate) fn remove(&self, served: &Arc<Served>, handle: Handle) {
        self.queue_pairs.write().unwrap_or_else(PoisonError::into_inner).remove(&served.number);
        let mut queue_pair = served.lock();
        queue_pair.end();
        self.events.forget(|event| event.element == handle.0);
        let mut later = self.later();
        later.retain(|(_, Due(_, wc))| wc.qp_num != served.number);
        self.late.store(later.len(), Ordering::Release);
        // Whoever looks has a queue's list, and may want these.
        drop(later);
        for queue in queue_pair.queues {
            // SAFETY: completion queues outlive their queue pairs.
            unsafe { &*queue }.detach(served.number);
        }
    }

    fn look_for_faults(&self, seen: &mut SeenFaults) {
        let words = self.port.words();
        let is_down = words.is_down.load(Ordering::Relaxed) != 0;
        if std::mem::replace(&mut seen.was_down, is_down) != is_down {
            let event = if is_down { abi::EVENT_PORT_ERR } else { abi::EVENT_PORT_ACTIVE };
            self.tell(event, std::ptr::without_provenance_mut(1));
        }
        let fatal = words.fatal.load(Ordering::Relaxed);
        if std::mem::replace(&mut seen.fatal, fatal) != fatal {
            self.queue_pairs().values().for_each(|served| self.fail(&mut served.lock()));
            self.tell(abi::EVENT_DEVICE_FATAL, std::ptr::null_mut());
        }
        let failing = words.failing_qp.load(Ordering::Relaxed);
        if failing != 0
            && let Some(served) = self.queue_pairs().get(&failing)
        {
            words.failing_qp.store(0, Ordering::Relaxed);
            let mut queue_pair = served.lock();
            self.fail(&mut queue_pair);
            self.tell(abi::EVENT_QP_FATAL, queue_pair.handle.0);
        }
    }

    /// Ends all that is in a queue pair's queues.
    pub(crate) fn fail(&self, queue_pair: &mut QueuePair) {
        let mut completions = Vec::new();
        self.with(&mut completions, |lent| queue_pair.fail(None, lent));
        self.hand_on(completions);
    }
}
