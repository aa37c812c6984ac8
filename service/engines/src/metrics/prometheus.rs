//! Prometheus' text format 0.0.4. Pure: families go in, text comes out.

use std::fmt::{self, Display, Write as _};

use mccs_control::overview::Overview;
use mccs_telemetry::histogram::{BUCKETS, HistogramView, bound_seconds};

use super::families::{Family, Kind, Sample, Value, families, seconds};

/// A label's value, with what the format gives a meaning escaped.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '\\' => f.write_str("\\\\"),
            '"' => f.write_str("\\\""),
            '\n' => f.write_str("\\n"),
            c => f.write_char(c),
        })
    }
}

/// The whole text.
#[must_use]
pub fn render(overview: &Overview) -> String {
    let mut text = String::new();
    families(overview).iter().for_each(|family| write_family(&mut text, family));
    text
}

fn write_family(text: &mut String, family: &Family) {
    let Family { name, help, .. } = family;
    let kind = match family.kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Histogram => "histogram",
    };
    // Writing into a text does not fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for Sample { labels, value } in &family.samples {
        match value {
            Value::Number(number) => write_sample(text, &name, labels, None, number),
            Value::Histogram(view) => write_histogram(text, name, labels, view),
        }
    }
}

fn write_sample(
    text: &mut String,
    name: &dyn Display,
    labels: &[(String, String)],
    bound: Option<&str>,
    value: &dyn Display,
) {
    let _ = write!(text, "{name}");
    let labels = labels.iter().map(|(label, text)| (label.as_str(), text.as_str()));
    let mut before = '{';
    for (label, value) in labels.chain(bound.map(|bound| ("le", bound))) {
        let _ = write!(text, "{before}{label}=\"{}\"", Escaped(value));
        before = ',';
    }
    let _ = writeln!(text, "{} {value}", if before == '{' { "" } else { "}" });
}

fn write_histogram(text: &mut String, name: &str, labels: &[(String, String)], view: &HistogramView) {
    let mut so_far = 0;
    for (bucket, count) in view.buckets.iter().enumerate().take(BUCKETS) {
        so_far += count;
        let bound = bound_seconds(bucket).to_string();
        write_sample(text, &format_args!("{name}_bucket"), labels, Some(&bound), &so_far);
    }
    let total = view.total();
    write_sample(text, &format_args!("{name}_bucket"), labels, Some("+Inf"), &total);
    write_sample(text, &format_args!("{name}_sum"), labels, None, &seconds(view.sum_ns));
    write_sample(text, &format_args!("{name}_count"), labels, None, &total);
}

#[cfg(test)]
mod tests;
