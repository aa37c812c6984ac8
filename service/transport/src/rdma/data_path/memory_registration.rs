//! Memory registration (MR) cache of a transport: host memory, and GPU memory by dma-buf or peer
//! memory.
//!
//! Registering with a device pins pages, which takes the kernel long. So registrations of tenants' regions are kept when
//! their last user deregisters them, as long as the region lives: collectives use the same buffers again and again. The
//! service names every region with a number that is never used again, so that memory which comes to lie at the same address
//! later is never taken for the one that was there. Other memory is never kept: nobody says when it goes.
//!
//! A device other than the first that there is learns of memory when a flow first uses it there. Long memory is pinned by a thread
//! of its own (`blocking_worker.rs`), and the flows that are to use it wait: those of other tenants do not.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use mccs_runtime::Share;
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};

use crate::host_regions::{HostRegion, region_of, regions_gone};
use crate::rdma::device::blocking_worker::{BlockingWorker, Work};
use crate::rdma::device::ports::Port;
use crate::rdma::verbs::{DmaBuffer, GpuRefusal, MemoryRegion, ProtectionDomain, VerbsError};
use crate::region::Regions;
use crate::{Fault, GpuAccess, MemoryKey, TransportError};

/// Registrations that are kept without a user.
const KEPT_MAX: usize = 256;
/// Other memory that is shorter than this is registered when a device is to use it, which with short messages is never: collectives
/// have such memory for an operation each. That the limit on locked memory refuses it is told late, by a flow that fails.
const AT_ONCE_FROM_BYTES: u64 = 16 << 10;
/// Host memory that is longer is pinned aside.
const PINNED_BY_WORKER_ABOVE_BYTES: u64 = 1 << 20;
/// Pieces of host memory of one tenant that wait to be pinned, or let go of: others' wait for no more than the one that is worked on.
const PINNINGS_OF_TENANT_MAX: usize = 64;
/// Ports of a transport.
pub(in crate::rdma) const PORTS_MAX: usize = mccs_config::limits::RDMA_PORTS_MAX;

/// A device's knowledge of a registration.
#[derive(Debug, Default)]
enum Known {
    #[default]
    No,
    /// The work of this number has it pinned.
    Pending(u64),
    Yes(MemoryRegion),
    /// It does not take it, which whoever asks next is told. A later question has it tried again.
    Refused(TransportError),
}

#[derive(Debug, Default)]
struct Registration {
    address: u64,
    bytes: u64,
    users: u32,
    /// The tenant's region that it lies in.
    region: Option<HostRegion>,
    /// A GPU's memory, by a descriptor where there is one.
    gpu: Option<GpuBuffer>,
    /// By port.
    known: [Known; PORTS_MAX],
}

impl Registration {
    /// Its tenant's share; memory outside all regions is the service's own.
    fn share(&self) -> Share {
        self.region.map_or(Share::SERVICE, |region| region.share)
    }
}

#[derive(Debug)]
struct GpuBuffer {
    buffer: Option<(OwnedFd, u64)>,
    /// The worst way of devices that know it.
    access: Option<GpuAccess>,
}

/// Work that may take the kernel long.
#[derive(Debug)]
pub(in crate::rdma) enum Pinning {
    Pin {
        number: u64,
        /// Bytes of the registration.
        place: usize,
        port: usize,
        pd: Arc<ProtectionDomain>,
        address: u64,
        bytes: u64,
        /// Its tenant's share.
        share: Share,
        /// `None` until it is done.
        made: Option<Result<MemoryRegion, VerbsError>>,
    },
    /// Lets go of memory that nobody uses.
    Unpin(Share, Option<MemoryRegion>),
}

impl Work for Pinning {
    fn share(&self) -> Share {
        match self {
            Pinning::Pin { share, .. } | Pinning::Unpin(share, _) => *share,
        }
    }

