//! Host memory shared with the service: allocation, registration and deregistration of regions.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};

use mccs_ipc::command::BufferRef;
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::shm::{Mapping, ShmError};
use mccs_ipc::types::Handle;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::client::{locked, unexpected};
use crate::element::Element;
use crate::{Client, Error};

/// Memory that the service maps too. Given back on drop; operations in flight still end.
///
/// Content of bytes is not defined while two operations in flight name them and one of these writes there, on whichever
/// communicators.
///
/// Dropping a region waits for the service's answer, one round trip over the session's socket, or until the service has gone. So the
/// service knows of it before any other session's next request, and the tenant's quota has room for that. Programs that must not wait
/// drop regions on a thread of their own: a region is [`Send`].
pub struct Region {
    client: Client,
    handle: Handle,
    ptr: *mut u8,
    bytes: usize,
    /// `None` where the caller's own pages are used, which outlive the region.
    _mapping: Option<Mapping>,
}

// SAFETY: a region is an address range in shared memory; access to its contents is unsafe and the caller's matter.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// A place in a region, where a buffer starts.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    pub(crate) buffer: BufferRef,
    /// [`Client`] that the region belongs to: another one's handles would name other memory.
    pub(crate) client_number: u64,
    /// Bytes from here to the region's end.
    pub(crate) available_bytes: u64,
}

impl Span {
    /// No buffer: for ranks whose role in a collective has none.
    pub const NONE: Span = Span { buffer: BufferRef::NONE, client_number: 0, available_bytes: 0 };

    /// The place `bytes` further on. Past the region's end it is a place without bytes, which the call that uses it refuses.
    #[must_use]
    pub fn offset(self, bytes: u64) -> Self {
        let buffer = BufferRef { offset_bytes: self.buffer.offset_bytes.saturating_add(bytes), ..self.buffer };
        Span { buffer, available_bytes: self.available_bytes.saturating_sub(bytes), ..self }
    }
}

/// Memory that a session knows: by address, as C programs name it, and by handle.
#[derive(Default)]
pub(crate) struct Regions {
    by_address: BTreeMap<usize, Known>,
    /// Slots of the service's table, with the first address.
    by_index: Vec<Option<(usize, Known)>>,
}

#[derive(Clone, Copy)]
struct Known {
    handle: Handle,
    bytes: usize,
}

impl Regions {
    fn insert(&mut self, address: usize, known: Known) {
        let index = known.handle.index as usize;
        if self.by_index.len() <= index {
            self.by_index.resize(index + 1, None);
        }
        self.by_index[index] = Some((address, known));
        self.by_address.insert(address, known);
    }

    fn remove(&mut self, address: usize, handle: Handle) {
        // Memory that has been registered again stays known, as the later region.
        if self.by_address.get(&address).is_some_and(|known| known.handle == handle) {
            self.by_address.remove(&address);
        }
        if let Some(slot) = self.by_index.get_mut(handle.index as usize) {
            *slot = None;
        }
    }

    /// The place that an address names, with the bytes from there to the region's end.
    pub(crate) fn place(&self, address: usize) -> Option<(BufferRef, u64)> {
        let (start, known) = self.by_address.range(..=address).next_back()?;
        let offset = address - start;
        let available_bytes = known.bytes.checked_sub(offset)? as u64;
        Some((BufferRef { region: known.handle, offset_bytes: offset as u64 }, available_bytes))
    }

    /// Address of `bytes` of a buffer here. Any address will do for none.
    pub(crate) fn address(&self, buffer: &BufferRef, bytes: usize) -> Option<*mut u8> {
        if bytes == 0 {
            return Some(std::ptr::dangling_mut());
        }
        let (start, known) = self.by_index.get(buffer.region.index as usize).copied().flatten()?;
        let offset = usize::try_from(buffer.offset_bytes).ok()?;
        let fits = known.handle == buffer.region && offset.checked_add(bytes)? <= known.bytes;
        fits.then(|| std::ptr::with_exposed_provenance_mut::<u8>(start).wrapping_add(offset))
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("ptr", &self.ptr).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Region {
    fn new(client: &Client, handle: Handle, ptr: *mut u8, bytes: usize, mapping: Option<Mapping>) -> Self {
        let mut regions = client.0.regions.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        regions.insert(ptr.expose_provenance(), Known { handle, bytes });
        Region { client: client.clone(), handle, ptr, bytes, _mapping: mapping }
    }

    /// First byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Size.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// As its own session knows it: in another's the same handle would name other memory.
    pub(crate) fn handle_in(&self, client: &Client) -> Result<Handle, Error> {
        if self.client.0.number != client.0.number {
            return Err(Error::argument("the region belongs to another session"));
        }
        Ok(self.handle)
    }

    /// The place `offset_bytes` into the region, as [`Span::offset`] has it.
    #[must_use]
    pub fn at(&self, offset_bytes: u64) -> Span {
        let buffer = BufferRef { region: self.handle, offset_bytes: 0 };
        let all = Span { buffer, client_number: self.client.0.number, available_bytes: self.bytes as u64 };
        all.offset(offset_bytes)
    }

    /// The contents.
    ///
    /// # Safety
    /// No operation that writes here may be in flight, and nobody else may write, while the slice lives.
    #[must_use]
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: the range is mapped while `self` lives; the rest is the caller's contract.
        unsafe { std::slice::from_raw_parts(self.ptr, self.bytes) }
    }

    /// The contents, to be changed.
    ///
    /// # Safety
    /// No operation that reads or writes here may be in flight, and nobody else may access it, while the slice lives.
    #[must_use]
    #[expect(clippy::mut_from_ref, reason = "shared memory: exclusivity is the caller's contract")]
    pub unsafe fn as_mut_slice(&self) -> &mut [u8] {
        // SAFETY: as for `as_slice`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.bytes) }
    }
}

impl Region {
    /// Elements `range` of the memory, taken as an array of `T`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a range that leaves the region.
    ///
    /// # Safety
    /// No operation that writes these elements may be in flight, and nobody else may write them, while the slice lives.
    pub unsafe fn slice<T: Element>(&self, range: Range<usize>) -> Result<&[T], Error> {
        let (first, count) = self.elements(range)?;
        // SAFETY: the elements are mapped while `self` lives, and any bytes are a `T`; the rest is the caller's contract.
        Ok(unsafe { std::slice::from_raw_parts(first, count) })
    }

