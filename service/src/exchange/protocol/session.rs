//! Messages to one peer, in order, each once, however often the link between breaks.
//!
//! ```text
//!          link_up: say hello          its hello                    link_down, silence
//! down ----------------------> greeting --------> up ------------------------------------> down
//!   |                                                                                       |
//!   +--- nothing heard for the host's time, or it has a new life: forget, begin a new life --+
//! ```
//!
//! Every message has a number and is kept until the peer has acknowledged it. A hello says how far its sender has heard the
//! other's current life, and what came after is sent again. Who forgets begins a new life, so the other one forgets too: both
//! always agree on what was said, or know that they do not. Invariant: a message is delivered to a life at most once and in
//! order; messages to a life that has ended are dropped, and whoever sent them is told ([`Lost`]), and which of them that life
//! cannot have heard: they may be meant for the next.
//!
//! Some messages are last words ([`Message::is_last_word`]): their sender holds nothing any more by which the loss could be dealt
//! with. They are said once more in the next life of the pair; to hear them twice, or without need, does no harm.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::message::{DecodeError, Frame, Hello, Known, Message, encode_ack, encode_data};
use super::types::{Life, LinkId, Name};
use crate::exchange::limits::{
    ACK_AFTER_BYTES, ACK_AFTER_MESSAGES, ACK_DELAY, BULK_BEHIND_MESSAGES, QUEUE_BYTES_MAX, QUEUE_MESSAGES_MAX,
    WINDOW_BYTES, WINDOW_MESSAGES,
};

/// How long silence is borne.
#[derive(Debug, Clone, Copy)]
pub struct LinkTimes {
    /// A link on which nothing is said for so long says that it lives.
    pub keep_alive: Duration,
    /// A link on which nothing is heard for so long is made anew.
    pub link_timeout: Duration,
    /// A peer of which nothing is heard for so long is given up.
    pub host_timeout: Duration,
}

/// Why everything that was said to and by a peer is void.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Lost {
    /// Nothing was heard of it.
    #[error("cannot be reached: nothing was heard of it for {0:?}")]
    Silent(Duration),
    /// Nothing could be said to it: what it said last was refused.
    #[error("cannot be talked to: {0}")]
    Refused(Fault),
    /// It has another incarnation.
    #[error("has restarted its service")]
    Restarted,
    /// It has another generation.
    #[error("has given this host up: nothing was heard between the two for too long")]
    GaveUp,
    /// It takes messages too slowly.
    #[error("is overloaded: too many messages to it wait")]
    Overloaded,
    /// It broke the protocol.
    #[error("broke the protocol: {0}")]
    Broke(Fault),
}

/// What a peer did wrong on a link.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Its bytes.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// Its name.
    #[error("it says that it is host {0}")]
    Name(Name),
    /// A hello where none is due, or something else where one is.
    #[error("it greeted at the wrong time")]
    Greeting,
    /// A connection from before the last one.
    #[error("it greeted with a life that it has given up")]
    Stale,
    /// A message's number.
    #[error("it sent message {got} where {due} was due")]
    Sequence {
        /// What it sent.
        got: u64,
        /// What it should have.
        due: u64,
    },
    /// An acknowledgement of what was never sent, or no longer of what it had acknowledged.
    #[error("it acknowledged message {0}, which cannot be")]
    Acknowledgement(u64),
}

/// What a frame led to.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// Nothing to tell.
    Nothing,
    /// The link is up.
    Greeted {
        /// Whether all that was said before is void.
        lost: Option<Lost>,
        /// Bodies of messages that the life before is not to have heard, if there was one.
        unheard: Vec<Vec<u8>>,
    },
    /// A message.
    Message(Message),
}

