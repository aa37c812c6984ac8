//! A sender's connection: the socket that carries its stream, and the one that is being dialled, at first or because the one before
//! has found a dead path.
//!
//! ```text
//!            dial: connecting --> greeting --> waiting for an answer --> the connection's line
//! line:  open ------ (its peer's kernel answers nothing) --^ cut: nothing is written to it, or learnt from it, any more
//!              <---- (it answers again before)
//! ```
//!
//! A dead path is told from a lossy one by *questions*: further connections over the line's own path, begun while the line is silent.
//! If one is answered the path lives, and the answered connection becomes the line: what was lost is sent again at once. If none is,
//! the path is dead, and another one is dialled. A line that has replaced another on its path so and brings nothing either
//! asks no more: whatever is wrong with the path, it is left. A first dial that is not answered, or whose hello is not, asks in the same way.
//! One whose hello was heard, and whose flow nobody has accepted yet, owes nothing: it asks from time to time, the less often the longer it waits.
//!
//! The receiver closes the old socket when it has heard the hello on the new one, takes what had come on it, and answers how much that
//! is; the stream goes on from there. Who says a hello cannot know whether it was heard. So sockets that said one and got no answer stay
//! open until a later one has, or the flow ends: the receiver takes the end of a socket for the flow's.
//!
//! Deliberately absent: which path comes next, and when to look (the sender and the transport know).

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use nix::errno::Errno;

use super::super::Fault;
use super::log::Log;
use super::peer_gone;
use super::probe::Probe;
use super::socket::{Moved, Socket};
use super::watches::Ready;
use super::wire::{Hello, RESUMED_BYTES, VERDICT_BYTES, Verdict, check_resumed};

/// A path is dead when so many looks, over its time-out, have found no answer.
pub(super) const LOOKS: u32 = 6;
/// After so many looks without an answer, of [`LOOKS`], questions are asked, one a look.
const ASKED_FROM: u32 = LOOKS / 2;
/// Questions about one silence: that a lossy path loses all of them, and all that the line has sent, is next to impossible.
const QUESTIONS: usize = 3;
/// Looks for the answer to a hello that goes on: its service may be busy, another dial would wait for it too.
const ANSWER_LOOKS: u32 = 4 * LOOKS;
/// A flow that was heard and waits to be accepted asks whether its path lives after so long, and again when it has waited for twice as
/// long, but for no longer at a time than the second of these.
const WAITING_ASKS_AFTER: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];
/// Dials that find no answer are given more time, up to so many times as much: their peer's host may be gone.
const DIAL_PATIENCE_MAX: u32 = 8;

const NO_ANSWER: Fault = Fault::Refused("it closes the connection without an answer");

/// The socket in use.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) socket: Socket,
    pub(super) watch: Handle,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// Nothing more will be written.
    pub(super) ended: bool,
}

/// How far a dialled socket is.
#[derive(Debug)]
enum Stage {
    Connecting,
    Greeting { sent: usize },
    Waiting { bytes: [u8; RESUMED_BYTES], got: usize },
}

#[derive(Debug)]
struct Dial {
    socket: Socket,
    watch: Handle,
    stage: Stage,
    readable: bool,
    writable: bool,
    resumption: u32,
    /// Where it goes, as the sender counts paths.
    path: usize,
    /// Looks that have found it where it was.
    looks: u32,
    /// Its hello was heard: since when it waits, and when to ask next.
    waits: Option<[Instant; 2]>,
    /// Whether it is wanted also where the line's path is well: only tests want that.
    is_forced: bool,
}

impl Dial {
    /// Whether the peer's kernel has the hello, and its service has not answered.
    fn is_heard(&self) -> bool {
        matches!(self.stage, Stage::Waiting { .. }) && self.socket.unacknowledged() == Some(0)
    }
}

/// For how long nothing was answered.
#[derive(Debug, Default)]
struct Stall {
    acknowledged: u64,
    looks: u32,
    since: Option<Instant>,
    looked_at: Option<Instant>,
    /// Something that was sent may have been lost.
    is_under_way: bool,
    /// The first question cannot have been answered before.
    answer_at: Option<Instant>,
}

