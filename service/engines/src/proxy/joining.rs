//! Ranks that join (`ncclCommInitRank`), from the first that comes to a communicator that may
//! begin.
//!
//! ```text
//! one host:       join --> rendezvous --all there--> preparing, by the device --> NewComm
//! several hosts:  join --> setups (with the exchange) --------------------------> NewComm
//! ```

pub(super) mod admission;
pub(super) mod hosts;
pub(super) mod new_comm;
pub(super) mod rendezvous;
pub(super) mod setup;
pub(super) mod setups;
pub(super) mod transport_offer;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_device::{NewGroup, Prepare, Prepared};
use mccs_exchange::protocol::{CommId, CommKey, Event, Name};
use mccs_ipc::protocol::Role;
use mccs_ipc::types::{ErrorClass, Handle, UniqueId};
use mccs_model::gathering::GatheringKey;
use mccs_model::handles::HandleTable;
use mccs_model::{SessionId, SetupError};
use mccs_registry::Registry;
use mccs_registry::missing_ranks::LateTold;
use mccs_tenants::session::Opens;

use super::MakeSchedules;
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::operation::JoinRequest;
use crate::proxy::calls::resumed::ResumedComm;
use crate::proxy::joining::admission::{join_failed, of_two_families, refuse_all, shared_gpu};
use crate::proxy::joining::new_comm::NewComm;
use crate::proxy::joining::rendezvous::{Joined, Rendezvous};
use crate::proxy::joining::setups::{Cluster, Completed, Setups};
use crate::proxy::mail::message::SessionMessage;
use crate::proxy::mail::outlets::Outlets;
use crate::proxy::state::State;

/// Communicators of a device that are being prepared at a time.
const PREPARING_MAX: u32 = 1 << 16;

/// A communicator whose ranks are all there, while its device makes what they share.
struct Preparing {
    id: UniqueId,
    requests: Vec<JoinRequest>,
}

/// See the module's documentation.
pub(super) struct Joining {
    rendezvous: Rendezvous<JoinRequest>,
    /// Ranks that others wait for, for whoever watches.
    late: LateTold,
    preparing: HandleTable<Preparing>,
    /// Its relation to other hosts, if there are any.
    setups: Option<Setups>,
    make_schedules: MakeSchedules,
    /// Whether ranks of several processes are refused on one GPU.
    refuses_duplicate_gpus: bool,
}

impl Joining {
    /// Ranks wait for each other for `timeout`. `name` is the engine's.
    pub(super) fn new(
        name: String,
        timeout: Duration,
        make_schedules: MakeSchedules,
        cluster: Option<Cluster>,
    ) -> Self {
        let terms = make_schedules(1, &[]).terms();
        Joining {
            rendezvous: Rendezvous::new(timeout),
            late: LateTold::new(name),
            preparing: HandleTable::new(PREPARING_MAX),
            setups: cluster.map(|cluster| Setups::new(cluster, terms)),
            make_schedules,
            refuses_duplicate_gpus: false,
        }
    }

    pub(super) fn refuse_duplicate_gpus(&mut self, refuses: bool) {
        self.refuses_duplicate_gpus = refuses;
    }

    /// Number of held entries of communicators across hosts: 0 when none is being set up.
    pub(super) fn held(&self) -> usize {
        self.setups.as_ref().map_or(0, Setups::held)
    }

    /// Those across hosts, where there are other hosts.
    pub(super) fn setups(&mut self) -> Option<&mut Setups> {
        self.setups.as_mut()
    }

