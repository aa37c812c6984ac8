//! Operators' requests about communicators whose root is on another host: forwarded there, and
//! answered.
//!
//! ```text
//! operator --> OperatorRequest --> exchange --> the root's host:  OperatorRequest --> checked --> as for an operator there
//! operator <-- the answer, or the time is over <-- exchange <-- OperatorResponse <-- whatever became of it
//! ```
//!
//! The operator's host decides who may ask: the control socket is root's and the service's own user's. Between hosts links are
//! authenticated, and the root hears only hosts that have ranks of the communicator.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mccs_exchange::protocol::{AccountBody, Answer, ChangeBody, ChangeRequest, CommId, Name, Request, Text};
use mccs_model::Refused;
use mccs_runtime::Sender;
use serde::{Deserialize, Serialize};

use crate::proxy::mail::message::{OperatorMessage, ProxyMessage};
use crate::proxy::mail::reply_to::{
    ForwardedRequest, OperatorAnswer, OperatorRequest, OperatorResult, Reconfigured, ReplyTo,
};
use crate::proxy::operators::reconfigure::{ChangeTerms, PREPARE_TIMEOUT, reconfigure};
use crate::proxy::state::State;
use crate::proxy::state::communicators::Communicators;

/// Time that the root's host has to answer: hosts agree within [`PREPARE_TIMEOUT`]. Shorter than the operator waits.
const REQUEST_TIME: Duration = Duration::from_secs(PREPARE_TIMEOUT.as_secs() + 2);
/// Requests that wait for other hosts at a time; more are refused.
const REQUESTS_MAX: usize = 64;

/// The root's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum ForwardedResponse {
    Reconfigured { epoch: u64, cut: u64 },
    Done,
    Refused { reason: String },
}

impl ForwardedResponse {
    /// The answer of the root's host, for the operator.
    fn read(body: &AccountBody, root: &Name) -> Result<OperatorAnswer, String> {
        match serde_json::from_slice(body.bytes()) {
            Ok(ForwardedResponse::Reconfigured { epoch, cut }) => {
                Ok(OperatorAnswer::Reconfigured(Reconfigured { epoch, cut }))
            }
            Ok(ForwardedResponse::Done) => Ok(OperatorAnswer::Done),
            Ok(ForwardedResponse::Refused { reason }) => Err(format!("host {root}: {}", Text::new(reason))),
            Err(error) => Err(format!("what host {root} answers cannot be read: {error}")),
        }
    }
}

struct Waiting {
    reply_to: ReplyTo,
    comm: CommId,
    until: Instant,
}

/// Operators who wait for other hosts, by the number of their question.
#[derive(Default)]
pub(crate) struct ForwardedRequests {
    next: u64,
    waiting: BTreeMap<u64, Waiting>,
}

impl ForwardedRequests {
    /// When the first has waited for too long.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.waiting.values().map(|waiting| waiting.until).min()
    }

    /// Question to the root's host, whose answer `reply_to` waits for. None where it is refused, and answered here.
    fn ask(&mut self, comm: CommId, request: &OperatorRequest, reply_to: ReplyTo, now: Instant) -> Option<Request> {
        let body = serde_json::to_vec(request).ok().and_then(|json| ChangeBody::new(&json));
        let refusal = match body {
            None => "the change is too long to be told to other hosts".to_owned(),
            Some(_) if self.waiting.len() >= REQUESTS_MAX => {
                format!("{REQUESTS_MAX} changes wait for other hosts; try again")
            }
            Some(body) => {
                self.next += 1;
                let (question, until) = (self.next, now + REQUEST_TIME);
                self.waiting.insert(question, Waiting { reply_to, comm: comm.clone(), until });
                return Some(Request::OperatorRequest(ChangeRequest { comm, question, body }));
            }
        };
        reply_to.answer(Err(refusal.into()));
        None
    }

    /// The root's host has answered.
    pub(crate) fn answer(&mut self, Answer { comm, question, body }: &Answer) {
        if let Some(waiting) = self.waiting.remove(question).filter(|waiting| waiting.comm == *comm) {
            waiting.reply_to.answer(ForwardedResponse::read(body, &comm.root).map_err(Refused::from));
        }
    }

    /// Operators wait no longer than they would anyway, nor for a communicator that has ended.
    pub(crate) fn end_late(&mut self, comms: &Communicators, now: Instant) {
        let lives = |comm: &CommId| {
            comms.called(comm).and_then(|comm| comms.get(comm)).is_some_and(|live| live.failure.is_none())
        };
        for (_, Waiting { reply_to, comm, until }) in
            self.waiting.extract_if(.., |_, waiting| waiting.until <= now || !lives(&waiting.comm))
        {
            let reason = match until <= now {
                true => format!(
                    "host {} has not answered within {REQUEST_TIME:?}: `mccsctl communicators` says which strategy is in force",
                    comm.root
                ),
                false => "the communicator has ended".to_owned(),
            };
            reply_to.answer(Err(reason.into()));
        }
    }
}

