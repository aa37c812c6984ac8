//! Admission of ranks to one communicator: duplicate GPUs and other refusals.

use mccs_ipc::types::ErrorClass;
use mccs_model::SetupError;

use crate::proxy::calls::operation::{JoinRequest, ProxyReply};

/// The mistake of two ranks of one process on one GPU: they would wait for each other in one context, of which the driver may never run
/// both. It is refused, since it would stand still now and then. Ranks of several processes take turns on a GPU, unless the operator
/// refuses them too.
pub(crate) fn shared_gpu(requests: &[JoinRequest], refuses_duplicates: bool) -> Option<String> {
    in_one_process(requests).or_else(|| duplicate_gpu(requests).filter(|_| refuses_duplicates))
}

fn duplicate_gpu(requests: &[JoinRequest]) -> Option<String> {
    requests.iter().enumerate().find_map(|(index, one)| {
        let gpu = one.gpu?;
        let other = requests[index + 1..].iter().find(|other| other.gpu == one.gpu)?;
        let (lower, upper) = (one.rank.min(other.rank), one.rank.max(other.rank));
        // The first words are NCCL's, which people search for.
        Some(format!(
            "Duplicate GPU detected : rank {lower} and rank {upper} both on CUDA device {gpu} of the service: give each a GPU of \
             its own, or set [cuda] duplicate_gpus = \"allow\" in service.toml"
        ))
    })
}

fn in_one_process(requests: &[JoinRequest]) -> Option<String> {
    let is_shared = |one: &JoinRequest, other: &JoinRequest| {
        let (session, pid) = (&one.session, one.session.peer.pid);
        let in_one_process = session.id == other.session.id || (pid != 0 && pid == other.session.peer.pid);
        in_one_process && one.gpu.is_some() && one.gpu == other.gpu
    };
    requests.iter().enumerate().find_map(|(index, one)| {
        let other = requests[index + 1..].iter().find(|other| is_shared(one, other))?;
        let (lower, upper, pid) = (one.rank.min(other.rank), one.rank.max(other.rank), one.session.peer.pid);
        Some(format!(
            "Duplicate GPU detected : ranks {lower} and {upper} of process {pid} are on one GPU, where they may wait for each other forever: \
             give each a process or a GPU of its own"
        ))
    })
}

/// The mistake of ranks of one service that say of a communicator that it is part of several.
pub(crate) fn of_two_families(requests: &[JoinRequest]) -> Option<String> {
    let what = |request: &JoinRequest| request.part.as_ref().map(|part| (part.whole, part.name.clone()));
    let first = requests.first()?;
    let other = requests.iter().find(|other| what(other) != what(first))?;
    let (one, two) = (first.rank, other.rank);
    Some(format!("ranks {one} and {two} join one communicator as parts of two: all ranks need the same whole and role"))
}

/// None of them joins.
pub(crate) fn refuse_all(refusal: &SetupError, members: Vec<JoinRequest>) {
    members.into_iter().for_each(|member| join_failed(member, refusal.class, &refusal.message));
}

/// A rank does not join.
pub(crate) fn join_failed(request: JoinRequest, class: ErrorClass, message: &str) {
    let JoinRequest { request, tenant_comm, reply, .. } = request;
    // A full or gone mailbox means that the session is ending: nobody waits for the answer.
    let _ = reply.send(ProxyReply::JoinFailed { request, tenant_comm, class, message: message.to_owned() });
}
