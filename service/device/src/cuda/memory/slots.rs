//! Slots of copy engines, made at first use: a communicator's own, or shared by a tenant's
//! communicators on a GPU.
//!
//! A *block* lies on one GPU; a communicator uses one on each of its ranks' GPUs. Operations take turns in a shared block (`hw_queue_admission.rs`): while a communicator
//! is alone there, its operations are issued before its ranks' streams have come to them; otherwise when all have, so that none holds slots that waits for another.
//! A block with an operation that streams have not come to takes no second communicator, who then begins another.
//!
//! A block goes to the thread that frees when the last communicator that uses it has ended.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use mccs_cuda::{DeviceAddress, DeviceMemory, DriverError, OwnedStream};
use mccs_ipc::large::{LargeLayout, SlotKind};
use mccs_tenants::{Charge, OverQuota, Resource, Tenant};

use crate::cuda::Gpus;
use crate::cuda::memory::deferred_free::DeferredFrees;
use crate::cuda::memory::symmetric_buffer::Block;

/// Names a block; no other has or had the same.
pub(crate) type BlockId = u64;

/// Slots on one GPU.
struct SlotBlock {
    id: BlockId,
    /// Communicators that use it.
    users: AtomicU32,
    bytes: u64,
    /// `None` only while dropping.
    held: Option<(Block, Charge)>,
    frees: DeferredFrees,
}

impl Drop for SlotBlock {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            self.frees.free(held.1.tenant().share, held);
        }
    }
}

/// The blocks of a communicator, by rank.
pub(crate) struct SlotSet {
    kind: SlotKind,
    blocks: Vec<Arc<SlotBlock>>,
}

impl SlotSet {
    /// Begin of a rank's slot, for this process.
    pub(crate) fn address(&self, rank: usize) -> Option<DeviceAddress> {
        let (block, _) = self.blocks.get(rank)?.held.as_ref()?;
        Some(block.address())
    }

    /// A rank's, for that rank to open.
    pub(crate) fn block(&self, rank: usize) -> Option<&Block> {
        self.blocks.get(rank)?.held.as_ref().map(|(block, _)| block)
    }

    /// Bytes on a rank's GPU, and between how many communicators they are shared.
    pub(crate) fn bytes(&self, rank: usize) -> (u64, u32) {
        self.blocks.get(rank).map_or((0, 1), |block| (block.bytes, block.users.load(Ordering::Relaxed).max(1)))
    }

    /// Its blocks, where operations take turns there.
    pub(crate) fn turns(&self) -> Option<Turns> {
        let is_alone = |block: &Arc<SlotBlock>| block.users.load(Ordering::Acquire) == 1;
        let turns = || Turns {
            blocks: self.blocks.iter().map(|block| block.id).collect(),
            is_alone: self.blocks.iter().all(is_alone),
        };
        (self.kind == SlotKind::Shared).then(turns)
    }
}

impl Drop for SlotSet {
    fn drop(&mut self) {
        for block in &self.blocks {
            block.users.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// Blocks that an operation uses alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Turns {
    pub(crate) blocks: Vec<BlockId>,
    /// Whether no other communicator uses any of them.
    pub(crate) is_alone: bool,
}

impl Turns {
    /// Whether one of its blocks is among these.
    pub(crate) fn meets(&self, blocks: &[BlockId]) -> bool {
        self.blocks.iter().any(|block| blocks.contains(block))
    }
}

/// Why there are no slots.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoSlots {
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
    #[error("no slots for copy engines on {gpu}: {error}")]
    Driver { gpu: String, error: DriverError },
}

/// For whom slots are.
pub(crate) struct SlotUser<'a> {
    pub(crate) tenant: &'a Arc<Tenant>,
    /// By rank.
    pub(crate) gpus: &'a [usize],
    /// Whether ranks open them by descriptors.
    pub(crate) by_descriptors: bool,
    pub(crate) layout: LargeLayout,
}

