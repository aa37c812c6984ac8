//! Emulated virtual memory management: `cuMemCreate` and what goes with it.
//!
//! A descriptor for another process has to be a device's, as the driver's are: it is a terminal's, whose settings say whose memory it is.
//! Other than with the driver, who has been passed it must open it while its maker has the memory.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::capture;
use crate::code::{Done, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, OPERATING_SYSTEM, PEER_ACCESS_UNSUPPORTED};
use crate::device;
use crate::memory::{self, Kind, LARGE_PAGE_BYTES, Table, table};
use crate::physical::{Physical, What, number_in_proc};
use crate::registry::Registry;
use crate::stream;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`.
const ON_NODE: u32 = 3;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: u32 = 1;

/// `CUmemLocation`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Location {
    kind: u32,
    id: i32,
}

/// `CUmemAllocationProp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    meta_data: usize,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Access {
    location: Location,
    flags: u32,
}

#[cfg(test)]
impl Properties {
    pub(crate) fn of_device(id: i32, is_shared: bool) -> Self {
        let location = Location { kind: ON_DEVICE, id };
        Properties { kind: PINNED, handle_types: u32::from(is_shared), location, meta_data: 0, flags: [0; 8] }
    }

    pub(crate) fn of_host() -> Self {
        Properties { location: Location { kind: ON_NODE, id: 0 }, ..Self::of_device(0, true) }
    }

    pub(crate) fn is_of_host(&self) -> bool {
        self.location.kind == ON_NODE
    }
}

#[cfg(test)]
impl Access {
    pub(crate) fn of_device(id: i32) -> Self {
        Access { location: Location { kind: ON_DEVICE, id }, flags: 3 }
    }
}

const _: () = assert!(size_of::<Properties>() == 32 && size_of::<Access>() == 12);

/// The object of a handle.
struct Allocation {
    physical: Arc<Physical>,
    is_shared: bool,
    /// References by the program, and mappings: each keeps the handle.
    uses: AtomicUsize,
}

static ALLOCATIONS: Registry<Allocation> = Registry::new(5);
/// Handles are looked up and counted in one step.
static COUNTING: Mutex<()> = Mutex::new(());

fn device_of(location: Location) -> Done<&'static device::Device> {
    if location.kind == ON_DEVICE { device::by_ordinal(location.id) } else { Err(INVALID_DEVICE) }
}

/// Whether memory is of the host's only node.
fn is_of_host(location: Location) -> bool {
    (location.kind, location.id) == (ON_NODE, 0)
}

/// Unit of sizes.
pub(crate) fn granularity(properties: &Properties) -> Done<usize> {
    if !is_of_host(properties.location) {
        device_of(properties.location)?;
    }
    Ok(LARGE_PAGE_BYTES as usize)
}

/// Allocates. Returns a handle.
pub(crate) fn create(bytes: u64, properties: &Properties) -> Done<u64> {
    capture::forbid()?;
    if bytes == 0 || !bytes.is_multiple_of(LARGE_PAGE_BYTES) || properties.handle_types & !DESCRIPTOR != 0 {
        return Err(INVALID_VALUE);
    }
    let _managing = memory::managing();
    let physical = if is_of_host(properties.location) {
        Physical::new(What::OfHost, 0, bytes)?
    } else {
        let device = device_of(properties.location)?;
        device.check()?;
        memory::check_room(device, bytes)?;
        Physical::new(What::Memory, device.number, bytes)?
    };
    let physical = Arc::new(physical);
    let is_shared = properties.handle_types == DESCRIPTOR;
    Ok(ALLOCATIONS.add(Arc::new(Allocation { physical, is_shared, uses: AtomicUsize::new(1) })) as u64)
}

fn counting() -> std::sync::MutexGuard<'static, ()> {
    COUNTING.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn get(handle: u64) -> Done<Arc<Allocation>> {
    ALLOCATIONS.get(handle as usize).map_err(|_| INVALID_VALUE)
}

/// The properties of its making.
pub(crate) fn properties(handle: u64) -> Done<Properties> {
    let allocation = get(handle)?;
    let name = allocation.physical.name;
    let kind = if name.what == What::OfHost { ON_NODE } else { ON_DEVICE };
    let location = Location { kind, id: name.device as i32 };
    let handle_types = if allocation.is_shared { DESCRIPTOR } else { 0 };
    Ok(Properties { kind: PINNED, handle_types, location, meta_data: 0, flags: [0; 8] })
}

