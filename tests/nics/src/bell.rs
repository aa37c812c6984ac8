//! Doorbells of emulated NICs: how a device hears that something has come for it. There is a bell
//! for each process that has opened it.
//!
//! ```text
//! peer: leaves a packet in the ring, one more in the ring's `rung`, one more in the bell
//!       the program looks into the completion queue?   yes: it serves the queue pair itself, and nobody is woken
//!                                                      no:  the device's thread is woken, if it sleeps
//! ```
//!
//! A program that looks is told from its looks' times, which lie in the bell's page. As long as one does, the thread *watches*: it looks
//! each millisecond, for what was left to a program that has looked away. A peer wakes nobody only if the thread watches.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::files::{Mapping, hex, now_ns};

/// A program that has looked into its queue so short a time ago looks again.
const LOOKS_NS: u64 = 10_000;
/// The thread watches for so long after the last look.
const WATCHES_NS: u64 = 10_000_000;
/// A thread that watches looks so often.
const WATCH: Duration = Duration::from_millis(1);
/// One that does not: whoever makes a fault rings, so this is for who was killed before.
const REST: Duration = Duration::from_millis(100);
/// Completion queues whose looks are known; those of others are not, and peers wake the thread.
const PLACES: usize = 63;

/// When a program has last looked into a completion queue; a cache line of its own.
#[repr(C, align(64))]
#[derive(Debug)]
struct Looked(AtomicU64);

#[repr(C)]
#[derive(Debug)]
struct Words {
    rung: AtomicU32,
    sleepers: AtomicU32,
    watches: AtomicU32,
    looked: [Looked; PLACES],
}

/// A bell, as its owner or a peer maps it.
#[derive(Debug)]
pub(crate) struct Bell {
    mapping: Mapping,
    /// The owner's, who removes it.
    path: Option<PathBuf>,
}

fn prefix(gid: [u8; 16]) -> String {
    format!("bell-{}-", hex(gid))
}

impl Bell {
    fn new(folder: &Path, gid: [u8; 16], number: u32, makes: bool) -> io::Result<Bell> {
        let path = folder.join(format!("{}{number}", prefix(gid)));
        if makes {
            let _ = std::fs::remove_file(&path);
        }
        let mapping = Mapping::open(&path, size_of::<Words>(), makes)?;
        Ok(Bell { mapping, path: makes.then_some(path) })
    }

    pub(crate) fn create(folder: &Path, gid: [u8; 16], number: u32) -> io::Result<Bell> {
        Bell::new(folder, gid, number, true)
    }

    pub(crate) fn open(folder: &Path, gid: [u8; 16], number: u32) -> io::Result<Bell> {
        Bell::new(folder, gid, number, false)
    }

    /// Wakes all threads of a device, whoever has opened it.
    pub(crate) fn ring_all(folder: &Path, gid: [u8; 16]) -> io::Result<()> {
        let prefix = prefix(gid);
        for entry in std::fs::read_dir(folder)? {
            let name = entry?.file_name();
            let number =
                name.to_str().and_then(|name| name.strip_prefix(&prefix)).and_then(|number| number.parse().ok());
            // One that has gone meanwhile is nobody's.
            if let Some(Ok(bell)) = number.map(|number| Bell::open(folder, gid, number)) {
                bell.ring();
            }
        }
        Ok(())
    }

    fn words(&self) -> &Words {
        // SAFETY: long enough, aligned to a page, and nothing but atomic words.
        unsafe { &*self.mapping.at::<Words>(0) }
    }

    /// Says that a program looks into the completion queue at `place`.
    pub(crate) fn look(&self, place: u32, now_ns: u64) {
        if let Some(Looked(at)) = self.words().looked.get(place as usize) {
            at.store(now_ns, Ordering::Relaxed);
        }
    }

    fn is_looked_at(&self, places: &[AtomicU32; 2], now_ns: u64) -> bool {
        let looked = |place: &AtomicU32| {
            let looked = self.words().looked.get(place.load(Ordering::Relaxed) as usize)?;
            Some(looked.0.load(Ordering::Relaxed))
        };
        places.iter().filter_map(looked).any(|at| now_ns < at.saturating_add(LOOKS_NS))
    }