/// What a look has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look {
    /// Nothing is owed: it need not be looked at before something is sent.
    Settled,
    /// Something is owed, and may come.
    Owed,
    /// Nothing is owed, and it is to be looked at again then.
    Waits(Instant),
    /// The line's path is to be asked whether it lives: see [`Connection::ask`].
    Ask,
    /// It does: the connection that was answered takes the line's place.
    Again,
    /// Another socket is to be dialled. Whether the path before it has answered nothing.
    Dial { is_dead: bool },
    /// Nothing was answered on any path for too long.
    Gone,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Connection {
    number: u16,
    pub(super) line: Option<Line>,
    dial: Option<Dial>,
    /// Dialled, and given up after they had said hello.
    given_up: Vec<(Socket, Handle)>,
    /// Over the line's path, in its silence.
    questions: Vec<Probe>,
    /// One of them that was answered, to be dialled.
    answered: Option<Socket>,
    /// The line, or what is dialled first, has taken the place of one on the same path, and has brought nothing yet.
    is_second: bool,
    is_cut: bool,
    /// Sockets that were dialled.
    dials: u32,
    /// Paths that were tried since the last one that worked.
    tries: usize,
    /// Sockets that have become its line.
    openings: u32,
    /// What was sent, or is to be.
    pub(super) log: Log,
    /// The line was given everything before this place in the stream.
    pub(super) position: u64,
    /// Of the line, as the sender counts paths.
    pub(super) path: usize,
    stall: Stall,
}

impl Connection {
    /// A connection that is not dialled yet.
    pub(super) fn new(number: u16) -> Self {
        Connection {
            number,
            line: None,
            dial: None,
            given_up: Vec::new(),
            questions: Vec::new(),
            answered: None,
            is_second: false,
            is_cut: false,
            dials: 0,
            tries: 0,
            openings: 0,
            log: Log::new(),
            position: 0,
            path: 0,
            stall: Stall::default(),
        }
    }

    /// The path, of `count`, to dial over: those after the one that worked last, in turn, and that one again.
    pub(super) fn next_path(&mut self, count: usize) -> usize {
        let path = (self.path + self.tries) % count.max(1);
        self.tries += 1;
        self.is_second = false;
        path
    }

    /// A question that was answered, to be dialled, and its path.
    pub(super) fn take_answered(&mut self) -> Option<(Socket, usize)> {
        let path = self.failing_path();
        let answered = self.answered.take()?;
        self.is_second = true;
        Some((answered, path))
    }

    /// A connection over the silent path has begun, to find out whether anything is answered there.
    pub(super) fn ask(&mut self, question: Socket, now: Instant) {
        self.questions.push(Probe::of(question));
        // Who is far away needs longer, the more so in a crowded network.
        let round_trip = self.line.as_ref().and_then(|line| line.socket.answers()).map(|answers| answers.round_trip);
        self.stall.answer_at.get_or_insert(now + 2 * round_trip.unwrap_or_default());
    }

    /// Ends the questions: what they ask is known, or of no interest any more.
    fn end_questions(&mut self) {
        self.questions.drain(..).for_each(Probe::end);
        self.answered.take().into_iter().for_each(|socket| socket.close(false));
    }

    /// The line, if bytes may be written to it and its acknowledgements mean something.
    pub(super) fn live(&mut self) -> Option<&mut Line> {
        self.line.as_mut().filter(|_| !self.is_cut)
    }

    /// How many sockets have been its line.
    pub(super) fn openings(&self) -> u32 {
        self.openings
    }

    pub(super) fn is_open(&self) -> bool {
        self.line.is_some()
    }

    /// Whether its peer's host was reached.
    pub(super) fn has_reached_peer(&self) -> bool {
        self.is_open() || self.dial.as_ref().is_some_and(|dial| matches!(dial.stage, Stage::Waiting { .. }))
    }

