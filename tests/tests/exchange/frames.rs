//! Frames of a host that is let in, and then says anything: in the wrong order, again, too long, or what nobody understands.

use std::io::{Read as _, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};

use mccs_exchange::limits::FRAME_BYTES_MAX;
use mccs_exchange::protocol::{
    AccountBody, AgreementMessage, Answer, ChangeBody, ChangeRequest, CommId, ControlBody, Failure, Hello, Life,
    Message, Part, RingHost,
};
use mccs_ipc::types::ErrorClass;
use mccs_tests::seeds;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::fixture::{Fixture, key, name, payload};
use crate::unauthenticated_peers::{all_is_well, connect_as_first, fixture_without_first, frame, hello};

/// Frames of a link.
const FRAMES: usize = 60;

/// Kinds of messages.
const KINDS: usize = 15;

/// Which kind a message is. A new one has to be made below, too: this does not compile without.
fn kind_of(message: &Message) -> usize {
    match message {
        Message::Report { .. } => 0,
        Message::Withdraw { .. } => 1,
        Message::Ring { .. } => 2,
        Message::Refused { .. } => 3,
        Message::Block { .. } => 4,
        Message::Ready { .. } => 5,
        Message::Begin { .. } => 6,
        Message::Failed { .. } => 7,
        Message::Left { .. } => 8,
        Message::Agreement { .. } => 9,
        Message::Inquiry { .. } => 10,
        Message::Account(_) => 11,
        Message::OperatorRequest(_) => 12,
        Message::OperatorResponse(_) => 13,
        Message::Control { .. } => 14,
    }
}

fn bytes(rng: &mut StdRng) -> Vec<u8> {
    (0..rng.random_range(0..200)).map(|_| rng.random()).collect()
}

/// A message of a kind, about what nobody has asked: its numbers may be right by chance.
fn of_kind(kind: usize, rng: &mut StdRng) -> Message {
    let (key, attempt) = (key(rng.random_range(1..4)), rng.random_range(0..3));
    let failure = Failure::new(ErrorClass::Remote, "of a stranger");
    let comm = CommId { root: name("b"), incarnation: attempt, number: 1 };
    let (question, nranks) = (rng.random(), rng.random_range(1..9));
    let ranks: Vec<u32> = (0..rng.random_range(1..5)).map(|_| rng.random_range(0..nranks)).collect();
    let change = ChangeBody::new(&bytes(rng)).expect("short");
    let body = AccountBody::new(&bytes(rng)).expect("short");
    match kind {
        0 => Message::Report { key, attempt, nranks, earlier: rng.random_range(0..nranks), ranks },
        1 => Message::Withdraw { key, attempt, failure },
        2 => {
            let host = |name| RingHost { name, incarnation: attempt, attempt };
            Message::Ring { key, attempt, comm, hosts: ["a", "b", "z"].map(|text| host(name(text))).to_vec() }
        }
        3 => Message::Refused { key, attempt, failure },
        4 => {
            let ranks = ranks.into_iter().map(|rank| (rank, payload(rank, 20))).collect();
            let part =
                Part { origin: rng.random_range(0..4), index: rng.random_range(0..3), last: rng.random(), ranks };
            Message::Block { key, attempt, part }
        }
        5 => Message::Ready { comm },
        6 => Message::Begin { comm },
        7 => Message::Failed { comm, failure },
        8 => Message::Left { comm, ranks },
        9 => Message::Agreement {
            comm,
            message: AgreementMessage::Propose { change: question, window: 1, body: change },
        },
        10 => Message::Inquiry { comm, question },
        11 => Message::Account(Answer { comm, question, body }),
        12 => Message::OperatorRequest(ChangeRequest { comm, question, body: change }),
        13 => Message::OperatorResponse(Answer { comm, question, body }),
        _ => Message::Control { body: ControlBody::new(&bytes(rng)).expect("short") },
    }
}

fn message(rng: &mut StdRng) -> Vec<u8> {
    match rng.random_range(0..=KINDS) {
        KINDS => bytes(rng),
        kind => of_kind(kind, rng).encode(),
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
        let said = frames(&mut rng);
        say(&mut fixture, said);
    }
    all_is_well(fixture);
}

/// Each kind of message, when nobody waits for it: as it should be, twice, cut, longer, and with a byte that is another.
#[test]
fn every_kind_of_message_at_the_wrong_time_and_malformed_costs_its_link_at_most() {
    let mut fixture = fixture_without_first(|_| {});
    let mut rng = StdRng::seed_from_u64(seeds(1).next().expect("a seed"));
    for kind in 0..KINDS {
        let message = of_kind(kind, &mut rng);
        assert_eq!(kind_of(&message), kind);
        let right = message.encode();
        let cut = right[..rng.random_range(0..right.len())].to_vec();
        let longer = [&right[..], &[0]].concat();
        let mut altered = right.clone();
        altered[rng.random_range(0..right.len())] ^= 1u8 << rng.random_range(0..8u32);
        for said in [vec![&right, &right], vec![&cut], vec![&longer], vec![&altered, &right]] {
            say(&mut fixture, (1..).zip(said).map(|(seq, body)| data(seq, 0, body)).collect());
        }
    }
    all_is_well(fixture);
}

/// The first host is let in, says this, and hangs up. The second host notices, and still hears the third.
fn say(fixture: &mut Fixture, said: Vec<Vec<u8>>) {
    // Each has a life of its own: what was said in another is not heard again.
    static LIVES: AtomicU64 = AtomicU64::new(1);
    let life = Life { incarnation: LIVES.fetch_add(1, Ordering::Relaxed), generation: 0 };
    let hello = frame(&Hello { name: name("a"), life, known: None }.encode());
    let mut stranger = connect_as_first(fixture);
    fixture.during(move || {
        stranger.write_all(&hello).and_then(|()| stranger.flush()).expect("it is listened to");
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
