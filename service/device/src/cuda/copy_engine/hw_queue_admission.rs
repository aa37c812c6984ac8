//! Admission to a GPU's hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`): whose streams may wait
//! there.
//!
//! All streams of a process share a GPU's hardware queues: 8, or as many as `CUDA_DEVICE_MAX_CONNECTIONS` says, 32 at most. A
//! stream that waits for a word holds up what else is in its queue, whoever's that is. Streams of the service wait for tenants, who may never come, and for
//! each other. So communicators are *active* on their GPUs only while there are queues enough: half of them are ever used, of those half
//! by communicators whose ranks' streams have not come to what they called, and three quarters by those of one tenant. An operation of another waits here, in
//! order; if all of its ranks have come, nothing that came later goes before it on its GPUs, or, if it waits for its own tenant, nothing of that tenant's.
//!
//! Whether ranks have come their tenant says, who may lie, or have copies wait on purpose: hence the limit for a tenant, which holds even while it is alone,
//! since who is active is only sent away when its time is up.
//!
//! Operations of a tenant's communicators that share slots (`slots.rs`) take turns there: one that has come, and is next for a block, is waited for by
//! all others of that block.
//!
//! Measured on an H200 (decision 028): with a quarter of the queues waiting no other stream is held up, with half of them hardly one, with all of them every one.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::cuda::memory::slots::{BlockId, Turns};

/// Part of a GPU's queues, in eighths, that is used.
const SHARE: u32 = 4;
/// Those of streams that wait for tenants.
const UNREADY_SHARE: u32 = 2;
/// Those of a tenant.
const TENANT_SHARE: u32 = 3;
/// The environment variable that tells the CUDA driver how many queues this process is to have.
pub const QUEUES_VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// The most that there can be.
pub const QUEUES_MAX: u32 = 32;
/// The driver's own number.
const QUEUES: u32 = 8;

/// How many queues a GPU has for this process.
pub(crate) fn queues_of_process() -> u32 {
    let said = std::env::var(QUEUES_VARIABLE).ok().and_then(|said| said.parse::<u32>().ok());
    said.filter(|count| (1..=QUEUES_MAX).contains(count)).unwrap_or(QUEUES)
}

/// A communicator, as far as queues go.
pub(crate) trait Holder {
    /// GPUs that it has streams on.
    fn gpus(&self) -> &[usize];
    /// Its owner, by name.
    fn tenant(&self) -> &str;
    /// Streams on each.
    fn streams(&self) -> u32;
    /// Blocks of slots that an operation uses alone, if it uses any.
    fn turns(&self, _number: u64) -> Option<Turns> {
        None
    }
    /// Whether the streams of all ranks have come to an operation.
    fn have_come(&self, number: u64) -> bool;
}

/// Nobody: holds queues in tests that need none.
#[cfg(any(test, feature = "testing"))]
pub(crate) struct NoHolder;

#[cfg(any(test, feature = "testing"))]
impl Holder for NoHolder {
    fn gpus(&self) -> &[usize] {
        &[]
    }

    fn tenant(&self) -> &str {
        ""
    }

    fn streams(&self) -> u32 {
        0
    }

    fn have_come(&self, _: u64) -> bool {
        true
    }
}

/// See the module's documentation. `F` is an operation.
pub(crate) struct HwQueues<H, F> {
    count: u32,
    is_crowded: AtomicBool,
    state: Mutex<State<H, F>>,
}

/// Portions that are held back for the time being.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    Nothing,
    /// Operations that not all ranks' streams have come to.
    Unready,
    All,
}

/// Portions that were let go and have not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnderWay {
    Nothing,
    /// Operations that all ranks' streams have come to.
    Ready,
    /// Others, too.
    Unready,
}

/// An operation that is under way.
pub(crate) type Name<H> = (*const H, u64);

struct State<H, F> {
    hold: Hold,
    active: Vec<Active<H>>,
    waiting: VecDeque<Waiting<H, F>>,
}

/// A communicator with operations that were let go.
struct Active<H> {
    holder: Weak<H>,
    numbers: Vec<u64>,
}

