//! Which cluster a store's keys are of, so that two clusters never decide for each other.
//!
//! The first service writes a record: an id, the hosts, and who signs their certificates. Another cluster's services have other
//! certificates, or other hosts, and are refused. A cluster that grows, or renews its authority as the pages say, changes the record.

use std::path::Path;
use std::time::Duration;

use mccs_exchange::protocol::Name;
use mccs_ipc::hex;
use mccs_store::election::{Holder, Office};
use mccs_store::{Entry, Guard, Keys, Outcome, Revision, Store, StoreError, Transaction, Write};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};

use super::unix_time;

/// The record's key.
const KEY: &str = "cluster";
/// Format that this release writes, and reads.
const FORMAT: u32 = 1;

/// The record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    format: u32,
    /// Random.
    id: String,
    hosts: Vec<String>,
    /// SHA-256 of the authorities' certificates.
    authorities: Vec<String>,
    /// Above all terms before: a term is this and the revision at which its office came to be. In nanoseconds since 1970, as lives of
    /// controllers are that no store elects.
    base: u64,
}

/// A cluster as one of its services knows it.
pub(super) struct Identity {
    pub(super) own: Name,
    hosts: Vec<String>,
    authorities: Vec<String>,
    prefix: String,
    /// Once it was read.
    id: Option<String>,
    /// As it was read last.
    base: u64,
}

