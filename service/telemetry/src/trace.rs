//! Writes traces: a window of operations in the Trace Event Format, for Perfetto and
//! chrome://tracing. Pure: records go in, JSON comes out.
//!
//! A tenant is a process there, and so is the service with its engines. Tracks of a tenant's communicator: each rank (waiting for the
//! others, then the collective), what its GPU does of itself (when, as closely as its clock is known), each channel, each link to or from another host with its messages. Slices of a track never
//! overlap: a message that was posted while an earlier one was on its way begins when that has ended, and says when it was posted.
//! Sends and receives have a track for each pair of ranks, collectives that have not ended end with the window, and say so.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::recorder::Record;
use mccs_model::link::LinkKey;

/// Names of a communicator besides its records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommName {
    /// Its owner.
    pub tenant: String,
    /// Its tenant's name for it; empty if it has none.
    pub name: String,
    /// The job that it is part of; empty where that is not known.
    pub job: String,
    /// Ranks of this host.
    pub ranks: BTreeSet<u32>,
}

/// Time of the cluster's common clock at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockView {
    /// When, as records have time.
    pub at_ns: u64,
    /// Its time.
    pub common_ns: u64,
    /// By how much that may be wrong.
    pub error_ns: u64,
}

/// Records of a window.
#[derive(Debug, Clone, Default)]
pub struct Window {
    /// The service's name.
    pub host: String,
    /// When it began, as records have time.
    pub from_ns: u64,
    /// When it ended.
    pub until_ns: u64,
    /// Wall-clock time when it began, since 1970.
    pub wall_ns: u64,
    /// The common clock within the window, if the host has known it then.
    pub clock: Option<ClockView>,
    /// Engines' names and records, in their order.
    pub engines: Vec<(String, Vec<Record>)>,
    /// Communicators by number.
    pub comms: BTreeMap<u64, CommName>,
    /// The only communicator that is wanted, if one is.
    pub only: Option<u64>,
    /// Records that were written over before they were read.
    pub lost: u64,
    /// Whether it ended before its time, since there were too many records.
    pub is_cut: bool,
}

/// Track of a slice; ordered as it is shown.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Track {
    Rank { comm: u64, rank: u32 },
    Gpu { comm: u64, rank: u32 },
    Channel { comm: u64, channel: u16 },
    Flow { comm: u64, channel: u16, from: u32, to: u32, sends: bool },
    Pair { comm: u64, from: u32, to: u32 },
    Engine { engine: usize },
}

/// The process of the service's own tracks comes after all tenants.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Process {
    Tenant(String),
    Engines,
}

struct Event {
    place: (Process, Track),
    name: String,
    from_ns: u64,
    /// `None`: a moment.
    until_ns: Option<u64>,
    args: Value,
}

/// A job: a collective, or a send or receive.
struct Job {
    comm: u64,
    name: String,
    /// Its place and the number of its strategy; `None` of a pair.
    seq: Option<u64>,
    epoch: Option<u64>,
    /// `None` of a collective.
    pair: Option<Pair>,
    bytes: u64,
    started_ns: u64,
    ended: Option<(u64, bool)>,
}

/// A communicator's operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    comm: u64,
    seq: u64,
}

/// The ranks of a pair.
#[derive(Debug, Clone, Copy)]
struct Pair {
    from: u32,
    to: u32,
}

/// When ranks came to a collective.
#[derive(Default, Clone, Copy)]
struct Came {
    enqueued_ns: Option<u64>,
    arrived_ns: Option<u64>,
}

/// Records put in order.
#[derive(Default)]
struct Told {
    jobs: BTreeMap<u64, Job>,
    came: BTreeMap<Place, BTreeMap<u32, Came>>,
    ranks: BTreeMap<u64, BTreeSet<u32>>,
    tags: BTreeMap<Place, u64>,
}

impl Window {
    fn is_wanted(&self, comm: u64) -> bool {
        self.only.is_none_or(|only| only == comm)
    }

    fn process(&self, comm: u64) -> Process {
        let tenant = self.comms.get(&comm).map(|name| name.tenant.clone());
        Process::Tenant(tenant.unwrap_or_else(|| "tenant unknown".into()))
    }

