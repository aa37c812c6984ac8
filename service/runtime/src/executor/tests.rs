use std::os::fd::BorrowedFd;
use std::sync::mpsc::{Receiver, Sender, channel};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::super::{Context, Progress, Runtimes, Waker, WakerSlot};
use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

/// Says what it is polled with, and wakes another engine, if there is one.
struct Teller {
    polls: Sender<(Instant, bool)>,
    bell: Arc<Doorbell>,
    descriptor: Arc<EventFd>,
    next: WakerSlot,
}

impl Engine for Teller {
    fn name(&self) -> String {
        "teller".into()
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        if cx.is_readable {
            let _ = self.descriptor.read();
        }
        self.next.wake();
        let _ = self.polls.send((cx.now, cx.is_readable));
        Progress::IDLE
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.descriptor.as_fd()]
    }

    fn doorbells(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.bell.as_fd()]
    }
}

/// An engine that has been polled for the first time: what it says, and what wakes it.
struct Told {
    polls: Receiver<(Instant, bool)>,
    bell: Arc<Doorbell>,
    descriptor: Arc<EventFd>,
    waker: WakerSlot,
}

impl Told {
    fn start(runtimes: &Runtimes, next: &WakerSlot) -> Self {
        let ((sender, polls), waker) = (channel(), WakerSlot::default());
        let bell = Arc::new(Doorbell::new().expect("eventfd"));
        let descriptor = Arc::new(EventFd::from_flags(EfdFlags::EFD_NONBLOCK).expect("eventfd"));
        let (own_bell, own_descriptor) = (Arc::clone(&bell), Arc::clone(&descriptor));
        let teller = Teller { polls: sender, bell: own_bell, descriptor: own_descriptor, next: next.clone() };
        let make = |own| {
            waker.set(own);
            Box::new(teller) as Box<dyn Engine>
        };
        runtimes.start_engine(0, make).expect("starts");
        let told = Told { polls, bell, descriptor, waker };
        assert!(told.polled().1, "nothing is known of its descriptor yet");
        told
    }

    /// Time and readability of the next poll.
    fn polled(&self) -> (Instant, bool) {
        self.polls.recv_timeout(PATIENCE).expect("it is polled")
    }
}

fn runtimes() -> Arc<Runtimes> {
    let runtimes =
        Runtimes::new(RuntimeOptions { spin: Duration::ZERO, spin_while_waiting: Duration::ZERO, budget: 1 });
    runtimes.start_runtime("test").expect("starts");
    runtimes
}

#[test]
fn engines_are_told_of_descriptors_and_hear_each_ring() {
    let runtimes = runtimes();
    let engine = Told::start(&runtimes, &WakerSlot::default());
    for _ in 0..3 {
        engine.bell.ring();
        assert!(!engine.polled().1);
        engine.descriptor.write(1).expect("counts");
        assert!(engine.polled().1);
    }
    runtimes.stop();
}

#[test]
fn who_is_woken_by_an_engine_is_polled_in_the_same_round() {
    let runtimes = runtimes();
    let last = Told::start(&runtimes, &WakerSlot::default());
    // The first poll of each wakes those behind it.
    let middle = Told::start(&runtimes, &last.waker);
    last.polled();
    let first = Told::start(&runtimes, &middle.waker);
    middle.polled();
    last.polled();
    for _ in 0..3 {
        first.bell.ring();
        let (round, _) = first.polled();
        assert_eq!([middle.polled(), last.polled()], [(round, false); 2]);
    }
    runtimes.stop();
}

/// Is always awake, counts its polls, and wakes another engine in each, if there is one.
struct Counting {
    polls: Arc<AtomicU64>,
    next: WakerSlot,
}

impl Engine for Counting {
    fn name(&self) -> String {
        "counting".into()
    }

    fn poll(&mut self, _: &Context) -> Progress {
        self.polls.fetch_add(1, Ordering::Release);
        self.next.wake();
        Progress::Busy
    }
}

#[test]
fn engines_that_hand_work_to_each_other_are_polled_again_in_a_round_and_leave_others_their_turn() {
    let runtimes = runtimes();
    let wakers: [WakerSlot; 2] = Default::default();
    let [first, second, alone]: [Arc<AtomicU64>; 3] = Default::default();
    let nexts = [wakers[1].clone(), wakers[0].clone(), WakerSlot::default()];
    let owns = [Some(&wakers[0]), Some(&wakers[1]), None];
    for ((polls, next), own) in [&first, &second, &alone].into_iter().zip(nexts).zip(owns) {
        let engine = Counting { polls: Arc::clone(polls), next };
        let make = |waker| {
            own.into_iter().for_each(|own| own.set(Waker::clone(&waker)));
            Box::new(engine) as Box<dyn Engine>
        };
        runtimes.start_engine(0, make).expect("starts");
    }
    let until = Instant::now() + PATIENCE;
    while alone.load(Ordering::Acquire) < 10_000 {
        assert!(Instant::now() < until, "others leave it no turn");
        std::thread::yield_now();
    }
    runtimes.stop();
    let [first, second, alone] = [first, second, alone].map(|polls| polls.load(Ordering::Acquire));
    for of_two in [first, second] {
        assert!(of_two > alone + alone / 2, "polled {of_two} times in {alone} rounds: no more than once in each");
        assert!(of_two <= alone * (2 + u64::from(CHAIN_MAX)) + 1000, "polled {of_two} times in {alone} rounds");
    }
}

