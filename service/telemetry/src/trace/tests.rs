use mccs_ipc::types::CollectiveKind;

use super::*;

const MS: u64 = 1_000_000;

/// Two collectives of two ranks, of which the second has not ended, on one channel with a link to another host; one more rank has not
/// come to a third; and another tenant's.
pub(super) fn window() -> Window {
    let kind = CollectiveKind::AllReduce;
    let came = |at_ns, comm, rank, seq| {
        [Record::Enqueued { at_ns, comm, rank, seq }, Record::Arrived { at_ns: at_ns + 1000, comm, rank, seq }]
    };
    let mut proxy = Vec::new();
    proxy.extend(came(11 * MS, 5, 0, 0));
    proxy.extend(came(12 * MS, 5, 1, 0));
    proxy.push(Record::Started { at_ns: 13 * MS, comm: 5, seq: 0, epoch: 0, job: 100, kind, bytes: 4096 });
    proxy.extend(came(14 * MS, 5, 0, 1));
    proxy.push(Record::Ended { at_ns: 20 * MS, job: 100, is_failed: false });
    proxy.extend(came(20 * MS, 5, 1, 1));
    proxy.push(Record::Started { at_ns: 21 * MS, comm: 5, seq: 1, epoch: 2, job: 101, kind, bytes: 4096 });
    proxy.extend(came(22 * MS, 5, 0, 2));
    let barrier = CollectiveKind::Barrier;
    proxy.push(Record::Started { at_ns: 15 * MS, comm: 6, seq: 9, epoch: 0, job: 200, kind: barrier, bytes: 0 });
    proxy.push(Record::Ended { at_ns: 16 * MS, job: 200, is_failed: true });
    proxy.push(Record::PairStarted { at_ns: 15 * MS, comm: 5, job: 300, from: 0, to: 1, bytes: 8 });
    proxy.push(Record::Ended { at_ns: 17 * MS, job: 300, is_failed: false });
    // Begun before the window: nobody knows what it was.
    proxy.push(Record::Ended { at_ns: 11 * MS, job: 99, is_failed: false });
    let chunk = |since_ns, at_ns, sends| Record::Chunk {
        since_ns,
        at_ns,
        job: 100,
        channel: 1,
        from: 0,
        to: 2,
        sends,
        bytes: 512,
    };
    let transport = vec![
        Record::Piece { since_ns: 13 * MS, at_ns: 14 * MS, job: 100 },
        chunk(13 * MS, 15 * MS, true),
        chunk(13 * MS + 1, 16 * MS, true),
        chunk(0, 17 * MS, false),
        Record::Channel { since_ns: 13 * MS, at_ns: 19 * MS, job: 100, channel: 1 },
        Record::Channel { since_ns: 1, at_ns: 12 * MS, job: 99, channel: 1 },
    ];
    let name = |tenant: &str, ranks: &[u32]| CommName {
        tenant: tenant.into(),
        name: String::new(),
        job: String::new(),
        ranks: ranks.iter().copied().collect(),
    };
    Window {
        host: "h0".into(),
        from_ns: 10 * MS,
        until_ns: 30 * MS,
        wall_ns: 7,
        clock: None,
        engines: vec![("proxy host".into(), proxy), ("transport 0".into(), transport)],
        comms: BTreeMap::from([(5, name("blue", &[0, 1])), (6, name("red", &[0]))]),
        only: None,
        lost: 3,
        is_cut: false,
    }
}

fn json_of(window: &Window) -> Value {
    let mut text = Vec::new();
    write(window, &mut text).unwrap();
    let trace = serde_json::from_slice(&text).unwrap();
    super::format::check(&trace);
    trace
}

/// Events of a track that is called so, without those that name it.
fn track(trace: &Value, name: &str) -> Vec<(String, f64, Option<f64>, Value)> {
    let events = trace["traceEvents"].as_array().unwrap();
    let is_name = |event: &&Value| event["name"] == "thread_name" && event["args"]["name"] == name;
    let named = events.iter().find(is_name).unwrap_or_else(|| panic!("no track {name}"));
    let here = |event: &&Value| event["ph"] != "M" && (&event["pid"], &event["tid"]) == (&named["pid"], &named["tid"]);
    let told = |event: &Value| {
        let name = event["name"].as_str().unwrap().to_owned();
        (name, event["ts"].as_f64().unwrap(), event["dur"].as_f64(), event["args"].clone())
    };
    events.iter().filter(here).map(told).collect()
}

fn slices(trace: &Value, name: &str) -> Vec<(String, f64, f64)> {
    let of = |(name, ts, dur, _): (String, f64, Option<f64>, Value)| Some((name, ts, dur?));
    track(trace, name).into_iter().filter_map(of).collect()
}

