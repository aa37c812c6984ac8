//! The keys of answers in JSON, beside those of the document.

use std::collections::BTreeSet;
use std::time::Duration;

use mccs::{DataType, RedOp};

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

/// Keys that docs/JSON.md has of a command.
fn documented(command: &str) -> BTreeSet<String> {
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
    let commands: [(&str, &[&str]); 21] = [
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
    ];
    for (command, arguments) in commands {
        let (mut found, known) = (BTreeSet::new(), documented(command));
        keys_of(&fixture.says_in_json(arguments), "", &mut found);
        assert!(!found.is_empty(), "{command}");
        let begins = |key: &String, with: &str| key.strip_prefix(with).is_some_and(|rest| rest.starts_with(['.', '[']));
        let has_children = |key: &str| known.iter().any(|other| begins(other, key));
        // A key that the document leaves at that stands for all that is in it.
        let is_told = |key: &String| {
            known.contains(key)
                || has_children(key)
                || known.iter().any(|above| begins(key, above) && !has_children(above))
        };
        let untold: Vec<_> = found.iter().filter(|key| !is_told(key)).collect();
        assert!(untold.is_empty(), "docs/JSON.md does not have of `{command}`: {untold:?}");
    }
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
