//! Shared memory: sealed memfds, their mappings, and huge pages.
//!
//! The service maps files that hostile processes hold. It takes only memfds that cannot shrink, so that no access to a
//! mapping can ever raise SIGBUS; their contents may change at any time, and are only touched through raw pointers.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;

/// Mappings of at least this size are aligned to it and ask for huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Why memory could not be shared.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// A size of zero, or one past the address space.
    #[error("{0} bytes cannot be mapped")]
    BadLength(u64),
    /// Not a memfd.
    #[error("the descriptor is no memfd on tmpfs (huge-page files are not supported)")]
    NotMemfd,
    /// It could be truncated under our feet.
    #[error("the memfd is not sealed against shrinking: add F_SEAL_SHRINK before registering it")]
    NotSealed,
    /// It cannot be written.
    #[error("the memfd is sealed against writing")]
    ReadOnly,
    /// Pages are missing, which the service would make, and be charged for.
    #[error("the memfd has pages that nobody has made: call fallocate() on all of it before registering it")]
    Sparse,
    /// It is shorter than said.
    #[error("the memfd has {actual} bytes, {wanted} were named")]
    TooShort { actual: u64, wanted: u64 },
    /// The kernel refused.
    #[error("the kernel refused to {what}: {errno}")]
    Os { what: &'static str, errno: Errno },
}

impl ShmError {
    /// The kernel's error, if it is one.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Os { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

fn os(what: &'static str) -> impl FnOnce(Errno) -> ShmError {
    move |errno| ShmError::Os { what, errno }
}

/// Rights of a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Reads,
    Writes,
}

impl Access {
    fn protection(self) -> libc::c_int {
        match self {
            Access::Reads => libc::PROT_READ,
            Access::Writes => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

/// A shared mapping of a memfd, unmapped on drop. Writable, but for [`Mapping::map_to_read`].
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    mapped_bytes: usize,
    start: *mut u8,
    len_bytes: usize,
}

// SAFETY: a mapping is an address range; what is in it is accessed through raw pointers and atomics by those who use it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Makes a memfd of `bytes`, sealed against any change of size, and maps it. The memory is zero.
    ///
    /// # Errors
    /// [`ShmError::BadLength`] or [`ShmError::Os`].
    pub fn create(name: &str, bytes: u64) -> Result<(OwnedFd, Self), ShmError> {
        Self::create_sealed(name, bytes, SealFlag::empty())
    }

    /// As [`Mapping::create`], for memory that this process alone writes. Whoever is handed the descriptor only reads: by
    /// [`Mapping::map_to_read`]. The kernel refuses it to map for writing, write, or free pages.
    ///
    /// # Errors
    /// [`ShmError::BadLength`] or [`ShmError::Os`]: kernels before Linux 5.1 have no such seal.
    pub fn create_for_readers(name: &str, bytes: u64) -> Result<(OwnedFd, Self), ShmError> {
        Self::create_sealed(name, bytes, SealFlag::from_bits_retain(libc::F_SEAL_FUTURE_WRITE))
    }

    fn create_sealed(name: &str, bytes: u64, more: SealFlag) -> Result<(OwnedFd, Self), ShmError> {
        let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).map_err(os("make a memfd"))?;
        let length = libc::off_t::try_from(bytes).map_err(|_| ShmError::BadLength(bytes))?;
        nix::unistd::ftruncate(&fd, length).map_err(os("size a memfd"))?;
        // Mapped first: a seal against writes in future leaves this mapping as it is.
        let mapping = Self::map_checked(fd.as_fd(), len_bytes_of(bytes)?, Access::Writes)?;
        seal_with(&fd, more)?;
        Ok((fd, mapping))
    }

    /// Maps the first `bytes` of a memfd that somebody else made.
    ///
    /// # Errors
    /// A refusal of anything that could change under our feet in a way that matters, or the kernel's.
    pub fn map(fd: BorrowedFd<'_>, bytes: u64) -> Result<Self, ShmError> {
        Self::map_as(fd, bytes, Access::Writes)
    }

    /// Maps the first `bytes` of a memfd that somebody else writes. To write through this mapping ends the process.
    ///
    /// # Errors
    /// As [`Mapping::map`]; a seal against writing is welcome here.
    pub fn map_to_read(fd: BorrowedFd<'_>, bytes: u64) -> Result<Self, ShmError> {
        Self::map_as(fd, bytes, Access::Reads)
    }

