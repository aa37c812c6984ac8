//! Watch on GPU communicators: when GPUs are asked how far they are, and when answers are judged
//! (time-outs).

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

use crate::proxy::communicator::comm::Comm;
use crate::proxy::gpus::gpu_ranks::GpuRanks;
use crate::proxy::state::State;

/// How often GPUs are looked at in the time that an operation may wait.
const LOOKS: u32 = 4;
/// And after what time at the latest: a GPU that is lost while operations are under way is told of within it. A look is two copies of 8 bytes a rank, some tens of
/// microseconds of the thread that sets up, and none where nothing is known to be under way, but for every [`ASK_ALL_EVERY`]th.
const LOOK_AFTER_MAX: Duration = Duration::from_secs(5);
/// And while kernels' stamps tell how long collectives come (`strategy/training_detection.rs` of `mccs-device`). The pause doubles after every [`IDLE_LOOKS`] in which nothing
/// was launched.
const LEARN_AFTER: Duration = Duration::from_millis(250);
const IDLE_LOOKS: u32 = 8;
/// So often all are asked: of graphs that hold sends and receives alone, or have come and gone since the last look, nobody else knows how often they ran.
const ASK_ALL_EVERY: u32 = 8;
/// From asking GPUs how far they are to looking at the answer: a few times what it takes.
const ANSWER_WITHIN: Duration = Duration::from_millis(5);

/// See the module's documentation.
pub(super) struct GpuWatch {
    /// Time that an operation may wait; for ever, if there is none.
    timeout: Option<Duration>,
    /// The next look, while there are such communicators.
    next: Option<PollTimer>,
    /// When all GPUs are asked next, also those that nothing is known to run on.
    ask_all_at: Option<Instant>,
    learning: Learning,
}

impl GpuWatch {
    pub(super) fn new(timeout: Option<Duration>) -> Self {
        GpuWatch { timeout, next: None, ask_all_at: None, learning: Learning::default() }
    }

    /// Time that an operation may wait; for ever, if there is none.
    pub(super) fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// When to look next.
    pub(super) fn look_at(&self) -> Option<Instant> {
        self.next.map(PollTimer::at)
    }

    /// When all GPUs are asked next.
    #[cfg(test)]
    pub(super) fn all_asked_at(&self) -> Option<Instant> {
        self.ask_all_at
    }

    /// The look that is due.
    pub(super) fn due(&self, now: Instant) -> Option<PollTimer> {
        self.next.filter(|look| look.at() <= now)
    }

    /// A communicator of GPUs has begun.
    pub(super) fn watch(&mut self, state: &State) {
        let now = state.now();
        self.ask_soon(launched_while_learning(state), now);
    }

    /// Ends communicators of GPUs that do not say how far they are, or in which operations have waited for too long. Nothing tells when such operations
    /// begin, so they are looked at several times in the time that they have.
    pub(super) fn end_late(&mut self, state: &mut State) {
        let now = state.now();
        let Some(look) = self.due(now) else { return };
        let of_gpus = |(comm, live): (Handle, &Comm)| live.info.device_initiated.is_some().then_some(comm);
        let comms: Vec<_> = state.comms.iter().filter_map(of_gpus).collect();
        if let PollTimer::Ask(_) = look {
            let asks_all = self.asked(!comms.is_empty(), now);
            let live = comms.iter().filter_map(|comm| state.comms.get(*comm)).filter(|live| live.failure.is_none());
            for live in live {
                live.info.device_initiated.iter().for_each(|group| group.strategies().renew_captured());
                if asks_all || live.gpus.as_ref().is_some_and(GpuRanks::may_run) {
                    live.info.ask();
                }
            }
            return;
        }
        for comm in comms {
            let Some(live) = state.comms.get_mut(comm) else { continue };
            if let Some(failure) = live.judge_gpus(self.timeout(), now) {
                state.abort(comm, failure);
            }
        }
        // After what was chosen: a communicator that learns from now on is looked at soon.
        self.judged(launched_while_learning(state), now);
    }

