//! Hosts that are what they should be: they meet, come and go, and lose no message with their links.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_engines::exchange::ExchangeError;
use mccs_exchange::protocol::{Event, Failure, Request};
use mccs_ipc::types::ErrorClass;
use mccs_runtime::{Context, Engine, Progress};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::bed::{Bed, Host, key};
use crate::proxy::{Harm, Proxy};

#[test]
fn hosts_meet_and_set_communicators_up() {
    for count in [2, 4] {
        let mut bed = Bed::running(count);
        for number in 0..3 {
            bed.join(&key(number), 2, 100);
            bed.complete(&key(number));
        }
        assert!(bed.hosts.iter().all(|host| host.refused() == 0));
        for host in &bed.hosts {
            for other in bed.names.iter().filter(|name| **name != host.settings.own) {
                assert!(host.info(other.as_str()).is_up);
            }
        }
    }
}

#[test]
fn ranks_may_join_before_their_hosts_meet() {
    let mut bed = Bed::new(3);
    for host in [0, 2, 1] {
        bed.hosts[host].start().unwrap();
        bed.poll();
    }
    bed.join(&key(1), 1, 100);
    bed.complete(&key(1));
}

#[test]
fn a_failure_is_told_to_all() {
    let mut bed = Bed::running(3);
    bed.join(&key(1), 1, 10);
    let comm = bed.complete(&key(1));
    let failure = Failure::new(ErrorClass::Remote, "rank 2 has gone").by_rank(2);
    bed.hosts[2].ask(Request::Fail { comm: comm.clone(), failure: failure.clone() });
    let told = |host: &Host| host.has(|event| *event == Event::Failed { comm: comm.clone(), failure: failure.clone() });
    bed.until(|bed| bed.hosts[..2].iter().all(told));
}

#[test]
fn a_host_that_dies_and_comes_back_is_blamed_and_met_again() {
    let mut bed = Bed::running(3);
    bed.join(&key(1), 1, 10);
    let comm = bed.complete(&key(1));
    // The first connects to the second, and the third is connected to by it: both ways of finding it again.
    bed.hosts[1].kill();
    bed.until(|bed| !bed.hosts[0].info("b").is_up && !bed.hosts[2].info("b").is_up);
    assert!(bed.hosts[0].info("b").last_error.is_some());
    bed.hosts[1].start().unwrap();
    let blamed = bed.names[1].clone();
    let failed = |host: &Host| {
        let of_b = |failure: &Failure| failure.host.as_ref() == Some(&blamed);
        host.has(|event| matches!(event, Event::Failed { comm: of, failure } if *of == comm && of_b(failure)))
    };
    bed.until(|bed| failed(&bed.hosts[0]) && failed(&bed.hosts[2]));
    bed.until_all_meet();
    bed.join(&key(2), 1, 10);
    bed.complete(&key(2));
}

#[test]
fn a_host_that_stays_away_is_given_up() {
    let mut bed = Bed::new(2);
    for host in &mut bed.hosts {
        host.settings.times.host_timeout = Duration::from_secs(4);
        host.settings.times.link_timeout = Duration::from_secs(4);
    }
    bed.start();
    bed.join(&key(1), 1, 10);
    let comm = bed.complete(&key(1));
    bed.hosts[1].kill();
    bed.until(|bed| bed.hosts[0].has(|event| matches!(event, Event::Failed { comm: of, .. } if *of == comm)));
}

/// What a host has said in time is in time, however late this one gets to read it.
#[test]
fn an_engine_that_did_not_run_blames_nobody_for_its_own_pause() {
    let mut bed = Bed::running(2);
    bed.until_all_meet();
    let timeout = bed.hosts[0].settings.times.link_timeout;
    let mut poll_at = |host: usize, now| {
        let engine = bed.hosts[host].engine.as_mut().expect("a running host");
        // Once: a deadline that is seen before what waits is read would be missed.
        engine.poll(&Context::new(now, 64));
        bed.hosts[0].info("b")
    };
    let now = Instant::now();
    // The other one gives signs of life meanwhile, the last of them a second before this one runs again.
    poll_at(1, now + timeout - Duration::from_secs(1));
    let seen = poll_at(0, now + timeout + Duration::from_millis(1));
    assert!(seen.is_up && seen.last_error.is_none(), "{seen:?}");
    // Without any it is.
    let seen = poll_at(0, now + 3 * timeout);
    assert!(seen.last_error.is_some(), "{seen:?}");
}

