//! Emulated physical memory: memfds, which live until the last process has closed them. A memfd's
//! name says what it is. It leaves nothing behind.

use std::ffi::CString;
use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;

use crate::code::{Done, INVALID_VALUE, OPERATING_SYSTEM, OUT_OF_MEMORY};

/// The processor's pages.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Mapped by a link of /proc, a memfd is called so.
const LINK_BEGINS: &str = "/memfd:";
const LINK_ENDS: &str = " (deleted)";

/// Kind of a memfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Memory,
    /// Memory that is no GPU's.
    OfHost,
    Event,
}

/// Names a memfd: no two have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) what: What,
    /// The GPU's number, or the host's node.
    pub(crate) device: usize,
    pub(crate) bytes: u64,
    pub(crate) nonce: u64,
}

/// A memfd, open in this process.
pub(crate) struct Physical {
    pub(crate) name: Name,
    fd: OwnedFd,
}

impl Name {
    fn new(what: What, device: usize, bytes: u64) -> Done<Self> {
        let mut nonce = [0; 8];
        // SAFETY: so many bytes are there to be written.
        let got = unsafe { libc::getrandom(nonce.as_mut_ptr().cast(), nonce.len(), 0) };
        if got != nonce.len() as isize {
            return Err(OPERATING_SYSTEM);
        }
        Ok(Name { what, device, bytes, nonce: u64::from_ne_bytes(nonce) })
    }

    fn text(self) -> String {
        let Name { what, device, bytes, nonce } = self;
        format!("mccs-emulated-{:x}-{what:?}-{device}-{bytes}-{nonce:x}", instance())
    }

    /// The memfd of this driver's that a link in /proc leads to.
    pub(crate) fn of_link(link: &Path) -> Option<Name> {
        let text = link.to_str()?.strip_prefix(LINK_BEGINS)?.strip_suffix(LINK_ENDS)?;
        let rest = text.strip_prefix("mccs-emulated-")?;
        let [of, what, device, bytes, nonce] = rest.split('-').collect::<Vec<_>>().try_into().ok()?;
        let what = [What::Memory, What::OfHost, What::Event].into_iter().find(|it| format!("{it:?}") == what)?;
        let name = Name {
            what,
            device: device.parse().ok()?,
            bytes: bytes.parse().ok()?,
            nonce: u64::from_str_radix(nonce, 16).ok()?,
        };
        Some(name).filter(|_| u64::from_str_radix(of, 16) == Ok(instance()))
    }
}

/// Tells drivers apart: processes with the same library share GPUs.
fn instance() -> u64 {
    use std::os::unix::fs::MetadataExt;
    static INSTANCE: OnceLock<u64> = OnceLock::new();
    *INSTANCE.get_or_init(|| {
        // SAFETY: all-zero is a value of this plain structure.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        let own: fn() -> u64 = instance;
        // SAFETY: the address is this function's, and `info` is there to be written.
        let is_known = unsafe { libc::dladdr(own as *const libc::c_void, &mut info) } != 0;
        if !is_known || info.dli_fname.is_null() {
            return 0;
        }
        // SAFETY: the loader's text, which is terminated and lives as long as the library.
        let path = unsafe { std::ffi::CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned();
        std::fs::metadata(path).map_or(0, |file| file.ino() ^ (file.dev() << 48))
    })
}

/// The number of this process as /proc has it, which is another than its own where it is in a PID namespace below.
pub(crate) fn number_in_proc() -> u32 {
    let link = std::fs::read_link("/proc/self").ok();
    link.and_then(|number| number.to_str()?.parse().ok()).unwrap_or_else(std::process::id)
}

impl Physical {
    /// New memory, full of zeros, which takes nothing of the host's until it is written.
    pub(crate) fn new(what: What, device: usize, bytes: u64) -> Done<Self> {
        let name = Name::new(what, device, bytes)?;
        let text = CString::new(name.text()).map_err(|_| INVALID_VALUE)?;
        // SAFETY: the name is terminated.
        let fd = unsafe { libc::memfd_create(text.as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(OPERATING_SYSTEM);
        }
        // SAFETY: made above, and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let length = i64::try_from(name.room()).map_err(|_| OUT_OF_MEMORY)?;
        // SAFETY: the descriptor is open.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), length) } != 0 {
            return Err(OUT_OF_MEMORY);
        }
        Ok(Physical { name, fd })
    }

    /// Another process' memory, by its descriptor there, if that is still what it says.
    pub(crate) fn open(pid: u32, fd: u32, is_it: impl Fn(&Name) -> bool) -> Done<Self> {
        let looked_at = |link: &str| std::fs::read_link(link).ok().and_then(|link| Name::of_link(&link)).filter(&is_it);
        let link = format!("/proc/{pid}/fd/{fd}");
        // Before it is opened: what is something else could block.
        looked_at(&link).ok_or(INVALID_VALUE)?;
        let file = OpenOptions::new().read(true).write(true).open(&link).map_err(|_| INVALID_VALUE)?;
        let fd = OwnedFd::from(file);
        let name = looked_at(&format!("/proc/self/fd/{}", fd.as_raw_fd())).ok_or(INVALID_VALUE)?;
        Ok(Physical { name, fd })
    }

    /// Its descriptor in this process.
    pub(crate) fn number(&self) -> u32 {
        self.fd.as_raw_fd().unsigned_abs()
    }

    /// Maps its first bytes, at addresses that were reserved, or anywhere.
    pub(crate) fn map(&self, at: Option<u64>, bytes: u64) -> Done<u64> {
        let room = bytes.next_multiple_of(PAGE_BYTES);
        if room > self.name.room() {
            return Err(INVALID_VALUE);
        }
        let fixed = if at.is_some() { libc::MAP_FIXED } else { 0 };
        let (wanted, flags) = (at.unwrap_or(0) as *mut libc::c_void, libc::MAP_SHARED | fixed);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: addresses that are named are of the reservation, where nothing else is; others the kernel chooses.
        let mapped = unsafe { libc::mmap(wanted, room as usize, access, flags, self.fd.as_raw_fd(), 0) };
        if mapped == libc::MAP_FAILED { Err(OUT_OF_MEMORY) } else { Ok(mapped.addr() as u64) }
    }
}

impl Name {
    /// Whole pages.
    fn room(&self) -> u64 {
        self.bytes.max(1).next_multiple_of(PAGE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_found_by_its_descriptor_as_long_as_that_is_what_it_was() {
        let memory = Physical::new(What::Memory, 1, 5000).expect("memory");
        let (pid, name, number) = (std::process::id(), memory.name, memory.number());
        assert_eq!(Physical::open(pid, number, |other| *other == name).map(|opened| opened.name), Ok(name));
        assert!(Physical::open(pid, number, |other| other.nonce != name.nonce).is_err());
        assert!(Physical::open(pid, 0, |_| true).is_err(), "something else");
        assert!(memory.map(None, 8192).is_ok() && memory.map(None, 8193).is_err());
        drop(memory);
        assert!(Physical::open(pid, number, |other| *other == name).is_err());
    }
}
