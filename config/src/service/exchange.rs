//! `[exchange]` and `[[host]]` of `service.toml`: addresses of other hosts' services, TLS files,
//! keepalive and time-outs.
//!
//! Both absent: a service of a single host. Addresses are numbers, not names: looking a name up may block for seconds, and no
//! engine of the service may.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::limits;
use crate::units::DurationText;
use crate::validate::{Problems, nearest};

/// An IP address with a port, written `"10.0.0.1:7400"` or `"[fd00::1]:7400"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub SocketAddr);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Address).map_err(|_| {
            format!(
                "{text:?} is no IP address with a port; write for example \"10.0.0.1:7400\" or \"[fd00::1]:7400\" (names are \
                 not looked up)"
            )
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// `[exchange]`: this service's end of the links to other hosts' services.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Exchange {
    /// Where to accept links.
    pub listen: Address,
    /// This host's certificate, PEM, with any intermediate ones. Its subject alternative name is the host's name.
    pub certificate: PathBuf,
    /// The certificate's private key, PEM.
    pub key: PathBuf,
    /// Certificates of the cluster's authority, PEM: who they signed may be a host of the list.
    pub authority: PathBuf,
    /// A link on which nothing is said for so long says that it lives.
    #[serde(default = "default_keep_alive")]
    pub keep_alive: DurationText,
    /// A link on which nothing is heard for so long is made anew.
    #[serde(default = "default_link_timeout")]
    pub link_timeout: DurationText,
    /// A host of which nothing is heard for so long is given up: communicators that it is part of fail.
    #[serde(default = "default_host_timeout")]
    pub host_timeout: DurationText,
    /// Time that a connection has to prove who it is.
    #[serde(default = "default_handshake_timeout")]
    pub handshake_timeout: DurationText,
    /// Longest pause between two attempts to reach a host.
    #[serde(default = "default_reconnect_max")]
    pub reconnect_max: DurationText,
}

fn default_keep_alive() -> DurationText {
    DurationText::secs(2)
}

fn default_link_timeout() -> DurationText {
    DurationText::secs(5)
}

fn default_host_timeout() -> DurationText {
    DurationText::secs(10)
}

fn default_handshake_timeout() -> DurationText {
    DurationText::secs(5)
}

fn default_reconnect_max() -> DurationText {
    DurationText::secs(1)
}

/// `[[host]]`: a host with a service, this one included. The list is the same on all hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct HostConfig {
    /// Its `service.name`, which its certificate confirms.
    pub name: String,
    /// Where other services reach it.
    pub address: Address,
}

impl Exchange {
    /// Links with these files, and with times that suit most clusters.
    #[must_use]
    pub fn new(listen: SocketAddr, certificate: PathBuf, key: PathBuf, authority: PathBuf) -> Self {
        Exchange {
            listen: Address(listen),
            certificate,
            key,
            authority,
            keep_alive: default_keep_alive(),
            link_timeout: default_link_timeout(),
            host_timeout: default_host_timeout(),
            handshake_timeout: default_handshake_timeout(),
            reconnect_max: default_reconnect_max(),
        }
    }

    pub(super) fn validate(&self, problems: &mut Problems) {
        if self.listen.0.port() == 0 {
            problems.add("exchange.listen", "must have a port that other hosts know, not 0");
        }
        for (key, path) in [("certificate", &self.certificate), ("key", &self.key), ("authority", &self.authority)] {
            if !path.is_absolute() {
                problems.add(format!("exchange.{key}"), format!("must be an absolute path, not {:?}", path.display()));
            }
        }
        for (key, value, limit) in [
            ("keep_alive", &self.keep_alive, limits::KEEP_ALIVE),
            ("link_timeout", &self.link_timeout, limits::HOST_TIMEOUT),
            ("host_timeout", &self.host_timeout, limits::HOST_TIMEOUT),
            ("handshake_timeout", &self.handshake_timeout, limits::HANDSHAKE_TIMEOUT),
            ("reconnect_max", &self.reconnect_max, limits::RECONNECT_MAX),
        ] {
            problems.within(format!("exchange.{key}"), value, &limit);
        }
        let twice = DurationText(self.keep_alive.0.saturating_mul(2));
        if self.link_timeout < twice {
            problems.add(
                "exchange.link_timeout",
                format!(
                    "must be at least twice exchange.keep_alive, {twice}: one late sign of life must not break a link"
                ),
            );
        }
        if self.host_timeout < self.link_timeout {
            problems.add(
                "exchange.host_timeout",
                format!("must be at least exchange.link_timeout, {}: a link is made anew first", self.link_timeout),
            );
        }
    }
}

/// Checks the list of hosts, in which `own` must be.
pub(super) fn validate_hosts(hosts: &[HostConfig], own: &str, problems: &mut Problems) {
    let count = u32::try_from(hosts.len()).unwrap_or(u32::MAX);
    problems.within("host", &count, &limits::CLUSTER_HOSTS);
    if !hosts.is_empty() && !hosts.iter().any(|host| host.name == own) {
        let hint = nearest(own, hosts.iter().map(|host| host.name.as_str()));
        let hint = hint.map_or_else(
            || "add this host to the list, or set service.name".to_owned(),
            |name| format!("set service.name = {name:?} if that is this host"),
        );
        problems.add("host", format!("this service is called {own:?}, and no host of the list is; {hint}"));
    }
    for (i, host) in hosts.iter().enumerate() {
        host_name(format!("host[{i}].name"), &host.name, problems);
        if host.address.0.port() == 0 || host.address.0.ip().is_unspecified() {
            let key = format!("host[{i}].address");
            problems.add(key, format!("must be an address and a port to connect to, not {}", host.address));
        }
        for (j, other) in hosts.iter().enumerate().take(i) {
            if other.name == host.name {
                problems.add(format!("host[{i}].name"), format!("host[{j}] is already called {:?}", host.name));
            } else if other.address == host.address {
                let key = format!("host[{i}].address");
                problems.add(key, format!("host {:?} already has {}; give each its own", other.name, host.address));
            }
        }
    }
}

/// Reports a name that a certificate could not confirm.
fn host_name(key: String, name: &str, problems: &mut Problems) {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.chars().all(allowed)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let is_number = |label: &str| label.chars().all(|c| c.is_ascii_digit());
    let (whole, last) = (name.len() <= limits::NAME_BYTES_MAX, name.rsplit('.').next().unwrap_or(name));
    if !whole || !name.split('.').all(is_label) || is_number(last) {
        problems.add(
            key,
            format!(
                "a host's name is a DNS name of at most {} lower-case letters, digits, '-' and '.', such as \"host-a\", not {name:?}",
                limits::NAME_BYTES_MAX
            ),
        );
    }
}
