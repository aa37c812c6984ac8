//! Admission of requests: which users a socket serves, which requests they may make, and how many
//! questions of observers other engines answer at a time.

use std::collections::BTreeMap;
use std::time::Instant;

use mccs_control::{Caller, ControlAnswer, ControlRequest, chunks};
use mccs_controller::messages::answer::ControllerRequest;
use mccs_ipc::handshake::Socket;

use super::tokens::{Judged, Tokens};

/// Questions of observers that engines here are answering at a time, also for those who have gone, besides one of each kind to all hosts,
/// and one comparison of a policy. More are refused: engines answer a limited number at a time, of which operators find the rest.
pub(super) const OBSERVERS_QUESTIONS_MAX: usize = 12;

/// Users that an engine serves, besides root and the service's own user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Nobody else; and these may ask for everything.
    Operators,
    /// Users with these numbers. All may only look, and hand on what holders of tokens have signed.
    Observers(Vec<u32>),
}

impl Access {
    pub(super) fn admits(&self, uid: u32) -> bool {
        let is_own = uid == 0 || uid == nix::unistd::geteuid().as_raw();
        is_own || matches!(self, Access::Observers(uids) if uids.contains(&uid))
    }

    fn allows(&self, request: &ControlRequest) -> bool {
        *self == Access::Operators || request.only_looks()
    }
}

/// Refuses a connection of a user who may not ask.
pub(super) fn turn_away(socket: &Socket, uid: u32) {
    let reason = "root and the service's own user may ask; at the observers' socket also users of [observers] in service.toml, which \
                  `mccsctl reload` reads";
    let refused = ControlAnswer::Refused(format!("user {uid} may not ask here: {reason}"));
    let told = chunks(&serde_json::to_vec(&refused).unwrap_or_default());
    let _ = socket.send_hello(0).and_then(|()| told.iter().try_for_each(|chunk| socket.send(chunk, &[])));
}

/// Engines that a request asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asks {
    /// This engine alone.
    Nobody,
    /// An engine here.
    Engine,
    /// All hosts of the cluster, what they have.
    AllHosts,
    /// The same, and what is stuck: each host looks at many communicators.
    WhatIsStuck,
    /// The controller, what it would decide for all communicators.
    Comparison,
}

impl Asks {
    fn of(request: &ControlRequest) -> Self {
        match request {
            ControlRequest::Cluster { stuck: true } => Asks::WhatIsStuck,
            ControlRequest::Cluster { stuck: false } => Asks::AllHosts,
            ControlRequest::Controller { request: ControllerRequest::Diff { .. } } => Asks::Comparison,
            ControlRequest::WhyStuck { .. } | ControlRequest::Accounts { .. } | ControlRequest::Controller { .. } => {
                Asks::Engine
            }
            _ => Asks::Nobody,
        }
    }
}

/// The caller, for history: the user, and the user with the command.
pub(super) struct By {
    pub(super) user: String,
    pub(super) line: String,
}

/// A request that may be made.
pub(super) struct Admitted {
    pub(super) request: ControlRequest,
    pub(super) by: By,
    pub(super) asks: Asks,
}

/// Decides about requests, and counts questions that other engines have not answered.
pub(super) struct Admission {
    access: Access,
    /// Questions without an answer, by connection; also of those who have gone.
    owed: BTreeMap<u64, Asks>,
}

impl Admission {
    pub(super) fn new(access: Access) -> Self {
        Admission { access, owed: BTreeMap::new() }
    }

    pub(super) fn access(&self) -> &Access {
        &self.access
    }

    /// Admits a request, or answers it.
    ///
    /// # Errors
    /// The answer: a refusal, or a token's view.
    pub(super) fn admit(
        &self,
        request: ControlRequest,
        by: &Caller,
        uid: u32,
        tokens: &Tokens,
    ) -> Result<Admitted, ControlAnswer> {
        if let ControlRequest::Act { act } = &request {
            // An operator's from here on, at whichever socket it came.
            return match tokens.judge(act, Instant::now()) {
                Ok(Judged::Request { request, by }) => {
                    Ok(Admitted { request, by: By { user: by.clone(), line: by }, asks: Asks::Nobody })
                }
                Ok(Judged::View(view)) => Err(ControlAnswer::Tokens(vec![view])),
                Err(refusal) => Err(ControlAnswer::ActRefused(refusal)),
            };
        }
        if !self.access.allows(&request) {
            let reason = "observers change nothing: ask at service.control_socket, as root or the service's user";
            return Err(ControlAnswer::Refused(reason.into()));
        }
        let asks = Asks::of(&request);
        if self.is_crowded(asks) {
            let reason = "as many questions of observers as may are being answered; try again in some seconds";
            return Err(ControlAnswer::Refused(reason.into()));
        }
        Ok(Admitted { request, by: By { user: by.user(uid), line: by.of_user(uid) }, asks })
    }

    /// Whether observers have asked as much as may: they are to leave operators room at other engines.
    fn is_crowded(&self, asks: Asks) -> bool {
        let asked = |whom: Asks| self.owed.values().filter(|owed| **owed == whom).count();
        self.access != Access::Operators
            && match asks {
                Asks::Nobody => false,
                Asks::Engine => asked(asks) >= OBSERVERS_QUESTIONS_MAX,
                Asks::AllHosts | Asks::WhatIsStuck | Asks::Comparison => asked(asks) > 0,
            }
    }

    /// Another engine is to answer a connection.
    pub(super) fn asked(&mut self, connection: u64, asks: Asks) {
        self.owed.insert(connection, asks);
    }

    /// It has answered.
    pub(super) fn answered(&mut self, connection: u64) {
        self.owed.remove(&connection);
    }
}
