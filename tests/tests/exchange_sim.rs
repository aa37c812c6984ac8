//! The exchange protocol under misfortune: production state machines, simulated network and clock, one seed a run.
//!
//! `MCCS_SEED=n` runs that seed only, and says all that happens; `MCCS_SEEDS=n` so many,
//! `MCCS_SECONDS=n` for so long.

use std::time::{Duration, Instant};

use mccs_exchange::limits::PART_BYTES;
use mccs_exchange::protocol::{Exchange, Name, Options, Request};
use mccs_tests::sim::ledger::Job;
use mccs_tests::sim::proxy::Manners;
use mccs_tests::sim::world::{ALL_OVER, INIT_TIMEOUT, Misfortune, TIMES, World};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const SEEDS: u64 = 200;
const DELAY: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(3));

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Events of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Weather {
    /// Nothing.
    Calm,
    /// Links break and come back; nobody may be given up, and every communicator completes.
    Windy,
    /// Everything.
    Storm,
}

/// Jobs, hosts and misfortunes that a seed means. Returns what is wrong, and the trace.
fn run(seed: u64) -> (Vec<String>, u64) {
    let mut rng = StdRng::seed_from_u64(!seed);
    let hosts = if seed.is_multiple_of(20) { rng.random_range(16..=32) } else { rng.random_range(1..=8) };
    let weather = match seed % 5 {
        0 => Weather::Calm,
        1 => Weather::Windy,
        _ => Weather::Storm,
    };
    let manners = Manners { pause: ms(5), withdraws: 40, fails: 40, retries: 2, leaves: 6, changes: 2, tells: 1 };
    let mut world = World::new(seed, hosts, DELAY, manners);
    world.is_verbose = std::env::var_os("MCCS_SEED").is_some();
    world.nobody_may_be_lost = weather != Weather::Storm;
    world.run_until(ms(rng.random_range(0..800)));
    let jobs = rng.random_range(1..=if hosts > 8 { 4 } else { 12 });
    for number in 0..jobs {
        let most = if hosts > 8 { 256 } else { 24 };
        let placement: Vec<_> = (0..rng.random_range(1..=most)).map(|_| rng.random_range(0..hosts)).collect();
        let mut job = Job::new(number, placement);
        let within = ms(if rng.random_bool(0.5) { 1 } else { rng.random_range(1..4000) });
        if rng.random_bool(0.15) {
            world.start_wrong(job, within);
        } else {
            job.must_complete = weather != Weather::Storm;
            world.start(job, within);
        }
    }
    if hosts > 1 {
        misfortunes(&mut world, &mut rng, hosts, weather);
    }
    world.run_until(world.now + ms(15_000));
    let trace = world.trace();
    (world.finish(), trace)
}

fn misfortunes(world: &mut World, rng: &mut StdRng, hosts: usize, weather: Weather) {
    let now = world.now;
    let time = |rng: &mut StdRng| {
        let most = if rng.random_bool(0.5) { 100 } else { 8000 };
        now + ms(rng.random_range(0..most))
    };
    let (count, kinds) = match weather {
        Weather::Calm => return,
        Weather::Windy => (rng.random_range(1..40), 6),
        Weather::Storm => (rng.random_range(1..8), 12),
    };
    for _ in 0..count {
        let (at, a) = (time(rng), rng.random_range(0..hosts));
        let b = (a + rng.random_range(1..hosts)) % hosts;
        match rng.random_range(0..kinds) {
            0..=2 => world.strike(at, Misfortune::Drop { told: rng.random() }),
            3 | 4 => world.strike(at, Misfortune::Duplicate(a, b)),
            5 => world.strike(at, Misfortune::Pause(a, ms(rng.random_range(1..1000)))),
            6 => world.strike(at, Misfortune::Pause(a, ms(rng.random_range(1000..15_000)))),
            7 | 8 => world.strike(at, Misfortune::Cut(a, b)),
            9 => world.strike(at, Misfortune::Garbage),
            _ => {
                world.strike(at, Misfortune::Crash(a));
                world.strike(at + ms(rng.random_range(1..4000)), Misfortune::Restart(a));
            }
        }
    }
    // Some cuts end in time, others only when a host has been given up.
    world.strike(now + ms(rng.random_range(0..15_000)), Misfortune::Heal);
}

