//! Emulated GPU memory: what is mapped where in this process, who reaches it, copies.
//!
//! A GPU's addresses are this process' own, in a range that is reserved for them, so that they can be told from the host's. They are given
//! out lowest first: one that was freed comes again soon, as with the driver.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::accounts;
use crate::capture;
use crate::code::{
    Done, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY,
};
use crate::device::{self, Device, MEMORY_BYTES};
use crate::handle::{self, Handle};
use crate::physical::{PAGE_BYTES, Physical, What};
use crate::stream;

/// How many addresses are reserved for GPUs: the first that are to be had. Valgrind leaves a program fewer than the first.
const ARENA_BYTES: [u64; 2] = [1 << 42, 1 << 35];
/// Allocations begin at multiples of this.
pub(crate) const LARGE_PAGE_BYTES: u64 = 2 << 20;

/// A mapping.
pub(crate) struct Range {
    /// As many as were asked for.
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
    /// No other of this process' has or had it.
    pub(crate) id: u64,
    pub(crate) physical: Arc<Physical>,
}

/// How it came to be there.
pub(crate) enum Kind {
    /// `cuMemAlloc`.
    Allocated,
    /// `cuMemAllocAsync`.
    Pooled,
    /// `cuMemAllocManaged`: every GPU of the process reaches it, and no other process opens it.
    Managed,
    /// Opened in a context so many times.
    Imported { context: usize, uses: usize },
    /// `cuMemMap`, of an allocation with this handle; for these GPUs.
    Segment { handle: usize, access: Vec<usize> },
}

/// All of this process'.
#[derive(Default)]
pub(crate) struct Table {
    /// By first address.
    pub(crate) ranges: BTreeMap<u64, Range>,
    /// Addresses that are in use, and how many from there.
    pub(crate) taken: BTreeMap<u64, u64>,
    /// Memory of the host, registered.
    registered: BTreeMap<u64, u64>,
}

/// The process' table.
pub(crate) fn table() -> MutexGuard<'static, Table> {
    static TABLE: Mutex<Table> =
        Mutex::new(Table { ranges: BTreeMap::new(), taken: BTreeMap::new(), registered: BTreeMap::new() });
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls that change what is mapped come one after the other: those beside one that waits for streams wait, too, as with the driver.
pub(crate) fn managing() -> MutexGuard<'static, ()> {
    static MANAGING: Mutex<()> = Mutex::new(());
    MANAGING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn next_id() -> u64 {
    static IDS: AtomicU64 = AtomicU64::new(1);
    IDS.fetch_add(1, Ordering::Relaxed)
}

/// The addresses that are reserved.
fn arena() -> Done<std::ops::Range<u64>> {
    static ARENA: OnceLock<Done<std::ops::Range<u64>>> = OnceLock::new();
    let reserve = |bytes: u64| {
        let (room, flags) = (bytes + LARGE_PAGE_BYTES, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a fresh reservation at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), room as usize, libc::PROT_NONE, flags, -1, 0) };
        let first = (base.addr() as u64).next_multiple_of(LARGE_PAGE_BYTES);
        (base != libc::MAP_FAILED).then(|| first..first + bytes)
    };
    ARENA.get_or_init(|| ARENA_BYTES.into_iter().find_map(reserve).ok_or(OUT_OF_MEMORY)).clone()
}

/// Whether an address is one that GPUs' memory has.
fn is_in_arena(address: u64) -> bool {
    arena().is_ok_and(|arena| arena.contains(&address))
}

/// Nothing is mapped there any more.
pub(crate) fn unmap(address: u64, bytes: u64) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let room = bytes.next_multiple_of(PAGE_BYTES) as usize;
    // SAFETY: a range of the reservation, which becomes what it was.
    unsafe { libc::mmap(address as *mut libc::c_void, room, libc::PROT_NONE, flags, -1, 0) };
}

impl Range {
    pub(crate) fn device(&self) -> usize {
        self.physical.name.device
    }

