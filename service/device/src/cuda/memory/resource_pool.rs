//! Pool of ended communicators' memory and streams: the tenant's next one on the same GPUs begins
//! with them.
//!
//! Nothing is freed while some tenant's stream does not come to what it called (`deferred_free.rs`), which may last as long as `limits.operation_timeout`. Whoever makes
//! and ends communicators meanwhile would fill the GPUs, or its quota, with what waits. So it waits here, and at most [`UNCHARGED_MAX`] of a tenant's
//! cost nobody anything; all goes when the thread that frees comes to it, which it does at once where nobody holds it up.
//!
//! Never another tenant's: processes keep symmetric buffers and pages open for as long as they like. And only what all ranks have left in
//! order: then their kernels have ended, and a well-meaning process touches it no more. But for graphs: each counts on the page until the
//! driver says that it has gone, which may be long after. A kit with such uses is taken by nobody until then. (With a page alone made anew
//! the old one would be left, and its registration: each time, and nobody pays for those.) A tenant that writes another count there keeps
//! its own from itself, or spoils it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mccs_runtime::Share;
use mccs_tenants::Charge;

use crate::cuda::memory::deferred_free::DeferredFrees;

/// Communicators of a tenant's that wait here beside its quota: as many as a job has at a time, for data, tensors, pipelines and experts in parallel. Memory that
/// nobody pays for is bounded by that; beyond, what waits keeps its charges.
const UNCHARGED_MAX: usize = 4;

/// Shape by which two communicators are the same, as far as memory goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) tenant: String,
    /// By rank.
    pub(crate) gpus: Box<[usize]>,
    /// On each.
    pub(crate) buffer_bytes: u64,
    /// How ranks open slots: memory that is named by descriptors is made otherwise.
    pub(crate) by_descriptors: bool,
    /// Whether ranks have events of the driver's.
    pub(crate) by_events: bool,
    /// Whether symmetric buffers are in memory of the host.
    pub(crate) on_host: bool,
}

struct Spare<K> {
    shape: Shape,
    kit: K,
    charges: Vec<Arc<Charge>>,
}

/// See the module's documentation. `K` is what a communicator is made of.
pub(crate) struct ResourcePool<K> {
    state: Mutex<State<K>>,
    frees: DeferredFrees,
}

struct State<K> {
    waiting: Vec<Spare<K>>,
    /// Whether the thread that frees has been told of what waits.
    is_told: bool,
}

/// Empties the spares when it is dropped, which the thread that frees does.
struct Emptying<K>(Arc<ResourcePool<K>>);

impl<K> Drop for Emptying<K> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_told = false;
        let all = std::mem::take(&mut state.waiting);
        drop(state);
        drop(all);
    }
}

impl<K: Send + 'static> ResourcePool<K> {
    pub(crate) fn new(frees: DeferredFrees) -> Arc<Self> {
        Arc::new(ResourcePool { state: Mutex::new(State { waiting: Vec::new(), is_told: false }), frees })
    }

    /// A communicator has ended.
    pub(crate) fn keep(self: &Arc<Self>, shape: Shape, kit: K, mut charges: Vec<Arc<Charge>>) {
        let mut state = self.state();
        let is_uncharged = |spare: &&Spare<K>| spare.charges.is_empty() && spare.shape.tenant == shape.tenant;
        if state.waiting.iter().filter(is_uncharged).count() < UNCHARGED_MAX {
            charges.clear();
        }
        state.waiting.push(Spare { shape, kit, charges });
        let is_told = std::mem::replace(&mut state.is_told, true);
        drop(state);
        if !is_told {
            self.frees.free(Share::SERVICE, Emptying(Arc::clone(self)));
        }
    }

    /// A kit of this shape that nobody uses, the last first. Its charges end: its next owner has its own.
    pub(crate) fn take(&self, shape: &Shape, is_unused: impl Fn(&K) -> bool) -> Option<K> {
        let mut state = self.state();
        let at = state.waiting.iter().rposition(|spare| spare.shape == *shape && is_unused(&spare.kit))?;
        Some(state.waiting.remove(at).kit)
    }
}

