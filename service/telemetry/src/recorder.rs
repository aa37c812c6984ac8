//! Flight recorder: what engines did last, in rings of plain records, for traces.
//!
//! ```text
//! off --begin (rings are made, once)--> on --the window is over--> off
//! engine:  is it on? --> record: one slot of its own ring, over the oldest        reader: copies slots that are whole
//! ```
//!
//! Each ring ([`mccs_ipc::records`]) is written by one engine, and lies in memory that the reader maps: to be read costs the service
//! nothing. While it is off an engine pays one load for each thing that it might record: no clock is read. While it is on, what follows
//! from a message that has just come takes the time of the engine's round, unless something later was recorded in it; all else takes
//! the time by [`ticks`], since the operating system's clock costs more than writing the record.
//!
//! Invariant: clones of a [`Recorder`] belong to parts of one engine, which is on one thread at a time. Breaking it would garble
//! records, not memory.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use mccs_ipc::records::{RecordWords, RecordWriter, records_bytes};
use mccs_ipc::shm::Mapping;
use mccs_ipc::types::{CollectiveKind, Handle};
use serde::{Deserialize, Serialize};

use super::{lock, ticks};

/// Records of a ring: 2 MiB. At a message each 10 us, a third of a second; readers come more often.
pub const RING_RECORDS: u64 = 1 << 15;

/// Names a job of a device, as the proxy engine and transport engines both know it.
#[must_use]
pub fn job_number(job: Handle) -> u64 {
    u64::from(job.generation) << 32 | u64::from(job.index)
}

/// Act of an engine. Times are nanoseconds since the service began; where something has taken time, `since_ns` is when it began, 0
/// if that was before the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// A rank's collective has reached its communicator.
    Enqueued { at_ns: u64, comm: u64, rank: u32, seq: u64 },
    /// It has become the head of its stream.
    Arrived { at_ns: u64, comm: u64, rank: u32, seq: u64 },
    /// It has begun on all ranks of this host, as a job, under the strategy of that number.
    Started { at_ns: u64, comm: u64, seq: u64, epoch: u64, job: u64, kind: CollectiveKind, bytes: u64 },
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
    /// A rank's kernel has carried out its part in a collective, from beginning to end, by a clock of the GPU's that is known to `error_ns`, of which
    /// a tenth of a microsecond is kept.
    OnGpu { since_ns: u64, at_ns: u64, comm: u64, rank: u32, seq: u64, kind: CollectiveKind, bytes: u64, error_ns: u64 },
    /// A collective has a tag of its tenant's.
    Tagged { at_ns: u64, comm: u64, seq: u64, tag: u64 },
}

/// In what an error of clocks is kept.
const ERROR_UNIT_NS: u64 = 100;

impl Record {
    /// As it lies in a ring: what and small numbers, ranks, then times and large ones; an epoch where others have when they began.
    #[must_use]
    pub fn to_words(self) -> RecordWords {
        let ranks = |from: u32, to: u32| u64::from(to) << 32 | u64::from(from);
        match self {
            Record::Enqueued { at_ns, comm, rank, seq } => [1, ranks(rank, 0), 0, at_ns, comm, seq, 0],
            Record::Arrived { at_ns, comm, rank, seq } => [2, ranks(rank, 0), 0, at_ns, comm, seq, 0],
            Record::Started { at_ns, comm, seq, epoch, job, kind, bytes } => {
                [3 | u64::from(kind.to_wire()) << 32, seq, epoch, at_ns, comm, job, bytes]
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
            Record::OnGpu { since_ns, at_ns, comm, rank, seq, kind, bytes, error_ns } => {
                let error = u32::try_from(error_ns.div_ceil(ERROR_UNIT_NS)).unwrap_or(u32::MAX);
                [9 | u64::from(kind.to_wire()) << 32, ranks(rank, error), since_ns, at_ns, comm, seq, bytes]
            }
            Record::Tagged { at_ns, comm, seq, tag } => [10, 0, 0, at_ns, comm, seq, tag],
        }
    }

    /// A record of a ring; `None` if no engine of this version has written it.
    #[must_use]
    pub fn from_words(words: &RecordWords) -> Option<Self> {
        let [head, second, third, at_ns, comm, fifth, bytes] = *words;
        let (from, to, job, small) = (second as u32, (second >> 32) as u32, fifth, (head >> 32) as u32);
        let (seq, since_ns, epoch) = (second, third, third);
        Some(match head as u8 {
            1 => Record::Enqueued { at_ns, comm, rank: from, seq: fifth },
            2 => Record::Arrived { at_ns, comm, rank: from, seq: fifth },
            3 => Record::Started { at_ns, comm, seq, epoch, job, kind: CollectiveKind::from_wire(small)?, bytes },
            4 => Record::PairStarted { at_ns, comm, job, from, to, bytes },
            5 => Record::Ended { at_ns, job, is_failed: small != 0 },
            6 => Record::Channel { since_ns, at_ns, job, channel: small as u16 },
            7 => Record::Piece { since_ns, at_ns, job },
            8 => {
                let sends = head & 1 << 8 != 0;
                Record::Chunk { since_ns, at_ns, job, channel: small as u16, from, to, sends, bytes }
            }
            9 => Record::OnGpu {
                since_ns,
                at_ns,
                comm,
                rank: from,
                seq: fifth,
                kind: CollectiveKind::from_wire(small)?,
                bytes,
                error_ns: u64::from(to) * ERROR_UNIT_NS,
            },
            10 => Record::Tagged { at_ns, comm, seq: fifth, tag: bytes },
            _ => return None,
        })
    }
}

/// One engine's records.
struct Ring {
    number: u64,
    engine: String,
    /// Made when somebody first wants them.
    memory: OnceLock<(OwnedFd, RecordWriter)>,
    /// Time of the last record.
    last_ns: AtomicU64,
    /// The engine's clock, which nobody else reads.
    clock: ticks::Anchor,
}

impl Ring {
    fn make_memory(&self) {
        if self.memory.get().is_some() {
            return;
        }
        let made = Mapping::create_for_readers("mccs-records", records_bytes(RING_RECORDS))
            .map_err(|error| error.to_string())
            .and_then(|(fd, mapping)| match RecordWriter::new(mapping, RING_RECORDS) {
                Ok(writer) => Ok((fd, writer)),
                Err(error) => Err(error.to_string()),
            });
        match made {
            // Somebody else may have been faster, with as good a ring.
            Ok(made) => drop(self.memory.set(made)),
            Err(error) => {
                tracing::warn!(engine = self.engine, error, "no memory for what the engine does: it records nothing")
            }
        }
    }
}

/// A ring as a reader knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingView {
    /// Its number.
    pub ring: u64,
    /// Its owner.
    pub engine: String,
    /// Number of its next record.
    pub next: u64,
}