    /// Whether kernels in a GPU's context reach it.
    fn is_reached_by(&self, device: &Device) -> bool {
        match &self.kind {
            Kind::Allocated | Kind::Pooled => device.reaches(self.device()),
            Kind::Managed => true,
            Kind::Imported { context, .. } => *context == device.number,
            Kind::Segment { access, .. } => access.contains(&device.number),
        }
    }
}

impl Table {
    /// The mapping at an address, and its begin.
    pub(crate) fn at(&self, address: u64) -> Option<(u64, &Range)> {
        let (base, range) = self.ranges.range(..=address).next_back()?;
        Some((*base, range)).filter(|_| address - base < range.bytes)
    }

    /// Takes addresses.
    pub(crate) fn take(&mut self, bytes: u64) -> Done<u64> {
        let (arena, room) = (arena()?, bytes.next_multiple_of(LARGE_PAGE_BYTES));
        let mut at = arena.start;
        for (taken, bytes) in &self.taken {
            if taken - at >= room {
                break;
            }
            at = taken + bytes;
        }
        if room == 0 || room > arena.end - at {
            return Err(OUT_OF_MEMORY);
        }
        self.taken.insert(at, room);
        Ok(at)
    }

    fn insert(&mut self, kind: Kind, physical: Physical) -> Done<u64> {
        let bytes = physical.name.bytes;
        let address = self.take(bytes)?;
        if let Err(error) = physical.map(Some(address), bytes) {
            self.taken.remove(&address);
            return Err(error);
        }
        self.ranges.insert(address, Range { bytes, kind, id: next_id(), physical: Arc::new(physical) });
        Ok(address)
    }

    fn remove(&mut self, address: u64) {
        if let Some(range) = self.ranges.remove(&address) {
            unmap(address, range.bytes);
            self.taken.remove(&address);
        }
    }

    /// The registered memory of the host that an address lies in: first byte and length.
    fn registered_at(&self, address: u64) -> Option<(u64, u64)> {
        let (base, bytes) = self.registered.range(..=address).next_back()?;
        Some((*base, *bytes)).filter(|_| address - base < *bytes)
    }

    /// End of a run of memory that kernels of a GPU reach from an address on.
    fn reached_from(&self, device: &Device, address: u64) -> Option<u64> {
        if !is_in_arena(address) {
            return self.registered_at(address).map(|(base, bytes)| base + bytes);
        }
        let (base, range) = self.at(address)?;
        range.is_reached_by(device).then_some(base + range.bytes)
    }
}

/// A range for memory that is mapped at addresses taken before.
pub(crate) fn segment(physical: Arc<Physical>, bytes: u64, handle: usize) -> Range {
    Range { bytes, kind: Kind::Segment { handle, access: Vec::new() }, id: next_id(), physical }
}

/// Fails where so many bytes more would be too many. All processes are asked only when this one has much: that takes milliseconds.
pub(crate) fn check_room(device: &Device, bytes: u64) -> Done {
    let of_it = |range: &&Range| range.device() == device.number;
    let own: u64 = table().ranges.values().filter(of_it).map(|range| range.bytes).sum();
    let is_much = own.saturating_add(bytes) > MEMORY_BYTES / 8;
    if is_much && accounts::used_bytes(device.number).saturating_add(bytes) > MEMORY_BYTES {
        return Err(OUT_OF_MEMORY);
    }
    Ok(())
}

/// Allocates.
pub(crate) fn allocate(device: &Device, bytes: u64, kind: Kind) -> Done<u64> {
    capture::forbid()?;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let _alone = managing();
    check_room(device, bytes)?;
    let physical = Physical::new(What::Memory, device.number, bytes)?;
    table().insert(kind, physical)
}

/// Frees what was allocated, when everything has ended that was enqueued.
pub(crate) fn free(address: u64) -> Done {
    capture::forbid()?;
    let is_allocated = |table: &Table| {
        let range = table.ranges.get(&address);
        range.is_some_and(|range| matches!(range.kind, Kind::Allocated | Kind::Pooled | Kind::Managed))
    };
    if address == 0 {
        return Ok(());
    }
    let _alone = managing();
    if !is_allocated(&table()) {
        return Err(INVALID_VALUE);
    }
    stream::wait_for_all();
    table().remove(address);
    Ok(())
}

