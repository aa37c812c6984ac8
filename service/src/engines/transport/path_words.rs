//! What the flows of a host have found out about paths: told by transport engines, read by the controller's agent.
//!
//! The last word about a peer and path is kept until it is read; flows of one path all find out the same. The lock is taken when
//! something has happened to a path, and by the reader.

use std::sync::{Mutex, OnceLock, PoisonError};

use crate::exchange::protocol::Name;
use crate::runtime::WakerSlot;
use crate::transports::FlowPath;

/// Peers and paths of which something is kept; who loses more of them at once has lost its own link.
const WORDS_MAX: usize = 1024;

/// The last that was found out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathWord {
    /// The other host.
    pub peer: Name,
    /// What steers packets over the path.
    pub path: FlowPath,
    /// Whether the host answers over it, after all; otherwise it has left packets unanswered.
    pub answers: bool,
}

/// See the module's documentation.
#[derive(Default)]
pub struct PathWords {
    words: Mutex<Vec<PathWord>>,
    reader: OnceLock<WakerSlot>,
}

impl PathWords {
    /// Whom to wake when there is a word; the first counts. Before that nothing is kept.
    pub fn set_reader(&self, reader: WakerSlot) {
        let _ = self.reader.set(reader);
    }

    /// Something was found out.
    pub fn say(&self, word: PathWord) {
        let Some(reader) = self.reader.get() else { return };
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        words.retain(|before| (&before.peer, &before.path) != (&word.peer, &word.path));
        if words.len() < WORDS_MAX {
            words.push(word);
        }
        drop(words);
        reader.wake();
    }

    /// All words since the last time.
    #[must_use]
    pub fn take(&self) -> Vec<PathWord> {
        std::mem::take(&mut *self.words.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_about_a_path_counts() {
        let words = PathWords::default();
        let word = |answers| PathWord { peer: Name::new("b").expect("name"), path: FlowPath::default(), answers };
        words.say(word(false));
        assert!(words.is_empty(), "nobody reads");
        words.set_reader(WakerSlot::default());
        let other = PathWord { peer: Name::new("c").expect("name"), ..word(false) };
        for said in [word(false), other.clone(), word(true)] {
            words.say(said);
        }
        assert_eq!(words.take(), [other, word(true)]);
        assert!(words.is_empty());
    }
}
