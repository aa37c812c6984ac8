//! Client side of `mccsctl trace`: has a service record for a while, and reads meanwhile. So a
//! window may be longer than what rings hold.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use mccs_ipc::records::{RecordReader, RecordWords, RecordsError};

use super::overview::Overview;
use super::{ControlAnswer, ControlError, ControlRequest, call, call_for_memory};
use mccs_telemetry::recorder::{Record, RingView};
use mccs_telemetry::trace::{CommName, Window};

/// Time between two looks at rings that fill slowly.
const READ_EVERY: Duration = Duration::from_millis(100);
/// And at such as would be full by then.
const READ_EVERY_MIN: Duration = Duration::from_millis(5);
/// Time between two looks at what communicators there are, which the service has to say.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Records that are kept, at most, of all engines together: half a gigabyte of JSON.
pub const RECORDS_MAX: usize = 4 << 20;

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The service could not be asked.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// It does not want to.
    #[error("refused: {0}")]
    Refused(String),
    /// There is nothing to trace.
    #[error("there is no communicator {0} on {1}: `mccsctl communicators` shows them")]
    NoCommunicator(u64, String),
    /// It is of another version.
    #[error("the service answered something else")]
    Answer,
    /// Its records cannot be read.
    #[error("what the service's engines recorded cannot be read: {0}")]
    Records(#[from] RecordsError),
}

/// An engine's records so far, as they are: to understand them can wait until the window is over.
struct Reading {
    ring: u64,
    engine: String,
    reader: RecordReader,
    next: u64,
    records: Vec<RecordWords>,
}

impl Reading {
    /// Maps a ring; `None` if its engine has ended.
    fn begin(socket: &Path, ring: RingView) -> Result<Option<Self>, TraceError> {
        let request = ControlRequest::TraceRing { ring: ring.ring };
        let (answer, memory) = call_for_memory(socket, &request)?;
        match (answer, memory) {
            (ControlAnswer::TraceRing, Some(memory)) => {
                let reader = RecordReader::map(memory.as_fd())?;
                Ok(Some(Reading { ring: ring.ring, engine: ring.engine, reader, next: ring.next, records: Vec::new() }))
            }
            (ControlAnswer::TraceRing, None) => Ok(None),
            (ControlAnswer::Refused(reason), _) => Err(TraceError::Refused(reason)),
            _ => Err(TraceError::Answer),
        }
    }

    /// Copies what has come. Returns how many records were lost, and how full the ring was.
    fn read(&mut self) -> (u64, f64) {
        let read = self.reader.read(self.next, &mut self.records);
        let filled = read.next.saturating_sub(self.next) as f64 / self.reader.capacity() as f64;
        self.next = read.next;
        (read.lost, filled)
    }
}

fn ask(socket: &Path, request: &ControlRequest) -> Result<ControlAnswer, TraceError> {
    match call(socket, request)? {
        ControlAnswer::Refused(reason) => Err(TraceError::Refused(reason)),
        answer => Ok(answer),
    }
}

/// Has the service that listens on `socket` record for so long, or until `is_over`; of one communicator, if `only` names it. Ends
/// sooner when there are more than [`RECORDS_MAX`] records, and says so.
///
/// # Errors
/// [`TraceError`].
pub fn trace(
    socket: &Path,
    duration: Duration,
    only: Option<u64>,
    is_over: &(dyn Fn() -> bool + Sync),
) -> Result<Window, TraceError> {
    trace_up_to(RECORDS_MAX, socket, duration, only, is_over)
}