    /// The socket in use, or to be.
    pub(super) fn socket(&self) -> Option<&Socket> {
        self.line.as_ref().map(|line| &line.socket).or(self.dial.as_ref().map(|dial| &dial.socket))
    }

    pub(super) fn ready(&mut self, watch: Handle, ready: Ready) {
        if let Some(line) = self.line.as_mut().filter(|line| line.watch == watch) {
            line.readable |= ready.readable || ready.hung_up;
            line.writable |= ready.writable || ready.hung_up;
        }
        if let Some(dial) = self.dial.as_mut().filter(|dial| dial.watch == watch) {
            dial.readable |= ready.readable || ready.hung_up;
            dial.writable |= ready.writable || ready.hung_up;
        }
    }

    /// A socket has begun to connect, over a path. Returns the watch of one that is closed for it.
    pub(super) fn dial(&mut self, socket: Socket, watch: Handle, path: usize) -> Option<Handle> {
        let resumption = self.dials;
        self.dials += 1;
        let useless = self.give_dial_up();
        let (stage, looks, waits) = (Stage::Connecting, 0, None);
        let (readable, writable, is_forced) = (false, false, false);
        self.dial = Some(Dial { socket, watch, stage, readable, writable, resumption, path, looks, waits, is_forced });
        useless
    }

    /// There are `count` other paths from here on; `place` is where one of those before is now. Returns whether the first of them is to be dialled:
    /// not where the line goes there already.
    pub(super) fn recount(&mut self, count: usize, place: impl Fn(usize) -> Option<usize>) -> bool {
        let path = place(self.path);
        if path == Some(0) && self.dial.is_none() {
            (self.path, self.tries) = (0, 1);
            return false;
        }
        self.end_questions();
        self.path = path.unwrap_or(0);
        // The next one is the first.
        self.tries = (count - self.path) % count.max(1);
        true
    }

    /// What is dialled takes the line's place, whatever the line does.
    pub(super) fn force(&mut self) {
        self.dial.iter_mut().for_each(|dial| dial.is_forced = true);
    }

    /// The path that brings no answer, as the sender counts them: what is dialled goes there, or else the line.
    pub(super) fn failing_path(&self) -> usize {
        self.dial.as_ref().map_or(self.path, |dial| dial.path)
    }

    /// Gives up what is being dialled. Returns its watch if its socket is closed.
    pub(super) fn give_dial_up(&mut self) -> Option<Handle> {
        let dial = self.dial.take()?;
        if matches!(dial.stage, Stage::Connecting) {
            dial.socket.close(false);
            return Some(dial.watch);
        }
        self.given_up.push((dial.socket, dial.watch));
        None
    }

    /// Goes on with what is being dialled: says hello, and reads the answer. Returns whether it got further. Watches of sockets
    /// that were closed go to `closed`.
    pub(super) fn go_on(&mut self, hello: &Hello, closed: &mut Vec<Handle>) -> Result<bool, Fault> {
        let (mut further, is_open) = (false, self.is_open());
        loop {
            let Some(dial) = &mut self.dial else { return Ok(further) };
            match &mut dial.stage {
                Stage::Connecting if dial.writable => {
                    dial.socket.connected().map_err(|fault| refused(is_open, fault))?;
                    if !dial.is_forced && self.has_progressed() {
                        // The old path is well again.
                        closed.extend(self.give_dial_up());
                        return Ok(true);
                    }
                    self.is_cut = self.line.is_some();
                    if let Some(dial) = &mut self.dial {
                        dial.stage = Stage::Greeting { sent: 0 };
                    }
                }
                Stage::Greeting { sent } => {
                    let hello = Hello { connection: self.number, resumption: dial.resumption, ..*hello }.encode();
                    let written = dial.socket.write_slice(&hello[*sent..]);
                    match written.map_err(|errno| refused(is_open, unanswered(errno)))? {
                        Moved::Bytes(bytes) => *sent += bytes,
                        Moved::WouldBlock | Moved::End => return Ok(further),
                    }
                    if *sent == hello.len() {
                        dial.stage = Stage::Waiting { bytes: [0; RESUMED_BYTES], got: 0 };
                    }
                }
                Stage::Waiting { bytes, got } if dial.readable => {
                    let answer_bytes = if dial.resumption == 0 { VERDICT_BYTES } else { RESUMED_BYTES };
                    let read = dial.socket.read_slice(&mut bytes[*got..answer_bytes]);
                    match read.map_err(|errno| refused(is_open, unanswered(errno)))? {
                        Moved::Bytes(count) => *got += count,
                        Moved::WouldBlock => dial.readable = false,
                        Moved::End if *got >= VERDICT_BYTES => {
                            // A refusal is shorter than what an answer may be.
                            check_resumed(bytes).map_err(|fault| refused(is_open, fault))?;
                            return Err(refused(is_open, NO_ANSWER));
                        }
                        Moved::End => return Err(refused(is_open, NO_ANSWER)),
                    }
                    if *got == answer_bytes {
                        let received = if dial.resumption == 0 {
                            bytes.first_chunk().map_or(Ok(()), Verdict::check).map(|()| 0)
                        } else {
                            check_resumed(bytes)
                        };
                        let received = received.map_err(|fault| refused(is_open, fault))?;
                        self.open(received, closed)?;
                    }
                }
                Stage::Connecting | Stage::Waiting { .. } => return Ok(further),
            }
            further = true;
        }
    }

