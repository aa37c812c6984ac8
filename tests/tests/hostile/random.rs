//! Seeded attackers that do anything, beside a tenant whose every element is checked. `MCCS_SECONDS=3600` hunts for an hour, and
//! `MCCS_SEED=n` repeats one sequence; `tests/hunt.sh` runs many such programs side by side.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use mccs_tests::attacker::Attacker;
use mccs_tests::quotas::all_comes_back;
use mccs_tests::{TestService, seeds, watchdog};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::victim::{SETTINGS, beside};

/// Sequences that every run of the tests tries.
const SEQUENCES: u64 = 40;
/// Steps of a sequence.
const STEPS: usize = 400;
/// Attackers at a time, each a tenant of its own: one's sessions end while another's begin.
const LANES: usize = 4;
/// Sequences after which the process has all that it allocates once.
const WARM: u64 = 20;
/// Growth of the process that is no leak. One of a few hundred bytes for each sequence is found in an hour.
const GROWTH_MAX_BYTES: u64 = 256 << 20;

/// What the process holds.
#[derive(Debug, Clone, Copy)]
struct Held {
    descriptors: usize,
    bytes: u64,
}

impl Held {
    fn now() -> Self {
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("descriptors").count();
        let status = std::fs::read_to_string("/proc/self/status").expect("a status");
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        Held { descriptors, bytes: kib.and_then(|kib| kib.parse::<u64>().ok()).expect("resident pages") << 10 }
    }
}

/// One sequence of the n-th lane's tenant, to its very end.
fn sequence(service: &TestService, lane: usize, seed: u64) {
    // The harness shows it if the sequence fails.
    println!("MCCS_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut attacker = Attacker::new(service.socket(2 + lane));
    let mut decide = |below: u64| rng.random_range(0..below.max(1));
    (0..STEPS).for_each(|_| attacker.step(&mut decide));
    all_comes_back(service, &lane_name(lane), || drop(attacker));
}

fn lane_name(lane: usize) -> String {
    format!("hostile-{lane}")
}

fn hunt(service: &TestService, seeds: &Mutex<impl Iterator<Item = u64> + Send>, done: &AtomicU64) {
    std::thread::scope(|scope| {
        for lane in 0..LANES {
            scope.spawn(move || {
                loop {
                    let seed = seeds.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some(seed) = seed else { break };
                    sequence(service, lane, seed);
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
}

#[test]
fn whatever_tenants_do_others_go_on_and_nothing_is_left() {
    let hostile = |lane| {
        format!(
            "[[tenant]]\nname = {:?}\nsocket = \"h{lane}\"\nmax_operations_in_flight = 64\nmax_memory = \"64GiB\"\n\
             max_regions = 65536\n",
            lane_name(lane)
        )
    };
    let service = TestService::start(&(SETTINGS.to_owned() + &(0..LANES).map(hostile).collect::<String>()));
    let (done, began) = (AtomicU64::new(0), Instant::now());
    let mut grown = 0;
    let served = beside(&service.socket(1), || {
        (0..WARM).for_each(|seed| sequence(&service, seed as usize % LANES, seed));
        let before = Held::now();
        hunt(&service, &Mutex::new(seeds(SEQUENCES)), &done);
        // Descriptors close on a thread of their own.
        while Held::now().descriptors > before.descriptors {
            std::thread::yield_now();
        }
        grown = Held::now().bytes.saturating_sub(before.bytes);
        watchdog();
    });
    assert!(grown <= GROWTH_MAX_BYTES, "the process has grown by {grown} bytes");
    // New sessions of the attackers' tenants work: their quotas are free again.
    (0..LANES).for_each(|lane| drop(service.ranks(2 + lane, 2, |_| ())));
    println!(
        "hunt: sequences={} steps={} seconds={} checked_calls={} longest_call_ms={} grown_kib={}",
        done.load(Ordering::Relaxed),
        done.load(Ordering::Relaxed) * STEPS as u64,
        began.elapsed().as_secs(),
        served.calls,
        served.longest.as_millis(),
        grown >> 10,
    );
}
