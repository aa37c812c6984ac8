//! Bounded queues of tenants at one engine: a full one stops nobody else.
//!
//! The first message of a queue that was empty lists the queue. The engine takes listed queues in, and then takes messages off
//! each in that tenant's turn ([`super::Turns`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam::queue::ArrayQueue;

use super::{Share, WakerSlot};

struct TenantQueue<T> {
    share: Share,
    queue: ArrayQueue<T>,
    /// From the message that lists it until the engine has taken it in: it is listed at most once.
    is_listed: AtomicBool,
}

/// The engine's end.
pub struct TenantQueues<T> {
    listed: Arc<ArrayQueue<Arc<TenantQueue<T>>>>,
    waker: WakerSlot,
}

/// Opens queues.
pub struct TenantQueueOpener<T> {
    listed: Arc<ArrayQueue<Arc<TenantQueue<T>>>>,
    waker: WakerSlot,
}

/// A tenant's end; any number of them.
pub struct TenantQueueSender<T> {
    queue: Arc<TenantQueue<T>>,
    listed: Arc<ArrayQueue<Arc<TenantQueue<T>>>>,
    waker: WakerSlot,
}

/// A queue at its engine.
pub struct TenantQueueReceiver<T>(Arc<TenantQueue<T>>);

impl<T> TenantQueues<T> {
    /// Room for so many queues, whose messages wake the slot's engine: those of tenants that have just gone included.
    #[must_use]
    pub fn new(tenants_max: usize, waker: WakerSlot) -> Self {
        TenantQueues { listed: Arc::new(ArrayQueue::new(tenants_max.max(1))), waker }
    }

    /// Opens queues of this engine.
    #[must_use]
    pub fn opener(&self) -> TenantQueueOpener<T> {
        TenantQueueOpener { listed: Arc::clone(&self.listed), waker: self.waker.clone() }
    }

    /// The next queue that has messages again.
    #[must_use]
    pub fn pop_listed(&self) -> Option<(Share, TenantQueueReceiver<T>)> {
        let queue = self.listed.pop()?;
        // Before its messages are taken: one that comes behind the last of them lists it again. Acquires what was pushed by
        // those who have found it listed.
        queue.is_listed.swap(false, Ordering::AcqRel);
        Some((queue.share, TenantQueueReceiver(queue)))
    }

    /// Whether no queue has become one with messages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.listed.is_empty()
    }
}

impl<T> TenantQueueOpener<T> {
    /// A tenant's queue, of at most `capacity` messages. There may be as many as [`TenantQueues::new`] was told, and one a tenant.
    #[must_use]
    pub fn open(&self, share: Share, capacity: usize) -> TenantQueueSender<T> {
        let queue = TenantQueue { share, queue: ArrayQueue::new(capacity), is_listed: AtomicBool::new(false) };
        TenantQueueSender { queue: Arc::new(queue), listed: Arc::clone(&self.listed), waker: self.waker.clone() }
    }
}

impl<T> Clone for TenantQueueOpener<T> {
    fn clone(&self) -> Self {
        TenantQueueOpener { listed: Arc::clone(&self.listed), waker: self.waker.clone() }
    }
}

impl<T> TenantQueueReceiver<T> {
    /// Messages that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.queue.len()
    }

    /// The next message.
    #[must_use]
    pub fn pop(&self) -> Option<T> {
        self.0.queue.pop()
    }
}

impl<T> Clone for TenantQueueSender<T> {
    fn clone(&self) -> Self {
        TenantQueueSender {
            queue: Arc::clone(&self.queue),
            listed: Arc::clone(&self.listed),
            waker: self.waker.clone(),
        }
    }
}

impl<T> TenantQueueSender<T> {
    /// Whether the engine has taken all that was sent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.queue.is_empty()
    }

    /// Sends and wakes the engine.
    ///
    /// # Errors
    /// Gives the message back when the queue is full: the sender keeps it and tries again in a later poll.
    pub fn send(&self, message: T) -> Result<(), T> {
        self.queue.queue.push(message)?;
        if !self.queue.is_listed.swap(true, Ordering::AcqRel) {
            // There is room for every queue, and each is listed at most once.
            let _ = self.listed.push(Arc::clone(&self.queue));
        }
        self.waker.wake();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_stops_nobody_else() {
        let queues = TenantQueues::new(2, WakerSlot::default());
        let [a, b] = [1, 2].map(|tenant| queues.opener().open(Share { tenant, weight: 1 }, 2));
        assert_eq!([a.send(1), a.send(2), a.send(3)], [Ok(()), Ok(()), Err(3)]);
        assert_eq!(b.send(9), Ok(()));
        let (share, queue) = queues.pop_listed().expect("the first");
        assert_eq!((share.tenant, queue.pop(), queue.pop(), queue.pop()), (1, Some(1), Some(2), None));
        assert_eq!(a.send(3), Ok(()), "there is room again, and it is listed again");
        let (share, of_b) = queues.pop_listed().expect("the second");
        assert_eq!((share.tenant, of_b.pop()), (2, Some(9)));
        assert!(queues.pop_listed().is_some_and(|(_, queue)| queue.pop() == Some(3)));
        assert!(queues.is_empty());
    }

    #[test]
    fn no_message_is_left_behind_by_threads_that_race() {
        const EACH: u64 = 20_000;
        let queues = TenantQueues::new(2, WakerSlot::default());
        std::thread::scope(|scope| {
            for tenant in [1, 2] {
                let queue = queues.opener().open(Share { tenant, weight: 1 }, 8);
                scope.spawn(move || {
                    for n in 0..EACH {
                        let mut message = n;
                        while let Err(back) = queue.send(message) {
                            message = back;
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut next = [0u64; 2];
            while next.iter().sum::<u64>() < 2 * EACH {
                let Some((share, queue)) = queues.pop_listed() else {
                    std::thread::yield_now();
                    continue;
                };
                while let Some(n) = queue.pop() {
                    let next = &mut next[share.tenant as usize - 1];
                    assert_eq!(n, *next, "in order");
                    *next += 1;
                }
            }
        });
    }
}
