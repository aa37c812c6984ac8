//! Checks a TCP connection's peer and path: unacknowledged bytes, questions over the path, then
//! what to do. A connection that owes nothing is not looked at.

use std::time::{Duration, Instant};

use super::dial::Dial;
use super::{Connection, is_closed};
use crate::tcp::probe::Probe;
use crate::tcp::socket::Socket;

/// A path is dead when so many looks, over its time-out, have found no answer.
pub(in crate::tcp) const LOOKS: u32 = 6;
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

/// For how long nothing was answered.
#[derive(Debug, Default)]
pub(in crate::tcp) struct Stall {
    pub(in crate::tcp) acknowledged: u64,
    pub(in crate::tcp) looks: u32,
    pub(in crate::tcp) since: Option<Instant>,
    pub(in crate::tcp) looked_at: Option<Instant>,
    /// Something that was sent may have been lost.
    pub(in crate::tcp) is_under_way: bool,
    /// The first question cannot have been answered before.
    pub(in crate::tcp) answer_at: Option<Instant>,
}

/// Results of a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::tcp) enum Look {
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

impl Connection {
    /// A connection over the silent path has begun, to find out whether anything is answered there.
    pub(in crate::tcp) fn ask(&mut self, question: Socket, now: Instant) {
        self.questions.push(Probe::of(question));
        // A far peer needs longer, the more so in a crowded network.
        let round_trip = self.line.as_ref().and_then(|line| line.socket.tcp_info()).map(|info| info.round_trip);
        self.stall.answer_at.get_or_insert(now + 2 * round_trip.unwrap_or_default());
    }

    /// A question that was answered, to be dialled, and its path.
    pub(in crate::tcp) fn take_answered(&mut self) -> Option<(Socket, usize)> {
        let path = self.failing_path();
        let answered = self.answered.take()?;
        self.is_second = true;
        Some((answered, path))
    }

    /// Ends the questions: what they ask is known, or of no interest any more.
    pub(in crate::tcp) fn end_questions(&mut self) {
        self.questions.drain(..).for_each(Probe::end);
        self.answered.take().into_iter().for_each(|socket| socket.close(false));
    }

    pub(in crate::tcp) fn has_progressed(&self) -> bool {
        self.acknowledged().is_some_and(|acknowledged| acknowledged > self.stall.acknowledged)
    }

    /// Looks whether the peer's kernel answers, [`LOOKS`] times in a path's time-out. `paths` is how many there are.
    pub(in crate::tcp) fn look(&mut self, now: Instant, paths: usize, silence_timeout: Duration) -> Look {
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

    /// Whether there is a line, and it answers or owes nothing.
    fn look_at_line(&mut self, now: Instant) -> bool {
        let (Some(line), Some(acknowledged)) = (&self.line, self.acknowledged()) else {
            if self.is_open() {
                self.stall.since.get_or_insert(now);
            }
            return false;
        };
        let info = line.socket.tcp_info();
        let stall = &mut self.stall;
        let since_look = stall.looked_at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let owes_nothing = acknowledged == self.log.end();
        let has_progressed = acknowledged > stall.acknowledged;
        let has_answered = info.is_none_or(|info| info.last_answer <= since_look);
        stall.acknowledged = acknowledged;
        self.is_second &= !has_progressed;
        if owes_nothing || has_progressed || has_answered {
            (stall.looks, stall.since, stall.answer_at) = (0, None, None);
            return true;
        }
        stall.is_under_way = info.is_some_and(|info| info.is_under_way);
        stall.looks += 1;
        stall.since.get_or_insert(now);
        // Before something was sent a second time it may just be on its way.
        if !info.is_some_and(|info| info.is_owed) {
            stall.looks = stall.looks.min(LOOKS - 1);
        }
        false
    }
}