    /// As [`Region::slice`], to be changed.
    ///
    /// # Errors
    /// As [`Region::slice`].
    ///
    /// # Safety
    /// No operation on these elements may be in flight, and nobody else may access them, while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "shared memory: exclusivity is the caller's contract")]
    pub unsafe fn slice_mut<T: Element>(&self, range: Range<usize>) -> Result<&mut [T], Error> {
        let (first, count) = self.elements(range)?;
        // SAFETY: as for `slice`.
        Ok(unsafe { std::slice::from_raw_parts_mut(first, count) })
    }

    /// The first of some elements, and how many they are. A region begins with a page.
    fn elements<T: Element>(&self, range: Range<usize>) -> Result<(*mut T, usize), Error> {
        let all = self.bytes / size_of::<T>();
        if range.start > range.end || range.end > all {
            let (Range { start, end }, name) = (range, T::DATA_TYPE);
            return Err(Error::argument(format!("elements {start}..{end} of a region of {all} of type {name}")));
        }
        Ok((self.ptr.cast::<T>().wrapping_add(range.start), range.len()))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Rounds that were begun with this memory end with it, on the service's side if need be.
        let _ = self.client.0.settle_all();
        let mut regions = self.client.0.regions.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        regions.remove(self.ptr as usize, self.handle);
        drop(regions);
        // If the service has gone, so has its side of the region.
        let _ = self.client.0.requests.call(Request::FreeMemory { region: self.handle }, &[]);
    }
}

fn system(what: &str) -> impl FnOnce(nix::errno::Errno) -> Error + '_ {
    move |errno| Error::refused_by_system(format_args!("cannot {what}"), errno)
}

fn unmapped(error: ShmError) -> Error {
    Error::below("cannot have memory for a region", &error, error.errno())
}

pub(crate) fn allocate(client: &Client, bytes: u64) -> Result<Region, Error> {
    match client.0.requests.call(Request::AllocMemory { bytes }, &[])? {
        (Response::Region { region, bytes }, fds) => {
            let fd = fds.first().ok_or_else(|| Error::ServiceGone("memory came without its descriptor".into()))?;
            let mapping = Mapping::map(fd.as_fd(), bytes).map_err(unmapped)?;
            Ok(Region::new(client, region, mapping.as_ptr(), mapping.len_bytes(), Some(mapping)))
        }
        (other, _) => Err(unexpected(&other)),
    }
}

fn register_with_service(client: &Client, fd: BorrowedFd<'_>, bytes: u64) -> Result<Handle, Error> {
    match client.0.requests.call(Request::RegisterMemory { bytes }, &[fd])? {
        (Response::Region { region, .. }, _) => Ok(region),
        (other, _) => Err(unexpected(&other)),
    }
}

pub(crate) fn register_fd(client: &Client, fd: BorrowedFd<'_>, bytes: u64) -> Result<Region, Error> {
    let mapping = Mapping::map(fd, bytes).map_err(|error| Error::argument(error.to_string()))?;
    let handle = register_with_service(client, fd, bytes)?;
    Ok(Region::new(client, handle, mapping.as_ptr(), mapping.len_bytes(), Some(mapping)))
}

