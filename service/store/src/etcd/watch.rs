//! A watch: an answer of etcd's without end, on a connection of its own.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mccs_http::{Connection, HttpError, Request};

use super::wire::{BeginWatch, EventKind, Range, Streamed, WatchAnswer, Watched};
use crate::{Change, Revision, StoreError, Watch, WatchError};

/// Has a member end the watch that has lost its leader, instead of going silent.
const REQUIRE_LEADER: (&str, &str) = ("Grpc-Metadata-hasleader", "true");
/// Bytes of a message that has not come whole.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// See the module's documentation.
pub(super) struct EtcdWatch {
    connection: Connection,
    prefix: String,
    /// Bytes of a message that is not whole: each ends with a line.
    partial: Vec<u8>,
}

impl EtcdWatch {
    pub(super) fn open(
        mut connection: Connection,
        range: &Range,
        after: Revision,
        token: Option<&str>,
        prefix: &str,
        until: Instant,
    ) -> Result<Self, HttpError> {
        let body = BeginWatch { create_request: Watched { range, start_revision: after.0 + 1 } };
        let body = serde_json::to_vec(&body).map_err(|_| HttpError::NoHttp("the request"))?;
        let request = Request { token, headers: &[REQUIRE_LEADER], ..Request::new("/v3/watch", &body) };
        match connection.begin(&request, until)? {
            200 => Ok(EtcdWatch { connection, prefix: prefix.to_owned(), partial: Vec::new() }),
            _ => Err(HttpError::NoHttp("it refuses to be watched")),
        }
    }

    fn message(&self, line: &[u8], changes: &mut BTreeMap<String, Change>) -> Result<(), WatchError> {
        let invalid = |reason: String| WatchError::Store(StoreError::Invalid(reason));
        let message: Streamed<WatchAnswer> =
            serde_json::from_slice(line).map_err(|error| invalid(format!("a watch: {error}")))?;
        let Some(answer) = message.result else {
            let reason = message.error.map_or_else(|| "a watch has ended".to_owned(), |error| error.to_string());
            return Err(StoreError::Unavailable(reason).into());
        };
        if answer.compact_revision != 0 {
            return Err(WatchError::Compacted);
        }
        if answer.canceled {
            return Err(StoreError::Unavailable(format!("a watch was ended: {}", answer.cancel_reason)).into());
        }
        for event in answer.events {
            let key = event.kv.key(&self.prefix).map_err(invalid)?;
            let entry = match event.kind {
                EventKind::Put => Some(event.kv.entry(&self.prefix).map_err(invalid)?),
                EventKind::Delete => None,
            };
            changes.insert(key.clone(), Change { key, entry });
        }
        Ok(())
    }
}

impl Watch for EtcdWatch {
    fn next(&mut self, timeout: Duration) -> Result<Vec<Change>, WatchError> {
        let until = Instant::now() + timeout;
        let mut changes = BTreeMap::new();
        loop {
            while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.partial.drain(..=end).collect();
                if line.iter().any(|byte| !byte.is_ascii_whitespace()) {
                    self.message(&line, &mut changes)?;
                }
            }
            if !changes.is_empty() {
                return Ok(changes.into_values().collect());
            }
            match self.connection.chunk(until) {
                Ok(Some(chunk)) if self.partial.len() + chunk.len() <= MESSAGE_BYTES_MAX => self.partial.extend(chunk),
                Ok(Some(_)) => return Err(StoreError::Invalid("a watch's message is too long".into()).into()),
                Ok(None) => return Err(StoreError::Unavailable("a watch has ended".into()).into()),
                Err(HttpError::Late) => return Ok(Vec::new()),
                Err(error) => return Err(StoreError::Unavailable(format!("a watch: {error}")).into()),
            }
        }
    }
}
