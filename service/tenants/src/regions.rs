//! Regions: tenants' memory, mapped in the service, and unmapped by a thread.

use std::sync::Arc;
use std::sync::mpsc::SendError;

use mccs_ipc::shm::Mapping;
use mccs_runtime::{Share, TurnSender, turn_channel};
use mccs_transport::host_regions;

use crate::host_memory::{Pages, Reservation};
use crate::tenant::Charge;

/// Memory on its way out, with what its tenant is charged for it until it is gone.
struct Leaving {
    mapping: Mapping,
    reservation: Reservation,
    charges: [Charge; 2],
}

impl Leaving {
    fn end(self) {
        let Leaving { mapping, reservation, charges } = self;
        if reservation.pages() == Pages::Service {
            mapping.give_back();
        }
        drop(mapping);
        drop(reservation);
        // In this order: who sees that nothing leaves any more sees what has come back.
        let tenant = Arc::clone(charges[0].tenant());
        drop(charges);
        tenant.note_leaving(-1);
    }
}

/// Memory that a tenant registered or the service allocated. Operations in flight keep it mapped.
pub struct Region {
    /// `None` only while dropping.
    memory: Option<Leaving>,
    share: Share,
    bytes: u64,
    unmap_worker: UnmapWorker,
}

impl Region {
    /// Takes charge of a mapping, for whose bytes and number of mappings the tenant is charged.
    #[must_use]
    pub fn new(mapping: Mapping, reservation: Reservation, charges: [Charge; 2], unmap_worker: UnmapWorker) -> Self {
        let bytes = reservation.bytes();
        host_regions::note_mapped(mapping.as_ptr() as usize, bytes);
        let share = charges[0].tenant().share;
        Region { memory: Some(Leaving { mapping, reservation, charges }), share, bytes, unmap_worker }
    }

    /// Usable bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// Its tenant's part of engines that tenants share.
    #[must_use]
    pub fn share(&self) -> Share {
        self.share
    }

    /// Address of `len_bytes` bytes at `offset_bytes`, or `None` where they do not all lie inside.
    #[must_use]
    pub fn range(&self, offset_bytes: u64, len_bytes: u64) -> Option<*mut u8> {
        let end = offset_bytes.checked_add(len_bytes)?;
        let memory = self.memory.as_ref()?;
        (end <= self.bytes).then(|| memory.mapping.as_ptr().wrapping_add(offset_bytes as usize))
    }
}

impl Region {
    /// Copies bytes to an offset, if they all lie inside.
    pub fn copy_in(&self, offset_bytes: u64, bytes: &[u8]) {
        if let Some(to) = self.range(offset_bytes, bytes.len() as u64) {
            // SAFETY: inside the mapping, which `self` keeps, and apart from the caller's own bytes. Shared memory is only accessed through raw
            // pointers.
            unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
    }

    /// Copies bytes from an offset, if they all lie inside.
    pub fn copy_out(&self, offset_bytes: u64, bytes: &mut [u8]) {
        if let Some(from) = self.range(offset_bytes, bytes.len() as u64) {
            // SAFETY: as for `copy_in`.
            unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from, bytes.len()) };
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            host_regions::note_going(memory.mapping.as_ptr() as usize);
            memory.charges[0].tenant().note_leaving(1);
            self.unmap_worker.end_later(self.share, memory);
        }
    }
}

/// Unmaps memory on a thread of its own: giving gigabytes back takes the kernel a good part of a second, and engines
/// must not wait for it. Tenants take turns. What waits for that still counts against its tenant's quotas.
#[derive(Clone)]
pub struct UnmapWorker(TurnSender<Leaving>);

impl UnmapWorker {
    /// Starts the thread; it ends when the last clone and the last region are gone.
    ///
    /// # Errors
    /// The kernel's refusal of a thread.
    pub fn start() -> std::io::Result<Self> {
        let (sender, mut receiver) = turn_channel::<Leaving>();
        std::thread::Builder::new().name("mccs-unmap".into()).spawn(move || {
            while let Ok(memory) = receiver.recv(None) {
                memory.end();
            }
        })?;
        Ok(UnmapWorker(sender))
    }

    fn end_later(&self, share: Share, memory: Leaving) {
        // The thread lives as long as any sender does, so this cannot fail; if it did, it would end here.
        if let Err(SendError(memory)) = self.0.send(share, memory) {
            memory.end();
        }
    }
}
