//! Registered memory: keys of the transport's users, and what the devices know.
//!
//! Registering with a device pins pages, which takes the kernel long. So registrations of tenants' regions are kept when
//! their last user deregisters them, as long as the region lives: collectives use the same buffers again and again. The
//! service names every region with a number that is never used again, so that memory which comes to lie at the same address
//! later is never taken for the one that was there. Other memory is never kept: nobody says when it goes.
//!
//! A device other than the first that there is learns of memory when a flow first uses it there.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};

use super::super::region::Regions;
use super::super::{Fault, MemoryKey, TransportError};
use super::ports::Port;
use super::verbs::{DmaBuffer, GpuRefusal, MemoryRegion, VerbsError};
use crate::memory::{region_number, regions_gone};

/// Registrations that are kept without a user.
const KEPT_MAX: usize = 256;
/// Other memory that is shorter than this is registered when a device is to use it, which with short messages is never: collectives
/// have such memory for an operation each. That the limit on locked memory refuses it is told late, by a flow that fails.
const AT_ONCE_FROM_BYTES: u64 = 16 << 10;
/// Ports of a transport.
pub(super) const PORTS_MAX: usize = mccs_config::limits::RDMA_PORTS_MAX;

#[derive(Debug, Default)]
struct Registration {
    address: u64,
    bytes: u64,
    users: u32,
    /// Number of the tenant's region that it lies in.
    region: Option<u64>,
    /// A GPU's memory, by a descriptor where there is one.
    gpu: Option<GpuBuffer>,
    /// By port.
    mrs: [Option<MemoryRegion>; PORTS_MAX],
}

#[derive(Debug)]
struct GpuBuffer {
    buffer: Option<(OwnedFd, u64)>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) regions: Regions,
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
pub(super) struct Keys {
    pub(super) lkey: u32,
    pub(super) rkey: u32,
    pub(super) is_gpu: bool,
}

/// What a refusal means.
pub(super) fn refusal(error: VerbsError, bytes: u64) -> TransportError {
    if error.errno == Errno::ENOMEM {
        let (limit_bytes, _) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap_or((0, 0));
        return TransportError::LockedMemory { bytes, limit_bytes };
    }
    TransportError::Os { call: error.call, reason: error.errno }
}

/// What it means for a flow that a device does not take its memory.
pub(super) fn unregistered(error: TransportError) -> Fault {
    match error {
        TransportError::Os { call, reason: reason @ (Errno::EIO | Errno::ENODEV) } => Fault::Os { call, reason },
        _ => Fault::Unregistered,
    }
}

impl Memory {
    pub(super) fn new(home: usize) -> Self {
        Memory {
            regions: Regions::new(),
            places: Vec::new(),
            registrations: Vec::new(),
            free: Vec::new(),
            by_extent: HashMap::new(),
            kept: Vec::new(),
            gone_before: regions_gone(),
            home,
        }
    }

