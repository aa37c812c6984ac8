//! Attackers that are stopped, go on, and are killed at any instant.

use mccs_tests::attackers::Attackers;
use mccs_tests::quotas::all_comes_back;
use mccs_tests::seeds;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use crate::victim::attack;

/// Signals of a sequence.
const SIGNALS: usize = 200;

#[test]
fn attackers_that_are_stopped_and_killed_at_any_instant_harm_nobody_and_leave_nothing() {
    attack(|service| {
        for seed in seeds(2) {
            println!("MCCS_SEED={seed}");
            let mut rng = StdRng::seed_from_u64(seed);
            let program = env!("CARGO_BIN_EXE_attacker").into();
            let mut attackers = Attackers::start(program, service.socket(0), 3, &mut rng);
            (0..SIGNALS).for_each(|_| attackers.signal_one(&mut rng));
            all_comes_back(service, "hostile", || drop(attackers));
        }
    });
}
