//! Communicators that are one to their caller: joins that fit no whole are refused, and what ends a part ends all.

use mccs_ipc::protocol::{JoinOptions, Request, Response, Role};
use mccs_ipc::types::{ErrorClass, Handle, UniqueId};
use mccs_tests::TestService;
use mccs_tests::hosts::TestHosts;

use crate::raw::Raw;

/// A join of a host's memory, as the root's host is called.
fn join(id: UniqueId, rank: u32, nranks: u32, role: Role, root: &str) -> Request {
    let (gpu, root_address, options) = (None, root.to_owned(), JoinOptions::default());
    Request::InitRank { id, rank, nranks, gpu, root_address, role, options }
}

fn new_id() -> UniqueId {
    mccs::unique_id().expect("an id")
}

fn joined(answer: &Response) -> Handle {
    let Response::Comm { comm, .. } = answer else { panic!("{answer:?}") };
    *comm
}

#[test]
fn a_join_that_fits_no_whole_is_refused_with_what_is_wrong() {
    let service = TestService::start("");
    let id = new_id();
    let mut raw = Raw::join(&service, id, 0, 1);
    let whole = raw.comm;
    let graphs = Role::Graphs { whole };
    let unknown = Handle { index: 40, generation: 1 };
    let refusals = [
        (join(new_id(), 0, 1, Role::Team { whole: unknown, number: 0 }, ""), "no such rank"),
        (join(id, 0, 1, Role::CopyEngines { whole: Handle::NONE }, ""), "no such rank"),
        (join(new_id(), 0, 2, graphs, ""), "rank 0 of 1 there, not 0 of 2"),
        (join(new_id(), 1, 2, graphs, ""), "rank 0 of 1 there, not 1 of 2"),
        (join(new_id(), 0, 1, Role::CopyEngines { whole }, ""), "another id"),
        (join(id, 0, 1, Role::Team { whole, number: 0 }, ""), "several services"),
        (join(new_id(), 0, 1, Role::Team { whole, number: 2 }, ""), "no team 2"),
        (join(new_id(), 0, 1, Role::Rail { whole, number: 0 }, ""), "several services"),
        (join(new_id(), 0, 1, Role::Rail { whole, number: u32::MAX }, ""), "several services"),
        (join(new_id(), 0, 1, Role::GraphsOfRail { whole: id, number: 0 }, ""), "several services"),
        (join(new_id(), 0, 1, Role::GraphsOfRail { whole: new_id(), number: 0 }, ""), "no rank of such"),
    ];
    let mut refused = |request: Request, words: &str| {
        let answer = raw.ask(request, &[]);
        let Response::Error { class, message } = &answer else { panic!("{answer:?}") };
        assert_eq!(*class, ErrorClass::InvalidArgument, "{message}");
        assert!(message.contains(words), "{message}");
    };
    for (request, words) in refusals {
        refused(request, words);
    }
    let part = joined(&raw.ask(join(new_id(), 0, 1, graphs, ""), &[]));
    let mut refused = |role: Role, words: &str| {
        let answer = raw.ask(join(new_id(), 0, 1, role, ""), &[]);
        let Response::Error { message, .. } = &answer else { panic!("{answer:?}") };
        assert!(message.contains(words), "{message}");
    };
    refused(graphs, "joined such a part before");
    refused(Role::Graphs { whole: part }, "itself a part");
}

/// The handle is the other session's; to this one it is nothing.
#[test]
fn a_whole_of_another_session_is_none() {
    let service = TestService::start("");
    let mut other = Raw::join(&service, new_id(), 0, 1);
    let second = joined(&other.ask(join(new_id(), 0, 1, Role::Whole, ""), &[]));
    let mut raw = Raw::join(&service, new_id(), 0, 1);
    let rail = Role::Rail { whole: second, number: 0 };
    let answer = raw.ask(join(new_id(), 0, 1, rail, ""), &[]);
    assert!(matches!(&answer, Response::Error { message, .. } if message.contains("no such rank")), "{answer:?}");
}