    fn work(&mut self) {
        match self {
            // SAFETY: whoever registered the memory keeps it until it deregisters it, and regions that are kept live. Memory that was
            // let go of meanwhile is refused by the kernel, or is another's by now, which no flow is given keys of.
            Pinning::Pin { pd, address, bytes, made, .. } => *made = Some(unsafe { pd.register(*address, *bytes) }),
            Pinning::Unpin(_, region) => *region = None,
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Memory {
    pub(in crate::rdma) regions: Regions,
    pub(in crate::rdma) pinner: BlockingWorker<Pinning>,
    /// Number of the pinner's last work.
    pinnings: u64,
    /// By key's index: place of its registration.
    places: Vec<usize>,
    registrations: Vec<Registration>,
    free: Vec<usize>,
    by_extent: HashMap<(u64, u64), usize>,
    /// Places without a user, oldest first.
    kept: Vec<usize>,
    gone_before: u64,
    /// Place of the port that most flows begin with.
    home: usize,
}

/// Keys of memory for work requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rdma) struct Keys {
    pub(in crate::rdma) lkey: u32,
    pub(in crate::rdma) rkey: u32,
    pub(in crate::rdma) is_gpu: bool,
}

/// Meaning of a refusal.
pub(in crate::rdma) fn refusal(error: VerbsError, bytes: u64) -> TransportError {
    if error.errno == Errno::ENOMEM {
        let (limit_bytes, _) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap_or((0, 0));
        return TransportError::LockedMemory { bytes, limit_bytes };
    }
    TransportError::Os { call: error.call, reason: error.errno }
}

/// Fault of a flow whose memory a device does not take.
pub(in crate::rdma) fn unregistered(error: TransportError) -> Fault {
    match error {
        TransportError::Os { call, reason: reason @ (Errno::EIO | Errno::ENODEV) } => Fault::Os { call, reason },
        TransportError::LockedMemory { bytes, limit_bytes } => Fault::LockedMemory { bytes, limit_bytes },
        TransportError::Os { reason, .. } | TransportError::GpuMemory { by_address: reason, .. } => {
            Fault::Unregistered(reason)
        }
        _ => Fault::Unregistered(Errno::EINVAL),
    }
}

impl Memory {
    pub(in crate::rdma) fn new(home: usize) -> Result<Self, VerbsError> {
        Ok(Memory {
            regions: Regions::new(),
            pinner: BlockingWorker::new("mccs-pin")?,
            pinnings: 0,
            places: Vec::new(),
            registrations: Vec::new(),
            free: Vec::new(),
            by_extent: HashMap::new(),
            kept: Vec::new(),
            gone_before: regions_gone(),
            home,
        })
    }

    /// Makes memory known, to the first port that there is, from home on. Refusals of memory that is not pinned aside are told here.
    ///
    /// # Safety
    /// As of [`crate::Transport::register`].
    pub(in crate::rdma) unsafe fn register(
        &mut self,
        ptr: *mut u8,
        bytes: u64,
        ports: &[Port],
    ) -> Result<MemoryKey, TransportError> {
        self.forget_gone();
        // SAFETY: the caller's promise, passed on.
        let key = unsafe { self.regions.register(ptr, bytes) }?;
        let place = self.place(ptr as u64, bytes);
        self.kept.retain(|kept| *kept != place);
        self.name(key, place, ports)
    }

    /// Makes a GPU's memory known. Never kept, and not shared with other registrations.
    ///
    /// # Safety
    /// As of [`crate::Transport::register`].
    pub(in crate::rdma) unsafe fn register_gpu(
        &mut self,
        address: u64,
        bytes: u64,
        dma_buffer: Option<(BorrowedFd<'_>, u64)>,
        ports: &[Port],
    ) -> Result<MemoryKey, TransportError> {
        // Devices learn of it when flows use them, which may be later.
        let own = |fd: BorrowedFd<'_>| fd.try_clone_to_owned();
        let buffer = dma_buffer.map(|(fd, offset)| Ok((own(fd)?, offset))).transpose();
        let buffer = buffer.map_err(|error: std::io::Error| TransportError::Os {
            call: "duplicating a dma-buf's descriptor",
            reason: Errno::from_raw(error.raw_os_error().unwrap_or_default()),
        })?;
        // SAFETY: the caller's promise; only devices use the address.
        let key = unsafe { self.regions.register(address as *mut u8, bytes) }?;
        let gpu = Some(GpuBuffer { buffer, access: None });
        let place = self.add(Registration { address, bytes, gpu, ..Registration::default() });
        self.name(key, place, ports)
    }

    /// Gives a registration another user's key, after the first port that there is has taken it. If there is none, those that
    /// come back will.
    fn name(&mut self, key: MemoryKey, place: usize, ports: &[Port]) -> Result<MemoryKey, TransportError> {
        self.registrations[place].users += 1;
        let index = key.0.index as usize;
        if self.places.len() <= index {
            self.places.resize(index + 1, usize::MAX);
        }
        self.places[index] = place;
        let Registration { bytes, region, ref gpu, ref mut known, .. } = self.registrations[place];
        known.iter_mut().filter(|known| matches!(known, Known::Refused(_))).for_each(|known| *known = Known::No);
        let is_at_once = bytes >= AT_ONCE_FROM_BYTES || region.is_some() || gpu.is_some();
        let home = self.home % ports.len().max(1);
        let is_open = |port: &usize| is_at_once && ports.get(*port).is_some_and(|port| port.opened.is_some());
        let first = (home..ports.len()).chain(0..home).find(is_open);
        if let Some(Err(error)) = first.map(|port| self.keys(key, port, ports)) {
            // Nothing uses it yet.
            let _ = self.deregister(key);
            return Err(error);
        }
        Ok(key)
    }

    fn place(&mut self, address: u64, bytes: u64) -> usize {
        let region = region_of(address as usize, bytes);
        if let Some(place) = self.by_extent.get(&(address, bytes)).copied()
            && (self.registrations[place].users > 0 || self.registrations[place].region == region)
        {
            return place;
        }
        let place = self.add(Registration { address, bytes, region, ..Registration::default() });
        self.by_extent.insert((address, bytes), place);
        place
    }

    fn add(&mut self, registration: Registration) -> usize {
        match self.free.pop() {
            Some(place) => {
                self.registrations[place] = registration;
                place
            }
            None => {
                self.registrations.push(registration);
                self.registrations.len() - 1
            }
        }
    }

    pub(in crate::rdma) fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
        self.regions.deregister(key)?;
        let Some(place) = self.places.get(key.0.index as usize).copied() else { return Ok(()) };
        let Some(registration) = self.registrations.get_mut(place) else { return Ok(()) };
        registration.users -= 1;
        if registration.users == 0 {
            self.kept.push(place);
            if registration.region.is_none() {
                self.forget(place);
            } else if self.kept.len() > KEPT_MAX {
                self.forget(self.kept[0]);
            }
        }
        Ok(())
    }

    fn forget(&mut self, place: usize) {
        self.kept.retain(|kept| *kept != place);
        let registration = std::mem::take(&mut self.registrations[place]);
        // Other memory is written by nobody from here on: its owner does not say when it goes.
        if registration.region.is_some() && registration.bytes > PINNED_BY_WORKER_ABOVE_BYTES {
            let share = registration.share();
            for known in registration.known {
                if let Known::Yes(region) = known {
                    self.pinner.begin(Pinning::Unpin(share, Some(region)));
                }
            }
        }
        let extent = (registration.address, registration.bytes);
        // Another region may lie there by now, with a registration of its own.
        if self.by_extent.get(&extent) == Some(&place) {
            self.by_extent.remove(&extent);
        }
        self.free.push(place);
    }

    /// Lets go of memory whose regions are gone.
    pub(in crate::rdma) fn forget_gone(&mut self) {
        let gone = regions_gone();
        if std::mem::replace(&mut self.gone_before, gone) == gone {
            return;
        }
        for place in self.kept.clone() {
            let Registration { address, bytes, region, .. } = self.registrations[place];
            if region_of(address as usize, bytes) != region {
                self.forget(place);
            }
        }
    }

    /// A port's device forgets all memory.
    pub(in crate::rdma) fn forget_port(&mut self, port: usize) {
        self.registrations
            .iter_mut()
            .filter_map(|registration| registration.known.get_mut(port))
            .for_each(|known| *known = Known::No);
    }

    /// The devices forget all memory, and the keys that they are asked for are those of other memory, now and later.
    #[cfg(test)]
    pub(in crate::rdma) fn revoke(&mut self, ports: &[Port]) {
        let other: &'static mut [u8] = vec![0; 4096].leak();
        let known = self.registrations.iter_mut().flat_map(|registration| ports.iter().zip(&mut registration.known));
        for (port, known) in known {
            let pd = &port.opened.as_ref().expect("an open port").pd;
            // SAFETY: the memory stays for as long as the process.
            *known = Known::Yes(unsafe { pd.register(other.as_ptr() as u64, other.len() as u64) }.expect("registers"));
        }
    }

    /// How devices reach it, if it is a GPU's.
    pub(in crate::rdma) fn gpu_access(&self, key: MemoryKey) -> Option<GpuAccess> {
        self.registrations.get(*self.places.get(key.0.index as usize)?)?.gpu.as_ref()?.access
    }

    /// Whether it is a GPU's, which the processor cannot reach.
    pub(in crate::rdma) fn is_gpu(&self, key: MemoryKey) -> bool {
        let place = self.places.get(key.0.index as usize).copied();
        place.and_then(|place| self.registrations.get(place)).is_some_and(|registration| registration.gpu.is_some())
    }

    /// Whether memory is kept that nobody uses.
    pub(in crate::rdma) fn keeps(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Keys for work requests on a port; `None` while the memory is being pinned there.
    pub(in crate::rdma) fn keys(
        &mut self,
        key: MemoryKey,
        port: usize,
        ports: &[Port],
    ) -> Result<Option<Keys>, TransportError> {
        let no_such = TransportError::NoSuch("registered memory");
        let place = self.places.get(key.0.index as usize).copied().ok_or(no_such.clone())?;
        let registration = self.registrations.get_mut(place).ok_or(no_such.clone())?;
        let is_gpu = registration.gpu.is_some();
        let known = registration.known.get_mut(port).ok_or(no_such)?;
        if let Known::Refused(error) = known {
            let error = error.clone();
            *known = Known::No;
            return Err(error);
        }
        match known {
            _ if registration.bytes == 0 => Ok(Some(Keys { lkey: 0, rkey: 0, is_gpu })),
            Known::Yes(region) => Ok(Some(Keys { lkey: region.lkey, rkey: region.rkey, is_gpu })),
            Known::Pending(_) => Ok(None),
            Known::No | Known::Refused(_) => {
                let known = self.make_known(place, port, ports)?;
                let keys = match &known {
                    Known::Yes(region) => Some(Keys { lkey: region.lkey, rkey: region.rkey, is_gpu }),
                    _ => None,
                };
                self.registrations[place].known[port] = known;
                Ok(keys)
            }
        }
    }

    /// Has a port's device learn of a registration, or begins to.
    fn make_known(&mut self, place: usize, port: usize, ports: &[Port]) -> Result<Known, TransportError> {
        let opened = ports.get(port).and_then(|port| port.opened.as_ref());
        let pd = &opened.ok_or(TransportError::NoSuch("registered memory"))?.pd;
        let Some(&mut Registration { address, bytes, ref mut gpu, .. }) = self.registrations.get_mut(place) else {
            return Err(TransportError::NoSuch("registered memory"));
        };
        if let Some(GpuBuffer { buffer, access }) = gpu {
            let buffer = buffer.as_ref().map(|(fd, offset)| DmaBuffer { fd: fd.as_raw_fd(), offset: *offset });
            let refused =
                |GpuRefusal { by_buffer, by_address }| TransportError::GpuMemory { bytes, by_buffer, by_address };
            // SAFETY: whoever registered the memory keeps it until it deregisters it.
            let (region, way) = unsafe { pd.register_gpu(address, bytes, buffer) }.map_err(refused)?;
            *access = Some(access.map_or(way, |known| known.worse(way)));
            return Ok(Known::Yes(region));
        }
        if bytes > PINNED_BY_WORKER_ABOVE_BYTES {
            return Ok(self.pin(place, port, pd));
        }
        // SAFETY: as above; regions that are kept live.
        match unsafe { pd.register(address, bytes) } {
            Ok(region) => Ok(Known::Yes(region)),
            // Not as long as others' memory is, which is let go of.
            Err(VerbsError { errno: Errno::ENOMEM, .. }) if self.forget_kept() || !self.pinner.is_idle() => {
                Ok(self.pin(place, port, pd))
            }
            Err(error) => Err(refusal(error, bytes)),
        }
    }

    /// Begins to pin a registration, behind what its tenant has begun before; or later, when less of that is left: whoever waits for memory
    /// asks again when some has been pinned.
    fn pin(&mut self, place: usize, port: usize, pd: &Arc<ProtectionDomain>) -> Known {
        let registration = &self.registrations[place];
        let (address, bytes, share) = (registration.address, registration.bytes, registration.share());
        if self.pinner.works_of(share) >= PINNINGS_OF_TENANT_MAX {
            return Known::No;
        }
        self.pinnings += 1;
        let (number, pd) = (self.pinnings, Arc::clone(pd));
        self.pinner.begin(Pinning::Pin { number, place, port, pd, address, bytes, share, made: None });
        Known::Pending(number)
    }

    /// Lets go of memory that nobody uses. Returns whether there was any.
    fn forget_kept(&mut self) -> bool {
        let any = self.keeps();
        while let Some(place) = self.kept.first().copied() {
            self.forget(place);
        }
        any
    }

    /// Takes what the pinner has done. Returns whether there was anything: flows that wait for memory may go on.
    pub(in crate::rdma) fn take_pinned(&mut self) -> bool {
        let mut any = false;
        while let Some(done) = self.pinner.take() {
            any = true;
            let Pinning::Pin { number, place, port, pd, bytes, made, .. } = done else { continue };
            let is_asked = |memory: &Memory| {
                let known = memory.registrations.get(place).and_then(|registration| registration.known.get(port));
                matches!(known, Some(Known::Pending(asked)) if *asked == number)
            };
            let (Some(made), true) = (made, is_asked(self)) else { continue };
            let known = match made {
                Ok(region) => Known::Yes(region),
                Err(VerbsError { errno: Errno::ENOMEM, .. }) if self.forget_kept() => {
                    // It may have been kept itself.
                    if !is_asked(self) {
                        continue;
                    }
                    self.pin(place, port, &pd)
                }
                Err(error) => Known::Refused(refusal(error, bytes)),
            };
            self.registrations[place].known[port] = known;
        }
        any
    }
}