/// As [`trace`], of so many records.
///
/// # Errors
/// [`TraceError`].
pub fn trace_up_to(
    records_max: usize,
    socket: &Path,
    duration: Duration,
    only: Option<u64>,
    is_over: &(dyn Fn() -> bool + Sync),
) -> Result<Window, TraceError> {
    let (mut comms, mut clock) = (BTreeMap::new(), None);
    let before = overview(socket)?;
    let host = note(&mut comms, &before);
    // An overview tells of so many at most.
    if let Some(only) = only.filter(|only| !comms.contains_key(only) && before.omitted.communicators == 0) {
        return Err(TraceError::NoCommunicator(only, host));
    }
    let request = ControlRequest::Trace { duration_ms: duration.as_millis() as u64 };
    let ControlAnswer::Tracing(begun) = ask(socket, &request)? else { return Err(TraceError::Answer) };
    let mut readings = Vec::new();
    for ring in begun.rings {
        readings.extend(Reading::begin(socket, ring)?);
    }
    let (mut lost, began) = (0, Instant::now());
    // How fast rings fill is known from the first look on.
    let (until, mut looked, mut every) = (began + duration, began, READ_EVERY_MIN);
    let is_cut = loop {
        let now = Instant::now();
        std::thread::sleep(every.min(until.saturating_duration_since(now)));
        // Once more after the end: what was recorded up to it.
        let is_over = is_over() || Instant::now() >= until;
        let mut fullest = 0.0;
        for reading in &mut readings {
            let (more, filled) = reading.read();
            (lost, fullest) = (lost + more, filled.max(fullest));
        }
        every = next_look(every, fullest);
        let count: usize = readings.iter().map(|reading| reading.records.len()).sum();
        let is_cut = count > records_max;
        let is_last = is_over || is_cut;
        if is_last || looked.elapsed() >= LOOK_EVERY {
            looked = Instant::now();
            let now = overview(socket)?;
            note(&mut comms, &now);
            clock = now.clock.filter(|clock| clock.at_ns >= begun.from_ns);
            lost += begin_new(socket, &mut readings)?;
        }
        if is_last {
            break is_cut;
        }
    };
    let understood =
        |reading: Reading| (reading.engine, reading.records.iter().filter_map(Record::from_words).collect::<Vec<_>>());
    let engines = readings.into_iter().map(understood).collect();
    let (from_ns, wall_ns) = (begun.from_ns, begun.wall_ns);
    let until_ns = from_ns + began.elapsed().min(duration).as_nanos() as u64;
    Ok(Window { host, from_ns, until_ns, wall_ns, clock, engines, comms, only, lost, is_cut })
}

/// Reads the rings of engines that have begun since the window did, from their first record on. Returns how many records were lost.
fn begin_new(socket: &Path, readings: &mut Vec<Reading>) -> Result<u64, TraceError> {
    let ControlAnswer::Tracing(now) = ask(socket, &ControlRequest::TraceRings)? else {
        return Err(TraceError::Answer);
    };
    let mut lost = 0;
    for ring in now.rings {
        if readings.iter().any(|reading| reading.ring == ring.ring) {
            continue;
        }
        if let Some(mut reading) = Reading::begin(socket, RingView { next: 0, ..ring })? {
            lost += reading.read().0;
            readings.push(reading);
        }
    }
    Ok(lost)
}

/// When to look again at rings of which the fullest one had filled so far: before half of it is new.
fn next_look(every: Duration, filled: f64) -> Duration {
    let wanted = every.mul_f64((0.25 / filled.max(1e-3)).min(2.0));
    wanted.clamp(READ_EVERY_MIN, READ_EVERY)
}

fn overview(socket: &Path) -> Result<Overview, TraceError> {
    match ask(socket, &ControlRequest::Overview)? {
        ControlAnswer::Overview(overview) => Ok(*overview),
        _ => Err(TraceError::Answer),
    }
}

/// Notes the communicators that there are. Returns the service's name.
fn note(comms: &mut BTreeMap<u64, CommName>, overview: &Overview) -> String {
    for comm in &overview.communicators {
        let ranks = comm.ranks.iter().map(|rank| rank.rank).collect();
        comms.insert(
            comm.communicator,
            CommName { tenant: comm.tenant.clone(), name: comm.name.clone(), job: comm.job.clone(), ranks },
        );
    }
    overview.host.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_read_before_they_are_full() {
        // Records a second, of a ring's capacity.
        for rate in [0.0, 0.1, 2.0, 12.0, 45.0] {
            let mut every = READ_EVERY;
            let looks = std::iter::repeat_with(|| {
                let filled = rate * every.as_secs_f64();
                every = next_look(every, filled);
                filled
            });
            let steady = looks.take(20).last().unwrap_or(1.0);
            assert!(steady < 0.3, "{rate}: {steady}");
        }
        assert_eq!(next_look(READ_EVERY_MIN, 0.0), 2 * READ_EVERY_MIN);
        assert_eq!(next_look(READ_EVERY, 0.0), READ_EVERY);
    }
}