    fn told(&self) -> Told {
        let mut told = Told::default();
        for (comm, name) in &self.comms {
            told.ranks.insert(*comm, name.ranks.clone());
        }
        let records = || self.engines.iter().flat_map(|(_, records)| records);
        for record in records() {
            match *record {
                Record::Enqueued { at_ns, comm, rank, seq } if self.is_wanted(comm) => {
                    told.came(comm, seq, rank).enqueued_ns = Some(at_ns);
                }
                Record::Arrived { at_ns, comm, rank, seq } if self.is_wanted(comm) => {
                    told.came(comm, seq, rank).arrived_ns = Some(at_ns);
                }
                Record::Started { at_ns, comm, seq, epoch, job, kind, bytes } if self.is_wanted(comm) => {
                    let (name, pair, seq, epoch) = (kind.to_string(), None, Some(seq), Some(epoch));
                    let started = Job { comm, name, seq, epoch, pair, bytes, started_ns: at_ns, ended: None };
                    told.jobs.insert(job, started);
                }
                Record::PairStarted { at_ns, comm, job, from, to, bytes } if self.is_wanted(comm) => {
                    let (name, pair, seq, epoch) = (String::from("send/recv"), Some(Pair { from, to }), None, None);
                    let started = Job { comm, name, seq, epoch, pair, bytes, started_ns: at_ns, ended: None };
                    told.jobs.insert(job, started);
                }
                Record::Tagged { comm, seq, tag, .. } => _ = told.tags.insert(Place { comm, seq }, tag),
                _ => {}
            }
        }
        for record in records() {
            if let Record::Ended { at_ns, job, is_failed } = *record
                && let Some(job) = told.jobs.get_mut(&job)
            {
                job.ended = Some((at_ns, is_failed));
            }
        }
        told
    }
}

impl Told {
    /// Adds the tag of a collective to what is said of it, if it has one.
    fn tag(&self, args: &mut Value, comm: u64, seq: u64) {
        if let Some(tag) = self.tags.get(&Place { comm, seq }) {
            args["user_tag"] = (*tag).into();
        }
    }

    fn came(&mut self, comm: u64, seq: u64, rank: u32) -> &mut Came {
        self.ranks.entry(comm).or_default().insert(rank);
        self.came.entry(Place { comm, seq }).or_default().entry(rank).or_default()
    }
}

