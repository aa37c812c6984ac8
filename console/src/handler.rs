//! A request's way: the gate, the route, the desk, the answer.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::header::HeaderValue;
use hyper::{HeaderMap, Request, StatusCode, header};
use mccs_config::limits::POLICY_BYTES_MAX;
use mccs_control::acts::ACT_BYTES_MAX;
use mccs_control::documents::Document;
use mccs_control::trace_window::TraceError;
use tokio::time::timeout;

use crate::acts::{self, Acts};
use crate::answer::{self, Answer};
use crate::desk::{Desk, Failure, Look};
use crate::gate::{Gate, Refusal};
use crate::page;
use crate::routes::{Route, route};
use crate::signature;
use crate::trace::Tracer;

/// How long a body may take.
const BODY_WITHIN: Duration = Duration::from_secs(5);

/// State that all connections share.
pub struct Handler {
    gate: Gate,
    desk: Arc<Desk>,
    tracer: Tracer,
    acts: Acts,
}

impl Handler {
    pub fn new(gate: Gate, desk: Desk) -> Self {
        Handler { gate, desk: Arc::new(desk), tracer: Tracer::new(), acts: Acts::new() }
    }

    /// Answers a request that came to the address `own`.
    pub async fn answer(&self, request: Request<Incoming>, own: SocketAddr) -> Answer {
        let (parts, body) = request.into_parts();
        if let Err(refusal) = self.gate.admit(&parts, own) {
            return refused(refusal);
        }
        let tags = &parts.headers;
        match route(&parts.method, parts.uri.path(), parts.uri.query().unwrap_or_default()) {
            Route::Page(name) => page_file(&name, tags),
            Route::Description => answer::json(crate::openapi::description()),
            Route::Document(document) => found(self.desk.look(&document).await, tags),
            Route::Diff => self.diff(body).await,
            Route::Act => self.act(tags, body).await,
            Route::Trace { seconds, communicator } => self.trace(seconds, communicator).await,
            Route::NotFound => answer::error(StatusCode::NOT_FOUND, "not_found", "there is nothing at this path"),
            Route::BadQuery(why) => answer::error(StatusCode::BAD_REQUEST, "bad_query", why),
            Route::MethodNotAllowed(allowed) => {
                let mut answer =
                    answer::error(StatusCode::METHOD_NOT_ALLOWED, "method", "this path takes another method");
                answer.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
                answer
            }
        }
    }

    async fn diff(&self, body: Incoming) -> Answer {
        match text_of(body, POLICY_BYTES_MAX.0 as usize).await {
            Ok(text) => self.desk.ask(Document::Diff(text)).await.map_or_else(failed, answer::json),
            Err(answer) => answer,
        }
    }

    async fn act(&self, headers: &HeaderMap, body: Incoming) -> Answer {
        let body = match text_of(body, ACT_BYTES_MAX).await {
            Ok(body) => body,
            Err(answer) => return answer,
        };
        let signed = match signature::signed(headers, body) {
            Ok(signed) => signed,
            Err(why) => return acts::unsigned(why),
        };
        let Some(turn) = self.acts.turn() else { return failed(Failure::Busy) };
        match acts::act(turn, self.desk.socket().clone(), signed).await {
            Ok(told) => acts::outcome(told),
            Err(reason) => failed(self.desk.away(&reason)),
        }
    }

    async fn trace(&self, seconds: f64, communicator: Option<u64>) -> Answer {
        let Some(turn) = self.tracer.turn() else {
            let why = "another trace is being made: try again when it has ended";
            return answer::error(StatusCode::TOO_MANY_REQUESTS, "busy", why);
        };
        let (socket, duration) = (self.desk.socket().clone(), Duration::from_secs_f64(seconds));
        match self.tracer.trace(turn, socket, duration, communicator).await {
            Ok(text) => {
                let mut answer = answer::json(text);
                let saved = HeaderValue::from_static("attachment; filename=\"mccs-trace.json\"");
                answer.headers_mut().insert(header::CONTENT_DISPOSITION, saved);
                answer
            }
            Err(error @ (TraceError::Control(_) | TraceError::Answer | TraceError::Records(_))) => {
                failed(self.desk.away(&error.to_string()))
            }
            Err(error @ TraceError::NoCommunicator(..)) => {
                answer::error(StatusCode::NOT_FOUND, "no_communicator", &error.to_string())
            }
            Err(TraceError::Refused(reason)) => failed(Failure::Refused(reason)),
        }
    }
}