#[derive(Debug)]
struct Queued {
    body: Vec<u8>,
    /// Is kept when the pair begins a new life.
    is_kept: bool,
    /// Was sent at least once.
    is_sent: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    Down,
    Greeting(LinkId),
    Up(LinkId),
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Session {
    peer: Name,
    life: Life,
    peer_life: Option<Life>,
    link: Link,
    /// Not acknowledged: the first has number `acked` + 1.
    queue: VecDeque<Queued>,
    queue_bytes: usize,
    acked: u64,
    /// Of `queue`, sent on this link.
    in_flight: usize,
    in_flight_bytes: usize,
    received: u64,
    owed_messages: u32,
    owed_bytes: usize,
    ack_at: Option<Instant>,
    said_at: Instant,
    /// When this link was last heard, or came up.
    link_heard_at: Instant,
    /// Was not met when it became part of a communicator.
    is_expected: bool,
    /// When the peer was last heard, or its silence began to count.
    heard_at: Instant,
    /// Why the peer's last greeting was refused, if it was.
    refused: Option<Fault>,
    times: LinkTimes,
}

impl Session {
    /// Nothing said, nothing heard.
    #[must_use]
    pub fn new(peer: Name, incarnation: u64, times: LinkTimes, now: Instant) -> Self {
        Session {
            peer,
            life: Life { incarnation, generation: 0 },
            peer_life: None,
            link: Link::Down,
            queue: VecDeque::new(),
            queue_bytes: 0,
            acked: 0,
            in_flight: 0,
            in_flight_bytes: 0,
            received: 0,
            owed_messages: 0,
            owed_bytes: 0,
            ack_at: None,
            said_at: now,
            link_heard_at: now,
            is_expected: false,
            heard_at: now,
            refused: None,
            times,
        }
    }

    /// The link, if there is one.
    #[must_use]
    pub fn link(&self) -> Option<LinkId> {
        match self.link {
            Link::Down => None,
            Link::Greeting(link) | Link::Up(link) => Some(link),
        }
    }

    /// Whether both sides have greeted.
    #[must_use]
    pub fn is_up(&self) -> bool {
        matches!(self.link, Link::Up(_))
    }

    /// The [`Life::incarnation`] in which the peer was met last, unless it was given up since.
    #[must_use]
    pub fn peer_incarnation(&self) -> Option<u64> {
        self.peer_life.map(|life| life.incarnation)
    }

    /// Messages that are not acknowledged.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Whether large messages that can wait should not.
    #[must_use]
    pub fn has_room_for_bulk(&self) -> bool {
        self.queue.len() < BULK_BEHIND_MESSAGES && self.queue_bytes < WINDOW_BYTES
    }

    /// Nothing to lose: the peer was never met, is to be told nothing, and is part of nothing.
    fn is_fresh(&self) -> bool {
        self.peer_life.is_none() && self.queue.is_empty() && !self.is_expected
    }

    /// The peer's silence counts from now on, if it did not before.
    pub fn expect(&mut self, now: Instant) {
        if self.is_fresh() {
            (self.is_expected, self.heard_at) = (true, now);
        }
    }

    /// Takes a connection; returns the hello to send on it. A link there was before is no longer heard.
    pub fn link_up(&mut self, link: LinkId, own: &Name, now: Instant) -> Vec<u8> {
        self.link = Link::Greeting(link);
        (self.in_flight, self.in_flight_bytes) = (0, 0);
        (self.owed_messages, self.owed_bytes, self.ack_at) = (0, 0, None);
        (self.said_at, self.link_heard_at) = (now, now);
        let known = self.peer_life.map(|life| Known { life, received: self.received });
        Hello { name: own.clone(), life: self.life, known }.encode()
    }

    /// The connection is gone.
    pub fn link_down(&mut self) {
        self.link = Link::Down;
        (self.in_flight, self.in_flight_bytes, self.ack_at) = (0, 0, None);
    }