/// Writes the window as one JSON object.
///
/// # Errors
/// The error of `out`.
pub fn write(window: &Window, out: &mut impl Write) -> std::io::Result<()> {
    let events = events(window);
    let places: BTreeSet<&(Process, Track)> = events.iter().map(|event| &event.place).collect();
    let processes: BTreeSet<&Process> = places.iter().map(|(process, _)| process).collect();
    let pids: BTreeMap<&Process, usize> = processes.iter().copied().zip(1..).collect();
    // A thread with its process's number is the main one: none of ours is.
    let tids: BTreeMap<&(Process, Track), usize> = places.iter().copied().zip(pids.len() + 1..).collect();
    let Window { host, wall_ns, lost, is_cut, .. } = window;
    let is_complete = *lost == 0 && !is_cut;
    let mut about = json!({ "host": host, "begin_unix_ns": wall_ns, "records_lost": lost, "complete": is_complete });
    if let Some(ClockView { at_ns, common_ns, error_ns }) = window.clock {
        let begin_ns = (common_ns + window.from_ns).saturating_sub(at_ns);
        about["clock"] = json!({ "begin_ns": begin_ns, "error_ns": error_ns });
    }
    write!(out, "{{\"displayTimeUnit\":\"ns\",\"otherData\":{about},\"traceEvents\":[")?;
    let mut separator = "\n";
    let mut line = |value: &Value, out: &mut dyn Write| {
        let written = write!(out, "{separator}{value}");
        separator = ",\n";
        written
    };
    for (process, pid) in &pids {
        let name = match process {
            Process::Tenant(tenant) => format!("{} / {tenant}", window.host),
            Process::Engines => format!("{} / engines", window.host),
        };
        line(&json!({ "ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": { "name": name } }), out)?;
        line(
            &json!({ "ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": { "sort_index": pid } }),
            out,
        )?;
    }
    for ((process, track), tid) in &tids {
        let pid = pids.get(process);
        let name = track_name(window, track);
        line(&json!({ "ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": { "name": name } }), out)?;
        line(
            &json!({ "ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": { "sort_index": tid } }),
            out,
        )?;
    }
    for event in &events {
        let (pid, tid) = (pids.get(&event.place.0), tids.get(&event.place));
        let ts = microseconds(event.from_ns.saturating_sub(window.from_ns));
        let Event { name, args, .. } = event;
        let value = match event.until_ns {
            Some(until_ns) => {
                let dur = microseconds(until_ns.saturating_sub(event.from_ns));
                json!({ "ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args })
            }
            None => json!({ "ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid, "ts": ts, "args": args }),
        };
        line(&value, out)?;
    }
    out.write_all(b"\n]}\n")
}

/// The format's unit. A reader that cuts it to nanoseconds is to find the same again, also if it reads decimals a little wrong: slices that it
/// took for overlapping, be it by one of them, it would drop. So those that are no whole number are a hundredth of a nanosecond more.
fn microseconds(ns: u64) -> f64 {
    if ns.is_multiple_of(1000) { (ns / 1000) as f64 } else { (ns as f64 + 0.01) / 1e3 }
}

fn track_name(window: &Window, track: &Track) -> String {
    let channel_name = |channel: &u16| match *channel {
        LinkKey::PAIRS => "send/recv".into(),
        channel => format!("channel {channel}"),
    };
    let titled = |comm: &u64| match window.comms.get(comm) {
        Some(known) if !known.name.is_empty() && !known.job.is_empty() => {
            format!("comm {comm} ({}, job {})", known.name, known.job)
        }
        Some(known) if !known.name.is_empty() => format!("comm {comm} ({})", known.name),
        Some(known) if !known.job.is_empty() => format!("comm {comm} (job {})", known.job),
        _ => format!("comm {comm}"),
    };
    match track {
        Track::Rank { comm, rank } => format!("{} rank {rank}", titled(comm)),
        Track::Gpu { comm, rank } => format!("{} rank {rank}, its GPU", titled(comm)),
        Track::Channel { comm, channel } => format!("{} {}", titled(comm), channel_name(channel)),
        Track::Flow { comm, channel, from, to, sends } => {
            let what = if *sends { "sends" } else { "receives" };
            format!("{} {} {what} {from} -> {to}", titled(comm), channel_name(channel))
        }
        Track::Pair { comm, from, to } => format!("{} send/recv {from} -> {to}", titled(comm)),
        Track::Engine { engine } => window.engines.get(*engine).map_or_else(String::new, |(name, _)| name.clone()),
    }
}

/// All that is drawn, each track's slices in their order.
fn events(window: &Window) -> Vec<Event> {
    let told = window.told();
    let mut events = Vec::new();
    collectives(window, &told, &mut events);
    for (engine, (name, records)) in window.engines.iter().enumerate() {
        let of = |job: u64| told.jobs.get(&job);
        for record in records {
            match *record {
                Record::Channel { since_ns, at_ns, job, channel } => events.extend(of(job).map(|job| Event {
                    place: (window.process(job.comm), Track::Channel { comm: job.comm, channel }),
                    name: job.name.clone(),
                    from_ns: since_ns,
                    until_ns: Some(at_ns),
                    args: json!({ "seq": job.seq, "engine": name }),
                })),
                Record::Piece { since_ns, at_ns, job } => events.extend(of(job).map(|job| Event {
                    place: (Process::Engines, Track::Engine { engine }),
                    name: format!("piece of {}", job.name),
                    from_ns: since_ns,
                    until_ns: Some(at_ns),
                    args: json!({ "communicator": job.comm, "seq": job.seq }),
                })),
                Record::Chunk { since_ns, at_ns, job, channel, from, to, sends, bytes } => {
                    events.extend(of(job).map(|job| Event {
                        place: (window.process(job.comm), Track::Flow { comm: job.comm, channel, from, to, sends }),
                        name: if sends { "send".into() } else { "receive".into() },
                        from_ns: since_ns,
                        until_ns: Some(at_ns),
                        args: json!({
                            "seq": job.seq,
                            "bytes": bytes,
                            "peer": if sends { to } else { from },
                            "posted_us": since_ns.saturating_sub(window.from_ns) as f64 / 1e3,
                            "engine": name,
                        }),
                    }));
                }
                Record::OnGpu { since_ns, at_ns, comm, rank, seq, kind, bytes, error_ns } if window.is_wanted(comm) => {
                    let error_us = error_ns as f64 / 1e3;
                    let mut args =
                        json!({ "communicator": comm, "seq": seq, "bytes": bytes, "clock_error_us": error_us });
                    told.tag(&mut args, comm, seq);
                    events.push(Event {
                        place: (window.process(comm), Track::Gpu { comm, rank }),
                        name: kind.to_string(),
                        from_ns: since_ns,
                        until_ns: Some(at_ns),
                        args,
                    });
                }
                _ => {}
            }
        }
    }
    for event in &mut events {
        // A slice that began before the window, and was recorded late, begins with it.
        event.from_ns = event.from_ns.max(window.from_ns);
        event.until_ns = event.until_ns.map(|until_ns| until_ns.max(event.from_ns));
    }
    in_line(&mut events);
    events
}

/// Collectives on the tracks of their ranks, sends and receives on those of their pairs.
fn collectives(window: &Window, told: &Told, events: &mut Vec<Event>) {
    let us = |ns: u64| ns.saturating_sub(window.from_ns) as f64 / 1e3;
    let mut started = BTreeSet::new();
    for job in told.jobs.values() {
        let (until_ns, is_failed) = job.ended.unwrap_or((window.until_ns.max(job.started_ns), false));
        let process = window.process(job.comm);
        let mut args = json!({ "communicator": job.comm, "bytes": job.bytes });
        if job.ended.is_none() {
            args["unfinished"] = true.into();
        }
        if is_failed {
            args["failed"] = true.into();
        }
        let slice = |track, args| Event {
            place: (process.clone(), track),
            name: job.name.clone(),
            from_ns: job.started_ns,
            until_ns: Some(until_ns),
            args,
        };
        if let Some(Pair { from, to }) = job.pair {
            events.push(slice(Track::Pair { comm: job.comm, from, to }, args));
            continue;
        }
        let Some(seq) = job.seq else { continue };
        started.insert(Place { comm: job.comm, seq });
        args["seq"] = seq.into();
        args["epoch"] = job.epoch.into();
        told.tag(&mut args, job.comm, seq);
        for rank in told.ranks.get(&job.comm).into_iter().flatten() {
            let came = told
                .came
                .get(&Place { comm: job.comm, seq })
                .and_then(|came| came.get(rank))
                .copied()
                .unwrap_or_default();
            let mut args = args.clone();
            for (name, at) in [("enqueued_us", came.enqueued_ns), ("arrived_us", came.arrived_ns)] {
                if let Some(at) = at {
                    args[name] = us(at).into();
                }
            }
            let track = Track::Rank { comm: job.comm, rank: *rank };
            events.extend(waiting(window, &process, &track, seq, came, Some(job.started_ns)));
            events.push(slice(track, args));
        }
    }
    // Ranks that wait for one that has not come.
    for (Place { comm, seq }, came) in told.came.iter().filter(|(place, _)| !started.contains(place)) {
        for (rank, came) in came {
            let track = Track::Rank { comm: *comm, rank: *rank };
            events.extend(waiting(window, &window.process(*comm), &track, *seq, *came, None));
        }
    }
}

/// When a rank has called, and how long it has waited for the others.
fn waiting(
    window: &Window,
    process: &Process,
    track: &Track,
    seq: u64,
    came: Came,
    started_ns: Option<u64>,
) -> impl Iterator<Item = Event> + use<> {
    let enqueued = came.enqueued_ns.map(|at_ns| Event {
        place: (process.clone(), track.clone()),
        name: "enqueued".into(),
        from_ns: at_ns,
        until_ns: None,
        args: json!({ "seq": seq }),
    });
    let wait = came.arrived_ns.map(|at_ns| Event {
        place: (process.clone(), track.clone()),
        name: "wait".into(),
        from_ns: at_ns,
        until_ns: Some(started_ns.unwrap_or(window.until_ns).max(at_ns)),
        args: match started_ns {
            Some(_) => json!({ "seq": seq }),
            None => json!({ "seq": seq, "unfinished": true }),
        },
    });
    enqueued.into_iter().chain(wait)
}

/// Puts each track's slices one behind the other: where they overlap, the later one begins when the earlier one has ended. Events are
/// then in the order in which they begin.
fn in_line(events: &mut [Event]) {
    events.sort_by(|a, b| {
        let end = |event: &Event| event.until_ns.unwrap_or(event.from_ns);
        (&a.place, end(a), a.from_ns).cmp(&(&b.place, end(b), b.from_ns))
    });
    let mut before: Option<((Process, Track), u64)> = None;
    for event in events.iter_mut() {
        let Some(until_ns) = event.until_ns else { continue };
        if let Some((place, ended_ns)) = &before
            && *place == event.place
        {
            event.from_ns = event.from_ns.max(*ended_ns).min(until_ns);
        }
        before = Some((event.place.clone(), until_ns));
    }
    events.sort_by(|a, b| (&a.place, a.from_ns).cmp(&(&b.place, b.from_ns)));
}

pub mod merge;

#[cfg(test)]
mod format;
#[cfg(test)]
mod tests;
