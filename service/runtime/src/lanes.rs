//! Bounded queues of tenants at one engine: each tenant has a lane of its own, so that a full one stops nobody else.
//!
//! The first message of a lane that was empty lists the lane. The engine takes listed lanes in, and then takes messages off
//! each in that tenant's turn ([`super::Turns`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam::queue::ArrayQueue;

use super::{Share, WakerSlot};

struct Lane<T> {
    share: Share,
    queue: ArrayQueue<T>,
    /// From the message that lists it until the engine has taken it in: it is listed at most once.
    is_listed: AtomicBool,
}

/// The engine's end.
pub struct Lanes<T> {
    listed: Arc<ArrayQueue<Arc<Lane<T>>>>,
    waker: WakerSlot,
}

/// Opens lanes.
pub struct LaneOpener<T> {
    listed: Arc<ArrayQueue<Arc<Lane<T>>>>,
    waker: WakerSlot,
}

/// A tenant's end; any number of them.
pub struct LaneSender<T> {
    lane: Arc<Lane<T>>,
    listed: Arc<ArrayQueue<Arc<Lane<T>>>>,
    waker: WakerSlot,
}

/// A lane at its engine.
pub struct LaneReceiver<T>(Arc<Lane<T>>);

impl<T> Lanes<T> {
    /// Room for so many lanes, whose messages wake the slot's engine.
    #[must_use]
    pub fn new(lanes_max: usize, waker: WakerSlot) -> Self {
        Lanes { listed: Arc::new(ArrayQueue::new(lanes_max.max(1))), waker }
    }

    /// Opens lanes of this engine.
    #[must_use]
    pub fn opener(&self) -> LaneOpener<T> {
        LaneOpener { listed: Arc::clone(&self.listed), waker: self.waker.clone() }
    }

    /// The next lane that has messages again.
    #[must_use]
    pub fn pop_listed(&self) -> Option<(Share, LaneReceiver<T>)> {
        let lane = self.listed.pop()?;
        // Before its messages are taken: one that comes behind the last of them lists it again. Acquires what was pushed by
        // those who have found it listed.
        lane.is_listed.swap(false, Ordering::AcqRel);
        Some((lane.share, LaneReceiver(lane)))
    }

    /// Whether no lane has become one with messages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.listed.is_empty()
    }
}

impl<T> LaneOpener<T> {
    /// A tenant's lane, of at most `capacity` messages. There may be as many as [`Lanes::new`] was told, and one a tenant.
    #[must_use]
    pub fn open(&self, share: Share, capacity: usize) -> LaneSender<T> {
        let lane = Lane { share, queue: ArrayQueue::new(capacity), is_listed: AtomicBool::new(false) };
        LaneSender { lane: Arc::new(lane), listed: Arc::clone(&self.listed), waker: self.waker.clone() }
    }
}

impl<T> Clone for LaneOpener<T> {
    fn clone(&self) -> Self {
        LaneOpener { listed: Arc::clone(&self.listed), waker: self.waker.clone() }
    }
}

impl<T> LaneReceiver<T> {
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

impl<T> Clone for LaneSender<T> {
    fn clone(&self) -> Self {
        LaneSender { lane: Arc::clone(&self.lane), listed: Arc::clone(&self.listed), waker: self.waker.clone() }
    }
}

impl<T> LaneSender<T> {
    /// Sends and wakes the engine.
    ///
    /// # Errors
    /// Gives the message back when the lane is full: the sender keeps it and tries again in a later poll.
    pub fn send(&self, message: T) -> Result<(), T> {
        self.lane.queue.push(message)?;
        if !self.lane.is_listed.swap(true, Ordering::AcqRel) {
            // There is room for every lane, and each is listed at most once.
            let _ = self.listed.push(Arc::clone(&self.lane));
        }
        self.waker.wake();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_lane_stops_nobody_else() {
        let lanes = Lanes::new(2, WakerSlot::default());
        let [a, b] = [1, 2].map(|tenant| lanes.opener().open(Share { tenant, weight: 1 }, 2));
        assert_eq!([a.send(1), a.send(2), a.send(3)], [Ok(()), Ok(()), Err(3)]);
        assert_eq!(b.send(9), Ok(()));
        let (share, lane) = lanes.pop_listed().expect("the first");
        assert_eq!((share.tenant, lane.pop(), lane.pop(), lane.pop()), (1, Some(1), Some(2), None));
        assert_eq!(a.send(3), Ok(()), "there is room again, and it is listed again");
        let (share, of_b) = lanes.pop_listed().expect("the second");
        assert_eq!((share.tenant, of_b.pop()), (2, Some(9)));
        assert!(lanes.pop_listed().is_some_and(|(_, lane)| lane.pop() == Some(3)));
        assert!(lanes.is_empty());
    }

    #[test]
    fn no_message_is_left_behind_by_threads_that_race() {
        const EACH: u64 = 20_000;
        let lanes = Lanes::new(2, WakerSlot::default());
        std::thread::scope(|scope| {
            for tenant in [1, 2] {
                let lane = lanes.opener().open(Share { tenant, weight: 1 }, 8);
                scope.spawn(move || {
                    for n in 0..EACH {
                        let mut message = n;
                        while let Err(back) = lane.send(message) {
                            message = back;
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut next = [0u64; 2];
            while next.iter().sum::<u64>() < 2 * EACH {
                let Some((share, lane)) = lanes.pop_listed() else {
                    std::thread::yield_now();
                    continue;
                };
                while let Some(n) = lane.pop() {
                    let next = &mut next[share.tenant as usize - 1];
                    assert_eq!(n, *next, "in order");
                    *next += 1;
                }
            }
        });
    }
}
