//! Bounded mailboxes between engines, and wake-ups of sleeping threads.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};

use crossbeam::queue::{ArrayQueue, SegQueue};
use mccs_ipc::sync::Doorbell;

use super::EngineId;
use super::executor::Order;

/// Most runtimes of one service: more than any host has cores worth dedicating.
pub(super) const RUNTIMES_MAX: usize = 128;
/// Most engines of one service, which bounds the ready queues. One a session, so also most sessions.
pub(super) const ENGINES_MAX: usize = 8192;
/// [`EngineState::runtime`] of an engine that has ended.
pub(super) const NO_RUNTIME: u32 = u32::MAX;

/// The part of an engine that others can see.
pub(super) struct EngineState {
    pub(super) id: EngineId,
    /// Runtime the engine is on, or is on its way to.
    pub(super) runtime: AtomicU32,
    /// Set from a wake-up until the next poll: an engine stands in a ready queue at most once.
    pub(super) notified: AtomicBool,
    /// Time that its polls have taken in which it had work, about.
    pub(super) busy_ns: AtomicU64,
}

/// The part of a runtime that others can see.
pub(super) struct RuntimeState {
    pub(super) ready: ArrayQueue<Arc<EngineState>>,
    pub(super) orders: ArrayQueue<Order>,
    pub(super) parked: AtomicBool,
    pub(super) doorbell: Doorbell,
}

impl RuntimeState {
    /// Ends the runtime's sleep, if it sleeps.
    pub(super) fn unpark(&self) {
        // Pairs with the fence between `parked = true` and the last look at the queues in the executor: either it sees
        // what was pushed before this call, or this load sees `parked`.
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::Relaxed) && self.parked.swap(false, Ordering::AcqRel) {
            self.doorbell.ring();
        }
    }
}

/// Slots for all runtimes a service may ever start.
pub(super) type RuntimeTable = [OnceLock<RuntimeState>; RUNTIMES_MAX];

/// Wakes one engine, wherever it is.
#[derive(Clone)]
pub struct Waker {
    pub(super) engine: Arc<EngineState>,
    pub(super) table: Arc<RuntimeTable>,
}

impl Waker {
    /// Has the engine polled soon. Cheap when a wake-up is already pending.
    pub fn wake(&self) {
        if !self.engine.notified.swap(true, Ordering::AcqRel) {
            route(&self.table, Arc::clone(&self.engine));
        }
    }
}

impl Waker {
    /// Moves the engine to another runtime, between two of its polls. It stays where it is if that one does not exist, or has
    /// too many orders.
    pub fn move_to(&self, runtime: u32) {
        let engine = self.engine.id;
        let from = self.engine.runtime.load(Ordering::Acquire);
        let is_there = self.table.get(runtime as usize).is_some_and(|slot| slot.get().is_some());
        if let Some(state) =
            self.table.get(from as usize).and_then(OnceLock::get).filter(|_| is_there && from != runtime)
            && state.orders.push(Order::Move { engine, to: runtime }).is_ok()
        {
            state.unpark();
        }
    }
}

/// Puts a notified engine into the ready queue of the runtime it is on.
pub(super) fn route(table: &RuntimeTable, engine: Arc<EngineState>) {
    let index = engine.runtime.load(Ordering::Acquire);
    if let Some(runtime) = table.get(index as usize).and_then(OnceLock::get) {
        // The queue has room for every engine there can be, and each is in it at most once.
        let _ = runtime.ready.push(engine);
        runtime.unpark();
    }
}

/// A waker that is filled in when its engine is started: mailboxes exist before their engines do.
#[derive(Clone, Default)]
pub struct WakerSlot(Arc<OnceLock<Waker>>);

impl WakerSlot {
    /// Sets the engine to wake; later calls change nothing.
    pub fn set(&self, waker: Waker) {
        let _ = self.0.set(waker);
    }

    /// Whether both are of one engine.
    #[must_use]
    pub fn is_same(&self, other: &WakerSlot) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Moves the engine; see [`Waker::move_to`].
    pub fn move_to(&self, runtime: u32) {
        if let Some(waker) = self.0.get() {
            waker.move_to(runtime);
        }
    }

    /// Wakes the engine. Before [`WakerSlot::set`] nothing: an engine is polled when it starts anyway.
    pub fn wake(&self) {
        if let Some(waker) = self.0.get() {
            waker.wake();
        }
    }
}