    /// There is a communicator to look at. `launched` is what ranks have launched while their communicators learn, if one does.
    pub(super) fn ask_soon(&mut self, launched: Option<u64>, now: Instant) {
        let next = self.next_ask(launched, now);
        if self.next.is_none_or(|look| look.at() > next.at()) {
            self.next = Some(next);
        }
    }

    /// GPUs are being asked. Returns whether all are to be, also those that nothing is known to run on.
    pub(super) fn asked(&mut self, are_some: bool, now: Instant) -> bool {
        self.next = are_some.then(|| PollTimer::Judge(now + ANSWER_WITHIN));
        let pause = self.pause();
        // The first look is one of them.
        let due = *self.ask_all_at.get_or_insert(now + pause * (ASK_ALL_EVERY - 1));
        let asks_all = due <= now;
        if asks_all {
            self.ask_all_at = Some(now + pause * ASK_ALL_EVERY);
        }
        asks_all
    }

    /// Answers were judged. `launched` as for [`GpuWatch::ask_soon`].
    pub(super) fn judged(&mut self, launched: Option<u64>, now: Instant) {
        self.next = Some(self.next_ask(launched, now));
    }

    fn next_ask(&mut self, launched: Option<u64>, now: Instant) -> PollTimer {
        let pause = self.pause();
        PollTimer::Ask(now + launched.map_or(pause, |launched| self.learning.pause(launched).min(pause)))
    }

    fn pause(&self) -> Duration {
        let part = self.timeout.map(|timeout| timeout / LOOKS);
        part.map_or(LOOK_AFTER_MAX, |part| part.min(LOOK_AFTER_MAX))
    }
}

/// Operations that ranks have launched of communicators that [learn](mccs_device::cuda::Strategies::learns); none if none does.
fn launched_while_learning(state: &State) -> Option<u64> {
    let launched = |(_, live): (Handle, &Comm)| {
        let group = live.info.device_initiated.as_ref().filter(|group| group.strategies().learns())?;
        live.failure.is_none().then(|| (0..live.nranks()).map(|rank| group.page().launched(rank)).sum::<u64>())
    };
    state.comms.iter().filter_map(launched).reduce(u64::wrapping_add)
}

/// How soon communicators are looked at again whose stamps tell how long collectives come.
#[derive(Debug, Default)]
struct Learning {
    launched: u64,
    idle_looks: u32,
}

impl Learning {
    /// The pause before the next look; `launched` is how many operations ranks have launched so far.
    fn pause(&mut self, launched: u64) -> Duration {
        self.idle_looks = if launched == self.launched { self.idle_looks.saturating_add(1) } else { 0 };
        self.launched = launched;
        LEARN_AFTER * (1 << (self.idle_looks / IDLE_LOOKS).min(8))
    }
}

/// The next time to look at communicators of GPUs.
#[derive(Debug, Clone, Copy)]
pub(super) enum PollTimer {
    /// To ask GPUs how far they are.
    Ask(Instant),
    /// To look at what they answered.
    Judge(Instant),
}

impl PollTimer {
    /// When it is due.
    pub(super) fn at(self) -> Instant {
        match self {
            PollTimer::Ask(at) | PollTimer::Judge(at) => at,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn communicators_that_learn_are_looked_at_often_while_they_run() {
        let mut learning = Learning::default();
        let mut pauses = |launched: u64, times: usize| (0..times).map(|_| learning.pause(launched)).last();
        assert_eq!(pauses(5, 1), Some(LEARN_AFTER));
        assert_eq!(pauses(5, 7), Some(LEARN_AFTER));
        assert_eq!(pauses(5, 1), Some(LEARN_AFTER * 2));
        assert!(pauses(5, 1000) > Some(LOOK_AFTER_MAX), "as seldom as others");
        assert_eq!(pauses(6, 1), Some(LEARN_AFTER));
    }
}