struct Waiting<H, F> {
    holder: Arc<H>,
    number: u64,
    operation: F,
}

impl<H: Holder, F> HwQueues<H, F> {
    pub(crate) fn new(count: u32) -> Self {
        let state = Mutex::new(State { hold: Hold::Nothing, active: Vec::new(), waiting: VecDeque::new() });
        HwQueues { count, is_crowded: AtomicBool::new(false), state }
    }

    fn state(&self) -> MutexGuard<'_, State<H, F>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether something waits, so that somebody has to [`HwQueues::look`] now and then.
    pub(crate) fn is_crowded(&self) -> bool {
        self.is_crowded.load(Ordering::Acquire)
    }

    /// All ranks have called an operation. Whatever is let go by that, it or others, `issue` is given, in order and under the lock: it
    /// must neither block nor drop operations. Returns the same, to be dropped.
    pub(crate) fn offer(&self, holder: &Arc<H>, number: u64, operation: F, issue: impl FnMut(&F)) -> Vec<F> {
        let mut state = self.state();
        state.waiting.push_back(Waiting { holder: Arc::clone(holder), number, operation });
        self.scan(&mut state, issue)
    }

    /// An operation has ended, or will not be. Lets others go, as [`HwQueues::offer`].
    pub(crate) fn ended(&self, holder: *const H, number: u64, issue: impl FnMut(&F)) -> Vec<F> {
        let mut state = self.state();
        for active in state.active.iter_mut().filter(|active| active.is(holder)) {
            active.numbers.retain(|running| *running != number);
        }
        state.active.retain(|active| !active.numbers.is_empty());
        self.scan(&mut state, issue)
    }

    /// Lets go what may by now, as [`HwQueues::offer`], unless somebody else is about to.
    pub(crate) fn look(&self, issue: impl FnMut(&F)) -> Vec<F> {
        match self.state.try_lock() {
            Ok(mut state) => self.scan(&mut state, issue),
            Err(_) => Vec::new(),
        }
    }

    /// Holds operations back from now on, or no more. Lets portions go to `issue`, as in [`HwQueues::offer`]. Returns what is under way.
    pub(crate) fn hold(&self, hold: Hold, issue: impl FnMut(&F)) -> UnderWay {
        let mut state = self.state();
        state.hold = hold;
        let let_go = self.scan(&mut state, issue);
        let is_unready = |active: &Active<H>| active.holder.upgrade().is_some_and(|h| !h.have_come(active.last()));
        let under_way = match &state.active[..] {
            [] => UnderWay::Nothing,
            active if active.iter().any(is_unready) => UnderWay::Unready,
            _ => UnderWay::Ready,
        };
        drop(state);
        drop(let_go);
        under_way
    }

    /// Names what is under way.
    pub(crate) fn names(&self) -> Vec<Name<H>> {
        let mut names = Vec::new();
        for Active { holder, numbers } in &self.state().active {
            names.extend(numbers.iter().map(|number| (holder.as_ptr(), *number)));
        }
        names
    }

    /// Whether something of a communicator waits, and nothing is under way; if so, whether all ranks' streams have come to it.
    pub(crate) fn waits(&self, holder: &Arc<H>) -> Option<bool> {
        let state = self.state();
        if state.active.iter().any(|active| active.is(&**holder)) {
            return None;
        }
        let next = state.waiting.iter().find(|waiting| Arc::ptr_eq(&waiting.holder, holder))?;
        Some(holder.have_come(next.number))
    }

    /// Whether a communicator with so many streams on a GPU that waits for its tenant leaves room for one that does not.
    pub(crate) fn have_room_beside(&self, streams: u32) -> bool {
        self.part(UNREADY_SHARE) >= streams && self.part(SHARE) >= 2 * streams
    }

    fn part(&self, eighths: u32) -> u32 {
        self.count * eighths / 8
    }

    /// Gives back what waits of a communicator: nothing of it is let go any more.
    pub(crate) fn forget(&self, holder: &Arc<H>) -> Vec<F> {
        let mut state = self.state();
        let (gone, kept) = std::mem::take(&mut state.waiting).into_iter().partition(|w| Arc::ptr_eq(&w.holder, holder));
        state.waiting = kept;
        let gone: VecDeque<Waiting<H, F>> = gone;
        gone.into_iter().map(|waiting| waiting.operation).collect()
    }

