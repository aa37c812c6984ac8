//! Another program's state is taken as far as it can be.

use std::os::fd::OwnedFd;
use std::time::Duration;

use mccs_config::service::AlgorithmChoice;
use mccs_handover::{
    CommCounters, MemberState, RankState, RegionState, SessionCountersState, SessionState, StreamState, TableState,
};
use mccs_ipc::handshake::SocketError;
use mccs_ipc::protocol::SegmentLayout;
use mccs_ipc::shm::Mapping;
use mccs_ipc::types::Handle;
use mccs_runtime::{Mailbox, TenantQueues, WakerSlot};
use mccs_tenants::{Quota, Tenant};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::*;

const FIRST: Handle = Handle { index: 0, generation: 1 };
const BYTES: u64 = 4096;

fn layout() -> SegmentLayout {
    SegmentLayout {
        segment_bytes: 1 << 16,
        commands_offset: 0,
        commands_capacity: 16,
        completions_offset: 8192,
        completions_capacity: 16,
        words_offset: 32_768,
        words: 1,
    }
}

/// A session with a region, and a rank in communicator 3; and its tenant's end. `memory`: what comes as the region's.
fn session(id: u64, memory: OwnedFd) -> (SessionState, Vec<OwnedFd>, Socket) {
    let state = SessionState {
        id,
        tenant: "t".into(),
        job: String::new(),
        has_process: false,
        layout: layout(),
        commands_consumed: 0,
        completions_produced: 0,
        regions: TableState(vec![(1, Some(RegionState { bytes: BYTES, is_of_service: true }))]),
        freed: Vec::new(),
        streams: TableState(vec![(1, Some(StreamState { ended: 0 }))]),
        ranks: TableState(vec![(1, Some(RankState { comm: 3, rank: id as u32 - 1, rounds: 0 }))]),
        pending: Vec::new(),
        joining: Vec::new(),
        parked: Vec::new(),
        answers: Vec::new(),
        sent_descriptors: 0,
        counters: SessionCountersState::default(),
    };
    let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).expect("a pair");
    let (segment, _) = Mapping::create("segment", layout().segment_bytes).expect("memory");
    let doorbell = mccs_ipc::sync::Doorbell::new().expect("a descriptor");
    let doorbell = std::os::fd::AsFd::as_fd(&doorbell).try_clone_to_owned().expect("a descriptor");
    (state, vec![pair.0, segment, doorbell, memory], Socket::from_fd(pair.1))
}

fn memory() -> OwnedFd {
    Mapping::create("region", BYTES).expect("memory").0
}

fn state(sessions: Vec<SessionState>) -> State {
    let member = |session| MemberState { session: Some(session), comm: FIRST, completed: 0, user_tag: 0, late_ns: 0 };
    let comm = CommState {
        number: 3,
        id: UniqueId([1; 16]),
        name: String::new(),
        job: String::new(),
        members: sessions.iter().map(|session| member(session.id)).collect(),
        started: 5,
        epoch: 0,
        algorithm: AlgorithmChoice::Auto,
        rings: vec![(0..sessions.len() as u32).collect()],
        shm_exchange: None,
        failure: None,
        counters: CommCounters::default(),
    };
    State { last_number: 3, sessions, comms: vec![comm], ..State::default() }
}

fn admissions(factory: &SessionFactory, name: &str) -> BTreeMap<String, Admission> {
    let quota = Quota { memory_bytes: 1 << 20, sessions: 2, streams: 1, regions: 4, mappings: 8, ..Quota::least() };
    let tenant = Tenant::new(name.into(), quota);
    let queues = factory.proxies.open_queues(tenant.share);
    BTreeMap::from([(name.to_owned(), Admission { tenant, uids: None, cgroup: None, queues })])
}

#[test]
fn a_session_that_cannot_be_taken_ends_alone_and_its_tenant_hears_why() {
    let queues = TenantQueues::new(1, WakerSlot::default());
    let factory = SessionFactory::for_tests(&queues);
    let nothing = OwnedFd::from(std::fs::File::open("/dev/null").expect("a device"));
    let (sound, broken) = (session(1, memory()), session(2, nothing));
    let descriptors: Vec<_> = sound.1.into_iter().chain(broken.1).collect();
    let state = state(vec![sound.0, broken.0]);
    assert_eq!(state.descriptors(), descriptors.len());
    let admissions = admissions(&factory, "t");
    let resumed = Resumed::new(state, descriptors, &factory, &admissions, false).expect("one can go on");
    assert_eq!(resumed.counts(), (1, 1, 1));
    assert_eq!(resumed.comms[0].state.members[1].session, None);
    let failure = resumed.comms[0].state.failure.as_ref().expect("a rank has gone");
    assert!(failure.message.contains("rank 1 has gone") && !failure.is_told, "{failure:?}");
    let proxy = Mailbox::new(4);
    drop(resumed.go_on(&factory, &proxy.sender()));
    let (envelope, _) = broken.2.recv::<ResponseEnvelope>().expect("not closed").expect("last words");
    let Response::Error { class, message } = envelope.response else { panic!("{envelope:?}") };
    assert!(class == ErrorClass::System && message.contains("memfd"), "{class:?}: {message}");
    assert!(matches!(broken.2.recv::<ResponseEnvelope>(), Err(SocketError::Closed)));
    assert!(!sound.2.wait_readable(Duration::from_millis(1)) && !sound.2.is_closed(), "the other hears nothing");
    assert_eq!(factory.registry.sessions().iter().map(|session| session.id).collect::<Vec<_>>(), [1]);
    factory.runtimes.stop();
}

#[test]
fn what_the_configuration_has_no_room_for_is_refused_or_ends_by_force() {
    let queues = TenantQueues::new(1, WakerSlot::default());
    let factory = SessionFactory::for_tests(&queues);
    let admissions = admissions(&factory, "another");
    let taken = |ends_sessions| {
        let (own, descriptors, peer) = session(1, memory());
        let taken = Resumed::new(state(vec![own]), descriptors, &factory, &admissions, ends_sessions);
        (taken.map(|resumed| resumed.counts()), peer)
    };
    let refused = taken(false).0.expect_err("there is no such tenant");
    assert!(refused.contains("session 1 of tenant t") && refused.contains("names no tenant t"), "{refused}");
    // Nobody is left in its communicator.
    assert_eq!(taken(true).0, Ok((0, 1, 0)));
    factory.runtimes.stop();
}
