//! Requests of a tenant that are read, and not served yet: those behind commands, those for memory that is leaving, and the tenant's rate.
//!
//! A request that ends something waits for the commands that were in the ring before it. The socket would overtake these otherwise.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use mccs_ipc::port_channels::PortChannelRequest;
use mccs_ipc::protocol::{Request, RequestEnvelope};
use mccs_registry::Registry;
use mccs_tenants::session::Session;
use mccs_tenants::{Resource, Tenant};

use super::tables::{Deferred, Fifos, TriggersBefore};

/// Most requests that wait for commands before them; the rest waits in the socket. Covers a tenant that lets go of all it
/// has at once.
const PARKED_MAX: usize = 4096;
/// A session whose tenant has made too many requests looks again after a pause, in proportion to the tenant's sessions: there are enough tokens for
/// all of them by then, and looks cost nobody much.
const PAUSE_OF_A_SESSION: Duration = Duration::from_millis(4);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A request that waits for what the tenant has written before it.
struct Parked {
    /// Commands to be taken first.
    commands: u64,
    triggers: Vec<TriggersBefore>,
    envelope: RequestEnvelope,
}

/// The request whose turn is next.
pub(super) enum Due {
    Now(RequestEnvelope),
    /// Once an engine has told of its stream.
    InAMoment,
    /// Not before something else happens, or there is none.
    Later,
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Requests {
    /// In order.
    parked: VecDeque<Parked>,
    deferred: Option<Deferred>,
    /// Until when no request is read, because the tenant makes too many.
    paused_until: Option<Instant>,
}

impl Requests {
    /// Those that another program has read, each behind so many commands.
    pub(super) fn resumed(parked: impl IntoIterator<Item = (u64, RequestEnvelope)>) -> Self {
        let parked = parked.into_iter();
        let parked = parked.map(|(commands, envelope)| Parked { commands, triggers: Vec::new(), envelope }).collect();
        Requests { parked, ..Requests::default() }
    }

    /// Requests that wait, each for so many commands of the ring to be taken first, behind the `taken` ones and those that another program had
    /// taken.
    pub(super) fn hand_over(&self, taken: u64) -> Vec<(u64, RequestEnvelope)> {
        let left = |parked: &Parked| (parked.commands.saturating_sub(taken), parked.envelope.clone());
        self.parked.iter().map(left).collect()
    }

    /// Whether the tenant has made more than its rate, and others are here: then no request is read for a while.
    pub(super) fn pauses(&mut self, tenant: &Tenant, registry: &Registry, now: Instant) -> bool {
        if self.paused_until.is_none() && !tenant.may_request(now) && registry.has_others(tenant) {
            let sessions = tenant.used(Resource::Sessions).max(1) as u32;
            self.paused_until = Some(now + (PAUSE_OF_A_SESSION * sessions).min(PAUSE_MAX));
        }
        self.paused_until.is_some()
    }

    /// Ends a pause that is over.
    pub(super) fn look_at_clock(&mut self, now: Instant) {
        self.paused_until.take_if(|until| *until <= now);
    }

    /// When the pause ends, if there is one.
    pub(super) fn paused_until(&self) -> Option<Instant> {
        self.paused_until
    }

    /// Whether so many requests wait for commands before them that no more are read.
    pub(super) fn are_crowded(&self) -> bool {
        self.parked.len() >= PARKED_MAX
    }

    /// Whether no request is read for now.
    pub(super) fn hold_others(&self) -> bool {
        self.are_crowded() || self.deferred.is_some() || self.paused_until.is_some()
    }

    /// Whether a request waits for commands before it, because it ends what they may name.
    pub(super) fn must_park(request: &Request) -> bool {
        matches!(
            request,
            Request::FreeMemory { .. }
                | Request::FreeGpuMemory { .. }
                | Request::DestroyStream { .. }
                | Request::DestroyComm { .. }
                | Request::PortChannel {
                    request: PortChannelRequest::Free { .. } | PortChannelRequest::CloseChannel { .. },
                    ..
                }
        )
    }

    /// Keeps a request until so many commands have been taken, and the triggers that are there now. It needs no descriptors then.
    pub(super) fn park(&mut self, envelope: RequestEnvelope, commands: u64, fifos: &Fifos) {
        let triggers = fifos.triggers_before(&envelope.request);
        self.parked.push_back(Parked { commands, triggers, envelope });
    }

    /// The next request that was parked, if its turn has come: so many commands have been taken.
    pub(super) fn take_parked(&mut self, popped: u64, fifos: &Fifos, session: &Session) -> Due {
        let is_due = |of: &&mut Parked| of.commands <= popped && fifos.are_taken(&of.triggers);
        let Some(next) = self.parked.front_mut().filter(is_due) else { return Due::Later };
        if let Request::DestroyStream { stream } = next.envelope.request
            && session.is_telling(stream.index)
        {
            return Due::InAMoment;
        }
        self.parked.pop_front().map_or(Due::Later, |parked| Due::Now(parked.envelope))
    }

    /// Keeps a request for memory, which is asked again.
    pub(super) fn defer(&mut self, deferred: Deferred) {
        self.deferred = Some(deferred);
    }

    /// Whether a request for memory is to be asked again. No other is read meanwhile.
    pub(super) fn has_deferred(&self) -> bool {
        self.deferred.is_some()
    }

    /// A request for memory that is to be asked again.
    pub(super) fn take_deferred(&mut self) -> Option<Deferred> {
        self.deferred.take()
    }
}