#[test]
fn a_part_that_is_aborted_ends_its_whole_with_the_same_reason() {
    let service = TestService::start("");
    let mut raw = Raw::join(&service, new_id(), 0, 1);
    let whole = raw.comm;
    let part = joined(&raw.ask(join(new_id(), 0, 1, Role::Graphs { whole }, ""), &[]));
    assert!(matches!(raw.ask(Request::AbortComm { comm: part, cuda_error: None }, &[]), Response::Done));
    let answer = raw.ask(join(new_id(), 0, 1, Role::CopyEngines { whole }, ""), &[]);
    assert!(matches!(&answer, Response::Error { message, .. } if message.contains("it has failed: rank 0 aborted")));
    let mut reports = raw.reports(2);
    reports.sort_by_key(|(comm, _)| *comm != whole);
    assert_eq!(reports.iter().map(|(comm, _)| *comm).collect::<Vec<_>>(), [whole, part]);
    assert!(reports.iter().all(|(_, message)| message.contains("rank 0 aborted")), "{reports:?}");
}

/// One is all that the quota has: a part takes none, and neither it nor the whole is left over.
#[test]
fn who_leaves_a_whole_leaves_its_parts() {
    let service = TestService::start("[[tenant]]\nname = \"t\"\nmax_communicators = 1\n");
    let mut raw = Raw::join(&service, new_id(), 0, 1);
    for _ in 0..50 {
        let whole = raw.comm;
        let part = joined(&raw.ask(join(new_id(), 0, 1, Role::Graphs { whole }, ""), &[]));
        assert!(matches!(raw.ask(Request::DestroyComm { comm: whole }, &[]), Response::Done));
        // It may be gone by now, or about to be.
        let _ = raw.ask(Request::DestroyComm { comm: part }, &[]);
        let comms = || service.service().registry.comms();
        while !comms().is_empty() {
            std::thread::yield_now();
        }
        raw.comm = joined(&raw.ask(join(new_id(), 0, 1, Role::Whole, ""), &[]));
    }
}

#[test]
fn who_waits_to_join_a_part_hears_that_the_whole_has_failed() {
    let service = TestService::start("");
    let (id, part) = (new_id(), new_id());
    let [mut raw, other] = std::thread::scope(|scope| {
        let service = &service;
        let ranks = [0, 1].map(|rank| scope.spawn(move || Raw::join(service, id, rank, 2)));
        ranks.map(|rank| rank.join().expect("a rank"))
    });
    let whole = raw.comm;
    let answer = std::thread::scope(|scope| {
        let waits = scope.spawn(|| raw.ask(join(part, 0, 2, Role::Graphs { whole }, ""), &[]));
        drop(other);
        waits.join().expect("an answer")
    });
    let Response::Error { message, .. } = &answer else { panic!("{answer:?}") };
    assert!(message.contains("rank 1") && message.contains("has gone"), "{message}");
}

/// Ranks of two services: a part is aborted here, and the whole ends there, and with it the part.
#[test]
fn what_ends_a_part_ends_all_of_it_at_every_service() {
    let hosts = TestHosts::start_each(2, |_| String::new());
    let (id, part_id) = (new_id(), new_id());
    let at = |host: usize| {
        let mut raw = Raw::join(hosts.service(host), new_id(), 0, 1);
        let whole = joined(&raw.ask(join(id, host as u32, 2, Role::Whole, "h0"), &[]));
        let part = joined(&raw.ask(join(part_id, host as u32, 2, Role::Graphs { whole }, "h0"), &[]));
        (raw, whole, part)
    };
    let [here, there] = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|host| scope.spawn(move || at(host)));
        ranks.map(|rank| rank.join().expect("a rank"))
    });
    let (mut raw, whole, part) = here;
    assert!(matches!(raw.ask(Request::AbortComm { comm: part, cuda_error: None }, &[]), Response::Done));
    for (raw, whole, part) in [(raw, whole, part), there] {
        let reports = raw.reports(2);
        for comm in [whole, part] {
            let (_, message) = reports.iter().find(|(of, _)| *of == comm).expect("both have ended");
            assert!(message.contains("rank 0 aborted"), "{message}");
        }
    }
}
