//! Registered memory of a transport: a table from keys to addresses, which counts uses.

use super::{MESSAGE_BYTES_MAX, MemoryKey, MemoryKind, MemorySpan, REGIONS_MAX, TransportError};
use mccs_model::handles::HandleTable;

/// Place of bytes, inside registered memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Buffer {
    ptr: *mut u8,
    /// Length.
    pub(super) bytes: u64,
}

// SAFETY: an address; whoever registered the memory promised that it stays accessible, from any thread, for as long as
// requests hold it.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Memory that is to be registered.
    pub(super) fn new(ptr: *mut u8, bytes: u64) -> Self {
        Buffer { ptr, bytes }
    }

    /// Address and length of what begins `offset` bytes from the start, `bytes` at most; empty where that is past the end.
    pub(super) fn part(self, offset: u64, bytes: u64) -> (*mut u8, usize) {
        let offset = offset.min(self.bytes);
        (self.ptr.wrapping_add(offset as usize), bytes.min(self.bytes - offset) as usize)
    }

    /// Copies into the buffer at `offset`, as much as fits. Returns the number of bytes.
    pub(super) fn write(self, offset: u64, source: &[u8]) -> usize {
        let (target, bytes) = self.part(offset, source.len() as u64);
        // SAFETY: `part` stays inside the registered memory, which is accessible while a request holds it; `source` is
        // ours, so that the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, bytes) };
        bytes
    }

    /// Copies the buffer's first bytes out, as many as fit. Returns their number.
    pub(super) fn read(self, target: &mut [u8]) -> usize {
        let (source, bytes) = self.part(0, target.len() as u64);
        // SAFETY: as for `write`.
        unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), bytes) };
        bytes
    }

    /// Appends `bytes` bytes at `offset` to a vector, as much as there is.
    pub(super) fn append_to(self, target: &mut Vec<u8>, offset: u64, bytes: u64) {
        let (source, bytes) = self.part(offset, bytes);
        target.reserve(bytes);
        let end = target.len();
        // SAFETY: `part` stays inside the registered memory, which is accessible while a request holds it; the vector has room for
        // as many bytes, which are initialised when its length covers them.
        unsafe {
            std::ptr::copy_nonoverlapping(source, target.as_mut_ptr().add(end), bytes);
            target.set_len(end + bytes);
        }
    }

    /// Copies `bytes` bytes at `offset` from another buffer's same offset, which may be the same memory. As much as both
    /// have.
    pub(super) fn copy_from(self, source: Buffer, offset: u64, bytes: u64) -> u64 {
        let (target, room) = self.part(offset, bytes);
        let (source, there) = source.part(offset, bytes);
        let bytes = room.min(there);
        // SAFETY: as for `write`; `copy` allows overlap.
        unsafe { std::ptr::copy(source, target, bytes) };
        bytes as u64
    }
}

#[derive(Debug)]
struct Region {
    buffer: Buffer,
    uses: u32,
}

/// All registrations of a transport.
#[derive(Debug)]
pub(super) struct Regions(HandleTable<Region>);

impl Regions {
    pub(super) fn new() -> Self {
        Regions(HandleTable::new(REGIONS_MAX))
    }

    /// See [`super::Transport::register`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn register(&mut self, ptr: *mut u8, bytes: u64) -> Result<MemoryKey, TransportError> {
        if (ptr as u64).checked_add(bytes).is_none() {
            return Err(TransportError::OutsideMemory { offset: 0, bytes, registered: 0 });
        }
        let region = Region { buffer: Buffer { ptr, bytes }, uses: 0 };
        let full = TransportError::TooMany { what: "memory registrations", limit: REGIONS_MAX };
        self.0.insert(region).map(MemoryKey).map_err(|_| full)
    }

    /// The same for transports that carry host memory only.
    ///
    /// # Safety
    /// As of [`super::Transport::register`].
    pub(super) unsafe fn register_host(
        &mut self,
        ptr: *mut u8,
        bytes: u64,
        kind: MemoryKind<'_>,
        carrier: &'static str,
    ) -> Result<MemoryKey, TransportError> {
        match kind {
            // SAFETY: the caller's promise, passed on.
            MemoryKind::Host => unsafe { self.register(ptr, bytes) },
            MemoryKind::Gpu { .. } => Err(TransportError::HostMemoryOnly { carrier, bytes }),
        }
    }

    pub(super) fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
        let region = self.0.get(key.0).ok_or(TransportError::NoSuch("registered memory"))?;
        if region.uses > 0 {
            return Err(TransportError::MemoryInUse(region.uses));
        }
        self.0.remove(key.0);
        Ok(())
    }

    /// Number of registrations.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The bytes that a span names.
    pub(super) fn resolve(&self, span: MemorySpan) -> Result<Buffer, TransportError> {
        let region = self.0.get(span.key.0).ok_or(TransportError::NoSuch("registered memory"))?;
        let registered = region.buffer.bytes;
        let end = span.offset.checked_add(span.bytes);
        if span.bytes > MESSAGE_BYTES_MAX || end.is_none_or(|end| end > registered) {
            return Err(TransportError::OutsideMemory { offset: span.offset, bytes: span.bytes, registered });
        }
        Ok(Buffer { ptr: region.buffer.ptr.wrapping_add(span.offset as usize), bytes: span.bytes })
    }

    /// A request begins to use memory.
    pub(super) fn hold(&mut self, key: MemoryKey) {
        if let Some(region) = self.0.get_mut(key.0) {
            region.uses += 1;
        }
    }

    /// A request has ended its use.
    pub(super) fn release(&mut self, key: MemoryKey) {
        if let Some(region) = self.0.get_mut(key.0) {
            region.uses = region.uses.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_stay_inside_and_memory_in_use_stays() {
        let mut memory = [0u8; 100];
        let mut regions = Regions::new();
        // SAFETY: `memory` outlives `regions`.
        let key = unsafe { regions.register(memory.as_mut_ptr(), 100) }.expect("room");
        let span = |offset, bytes| MemorySpan { key, offset, bytes };
        assert_eq!(regions.resolve(span(0, 100)).expect("inside").bytes, 100);
        assert_eq!(regions.resolve(span(100, 0)).expect("inside").bytes, 0);
        for (offset, bytes) in [(0, 101), (100, 1), (1, u64::MAX), (u64::MAX, 1), (u64::MAX, 0)] {
            let refusal = TransportError::OutsideMemory { offset, bytes, registered: 100 };
            assert_eq!(regions.resolve(span(offset, bytes)).expect_err("outside"), refusal);
        }
        regions.hold(key);
        assert_eq!(regions.deregister(key), Err(TransportError::MemoryInUse(1)));
        regions.release(key);
        assert_eq!(regions.deregister(key), Ok(()));
        assert!(matches!(regions.resolve(span(0, 1)), Err(TransportError::NoSuch(_))));
    }

    #[test]
    fn parts_never_leave_a_buffer() {
        let mut memory = [7u8; 10];
        let buffer = Buffer { ptr: memory.as_mut_ptr(), bytes: 10 };
        assert_eq!(buffer.part(4, 100).1, 6);
        assert_eq!(buffer.part(u64::MAX, u64::MAX).1, 0);
        assert_eq!(buffer.write(8, &[1, 2, 3]), 2);
        assert_eq!(memory, [7, 7, 7, 7, 7, 7, 7, 7, 1, 2]);
    }
}
