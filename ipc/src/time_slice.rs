//! Time slice of a thread, which it asks the kernel's scheduler for (`sched_setattr`). It decides
//! who has a core first, and not how much of it.
//!
//! A thread that wakes takes the core from one with a longer slice; from one with a slice as long it waits until that one's is over, some
//! milliseconds. A thread that hands a call on, or waits for one, works for microseconds. So it asks for a short slice, and has a core at
//! once also while others compute on all of them.
//!
//! Linux knows slices of a thread's own from 6.12 on. Earlier kernels take the request, and do nothing.

use std::time::Duration;

/// The shortest that the kernel gives.
pub const SHORT: Duration = Duration::from_micros(100);

/// Bytes that every kernel knows of the structure; what came later is about utilisation.
const ATTRIBUTES_BYTES: u32 = 48;

/// The calling thread's slice. It stays as it was last set when this is dropped.
pub struct ThreadSlice {
    /// The thread's slice before, in nanoseconds; none if the kernel does not say, or refuses.
    own_ns: Option<u64>,
}

impl ThreadSlice {
    /// The slice of the calling thread, which alone may use it.
    #[must_use]
    pub fn of_this_thread() -> Self {
        ThreadSlice { own_ns: attributes().map(|own| own.sched_runtime) }
    }

    /// Asks for a slice, or for that which the thread had before. If an operator's sandbox refuses it, once is enough.
    pub fn ask(&mut self, slice: Option<Duration>) {
        let Some(own_ns) = self.own_ns else { return };
        let sched_runtime = slice.map_or(own_ns, |slice| slice.as_nanos() as u64);
        // As they are now: somebody may have changed its priority since.
        let asked = attributes().is_some_and(|now| set_attributes(&libc::sched_attr { sched_runtime, ..now }));
        if !asked {
            self.own_ns = None;
        }
    }
}

/// The slice of the calling thread; none if the kernel does not say, or somebody has given the thread another policy, which has no such
/// slices.
fn attributes() -> Option<libc::sched_attr> {
    let mut own = libc::sched_attr {
        size: ATTRIBUTES_BYTES,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel writes at most as many bytes as it is told, which the structure has.
    let refused = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut own, ATTRIBUTES_BYTES, 0) };
    (refused == 0 && own.sched_policy == libc::SCHED_OTHER as u32).then_some(own)
}

fn set_attributes(attributes: &libc::sched_attr) -> bool {
    // SAFETY: the kernel reads as many bytes as the structure says of itself, which `attributes` has had from the kernel.
    (unsafe { libc::syscall(libc::SYS_sched_setattr, 0, std::ptr::from_ref(attributes), 0) }) == 0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_its_own_attributes_back_and_never_loses_its_policy() {
        let before = attributes().expect("the kernel says");
        let mut slice = ThreadSlice::of_this_thread();
        slice.ask(Some(SHORT));
        let within = attributes().expect("the kernel says");
        assert_eq!((within.sched_policy, within.sched_nice), (before.sched_policy, before.sched_nice));
        // Kernels before 6.12 have none to say.
        assert!([0, SHORT.as_nanos() as u64].contains(&within.sched_runtime), "{}", within.sched_runtime);
        slice.ask(None);
        let after = attributes().expect("the kernel says");
        assert_eq!((after.sched_policy, after.sched_runtime), (before.sched_policy, before.sched_runtime));
    }
}
