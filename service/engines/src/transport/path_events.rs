//! Path events of a host (dead, alive again): told by transport engines, read by the controller's
//! agent.
//!
//! The last event of a peer and path is kept until it is read; flows of one path all find out the same. The lock is taken when
//! something has happened to a path, and by the reader.

use std::sync::{Mutex, OnceLock, PoisonError};

use mccs_exchange::protocol::Name;
use mccs_runtime::WakerSlot;
use mccs_transport::FlowPath;

/// Peers and paths of which something is kept; who loses more of them at once has lost its own link.
const EVENTS_MAX: usize = 1024;

/// The last that was found out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerPathEvent {
    /// The other host.
    pub peer: Name,
    /// Steering of packets over the path.
    pub path: FlowPath,
    /// Whether the host answers over it, after all; otherwise it has left packets unanswered.
    pub answers: bool,
}

/// See the module's documentation.
#[derive(Default)]
pub struct PathEventLog {
    events: Mutex<Vec<PeerPathEvent>>,
    reader: OnceLock<WakerSlot>,
}

impl PathEventLog {
    /// Sets the reader to wake when there is an event; the first counts. Before that nothing is kept.
    pub fn set_reader(&self, reader: WakerSlot) {
        let _ = self.reader.set(reader);
    }

    /// Something was found out.
    pub fn push(&self, event: PeerPathEvent) {
        let Some(reader) = self.reader.get() else { return };
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.retain(|before| (&before.peer, &before.path) != (&event.peer, &event.path));
        if events.len() < EVENTS_MAX {
            events.push(event);
        }
        drop(events);
        reader.wake();
    }

    /// All events since the last time.
    #[must_use]
    pub fn take(&self) -> Vec<PeerPathEvent> {
        std::mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_about_a_path_counts() {
        let events = PathEventLog::default();
        let event = |answers| PeerPathEvent { peer: Name::new("b").expect("name"), path: FlowPath::default(), answers };
        events.push(event(false));
        assert!(events.is_empty(), "nobody reads");
        events.set_reader(WakerSlot::default());
        let other = PeerPathEvent { peer: Name::new("c").expect("name"), ..event(false) };
        for said in [event(false), other.clone(), event(true)] {
            events.push(said);
        }
        assert_eq!(events.take(), [other, event(true)]);
        assert!(events.is_empty());
    }
}
