//! Ranks that call until there is an error, and what has them end.

use super::rails::synchronize;
use super::ranks::{Player, Rank};
use super::told;

/// Has rank 1 abort among its calls.
pub const ABORTS: &str = "MCCS_GPU_ABORTS";

/// Makes calls, each with its turn, one behind the end of the other, until there is an error, which the rank tells: no stream stands still. Rank 1
/// aborts among them where [`ABORTS`] is set.
pub fn calls_until_it_fails(rank: &Rank, mut call: impl FnMut(usize) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let Rank { comm, stream, .. } = rank;
    let aborts = std::env::var_os(ABORTS).is_some();
    for turn in 0.. {
        let called = call(turn);
        if aborts && comm.rank() == 1 && turn == 3 {
            comm.abort()?;
        }
        synchronize(stream)?;
        if called.is_err() || comm.async_error().is_some() {
            break;
        }
        if turn == 3 {
            println!("is at work");
        }
    }
    println!("rank {} was told: {}", comm.rank(), told(rank));
    Ok(())
}

/// Waits until all of them have made some calls.
pub fn are_at_work(players: &mut [Player]) {
    players.iter_mut().for_each(|player| player.hears("is at work"));
}

/// The last rank's process is killed among its calls, and the others are told.
pub fn others_hear_of_a_kill(mut players: Vec<Player>) {
    are_at_work(&mut players);
    players.pop().expect("the last rank").kill();
    all_are_told(players, "");
}

/// Processes of one rank each, in order, are told of an error, in these words.
pub fn all_are_told(players: Vec<Player>, words: &str) {
    for (rank, player) in players.into_iter().enumerate() {
        let said = player.ends_well();
        assert!(said.contains(&format!("rank {rank} was told")) && said.contains(words), "{said}");
    }
}