    /// Queues a message. `is_last_word` as in [`Message::is_last_word`].
    ///
    /// # Errors
    /// [`Lost::Overloaded`], upon which the caller is to [`Session::forget`].
    pub fn push(&mut self, body: Vec<u8>, is_last_word: bool, now: Instant) -> Result<(), Lost> {
        if self.queue.len() >= QUEUE_MESSAGES_MAX || self.queue_bytes + body.len() > QUEUE_BYTES_MAX {
            return Err(Lost::Overloaded);
        }
        if self.is_fresh() {
            self.heard_at = now;
        }
        self.queue_bytes += body.len();
        self.queue.push_back(Queued { body, is_kept: is_last_word, is_sent: false });
        Ok(())
    }

    /// Begins a new life: nothing said or heard before counts. The link, if there is one, is to be closed. Returns the bodies
    /// of messages that were never sent.
    pub fn forget(&mut self, now: Instant) -> Vec<Vec<u8>> {
        self.life.generation = self.life.generation.wrapping_add(1);
        (self.peer_life, self.is_expected) = (None, false);
        self.link_down();
        self.heard_at = now;
        self.drop_all(false)
    }

    /// Drops all but last words. Returns what was dropped and not sent; with `also_sent` all that was not acknowledged.
    fn drop_all(&mut self, also_sent: bool) -> Vec<Vec<u8>> {
        let unheard = self.queue.iter_mut().filter(|queued| !queued.is_kept && (also_sent || !queued.is_sent));
        let unheard = unheard.map(|queued| std::mem::take(&mut queued.body)).collect();
        self.queue.retain(|queued| queued.is_kept);
        self.queue.iter_mut().for_each(|queued| queued.is_kept = false);
        self.queue_bytes = self.queue.iter().map(|queued| queued.body.len()).sum();
        (self.acked, self.received) = (0, 0);
        (self.in_flight, self.in_flight_bytes) = (0, 0);
        unheard
    }

    /// Takes a frame from the current link.
    ///
    /// # Errors
    /// The peer's fault. On a link that is up, the caller is to [`Session::forget`]: to send the same again would not help.
    pub fn receive(&mut self, bytes: &[u8], now: Instant) -> Result<Received, Fault> {
        let frame = Frame::decode(bytes)?;
        let received = match (frame, self.link) {
            (Frame::Hello(hello), Link::Greeting(link)) => {
                self.refused = None;
                self.greet(&hello, link)?
            }
            (Frame::Data { seq, ack, body }, Link::Up(_)) => {
                self.acknowledge(ack)?;
                let due = self.received + 1;
                if seq != due {
                    return Err(Fault::Sequence { got: seq, due });
                }
                let message = Message::decode(body)?;
                self.received = due;
                self.owed_messages += 1;
                self.owed_bytes += body.len();
                self.ack_at.get_or_insert(now + ACK_DELAY);
                Received::Message(message)
            }
            (Frame::Ack { ack }, Link::Up(_)) => {
                self.acknowledge(ack)?;
                Received::Nothing
            }
            _ => return Err(Fault::Greeting),
        };
        (self.link_heard_at, self.heard_at) = (now, now);
        Ok(received)
    }

    fn greet(&mut self, hello: &Hello, link: LinkId) -> Result<Received, Fault> {
        if hello.name != self.peer {
            return Err(Fault::Name(hello.name.clone()));
        }
        let lost = match self.peer_life {
            Some(before) if before.incarnation != hello.life.incarnation => Some(Lost::Restarted),
            // Connections may be accepted in another order than they were made in.
            Some(before) if before.is_later_than(hello.life) => return Err(Fault::Stale),
            Some(before) if before != hello.life => Some(Lost::GaveUp),
            _ => None,
        };
        // What the dead have heard without acknowledging it has ended with them.
        let unheard = lost.as_ref().map_or_else(Vec::new, |lost| self.drop_all(*lost == Lost::Restarted));
        let heard = hello.known.as_ref().filter(|known| known.life == self.life).map_or(0, |known| known.received);
        let newly = heard.checked_sub(self.acked).and_then(|newly| usize::try_from(newly).ok());
        let newly = newly.filter(|newly| *newly <= self.queue.len()).ok_or(Fault::Acknowledgement(heard))?;
        self.drop_acknowledged(newly);
        self.peer_life = Some(hello.life);
        self.link = Link::Up(link);
        Ok(Received::Greeted { lost, unheard })
    }

