//! Documents are as mccsctl prints and the description says, made once for all readers; an error says why there is none.

use std::collections::BTreeSet;
use std::sync::Barrier;
use std::time::Duration;

use mccs::{DataType, RedOp};
use mccs_control::documents::Document;
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_tests::hosts::{TestHosts, in_threads};
use mccs_tests::{Rank, TestService, open_to_all};
use serde_json::Value;

use super::fixture::Console;

/// Parts of a value that a schema does not allow, with their places.
fn wrong(value: &Value, schema: &Value, at: &str, found: &mut Vec<String>) {
    let is = |kind: &str| match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("{at}: the type {other:?}"),
    };
    let fits = match &schema["type"] {
        Value::String(kind) => is(kind),
        Value::Array(kinds) => kinds.iter().any(|kind| is(kind.as_str().expect("a type"))),
        _ => true,
    };
    if !fits {
        found.push(format!("{at} is {value}, not {}", schema["type"]));
        return;
    }
    if let Value::Object(object) = value {
        for key in schema["required"].as_array().into_iter().flatten() {
            if !object.contains_key(key.as_str().expect("a key")) {
                found.push(format!("{at} has no {key}"));
            }
        }
        for (key, value) in object {
            match &schema["properties"][key] {
                Value::Null if schema["properties"].is_null() => {}
                Value::Null => found.push(format!("{at}.{key} is not told of")),
                schema => wrong(value, schema, &format!("{at}.{key}"), found),
            }
        }
    }
    if let Value::Array(values) = value {
        values.iter().for_each(|value| wrong(value, &schema["items"], &format!("{at}[]"), found));
    }
}

fn sums(rank: &Rank, times: usize) {
    let memory = rank.client.allocate(1 << 16).expect("memory");
    for _ in 0..times {
        rank.comm
            .all_reduce(memory.at(0), memory.at(0), 1 << 14, DataType::I32, RedOp::Sum, &rank.stream)
            .expect("enqueued");
    }
    rank.stream.synchronize().expect("completed");
}

/// Two hosts of which the first has the controller.
pub fn cluster(folder: &std::path::Path) -> TestHosts {
    let mut topology = "[rates]\nhost_leaf = \"100Gbit/s\"\nleaf_spine = \"50Gbit/s\"\n".to_owned();
    for host in ["h0", "h1"] {
        topology += &format!(
            "[[leaf]]\nname = \"leaf-{host}\"\n[[host]]\nname = {host:?}\ndevices = 2\nleaf = \"leaf-{host}\"\n"
        );
    }
    topology += "[[spine]]\nname = \"spine0\"\nsource_ports = \"23000-23019\"\n";
    std::fs::write(folder.join("topology.toml"), topology).expect("a file");
    std::fs::write(folder.join("policy.toml"), "[policy]\nname = \"ecmp\"\n").expect("a file");
    let [topology, policy] = ["topology.toml", "policy.toml"].map(|name| folder.join(name));
    TestHosts::start(
        2,
        &format!("[cuda]\nuse = \"off\"\n[controller]\nhost = \"h0\"\ntopology = {topology:?}\npolicy = {policy:?}\n"),
    )
}

#[test]
fn documents_are_as_the_description_says() {
    let folder = tempfile::tempdir().expect("a directory");
    let hosts = cluster(folder.path());
    let console = Console::start(&hosts.service(0).control_socket());
    let ranks = hosts.join(&[0, 0, 1]);
    // A rank that goes takes its communicator with it.
    let ranks = in_threads(ranks, |rank| {
        sums(&rank, 7);
        rank
    });
    check(&console, &hosts);
    drop(ranks);
}

