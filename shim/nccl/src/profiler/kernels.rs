//! Profiler events of kernels: a thread reads the stamps that kernels leave, and tells of them.
//!
//! Calls of the program share the driver and a lock with it, so it holds neither for long: it begins a copy, sleeps, and tells of what the copy
//! has brought. It sleeps for good while no collective waits for its stamp. An operation whose stamp is lost (512 others came before it was read, or the
//! communicator was aborted) is told without times, so that plugins forget no event.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError, Weak};
use std::time::Duration;

use mccs::cuda::{RanAt, StampReader};

use super::Profile;
use super::events::{Event, state};
use super::plugin::Handle;
use crate::communicators::locked;

/// How often stamps are read while some are waited for: 512 of the shortest collectives take longer.
const READ_EVERY: Duration = Duration::from_millis(1);
/// Stamps in a ring. One that is not there after so many others was lost.
const STAMPS: u64 = 512;

/// A communicator's kernels that have not been told of.
pub(super) struct Kernels {
    /// Locked by calls, so never while the driver or a plugin is called.
    waiting: Mutex<Waiting>,
    /// Locked by whoever tells. Comes before `waiting`.
    reader: Mutex<StampReader>,
}

#[derive(Default)]
struct Waiting {
    /// By the operation's number, in order, with the event that the kernel belongs to.
    operations: VecDeque<(u64, Handle)>,
    /// Whether the thread looks after them.
    is_watched: bool,
}

impl Kernels {
    pub(super) fn new(reader: StampReader) -> Self {
        Kernels { waiting: Mutex::default(), reader: Mutex::new(reader) }
    }

    /// Adds an operation. Returns whether the thread has to be told.
    fn add(&self, number: u64, operation: Handle) -> bool {
        let mut waiting = locked(&self.waiting);
        waiting.operations.push_back((number, operation));
        !std::mem::replace(&mut waiting.is_watched, true)
    }

    /// Puts back what has not ended, before all that has come meanwhile. Returns whether there is anything.
    fn put_back(&self, mut rest: VecDeque<(u64, Handle)>) -> bool {
        let mut waiting = locked(&self.waiting);
        rest.append(&mut waiting.operations);
        waiting.operations = rest;
        waiting.is_watched = !waiting.operations.is_empty();
        waiting.is_watched
    }
}

/// Communicators that wait for stamps.
static WATCHED: LazyLock<(Mutex<Watched>, Condvar)> = LazyLock::new(Default::default);

#[derive(Default)]
struct Watched {
    profiles: Vec<Weak<Profile>>,
    has_thread: bool,
}

impl Profile {
    /// An operation was launched, whose kernel's event comes later: in the order of the operations' numbers.
    pub(super) fn expect_kernel(self: &Arc<Self>, number: u64, operation: Handle) {
        let Some(kernels) = &self.kernels else { return };
        if kernels.add(number, operation) {
            let (watched, changed) = &*WATCHED;
            let mut watched = locked(watched);
            watched.profiles.push(Arc::downgrade(self));
            if !watched.has_thread {
                watched.has_thread = std::thread::Builder::new().name("mccs-profiler".into()).spawn(watch).is_ok();
            }
            changed.notify_one();
        }
    }

    /// Tells of a kernel; without times where nobody knows them.
    pub(super) fn tell_kernel(&self, operation: Handle, ran: Option<RanAt>) {
        let ran = ran.unwrap_or(RanAt { began_ns: 0, ended_ns: 0 });
        let kernel = self.start(&Event::KernelCh { began_ns: ran.began_ns }, operation);
        self.plugin.record(kernel, state::KERNEL_CH_STOP, Some(ran.ended_ns));
        self.plugin.stop(kernel);
    }

    /// Tells of kernels that had ended when their stamps were last copied, and has them copied again for the rest. Returns whether there are
    /// such.
    fn tell_kernels(&self) -> bool {
        let Some(kernels) = &self.kernels else { return false };
        let mut reader = locked(&kernels.reader);
        let has_come = reader.has_come();
        let is_over = has_come.is_err() || reader.is_aborted();
        let mut operations = std::mem::take(&mut locked(&kernels.waiting).operations);
        while let Some(&(number, operation)) = operations.front() {
            let ran = reader.ran_at(number);
            // The count may come before the stamp.
            if ran.is_none() && !is_over && reader.ended() < number + STAMPS {
                break;
            }
            operations.pop_front();
            self.tell_kernel(operation, ran);
        }
        // A copy that cannot be begun is an error of `has_come`, next time.
        kernels.put_back(operations) && {
            reader.begin();
            true
        }
    }

    /// Waits until all kernels have ended, and tells of them.
    pub(super) fn drain_kernels(&self) {
        while self.tell_kernels() {
            std::thread::sleep(READ_EVERY);
        }
    }
}

/// The thread's work.
fn watch() {
    let (watched, changed) = &*WATCHED;
    loop {
        let mut known = locked(watched);
        while known.profiles.is_empty() {
            known = changed.wait(known).unwrap_or_else(PoisonError::into_inner);
        }
        let profiles = std::mem::take(&mut known.profiles);
        drop(known);
        // One that has told of all comes again with its next operation.
        let mut rest: Vec<_> = profiles
            .into_iter()
            .filter(|profile| profile.upgrade().is_some_and(|profile| profile.tell_kernels()))
            .collect();
        locked(watched).profiles.append(&mut rest);
        std::thread::sleep(READ_EVERY);
    }
}
