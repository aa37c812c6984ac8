//! The common clock: what the controller's clock shows, estimated by every host that needs it.
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
    /// When the last question was asked, and its number.
    asked: Option<(Instant, u64)>,
    questions: u64,
}

impl CommonClock {
    /// Asks again, if that is due: the question's number.
    pub fn ask(&mut self, now: Instant) -> Option<u64> {
        if self.next_question().is_some_and(|at| at > now) {
            return None;
        }
        self.questions += 1;
        self.asked = Some((now, self.questions));
        Some(self.questions)
    }

    /// When it is to be asked again; `None`: now.
    #[must_use]
    pub fn next_question(&self) -> Option<Instant> {
        let (at, _) = self.asked?;
        Some(at + if self.answers.len() < ANSWERS { QUICKLY } else { CALMLY })
    }

    /// A question was answered. An answer to another than the last one is too late to be of use.
    pub fn answered(&mut self, question: u64, common_ns: u64, now: Instant) {
        let Some((at, _)) = self.asked.filter(|(_, number)| *number == question) else { return };
        let error = now.saturating_duration_since(at) / 2;
        self.answers.push_back(Answer { at: at + error, common_ns, error });
        if self.answers.len() > ANSWERS {
            self.answers.pop_front();
        }
    }

    /// What the common clock shows, and by how much that may be wrong; `None` before it was told.
    #[must_use]
    pub fn now(&self, now: Instant) -> Option<(u64, Duration)> {
        let best = self.answers.iter().min_by_key(|answer| answer.error_at(now))?;
        Some((best.common_ns_at(now), best.error_at(now)))
    }

    /// The controller's clock is another one from here on.
    pub fn forget(&mut self) {
        self.answers.clear();
        self.asked = None;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever the network does to questions and answers, the truth is within the error, and one quick round is enough for it
        /// to be small.
        #[test]
        fn the_truth_is_within_the_error(
            trips in prop::collection::vec((1_u64..5_000, 1_u64..5_000), 1..30),
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
            for (out_us, back_us) in trips {
                now = clock.next_question().map_or(now, |at| at.max(now));
                let question = clock.ask(now).unwrap();
                prop_assert_eq!(clock.ask(now), None);
                let told = truth(now + Duration::from_micros(out_us));
                now += Duration::from_micros(out_us + back_us);
                clock.answered(question, told, now);
                let (common_ns, error) = clock.now(now).unwrap();
                let wrong_ns = common_ns.abs_diff(truth(now));
                prop_assert!(u128::from(wrong_ns) <= error.as_nanos() + 1_000, "{wrong_ns} beyond {error:?}");
                // What drifts while the answer is under way.
                prop_assert!(error <= Duration::from_micros((out_us + back_us) / 2 + 3));
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
