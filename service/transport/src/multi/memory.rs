//! Registered memory of several transports: one key for the keys of each.

use super::super::region::Buffer;
use super::super::{MemoryKey, MemoryKind, TransportError};
use super::Member;

/// Memory, and what the members that know it call it, by place.
#[derive(Debug)]
pub(super) struct Memory {
    buffer: Buffer,
    /// Members learn of it as they begin flows.
    is_host: bool,
    keys: Vec<Option<MemoryKey>>,
}

impl Memory {
    /// Memory that none of `members` knows yet.
    pub(super) fn new(ptr: *mut u8, bytes: u64, kind: MemoryKind<'_>, members: usize) -> Self {
        let is_host = matches!(kind, MemoryKind::Host);
        Memory { buffer: Buffer::new(ptr, bytes), is_host, keys: vec![None; members] }
    }

    /// Key of the member at a place, if that knows it.
    pub(super) fn key(&self, place: usize) -> Option<MemoryKey> {
        self.keys.get(place).copied().flatten()
    }

    /// Makes it known to all members that are to know it from the start.
    ///
    /// # Safety
    /// As of [`Transport::register`], until [`Memory::forget`] or the members' end.
    pub(super) unsafe fn register(
        &mut self,
        members: &mut [Member],
        kind: MemoryKind<'_>,
    ) -> Result<(), TransportError> {
        if self.is_host {
            for (place, member) in members.iter_mut().enumerate() {
                if place == 0 || member.is_in_use() {
                    // SAFETY: the caller's promise, passed on.
                    unsafe { self.make_known(place, member) }?;
                }
            }
            return Ok(());
        }
        let (ptr, bytes) = (self.buffer.part(0, 0).0, self.buffer.bytes);
        let mut refusal = None;
        for (key, member) in self.keys.iter_mut().zip(members) {
            // SAFETY: the caller's promise, passed on.
            match unsafe { member.transport.register(ptr, bytes, kind) } {
                Ok(known) => *key = Some(known),
                // That of a device says more than that of a transport that reaches no GPU at all.
                Err(error) => {
                    refusal = refusal.filter(|_| matches!(error, TransportError::HostMemoryOnly { .. })).or(Some(error))
                }
            }
        }
        if self.keys.iter().any(Option::is_some) { Ok(()) } else { refusal.map_or(Ok(()), Err) }
    }

    /// Makes host memory known to a member.
    ///
    /// # Safety
    /// As of [`Transport::register`], until [`Memory::forget`] or the member's end.
    pub(super) unsafe fn make_known(&mut self, place: usize, member: &mut Member) -> Result<(), TransportError> {
        let (Some(key), (ptr, _)) = (self.keys.get_mut(place), self.buffer.part(0, 0)) else { return Ok(()) };
        if self.is_host && key.is_none() {
            // SAFETY: the caller's promise, passed on.
            *key = Some(unsafe { member.transport.register(ptr, self.buffer.bytes, MemoryKind::Host) }?);
        }
        Ok(())
    }

    /// Has it forgotten by all who know it; who refuses goes on to know it, and so do those behind.
    pub(super) fn forget(&mut self, members: &mut [Member]) -> Result<(), TransportError> {
        for (key, member) in self.keys.iter_mut().zip(members) {
            if let Some(known) = *key {
                member.transport.deregister(known)?;
                *key = None;
            }
        }
        Ok(())
    }
}
