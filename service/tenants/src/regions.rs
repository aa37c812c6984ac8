//! Regions: tenants' memory, mapped in the service, and unmapped by a thread.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::mpsc::SendError;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use mccs_ipc::loan;
use mccs_ipc::shm::Mapping;
use mccs_runtime::{Share, TurnSender, turn_channel};
use mccs_transport::host_regions;

use crate::host_memory::{Pages, Reservation};
use crate::quota::Resource;
use crate::tenant::{Charge, Tenant};

/// Memory on its way out, with what its tenant is charged for it until it is gone.
struct Leaving {
    mapping: Mapping,
    reservation: Reservation,
    charges: [Charge; 2],
    /// Kept for the service's next program, with what its tenant is charged for that.
    descriptor: Option<(OwnedFd, Charge)>,
}

impl Leaving {
    fn end(self) {
        let Leaving { mapping, reservation, charges, descriptor } = self;
        if reservation.pages() == Pages::Service {
            mapping.give_back();
        }
        // The last descriptor takes the pages along, as the last mapping does.
        drop((mapping, descriptor));
        drop(reservation);
        // In this order: who sees that nothing leaves any more sees what has come back.
        let (tenant, bytes) = (Arc::clone(charges[0].tenant()), charges[0].amount());
        drop(charges);
        tenant.note_leaving(-(bytes as i64));
    }
}

/// Memory of a tenant that another process is giving back: it is charged until the value is dropped, as far as the quota goes.
pub struct LeavingElsewhere {
    tenant: Arc<Tenant>,
    bytes: u64,
    charge: Option<Charge>,
}

impl LeavingElsewhere {
    /// So many bytes.
    #[must_use]
    pub fn new(tenant: Arc<Tenant>, bytes: u64) -> Self {
        tenant.note_leaving(bytes as i64);
        let charge = tenant.charge(Resource::MemoryBytes, bytes).ok();
        LeavingElsewhere { tenant, bytes, charge }
    }
}

impl Drop for LeavingElsewhere {
    fn drop(&mut self) {
        drop(self.charge.take());
        self.tenant.note_leaving(-(self.bytes as i64));
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
        let share = charges[0].tenant().share;
        host_regions::note_mapped(mapping.as_ptr() as usize, bytes, share);
        Region { memory: Some(Leaving { mapping, reservation, charges, descriptor: None }), share, bytes, unmap_worker }
    }

    /// Keeps a descriptor of the memory, so that the service's next program can have it; and what its tenant is charged for that.
    #[must_use]
    pub fn keeping(mut self, descriptor: OwnedFd, charge: Charge) -> Self {
        if let Some(memory) = &mut self.memory {
            memory.descriptor = Some((descriptor, charge));
        }
        self
    }

    /// The descriptor that is kept, if one is.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.memory.as_ref()?.descriptor.as_ref().map(|(fd, _)| fd.as_fd())
    }

    /// Whether its pages are the service's, or else the tenant's own.
    #[must_use]
    pub fn is_of_service(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.reservation.pages() == Pages::Service)
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

    /// Bytes at an offset; `None` where they do not all lie inside.
    ///
    /// # Safety
    /// While they are used nobody else writes or reads them: no process has the region's memory, and no request of a transport.
    #[must_use]
    #[expect(clippy::mut_from_ref, reason = "the caller promises that they are nobody else's")]
    pub unsafe fn bytes_mut(&self, offset_bytes: u64, len_bytes: u64) -> Option<&mut [u8]> {
        let at = self.range(offset_bytes, len_bytes)?;
        // SAFETY: inside the mapping, which `self` keeps; the rest is the caller's promise.
        Some(unsafe { std::slice::from_raw_parts_mut(at, len_bytes as usize) })
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
            memory.charges[0].tenant().note_leaving(memory.charges[0].amount() as i64);
            self.unmap_worker.end_later(self.share, memory);
        }
    }
}

/// Unmaps memory on a thread of its own: giving gigabytes back takes the kernel a good part of a second, and engines
/// must not wait for it. Tenants take turns. Memory that waits for that still counts against its tenant's quotas.
#[derive(Clone)]
pub struct UnmapWorker {
    sender: TurnSender<Leaving>,
    waiting: Arc<Waiting>,
}

/// How much memory waits for the thread, or is in its hands.
#[derive(Default)]
struct Waiting {
    regions: Mutex<u64>,
    none_left: Condvar,
}

impl Waiting {
    fn count(&self, by: i64) {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        *regions = regions.wrapping_add_signed(by);
        if *regions == 0 {
            self.none_left.notify_all();
        }
    }
}

impl UnmapWorker {
    /// Starts the thread; it ends when the last clone and the last region are gone.
    ///
    /// # Errors
    /// The kernel's refusal of a thread.
    pub fn start() -> std::io::Result<Self> {
        let (sender, mut receiver) = turn_channel::<Leaving>();
        let waiting = Arc::new(Waiting::default());
        let counted = Arc::clone(&waiting);
        std::thread::Builder::new().name("mccs-unmap".into()).spawn(move || {
            while let Ok(memory) = receiver.recv(None) {
                // Memory that is another's until then may go on with it.
                loan::wait_for_end();
                memory.end();
                counted.count(-1);
            }
        })?;
        Ok(UnmapWorker { sender, waiting })
    }

    /// Returns when all that has been left here is gone.
    pub fn wait_until_idle(&self) {
        let mut regions = self.waiting.regions.lock().unwrap_or_else(PoisonError::into_inner);
        while *regions > 0 {
            regions = self.waiting.none_left.wait(regions).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn end_later(&self, share: Share, memory: Leaving) {
        self.waiting.count(1);
        // The thread lives as long as any sender does, so this cannot fail; if it did, it would end here.
        if let Err(SendError(memory)) = self.sender.send(share, memory) {
            memory.end();
            self.waiting.count(-1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Quota;
    use crate::testing;

    /// Whoever sees that nothing leaves any more sees what has come back, wherever the memory was.
    #[test]
    fn memory_that_leaves_is_charged_until_it_is_gone_here_or_elsewhere() {
        const BYTES: u64 = 1 << 20;
        let worker = UnmapWorker::start().expect("a thread");
        let (region, tenants) = testing::region(BYTES, worker.clone());
        // SAFETY: inside the mapping, which nobody else uses.
        unsafe { tenants.as_ptr().write(7) };
        drop(region);
        worker.wait_until_idle();
        // SAFETY: as above.
        assert_eq!(unsafe { tenants.as_ptr().read() }, 0, "its pages are back");

        let tenant = Tenant::new("t".into(), Quota { memory_bytes: BYTES, ..Quota::least() });
        let elsewhere = LeavingElsewhere::new(Arc::clone(&tenant), BYTES);
        assert_eq!((tenant.used(Resource::MemoryBytes), tenant.leaving_bytes()), (BYTES, BYTES));
        let beyond = LeavingElsewhere::new(Arc::clone(&tenant), 1);
        assert_eq!(
            (tenant.used(Resource::MemoryBytes), tenant.leaving_bytes()),
            (BYTES, BYTES + 1),
            "as the quota goes"
        );
        drop((elsewhere, beyond));
        assert_eq!((tenant.used(Resource::MemoryBytes), tenant.is_memory_leaving()), (0, false));
    }
}
