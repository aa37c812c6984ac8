//! How long collectives take that ranks, or copy engines, carry out on GPUs: for the operator's tables, and in a trace.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::time::{Duration, Instant};

use mccs_control::trace_window::trace;
use mccs_control::{CommView, ControlAnswer, ControlRequest, call as ask};
use mccs_cuda::OwnedStream;
use mccs_eval::workload::Call;
use mccs_ipc::types::{CollectiveKind, DataType};
use mccs_telemetry::recorder::Record;
use mccs_tests::TestService;

use super::changes::{Rounds, sign};
use super::ranks::{Buffers, Place, Player, Rank, Role, call, enqueue, everybody};
use super::{LARGE, TENANTS};

pub const ROLES: &[(&str, Role)] = &[("comes_late", comes_late), ("computes_between", computes_between)];

/// By how much the last rank comes later to every call than the others.
const LATE: Duration = Duration::from_millis(5);
/// Calls over which how late ranks are shows, whatever else takes processors from them.
const CALLS: u64 = 40;

/// Calls of who runs ahead, for each that it waits for.
const AHEAD: u32 = 8;

/// Their tag.
const TAG: u64 = 0x7fff_0123_4567_89ab;

/// Their call.
fn gathers(nranks: u32) -> Call {
    Call { kind: CollectiveKind::AllGather, ..call(0, nranks, 1000) }
}

/// Calls one after the other until the test gives a sign.
fn comes_late(place: &Place) -> anyhow::Result<()> {
    let rounds = Rounds::until(place, "ends");
    place.each_rank(|rank: Rank| {
        let (own, call) = (rank.comm.rank(), gathers(place.nranks));
        let (at, stream) = (Buffers::of(&rank.context, &call)?, OwnedStream::new(&rank.context)?);
        let mut is_first = true;
        while rounds.go_on(&rank) {
            if own + 1 == place.nranks {
                std::thread::sleep(LATE);
            }
            let (send, recv, raw) = (at.send.address(), at.recv.address(), stream.raw().as_ptr());
            // SAFETY: buffers have room for the call; they and the stream live until it was synchronized.
            unsafe {
                rank.comm.tagged(TAG).all_gather(send, recv, call.count, call.dtype, raw)?;
                stream.raw().synchronize()?;
            }
            if own == 0 && std::mem::take(&mut is_first) {
                println!("runs");
            }
        }
        Ok(())
    })
}

/// Sleeps for so many nanoseconds, as a stream's work.
unsafe extern "C" fn computes(nanoseconds: *mut c_void) {
    std::thread::sleep(Duration::from_nanos(nanoseconds.addr() as u64));
}

/// Calls long collectives ahead of the GPU, with longer pauses of its stream between them, until the test gives a sign; then checks that the result is right.
fn computes_between(place: &Place) -> anyhow::Result<()> {
    let rounds = Rounds::until(place, "ends");
    place.each_rank(|rank: Rank| {
        let call = Call { kind: CollectiveKind::AllGather, dtype: DataType::U8, ..call(0, place.nranks, 0) };
        let call = Call { count: (16 << 20) / u64::from(place.nranks) + 64, ..call };
        let (at, stream) = (Buffers::of(&rank.context, &call)?, OwnedStream::new(&rank.context)?);
        at.fill(&call, rank.comm.rank())?;
        let mut pause = Duration::ZERO;
        while rounds.go_on(&rank) {
            let begin = Instant::now();
            for _ in 0..AHEAD {
                let nanoseconds = std::ptr::without_provenance_mut(pause.as_nanos() as usize);
                // SAFETY: the stream lives, and the function reads no memory.
                unsafe { stream.raw().call(computes, nanoseconds)? };
                enqueue(&rank.comm, &call, &at, stream.raw())?;
            }
            // SAFETY: it lives.
            unsafe { stream.raw().synchronize()? };
            pause = 2 * (begin.elapsed() / AHEAD).saturating_sub(pause);
        }
        at.check(&call, rank.comm.rank())
    })
}

/// The only communicator there is, when something is known of the times of enough calls.
fn timed(service: &TestService) -> CommView {
    loop {
        match ask(&service.control_socket(), &ControlRequest::Communicators).expect("an answer") {
            ControlAnswer::Communicators(comms) => {
                if let Some(comm) = comms.into_iter().find(|comm| comm.operations >= CALLS && !comm.kinds.is_empty()) {
                    return comm;
                }
            }
            other => panic!("{other:?}"),
        }
        std::thread::yield_now();
    }
}

/// A service with ranks that call.
fn running(config: &str) -> (TestService, Place, Player) {
    let service = TestService::start(config);
    let place = everybody(&service, 0);
    let mut player = Player::start("comes_late", &place);
    player.hears("runs");
    (service, place, player)
}