/// Whether other processes may be passed it.
pub(crate) fn is_shared(handle: u64) -> bool {
    get(handle).is_ok_and(|allocation| allocation.is_shared)
}

/// Gives a reference back.
pub(crate) fn release(handle: u64) -> Done {
    let _alone = counting();
    if get(handle)?.uses.fetch_sub(1, Ordering::AcqRel) == 1 {
        ALLOCATIONS.remove(handle as usize)?;
    }
    Ok(())
}

/// The handle of what is mapped at an address, with a reference more.
pub(crate) fn retain(address: u64) -> Done<u64> {
    let _alone = counting();
    let table = table();
    let Some((_, memory::Range { kind: Kind::Segment { handle, .. }, .. })) = table.at(address) else {
        return Err(INVALID_VALUE);
    };
    get(*handle as u64)?.uses.fetch_add(1, Ordering::AcqRel);
    Ok(*handle as u64)
}

/// A descriptor for another process.
pub(crate) fn export(handle: u64, kind: u32) -> Done<i32> {
    let allocation = get(handle)?;
    if kind != DESCRIPTOR || !allocation.is_shared {
        return Err(NOT_SUPPORTED);
    }
    // SAFETY: opens a terminal of its own.
    let fd = unsafe { libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(OPERATING_SYSTEM);
    }
    // SAFETY: opened above, and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let physical = &allocation.physical;
    let named = Named { pid: number_in_proc(), fd: physical.number(), nonce: physical.name.nonce };
    named.write_to(&fd)?;
    Ok(fd.into_raw_fd())
}

/// An allocation that another process has exported. Returns a handle of one's own.
pub(crate) fn import(fd: i32, kind: u32) -> Done<u64> {
    capture::forbid()?;
    if kind != DESCRIPTOR || fd < 0 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: looked at before the caller can close it; one that is not open is refused below.
    let Named { pid, fd, nonce } = Named::read_from(unsafe { BorrowedFd::borrow_raw(fd) })?;
    let is_it = |name: &crate::physical::Name| name.nonce == nonce && name.what != What::Event;
    let physical = Arc::new(Physical::open(pid, fd, is_it)?);
    Ok(ALLOCATIONS.add(Arc::new(Allocation { physical, is_shared: true, uses: AtomicUsize::new(1) })) as u64)
}

/// Owner of a terminal's memory.
struct Named {
    pid: u32,
    fd: u32,
    nonce: u64,
}

/// First bytes of settings of terminals that do.
const MAGIC: [u8; 8] = *b"emuVMMv1";

impl Named {
    /// Into the size of the window, and the control characters.
    fn write_to(&self, fd: &OwnedFd) -> Done {
        let half = |value: u32| [value as u16, (value >> 16) as u16];
        let ([ws_row, ws_col], [ws_xpixel, ws_ypixel]) = (half(self.pid), half(self.fd));
        let size = libc::winsize { ws_row, ws_col, ws_xpixel, ws_ypixel };
        // SAFETY: all-zero is a value of this plain structure.
        let mut settings: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open, and the structures live.
        let is_done = unsafe {
            libc::ioctl(fd.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) == 0
                && libc::tcgetattr(fd.as_raw_fd(), &mut settings) == 0
                && {
                    settings.c_cc[..8].copy_from_slice(&MAGIC);
                    settings.c_cc[8..16].copy_from_slice(&self.nonce.to_ne_bytes());
                    libc::tcsetattr(fd.as_raw_fd(), libc::TCSANOW, &settings) == 0
                }
        };
        if is_done { Ok(()) } else { Err(OPERATING_SYSTEM) }
    }

