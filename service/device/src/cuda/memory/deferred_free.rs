//! Deferred frees: a thread gives back symmetric buffers, streams and imported memory to the
//! driver.
//!
//! The driver frees and unmaps memory when all streams of the process have ended, on the GPU and on its peers, and other threads' calls may wait
//! beside it. Streams of the service wait for tenants, and for what other threads have yet to issue. So nothing is freed while operations are under way
//! (`hw_queue_admission.rs`), and while something is to be freed they are held:
//!
//! ```text
//! unready ones are held, until all under way have come --> all are held, until none is under way --> freed; none is held
//!                         ^                                                  |
//!                         +---------------- it takes long -------------------+
//! ```
//!
//! Tenants take turns, and what is left when operations have been held for a while is freed the next time.
//!
//! An end that never comes is waited for until it has failed; others go on meanwhile, once they have come. Charges lie with what they are
//! for, so that a tenant has its quota back when that is freed.

use std::any::Any;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mccs_runtime::{Share, TurnReceiver, TurnSender, turn_channel};

use crate::cuda::copy_engine::hw_queue_admission::{Hold, Holder, HwQueues, UnderWay};

/// How often operations that are under way are looked at: between the shortest pause and the longest, doubled each time; the shortest while others
/// are held, which may have come meanwhile.
const LOOK_AFTER: Duration = Duration::from_micros(100);
const LOOK_AFTER_MAX: Duration = Duration::from_millis(1);
/// How long operations are held for those that have come to end: what is honest takes some milliseconds.
const HELD_MAX: Duration = Duration::from_millis(100);
/// How long they go on if some of them have still not ended, doubled each time up to a minute: whoever says that its streams have come, and never lets
/// them end, holds others for a tenth of a second, and seldom.
const GO_ON_FOR: Duration = Duration::from_secs(2);
const GO_ON_FOR_MAX: Duration = Duration::from_secs(60);
/// How long things are freed at a time: one tenant's many hold nobody's operations for longer.
const FREEING_MAX: Duration = Duration::from_millis(100);
/// How many times as long they go on as they were held, when something was freed: whoever makes and ends things all the time holds others a tenth of it.
const GO_ON_TIMES: u32 = 9;
/// At most so long: nothing is to be left of a tenant a second after its death.
const GO_ON_MAX: Duration = Duration::from_millis(500);

/// To the thread, which ends when nobody has this any more.
#[derive(Clone)]
pub(crate) struct DeferredFrees(TurnSender<Box<dyn Any + Send>>);

impl DeferredFrees {
    /// Starts the thread, which the handle is of. Operations that it has held are given to `issue`.
    pub(crate) fn start<H: Holder + Send + Sync + 'static, F: Send + 'static>(
        queues: Arc<HwQueues<H, F>>,
        issue: impl Fn(&F) + Send + 'static,
    ) -> std::io::Result<(Self, JoinHandle<()>)> {
        let (sender, unused) = turn_channel();
        let run = move || run(unused, &queues, &issue);
        let thread = std::thread::Builder::new().name("mccs-cuda-free".into()).spawn(run)?;
        Ok((DeferredFrees(sender), thread))
    }

    /// Drops it when that holds up nobody, in its owner's turn. Returns at once.
    pub(crate) fn free(&self, owner: Share, unused: impl Any + Send) {
        // If the thread could not be reached it would be dropped here.
        let _ = self.0.send(owner, Box::new(unused));
    }
}

fn run<H: Holder, F>(mut unused: TurnReceiver<Box<dyn Any + Send>>, queues: &HwQueues<H, F>, issue: &impl Fn(&F)) {
    while let Ok(first) = unused.recv(None) {
        let held_since = hold_all(queues, issue);
        let until = Instant::now() + FREEING_MAX;
        drop(first);
        while Instant::now() < until
            && let Some(next) = unused.try_recv()
        {
            drop(next);
        }
        unused.rest();
        queues.hold(Hold::Nothing, issue);
        // Or until nobody is left who could go on.
        unused.pause((held_since.elapsed() * GO_ON_TIMES).min(GO_ON_MAX));
    }
}

/// Returns when nothing is under way, and nothing is let go; and since when.
fn hold_all<H: Holder, F>(queues: &HwQueues<H, F>, issue: &impl Fn(&F)) -> Instant {
    let (mut pause, mut go_on_for) = (LOOK_AFTER, GO_ON_FOR);
    loop {
        let now = Instant::now();
        if queues.hold(Hold::Unready, issue) == UnderWay::Unready {
            std::thread::sleep(pause);
            pause = if queues.is_crowded() { LOOK_AFTER } else { (pause * 2).min(LOOK_AFTER_MAX) };
        } else if becomes_so(HELD_MAX, LOOK_AFTER, || queues.hold(Hold::All, issue) == UnderWay::Nothing) {
            return now;
        } else {
            let late = queues.names();
            queues.hold(Hold::Unready, issue);
            let have_ended = || queues.names().iter().all(|name| !late.contains(name));
            becomes_so(go_on_for, LOOK_AFTER_MAX, have_ended);
            go_on_for = (go_on_for * 2).min(GO_ON_FOR_MAX);
        }
    }
}

