//! Stuck and failed communicators: of a host, and of a cluster.

use std::process::Output;
use std::time::Duration;

use mccs::{Client, Communicator, DataType, RedOp, ReduceOperator, Stream};

use super::fixture::{Fixture, JOB};
use super::programs::mccsctl;

/// From any host: what all have, what is stuck, and what became of a communicator after it failed.
#[test]
fn the_cluster_is_seen_from_any_host_also_what_has_failed() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let (first, second) = fixture.join_across();
    let on_second = |arguments: &[&str]| {
        let socket = fixture.at("h1").join("mccs-control.sock");
        mccsctl().arg("--socket").arg(socket).args(arguments).output().expect("runs")
    };
    let said = |output: Output| String::from_utf8(output.stdout).expect("text");
    let of_job = format!("(job {JOB})");
    // Hosts have met.
    let view = loop {
        let text = said(on_second(&["--json", "cluster"]));
        let view: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let hosts = view["cluster"]["hosts"].as_array().expect("a list").clone();
        if hosts.iter().all(|host| host["summary"].is_object()) {
            break view;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    assert_eq!(view["cluster"]["asked"], "h1");
    let comms = |host: usize| view["cluster"]["hosts"][host]["summary"]["communicators"].as_array().map(Vec::len);
    assert_eq!((comms(0), comms(1)), (Some(1), Some(0)), "told by the host of its first rank alone: {view}");
    let text = said(on_second(&["cluster"]));
    assert!(text.contains("days") && text.contains("h0, number ") && text.contains(&of_job), "{text}");
    assert_eq!(view["cluster"]["hosts"][0]["summary"]["communicators"][0]["job"], JOB, "{view}");
    let watched = fixture.says(&["watch", "--once", "--interval", "0.05"]);
    assert!(watched.contains(&of_job), "{watched}");
    let well = on_second(&["stuck"]);
    assert!(well.status.success(), "{well:?}");
    assert!(said(well).contains("0 of 1 communicators are stuck"));
    // A rank leaves, and another one waits for it in vain.
    let number =
        fixture.says_in_json(&["communicators"])["communicators"][0]["communicator"].as_u64().expect("a number");
    drop(second);
    let (client, comm, stream) = &first;
    let memory = client.allocate(64).expect("memory");
    let called = comm.all_reduce(memory.at(0), memory.at(0), 8, DataType::I32, RedOp::Sum, stream);
    assert!(called.and_then(|()| stream.synchronize()).is_err(), "rank 1 has left");
    let failed = fixture.says_in_json(&["failed"])["failed"][0].clone();
    assert_eq!(failed["communicator"], number, "{failed}");
    let reason = failed["reason"].as_str().expect("text").to_owned();
    assert_eq!(failed["job"], JOB, "{failed}");
    let text = fixture.says(&["failed"]);
    assert!(text.contains(&reason) && text.contains(&of_job), "{text}");
    drop(first);
    // When nothing of it is left, it is still known why.
    while !fixture.says_in_json(&["communicators"])["communicators"].as_array().expect("a list").is_empty() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let why = fixture.complains(&["why-stuck", &number.to_string()]);
    assert!(why.contains("any more: it failed") && why.contains(&reason), "{why}");
    let text = said(on_second(&["cluster"]));
    assert!(text.contains(&reason) && text.contains(&of_job), "{text}");
}

/// A host that nobody could ask may have something that is stuck.
#[test]
fn stuck_fails_where_a_host_could_not_be_asked() {
    let mut fixture = Fixture::of(&["h0", "h1"]);
    drop(fixture.services.pop());
    let output = fixture.run(&["stuck"]);
    assert!(!output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("h1: not known"), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("1 hosts could not be asked"), "{output:?}");
}

#[test]
fn without_a_controller_stuck_looks_at_its_own_host() {
    let fixture = Fixture::with(&["h0", "h1"], false);
    let said = fixture.says(&["stuck"]);
    assert!(said.starts_with("this host alone: service.toml names no [controller]\n"), "{said}");
    assert!(said.contains("0 of 0 communicators are stuck"), "{said}");
    assert_eq!(fixture.says_in_json(&["stuck"])["stuck"]["asked"], "this host");
    assert!(fixture.complains(&["cluster"]).contains("names no [controller]"));
}

#[test]
fn who_is_stuck_is_named_and_what_happens_is_seen() {
    let fixture = Fixture::start();
    let why = fixture.complains(&["why-stuck", "999"]);
    assert!(why.contains("999"), "{why}");
    let id = mccs::unique_id().expect("an id");
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| fixture.join(id, 1));
        (fixture.join(id, 0), second.join().expect("a rank"))
    });
    let communicators = fixture.says_in_json(&["communicators"]);
    let number = communicators["communicators"][0]["communicator"].as_u64().expect("a number").to_string();

    let call = |(client, comm, stream): &(Client, Communicator, Stream)| {
        let memory = client.allocate(4096).expect("memory");
        comm.all_reduce(memory.at(0), memory.at(0), 1000, DataType::I32, ReduceOperator::from(RedOp::Sum), stream)
            .expect("enqueued");
        stream.synchronize().expect("completed");
    };
    assert!(fixture.says(&["why-stuck", &number]).contains("nobody waits"));
    let (report, text) = std::thread::scope(|scope| {
        scope.spawn(|| call(&first));
        // Until it has been noticed that the first rank is in the call.
        let report = loop {
            let report = fixture.says_in_json(&["why-stuck", &number]);
            if report["stuck"]["class"] == "rank" {
                break report;
            }
        };
        let text = fixture.says(&["why-stuck", &number]);
        let stuck = String::from_utf8(fixture.run(&["stuck"]).stdout).expect("text");
        assert!(stuck.contains(&format!("tenant default (job {JOB}): ")), "{stuck}");
        call(&second);
        (report, text)
    });
    assert_eq!(report["stuck"]["culprits"][0]["rank"], 1, "{report}");
    assert!(text.contains("waits for ranks that have not called") && text.contains("rank 1 (process"), "{text}");
    let seen = fixture.says(&["watch", "--once", "--interval", "0.05"]);
    assert!(seen.contains(&number) && seen.contains("default"), "{seen}");
    let file = fixture.at("trace.json").display().to_string();
    let traced = fixture.run(&["trace", "--seconds", "0.05", "--out", &file]);
    assert!(traced.status.success() && traced.stdout.is_empty(), "{traced:?}");
    assert!(String::from_utf8_lossy(&traced.stderr).contains("trace.json"), "{traced:?}");
    let trace: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&file).expect("a file")).expect("JSON, as Perfetto loads it");
    assert!(trace["traceEvents"].is_array() && trace["otherData"]["complete"] == true, "{trace}");
    let (merged, other) = (fixture.at("merged.json"), fixture.at("other.json").display().to_string());
    std::fs::write(&other, "{}").expect("a file");
    for (of, why) in [(&other, "other.json is no trace"), (&String::from("nosuch.json"), "cannot read nosuch.json")] {
        let said = fixture.complains(&["merge-traces", of, "--out", &merged.display().to_string()]);
        assert!(said.contains(why) && !merged.exists(), "{said}");
    }
    // An existing file stays until there is another.
    std::fs::write(&merged, "an earlier one").expect("a file");
    let said = fixture.complains(&["merge-traces", &other, "--out", &merged.display().to_string()]);
    assert_eq!(std::fs::read_to_string(&merged).expect("a file"), "an earlier one", "{said}");
    assert!(!fixture.at("merged.json.part").exists());
    let merge = fixture.run(&["merge-traces", &file, "--out", &merged.display().to_string()]);
    assert!(merge.status.success(), "{merge:?}");
    let text = std::fs::read_to_string(&merged).expect("a file");
    assert!(text.contains("traceEvents") && !text.contains("an earlier one"), "another one takes its place");
    let why = fixture.complains(&["trace", "--communicator", "nosuch", "--out", &file]);
    assert!(why.contains("unique id nosuch"), "{why}");
    let why = fixture.complains(&["trace", "--seconds", "0.05", "--out", "/nowhere/trace.json"]);
    assert!(why.contains("/nowhere/trace.json"), "{why}");
    let why = fixture.complains(&["trace", "--communicator", "77", "--out", &file]);
    assert!(why.contains("no communicator 77"), "{why}");
    assert!(std::fs::read_to_string(&file).expect("the earlier trace").contains("traceEvents"));
    let why = fixture.complains(&["trace", "--seconds", "100000", "--out", &file]);
    assert!(why.contains("refused"), "{why}");
    assert!(fixture.says(&["show"]).contains("proxy"));
    let shown = fixture.says_in_json(&["show"]);
    for (part, many) in [("hosts", 1), ("sessions", 2), ("communicators", 1)] {
        assert_eq!(shown[part].as_array().map(Vec::len), Some(many), "{part} of {shown}");
    }
    assert!(shown["engines"]["runtimes"].is_array() && shown["engines"]["engines"].is_array(), "{shown}");
}
