//! Regions: tenants' memory, mapped in the service.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{OnceLock, PoisonError, RwLock, mpsc};

use mccs_ipc::protocol::{GPU_SEGMENTS_MAX, MESSAGE_FDS_MAX};
use mccs_ipc::shm::Mapping;
use nix::sys::resource::{Resource, getrlimit};

use crate::runtime::Share;
use crate::tenants::Charge;

/// Regions that are mapped, by address: length and number.
static MAPPED: RwLock<BTreeMap<usize, (u64, u64)>> = RwLock::new(BTreeMap::new());
/// Number of the next region.
static NEXT: AtomicU64 = AtomicU64::new(0);
static GONE: AtomicU64 = AtomicU64::new(0);

/// Number of the region that memory lies in, which no other region ever has: what is known about memory (its registration
/// with a device) holds as long as this is the same. `None` for memory of the service's own.
#[must_use]
pub fn region_number(address: usize, bytes: u64) -> Option<u64> {
    let mapped = MAPPED.read().unwrap_or_else(PoisonError::into_inner);
    let (start, (length, number)) = mapped.range(..=address).next_back()?;
    let end = ((address - start) as u64).checked_add(bytes)?;
    (end <= *length).then_some(*number)
}

/// How many regions have gone so far: as long as it stays, all are there that were.
#[must_use]
pub fn regions_gone() -> u64 {
    GONE.load(Ordering::Acquire)
}

/// The kernel's limit where it does not say.
const MAPPINGS_DEFAULT: u64 = 65_530;

/// Mappings of this process that tenants' regions may take, all together: seven eighths of what the kernel allows. Who has
/// none left can map neither sessions nor memory of its own, and ends.
#[must_use]
pub fn mappings_of_tenants() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    let all: u64 = text.trim().parse().unwrap_or(MAPPINGS_DEFAULT);
    all - all / 8
}

/// Descriptors of this process that a tenant's segments of GPU memory may take, each for the moment until it is imported: a sixteenth of
/// what the kernel allows, which is more than sessions need beside them, and no more than a region has.
#[must_use]
pub fn descriptors_of_tenant() -> u64 {
    static LIMIT: OnceLock<u64> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let all = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        (all / 16).clamp(MESSAGE_FDS_MAX as u64, GPU_SEGMENTS_MAX as u64)
    })
}

/// Memory that a tenant registered or the service allocated. Operations in flight keep it mapped.
pub struct Region {
    /// With what its tenant is charged until it is unmapped. `None` only while dropping.
    mapping: Option<(Mapping, Charge)>,
    bytes: u64,
    reaper: Reaper,
    memory: Charge,
}

impl Region {
    /// Takes charge of a mapping, for whose bytes and number of mappings the tenant is charged.
    #[must_use]
    pub fn new(mapping: Mapping, bytes: u64, [memory, mappings]: [Charge; 2], reaper: Reaper) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let start = mapping.as_ptr() as usize;
        MAPPED.write().unwrap_or_else(PoisonError::into_inner).insert(start, (bytes, number));
        Region { mapping: Some((mapping, mappings)), bytes, reaper, memory }
    }

    /// Usable bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// Its tenant's part of engines that tenants share.
    #[must_use]
    pub fn share(&self) -> Share {
        self.memory.tenant().share
    }

    /// Address of `len_bytes` bytes at `offset_bytes`, or `None` where they do not all lie inside.
    #[must_use]
    pub fn range(&self, offset_bytes: u64, len_bytes: u64) -> Option<*mut u8> {
        let end = offset_bytes.checked_add(len_bytes)?;
        let (mapping, _) = self.mapping.as_ref()?;
        (end <= self.bytes).then(|| mapping.as_ptr().wrapping_add(offset_bytes as usize))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some((mapping, charge)) = self.mapping.take() {
            // Before it is unmapped: afterwards another region may be mapped there.
            MAPPED.write().unwrap_or_else(PoisonError::into_inner).remove(&(mapping.as_ptr() as usize));
            GONE.fetch_add(1, Ordering::Release);
            self.reaper.unmap_later(mapping, charge);
        }
    }
}

/// Unmaps memory on a thread of its own: giving gigabytes back takes the kernel a good part of a second, and engines
/// must not wait for it. What waits for that still counts against its tenant's mappings.
#[derive(Clone)]
pub struct Reaper(mpsc::Sender<(Mapping, Charge)>);

impl Reaper {
    /// Starts the thread; it ends when the last clone and the last region are gone.
    ///
    /// # Errors
    /// The kernel's refusal of a thread.
    pub fn start() -> std::io::Result<Self> {
        // The mapping comes first in what is dropped, and goes first.
        let (sender, receiver) = mpsc::channel::<(Mapping, Charge)>();
        std::thread::Builder::new().name("mccs-reaper".into()).spawn(move || receiver.iter().for_each(drop))?;
        Ok(Reaper(sender))
    }

    fn unmap_later(&self, mapping: Mapping, charge: Charge) {
        // The thread lives as long as any sender does, so this cannot fail; if it did, the mapping would drop here.
        let _ = self.0.send((mapping, charge));
    }
}
