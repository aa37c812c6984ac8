//! Symmetric buffers of a living communicator, and what becomes of them when it ends.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SendError;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use mccs_cuda::DeviceAddress;
use mccs_ipc::device_initiated::{CommPart, ControlPage, SymmetricBufferPart};
use mccs_ipc::large::{LargeLayout, SlotKind};
use mccs_kernels::cuda::SymmetricBufferLayout;
use mccs_runtime::Share;
use mccs_tenants::{Charge, OverQuota, Resource, Tenant};

use super::error::PrepareError;
use super::{Order, Orders};
use crate::cuda::copy_engine::Parts;
use crate::cuda::group::{Ended, HeldBytes, OpenMemory, OpenPart, SymmetricBuffers};
use crate::cuda::memory::deferred_free::DeferredFrees;
use crate::cuda::memory::resource_pool::{ResourcePool, Shape};
use crate::cuda::memory::slots::SlotSet;
use crate::cuda::memory::symmetric_buffer::RankBuffer;

/// Parts of a communicator, by the driver. Dropped in this order.
pub(super) struct Kit {
    /// Its copy engines' parts, and the descriptor of the page that is registered among them.
    pub(super) engines: Option<(OwnedFd, Parts)>,
    /// The ranks' symmetric buffers, and their GPUs as the device counts them.
    pub(super) buffers: Vec<(usize, RankBuffer)>,
}

impl Kit {
    /// Whether ranks had graphs when they left that have not gone since: the driver says so on the page when they go.
    pub(super) fn has_graphs(&self) -> bool {
        let ranks = 0..self.buffers.len() as u32;
        self.engines.iter().any(|(_, parts)| ranks.clone().any(|rank| parts.page().has_graphs(rank)))
    }
}

/// The ranks' symmetric buffers. When dropped they go to the thread that frees, with what the copy engines have left; or can be used again until that comes to it.
pub(super) struct Memory {
    pub(super) held: Mutex<Held>,
    /// Bytes of each symmetric buffer, made so far.
    pub(super) buffer_bytes: AtomicU64,
    pub(super) layout: SymmetricBufferLayout,
    pub(super) shape: Shape,
    /// Descriptor of the page, if there are copy engines.
    pub(super) page: Option<OwnedFd>,
    pub(super) parts: Mutex<Option<Parts>>,
    /// Slots of its copy engines, made at first use: its own, and those that it shares.
    pub(super) slots: [OnceLock<SlotSet>; 2],
    /// How these are divided, where there are copy engines.
    pub(super) large: Option<LargeLayout>,
    /// Whether all ranks have left in order.
    pub(super) is_left: AtomicBool,
    pub(super) spares: Arc<ResourcePool<Kit>>,
    pub(super) frees: DeferredFrees,
    /// The share by which it is read, opened and freed.
    pub(super) share: Share,
}

/// Parts of a communicator that grow with its use.
#[derive(Default)]
pub(super) struct Held {
    /// By rank: its GPU, as the device counts them, and its symmetric buffer.
    pub(super) buffers: Vec<(usize, RankBuffer)>,
    pub(super) charges: Vec<Arc<Charge>>,
}

impl Memory {
    pub(super) fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its owner.
    pub(super) fn tenant(&self) -> Option<Arc<Tenant>> {
        self.held().charges.first().map(|charge| Arc::clone(charge.tenant()))
    }

    /// Charges the heads of symmetric buffers of so many ranks to whose they are, or what those have that are used again.
    pub(super) fn charge_heads(&mut self, owner: &Arc<Tenant>, nranks: u32) -> Result<(), OverQuota> {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        let heads = self.layout.part(SymmetricBufferPart::Head).end * u64::from(nranks);
        let used = held.buffers.iter().map(|(_, buffer)| buffer.held_bytes()).sum::<u64>();
        let resource = if self.shape.on_host { Resource::MemoryBytes } else { Resource::GpuMemoryBytes };
        held.charges.push(Arc::new(owner.charge(resource, heads.max(used))?));
        if self.shape.on_host {
            // Each is a descriptor for as long as it is there.
            held.charges.push(Arc::new(owner.charge(Resource::Descriptors, u64::from(nranks))?));
        }
        Ok(())
    }

    /// The page that ranks share with the driver, and its descriptor: the one of these copy engines, or a new one.
    pub(super) fn control_page(
        &mut self,
        engines: Option<(OwnedFd, Parts)>,
    ) -> Result<(OwnedFd, Arc<ControlPage>), PrepareError> {
        let Some((fd, parts)) = engines else {
            let (fd, page) = ControlPage::create()?;
            return Ok((fd, Arc::new(page)));
        };
        let page = Arc::clone(parts.page());
        *self.parts() = Some(parts);
        Ok((fd, page))
    }

