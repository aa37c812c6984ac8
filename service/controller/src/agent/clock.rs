//! Clock synchronisation between hosts: every host estimates the controller's clock, which time
//! windows go by.
//!
//! A host asks the time and gets it back with its own question. The answer was true at some moment between asking and hearing,
//! so that half of that time is the most by which its middle can be wrong; of the last few answers the one that took least
//! counts. Between answers clocks drift apart, by `DRIFT` at most.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Answers that are compared.
const ANSWERS: usize = 8;
/// Between questions while answers are few.
const QUICKLY: Duration = Duration::from_millis(20);
/// Between questions later.
const CALMLY: Duration = Duration::from_secs(2);
/// A question that was not answered for so long is followed by another, and may still be answered.
const PATIENCE: Duration = Duration::from_secs(1);
/// How far two clocks drift apart: twice what crystals are allowed.
const DRIFT: f64 = 200e-6;

#[derive(Debug, Clone, Copy)]
struct Answer {
    /// The middle between asking and hearing.
    at: Instant,
    common_ns: u64,
    error: Duration,
}

impl Answer {
    fn error_at(&self, now: Instant) -> Duration {
        self.error + now.saturating_duration_since(self.at).mul_f64(DRIFT)
    }

    fn common_ns_at(&self, now: Instant) -> u64 {
        if let Some(since) = now.checked_duration_since(self.at) {
            self.common_ns.saturating_add(since.as_nanos() as u64)
        } else {
            self.common_ns.saturating_sub(self.at.duration_since(now).as_nanos() as u64)
        }
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct CommonClock {
    answers: VecDeque<Answer>,
    /// When the last question was asked.
    asked: Option<Instant>,
    /// The last questions that were not answered: when they were asked, and their numbers.
    open: VecDeque<(Instant, u64)>,
    questions: u64,
}

impl CommonClock {
    /// Asks again, if that is due: the question's number.
    pub fn ask(&mut self, now: Instant) -> Option<u64> {
        if self.next_question().is_some_and(|at| at > now) {
            return None;
        }
        self.questions += 1;
        self.asked = Some(now);
        self.open.push_back((now, self.questions));
        if self.open.len() > ANSWERS {
            self.open.pop_front();
        }
        Some(self.questions)
    }

    /// When it is to be asked again; `None`: now.
    #[must_use]
    pub fn next_question(&self) -> Option<Instant> {
        let pause = match self.open.back() {
            // One that is under way for longer than the pause is waited for: it says as much as the next would.
            Some(_) => PATIENCE,
            None if self.answers.len() < ANSWERS => QUICKLY,
            None => CALMLY,
        };
        Some(self.asked? + pause)
    }

    /// A question was answered, be it that others were asked meanwhile.
    pub fn answered(&mut self, question: u64, common_ns: u64, now: Instant) {
        let Some(place) = self.open.iter().position(|(_, number)| *number == question) else { return };
        // Those before it have been lost, or are too late to be of use.
        let Some((at, _)) = self.open.drain(..=place).next_back() else { return };
        let error = now.saturating_duration_since(at) / 2;
        self.answers.push_back(Answer { at: at + error, common_ns, error });
        if self.answers.len() > ANSWERS {
            self.answers.pop_front();
        }
    }

    /// Time of the common clock, and its possible error; `None` before it was told.
    #[must_use]
    pub fn now(&self, now: Instant) -> Option<(u64, Duration)> {
        let best = self.answers.iter().min_by_key(|answer| answer.error_at(now))?;
        Some((best.common_ns_at(now), best.error_at(now)))
    }

    /// Until when it is not wrong by more than this, if nobody answers any more; `None` before it was told.
    #[must_use]
    pub fn holds_until(&self, error_max: Duration) -> Option<Instant> {
        let until = |answer: &Answer| answer.at + error_max.saturating_sub(answer.error).div_f64(DRIFT);
        self.answers.iter().map(until).max()
    }

    /// The controller's clock is another one from here on.
    pub fn forget(&mut self) {
        self.answers.clear();
        self.open.clear();
        self.asked = None;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever the network does to questions and answers, the truth is within the error; the first answer is one, however long it
        /// takes, and one quick round is enough for the error to be small.
        #[test]
        fn the_truth_is_within_the_error(
            trips in prop_oneof![Just(5_000_u64), Just(100_000), Just(2_000_000)]
                .prop_flat_map(|most_us| prop::collection::vec((1..most_us, 1..most_us), 1..30)),
            drift_ppm in -100_i64..100,
            epoch_ns in 0_u64..1 << 62,
        ) {
            let begin = Instant::now();
            let truth = |at: Instant| {
                let since_ns = (at - begin).as_nanos() as i128;
                (i128::from(epoch_ns) + since_ns + since_ns * i128::from(drift_ppm) / 1_000_000) as u64
            };
            let mut clock = CommonClock::default();
            prop_assert_eq!(clock.now(begin), None);
            let mut now = begin;
            // Answers that are under way: when they come, the question, the time, and how long it has all taken.
            let mut under_way: Vec<(Instant, u64, u64, Duration)> = Vec::new();
            let mut last_answered = 0;
            for (out_us, back_us) in trips {
                // Whoever needs the time asks as soon as that is due, and hears what comes before.
                loop {
                    let asks_at = clock.next_question().map_or(now, |at| at.max(now));
                    under_way.sort_unstable();
                    if under_way.first().is_none_or(|(at, ..)| *at > asks_at) {
                        now = asks_at;
                        break;
                    }
                    let (at, question, told, took) = under_way.remove(0);
                    now = at;
                    clock.answered(question, told, now);
                    let (common_ns, error) = clock.now(now).expect("an answer");
                    let wrong_ns = common_ns.abs_diff(truth(now));
                    prop_assert!(u128::from(wrong_ns) <= error.as_nanos() + 1_000, "{wrong_ns} beyond {error:?}");
                    // Drift while the answer is under way. An answer behind the answer to a later question says nothing.
                    let is_late = question < last_answered;
                    prop_assert!(is_late || error <= took.mul_f64(0.5 + DRIFT) + Duration::from_micros(3));
                    last_answered = question.max(last_answered);
                }
                let question = clock.ask(now).expect("a question");
                prop_assert_eq!(clock.ask(now), None);
                let (out, back) = (Duration::from_micros(out_us), Duration::from_micros(back_us));
                under_way.push((now + out + back, question, truth(now + out), out + back));
            }
        }
    }

    #[test]
    fn answers_to_other_questions_do_not_count() {
        let (mut clock, now) = (CommonClock::default(), Instant::now());
        let question = clock.ask(now).unwrap();
        clock.answered(question + 1, 5, now);
        assert_eq!(clock.now(now), None);
        clock.answered(question, 5, now);
        assert_eq!(clock.now(now), Some((5, Duration::ZERO)));
        clock.forget();
        assert_eq!(clock.now(now), None);
    }
}
