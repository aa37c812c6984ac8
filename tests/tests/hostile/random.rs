//! Seeded attackers that do anything, beside a tenant whose every element is checked. `MCCS_SECONDS=3600` hunts for an hour, and
//! `MCCS_SEED=n` repeats one sequence; `tests/hunt.sh` runs many such programs side by side.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use mccs_tests::attacker::Attacker;
use mccs_tests::quotas::all_comes_back;
use mccs_tests::{TestService, seeds, watchdog};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::held::{descriptors, most_bytes_of_tenants, resident_bytes};
use crate::victim::{SETTINGS, beside};

/// Sequences that every run of the tests tries.
const SEQUENCES: u64 = 40;
/// Steps of a sequence.
const STEPS: usize = 400;
/// Attackers at a time, each a tenant of its own: one's sessions end while another's begin.
const LANES: usize = 4;
/// Memory that each of these tenants may have.
const LANE_BYTES: u64 = 8 << 20;
/// What all tenants' pages may take beside quotas: memory of the honest tenant, and pages of freed memory that an attacker has written
/// to once more, which are then its own.
const BESIDE_QUOTAS_BYTES: u64 = 8 << 20;
/// Sequences after which the process has all that it allocates once.
const WARM: u64 = 20;
/// Growth of the process that is no leak. One of a few hundred bytes for each sequence is found in an hour.
const GROWTH_MAX_BYTES: u64 = 256 << 20;

fn lane_name(lane: usize) -> String {
    format!("hostile-{lane}")
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

/// Sequences on all lanes. Returns how many.
fn hunt(service: &TestService, seeds: impl Iterator<Item = u64> + Send) -> u64 {
    let (seeds, done) = (Mutex::new(seeds), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for lane in 0..LANES {
            let (seeds, done) = (&seeds, &done);
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
    done.into_inner()
}

#[test]
fn whatever_tenants_do_others_go_on_and_nothing_is_left() {
    let hostile = |lane| {
        format!(
            "[[tenant]]\nname = {:?}\nsocket = \"h{lane}\"\nmax_operations_in_flight = 64\nmax_memory = \"{}KiB\"\n\
             max_regions = 65536\n",
            lane_name(lane),
            LANE_BYTES >> 10
        )
    };
    let service = TestService::start(&(SETTINGS.to_owned() + &(0..LANES).map(hostile).collect::<String>()));
    let (began, is_over) = (Instant::now(), AtomicBool::new(false));
    let (mut sequences, mut grown, mut held) = (0, 0, 0);
    let served = beside(&service.socket(1), || {
        (0..WARM).for_each(|seed| sequence(&service, seed as usize % LANES, seed));
        let (descriptors_before, resident_before) = (descriptors(), resident_bytes());
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| most_bytes_of_tenants(&is_over));
            let hunted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| hunt(&service, seeds(SEQUENCES))));
            is_over.store(true, Ordering::Relaxed);
            held = looks.join().expect("looks");
            sequences = hunted.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
        // Descriptors close on a thread of their own.
        while descriptors() > descriptors_before {
            std::thread::yield_now();
        }
        grown = resident_bytes().saturating_sub(resident_before);
        watchdog();
    });
    assert!(grown <= GROWTH_MAX_BYTES, "the process has grown by {grown} bytes");
    let quotas = LANES as u64 * LANE_BYTES;
    let most = quotas + quotas / 20 + BESIDE_QUOTAS_BYTES;
    assert!(held <= most, "tenants' memory has had {held} bytes, of quotas of {quotas}");
    // New sessions of the attackers' tenants work: their quotas are free again.
    (0..LANES).for_each(|lane| drop(service.ranks(2 + lane, 2, |_| ())));
    println!(
        "hunt: sequences={sequences} steps={} seconds={} checked_calls={} longest_call_ms={} grown_kib={} held_kib={} \
         quotas_kib={}",
        sequences * STEPS as u64,
        began.elapsed().as_secs(),
        served.calls,
        served.longest.as_millis(),
        grown >> 10,
        held >> 10,
        quotas >> 10,
    );
}
