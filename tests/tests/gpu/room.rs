//! Memory of GPUs: when there is none left, when those that had it are dead, and how much of tenants' stays open. Needs two GPUs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, ensure};
use mccs::CollectiveKind;
use mccs::cuda::REGISTERED_MAX;
use mccs_cuda::{Context, DeviceMemory, gpus};
use mccs_eval::workload::Call;
use mccs_ipc::device_initiated::{ControlPage, DEVICE_INITIATED_RANKS_MAX};
use mccs_ipc::large::LargeWord;
use mccs_tenants::{Resource, Tenant};
use mccs_tests::TestService;

use super::failures::{free_bytes, wait_until_as_free};
use super::losses::refuse;
use super::mps::UNTIL;
use super::ranks::{Buffers, Place, Player, Rank, Role, call, enqueue, enqueue_at, everybody};
use super::staged::by_engines;
use super::{LARGE, TENANTS, told, wait_until};

pub const ROLES: &[(&str, Role)] = &[
    ("has_no_room", has_no_room),
    ("never_comes", never_comes),
    ("writes_back", writes_back),
    ("writes_back_to_a_gather", writes_back_to_a_gather),
    ("uses_many_buffers", uses_many_buffers),
];

/// The tenant of a session that is there.
fn tenant(service: &TestService) -> Arc<Tenant> {
    Arc::clone(&service.service().registry.sessions().first().expect("a session").tenant)
}

/// Joins, and has a large operation when there is no room for its slots: all ranks hear why.
fn has_no_room(place: &Place) -> anyhow::Result<()> {
    let until = std::env::var_os(UNTIL).map(std::path::PathBuf::from).context("a file")?;
    place.each_rank(|rank| {
        let call = Call { kind: CollectiveKind::AllReduce, ..call(0, place.nranks, 1 << 16) };
        let at = Buffers::of(&rank.context, &call)?;
        rank.together.wait();
        println!("has joined");
        wait_until(|| until.exists());
        let error = match enqueue(&rank.comm, &call, &at, rank.stream.raw()) {
            Ok(()) => told(&rank).to_string(),
            Err(error) => error.to_string(),
        };
        ensure!(error.contains("CUDA_ERROR_OUT_OF_MEMORY (2)"), "{error}");
        Ok(())
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn a_gpu_without_room_ends_the_communicator_that_wants_it_and_nothing_else() {
    /// Less than its slots take.
    const LEFT: u64 = 64 << 20;
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    for config in [LARGE, &by_engines("auto")] {
        let config = config.replace("slot = \"256KiB\"\n", "").replacen("[cuda]\n", "[cuda]\nslot = \"512MiB\"\n", 1);
        let service = TestService::start(&config);
        let directory = tempfile::tempdir().expect("a directory");
        let enough = directory.path().join("enough");
        let mut others = Player::start_with("keeps_calling", &everybody(&service, 1), &[(UNTIL, enough.clone())]);
        others.hears("keeps calling");
        let context = Context::primary(gpus().expect("GPUs").last().expect("a GPU")).expect("a context");
        let full = directory.path().join("full");
        let mut wanting = Player::start_with("has_no_room", &everybody(&service, 0), &[(UNTIL, full.clone())]);
        wanting.hears("has joined");
        let rest = context.free_bytes().expect("a number") - LEFT;
        let taken = DeviceMemory::new(&context, rest as usize).expect("all but a little");
        std::fs::write(&full, "").expect("written");
        wanting.ends_well();
        std::fs::write(&enough, "").expect("written");
        others.ends_well();
        drop(taken);
        Player::start("checks", &everybody(&service, 0)).ends_well();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_tenant_has_as_much_memory_of_gpus_as_it_may() {
    let service =
        TestService::start(&TENANTS.replacen("name = \"a\"\n", "name = \"a\"\nmax_gpu_memory = \"1MiB\"\n", 1));
    refuse(&everybody(&service, 0), "bytes of GPU memory for communicators asked for, 0 of 1048576 in use");
    Player::start("checks", &everybody(&service, 1)).ends_well();
}

/// All ranks call, and their streams do not come to it; then a thread each does something, and stays.
fn never_comes_and(place: &Place, kind: CollectiveKind, does: fn(&Rank)) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let call = Call { kind, ..call(0, place.nranks, 1 << 20) };
        let (at, word) = (Buffers::of(&rank.context, &call)?, DeviceMemory::zeroed(&rank.context, 8)?);
        rank.together.wait();
        // SAFETY: word and stream live as long as the process.
        unsafe { rank.stream.raw().wait_word(word.address(), 1)? };
        enqueue(&rank.comm, &call, &at, rank.stream.raw())?;
        rank.together.wait();
        println!("is there");
        does(&rank);
        loop {
            std::thread::park();
        }
    })
}

fn never_comes(place: &Place) -> anyhow::Result<()> {
    never_comes_and(place, CollectiveKind::AllReduce, |_| ())
}

fn writes_back(place: &Place) -> anyhow::Result<()> {
    never_comes_and(place, CollectiveKind::AllReduce, write_back)
}

/// One of three ranks waits for what another one's stream tells at its end.
fn writes_back_to_a_gather(place: &Place) -> anyhow::Result<()> {
    never_comes_and(place, CollectiveKind::Gather, write_back)
}

/// Says that no stream has come anywhere, whatever the service writes.
fn write_back(rank: &Rank) {
    let pages = std::fs::read_to_string("/proc/self/maps").expect("its memory");
    let starts = pages.lines().filter(|line| line.contains("memfd:mccs-device-initiated")).map(|line| {
        let (start, _) = line.split_once('-').expect("a range");
        usize::from_str_radix(start, 16).expect("an address")
    });
    let words = || (0..DEVICE_INITIATED_RANKS_MAX).flat_map(|rank| LargeWord::ALL.map(|word| (rank, word)));
    let words: Vec<_> = starts
        .flat_map(|start| words().map(move |(rank, word)| start + ControlPage::large_offset(rank, word) as usize))
        // SAFETY: the process has its pages as long as it lives, and others write these words as well, whole.
        .map(|address| unsafe { &*std::ptr::with_exposed_provenance::<AtomicU64>(address) })
        .collect();
    assert!(!words.is_empty());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            }
        });
        println!("was told: {}", told(rank));
    });
}

