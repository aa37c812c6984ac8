//! Seeded attackers that do anything, beside a tenant whose every element is checked. `MCCS_SECONDS=3600` hunts for an hour, and
//! `MCCS_SEED=n` repeats one sequence; `eval/hunt.py` runs many such programs side by side, and keeps what they say.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use mccs_tests::attacker::{Outcome, RequestKind, Tally};
use mccs_tests::attackers::AttackerProcess;
use mccs_tests::quotas::all_comes_back;
use mccs_tests::{TestService, seeds};

use crate::held::{descriptors, most_bytes_of_tenants, resident_bytes, threads};
use crate::victim::{Calls, SETTINGS, beside_calls};

/// Sequences that every run of the tests tries.
const SEQUENCES: u64 = 200;
/// Most steps of a sequence.
const STEPS: usize = 256;
/// Attackers at a time, each a process.
const LANES: usize = 4;
/// Tenants of each, in turn: one's sessions end while another's begin.
const TENANTS_OF_A_LANE: usize = 2;
const TENANTS: usize = LANES * TENANTS_OF_A_LANE;
/// Memory that each tenant may have.
const TENANT_BYTES: u64 = 4 << 20;
/// Most of all tenants' pages beside quotas: memory of the honest tenant, and pages of freed memory that an attacker has written to
/// once more, which are then its own.
const BESIDE_QUOTAS_BYTES: u64 = 8 << 20;
/// Sequences after which the process has all that it allocates once.
const WARM: u64 = 40;
/// Growth of the process that is no leak. One of a few hundred bytes for each sequence is found in an hour.
const GROWTH_MAX_BYTES: u64 = 256 << 20;

fn name(tenant: usize) -> String {
    format!("hostile-{tenant}")
}

/// Results of sequences.
#[derive(Default)]
struct Hunted {
    sequences: u64,
    tally: Tally,
    /// The longest time from a sequence's begin to when nothing was left of it.
    longest: Duration,
}

/// Carries out sequences on all lanes. The honest tenant makes a call for each.
fn hunt(service: &TestService, calls: &Calls, seeds: impl Iterator<Item = u64> + Send) -> Hunted {
    let (seeds, hunted) = (Mutex::new(seeds), Mutex::new(Hunted::default()));
    // Tests that were carried to another machine are told where theirs is.
    let built = || PathBuf::from(env!("CARGO_BIN_EXE_attacker"));
    let program = std::env::var_os("MCCS_ATTACKER").map_or_else(built, PathBuf::from);
    let attack = |lane: usize| {
        let mut attacker = AttackerProcess::start(&program);
        let mut began = [None; TENANTS_OF_A_LANE];
        let end = |turn: usize, began: &mut Option<Instant>| {
            all_comes_back(service, &name(lane * TENANTS_OF_A_LANE + turn));
            if let Some(began) = began.take() {
                let mut hunted = hunted.lock().unwrap_or_else(PoisonError::into_inner);
                hunted.longest = hunted.longest.max(began.elapsed());
            }
        };
        for turn in (0..TENANTS_OF_A_LANE).cycle() {
            end(turn, &mut began[turn]);
            let Some(seed) = seeds.lock().unwrap_or_else(PoisonError::into_inner).next() else { break };
            // Whatever goes wrong, the last of these lines of each lane are there.
            println!("MCCS_SEED={seed}");
            began[turn] = Some(Instant::now());
            let tenant = lane * TENANTS_OF_A_LANE + turn;
            let done = attacker.sequence(&service.socket(2 + tenant), seed, STEPS);
            calls.one_more();
            let mut hunted = hunted.lock().unwrap_or_else(PoisonError::into_inner);
            hunted.sequences += 1;
            hunted.tally.add(&done);
        }
        drop(attacker);
        began.iter_mut().enumerate().for_each(|(turn, began)| end(turn, began));
    };
    std::thread::scope(|scope| {
        for lane in 0..LANES {
            scope.spawn(move || attack(lane));
        }
    });
    hunted.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Each request has been sent, and has been done and refused, as far as a service without GPUs does.
fn assert_that_all_was_tried(tally: &Tally) {
    for kind in RequestKind::ALL {
        let [sent, done, refused] =
            [Outcome::Sent, Outcome::Done, Outcome::Refused].map(|outcome| tally.of_request(kind.name(), outcome));
        let told = format!("{}: {sent} sent, {done} done, {refused} refused", kind.name());
        assert!(sent > 0 && (refused > 0 || kind.is_always_right()), "{told}");
        assert!(done > 0 || kind.needs_gpus(), "{told}");
    }
}

#[test]
fn whatever_tenants_do_others_go_on_and_nothing_is_left() {
    let hostile = |tenant| {
        format!(
            "[[tenant]]\nname = {:?}\nsocket = \"h{tenant}\"\nmax_operations_in_flight = 64\nmax_memory = \"{}KiB\"\n\
             max_regions = 65536\n",
            name(tenant),
            TENANT_BYTES >> 10
        )
    };
    let service = TestService::start(&(SETTINGS.to_owned() + &(0..TENANTS).map(hostile).collect::<String>()));
    let (began, is_over, calls) = (Instant::now(), AtomicBool::new(false), Calls::when_asked());
    let (mut hunted, mut held, mut before, mut after) = (Hunted::default(), 0, (0, 0, 0), (0, 0, 0));
    let served = beside_calls(&service.socket(1), &calls, || {
        let counted = || (descriptors(), resident_bytes(), threads());
        hunt(&service, &calls, 0..WARM);
        before = counted();
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| most_bytes_of_tenants(&is_over));
            let caught = std::panic::AssertUnwindSafe(|| hunt(&service, &calls, seeds(SEQUENCES)));
            let ended = std::panic::catch_unwind(caught);
            is_over.store(true, Ordering::Relaxed);
            held = looks.join().expect("looks");
            hunted = ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
        // Descriptors close on a thread of their own.
        while descriptors() > before.0 {
            std::thread::yield_now();
        }
        after = counted();
    });
    let quotas = TENANTS as u64 * TENANT_BYTES;
    let said = serde_json::json!({
        "sequences": hunted.sequences, "seconds": began.elapsed().as_secs(), "longest_sequence_ms": hunted.longest.as_millis(),
        "checked_calls": served.calls, "longest_call_ms": served.longest.as_millis(), "calls_over_a_second": served.over_a_second,
        "descriptors": [before.0, after.0], "resident_kib": [before.1 >> 10, after.1 >> 10], "threads": [before.2, after.2],
        "held_kib": held >> 10, "quotas_kib": quotas >> 10, "tally": hunted.tally.counts(),
    });
    println!("hunt: {said}");
    let grown = after.1.saturating_sub(before.1);
    assert!(grown <= GROWTH_MAX_BYTES, "the process has grown by {grown} bytes");
    let most = quotas + quotas / 20 + BESIDE_QUOTAS_BYTES;
    assert!(held <= most, "tenants' memory has had {held} bytes, of quotas of {quotas}");
    if hunted.sequences >= SEQUENCES {
        assert_that_all_was_tried(&hunted.tally);
    }
    // New sessions of the attackers' tenants work: their quotas are free again.
    (0..TENANTS).for_each(|tenant| drop(service.ranks(2 + tenant, 2, |_| ())));
}