    /// What was dialled becomes the line; `received` bytes of the stream have come.
    fn open(&mut self, received: u64, closed: &mut Vec<Handle>) -> Result<(), Fault> {
        if received < self.log.start() || received > self.position {
            return Err(Fault::Protocol("it says that bytes have come which were not sent, or has lost some"));
        }
        let Some(dial) = self.dial.take() else { return Ok(()) };
        let line = Line { socket: dial.socket, watch: dial.watch, readable: true, writable: true, ended: false };
        if let Some(old) = self.line.replace(line) {
            old.socket.close(false);
            closed.push(old.watch);
        }
        for (socket, watch) in self.given_up.drain(..) {
            socket.close(false);
            closed.push(watch);
        }
        self.log.acknowledge(received);
        self.end_questions();
        self.is_second = self.openings > 0 && dial.path == self.path;
        // What is acknowledged from here on, the line has brought.
        self.stall = Stall { acknowledged: received, looked_at: self.stall.looked_at, ..Stall::default() };
        (self.position, self.path, self.is_cut) = (received, dial.path, false);
        (self.tries, self.openings) = (1, self.openings + 1);
        Ok(())
    }

    /// Bytes of the stream that the peer's kernel has acknowledged, where the socket can tell.
    pub(super) fn acknowledged(&self) -> Option<u64> {
        let line = self.line.as_ref().filter(|_| !self.is_cut)?;
        // What ends the stream counts as a byte.
        let unacknowledged = line.socket.unacknowledged()?.saturating_sub(u64::from(line.ended));
        Some(self.position.saturating_sub(unacknowledged))
    }

    fn has_progressed(&self) -> bool {
        self.acknowledged().is_some_and(|acknowledged| acknowledged > self.stall.acknowledged)
    }

    /// The line's path is taken for dead, whatever it will bring.
    pub(super) fn cut(&mut self) {
        self.is_cut = true;
    }