#[test]
fn communicators_complete_everywhere_or_fail_everywhere_with_one_who_is_to_blame() {
    let mut seeds = 0;
    for seed in mccs_tests::seeds(SEEDS) {
        let (problems, _) = run(seed);
        assert!(
            problems.is_empty(),
            "{}\nrepeat with: MCCS_SEED={seed} cargo test -p mccs-tests --test exchange_sim communicators",
            problems.join("\n")
        );
        seeds += 1;
    }
    println!("{seeds} seeds");
}

#[test]
fn the_same_seed_is_the_same_run() {
    mccs_tests::watchdog();
    for seed in 1..12 {
        assert_eq!(run(seed).1, run(seed).1, "seed {seed}");
    }
}

/// `ranks` ranks on each of `hosts` connected hosts.
fn calm_world(hosts: usize, ranks: usize) -> (World, Job) {
    let mut world = World::new(1, hosts, DELAY, Manners::default());
    world.run_until(ms(1000));
    let placement = (0..hosts).flat_map(|host| std::iter::repeat_n(host, ranks)).collect();
    (world, Job::new(0, placement))
}

fn failure(world: &World, job: usize, host: usize) -> String {
    let failure = world.failure(job, host).unwrap_or_else(|| panic!("job {job} did not fail on host {host}"));
    failure.message.to_string()
}

#[test]
fn set_up_of_4096_ranks_on_64_hosts_takes_messages_per_host_not_per_rank() {
    mccs_tests::watchdog();
    const HOSTS: u64 = 64;
    let (mut world, mut job) = calm_world(HOSTS as usize, 64);
    (job.must_complete, job.payload_bytes) = (true, 512);
    let payload_bytes: usize = (0..4096).map(|rank| job.payload(rank).bytes().len()).sum();
    let (before, started, began) = (world.counters(), world.now, Instant::now());
    world.start(job, ms(1));
    world.run_until(started + ms(5_000));
    let took = began.elapsed();
    let (first, last) = world.completed[&0];
    let sent: Vec<_> = before
        .iter()
        .zip(world.counters())
        .map(|(b, a)| (a.messages - b.messages, a.message_bytes - b.message_bytes))
        .collect();
    let others = sent.iter().skip(1);
    let (most, most_bytes) = (others.clone().map(|s| s.0).max().unwrap(), others.map(|s| s.1).max().unwrap());
    println!(
        "4096 ranks on {HOSTS} hosts, {payload_bytes} bytes told: complete {:?} to {:?} after the first rank joined, {took:?} of this \
         machine's time for all hosts; the root's host sent {} messages of {} KiB, no other more than {most} of {} KiB; \
         {} connections a host, {} in all",
        first - started,
        last - started,
        sent[0].0,
        sent[0].1 >> 10,
        most_bytes >> 10,
        HOSTS - 1,
        HOSTS * (HOSTS - 1) / 2
    );
    // A block from every host goes through every host, in one part or a few; the rest is a handful.
    let parts = (payload_bytes as u64 / HOSTS).div_ceil(PART_BYTES as u64) + 1;
    assert!(most <= HOSTS * parts + 8, "{most} messages");
    assert!(sent[0].0 <= HOSTS * (parts + 2) + 8, "{} messages of the root", sent[0].0);
    assert!(most_bytes <= 2 * payload_bytes as u64, "{most_bytes} bytes");
    // Each part waits a delay a hop, and nothing else.
    assert!(last - started <= DELAY.1 * (HOSTS as u32 + 8) + ms(50), "{:?}", last - started);
    assert_eq!(world.finish(), Vec::<String>::new());
}

