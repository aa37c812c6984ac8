//! Ranks on GPUs, from the outside: graphs, streams, tenants, and what happens when something goes wrong. Run by
//! `tests/gpu.sh` where there are GPUs; the service is in this process, and ranks are in others.

mod apart;
mod bad_luck;
mod changes;
mod counts;
mod deaths;
mod divided;
mod empty;
mod emulated_nics;
mod failures;
mod gpudirect;
mod graphs;
mod hostile;
mod life;
mod losses;
mod memory;
mod memory_channels;
mod messages;
mod mps;
mod nics;
mod p2p;
mod port_channels;
mod process_groups;
mod rails;
mod ranks;
mod room;
mod staged;
mod stalls;
mod streams;
mod times;
mod until_it_fails;
mod values;

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use mccs::Error;
use mccs_cuda::{Context, DeviceMemory, gpus};
use mccs_eval::workload::Call;
use mccs_ipc::handshake::{Socket, connect};
use mccs_ipc::protocol::{self, JoinOptions, Request, RequestEnvelope, ResponseEnvelope};
use mccs_tests::{TestService, watchdog};

use self::ranks::{Buffers, Place, Player, Rank, Role, call, enqueue, everybody, everybody_at, everybody_plays};

const TENANTS: &str = "[cuda]\nuse = \"required\"\n[[tenant]]\nname = \"a\"\nsocket = \"a\"\n\
                       [[tenant]]\nname = \"b\"\nsocket = \"b\"\n";

/// The same, with nearly everything by copy engines.
const LARGE: &str = "[cuda]\nuse = \"required\"\nlarge_from = \"1KiB\"\nslot = \"256KiB\"\n[[tenant]]\nname = \"a\"\n\
                     socket = \"a\"\n[[tenant]]\nname = \"b\"\nsocket = \"b\"\n";

/// The same as another one, where memory goes from process to process by descriptors alone.
fn without_handles(config: &str) -> String {
    config.replace("[cuda]\n", "[cuda]\nhandles = \"never\"\n")
}

const ROLES: &[(&str, Role)] = &[
    ("checks", checks),
    ("stays", stays),
    ("mixes_communicators", mixes_communicators),
    ("gives_its_context_back", gives_its_context_back),
];

/// Not a test: what this binary does when a test has started it as a process of ranks.
#[test]
#[ignore = "needs a GPU"]
fn plays_its_role() {
    watchdog();
    let more = [
        apart::ROLES,
        bad_luck::ROLES,
        counts::ROLES,
        deaths::ROLES,
        empty::ROLES,
        gpudirect::ROLES,
        life::ROLES,
        losses::ROLES,
        memory::ROLES,
        messages::ROLES,
        mps::ROLES,
        nics::ROLES,
        p2p::ROLES,
        memory_channels::ROLES,
        port_channels::ROLES,
        process_groups::ROLES,
        rails::ROLES,
        room::ROLES,
        staged::ROLES,
        staged::graphs::ROLES,
    ];
    let of_all = [
        ROLES,
        changes::ROLES,
        failures::ROLES,
        graphs::ROLES,
        stalls::ROLES,
        streams::ROLES,
        times::ROLES,
        values::ROLES,
    ];
    ranks::play(&[&of_all, &more[..]].concat().concat());
}

