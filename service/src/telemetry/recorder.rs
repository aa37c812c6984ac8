//! The flight recorder: what engines did last, in rings of plain records, for the operator who traces a window of time.
//!
//! ```text
//! off --begin (rings are made, once)--> on --the window is over--> off
//! engine:  is it on? --> record: one slot of its own ring, over the oldest        reader: copies slots that are whole
//! ```
//!
//! Each ring is written by one engine and read by the control path; neither waits for the other. A slot carries the number of its
//! record before and after its words, so that a reader which the writer laps knows that it has read nothing. While it is off
//! an engine pays one load for each thing that it might record: no clock is read.
//!
//! Invariant: clones of a [`Recorder`] belong to parts of one engine, which is on one thread at a time. Breaking it would garble
//! records, not memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use mccs_ipc::types::{CollectiveKind, Handle};
use serde::{Deserialize, Serialize};

use super::lock;

/// Records of a ring: 2 MiB. At a message each 10 us, a third of a second; readers come more often.
pub const RING_RECORDS: usize = 1 << 15;
/// Most records that are read at a time: bounds how long the reader's engine works.
pub const READ_MAX: usize = 4096;
/// Words of a record.
pub const WORDS: usize = 7;

/// A record as it lies in a ring.
pub type Words = [u64; WORDS];

/// Names a job of a device, as the proxy engine and transport engines both know it.
#[must_use]
pub fn job_number(job: Handle) -> u64 {
    u64::from(job.generation) << 32 | u64::from(job.index)
}

/// What an engine did. Times are nanoseconds since the service began; where something has taken time, `since_ns` is when it began,
/// 0 if that was before the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// A rank's collective has reached its communicator.
    Enqueued { at_ns: u64, comm: u64, rank: u32, seq: u64 },
    /// It has become the head of its stream.
    Arrived { at_ns: u64, comm: u64, rank: u32, seq: u64 },
    /// It has begun on all ranks of this host, as a job.
    Started { at_ns: u64, comm: u64, seq: u64, job: u64, kind: CollectiveKind, bytes: u64 },
    /// A send, or a receive, or both where they are on one host, has begun.
    PairStarted { at_ns: u64, comm: u64, job: u64, from: u32, to: u32, bytes: u64 },
    /// A job has ended.
    Ended { at_ns: u64, job: u64, is_failed: bool },
    /// A channel of a job was worked on by this engine, from beginning to end.
    Channel { since_ns: u64, at_ns: u64, job: u64, channel: u16 },
    /// A piece of a job that engines share was done by this one.
    Piece { since_ns: u64, at_ns: u64, job: u64 },
    /// A message to or from another host has left its buffer, or has come: `since_ns` is when it was posted.
    Chunk { since_ns: u64, at_ns: u64, job: u64, channel: u16, from: u32, to: u32, sends: bool, bytes: u64 },
}

impl Record {
    /// As it lies in a ring: what and small numbers, ranks, then times and large ones.
    #[must_use]
    pub fn to_words(self) -> Words {
        let ranks = |from: u32, to: u32| u64::from(to) << 32 | u64::from(from);
        match self {
            Record::Enqueued { at_ns, comm, rank, seq } => [1, ranks(rank, 0), 0, at_ns, comm, seq, 0],
            Record::Arrived { at_ns, comm, rank, seq } => [2, ranks(rank, 0), 0, at_ns, comm, seq, 0],
            Record::Started { at_ns, comm, seq, job, kind, bytes } => {
                [3 | u64::from(kind.to_wire()) << 32, seq, 0, at_ns, comm, job, bytes]
            }
            Record::PairStarted { at_ns, comm, job, from, to, bytes } => {
                [4, ranks(from, to), 0, at_ns, comm, job, bytes]
            }
            Record::Ended { at_ns, job, is_failed } => [5 | u64::from(is_failed) << 32, 0, 0, at_ns, 0, job, 0],
            Record::Channel { since_ns, at_ns, job, channel } => {
                [6 | u64::from(channel) << 32, 0, since_ns, at_ns, 0, job, 0]
            }
            Record::Piece { since_ns, at_ns, job } => [7, 0, since_ns, at_ns, 0, job, 0],
            Record::Chunk { since_ns, at_ns, job, channel, from, to, sends, bytes } => {
                let head = 8 | u64::from(sends) << 8 | u64::from(channel) << 32;
                [head, ranks(from, to), since_ns, at_ns, 0, job, bytes]
            }
        }
    }