    fn acknowledge(&mut self, ack: u64) -> Result<(), Fault> {
        let newly = ack.checked_sub(self.acked).and_then(|newly| usize::try_from(newly).ok());
        let newly = newly.filter(|newly| *newly <= self.in_flight).ok_or(Fault::Acknowledgement(ack))?;
        let bytes: usize = self.queue.iter().take(newly).map(|queued| queued.body.len()).sum();
        self.in_flight -= newly;
        self.in_flight_bytes -= bytes;
        self.drop_acknowledged(newly);
        Ok(())
    }

    fn drop_acknowledged(&mut self, count: usize) {
        self.queue_bytes -= self.queue.drain(..count).map(|queued| queued.body.len()).sum::<usize>();
        self.acked += count as u64;
    }

    /// The next frame to send, if one is due and the window is open.
    pub fn next_frame(&mut self, now: Instant) -> Option<(LinkId, Vec<u8>)> {
        let Link::Up(link) = self.link else { return None };
        let is_open = self.in_flight < WINDOW_MESSAGES && self.in_flight_bytes < WINDOW_BYTES;
        let frame = if let Some(queued) = self.queue.get_mut(self.in_flight).filter(|_| is_open) {
            queued.is_sent = true;
            self.in_flight += 1;
            self.in_flight_bytes += queued.body.len();
            encode_data(self.acked + self.in_flight as u64, self.received, &queued.body)
        } else if self.acknowledgement_is_due(now) || self.said_at + self.times.keep_alive <= now {
            encode_ack(self.received)
        } else {
            return None;
        };
        (self.owed_messages, self.owed_bytes, self.ack_at) = (0, 0, None);
        self.said_at = now;
        Some((link, frame))
    }

    /// The next frame is due, whether or not there is anything to say.
    pub fn say_alive(&mut self) {
        self.ack_at = Some(self.said_at);
    }

    fn acknowledgement_is_due(&self, now: Instant) -> bool {
        self.owed_messages >= ACK_AFTER_MESSAGES
            || self.owed_bytes >= ACK_AFTER_BYTES
            || self.ack_at.is_some_and(|at| at <= now)
    }

    /// Whether the link has been silent for too long and is to be closed.
    #[must_use]
    pub fn link_is_silent(&self, now: Instant) -> bool {
        self.link != Link::Down && self.link_heard_at + self.times.link_timeout <= now
    }

    /// Whether the peer has been silent for so long that it is to be given up.
    #[must_use]
    pub fn peer_is_silent(&self, now: Instant) -> Option<Lost> {
        let silent = !self.is_fresh() && self.heard_at + self.times.host_timeout <= now;
        silent.then(|| self.refused.clone().map_or(Lost::Silent(self.times.host_timeout), Lost::Refused))
    }

    /// What was heard on a link that is not up yet was refused: if nothing better comes, that is why the peer is silent.
    pub fn refuse(&mut self, fault: Fault) {
        self.refused = Some(fault);
    }

    /// When time alone makes something due.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let host = (!self.is_fresh()).then(|| self.heard_at + self.times.host_timeout);
        let link = (self.link != Link::Down).then(|| self.link_heard_at + self.times.link_timeout);
        let said = self.is_up().then(|| self.said_at + self.times.keep_alive);
        [host, link, said, self.ack_at].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exchange::protocol::types::CommId;

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
            Pair {
                sides: [side(0), side(1)],
                names,
                heard: Default::default(),
                lost: Default::default(),
                links: 0,
                now,
            }
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
}
