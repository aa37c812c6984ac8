//! Communicators that are one to their caller: a whole and its parts, here and at the proxy engine of another device. What fails the one
//! fails all, with the first reason.
//!
//! Other services hear of it from each of them that has ranks there. Deliberately absent: who is part of what, which sessions check.

use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;
use mccs_registry::CommInfo;

use super::ProxyEngine;
use super::comm::Failure;
use super::joining::refuse_all;
use super::message::ProxyMessage;
use super::operation::JoinRequest;

impl ProxyEngine {
    /// A communicator has failed here: so have the whole that it is a part of, and its other parts.
    pub(super) fn fail_family(&mut self, info: &CommInfo, failure: &Failure) {
        if !info.family.fail(failure.class, &failure.message) || !info.family.has_parts() {
            return;
        }
        let whole = info.whole();
        self.other.send(ProxyMessage::FamilyFailed { whole, failure: failure.clone() });
        self.abort_family(whole, failure);
    }

    /// Ends what there is here of a caller's communicator, also what ranks are joining.
    pub(super) fn abort_family(&mut self, whole: u64, failure: &Failure) {
        let of_family = |(_, live): &(Handle, &super::comm::Comm)| live.info.whole() == whole && live.failure.is_none();
        let all: Vec<Handle> = self.comms.iter().filter(of_family).map(|(comm, _)| comm).collect();
        all.into_iter().for_each(|comm| self.abort(comm, failure.clone()));
        let is_of = |request: &JoinRequest| request.part.as_ref().is_some_and(|part| part.whole == whole);
        let refusal = SetupError { class: ErrorClass::Remote, message: failure.message.to_string() };
        for members in self.rendezvous.end_with(is_of) {
            refuse_all(&refusal, members);
        }
        self.withdraw_part(whole, failure);
    }
}
