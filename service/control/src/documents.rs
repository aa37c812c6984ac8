//! Documents: what `mccsctl --json` prints of a command that looks, for `mccsctl` and the console alike. docs/JSON.md has their keys.
//!
//! A service's answer is handed on as it came where the document is no other: of thousands of communicators it is a megabyte.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value};

use mccs_controller::messages::answer::ControllerRequest;
use mccs_telemetry::stuck::StuckClass;

use crate::client::ANSWER_WITHIN;
use crate::cluster::{ClusterHost, ClusterView, HostSummary, StuckSummary};
use crate::overview::Overview;
use crate::{ControlAnswer, ControlError, ControlRequest, call, call_for_text, call_within};

/// Hosts may take seconds to agree, and again to go back.
pub const CONTROLLER_ANSWERS_WITHIN: Duration = Duration::from_secs(90);
/// Hosts look for what is stuck for some seconds.
const HOSTS_ANSWER_WITHIN: Duration = Duration::from_secs(15);

/// Why there is no document.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The service could not be asked.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// It does not want to.
    #[error("refused: {0}")]
    Refused(String),
    /// Nobody may ask other hosts.
    #[error("service.toml names no [controller], whose agents ask other hosts: ask on each host")]
    NoController,
    /// It is of another version.
    #[error("the service answered something else")]
    Answer,
}

/// Documents to look at.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Document {
    /// `show`.
    Show,
    /// `hosts`.
    Hosts,
    /// `gpus`.
    Gpus,
    /// `sessions`.
    Sessions,
    /// `communicators`.
    Communicators,
    /// `joining`.
    Joining,
    /// `failed`.
    Failed,
    /// `engines`.
    Engines,
    /// `watch`, without `accounts`.
    Overview,
    /// `flows`.
    Flows,
    /// `links`.
    Links,
    /// `cluster`.
    Cluster,
    /// `stuck`.
    Stuck,
    /// `why-stuck` of a communicator.
    WhyStuck(u64),
    /// The same at one look, whatever waits: for comparing ranks of several hosts.
    Accounts(u64),
    /// `policy show`.
    Policy,
    /// `policy history`.
    History {
        /// Only what operators did.
        acts: bool,
    },
    /// `policy diff` of a file with this text.
    Diff(String),
}

impl Document {
    /// The request to a service whose answer is the document.
    fn request(&self) -> Option<ControlRequest> {
        let controller = |request| ControlRequest::Controller { request };
        Some(match self {
            Document::Hosts => ControlRequest::Hosts,
            Document::Gpus => ControlRequest::Gpus,
            Document::Sessions => ControlRequest::Sessions,
            Document::Communicators => ControlRequest::Communicators,
            Document::Joining => ControlRequest::Joining,
            Document::Failed => ControlRequest::Failed,
            Document::Engines => ControlRequest::Engines,
            Document::WhyStuck(communicator) => ControlRequest::WhyStuck { communicator: *communicator },
            Document::Accounts(communicator) => ControlRequest::Accounts { communicator: *communicator },
            Document::Policy => controller(ControllerRequest::Show),
            Document::History { acts } => controller(ControllerRequest::History { acts: *acts }),
            Document::Diff(text) => {
                controller(ControllerRequest::Diff { name: "the policy".to_owned(), text: text.clone() })
            }
            Document::Show
            | Document::Overview
            | Document::Flows
            | Document::Links
            | Document::Cluster
            | Document::Stuck => return None,
        })
    }

    /// Asks the service that listens on `socket`. Returns JSON without spaces.
    ///
    /// # Errors
    /// [`DocumentError`].
    pub fn text(&self, socket: &Path) -> Result<Vec<u8>, DocumentError> {
        if let Some(request) = self.request() {
            let within = match request {
                ControlRequest::Controller { .. } => CONTROLLER_ANSWERS_WITHIN,
                _ => ANSWER_WITHIN,
            };
            return unless_refused(call_for_text(socket, &request, within)?);
        }
        let text = |value: &Value| serde_json::to_vec(value).map_err(|error| ControlError::Answer(error).into());
        match self {
            Document::Overview => inner(call_for_text(socket, &ControlRequest::Overview, ANSWER_WITHIN)?, "overview"),
            Document::Flows => text(&serde_json::json!({ "flows": overview(socket)?.flows })),
            Document::Links => text(&serde_json::json!({ "links": overview(socket)?.paths })),
            Document::Cluster => {
                let view = ask_cluster(socket, false)?.ok_or(DocumentError::NoController)?;
                text(&serde_json::json!({ "cluster": view }))
            }
            Document::Stuck => text(&serde_json::json!({ "stuck": stuck(socket)? })),
            _ => text(&show(socket)?),
        }
    }

    /// The same for people to read.
    ///
    /// # Errors
    /// As [`Document::text`].
    pub fn pretty(&self, socket: &Path) -> Result<String, DocumentError> {
        let value: Value = serde_json::from_slice(&self.text(socket)?).map_err(ControlError::Answer)?;
        pretty(&value)
    }
}

/// Any document for people to read.
///
/// # Errors
/// It is none.
pub fn pretty(value: &impl Serialize) -> Result<String, DocumentError> {
    serde_json::to_string_pretty(value).map_err(|error| ControlError::Answer(error).into())
}

