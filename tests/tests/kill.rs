//! Processes killed at any instant: the service frees what they held, peers get an error, waiters are released.

use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mccs::{DataType, Error, RedOp, RemoteMemory};
use mccs_tests::hosts::TestHosts;
use mccs_tests::{TestService, watchdog};

/// Kills in one run; set MCCS_KILLS for more, such as the 1,000 of a long run.
fn kills() -> u32 {
    std::env::var("MCCS_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(100)
}

fn victim_command(service: &TestService, id: &mccs::UniqueId, rank: u32, count: u64) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_victim"));
    command
        .arg(service.socket(0))
        .args([id.to_string(), rank.to_string(), "2".into(), count.to_string()])
        .stderr(Stdio::null());
    command
}

/// Descriptors and mappings are the process': whoever counts them must be the only test that runs.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Holdings of a service: sessions, communicators, bytes of tenants' memory, descriptors, mapped memfds.
fn held(service: &TestService) -> [usize; 5] {
    let registry = &service.service().registry;
    let sessions = registry.sessions();
    let memory = sessions.first().map_or(0, |s| s.tenant.used(mccs_tenants::Resource::MemoryBytes));
    let count = |path: &str| std::fs::read_dir(path).map_or(0, Iterator::count);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mapped = maps.lines().filter(|line| line.contains("memfd:mccs")).count();
    [sessions.len(), registry.comms().len(), memory as usize, count("/proc/self/fd"), mapped]
}

