//! A store in etcd v3.
//!
//! Calls go to etcd's JSON gateway, one connection at a time, to the endpoint that answered last. An endpoint that does not answer
//! in time is left for the next one. A watch has a connection of its own.
//!
//! Deliberately absent: gRPC, which would bring a runtime and some sixty crates into the daemon for a handful of calls a second.

mod tls;
mod watch;
mod wire;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_http::{Connection, Endpoint, HttpError, Request};
use serde::Serialize;
use serde::de::DeserializeOwned;

use self::watch::EtcdWatch;
use self::wire::{
    Authenticate, Authenticated, Comparison, Done, Failure, Granted, KeepAlive, Kept, Operation, Range, Read, Streamed,
};
use crate::folder::too_large;
use crate::{
    Guard, Keys, LeaseId, Outcome, Revision, Snapshot, Store, StoreError, Transaction, VALUE_BYTES_MAX, Watch, Write,
};

/// Address of a cluster's etcd, and the user who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdSettings {
    /// URLs of members' client ports: `https://10.0.0.1:2379`. At least one.
    pub endpoints: Vec<String>,
    /// Prefix of all keys; other keys are neither read nor written.
    pub prefix: String,
    /// Certificates of who may be etcd, PEM; needed for `https`.
    pub authority: Option<PathBuf>,
    /// This service's certificate and key, PEM, if etcd asks for one.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// User, and the file that has the password alone.
    pub user: Option<(String, PathBuf)>,
    /// How long an endpoint may take to answer.
    pub timeout: Duration,
}

/// See the module's documentation.
pub struct EtcdStore {
    endpoints: Vec<Endpoint>,
    prefix: String,
    tls: Option<Arc<rustls::ClientConfig>>,
    user: Option<(String, PathBuf)>,
    timeout: Duration,
    /// The endpoint that is asked first.
    current: usize,
    connection: Option<Connection>,
    token: Option<String>,
}

/// Whether a call that was sent may be sent again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeat {
    Harmless,
    Harmful,
}

impl EtcdStore {
    /// Reads the files. Nobody is asked yet.
    ///
    /// # Errors
    /// [`StoreError::Refused`]: a URL or a file is wrong, and which.
    pub fn new(settings: &EtcdSettings) -> Result<Self, StoreError> {
        let endpoints: Result<Vec<_>, _> = settings.endpoints.iter().map(|url| url.parse()).collect();
        let endpoints: Vec<Endpoint> = endpoints.map_err(StoreError::Refused)?;
        if endpoints.is_empty() {
            return Err(StoreError::Refused("it has no endpoint".into()));
        }
        let tls = match (endpoints.iter().any(|endpoint| endpoint.is_tls), &settings.authority) {
            (true, None) => return Err(StoreError::Refused("an https endpoint needs the authority's file".into())),
            (true, Some(authority)) => {
                Some(tls::client(authority, settings.identity.as_ref()).map_err(StoreError::Refused)?)
            }
            (false, _) => None,
        };
        Ok(EtcdStore {
            endpoints,
            prefix: settings.prefix.clone(),
            tls,
            user: settings.user.clone(),
            timeout: settings.timeout,
            current: 0,
            connection: None,
            token: None,
        })
    }

    /// Asks one endpoint after the other, each once: also if one refuses, whose certificate is over, say, or that is none of etcd's.
    fn call<A: DeserializeOwned>(
        &mut self,
        path: &str,
        body: &impl Serialize,
        repeat: Repeat,
    ) -> Result<A, StoreError> {
        let body = serde_json::to_vec(body).map_err(|error| StoreError::Invalid(error.to_string()))?;
        let (mut unavailable, mut refused) = (None, None);
        for _ in 0..self.endpoints.len() {
            match self.call_current(path, &body, repeat) {
                Ok(answer) => return Ok(answer),
                Err(error @ StoreError::Full(_)) => return Err(error),
                Err(error @ StoreError::Unknown(_)) => {
                    self.leave_current();
                    return Err(error);
                }
                Err(error @ StoreError::Unavailable(_)) => unavailable = Some(error),
                Err(error) => refused = refused.or(Some(error)),
            }
            self.leave_current();
        }
        Err(refused.or(unavailable).unwrap_or_else(|| StoreError::Unavailable("it has no endpoint".into())))
    }

    fn leave_current(&mut self) {
        self.connection = None;
        self.current = (self.current + 1) % self.endpoints.len();
    }