#[test]
fn broken_links_lose_nothing() {
    let mut bed = Bed::new(2);
    // Not even a whole set-up fits through one connection.
    let harm = Harm { break_after_bytes: 150_000, pause: Duration::ZERO };
    let proxy = Proxy::start(bed.hosts[1].settings.listen, harm);
    bed.hosts[0].settings.hosts[1].1 = proxy.address;
    bed.start();
    for number in 0..6 {
        bed.join(&key(number), 64, 4096);
    }
    for number in 0..6 {
        proxy.break_all();
        bed.complete(&key(number));
    }
    assert!(proxy.connections.load(Ordering::Relaxed) > 3);
}

#[test]
fn a_slow_reader_is_waited_for() {
    let mut bed = Bed::new(2);
    let harm = Harm { break_after_bytes: usize::MAX, pause: Duration::from_micros(500) };
    let proxy = Proxy::start(bed.hosts[1].settings.listen, harm);
    bed.hosts[0].settings.hosts[1].1 = proxy.address;
    bed.start();
    bed.join(&key(1), 128, 4096);
    bed.join(&key(2), 1, 10);
    bed.complete(&key(2));
    bed.complete(&key(1));
    let views = [bed.hosts[0].info("b"), bed.hosts[1].info("a")];
    assert_eq!(proxy.connections.load(Ordering::Relaxed), 1, "{views:?}");
}

#[test]
fn events_wait_for_a_receiver_that_is_full() {
    let mut bed = Bed::running(2);
    bed.hosts[1].is_full.store(true, Ordering::Relaxed);
    bed.join(&key(1), 2, 10);
    bed.until(|bed| bed.hosts[0].has(|event| matches!(event, Event::Gathered { .. })));
    // It looks again by itself, and not without a pause.
    bed.until(|bed| {
        let engine = bed.hosts[1].engine.as_ref().unwrap();
        engine.is_up(&bed.names[0])
    });
    let mut idle = None;
    while idle.is_none() {
        let cx = Context::new(Instant::now(), 64);
        if let Progress::Idle { wake_at } = bed.hosts[1].engine.as_mut().unwrap().poll(&cx) {
            idle = wake_at.map(|at| at - cx.now);
        }
    }
    assert!(idle.unwrap() > Duration::ZERO);
    assert!(bed.hosts[1].events.lock().unwrap().is_empty());
    bed.hosts[1].is_full.store(false, Ordering::Relaxed);
    bed.complete(&key(1));
}

#[test]
fn an_idle_engine_waits_for_the_next_sign_of_life() {
    let mut bed = Bed::new(3);
    for host in &mut bed.hosts {
        host.settings.times.keep_alive = Duration::from_secs(9);
    }
    bed.start();
    bed.until_all_meet();
    bed.join(&key(1), 1, 10);
    bed.complete(&key(1));
    let mut quiet = 0;
    bed.until(|bed| {
        let readable = bed.hosts.iter().any(|host| {
            let descriptors = host.engine.as_ref().unwrap().descriptors();
            let mut polled: Vec<_> =
                descriptors.iter().map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN)).collect();
            poll(&mut polled, PollTimeout::ZERO).unwrap() > 0
        });
        quiet = if readable { 0 } else { quiet + 1 };
        quiet > 1000
    });
    for host in &mut bed.hosts {
        let cx = Context::new(Instant::now(), 64);
        let progress = host.engine.as_mut().unwrap().poll(&cx);
        let Progress::Idle { wake_at: Some(at) } = progress else { panic!("{progress:?}") };
        assert!(at > cx.now + Duration::from_millis(100), "{:?}", at - cx.now);
    }
}

#[test]
fn a_port_in_use_is_named() {
    let mut bed = Bed::new(2);
    bed.hosts[0].start().unwrap();
    let mut other = Bed::new(2);
    other.hosts[0].settings.listen = bed.hosts[0].settings.listen;
    let error = other.hosts[0].start().unwrap_err();
    assert!(matches!(error, ExchangeError::InUse(address) if address == bed.hosts[0].settings.listen), "{error}");
    assert!(error.to_string().starts_with("exchange.listen: "), "{error}");
    other.hosts[0].settings.listen = "192.0.2.1:7400".parse().unwrap();
    let error = other.hosts[0].start().unwrap_err().to_string();
    assert!(error.contains("192.0.2.1:7400"), "{error}");
}
