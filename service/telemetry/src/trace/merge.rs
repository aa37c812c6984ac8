//! Merges traces of several hosts on the cluster's common clock. Each host has estimated that clock
//! while it recorded.
//!
//! A trace of [`write`](super::write) is read line by line, as an event is a line of its own: traces may be larger than memory.

use std::io::{BufRead, Write};

use serde_json::{Value, json};

use super::microseconds;

/// Numbers of processes and tracks of a host are raised by so many for each host before it: more than a trace has.
const NUMBERS: u64 = 1 << 20;
/// Arguments of events that are times within the window, in microseconds.
const TIMES: [&str; 3] = ["enqueued_us", "arrived_us", "posted_us"];

/// Why traces cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// It cannot be read, or the whole not be written.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// It is something else.
    #[error("{0} is no trace that `mccsctl trace` has written, or was cut off")]
    NoTrace(String),
    /// Its times mean nothing elsewhere.
    #[error(
        "host {0} did not know the cluster's common clock when it recorded: no controller was named, or none was reached"
    )]
    NoClock(String),
}

/// A host's trace, of which what it is about was read.
struct Part<R> {
    name: String,
    lines: std::io::Lines<R>,
    about: Value,
    begin_ns: u64,
}

impl<R: BufRead> Part<R> {
    fn open(name: String, input: R) -> Result<Self, MergeError> {
        let mut lines = input.lines();
        let head = lines.next().transpose()?.unwrap_or_default();
        let head: Value = serde_json::from_str(&(head + "]}")).unwrap_or_default();
        let about = head.get("otherData").cloned().filter(|about| about["host"].is_string());
        let about = about.ok_or_else(|| MergeError::NoTrace(name.clone()))?;
        let host = about["host"].as_str().unwrap_or_default();
        let begin_ns = about["clock"]["begin_ns"].as_u64().ok_or_else(|| MergeError::NoClock(host.into()))?;
        Ok(Part { name, lines, about, begin_ns })
    }

    /// Gives each event to `to`, later by so much, with other numbers of process and track.
    fn events(
        mut self,
        later_ns: u64,
        numbers: u64,
        mut to: impl FnMut(&Value) -> std::io::Result<()>,
    ) -> Result<(), MergeError> {
        for line in self.lines.by_ref() {
            let line = line?;
            if line == "]}" {
                return Ok(());
            }
            let event = serde_json::from_str::<Value>(line.trim_end_matches(','));
            let Some(mut event) = event.ok().filter(|event| event.is_object() && event["args"].is_object()) else {
                break;
            };
            for number in ["pid", "tid"] {
                event[number] = event[number].as_u64().map(|of| of.saturating_add(numbers)).into();
            }
            let args = &mut event["args"];
            if let Some(place) = args.get("sort_index").and_then(Value::as_u64) {
                args["sort_index"] = place.saturating_add(numbers).into();
            }
            for time in TIMES {
                if let Some(us) = args.get(time).and_then(Value::as_f64) {
                    args[time] = (us + later_ns as f64 / 1e3).into();
                }
            }
            if let Some(us) = event.get("ts").and_then(Value::as_f64) {
                event["ts"] = microseconds(((us * 1e3) as u64).saturating_add(later_ns)).into();
            }
            to(&event)?;
        }
        Err(MergeError::NoTrace(self.name))
    }
}

/// Writes traces, each with what it is called in errors, as one. Times are from when the first of them began.
///
/// # Errors
/// [`MergeError`]; then what was written is of no use.
pub fn merge<R: BufRead>(traces: Vec<(String, R)>, out: &mut impl Write) -> Result<(), MergeError> {
    let parts = traces.into_iter().map(|(name, input)| Part::open(name, input)).collect::<Result<Vec<_>, _>>()?;
    let begin_ns = parts.iter().map(|part| part.begin_ns).min().unwrap_or(0);
    let error_ns = |part: &Part<R>| part.about["clock"]["error_ns"].as_u64().unwrap_or(0);
    let mut errors: Vec<u64> = parts.iter().map(error_ns).collect();
    errors.sort_unstable();
    let is_complete = parts.iter().all(|part| part.about["complete"] == true);
    let hosts: Vec<&Value> = parts.iter().map(|part| &part.about).collect();
    // Either of two hosts may be wrong.
    let about = json!({ "hosts": hosts, "complete": is_complete, "times_differ_by_ns_at_most": errors.iter().rev().take(2).sum::<u64>() });
    write!(out, "{{\"displayTimeUnit\":\"ns\",\"otherData\":{about},\"traceEvents\":[")?;
    let mut separator = "\n";
    for (part, number) in parts.into_iter().zip(0..) {
        let later_ns = part.begin_ns - begin_ns;
        part.events(later_ns, number * NUMBERS, |event| {
            write!(out, "{separator}{event}")?;
            separator = ",\n";
            Ok(())
        })?;
    }
    Ok(out.write_all(b"\n]}\n")?)
}