/// Calls of many kinds and sizes, each checked.
fn checks(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let calls: Vec<_> = (0..40).map(|n| call(n, place.nranks, 1 + n * 531)).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        together.wait();
        for (call, at) in calls.iter().zip(&at) {
            at.fill(call, comm.rank())?;
            enqueue(&comm, call, at, stream.raw())?;
            // SAFETY: the stream lives.
            unsafe { stream.raw().synchronize()? };
            at.check(call, comm.rank())?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn two_tenants_at_once_get_their_own_results() {
    for config in [TENANTS, LARGE] {
        let service = TestService::start(config);
        let players = [0, 1].map(|tenant| Player::start("checks", &everybody(&service, tenant)));
        players.into_iter().for_each(|player| drop(player.ends_well()));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn four_ranks_on_one_gpu_work_together() {
    let service = TestService::start(TENANTS);
    let place = Place { nranks: 4, ranks: 0..4, gpus: 1, ..everybody(&service, 0) };
    Player::start("checks", &place).ends_well();
}

/// Calls, each checked, and stays.
fn stays(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        for number in 0..ENGINES_CALLS {
            let call = call(number % 5, place.nranks, 20_000);
            let at = Buffers::of(&context, &call)?;
            at.fill(&call, comm.rank())?;
            together.wait();
            enqueue(&comm, &call, &at, stream.raw())?;
            // SAFETY: the stream lives.
            unsafe { stream.raw().synchronize()? };
            at.check(&call, comm.rank())?;
            together.wait();
        }
        if comm.rank() == 0 {
            println!("is done");
        }
        loop {
            std::thread::park();
        }
    })
}

/// Calls of the kinds that engines have a way for.
const ENGINES_CALLS: u64 = 10;

/// Large calls go by engines: right results do not tell.
#[test]
#[ignore = "needs two GPUs"]
fn large_calls_go_by_copy_engines() {
    for (config, calls) in [
        (TENANTS.into(), 0),
        (LARGE.into(), ENGINES_CALLS),
        (staged::by_engines("auto"), ENGINES_CALLS),
        (staged::by_engines("events"), ENGINES_CALLS),
    ] {
        let service = TestService::start(&config);
        let mut player = Player::start("stays", &everybody(&service, 0));
        player.hears("is done");
        let comms = service.service().registry.comms();
        let large = comms.iter().find_map(|comm| comm.device_initiated.as_ref()?.large()).expect("engines");
        assert_eq!(large.operations().begun, calls, "{config}");
        wait_until(|| large.operations().ended == calls);
        player.kill();
    }
}

/// Several communicators of the same ranks, each on a stream of its own, called in another order by each rank.
fn mixes_communicators(place: &Place) -> anyhow::Result<()> {
    let ids = [0, 1].map(|number| place.another_id(number));
    place.each_rank(|first| {
        let rank = first.comm.rank();
        let more =
            ids.iter().map(|id| place.join(rank, *id, Arc::clone(&first.together))).collect::<Result<Vec<_>, _>>()?;
        let all: Vec<_> = [first].into_iter().chain(more).collect();
        let calls: Vec<_> = (0..20).map(|n| call(n, place.nranks, 1 + n * 97)).collect();
        let mut at = Vec::new();
        for (index, call) in all.iter().flat_map(|_| &calls).enumerate() {
            let call = Call { seed: index as u64, ..*call };
            let buffers = Buffers::of(&all[0].context, &call)?;
            buffers.fill(&call, rank)?;
            at.push((call, buffers));
        }
        all[0].together.wait();
        for number in 0..calls.len() {
            for turn in 0..all.len() {
                let of = (turn + rank as usize) % all.len();
                let (call, buffers) = &at[of * calls.len() + number];
                enqueue(&all[of].comm, call, buffers, all[of].stream.raw())?;
            }
        }
        for Rank { stream, .. } in &all {
            // SAFETY: the stream lives.
            unsafe { stream.raw().synchronize()? };
        }
        at.iter().try_for_each(|(call, buffers)| buffers.check(call, rank))
    })
}

#[test]
#[ignore = "needs a GPU"]
fn communicators_do_not_wait_for_each_other() {
    everybody_plays("mixes_communicators", &[TENANTS, LARGE]);
}

/// As in processes of other users, and in containers, of which the driver opens no handles. Communicators begin with what others were made of, too.
#[test]
#[ignore = "needs a GPU"]
fn memory_goes_by_descriptors_where_handles_do_not() {
    // Events of the driver's are opened by handles: without, ranks tell and wait by words.
    for config in [TENANTS.into(), LARGE.into(), staged::by_engines("events")] {
        let service = TestService::start(&without_handles(&config));
        for role in ["checks", "replays", "exchanges", "mixes_communicators", "checks"] {
            Player::start(role, &everybody(&service, 0)).ends_well();
        }
    }
}

/// Gives a GPU's context back that the library has taken from its thread.
fn gives_its_context_back(_: &Place) -> anyhow::Result<()> {
    mccs_cuda::driver()?;
    let own = Context::primary(&gpus()?[0])?;
    std::mem::forget(own.enter()?);
    let kept = Context::current()?;
    drop(own);
    // The driver is asked for it on a thread where it is not current.
    let made = std::thread::scope(|scope| scope.spawn(|| DeviceMemory::zeroed(&kept, 4096).map(drop)).join());
    Ok(made.expect("a thread that does not panic")?)
}

/// In a process of its own: nobody else there has the context.
#[test]
#[ignore = "needs a GPU"]
fn the_current_context_is_kept_when_its_owner_gives_it_back() {
    let nobody = Place { ranks: 0..1, ..everybody_at("no service".into()) };
    Player::start("gives_its_context_back", &nobody).ends_well();
}

/// Why a communicator has failed, once it has.
fn told(rank: &Rank) -> Error {
    loop {
        if let Some(error) = rank.comm.async_error() {
            return error;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Rank 1 aborts, after some time in which others begin to wait.
fn aborts_later(rank: &Rank) -> anyhow::Result<()> {
    std::thread::sleep(Duration::from_millis(100));
    Ok(rank.comm.abort()?)
}

/// Any rank hears that rank 1 has aborted.
fn hears_of_the_abort(rank: &Rank) -> anyhow::Result<()> {
    let error = told(rank).to_string();
    ensure!(error.contains("rank 1 aborted"), "{error}");
    Ok(())
}

/// The watchdog decides when that is never.
fn wait_until(is_so: impl Fn() -> bool) {
    while !is_so() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asks to join with a GPU, as a client that says whatever it likes.
fn join_with_gpu(service: &TestService, gpu: [u8; 16]) -> String {
    let receive = |socket: &Socket| -> ResponseEnvelope {
        assert!(socket.wait_readable(Duration::from_secs(300)));
        socket.recv().expect("an answer").expect("not the end").0
    };
    let socket = connect(&service.socket(0)).expect("connected");
    receive(&socket);
    let id = mccs::unique_id().expect("an id");
    let root_address = String::new();
    let request = Request::InitRank {
        id,
        rank: 0,
        nranks: 1,
        gpu: Some(gpu),
        root_address,
        role: protocol::Role::Whole,
        options: JoinOptions::default(),
    };
    socket.send(&RequestEnvelope { id: 1, request }, &[]).expect("sent");
    format!("{:?}", receive(&socket).response)
}

#[test]
#[ignore = "needs a GPU"]
fn a_gpu_that_is_not_there_is_refused() {
    let service = TestService::start(TENANTS);
    let answer = join_with_gpu(&service, [7; 16]);
    assert!(answer.contains("does not have the GPU with UUID 0707"), "{answer}");
    let off = TestService::start("[cuda]\nuse = \"off\"\n[[tenant]]\nname = \"a\"\nsocket = \"a\"\n");
    let answer = join_with_gpu(&off, gpus().expect("GPUs")[0].id.0);
    assert!(answer.contains("no GPUs: the operator has switched them off"), "{answer}");
}
