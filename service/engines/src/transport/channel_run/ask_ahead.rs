//! Receives posted ahead: which messages a program may ask for before it comes to their steps.

use mccs_collective::{Buffer, RankSpan, Step};

/// Up to where a program has asked for messages.
#[derive(Default)]
pub(super) struct Ask {
    /// The step that is asked for: the one where the program is, or a later one.
    pub(super) step: usize,
    /// Elements of it that were asked for.
    pub(super) done: u64,
    /// Whether its only message was asked for, where it has no elements.
    pub(super) done_empty: bool,
}

impl Ask {
    pub(super) fn of(step: usize) -> Self {
        Ask { step, ..Ask::default() }
    }

    /// Whether all of a step was asked for that has so many elements.
    pub(super) fn is_done(&self, count: u64) -> bool {
        self.done >= count && (count > 0 || self.done_empty)
    }
}

/// The step behind `asked` whose messages may be asked for while a program is at step `at`: its next receive, of the same peer, with
/// nothing but sends between. If the message goes to its place, no step that is not over may use that. (A peer sends it only when it has
/// come to it in its program: what the messages before it say of others, it says, too.)
pub(super) fn next_to_ask(steps: &[Step], at: usize, asked: usize) -> Option<usize> {
    let (Step::Recv { peer, .. } | Step::RecvReduce { peer, .. }) = steps.get(asked)? else { return None };
    let behind = steps.get(asked + 1..)?;
    let next = asked + 1 + behind.iter().position(|step| !matches!(step, Step::Send { .. }))?;
    match steps.get(next)? {
        Step::RecvReduce { peer: of, .. } => (of == peer).then_some(next),
        Step::Recv { peer: of, dsts } => {
            let first = dsts.first()?;
            let is_free = || steps.get(at..next).is_some_and(|steps| !steps.iter().any(|step| uses(step, first)));
            (of == peer && is_free()).then_some(next)
        }
        _ => None,
    }
}

/// Whether a step reads or writes any of a span. One of a rank's send and receive buffers may lie in the other.
fn uses(step: &Step, span: &RankSpan) -> bool {
    let is_used = |of: &RankSpan| {
        let (own, other) = (span.span, of.span);
        let are_apart = own.offset + own.count <= other.offset || other.offset + other.count <= own.offset;
        let are_kinds = [own.buffer, other.buffer].contains(&Buffer::Scratch);
        of.rank == span.rank && if own.buffer == other.buffer { !are_apart } else { !are_kinds }
    };
    match step {
        Step::Send { src, .. } => is_used(src),
        Step::Recv { dsts, .. } => dsts.iter().any(is_used),
        Step::Copy { src, dsts } => is_used(src) || dsts.iter().any(is_used),
        Step::RecvReduce { srcs, dsts, .. } | Step::Reduce { srcs, dsts, .. } => srcs.iter().chain(dsts).any(is_used),
    }
}

/// Whether nothing remains to be posted of a program's steps, which is at the step `at`.
pub(super) fn has_posted(steps: &[Step], at: usize, ask: &Ask) -> bool {
    let is_posted = |(number, step): (usize, &Step)| match step {
        Step::Copy { .. } | Step::Reduce { .. } => true,
        Step::Send { .. } => false,
        Step::Recv { .. } | Step::RecvReduce { .. } => {
            number < ask.step || (number == ask.step && ask.is_done(step.count()))
        }
    };
    steps.iter().enumerate().skip(at).all(is_posted)
}

#[cfg(test)]
mod tests {
    use mccs_collective::Span;

    use super::*;

    fn at(buffer: Buffer, offset: u64) -> RankSpan {
        RankSpan { rank: 0, span: Span::new(buffer, offset, 10) }
    }

    fn recv(peer: u32, offset: u64) -> Step {
        Step::Recv { peer, dsts: vec![at(Buffer::Recv, offset)] }
    }

    fn reduce(peer: u32) -> Step {
        let (incoming_raw, srcs_raw, finish) = (false, false, false);
        Step::RecvReduce {
            peer,
            srcs: vec![at(Buffer::Send, 0)],
            dsts: vec![at(Buffer::Recv, 0)],
            incoming_raw,
            srcs_raw,
            finish,
        }
    }

    fn send(buffer: Buffer, offset: u64) -> Step {
        Step::Send { peer: 1, src: at(buffer, offset) }
    }

    #[test]
    fn messages_of_later_steps_are_asked_for_where_nothing_else_uses_their_place() {
        let next = |steps: &[Step]| next_to_ask(steps, 0, 0);
        assert_eq!(next(&[recv(1, 0), recv(1, 10)]), Some(1));
        assert_eq!(next(&[recv(1, 0), send(Buffer::Recv, 0), recv(1, 10)]), Some(2), "what is passed on is elsewhere");
        assert_eq!(next(&[reduce(1), send(Buffer::Recv, 0), reduce(1)]), Some(2), "staging memory is nobody else's");
        assert_eq!(next(&[recv(1, 0), recv(2, 10)]), None, "another flow");
        assert_eq!(next(&[recv(1, 0), recv(1, 9)]), None, "the place of one that may not have come");
        assert_eq!(next(&[recv(1, 0), send(Buffer::Recv, 10), recv(1, 10)]), None, "it is sent before");
        assert_eq!(next(&[recv(1, 0), send(Buffer::Send, 50), recv(1, 10)]), None, "a call may be in place");
        assert_eq!(next(&[recv(1, 0), send(Buffer::Scratch, 10), recv(1, 10)]), Some(2));
        let copy = Step::Copy { src: at(Buffer::Recv, 0), dsts: vec![at(Buffer::Recv, 90)] };
        assert_eq!(next(&[recv(1, 0), copy, recv(1, 10)]), None, "what this rank does by itself comes first");
        // A step that was over when the message is asked for is in nobody's way.
        let steps = [recv(1, 10), recv(1, 0), recv(1, 10)];
        assert_eq!([next_to_ask(&steps, 0, 1), next_to_ask(&steps, 1, 1)], [None, Some(2)]);
    }
}
