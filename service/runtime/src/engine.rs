//! The [`Engine`] trait: a state machine that a runtime polls.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use super::{Account, Share};

/// Number of an engine, for the life of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct EngineId(pub u64);

impl std::fmt::Display for EngineId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The result of a poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Did work; poll again soon.
    Busy,
    /// Had nothing to do. Poll again after a wake-up, or at `wake_at` at the latest.
    Idle {
        /// When time alone makes work, if it does.
        wake_at: Option<Instant>,
    },
    /// Ended; the runtime drops the engine.
    Done,
}

impl Progress {
    /// Idle until woken.
    pub const IDLE: Progress = Progress::Idle { wake_at: None };
}

/// Tenants with engines of their own that are awake on a runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AwakeTenants {
    /// None.
    None,
    /// This one alone.
    One(u32),
    /// More than one.
    Several,
}

impl AwakeTenants {
    /// Whether another than this one waits for the thread, or may at any moment.
    #[must_use]
    pub fn has_others(self, share: Share) -> bool {
        match self {
            AwakeTenants::None => false,
            AwakeTenants::One(tenant) => tenant != share.tenant,
            AwakeTenants::Several => true,
        }
    }
}

/// Resources of an engine while it is polled.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    /// Time at the start of the runtime's round, or of one shortly before where clocks are slow. Engines use no other clock.
    pub now: Instant,
    /// How many items (commands, messages) one poll may take at most.
    pub budget: usize,
    /// Whether a descriptor of the engine's may be readable. Otherwise none was when the runtime looked last; it looks again when it
    /// sleeps, and often while it does not.
    pub is_readable: bool,
    /// Tenants with engines that are awake in this round.
    pub tenants: AwakeTenants,
}

impl Context {
    /// The context of a caller that polls an engine, or part of one, without watching its descriptors.
    #[must_use]
    pub fn new(now: Instant, budget: usize) -> Self {
        Context { now, budget, is_readable: true, tenants: AwakeTenants::None }
    }
}

/// A state machine that a runtime polls, round robin with the runtime's other engines.
///
/// An engine never blocks, and does a bounded amount of work a poll. It is on one runtime at a time, and can be moved
/// between polls; all that others hold of it is its [`super::Waker`].
pub trait Engine: Send {
    /// Name for the operator, such as `proxy host`.
    fn name(&self) -> String;

    /// The tenant that the engine works for alone, if it does: a tenant's engines together have a bounded part of each round of
    /// their runtime. The same for the engine's whole life.
    fn share(&self) -> Option<Share> {
        None
    }

    /// Work that it has done for each tenant, where it works for several; asked once.
    fn account(&self) -> Option<Arc<Account>> {
        None
    }

    /// Does some work.
    fn poll(&mut self, cx: &Context) -> Progress;

    /// Called when polls have been idle for the runtime's spin time: arms doorbells. Returns false if work arrived
    /// meanwhile; otherwise the engine is not polled again before it is woken, a descriptor of it is readable, a doorbell of it is
    /// rung, or `wake_at` has passed.
    fn prepare_to_sleep(&mut self) -> bool {
        true
    }

    /// Whether others may have it go on at any moment: then it is polled for [`RuntimeOptions::spin_while_waiting`] before it sleeps.
    ///
    /// [`RuntimeOptions::spin_while_waiting`]: super::RuntimeOptions::spin_while_waiting
    fn awaits_others(&self) -> bool {
        false
    }

    /// Descriptors whose readability wakes the engine; the same set for the engine's whole life.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Whether the engine, which is about to sleep, can do nothing about its descriptors before it is woken otherwise: they are not watched
    /// meanwhile. One that stays readable would not let the runtime sleep.
    fn ignores_descriptors(&self) -> bool {
        false
    }

    /// Doorbells that wake the engine each time they are rung, and that nobody clears; the same set for the engine's whole life.
    fn doorbells(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }
}
