//! A tenant with many communicators of two ranks, for what a console's looks cost a real service.
//!
//! `many SOCKET COMMUNICATORS`; each sums once a second. `ready` on standard output says that all have joined; ends with standard input.

use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use mccs::{Client, DataType, RedOp, UniqueId};

/// A rank of each communicator, in a session of its own.
fn rank(rank: u32, socket: &PathBuf, ids: &[UniqueId], joined: &Barrier, is_over: &AtomicBool) -> anyhow::Result<()> {
    let client = Client::connect(socket)?;
    let join = |id: &UniqueId| client.communicator(*id, rank, 2).join();
    let comms: Vec<_> = ids.iter().map(join).collect::<Result<_, _>>()?;
    let (stream, memory) = (client.create_stream()?, client.allocate(4096)?);
    joined.wait();
    while !is_over.load(Ordering::Relaxed) {
        for comm in &comms {
            comm.all_reduce(memory.at(0), memory.at(0), 1024, DataType::I32, RedOp::Max, &stream)?;
        }
        stream.synchronize()?;
        std::thread::sleep(Duration::from_secs(1));
        // Both stop after the same round, or the other's calls would wait for this one's.
        joined.wait();
    }
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = "many SOCKET COMMUNICATORS";
    let socket = PathBuf::from(arguments.next().context(usage)?);
    let count: usize = arguments.next().context(usage)?.parse()?;
    let ids: Vec<_> = (0..count).map(|_| mccs::unique_id()).collect::<Result<_, _>>()?;
    let (joined, is_over) = (Barrier::new(3), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|number| {
                scope.spawn({
                    let (socket, ids, joined, is_over) = (&socket, &ids, &joined, &is_over);
                    move || rank(number, socket, ids, joined, is_over)
                })
            })
            .collect();
        joined.wait();
        println!("ready");
        let ended = scope.spawn(|| std::io::stdin().lines().count());
        while !is_over.load(Ordering::Relaxed) {
            is_over.store(ended.is_finished(), Ordering::Relaxed);
            joined.wait();
        }
        ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank does not panic"))
    })
}