    /// A rank joins. Returns the communicator if it was the last, and nothing is to be prepared.
    pub(super) fn join(&mut self, out: &mut Outlets, request: JoinRequest, now: Instant) -> Option<NewComm> {
        // Whoever ended the whole has looked for joins that wait before this one came.
        if let Some((_, message)) = request.part.as_ref().and_then(|part| part.family.failure()) {
            let message = message.to_string();
            join_failed(request, ErrorClass::Remote, &message);
            return None;
        }
        if request.root.is_some() {
            self.join_across(out, request, now);
            return None;
        }
        let key = GatheringKey { tenant: request.session.tenant.name.clone(), id: request.id };
        let (rank, nranks, id, owner) = (request.rank, request.nranks, request.id, request.session.id);
        match self.rendezvous.join(key, rank, nranks, owner, request, now) {
            Joined::Waiting => None,
            Joined::Refused(refusal, members) => {
                refuse_all(&refusal, members);
                None
            }
            Joined::Complete(requests) => {
                match shared_gpu(&requests, self.refuses_duplicate_gpus).or_else(|| of_two_families(&requests)) {
                    Some(message) => {
                        refuse_all(&SetupError { class: ErrorClass::InvalidUsage, message }, requests);
                        None
                    }
                    None => self.complete_here(out, id, requests),
                }
            }
        }
    }

    /// A rank joins a communicator whose ranks may be on other hosts.
    fn join_across(&mut self, out: &mut Outlets, request: JoinRequest, now: Instant) {
        match (&mut self.setups, Name::new(&request.session.tenant.name)) {
            (Some(setups), Some(tenant)) => setups.join(out, request, tenant, now),
            _ => {
                let message = "this service joins ranks of its own host only: its configuration names no other hosts";
                join_failed(request, ErrorClass::InvalidUsage, message);
            }
        }
    }

    /// The exchange tells of a communicator that is being set up, and not complete.
    pub(super) fn setup_event(&mut self, out: &mut Outlets, event: Event) {
        let Some(setups) = &mut self.setups else { return };
        match event {
            Event::JoinRefused { key, rank, failure } => setups.join_refused(out, &key, rank, &failure),
            Event::SetupFailed { key, failure } => setups.fail(out, &key, failure.class, failure.message.as_str()),
            Event::Gathered { membership, payloads } => {
                setups.gathered(out, membership, &payloads, self.refuses_duplicate_gpus);
            }
            _ => {}
        }
    }

    /// A communicator across hosts is complete. It begins, or its ranks turn out to be all here.
    pub(super) fn complete(&mut self, out: &mut Outlets, key: &CommKey, comm: CommId, now: Instant) -> Option<NewComm> {
        match self.setups.as_mut()?.complete(out, key, comm, now)? {
            Completed::Here(requests) => self.complete_here(out, key.id, requests),
            Completed::Across(comm) => Some(*comm),
        }
    }

    /// All ranks of a communicator of this host alone are there, ascending.
    fn complete_here(&mut self, out: &mut Outlets, id: UniqueId, requests: Vec<JoinRequest>) -> Option<NewComm> {
        if !out.other.takes(&requests) {
            return self.prepare(out, id, requests);
        }
        for request in requests {
            out.other.send(SessionMessage::Join(Box::new(JoinRequest { root: None, ..request })));
        }
        None
    }

    fn prepare(&mut self, out: &mut Outlets, id: UniqueId, requests: Vec<JoinRequest>) -> Option<NewComm> {
        let gpus: Vec<_> = requests.iter().map(|request| request.gpu).collect();
        let charges: Vec<_> = requests.iter().map(|request| Arc::clone(&request.charge)).collect();
        let opens = opens_of(&requests);
        let meets_on_host = requests.iter().any(|request| matches!(request.role, Role::Pinned { .. }));
        let key = match self.preparing.insert(Preparing { id, requests }) {
            Ok(key) => key,
            Err(Preparing { requests, .. }) => {
                let message = format!("the service prepares {PREPARING_MAX} communicators, the most it can");
                refuse_all(&SetupError { class: ErrorClass::System, message }, requests);
                return None;
            }
        };
        let group = NewGroup { gpus: &gpus, charges: &charges, opens, meets_on_host };
        match out.device.prepare(&group, key) {
            Prepare::Ready(prepared) => self.prepared(key, Ok(prepared)),
            Prepare::Begun => None,
        }
    }

