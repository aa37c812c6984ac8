//! Ids of sessions and communicators, and keys that hosts have in common.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;

use mccs_ipc::types::UniqueId;
use serde::{Deserialize, Serialize};

use crate::names::Name;

/// Number of a session, for the life of the service.
pub type SessionId = u64;

/// Names a communicator that is to be: tenants have separate name spaces, so none can join another's by guessing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommKey {
    /// The tenant's name, the same on all hosts.
    pub tenant: Name,
    /// The communicator's id.
    pub id: UniqueId,
}

impl CommKey {
    /// How many of these are the same tenant's. Takes no longer than there are of them.
    #[must_use]
    pub fn count_of_tenant<T>(&self, of: &BTreeMap<CommKey, T>) -> usize {
        let first = CommKey { tenant: self.tenant.clone(), id: UniqueId([0; 16]) };
        of.range(first..).take_while(|(other, _)| other.tenant == self.tenant).count()
    }
}

impl Ord for CommKey {
    fn cmp(&self, other: &Self) -> Ordering {
        (&self.tenant, self.id.0).cmp(&(&other.tenant, other.id.0))
    }
}

impl PartialOrd for CommKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Names a communicator once its root has closed the ring. Never used twice.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CommId {
    /// Host of the root.
    pub root: Name,
    /// Differs each time that the root's service starts.
    pub incarnation: u64,
    /// The root's count.
    pub number: u64,
}

impl fmt::Display for CommId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:x}/{}", self.root, self.incarnation, self.number)
    }
}