    fn read_from(fd: BorrowedFd<'_>) -> Done<Self> {
        // SAFETY: all-zero is a value of these plain structures.
        let (mut size, mut settings): (libc::winsize, libc::termios) = unsafe { std::mem::zeroed() };
        // SAFETY: the structures live; a descriptor that is no terminal's is refused.
        let is_done = unsafe {
            libc::ioctl(fd.as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) == 0
                && libc::tcgetattr(fd.as_raw_fd(), &mut settings) == 0
        };
        if !is_done || settings.c_cc[..8] != MAGIC {
            return Err(INVALID_VALUE);
        }
        let whole = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        let nonce = settings.c_cc[8..16].try_into().map_err(|_| INVALID_VALUE)?;
        Ok(Named {
            pid: whole(size.ws_row, size.ws_col),
            fd: whole(size.ws_xpixel, size.ws_ypixel),
            nonce: u64::from_ne_bytes(nonce),
        })
    }
}

/// Reserves addresses.
pub(crate) fn reserve(bytes: u64) -> Done<u64> {
    if bytes == 0 || !bytes.is_multiple_of(LARGE_PAGE_BYTES) {
        return Err(INVALID_VALUE);
    }
    table().take(bytes)
}

/// Gives addresses back where nothing is mapped.
pub(crate) fn give_back(address: u64, bytes: u64) -> Done {
    let mut table = table();
    let is_reserved = table.taken.get(&address) == Some(&bytes);
    if !is_reserved || table.ranges.range(address..address + bytes).next().is_some() {
        return Err(INVALID_VALUE);
    }
    table.taken.remove(&address);
    Ok(())
}

/// Whether addresses were reserved, and nothing is mapped there.
fn is_free(table: &Table, address: u64, bytes: u64) -> bool {
    let reserved = table.taken.range(..=address).next_back();
    let is_reserved = reserved.is_some_and(|(base, room)| address - base + bytes <= *room);
    let before = table.ranges.range(..address + bytes).next_back();
    is_reserved && before.is_none_or(|(base, range)| base + range.bytes <= address)
}

/// Maps the first bytes of an allocation.
pub(crate) fn map(address: u64, bytes: u64, offset: u64, handle: u64) -> Done {
    let _managing = memory::managing();
    let _alone = counting();
    let allocation = get(handle)?;
    let mut table = table();
    let is_whole = bytes != 0 && bytes.is_multiple_of(LARGE_PAGE_BYTES) && bytes <= allocation.physical.name.bytes;
    if offset != 0 || !is_whole || !is_free(&table, address, bytes) {
        return Err(INVALID_VALUE);
    }
    allocation.physical.map(Some(address), bytes)?;
    allocation.uses.fetch_add(1, Ordering::AcqRel);
    let range = memory::segment(Arc::clone(&allocation.physical), bytes, handle as usize);
    table.ranges.insert(address, range);
    Ok(())
}

/// Lets GPUs reach what is mapped.
pub(crate) fn set_access(address: u64, bytes: u64, to: &[Access]) -> Done {
    const READ_AND_WRITE: u32 = 3;
    let mut table = table();
    // Whole mappings, and nothing else.
    let mut end = address;
    for (begin, range) in table.ranges.range(address..address + bytes) {
        end += if *begin == end { range.bytes } else { 0 };
    }
    if bytes == 0 || end != address + bytes {
        return Err(INVALID_VALUE);
    }
    for (_, range) in table.ranges.range_mut(address..address + bytes) {
        let owner = range.device();
        let Kind::Segment { access, .. } = &mut range.kind else { return Err(INVALID_VALUE) };
        for one in to.iter().filter(|one| one.flags == READ_AND_WRITE) {
            let number = device_of(one.location)?.number;
            if number != owner && !device::claims_access(number, owner) {
                return Err(PEER_ACCESS_UNSUPPORTED);
            }
            access.push(number);
        }
    }
    Ok(())
}

/// Unmaps what was mapped by one call, when everything has ended that was enqueued.
pub(crate) fn unmap(address: u64, bytes: u64) -> Done {
    let is_it = |table: &Table| match table.ranges.get(&address) {
        Some(memory::Range { kind: Kind::Segment { handle, .. }, bytes: mapped, .. }) if *mapped == bytes => {
            Ok(*handle as u64)
        }
        _ => Err(INVALID_VALUE),
    };
    let _managing = memory::managing();
    let handle = is_it(&table())?;
    stream::wait_for_all();
    {
        let mut table = table();
        table.ranges.remove(&address);
        memory::unmap(address, bytes);
    }
    release(handle)
}
