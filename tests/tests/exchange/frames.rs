//! Frames of a host that is let in, and then says anything: in the wrong order, again, too long, or what nobody understands.

use std::io::{Read as _, Write as _};

use mccs_exchange::limits::FRAME_BYTES_MAX;
use mccs_exchange::protocol::{CommId, Failure, Message};
use mccs_ipc::types::ErrorClass;
use mccs_tests::seeds;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::fixture::{key, name};
use crate::unauthenticated_peers::{all_is_well, connect_as_first, fixture_without_first, frame, hello};

/// Frames of a link.
const FRAMES: usize = 60;

fn message(rng: &mut StdRng) -> Vec<u8> {
    let (key, attempt) = (key(rng.random_range(1..4)), rng.random_range(0..3));
    let failure = || Failure::new(ErrorClass::Remote, "of a stranger");
    let comm = || CommId { root: name("b"), incarnation: attempt, number: 1 };
    match rng.random_range(0..5) {
        0 => {
            let ranks = (0..rng.random_range(0..5)).map(|_| rng.random_range(0..9)).collect();
            let (nranks, earlier) = (rng.random_range(0..9), rng.random_range(0..3));
            Message::Report { key, attempt, nranks, earlier, ranks }.encode()
        }
        1 => Message::Withdraw { key, attempt, failure: failure() }.encode(),
        2 => Message::Refused { key, attempt, failure: failure() }.encode(),
        3 => Message::Ring { key, attempt, comm: comm(), hosts: Vec::new() }.encode(),
        _ => (0..rng.random_range(0..200)).map(|_| rng.random()).collect(),
    }
}

/// A data frame: its kind, its number, what it acknowledges, and a message.
fn data(seq: u64, ack: u64, body: &[u8]) -> Vec<u8> {
    frame(&[b"D", &seq.to_le_bytes()[..], &ack.to_le_bytes()[..], body].concat())
}

/// Frames of a host on a link after its greeting.
fn frames(rng: &mut StdRng) -> Vec<Vec<u8>> {
    let mut said: Vec<Vec<u8>> = Vec::new();
    let mut next = 1;
    for _ in 0..FRAMES {
        let one = match rng.random_range(0..20) {
            // Once more, as it was.
            0..=3 if !said.is_empty() => said[rng.random_range(0..said.len())].clone(),
            4 => data(next + rng.random_range(1..5), 0, &message(rng)),
            5 => data(next, u64::MAX, &message(rng)),
            6 => data(0, 0, &message(rng)),
            7 => hello("a"),
            8 => (FRAME_BYTES_MAX as u32 + rng.random_range(1..9)).to_le_bytes().to_vec(),
            _ => {
                next += 1;
                data(next - 1, 0, &message(rng))
            }
        };
        said.push(one);
    }
    said
}

#[test]
fn whatever_a_host_that_is_let_in_says_costs_its_link_alone() {
    let mut fixture = fixture_without_first(|_| {});
    for seed in seeds(12) {
        println!("MCCS_SEED={seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let mut stranger = connect_as_first(&fixture);
        let said = frames(&mut rng);
        fixture.during(move || {
            stranger.write_all(&hello("a")).and_then(|()| stranger.flush()).expect("it is listened to");
            // A frame's length, and its kind.
            let mut answer = [0; 5];
            stranger.read_exact(&mut answer).expect("an answer");
            assert_eq!(answer[4], b'H', "it is greeted: it is let in");
            // The other side may have hung up: it should, sooner or later.
            let _ = said.iter().try_for_each(|one| stranger.write_all(one).and_then(|()| stranger.flush()));
        });
        let first = fixture.names[0].clone();
        fixture.until(|fixture| !fixture.hosts[1].is_up(&first));
        let third = fixture.names[2].clone();
        fixture.until(|fixture| fixture.hosts[1].is_up(&third));
    }
    all_is_well(fixture);
}
