//! Wake-ups and bounded mailboxes between engines.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use crossbeam::queue::ArrayQueue;
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

/// Receiving end of a bounded queue of messages to an engine.
pub struct Mailbox<T> {
    queue: Arc<ArrayQueue<T>>,
    waker: WakerSlot,
}

/// Sending end; any number of them.
pub struct Sender<T> {
    queue: Arc<ArrayQueue<T>>,
    waker: WakerSlot,
}

impl<T> Mailbox<T> {
    /// A mailbox of at most `capacity` messages.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Mailbox { queue: Arc::new(ArrayQueue::new(capacity)), waker: WakerSlot::default() }
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