#[test]
fn a_missing_rank_is_named_on_every_host_when_the_time_is_over() {
    let (mut world, mut job) = calm_world(3, 2);
    job.placement.push(2);
    world.start_missing(job, 6, ms(10));
    world.run_until(world.now + INIT_TIMEOUT + ms(50));
    for host in 0..3 {
        let text = failure(&world, 0, host);
        assert!(text.contains("missing rank 6 of 7") && text.contains("2 on h000"), "{text}");
    }
    assert_eq!(world.finish(), Vec::<String>::new());
}

#[test]
fn a_rank_on_two_hosts_is_named_with_both() {
    let (mut world, job) = calm_world(2, 2);
    let mut other = job.clone();
    other.placement = vec![0, 1, 1, 1];
    world.start_missing(job, 3, ms(1));
    world.run_until(world.now + ms(20));
    world.start_only(other, 1, ms(1));
    world.run_until(world.now + ms(100));
    let text = failure(&world, 0, 0);
    assert!(text.contains("rank 1 joined") && text.contains("on host h000 and on host h001"), "{text}");
}

#[test]
fn a_host_that_dies_during_set_up_is_named_on_all_others() {
    let (mut world, job) = calm_world(3, 2);
    world.start_missing(job, 5, ms(10));
    world.run_until(world.now + ms(100));
    world.strike(world.now, Misfortune::Crash(2));
    world.run_until(world.now + TIMES.host_timeout + ms(100));
    for host in 0..2 {
        let text = failure(&world, 0, host);
        assert!(text.contains("host h002") && text.contains("cannot be reached"), "{text}");
    }
}

#[test]
fn a_host_that_restarts_is_found_out_at_once() {
    let (mut world, job) = calm_world(3, 2);
    world.start(job, ms(10));
    world.run_until(world.now + ms(200));
    assert!((0..3).all(|host| world.has_begun(0, host)));
    world.strike(world.now, Misfortune::Crash(1));
    world.strike(world.now + ms(10), Misfortune::Restart(1));
    world.run_until(world.now + ms(2000));
    for host in [0, 2] {
        let text = failure(&world, 0, host);
        assert!(text.contains("host h001") && text.contains("restarted"), "{text}");
    }
}

#[test]
fn a_host_that_has_restarted_is_part_of_what_begins_before_all_have_met_it_again() {
    mccs_tests::watchdog();
    // With the root on the host that restarts, on one that has not met it again, and on one that has.
    let placements = [[2, 1, 0, 3], [1, 0, 2, 3], [0, 1, 2, 3], [0, 2, 3, 1]];
    // Also when the life before is given up just then, since nothing was heard of it.
    let waits = [800, 8000, 8500, 9000, 9500, 9900];
    for (placement, wait) in placements.into_iter().flat_map(|placement| waits.map(|wait| (placement, wait))) {
        let (mut world, _) = calm_world(4, 1);
        let old = Job::new(0, vec![1, 2]);
        world.start(old, ms(10));
        world.run_until(world.now + ms(200));
        assert!([1, 2].into_iter().all(|host| world.has_begun(0, host)));
        world.strike(world.now, Misfortune::Cut(1, 2));
        world.strike(world.now + ms(1), Misfortune::Crash(2));
        world.strike(world.now + ms(10), Misfortune::Restart(2));
        world.run_until(world.now + ms(wait));
        assert!(world.have_met(0, 2));
        world.start(Job::new(1, placement.to_vec()), ms(10));
        world.run_until(world.now + ms(1000));
        world.strike(world.now, Misfortune::Heal);
        world.run_until(world.now + ms(2000));
        assert!((0..4).all(|host| world.has_begun(1, host)), "{placement:?}, {wait} ms");
        // Communicators that began with the life before have failed.
        let text = failure(&world, 0, 1);
        assert!(text.contains("restarted") || text.contains("cannot be reached"), "{text}");
        assert_eq!(world.finish(), Vec::<String>::new());
    }
}