    fn call_current<A: DeserializeOwned>(&mut self, path: &str, body: &[u8], repeat: Repeat) -> Result<A, StoreError> {
        self.authenticate(false)?;
        match self.post(path, body, repeat) {
            // The token's time is over, or another member is asked, which does not know it.
            Err(StoreError::Refused(_)) if self.user.is_some() => {
                self.authenticate(true)?;
                self.post(path, body, repeat)
            }
            other => other,
        }
    }

    /// Has a token, where there is a user.
    fn authenticate(&mut self, anew: bool) -> Result<(), StoreError> {
        let Some((name, file)) = &self.user else { return Ok(()) };
        if self.token.is_some() && !anew {
            return Ok(());
        }
        let password = std::fs::read_to_string(file)
            .map_err(|error| StoreError::Refused(format!("password file {}: {error}", file.display())))?;
        let body = Authenticate { name: name.clone(), password: password.trim_end_matches(['\r', '\n']).to_owned() };
        let body = serde_json::to_vec(&body).map_err(|error| StoreError::Invalid(error.to_string()))?;
        self.token = None;
        let answer: Authenticated = self.post("/v3/auth/authenticate", &body, Repeat::Harmless)?;
        self.token = Some(answer.token);
        Ok(())
    }

    /// A connection to the endpoint that is asked now.
    fn connect(&self, until: Instant) -> Result<Connection, StoreError> {
        let endpoint = &self.endpoints[self.current];
        Connection::open(endpoint, self.tls.as_ref(), until).map_err(|error| match error {
            HttpError::Refused(reason) => StoreError::Refused(format!("{endpoint}: {reason}")),
            other => StoreError::Unavailable(format!("{endpoint}: {other}")),
        })
    }

    fn post<A: DeserializeOwned>(&mut self, path: &str, body: &[u8], repeat: Repeat) -> Result<A, StoreError> {
        let until = Instant::now() + self.timeout;
        let mut connection = match self.connection.take().filter(Connection::is_open) {
            Some(connection) => connection,
            None => self.connect(until)?,
        };
        let endpoint = &self.endpoints[self.current];
        let request = Request { token: self.token.as_deref(), ..Request::new(path, body) };
        let answer = connection.post(&request, until);
        let response = answer.map_err(|error| match (error, repeat) {
            (HttpError::Refused(reason), _) => StoreError::Refused(format!("{endpoint}: {reason}")),
            (error, Repeat::Harmless) => StoreError::Unavailable(format!("{endpoint}: {error}")),
            (error, Repeat::Harmful) => StoreError::Unknown(format!("{endpoint}: {error}")),
        })?;
        self.connection = Some(connection);
        if response.status != 200 {
            return Err(failure(endpoint, response.status, &response.body, repeat));
        }
        serde_json::from_slice(&response.body).map_err(|error| match repeat {
            Repeat::Harmless => StoreError::Invalid(format!("{endpoint}: {error}")),
            Repeat::Harmful => StoreError::Unknown(format!("{endpoint}: {error}")),
        })
    }

    /// Has etcd do something else, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn ask(&mut self, path: &str, body: &str) -> Result<serde_json::Value, StoreError> {
        self.post(path, body.as_bytes(), Repeat::Harmless)
    }

    fn key(&self, key: &str) -> Vec<u8> {
        [self.prefix.as_bytes(), key.as_bytes()].concat()
    }

    fn range(&self, keys: Keys<'_>) -> Range {
        match keys {
            Keys::Only(key) => Range { key: self.key(key), range_end: Vec::new() },
            Keys::Under(prefix) => {
                let key = self.key(prefix);
                Range { range_end: end_of(&key), key }
            }
        }
    }
}

/// The first key behind all that begin with a prefix.
fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // End of all keys.
    vec![0]
}

/// The failure in an answer that is none. Codes are gRPC's.
fn failure(endpoint: &Endpoint, status: u16, body: &[u8], repeat: Repeat) -> StoreError {
    let Ok(Failure { error, code }) = serde_json::from_slice(body) else {
        let text: String = String::from_utf8_lossy(body).chars().filter(|c| !c.is_control()).take(100).collect();
        if text.starts_with("CommonName of client") {
            let why = "with users, a certificate for etcd's JSON gateway has no common name (CN)";
            return StoreError::Refused(format!("{endpoint}: {why}"));
        }
        let ask = "is that etcd's client port, with its JSON gateway?";
        let reason = format!("{endpoint}: HTTP status {status}, {text:?}: {ask}");
        // A proxy may have passed it on.
        return if status >= 500 && repeat == Repeat::Harmful {
            StoreError::Unknown(reason)
        } else {
            StoreError::Invalid(reason)
        };
    };
    let reason = format!("{endpoint}: {error}");
    const FULL: u32 = 8;
    match code {
        FULL if error.contains("space exceeded") => StoreError::Full(reason),
        // Nothing was proposed, or who proposed has no leader to say what became of it.
        _ if error.contains("timed out") || error.contains("leader changed") => match repeat {
            Repeat::Harmless => StoreError::Unavailable(reason),
            Repeat::Harmful => StoreError::Unknown(reason),
        },
        // Cancelled, deadline, too many requests, aborted, internal, unavailable.
        1 | 4 | FULL | 10 | 13 | 14 => match repeat {
            Repeat::Harmful if code != FULL && !error.contains("no leader") => StoreError::Unknown(reason),
            _ => StoreError::Unavailable(reason),
        },
        // Invalid (a password, too), permission, precondition (no users there), unauthenticated.
        3 | 7 | 9 | 16 => StoreError::Refused(reason),
        _ => StoreError::Invalid(reason),
    }
}