    /// What lies in a ring; `None` if no engine of this version has written it.
    #[must_use]
    pub fn from_words(words: &Words) -> Option<Self> {
        let [head, second, since_ns, at_ns, comm, fifth, bytes] = *words;
        let (from, to, job, small) = (second as u32, (second >> 32) as u32, fifth, (head >> 32) as u32);
        Some(match head as u8 {
            1 => Record::Enqueued { at_ns, comm, rank: from, seq: fifth },
            2 => Record::Arrived { at_ns, comm, rank: from, seq: fifth },
            3 => Record::Started { at_ns, comm, seq: second, job, kind: CollectiveKind::from_wire(small)?, bytes },
            4 => Record::PairStarted { at_ns, comm, job, from, to, bytes },
            5 => Record::Ended { at_ns, job, is_failed: small != 0 },
            6 => Record::Channel { since_ns, at_ns, job, channel: small as u16 },
            7 => Record::Piece { since_ns, at_ns, job },
            8 => {
                let sends = head & 1 << 8 != 0;
                Record::Chunk { since_ns, at_ns, job, channel: small as u16, from, to, sends, bytes }
            }
            _ => return None,
        })
    }
}

/// Room for one record.
#[derive(Default)]
#[repr(align(64))]
struct Slot {
    /// Of record n: 2n + 1 while it is written, 2n + 2 when it is there.
    turn: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// One engine's records.
struct Ring {
    number: u64,
    engine: String,
    /// Made when somebody first wants them.
    slots: OnceLock<Box<[Slot]>>,
    /// Number of the next record.
    next: AtomicU64,
}

impl Ring {
    fn make_slots(&self) {
        self.slots.get_or_init(|| (0..RING_RECORDS).map(|_| Slot::default()).collect());
    }

    /// Writes over the oldest record. Only the ring's engine calls it.
    fn push(&self, words: &Words) {
        let Some(slots) = self.slots.get() else { return };
        let number = self.next.load(Ordering::Relaxed);
        let Some(slot) = slots.get(number as usize % RING_RECORDS) else { return };
        slot.turn.store(2 * number + 1, Ordering::Relaxed);
        // A reader that sees any of the words sees that the slot is being written, too: pairs with its second look.
        fence(Ordering::Release);
        for (to, word) in slot.words.iter().zip(words) {
            to.store(*word, Ordering::Relaxed);
        }
        slot.turn.store(2 * number + 2, Ordering::Release);
        self.next.store(number + 1, Ordering::Release);
    }

    /// A record, unless it has been written over.
    fn read(&self, number: u64) -> Option<Words> {
        let slot = self.slots.get()?.get(number as usize % RING_RECORDS)?;
        let whole = 2 * number + 2;
        if slot.turn.load(Ordering::Acquire) != whole {
            return None;
        }
        let words = std::array::from_fn(|at| slot.words[at].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (slot.turn.load(Ordering::Relaxed) == whole).then_some(words)
    }
}

/// A ring as a reader knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingView {
    /// Its number.
    pub ring: u64,
    /// Whose it is.
    pub engine: String,
    /// Number of its next record.
    pub next: u64,
}

/// Some of a ring's records.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Records {
    /// From where to go on.
    pub next: u64,
    /// Records that had been written over before they were read.
    pub lost: u64,
    /// The others, in order.
    pub records: Vec<Words>,
}

