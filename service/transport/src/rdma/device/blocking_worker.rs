//! Worker thread for blocking verbs calls, so that the engine's flows do not wait for the kernel.
//!
//! The thread begins with the first work, does one after the other, in turns of their tenants, and ends after the transport, which does not
//! wait for it. Done work is taken back in a later poll.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mccs_runtime::{Share, TurnSender, turn_channel};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::rdma::verbs::VerbsError;

/// Work to be done; it keeps its result.
pub(in crate::rdma) trait Work: Send + 'static {
    /// For whom.
    fn share(&self) -> Share;

    /// Does it.
    fn work(&mut self);
}

#[derive(Debug)]
struct Shared<W> {
    done: Mutex<Vec<W>>,
    /// Readable when something is done.
    news: EventFd,
    is_over: AtomicBool,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct BlockingWorker<W> {
    shared: Arc<Shared<W>>,
    /// Name of the thread.
    name: &'static str,
    /// To the thread, if there is one.
    queue: Option<TurnSender<W>>,
    /// Works that have not been taken back, of tenants that have some.
    works: BTreeMap<u32, usize>,
    /// The engine does it: for tests whose time is not the clock's.
    is_in_place: bool,
}

/// Locks what a thread that panics leaves as it should be.
pub(in crate::rdma) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<W: Work> BlockingWorker<W> {
    /// Nothing to do yet, for a thread of that name.
    pub(in crate::rdma) fn new(name: &'static str) -> Result<Self, VerbsError> {
        let news = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
        let news = news.map_err(|errno| VerbsError { call: "eventfd", errno })?;
        let shared = Arc::new(Shared { done: Mutex::default(), news, is_over: AtomicBool::new(false) });
        Ok(BlockingWorker { shared, name, queue: None, works: BTreeMap::new(), is_in_place: false })
    }

    /// Whether everything is done in place, when it is begun, or aside.
    #[cfg(test)]
    pub(in crate::rdma) fn do_in_place(&mut self, is_in_place: bool) {
        self.is_in_place = is_in_place;
    }

    /// Begins. It is given back once, when it is done.
    pub(in crate::rdma) fn begin(&mut self, work: W) {
        let share = work.share();
        *self.works.entry(share.tenant).or_default() += 1;
        if self.queue.is_none() && !self.is_in_place {
            self.queue = start(self.name, &self.shared).ok();
        }
        let refused = match &self.queue {
            Some(queue) if !self.is_in_place => queue.send(share, work).err().map(|refused| refused.0),
            _ => Some(work),
        };
        // If the kernel refuses a thread there is nobody but the engine.
        if let Some(work) = refused {
            self.shared.finish(work);
        }
    }

    /// One that is done, if there is one.
    pub(in crate::rdma) fn take(&mut self) -> Option<W> {
        if self.is_idle() {
            return None;
        }
        let done = lock(&self.shared.done).pop()?;
        if let Entry::Occupied(mut works) = self.works.entry(done.share().tenant) {
            *works.get_mut() -= 1;
            if *works.get() == 0 {
                works.remove();
            }
        }
        Some(done)
    }

    /// Whether all that was begun has been taken back.
    pub(in crate::rdma) fn is_idle(&self) -> bool {
        self.works.is_empty()
    }

    /// How much of a tenant's has not been taken back.
    pub(in crate::rdma) fn works_of(&self, share: Share) -> usize {
        self.works.get(&share.tenant).copied().unwrap_or(0)
    }

    /// Readable when there is something to take.
    pub(in crate::rdma) fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.news.as_fd()
    }

    /// The descriptor's news is known.
    pub(in crate::rdma) fn hear(&self) {
        // Nothing to read is as good as read.
        let _ = self.shared.news.read();
    }
}

impl<W> Drop for BlockingWorker<W> {
    /// Nobody waits for the thread: it ends after what it is at.
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
    }
}

fn start<W: Work>(name: &str, shared: &Arc<Shared<W>>) -> std::io::Result<TurnSender<W>> {
    let (sender, mut receiver) = turn_channel::<W>();
    let shared = Arc::clone(shared);
    std::thread::Builder::new().name(name.into()).spawn(move || {
        while let Ok(work) = receiver.recv(None) {
            if !shared.is_over.load(Ordering::Relaxed) {
                shared.finish(work);
            }
        }
    })?;
    Ok(sender)
}

impl<W: Work> Shared<W> {
    fn finish(&self, mut work: W) {
        work.work();
        lock(&self.done).push(work);
        // It is full when the engine is to wake anyway.
        let _ = self.news.write(1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Notes for whom it was done; the first one is held up.
    struct Noted {
        share: Share,
        order: Arc<Mutex<Vec<u32>>>,
        gate: Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>,
    }

    impl Work for Noted {
        fn share(&self) -> Share {
            self.share
        }

        fn work(&mut self) {
            if let Some((begun, gate)) = self.gate.take() {
                begun.send(()).expect("the test waits");
                gate.recv().expect("it is opened");
            }
            lock(&self.order).push(self.share.tenant);
        }
    }

    #[test]
    fn a_tenant_with_much_to_do_lets_anothers_first_work_by() {
        let (order, mut worker) = (Arc::default(), BlockingWorker::new("worker").expect("a descriptor"));
        let work = |tenant, gate| Noted { share: Share { tenant, weight: 1 }, order: Arc::clone(&order), gate };
        let ((begun, begins), (open, gate)) = (mpsc::channel(), mpsc::channel());
        worker.begin(work(1, Some((begun, gate))));
        begins.recv().expect("it has begun");
        (0..100).for_each(|_| worker.begin(work(1, None)));
        worker.begin(work(2, None));
        assert_eq!([1, 2, 3].map(|tenant| worker.works_of(Share { tenant, weight: 1 })), [101, 1, 0]);
        // Longer than a turn.
        std::thread::sleep(std::time::Duration::from_millis(1));
        open.send(()).expect("it waits");
        let mut back = 0;
        while back < 102 {
            match worker.take() {
                Some(_) => back += 1,
                None => std::thread::yield_now(),
            }
        }
        assert!(worker.is_idle());
        assert_eq!(lock(&order)[..3], [1, 2, 1], "what was begun, then the other tenant's");
    }
}
