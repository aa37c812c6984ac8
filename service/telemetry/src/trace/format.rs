//! Checks trace files against the Trace Event Format, whatever engines may have recorded. Readers
//! drop in silence what is not of the format.

use std::collections::{BTreeMap, BTreeSet};

use mccs_ipc::types::CollectiveKind;
use proptest::prelude::*;
use serde_json::Map;

use super::*;

type Object = Map<String, Value>;

fn object(value: &Value) -> &Object {
    value.as_object().unwrap_or_else(|| panic!("no object: {value}"))
}

fn text<'a>(event: &'a Object, key: &str) -> &'a str {
    let text = event.get(key).and_then(Value::as_str);
    text.filter(|text| !text.is_empty()).unwrap_or_else(|| panic!("{key} is no text: {event:?}"))
}

fn id(event: &Object, key: &str) -> u64 {
    let id = event.get(key).and_then(Value::as_u64);
    id.filter(|id| *id <= u64::from(u32::MAX))
        .unwrap_or_else(|| panic!("{key} is no number of a process or thread: {event:?}"))
}

/// A time in microseconds.
fn time(event: &Object, key: &str) -> f64 {
    let time = event.get(key).and_then(Value::as_f64);
    time.filter(|time| time.is_finite() && *time >= 0.0).unwrap_or_else(|| panic!("{key} is no time: {event:?}"))
}

fn has_only(object: &Object, keys: &[&str]) {
    let unknown = object.keys().find(|key| !keys.contains(&key.as_str()));
    assert_eq!(unknown, None, "{object:?}");
}

/// The names of processes and tracks, each once, and a track's process.
#[derive(Default)]
struct Names {
    processes: BTreeMap<u64, String>,
    tracks: BTreeMap<u64, (u64, String)>,
    sorted: BTreeSet<(String, u64)>,
}

impl Names {
    fn note(&mut self, event: &Object) {
        has_only(event, &["ph", "name", "pid", "tid", "args"]);
        let (pid, tid, args) = (id(event, "pid"), id(event, "tid"), object(&event["args"]));
        match text(event, "name") {
            "process_name" => {
                let before = self.processes.insert(pid, text(args, "name").to_owned());
                assert_eq!(before, None, "process {pid} has two names");
            }
            "thread_name" => {
                // Some readers know threads by their number alone.
                let before = self.tracks.insert(tid, (pid, text(args, "name").to_owned()));
                assert_eq!(before, None, "track {tid} has two names");
            }
            kind @ ("process_sort_index" | "thread_sort_index") => {
                assert!(args["sort_index"].is_i64() || args["sort_index"].is_u64(), "{event:?}");
                let of = if kind == "process_sort_index" { pid } else { tid };
                assert!(self.sorted.insert((kind.to_owned(), of)), "{event:?} is there twice");
            }
            other => panic!("{other} names nothing"),
        }
        let arguments = if text(event, "name").ends_with("_name") { "name" } else { "sort_index" };
        has_only(args, &[arguments]);
    }
}

/// Panics at whatever is not as the format has it, or would not be shown.
pub(super) fn check(trace: &Value) {
    let trace = object(trace);
    has_only(trace, &["displayTimeUnit", "otherData", "traceEvents"]);
    assert!(["ms", "ns"].contains(&text(trace, "displayTimeUnit")));
    object(&trace["otherData"]);
    let mut names = Names::default();
    // By track, the times of its slices as they are written, and where the last event began.
    let mut slices: BTreeMap<u64, Vec<(f64, f64)>> = BTreeMap::new();
    let mut last: BTreeMap<u64, f64> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().expect("events").iter().map(object) {
        let kind = text(event, "ph");
        if kind == "M" {
            assert!(!last.contains_key(&id(event, "tid")), "names come first");
            names.note(event);
            continue;
        }
        text(event, "name");
        let (pid, tid, ts) = (id(event, "pid"), id(event, "tid"), time(event, "ts"));
        assert_eq!(names.tracks.get(&tid).map(|(pid, _)| *pid), Some(pid), "a track without a name: {event:?}");
        assert!(names.processes.contains_key(&pid), "a process without a name: {event:?}");
        assert!(last.insert(tid, ts).is_none_or(|before| before <= ts), "not in order: {event:?}");
        object(&event["args"]);
        match kind {
            "X" => {
                has_only(event, &["ph", "name", "pid", "tid", "ts", "dur", "args"]);
                slices.entry(tid).or_default().push((ts, time(event, "dur")));
            }
            "i" => {
                has_only(event, &["ph", "s", "name", "pid", "tid", "ts", "args"]);
                assert!(["g", "p", "t"].contains(&text(event, "s")), "{event:?}");
            }
            other => panic!("no event of ours is {other:?}"),
        }
    }
    assert!(names.tracks.keys().all(|tid| !names.processes.contains_key(tid)), "a track is a process's main thread");
    let used: BTreeSet<_> = last.keys().collect();
    assert_eq!(names.tracks.keys().collect::<BTreeSet<_>>(), used, "a track that is empty");
    // Whoever reads this has nanoseconds, cut or rounded, and drops what overlaps in them.
    for to_ns in [|us: f64| (us * 1e3) as u64, |us: f64| (us * 1e3).round() as u64] {
        for (track, slices) in &slices {
            for pair in slices.windows(2) {
                let ends = to_ns(pair[0].0) + to_ns(pair[0].1);
                assert!(ends <= to_ns(pair[1].0), "track {track}: {pair:?} overlap");
            }
        }
    }
}