#[cfg(test)]
mod tests {
    use super::super::tests::window;
    use super::super::{ClockView, Window, format, write};
    use super::*;

    /// A host's trace, whose window began when the common clock showed so much.
    fn of(host: &str, begin_ns: u64, error_ns: u64) -> (String, Vec<u8>) {
        let window = Window { host: host.into(), lost: 0, ..window() };
        let at_ns = window.from_ns + 5_000_000;
        let clock = Some(ClockView { at_ns, common_ns: begin_ns + 5_000_000, error_ns });
        let mut text = Vec::new();
        write(&Window { clock, ..window }, &mut text).unwrap();
        (format!("{host}.json"), text)
    }

    fn merged(traces: &[(String, Vec<u8>)]) -> Result<Value, MergeError> {
        let mut text = Vec::new();
        merge(traces.iter().map(|(name, text)| (name.clone(), text.as_slice())).collect(), &mut text)?;
        let trace = serde_json::from_slice(&text).expect("JSON");
        format::check(&trace);
        Ok(trace)
    }

    /// When a host's ranks came to a collective, and began it.
    fn first_call(trace: &Value, host: &str) -> (f64, f64) {
        let events = trace["traceEvents"].as_array().expect("events");
        let is_process = |event: &&Value| event["args"]["name"] == format!("{host} / blue");
        let pid = &events.iter().find(is_process).expect("its process")["pid"];
        let call = events.iter().find(|event| event["name"] == "all_reduce" && event["pid"] == *pid).expect("a call");
        (call["args"]["arrived_us"].as_f64().expect("a time"), call["ts"].as_f64().expect("a time"))
    }

    #[test]
    fn times_are_on_the_common_clock_whatever_hosts_own_clocks_show() {
        let trace =
            merged(&[of("a", 1 << 60, 3_000), of("b", (1 << 60) - 7_000_000, 500), of("c", 1 << 60, 40)]).unwrap();
        assert_eq!(first_call(&trace, "b"), (1001.0, 3000.0));
        assert_eq!(first_call(&trace, "a"), (8001.0, 10_000.0));
        assert_eq!(first_call(&trace, "a"), first_call(&trace, "c"));
        let about = &trace["otherData"];
        assert_eq!((&about["times_differ_by_ns_at_most"], &about["complete"]), (&3_500.into(), &true.into()));
        assert_eq!(about["hosts"][1]["clock"]["error_ns"], 500);
    }

    #[test]
    fn what_has_no_clock_or_is_no_whole_trace_is_refused() {
        let mut without = Vec::new();
        write(&window(), &mut without).unwrap();
        let refused = |text: &[u8]| merged(&[of("a", 9, 1), ("b.json".into(), text.into())]).unwrap_err().to_string();
        assert!(refused(&without).starts_with("host h0 did not know the cluster's common clock"));
        let (_, whole) = of("b", 9, 1);
        let head = whole.iter().position(|byte| *byte == b'\n').unwrap();
        let other = |line: &[u8]| [&whole[..=head], line, b"\n]}\n"].concat();
        let [number, bare] = [&b"5,"[..], b"{}"].map(other);
        for part in [&b"{}"[..], b"", &whole[..whole.len() / 2], &whole[..whole.len() - 3], &number, &bare] {
            assert!(refused(part).starts_with("b.json is no trace that `mccsctl trace` has written"));
        }
    }
}
