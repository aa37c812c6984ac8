//! Engines that reach beyond the service: none of them does anything while it is handed over, nor in a program before its time.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use mccs_handover::Handover;
use mccs_runtime::{Account, Context, Engine, Progress, RuntimeError, Runtimes, Share, Waker, WakerSlot};

/// An engine that stands still while its service does.
pub struct Standing<E> {
    engine: E,
    handover: Arc<Handover>,
    /// Whether it waits for the end of the program before.
    reaches: Reaches,
}

/// Peers that an engine deals with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaches {
    /// Readers of this host's state.
    Lookers,
    /// Other hosts, which take one program for the service.
    Hosts,
}

impl<E: Engine + 'static> Standing<E> {
    /// An engine that stands still as `reaches` says.
    pub fn new(engine: E, handover: &Arc<Handover>, reaches: Reaches) -> Self {
        Standing { engine, handover: Arc::clone(handover), reaches }
    }

    /// Starts it on a runtime. `set_waker` hands on the engine's waker.
    ///
    /// # Errors
    /// As [`Runtimes::start_engine`].
    pub fn start(self, runtimes: &Runtimes, runtime: u32, set_waker: impl FnOnce(&Waker)) -> Result<(), RuntimeError> {
        let slot = WakerSlot::default();
        self.handover.register(slot.clone());
        let started = runtimes.start_engine(runtime, |waker| {
            set_waker(&waker);
            slot.set(waker);
            Box::new(self)
        });
        started.map(drop)
    }
}

impl<E> Standing<E> {
    fn may_move(&self) -> bool {
        match self.reaches {
            Reaches::Lookers => self.handover.may_be_seen(),
            Reaches::Hosts => self.handover.is_alone(),
        }
    }
}

impl<E: Engine> Engine for Standing<E> {
    fn name(&self) -> String {
        self.engine.name()
    }

    fn share(&self) -> Option<Share> {
        self.engine.share()
    }

    fn account(&self) -> Option<Arc<Account>> {
        self.engine.account()
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        if self.may_move() { self.engine.poll(cx) } else { Progress::IDLE }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        !self.may_move() || self.engine.prepare_to_sleep()
    }

    fn awaits_others(&self) -> bool {
        self.may_move() && self.engine.awaits_others()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.engine.descriptors()
    }

    fn ignores_descriptors(&self) -> bool {
        !self.may_move() || self.engine.ignores_descriptors()
    }

    fn doorbells(&self) -> Vec<BorrowedFd<'_>> {
        self.engine.doorbells()
    }
}
