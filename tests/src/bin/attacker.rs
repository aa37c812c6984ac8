//! An attacker in a process of its own, which others stop and kill at any instant: does anything, as the seed says, until it is ended.

use mccs_tests::attacker::Attacker;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().ok_or_else(|| anyhow::anyhow!("usage: attacker SOCKET SEED"));
    let (socket, seed) = (next()?, next()?.parse()?);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut attacker = Attacker::new(socket.into());
    let mut decide = |below: u64| rng.random_range(0..below.max(1));
    loop {
        attacker.step(&mut decide);
    }
}
