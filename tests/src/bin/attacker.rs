//! Program of an attacker: carries out sequences that it is told, a line each, and answers with
//! what it did. Others stop and kill it at any instant.

use std::io::{BufRead as _, Write as _};

use anyhow::Context as _;
use mccs_tests::attacker::{Surroundings, sequence};

fn main() -> anyhow::Result<()> {
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.splitn(3, ' ');
        let mut next = || words.next().context("a line is: SEED STEPS SOCKET");
        let (seed, steps, socket) = (next()?.parse()?, next()?.parse()?, next()?.into());
        let tally = sequence(&Surroundings { socket, gpus: Vec::new() }, seed, steps);
        writeln!(std::io::stdout(), "{}", tally.to_json())?;
    }
    Ok(())
}
