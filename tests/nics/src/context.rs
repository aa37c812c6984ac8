//! An open device: its queue pairs and regions behind one lock, and a thread that serves them.
//!
//! Whoever posts a request or asks for completions serves them as well, so that short messages need no switch of threads.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::abi::{self, AsyncEvent, Wc};
use crate::completions::{CompletionQueue, Events};
use crate::files::{Listed, Port, now_ns};
use crate::gpu::Copies;
use crate::memory::Regions;
use crate::queue_pair::{Failed, Handle, Lent, QueuePair};

/// The thread looks at least so often: a fault is a word that is changed, by whom may not ring.
const LOOKS_AT_LEAST: Duration = Duration::from_millis(5);

/// What an open device has.
#[derive(Debug)]
pub(crate) struct Nic {
    pub folder: PathBuf,
    pub listed: Listed,
    pub port: Port,
    state: Mutex<State>,
    ends: AtomicBool,
    pub events: Events<AsyncEvent>,
}

/// What is behind the lock.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub regions: Regions,
    pub copies: Copies,
    pub queue_pairs: BTreeMap<u32, QueuePair>,
    /// Completions that are not told yet, and when they are.
    later: Vec<(u64, Due)>,
    was_down: bool,
    fatal: u32,
    chance: u64,
    seen: u32,
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

/// For so long a device's thread looks on after something has come: `MCCS_NICS_SPIN_US`, where there are processors for it.
fn spin_ns() -> u64 {
    let named = std::env::var("MCCS_NICS_SPIN_US").ok();
    named.and_then(|micros| micros.parse::<u64>().ok()).unwrap_or(0).saturating_mul(1000)
}

impl Nic {
    pub(crate) fn open(folder: PathBuf, listed: Listed) -> std::io::Result<Nic> {
        let events = Events::new()?;
        let port = Port::open(&folder, &listed)?;
        let words = port.words();
        let state = State {
            was_down: words.is_down.load(Ordering::Relaxed) != 0,
            fatal: words.fatal.load(Ordering::Relaxed),
            // From run to run the same losses, if the calls are the same.
            chance: u64::from(u32::from(listed.address)),
            ..State::default()
        };
        Ok(Nic { folder, listed, port, state: Mutex::new(state), ends: AtomicBool::new(false), events })
    }

    /// The thread that serves it.
    pub(crate) fn serve(self: &Arc<Self>) -> std::io::Result<JoinHandle<()>> {
        let nic = Arc::clone(self);
        std::thread::Builder::new().name(format!("nic {}", self.listed.name)).spawn(move || {
            let (spin_ns, mut rung, mut rung_ns) = (spin_ns(), 0, 0);
            while !nic.ends.load(Ordering::Acquire) {
                let seen = nic.port.words().doorbell.load(Ordering::SeqCst);
                let next = nic.progress(&mut nic.lock());
                let now = now_ns();
                if std::mem::replace(&mut rung, seen) != seen {
                    rung_ns = now;
                }
                let wait = Duration::from_nanos(next.saturating_sub(now)).min(LOOKS_AT_LEAST);
                if wait.is_zero() || now < rung_ns + spin_ns {
                    std::thread::yield_now();
                } else {
                    nic.port.sleep(seen, wait);
                }
            }
        })
    }