/// The same, whose times are known.
fn running_timed(config: &str) -> (TestService, Place, Player, CommView) {
    let (service, place, player) = running(config);
    let comm = timed(&service);
    assert!(comm.ranks.iter().all(|rank| rank.user_tag == Some(TAG)), "{comm:?}");
    let [kind] = &comm.kinds[..] else { panic!("one kind: {comm:?}") };
    assert!(kind.collective == "all_gather" && kind.exec_us > 0.0 && kind.busbw_gbps > 0.0, "{kind:?}");
    (service, place, player, comm)
}

#[test]
#[ignore = "needs a GPU"]
fn what_ranks_do_is_timed_and_traced() {
    let (service, place, player, comm) = running_timed(TENANTS);
    let (last, others) = comm.ranks.split_last().expect("ranks");
    assert!(others.iter().all(|other| other.late_ns < last.late_ns), "{comm:?}");

    let window = trace(&service.control_socket(), Duration::from_millis(500), None, &|| false).expect("a trace");
    let Call { kind: called, dtype, count, .. } = gathers(place.nranks);
    let payload_bytes = called.payload_count(count, place.nranks) * dtype.size_bytes() as u64;
    let mut by_rank: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
    for record in window.engines.iter().flat_map(|(_, records)| records) {
        if let Record::OnGpu { since_ns, at_ns, comm: number, rank, seq, kind, bytes, error_ns } = *record {
            assert_eq!((number, kind, bytes), (comm.communicator, called, payload_bytes));
            assert!(since_ns <= at_ns && error_ns <= 20_000_000, "{record:?}");
            by_rank.entry(rank).or_default().push((seq, at_ns - since_ns));
        }
    }
    let tags = window.engines.iter().flat_map(|(_, records)| records).filter_map(|record| match record {
        Record::Tagged { comm, seq, tag, .. } => Some((*comm, *seq, *tag)),
        _ => None,
    });
    let tags: Vec<_> = tags.collect();
    // Tags of the last ones, whatever else the ring of tags has lost.
    let (last, _) = by_rank[&0].last().expect("collectives");
    assert!(tags.contains(&(comm.communicator, *last, TAG)), "{tags:?}");
    assert_eq!(by_rank.keys().copied().collect::<Vec<_>>(), (0..place.nranks).collect::<Vec<_>>());
    let ran = |rank: u32| by_rank[&rank].iter().map(|(_, ran_ns)| ran_ns).sum::<u64>() / by_rank[&rank].len() as u64;
    assert!((0..place.nranks - 1).all(|rank| ran(rank) > ran(place.nranks - 1)), "{by_rank:?}");
    for slices in by_rank.values() {
        assert!(slices.is_sorted_by(|one, next| one.0 < next.0), "{slices:?}");
    }
    std::fs::write(sign(&place, "ends"), "").expect("a sign");
    player.ends_well();
}

#[test]
#[ignore = "needs two GPUs"]
fn what_copy_engines_do_is_timed() {
    let (_service, place, player, _) = running_timed(LARGE);
    std::fs::write(sign(&place, "ends"), "").expect("a sign");
    player.ends_well();
}

#[test]
#[ignore = "needs two GPUs"]
fn large_calls_go_by_copy_engines_by_and_by_where_they_come_apart() {
    let service = TestService::start(TENANTS);
    let place = everybody(&service, 0);
    let player = Player::start("computes_between", &place);
    let by_engines = || {
        let comms = service.service().registry.comms();
        comms
            .iter()
            .filter_map(|comm| comm.device_initiated.as_ref()?.large())
            .map(|large| large.operations().ended)
            .sum::<u64>()
    };
    while by_engines() == 0 {
        std::thread::yield_now();
    }
    let answer = ask(&service.control_socket(), &ControlRequest::Communicators).expect("an answer");
    let ControlAnswer::Communicators(view) = answer else { panic!("{answer:?}") };
    assert!(view.iter().any(|comm| comm.is_for_training && comm.epoch > 0), "{view:?}");
    std::fs::write(sign(&place, "ends"), "").expect("a sign");
    player.ends_well();
}

#[test]
#[ignore = "needs a GPU"]
fn what_nobody_wants_to_time_is_counted_alone() {
    let (service, place, player) = running(&TENANTS.replacen("[cuda]\n", "[cuda]\ntiming = false\n", 1));
    let operations = || match ask(&service.control_socket(), &ControlRequest::Communicators).expect("an answer") {
        ControlAnswer::Communicators(comms) => (comms[0].operations, comms[0].busy_ns),
        other => panic!("{other:?}"),
    };
    while operations().0 < 3 {}
    assert_eq!(operations().1, 0);
    std::fs::write(sign(&place, "ends"), "").expect("a sign");
    player.ends_well();
}
