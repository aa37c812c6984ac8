//! Hosts that are what they should be: they meet, come and go, and lose no message with their links.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_engines::exchange::ExchangeError;
use mccs_exchange::protocol::{Event, Failure, Request};
use mccs_ipc::types::ErrorClass;
use mccs_runtime::{Context, Engine, Progress};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::fixture::{Fixture, Host, key};
use crate::proxy::{Harm, Proxy};

#[test]
fn hosts_meet_and_set_communicators_up() {
    for count in [2, 4] {
        let mut fixture = Fixture::running(count);
        for number in 0..3 {
            fixture.join(&key(number), 2, 100);
            fixture.complete(&key(number));
        }
        assert!(fixture.hosts.iter().all(|host| host.refused() == 0));
        for host in &fixture.hosts {
            for other in fixture.names.iter().filter(|name| **name != host.settings.own) {
                assert!(host.info(other.as_str()).is_up);
            }
        }
    }
}

#[test]
fn ranks_may_join_before_their_hosts_meet() {
    let mut fixture = Fixture::new(3);
    for host in [0, 2, 1] {
        fixture.hosts[host].start().unwrap();
        fixture.poll();
    }
    fixture.join(&key(1), 1, 100);
    fixture.complete(&key(1));
}

#[test]
fn a_failure_is_told_to_all() {
    let mut fixture = Fixture::running(3);
    fixture.join(&key(1), 1, 10);
    let comm = fixture.complete(&key(1));
    let failure = Failure::new(ErrorClass::Remote, "rank 2 has gone").by_rank(2);
    fixture.hosts[2].ask(Request::Fail { comm: comm.clone(), failure: failure.clone() });
    let told = |host: &Host| host.has(|event| *event == Event::Failed { comm: comm.clone(), failure: failure.clone() });
    fixture.until(|fixture| fixture.hosts[..2].iter().all(told));
}

#[test]
fn a_host_that_dies_and_comes_back_is_blamed_and_met_again() {
    let mut fixture = Fixture::running(3);
    fixture.join(&key(1), 1, 10);
    let comm = fixture.complete(&key(1));
    // The first connects to the second, and the third is connected to by it: both ways of finding it again.
    fixture.hosts[1].kill();
    fixture.until(|fixture| !fixture.hosts[0].info("b").is_up && !fixture.hosts[2].info("b").is_up);
    assert!(fixture.hosts[0].info("b").last_error.is_some());
    fixture.hosts[1].start().unwrap();
    let blamed = fixture.names[1].clone();
    let failed = |host: &Host| {
        let of_b = |failure: &Failure| failure.host.as_ref() == Some(&blamed);
        host.has(|event| matches!(event, Event::Failed { comm: of, failure } if *of == comm && of_b(failure)))
    };
    fixture.until(|fixture| failed(&fixture.hosts[0]) && failed(&fixture.hosts[2]));
    fixture.until_all_meet();
    fixture.join(&key(2), 1, 10);
    fixture.complete(&key(2));
}

#[test]
fn a_host_that_stays_away_is_given_up() {
    let mut fixture = Fixture::new(2);
    for host in &mut fixture.hosts {
        host.settings.times.host_timeout = Duration::from_secs(4);
        host.settings.times.link_timeout = Duration::from_secs(4);
    }
    fixture.start();
    fixture.join(&key(1), 1, 10);
    let comm = fixture.complete(&key(1));
    fixture.hosts[1].kill();
    fixture
        .until(|fixture| fixture.hosts[0].has(|event| matches!(event, Event::Failed { comm: of, .. } if *of == comm)));
}

