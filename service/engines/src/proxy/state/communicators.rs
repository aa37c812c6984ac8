//! Communicators of a proxy engine, found by handle, by number, and by the name that other hosts
//! use.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_exchange::protocol::CommId;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SessionId;
use mccs_model::handles::HandleTable;
use mccs_model::link::LinksId;
use mccs_tenants::session::Session;

use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::members::Member;
use crate::proxy::communicator::comm::Comm;

/// Communicators of a device; quotas keep tenants far below.
pub(crate) const COMMS_MAX: u32 = 1 << 20;

/// See the module's documentation.
pub(crate) struct Communicators {
    table: HandleTable<Comm>,
    by_links: HashMap<LinksId, Handle>,
    by_id: BTreeMap<CommId, Handle>,
}

impl Communicators {
    pub(crate) fn new() -> Self {
        Communicators { table: HandleTable::new(COMMS_MAX), by_links: HashMap::new(), by_id: BTreeMap::new() }
    }

    /// Number of held entries: 0 when all are over.
    pub(crate) fn held(&self) -> usize {
        self.table.len() + self.by_links.len() + self.by_id.len()
    }

    /// A communicator begins. It is given back where there are [`COMMS_MAX`].
    pub(crate) fn insert(&mut self, comm: Comm) -> Result<Handle, Box<Comm>> {
        let handle = self.table.insert(comm).map_err(Box::new)?;
        self.index(handle);
        Ok(handle)
    }

    fn index(&mut self, handle: Handle) {
        if let Some(span) = self.table.get(handle).and_then(|live| live.span.as_ref()) {
            self.by_links.insert(span.network.links, handle);
            self.by_id.insert(span.comm.clone(), handle);
        }
    }

    /// A communicator is over.
    pub(crate) fn remove(&mut self, handle: Handle) -> Option<Comm> {
        let comm = self.table.remove(handle)?;
        if let Some(span) = &comm.span {
            self.by_links.remove(&span.network.links);
            self.by_id.remove(&span.comm);
        }
        Some(comm)
    }

    pub(crate) fn get(&self, handle: Handle) -> Option<&Comm> {
        self.table.get(handle)
    }

    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut Comm> {
        self.table.get_mut(handle)
    }

    /// One that has not failed.
    pub(crate) fn sound_mut(&mut self, handle: Handle) -> Option<&mut Comm> {
        self.table.get_mut(handle).filter(|live| live.failure.is_none())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Handle, &Comm)> {
        self.table.iter()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (Handle, &mut Comm)> {
        self.table.iter_mut()
    }

    /// The one that operators call by a number.
    pub(crate) fn numbered(&self, number: u64) -> Option<Handle> {
        self.iter().find(|(_, live)| live.info.number == number).map(|(comm, _)| comm)
    }

    /// The one with these links.
    pub(crate) fn with_links(&self, links: LinksId) -> Option<Handle> {
        self.by_links.get(&links).copied()
    }

    /// The one that other hosts call so.
    pub(crate) fn called(&self, id: &CommId) -> Option<Handle> {
        self.by_id.get(id).copied()
    }

    /// Those with a rank on a GPU.
    pub(crate) fn on_gpu(&self, gpu: usize) -> Vec<Handle> {
        let is_there = |live: &Comm| live.members.iter().any(|member| member.gpu == Some(gpu));
        self.iter().filter(|(_, live)| is_there(live)).map(|(comm, _)| comm).collect()
    }

    /// Nothing could happen in any of them for so long.
    pub(crate) fn put_off(&mut self, by: Duration) {
        self.table.iter_mut().for_each(|(_, live)| live.put_off(by));
    }

    /// Those in which operations wait for other ranks, and since when nothing has happened there.
    pub(crate) fn waiting(&self) -> Vec<(Handle, Instant)> {
        self.iter().filter_map(|(comm, live)| Some((comm, live.waits_since()?))).collect()
    }

    /// A rank of one of them.
    pub(crate) fn member_mut(&mut self, comm: Handle, rank: u32) -> Option<&mut Member> {
        self.get_mut(comm)?.members.get_mut(rank)
    }

    /// A session, if it has a rank in one of them.
    pub(crate) fn session(&self, session: SessionId) -> Option<&Arc<Session>> {
        let members = self.table.iter().flat_map(|(_, live)| live.members.iter());
        members.map(|member| &member.session).find(|other| other.id == session)
    }

    /// Why operations of one fail.
    pub(crate) fn failure_of(&self, comm: Handle) -> Failure {
        let failure = self.get(comm).and_then(|comm| comm.failure.clone());
        failure.unwrap_or_else(|| Failure::new(ErrorClass::InvalidUsage, "the communicator has been destroyed"))
    }

    /// Makes a communicator of this host one of several.
    #[cfg(test)]
    pub(crate) fn set_span(&mut self, handle: Handle, span: crate::proxy::communicator::comm::Span) {
        self.table.get_mut(handle).expect("it lives").span = Some(Box::new(span));
        self.index(handle);
    }
}