/// Message to the host of an operator, with the result of the request. None where no message holds it.
pub(crate) fn response(request: ForwardedRequest, answer: OperatorResult) -> Option<Request> {
    let response = match answer {
        Ok(OperatorAnswer::Reconfigured(Reconfigured { epoch, cut })) => ForwardedResponse::Reconfigured { epoch, cut },
        Ok(_) => ForwardedResponse::Done,
        Err(refused) => ForwardedResponse::Refused { reason: Text::new(refused.reason).as_str().to_owned() },
    };
    let body = AccountBody::new(&serde_json::to_vec(&response).ok()?)?;
    let ForwardedRequest { comm, from: to, question } = request;
    Some(Request::OperatorResponse { to, answer: Answer { comm, question, body } })
}

impl ForwardedRequests {
    /// An operator here wants something of the communicator with a number.
    pub(crate) fn operator_request(
        &mut self,
        state: &mut State,
        number: u64,
        request: &OperatorRequest,
        reply_to: ReplyTo,
    ) {
        let now = state.now();
        if let Err(problems) = request.check() {
            return reply_to.answer(Err(problems.into()));
        }
        let live = state.comms.numbered(number).and_then(|comm| state.comms.get(comm));
        let Some(live) = live else {
            return reply_to.answer(Err(format!("there is no communicator {number} here").into()));
        };
        let id = live.span.as_ref().map(|span| span.comm.clone());
        match id.filter(|comm| !state.out.exchange.is_own(&comm.root)) {
            Some(_) if live.failure.is_some() => reply_to.answer(Err("the communicator has failed".into())),
            Some(comm) => {
                if let Some(request) = self.ask(comm, request, reply_to, now) {
                    state.out.exchange.ask(request);
                }
            }
            None => execute(state, number, request, reply_to),
        }
    }
}

/// Executes a request about a communicator whose root is here, or that has no other hosts.
fn execute(state: &mut State, number: u64, request: &OperatorRequest, reply_to: ReplyTo) {
    match request {
        OperatorRequest::Change { change, window } => {
            reconfigure(state, number, change, ChangeTerms { window: *window, expected: None }, reply_to);
        }
        OperatorRequest::Unpin => {
            reply_to.answer(unpin(state, number).map(|()| OperatorAnswer::Done).map_err(Refused::from));
        }
    }
}

/// The controller may decide again for a communicator.
fn unpin(state: &mut State, number: u64) -> Result<(), String> {
    let live = state.comms.numbered(number).and_then(|comm| state.comms.get(comm));
    let live = live.ok_or_else(|| format!("there is no communicator {number} here"))?;
    if !live.info.placed.as_ref().is_some_and(|placed| placed.pin(false)) {
        return Err(format!("communicator {number} is not pinned"));
    }
    state.out.registry.note_comms();
    Ok(())
}