/// Shared blocks that there are. Owned by the set-up thread.
pub(crate) struct SlotPool {
    shared: Vec<Shared>,
    made: BlockId,
    frees: DeferredFrees,
}

struct Shared {
    tenant: Weak<Tenant>,
    gpu: usize,
    by_descriptors: bool,
    block: Weak<SlotBlock>,
}

impl SlotPool {
    pub(crate) fn new(frees: DeferredFrees) -> Self {
        SlotPool { shared: Vec::new(), made: 0, frees }
    }

    /// Slots for a communicator. Slots that are there when something fails go to the thread that frees.
    pub(crate) fn take(
        &mut self,
        kind: SlotKind,
        user: &SlotUser<'_>,
        gpus: &Gpus,
        streams: &[OwnedStream],
    ) -> Result<SlotSet, NoSlots> {
        self.shared.retain(|shared| shared.block.strong_count() > 0);
        let mut set = SlotSet { kind, blocks: Vec::with_capacity(user.gpus.len()) };
        for &gpu in user.gpus {
            let found = if kind == SlotKind::Shared { self.join(user, gpu, gpus) } else { None };
            let block = match found {
                Some(block) => block,
                None => self.make(kind, user, gpu, gpus, &streams[gpu])?,
            };
            set.blocks.push(block);
        }
        Ok(set)
    }

    /// A block of the tenant's on a GPU where another communicator may come in, which is then counted.
    fn join(&self, user: &SlotUser<'_>, gpu: usize, gpus: &Gpus) -> Option<Arc<SlotBlock>> {
        let bytes = user.layout.block_bytes(SlotKind::Shared);
        let is_of_user = |shared: &&Shared| {
            let is_same = (shared.gpu, shared.by_descriptors) == (gpu, user.by_descriptors);
            is_same && std::ptr::eq(shared.tenant.as_ptr(), Arc::as_ptr(user.tenant))
        };
        let blocks = self.shared.iter().filter(is_of_user).filter_map(|shared| shared.block.upgrade());
        let comes_in = |block: &Arc<SlotBlock>| {
            gpus.queues.unless_unready_in(block.id, || block.users.fetch_add(1, Ordering::AcqRel)).is_some()
        };
        blocks.filter(|block| block.bytes == bytes).find(comes_in)
    }

    fn make(
        &mut self,
        kind: SlotKind,
        user: &SlotUser<'_>,
        gpu: usize,
        gpus: &Gpus,
        stream: &OwnedStream,
    ) -> Result<Arc<SlotBlock>, NoSlots> {
        let bytes = user.layout.block_bytes(kind);
        let charge = user.tenant.charge(Resource::GpuMemoryBytes, bytes)?;
        let (own, context) = &gpus.gpus[gpu];
        let failed = |error| NoSlots::Driver { gpu: own.id.to_string(), error };
        let block = if user.by_descriptors {
            // Any GPU's copy engine may push there for a communicator that comes later.
            let reaches = |other: &&(mccs_cuda::Gpu, _)| other.0.reaches(own).unwrap_or(false);
            let contexts: Vec<_> = gpus.gpus.iter().filter(reaches).map(|(_, context)| context).collect();
            Block::by_descriptor(context, bytes, mccs_cuda::Shared::ByDescriptor, &contexts, &self.frees)
        } else {
            DeviceMemory::new(context, bytes as usize).map(Block::ByHandle)
        };
        let block = block.map_err(failed)?;
        self.made += 1;
        let zeroed = block.zero(stream).map_err(failed);
        let (id, users, frees) = (self.made, AtomicU32::new(1), self.frees.clone());
        let block = Arc::new(SlotBlock { id, users, bytes, held: Some((block, charge)), frees });
        zeroed?;
        if kind == SlotKind::Shared {
            self.shared.push(Shared {
                tenant: Arc::downgrade(user.tenant),
                gpu,
                by_descriptors: user.by_descriptors,
                block: Arc::downgrade(&block),
            });
        }
        Ok(block)
    }
}
