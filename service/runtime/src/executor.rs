//! Executor: the runtime's thread polls engines that are awake, spins for a while, then sleeps in
//! `epoll_wait`.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::run_queue::Poll;
use mccs_ipc::contention;
use mccs_ipc::sync::Doorbell;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::time::TimeSpec;

use super::mailbox::{EngineState, NO_RUNTIME, RuntimeState, RuntimeTable, route};
use super::run_queue::Awake;
use super::time_slice::TimeSlice;
use super::{Context, Engine, EngineId, Progress, RuntimeOptions, Share};

/// Orders of the control path to a runtime.
pub(super) enum Order {
    Adopt(Adopted),
    Move { engine: EngineId, to: u32 },
}

/// An engine on its way to a runtime.
pub(super) struct Adopted {
    pub(super) engine: Box<dyn Engine>,
    pub(super) state: Arc<EngineState>,
}

#[derive(Default)]
pub(super) struct RuntimeStats {
    pub(super) tid: AtomicU32,
    pub(super) rounds: AtomicU64,
    pub(super) parks: AtomicU64,
}

/// Event token of the runtime's own doorbell. Engines' tokens are their numbers, with [`RUNG`] for their doorbells.
const DOORBELL_TOKEN: u64 = u64::MAX;
const RUNG: u64 = 1 << 63;
/// How doorbells are watched: each ring is an event, so that nobody need clear them, which is a system call.
const WHEN_RUNG: EpollFlags = EpollFlags::EPOLLIN.union(EpollFlags::EPOLLET);
/// How often descriptors are looked at while engines keep the runtime busy; where system calls are slow, too, less often.
const EVENTS_EVERY: Duration = Duration::from_micros(50);
const EVENTS_EVERY_SLOW: Duration = Duration::from_micros(200);
/// Rounds for which one look at a slow clock is good: a short operation takes no more.
const ROUNDS_A_SLOW_LOOK: u32 = 4;
/// One round in so many is timed, and stands for all of them.
const TIMED_ROUNDS: u64 = 16;
/// Times that a round looks for engines which others have woken in it.
const CHAIN_MAX: u32 = 4;
/// A clock is slow that takes as long: a system call, where the machine's is none that programs can read themselves.
const SLOW_CLOCK: Duration = Duration::from_micros(1);
/// Sleeps shorter than this are timed to the microsecond.
const FINE_BELOW: Duration = Duration::from_millis(5);
/// Sleeps from this on may be as much longer as a round takes.
const COARSE_FROM: Duration = Duration::from_millis(20);
/// A tenant with which the service had to do within this time may be waited for.
const LATELY: Duration = Duration::from_millis(50);
/// Readiness events taken at a time.
const EVENTS_MAX: usize = 64;

struct Slot {
    engine: Box<dyn Engine>,
    state: Arc<EngineState>,
    /// Tenant that it works for.
    share: Share,
    /// When the engine last found work; `None` while it sleeps.
    awake_since: Option<Instant>,
    slept_at: Instant,
    wake_at: Option<Instant>,
    /// As [`Context::is_readable`] for the next poll.
    is_readable: bool,
    /// Whether its descriptors are watched: not while it sleeps and ignores them.
    is_watched: bool,
}

/// Engines that are woken in a round, and polled in it.
struct Chain {
    /// Times that the round may still look for them.
    left: u32,
    /// Some were woken whose tenants' turn in the round was over.
    goes_on: bool,
}

impl Chain {
    /// Whether there are any, and the round has not looked too often.
    fn takes(&mut self, state: &RuntimeState) -> bool {
        let takes = self.left > 0 && !state.ready.is_empty();
        self.left -= u32::from(takes);
        takes
    }
}

/// State of one runtime's thread.
pub(super) struct Executor {
    index: u32,
    table: Arc<RuntimeTable>,
    pub(super) stats: Arc<RuntimeStats>,
    stop: Arc<AtomicBool>,
    options: RuntimeOptions,
    epoll: Epoll,
    slots: BTreeMap<EngineId, Slot>,
    awake: Awake,
    /// No sleeping engine's timer is due before this.
    earliest_timer: Option<Instant>,
}

fn is_clock_slow() -> bool {
    // The least of some: any one may be interrupted.
    let looks = std::iter::repeat_with(|| Instant::now().elapsed()).take(8);
    looks.min().is_some_and(|least| least >= SLOW_CLOCK)
}

fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl Executor {
    /// The waker of a runtime without engines, which its doorbell wakes.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub(super) fn new(
        index: u32,
        table: &Arc<RuntimeTable>,
        doorbell: &Doorbell,
        options: RuntimeOptions,
        stop: &Arc<AtomicBool>,
    ) -> std::io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(doorbell, EpollEvent::new(WHEN_RUNG, DOORBELL_TOKEN))?;
        Ok(Executor {
            index,
            table: Arc::clone(table),
            stats: Arc::default(),
            stop: Arc::clone(stop),
            options,
            epoll,
            slots: BTreeMap::new(),
            awake: Awake::new(options.budget),
            earliest_timer: None,
        })
    }

    /// Returns the engines, to be dropped when no runtime uses what they share any more.
    pub(super) fn run(mut self) -> Vec<Box<dyn Engine>> {
        self.stats.tid.store(nix::unistd::gettid().as_raw() as u32, Ordering::Relaxed);
        let table = Arc::clone(&self.table);
        let Some(state) = table[self.index as usize].get() else { return Vec::new() };
        let (rounds_a_look, events_every) =
            if is_clock_slow() { (ROUNDS_A_SLOW_LOOK, EVENTS_EVERY_SLOW) } else { (1, EVENTS_EVERY) };
        let (mut looked_at_events, mut slice) = (Instant::now(), TimeSlice::of_this_thread());
        // The time, and for how many rounds it is good.
        let (mut now, mut known_for) = (looked_at_events, rounds_a_look);
        while !self.stop.load(Ordering::Acquire) {
            if known_for == 0 {
                (now, known_for) = (Instant::now(), rounds_a_look);
            }
            known_for -= 1;
            // Nobody else counts.
            self.stats.rounds.store(self.stats.rounds.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            self.follow_orders(state, now);
            self.take_ready(state, now);
            let busy = self.poll_engines(state, now);
            if busy {
                slice.busy(now);
            } else {
                slice.idle(now);
            }
            if self.awake.is_empty() {
                looked_at_events = self.park(state, now);
                (now, known_for) = (looked_at_events, rounds_a_look);
            } else if now.duration_since(looked_at_events) >= events_every {
                self.wake_timers(now);
                looked_at_events = self.take_events(EpollTimeout::ZERO);
                (now, known_for) = (looked_at_events, rounds_a_look);
            } else if !busy {
                // A tenant, or another runtime, may need this core to make the work waited for.
                // The round found nothing, and took no time. A slow clock's look may be some rounds old.
                let before = (known_for == 0).then(|| if rounds_a_look == 1 { now } else { Instant::now() });
                std::thread::yield_now();
                if let Some(before) = before {
                    (now, known_for) = (Instant::now(), rounds_a_look);
                    slice.was_away(now.saturating_duration_since(before), || self.threads_at_work(now));
                }
            }
        }
        let end = |slot: Slot| {
            slot.state.runtime.store(NO_RUNTIME, Ordering::Release);
            slot.engine
        };
        std::mem::take(&mut self.slots).into_values().map(end).collect()
    }

    /// Threads that work with each other: the service's own, and those of tenants for which something was done lately.
    fn threads_at_work(&self, now: Instant) -> u32 {
        let was_awake = |slot: &Slot| slot.awake_since.is_some() || now.duration_since(slot.slept_at) < LATELY;
        let tenants = self.slots.values().filter(|slot| slot.share != Share::SERVICE && was_awake(slot)).count();
        (tenants + self.table.iter().filter(|state| state.get().is_some()).count()) as u32
    }

    fn follow_orders(&mut self, state: &RuntimeState, now: Instant) {
        while let Some(order) = state.orders.pop() {
            match order {
                Order::Adopt(adopted) => self.adopt(adopted, now),
                Order::Move { engine, to } => self.give_away(engine, to),
            }
        }
    }

    fn adopt(&mut self, adopted: Adopted, now: Instant) {
        let Adopted { engine, state } = adopted;
        self.watch(engine.as_ref(), engine.descriptors(), EpollEvent::new(EpollFlags::EPOLLIN, state.id.0));
        self.watch(engine.as_ref(), engine.doorbells(), EpollEvent::new(WHEN_RUNG, state.id.0 | RUNG));
        // Cleared before the first poll: a wake-up from here on finds the engine on this runtime.
        state.notified.store(false, Ordering::Release);
        let (id, share) = (state.id, engine.share().unwrap_or(Share::SERVICE));
        let (awake_since, wake_at) = (Some(now), None);
        let (slept_at, is_readable, is_watched) = (now, true, true);
        let slot = Slot { engine, state, share, awake_since, slept_at, wake_at, is_readable, is_watched };
        self.slots.insert(id, slot);
        self.awake.push(share, id);
    }

    fn watch(&self, engine: &dyn Engine, descriptors: Vec<BorrowedFd<'_>>, event: EpollEvent) {
        for fd in descriptors {
            if let Err(error) = self.epoll.add(fd, event) {
                tracing::error!(engine = %engine.name(), %error, "cannot watch a descriptor");
            }
        }
    }

    fn give_away(&mut self, id: EngineId, to: u32) {
        let Some(slot) = self.slots.remove(&id) else { return };
        self.awake.remove(id);
        self.forget_all(slot.engine.as_ref());
        slot.state.runtime.store(to, Ordering::Release);
        let order = Order::Adopt(Adopted { engine: slot.engine, state: Arc::clone(&slot.state) });
        let refused = match self.table.get(to as usize).and_then(OnceLock::get) {
            Some(target) => target.orders.push(order).map(|()| target.unpark()).err(),
            None => Some(order),
        };
        // A runtime that cannot take it (its orders are full) leaves the engine where it was.
        if let Some(Order::Adopt(adopted)) = refused {
            slot.state.runtime.store(self.index, Ordering::Release);
            self.adopt(adopted, Instant::now());
        }
    }

    fn forget_all(&self, engine: &dyn Engine) {
        self.forget(engine.descriptors());
        self.forget(engine.doorbells());
    }

    /// Some may not be watched.
    fn forget(&self, descriptors: Vec<BorrowedFd<'_>>) {
        for fd in descriptors {
            let _ = self.epoll.delete(fd);
        }
    }

    /// Wakes engines that others have notified. One that has moved on is sent after.
    fn take_ready(&mut self, state: &RuntimeState, now: Instant) {
        while let Some(engine) = state.ready.pop() {
            if self.slots.contains_key(&engine.id) {
                engine.notified.store(false, Ordering::Release);
                self.wake(engine.id, now);
            } else if engine.runtime.load(Ordering::Acquire) != self.index {
                route(&self.table, engine);
            }
            // Otherwise it has ended, or its adoption is still in the queue and polls it anyway.
        }
    }

    fn wake(&mut self, id: EngineId, now: Instant) {
        if let Some(slot) = self.slots.get(&id).filter(|slot| !slot.is_watched) {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, id.0);
            self.watch(slot.engine.as_ref(), slot.engine.descriptors(), event);
        }
        if let Some(slot) = self.slots.get_mut(&id) {
            slot.is_watched = true;
            if slot.awake_since.is_none() {
                self.awake.push(slot.share, id);
            } else {
                self.awake.poll_again(slot.share, id);
            }
            slot.awake_since = Some(now);
            slot.wake_at = None;
        }
    }

    /// Polls awake engines, and then those that they have woken: what one hands on is done in the same round. Returns whether one
    /// was busy.
    fn poll_engines(&mut self, state: &RuntimeState, now: Instant) -> bool {
        self.awake.begin_round();
        let mut chain = Chain { left: CHAIN_MAX, goes_on: false };
        let mut any_busy = self.poll_due(state, now, &mut chain);
        while chain.takes(state) || chain.goes_on {
            self.take_ready(state, now);
            self.awake.look_again();
            any_busy |= self.poll_due(state, now, &mut chain);
        }
        any_busy
    }

    /// Polls engines that are due in this round; returns whether one was busy. A message of one of the service's engines to another that
    /// has been polled in this round does not wait for the next one, which begins with all tenants.
    fn poll_due(&mut self, state: &RuntimeState, now: Instant, chain: &mut Chain) -> bool {
        chain.goes_on = false;
        let (mut any_busy, is_timed) = (false, self.stats.rounds.load(Ordering::Relaxed).is_multiple_of(TIMED_ROUNDS));
        while let Some(Poll { share, engine: id, budget }) = self.awake.next() {
            let Some(slot) = self.slots.get_mut(&id) else { continue };
            let is_readable = std::mem::take(&mut slot.is_readable);
            let cx = Context { now, budget, is_readable, tenants: self.awake.tenants() };
            let began = is_timed.then(Instant::now);
            let keep_awake = match slot.engine.poll(&cx) {
                Progress::Busy => {
                    any_busy = true;
                    if let Some(began) = began {
                        let stands_for_ns = began.elapsed().as_nanos() as u64 * TIMED_ROUNDS;
                        slot.state.busy_ns.fetch_add(stands_for_ns, Ordering::Relaxed);
                    }
                    slot.awake_since = Some(now);
                    true
                }
                Progress::Idle { wake_at } => {
                    slot.wake_at = wake_at;
                    let idle_for = slot.awake_since.map_or(Duration::ZERO, |since| now.duration_since(since));
                    let spin =
                        if slot.engine.awaits_others() { self.options.spin_while_waiting } else { self.options.spin };
                    // A woken thread has the core sooner than one that yields it.
                    let sleeps = spin < Duration::MAX && contention::is_starved(now);
                    let spin = if sleeps { Duration::ZERO } else { spin };
                    idle_for < spin || !slot.engine.prepare_to_sleep()
                }
                Progress::Done => {
                    if let Some(slot) = self.slots.remove(&id) {
                        self.forget_all(slot.engine.as_ref());
                        slot.state.runtime.store(NO_RUNTIME, Ordering::Release);
                    }
                    false
                }
            };
            if keep_awake {
                self.awake.keep(share, id);
            } else {
                if let Some(slot) = self.slots.get_mut(&id) {
                    slot.awake_since = None;
                    slot.slept_at = now;
                    slot.is_watched = !slot.engine.ignores_descriptors();
                    self.earliest_timer = earlier(self.earliest_timer, slot.wake_at);
                }
                if let Some(slot) = self.slots.get(&id).filter(|slot| !slot.is_watched) {
                    self.forget(slot.engine.descriptors());
                }
            }
            if share == Share::SERVICE && chain.takes(state) {
                self.take_ready(state, now);
                chain.goes_on = true;
            }
        }
        any_busy
    }

    fn wake_timers(&mut self, now: Instant) {
        if self.earliest_timer.is_none_or(|at| at > now) {
            return;
        }
        let due: Vec<_> = (self.slots.iter())
            .filter(|(_, slot)| slot.awake_since.is_none() && slot.wake_at.is_some_and(|at| at <= now))
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.wake(id, now);
            // A thread that finds nothing sleeps again at once: its time has come, and tells of no work that more
            // may follow.
            if let Some(slot) = self.slots.get_mut(&id) {
                slot.awake_since =
                    now.checked_sub(self.options.spin.max(self.options.spin_while_waiting)).or(Some(now));
            }
        }
        let asleep = self.slots.values().filter(|slot| slot.awake_since.is_none());
        self.earliest_timer = asleep.fold(None, |earliest, slot| earlier(earliest, slot.wake_at));
    }

    /// Waits for events and wakes their engines. Returns the time after.
    fn take_events(&mut self, timeout: EpollTimeout) -> Instant {
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        // An interrupted wait is as good as a timed-out one: the loop comes back.
        let count = self.epoll.wait(&mut events, timeout).unwrap_or(0);
        let now = Instant::now();
        for event in events.iter().take(count) {
            match event.data() {
                DOORBELL_TOKEN => {}
                token if token & RUNG != 0 => self.wake(EngineId(token & !RUNG), now),
                id => {
                    self.wake(EngineId(id), now);
                    if let Some(slot) = self.slots.get_mut(&EngineId(id)) {
                        slot.is_readable = true;
                    }
                }
            }
        }
        now
    }

    /// Sleeps until a wake-up, a descriptor, an order, or the earliest timer, `now` being the time at the round's beginning.
    /// Returns the time after.
    fn park(&mut self, state: &RuntimeState, now: Instant) -> Instant {
        state.parked.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        let work_arrived = !state.ready.is_empty() || !state.orders.is_empty() || self.stop.load(Ordering::Acquire);
        let now = if work_arrived {
            Instant::now()
        } else {
            // The time of the round makes no difference to a timer that is far away.
            let far = self.earliest_timer.filter(|at| at.saturating_duration_since(now) >= COARSE_FROM);
            let now = if self.earliest_timer.is_some() && far.is_none() { Instant::now() } else { now };
            let wait = self.earliest_timer.map(|at| at.saturating_duration_since(now));
            let is_short = wait.is_some_and(|wait| wait < FINE_BELOW);
            if let Some(wait) = wait.filter(|_| is_short) {
                // Waits for the same as below, on a finer clock; an interrupted one is as good as a timed-out one.
                let mut events = [PollFd::new(self.epoll.0.as_fd(), PollFlags::POLLIN)];
                let _ = ppoll(&mut events, Some(TimeSpec::from_duration(wait)), None);
            }
            // Rounded up: a wait that ends just before the timer would spin through the last fraction of a millisecond.
            let timeout = wait.filter(|_| !is_short).map(|wait| {
                EpollTimeout::try_from(wait.as_millis().saturating_add(1).min(60_000) as i32)
                    .unwrap_or(EpollTimeout::NONE)
            });
            let timeout = timeout.unwrap_or(if is_short { EpollTimeout::ZERO } else { EpollTimeout::NONE });
            self.stats.parks.fetch_add(1, Ordering::Relaxed);
            self.take_events(timeout)
        };
        state.parked.store(false, Ordering::Release);
        self.wake_timers(now);
        now
    }
}

#[cfg(test)]
mod tests;
