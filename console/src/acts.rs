//! Acts: hands on what the holder of a token has signed, and says what came of it. The console judges nothing, and keeps nothing.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{self, HeaderValue};
use mccs_control::acts::{ActRefusal, SignedAct};
use mccs_control::documents::CONTROLLER_ANSWERS_WITHIN;
use mccs_control::{ControlAnswer, ControlError, ControlRequest, call_within};
use mccs_controller::messages::answer::ControllerAnswer;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;

use crate::answer::{self, Answer};
use crate::signature::NoSignature;

/// Acts at a time, of the connections that the service takes.
const ACTS_MAX: usize = 4;

/// Hands acts on.
pub struct Acts(Arc<Semaphore>);

impl Acts {
    pub fn new() -> Self {
        Acts(Arc::new(Semaphore::new(ACTS_MAX)))
    }

    /// The turn, unless as many acts are under way as may be.
    pub fn turn(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.0).try_acquire_owned().ok()
    }
}

/// Asks the service. The act goes on where nobody waits for its outcome any more.
pub async fn act(turn: OwnedSemaphorePermit, socket: PathBuf, act: SignedAct) -> Result<ControlAnswer, String> {
    let asked = spawn_blocking(move || {
        let _turn = turn;
        call_within(&socket, &ControlRequest::Act { act }, CONTROLLER_ANSWERS_WITHIN)
    });
    match asked.await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error @ ControlError::NoAnswer(_))) => {
            Err(format!("{error}; the act may still be done: look at the history"))
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// The service's answer, as HTTP has it.
pub fn outcome(told: ControlAnswer) -> Answer {
    match told {
        ControlAnswer::ActRefused(refusal) => refused(&refusal),
        ControlAnswer::Refused(reason) => answer::error(StatusCode::CONFLICT, "refused", &reason),
        ControlAnswer::TryAgain(reason) => answer::error(StatusCode::SERVICE_UNAVAILABLE, "busy", &reason),
        ControlAnswer::NoTenant => {
            let why = "no tenant of that name was added while the service ran";
            answer::error(StatusCode::NOT_FOUND, "no_tenant", why)
        }
        told => match failure(&told) {
            Some(reason) => answer::error(StatusCode::CONFLICT, "refused", &reason),
            None => done(&told),
        },
    }
}

/// Why what was to be put in force is not.
fn failure(told: &ControlAnswer) -> Option<String> {
    let ControlAnswer::Controller(answer) = told else { return None };
    let ControllerAnswer::Applied(applied) = &**answer else { return None };
    applied.failure()
}

fn done(told: &ControlAnswer) -> Answer {
    match serde_json::to_vec(&serde_json::json!({ "answer": told })) {
        Ok(body) => answer::json(Bytes::from(body)),
        Err(error) => answer::error(StatusCode::INTERNAL_SERVER_ERROR, "answer", &error.to_string()),
    }
}

fn refused(refusal: &ActRefusal) -> Answer {
    let status = match refusal {
        ActRefusal::Wrong | ActRefusal::Expired | ActRefusal::Removed => StatusCode::UNAUTHORIZED,
        ActRefusal::Spent | ActRefusal::NoRight(_) => StatusCode::FORBIDDEN,
        ActRefusal::Replayed => StatusCode::CONFLICT,
        ActRefusal::TooManyWrong => StatusCode::TOO_MANY_REQUESTS,
        ActRefusal::Unreadable(_) => StatusCode::BAD_REQUEST,
    };
    challenging(answer::error(status, refusal.code(), &refusal.to_string()))
}

/// Without a signature that can be read.
pub fn unsigned(why: NoSignature) -> Answer {
    challenging(match why {
        NoSignature::Absent => answer::error(
            StatusCode::UNAUTHORIZED,
            "no_token",
            "acts are signed with a token: Authorization: mccs id=\"…\", nonce=\"…\", mac=\"…\"",
        ),
        NoSignature::Malformed => answer::error(
            StatusCode::BAD_REQUEST,
            "bad_signature",
            "a signature is one header: Authorization: mccs id=\"…\", nonce=\"…\", mac=\"…\", of hexadecimal digits",
        ),
    })
}

/// HTTP wants to know how one may ask. No browser has a window for this scheme.
fn challenging(mut answer: Answer) -> Answer {
    if answer.status() == StatusCode::UNAUTHORIZED {
        answer.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("mccs"));
    }
    answer
}
