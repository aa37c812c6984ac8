use std::collections::{BTreeMap, BTreeSet};

use mccs_control::testing::overview;

use super::super::families::inspector::nccl_name;
use super::super::families::{Metrics, Number};
use super::*;

/// A sample's name, labels and value, read by the format's grammar: names, each label once, its text with `\\`, `\"` and `\n` alone escaped.
fn sample(line: &str) -> (&str, Vec<(&str, String)>, f64) {
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let end = line.find(['{', ' ']).unwrap_or_else(|| panic!("{line:?} has no value"));
    let (name, mut rest) = line.split_at(end);
    assert!(is_name(name), "{line:?}");
    let mut labels: Vec<(&str, String)> = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, text) = rest.split_once("=\"").unwrap_or_else(|| panic!("{line:?}: a label has a text"));
            assert!(is_name(label) && !label.starts_with("__"), "{line:?}: {label}");
            let (mut value, mut chars) = (String::new(), text.char_indices());
            let end = loop {
                match chars.next().unwrap_or_else(|| panic!("{line:?}: a text ends")) {
                    (at, '"') => break at,
                    (_, '\\') => match chars.next() {
                        Some((_, 'n')) => value.push('\n'),
                        Some((_, c @ ('\\' | '"'))) => value.push(c),
                        other => panic!("{line:?}: {other:?} is not escaped"),
                    },
                    (_, c) => value.push(c),
                }
            };
            assert!(labels.iter().all(|(other, _)| *other != label), "{line:?} has {label} twice");
            labels.push((label, value));
            rest = &text[end + 1..];
            match rest.strip_prefix(',') {
                Some(more) => rest = more,
                None => break,
            }
        }
        rest = rest.strip_prefix('}').unwrap_or_else(|| panic!("{line:?}: labels end"));
    }
    let value = rest.strip_prefix(' ').unwrap_or_else(|| panic!("{line:?}: a space, and a value"));
    (name, labels, value.parse().unwrap_or_else(|_| panic!("{line:?}: {value:?} is a number")))
}

/// Values by series, checked as a strict scraper would: every family announced once, its help before its type and all of its samples behind
/// them, in one piece; counters and only these called `_total`; series once; histograms whole.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let mut series = BTreeMap::new();
    let (mut families, mut helped): (BTreeMap<String, String>, Option<String>) = (BTreeMap::new(), None);
    let mut family = String::new();
    assert!(text.ends_with('\n') && !text.contains('\r'));
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(!help.is_empty() && !help.contains('\\'), "{line:?}");
            assert!(helped.replace(name.to_owned()).is_none(), "{line:?} stands between another's help and type");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(helped.take().as_deref(), Some(name), "its help stands before");
            assert!(["counter", "gauge", "histogram"].contains(&kind), "{line:?}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line:?}");
            let is_sample = ["_bucket", "_sum", "_count"].iter().any(|suffix| name.ends_with(suffix));
            assert!(!is_sample, "{line:?} has the name of a histogram's sample");
            assert!(families.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} is announced twice");
            name.clone_into(&mut family);
        } else {
            let (name, labels, value) = sample(line);
            assert!(helped.is_none(), "{line:?} stands between help and type");
            let kind = families.get(&family).map(String::as_str);
            let suffix = name.strip_prefix(&*family).unwrap_or_else(|| panic!("{line:?} is not of {family}"));
            match kind {
                Some("histogram") => {
                    assert!(["_bucket", "_sum", "_count"].contains(&suffix), "{line:?}");
                    assert_eq!(suffix == "_bucket", labels.iter().any(|(label, _)| *label == "le"), "{line:?}");
                }
                _ => assert_eq!(suffix, "", "{line:?}"),
            }
            assert!(kind != Some("counter") || (value >= 0.0 && value.is_finite()), "{line:?}");
            let key = line.rsplit_once(' ').unwrap().0;
            assert!(series.insert(key.to_owned(), value).is_none(), "{key} comes twice");
        }
    }
    assert_eq!(helped, None);
    series
}

fn names(text: &str) -> BTreeSet<String> {
    let name = |line: &str| Some(line.strip_prefix("# TYPE ")?.split(' ').next()?.to_owned());
    text.lines().filter_map(name).collect()
}

