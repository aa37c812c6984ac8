//! Whether a link's path lives: a link over which nothing is answered is made anew soon, on a path that the network's hash finds for
//! another port. The host behind it has longer, since it may be well.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::answers::{answers, unacknowledged};

/// How often links are looked at while something is owed.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A path is dead when so many looks have found no answer.
const LOOKS: u32 = 6;

/// What a look has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing is owed.
    Nothing,
    /// Something is, and may come.
    Owed,
    /// Nothing has come for too long.
    Dead,
}

/// For how long a link has brought no answer.
#[derive(Debug, Default)]
pub(super) struct Silence {
    looks: u32,
    looked_at: Option<Instant>,
}

impl Silence {
    /// Looks at a connection's socket.
    pub(super) fn look(&mut self, stream: &TcpStream, is_connecting: bool, now: Instant) -> Found {
        let since_look = self.looked_at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        if is_connecting {
            // Whether it is asked a second time is not told.
            self.looks += 1;
            return if self.looks > LOOKS { Found::Dead } else { Found::Owed };
        }
        if unacknowledged(stream).is_none_or(|bytes| bytes == 0) {
            self.looks = 0;
            return Found::Nothing;
        }
        let Some(answers) = answers(stream).filter(|answers| answers.last > since_look) else {
            self.looks = 0;
            return Found::Owed;
        };
        self.looks += 1;
        if self.looks > LOOKS && answers.is_owed { Found::Dead } else { Found::Owed }
    }
}