impl Store for EtcdStore {
    fn read(&mut self, keys: Keys<'_>) -> Result<Snapshot, StoreError> {
        let answer: Read = self.call("/v3/kv/range", &self.range(keys), Repeat::Harmless)?;
        let entries: Result<_, _> = answer.kvs.into_iter().map(|kv| kv.entry(&self.prefix)).collect();
        Ok(Snapshot { revision: answer.header.revision, entries: entries.map_err(StoreError::Invalid)? })
    }

    fn commit(&mut self, transaction: &Transaction) -> Result<Outcome, StoreError> {
        let compare = |guard: &Guard| match guard {
            Guard::Absent(key) => Comparison::created(self.key(key), Revision(0)),
            Guard::Created(key, at) => Comparison::created(self.key(key), *at),
            Guard::Modified(key, at) => Comparison::modified(self.key(key), *at),
        };
        let compare = transaction.guards.iter().map(compare).collect();
        let mut success = Vec::new();
        for write in &transaction.writes {
            success.push(match write {
                Write::Put { key, value, .. } if value.len() > VALUE_BYTES_MAX => return Err(too_large(key, value)),
                Write::Put { key, value, lease } => Operation::put(self.key(key), value, *lease),
                Write::Delete { key } => Operation::delete(self.key(key)),
            });
        }
        let done: Done = self.call("/v3/kv/txn", &wire::Transaction { compare, success }, Repeat::Harmful)?;
        Ok(if done.succeeded { Outcome::Done(done.header.revision) } else { Outcome::Conflict })
    }

    fn grant(&mut self, ttl: Duration) -> Result<LeaseId, StoreError> {
        let ttl = ttl.as_millis().div_ceil(1000) as u64;
        // One that was granted and not heard of ends by itself.
        let granted: Granted = self.call("/v3/lease/grant", &wire::Grant { ttl }, Repeat::Harmless)?;
        Ok(LeaseId(granted.id))
    }

    fn keep_alive(&mut self, lease: LeaseId) -> Result<Option<Duration>, StoreError> {
        let kept: Streamed<Kept> = self.call("/v3/lease/keepalive", &KeepAlive { id: lease.0 }, Repeat::Harmless)?;
        match kept {
            Streamed { result: Some(Kept { ttl: 0 }), .. } => Ok(None),
            Streamed { result: Some(Kept { ttl }), .. } => Ok(Some(Duration::from_secs(ttl))),
            Streamed { result: None, error } => {
                let reason = error.map_or_else(|| "it ends without an answer".to_owned(), |error| error.to_string());
                Err(StoreError::Unavailable(reason))
            }
        }
    }

    fn revoke(&mut self, lease: LeaseId) -> Result<(), StoreError> {
        const NOT_FOUND: &str = "lease not found";
        match self.call::<serde::de::IgnoredAny>("/v3/lease/revoke", &KeepAlive { id: lease.0 }, Repeat::Harmless) {
            Err(StoreError::Invalid(reason)) if reason.contains(NOT_FOUND) => Ok(()),
            other => other.map(|_| ()),
        }
    }

    fn watch(&mut self, after: Revision) -> Result<Box<dyn Watch>, StoreError> {
        self.authenticate(false)?;
        let until = Instant::now() + self.timeout;
        let endpoint = self.endpoints[self.current].clone();
        let connection = self.connect(until)?;
        let range = self.range(Keys::Under(""));
        let watch = EtcdWatch::open(connection, &range, after, self.token.as_deref(), &self.prefix, until);
        watch
            .map(|watch| Box::new(watch) as Box<dyn Watch>)
            .map_err(|error| StoreError::Unavailable(format!("{endpoint}: {error}")))
    }
}