    fn map_as(fd: BorrowedFd<'_>, bytes: u64, access: Access) -> Result<Self, ShmError> {
        let len_bytes = len_bytes_of(bytes)?;
        let filesystem = nix::sys::statfs::fstatfs(fd).map_err(os("look at the memfd"))?;
        if filesystem.filesystem_type() != nix::sys::statfs::TMPFS_MAGIC {
            return Err(ShmError::NotMemfd);
        }
        check_seals(fd, access)?;
        let actual = fstat(fd).map_err(os("look at the memfd"))?.st_size as u64;
        if actual < bytes {
            return Err(ShmError::TooShort { actual, wanted: bytes });
        }
        Self::map_checked(fd, len_bytes, access)
    }

    /// The same of a memfd that others have: they can seal it no further from then on, so that whoever has its descriptor can map it again.
    ///
    /// # Errors
    /// As [`Mapping::map`].
    pub fn map_of_others(fd: BorrowedFd<'_>, bytes: u64) -> Result<Self, ShmError> {
        // First, so that what is refused can still be sealed as it has to be.
        let mapping = Self::map(fd, bytes)?;
        match fcntl(fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SEAL)) {
            // Whoever made it has sealed that already.
            Ok(_) | Err(Errno::EPERM) => {}
            Err(errno) => return Err(os("seal a memfd")(errno)),
        }
        // They may have sealed it meanwhile.
        check_seals(fd, Access::Writes)?;
        Ok(mapping)
    }

    fn map_checked(fd: BorrowedFd<'_>, len_bytes: usize, access: Access) -> Result<Self, ShmError> {
        let huge = len_bytes >= HUGE_PAGE_BYTES;
        // Huge pages need file offset and address to agree modulo their size: reserve more, and map in the middle.
        let mapped_bytes = if huge { len_bytes + HUGE_PAGE_BYTES } else { len_bytes };
        // SAFETY: a fresh anonymous reservation at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(ShmError::Os { what: "reserve addresses", errno: Errno::last() });
        }
        let base = base.cast::<u8>();
        let start = if huge { base.wrapping_add(base.align_offset(HUGE_PAGE_BYTES)) } else { base };
        let mapping = Mapping { base, mapped_bytes, start, len_bytes };
        // SAFETY: [start, start + len_bytes) lies in the reservation made above, which nobody else knows.
        let mapped = unsafe {
            libc::mmap(
                start.cast(),
                len_bytes,
                access.protection(),
                libc::MAP_SHARED | libc::MAP_FIXED,
                fd.as_raw_fd(),
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            // The drop of `mapping` gives the reservation back.
            return Err(ShmError::Os { what: "map the memfd", errno: Errno::last() });
        }
        if huge {
            // SAFETY: the range is the mapping just made; the advice changes no contents. Best effort.
            unsafe { libc::madvise(start.cast(), len_bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(mapping)
    }

    /// Gives all pages back, also while others have the memory mapped or hold its descriptor: to them it is zero from now on.
    /// Pages that they write afterwards are charged to them, not to this process.
    pub fn give_back(&self) {
        if crate::loan::is_on() {
            return;
        }
        // SAFETY: the range is this mapping, of shared memory, which is only accessed through raw pointers. A failure leaves the
        // pages to whoever else has them.
        unsafe { libc::madvise(self.start.cast(), self.len_bytes, libc::MADV_REMOVE) };
    }

    /// How many of the kernel's mappings one of `bytes` takes at most: a process has some 65,000 (`vm.max_map_count`).
    #[must_use]
    pub fn count(bytes: u64) -> u64 {
        // Mappings before and behind a huge one stay reserved.
        if bytes >= HUGE_PAGE_BYTES as u64 { 3 } else { 1 }
    }

    /// First byte.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Usable bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Address of `count` values of `T` at `offset_bytes`, if they lie inside and are aligned.
    #[must_use]
    pub fn at<T>(&self, offset_bytes: u64, count: usize) -> Option<*mut T> {
        let offset = usize::try_from(offset_bytes).ok()?;
        let end = offset.checked_add(size_of::<T>().checked_mul(count)?)?;
        let ptr = self.start.wrapping_add(offset).cast::<T>();
        (end <= self.len_bytes && ptr.is_aligned()).then_some(ptr)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the whole reservation is ours, and whoever used addresses in it held the mapping.
        unsafe { libc::munmap(self.base.cast(), self.mapped_bytes) };
    }
}

/// A length that can be mapped.
fn len_bytes_of(bytes: u64) -> Result<usize, ShmError> {
    let len_bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes > 0 && *bytes <= isize::MAX as usize / 2);
    len_bytes.ok_or(ShmError::BadLength(bytes))
}

/// Whether a memfd cannot shrink, and can be mapped with this access.
fn check_seals(fd: BorrowedFd<'_>, access: Access) -> Result<(), ShmError> {
    let seals = fcntl(fd, FcntlArg::F_GET_SEALS).map_err(|_| ShmError::NotMemfd)?;
    if seals & libc::F_SEAL_SHRINK == 0 {
        return Err(ShmError::NotSealed);
    }
    let is_read_only = seals & (libc::F_SEAL_WRITE | libc::F_SEAL_FUTURE_WRITE) != 0;
    if is_read_only && access == Access::Writes { Err(ShmError::ReadOnly) } else { Ok(()) }
}

/// Whether every page of the first `bytes` of a memfd is there: then who maps it makes none, and is charged for none.
///
/// # Errors
/// The kernel's refusal.
pub fn is_whole(fd: BorrowedFd<'_>, bytes: u64) -> Result<bool, ShmError> {
    const BLOCK_BYTES: u64 = 512;
    let held = fstat(fd).map_err(os("look at the memfd"))?.st_blocks as u64;
    Ok(held.saturating_mul(BLOCK_BYTES) >= bytes)
}

/// Makes every page of the first `bytes` of a memfd, for this process.
///
/// # Errors
/// The kernel's refusal: there is no memory left.
pub fn make_whole(fd: &OwnedFd, bytes: u64) -> Result<(), ShmError> {
    let length = libc::off_t::try_from(bytes).map_err(|_| ShmError::BadLength(bytes))?;
    nix::fcntl::fallocate(fd, nix::fcntl::FallocateFlags::empty(), 0, length).map_err(os("fill a memfd"))
}

/// Gives all pages of a memfd back, whoever has it mapped. On failure, pages stay with their owners.
pub fn give_back(fd: &OwnedFd) {
    use nix::fcntl::FallocateFlags;
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    if let Ok(metadata) = fstat(fd) {
        let _ = nix::fcntl::fallocate(fd, flags, 0, metadata.st_size);
    }
}

/// Seals a memfd against any change of size and of seals.
///
/// # Errors
/// The kernel's refusal.
pub fn seal(fd: &OwnedFd) -> Result<(), ShmError> {
    seal_with(fd, SealFlag::empty())
}

fn seal_with(fd: &OwnedFd, more: SealFlag) -> Result<(), ShmError> {
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL | more;
    fcntl(fd, FcntlArg::F_ADD_SEALS(seals)).map_err(os("seal a memfd"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn two_mappings_of_one_memfd_are_one_memory() {
        for bytes in [1, 4096, 10_000, 5 << 20] {
            let (fd, first) = Mapping::create("test", bytes).expect("create");
            let second = Mapping::map(fd.as_fd(), bytes).expect("map");
            let last = bytes as usize - 1;
            // SAFETY: both pointers are inside their mappings, and nobody else uses them.
            unsafe {
                first.as_ptr().add(last).write(42);
                assert_eq!(second.as_ptr().add(last).read(), 42);
            }
            assert!(first.at::<u64>(bytes, 1).is_none());
            assert!(first.at::<u8>(u64::MAX, 2).is_none());
        }
    }

    #[test]
    fn pages_that_are_given_back_are_gone_for_those_who_keep_the_descriptor() {
        const BYTES: u64 = 5 << 20;
        let (fd, own) = Mapping::create("test", BYTES).expect("create");
        let others = Mapping::map(fd.as_fd(), BYTES).expect("map");
        // SAFETY: inside the mapping, which nobody else uses.
        unsafe { std::slice::from_raw_parts_mut(own.as_ptr(), BYTES as usize) }.fill(7);
        let held_bytes = || fstat(&fd).expect("looks").st_blocks as u64 * 512;
        assert!(held_bytes() >= BYTES);
        own.give_back();
        assert_eq!(held_bytes(), 0);
        // SAFETY: as above.
        assert_eq!(unsafe { others.as_ptr().add(4096).read() }, 0);
    }

    #[test]
    fn a_memfd_is_whole_when_all_its_pages_are_made() {
        const BYTES: u64 = 64 * 4096;
        let (fd, own) = Mapping::create("test", BYTES).expect("create");
        assert!(!is_whole(fd.as_fd(), 1).expect("looks"));
        // SAFETY: inside the mapping, which nobody else uses.
        unsafe { own.as_ptr().write(1) };
        assert!(!is_whole(fd.as_fd(), BYTES).expect("looks"));
        make_whole(&fd, BYTES).expect("room");
        assert!(is_whole(fd.as_fd(), BYTES).expect("looks"));
        // SAFETY: as above.
        assert_eq!(unsafe { own.as_ptr().read() }, 1, "what was there stays");
    }

    #[test]
    fn what_others_have_can_be_mapped_again_whatever_they_do() {
        let add = |fd: &OwnedFd, seals| fcntl(fd, FcntlArg::F_ADD_SEALS(seals));
        let future = SealFlag::from_bits_retain(libc::F_SEAL_FUTURE_WRITE);
        let make = || memfd_create("test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).expect("memfd");
        for sealed in [SealFlag::F_SEAL_SHRINK, SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL] {
            let fd = make();
            nix::unistd::ftruncate(&fd, 4096).expect("size");
            assert!(matches!(Mapping::map_of_others(fd.as_fd(), 4096), Err(ShmError::NotSealed)));
            add(&fd, sealed).expect("what was refused may be sealed as it has to be");
            let mapping = Mapping::map_of_others(fd.as_fd(), 4096).expect("maps");
            assert_eq!(add(&fd, future), Err(Errno::EPERM));
            Mapping::map(fd.as_fd(), 4096).expect("maps again");
            // SAFETY: inside the mapping, which nobody else uses.
            unsafe { mapping.as_ptr().write(7) };
            give_back(&fd);
            // SAFETY: as above.
            assert_eq!(unsafe { mapping.as_ptr().read() }, 0);
        }
        let fd = make();
        nix::unistd::ftruncate(&fd, 4096).expect("size");
        add(&fd, SealFlag::F_SEAL_SHRINK | future).expect("sealed");
        assert!(matches!(Mapping::map_of_others(fd.as_fd(), 4096), Err(ShmError::ReadOnly)));
    }

    /// By each way to write that a descriptor has, also one that was opened anew.
    #[test]
    fn memory_for_readers_is_written_by_its_maker_alone() {
        const BYTES: u64 = 2 * 4096;
        let (fd, own) = Mapping::create_for_readers("test", BYTES).expect("create");
        let reader = Mapping::map_to_read(fd.as_fd(), BYTES).expect("maps");
        // SAFETY: both pointers are inside their mappings, and nobody else uses them.
        unsafe {
            own.as_ptr().write(42);
            assert_eq!(reader.as_ptr().read(), 42);
        }
        assert!(matches!(Mapping::map(fd.as_fd(), BYTES), Err(ShmError::ReadOnly)));
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let again = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("opens");
        for fd in [fd.as_fd(), again.as_fd()] {
            let writes = Mapping::map_checked(fd, BYTES as usize, Access::Writes);
            assert!(matches!(writes, Err(ShmError::Os { errno: Errno::EPERM, .. })), "{writes:?}");
            assert_eq!(nix::unistd::write(fd, &[1]), Err(Errno::EPERM));
            assert_eq!(nix::unistd::ftruncate(fd, 0), Err(Errno::EPERM));
            assert_eq!(fcntl(fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)), Err(Errno::EPERM));
        }
        // SAFETY: the range is the reader's mapping, of which nothing is accessed meanwhile.
        let widened = unsafe { libc::mprotect(reader.as_ptr().cast(), 4096, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!((widened, Errno::last()), (-1, Errno::EACCES));
        // Its pages stay.
        reader.give_back();
        give_back(&fd);
        // SAFETY: as above.
        assert_eq!(unsafe { reader.as_ptr().read() }, 42);
    }

    #[test]
    fn what_could_change_under_our_feet_is_refused() {
        let unsealed = memfd_create("test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).expect("memfd");
        nix::unistd::ftruncate(&unsealed, 4096).expect("size");
        assert!(matches!(Mapping::map(unsealed.as_fd(), 4096), Err(ShmError::NotSealed)));
        seal(&unsealed).expect("seal");
        assert!(nix::unistd::ftruncate(&unsealed, 0).is_err(), "sealed");
        assert!(matches!(Mapping::map(unsealed.as_fd(), 4097), Err(ShmError::TooShort { .. })));
        assert!(matches!(Mapping::map(unsealed.as_fd(), 0), Err(ShmError::BadLength(0))));
        assert!(matches!(Mapping::map(unsealed.as_fd(), u64::MAX), Err(ShmError::BadLength(_))));
        let pipe = nix::unistd::pipe().expect("pipe");
        assert!(matches!(Mapping::map(pipe.0.as_fd(), 1), Err(ShmError::NotMemfd)));
        let plain = std::fs::File::open("/proc/self/exe").expect("open");
        assert!(matches!(Mapping::map(plain.as_fd(), 1), Err(ShmError::NotMemfd)));
    }
}