/// # Safety
/// As for [`Client::register`].
pub(crate) unsafe fn register(client: &Client, ptr: *mut u8, bytes: usize) -> Result<Region, Error> {
    // SAFETY: sysconf has no preconditions.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    if ptr.is_null() || bytes == 0 || !(ptr as usize).is_multiple_of(page) || !bytes.is_multiple_of(page) {
        let message = format!(
            "{ptr:p} with {bytes} bytes: memory to register starts at a page and has whole pages of {page} bytes; or allocate it from the service"
        );
        return Err(Error::argument(message));
    }
    if let Some(fd) = registered_before(ptr as usize, bytes) {
        let handle = register_with_service(client, fd.as_fd(), bytes as u64)?;
        return Ok(Region::new(client, handle, ptr, bytes, None));
    }
    check_private_anonymous(ptr as usize, bytes)?;
    let fd = memfd_create("mccs-registered", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING);
    let fd = fd.map_err(system("make a memfd"))?;
    nix::unistd::ftruncate(&fd, bytes as i64).map_err(system("size a memfd"))?;
    mccs_ipc::shm::seal(&fd).map_err(unmapped)?;
    // The service takes no memory whose pages it would have to make.
    mccs_ipc::shm::make_whole(&fd, bytes as u64).map_err(unmapped)?;
    let inode = nix::sys::stat::fstat(&fd).map_err(system("look at a memfd"))?.st_ino;
    // The service first: if it refuses, nothing has happened to the caller's memory.
    let handle = register_with_service(client, fd.as_fd(), bytes as u64)?;
    let undo = |error| {
        let _ = client.0.requests.call(Request::FreeMemory { region: handle }, &[]);
        error
    };
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let moved = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
    if moved == libc::MAP_FAILED {
        return Err(undo(Error::refused_by_system("cannot map a memfd", std::io::Error::last_os_error())));
    }
    // SAFETY: both ranges have `bytes`, are mapped, and differ; nobody accesses the caller's during the call.
    unsafe { std::ptr::copy_nonoverlapping(ptr, moved.cast(), bytes) };
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller's range consists of whole private anonymous pages (checked) with the same contents.
    let placed = unsafe { libc::mremap(moved, bytes, bytes, flags, ptr) };
    if placed == libc::MAP_FAILED {
        let error = Error::refused_by_system("cannot place shared pages", std::io::Error::last_os_error());
        // SAFETY: the mapping made above, which nobody knows.
        unsafe { libc::munmap(moved, bytes) };
        return Err(undo(error));
    }
    former_registrations().insert(ptr as usize, Former { bytes, inode, fd });
    Ok(Region::new(client, handle, ptr, bytes, None))
}

/// A range whose pages have been moved to a file.
struct Former {
    bytes: usize,
    inode: u64,
    fd: OwnedFd,
}

/// Such ranges of this process, by address: the file stays with them for as long as they are mapped.
static FORMER: Mutex<BTreeMap<usize, Former>> = Mutex::new(BTreeMap::new());

fn former_registrations() -> MutexGuard<'static, BTreeMap<usize, Former>> {
    locked(&FORMER)
}

/// The file of a range that was registered before, if the range is still that file's.
fn registered_before(start: usize, bytes: usize) -> Option<OwnedFd> {
    let mut former = former_registrations();
    if former.is_empty() {
        return None;
    }
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mapped: BTreeMap<usize, (usize, u64)> = maps.lines().filter_map(file_mapping).collect();
    // Others have been unmapped by the caller, and are perhaps something else since.
    former.retain(|start, known| {
        mapped.get(start).is_some_and(|(end, inode)| *inode == known.inode && *end >= start + known.bytes)
    });
    let known = former.get(&start).filter(|known| known.bytes == bytes)?;
    known.fd.try_clone().ok()
}

/// First address, end and inode of a line of `/proc/self/maps`, if that is a file's.
fn file_mapping(line: &str) -> Option<(usize, (usize, u64))> {
    let mut fields = line.split_ascii_whitespace();
    let (low, high) = fields.next()?.split_once('-')?;
    let inode = fields.nth(3)?.parse::<u64>().ok().filter(|inode| *inode != 0)?;
    Some((usize::from_str_radix(low, 16).ok()?, (usize::from_str_radix(high, 16).ok()?, inode)))
}

/// Only such pages can be replaced without anybody noticing: no file behind them, nobody sharing them, writable.
fn check_private_anonymous(start: usize, bytes: usize) -> Result<(), Error> {
    let maps = std::fs::read_to_string("/proc/self/maps");
    let maps = maps.map_err(|error| Error::refused_by_system("/proc/self/maps", error))?;
    let end = start.checked_add(bytes).ok_or_else(|| Error::argument("the range leaves the address space"))?;
    let mut covered = start;
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(permissions)) = (fields.next(), fields.next()) else { continue };
        let Some((low, high)) = range.split_once('-') else { continue };
        let parse = |text| usize::from_str_radix(text, 16).unwrap_or(usize::MAX);
        let (low, high) = (parse(low), parse(high));
        if high <= covered || low >= end {
            continue;
        }
        let inode = fields.nth(2);
        if low > covered || !permissions.starts_with("rw") || !permissions.ends_with('p') || inode != Some("0") {
            break;
        }
        covered = high;
    }
    if covered >= end {
        Ok(())
    } else {
        let message = format!(
            "the page at {covered:#x} is no private, anonymous, writable memory, and cannot be shared in place"
        );
        Err(Error::argument(message))
    }
}