fn check(console: &Console, hosts: &TestHosts) {
    // A decision takes hosts a moment.
    while console.document("policy")["controller"]["show"]["communicators"][0]["state"] != "as_decided" {
        std::thread::sleep(Duration::from_millis(20));
    }
    let description = console.document("openapi.json");
    let number = console.document("communicators")["communicators"][0]["communicator"].to_string();
    let (mut found, mut paths) = (Vec::new(), BTreeSet::new());
    for (path, item) in description["paths"].as_object().expect("paths") {
        // Signed: acts.rs has those.
        if path.ends_with("/acts") {
            continue;
        }
        let (method, body) = if item["get"].is_object() { ("GET", "") } else { ("POST", "[policy]\nname = \"ffa\"\n") };
        let operation = &item[method.to_lowercase()];
        let content = &operation["responses"]["200"]["content"]["application/json"]["schema"];
        let name = content["$ref"].as_str().and_then(|reference| reference.strip_prefix("#/components/schemas/"));
        let schema = name.map_or(content, |name| &description["components"]["schemas"][name]);
        assert!(schema.is_object(), "{path}: {content}");
        let target = path.replace("{communicator}", &number);
        let answer = console.ask(method, &target, &[], if path.ends_with("trace") { "" } else { body });
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        wrong(&answer.json(), schema, path, &mut found);
        paths.insert(path.clone());
    }
    found.sort();
    found.dedup();
    assert!(found.is_empty(), "docs/JSON.md says otherwise:\n{}", found.join("\n"));
    assert!(paths.len() >= 19, "{paths:?}");

    // Numbers move; what does not is as mccsctl has it.
    for (path, document) in [("hosts", Document::Hosts), ("cluster", Document::Cluster), ("failed", Document::Failed)] {
        let text = document.text(&hosts.service(0).control_socket()).expect("a document");
        let of_service: Value = serde_json::from_slice(&text).expect("JSON");
        let keys = |value: &Value| value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&console.document(path)), keys(&of_service), "{path}");
    }
    let comm = &console.document("overview")["communicators"][0];
    assert_eq!((comm["operations"].as_u64(), comm["ranks"].as_array().map(Vec::len)), (Some(7), Some(2)), "{comm}");
    let policy = console.document("policy/history?acts=true");
    assert!(policy["controller"]["history"].is_array(), "{policy}");
}

#[test]
fn one_question_answers_all_who_look() {
    let service = TestService::start("");
    let console = Console::start(&service.control_socket());
    let (barrier, many) = (Barrier::new(24), (0..24).collect::<Vec<_>>());
    let tags = in_threads(many, |_| {
        barrier.wait();
        console.get("/api/v1/overview").headers["etag"].clone()
    });
    // A second may begin within them.
    let different: BTreeSet<_> = tags.iter().collect();
    assert!(different.len() <= 3, "{different:?}");
    // An unchanged document keeps its tag, also when the service has been asked again.
    let first = console.get("/api/v1/hosts").headers["etag"].clone();
    std::thread::sleep(Duration::from_millis(1100));
    let again = console.ask("GET", "/api/v1/hosts", &[("If-None-Match", &first)], "");
    assert_eq!((again.status, &again.headers["etag"], again.body.len()), (304, &first, 0));
    assert_eq!(console.ask("GET", "/api/v1/hosts", &[("If-None-Match", "\"other\"")], "").status, 200);
}

#[test]
fn a_service_that_is_away_is_told_of_and_comes_back() {
    // Sockets of both services, one after the other.
    let folder = tempfile::tempdir().expect("a directory");
    let socket = folder.path().join("observers.sock");
    let settings = format!("[observers]\nsocket = {socket:?}\nusers = [0]\n");
    let mut service = TestService::start(&settings);
    let console = Console::start(&socket);
    let host = console.document("overview")["host"].clone();
    assert_eq!(console.get("/api/v1/cluster").code(), "no_controller");
    assert_eq!(console.get("/api/v1/policy").code(), "refused");
    service.stop();
    let away = std::iter::repeat_with(|| console.get("/api/v1/overview")).find(|answer| answer.status != 200);
    let away = away.expect("an answer").json();
    assert_eq!(away["error"]["code"], "service_away");
    let since = away["error"]["since"].as_u64().expect("a time");
    std::thread::sleep(Duration::from_millis(1200));
    let later = console.get("/api/v1/overview").json();
    assert_eq!(later["error"]["since"].as_u64(), Some(since), "it is away since then");
    assert_eq!(console.get("/").status, 200, "the page is there");
    let _service = TestService::start(&settings);
    let back = std::iter::repeat_with(|| console.get("/api/v1/overview")).find(|answer| answer.status == 200);
    assert_eq!(back.expect("an answer").json()["host"], host);
}