    pub(crate) fn end(&self) {
        self.ends.store(true, Ordering::Release);
        self.port.ring();
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves the device if something has come since the last time.
    pub(crate) fn progress_if_rung(&self) {
        let seen = self.port.words().doorbell.load(Ordering::SeqCst);
        let mut state = self.lock();
        if std::mem::replace(&mut state.seen, seen) != seen || state.queue_pairs.values().any(QueuePair::has_work) {
            self.progress(&mut state);
        }
    }

    pub(crate) fn tell(&self, event_type: u32, element: *mut c_void) {
        self.events.tell(AsyncEvent { element, event_type });
    }

    /// Has all queue pairs go on. Gives when it is to be called again, whatever comes.
    pub(crate) fn progress(&self, state: &mut State) -> u64 {
        let now = now_ns();
        self.look_for_faults(state);
        let mut completions = Vec::new();
        let mut failed = Vec::new();
        let mut next = u64::MAX;
        let State { regions, copies, queue_pairs, chance, .. } = state;
        let port = self.port.words();
        let mut lent = Lent { regions, copies, port, now_ns: now, chance, completions: &mut completions };
        for queue_pair in queue_pairs.values_mut() {
            match queue_pair.step(&mut lent) {
                Ok(at) => next = next.min(at),
                Err(Failed { by_peer }) => failed.push((queue_pair.handle, by_peer)),
            }
        }
        for (handle, by_peer) in failed {
            if by_peer {
                self.tell(abi::EVENT_QP_ACCESS_ERR, handle.0);
            }
        }
        self.hand_on(state, completions, now).min(next)
    }

    /// Puts completions into their queues, at once or when the device's delay is over.
    pub(crate) fn hand_on(&self, state: &mut State, completions: Vec<(*const CompletionQueue, Wc)>, now: u64) -> u64 {
        let delay = self.port.words().completion_delay_ns.load(Ordering::Relaxed);
        state.later.extend(completions.into_iter().map(|(queue, wc)| (now + delay, Due(queue, wc))));
        state.later.retain(|(at, Due(queue, wc))| {
            let is_due = *at <= now;
            if is_due {
                // SAFETY: `remove` forgets, under this lock, what is still to come for a queue.
                unsafe { &**queue }.push(*wc);
            }
            !is_due
        });
        state.later.iter().map(|(at, _)| *at).min().unwrap_or(u64::MAX)
    }

    /// Forgets a queue pair, its events, and its completions that are still to come.
    pub(crate) fn remove(&self, number: u32, handle: Handle) {
        let mut state = self.lock();
        self.events.forget(|event| event.element == handle.0);
        state.later.retain(|(_, Due(_, wc))| wc.qp_num != number);
        if let Some(mut queue_pair) = state.queue_pairs.remove(&number) {
            queue_pair.settle();
            for queue in queue_pair.queues {
                // SAFETY: completion queues outlive their queue pairs.
                unsafe { &*queue }.forget(number);
            }
        }
    }

    fn look_for_faults(&self, state: &mut State) {
        let words = self.port.words();
        let is_down = words.is_down.load(Ordering::Relaxed) != 0;
        if std::mem::replace(&mut state.was_down, is_down) != is_down {
            let event = if is_down { abi::EVENT_PORT_ERR } else { abi::EVENT_PORT_ACTIVE };
            self.tell(event, std::ptr::without_provenance_mut(1));
        }
        let fatal = words.fatal.load(Ordering::Relaxed);
        if std::mem::replace(&mut state.fatal, fatal) != fatal {
            let numbers: Vec<u32> = state.queue_pairs.keys().copied().collect();
            numbers.into_iter().for_each(|number| self.fail(state, number));
            self.tell(abi::EVENT_DEVICE_FATAL, std::ptr::null_mut());
        }
        let failing = words.failing_qp.load(Ordering::Relaxed);
        if failing != 0 && state.queue_pairs.contains_key(&failing) {
            words.failing_qp.store(0, Ordering::Relaxed);
            let handle = state.queue_pairs[&failing].handle;
            self.fail(state, failing);
            self.tell(abi::EVENT_QP_FATAL, handle.0);
        }
    }

    /// Ends all that is in a queue pair's queues.
    pub(crate) fn fail(&self, state: &mut State, number: u32) {
        let (now, mut completions) = (now_ns(), Vec::new());
        let State { regions, copies, queue_pairs, chance, .. } = state;
        if let Some(queue_pair) = queue_pairs.get_mut(&number) {
            let port = self.port.words();
            let mut lent = Lent { regions, copies, port, now_ns: now, chance, completions: &mut completions };
            queue_pair.fail(None, &mut lent);
        }
        self.hand_on(state, completions, now);
    }
}