#[test]
fn numbers_are_where_they_belong() {
    let series = parse(&render(&overview()));
    for (key, value) in [
        ("mccs_tenant_joining{tenant=\"a\"}", 1.0),
        ("mccs_tenant_operations_total{tenant=\"a\"}", 10.0),
        ("nccl_collectives_total{tenant=\"a\",node=\"h0\"}", 6.0),
        ("nccl_p2p_total{tenant=\"a\",node=\"h0\"}", 4.0),
        ("mccs_tenant_info{tenant=\"a\",rules=\"all\",job=\"47\\\"11\"}", 1.0),
        ("mccs_tenant_used{tenant=\"a\",resource=\"memory_bytes\"}", 5.0),
        ("mccs_tenant_quota{tenant=\"a\",resource=\"memory_bytes\"}", 6.0),
        ("mccs_tenant_weight{tenant=\"a\"}", 1.5),
        ("mccs_tenant_flow_cap_bytes_per_second{tenant=\"a\"}", 1000.0),
        ("mccs_tenant_host_cap_bytes_per_second{tenant=\"a\"}", 3000.0),
        ("mccs_tenant_allotted_bytes_per_second{tenant=\"a\"}", 2000.0),
        (
            "mccs_communicator_busy_seconds_total{tenant=\"a\",communicator=\"5\",device=\"host\",name=\"data \\\"parallel\\\"\"}",
            0.5,
        ),
        (
            "mccs_communicator_multiprocessor_seconds_total{tenant=\"a\",communicator=\"5\",device=\"host\",name=\"data \\\"parallel\\\"\"}",
            2.5,
        ),
        (
            "mccs_communicator_gpu_memory_bytes{tenant=\"a\",communicator=\"5\",device=\"host\",name=\"data \\\"parallel\\\"\"}",
            f64::from(29 << 20),
        ),
        (
            "mccs_communicator_epoch{tenant=\"a\",communicator=\"5\",device=\"host\",name=\"data \\\"parallel\\\"\"}",
            3.0,
        ),
        ("mccs_rank_late_seconds_total{tenant=\"a\",communicator=\"5\",rank=\"1\"}", 1.5),
        ("mccs_path_bytes_total{peer=\"h1\",path=\"-\",direction=\"send\"}", 8.0),
        ("mccs_paths_left_total{peer=\"h1\",path=\"-\",direction=\"send\"}", 4.0),
        ("mccs_host_up{peer=\"h1\"}", 1.0),
        ("mccs_gpu_nic_access{uuid=\"GPU-1\",access=\"bounce\",reason=\"no NIC\"}", 1.0),
        ("mccs_gpu_lost{uuid=\"GPU-1\",reason=\"CUDA_ERROR_ILLEGAL_ADDRESS (700)\"}", 1.0),
        ("mccs_draining", 1.0),
        ("mccs_otlp_pushes_total{result=\"accepted\"}", 12.0),
        ("mccs_otlp_pushes_total{result=\"failed\"}", 13.0),
        ("mccs_certificate_end_timestamp_seconds", 2e9),
        ("mccs_controller_acts", 1.0),
        ("mccs_controller_term", 17.0),
        ("mccs_store_usable{kind=\"etcd\"}", 0.0),
        ("mccs_clock_error_seconds", 0.000_25),
        ("mccs_runtime_parks_total{runtime=\"mccs-main\"}", 2.0),
        ("mccs_uptime_seconds", 2.0),
        (
            "nccl_bus_bandwidth_gbs{tenant=\"a\",node=\"h0\",comm_name=\"5\",n_nodes=\"2\",nranks=\"4\",collective=\"AllReduce\"}",
            2.5,
        ),
        (
            "nccl_p2p_exec_time_microseconds{tenant=\"a\",node=\"h0\",comm_name=\"5\",n_nodes=\"2\",nranks=\"4\",p2p_operation=\"Recv\"}",
            20.0,
        ),
        (
            "nccl_p2p_bus_bandwidth_gbs{tenant=\"a\",node=\"h0\",comm_name=\"5\",n_nodes=\"2\",nranks=\"4\",p2p_operation=\"Recv\"}",
            1.5,
        ),
    ] {
        assert_eq!(series.get(key), Some(&value), "{key}");
    }
}

