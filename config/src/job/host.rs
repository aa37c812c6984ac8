//! `[[host]]` of a job file: where services and ranks run, by ssh, prefix or on this machine.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::limits;
use crate::template;
use crate::validate::Problems;

/// The only host of a file that names none.
pub const LOCAL: &str = "local";

/// Names that the launcher itself gives values to, in a service's configuration.
pub const PLACES: [&str; 5] = ["host", "index", "address", "port", "runtime_dir"];

/// `[[host]]`: a machine, or a part of one, with a service of its own. At most one of `ssh`, `fabric` and `namespace`
/// says how to get there; without one it is this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Name, as in `MCCS_HOST`, prefixes and log files.
    pub name: String,
    /// Destination of `ssh`: `[user@]host`, or a name from its configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssh: Option<String>,
    /// Options of `ssh` for this host, after those of `[ssh]`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssh_options: Vec<String>,
    /// An emulated fabric that is up; the host is the network namespace of its node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<String>,
    /// The fabric's host. Absent: `name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// A network namespace, as `ip netns` lists it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The launcher's executable there. Absent: where it is here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<PathBuf>,
    /// Where its private folder is made. Absent: the user's runtime folder; over ssh `/tmp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime_parent: Option<PathBuf>,
    /// Where other hosts' services reach its service, an IP address where jobs span hosts. Absent, on a fabric: the node's
    /// first address; where nothing says how to get there: 127.0.0.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Port of its service. Absent: 7400, or the next that no other host of the address has; on this machine a free one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Devices; a job's ranks there each get one. Absent: all share device 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices: Option<u32>,
    /// Variables of its service and its ranks.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// More places to fill in, in its service's configuration.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub values: BTreeMap<String, String>,
}

impl Host {
    /// This machine, for a file without hosts.
    #[must_use]
    pub fn local() -> Self {
        Host { name: LOCAL.to_owned(), ..Host::default() }
    }

    /// What the places in its service's configuration are filled with.
    #[must_use]
    pub fn places(&self, index: usize, runtime_dir: &str) -> BTreeMap<String, String> {
        let mut places = self.values.clone();
        places.insert("host".to_owned(), self.name.clone());
        places.insert("index".to_owned(), index.to_string());
        places.insert("runtime_dir".to_owned(), runtime_dir.to_owned());
        places.extend(self.address.iter().map(|address| ("address".to_owned(), address.clone())));
        places.extend(self.port.iter().map(|port| ("port".to_owned(), port.to_string())));
        places
    }

    pub(super) fn validate_at(&self, key: &str, problems: &mut Problems) {
        problems.name(format!("{key}.name"), &self.name);
        self.validate_way(key, problems);
        if let Some(parent) = &self.runtime_parent
            && !parent.is_absolute()
        {
            problems
                .add(format!("{key}.runtime_parent"), format!("must be an absolute path, not {:?}", parent.display()));
        }
        if self.address.as_deref().is_some_and(|address| !is_word(address)) {
            problems.add(format!("{key}.address"), "is a name or an address without spaces; the port has its own key");
        }
        if self.port == Some(0) {
            problems.add(format!("{key}.port"), "is from 1 to 65535: other services must know it beforehand");
        }
        if let Some(devices) = &self.devices {
            problems.within(format!("{key}.devices"), devices, &limits::DEVICES);
        }
        super::environment(problems, key, &self.env);
        for (name, value) in &self.values {
            let at = format!("{key}.values.{name}");
            if PLACES.contains(&name.as_str()) {
                problems.add(at, "is given by the launcher; choose another name");
            } else if !template::is_name(name) {
                problems.add(at, "a place's name has lower-case letters, digits and '_', and starts with a letter");
            } else if value.contains(['"', '\'', '\\', '{', '}']) || value.contains(char::is_control) {
                problems.add(at, "has no quotes, backslashes, braces or line breaks: it becomes part of a TOML file");
            }
        }
    }

    fn validate_way(&self, key: &str, problems: &mut Problems) {
        let ways =
            [("ssh", self.ssh.is_some()), ("fabric", self.fabric.is_some()), ("namespace", self.namespace.is_some())];
        let given: Vec<&str> = ways.into_iter().filter(|way| way.1).map(|way| way.0).collect();
        if let [first, second, ..] = given[..] {
            problems.add(format!("{key}.{second}"), format!("stands beside {key}.{first}; keep one of them"));
        }
        if let Some(ssh) = &self.ssh
            && !is_word(ssh)
        {
            problems
                .add(format!("{key}.ssh"), "is a destination such as \"user@node1\", without spaces or a leading '-'");
        }
        if self.ssh.is_none() && !self.ssh_options.is_empty() {
            problems.add(format!("{key}.ssh_options"), "has no use without ssh");
        }
        for (name, value) in [("fabric", &self.fabric), ("node", &self.node), ("namespace", &self.namespace)] {
            if let Some(value) = value {
                problems.name(format!("{key}.{name}"), value);
            }
        }
        if self.node.is_some() && self.fabric.is_none() {
            problems.add(format!("{key}.node"), "has no use without fabric");
        }
    }
}

/// A word that no program takes for an option or for two words.
fn is_word(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with('-')
        && !text.contains(|c: char| c.is_whitespace() || c.is_control() || "\"'\\{}".contains(c))
}
