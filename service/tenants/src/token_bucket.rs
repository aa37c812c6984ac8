//! A token bucket: how often something happens, at once and from then on.

use std::time::{Duration, Instant};

/// See the module's documentation. Has no clock.
#[derive(Debug)]
pub struct TokenBucket {
    at_once: u32,
    /// In which another token comes.
    each: Duration,
    /// When it is full again.
    full_at: Option<Instant>,
}

impl TokenBucket {
    /// Full, with `at_once` tokens, at least one. `per_s` come each second.
    #[must_use]
    pub const fn new(at_once: u32, per_s: u32) -> Self {
        TokenBucket { at_once, each: Duration::from_nanos(1_000_000_000 / per_s as u64), full_at: None }
    }

    /// When there is a token; `None` where there has always been one.
    #[must_use]
    pub fn next_at(&self) -> Option<Instant> {
        self.full_at.and_then(|full_at| full_at.checked_sub(self.each * (self.at_once - 1)))
    }

    /// Whether there is one now.
    #[must_use]
    pub fn has_token(&self, now: Instant) -> bool {
        self.next_at().is_none_or(|at| at <= now)
    }

    /// Takes one, if there is one. Returns whether there was.
    pub fn take(&mut self, now: Instant) -> bool {
        let has_token = self.has_token(now);
        if has_token {
            self.full_at = Some(self.full_at.map_or(now, |at| at.max(now)) + self.each);
        }
        has_token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_without_end_happens_so_often_a_second() {
        let (mut bucket, began) = (TokenBucket::new(256, 250), Instant::now());
        let at = |ms| began + Duration::from_millis(ms);
        let mut taken = |ms| (0..2000).take_while(|_| bucket.take(at(ms))).count();
        assert_eq!(taken(0), 256);
        assert_eq!(taken(3), 0);
        assert_eq!([4, 100, 1100].map(&mut taken), [1, 24, 250]);
        assert_eq!(taken(60_000), 256, "no more for having been away");
        assert_eq!(bucket.next_at(), Some(at(60_004)));
        assert!(!bucket.has_token(at(60_003)) && bucket.has_token(at(60_004)));
    }
}