/// The same, in a stream's work.
pub(crate) fn free_pooled(address: u64) -> Done {
    table().remove(address);
    Ok(())
}

/// Whether an address begins memory of the pool's.
pub(crate) fn is_pooled(address: u64) -> bool {
    table().ranges.get(&address).is_some_and(|range| matches!(range.kind, Kind::Pooled))
}

/// Names an allocation to other processes.
pub(crate) fn export(address: u64) -> Done<Handle> {
    let table = table();
    let (_, range) = table.at(address).ok_or(INVALID_VALUE)?;
    if matches!(range.kind, Kind::Allocated) { Ok(handle::of(&range.physical)) } else { Err(INVALID_VALUE) }
}

/// A descriptor for devices of others' of whole pages of one allocation. It maps nothing anywhere, as with the driver.
pub(crate) fn dma_buffer(address: u64, bytes: u64) -> Done<i32> {
    let table = table();
    let (base, range) = table.at(address).ok_or(INVALID_VALUE)?;
    let is_whole = address.is_multiple_of(PAGE_BYTES) && bytes.is_multiple_of(PAGE_BYTES) && bytes > 0;
    let room = range.bytes.next_multiple_of(PAGE_BYTES) - (address - base);
    if !is_whole || bytes > room {
        return Err(INVALID_VALUE);
    }
    // SAFETY: a terminated name; the descriptor is the caller's.
    match unsafe { libc::memfd_create(c"dma-buf".as_ptr(), libc::MFD_CLOEXEC) } {
        ..0 => Err(crate::code::OPERATING_SYSTEM),
        fd => Ok(fd),
    }
}

/// Opens another process' allocation in a context. Again, it is the same.
pub(crate) fn import(device: &Device, handle: &Handle) -> Done<u64> {
    capture::forbid()?;
    let _alone = managing();
    let physical = handle::open(handle, What::Memory)?;
    let mut table = table();
    let name = physical.name;
    let known = table.ranges.iter_mut().find_map(|(address, range)| match &mut range.kind {
        Kind::Imported { context, uses } if *context == device.number && range.physical.name == name => {
            *uses += 1;
            Some(*address)
        }
        _ => None,
    });
    match known {
        Some(address) => Ok(address),
        None => table.insert(Kind::Imported { context: device.number, uses: 1 }, physical),
    }
}

/// Closes it; the last time it is unmapped, when everything has ended that was enqueued.
pub(crate) fn close(address: u64) -> Done {
    capture::forbid()?;
    let _alone = managing();
    {
        let mut table = table();
        let range = table.ranges.get_mut(&address).ok_or(INVALID_VALUE)?;
        let Kind::Imported { uses, .. } = &mut range.kind else { return Err(INVALID_VALUE) };
        if *uses > 1 {
            *uses -= 1;
            return Ok(());
        }
    }
    stream::wait_for_all();
    table().remove(address);
    Ok(())
}

/// Lets GPUs reach memory of the host.
pub(crate) fn register(address: u64, bytes: u64) -> Done {
    capture::forbid()?;
    let end = address.checked_add(bytes).filter(|_| address != 0 && bytes != 0).ok_or(INVALID_VALUE)?;
    let _alone = managing();
    let mut table = table();
    let before = table.registered.range(..end).next_back();
    if before.is_some_and(|(base, bytes)| base + bytes > address) {
        return Err(HOST_MEMORY_ALREADY_REGISTERED);
    }
    table.registered.insert(address, bytes);
    Ok(())
}

/// And no more, when everything has ended that was enqueued.
pub(crate) fn unregister(address: u64) -> Done {
    capture::forbid()?;
    let _alone = managing();
    if !table().registered.contains_key(&address) {
        return Err(HOST_MEMORY_NOT_REGISTERED);
    }
    stream::wait_for_all();
    table().registered.remove(&address);
    Ok(())
}

/// Whether memory of the host is registered at an address.
pub(crate) fn is_registered(address: u64) -> bool {
    table().registered_at(address).is_some()
}

