//! Seeded attackers that know the host's GPUs, beside another tenant's ranks on them whose every element is checked.

use std::sync::atomic::{AtomicBool, Ordering};

use mccs_cuda::gpus;
use mccs_tests::attacker::{Surroundings, sequence};
use mccs_tests::quotas::all_comes_back;
use mccs_tests::{TestService, seeds};

use super::ranks::{Player, everybody};
use super::{LARGE, TENANTS, without_handles};

/// Sequences of each configuration.
const SEQUENCES: u64 = 30;
/// Most steps of a sequence.
const STEPS: usize = 300;

fn attack(service: &TestService) {
    let gpus = gpus().expect("GPUs").iter().map(|gpu| gpu.id.0).collect();
    let surroundings = Surroundings { socket: service.socket(1), gpus };
    for seed in seeds(SEQUENCES) {
        println!("MCCS_SEED={seed}");
        drop(sequence(&surroundings, seed, STEPS));
        all_comes_back(service, "b");
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
