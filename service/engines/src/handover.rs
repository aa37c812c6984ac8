//! State that another program has handed over, as sessions and communicators of this one. A session that cannot go on ends
//! alone, with a reason.

pub mod counters;
mod standing;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use mccs_handover::{CommState, EndedSession, ServiceCounters, State};
use mccs_ipc::handshake::Socket;
use mccs_ipc::protocol::{Response, ResponseEnvelope};
use mccs_ipc::shm::give_back;
use mccs_ipc::types::{ErrorClass, UniqueId};
use mccs_runtime::Sender;
use mccs_tenants::regions::LeavingElsewhere;

pub use self::standing::{Reaches, Standing};
use crate::proxy::{ProxyMessage, ResumedComm, ResumedMember};
use crate::session::{Admission, NotResumed, ResumedSession, SessionFactory};

/// Sessions and communicators that can go on.
pub struct Resumed {
    last_number: u64,
    draining: Option<Option<String>>,
    counters: ServiceCounters,
    leaving: Vec<LeavingElsewhere>,
    sessions: Vec<ResumedSession>,
    ended: Vec<Ended>,
    comms: Vec<ResumedComm>,
    connections: Vec<(Admission, OwnedFd)>,
}

/// A session that does not go on.
struct Ended {
    state: EndedSession,
    socket: OwnedFd,
    /// Pages of the service's, which its process may have mapped.
    memory: Vec<OwnedFd>,
}

impl Ended {
    /// With the first descriptor of a session, and those of memory behind it.
    fn new(state: EndedSession, mut descriptors: impl Iterator<Item = OwnedFd>) -> Option<Self> {
        Some(Ended { state, socket: descriptors.next()?, memory: descriptors.collect() })
    }

    /// Tells its tenant, and takes the memory back.
    fn end(self) {
        let Ended { state: EndedSession { id, tenant, reason, .. }, socket, memory } = self;
        tracing::warn!(session = id, tenant, reason, "a session of the program before ends");
        let message =
            format!("the service ended this session: its next program cannot go on with it, since it {reason}");
        let response = Response::Error { class: ErrorClass::System, message };
        // A process that does not read it sees the end of the connection.
        let _ = Socket::from_fd(socket).send(&ResponseEnvelope { id: 0, response }, &[]);
        memory.iter().for_each(give_back);
    }
}

impl Resumed {
    /// Makes them of a state. Nothing of it is changed yet. `ends_sessions`: also those end that the configuration alone has no room for.
    ///
    /// # Errors
    /// Why this program is not to go on.
    pub fn new(
        mut state: State,
        descriptors: Vec<OwnedFd>,
        factory: &SessionFactory,
        admissions: &BTreeMap<String, Admission>,
        ends_sessions: bool,
    ) -> Result<Self, String> {
        let mut descriptors = descriptors.into_iter();
        let admission = |tenant: &String| {
            let gone = || format!("service.toml names no tenant {tenant}, of whom processes are connected");
            admissions.get(tenant).ok_or_else(gone)
        };
        let ids: BTreeMap<u64, UniqueId> = state.comms.iter().map(|comm| (comm.number, comm.id)).collect();
        let (mut sessions, mut ended) = (BTreeMap::new(), Vec::new());
        for session in std::mem::take(&mut state.sessions) {
            let (id, tenant) = (session.id, session.tenant.clone());
            let own: Vec<_> = descriptors.by_ref().take(session.descriptors()).collect();
            let kept: Vec<_> = own.iter().take(2).filter_map(|fd| fd.try_clone().ok()).collect();
            let resumed = admission(&tenant)
                .map_err(NotResumed::Configuration)
                .and_then(|admission| factory.resume(session, own, admission, &ids));
            let reason = match resumed {
                Ok(resumed) => {
                    sessions.insert(id, resumed);
                    continue;
                }
                Err(NotResumed::Configuration(why)) if !ends_sessions => {
                    return Err(format!("session {id} of tenant {tenant} cannot go on: {why}"));
                }
                Err(NotResumed::Configuration(why) | NotResumed::Session(why)) => format!("cannot go on: {why}"),
            };
            ended.extend(Ended::new(EndedSession { id, tenant, reason, memory: 1 }, kept.into_iter()));
        }
        for session in std::mem::take(&mut state.ended) {
            let own = session.descriptors();
            ended.extend(Ended::new(session, descriptors.by_ref().take(own)));
        }
        let mut connections = Vec::new();
        for tenant in &state.connections {
            let socket = descriptors.next().ok_or("a connection has no descriptor")?;
            match admission(tenant) {
                Ok(admission) => connections.push((admission.clone(), socket)),
                // It has asked for nothing yet, and sees its connection end.
                Err(_) if ends_sessions => {}
                Err(why) => return Err(why),
            }
        }
        let mut comms = Vec::new();
        for mut comm in std::mem::take(&mut state.comms) {
            let number = comm.number;
            let exchange = comm.shm_exchange.and_then(|_| descriptors.next());
            if !comm.lose(|session| sessions.contains_key(&session)) {
                continue;
            }
            let resumed = resume_comm(comm, exchange, &sessions);
            comms.push(resumed.map_err(|why| format!("communicator {number} cannot go on: {why}"))?);
        }
        // Sessions that go on come first.
        let leaving = state.leaving.iter().filter_map(|(tenant, bytes)| {
            Some(LeavingElsewhere::new(Arc::clone(&admissions.get(tenant)?.tenant), *bytes))
        });
        let leaving = leaving.collect();
        let State { last_number, draining, counters, .. } = state;
        let sessions = sessions.into_values().collect();
        Ok(Resumed { last_number, draining, counters, leaving, sessions, ended, comms, connections })
    }

    /// How many sessions go on, how many end, and how many communicators go on.
    #[must_use]
    pub fn counts(&self) -> (u64, u64, u64) {
        (self.sessions.len() as u64, self.ended.len() as u64, self.comms.len() as u64)
    }

    /// All go on. From here on they are this program's. Returns memory that is charged until the program before has ended.
    pub fn go_on(self, factory: &SessionFactory, proxy: &Sender<ProxyMessage>) -> Vec<LeavingElsewhere> {
        let Resumed { last_number, draining, counters, leaving, sessions, ended, comms, connections } = self;
        counters::resume(&factory.registry, counters);
        factory.registry.resume_numbers(last_number);
        if let Some(reason) = draining {
            factory.registry.set_draining(true, reason);
        }
        // The mailbox is empty: nothing has run here yet.
        let _ = proxy.send(ProxyMessage::Resume(comms));
        sessions.into_iter().for_each(|session| factory.go_on(session));
        ended.into_iter().for_each(Ended::end);
        for (admission, socket) in connections {
            if let Err(error) = factory.connect(socket, &admission) {
                tracing::warn!(%error, "a connection of the program before cannot go on");
            }
        }
        leaving
    }
}

fn resume_comm(
    state: CommState,
    exchange: Option<OwnedFd>,
    sessions: &BTreeMap<u64, ResumedSession>,
) -> Result<ResumedComm, String> {
    let mut members = Vec::new();
    for member in &state.members {
        let Some(id) = member.session else {
            members.push(None);
            continue;
        };
        let session = sessions.get(&id).ok_or("a session is missing")?;
        let charge = session.charge_of(member.comm).ok_or("a rank is missing")?;
        let (session, reply) = (Arc::clone(session.session()), session.reply());
        members.push(Some(ResumedMember { session, charge, reply }));
    }
    ResumedComm::new(state, members, exchange)
}
