//! Two sessions that talk to each other over links that break.

use super::*;
use crate::protocol::frame::DecodeError;
use mccs_model::CommId;

const TIMES: LinkTimes = LinkTimes {
    keep_alive: Duration::from_secs(2),
    link_timeout: Duration::from_secs(5),
    host_timeout: Duration::from_secs(10),
};

struct Pair {
    names: [Name; 2],
    sides: [Session; 2],
    heard: [Vec<u64>; 2],
    lost: [Vec<Lost>; 2],
    links: u64,
    now: Instant,
}

fn message(number: u64) -> Message {
    Message::Ready { comm: CommId { root: Name::new("r").unwrap(), incarnation: 0, number } }
}

impl Pair {
    fn new() -> Self {
        let (now, names) = (Instant::now(), ["a", "b"].map(|name| Name::new(name).unwrap()));
        let side = |of: usize| Session::new(names[1 - of].clone(), 100 + of as u64, TIMES, now);
        Pair { sides: [side(0), side(1)], names, heard: Default::default(), lost: Default::default(), links: 0, now }
    }

    fn say(&mut self, from: usize, numbers: std::ops::Range<u64>) {
        for number in numbers {
            self.sides[from].push(message(number).encode(), false, self.now).unwrap();
        }
    }

    fn deliver(&mut self, to: usize, bytes: &[u8]) {
        match self.sides[to].receive(bytes, self.now).unwrap() {
            Received::Message(Message::Ready { comm }) => self.heard[to].push(comm.number),
            Received::Greeted { lost: Some(lost), .. } => self.lost[to].push(lost),
            _ => {}
        }
    }

    fn connect(&mut self) {
        self.links += 1;
        let hellos =
            [0, 1].map(|side: usize| self.sides[side].link_up(LinkId(self.links), &self.names[side], self.now));
        self.deliver(1, &hellos[0]);
        self.deliver(0, &hellos[1]);
    }

    /// Carries at most `frames` frames each way, of which the last is lost with the link.
    fn carry(&mut self, frames: usize) {
        for side in [0, 1] {
            for frame in 0..frames {
                let Some((_, bytes)) = self.sides[side].next_frame(self.now) else { break };
                if frame + 1 < frames {
                    self.deliver(1 - side, &bytes);
                }
            }
        }
    }
}

#[test]
fn broken_links_neither_lose_nor_repeat_nor_reorder() {
    let mut pair = Pair::new();
    for round in 0..50 {
        pair.say(0, round * 10..round * 10 + 10);
        pair.say(1, round * 7..round * 7 + 7);
        pair.connect();
        pair.carry(4 + round as usize % 9);
        pair.sides.iter_mut().for_each(Session::link_down);
    }
    pair.connect();
    for _ in 0..10 {
        pair.carry(usize::MAX);
        pair.now += ACK_DELAY;
    }
    assert_eq!(pair.heard[1], (0..500).collect::<Vec<_>>());
    assert_eq!(pair.heard[0], (0..350).collect::<Vec<_>>());
    assert_eq!((pair.sides[0].queued(), pair.sides[1].queued()), (0, 0));
    assert_eq!(pair.lost, [vec![], vec![]]);
}

#[test]
fn the_window_closes_until_the_peer_acknowledges() {
    let mut pair = Pair::new();
    pair.connect();
    pair.say(0, 0..WINDOW_MESSAGES as u64 + 10);
    let sent: Vec<_> = std::iter::from_fn(|| pair.sides[0].next_frame(pair.now)).collect();
    assert_eq!(sent.len(), WINDOW_MESSAGES);
    sent.iter().for_each(|(_, bytes)| pair.deliver(1, bytes));
    let (_, ack) = pair.sides[1].next_frame(pair.now).unwrap();
    pair.deliver(0, &ack);
    assert_eq!(std::iter::from_fn(|| pair.sides[0].next_frame(pair.now)).count(), 10);
}

