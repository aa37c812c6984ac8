//! A push as proto3's JSON has it. Pure: families go in, text comes out.
//!
//! Numbers of 64 bits are texts, and enumerations are numbers. Values that are no finite numbers have no place in JSON, and are left out.

use std::collections::BTreeMap;

use mccs_control::overview::Overview;
use mccs_telemetry::histogram::{BUCKETS, HistogramView, bound_seconds};
use serde_json::{Value as Json, json};

use super::super::families::{Family, Kind, Number, Sample, Value, families, seconds};

/// `AGGREGATION_TEMPORALITY_CUMULATIVE`.
const CUMULATIVE: u8 = 2;
/// Units of UCUM, by how names end.
const UNITS: [(&str, &str); 5] = [
    ("_bytes_per_second", "By/s"),
    ("_timestamp_seconds", "s"),
    ("_microseconds", "us"),
    ("_seconds", "s"),
    ("_bytes", "By"),
];

/// Identity of the teller, beside its name, version and host.
pub(super) struct Resource {
    pub(super) attributes: BTreeMap<String, String>,
}

/// When counters began, and now: nanoseconds of the Unix epoch.
#[derive(Clone, Copy)]
pub(super) struct Times {
    pub(super) since_ns: u64,
    pub(super) now_ns: u64,
}

/// The text of a push.
pub(super) fn encode(overview: &Overview, resource: &Resource, times: Times) -> String {
    let own = [
        ("service.name", "mccs-service"),
        ("service.version", &overview.version),
        ("service.instance.id", &overview.host),
        ("host.name", &overview.host),
    ];
    let more = resource.attributes.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let metrics: Vec<Json> = families(overview).iter().filter_map(|family| metric(family, times)).collect();
    let scope = json!({"name": "mccs", "version": overview.version});
    json!({"resourceMetrics": [{
        "resource": {"attributes": attributes(own.into_iter().chain(more))},
        "scopeMetrics": [{"scope": scope, "metrics": metrics}],
    }]})
    .to_string()
}

fn attributes<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<Json> {
    pairs.map(|(key, value)| json!({"key": key, "value": {"stringValue": value}})).collect()
}

/// A metric; none without points.
fn metric(family: &Family, times: Times) -> Option<Json> {
    let points: Vec<Json> = family.samples.iter().filter_map(|sample| point(sample, family.kind, times)).collect();
    if points.is_empty() {
        return None;
    }
    let (key, data) = match family.kind {
        Kind::Gauge => ("gauge", json!({"dataPoints": points})),
        Kind::Counter => {
            ("sum", json!({"dataPoints": points, "aggregationTemporality": CUMULATIVE, "isMonotonic": true}))
        }
        Kind::Histogram => ("histogram", json!({"dataPoints": points, "aggregationTemporality": CUMULATIVE})),
    };
    let stem = family.name.strip_suffix("_total").unwrap_or(family.name);
    let unit = UNITS.iter().find(|(suffix, _)| stem.ends_with(suffix)).map_or("", |(_, unit)| unit);
    let mut metric = json!({"name": family.name, "description": family.help, "unit": unit});
    metric[key] = data;
    Some(metric)
}

fn point(sample: &Sample, kind: Kind, times: Times) -> Option<Json> {
    let labels = sample.labels.iter().map(|(label, value)| (label.as_str(), value.as_str()));
    let mut point = json!({"attributes": attributes(labels), "timeUnixNano": times.now_ns.to_string()});
    if kind != Kind::Gauge {
        point["startTimeUnixNano"] = times.since_ns.to_string().into();
    }
    match &sample.value {
        Value::Number(Number::Whole(number)) => match i64::try_from(*number) {
            Ok(number) => point["asInt"] = number.to_string().into(),
            Err(_) => point["asDouble"] = (*number as f64).into(),
        },
        Value::Number(Number::Real(number)) if number.is_finite() => point["asDouble"] = (*number).into(),
        Value::Number(Number::Real(_)) => return None,
        Value::Histogram(view) => buckets(&mut point, view),
    }
    Some(point)
}

fn buckets(point: &mut Json, view: &HistogramView) {
    let counts: Vec<String> = view.buckets.iter().map(u64::to_string).collect();
    let bounds: Vec<f64> = (0..BUCKETS).map(bound_seconds).collect();
    point["count"] = view.total().to_string().into();
    point["sum"] = seconds(view.sum_ns).into();
    point["bucketCounts"] = counts.into();
    point["explicitBounds"] = bounds.into();
}
