//! Conformance of a message of a gibibyte, over memory that has only a few pages.

use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::Fixture;
use super::harness::{Pair, assert_filled, fill};
use crate::{MemoryKind, MemorySpan, Transport};

const GIBIBYTE: usize = 1 << 30;
/// The pages repeat with this period, which is no multiple of any chunk: a chunk in a wrong place is seen.
const PERIOD: usize = (1 << 20) + 3 * 4096;

/// A gibibyte of addresses that all lead to [`PERIOD`] bytes.
struct Sparse {
    start: NonNull<std::ffi::c_void>,
    _file: OwnedFd,
}

impl Sparse {
    fn new() -> Self {
        let file = memfd_create("sparse", MFdFlags::MFD_CLOEXEC).expect("memfd");
        nix::unistd::ftruncate(&file, PERIOD as i64).expect("truncate");
        let all = NonZeroUsize::new(GIBIBYTE).expect("not zero");
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start =
            unsafe { mmap_anonymous(None, all, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE) };
        let start = start.expect("addresses");
        for at in (0..GIBIBYTE).step_by(PERIOD) {
            let address = NonZeroUsize::new(start.as_ptr() as usize + at);
            let length = NonZeroUsize::new(PERIOD.min(GIBIBYTE - at)).expect("not zero");
            let (read_write, flags) =
                (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED | MapFlags::MAP_FIXED);
            // SAFETY: replaces part of the mapping above, which is ours.
            unsafe { mmap(address, length, read_write, flags, &file, 0) }.expect("maps");
        }
        Sparse { start, _file: file }
    }

    fn period(&mut self) -> &mut [u8] {
        // SAFETY: mapped, ours, and nothing polls while the reference lives.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), PERIOD) }
    }
}

impl Drop for Sparse {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`; tests drop it when nothing polls any more.
        let _ = unsafe { munmap(self.start, GIBIBYTE) };
    }
}

pub(crate) fn a_gibibyte<F: Fixture>(pair: &mut Pair<F>) {
    let ends = pair.flow(0);
    let (mut source, mut target) = (Sparse::new(), Sparse::new());
    fill(source.period(), 11);
    let mut whole = |host: usize, memory: &Sparse| {
        // SAFETY: mapped until after the last poll.
        let key = unsafe { pair.host(host).register(memory.start.as_ptr().cast(), GIBIBYTE as u64, MemoryKind::Host) }
            .expect("registers");
        MemorySpan { key, offset: 0, bytes: GIBIBYTE as u64 }
    };
    let (from, to) = (whole(0, &source), whole(1, &target));
    let recv = pair.recv(ends, to);
    let send = pair.send(ends, from);
    assert_eq!(pair.finish(1, recv), GIBIBYTE as u64);
    assert_eq!(pair.finish(0, send), GIBIBYTE as u64);
    assert_filled(target.period(), 11);
}
