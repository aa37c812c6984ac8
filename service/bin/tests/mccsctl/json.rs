//! The keys of answers in JSON, beside those of the document.

use std::collections::BTreeSet;
use std::time::Duration;

use mccs::{DataType, RedOp};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::fixture::Fixture;

/// Keys of a document, with `[]` for the elements of lists.
fn keys_of(value: &serde_json::Value, prefix: &str, found: &mut BTreeSet<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (key, value) in fields {
                let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                found.insert(path.clone());
                keys_of(value, &path, found);
            }
        }
        serde_json::Value::Array(values) => {
            values.iter().for_each(|value| keys_of(value, &format!("{prefix}[]"), found))
        }
        _ => {}
    }
}

/// Keys that docs/JSON.md has of a command. Some are made of others' answers.
fn documented(command: &str) -> BTreeSet<String> {
    const OF_SHOW: [&str; 7] = ["hosts", "gpus", "sessions", "communicators", "joining", "failed", "engines"];
    // Lists of `watch` have the elements of these.
    const OF_WATCH: [(&str, &str); 6] = [
        ("communicators", "communicators"),
        ("joining", "joining"),
        ("flows", "flows"),
        ("hosts", "hosts"),
        ("gpus", "gpus"),
        ("paths", "links"),
    ];
    let own = section(command);
    match command {
        "show" => own.into_iter().chain(OF_SHOW.iter().flat_map(|part| section(part))).collect(),
        "stuck" => section("cluster").iter().map(|key| key.replacen("cluster", "stuck", 1)).collect(),
        "watch" => {
            let of = |(list, command): (&str, &str)| {
                let element = format!("{command}[].");
                let keys = section(command).into_iter();
                let list = format!("{list}[].");
                keys.filter_map(move |key| Some(format!("{list}{}", key.strip_prefix(&element)?))).collect::<Vec<_>>()
            };
            own.into_iter().chain(OF_WATCH.into_iter().flat_map(of)).collect()
        }
        _ => own,
    }
}

/// Keys of a section.
fn section(command: &str) -> BTreeSet<String> {
    let text = include_str!("../../../../docs/JSON.md");
    let heading = format!("## `{command}`\n");
    let (_, section) = text.split_once(&heading).unwrap_or_else(|| panic!("docs/JSON.md has no {command}"));
    let section = section.split("\n## ").next().unwrap_or_default();
    section.lines().filter_map(|line| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned())).collect()
}

