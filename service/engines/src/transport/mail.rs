//! Mail to transport engines: in order, and kept for as long as a mailbox is full.

use std::collections::VecDeque;

use super::{AssignedJob, TransportHandle, TransportMessage};

/// Messages that wait for room.
enum Waiting {
    /// For any engine of the pool.
    Job(AssignedJob),
    /// For one.
    Message(TransportHandle, TransportMessage),
}

/// The mail of a proxy engine. A later message never overtakes an earlier one.
#[derive(Default)]
pub struct TransportMail {
    engines: Vec<TransportHandle>,
    backlog: VecDeque<Waiting>,
    /// Engine that gets the first channel of the next schedule that any engine may run.
    turn: usize,
}

impl TransportMail {
    /// Uses these engines from now on, and sends away those it used and that are not among them.
    pub fn set_engines(&mut self, engines: Vec<TransportHandle>) {
        let old = std::mem::replace(&mut self.engines, engines);
        for engine in old {
            if !self.engines.iter().any(|new| new.number == engine.number) {
                self.tell(&engine, TransportMessage::Retire);
            }
        }
    }

    /// The pool.
    #[must_use]
    pub fn engines(&self) -> &[TransportHandle] {
        &self.engines
    }

    /// Tells an engine something; later, if it has no room now.
    pub fn tell(&mut self, engine: &TransportHandle, message: TransportMessage) {
        self.post(Waiting::Message(engine.clone(), message));
    }

    /// Gives a job to every engine that has room, as soon as one has.
    pub fn share(&mut self, job: AssignedJob) {
        self.post(Waiting::Job(job));
    }

    /// Engine whose turn it is to run the first of `count` channels that any engine may run.
    pub(super) fn take_turns(&mut self, count: usize) -> usize {
        let first = self.turn;
        self.turn = self.turn.wrapping_add(count);
        first
    }

    /// Hands out what found no room before. Returns whether some still waits.
    pub fn push_backlog(&mut self) -> bool {
        while let Some(waiting) = self.backlog.pop_front() {
            let left = match waiting {
                Waiting::Job(job) if self.assign(&job) => continue,
                Waiting::Job(job) => Waiting::Job(job),
                Waiting::Message(engine, message) => match engine.sender.send(message) {
                    Ok(()) => continue,
                    Err(message) => Waiting::Message(engine, message),
                },
            };
            self.backlog.push_front(left);
            return true;
        }
        false
    }

    fn post(&mut self, waiting: Waiting) {
        self.backlog.push_back(waiting);
        self.push_backlog();
    }

    /// Gives a job to every engine that has room; false if none has.
    fn assign(&self, job: &AssignedJob) -> bool {
        let sent = self.engines.iter().filter(|t| t.sender.send(TransportMessage::Run(job.clone())).is_ok());
        sent.count() > 0
    }
}

#[cfg(test)]
mod tests {
    use mccs_model::link::LinksId;
    use mccs_runtime::Mailbox;

    use super::*;

    fn close(number: u64) -> TransportMessage {
        TransportMessage::CloseLinks { links: LinksId(number) }
    }

    fn closed(mailbox: &Mailbox<TransportMessage>) -> Vec<u64> {
        let told = std::iter::from_fn(|| mailbox.pop());
        told.filter_map(|message| match message {
            TransportMessage::CloseLinks { links } => Some(links.0),
            _ => None,
        })
        .collect()
    }

    #[test]
    fn mail_waits_for_room_and_keeps_its_order() {
        let full = Mailbox::new(1);
        let engine = TransportHandle { number: 1, sender: full.sender(), is_near: false };
        let mut mail = TransportMail::default();
        (1..=3).for_each(|number| mail.tell(&engine, close(number)));
        for number in 1..=3 {
            assert_eq!(closed(&full), [number]);
            assert_eq!(mail.push_backlog(), number < 2, "{number}");
        }
        assert!(closed(&full).is_empty());
    }

    #[test]
    fn engines_that_leave_the_pool_retire() {
        let mailboxes = [Mailbox::new(4), Mailbox::new(4)];
        let engine = |number: usize| TransportHandle {
            number: number as u64,
            sender: mailboxes[number].sender(),
            is_near: false,
        };
        let mut mail = TransportMail::default();
        mail.set_engines(vec![engine(0), engine(1)]);
        mail.set_engines(vec![engine(1)]);
        assert!(matches!(mailboxes[0].pop(), Some(TransportMessage::Retire)));
        assert!(mailboxes[1].is_empty());
        assert_eq!(mail.engines().iter().map(|engine| engine.number).collect::<Vec<_>>(), [1]);
    }
}