/// Some moment in and around the window, to the nanosecond.
fn moment() -> impl Strategy<Value = u64> {
    prop_oneof![0..2_000_u64, 1_000_000_000..1_000_003_000_u64, any::<u32>().prop_map(u64::from)]
}

fn records() -> impl Strategy<Value = Vec<Record>> {
    let span = || (moment(), moment()).prop_map(|(a, b)| (a.min(b), a.max(b)));
    let (comm, rank, job) = (|| 1..3_u64, || 0..3_u32, || 0..6_u64);
    let kind = CollectiveKind::AllReduce;
    let record = prop_oneof![
        (moment(), comm(), rank(), 0..4_u64).prop_map(|(at_ns, comm, rank, seq)| Record::Enqueued {
            at_ns,
            comm,
            rank,
            seq
        }),
        (moment(), comm(), rank(), 0..4_u64).prop_map(|(at_ns, comm, rank, seq)| Record::Arrived {
            at_ns,
            comm,
            rank,
            seq
        }),
        (moment(), comm(), 0..4_u64, job()).prop_map(move |(at_ns, comm, seq, job)| Record::Started {
            at_ns,
            comm,
            seq,
            epoch: seq / 2,
            job,
            kind,
            bytes: 7
        }),
        (moment(), comm(), job()).prop_map(|(at_ns, comm, job)| Record::PairStarted {
            at_ns,
            comm,
            job,
            from: 0,
            to: 1,
            bytes: 7
        }),
        (moment(), job(), any::<bool>()).prop_map(|(at_ns, job, is_failed)| Record::Ended { at_ns, job, is_failed }),
        (span(), job()).prop_map(|((since_ns, at_ns), job)| Record::Channel { since_ns, at_ns, job, channel: 1 }),
        (span(), job()).prop_map(|((since_ns, at_ns), job)| Record::Piece { since_ns, at_ns, job }),
        (span(), job(), any::<bool>()).prop_map(|((since_ns, at_ns), job, sends)| {
            Record::Chunk { since_ns, at_ns, job, channel: LinkKey::PAIRS, from: 0, to: 2, sends, bytes: 512 }
        }),
    ];
    proptest::collection::vec(record, 0..60)
}

proptest! {
    #[test]
    fn whatever_was_recorded_makes_a_file_that_is_shown_whole(proxy in records(), transport in records()) {
        let names = |rank| CommName { tenant: "\"a\" <b>\n".into(), name: "\\\"n".into(), job: "j\n\"".into(), ranks: BTreeSet::from([rank]) };
        let window = Window {
            host: "h0".into(),
            from_ns: 1_000,
            until_ns: 1_000_002_001,
            wall_ns: u64::MAX,
            clock: None,
            engines: vec![("proxy".into(), proxy), ("transport 0".into(), transport)],
            comms: BTreeMap::from([(1, names(0))]),
            only: None,
            lost: 0,
            is_cut: false,
        };
        let mut text = Vec::new();
        write(&window, &mut text).unwrap();
        check(&serde_json::from_slice(&text).unwrap());
    }
}

#[test]
fn nanoseconds_are_found_again_in_microseconds() {
    let to_ns = |us: f64| (us * 1e3) as u64;
    let is_found = |ns: u64| [microseconds(ns), microseconds(ns).next_up()].map(to_ns) == [ns; 2];
    let is_found_below = |ns: u64| ns.is_multiple_of(1000) || to_ns(microseconds(ns).next_down()) == ns;
    let wrong =
        (0..3_000_000_u64).chain(600_000_000_000..600_001_000_000).find(|ns| !(is_found(*ns) && is_found_below(*ns)));
    assert_eq!(wrong, None);
}