#[test]
fn json_has_the_keys_that_the_document_says() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let (first, second) = fixture.join_across();
    let memory = [&first, &second].map(|(client, ..)| client.allocate(1 << 20).expect("memory"));
    for (memory, (_, comm, stream)) in memory.iter().zip([&first, &second]) {
        comm.all_reduce(memory.at(0), memory.at(0), 1 << 18, DataType::I32, RedOp::Sum, stream).expect("enqueued");
    }
    [&first, &second].into_iter().for_each(|(_, _, stream)| stream.synchronize().expect("completed"));
    while !fixture.says(&["policy", "show"]).contains("as decided") {
        std::thread::sleep(Duration::from_millis(2));
    }
    let number = fixture.says_in_json(&["communicators"])["communicators"][0]["communicator"].to_string();
    let other = fixture.write("other.toml", "[policy]\nname = \"ffa\"\n");
    let commands: [(&str, &[&str]); 25] = [
        ("show", &["show"]),
        ("watch", &["watch", "--once", "--interval", "0.05"]),
        ("stuck", &["stuck"]),
        ("controller", &["controller"]),
        ("hosts", &["hosts"]),
        ("gpus", &["gpus"]),
        ("sessions", &["sessions"]),
        ("communicators", &["communicators"]),
        ("joining", &["joining"]),
        ("failed", &["failed"]),
        ("engines", &["engines"]),
        ("tenant add", &["tenant", "add", "job-1", "--label", "job=1"]),
        ("tenants", &["tenants"]),
        ("tenant remove", &["tenant", "remove", "job-1"]),
        ("token add", &["token", "add", "on-call", "--rights", "policy,host"]),
        ("token list", &["token", "list"]),
        ("flows", &["flows"]),
        ("links", &["links"]),
        ("why-stuck", &["why-stuck", &number]),
        ("cluster", &["cluster"]),
        ("drain", &["drain", "--undo"]),
        ("policy show", &["policy", "show"]),
        ("policy diff", &["policy", "diff", &other]),
        ("policy apply", &["policy", "apply", &other]),
        ("policy history", &["policy", "history"]),
    ];
    for (command, arguments) in commands {
        assert_documented(command, &fixture.says_in_json(arguments));
    }
    let config = fixture.at("service.toml").display().to_string();
    let topology = std::fs::read_to_string(fixture.at("topology.toml")).expect("a file");
    let second = "[[spine]]\nname = \"spine1\"\nsource_ports = \"23020-23039\"\n";
    let topology = fixture.write("steered.toml", &format!("{topology}{second}"));
    // It fails where the network does not steer, which a loopback does not.
    let steering = fixture.run(&["--json", "steering", "--config", &config, "--topology", &topology]);
    let traces: serde_json::Value = serde_json::from_slice(&steering.stdout).unwrap_or_else(|_| panic!("{steering:?}"));
    assert_documented("steering", &traces);
    // Whether this machine has problems is its own affair.
    let output = fixture.run(&["--json", "doctor", "--config", &fixture.at("service.toml").display().to_string()]);
    let doctor: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let (mut found, known) = (BTreeSet::new(), documented("doctor"));
    keys_of(&doctor, "", &mut found);
    assert!(found.remove("doctor") && found.is_subset(&known) && found.len() >= 3, "{found:?}");
    let findings = doctor["doctor"].as_array().expect("findings");
    let verdict_of = |check: &str| findings.iter().find(|one| one["check"] == check).map(|one| one["verdict"].clone());
    for check in ["configuration", "service", "cluster"] {
        assert_eq!(verdict_of(check).as_ref().and_then(|verdict| verdict.as_str()), Some("ok"), "{check}: {doctor}");
    }
    // Checks of the service's process, whose user this one is.
    assert!(verdict_of("containers").is_some() && verdict_of("cpus").is_some(), "{doctor}");
    let has_problem = findings.iter().any(|one| one["verdict"] == "problem");
    assert_eq!(output.status.success(), !has_problem, "{output:?}");
    let history = fixture.says_in_json(&["policy", "history", "--acts"]);
    assert_eq!(history["controller"]["history"].as_array().map(Vec::is_empty), Some(false), "{history}");
}

#[test]
fn an_upgrades_answer_has_the_keys_that_the_document_says() {
    let fixture = Fixture::with(&["h0"], false);
    let answer = fixture.says_in_json(&["upgrade"]);
    // Nobody else ends it: it is no child of this process.
    let pid = Pid::from_raw(answer["pid"].as_i64().expect("a process") as i32);
    let ended = kill(pid, Signal::SIGTERM);
    assert_documented("upgrade", &answer);
    ended.expect("it is there");
}

/// Fails unless docs/JSON.md has every key of a command's answer.
fn assert_documented(command: &str, answer: &serde_json::Value) {
    let (mut found, known) = (BTreeSet::new(), documented(command));
    keys_of(answer, "", &mut found);
    assert!(!found.is_empty(), "{command}");
    let begins = |key: &String, with: &str| key.strip_prefix(with).is_some_and(|rest| rest.starts_with(['.', '[']));
    let has_children = |key: &str| known.iter().any(|other| begins(other, key));
    // A key that the document leaves at that stands for all that is in it.
    let is_told = |key: &String| {
        known.contains(key) || has_children(key) || known.iter().any(|above| begins(key, above) && !has_children(above))
    };
    let untold: Vec<_> = found.iter().filter(|key| !is_told(key)).collect();
    assert!(untold.is_empty(), "docs/JSON.md does not have of `{command}`: {untold:?}");
}
