//! Metrics for an OpenTelemetry collector: OTLP over HTTP, with JSON, pushed by a thread of its own.
//!
//! The families are those that Prometheus is told. Sums are cumulative: a push that is lost costs a point of a graph, so none is
//! kept or repeated, and there is one message in memory at a time. No engine waits: the thread looks as a scrape does.
//!
//! Deliberately absent: gRPC, TLS and passwords. A collector on this host does that better.

mod encode;

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mccs_config::service::Otlp;
use mccs_handover::Handover;
use mccs_http::{Connection, Endpoint, Request, Response};
use mccs_registry::Overseer;
use serde::Deserialize;

use self::encode::{Resource, Times, encode};

/// Time for a push, or the interval where that is shorter.
const PUSH_WITHIN: Duration = Duration::from_secs(10);
/// Longest answer: collectors say what they have rejected, and why.
const ANSWER_BYTES_MAX: usize = 64 << 10;
/// Characters of a collector's answer in the log.
const REASON_CHARS_MAX: usize = 200;

/// Pushes until it is dropped. A push that is under way goes on to its end, at most ten seconds.
pub struct OtlpPusher {
    /// The thread ends when this does.
    _stop: Sender<()>,
}

impl OtlpPusher {
    /// Begins to push, the first time after an interval. No push begins while the service is handed over; one that is under way ends.
    ///
    /// # Errors
    /// The kernel refuses a thread.
    pub fn start(otlp: &Otlp, overseer: Overseer, handover: Arc<Handover>) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let mut push = Push::new(otlp, overseer);
        let interval = otlp.interval.0;
        std::thread::Builder::new().name("mccs-otlp".into()).spawn(move || {
            let mut due = Instant::now() + interval;
            while let Err(RecvTimeoutError::Timeout) =
                stopped.recv_timeout(due.saturating_duration_since(Instant::now()))
            {
                if handover.may_be_seen() {
                    push.push();
                }
                // Pushes that took too long are left out.
                due = Instant::now().max(due + interval);
            }
        })?;
        Ok(OtlpPusher { _stop: stop })
    }
}

/// A pusher: its metrics, the collector, and how the last time went.
struct Push {
    endpoint: Endpoint,
    path: String,
    url: String,
    within: Duration,
    resource: Resource,
    /// When counters began, on the wall clock of then: it must not move with the clock.
    since_ns: u64,
    overseer: Overseer,
    connection: Option<Connection>,
    /// The last push has failed, and that was logged.
    has_failed: bool,
}

impl Push {
    fn new(otlp: &Otlp, overseer: Overseer) -> Self {
        let url = &otlp.url;
        Push {
            endpoint: Endpoint { is_tls: false, host: url.host.clone(), port: url.port },
            path: url.path.clone(),
            url: url.to_string(),
            within: otlp.interval.0.min(PUSH_WITHIN),
            resource: Resource { attributes: otlp.attributes.clone() },
            since_ns: now_ns().saturating_sub(overseer.since.elapsed().as_nanos() as u64),
            overseer,
            connection: None,
            has_failed: false,
        }
    }

    /// Pushes once, counts it, and logs what has changed.
    fn push(&mut self) {
        let times = Times { since_ns: self.since_ns, now_ns: now_ns() };
        let body = encode(&self.overseer.look(), &self.resource, times);
        let outcome = self.post(body.as_bytes());
        match &outcome {
            Err(reason) if !self.has_failed => {
                tracing::warn!(url = self.url, reason, "metrics could not be pushed; it is tried again each interval");
            }
            Ok(()) if self.has_failed => tracing::info!(url = self.url, "metrics are pushed again"),
            _ => {}
        }
        self.has_failed = outcome.is_err();
        self.overseer.registry.count_push(outcome);
    }

    fn post(&mut self, body: &[u8]) -> Result<(), String> {
        let until = Instant::now() + self.within;
        // A collector may end a quiet connection at any time: then another one is made.
        let kept = self.connection.take().filter(Connection::is_open);
        let mut connection = match kept {
            Some(connection) => connection,
            None => {
                let opened = Connection::open(&self.endpoint, None, until).map_err(|error| error.to_string())?;
                opened.with_answers_up_to(ANSWER_BYTES_MAX)
            }
        };
        let response = connection.post(&Request::new(&self.path, body), until).map_err(|error| error.to_string())?;
        self.connection = Some(connection);
        judge(&response)
    }
}

/// Answer to a push, which may be empty.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Answer {
    partial_success: PartialSuccess,
}

/// Part of a push that the collector has not taken.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct PartialSuccess {
    /// A number; as JSON writes 64 bits, a text.
    rejected_data_points: serde_json::Value,
    error_message: String,
}

/// Whether the collector has taken all.
fn judge(response: &Response) -> Result<(), String> {
    let Response { status, location, body } = response;
    match (status, location) {
        (200..=299, _) => {
            // Collectors answer a push of JSON in JSON; what is none says nothing.
            let PartialSuccess { rejected_data_points: count, error_message } =
                serde_json::from_slice::<Answer>(body).unwrap_or_default().partial_success;
            let count = count.as_u64().or_else(|| count.as_str()?.parse().ok()).unwrap_or(0);
            match count {
                0 => Ok(()),
                count => Err(format!("the collector has rejected {count} data points: {}", printable(&error_message))),
            }
        }
        (300..=399, Some(location)) => {
            Err(format!("the collector is at {}: write that as metrics.otlp.url", printable(location)))
        }
        _ => Err(format!("the collector answers {status}: {}", printable(&String::from_utf8_lossy(body)))),
    }
}

/// The beginning of what a stranger says, as a part of a line.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(REASON_CHARS_MAX).collect()
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests;