#[test]
fn ranks_wait_and_run() {
    let trace = json_of(&window());
    let slice = |name: &str, ts: f64, dur: f64| (name.to_owned(), ts, dur);
    assert_eq!(
        slices(&trace, "comm 5 rank 0"),
        [
            slice("wait", 1001.0, 1999.0),
            slice("all_reduce", 3000.0, 7000.0),
            // It came while the first ran: its waiting begins when that has ended.
            slice("wait", 10_000.0, 1000.0),
            slice("all_reduce", 11_000.0, 9000.0),
            slice("wait", 20_000.0, 0.0),
        ]
    );
    let first = &track(&trace, "comm 5 rank 1");
    assert_eq!(first.iter().filter(|event| event.0 == "enqueued").count(), 2);
    let runs: Vec<_> = first.iter().filter(|event| event.0 == "all_reduce").map(|event| &event.3).collect();
    assert_eq!((&runs[0]["seq"], &runs[0]["bytes"], &runs[0]["unfinished"]), (&0.into(), &4096.into(), &Value::Null));
    assert_eq!((&runs[0]["enqueued_us"], &runs[0]["arrived_us"]), (&2000.0.into(), &2001.0.into()));
    assert_eq!((&runs[1]["seq"], &runs[1]["unfinished"]), (&1.into(), &true.into()));
    assert_eq!(runs.iter().map(|run| &run["epoch"]).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(track(&trace, "comm 6 rank 0")[0].3["failed"], true);
    assert_eq!(slices(&trace, "comm 5 send/recv 0 -> 1"), [slice("send/recv", 5000.0, 2000.0)]);
}

#[test]
fn what_gpus_do_of_themselves_has_tracks_of_its_own() {
    let (mut window, kind) = (window(), CollectiveKind::AllGather);
    let on_gpu = |comm, since_ns, at_ns| Record::OnGpu {
        since_ns,
        at_ns,
        comm,
        rank: 1,
        seq: 4,
        kind,
        bytes: 64,
        error_ns: 12_500,
    };
    window
        .engines
        .push(("gpus".into(), vec![on_gpu(5, 11 * MS, 12 * MS), on_gpu(5, 12 * MS, 14 * MS), on_gpu(6, 1, 2)]));
    window.only = Some(5);
    let trace = json_of(&window);
    let slice = |ts: f64, dur: f64| ("all_gather".to_owned(), ts, dur);
    assert_eq!(slices(&trace, "comm 5 rank 1, its GPU"), [slice(1000.0, 1000.0), slice(2000.0, 2000.0)]);
    let args = &track(&trace, "comm 5 rank 1, its GPU")[0].3;
    assert_eq!((&args["seq"], &args["bytes"], &args["clock_error_us"]), (&4.into(), &64.into(), &12.5.into()));
    assert!(!trace.to_string().contains("comm 6"));
}

#[test]
fn channels_and_messages_have_tracks_of_their_own() {
    let trace = json_of(&window());
    let slice = |name: &str, ts: f64, dur: f64| (name.to_owned(), ts, dur);
    assert_eq!(slices(&trace, "comm 5 channel 1"), [slice("all_reduce", 3000.0, 6000.0)]);
    assert_eq!(
        slices(&trace, "comm 5 channel 1 sends 0 -> 2"),
        [slice("send", 3000.0, 2000.0), slice("send", 5000.0, 1000.0)]
    );
    // Asked for before the window.
    assert_eq!(slices(&trace, "comm 5 channel 1 receives 0 -> 2"), [slice("receive", 0.0, 7000.0)]);
    assert_eq!(slices(&trace, "transport 0"), [slice("piece of all_reduce", 3000.0, 1000.0)]);
    let sent = &track(&trace, "comm 5 channel 1 sends 0 -> 2")[1].3;
    assert_eq!((&sent["peer"], &sent["bytes"], &sent["engine"]), (&2.into(), &512.into(), &"transport 0".into()));
}

#[test]
fn slices_of_a_track_do_not_overlap_and_everything_has_a_name() {
    let trace = json_of(&window());
    assert_eq!(trace["otherData"]["records_lost"], 3);
    for (lost, is_cut) in [(0, false), (0, true), (1, false)] {
        let trace = json_of(&Window { lost, is_cut, ..window() });
        assert_eq!(trace["otherData"]["complete"], lost == 0 && !is_cut);
    }
    let events = trace["traceEvents"].as_array().unwrap();
    let mut ends: BTreeMap<String, f64> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let place = format!("{} {}", event["pid"], event["tid"]);
        let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        assert!(dur >= 0.0 && ts + dur <= 20_000.0, "{event}");
        assert!(ends.insert(place, ts + dur).is_none_or(|end| end <= ts), "{event}");
    }
    let names = |kind: &str| {
        events
            .iter()
            .filter(|event| event["name"] == kind)
            .map(|event| event["args"]["name"].as_str().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(names("process_name"), ["h0 / blue", "h0 / red", "h0 / engines"]);
    let known: BTreeSet<_> =
        events.iter().filter(|e| e["name"] == "thread_name").map(|e| e["tid"].to_string()).collect();
    assert!(events.iter().filter(|event| event["ph"] != "M").all(|event| known.contains(&event["tid"].to_string())));
}

#[test]
fn one_communicator_can_be_had_alone() {
    let trace = json_of(&Window { only: Some(6), ..window() });
    let text = trace.to_string();
    assert!(text.contains("comm 6 rank 0") && !text.contains("comm 5"), "{text}");
    let nothing = json_of(&Window { only: Some(7), ..window() });
    assert_eq!(nothing["traceEvents"].as_array().unwrap().len(), 0);
}