#[test]
#[ignore = "needs two GPUs"]
fn memory_of_the_dead_comes_back_whose_streams_never_came_to_their_calls() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    for config in [LARGE, &by_engines("auto"), &by_engines("events")] {
        let service = TestService::start(config);
        // Checks that are only ever made once.
        Player::start("checks", &everybody(&service, 0)).ends_well();
        wait_until(|| service.service().registry.comms().is_empty());
        let before = free_bytes();
        let mut player = Player::start("never_comes", &everybody(&service, 0));
        player.hears("is there");
        let tenant = tenant(&service);
        wait_until(|| tenant.used(Resource::Imports) > 0);
        player.kill();
        wait_until(|| service.service().registry.comms().is_empty() && tenant.used(Resource::Imports) == 0);
        wait_until_as_free(&before);
    }
}

/// The word that lets the service's streams go is written again and again, so that whoever writes over it wins for a while only: nothing
/// could be freed meanwhile.
#[test]
#[ignore = "needs two GPUs"]
fn who_writes_back_what_the_service_says_holds_nobody_up() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    hold_up("writes_back");
}

#[test]
#[ignore = "needs three GPUs"]
fn who_writes_back_to_a_gather_holds_nobody_up() {
    // Neither of two ranks waits for the end of another's part.
    assert!(gpus().expect("GPUs").len() > 2, "needs three GPUs");
    hold_up("writes_back_to_a_gather");
}

fn hold_up(role: &str) {
    for config in [LARGE, &by_engines("auto")] {
        let service = TestService::start(&format!("{config}[limits]\noperation_timeout = \"1s\"\n"));
        let mut hostile = Player::start(role, &everybody(&service, 0));
        hostile.hears("was told");
        // Checks that are only ever made once, beside it.
        Player::start("checks", &everybody(&service, 1)).ends_well();
        let before = free_bytes();
        Player::start("checks", &everybody(&service, 1)).ends_well();
        wait_until_as_free(&before);
        assert!(hostile.process.try_wait().expect("a process").is_none());
        hostile.kill();
    }
}

const RANKS: u32 = 2;

/// Calls with more buffers than stay registered, and with the first ones again.
fn uses_many_buffers(place: &Place) -> anyhow::Result<()> {
    let buffers = REGISTERED_MAX * 2 + 50;
    place.each_rank(|rank| {
        let call = call(0, place.nranks, 1000);
        // An allocation of its own each.
        let memory = (0..buffers).map(|_| DeviceMemory::new(&rank.context, 2 << 20));
        let memory = memory.collect::<Result<Vec<_>, _>>()?;
        rank.together.wait();
        for memory in memory.iter().chain(&memory[..3]) {
            let at = memory.address();
            let mut output = call.input(rank.comm.rank());
            // SAFETY: there is room for the call, and nothing is in flight before and after.
            unsafe {
                mccs_cuda::copy_from_host(at, &output)?;
                enqueue_at(&rank.comm, &call, call.redop.into(), at, at, rank.stream.raw())?;
                rank.stream.raw().synchronize()?;
                mccs_cuda::copy_to_host(&mut output, at)?;
            }
            ensure!(call.wrong_elements(rank.comm.rank(), &output) == 0);
        }
        rank.together.wait();
        println!("is done");
        loop {
            std::thread::park();
        }
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn only_so_many_buffers_stay_open() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    // As many as a rank's process takes, and as few as its tenant may have.
    let few = 5;
    let config = LARGE.replacen("name = \"a\"\n", &format!("name = \"a\"\nmax_regions = {few}\n"), 1);
    for (config, each) in [(LARGE, REGISTERED_MAX as u64), (&config, few)] {
        let service = TestService::start(config);
        let place = Place { nranks: RANKS, ranks: 0..RANKS, ..everybody(&service, 0) };
        let mut player = Player::start("uses_many_buffers", &place);
        player.hears("is done");
        // Imports of each rank, on each GPU; all of them would be more even if one GPU had them open.
        let most = each * u64::from(RANKS * RANKS);
        let tenant = tenant(&service);
        wait_until(|| (1..=most).contains(&tenant.used(Resource::Imports)));
        player.kill();
        wait_until(|| tenant.used(Resource::Imports) == 0);
    }
}