    /// Makes memory known, to the first port that there is, from home on, at once, so that a refusal is told here.
    ///
    /// # Safety
    /// As of [`super::super::Transport::register`].
    pub(super) unsafe fn register(
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
    /// As of [`super::RdmaTransport::register_gpu`].
    pub(super) unsafe fn register_gpu(
        &mut self,
        address: u64,
        bytes: u64,
        buffer: Option<(OwnedFd, u64)>,
        ports: &[Port],
    ) -> Result<MemoryKey, TransportError> {
        // SAFETY: the caller's promise; only devices use the address.
        let key = unsafe { self.regions.register(address as *mut u8, bytes) }?;
        let gpu = Some(GpuBuffer { buffer });
        let place = self.add(Registration { address, bytes, gpu, ..Registration::default() });
        self.name(key, place, ports)
    }

    /// Gives a registration another user's key, after the first port that there is has taken it. Where there is none, those that
    /// come back will.
    fn name(&mut self, key: MemoryKey, place: usize, ports: &[Port]) -> Result<MemoryKey, TransportError> {
        self.registrations[place].users += 1;
        let index = key.0.index as usize;
        if self.places.len() <= index {
            self.places.resize(index + 1, usize::MAX);
        }
        self.places[index] = place;
        let Registration { bytes, region, ref gpu, .. } = self.registrations[place];
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
        let region = region_number(address as usize, bytes);
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

    pub(super) fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
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
        let extent = (registration.address, registration.bytes);
        // Another region may lie there by now, with a registration of its own.
        if self.by_extent.get(&extent) == Some(&place) {
            self.by_extent.remove(&extent);
        }
        self.free.push(place);
    }

    /// Lets go of memory whose regions are gone.
    pub(super) fn forget_gone(&mut self) {
        let gone = regions_gone();
        if std::mem::replace(&mut self.gone_before, gone) == gone {
            return;
        }
        for place in self.kept.clone() {
            let Registration { address, bytes, region, .. } = self.registrations[place];
            if region_number(address as usize, bytes) != region {
                self.forget(place);
            }
        }
    }

    /// A port's device forgets all memory.
    pub(super) fn forget_port(&mut self, port: usize) {
        self.registrations
            .iter_mut()
            .filter_map(|registration| registration.mrs.get_mut(port))
            .for_each(|mr| *mr = None);
    }

    /// The devices forget all memory, and the keys that they are asked for are those of other memory, now and later.
    #[cfg(test)]
    pub(super) fn revoke(&mut self, ports: &[Port]) {
        let other: &'static mut [u8] = vec![0; 4096].leak();
        for (port, mr) in self.registrations.iter_mut().flat_map(|registration| ports.iter().zip(&mut registration.mrs))
        {
            let pd = &port.opened.as_ref().expect("an open port").pd;
            // SAFETY: the memory stays for as long as the process.
            *mr = Some(unsafe { pd.register(other.as_ptr() as u64, other.len() as u64) }.expect("registers"));
        }
    }

    /// Whether it is a GPU's, which the processor cannot reach.
    pub(super) fn is_gpu(&self, key: MemoryKey) -> bool {
        let place = self.places.get(key.0.index as usize).copied();
        place.and_then(|place| self.registrations.get(place)).is_some_and(|registration| registration.gpu.is_some())
    }

    /// Whether memory is kept that nobody uses.
    pub(super) fn keeps(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Keys for work requests on a port.
    pub(super) fn keys(&mut self, key: MemoryKey, port: usize, ports: &[Port]) -> Result<Keys, TransportError> {
        let no_such = TransportError::NoSuch("registered memory");
        let place = self.places.get(key.0.index as usize).copied().ok_or(no_such.clone())?;
        let registration = self.registrations.get_mut(place).ok_or(no_such.clone())?;
        if registration.bytes == 0 {
            return Ok(Keys { lkey: 0, rkey: 0, is_gpu: false });
        }
        let Registration { address, bytes, ref gpu, ref mut mrs, .. } = *registration;
        let slot = mrs.get_mut(port).ok_or(no_such.clone())?;
        let mr = match slot {
            Some(mr) => mr,
            None => {
                let pd = &ports.get(port).and_then(|port| port.opened.as_ref()).ok_or(no_such)?.pd;
                // SAFETY: whoever registered the memory keeps it until it deregisters it, and regions that are kept live.
                let made = unsafe {
                    match gpu {
                        None => pd.register(address, bytes).map_err(|error| refusal(error, bytes)),
                        Some(GpuBuffer { buffer }) => {
                            let buffer =
                                buffer.as_ref().map(|(fd, offset)| DmaBuffer { fd: fd.as_raw_fd(), offset: *offset });
                            let refused = |GpuRefusal { by_buffer, by_address }| TransportError::GpuMemory {
                                bytes,
                                by_buffer,
                                by_address,
                            };
                            pd.register_gpu(address, bytes, buffer).map_err(refused)
                        }
                    }
                };
                slot.insert(made?)
            }
        };
        Ok(Keys { lkey: mr.lkey, rkey: mr.rkey, is_gpu: gpu.is_some() })
    }
}