/// Leaves its descriptor readable for as long as it ignores that.
struct Ignorant {
    ignores: Arc<AtomicBool>,
    polls: Sender<bool>,
    bell: Arc<Doorbell>,
    descriptor: EventFd,
}

impl Engine for Ignorant {
    fn name(&self) -> String {
        "ignorant".into()
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        if cx.is_readable && !self.ignores_descriptors() {
            let _ = self.descriptor.read();
        }
        let _ = self.polls.send(cx.is_readable);
        Progress::IDLE
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.descriptor.as_fd()]
    }

    fn ignores_descriptors(&self) -> bool {
        self.ignores.load(Ordering::Relaxed)
    }

    fn doorbells(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.bell.as_fd()]
    }
}

#[test]
fn what_an_engine_ignores_wakes_nobody_until_it_listens_again() {
    let runtimes = runtimes();
    let (ignores, bell) = (Arc::new(AtomicBool::new(true)), Arc::new(Doorbell::new().expect("eventfd")));
    let descriptor = EventFd::from_value_and_flags(1, EfdFlags::EFD_NONBLOCK).expect("eventfd");
    let (sender, polls) = channel();
    let engine = Ignorant { ignores: Arc::clone(&ignores), polls: sender, bell: Arc::clone(&bell), descriptor };
    runtimes.start_engine(0, |_| Box::new(engine)).expect("starts");
    let polled = || polls.recv_timeout(PATIENCE).expect("it is polled");
    assert!(polled());
    let other = Told::start(&runtimes, &WakerSlot::default());
    for _ in 0..10 {
        other.bell.ring();
        other.polled();
    }
    assert!(polls.try_recv().is_err(), "its descriptor keeps the runtime awake");
    // It is still heard by other ways, and its descriptor again as soon as it wants to know.
    bell.ring();
    while polled() {}
    ignores.store(false, Ordering::Relaxed);
    bell.ring();
    while !polled() {}
    runtimes.stop();
}

/// Has nothing to do, and awaits others as long as it is told to.
struct Waiting {
    awaits: Arc<AtomicBool>,
    polls: Sender<()>,
}

impl Engine for Waiting {
    fn name(&self) -> String {
        "waiting".into()
    }

    fn poll(&mut self, _: &Context) -> Progress {
        let _ = self.polls.send(());
        Progress::IDLE
    }

    fn awaits_others(&self) -> bool {
        self.awaits.load(Ordering::Acquire)
    }
}

#[test]
fn who_awaits_others_is_polled_for_longer() {
    let options = RuntimeOptions { spin: Duration::ZERO, spin_while_waiting: Duration::MAX, budget: 1 };
    let runtimes = Runtimes::new(options);
    let runtime = runtimes.start_runtime("test").expect("starts");
    let ((sender, polls), awaits) = (channel(), Arc::new(AtomicBool::new(true)));
    let waiting = Waiting { awaits: Arc::clone(&awaits), polls: sender };
    let parks = || runtimes.runtimes()[runtime as usize].parks;
    runtimes.start_engine(runtime, |_| Box::new(waiting)).expect("starts");
    for _ in 0..1000 {
        polls.recv_timeout(PATIENCE).expect("it is polled without being woken");
    }
    let parks_before = parks();
    awaits.store(false, Ordering::Release);
    let until = Instant::now() + PATIENCE;
    while parks() == parks_before {
        assert!(Instant::now() < until, "it does not sleep");
        std::thread::yield_now();
    }
    runtimes.stop();
}

struct Holder {
    _held: Arc<()>,
    /// As an engine that starts others has.
    _runtimes: Arc<Runtimes>,
}

impl Engine for Holder {
    fn name(&self) -> String {
        "holder".into()
    }

    fn poll(&mut self, _: &Context) -> Progress {
        Progress::IDLE
    }
}

#[test]
fn who_stops_at_once_keeps_no_engine_that_was_on_its_way() {
    for _ in 0..200 {
        let runtimes =
            Runtimes::new(RuntimeOptions { spin: Duration::ZERO, spin_while_waiting: Duration::ZERO, budget: 1 });
        let (held, runtime) = (Arc::new(()), runtimes.start_runtime("test").unwrap());
        for _ in 0..8 {
            let holder = Holder { _held: Arc::clone(&held), _runtimes: Arc::clone(&runtimes) };
            runtimes.start_engine(runtime, |_| Box::new(holder)).unwrap();
        }
        runtimes.stop();
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