/// All rings of a service.
pub struct Recorders {
    is_on: AtomicBool,
    since: Instant,
    rings: Mutex<Vec<Arc<Ring>>>,
    next_ring: AtomicU64,
}

impl Default for Recorders {
    fn default() -> Self {
        let (rings, next_ring) = (Mutex::default(), AtomicU64::new(0));
        Recorders { is_on: AtomicBool::new(false), since: Instant::now(), rings, next_ring }
    }
}

impl Recorders {
    /// A recorder for a new engine.
    #[must_use]
    pub fn recorder(self: &Arc<Self>, engine: String) -> Recorder {
        let number = self.next_ring.fetch_add(1, Ordering::Relaxed);
        let ring = Arc::new(Ring { number, engine, slots: OnceLock::new(), next: AtomicU64::new(0) });
        if self.is_on() {
            ring.make_slots();
        }
        lock(&self.rings).push(Arc::clone(&ring));
        Recorder { recorders: Arc::clone(self), ring }
    }

    /// Whether engines record.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Time, as records have it.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.since.elapsed().as_nanos() as u64
    }

    /// Engines record from now on. Forgets the rings of engines that have ended.
    pub fn begin(&self) {
        let mut rings = lock(&self.rings);
        rings.retain(|ring| Arc::strong_count(ring) > 1);
        rings.iter().for_each(|ring| ring.make_slots());
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// Engines record no more. What they have recorded stays readable.
    pub fn end(&self) {
        self.is_on.store(false, Ordering::Relaxed);
    }

    /// The rings, and where they are.
    #[must_use]
    pub fn rings(&self) -> Vec<RingView> {
        let view = |ring: &Arc<Ring>| RingView {
            ring: ring.number,
            engine: ring.engine.clone(),
            next: ring.next.load(Ordering::Acquire),
        };
        lock(&self.rings).iter().map(view).collect()
    }

    /// Records of a ring from number `from` on, at most [`READ_MAX`]. `None` if there is no such ring any more.
    #[must_use]
    pub fn read(&self, ring: u64, from: u64) -> Option<Records> {
        let ring = lock(&self.rings).iter().find(|of| of.number == ring).cloned()?;
        let next = ring.next.load(Ordering::Acquire);
        let first = from.max(next.saturating_sub(RING_RECORDS as u64)).min(next);
        let last = next.min(first + READ_MAX as u64);
        let mut read = Records { next: last, lost: first.saturating_sub(from), records: Vec::new() };
        for number in first..last {
            match ring.read(number) {
                Some(words) => read.records.push(words),
                None => read.lost += 1,
            }
        }
        Some(read)
    }
}

/// An engine's end of its ring.
#[derive(Clone)]
pub struct Recorder {
    recorders: Arc<Recorders>,
    ring: Arc<Ring>,
}

impl Default for Recorder {
    /// One that nobody reads, and that is never on.
    fn default() -> Self {
        Arc::new(Recorders::default()).recorder(String::new())
    }
}