    pub(super) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Looks whether the peer's kernel answers, [`LOOKS`] times in a path's time-out. `paths` is how many there are.
    pub(super) fn look(&mut self, now: Instant, paths: usize, silence_timeout: Duration) -> Look {
        let is_line_well = self.look_at_line(now);
        if is_line_well {
            self.end_questions();
            // Its dial is not needed, and has not said a hello.
            return if self.log.is_empty() && self.dial.is_none() { Look::Settled } else { Look::Owed };
        }
        let is_open = self.is_open();
        let is_heard = self.dial.as_ref().is_some_and(Dial::is_heard);
        if is_heard && is_open {
            // The peer's host lives. Its service is busy, or the flow's receiver has no room.
            self.stall.since = Some(now);
        }
        if self.stall.since.is_some_and(|since| now.saturating_duration_since(since) >= silence_timeout) {
            return Look::Gone;
        }
        if is_open
            && !self.is_cut
            && let Some(look) = self.look_at_questions(now)
        {
            return look;
        }
        if is_heard && !is_open {
            return self.look_at_wait(now);
        }
        let Some(dial) = &mut self.dial else { return Look::Dial { is_dead: true } };
        let rounds = u32::try_from(self.tries.saturating_sub(1) / paths.max(1)).unwrap_or(DIAL_PATIENCE_MAX);
        let mut limit = LOOKS * rounds.clamp(1, DIAL_PATIENCE_MAX);
        if is_heard {
            limit = limit.max(ANSWER_LOOKS);
        }
        dial.looks += 1;
        // A first packet may be lost as well, and is repeated after a second only; so may a hello, and what repeats it.
        let may_ask = !is_open && !is_heard && !self.is_second && self.tries <= paths;
        if dial.looks <= limit {
            let asks = may_ask && dial.looks >= ASKED_FROM && self.questions.len() < QUESTIONS;
            return if asks { Look::Ask } else { Look::Owed };
        }
        if may_ask && self.is_answered() {
            return Look::Again;
        }
        self.end_questions();
        Look::Dial { is_dead: !is_heard }
    }

    /// The peer's service has not accepted the flow yet, and may take its time; its path may die meanwhile.
    fn look_at_wait(&mut self, now: Instant) -> Look {
        let Some(dial) = &mut self.dial else { return Look::Settled };
        let [first, most] = WAITING_ASKS_AFTER;
        let [since, ask_at] = *dial.waits.get_or_insert_with(|| {
            // Those before have asked whether the hello would be heard.
            self.questions.drain(..).for_each(Probe::end);
            dial.looks = 0;
            [now, now + first]
        });
        if self.questions.iter_mut().any(Probe::has_answered) {
            let ask_at = now + now.saturating_duration_since(since).min(most);
            (dial.looks, dial.waits) = (0, Some([since, ask_at]));
            self.end_questions();
            return Look::Waits(ask_at);
        }
        if self.questions.is_empty() {
            return if now < ask_at { Look::Waits(ask_at) } else { Look::Ask };
        }
        dial.looks += 1;
        if dial.looks <= LOOKS {
            return if self.questions.len() < QUESTIONS { Look::Ask } else { Look::Owed };
        }
        self.end_questions();
        Look::Dial { is_dead: true }
    }

    /// Whether a question was answered, and can be gone on with: the peer closes those that say nothing for long, first the first.
    fn is_answered(&mut self) -> bool {
        while self.answered.is_none()
            && let Some(answered) = self.questions.iter_mut().rposition(Probe::has_answered)
        {
            let socket = self.questions.remove(answered).into_socket();
            if is_closed(&socket) {
                socket.close(false);
                continue;
            }
            self.answered = Some(socket);
            self.questions.drain(..).for_each(Probe::end);
        }
        self.answered.is_some()
    }

    /// Whether the line's path lives, although nothing is answered on the line. `None`: it is dead, as far as can be told.
    fn look_at_questions(&mut self, now: Instant) -> Option<Look> {
        let Stall { looks, is_under_way, answer_at, .. } = self.stall;
        if looks < LOOKS {
            let may_ask = looks >= ASKED_FROM && is_under_way && !self.is_second && self.dial.is_none();
            return Some(if may_ask && self.questions.len() < QUESTIONS { Look::Ask } else { Look::Owed });
        }
        if self.is_answered() {
            return Some(Look::Again);
        }
        let is_early = !self.questions.is_empty() && answer_at.is_some_and(|at| now < at);
        if !is_early {
            self.end_questions();
        }
        is_early.then_some(Look::Owed)
    }

    /// Forgets sockets that were given up and that the peer has closed: it has not taken them for the line. Returns their watches.
    pub(super) fn forget_refused(&mut self) -> impl Iterator<Item = Handle> {
        let closed = self.given_up.extract_if(.., |(socket, _)| is_closed(socket));
        closed.map(|(socket, watch)| {
            socket.close(false);
            watch
        })
    }

