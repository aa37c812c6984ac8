//! The store of what a cluster has in common: keys with revisions, transactions that compare and
//! set, leases, and watches.
//!
//! | store | for |
//! | --- | --- |
//! | [`EtcdStore`] | clusters: etcd v3, over its JSON gateway (HTTP/1.1, TLS) |
//! | [`FolderStore`] | services of one machine: a folder that they share |
//!
//! [`election`] finds one holder of an office among those that campaign, by a lease.
//!
//! One conformance suite (`conformance`) runs against both. Calls block, each for a bounded time: they are made by threads of
//! their own, never by an engine.
//!
//! Invariants: a revision names one state of all keys and only grows; a transaction is done as a whole or not at all; a key that
//! was put with a lease is gone once the lease is.
//!
//! Imports plain crates alone. Deliberately absent: what keys mean (the controller's), retries of transactions whose outcome is
//! unknown (only who wrote them can tell from what is there), and caches.

#[cfg(test)]
mod conformance;
pub mod election;
mod etcd;
mod folder;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use etcd::{EtcdSettings, EtcdStore};
pub use folder::FolderStore;

/// A state of all keys of a store. Later states have greater ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Revision(pub u64);

/// A lease of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

/// Bytes of a value, at most. A transaction of etcd has 1.5 MiB.
pub const VALUE_BYTES_MAX: usize = 1 << 20;

/// A key that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Below the cluster's prefix.
    pub key: String,
    /// Its quotas.
    pub value: Vec<u8>,
    /// When it came to be.
    pub created: Revision,
    /// When it was put last.
    pub modified: Revision,
    /// The lease with which it goes.
    pub lease: Option<LeaseId>,
}

/// Keys as they are at a revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The store's revision.
    pub revision: Revision,
    /// In the order of their keys.
    pub entries: Vec<Entry>,
}

impl Snapshot {
    /// The entry of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.key == key)
    }
}

/// Which keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keys<'a> {
    /// This one.
    Only(&'a str),
    /// All that begin so; with an empty text, all.
    Under(&'a str),
}

/// Condition for a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guard {
    /// There is no such key.
    Absent(String),
    /// The key is there, the same since it came to be at that revision.
    Created(String, Revision),
    /// The key was put last at that revision.
    Modified(String, Revision),
}

/// Write of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Puts a key.
    Put {
        /// Which.
        key: String,
        /// At most [`VALUE_BYTES_MAX`].
        value: Vec<u8>,
        /// The key goes with it.
        lease: Option<LeaseId>,
    },
    /// Removes a key, if it is there.
    Delete {
        /// Which.
        key: String,
    },
}

impl Write {
    /// Which key it puts or removes.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Write::Put { key, .. } | Write::Delete { key } => key,
        }
    }
}

/// Writes that are done as one if all guards hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transaction {
    /// All must hold.
    pub guards: Vec<Guard>,
    /// In order; each key once.
    pub writes: Vec<Write>,
}

/// The result of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All writes were done, at this revision.
    Done(Revision),
    /// A guard did not hold: nothing was done.
    Conflict,
}

/// A key that was put or has gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Which.
    pub key: String,
    /// As it is; `None` where it has gone.
    pub entry: Option<Entry>,
}

/// Why a call has failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Nobody answers in time, or who answers has no leader. The same call may succeed later.
    #[error("the store cannot be reached: {0}")]
    Unavailable(String),
    /// A transaction was sent, and nobody has said what became of it.
    #[error("the store may have done it or not: {0}")]
    Unknown(String),
    /// There is no room for what is to be written. Present keys can be read.
    #[error("the store is full: {0}")]
    Full(String),
    /// The store does not let this service do that: credentials, rights or certificates. The operator's fault.
    #[error("the store refuses: {0}")]
    Refused(String),
    /// The store's answer makes no sense.
    #[error("the store's answer cannot be used: {0}")]
    Invalid(String),
}

/// Why a watch has ended. A watcher reads all anew, and watches from there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WatchError {
    /// Changes were forgotten before they were told.
    #[error("the store has forgotten changes that were not told yet")]
    Compacted,
    /// The connection has ended, or the store refuses.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A store. Each call blocks for a bounded time.
pub trait Store: Send {
    /// Keys as they are now: no earlier than any transaction that has ended before the call.
    ///
    /// # Errors
    /// [`StoreError`].
    fn read(&mut self, keys: Keys<'_>) -> Result<Snapshot, StoreError>;

    /// Does a transaction.
    ///
    /// # Errors
    /// [`StoreError::Unknown`] where it may have been done.
    fn commit(&mut self, transaction: &Transaction) -> Result<Outcome, StoreError>;

    /// A lease that ends no earlier than `ttl` after this call was made, unless it is revoked. Whole seconds, rounded up.
    ///
    /// # Errors
    /// [`StoreError`].
    fn grant(&mut self, ttl: Duration) -> Result<LeaseId, StoreError>;

    /// Has a lease end no earlier than the time that is returned, counted from when this call was made. `None`: it has ended.
    ///
    /// # Errors
    /// [`StoreError`].
    fn keep_alive(&mut self, lease: LeaseId) -> Result<Option<Duration>, StoreError>;

    /// Ends a lease, with its keys. One that has ended already is no error.
    ///
    /// # Errors
    /// [`StoreError`].
    fn revoke(&mut self, lease: LeaseId) -> Result<(), StoreError>;

    /// Watches all keys, for changes after a revision.
    ///
    /// # Errors
    /// [`StoreError`].
    fn watch(&mut self, after: Revision) -> Result<Box<dyn Watch>, StoreError>;
}

/// Changes of a store's keys.
pub trait Watch: Send {
    /// The next changes, each key once, in order; none where there was none for `timeout`.
    ///
    /// # Errors
    /// [`WatchError`]: the watch has ended.
    fn next(&mut self, timeout: Duration) -> Result<Vec<Change>, WatchError>;
}