impl Identity {
    /// Identity of a service whose hosts have certificates of an authority in that file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn new(own: &Name, hosts: &[Name], authority: &Path, prefix: &str) -> Result<Self, String> {
        let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", authority.display());
        let read = CertificateDer::pem_file_iter(authority).map_err(|error| wrong(&error))?;
        let authorities: Result<Vec<_>, _> = read.map(|one| one.map(|one| fingerprint(&one))).collect();
        Ok(Identity {
            own: own.clone(),
            hosts: hosts.iter().map(ToString::to_string).collect(),
            authorities: authorities.map_err(|error| wrong(&error))?,
            prefix: prefix.to_owned(),
            id: None,
            base: 0,
        })
    }

    /// The number of the term whose office came to be then.
    pub(super) fn number(&self, created: Revision) -> u64 {
        self.base.saturating_add(created.0)
    }

    /// A holder, by the number of its term.
    pub(super) fn numbered(&self, holder: Holder) -> Holder {
        let number = |created| Revision(self.number(created));
        match holder {
            Holder::Own(office) => Holder::Own(Office { term: number(office.term), ..office }),
            Holder::Other { name, term } => Holder::Other { name, term: number(term) },
            Holder::Nobody => Holder::Nobody,
        }
    }

    /// Whether terms were begun anew so short a time ago, by this host's clock.
    pub(super) fn is_younger_than(&self, time: Duration) -> bool {
        unix_time().checked_sub(Duration::from_nanos(self.base)).is_some_and(|age| age < time)
    }

    /// Has terms begin anew, above that one.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(super) fn rise_above(&mut self, term: u64, store: &mut dyn Store) -> Result<(), StoreError> {
        // Times are far below: it is none that a store or a clock has given.
        if term > TERM_MAX {
            return Err(StoreError::Invalid(format!("a host knows of term {term}, which cannot be")));
        }
        loop {
            let snapshot = store.read(Keys::Only(KEY))?;
            let Some(entry) = snapshot.get(KEY) else { return self.check(store) };
            let Ok(mut record) = serde_json::from_slice::<Record>(&entry.value) else { return self.check(store) };
            if record.base > term {
                return Ok(());
            }
            record.base = (term + 1).max(now_ns());
            if self.put(&record, Guard::Modified(KEY.to_owned(), entry.modified), store)? {
                return Ok(());
            }
        }
    }

    /// Sees that the store's keys are of this cluster. Writes that they are where they are of none.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: they are of another one, and which.
    pub(super) fn check(&mut self, store: &mut dyn Store) -> Result<(), StoreError> {
        // All services of a new cluster write it at once, and one is first.
        while !self.is_written(store)? {}
        Ok(())
    }

    /// Writes the record if it has to be. Returns whether it is there; if not, somebody else has just written.
    fn is_written(&mut self, store: &mut dyn Store) -> Result<bool, StoreError> {
        let snapshot = store.read(Keys::Only(KEY))?;
        let (guard, record) = match snapshot.get(KEY) {
            None => {
                let id = self.id.clone().unwrap_or_else(random_id);
                let (hosts, authorities) = (self.hosts.clone(), self.authorities.clone());
                let base = now_ns().max(self.base);
                (Guard::Absent(KEY.to_owned()), Record { format: FORMAT, id, hosts, authorities, base })
            }
            Some(entry) => match self.next(entry)? {
                None => return Ok(true),
                Some(next) => (Guard::Modified(KEY.to_owned(), entry.modified), next),
            },
        };
        self.put(&record, guard, store)
    }

    /// Writes the record. Returns whether nobody else has, since.
    fn put(&mut self, record: &Record, guard: Guard, store: &mut dyn Store) -> Result<bool, StoreError> {
        let value = serde_json::to_vec(record).map_err(|error| StoreError::Invalid(error.to_string()))?;
        let writes = vec![Write::Put { key: KEY.to_owned(), value, lease: None }];
        match store.commit(&Transaction { guards: vec![guard], writes })? {
            Outcome::Done(_) => {
                (self.id, self.base) = (Some(record.id.clone()), record.base);
                Ok(true)
            }
            Outcome::Conflict => Ok(false),
        }
    }

    /// The next record, if it is this cluster's and says less than is known.
    fn next(&mut self, entry: &Entry) -> Result<Option<Record>, StoreError> {
        let refused = |reason: String| {
            let prefix = &self.prefix;
            Err(StoreError::Refused(format!("{prefix}{KEY}: {reason}")))
        };
        let Ok(record) = serde_json::from_slice::<Record>(&entry.value) else {
            return refused(
                "it was not written by a service of this release; give the cluster another store.cluster".into(),
            );
        };
        let Record { format, id, hosts, authorities, base } = record;
        if format != FORMAT {
            return refused(format!("it has format {format}, and this release reads {FORMAT}"));
        }
        if let Some(known) = self.id.as_ref().filter(|known| **known != id) {
            return refused(format!(
                "the keys are of cluster {id} now, and were of {known}; restart the service if that is meant"
            ));
        }
        let another = "give each cluster a store.cluster of its own";
        if !self.authorities.iter().any(|own| authorities.contains(own)) {
            return refused(format!(
                "the keys are of a cluster ({}) whose certificates another authority has signed; {another}",
                hosts.join(", ")
            ));
        }
        let is_larger = hosts.iter().all(|host| self.hosts.contains(host));
        if !hosts.iter().any(|host| *host == self.own.as_str()) && !is_larger {
            return refused(format!("the keys are of a cluster of the hosts {}; {another}", hosts.join(", ")));
        }
        (self.id, self.base) = (Some(id.clone()), base);
        let hosts = if is_larger { self.hosts.clone() } else { hosts };
        let mut all = authorities.clone();
        all.extend(self.authorities.iter().filter(|own| !authorities.contains(own)).cloned());
        // The newest of those that were renewed stay.
        all.drain(..all.len().saturating_sub(AUTHORITIES_MAX));
        let next = Record { format, id, hosts, authorities: all, base };
        let says = serde_json::from_slice::<Record>(&entry.value).is_ok_and(|before| before == next);
        Ok((!says).then_some(next))
    }
}

/// Authorities that a cluster has had.
const AUTHORITIES_MAX: usize = 16;
/// Far above all times in nanoseconds since 1970 that a clock may say: the year 2116.
const TERM_MAX: u64 = u64::MAX / 4;

fn now_ns() -> u64 {
    unix_time().as_nanos() as u64
}

fn fingerprint(certificate: &[u8]) -> String {
    let suite = rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256.tls13();
    let hash = suite.map(|suite| suite.common.hash_provider.hash(certificate));
    hash.map_or_else(String::new, |hash| hex::encode(hash.as_ref()))
}

fn random_id() -> String {
    let mut bytes = [0; 16];
    let provider = rustls::crypto::ring::default_provider();
    // Without randomness no TLS would be there either.
    let _ = provider.secure_random.fill(&mut bytes);
    hex::encode(&bytes)
}

#[cfg(test)]
mod tests {
    use mccs_store::FolderStore;

    use super::*;

