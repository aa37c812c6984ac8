//! Events of kernels: a thread reads the stamps that kernels leave, and tells of them.
//!
//! It sleeps while no collective waits for its stamp. An operation whose stamp is lost (512 others came before it was read, or the
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
pub(super) struct Kernels(Mutex<Waiting>);

struct Waiting {
    reader: StampReader,
    /// By the operation's number, in order, with the event that the kernel belongs to.
    operations: VecDeque<(u64, Handle)>,
}

impl Kernels {
    pub(super) fn new(reader: StampReader) -> Self {
        Kernels(Mutex::new(Waiting { reader, operations: VecDeque::new() }))
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
    /// Operations were launched, whose kernels' events come later: in order, with the operations' numbers.
    pub(super) fn expect_kernels(self: &Arc<Self>, operations: impl IntoIterator<Item = (u64, Handle)>) {
        let Some(kernels) = &self.kernels else { return };
        let was_idle = {
            let mut waiting = locked(&kernels.0);
            let was_idle = waiting.operations.is_empty();
            waiting.operations.extend(operations);
            was_idle && !waiting.operations.is_empty()
        };
        if was_idle {
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

    /// Tells of kernels that have ended. Returns whether some have not.
    fn tell_kernels(&self) -> bool {
        let Some(kernels) = &self.kernels else { return false };
        let mut waiting = locked(&kernels.0);
        let Waiting { reader, operations } = &mut *waiting;
        if operations.is_empty() {
            return false;
        }
        let is_over = reader.read().is_err() || reader.is_aborted();
        while let Some(&(number, operation)) = operations.front() {
            let ran = reader.ran_at(number);
            // The count may come before the stamp.
            if ran.is_none() && !is_over && reader.ended() < number + STAMPS {
                return true;
            }
            operations.pop_front();
            self.tell_kernel(operation, ran);
        }
        false
    }

    /// Waits until all kernels have ended, and tells of them.
    pub(super) fn drain_kernels(&self) {
        while self.tell_kernels() {
            std::thread::sleep(READ_EVERY);
        }
    }
}

/// What the thread does.
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