/// All rings of a service.
pub struct Recorders {
    is_on: AtomicBool,
    /// When they stop by themselves.
    until: Mutex<Option<Instant>>,
    time: ticks::Clocks,
    rings: Mutex<Vec<Arc<Ring>>>,
    next_ring: AtomicU64,
}

impl Default for Recorders {
    fn default() -> Self {
        let (rings, next_ring) = (Mutex::default(), AtomicU64::new(0));
        Recorders {
            is_on: AtomicBool::new(false),
            until: Mutex::default(),
            time: ticks::Clocks::begin(),
            rings,
            next_ring,
        }
    }
}

impl Recorders {
    /// A recorder for a new engine.
    #[must_use]
    pub fn recorder(self: &Arc<Self>, engine: String) -> Recorder {
        let number = self.next_ring.fetch_add(1, Ordering::Relaxed);
        let (memory, last_ns, clock) = (OnceLock::new(), AtomicU64::new(0), ticks::Anchor::default());
        let ring = Arc::new(Ring { number, engine, memory, last_ns, clock });
        if self.is_on() {
            ring.make_memory();
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
        self.time.clock_ns()
    }

    /// A time, as records have it.
    #[must_use]
    pub fn ns_at(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.time.began()).as_nanos() as u64
    }

    /// Engines record from now on. Forgets the rings of engines that have ended.
    pub fn begin(&self) {
        let mut rings = lock(&self.rings);
        rings.retain(|ring| Arc::strong_count(ring) > 1);
        rings.iter().for_each(|ring| ring.make_memory());
        self.time.learn();
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// Engines record from now on until then, or for as long as somebody else wants, if that is longer.
    pub fn begin_until(&self, until: Instant) {
        let mut latest = lock(&self.until);
        *latest = Some(latest.map_or(until, |other| other.max(until)));
        self.begin();
    }

    /// Ends what [`Recorders::begin_until`] began, if it is over. Returns when it will be.
    pub fn end_if_over(&self, now: Instant) -> Option<Instant> {
        let mut until = lock(&self.until);
        if until.is_some_and(|until| until <= now) {
            *until = None;
            self.end();
        }
        *until
    }

    /// Engines record no more. Their records stay readable.
    pub fn end(&self) {
        self.is_on.store(false, Ordering::Relaxed);
    }

    /// The rings, and where they are.
    #[must_use]
    pub fn rings(&self) -> Vec<RingView> {
        let view = |ring: &Arc<Ring>| RingView {
            ring: ring.number,
            engine: ring.engine.clone(),
            next: ring.memory.get().map_or(0, |(_, writer)| writer.next()),
        };
        lock(&self.rings).iter().map(view).collect()
    }

    /// The memory of a ring, for [`mccs_ipc::records::RecordReader::map`]. `None` if there is no such ring any more, or no
    /// descriptor to be had.
    #[must_use]
    pub fn memory(&self, ring: u64) -> Option<OwnedFd> {
        let ring = lock(&self.rings).iter().find(|of| of.number == ring).cloned()?;
        ring.memory.get()?.0.as_fd().try_clone_to_owned().ok()
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
    /// Whether records are wanted.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.recorders.is_on()
    }

    /// The time, if it is to be recorded; 0 otherwise.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        if self.recorders.is_on() { self.clock_ns() } else { 0 }
    }