    fn scan(&self, state: &mut State<H, F>, mut issue: impl FnMut(&F)) -> Vec<F> {
        let State { hold, active, waiting } = state;
        let (mut let_go, mut kept) = (Vec::new(), VecDeque::new());
        // GPUs on which somebody is next, or is of its tenant's.
        let mut taken: Vec<(usize, Option<Arc<H>>)> = Vec::new();
        // Blocks of slots for which somebody is next.
        let mut awaited: Vec<BlockId> = Vec::new();
        for Waiting { holder, number, operation } in waiting.drain(..) {
            let is_behind_own = kept.iter().any(|before: &Waiting<H, F>| Arc::ptr_eq(&before.holder, &holder));
            let is_before = |(gpu, of): &(usize, Option<Arc<H>>)| {
                holder.gpus().contains(gpu) && of.as_ref().is_none_or(|of| of.tenant() == holder.tenant())
            };
            let is_behind = is_behind_own || taken.iter().any(is_before);
            let is_held = match hold {
                Hold::Nothing => false,
                Hold::Unready => !holder.have_come(number),
                Hold::All => true,
            };
            let turns = holder.turns(number);
            let has_slots =
                turns.as_ref().is_none_or(|turns| !turns.meets(&awaited) && has_turn(active, &holder, number, turns));
            if !is_behind && !is_held && has_slots && self.has_room(active, &*holder, number) {
                match active.iter_mut().find(|active| active.is(&*holder)) {
                    Some(active) => active.numbers.push(number),
                    None => active.push(Active { holder: Arc::downgrade(&holder), numbers: vec![number] }),
                }
                issue(&operation);
                let_go.push(operation);
            } else {
                if !is_behind_own && holder.have_come(number) && !has_slots {
                    awaited.extend(turns.iter().flat_map(|turns| &turns.blocks));
                } else if !is_behind_own && holder.have_come(number) {
                    let of = (!self.has_tenants_room(active, &*holder)).then(|| Arc::clone(&holder));
                    taken.extend(holder.gpus().iter().map(|gpu| (*gpu, of.clone())));
                }
                kept.push_back(Waiting { holder, number, operation });
            }
        }
        *waiting = kept;
        self.is_crowded.store(!waiting.is_empty(), Ordering::Release);
        let_go
    }

    /// Does something while nobody begins an operation, unless one is under way in a block of slots that not all ranks' streams have come to.
    pub(crate) fn unless_unready_in<T>(&self, block: BlockId, then: impl FnOnce() -> T) -> Option<T> {
        let state = self.state();
        let is_unready = |active: &Active<H>| {
            active.holder.upgrade().is_some_and(|holder| {
                let is_in_it = |number: u64| holder.turns(number).is_some_and(|turns| turns.meets(&[block]));
                active.numbers.iter().any(|number| is_in_it(*number) && !holder.have_come(*number))
            })
        };
        let done = (!state.active.iter().any(is_unready)).then(then);
        drop(state);
        done
    }

    /// Whether an operation of a communicator may go: whether that can be active on all of its GPUs, and, if its ranks' streams have not come, wait there
    /// for them.
    fn has_room(&self, active: &[Active<H>], holder: &H, number: u64) -> bool {
        let own = active.iter().find(|active| active.is(holder));
        let has_place =
            own.is_some() || self.fits(active, holder, SHARE, |_, _| true) && self.has_tenants_room(active, holder);
        // A communicator that is active with what its ranks have come to must not wait for tenants with the next beyond the share
        // of those who do.
        let waits_already = || own.is_some_and(|own| !holder.have_come(own.last()));
        let may_wait = || self.fits(active, holder, UNREADY_SHARE, |other, last| !other.have_come(last));
        has_place && (holder.have_come(number) || waits_already() || may_wait())
    }

    /// Whether its tenant may have it active.
    fn has_tenants_room(&self, active: &[Active<H>], holder: &H) -> bool {
        self.fits(active, holder, TENANT_SHARE, |other, _| other.tenant() == holder.tenant())
    }

