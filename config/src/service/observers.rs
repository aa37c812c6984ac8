//! `[observers]` of `service.toml`: the socket of programs that look and change nothing, and their users.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::limits::OBSERVERS_MAX;
use crate::validate::Problems;

/// The observers' socket where the file gives none.
pub const OBSERVERS_SOCKET: &str = "mccs-observers.sock";

/// `[observers]`: users that may ask what `mccsctl` shows, and change nothing. The console is one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Observers {
    /// Their socket, relative to the runtime folder.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// Who they are, besides root and the service's own user.
    pub users: Vec<User>,
}

fn default_socket() -> PathBuf {
    OBSERVERS_SOCKET.into()
}

/// A user of this host: the number, or the name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum User {
    /// The number.
    Id(u32),
    /// The name, which the service looks up when it starts.
    Name(String),
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            User::Id(id) => id.fmt(f),
            User::Name(name) => name.fmt(f),
        }
    }
}

impl Observers {
    pub(super) fn validate(&self, problems: &mut Problems) {
        if self.users.is_empty() || self.users.len() > OBSERVERS_MAX {
            problems.add("observers.users", format!("lists 1 to {OBSERVERS_MAX} users, by name or number"));
        }
        for user in &self.users {
            if let User::Name(name) = user {
                problems.name("observers.users", name);
            }
        }
    }
}