#[test]
fn what_begins_when_hosts_have_just_restarted_completes() {
    mccs_tests::watchdog();
    for seed in 0..100 {
        let mut rng = StdRng::seed_from_u64(seed);
        let hosts = rng.random_range(2..=8);
        let mut world = World::new(seed, hosts, DELAY, Manners { pause: ms(5), ..Manners::default() });
        world.run_until(ms(1000));
        let anywhere = |rng: &mut StdRng| (0..12).map(|_| rng.random_range(0..hosts)).collect();
        for number in 0..4 {
            world.start(Job::new(number, anywhere(&mut rng)), ms(1000));
        }
        world.run_until(world.now + ms(rng.random_range(0..1500)));
        let (now, most) = (world.now, rng.random_range(1..=hosts));
        for _ in 0..most {
            let host = rng.random_range(0..hosts);
            world.strike(now + ms(rng.random_range(0..50)), Misfortune::Crash(host));
            world.strike(now + ms(50), Misfortune::Restart(host));
        }
        world.run_until(now + ms(50));
        for number in 4..8 {
            let mut job = Job::new(number, anywhere(&mut rng));
            job.must_complete = true;
            world.start(job, ms(if rng.random_bool(0.5) { 1 } else { 400 }));
        }
        assert_eq!(world.finish(), Vec::<String>::new(), "seed {seed}");
    }
}

#[test]
fn a_host_whose_ranks_have_left_may_go() {
    let (mut world, job) = calm_world(3, 1);
    world.start(job, ms(10));
    world.run_until(world.now + ms(200));
    world.leave(0, 1);
    world.run_until(world.now + ms(200));
    world.strike(world.now, Misfortune::Crash(1));
    world.run_until(world.now + ALL_OVER);
    assert!([0, 2].into_iter().all(|host| world.has_begun(0, host)));
}

#[test]
fn the_same_id_can_be_tried_again_after_a_failure() {
    let (mut world, job) = calm_world(2, 2);
    world.start_missing(job.clone(), 3, ms(10));
    world.run_until(world.now + INIT_TIMEOUT + ms(100));
    failure(&world, 0, 1);
    world.start_again(0, ms(10));
    world.run_until(world.now + ms(200));
    assert!((0..2).all(|host| world.has_begun(0, host)));
    assert_eq!(world.finish(), Vec::<String>::new());
}

/// Each part would wait for the other until the time for joining is over.
#[test]
fn parts_of_a_job_whose_tenant_hosts_call_differently_are_refused_at_once_on_both() {
    let (mut world, job) = calm_world(2, 1);
    let mut other = job.clone();
    other.key.tenant = mccs_exchange::protocol::Name::new("somebody-else").unwrap();
    world.start_missing(job, 1, ms(1));
    world.start_missing(other, 0, ms(1));
    world.run_until(world.now + ms(200));
    for (of, rank) in [(0, 0), (1, 1)] {
        let why = failure(&world, of, rank);
        assert!(
            why.contains("by tenant somebody-else on host") && why.contains("the same name in service.toml"),
            "{why}"
        );
    }
}

/// A host whose links are tested while another has none has nothing more to do about that one.
#[test]
fn a_host_that_is_down_keeps_nobody_busy_whose_links_are_tested() {
    let hosts = ["a", "b"].map(|host| Name::new(host).expect("a name"));
    let (own, hosts) = (hosts[0].clone(), hosts.to_vec());
    let options = Options { own, hosts, incarnation: 1, times: TIMES, init_timeout: INIT_TIMEOUT };
    let now = Instant::now();
    let mut exchange = Exchange::new(&options, now);
    exchange.request(Request::TestLinks, now);
    exchange.tick(now);
    assert!(exchange.next_deadline().is_none_or(|at| at > now));
}