    /// Whether a communicator's streams fit into so many eighths of each of its GPUs' queues, beside those of the others that count.
    fn fits(&self, active: &[Active<H>], holder: &H, eighths: u32, counts: impl Fn(&H, u64) -> bool) -> bool {
        holder.gpus().iter().all(|gpu| {
            let of = |active: &Active<H>| {
                let other = active.holder.upgrade().filter(|other| other.gpus().contains(gpu))?;
                (!active.is(holder) && counts(&other, active.last())).then(|| other.streams())
            };
            let used: u32 = active.iter().filter_map(of).sum();
            used == 0 || used + holder.streams() <= self.part(eighths)
        })
    }
}

/// Whether an operation may use its blocks of slots now: nobody else does, and it waits for nobody who might wait for others that need them.
fn has_turn<H: Holder>(active: &[Active<H>], holder: &Arc<H>, number: u64, turns: &Turns) -> bool {
    let uses = |active: &Active<H>| {
        active.holder.upgrade().is_some_and(|other| {
            active.numbers.iter().any(|number| other.turns(*number).is_some_and(|of| of.meets(&turns.blocks)))
        })
    };
    let is_free = !active.iter().filter(|active| !active.is(&**holder)).any(uses);
    is_free && (turns.is_alone || holder.have_come(number))
}

impl<H> Active<H> {
    fn is(&self, holder: *const H) -> bool {
        std::ptr::eq(self.holder.as_ptr(), holder)
    }