fn becomes_so(within: Duration, look_after: Duration, is_so: impl Fn() -> bool) -> bool {
    let since = Instant::now();
    while !is_so() {
        if since.elapsed() > within {
            return false;
        }
        std::thread::sleep(look_after);
    }
    true
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::cuda::copy_engine::hw_queue_admission::tests::{Comm, comm};

    /// Tells that it was dropped.
    struct Told(mpsc::Sender<()>);

    impl Drop for Told {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }

    /// Lets a communicator do one operation after the other until one is held, as happens from some moment on while something is to be freed. Returns that.
    fn held(queues: &HwQueues<Comm, u64>, comm: &Arc<Comm>) -> u64 {
        let mut number = 1;
        while !queues.offer(comm, number, number, |_| ()).is_empty() {
            queues.ended(Arc::as_ptr(comm), number, |_| ());
            number += 1;
        }
        number
    }

    #[test]
    fn nothing_is_freed_while_somebody_does_not_come_and_others_go_on() {
        let (queues, (issued, issues)) = (Arc::new(HwQueues::new(8)), mpsc::channel());
        let issue = move |number: &u64| issued.send(*number).expect("a test that waits");
        let (frees, thread) = DeferredFrees::start(Arc::clone(&queues), issue).expect("a thread");
        let (told, freed) = mpsc::channel();
        let (late, there, other) = (comm(&[0], 0), comm(&[0], 9), comm(&[1], 0));
        assert_eq!(queues.offer(&late, 1, 1, |_| ()), [1]);
        frees.free(Share::SERVICE, Told(told.clone()));
        let number = held(&queues, &other);
        assert_eq!(queues.offer(&there, 1, 2, |_| ()), [2], "it has come");
        queues.ended(Arc::as_ptr(&there), 1, |_| ());
        assert!(freed.try_recv().is_err());
        late.come_to(1);
        queues.ended(Arc::as_ptr(&late), 1, |_| ());
        assert_eq!(freed.recv(), Ok(()));
        // A held operation goes on.
        assert_eq!(issues.recv(), Ok(number));
        queues.ended(Arc::as_ptr(&other), number, |_| ());
        frees.free(Share::SERVICE, Told(told));
        assert_eq!(freed.recv(), Ok(()));
        drop(frees);
        thread.join().expect("its end");
    }

    #[test]
    fn who_has_come_and_does_not_end_holds_others_for_a_while() {
        let (queues, (issued, issues)) = (Arc::new(HwQueues::new(8)), mpsc::channel());
        let issue = move |number: &u64| issued.send(*number).expect("a test that waits");
        let (frees, thread) = DeferredFrees::start(Arc::clone(&queues), issue).expect("a thread");
        let (told, freed) = mpsc::channel();
        let (endless, other) = (comm(&[0], 9), comm(&[1], u64::MAX));
        assert_eq!(queues.offer(&endless, 1, 0, |_| ()), [0]);
        frees.free(Share::SERVICE, Told(told));
        let number = held(&queues, &other);
        assert_eq!(issues.recv(), Ok(number), "it goes on");
        assert!(freed.try_recv().is_err());
        queues.ended(Arc::as_ptr(&other), number, |_| ());
        queues.ended(Arc::as_ptr(&endless), 1, |_| ());
        assert_eq!(freed.recv(), Ok(()));
        drop(frees);
        thread.join().expect("its end");
    }

    #[test]
    fn one_tenants_many_let_anothers_by() {
        /// Takes a while to be dropped, as memory does.
        struct Slow(u32, mpsc::Sender<u32>);
        impl Drop for Slow {
            fn drop(&mut self) {
                std::thread::sleep(Duration::from_millis(2));
                let _ = self.1.send(self.0);
            }
        }
        let queues = Arc::new(HwQueues::<Comm, u64>::new(8));
        let (frees, thread) = DeferredFrees::start(queues, |_| ()).expect("a thread");
        let (told, freed) = mpsc::channel();
        let share = |tenant| Share { tenant, weight: 1 };
        (0..200).for_each(|_| frees.free(share(1), Slow(1, told.clone())));
        frees.free(share(2), Slow(2, told.clone()));
        let before = (0..).take_while(|_| freed.recv().expect("all are freed") == 1).count();
        // As many as were freed while this thread put them there, and one.
        assert!(before < 100, "{before} came first");
        drop((frees, told));
        thread.join().expect("its end");
        assert_eq!(freed.iter().filter(|tenant| *tenant == 1).count() + before, 200, "also behind the first pause");
    }
}
