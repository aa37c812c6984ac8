//! Tickets of a stream: which operations have ended, and which of those the tenant has been told
//! of.
//!
//! ```text
//! engine:   ended = n --> word = n --> semaphore --> told = n
//! session:  told = the stream's last? --> word = 0, for the next stream      is_telling? --> asks again in a moment
//! ```
//!
//! A word that went to another stream while an engine is between the first step and the last would show that stream the old ticket:
//! operations of it would seem to have ended before they began. So `told` alone says whose the word is. `ended` can be ahead of it
//! at any moment, also between two looks; it says whether asking again is worth while.

use crate::sync::StreamWord;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The last tickets of a stream, which the tenant cannot change. One thread at a time ends operations of a stream.
#[derive(Debug)]
pub struct Tickets {
    ended: AtomicU64,
    told: AtomicU64,
}

impl Tickets {
    /// The tickets of a stream whose tickets start at 1.
    #[must_use]
    pub fn new() -> Self {
        Tickets { ended: AtomicU64::new(0), told: AtomicU64::new(0) }
    }

    /// The tickets of a stream that another process has served so far: all up to `ticket` have ended, and been told.
    #[must_use]
    pub fn resume(ticket: u64) -> Self {
        Tickets { ended: AtomicU64::new(ticket), told: AtomicU64::new(ticket) }
    }

    /// All up to `ticket` have ended: raises the stream's word, then calls `behind` for what tells the tenant besides.
    pub fn end(&self, word: Option<&StreamWord>, ticket: u64, behind: impl FnOnce()) {
        self.ended.store(ticket, Ordering::Release);
        if let Some(word) = word {
            word.publish(ticket);
        }
        behind();
        self.told.store(ticket, Ordering::Release);
    }

    /// The last that has ended.
    #[must_use]
    pub fn last_ended(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether the tenant is just being told of what has ended: an engine is between two instructions.
    #[must_use]
    pub fn is_telling(&self) -> bool {
        let told = self.told.load(Ordering::Acquire);
        self.last_ended() != told
    }

    /// Makes the word fit for another stream, if the tenant has been told of all tickets up to `last`, the last one that there is.
    /// Returns whether it has.
    #[must_use]
    pub fn reset(&self, word: Option<&StreamWord>, last: u64) -> bool {
        if self.told.load(Ordering::Acquire) != last {
            return false;
        }
        self.ended.store(0, Ordering::Release);
        self.told.store(0, Ordering::Release);
        if let Some(word) = word {
            word.publish(0);
        }
        true
    }
}

impl Default for Tickets {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_given_away_when_its_last_ticket_has_been_told() {
        let (tickets, word) = (Tickets::new(), StreamWord::new());
        tickets.end(Some(&word), 2, || {
            assert_eq!((tickets.last_ended(), word.load()), (2, 2));
            assert!(tickets.is_telling() && !tickets.reset(Some(&word), 2), "the semaphore has not been told");
        });
        assert!(!tickets.is_telling() && !tickets.reset(Some(&word), 3), "the third is in flight");
        assert!(tickets.reset(Some(&word), 2));
        assert_eq!((tickets.last_ended(), word.load()), (0, 0));
        assert!(tickets.reset(Some(&word), 0), "nothing was called on it");
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use std::time::Duration;

    use loom::sync::Arc;

    use super::*;

    /// A stream on which the engine ends the only operation.
    fn ending() -> (Arc<(Tickets, StreamWord)>, loom::thread::JoinHandle<()>) {
        let stream = Arc::new((Tickets::new(), StreamWord::new()));
        let engine = {
            let stream = Arc::clone(&stream);
            loom::thread::spawn(move || stream.0.end(Some(&stream.1), 1, || {}))
        };
        (stream, engine)
    }

    /// A tenant destroys its stream at any moment: the next one has its word at 0, and the old ticket does not come any more.
    #[test]
    fn loom_a_word_given_away_does_not_show_the_old_ticket() {
        loom::model(|| {
            let (stream, engine) = ending();
            let (tickets, word) = &*stream;
            let is_given = !tickets.is_telling() && tickets.reset(Some(word), 1);
            engine.join().expect("engine");
            let shown = u64::from(!is_given);
            assert_eq!((word.load(), tickets.last_ended()), (shown, shown));
        });
    }

    /// A caller that has waited for its last operation is not refused: its word is free, or is going to be in a moment.
    #[test]
    fn loom_who_has_waited_may_destroy_its_stream() {
        loom::model(|| {
            let (stream, engine) = ending();
            let (tickets, word) = &*stream;
            assert!(word.wait(1, Duration::ZERO, Duration::from_secs(600)));
            while tickets.is_telling() {
                loom::thread::yield_now();
            }
            assert!(tickets.reset(Some(word), 1));
            engine.join().expect("engine");
            assert_eq!(word.load(), 0);
        });
    }
}
