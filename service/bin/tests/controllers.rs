//! Controllers that are killed, doubled, stopped and let go again, as processes, while jobs run whose every result is checked: what is in
//! force stays in force, and in the end one controller alone decides.

#[path = "programs/cluster.rs"]
#[allow(dead_code, reason = "tests of elections use the rest")]
mod cluster;
#[allow(dead_code, reason = "the other tests of programs need more of it")]
mod programs;

use std::time::Duration;

use mccs_controller::messages::answer::{ControllerAnswer, ControllerRequest};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::cluster::{CONTROLLERS, Cluster, WORKERS, policy};
use self::programs::address;

/// Kills in one run; set MCCS_CONTROLLER_KILLS for more.
fn kills() -> u64 {
    std::env::var("MCCS_CONTROLLER_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(12)
}

#[test]
fn a_controller_killed_at_any_instant_of_a_roll_out_harms_no_job_and_the_next_one_decides() {
    let [own, _] = CONTROLLERS;
    let cluster = Cluster::new(1);
    let _workers = WORKERS.map(|name| cluster.start(name, own, None));
    let mut controller = cluster.start(own, own, Some(&policy("ffa")));
    cluster.with_jobs(|jobs| {
        let mut seed = 1_u64;
        let mut in_force = "ffa";
        jobs.wait_until(|| cluster.is_in_force(own, in_force));
        for round in 0..kills() {
            let wanted = if in_force == "ffa" { "ecmp" } else { "ffa" };
            let before = cluster.epochs();
            std::thread::scope(|scope| {
                let asking = scope.spawn(|| cluster.apply(own, wanted));
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Up to the time that a roll-out to these jobs takes.
                std::thread::sleep(Duration::from_micros((seed >> 33) % 15_000));
                controller.0.kill().expect("killed");
                controller.0.wait().expect("a child");
                // It was in force, or the operator is told that the service has gone.
                if let Ok(answer) = asking.join().expect("asked") {
                    assert!(matches!(&answer, ControllerAnswer::Applied(made) if made.failed.is_empty()), "{answer:?}");
                }
            });
            jobs.go_on();
            // Orders are agreed on without it, by both hosts or by none, and once.
            jobs.wait_until(|| cluster.epochs()[0] == cluster.epochs()[1]);
            let after = cluster.epochs();
            assert!(after[0].iter().zip(&before[0]).all(|(after, before)| after - before <= 1), "{before:?} {after:?}");
            // The next one wants now what the last one wanted, now what was before.
            in_force = if round % 2 == 0 { wanted } else { in_force };
            controller = cluster.start(own, own, Some(&policy(in_force)));
            jobs.wait_until(|| cluster.is_in_force(own, in_force));
            jobs.go_on();
        }
    });
}

#[test]
fn of_two_controllers_the_one_that_hosts_obey_decides_and_the_other_is_told_so() {
    let [own, other] = CONTROLLERS;
    let cluster = Cluster::new(2);
    let _workers = WORKERS.map(|name| cluster.start(name, own, None));
    let _first = cluster.start(own, own, Some(&policy("ffa")));
    cluster.with_jobs(|jobs| {
        jobs.wait_until(|| cluster.is_in_force(own, "ffa"));
        let before = cluster.epochs();
        let second = cluster.start(other, other, Some(&policy("ecmp")));
        let obey_the_first: Vec<_> = [own, WORKERS[0], WORKERS[1]].map(|host| (host.to_owned(), own.to_owned())).into();
        jobs.wait_until(|| cluster.show(other).elsewhere == obey_the_first);
        let refused = cluster.apply(other, "ecmp").expect_err("nobody obeys it");
        assert!(refused.contains("h0 obeys a0"), "{refused}");
        assert!(cluster.show(other).communicators.is_empty());
        jobs.go_on();
        assert_eq!(cluster.epochs(), before, "nothing was changed");
        // The rightful one says who does not obey it, and decides as before.
        jobs.wait_until(|| cluster.show(own).elsewhere == [(other.to_owned(), other.to_owned())]);
        cluster.apply(own, "ecmp").expect("in force");
        jobs.wait_until(|| cluster.is_in_force(own, "ecmp"));
        drop(second);
        jobs.go_on();
        jobs.wait_until(|| cluster.show(own).elsewhere.is_empty());
        assert!(cluster.is_in_force(own, "ecmp"));
    });
}

/// As docs/CONTROLLER.md has it: the old one is stopped, and a service of the same name starts on another machine, with the same files.
#[test]
fn the_role_moves_to_another_machine_while_jobs_run_and_changes_nothing() {
    let [own, _] = CONTROLLERS;
    let cluster = Cluster::new(1);
    let _workers = WORKERS.map(|name| cluster.start(name, own, None));
    let old = cluster.start(own, own, Some(&policy("ffa")));
    cluster.with_jobs(|jobs| {
        jobs.wait_until(|| cluster.is_in_force(own, "ffa"));
        let before = cluster.epochs();
        drop(old);
        jobs.go_on();
        let _new = cluster.start_at(own, "new", address(), own, Some(&policy("ffa")));
        jobs.wait_until(|| cluster.is_in_force("new", "ffa"));
        jobs.go_on();
        assert_eq!(cluster.epochs(), before, "what was in force was as decided");
        let history = cluster.ask("new", ControllerRequest::History { acts: false });
        let Ok(ControllerAnswer::History(history)) = history else { panic!("{history:?}") };
        assert!(!history.iter().any(|entry| entry.what.starts_with("order")), "{history:?}");
        cluster.apply("new", "ecmp").expect("it decides");
        jobs.wait_until(|| cluster.is_in_force("new", "ecmp"));
    });
}

/// A mistake: a second service with the controller's name, other files and another address, while the first one works.
#[test]
fn a_second_service_of_the_controllers_name_harms_nothing_and_is_told_so() {
    let [own, _] = CONTROLLERS;
    let cluster = Cluster::new(1);
    let _workers = WORKERS.map(|name| cluster.start(name, own, None));
    let _first = cluster.start(own, own, Some(&policy("ffa")));
    cluster.with_jobs(|jobs| {
        jobs.wait_until(|| cluster.is_in_force(own, "ffa"));
        let (before, life) = (cluster.epochs(), cluster.show(own).life);
        let second = cluster.start_at(own, "second", address(), own, Some(&policy("ecmp")));
        let is_turned_away = |refused: &str| refused.contains("another service called a0 is connected to h");
        jobs.wait_until(|| cluster.apply("second", "ecmp").is_err_and(|refused| is_turned_away(&refused)));
        jobs.wait_until(|| cluster.show("second").turned_away.len() == WORKERS.len());
        jobs.go_on();
        assert_eq!(cluster.epochs(), before, "nothing was changed");
        assert!(cluster.is_in_force(own, "ffa") && cluster.show(own).life == life, "the first one did not notice");
        drop(second);
        cluster.apply(own, "ecmp").expect("the first one decides as before");
        jobs.wait_until(|| cluster.is_in_force(own, "ecmp"));
        jobs.go_on();
    });
}

#[test]
fn an_old_controller_that_comes_back_beside_a_new_one_is_not_obeyed_until_that_has_gone() {
    let [own, _] = CONTROLLERS;
    let cluster = Cluster::new(1);
    let _workers = WORKERS.map(|name| cluster.start(name, own, None));
    let old = cluster.start(own, own, Some(&policy("ffa")));
    let signal = |signal: Signal| kill(Pid::from_raw(old.0.id() as i32), signal).expect("signalled");
    cluster.with_jobs(|jobs| {
        jobs.wait_until(|| cluster.is_in_force(own, "ffa"));
        // Its host hangs; another one takes its place, by the same name, when nothing was heard of it for link_timeout.
        signal(Signal::SIGSTOP);
        let new = cluster.start_at(own, "new", address(), own, Some(&policy("ecmp")));
        jobs.wait_until(|| cluster.is_in_force("new", "ecmp"));
        let before = cluster.epochs();
        signal(Signal::SIGCONT);
        jobs.wait_until(|| cluster.apply(own, "ffa").is_err_and(|why| why.contains("another service called a0")));
        jobs.go_on();
        assert_eq!(cluster.epochs(), before, "the old policy is not in force again");
        assert!(cluster.is_in_force("new", "ecmp"));
        // The new one goes, and the old one is let in again, and obeyed.
        drop(new);
        jobs.wait_until(|| cluster.apply(own, "ffa").is_ok());
        jobs.wait_until(|| cluster.is_in_force(own, "ffa"));
        jobs.go_on();
    });
}