impl<K> ResourcePool<K> {
    fn state(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use mccs_tenants::{Quota, Resource, Tenant};

    use super::*;
    use crate::cuda::copy_engine::hw_queue_admission::HwQueues;
    use crate::cuda::copy_engine::hw_queue_admission::tests::{Comm, comm};

    /// Says its number when it is freed.
    struct Kit(u32, mpsc::Sender<u32>);

    impl Drop for Kit {
        fn drop(&mut self) {
            let _ = self.1.send(self.0);
        }
    }

    fn tenant(name: &str) -> Arc<Tenant> {
        let quota = Quota {
            memory_bytes: 0,
            gpu_memory_bytes: 0,
            sessions: 1,
            communicators: 8,
            operations_in_flight: 1,
            streams: 1,
            regions: 1,
            mappings: 1,
            origins: Default::default(),
        };
        Tenant::new(name.into(), quota)
    }

    fn shape(tenant: &str, gpus: &[usize], buffer_bytes: u64) -> Shape {
        Shape {
            tenant: tenant.into(),
            gpus: gpus.into(),
            buffer_bytes,
            by_descriptors: false,
            by_events: false,
            on_host: false,
        }
    }

    /// Two ranks of a communicator.
    fn charges(tenant: &Arc<Tenant>) -> Vec<Arc<Charge>> {
        let charge = |_| tenant.charge(Resource::Communicators, 1).expect("within the quota");
        (0..2).map(|rank| Arc::new(charge(rank))).collect()
    }

    #[test]
    fn while_a_tenant_does_not_come_another_goes_on_with_what_it_had() {
        let queues: Arc<HwQueues<Comm, u32>> = Arc::new(HwQueues::new(8));
        let spares = ResourcePool::new(DeferredFrees::start(Arc::clone(&queues), |_| ()).expect("a thread").0);
        let (freed, frees) = mpsc::channel();
        let late = comm(&[0], 0);
        assert_eq!(queues.offer(&late, 1, 1, |_| ()), [1]);
        let (own, mut kit) = (tenant("b"), Some(Kit(0, freed.clone())));
        // Far more than its quota of four, one after the other.
        for _ in 0..1000 {
            let charges = charges(&own);
            let taken = kit
                .take()
                .unwrap_or_else(|| spares.take(&shape("b", &[0, 1], 7), |_| true).expect("what it had before"));
            spares.keep(shape("b", &[0, 1], 7), taken, charges);
            assert_eq!(own.used(Resource::Communicators), 0);
        }
        // A kit of another tenant, or place, or size, is not for it.
        let others = [("a", &[0, 1][..], 7), ("b", &[1, 0], 7), ("b", &[0], 7), ("b", &[0, 1], 8)];
        assert!(
            others.iter().all(|(tenant, gpus, bytes)| spares.take(&shape(tenant, gpus, *bytes), |_| true).is_none())
        );
        assert!(frees.try_recv().is_err(), "nothing is freed beside what does not come");
        late.come_to(1);
        queues.ended(Arc::as_ptr(&late), 1, |_| ());
        assert_eq!(frees.recv(), Ok(0));
        assert!(spares.take(&shape("b", &[0, 1], 7), |_| true).is_none());
        // And again.
        spares.keep(shape("b", &[0, 1], 7), Kit(1, freed), Vec::new());
        assert_eq!(frees.recv(), Ok(1));
    }

    #[test]
    fn of_a_tenant_only_so_much_waits_beside_its_quota() {
        let queues: Arc<HwQueues<Comm, u32>> = Arc::new(HwQueues::new(8));
        let spares = ResourcePool::new(DeferredFrees::start(Arc::clone(&queues), |_| ()).expect("a thread").0);
        let late = comm(&[0], 0);
        assert_eq!(queues.offer(&late, 1, 1, |_| ()), [1]);
        let (freed, frees) = mpsc::channel();
        let (own, other) = (tenant("b"), tenant("c"));
        for n in 0..6 {
            spares.keep(shape("b", &[0, 1], u64::from(n)), Kit(n, freed.clone()), charges(&own));
        }
        assert_eq!(own.used(Resource::Communicators), 4, "two of six are paid for");
        spares.keep(shape("c", &[0, 1], 0), Kit(6, freed.clone()), charges(&other));
        assert_eq!(other.used(Resource::Communicators), 0);
        // Taken again, they are paid for by who has them.
        drop(spares.take(&shape("b", &[0, 1], 5), |_| true));
        assert_eq!((frees.recv(), own.used(Resource::Communicators)), (Ok(5), 2));
        late.come_to(1);
        queues.ended(Arc::as_ptr(&late), 1, |_| ());
        let mut all: Vec<_> = (0..6).map(|_| frees.recv().expect("all are freed")).collect();
        all.sort_unstable();
        assert_eq!((all, own.used(Resource::Communicators)), (vec![0, 1, 2, 3, 4, 6], 0));
    }

    #[test]
    fn what_is_still_used_waits_and_others_are_taken() {
        let queues: Arc<HwQueues<Comm, u32>> = Arc::new(HwQueues::new(8));
        let spares = ResourcePool::new(DeferredFrees::start(Arc::clone(&queues), |_| ()).expect("a thread").0);
        let late = comm(&[0], 0);
        assert_eq!(queues.offer(&late, 1, 1, |_| ()), [1]);
        let (freed, frees) = mpsc::channel();
        let same = shape("b", &[0, 1], 7);
        for n in 0..3 {
            spares.keep(same.clone(), Kit(n, freed.clone()), Vec::new());
        }
        let take = |used: &[u32]| spares.take(&same, |kit| !used.contains(&kit.0)).map(|kit| kit.0);
        assert_eq!([take(&[0, 2]), take(&[0, 2]), take(&[0]), take(&[])], [Some(1), None, Some(2), Some(0)]);
        assert_eq!(frees.try_iter().collect::<Vec<_>>(), [1, 2, 0], "by this test alone");
        // A kit that is used to the end is freed like all else.
        spares.keep(same.clone(), Kit(3, freed), Vec::new());
        assert_eq!(take(&[3]), None);
        late.come_to(1);
        queues.ended(Arc::as_ptr(&late), 1, |_| ());
        assert_eq!(frees.recv(), Ok(3));
    }
}