    /// Its last operation.
    fn last(&self) -> u64 {
        self.numbers.last().copied().unwrap_or(0)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    pub(crate) struct Comm {
        tenant: &'static str,
        gpus: Vec<usize>,
        come: AtomicU64,
        /// Turns of all its operations.
        turns: Option<Turns>,
    }

    impl Comm {
        pub(crate) fn come_to(&self, number: u64) {
            self.come.store(number, Ordering::Relaxed);
        }
    }

    impl Holder for Comm {
        fn gpus(&self) -> &[usize] {
            &self.gpus
        }
        fn tenant(&self) -> &str {
            self.tenant
        }
        fn streams(&self) -> u32 {
            1
        }
        fn turns(&self, _number: u64) -> Option<Turns> {
            self.turns.clone()
        }
        fn have_come(&self, number: u64) -> bool {
            self.come.load(Ordering::Relaxed) >= number
        }
    }

    pub(crate) fn comm(gpus: &[usize], come: u64) -> Arc<Comm> {
        comm_of("a", gpus, come)
    }

    fn comm_of(tenant: &'static str, gpus: &[usize], come: u64) -> Arc<Comm> {
        Arc::new(Comm { tenant, gpus: gpus.to_vec(), come: AtomicU64::new(come), turns: None })
    }

    fn in_slots(gpus: &[usize], blocks: &[BlockId], is_alone: bool, come: u64) -> Arc<Comm> {
        let turns = Some(Turns { blocks: blocks.to_vec(), is_alone });
        Arc::new(Comm { tenant: "a", gpus: gpus.to_vec(), come: AtomicU64::new(come), turns })
    }

    #[test]
    fn who_shares_slots_takes_turns_once_its_ranks_have_come() {
        let queues: HwQueues<Comm, u32> = HwQueues::new(32);
        let [one, two, three] = [&[7][..], &[7, 8], &[8]].map(|blocks| in_slots(&[0], blocks, false, 0));
        let elsewhere = comm(&[0], 9);
        assert!(queues.offer(&one, 1, 10, |_| ()).is_empty(), "it might wait for the others, and they for the slots");
        two.come_to(2);
        assert_eq!(queues.offer(&two, 1, 20, |_| ()), [20]);
        assert_eq!(queues.offer(&two, 2, 21, |_| ()), [21], "they are its own");
        three.come_to(1);
        one.come_to(1);
        assert!(queues.offer(&three, 1, 30, |_| ()).is_empty(), "another uses one of its blocks");
        assert_eq!(queues.offer(&elsewhere, 1, 40, |_| ()), [40], "who needs no slots waits for none");
        two.come_to(9);
        assert!(queues.offer(&two, 3, 22, |_| ()).is_empty(), "it is another's turn");
        assert!(queues.ended(Arc::as_ptr(&two), 1, |_| ()).is_empty());
        assert_eq!(queues.ended(Arc::as_ptr(&two), 2, |_| ()), [10, 30], "side by side, in blocks of their own");
        assert!(queues.ended(Arc::as_ptr(&one), 1, |_| ()).is_empty());
        assert_eq!(queues.ended(Arc::as_ptr(&three), 1, |_| ()), [22]);
    }

    #[test]
    fn who_is_alone_in_a_block_waits_for_nobody_and_lets_others_in_once_it_has_come() {
        let queues: HwQueues<Comm, u32> = HwQueues::new(32);
        let alone = in_slots(&[0], &[7], true, 0);
        assert_eq!(queues.offer(&alone, 1, 1, |_| ()), [1]);
        assert_eq!((queues.unless_unready_in(7, || 5), queues.unless_unready_in(8, || 5)), (None, Some(5)));
        alone.come_to(1);
        assert_eq!(queues.unless_unready_in(7, || 5), Some(5));
    }

    #[test]
    fn who_never_comes_leaves_room_for_who_does() {
        let queues: HwQueues<Comm, u32> = HwQueues::new(8);
        let late: Vec<_> = (0..5).map(|_| comm(&[0, 1], 0)).collect();
        let let_go: Vec<_> = late.iter().zip(0..).flat_map(|(comm, n)| queues.offer(comm, 1, n, |_| ())).collect();
        assert_eq!(let_go, [0, 1], "a quarter of eight");
        assert!(queues.is_crowded());
        let there: Vec<_> = (0..3).map(|_| comm_of("b", &[1], 9)).collect();
        assert_eq!(queues.offer(&there[0], 1, 10, |_| ()), [10]);
        assert_eq!(queues.offer(&there[1], 1, 11, |_| ()), [11], "half of eight");
        assert!(queues.offer(&there[2], 1, 12, |_| ()).is_empty());
        // Its turn is before those that have not come.
        assert_eq!(queues.ended(Arc::as_ptr(&there[0]), 1, |_| ()), [12]);
        late[3].come_to(1);
        assert!(queues.look(|_| ()).is_empty());
        assert_eq!(queues.ended(Arc::as_ptr(&there[1]), 1, |_| ()), [3]);
        assert_eq!(queues.forget(&late[4]), [4]);
    }

    #[test]
    fn operations_of_a_communicator_keep_their_order_and_it_makes_room() {
        let queues: HwQueues<Comm, u32> = HwQueues::new(2);
        let (one, wide) = (comm(&[0], 100), comm(&[0, 1], 100));
        assert_eq!(queues.offer(&one, 1, 1, |_| ()), [1]);
        assert_eq!(queues.offer(&one, 2, 2, |_| ()), [2], "it is active");
        assert!(queues.offer(&wide, 1, 50, |_| ()).is_empty());
        assert!(queues.offer(&one, 3, 3, |_| ()).is_empty(), "somebody waits for its GPU");
        assert!(queues.ended(Arc::as_ptr(&one), 1, |_| ()).is_empty());
        assert_eq!(queues.ended(Arc::as_ptr(&one), 2, |_| ()), [50]);
        assert!(queues.offer(&one, 4, 4, |_| ()).is_empty());
        assert_eq!(queues.ended(Arc::as_ptr(&wide), 1, |_| ()), [3, 4]);
        assert!(!queues.is_crowded());
    }

    #[test]
    fn nobody_waits_for_who_is_gone() {
        let queues: HwQueues<Comm, u32> = HwQueues::new(2);
        let gone = comm(&[0], 0);
        assert_eq!(queues.offer(&gone, 1, 1, |_| ()), [1]);
        drop(gone);
        assert_eq!(queues.offer(&comm(&[0], 0), 1, 2, |_| ()), [2]);
    }

    #[test]
    fn who_calls_ahead_waits_for_tenants_like_everybody() {
        let queues: HwQueues<Comm, u32> = HwQueues::new(8);
        let ahead = ["a", "b", "a", "b"].map(|tenant| comm_of(tenant, &[0], 1));
        let offer = |number| -> Vec<_> {
            let offers = ahead.iter().zip(0..).flat_map(|(comm, n)| queues.offer(comm, number, n, |_| ()));
            offers.collect()
        };
        assert_eq!(offer(1), [0, 1, 2, 3], "half of eight");
        assert_eq!(offer(2), [0, 1], "a quarter of eight");
        // A portion that waits with one operation may go with the next.
        assert_eq!(queues.offer(&ahead[0], 3, 30, |_| ()), [30]);
        assert!(ahead.iter().all(|comm| queues.ended(Arc::as_ptr(comm), 1, |_| ()).is_empty()));
        // Those that wait may wait for this one.
        assert_eq!(queues.offer(&comm_of("c", &[0], 9), 1, 99, |_| ()), [99]);
        ahead[3].come_to(2);
        assert_eq!(queues.look(|_| ()), [3]);
    }

    #[test]
    fn whoever_lets_operations_go_they_are_issued_in_order() {
        const LAST: u64 = 3000;
        let queues: HwQueues<Comm, (usize, u64)> = HwQueues::new(2);
        let (comms, issued) = ([comm(&[0], LAST), comm(&[0], LAST)], Mutex::new([Vec::new(), Vec::new()]));
        let (done, ends) = std::sync::mpsc::channel();
        let issue = |(of, number): &(usize, u64)| {
            issued.lock().expect("a list")[*of].push(*number);
            done.send((*of, *number)).expect("who ends it");
        };
        std::thread::scope(|scope| {
            for of in 0..2 {
                let (queues, comms, issue) = (&queues, &comms, issue);
                scope.spawn(move || {
                    (1..=LAST).for_each(|number| drop(queues.offer(&comms[of], number, (of, number), &issue)));
                });
            }
            for _ in 0..2 * LAST {
                let (of, number) = ends.recv().expect("all are issued");
                queues.ended(Arc::as_ptr(&comms[of]), number, &issue);
                queues.look(&issue);
            }
        });
        assert!(issued.lock().expect("a list").iter().all(|numbers| numbers.iter().copied().eq(1..=LAST)));
    }

    #[test]
    fn a_tenant_leaves_room_for_others_whatever_it_says() {
        let queues: HwQueues<Comm, u32> = HwQueues::new(8);
        let lying: Vec<_> = (0..5).map(|_| comm_of("liar", &[0], u64::MAX)).collect();
        let let_go: Vec<_> = lying.iter().zip(0..).flat_map(|(comm, n)| queues.offer(comm, 1, n, |_| ())).collect();
        assert_eq!(let_go, [0, 1, 2], "three eighths of eight");
        let honest = comm_of("honest", &[0], 0);
        assert_eq!(queues.waits(&honest), None);
        // A portion that waits for its own tenant is before that tenant's only.
        assert_eq!(queues.offer(&honest, 1, 10, |_| ()), [10]);
        let next = comm_of("honest", &[0], 0);
        assert!(queues.offer(&next, 1, 11, |_| ()).is_empty(), "half of eight");
        assert_eq!(
            (queues.waits(&next), queues.waits(&honest), queues.waits(&lying[3])),
            (Some(false), None, Some(true))
        );
        next.come_to(1);
        assert_eq!(queues.waits(&next), Some(true));
        assert_eq!(queues.ended(Arc::as_ptr(&honest), 1, |_| ()), [11]);
        // A place of its tenant's is free: its turn comes, in order.
        assert_eq!(queues.ended(Arc::as_ptr(&lying[0]), 1, |_| ()), [3]);
        assert_eq!(queues.ended(Arc::as_ptr(&lying[1]), 1, |_| ()), [4]);
    }

    #[test]
    fn few_queues_are_told_of() {
        let has_room = |count, streams| HwQueues::<Comm, u32>::new(count).have_room_beside(streams);
        assert!(has_room(8, 2) && has_room(12, 3) && has_room(4, 1));
        assert!(!has_room(7, 2) && !has_room(8, 3) && !has_room(3, 1));
    }
}