/// A bounded queue.
enum Queue<T> {
    /// All slots are there from the beginning: the data path allocates nothing.
    Ready(ArrayQueue<T>),
    /// Slots are made as messages come, and go with them.
    Growing { messages: SegQueue<T>, count: AtomicUsize, capacity: usize },
}

impl<T> Queue<T> {
    fn push(&self, message: T) -> Result<(), T> {
        match self {
            Queue::Ready(queue) => queue.push(message),
            Queue::Growing { messages, count, capacity } => {
                // Counted before it can be taken out.
                if count.fetch_add(1, Ordering::Relaxed) >= *capacity {
                    count.fetch_sub(1, Ordering::Relaxed);
                    return Err(message);
                }
                messages.push(message);
                Ok(())
            }
        }
    }

    fn pop(&self) -> Option<T> {
        match self {
            Queue::Ready(queue) => queue.pop(),
            Queue::Growing { messages, count, .. } => {
                let message = messages.pop()?;
                count.fetch_sub(1, Ordering::Relaxed);
                Some(message)
            }
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Queue::Ready(queue) => queue.is_empty(),
            Queue::Growing { messages, .. } => messages.is_empty(),
        }
    }
}

/// Receiving end of a bounded queue of messages to an engine.
pub struct Mailbox<T> {
    queue: Arc<Queue<T>>,
    waker: WakerSlot,
}

/// Sending end; any number of them.
pub struct Sender<T> {
    queue: Arc<Queue<T>>,
    waker: WakerSlot,
}

impl<T> Mailbox<T> {
    /// A mailbox of at most `capacity` messages, with room for all of them from the beginning.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Mailbox { queue: Arc::new(Queue::Ready(ArrayQueue::new(capacity))), waker: WakerSlot::default() }
    }

    /// The same, with memory for those messages alone that wait: for mailboxes that there are many of, and whose capacity is for the worst.
    #[must_use]
    pub fn growing(capacity: usize) -> Self {
        let queue = Queue::Growing { messages: SegQueue::new(), count: AtomicUsize::new(0), capacity };
        Mailbox { queue: Arc::new(queue), waker: WakerSlot::default() }
    }

    /// The slot to fill with the owner's waker.
    #[must_use]
    pub fn waker(&self) -> &WakerSlot {
        &self.waker
    }

    /// A sender.
    #[must_use]
    pub fn sender(&self) -> Sender<T> {
        Sender { queue: Arc::clone(&self.queue), waker: self.waker.clone() }
    }

    /// The next message.
    #[must_use]
    pub fn pop(&self) -> Option<T> {
        self.queue.pop()
    }

    /// Whether no message waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Sender { queue: Arc::clone(&self.queue), waker: self.waker.clone() }
    }
}

impl<T> Sender<T> {
    /// Sends and wakes the owner.
    ///
    /// # Errors
    /// Gives the message back when the mailbox is full: the sender keeps it and tries again in a later poll.
    pub fn send(&self, message: T) -> Result<(), T> {
        self.queue.push(message)?;
        self.waker.wake();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mailboxes_take_as_many_messages_as_they_have_room_for_in_order() {
        for mailbox in [Mailbox::new(40), Mailbox::growing(40)] {
            let sender = mailbox.sender();
            for round in 0..3 {
                assert!(mailbox.is_empty() && mailbox.pop().is_none());
                (0..40).for_each(|message| sender.send(round + message).expect("room"));
                assert_eq!(sender.send(99), Err(99));
                assert!(!mailbox.is_empty());
                (0..40).for_each(|message| assert_eq!(mailbox.pop(), Some(round + message)));
            }
        }
    }

    /// Together they never have more than there is room for, and none is lost.
    #[test]
    fn a_growing_mailbox_is_bounded_for_senders_at_once() {
        const EACH: u64 = 20_000;
        let mailbox = Mailbox::growing(8);
        let taken = std::thread::scope(|scope| {
            for _ in 0..3 {
                let sender = mailbox.sender();
                scope.spawn(move || {
                    for mut message in 1..=EACH {
                        while let Err(back) = sender.send(message) {
                            message = back;
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let (mut count, mut sum) = (0, 0);
            while count < 3 * EACH {
                match mailbox.pop() {
                    Some(message) => (count, sum) = (count + 1, sum + message),
                    None => std::thread::yield_now(),
                }
            }
            sum
        });
        assert_eq!(taken, 3 * EACH * (EACH + 1) / 2);
        assert!(mailbox.is_empty());
    }
}
