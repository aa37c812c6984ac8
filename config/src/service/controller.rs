//! `[controller]` of `service.toml`: which host decides for the whole cluster, and where its policy
//! and topology files are.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::HostConfig;
use crate::validate::{Problems, nearest};

/// `[controller]`: the host whose service has the controller role. The same on all hosts; the files are read on that one alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Controller {
    /// Its name among the hosts. Services obey no other.
    pub host: String,
    /// What the network is: `topology.toml`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<PathBuf>,
    /// How the network is used: `policy.toml`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PathBuf>,
    /// Where it keeps what operators have said of links. Absent: hosts keep it, while any of them runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links: Option<PathBuf>,
    /// Where it keeps its history. Absent: in memory, until its service ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<PathBuf>,
}

impl Controller {
    /// Of the service called `own`, among `hosts`.
    pub(super) fn validate(&self, own: &str, hosts: &[HostConfig], problems: &mut Problems) {
        if hosts.is_empty() {
            problems.add("controller", "has nothing to control: it needs [exchange] and the list of hosts");
        } else if !hosts.iter().any(|host| host.name == self.host) {
            let hint = nearest(&self.host, hosts.iter().map(|host| host.name.as_str()));
            let hint = hint.map(|near| format!("; did you mean {near:?}?")).unwrap_or_default();
            problems.add("controller.host", format!("there is no host {:?} in the list{hint}", self.host));
        }
        let read = [("topology", &self.topology), ("policy", &self.policy)];
        let written = [("links", &self.links), ("history", &self.history)];
        for (key, path) in read.into_iter().chain(written) {
            match path {
                None if self.host == own && matches!(key, "topology" | "policy") => {
                    let message = format!("must be said here: this service is {own:?}, the controller");
                    problems.add(format!("controller.{key}"), message);
                }
                Some(path) if !path.is_absolute() => {
                    let message = format!("must be an absolute path, not {:?}", path.display());
                    problems.add(format!("controller.{key}"), message);
                }
                _ => {}
            }
        }
        for (key, path) in written.into_iter().filter(|(_, path)| path.is_some()) {
            if read.into_iter().chain(written).any(|(other, taken)| other != key && taken == path) {
                let message = "is written by the controller: give it a file of its own";
                problems.add(format!("controller.{key}"), message);
            }
        }
    }
}
