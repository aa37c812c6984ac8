//! A GPU that fails in the service's process: what is there ends, on all ranks, with the error's name, and other GPUs' communicators go on. Those only on
//! emulated GPUs: a stray kernel, the one way to have a GPU fail on purpose, has the driver end a process' contexts on its other GPUs as well (decision 032).
//! Needs two GPUs.

use std::path::PathBuf;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use mccs_cuda::{Context, Module, OwnedStream, gpus};
use mccs_tests::TestService;

use super::deaths::{CONFIG, Serving};
use super::mps::{STRAY, UNTIL};
use super::ranks::{Place, Player, Role, Together, everybody_at};
use super::staged::by_engines;
use super::{LARGE, TENANTS};

pub const ROLES: &[(&str, Role)] = &[("loses_a_gpu", loses_a_gpu), ("is_refused", is_refused)];

/// Variable with the words that its process is to find in an error.
const REASON: &str = "MCCS_GPU_REASON";
const LOST: &str = "CUDA_ERROR_ILLEGAL_ADDRESS (700)";

/// A service whose context on the last GPU fails as soon as a file is there.
fn loses_a_gpu(_: &Place) -> anyhow::Result<()> {
    let service = TestService::start(&std::fs::read_to_string(std::env::var(CONFIG)?)?);
    let until = PathBuf::from(std::env::var_os(UNTIL).context("a file")?);
    let context = Context::primary(gpus()?.last().context("a GPU")?)?;
    let _entered = context.enter()?;
    let (stream, stray) = (OwnedStream::new(&context)?, Module::load_ptx(&context, STRAY)?);
    let stray = stray.function("stray")?;
    println!("serves at {}", service.socket(0).display());
    while !until.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: none: that is what the test is about.
    let crashed = unsafe { stray.launch(stream.raw(), 1, 1, &8_u64).and_then(|()| stream.raw().synchronize()) };
    ensure!(crashed.is_err_and(|error| error.to_string().contains(LOST)));
    println!("has lost it");
    loop {
        std::thread::park();
    }
}

/// No rank can join, for the reason that its environment names.
fn is_refused(place: &Place) -> anyhow::Result<()> {
    let reason = std::env::var(REASON)?;
    let join = |rank| place.join(rank, place.id, Arc::new(Together::Threads(Barrier::new(1))));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = place.ranks.clone().map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().try_for_each(|rank| {
            let error =
                rank.join().expect("a rank that does not panic").err().context("a rank has joined")?.to_string();
            ensure!(error.contains(&reason), "{error}");
            Ok(())
        })
    })
}

/// Has all ranks of a new communicator refused.
pub fn refuse(place: &Place, reason: &str) {
    Player::start_with("is_refused", place, &[(REASON, reason.into())]).ends_well();
}

fn lose(config: &str, others_go_on: bool) {
    let directory = tempfile::tempdir().expect("a directory");
    let [lose, enough] = ["lose", "enough"].map(|name| directory.path().join(name));
    let mut serving = Serving::start("loses_a_gpu", config, &[(UNTIL, lose.clone())]);
    let all = everybody_at(serving.socket.clone());
    let mut on_all = Player::start("runs", &all);
    // With a process each, as is to be on one GPU.
    let id = mccs::unique_id().expect("an id");
    let socket = serving.socket.with_file_name("b");
    let first = |rank| Place { id, socket: socket.clone(), ranks: rank..rank + 1, nranks: 2, gpus: 1, ..all.clone() };
    let mut others = [0, 1].map(|rank| Player::start_with("keeps_calling", &first(rank), &[(UNTIL, enough.clone())]));
    others[0].hears("keeps calling");
    on_all.hears("runs");

    std::fs::write(&lose, "").expect("written");
    serving.player.hears("has lost it");
    // One of them finds out.
    refuse(&Place { id: mccs::unique_id().expect("an id"), ..all.clone() }, LOST);
    let said = on_all.ends_well();
    assert_eq!(said.matches(LOST).count(), all.nranks as usize, "{said}");
    refuse(&Place { id: mccs::unique_id().expect("an id"), ..all.clone() }, "is lost to this service");

    std::fs::write(&enough, "").expect("written");
    if !others_go_on {
        for player in &mut others {
            player.process.wait().expect("its end");
        }
        return serving.kill();
    }
    others.into_iter().for_each(|player| drop(player.ends_well()));
    let id = mccs::unique_id().expect("an id");
    let again = [0, 1].map(|rank| Player::start("checks", &Place { id, ..first(rank) }));
    again.into_iter().for_each(|player| drop(player.ends_well()));
    serving.kill();
}

#[test]
#[ignore = "needs two GPUs"]
fn a_gpu_that_the_service_has_lost_ends_what_is_there_and_nothing_else() {
    let gpus = gpus().expect("GPUs");
    assert!(gpus.len() > 1, "needs two GPUs");
    let others_go_on = gpus.iter().all(|gpu| gpu.name == "Emulated GPU");
    for config in [TENANTS, LARGE, &by_engines("auto")] {
        lose(config, others_go_on);
    }
}