    pub(super) fn slots(&self, kind: SlotKind) -> &OnceLock<SlotSet> {
        match kind {
            SlotKind::Own => &self.slots[0],
            SlotKind::Shared => &self.slots[1],
        }
    }

    pub(super) fn parts(&self) -> MutexGuard<'_, Option<Parts>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let parts = self.parts.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Held { buffers, charges } = std::mem::take(self.held.get_mut().unwrap_or_else(PoisonError::into_inner));
        let is_whole = self.page.is_some() == parts.is_some() && buffers.len() == self.shape.gpus.len();
        let can_be_used_again = parts.as_ref().is_none_or(Parts::can_be_used_again);
        if *self.is_left.get_mut() && is_whole && can_be_used_again {
            let kit = Kit { engines: self.page.take().zip(parts), buffers };
            self.spares.keep(self.shape.clone(), kit, charges);
        } else {
            self.frees.free(self.share, (parts, buffers, charges));
        }
    }
}

/// Symmetric buffers in use.
#[derive(Clone)]
pub(crate) struct BuffersInUse {
    pub(super) memory: Arc<Memory>,
    pub(super) page: Arc<ControlPage>,
    pub(super) orders: Arc<Orders>,
}

impl BuffersInUse {
    /// The ranks' control page.
    pub(crate) fn page(&self) -> &Arc<ControlPage> {
        &self.page
    }

    /// Queue of orders to the set-up thread.
    pub(crate) fn orders(&self) -> &Arc<Orders> {
        &self.orders
    }

    /// Its slots of a kind, if they are made.
    pub(crate) fn slots(&self, kind: SlotKind) -> Option<&SlotSet> {
        self.memory.slots(kind).get()
    }

    /// First byte of a rank's slots, as this process sees it.
    pub(crate) fn slot_address(&self, kind: SlotKind, rank: usize) -> Option<DeviceAddress> {
        self.slots(kind)?.address(rank)
    }

    /// The tag that a rank has given its collective of a number.
    pub(crate) fn tag_of(&self, rank: u32, number: u64) -> Option<u64> {
        self.page.tag_of(rank, number)
    }

    /// The share by which threads work for them.
    pub(crate) fn share(&self) -> Share {
        self.memory.share
    }

    /// Their owner, by name.
    pub(crate) fn tenant(&self) -> &str {
        &self.memory.shape.tenant
    }

    fn order(&self, ended: &Arc<Ended>, then: Option<Box<dyn FnOnce() + Send>>) {
        let order = Order::Read { buffers: self.clone(), ended: Arc::clone(ended), then };
        if let Err(SendError(Order::Read { then, .. })) = self.orders.send(self.share(), order) {
            ended.tell(Err("the thread that reads GPUs has ended".into()));
            then.into_iter().for_each(|then| then());
        }
    }

    /// Parts that copy engines on the same memory have left.
    pub(crate) fn take_parts(&self) -> Option<Parts> {
        self.memory.parts().take()
    }

    /// Copy engines have ended.
    pub(crate) fn leave_parts(&self, parts: Parts) {
        *self.memory.parts() = Some(parts);
    }
}

impl SymmetricBuffers for BuffersInUse {
    fn read(&self, ended: &Arc<Ended>) {
        self.order(ended, None);
    }

    fn read_at_last(&self, ended: &Arc<Ended>, then: Box<dyn FnOnce() + Send>) {
        self.order(ended, Some(then));
    }

    fn left(&self) {
        self.memory.is_left.store(true, Ordering::Release);
    }

    fn descriptors_of(&self, part: CommPart) -> u64 {
        let shape = &self.memory.shape;
        match part {
            _ if !shape.by_descriptors => 0,
            CommPart::SymmetricBuffer(_) => shape.gpus.len() as u64,
            CommPart::Slots(_) => 1,
        }
    }

    fn open(&self, part: OpenPart) {
        if let Err(SendError(Order::Open { part, .. })) =
            self.orders.send(self.share(), Order::Open { buffers: self.clone(), part })
        {
            (part.reply)(Err(PrepareError::Stopping.refusal()));
        }
    }

    fn open_memory(&self, memory: OpenMemory) {
        let order = Order::OpenMemory { gpus: self.memory.shape.gpus.clone(), memory };
        if let Err(SendError(Order::OpenMemory { memory, .. })) = self.orders.send(self.share(), order) {
            (memory.reply)(Err(PrepareError::Stopping.refusal()));
        }
    }

    fn held_bytes(&self, rank: usize) -> HeldBytes {
        let memory = &self.memory;
        let of = |kind| memory.slots(kind).get().map_or((0, 1), |slots| slots.bytes(rank));
        let (shared_slots, sharing) = of(SlotKind::Shared);
        let buffers = memory.buffer_bytes.load(Ordering::Relaxed);
        HeldBytes { buffers, own_slots: of(SlotKind::Own).0, shared_slots, sharing }
    }
}