#[test]
fn who_restarts_or_gives_up_is_met_anew_by_the_other() {
    let mut pair = Pair::new();
    pair.connect();
    pair.say(0, 0..3);
    pair.say(1, 0..3);
    pair.carry(usize::MAX);
    pair.sides.iter_mut().for_each(Session::link_down);
    pair.say(0, 3..5);
    pair.sides[1].forget(pair.now);
    pair.say(1, 100..102);
    pair.connect();
    assert_eq!(pair.lost, [vec![Lost::GaveUp], vec![]]);
    pair.say(0, 10..12);
    pair.carry(usize::MAX);
    assert_eq!(pair.heard, [vec![0, 1, 2, 100, 101], vec![0, 1, 2, 10, 11]]);
    pair.sides[1] = Session::new(pair.names[0].clone(), 777, TIMES, pair.now);
    pair.connect();
    assert_eq!(pair.lost[0], [Lost::GaveUp, Lost::Restarted]);
    pair.say(0, 20..21);
    pair.carry(usize::MAX);
    assert_eq!(pair.heard[1].last(), Some(&20));
}

#[test]
fn what_a_life_that_has_ended_has_not_heard_is_known() {
    let mut pair = Pair::new();
    pair.connect();
    pair.say(0, 0..2);
    pair.carry(usize::MAX);
    pair.now += ACK_DELAY;
    pair.carry(usize::MAX);
    pair.say(0, 2..3);
    assert!(pair.sides[0].next_frame(pair.now).is_some(), "sent, and nobody takes it");
    pair.sides[0].link_down();
    pair.say(0, 3..4);
    pair.sides[1] = Session::new(pair.names[0].clone(), 777, TIMES, pair.now);
    let hello = pair.sides[1].link_up(LinkId(9), &pair.names[1].clone(), pair.now);
    pair.sides[0].link_up(LinkId(9), &pair.names[0].clone(), pair.now);
    let mut silent = Session::new(pair.names[1].clone(), 100, TIMES, pair.now);
    silent.push(message(5).encode(), false, pair.now).unwrap();
    silent.push(message(6).encode(), true, pair.now).unwrap();
    assert_eq!(silent.forget(pair.now), [message(5).encode()]);
    assert_eq!(pair.sides[0].peer_incarnation(), Some(101));
    let unheard = [2, 3].map(|number| message(number).encode()).to_vec();
    let greeted = Received::Greeted { lost: Some(Lost::Restarted), unheard };
    assert_eq!(pair.sides[0].receive(&hello, pair.now), Ok(greeted));
    assert_eq!((pair.sides[0].peer_incarnation(), pair.sides[0].queued()), (Some(777), 0));
}

#[test]
fn both_may_give_up_at_once() {
    let mut pair = Pair::new();
    pair.connect();
    pair.say(0, 0..3);
    pair.carry(2);
    pair.sides.iter_mut().for_each(|side| drop(side.forget(pair.now)));
    pair.say(0, 7..8);
    pair.connect();
    pair.carry(usize::MAX);
    assert_eq!(pair.heard[1], [0, 7]);
    assert_eq!(pair.lost, [vec![], vec![]]);
}

#[test]
fn silence_is_broken_then_noticed() {
    let mut pair = Pair::new();
    assert_eq!(pair.sides[0].next_deadline(), None);
    pair.connect();
    let start = pair.now;
    assert_eq!(pair.sides[0].next_deadline(), Some(start + TIMES.keep_alive));
    pair.now = start + TIMES.keep_alive;
    assert!(pair.sides[0].next_frame(pair.now).is_some());
    assert!(pair.sides[0].next_frame(pair.now).is_none());
    assert!(!pair.sides[0].link_is_silent(pair.now));
    pair.now = start + TIMES.link_timeout;
    assert!(pair.sides[0].link_is_silent(pair.now));
    pair.sides[0].link_down();
    assert_eq!(pair.sides[0].next_deadline(), Some(start + TIMES.host_timeout));
    assert!(pair.sides[0].peer_is_silent(pair.now).is_none());
    pair.now = start + TIMES.host_timeout;
    assert!(pair.sides[0].peer_is_silent(pair.now).is_some());
    pair.sides[0].forget(pair.now);
    assert_eq!(pair.sides[0].next_deadline(), None);
}

#[test]
fn what_a_peer_cannot_say_is_its_fault() {
    let mut pair = Pair::new();
    let fault = |pair: &mut Pair, bytes: &[u8]| pair.sides[0].receive(bytes, pair.now).unwrap_err();
    let hello = pair.sides[0].link_up(LinkId(1), &pair.names[0].clone(), pair.now);
    assert_eq!(fault(&mut pair, &hello), Fault::Name(pair.names[0].clone()));
    assert_eq!(fault(&mut pair, &encode_ack(0)), Fault::Greeting);
    pair.connect();
    let body = message(1).encode();
    assert_eq!(fault(&mut pair, &encode_data(2, 0, &body)), Fault::Sequence { got: 2, due: 1 });
    assert_eq!(fault(&mut pair, &encode_ack(1)), Fault::Acknowledgement(1));
    assert!(matches!(fault(&mut pair, &encode_data(1, 0, &body[1..])), Fault::Decode(_)));
    assert_eq!(fault(&mut pair, &hello), Fault::Greeting);
}

