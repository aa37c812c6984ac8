//! Seeded attackers that know the host's GPUs, beside another tenant's ranks on them whose every element is checked.

use std::sync::atomic::{AtomicBool, Ordering};

use mccs_cuda::gpus;
use mccs_tests::attacker::Attacker;
use mccs_tests::quotas::all_comes_back;
use mccs_tests::{TestService, seeds};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::ranks::{Player, everybody};
use super::{LARGE, TENANTS, without_handles};

/// Sequences of each configuration.
const SEQUENCES: u64 = 30;
/// Steps of a sequence.
const STEPS: usize = 300;

fn attack(service: &TestService) {
    let known: Vec<_> = gpus().expect("GPUs").iter().map(|gpu| gpu.id.0).collect();
    for seed in seeds(SEQUENCES) {
        println!("MCCS_SEED={seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let mut attacker = Attacker::new(service.socket(1)).with_gpus(known.clone());
        let mut decide = |below: u64| rng.random_range(0..below.max(1));
        (0..STEPS).for_each(|_| attacker.step(&mut decide));
        all_comes_back(service, "b", || drop(attacker));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn whatever_a_tenant_does_to_gpus_others_go_on_and_nothing_is_left() {
    for config in [TENANTS.to_owned(), LARGE.to_owned(), without_handles(LARGE)] {
        let service = TestService::start(&config);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let attacked = scope.spawn(|| {
                let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| attack(&service)));
                is_over.store(true, Ordering::Relaxed);
                ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            });
            // At least once beside them, and once behind them.
            loop {
                let is_last = is_over.load(Ordering::Relaxed);
                Player::start("checks", &everybody(&service, 0)).ends_well();
                if is_last {
                    break;
                }
            }
            attacked.join().expect("the attackers");
        });
        // The attackers' tenant has all of its quotas again.
        Player::start("checks", &everybody(&service, 1)).ends_well();
    }
}