    /// Records what `record` makes of the time, if records are wanted.
    pub fn record(&self, record: impl FnOnce(u64) -> Record) {
        if self.recorders.is_on() {
            self.push(self.clock_ns(), record);
        }
    }

    fn clock_ns(&self) -> u64 {
        self.ring.clock.now_ns(&self.recorders.time)
    }

    /// As [`Recorder::record`], of what the engine does in a round that began at `now`, without a look at the clock.
    pub fn record_in_round(&self, now: Instant, record: impl FnOnce(u64) -> Record) {
        if self.recorders.is_on() {
            self.push(self.recorders.ns_at(now), record);
        }
    }

    fn push(&self, at_ns: u64, record: impl FnOnce(u64) -> Record) {
        if let Some((_, writer)) = self.ring.memory.get() {
            let at_ns = at_ns.max(self.ring.last_ns.load(Ordering::Relaxed));
            self.ring.last_ns.store(at_ns, Ordering::Relaxed);
            writer.push(&record(at_ns).to_words());
        }
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::records::{RECORD_WORDS, Read, RecordReader};

    use super::*;

    fn piece(number: u64) -> Record {
        Record::Piece { since_ns: number, at_ns: 3 * number, job: !number }
    }

    #[test]
    fn records_come_back_as_they_were() {
        let kinds = CollectiveKind::ALL.iter();
        let (epoch, bytes) = (5, u64::MAX);
        let started =
            kinds.map(|kind| Record::Started { at_ns: 1, comm: 2, seq: 3, epoch, job: 4, kind: *kind, bytes });
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
            Record::Tagged { at_ns: 1, comm: 2, seq: 3, tag: u64::MAX },
            Record::Arrived { at_ns: 1, comm: 2, rank: 3, seq: 4 },
            Record::PairStarted { at_ns: 1, comm: 2, job: 3, from: 4, to: 5, bytes: 6 },
            Record::Ended { at_ns: 1, job: 2, is_failed: true },
            Record::Ended { at_ns: 1, job: 2, is_failed: false },
            Record::Channel { since_ns: 1, at_ns: 2, job: 3, channel: 4 },
            piece(5),
            chunk(true),
            chunk(false),
            Record::OnGpu {
                since_ns: 1,
                at_ns: 2,
                comm: u64::MAX,
                rank: 7,
                seq: 3,
                kind: CollectiveKind::Barrier,
                bytes: 4,
                error_ns: 25_500,
            },
        ];
        for record in started.chain(others) {
            assert_eq!(Record::from_words(&record.to_words()), Some(record));
        }
        assert_eq!(Record::from_words(&[0; RECORD_WORDS]), None);
        assert_eq!(Record::from_words(&[3 | 99 << 32, 0, 0, 0, 0, 0, 0]), None);
    }

    #[test]
    fn nothing_is_recorded_unless_somebody_wants_it() {
        let recorders = Arc::new(Recorders::default());
        let recorder = recorders.recorder("a".into());
        recorder.record(|_| panic!("nobody wants it"));
        recorder.record_in_round(Instant::now(), |_| panic!("nobody wants it"));
        assert_eq!(recorder.now_ns(), 0);
        assert!(recorders.memory(0).is_none());
        recorders.begin();
        recorder.record(|_| piece(1));
        recorders.end();
        recorder.record(|_| panic!("nobody wants it any more"));
        let reader = RecordReader::map(recorders.memory(0).unwrap().as_fd()).unwrap();
        let mut got = Vec::new();
        assert_eq!(reader.read(0, &mut got), Read { next: 1, lost: 0 });
        assert_eq!(got, [piece(1).to_words()]);
        // Still there, until the next window begins; and longer for whoever reads it.
        drop(recorder);
        assert!(recorders.memory(0).is_some());
        recorders.begin();
        assert!(recorders.memory(0).is_none() && recorders.rings().is_empty());
        assert_eq!(reader.next(), 1);
    }

    #[test]
    fn times_of_an_engine_never_go_back() {
        let recorders = Arc::new(Recorders::default());
        let recorder = recorders.recorder("a".into());
        recorders.begin();
        let round = Instant::now();
        let at = |at_ns| Record::Ended { at_ns, job: 0, is_failed: false };
        recorder.record_in_round(round, at);
        recorder.record(at);
        // Later in the same round.
        recorder.record_in_round(round, at);
        recorder.record(at);
        let mut got = Vec::new();
        RecordReader::map(recorders.memory(0).unwrap().as_fd()).unwrap().read(0, &mut got);
        let times: Vec<_> = got.iter().map(|words| words[3]).collect();
        assert!(times.is_sorted() && times[1] == times[2], "{times:?}");
    }
}
