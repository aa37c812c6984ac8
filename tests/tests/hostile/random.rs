//! A seeded attacker that does anything, beside a tenant whose every element is checked. `MCCS_SECONDS=3600` hunts for an hour, and
//! `MCCS_SEED=n` repeats one sequence.

use std::sync::Arc;

use mccs_tenants::Resource;
use mccs_tests::attacker::Attacker;
use mccs_tests::{TestService, seeds};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::victim::attack;

/// Sequences that every run of the tests tries.
const SEQUENCES: u64 = 40;
/// Steps of a sequence.
const STEPS: usize = 400;

const RESOURCES: [Resource; 5] =
    [Resource::MemoryBytes, Resource::Mappings, Resource::Sessions, Resource::Communicators, Resource::SentDescriptors];

/// Ends the attacker, and returns when nothing of its tenant is left, whatever it was.
pub fn all_comes_back(service: &TestService, end: impl FnOnce()) {
    let hostile = || {
        let sessions = service.service().registry.sessions();
        sessions.into_iter().find(|session| session.tenant.name == "hostile")
    };
    let tenant = hostile().map(|session| Arc::clone(&session.tenant));
    end();
    while hostile().is_some()
        || tenant.as_ref().is_some_and(|tenant| RESOURCES.iter().any(|resource| tenant.used(*resource) > 0))
    {
        std::thread::yield_now();
    }
}

#[test]
fn whatever_a_tenant_does_others_go_on_and_nothing_is_left() {
    attack(|service| {
        for seed in seeds(SEQUENCES) {
            // The harness shows it if the sequence fails.
            println!("MCCS_SEED={seed}");
            let mut rng = StdRng::seed_from_u64(seed);
            let mut attacker = Attacker::new(service.socket(0));
            let mut decide = |below: u64| rng.random_range(0..below.max(1));
            (0..STEPS).for_each(|_| attacker.step(&mut decide));
            all_comes_back(service, || drop(attacker));
        }
    });
}