/// Fails where a kernel in a GPU's context could not touch all of a range.
pub(crate) fn reach(device: &Device, address: u64, bytes: u64) -> Done {
    let end = address.checked_add(bytes).ok_or(ILLEGAL_ADDRESS)?;
    let (table, mut at) = (table(), address);
    while at < end {
        at = table.reached_from(device, at).ok_or(ILLEGAL_ADDRESS)?;
    }
    Ok(())
}

/// Target of a GPU's accesses to an address: there, or nowhere if it loses what it writes to the memory's GPU.
pub(crate) fn as_seen_by(device: &Device, address: u64, bytes: u64) -> u64 {
    let owner = table().at(address).map(|(_, range)| range.device());
    if !owner.is_some_and(|owner| device::loses(device.number, owner)) {
        return address;
    }
    // As aligned as the address, in memory that nobody reads.
    nowhere(bytes + LARGE_PAGE_BYTES) + address % LARGE_PAGE_BYTES
}

/// So many bytes of memory, the same for all.
fn nowhere(bytes: u64) -> u64 {
    static NOWHERE: Mutex<Option<(u64, u64)>> = Mutex::new(None);
    let mut nowhere = NOWHERE.lock().unwrap_or_else(PoisonError::into_inner);
    match *nowhere {
        Some((address, room)) if room >= bytes => address,
        _ => {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists. It stays: somebody may still write there.
            let made = unsafe { libc::mmap(std::ptr::null_mut(), bytes as usize, access, flags, -1, 0) };
            assert!(made != libc::MAP_FAILED, "no memory for what is lost");
            nowhere.insert((made.addr() as u64, bytes)).0
        }
    }
}

/// Fails where streams of a GPU can neither write a word nor wait for it: in memory of another GPU's, or the host's that is not registered.
pub(crate) fn reach_word(device: &Device, address: u64) -> Done {
    let table = table();
    let is_own = |(_, range): (u64, &Range)| range.device() == device.number && range.is_reached_by(device);
    let is_reached = match is_in_arena(address) {
        true => table.at(address).is_some_and(is_own),
        false => table.registered_at(address).is_some(),
    };
    if is_reached && address.is_multiple_of(8) { Ok(()) } else { Err(INVALID_VALUE) }
}

/// Fails where copies could not touch all of a range. Returns whether it is the host's, and not registered.
pub(crate) fn reach_by_copies(address: u64, bytes: u64) -> Done<bool> {
    let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
    if !is_in_arena(address) {
        return if address == 0 { Err(INVALID_VALUE) } else { Ok(!is_registered(address)) };
    }
    let (table, mut at) = (table(), address);
    while at < end {
        let (base, range) = table.at(at).ok_or(INVALID_VALUE)?;
        at = base + range.bytes;
    }
    Ok(false)
}

/// Copies. Both ranges are there, as was looked up.
pub(crate) fn copy(to: u64, from: u64, bytes: u64) {
    let is_word = bytes == 8 && to.is_multiple_of(8) && from.is_multiple_of(8);
    if is_word {
        // Another process may write it, or wait for it.
        let value = crate::wait::word(from).load(Ordering::Acquire);
        return crate::wait::word(to).store(value, Ordering::Release);
    }
    // SAFETY: as the caller has looked up; other processes may change the bytes meanwhile, which are bytes all the same.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
}

/// Fills memory of a GPU's, which is there, as was looked up. Zeros take nothing of the host's.
pub(crate) fn fill(to: u64, value: u8, bytes: u64) {
    let (first, end) = (to.next_multiple_of(PAGE_BYTES), (to + bytes) / PAGE_BYTES * PAGE_BYTES);
    let write = |to: u64, bytes: u64| {
        // SAFETY: as for `copy`.
        unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes as usize) };
    };
    let is_removed = value == 0 && first < end && is_in_arena(to) && {
        // SAFETY: whole pages of a shared mapping: they are zeros afterwards, for all who have it mapped.
        unsafe { libc::madvise(first as *mut libc::c_void, (end - first) as usize, libc::MADV_REMOVE) == 0 }
    };
    if is_removed {
        write(to, first - to);
        write(end, to + bytes - end);
    } else {
        write(to, bytes);
    }
}
