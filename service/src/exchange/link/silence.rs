//! Whether a link's path lives: a link over which nothing is answered is made anew soon, on a path that the network's hash finds for
//! another port. The host behind it has longer, since it may be well. Before that there is doubt, in which another path is looked for
//! while the link is still there: the network's control goes over links, and waits for them when a path has died.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::answers::{answers, unacknowledged};

/// How often links are looked at while something is owed.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A path is in doubt when more looks than this have found no answer: twice as long as acknowledgements are usually delayed.
const DOUBTFUL_LOOKS: u32 = 2;
/// A path is dead when more looks than this have found no answer.
const LOOKS: u32 = 6;
/// An attempt to connect has so many at first.
const CONNECTING_LOOKS: u32 = 3;

/// What a look has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing is owed.
    Nothing,
    /// Something is, and may come.
    Owed,
    /// Something is, and should have come.
    Doubtful,
    /// Nothing has come for too long.
    Dead,
}

/// For how long a link has brought no answer.
#[derive(Debug)]
pub(super) struct Silence {
    /// Looks until an attempt to connect is given up.
    connecting_looks: u32,
    looks: u32,
    looked_at: Option<Instant>,
}

impl Silence {
    /// Of a link to a host that so many attempts have not reached: the first ones are short, since another may find another path.
    pub(super) fn after(failures: u32) -> Self {
        Silence { connecting_looks: CONNECTING_LOOKS << (failures / 2).min(6), looks: 0, looked_at: None }
    }

    /// Looks at a connection's socket.
    pub(super) fn look(&mut self, stream: &TcpStream, is_connecting: bool, now: Instant) -> Found {
        let since_look = self.looked_at.replace(now).map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        if is_connecting {
            // Whether it is asked a second time is not told.
            self.looks += 1;
            return if self.looks > self.connecting_looks { Found::Dead } else { Found::Owed };
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
        match self.looks {
            looks if looks > LOOKS && answers.is_owed => Found::Dead,
            looks if looks > DOUBTFUL_LOOKS => Found::Doubtful,
            _ => Found::Owed,
        }
    }
}
