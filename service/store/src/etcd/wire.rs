//! Messages of etcd's JSON gateway: bytes in Base64, numbers of 64 bits as texts, and what is zero
//! left out.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Entry, LeaseId, Revision};

#[derive(Deserialize)]
#[serde(untagged)]
enum Number {
    Text(String),
    Number(u64),
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match Number::deserialize(deserializer)? {
        Number::Text(text) => text.parse().map_err(D::Error::custom),
        Number::Number(number) => Ok(number),
    }
}

fn revision<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Revision, D::Error> {
    number(deserializer).map(Revision)
}

fn text<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(number)
}

fn base64<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&STANDARD.encode(bytes))
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    STANDARD.decode(String::deserialize(deserializer)?).map_err(D::Error::custom)
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    #[serde(deserialize_with = "revision")]
    pub(super) revision: Revision,
}

#[derive(Deserialize)]
pub(super) struct Failure {
    pub(super) error: String,
    #[serde(default)]
    pub(super) code: u32,
}

#[derive(Serialize)]
pub(super) struct Range {
    #[serde(serialize_with = "base64")]
    pub(super) key: Vec<u8>,
    #[serde(serialize_with = "base64", skip_serializing_if = "Vec::is_empty")]
    pub(super) range_end: Vec<u8>,
}

#[derive(Deserialize)]
pub(super) struct Read {
    #[serde(default)]
    pub(super) header: Header,
    #[serde(default)]
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct KeyValue {
    #[serde(deserialize_with = "bytes")]
    key: Vec<u8>,
    #[serde(deserialize_with = "bytes")]
    value: Vec<u8>,
    #[serde(deserialize_with = "revision")]
    create_revision: Revision,
    #[serde(deserialize_with = "revision")]
    mod_revision: Revision,
    #[serde(deserialize_with = "number")]
    lease: u64,
}

impl KeyValue {
    /// Its key below a prefix.
    ///
    /// # Errors
    /// It is none of that prefix.
    pub(super) fn key(&self, prefix: &str) -> Result<String, String> {
        let key = self.key.strip_prefix(prefix.as_bytes()).and_then(|key| String::from_utf8(key.to_vec()).ok());
        key.ok_or_else(|| format!("a key that is not below {prefix:?}"))
    }

    pub(super) fn entry(self, prefix: &str) -> Result<Entry, String> {
        Ok(Entry {
            key: self.key(prefix)?,
            value: self.value,
            created: self.create_revision,
            modified: self.mod_revision,
            lease: Some(LeaseId(self.lease)).filter(|lease| lease.0 != 0),
        })
    }
}

#[derive(Serialize)]
pub(super) struct Transaction {
    pub(super) compare: Vec<Comparison>,
    pub(super) success: Vec<Operation>,
}

#[derive(Serialize)]
pub(super) struct Comparison {
    #[serde(serialize_with = "base64")]
    key: Vec<u8>,
    result: &'static str,
    target: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    create_revision: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mod_revision: Option<String>,
}

impl Comparison {
    /// The key came to be at that revision; at 0: it is not there.
    pub(super) fn created(key: Vec<u8>, at: Revision) -> Self {
        let create_revision = Some(at.0.to_string());
        Comparison { key, result: "EQUAL", target: "CREATE", create_revision, mod_revision: None }
    }

    pub(super) fn modified(key: Vec<u8>, at: Revision) -> Self {
        let mod_revision = Some(at.0.to_string());
        Comparison { key, result: "EQUAL", target: "MOD", create_revision: None, mod_revision }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Operation {
    RequestPut(Put),
    RequestDeleteRange(Range),
}

#[derive(Serialize)]
pub(super) struct Put {
    #[serde(serialize_with = "base64")]
    key: Vec<u8>,
    #[serde(serialize_with = "base64")]
    value: Vec<u8>,
    #[serde(serialize_with = "text")]
    lease: u64,
}

impl Operation {
    pub(super) fn put(key: Vec<u8>, value: &[u8], lease: Option<LeaseId>) -> Self {
        Operation::RequestPut(Put { key, value: value.to_vec(), lease: lease.map_or(0, |lease| lease.0) })
    }

    pub(super) fn delete(key: Vec<u8>) -> Self {
        Operation::RequestDeleteRange(Range { key, range_end: Vec::new() })
    }
}

#[derive(Deserialize)]
pub(super) struct Done {
    #[serde(default)]
    pub(super) header: Header,
    #[serde(default)]
    pub(super) succeeded: bool,
}

#[derive(Serialize)]
pub(super) struct Grant {
    #[serde(rename = "TTL", serialize_with = "text")]
    pub(super) ttl: u64,
}

#[derive(Deserialize)]
pub(super) struct Granted {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: u64,
}

#[derive(Serialize)]
pub(super) struct KeepAlive {
    #[serde(rename = "ID", serialize_with = "text")]
    pub(super) id: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Kept {
    /// In seconds; 0 if there is no such lease.
    #[serde(rename = "TTL", deserialize_with = "number")]
    pub(super) ttl: u64,
}

/// A message of a stream.
#[derive(Deserialize)]
#[serde(bound(deserialize = "T: Deserialize<'de>"))]
pub(super) struct Streamed<T> {
    #[serde(default = "Option::default")]
    pub(super) result: Option<T>,
    #[serde(default)]
    pub(super) error: Option<serde_json::Value>,
}

#[derive(Serialize)]
pub(super) struct Authenticate {
    pub(super) name: String,
    pub(super) password: String,
}

#[derive(Deserialize)]
pub(super) struct Authenticated {
    pub(super) token: String,
}

#[derive(Serialize)]
pub(super) struct BeginWatch<'a> {
    pub(super) create_request: Watched<'a>,
}

#[derive(Serialize)]
pub(super) struct Watched<'a> {
    #[serde(flatten)]
    pub(super) range: &'a Range,
    #[serde(serialize_with = "text")]
    pub(super) start_revision: u64,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct WatchAnswer {
    pub(super) canceled: bool,
    pub(super) cancel_reason: String,
    #[serde(deserialize_with = "number")]
    pub(super) compact_revision: u64,
    pub(super) events: Vec<Event>,
}

#[derive(Deserialize)]
pub(super) struct Event {
    #[serde(default, rename = "type")]
    pub(super) kind: EventKind,
    pub(super) kv: KeyValue,
}

#[derive(Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub(super) enum EventKind {
    #[default]
    Put,
    Delete,
}