#[test]
fn a_trace_has_what_the_job_did_and_there_is_one_at_a_time() {
    let service = TestService::start("[host_device]\nshm_exchange_limit = \"0\"\n");
    let console = Console::start(&service.control_socket());
    // The trace begins a moment after recorders are on.
    let work = |rank: &Rank| {
        for _ in 0..100 {
            sums(rank, 1);
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    service.ranks(0, 2, |rank| {
        if rank.comm.rank() == 0 {
            let number = console.document("communicators")["communicators"][0]["communicator"].to_string();
            let target = format!("/api/v1/trace?seconds=3&communicator={number}");
            let (trace, other) = std::thread::scope(|scope| {
                let trace = scope.spawn(|| console.ask("POST", &target, &[], ""));
                while !service.service().registry.recorders.is_on() {
                    std::thread::yield_now();
                }
                work(&rank);
                (trace.join().expect("a trace"), console.ask("POST", "/api/v1/trace?seconds=0.01", &[], ""))
            });
            assert!(trace.headers["content-disposition"].starts_with("attachment"), "{:?}", trace.headers);
            let events = trace.json();
            let events = events["traceEvents"].as_array().expect("events");
            assert!(events.iter().filter(|event| event.to_string().contains("all_reduce")).count() >= 5, "{events:?}");
            assert_eq!(other.status, 200, "its turn is over");
            assert_eq!(console.ask("POST", "/api/v1/trace?communicator=4711", &[], "").code(), "no_communicator");
        } else {
            while !service.service().registry.recorders.is_on() {
                std::thread::yield_now();
            }
            work(&rank);
        }
    });
    std::thread::scope(|scope| {
        let first = scope.spawn(|| console.ask("POST", "/api/v1/trace?seconds=2", &[], ""));
        while !service.service().registry.recorders.is_on() {
            std::thread::yield_now();
        }
        assert_eq!(console.ask("POST", "/api/v1/trace", &[], "").code(), "busy");
        assert_eq!(first.join().expect("an answer").status, 200);
    });
}

#[test]
fn observers_look_and_change_nothing() {
    const NOBODY: u32 = 65_534;
    let is_root = nix::unistd::geteuid().is_root();
    let service = TestService::start(&format!("[observers]\nusers = [{NOBODY}]\n"));
    let folder = service.control_socket().parent().expect("a folder").to_owned();
    open_to_all(&folder);
    let socket = folder.join("mccs-observers.sock");
    for request in [
        ControlRequest::Drain { drains: Some(true), reason: None },
        ControlRequest::ScaleTransports { count: 1 },
        ControlRequest::Upgrade { binary: None, force: false },
    ] {
        let answer = call(&socket, &request).expect("an answer");
        assert!(matches!(&answer, ControlAnswer::Refused(why) if why.contains("observers")), "{request:?}: {answer:?}");
    }
    assert!(matches!(
        call(&socket, &ControlRequest::Drain { drains: None, reason: None }),
        Ok(ControlAnswer::Drain(_))
    ));
    let user = is_root.then_some(NOBODY);
    let console = Console::start_as(&socket, user);
    assert_eq!(console.document("overview")["host"], "test");
    assert_eq!(console.ask("POST", "/api/v1/trace?seconds=0.1", &[], "").status, 200);
    if is_root {
        // The operators' socket is not theirs, nor is the observers' anybody's.
        let at_control = Console::start_as(&service.control_socket(), user);
        assert_eq!(at_control.get("/api/v1/overview").code(), "service_away");
        let stranger = Console::start_as(&socket, Some(NOBODY - 1));
        let refused = stranger.get("/api/v1/overview");
        assert_eq!(refused.code(), "refused");
        let message = refused.json()["error"]["message"].to_string();
        assert!(message.contains("users of [observers] in service.toml"), "{message}");
    }
}