impl Recorder {
    /// The time, if it is to be recorded; 0 otherwise.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        if self.recorders.is_on() { self.recorders.now_ns() } else { 0 }
    }

    /// Records what `record` makes of the time, if records are wanted.
    pub fn record(&self, record: impl FnOnce(u64) -> Record) {
        if self.recorders.is_on() {
            self.ring.push(&record(self.recorders.now_ns()).to_words());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(number: u64) -> Record {
        Record::Piece { since_ns: number, at_ns: 3 * number, job: !number }
    }

    #[test]
    fn records_come_back_as_they_were() {
        let kinds = CollectiveKind::ALL.iter();
        let started =
            kinds.map(|kind| Record::Started { at_ns: 1, comm: 2, seq: 3, job: 4, kind: *kind, bytes: u64::MAX });
        let chunk = |sends| Record::Chunk {
            since_ns: 1,
            at_ns: 2,
            job: u64::MAX,
            channel: u16::MAX,
            from: 7,
            to: u32::MAX,
            sends,
            bytes: 9,
        };
        let others = [
            Record::Enqueued { at_ns: 1, comm: 2, rank: u32::MAX, seq: 3 },
            Record::Arrived { at_ns: 1, comm: 2, rank: 3, seq: 4 },
            Record::PairStarted { at_ns: 1, comm: 2, job: 3, from: 4, to: 5, bytes: 6 },
            Record::Ended { at_ns: 1, job: 2, is_failed: true },
            Record::Ended { at_ns: 1, job: 2, is_failed: false },
            Record::Channel { since_ns: 1, at_ns: 2, job: 3, channel: 4 },
            piece(5),
            chunk(true),
            chunk(false),
        ];
        for record in started.chain(others) {
            assert_eq!(Record::from_words(&record.to_words()), Some(record));
        }
        assert_eq!(Record::from_words(&[0; WORDS]), None);
        assert_eq!(Record::from_words(&[3 | 99 << 32, 0, 0, 0, 0, 0, 0]), None);
    }

    #[test]
    fn nothing_is_recorded_unless_somebody_wants_it() {
        let recorders = Arc::new(Recorders::default());
        let recorder = recorders.recorder("a".into());
        recorder.record(|_| panic!("nobody wants it"));
        assert_eq!(recorder.now_ns(), 0);
        recorders.begin();
        recorder.record(|_| piece(1));
        recorders.end();
        recorder.record(|_| panic!("nobody wants it any more"));
        let read = recorders.read(0, 0).unwrap();
        assert_eq!((read.next, read.lost, read.records), (1, 0, vec![piece(1).to_words()]));
        // Still there, until the next window begins.
        drop(recorder);
        assert_eq!(recorders.read(0, 0).unwrap().next, 1);
        recorders.begin();
        assert!(recorders.read(0, 0).is_none() && recorders.rings().is_empty());
    }

    #[test]
    fn the_oldest_records_go_first() {
        let recorders = Arc::new(Recorders::default());
        let recorder = recorders.recorder("a".into());
        recorders.begin();
        let count = RING_RECORDS as u64 + 100;
        (0..count).for_each(|number| recorder.record(|_| piece(number)));
        let (mut from, mut lost, mut got) = (0, 0, Vec::new());
        loop {
            let read = recorders.read(0, from).unwrap();
            assert!(read.records.len() <= READ_MAX);
            if read.next == from {
                break;
            }
            (from, lost) = (read.next, lost + read.lost);
            got.extend(read.records);
        }
        assert_eq!((from, lost, got.len()), (count, 100, RING_RECORDS));
        assert!((100..).zip(&got).all(|(number, words)| *words == piece(number).to_words()));
        assert_eq!(recorders.read(0, u64::MAX).unwrap().next, count);
    }

    /// A writer that laps its reader again and again: what is read is whole, in order, and all that is not read is counted.
    #[test]
    fn a_reader_that_is_lapped_reads_nothing_torn() {
        const COUNT: u64 = 40 * RING_RECORDS as u64;
        let recorders = Arc::new(Recorders::default());
        let recorder = recorders.recorder("a".into());
        recorders.begin();
        let writer = std::thread::spawn(move || (0..COUNT).for_each(|number| recorder.record(|_| piece(number))));
        let (mut from, mut lost, mut got, mut last) = (0, 0, 0, None);
        while from < COUNT {
            let read = recorders.read(0, from).unwrap();
            for words in &read.records {
                let Some(Record::Piece { since_ns, at_ns, job }) = Record::from_words(words) else {
                    panic!("{words:?}")
                };
                assert_eq!((at_ns, job), (3 * since_ns, !since_ns), "torn");
                assert!(last.is_none_or(|last| since_ns > last), "{since_ns} after {last:?}");
                last = Some(since_ns);
            }
            got += read.records.len() as u64;
            lost += read.lost;
            from = read.next;
        }
        writer.join().unwrap();
        assert_eq!(got + lost, COUNT);
        assert!(got > 0);
    }
}
