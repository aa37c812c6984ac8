//! Operations whose stream nobody else would let go on: the service has died, or what comes behind the command cannot be enqueued; and a context that
//! has failed.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use mccs::{Client, DataType, Error};
use mccs_cuda::{Context, Module, OwnedStream, gpus};
use mccs_tests::{TestService, watchdog};

use super::mps::STRAY;
use super::ranks::{Buffers, Place, Player, Rank, Role, call, capture, enqueue, everybody_at, everybody_plays};
use super::staged::strict;
use super::{LARGE, TENANTS, told};

pub const ROLES: &[(&str, Role)] = &[
    ("serves", serves),
    ("synchronizes_after_its_service", synchronizes_after_its_service),
    ("aborts_after_its_service", aborts_after_its_service),
    ("only_synchronizes", only_synchronizes),
    ("only_synchronizes_a_graph", only_synchronizes_a_graph),
    ("calls_on_a_strange_stream", calls_on_a_strange_stream),
    ("loses_its_context", loses_its_context),
];

/// The configuration of a service in a process of its own.
pub const CONFIG: &str = "MCCS_GPU_CONFIG";
/// Its name, if it has others' beside it.
pub const HOST: &str = "MCCS_GPU_HOST";
/// Elements of a call that goes by the engines, in whatever way.
const COUNT: u64 = 1 << 20;
/// Roles of ranks that call this library afterwards.
const ASKING: [&str; 2] = ["synchronizes_after_its_service", "aborts_after_its_service"];

/// A service in a process of its own.
pub struct Serving {
    pub player: Player,
    /// Socket of its first tenant.
    pub socket: PathBuf,
}

impl Serving {
    /// Starts it, as a role that says where it serves.
    pub fn start(role: &str, config: &str, environment: &[(&str, PathBuf)]) -> Self {
        watchdog();
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("config");
        std::fs::write(&file, config).expect("a file");
        let environment = [environment, &[(CONFIG, file)]].concat();
        let place = Place { ranks: 0..1, ..everybody_at(PathBuf::new()) };
        let mut player = Player::start_with(role, &place, &environment);
        let said = player.line_with("serves at ");
        let (_, socket) = said.trim_end().split_once("serves at ").expect("a path");
        Serving { player, socket: socket.into() }
    }

    /// Kills it.
    pub fn kill(mut self) {
        self.player.kill();
        let directory = self.socket.parent().expect("a directory of its own");
        std::fs::remove_dir_all(directory).expect("what it could not remove");
    }
}

/// A service that can be killed.
fn serves(_: &Place) -> anyhow::Result<()> {
    let name = std::env::var(HOST).unwrap_or_else(|_| "test".into());
    let service = TestService::start_named(&name, &std::fs::read_to_string(std::env::var(CONFIG)?)?);
    println!("serves at {}", service.socket(0).display());
    loop {
        std::thread::park();
    }
}

/// Rank 0 calls and waits for the others, who do not come; then the service dies.
fn outlives_its_service(place: &Place, is_aborted: bool) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let call = call(0, place.nranks, COUNT);
        let at = Buffers::of(&rank.context, &call)?;
        rank.together.wait();
        if rank.comm.rank() == 0 {
            enqueue(&rank.comm, &call, &at, rank.stream.raw())?;
            println!("is there");
        }
        while Client::connect(&place.socket).is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        if is_aborted {
            ensure!(rank.comm.abort().is_err(), "nobody could be told");
        } else {
            told(&rank);
        }
        let synchronize = || {
            // SAFETY: the stream lives.
            unsafe { rank.stream.raw().synchronize() }
        };
        if is_aborted {
            drop(rank.comm);
            synchronize()?;
        } else {
            synchronize()?;
            drop(rank.comm);
        }
        Ok(())
    })
}

fn synchronizes_after_its_service(place: &Place) -> anyhow::Result<()> {
    outlives_its_service(place, false)
}

fn aborts_after_its_service(place: &Place) -> anyhow::Result<()> {
    outlives_its_service(place, true)
}

/// Rank 0 waits for the others, who never come, and asks for nothing but its streams: they go on when the service dies.
fn only_waits(
    rank: &Rank,
    enqueue: impl FnOnce() -> anyhow::Result<()>,
    streams: &[&OwnedStream],
) -> anyhow::Result<()> {
    rank.together.wait();
    if rank.comm.rank() == 0 {
        enqueue()?;
        println!("is there");
        // SAFETY: the streams live.
        streams.iter().try_for_each(|stream| unsafe { stream.raw().synchronize() })?;
    }
    rank.together.wait();
    let error = told(rank);
    ensure!(matches!(error, Error::ServiceGone(_)), "{error}");
    Ok(())
}

