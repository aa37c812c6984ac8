//! `[controller]` of `service.toml`: which host decides for the whole cluster, or which may be
//! elected to, and where its policy and topology files are.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::HostConfig;
use crate::validate::{Problems, nearest};

/// `[controller]`: the host whose service has the controller role, or those of which one is elected. The same on all hosts; the
/// files are read on those alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Controller {
    /// Its name among the hosts. Services obey no other. Absent: it is elected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Hosts of which one is elected; without a store in this order. Empty: `host` says it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
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
    /// Whether a host's service has the role, or may be elected.
    #[must_use]
    pub fn may_be(&self, host: &str) -> bool {
        self.host.as_deref() == Some(host) || self.hosts.iter().any(|one| one == host)
    }

    fn role(&self) -> &'static str {
        if self.hosts.is_empty() { "the controller" } else { "which may be elected the controller" }
    }

    /// Of the service called `own`, among `hosts`.
    pub(super) fn validate(&self, own: &str, hosts: &[HostConfig], problems: &mut Problems) {
        if hosts.is_empty() {
            problems.add("controller", "has nothing to control: it needs [exchange] and the list of hosts");
        }
        match (&self.host, self.hosts.len()) {
            (Some(host), 0) => named("controller.host", host, hosts, problems),
            (None, 0) => problems.add("controller", "must name the controller: one host, or hosts to be elected"),
            (Some(_), _) => {
                problems.add("controller.hosts", "and controller.host exclude each other: name one, or elect")
            }
            (None, _) => self.hosts.iter().for_each(|host| named("controller.hosts", host, hosts, problems)),
        }
        let twice = |(place, host): &(usize, &String)| self.hosts[..*place].contains(host);
        if let Some((_, host)) = self.hosts.iter().enumerate().find(twice) {
            problems.add("controller.hosts", format!("names {host:?} twice"));
        }
        let read = [("topology", &self.topology), ("policy", &self.policy)];
        let written = [("links", &self.links), ("history", &self.history)];
        for (key, path) in read.into_iter().chain(written) {
            match path {
                None if self.may_be(own) && matches!(key, "topology" | "policy") => {
                    let message = format!("must be said here: this service is {own:?}, {}", self.role());
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

/// Reports a name that is none of the list's.
fn named(key: &str, name: &str, hosts: &[HostConfig], problems: &mut Problems) {
    if !hosts.is_empty() && !hosts.iter().any(|host| host.name == name) {
        let hint = nearest(name, hosts.iter().map(|host| host.name.as_str()));
        let hint = hint.map(|near| format!("; did you mean {near:?}?")).unwrap_or_default();
        problems.add(key, format!("there is no host {name:?} in the list{hint}"));
    }
}