/// A host's message in time is in time, however late this one gets to read it.
#[test]
fn an_engine_that_did_not_run_blames_nobody_for_its_own_pause() {
    let mut fixture = Fixture::running(2);
    fixture.until_all_meet();
    let timeout = fixture.hosts[0].settings.times.link_timeout;
    let mut poll_at = |host: usize, now| {
        let engine = fixture.hosts[host].engine.as_mut().expect("a running host");
        // Once: a deadline that is seen before what waits is read would be missed.
        engine.poll(&Context::new(now, 64));
        fixture.hosts[0].info("b")
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
    let mut fixture = Fixture::new(2);
    // Not even a whole set-up fits through one connection.
    let harm = Harm { break_after_bytes: 150_000, pause: Duration::ZERO };
    let proxy = Proxy::start(fixture.hosts[1].settings.listen, harm);
    fixture.hosts[0].settings.hosts[1].1 = proxy.address;
    fixture.start();
    for number in 0..6 {
        fixture.join(&key(number), 64, 4096);
    }
    for number in 0..6 {
        proxy.break_all();
        fixture.complete(&key(number));
    }
    assert!(proxy.connections.load(Ordering::Relaxed) > 3);
}

#[test]
fn a_slow_reader_is_waited_for() {
    let mut fixture = Fixture::new(2);
    let harm = Harm { break_after_bytes: usize::MAX, pause: Duration::from_micros(500) };
    let proxy = Proxy::start(fixture.hosts[1].settings.listen, harm);
    fixture.hosts[0].settings.hosts[1].1 = proxy.address;
    fixture.start();
    fixture.join(&key(1), 128, 4096);
    fixture.join(&key(2), 1, 10);
    fixture.complete(&key(2));
    fixture.complete(&key(1));
    let views = [fixture.hosts[0].info("b"), fixture.hosts[1].info("a")];
    assert_eq!(proxy.connections.load(Ordering::Relaxed), 1, "{views:?}");
}

#[test]
fn events_wait_for_a_receiver_that_is_full() {
    let mut fixture = Fixture::running(2);
    fixture.hosts[1].is_full.store(true, Ordering::Relaxed);
    fixture.join(&key(1), 2, 10);
    fixture.until(|fixture| fixture.hosts[0].has(|event| matches!(event, Event::Gathered { .. })));
    // It looks again by itself, and not without a pause.
    fixture.until(|fixture| {
        let engine = fixture.hosts[1].engine.as_ref().unwrap();
        engine.is_up(&fixture.names[0])
    });
    let mut idle = None;
    while idle.is_none() {
        let cx = Context::new(Instant::now(), 64);
        if let Progress::Idle { wake_at } = fixture.hosts[1].engine.as_mut().unwrap().poll(&cx) {
            idle = wake_at.map(|at| at - cx.now);
        }
    }
    assert!(idle.unwrap() > Duration::ZERO);
    assert!(fixture.hosts[1].events.lock().unwrap().is_empty());
    fixture.hosts[1].is_full.store(false, Ordering::Relaxed);
    fixture.complete(&key(1));
}

#[test]
fn an_idle_engine_waits_for_the_next_sign_of_life() {
    let mut fixture = Fixture::new(3);
    for host in &mut fixture.hosts {
        host.settings.times.keep_alive = Duration::from_secs(9);
    }
    fixture.start();
    fixture.until_all_meet();
    fixture.join(&key(1), 1, 10);
    fixture.complete(&key(1));
    let mut quiet = 0;
    fixture.until(|fixture| {
        let readable = fixture.hosts.iter().any(|host| {
            let descriptors = host.engine.as_ref().unwrap().descriptors();
            let mut polled: Vec<_> =
                descriptors.iter().map(|one| PollFd::new(one.as_fd(), PollFlags::POLLIN)).collect();
            poll(&mut polled, PollTimeout::ZERO).unwrap() > 0
        });
        quiet = if readable { 0 } else { quiet + 1 };
        quiet > 1000
    });
    for host in &mut fixture.hosts {
        let cx = Context::new(Instant::now(), 64);
        let progress = host.engine.as_mut().unwrap().poll(&cx);
        let Progress::Idle { wake_at: Some(at) } = progress else { panic!("{progress:?}") };
        assert!(at > cx.now + Duration::from_millis(100), "{:?}", at - cx.now);
    }
}

#[test]
fn a_port_in_use_is_named() {
    let mut fixture = Fixture::new(2);
    fixture.hosts[0].start().unwrap();
    let mut other = Fixture::new(2);
    other.hosts[0].settings.listen = fixture.hosts[0].settings.listen;
    let error = other.hosts[0].start().unwrap_err();
    assert!(matches!(error, ExchangeError::InUse(address) if address == fixture.hosts[0].settings.listen), "{error}");
    assert!(error.to_string().starts_with("exchange.listen: "), "{error}");
    other.hosts[0].settings.listen = "192.0.2.1:7400".parse().unwrap();
    let error = other.hosts[0].start().unwrap_err().to_string();
    assert!(error.contains("192.0.2.1:7400"), "{error}");
}