fn only_synchronizes(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let (call, other) = (call(0, place.nranks, COUNT), OwnedStream::new(&rank.context)?);
        let (at, inbox) = (Buffers::of(&rank.context, &call)?, Buffers::of(&rank.context, &call)?);
        let both = || {
            // SAFETY: the buffer has that room, and lives as long as the stream.
            unsafe { rank.comm.recv(inbox.recv.address(), COUNT, DataType::F32, 1, other.raw().as_ptr())? };
            enqueue(&rank.comm, &call, &at, rank.stream.raw())
        };
        only_waits(&rank, both, &[&rank.stream, &other])
    })
}

fn only_synchronizes_a_graph(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let call = call(0, place.nranks, COUNT);
        let at = Buffers::of(&rank.context, &call)?;
        rank.together.wait();
        let mut graph = capture(&rank.stream, &rank.together, |stream| enqueue(&rank.comm, &call, &at, stream))?;
        // SAFETY: communicator, buffers and stream live.
        let launch = || unsafe { Ok(graph.launch(rank.stream.raw())?) };
        only_waits(&rank, launch, &[&rank.stream])
    })
}

fn kill_service(config: &str, roles: &[&str]) {
    for role in roles {
        let serving = Serving::start("serves", config, &[]);
        let mut ranks = Player::start(role, &everybody_at(serving.socket.clone()));
        ranks.hears("is there");
        serving.kill();
        ranks.ends_well();
    }
}

#[test]
#[ignore = "needs two GPUs"]
fn large_calls_go_on_when_the_service_is_killed() {
    kill_service(LARGE, &ASKING);
}

#[test]
#[ignore = "needs two GPUs"]
fn large_calls_of_a_strict_service_go_on_when_it_is_killed() {
    kill_service(&strict("auto"), &ASKING);
}

#[test]
#[ignore = "needs two GPUs"]
fn streams_go_on_when_the_service_is_killed_and_nobody_asks() {
    for config in [TENANTS, LARGE, &strict("auto"), &strict("kernels")] {
        kill_service(config, &["only_synchronizes", "only_synchronizes_a_graph"]);
    }
    // Has no graphs.
    kill_service(&strict("words"), &["only_synchronizes"]);
}

/// Rank 0 calls on a stream of another context, where nothing can be enqueued behind the command.
fn calls_on_a_strange_stream(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let call = call(0, place.nranks, COUNT);
        let at = Buffers::of(&rank.context, &call)?;
        let strange = OwnedStream::new(&Context::primary(&gpus()?[1])?)?;
        rank.together.wait();
        if rank.comm.rank() == 0 {
            ensure!(enqueue(&rank.comm, &call, &at, strange.raw()).is_err());
        } else {
            // Refused, if rank 0 was faster.
            let _ = enqueue(&rank.comm, &call, &at, rank.stream.raw());
            // SAFETY: the stream lives.
            unsafe { rank.stream.raw().synchronize()? };
        }
        let error = told(&rank).to_string();
        ensure!(error.contains("rank 0: CUDA_ERROR"), "{error}");
        Ok(())
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn a_call_that_fails_behind_its_command_is_told_to_everybody() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    everybody_plays("calls_on_a_strange_stream", &[LARGE]);
}

/// Rank 1's context fails, and the others wait for it.
fn loses_its_context(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let call = call(0, place.nranks, COUNT);
        let at = Buffers::of(&rank.context, &call)?;
        let stray = Module::load_ptx(&rank.context, STRAY)?;
        rank.together.wait();
        if rank.comm.rank() == 1 {
            let (stream, stray) = (rank.stream.raw(), stray.function("stray")?);
            // SAFETY: none: that is what the test is about. The context is of no use afterwards.
            let crashed = unsafe { stray.launch(stream, 1, 1, &8_u64).and_then(|()| stream.synchronize()) };
            ensure!(crashed.is_err() && enqueue(&rank.comm, &call, &at, stream).is_err());
        } else {
            // Refused, if rank 1 was faster.
            let _ = enqueue(&rank.comm, &call, &at, rank.stream.raw());
            let error = told(&rank).to_string();
            ensure!(error.contains("rank 1: CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{error}");
        }
        rank.together.wait();
        // Nothing can be given back in order.
        std::process::exit(0)
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn a_rank_whose_context_fails_is_named_to_the_others_with_the_error() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    everybody_plays("loses_its_context", &[TENANTS, LARGE]);
}
