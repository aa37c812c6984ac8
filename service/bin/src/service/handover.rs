//! A running service is handed over to another program, or goes on with what one has handed over.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::time::Duration;

use mccs_engines::handover::{Resumed, counters};
use mccs_handover::{NotStill, Obstacles, State, WithDescriptors};
use mccs_tenants::regions::LeavingElsewhere;

use super::{Listening, Service, Tenants};
use crate::sockets::SocketAndLock;

/// The obstacle that keeps this process' service from being handed over, whatever its sessions do.
pub(crate) fn obstacle() -> Option<&'static str> {
    (std::process::id() == 1).then_some("the service is process 1 of its container, which would end with it")
}

impl Service {
    /// Sockets on which another program goes on listening.
    #[must_use]
    pub fn listening(&self) -> &Listening {
        &self.listening
    }

    /// From now on no tenant is added or taken away, unless the service [moves again](Service::move_again). Returns what another program goes on
    /// listening with besides.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn freeze_tenants(&self) -> std::io::Result<Vec<SocketAndLock>> {
        self.tenants.added.freeze()
    }

    /// Sessions that another program could not go on with. Nobody stands still for it.
    ///
    /// # Errors
    /// A session does not answer in time.
    pub fn ask(&self, within: Duration) -> Result<Obstacles, NotStill> {
        self.handover.ask(&|| self.session_ids(), &|| self.wake_sessions(), within)
    }

    /// Has all stand still, and takes what another program goes on with. On an error, and where the other program cannot go on, the service
    /// is to [move again](Service::move_again). `ends_sessions`: those that cannot be handed over end with the hand-over.
    ///
    /// # Errors
    /// A part cannot be handed over, or does not come to rest in time.
    pub fn stand_still(&self, within: Duration, ends_sessions: bool) -> Result<WithDescriptors<State>, NotStill> {
        let (ids, wake) = (|| self.session_ids(), || self.wake_sessions());
        let parts = self.handover.stand_still(&ids, &wake, within, ends_sessions)?;
        let sessions: BTreeMap<_, _> =
            self.registry.sessions().into_iter().map(|session| (session.id, session)).collect();
        let last_ended = |session, stream| sessions.get(&session).map_or(0, |session| session.last_ended(stream));
        let mut whole = parts.into_state(&last_ended);
        let going_on: BTreeSet<_> = whole.state.comms.iter().map(|comm| comm.number).collect();
        whole.state.counters = counters::hand_over(&self.registry, |number| going_on.contains(&number));
        let tenants = self.registry.tenants();
        let leaving = tenants.iter().map(|tenant| (tenant.name.clone(), tenant.leaving_bytes()));
        whole.state.leaving = leaving.filter(|(_, bytes)| *bytes > 0).collect();
        whole.state.last_number = self.registry.last_number();
        whole.state.draining = self.registry.is_draining().then(|| self.registry.draining_reason());
        Ok(whole)
    }

    /// Nobody has taken the service over: all do again what they are for.
    pub fn move_again(&self) {
        self.tenants.added.thaw();
        self.handover.go_on(&|| self.wake_sessions());
    }

    fn session_ids(&self) -> Vec<u64> {
        self.registry.sessions().iter().map(|session| session.id).collect()
    }

    fn wake_sessions(&self) {
        self.registry.sessions().iter().for_each(|session| session.waker.wake());
    }

    /// Makes sessions and communicators of what the program before has handed over. They do nothing yet. `ends_sessions`: those that this
    /// service's configuration has no room for end.
    ///
    /// # Errors
    /// Why the program before is to go on.
    pub fn take(&self, state: State, descriptors: Vec<OwnedFd>, ends_sessions: bool) -> Result<Resumed, String> {
        let Tenants { sessions, admissions, added } = &self.tenants;
        let all = admissions.clone().into_iter().chain(added.admissions()).collect();
        Resumed::new(state, descriptors, sessions, &all, ends_sessions)
    }

    /// The program before does nothing more: this one is the service. Nothing of this can fail. Returns memory that is charged until the program
    /// before has ended.
    pub fn go_on(&mut self, resumed: Resumed) -> Vec<LeavingElsewhere> {
        let leaving = resumed.go_on(&self.tenants.sessions, &self.proxy);
        self.handover.go_on(&|| self.wake_sessions());
        self.listening.retired.clear();
        leaving
    }

    /// Another program is the service. Returns when memory is gone that tenants have freed.
    pub fn give_memory_back(&self) {
        self.tenants.sessions.unmap_worker.wait_until_idle();
    }
}