/// Whatever tenants are called, and paths.
#[test]
fn names_with_any_characters_come_through() {
    let mut strange = overview();
    let name = "a\"}\\ \n{b=\"c\", ü";
    name.clone_into(&mut strange.tenants[0].tenant);
    name.clone_into(&mut strange.paths[0].path);
    let text = render(&strange);
    assert_eq!(parse(&text).len(), parse(&render(&overview())).len());
    let samples = text.lines().filter(|line| !line.starts_with('#')).map(sample);
    let told: BTreeSet<_> =
        samples.flat_map(|(_, labels, _)| labels).filter(|(_, text)| text == name).map(|(label, _)| label).collect();
    assert_eq!(told, BTreeSet::from(["tenant", "path"]));
}

#[test]
fn collectives_have_the_names_that_nccl_gives_them() {
    let names = mccs_ipc::types::CollectiveKind::ALL.iter().map(|kind| nccl_name(&kind.to_string()).to_owned());
    let expected =
        ["AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "Gather", "Scatter", "Barrier"];
    assert_eq!(names.collect::<Vec<_>>(), expected);
}

#[test]
fn buckets_hold_all_below_their_bound() {
    let series = parse(&render(&overview()));
    let labels = "tenant=\"a\",collective=\"all_reduce\"";
    let bucket = |le: &str| series[&format!("mccs_collective_duration_seconds_bucket{{{labels},le=\"{le}\"}}")];
    assert_eq!((bucket("0.000001"), bucket("0.000002"), bucket("0.000004")), (1.0, 1.0, 2.0));
    assert_eq!((bucket("0.000512"), bucket("0.001024"), bucket("33.554432"), bucket("+Inf")), (2.0, 3.0, 3.0, 3.0));
    let of = |suffix: &str| series[&format!("mccs_collective_duration_seconds_{suffix}{{{labels}}}")];
    assert_eq!((of("count"), of("sum")), (3.0, 0.001004));
}

#[test]
fn labels_say_what_they_are_given() {
    let text_of = |kind, labels: &[(&str, &dyn Display)], value: Number| {
        let (mut metrics, mut text) = (Metrics::default(), String::new());
        let family = metrics.family("m", kind, "h");
        family.sample(labels, value);
        write_family(&mut text, family);
        text
    };
    let text = text_of(Kind::Gauge, &[("a", &"x\"y\\z\nw"), ("b", &"ü{}=,")], 1.5.into());
    assert_eq!(text, "# HELP m h\n# TYPE m gauge\nm{a=\"x\\\"y\\\\z\\nw\",b=\"ü{}=,\"} 1.5\n");
    assert!(text_of(Kind::Counter, &[], u64::MAX.into()).ends_with("\nm 18446744073709551615\n"));
}

/// All words of a text that look like a metric's name.
fn mentioned(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let is_name = |word: &&str| (word.starts_with("mccs_") && word.len() > "mccs_".len()) || word.starts_with("nccl_");
    words.filter(is_name).map(str::to_owned).collect()
}

#[test]
fn the_guide_says_what_each_metric_means() {
    let guide = include_str!("../../../../../docs/METRICS.md");
    let (told, names) = (mentioned(guide), names(&render(&overview())));
    let untold: Vec<_> = names.difference(&told).collect();
    assert!(untold.is_empty(), "docs/METRICS.md does not say what these mean: {untold:?}");
    let suffixes = ["_bucket", "_sum", "_count"];
    let is_known = |name: &&String| {
        names.contains(*name)
            || suffixes.iter().any(|suffix| name.strip_suffix(suffix).is_some_and(|n| names.contains(n)))
    };
    let unknown: Vec<_> = told.iter().filter(|name| !is_known(name)).collect();
    assert!(unknown.is_empty(), "docs/METRICS.md speaks of what there is not: {unknown:?}");
}

#[test]
fn the_dashboard_shows_what_there_is() {
    let dashboard: serde_json::Value =
        serde_json::from_str(include_str!("../../../../../eval/grafana/mccs.json")).unwrap();
    let names = names(&render(&overview()));
    let mut expressions = Vec::new();
    expressions_of(&dashboard, &mut expressions);
    assert!(expressions.len() >= 10, "{expressions:?}");
    for expression in expressions {
        let metrics: Vec<_> = mentioned(&expression).into_iter().collect();
        assert!(!metrics.is_empty(), "{expression} shows no metric");
        for metric in metrics {
            let family = metric.strip_suffix("_bucket").unwrap_or(&metric);
            assert!(names.contains(family), "{expression}: there is no {metric}");
        }
    }
}

/// Rules as Prometheus reads them: indented lists of maps, of which each rule has an alert, an expression, and words for a person.
#[test]
fn the_alerts_are_of_what_there_is() {
    let rules = include_str!("../../../../../eval/grafana/alerts.yml");
    let names = names(&render(&overview()));
    let (mut alerts, mut expressions, mut told) = (0, 0, 0);
    for (number, line) in (1..).zip(rules.lines()) {
        let indent = line.len() - line.trim_start().len();
        assert!(indent % 2 == 0 && !line.contains('\t'), "line {number} is not indented by twos: {line}");
        let entry = line.trim_start().trim_start_matches("- ");
        if entry.is_empty() || entry.starts_with('#') {
            continue;
        }
        let (key, value) = entry.split_once(':').unwrap_or_else(|| panic!("line {number} has no key: {line}"));
        let value = value.trim();
        match key {
            "alert" => alerts += 1,
            "expr" => {
                expressions += 1;
                let metrics = mentioned(value);
                assert!(!metrics.is_empty(), "line {number} looks at nothing: {line}");
                for metric in metrics {
                    let family = metric.strip_suffix("_bucket").unwrap_or(&metric);
                    assert!(names.contains(family), "line {number}: there is no {metric}");
                }
                let count = |of: char| value.matches(of).count();
                assert!(count('(') == count(')') && count('{') == count('}'), "line {number}: {value}");
            }
            "summary" => told += 1,
            "groups" | "rules" | "labels" | "annotations" => assert!(value.is_empty(), "line {number}: {line}"),
            "name" | "for" | "severity" | "description" => assert!(!value.is_empty(), "line {number}: {line}"),
            other => panic!("line {number}: Prometheus knows no key {other}"),
        }
    }
    assert!(alerts >= 8 && alerts == expressions && alerts == told, "{alerts} {expressions} {told}");
}

#[test]
fn the_dashboard_adds_up_nothing_that_each_host_counts_and_tells_hosts_apart() {
    let dashboard: serde_json::Value =
        serde_json::from_str(include_str!("../../../../../eval/grafana/mccs.json")).unwrap();
    let mut targets = Vec::new();
    targets_of(&dashboard, &mut targets);
    assert!(targets.len() >= 10);
    for (expression, legend) in targets {
        // A collective is counted on each of its hosts.
        let is_by_host =
            ["mccs_tenant_operations_total", "mccs_tenant_bytes_total", "mccs_communicator_", "mccs_rank_", "nccl_"];
        if is_by_host.iter().any(|metric| expression.contains(metric)) {
            assert!(!expression.contains("sum") || expression.contains("by (instance"), "{expression}");
            // Numbers of communicators are a host's own.
            assert!(legend.contains("{{instance}}"), "{expression}: {legend}");
        }
    }
}

/// Expressions and legends of panels.
fn targets_of(value: &serde_json::Value, found: &mut Vec<(String, String)>) {
    let text = |field: &serde_json::Value| field.as_str().unwrap_or_default().to_owned();
    match value {
        serde_json::Value::Object(fields) => {
            found.extend(fields.get("expr").map(|expression| (text(expression), text(&value["legendFormat"]))));
            fields.values().for_each(|field| targets_of(field, found));
        }
        serde_json::Value::Array(items) => items.iter().for_each(|item| targets_of(item, found)),
        _ => {}
    }
}

/// Expressions of panels and variables.
fn expressions_of(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => fields.iter().for_each(|(name, field)| match field.as_str() {
            Some(text) if name == "expr" || name == "definition" => found.push(text.into()),
            _ => expressions_of(field, found),
        }),
        serde_json::Value::Array(items) => items.iter().for_each(|item| expressions_of(item, found)),
        _ => {}
    }
}
