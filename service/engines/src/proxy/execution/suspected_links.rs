//! Communicators with a broken link, kept for a moment: the exchange may be about to tell why.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

/// How long the exchange may take to tell why a link has broken. Long enough for hosts that are busy: who is not told in time
/// blames a neighbour that has only passed the failure on.
const SUSPECT_TIME: Duration = Duration::from_secs(2);
/// The same where the peer has ended the link: it tells why when its own time is over.
const SUSPECT_TIME_OF_PEERS_END: Duration = Duration::from_secs(3);

/// See the module's documentation. In the order in which they fail.
#[derive(Default)]
pub(crate) struct SuspectedLinks(VecDeque<(Instant, Handle)>);

impl SuspectedLinks {
    /// A link of a communicator has broken, because its peer has ended it or otherwise.
    pub(crate) fn push(&mut self, comm: Handle, now: Instant, is_of_peers_end: bool) {
        let until = now + if is_of_peers_end { SUSPECT_TIME_OF_PEERS_END } else { SUSPECT_TIME };
        let place = self.0.partition_point(|(other, _)| *other <= until);
        self.0.insert(place, (until, comm));
    }

    /// The next that fails by now, if the exchange has told nothing better.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Handle> {
        self.0.pop_front_if(|(until, _)| *until <= now).map(|(_, comm)| comm)
    }

    /// When the next fails.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.0.front().map(|(until, _)| *until)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}