/// A document of one key with the answer of that name.
fn inner(text: Vec<u8>, key: &str) -> Result<Vec<u8>, DocumentError> {
    let begin = format!("{{\"{key}\":");
    if let Some(value) = text.strip_prefix(begin.as_bytes()).and_then(|rest| rest.strip_suffix(b"}")) {
        return Ok(value.to_vec());
    }
    unless_refused(text).and(Err(DocumentError::Answer))
}

/// The answer, unless it says that there is none.
fn unless_refused(text: Vec<u8>) -> Result<Vec<u8>, DocumentError> {
    if text.starts_with(b"{\"refused\"") {
        let answer = serde_json::from_slice(&text).map_err(ControlError::Answer)?;
        return Err(match answer {
            ControlAnswer::Refused(reason) => DocumentError::Refused(reason),
            _ => DocumentError::Answer,
        });
    }
    Ok(text)
}

/// The service's overview.
///
/// # Errors
/// [`DocumentError`].
pub fn overview(socket: &Path) -> Result<Overview, DocumentError> {
    match call(socket, &ControlRequest::Overview)? {
        ControlAnswer::Overview(overview) => Ok(*overview),
        ControlAnswer::Refused(reason) => Err(DocumentError::Refused(reason)),
        _ => Err(DocumentError::Answer),
    }
}

/// All that `show` shows, as one document.
fn show(socket: &Path) -> Result<Value, DocumentError> {
    let parts = [
        Document::Hosts,
        Document::Gpus,
        Document::Sessions,
        Document::Communicators,
        Document::Joining,
        Document::Failed,
        Document::Engines,
    ];
    let mut all = Map::new();
    for part in parts {
        // Answers are objects, with what was asked for as their key: no two are the same.
        let told: Map<String, Value> = serde_json::from_slice(&part.text(socket)?).map_err(ControlError::Answer)?;
        all.extend(told);
    }
    Ok(Value::Object(all))
}

/// Summaries of all hosts; none if nobody may ask them.
///
/// # Errors
/// [`DocumentError`].
pub fn ask_cluster(socket: &Path, stuck: bool) -> Result<Option<ClusterView>, DocumentError> {
    match call_within(socket, &ControlRequest::Cluster { stuck }, HOSTS_ANSWER_WITHIN)? {
        ControlAnswer::Cluster(view) => Ok(Some(*view)),
        ControlAnswer::NoController => Ok(None),
        ControlAnswer::Refused(reason) => Err(DocumentError::Refused(reason)),
        _ => Err(DocumentError::Answer),
    }
}

/// Stuck communicators of the whole cluster. On a host that belongs to none, or where no controller is named, what is stuck on it:
/// `asked` is `this host` then.
///
/// # Errors
/// [`DocumentError`].
pub fn stuck(socket: &Path) -> Result<ClusterView, DocumentError> {
    let is_alone = matches!(call(socket, &ControlRequest::Hosts)?, ControlAnswer::Hosts(hosts) if hosts.is_empty());
    let of_all = if is_alone { None } else { ask_cluster(socket, true)? };
    of_all.map_or_else(|| stuck_here(socket), Ok)
}

/// The same view, of a host without a cluster.
fn stuck_here(socket: &Path) -> Result<ClusterView, DocumentError> {
    let ControlAnswer::Communicators(comms) = call(socket, &ControlRequest::Communicators)? else {
        return Err(DocumentError::Answer);
    };
    let mut summary = HostSummary::default();
    for comm in comms {
        let communicator = comm.communicator;
        match call(socket, &ControlRequest::WhyStuck { communicator })? {
            ControlAnswer::Stuck(report) => {
                summary.looked_at += 1;
                if !matches!(report.class, StuckClass::NotStuck | StuckClass::Running) {
                    let (class, part, culprits) = (report.class, report.part, report.culprits);
                    let (tenant, job) = (comm.tenant, comm.job);
                    summary.stuck.push(StuckSummary { communicator, part, tenant, job, class, culprits });
                }
            }
            // It has ended meanwhile.
            _ => summary.not_looked_at += 1,
        }
    }
    let host = ClusterHost { host: THIS_HOST.to_owned(), summary: Some(summary), trouble: None };
    Ok(ClusterView { asked: THIS_HOST.to_owned(), hosts: vec![host] })
}

/// Name in [`stuck`] of a host without a controller.
pub const THIS_HOST: &str = "this host";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_handed_on_and_a_refusal_is_an_error() {
        let inner = |text: &str| inner(text.into(), "overview");
        assert_eq!(inner(r#"{"overview":{"a":{}}}"#).unwrap(), br#"{"a":{}}"#);
        assert!(matches!(inner(r#"{"refused":"why"}"#), Err(DocumentError::Refused(why)) if why == "why"));
        assert!(matches!(inner(r#"{"sessions":[]}"#), Err(DocumentError::Answer)));
        assert!(matches!(unless_refused(br#"{"refused":7}"#.to_vec()), Err(DocumentError::Control(_))));
    }

    #[test]
    fn answers_are_written_as_they_are_taken_apart() {
        let answer = serde_json::to_vec(&ControlAnswer::Refused("why".to_owned())).unwrap();
        assert!(matches!(unless_refused(answer), Err(DocumentError::Refused(why)) if why == "why"));
        let gpus = serde_json::to_vec(&ControlAnswer::Gpus(Vec::new())).unwrap();
        assert_eq!(inner(gpus, "gpus").unwrap(), b"[]");
    }
}