#[test]
fn last_words_are_said_once_more() {
    let mut pair = Pair::new();
    let say = |pair: &mut Pair, number| {
        pair.sides[0].push(message(number).encode(), true, pair.now).unwrap();
        pair.say(0, number + 1..number + 2);
    };
    pair.connect();
    pair.sides.iter_mut().for_each(Session::link_down);
    say(&mut pair, 10);
    pair.sides[1].forget(pair.now);
    pair.connect();
    pair.carry(2);
    pair.sides[0].link_down();
    // Once: it may be for ever that nobody listens.
    say(&mut pair, 20);
    pair.sides[0].forget(pair.now);
    pair.sides[0].forget(pair.now);
    assert_eq!(pair.sides[0].queued(), 0);
    say(&mut pair, 30);
    pair.sides[0].forget(pair.now);
    pair.connect();
    pair.carry(usize::MAX);
    say(&mut pair, 40);
    pair.sides[1] = Session::new(pair.names[0].clone(), 777, TIMES, pair.now);
    pair.connect();
    pair.carry(usize::MAX);
    assert_eq!(pair.heard[1], [10, 30, 40]);
}

#[test]
fn a_greeting_from_before_the_last_one_is_refused_and_harms_nothing() {
    let mut pair = Pair::new();
    pair.sides[1].forget(pair.now);
    let stale = pair.sides[1].link_up(LinkId(7), &pair.names[1].clone(), pair.now);
    pair.sides[1].forget(pair.now);
    pair.connect();
    pair.say(0, 0..3);
    pair.carry(3);
    pair.sides[0].link_up(LinkId(8), &pair.names[0].clone(), pair.now);
    assert_eq!(pair.sides[0].receive(&stale, pair.now), Err(Fault::Stale));
    pair.connect();
    pair.carry(usize::MAX);
    assert_eq!(pair.heard[1], [0, 1, 2]);
    assert_eq!(pair.lost, [vec![], vec![]]);
}

#[test]
fn who_is_expected_and_never_met_is_given_up_with_the_reason_that_is_known() {
    let mut pair = Pair::new();
    pair.sides[0].expect(pair.now);
    assert_eq!(pair.sides[0].next_deadline(), Some(pair.now + TIMES.host_timeout));
    pair.now += TIMES.host_timeout;
    assert_eq!(pair.sides[0].peer_is_silent(pair.now), Some(Lost::Silent(TIMES.host_timeout)));
    pair.sides[0].refuse(Fault::Decode(DecodeError::Version(9)));
    let text = pair.sides[0].peer_is_silent(pair.now).unwrap().to_string();
    assert!(text.contains("speaks version 9"), "{text}");
    pair.connect();
    pair.now += TIMES.host_timeout;
    assert_eq!(pair.sides[0].peer_is_silent(pair.now), Some(Lost::Silent(TIMES.host_timeout)));
}

#[test]
fn a_peer_that_takes_nothing_is_given_up() {
    let mut pair = Pair::new();
    let body = vec![0; QUEUE_BYTES_MAX / 4];
    (0..4).for_each(|_| pair.sides[0].push(body.clone(), false, pair.now).unwrap());
    assert_eq!(pair.sides[0].push(body, false, pair.now), Err(Lost::Overloaded));
}

#[test]
fn links_are_tested_where_there_are_any() {
    let mut pair = Pair::new();
    let later = |pair: &Pair| pair.sides[0].next_deadline().is_none_or(|at| at > pair.now);
    pair.sides[0].say_alive();
    assert!(later(&pair), "never met");
    pair.sides[0].link_up(LinkId(1), &pair.names[0].clone(), pair.now);
    pair.sides[0].say_alive();
    assert!(later(&pair), "not greeted");
    pair.connect();
    pair.sides[0].say_alive();
    assert!(!later(&pair) && pair.sides[0].next_frame(pair.now).is_some() && later(&pair));
    pair.sides[0].link_down();
    pair.sides[0].say_alive();
    assert!(later(&pair), "gone");
}