fn refused(Refusal { status, code, message }: Refusal) -> Answer {
    closing(answer::error(status, code, message))
}

/// The connection ends with it: what follows may be anything.
fn closing(mut answer: Answer) -> Answer {
    answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    answer
}

fn failed(failure: Failure) -> Answer {
    match failure {
        Failure::Away { reason, since } => {
            let body = serde_json::json!({ "error": { "code": "service_away", "message": reason, "since": since } });
            answer::of(StatusCode::SERVICE_UNAVAILABLE, "application/json", body.to_string().into())
        }
        Failure::Refused(reason) => answer::error(StatusCode::CONFLICT, "refused", &reason),
        Failure::NoController => {
            let why = "service.toml names no [controller], whose agents ask other hosts";
            answer::error(StatusCode::NOT_FOUND, "no_controller", why)
        }
        Failure::Busy => {
            let why = "too many other questions are being answered: try again in some seconds";
            answer::error(StatusCode::SERVICE_UNAVAILABLE, "busy", why)
        }
    }
}

fn found(look: Look, headers: &HeaderMap) -> Answer {
    match look.found {
        Ok(found) if is_known(headers, &found.tag) => answer::unchanged(&found.tag),
        Ok(found) => answer::tagged(answer::json(found.text), &found.tag),
        Err(failure) => failed(failure),
    }
}

fn page_file(name: &str, headers: &HeaderMap) -> Answer {
    let Some(file) = page::file(name) else {
        return answer::error(StatusCode::NOT_FOUND, "not_found", "there is nothing at this path");
    };
    let tag = file.tag();
    if is_known(headers, &tag) {
        return answer::unchanged(&tag);
    }
    let body = Bytes::from_static(file.text.as_bytes());
    answer::tagged(answer::of(StatusCode::OK, file.kind, body), &tag)
}

/// Whether the browser has what has this tag.
fn is_known(headers: &HeaderMap, tag: &str) -> bool {
    let known = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|tags| tags.to_str().ok());
    known.flat_map(|tags| tags.split(',')).any(|known| known.trim().trim_start_matches("W/") == tag)
}

/// A body's text, or why there is none.
async fn text_of(body: Incoming, bytes_max: usize) -> Result<String, Answer> {
    match timeout(BODY_WITHIN, read(body, bytes_max)).await {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(BodyError::TooLong)) => {
            let why = format!("a body has {} KiB at most here", bytes_max >> 10);
            Err(closing(answer::error(StatusCode::PAYLOAD_TOO_LARGE, "too_long", &why)))
        }
        Ok(Err(BodyError::Broken)) => {
            Err(closing(answer::error(StatusCode::BAD_REQUEST, "bad_body", "the body is no UTF-8 text")))
        }
        Err(_) => Err(closing(answer::error(StatusCode::REQUEST_TIMEOUT, "slow", "the body did not come in time"))),
    }
}

enum BodyError {
    TooLong,
    Broken,
}

/// A text of at most so many bytes.
async fn read(mut body: Incoming, bytes_max: usize) -> Result<String, BodyError> {
    let mut bytes = Vec::new();
    while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else { continue };
        if bytes.len() + data.len() > bytes_max {
            return Err(BodyError::TooLong);
        }
        bytes.extend_from_slice(&data);
    }
    String::from_utf8(bytes).map_err(|_| BodyError::Broken)
}