    fn identity(own: &str, hosts: &[&str], authorities: &[&str]) -> Identity {
        let texts = |texts: &[&str]| texts.iter().map(ToString::to_string).collect();
        let own = Name::new(own).unwrap();
        Identity {
            own,
            hosts: texts(hosts),
            authorities: texts(authorities),
            prefix: "/mccs/c/".into(),
            id: None,
            base: 0,
        }
    }

    fn refusal(result: Result<(), StoreError>) -> String {
        match result {
            Err(StoreError::Refused(reason)) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_cluster_finds_its_own_keys_and_another_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = FolderStore::open(folder.path());
        let mut first = identity("a", &["a", "b"], &["x"]);
        first.check(&mut store).unwrap();
        let at = store.read(Keys::Only(KEY)).unwrap().revision;
        identity("b", &["a", "b"], &["x"]).check(&mut store).unwrap();
        first.check(&mut store).unwrap();
        assert_eq!(store.read(Keys::Only(KEY)).unwrap().revision, at, "nothing is written that is there");
        let other_hosts = refusal(identity("c", &["c", "d"], &["x"]).check(&mut store));
        assert!(other_hosts.contains("/mccs/c/cluster: the keys are of a cluster of the hosts a, b"), "{other_hosts}");
        let other_authority = refusal(identity("a", &["a", "b"], &["y"]).check(&mut store));
        assert!(other_authority.contains("another authority"), "{other_authority}");
    }

    #[test]
    fn terms_rise_also_when_the_store_goes_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = FolderStore::open(folder.path());
        let by_votes = now_ns();
        let (mut first, mut other) = (identity("a", &["a", "b"], &["x"]), identity("b", &["a", "b"], &["x"]));
        first.check(&mut store).unwrap();
        other.check(&mut store).unwrap();
        let before = first.number(Revision(5000));
        assert!(by_votes < first.number(Revision(1)) && other.number(Revision(5000)) == before);
        assert!(first.is_younger_than(Duration::from_secs(3600)) && !first.is_younger_than(Duration::ZERO));
        // Wiped.
        std::fs::remove_dir_all(folder.path()).unwrap();
        other.check(&mut store).unwrap();
        let wiped = other.number(Revision(1));
        assert!(wiped > before);
        // Restored: an earlier state with the same record, which knows nothing of a term that hosts obey.
        first.check(&mut store).unwrap();
        first.rise_above(wiped + 1_000_000, &mut store).unwrap();
        assert!(first.number(Revision(0)) > wiped + 1_000_000);
        let at = store.read(Keys::Only(KEY)).unwrap().revision;
        other.rise_above(wiped, &mut store).unwrap();
        other.check(&mut store).unwrap();
        assert_eq!(
            (store.read(Keys::Only(KEY)).unwrap().revision, other.base),
            (at, first.base),
            "it is above already"
        );
        assert!(first.rise_above(u64::MAX, &mut store).is_err());
    }

    #[test]
    fn a_cluster_grows_and_renews_its_authority() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = FolderStore::open(folder.path());
        let mut old = identity("a", &["a", "b"], &["x"]);
        old.check(&mut store).unwrap();
        identity("c", &["a", "b", "c"], &["x", "y"]).check(&mut store).unwrap();
        // Hosts that have not been told of the third one, and others that know the new authority alone.
        old.check(&mut store).unwrap();
        let mut new = identity("c", &["a", "b", "c"], &["y"]);
        new.check(&mut store).unwrap();
        assert_eq!(new.id, old.id);
    }

    #[test]
    fn keys_of_another_release_or_another_cluster_that_came_later_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = FolderStore::open(folder.path());
        let mut own = identity("a", &["a"], &["x"]);
        own.check(&mut store).unwrap();
        let mut put = |value: &str| {
            let put = Write::Put { key: KEY.into(), value: value.into(), lease: None };
            store.commit(&Transaction { guards: vec![], writes: vec![put] }).unwrap();
            FolderStore::open(folder.path())
        };
        let mut changed = put(r#"{"format":1,"id":"z","hosts":["a"],"authorities":["x"],"base":1}"#);
        assert!(refusal(own.check(&mut changed)).contains("cluster z now"));
        let mut changed = put(r#"{"format":2,"id":"z","hosts":["a"],"authorities":["x"],"base":1}"#);
        assert!(refusal(own.check(&mut changed)).contains("format 2"));
        let mut changed = put("hello");
        assert!(refusal(own.check(&mut changed)).contains("not written by a service"));
    }
}
