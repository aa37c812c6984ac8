//! Requests of a flow: a ring of fixed length whose entries complete in order.
//!
//! ```text
//!      first              running                 next
//!        |  done, untested   |  unfinished          |        numbers grow to the right; `next - first` <= length
//! ```

use super::region::{Buffer, Regions};
use super::{MemoryKey, Status, TransportError};

/// One posted request.
#[derive(Debug)]
pub(super) struct Entry<T> {
    key: MemoryKey,
    /// The operand that is sent, or received into.
    pub(super) buffer: Buffer,
    /// The transport's own.
    pub(super) progress: T,
    /// Once all of it has moved.
    moved: Option<Moved>,
    tested: bool,
}

/// Bytes and tag of a finished request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Moved {
    /// Length of the message.
    pub(super) bytes: u64,
    /// The message's tag.
    pub(super) tag: u32,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct RequestRing<T> {
    entries: Box<[Option<Entry<T>>]>,
    first: u64,
    running: u64,
    next: u64,
}

impl<T> RequestRing<T> {
    /// A ring of `length` entries.
    pub(super) fn new(length: u16) -> Self {
        RequestRing { entries: (0..length.max(1)).map(|_| None).collect(), first: 0, running: 0, next: 0 }
    }

    fn index(&self, number: u64) -> usize {
        (number % self.entries.len() as u64) as usize
    }

    /// Adds a request and returns its number, unless the ring is full.
    pub(super) fn push(&mut self, key: MemoryKey, buffer: Buffer, progress: T, regions: &mut Regions) -> Option<u64> {
        if self.next - self.first == self.entries.len() as u64 {
            return None;
        }
        let number = self.next;
        let index = self.index(number);
        self.entries[index] = Some(Entry { key, buffer, progress, moved: None, tested: false });
        regions.hold(key);
        self.next += 1;
        Some(number)
    }

    /// Number of the oldest unfinished request, or of the next one.
    pub(super) fn running(&self) -> u64 {
        self.running
    }

    /// Number of the next request.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Whether requests are unfinished.
    pub(super) fn has_unfinished(&self) -> bool {
        self.running < self.next
    }

    /// A request that is not tested to its end.
    pub(super) fn get(&self, number: u64) -> Option<&Entry<T>> {
        if number < self.first || number >= self.next {
            return None;
        }
        self.entries[self.index(number)].as_ref()
    }

    /// As [`RequestRing::get`].
    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Entry<T>> {
        if number < self.first || number >= self.next {
            return None;
        }
        let index = self.index(number);
        self.entries[index].as_mut()
    }

    /// All of a request has moved; its memory is not touched again.
    pub(super) fn finish(&mut self, number: u64, moved: Moved, regions: &mut Regions) {
        if let Some(entry) = self.get_mut(number).filter(|entry| entry.moved.is_none()) {
            entry.moved = Some(moved);
            regions.release(entry.key);
        }
        while self.get(self.running).is_some_and(|entry| entry.moved.is_some()) {
            self.running += 1;
        }
    }

    /// Gives memory back that unfinished requests hold. They stay unfinished.
    pub(super) fn abandon(&mut self, regions: &mut Regions) {
        for entry in self.entries.iter_mut().flatten() {
            if entry.moved.is_none() {
                entry.moved = Some(Moved::default());
                regions.release(entry.key);
            }
        }
    }

    /// Whether a request is done; `None` while it is not. A done one is forgotten.
    ///
    /// # Errors
    /// There is no such request.
    pub(super) fn test(&mut self, number: u64) -> Result<Option<Status>, TransportError> {
        let running = self.running;
        let no_such = TransportError::NoSuch("request");
        let entry = self.get_mut(number).filter(|entry| !entry.tested).ok_or(no_such)?;
        if number >= running {
            return Ok(None);
        }
        entry.tested = true;
        let Moved { bytes, tag } = entry.moved.unwrap_or_default();
        while self.first < self.running && self.get(self.first).is_none_or(|entry| entry.tested) {
            let index = self.index(self.first);
            self.entries[index] = None;
            self.first += 1;
        }
        Ok(Some(Status::Done { bytes, tag }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemorySpan;
    use super::*;

    #[test]
    fn requests_complete_in_order_and_places_come_free_when_tested() {
        let mut memory = [0u8; 8];
        let mut regions = Regions::new();
        // SAFETY: `memory` outlives `regions`.
        let key = unsafe { regions.register(memory.as_mut_ptr(), 8) }.expect("room");
        let buffer = regions.resolve(MemorySpan { key, offset: 0, bytes: 8 }).expect("inside");
        let mut ring = RequestRing::new(2);
        let done = |bytes, tag| Ok(Some(Status::Done { bytes, tag }));
        let moved = |bytes, tag| Moved { bytes, tag };
        assert_eq!(ring.push(key, buffer, (), &mut regions), Some(0));
        assert_eq!(ring.push(key, buffer, (), &mut regions), Some(1));
        assert_eq!(ring.push(key, buffer, (), &mut regions), None);
        ring.finish(1, moved(5, 9), &mut regions);
        assert_eq!(ring.test(1), Ok(None), "0 has not finished");
        assert_eq!(regions.deregister(key), Err(TransportError::MemoryInUse(1)));
        ring.finish(0, moved(3, 0), &mut regions);
        ring.finish(0, moved(4, 1), &mut regions);
        assert_eq!(ring.test(1), done(5, 9));
        assert_eq!(ring.push(key, buffer, (), &mut regions), None, "0 has not been tested");
        assert_eq!(ring.test(0), done(3, 0));
        assert_eq!(ring.test(0), Err(TransportError::NoSuch("request")));
        assert_eq!(ring.push(key, buffer, (), &mut regions), Some(2));
        assert_eq!(ring.test(2), Ok(None));
        assert_eq!(ring.test(3), Err(TransportError::NoSuch("request")));
        ring.abandon(&mut regions);
        assert_eq!(ring.test(2), Ok(None), "abandoned, not done");
        assert_eq!(regions.deregister(key), Ok(()));
    }
}