    /// Whether it has no socket at all: another is dialled when it is looked at.
    pub(super) fn is_lost(&self) -> bool {
        self.line.is_none() && self.dial.is_none()
    }

    /// Whether there is a line, and it answers or owes nothing.
    fn look_at_line(&mut self, now: Instant) -> bool {
        let (Some(line), Some(acknowledged)) = (&self.line, self.acknowledged()) else {
            if self.is_open() {
                self.stall.since.get_or_insert(now);
            }
            return false;
        };
        let answers = line.socket.answers();
        let stall = &mut self.stall;
        let since_look = stall.looked_at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let owes_nothing = acknowledged == self.log.end();
        let has_progressed = acknowledged > stall.acknowledged;
        let has_answered = answers.is_none_or(|answers| answers.last <= since_look);
        stall.acknowledged = acknowledged;
        self.is_second &= !has_progressed;
        if owes_nothing || has_progressed || has_answered {
            (stall.looks, stall.since, stall.answer_at) = (0, None, None);
            return true;
        }
        stall.is_under_way = answers.is_some_and(|answers| answers.is_under_way);
        stall.looks += 1;
        stall.since.get_or_insert(now);
        // Before something was sent a second time it may just be on its way.
        if !answers.is_some_and(|answers| answers.is_owed) {
            stall.looks = stall.looks.min(LOOKS - 1);
        }
        false
    }

    /// Whether what is dialled is not needed, since the line answers.
    pub(super) fn is_dial_idle(&self) -> bool {
        self.dial.as_ref().is_some_and(|dial| !dial.is_forced)
            && self.is_open()
            && !self.is_cut
            && self.stall.looks == 0
    }

    /// The receiver has nothing to say: what is readable is its end, or wrong.
    pub(super) fn check_peer(&mut self) -> Result<(), Fault> {
        let Some(line) = self.line.as_mut().filter(|line| line.readable && !self.is_cut) else { return Ok(()) };
        match line.socket.read_slice(&mut [0; 1]).map_err(peer_gone)? {
            Moved::Bytes(_) => Err(Fault::Protocol("a receiver sends bytes")),
            Moved::End => Err(Fault::Closed),
            Moved::WouldBlock => {
                line.readable = false;
                Ok(())
            }
        }
    }

    /// Watches of its sockets.
    pub(super) fn watches(&self) -> impl Iterator<Item = Handle> {
        let line = self.line.as_ref().map(|line| line.watch);
        let dial = self.dial.as_ref().map(|dial| dial.watch);
        line.into_iter().chain(dial).chain(self.given_up.iter().map(|(_, watch)| *watch))
    }

    /// Ends its sockets. Returns their watches.
    pub(super) fn end(self, rest_is_wanted: bool) -> impl Iterator<Item = Handle> {
        let line = self.line.map(|line| (line.socket, line.watch));
        let dial = self.dial.map(|dial| (dial.socket, dial.watch));
        self.questions.into_iter().map(Probe::into_socket).chain(self.answered).for_each(|socket| socket.close(false));
        line.into_iter().chain(dial).chain(self.given_up).map(move |(socket, watch)| {
            socket.close(rest_is_wanted);
            watch
        })
    }
}

/// Whether the peer has ended a socket on which it has nothing to say yet.
fn is_closed(socket: &Socket) -> bool {
    !matches!(socket.read_slice(&mut [0; 1]), Ok(Moved::Bytes(_) | Moved::WouldBlock))
}

/// What a refusal means: of a flow that was open, that the peer has closed it.
fn refused(is_open: bool, fault: Fault) -> Fault {
    if is_open && matches!(fault, Fault::Refused(_)) { Fault::Closed } else { fault }
}

fn unanswered(errno: Errno) -> Fault {
    match peer_gone(errno) {
        Fault::Closed => NO_ANSWER,
        fault => fault,
    }
}
