//! Groups of sends and receives between simulated ranks.

use mccs_ipc::types::DataType;
use mccs_kernels::cuda::{P2pLaunch, P2pMessage, SymmetricBufferLayout};
use mccs_tests::seeds;
use rand::rngs::StdRng;
use rand::seq::IndexedMutRandom as _;
use rand::{Rng as _, SeedableRng as _};

use super::{Buffer, MACHINE, Memory, draw, name_symmetric_buffers};

/// A message of one rank to another.
struct Sent {
    from: u32,
    to: u32,
    send: Buffer,
    recv: Buffer,
}

fn some_message(random: &mut StdRng, from: u32, to: u32, bytes: usize) -> Sent {
    let [mut send, recv] = [0; 2].map(|_| Buffer::new(bytes, draw(random, &[0, 1, 4, 8, 13])));
    let data: Vec<u8> = (0..bytes).map(|_| random.random()).collect();
    send.write(0, &data);
    Sent { from, to, send, recv }
}

/// A rank's list: its sends and receives in any order, but that of each direction.
fn list_of(random: &mut StdRng, sent: &[Sent], rank: u32) -> Vec<P2pMessage> {
    let dtype = DataType::U8;
    let mut directions: Vec<Vec<P2pMessage>> = Vec::new();
    for (is_send, peer) in (0..8).flat_map(|peer| [(true, peer), (false, peer)]) {
        let its = sent.iter().filter(|one| {
            if is_send { (one.from, one.to) == (rank, peer) } else { (one.to, one.from) == (rank, peer) }
        });
        let point = |one: &Sent| {
            let buffer = if is_send { &one.send } else { &one.recv };
            P2pMessage { is_send, peer, buffer: buffer.address(), bytes: buffer.bytes as u64, dtype }
        };
        directions.push(its.map(point).rev().collect());
    }
    let mut list = Vec::new();
    while let Some(direction) = {
        directions.retain(|left| !left.is_empty());
        directions.choose_mut(random)
    } {
        list.extend(direction.pop());
    }
    list
}

/// Groups behind each other, on each rank.
fn exchanged(nranks: u32, groups: &[Vec<Sent>], random: &mut StdRng, seed: u64) {
    let layout = SymmetricBufferLayout {
        nranks,
        blocks: 1,
        slots: 2,
        slot_bytes: 128,
        ll_bytes: 128,
        ll128_bytes: 128,
        lanes: random.random_range(1..=9),
    };
    let symmetric: Vec<_> = (0..nranks).map(|_| Memory::new(layout.bytes())).collect();
    let mut launches = Vec::new();
    for (sent, rank) in groups.iter().flat_map(|sent| (0..nranks).map(move |rank| (sent, rank))) {
        let mut launch = P2pLaunch::new(&list_of(random, sent, rank), &layout, rank, nranks).expect("a group");
        name_symmetric_buffers(&mut launch.head_mut().symmetric, &symmetric);
        launches.push((rank, launch));
    }
    let begun: Vec<_> = launches
        .iter()
        .map(|(rank, launch)| match launch {
            P2pLaunch::Few(launch) => MACHINE.begun(launch, *rank),
            P2pLaunch::Many(launch) => MACHINE.begun(&**launch, *rank),
        })
        .filter(|begun| begun.grid > 0)
        .collect();
    assert!(MACHINE.run(&begun, seed, None).is_some(), "seed {seed}: nobody goes on");
    for (number, one) in groups.iter().flatten().enumerate() {
        let (from, to, bytes) = (one.from, one.to, one.send.bytes);
        assert!(one.send.data() == one.recv.data(), "seed {seed}: message {number}, {bytes} bytes from {from} to {to}");
        assert!(one.recv.is_whole(), "seed {seed}: written beside message {number}, {bytes} bytes from {from} to {to}");
    }
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn groups_of_sends_and_receives_in_any_order_of_threads() {
    for seed in seeds(30) {
        let mut random = StdRng::seed_from_u64(seed);
        let nranks = random.random_range(2..=4);
        let mut group = || -> Vec<Sent> {
            let pairs = (0..nranks).flat_map(|from| (0..nranks).map(move |to| (from, to)));
            let messages: Vec<_> =
                pairs.flat_map(|pair| (0..draw(&mut random, &[0, 0, 1, 3, 12])).map(move |_| pair)).collect();
            let long = draw(&mut random, &[4, 400, 9000]);
            messages
                .into_iter()
                .map(|(from, to)| {
                    let bytes = random.random_range(0..long);
                    some_message(&mut random, from, to, bytes)
                })
                .collect()
        };
        let groups = [group(), group(), group()];
        exchanged(nranks, &groups, &mut random, seed);
    }
}

/// In chunks, over all lanes of a pair: both ways.
#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn long_messages_in_any_order_of_threads() {
    for seed in seeds(10) {
        let mut random = StdRng::seed_from_u64(seed);
        let bytes = random.random_range(150_000..400_000);
        let groups = [vec![some_message(&mut random, 2, 1, bytes), some_message(&mut random, 1, 2, bytes - 77)]];
        exchanged(3, &groups, &mut random, seed);
    }
}