/// An operator on another host wants something of a communicator whose root is here. `own` is the proxy engine's mailbox.
pub(crate) fn forwarded_request(
    state: &mut State,
    asked: ForwardedRequest,
    body: &ChangeBody,
    own: Sender<ProxyMessage>,
) {
    let (comm, from) = (&asked.comm, &asked.from);
    let number = state.comms.called(comm).and_then(|handle| state.comms.get(handle)).map(|live| live.info.number);
    let request = OperatorRequest::read(body);
    tracing::info!(%comm, %from, ?request, "an operator on another host wants something of a communicator");
    let reply_to = ReplyTo::to(move |answer| {
        let _ = own.send(OperatorMessage::ForwardedResponse { request: asked, answer }.into());
    });
    match (number, request) {
        (Some(number), Ok(request)) => execute(state, number, &request, reply_to),
        (None, _) => reply_to.answer(Err("the communicator has ended there".into())),
        (_, Err(reason)) => reply_to.answer(Err(reason.into())),
    }
}

#[cfg(test)]
mod tests {
    use mccs_exchange::limits::{ACCOUNT_BYTES_MAX, TEXT_BYTES_MAX};
    use proptest::prelude::*;

    use super::*;

    fn root() -> Name {
        Name::new("host-a").expect("a name")
    }

    /// Requests that no service makes: each is refused, with a reason, and nothing else happens.
    #[test]
    fn requests_of_broken_hosts_are_refused() {
        let deep = "[".repeat(60_000);
        let unreadable = [
            "",
            "null",
            "\"unpinned\"",
            "{\"change\":{}}",
            "{\"change\":{\"change\":{},\"window\":-1}}",
            "{\"change\":{\"change\":{},\"window\":4294967296}}",
            "{\"change\":{\"change\":{\"rings\":[[0.5]]},\"window\":null}}",
            "{\"change\":{\"change\":{\"colour\":1},\"window\":null}}",
            "\"unpin\" \"unpin\"",
            "\u{0}\u{0}",
            &deep,
        ];
        for json in unreadable {
            let body = ChangeBody::new(json.as_bytes()).expect("short enough");
            let refusal = OperatorRequest::read(&body).expect_err(json.get(..100).unwrap_or(json));
            assert!(refusal.starts_with("it cannot be read: ") && refusal.len() < 200, "{refusal}");
        }
        let body = ChangeBody::new(&[0xff; 100]).expect("short enough");
        assert!(OperatorRequest::read(&body).is_err(), "no text at all");
        // Readable, and nothing that an operator here could ask for.
        let json = r#"{"change":{"change":{"channels":0},"window":null}}"#;
        let refusal =
            OperatorRequest::read(&ChangeBody::new(json.as_bytes()).expect("short enough")).expect_err("no channels");
        assert!(refusal.contains("channels"), "{refusal}");
    }

    /// A root's answer is told to the operator whatever it is, as text that is not too long.
    #[test]
    fn answers_of_broken_roots_are_told_as_such() {
        for json in
            ["", "{}", "\"denied\"", "{\"reconfigured\":{\"epoch\":-1,\"cut\":0}}", "{\"refused\":{\"reason\":7}}"]
        {
            let body = AccountBody::new(json.as_bytes()).expect("short enough");
            let refusal = ForwardedResponse::read(&body, &root()).expect_err(json);
            assert!(refusal.starts_with("what host host-a answers cannot be read: "), "{refusal}");
        }
        let reason = "x".repeat(ACCOUNT_BYTES_MAX - 100);
        let body = serde_json::to_vec(&ForwardedResponse::Refused { reason }).expect("json");
        let refusal =
            ForwardedResponse::read(&AccountBody::new(&body).expect("short enough"), &root()).expect_err("refused");
        assert!(refusal.len() <= TEXT_BYTES_MAX + 20, "{} bytes", refusal.len());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = OperatorRequest::read(&ChangeBody::new(&bytes).expect("short enough"));
            let _ = ForwardedResponse::read(&AccountBody::new(&bytes).expect("short enough"), &root());
        }
    }
}
