//! Worker thread for blocking verbs calls, so that the engine's flows do not wait for the kernel.
//!
//! The thread begins with the first work, does one after the other, and ends after the transport, which does not wait for it. Done
//! work is taken back in a later poll.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::rdma::verbs::VerbsError;

/// Work to be done; it keeps its result.
pub(in crate::rdma) trait Work: Send + 'static {
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
    queue: Option<mpsc::Sender<W>>,
    /// Works that have not been taken back.
    works: usize,
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
        Ok(BlockingWorker { shared, name, queue: None, works: 0, is_in_place: false })
    }

    /// Whether everything is done in place, when it is begun, or aside.
    #[cfg(test)]
    pub(in crate::rdma) fn do_in_place(&mut self, is_in_place: bool) {
        self.is_in_place = is_in_place;
    }

    /// Begins. It is given back once, when it is done.
    pub(in crate::rdma) fn begin(&mut self, work: W) {
        self.works += 1;
        if self.queue.is_none() && !self.is_in_place {
            self.queue = start(self.name, &self.shared).ok();
        }
        let refused = match &self.queue {
            Some(queue) if !self.is_in_place => queue.send(work).err().map(|refused| refused.0),
            _ => Some(work),
        };
        // If the kernel refuses a thread there is nobody but the engine.
        if let Some(work) = refused {
            self.shared.finish(work);
        }
    }

    /// One that is done, if there is one.
    pub(in crate::rdma) fn take(&mut self) -> Option<W> {
        if self.works == 0 {
            return None;
        }
        let done = lock(&self.shared.done).pop()?;
        self.works -= 1;
        Some(done)
    }

    /// Whether all that was begun has been taken back.
    pub(in crate::rdma) fn is_idle(&self) -> bool {
        self.works == 0
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

fn start<W: Work>(name: &str, shared: &Arc<Shared<W>>) -> std::io::Result<mpsc::Sender<W>> {
    let (sender, receiver) = mpsc::channel::<W>();
    let shared = Arc::clone(shared);
    std::thread::Builder::new().name(name.into()).spawn(move || {
        for work in receiver {
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