    /// The device has prepared, or cannot. A key that is not known any more is of ranks that have gone.
    pub(super) fn prepared(&mut self, key: Handle, prepared: Result<Prepared, SetupError>) -> Option<NewComm> {
        let Preparing { id, requests } = self.preparing.remove(key)?;
        match prepared {
            Ok(prepared) => Some(NewComm::here(id, requests, prepared)),
            Err(refusal) => {
                refuse_all(&refusal, requests);
                None
            }
        }
    }

    /// Goes on with a communicator of the program before.
    pub(super) fn resume(&self, state: &mut State, comm: ResumedComm) {
        new_comm::resume(comm, state, &self.make_schedules);
    }

    /// Begins a communicator. Returns whether its ranks run collectives on GPUs themselves.
    pub(super) fn begin(&self, state: &mut State, new: NewComm) -> bool {
        new.begin(state, &self.make_schedules)
    }

    /// A session has ended: communicators that it was to be in are not to be.
    pub(super) fn close_session(&mut self, out: &mut Outlets, session: SessionId) {
        for (refusal, members) in self.rendezvous.leave(session) {
            refuse_all(&refusal, members);
        }
        if let Some(setups) = &mut self.setups {
            setups.withdraw(out, session);
        }
        let of_session = |preparing: &Preparing| preparing.requests.iter().any(|request| request.session.id == session);
        let hit: Vec<_> =
            self.preparing.iter().filter(|(_, preparing)| of_session(preparing)).map(|(key, _)| key).collect();
        for Preparing { id, requests } in hit.into_iter().filter_map(|key| self.preparing.remove(key)) {
            let (gone, others): (Vec<_>, _) = requests.into_iter().partition(|request| request.session.id == session);
            let rank = gone.first().map_or(0, |request| request.rank);
            let message = format!("rank {rank} left while communicator {id} was being set up");
            refuse_all(&SetupError { class: ErrorClass::Remote, message }, others);
        }
    }

    /// A whole has failed: ranks that are joining parts of it are refused.
    pub(super) fn end_whole(&mut self, out: &mut Outlets, whole: u64, failure: &Failure) {
        let is_of = |request: &JoinRequest| request.part.as_ref().is_some_and(|part| part.whole == whole);
        let refusal = SetupError { class: ErrorClass::Remote, message: failure.message.to_string() };
        for members in self.rendezvous.end_with(is_of) {
            refuse_all(&refusal, members);
        }
        if let Some(setups) = &mut self.setups {
            setups.withdraw_part(out, whole, failure);
        }
    }

    /// Refuses ranks that have waited for others for too long, and tells who watches of those that are late.
    pub(super) fn expire(&mut self, registry: &Registry, now: Instant) {
        for (refusal, members) in self.rendezvous.expire(now) {
            refuse_all(&refusal, members);
        }
        self.late.tell(registry, self.rendezvous.late_changes(), || self.rendezvous.late(), now);
    }

    /// The service has stood still for so long.
    pub(super) fn put_off(&mut self, by: Duration) {
        self.rendezvous.put_off(by);
    }

    /// When to [look](Joining::expire) again.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.rendezvous.next_deadline()
    }
}

/// Kinds of memory that all its ranks can open.
fn opens_of(requests: &[JoinRequest]) -> Opens {
    let of_each = requests.iter().map(|request| request.session.opens());
    let pids: Vec<_> = requests.iter().map(|request| request.session.peer.pid).collect();
    let are_apart = pids.iter().enumerate().all(|(rank, pid)| !pids[..rank].contains(pid));
    Opens {
        apart: of_each.clone().all(|opens| opens.apart) && are_apart,
        memory: of_each.clone().all(|opens| opens.memory),
        events: of_each.clone().all(|opens| opens.events),
    }
}
