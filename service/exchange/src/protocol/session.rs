//! Session with one peer: messages in order, each once, however often the link breaks; silence, and
//! restarts.
//!
//! ```text
//!          link_up: say hello          its hello                    link_down, silence
//! down ----------------------> greeting --------> up ------------------------------------> down
//!   |                                                                                       |
//!   +--- nothing heard for the host's time, or it has a new life: forget, begin a new life --+
//! ```
//!
//! Every message has a number and is kept until the peer has acknowledged it. A hello says how far its sender has heard the
//! other's current life, and what came after is sent again. A side that forgets begins a new life, so the other one forgets
//! too: both always agree on what was said, or know that they do not. Invariant: a message is delivered to a life at most once
//! and in order; messages to a life that has ended are dropped, and whoever sent them is told ([`Lost`]), and which of them
//! that life cannot have heard: they may be meant for the next.
//!
//! Some messages are last words ([`Message::is_last_word`]): their sender holds nothing any more by which the loss could be dealt
//! with. They are said once more in the next life of the pair; to hear them twice, or without need, does no harm.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::faults::{Fault, Lost};
use super::frame::{Frame, Hello, Known, encode_ack, encode_data};
use super::message::Message;
use crate::limits::{
    ACK_AFTER_BYTES, ACK_AFTER_MESSAGES, ACK_DELAY, BULK_BEHIND_MESSAGES, QUEUE_BYTES_MAX, QUEUE_MESSAGES_MAX,
    WINDOW_BYTES, WINDOW_MESSAGES,
};
use crate::protocol::life::{Life, LinkId};
use mccs_model::Name;

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

/// The result of a frame.
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
    /// Messages of `queue` that were sent on this link.
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
            (Frame::Refusal { reason }, Link::Greeting(_)) => return Err(Fault::TurnsAway(reason.to_owned())),
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
        // Messages that the dead have heard without acknowledging them have ended with them.
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

    /// The next frame is due, whether or not there is anything to say; where there is no link, nothing is.
    pub fn say_alive(&mut self) {
        if self.is_up() {
            self.ack_at = Some(self.said_at);
        }
    }

    fn acknowledgement_is_due(&self, now: Instant) -> bool {
        self.owed_messages >= ACK_AFTER_MESSAGES
            || self.owed_bytes >= ACK_AFTER_BYTES
            || self.ack_at.is_some_and(|at| at <= now)
    }

    /// Whether nothing was heard for so long that the peer should have said twice that it lives.
    #[must_use]
    pub fn is_silent(&self, now: Instant) -> bool {
        !self.is_up() || self.heard_at + 2 * self.times.keep_alive <= now
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

    /// A reason that was heard on a link that is not up yet was a refusal: if nothing better comes, that is why the peer
    /// is silent.
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
mod tests;