    /// Wakes the thread.
    pub(crate) fn ring(&self) {
        let words = self.words();
        words.rung.fetch_add(1, Ordering::SeqCst);
        if words.sleepers.load(Ordering::SeqCst) > 0 {
            // SAFETY: a word of a mapping that lives.
            unsafe { libc::syscall(libc::SYS_futex, words.rung.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
        }
    }

    /// Wakes the thread, unless a program looks into one of the queues at `places` and the thread watches.
    pub(crate) fn ring_for(&self, places: &[AtomicU32; 2]) {
        let words = self.words();
        words.rung.fetch_add(1, Ordering::SeqCst);
        let sleeps = words.sleepers.load(Ordering::SeqCst) > 0;
        let watches = words.watches.load(Ordering::SeqCst) != 0;
        if sleeps && !(watches && self.is_looked_at(places, now_ns())) {
            // SAFETY: a word of a mapping that lives.
            unsafe { libc::syscall(libc::SYS_futex, words.rung.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
        }
    }

    /// How often it has rung.
    pub(crate) fn rung(&self) -> u32 {
        self.words().rung.load(Ordering::SeqCst)
    }

    /// Waits until it has rung more often than `seen` times, or until `until_ns`, or for as long as the thread may.
    pub(crate) fn sleep(&self, seen: u32, until_ns: u64) {
        let (words, now) = (self.words(), now_ns());
        let last = words.looked.iter().map(|Looked(at)| at.load(Ordering::Relaxed)).max().unwrap_or(0);
        let watches = now < last.saturating_add(WATCHES_NS);
        let most = if watches { WATCH } else { REST }.min(Duration::from_nanos(until_ns.saturating_sub(now)));
        let most = libc::timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
        // Before the word is compared: who rings later sees it, who rang earlier has changed the word.
        words.watches.store(watches.into(), Ordering::SeqCst);
        words.sleepers.fetch_add(1, Ordering::SeqCst);
        // SAFETY: a word of a mapping that lives, and a time that does.
        unsafe { libc::syscall(libc::SYS_futex, words.rung.as_ptr(), libc::FUTEX_WAIT, seen, &raw const most) };
        words.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Places for completion queues in a bell's page.
#[derive(Debug, Default)]
pub(crate) struct Places(u64);

impl Places {
    /// A free one; `PLACES`, which is none, where all are taken.
    pub(crate) fn take(&mut self) -> u32 {
        let free = self.0.trailing_ones().min(PLACES as u32);
        self.0 |= (1 << free) & ((1 << PLACES) - 1);
        free
    }

    pub(crate) fn give_back(&mut self, place: u32) {
        self.0 &= !(1 << place.min(PLACES as u32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_out_once_until_they_come_back() {
        let mut places = Places::default();
        let taken: Vec<u32> = (0..PLACES).map(|_| places.take()).collect();
        assert_eq!(taken, (0..PLACES as u32).collect::<Vec<_>>());
        assert_eq!([places.take(), places.take()], [PLACES as u32; 2], "all are taken");
        places.give_back(PLACES as u32);
        places.give_back(17);
        assert_eq!([places.take(), places.take()], [17, PLACES as u32]);
    }

    #[test]
    fn a_peer_leaves_a_thread_that_watches_asleep_while_a_program_looks() {
        let folder = tempfile::tempdir().expect("a folder");
        let bell = Bell::create(folder.path(), [1; 16], 3).expect("a bell");
        let peer = Bell::open(folder.path(), [1; 16], 3).expect("the same");
        let places = [5, 6].map(AtomicU32::new);
        assert!(!peer.is_looked_at(&places, 1_000_000));
        bell.look(6, 1_000_000);
        assert!(peer.is_looked_at(&places, 1_000_000 + LOOKS_NS - 1));
        assert!(!peer.is_looked_at(&places, 1_000_000 + LOOKS_NS), "it has looked away");
        bell.look(PLACES as u32, now_ns());
        // It has rung since, so this returns.
        let seen = bell.rung();
        Bell::ring_all(folder.path(), [1; 16]).expect("a folder");
        bell.sleep(seen, u64::MAX);
        assert_eq!(bell.rung(), seen + 1);
    }
}