/// Waits until the service holds no more than it held at the start (other tests of this process may have held something
/// then); the watchdog decides when that is never.
fn wait_until_freed(service: &TestService, start: [usize; 5]) {
    while held(service).into_iter().zip(start).any(|(now, start)| now > start) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn killed_tenants_leave_nothing_behind() {
    let _alone = alone();
    let service = TestService::start(
        "[limits]\ninit_timeout = \"300ms\"\n[[tenant]]\nname = \"a\"\nsocket = \"a\"\n[[tenant]]\nname = \"b\"\nsocket = \"b\"\n",
    );
    // A session that stays: it makes the tenant's counters visible.
    let _witness = service.connect(0);
    // The first victims warm up whatever is only ever made once.
    let mut start = None;
    let mut seed = 1u64;
    for round in 0..kills() {
        let id = mccs::unique_id().expect("an id");
        let count = if round % 2 == 0 { 64 } else { 100_000 };
        let mut victims = [0, 1].map(|rank| {
            let mut command = victim_command(&service, &id, rank, count);
            if round / 2 % 2 == 1 {
                command.env("MCCS_VICTIM_PUTS", "1");
            }
            command.spawn().expect("a victim")
        });
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // From the start of the process to some way into its work.
        std::thread::sleep(Duration::from_micros((seed >> 33) % 12_000));
        victims[round as usize % 2].kill().expect("killed");
        let other = &mut victims[1 - round as usize % 2];
        // The peer ends by itself: with an error, or as one who never joined. A joined one must not hang.
        if round % 8 == 7 {
            other.kill().expect("killed");
        }
        let killed = Instant::now();
        for victim in &mut victims {
            while victim.try_wait().expect("a child").is_none() {
                // One whose peer died before it joined waits for the init time-out: not what is tested here.
                if killed.elapsed() > Duration::from_secs(2) {
                    victim.kill().expect("killed");
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        match start {
            None => {
                while service.service().registry.sessions().len() > 1 {
                    std::thread::sleep(Duration::from_millis(1));
                }
                std::thread::sleep(Duration::from_millis(100));
                start = Some(held(&service));
            }
            Some(start) => wait_until_freed(&service, start),
        }
    }
}

#[test]
fn a_killed_ranks_peers_are_told_who_has_gone() {
    killed_rank(|victim| victim);
}

/// As after the death of a program whose workers, forked from it, are still there.
#[test]
fn a_killed_ranks_peers_are_told_although_a_child_has_its_socket() {
    killed_rank(|victim| victim.env("MCCS_VICTIM_FORKS", "1").stdin(Stdio::piped()));
}

fn killed_rank(how: fn(&mut Command) -> &mut Command) {
    watchdog();
    let _alone = alone();
    let service = TestService::start("");
    let id = mccs::unique_id().expect("an id");
    let mut victim = how(&mut victim_command(&service, &id, 1, 1000)).spawn().expect("a victim");
    // A child of its ends when this does.
    let _input = victim.stdin.take();
    let client = service.connect(0);
    let comm = client.communicator(id, 0, 2).join().expect("joined");
    let stream = client.create_stream().expect("a stream");
    let memory = client.allocate(4000).expect("memory");
    let call = || {
        comm.all_reduce(memory.at(0), memory.at(0), 1000, DataType::F32, RedOp::Sum, &stream).expect("enqueued");
        stream.synchronize()
    };
    call().expect("completed");
    victim.kill().expect("killed");
    victim.wait().expect("a child");
    // The victim had up to eight calls enqueued; after those nobody answers.
    let error = (0..10).find_map(|_| call().err()).expect("the peer is gone");
    assert!(error.to_string().contains("rank 1") && error.to_string().contains("has gone"), "{error}");
    // The rank is told before its operations are counted.
    let infos = service.service().registry.comms();
    while infos.iter().any(|info| info.failed.load(Ordering::Relaxed) == 0) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A process that ends without leaving, as one that calls `_exit`, has done its part of what it called.
#[test]
fn a_rank_that_ends_after_its_last_call_fails_nobody_elses() {
    watchdog();
    let service = TestService::start("");
    let client = service.connect(0);
    let stream = client.create_stream().expect("a stream");
    // One that posts to a round and ends; one that ends as soon as it has its results, of rounds and of the service.
    for (count, calls, waits) in [(250, 1, false), (250, 40, true), (1 << 18, 10, true)] {
        let id = mccs::unique_id().expect("an id");
        let mut victim = victim_command(&service, &id, 1, count);
        victim.env("MCCS_VICTIM_CALLS", calls.to_string());
        if waits {
            victim.env("MCCS_VICTIM_WAITS", "1");
        }
        let mut victim = victim.spawn().expect("a victim");
        let comm = client.communicator(id, 0, 2).join().expect("joined");
        let memory = client.allocate(4 * count).expect("memory");
        let call = || {
            comm.all_reduce(memory.at(0), memory.at(0), 4 * count, DataType::U8, RedOp::Sum, &stream)
                .expect("enqueued");
            stream.synchronize()
        };
        if !waits {
            victim.wait().expect("a child");
            while service.service().registry.sessions().len() > 1 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // Each call gives both ranks the sum of both, so that it doubles from the second on.
        let mut expected = victim.id() as u8 | 1;
        for _ in 0..calls {
            call().expect("the other rank has called the same");
            // SAFETY: nothing is under way.
            assert!(unsafe { memory.as_slice() }.iter().all(|byte| *byte == expected));
            expected = expected.wrapping_mul(2);
        }
        let error = call().expect_err("nobody else is there").to_string();
        let reason = format!("rank 1 (process {}) has gone, and rank 0 waits for it", victim.id());
        assert!(error.contains(&reason), "{error}");
        assert!(victim.wait().expect("a child").success());
    }
}

/// A rank puts to and from one on a host that is killed, until it hears so.
fn killed_under_puts(own: &TestService, victims: &TestService, root: &str) {
    const BYTES: u64 = 1 << 20;
    let id = mccs::unique_id().expect("an id");
    let mut victim = victim_command(victims, &id, 1, BYTES / 4);
    let mut victim = victim.arg(root).env("MCCS_VICTIM_PUTS", "1").spawn().expect("a victim");
    let place = own.connect(0).communicator(id, 0, 2).root_address_or_empty(root);
    let (comm, mut bootstrap) = (place.join().expect("joined"), place.join_bootstrap().expect("joined"));
    let channels = comm.port_channels().expect("opened");
    let memory = comm.client().allocate(2 * BYTES).expect("memory");
    let registered = channels.register(memory.at(0), 2 * BYTES).expect("registered");
    let told = bootstrap.all_gather(&registered.remote().to_bytes()).expect("told");
    let theirs = RemoteMemory::from_bytes(&told[1]).expect("a memory");
    let channel = channels.channel(1, 0, &registered, &theirs).expect("a channel");
    let turn = || {
        (0..8).try_for_each(|_| channel.put_with_signal(0, BYTES, BYTES))?;
        (0..8).try_for_each(|_| channel.wait())?;
        channel.flush()
    };
    turn().expect("the victim puts too");
    victim.kill().expect("killed");
    victim.wait().expect("a child");
    let error = loop {
        if let Err(error) = turn() {
            break error.to_string();
        }
    };
    assert!(error.contains("rank 1") && error.contains("has gone"), "{error}");
    // No other than its communicators hears of it.
    let other = comm.client().communicator(mccs::unique_id().expect("an id"), 0, 1).join().expect("joined");
    let stream = comm.client().create_stream().expect("a stream");
    other.barrier(&stream).and_then(|()| stream.synchronize()).expect("completed");
}

#[test]
fn a_rank_killed_under_puts_releases_its_peer() {
    watchdog();
    let _alone = alone();
    let service = TestService::start("");
    let witness = service.connect(0);
    let start = held(&service);
    killed_under_puts(&service, &service, "");
    drop(witness);
    wait_until_freed(&service, start);
}

#[test]
fn a_rank_killed_under_puts_releases_its_peer_on_another_host() {
    watchdog();
    let _alone = alone();
    let hosts = TestHosts::start(2, "");
    killed_under_puts(hosts.service(0), hosts.service(1), "h0");
}

#[test]
fn waiters_are_released_when_the_service_goes() {
    let _alone = alone();
    let mut service = TestService::start("");
    let client = service.connect(0);
    let id = mccs::unique_id().expect("an id");
    let other = service.connect(0);
    let join = std::thread::spawn(move || (other.communicator(id, 1, 2).join().expect("joined"), other));
    let comm = client.communicator(id, 0, 2).join().expect("joined");
    let _other = join.join().expect("the other rank");
    let stream = client.create_stream().expect("a stream");
    comm.barrier(&stream).expect("enqueued");
    let waiter = std::thread::spawn({
        let stream = stream.clone();
        move || stream.synchronize()
    });
    service.stop();
    let error = waiter.join().expect("the waiter").expect_err("the service has gone");
    assert!(matches!(error, Error::ServiceGone(_)), "{error}");
    assert!(error.to_string().contains("stopping; connect again once it is there"), "{error}");
    assert!(matches!(client.create_stream(), Err(Error::ServiceGone(_))));
    assert!(matches!(comm.async_error(), Some(Error::ServiceGone(_))));
}
