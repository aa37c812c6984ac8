//! The asking side of a trace: has a service record for a while, and reads meanwhile, so that a window may be longer than what
//! rings hold.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use super::overview::Overview;
use super::{ControlAnswer, ControlError, ControlRequest, call};
use crate::telemetry::recorder::{READ_MAX, Record};
use crate::telemetry::trace::{CommName, Window};

/// Time between two looks at the rings: they hold more than what is recorded meanwhile.
const READ_EVERY: Duration = Duration::from_millis(100);
/// Records that are kept, at most, of all engines together: half a gigabyte of JSON.
const RECORDS_MAX: usize = 4 << 20;

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The service could not be asked.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// It does not want to.
    #[error("refused: {0}")]
    Refused(String),
    /// It is of another version.
    #[error("the service answered something else")]
    Answer,
}

/// An engine's records so far.
struct Reading {
    ring: u64,
    engine: String,
    next: u64,
    records: Vec<Record>,
}

fn ask(socket: &Path, request: &ControlRequest) -> Result<ControlAnswer, TraceError> {
    match call(socket, request)? {
        ControlAnswer::Refused(reason) => Err(TraceError::Refused(reason)),
        answer => Ok(answer),
    }
}

/// Has the service that listens on `socket` record for so long, or until `is_over`; of one communicator, if `only` names it.
///
/// # Errors
/// [`TraceError`].
pub fn trace(
    socket: &Path,
    duration: Duration,
    only: Option<u64>,
    is_over: &(dyn Fn() -> bool + Sync),
) -> Result<Window, TraceError> {
    let mut comms = BTreeMap::new();
    let host = note(&mut comms, &overview(socket)?);
    let request = ControlRequest::Trace { duration_ms: duration.as_millis() as u64 };
    let ControlAnswer::Tracing(begun) = ask(socket, &request)? else { return Err(TraceError::Answer) };
    let reading = |ring: crate::telemetry::recorder::RingView| Reading {
        ring: ring.ring,
        engine: ring.engine,
        next: ring.next,
        records: Vec::new(),
    };
    let mut readings: Vec<_> = begun.rings.into_iter().map(reading).collect();
    let (mut lost, began) = (0, Instant::now());
    let until = began + duration;
    loop {
        let now = Instant::now();
        std::thread::sleep(READ_EVERY.min(until.saturating_duration_since(now)));
        // Once more after the end: what was recorded up to it.
        let is_last = is_over() || Instant::now() >= until;
        for reading in &mut readings {
            lost += read(socket, reading)?;
        }
        note(&mut comms, &overview(socket)?);
        let count: usize = readings.iter().map(|reading| reading.records.len()).sum();
        if is_last || count > RECORDS_MAX {
            break;
        }
    }
    let engines = readings.into_iter().map(|reading| (reading.engine, reading.records)).collect();
    let (from_ns, wall_ns) = (begun.from_ns, begun.wall_ns);
    let until_ns = from_ns + began.elapsed().min(duration).as_nanos() as u64;
    Ok(Window { host, from_ns, until_ns, wall_ns, engines, comms, only, lost })
}

/// Reads a ring up to where it is. Returns how many records were lost.
fn read(socket: &Path, reading: &mut Reading) -> Result<u64, TraceError> {
    let mut lost = 0;
    loop {
        let request = ControlRequest::TraceRead { ring: reading.ring, from: reading.next };
        let ControlAnswer::TraceRecords(read) = ask(socket, &request)? else { return Err(TraceError::Answer) };
        let advanced = read.next.saturating_sub(reading.next);
        lost += read.lost;
        reading.next = read.next;
        reading.records.extend(read.records.iter().filter_map(Record::from_words));
        // Less than there may be at a time: that was all.
        if advanced < READ_MAX as u64 {
            return Ok(lost);
        }
    }
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
        comms.insert(comm.communicator, CommName { tenant: comm.tenant.clone(), ranks });
    }
    overview.host.clone()
}
