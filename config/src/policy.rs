//! `policy.toml`: the network policy by name; weights, priorities, rate caps, reserved shares,
//! paths and time windows of tenants.
//!
//! A file is checked as a whole, against the topology that it is for and the policies that there are, before any of it is in
//! force ([`PolicyFile::parse_for`]); what is in force stays when a file is refused.
//!
//! Deliberately absent: what policies do with it (`service/policy/src`), and who is which tenant (`service.toml`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::document;
use crate::error::ConfigError;
use crate::limits;
use crate::service::{AlgorithmChoice, Reductions, TransportKind};
use crate::topology::{Host, Nic, TopologyFile};
use crate::units::{Bytes, DurationText, Rate};
use crate::validate::{Problems, Validate, nearest};

/// A whole `policy.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PolicyFile {
    /// Which policy. Required: a file that lost its content lifts no cap.
    pub policy: PolicySection,
    /// What tenants may have. A tenant that is not listed has the defaults.
    #[serde(default, rename = "tenant", skip_serializing_if = "Vec::is_empty")]
    pub tenants: Vec<TenantRule>,
    /// Paths that only certain tenants use, under policies that reserve.
    #[serde(default, rename = "reserve", skip_serializing_if = "Vec::is_empty")]
    pub reserves: Vec<Reserve>,
    /// Times at which tenants may send.
    #[serde(default, rename = "window", skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
}

/// `[policy]`: who decides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PolicySection {
    /// Name of the policy.
    pub name: String,
    /// Orders of ranks.
    #[serde(default)]
    pub rings: Rings,
    /// What carries flows. Absent: what `rdma.use` of the hosts' `service.toml` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<TransportKind>,
    /// How many channels. Absent: as many as a communicator began with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<Channels>,
    /// How collectives are carried out. Absent: as a communicator began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<AlgorithmChoice>,
    /// How GPUs of more than two hosts reduce, in communicators that begin from now on: round a ring only where hosts are below several leaves.
    /// Absent: as `service.toml` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reductions: Option<Reductions>,
}

impl PolicySection {
    /// The policy of this name, with every other key at its default.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        PolicySection {
            name: name.into(),
            rings: Rings::default(),
            transport: None,
            channels: None,
            algorithm: None,
            reductions: None,
        }
    }
}

/// How many channels a communicator has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channels {
    /// So many.
    Count(u32),
    /// One for each NIC that its ranks are nearest to, on the host where these are most.
    Nics,
}

impl Serialize for Channels {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Channels::Count(count) => serializer.serialize_u32(*count),
            Channels::Nics => serializer.serialize_str("nics"),
        }
    }
}

impl<'de> Deserialize<'de> for Channels {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = Channels;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of channels, or \"nics\"")
            }

            fn visit_i64<E: de::Error>(self, count: i64) -> Result<Channels, E> {
                let wrong = |_| E::invalid_value(de::Unexpected::Signed(count), &self);
                u32::try_from(count).map(Channels::Count).map_err(wrong)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Channels, E> {
                match text {
                    "nics" => Ok(Channels::Nics),
                    _ => Err(E::invalid_value(de::Unexpected::Str(text), &self)),
                }
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// Where ring orders come from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Rings {
    /// The policy: as few crossings between racks as possible.
    #[default]
    Local,
    /// The communicator's strategy keeps those it has: rank order, or what the operator set by hand.
    Kept,
}

/// `[[tenant]]`: what a tenant may have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TenantRule {
    /// As in `service.toml`.
    pub name: String,
    /// Its part of a contended link, against tenants without `share_percent`.
    #[serde(default = "default_weight")]
    pub weight: u32,
    /// Part of every contended link that it gets at least; the others share the rest by weight, also those that are not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_percent: Option<u32>,
    /// Most payload that each of its flows sends: what goes from one host to another on a channel of a communicator, or point to point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap: Option<Rate>,
    /// Most payload that all its flows together send out of a host, of however many communicators, channels and peers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_cap: Option<Rate>,
    /// Higher goes first, under policies that have priorities.
    #[serde(default)]
    pub priority: u32,
}

impl TenantRule {
    /// A tenant like all others.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        let (weight, share_percent, cap, host_cap, priority) = (default_weight(), None, None, None, 0);
        TenantRule { name: name.into(), weight, share_percent, cap, host_cap, priority }
    }
}

fn default_weight() -> u32 {
    1
}

/// `[[reserve]]`: paths that other tenants keep off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Reserve {
    /// Whose.
    pub tenant: String,
    /// Names of spines.
    pub paths: Vec<String>,
}

/// `[[window]]`: a time at which a tenant may send, once a period of the cluster's common clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Whose.
    pub tenant: String,
    /// From one opening to the next.
    pub period: DurationText,
    /// Of the opening, from the start of the period.
    #[serde(default)]
    pub offset: DurationText,
    /// How long it stays open.
    pub length: DurationText,
}

crate::document!(PolicyFile, written);

impl PolicyFile {
    /// As [`PolicyFile::parse`], and against the topology and the policies that there are.
    ///
    /// # Errors
    /// As [`PolicyFile::load`]; also a path or a policy that does not exist, a cap that no NIC or host reaches, and reservations that
    /// leave nothing to the others.
    pub fn parse_for(
        text: &str,
        file_name: &str,
        topology: &TopologyFile,
        policies: &[&str],
    ) -> Result<Self, ConfigError> {
        let file: PolicyFile = document::parse(text, file_name)?;
        let found = document::check(&Against { file: &file, topology, policies }, text, file_name);
        if found.is_empty() { Ok(file) } else { Err(ConfigError::Invalid(found)) }
    }
}

impl Validate for PolicyFile {
    const BYTES_MAX: Bytes = limits::POLICY_BYTES_MAX;

    fn validate(&self, problems: &mut Problems) {
        problems.name("policy.name", &self.policy.name);
        if let Some(channels) = &self.policy.channels {
            if let Channels::Count(count) = channels {
                problems.within("policy.channels", count, &limits::CHANNELS);
            }
            if self.policy.rings == Rings::Kept {
                problems.add("policy.channels", "rings = \"kept\" keeps as many as there are: give one of the two");
            }
        }
        problems.within("tenant", &self.tenants.len(), &limits::TENANT_RULES);
        let (mut shares_percent, mut called) = (0, BTreeMap::new());
        for (i, tenant) in self.tenants.iter().enumerate().take(limits::TENANT_RULES.max) {
            tenant.validate_at(&format!("tenant[{i}]"), problems);
            let j = *called.entry(&*tenant.name).or_insert(i);
            if j < i {
                problems.add(format!("tenant[{i}].name"), format!("tenant[{j}] is already called {:?}", tenant.name));
            }
            let before = shares_percent;
            shares_percent += tenant.share_percent.unwrap_or(0).min(limits::SHARE_PERCENT.max);
            if before <= 100 && shares_percent > 100 {
                let key = format!("tenant[{i}].share_percent");
                problems.add(key, format!("brings the shares to {shares_percent}%; all together are at most 100%"));
            }
        }
        let rest = self.tenants.iter().position(|tenant| tenant.share_percent.is_none());
        if let (100, Some(i)) = (shares_percent, rest) {
            let name = &self.tenants[i].name;
            problems.add(format!("tenant[{i}]"), format!("{name:?} would starve: the shares of others are 100%"));
        }
        self.validate_reserves(problems);
        self.validate_windows(problems);
    }
}

impl PolicyFile {
    /// Tenants that it has rules for; some more than once.
    pub fn tenants_named(&self) -> impl Iterator<Item = &str> {
        let (listed, reserves) = (self.tenants.iter(), self.reserves.iter());
        let windows = self.windows.iter().map(|window| &*window.tenant);
        listed.map(|tenant| &*tenant.name).chain(reserves.map(|reserve| &*reserve.tenant)).chain(windows)
    }

    fn validate_reserves(&self, problems: &mut Problems) {
        problems.within("reserve", &self.reserves.len(), &limits::RESERVES);
        for (i, reserve) in self.reserves.iter().enumerate().take(limits::RESERVES.max) {
            problems.name(format!("reserve[{i}].tenant"), &reserve.tenant);
            if reserve.paths.is_empty() {
                problems.add(format!("reserve[{i}].paths"), "reserves nothing; name at least one path");
            } else {
                problems.within(format!("reserve[{i}].paths"), &reserve.paths.len(), &limits::RESERVED_PATHS);
            }
            let mut named = BTreeSet::new();
            for path in &reserve.paths {
                if !named.insert(path) {
                    problems.add(format!("reserve[{i}].paths"), format!("names {path:?} twice"));
                }
            }
        }
    }

    fn validate_windows(&self, problems: &mut Problems) {
        problems.within("window", &self.windows.len(), &limits::WINDOWS);
        for (i, window) in self.windows.iter().enumerate().take(limits::WINDOWS.max) {
            problems.name(format!("window[{i}].tenant"), &window.tenant);
            problems.within(format!("window[{i}].period"), &window.period, &limits::WINDOW_PERIOD);
            if window.offset >= window.period {
                let key = format!("window[{i}].offset");
                problems.add(key, format!("must be below the period, {}, not {}", window.period, window.offset));
            }
            if window.length > window.period {
                let key = format!("window[{i}].length");
                problems.add(key, format!("must be at most the period, {}, not {}", window.period, window.length));
            } else if window.length.0.as_nanos() * STARVES_BELOW < window.period.0.as_nanos() {
                let key = format!("window[{i}].length");
                let reason = format!("{:?} would starve: less than 1/{STARVES_BELOW} of the period", window.tenant);
                problems.add(key, reason);
            }
            for (j, other) in self.windows.iter().enumerate().take(i) {
                if other.tenant == window.tenant {
                    problems.add(format!("window[{i}].tenant"), format!("window[{j}] is already {:?}'s", other.tenant));
                } else if overlap(window, other) {
                    let other = format!("window[{j}] of {:?}", other.tenant);
                    problems.add(format!("window[{i}]"), format!("overlaps {other}: both would send at once"));
                }
            }
        }
    }
}

/// A window shorter than this part of its period is no way to get work done.
const STARVES_BELOW: u128 = 100;

/// Whether two windows are ever open at once. Their openings drift against each other by the common divisor of the periods.
fn overlap(a: &Window, b: &Window) -> bool {
    let ns = |text: DurationText| text.0.as_nanos();
    let common = gcd(ns(a.period), ns(b.period));
    if common == 0 {
        return false; // A period of zero is a complaint of its own.
    }
    let lag = (ns(b.offset) % common + common - ns(a.offset) % common) % common;
    lag < ns(a.length) || lag + ns(b.length) > common
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl TenantRule {
    fn validate_at(&self, key: &str, problems: &mut Problems) {
        problems.name(format!("{key}.name"), &self.name);
        problems.within(format!("{key}.weight"), &self.weight, &limits::WEIGHT);
        problems.within(format!("{key}.priority"), &self.priority, &limits::PRIORITY);
        if let Some(share) = &self.share_percent {
            problems.within(format!("{key}.share_percent"), share, &limits::SHARE_PERCENT);
        }
        if let Some(cap) = &self.cap {
            problems.within(format!("{key}.cap"), cap, &limits::CAP);
        }
        if let Some(host_cap) = &self.host_cap {
            problems.within(format!("{key}.host_cap"), host_cap, &limits::CAP);
        }
        if let (Some(cap), Some(host_cap)) = (self.cap, self.host_cap)
            && cap > host_cap
        {
            let message = format!("{cap} is beyond host_cap, {host_cap}, and caps nothing; leave it out");
            problems.add(format!("{key}.cap"), message);
        }
    }
}

/// What the NICs of the fastest host carry together.
fn most_of_a_host(topology: &TopologyFile) -> Rate {
    let usual = topology.rates.host_leaf;
    let sum = |nics: &[Nic]| nics.iter().fold(0_u64, |sum, nic| sum.saturating_add(nic.rate.unwrap_or(usual).0));
    let of = |host: &Host| if host.nics.is_empty() { usual } else { Rate(sum(&host.nics)) };
    topology.hosts.iter().map(of).max().unwrap_or_default()
}

/// Problems up to which it is said which path may have been meant: each is compared with all.
const HINTS_MAX: usize = 8;

/// A policy file beside what it is for.
struct Against<'a> {
    file: &'a PolicyFile,
    topology: &'a TopologyFile,
    policies: &'a [&'a str],
}

impl Validate for Against<'_> {
    fn validate(&self, problems: &mut Problems) {
        let name = &self.file.policy.name;
        if !self.policies.contains(&name.as_str()) {
            let hint = nearest(name, self.policies.iter().copied()).map(|near| format!("; did you mean {near:?}?"));
            let all = self.policies.join(", ");
            problems.add(
                "policy.name",
                format!("there is no policy {name:?}{}; there are {all}", hint.unwrap_or_default()),
            );
        }
        let known: BTreeMap<&str, _> = self.topology.spines.iter().map(|spine| (spine.name.as_str(), spine)).collect();
        let mut reserved = BTreeSet::new();
        for (i, reserve) in self.file.reserves.iter().enumerate() {
            for path in &reserve.paths {
                if problems.are_too_many() {
                    break;
                }
                let Some(spine) = known.get(path.as_str()) else {
                    let hints = (problems.count() < HINTS_MAX).then(|| known.keys().copied());
                    let hint =
                        nearest(path, hints.into_iter().flatten()).map(|near| format!("; did you mean {near:?}?"));
                    let message = format!("there is no path {path:?} in the topology{}", hint.unwrap_or_default());
                    problems.add(format!("reserve[{i}].paths"), message);
                    continue;
                };
                if spine.source_ports.is_none() && spine.dscp.is_none() {
                    let message = format!("nothing steers a flow over {path:?}: give it source_ports or dscp");
                    problems.add(format!("reserve[{i}].paths"), message);
                }
                reserved.insert(path);
            }
            if reserved.len() == known.len() && !known.is_empty() {
                let message = "leaves no path to other tenants, who would starve; reserve fewer";
                problems.add(format!("reserve[{i}].paths"), message);
            }
        }
        let rates = self.topology.hosts.iter().flat_map(|host| host.nics.iter().filter_map(|nic| nic.rate));
        let fastest = rates.chain([self.topology.rates.host_leaf]).max().unwrap_or_default();
        let most = most_of_a_host(self.topology);
        for (i, tenant) in self.file.tenants.iter().enumerate() {
            if let Some(cap) = tenant.cap.filter(|cap| *cap > fastest) {
                let message = format!("{cap} is beyond the fastest NIC, {fastest}, and caps nothing; leave it out");
                problems.add(format!("tenant[{i}].cap"), message);
            }
            if let Some(host_cap) = tenant.host_cap.filter(|host_cap| *host_cap > most) {
                let message =
                    format!("{host_cap} is beyond the NICs of every host, {most}, and caps nothing; leave it out");
                problems.add(format!("tenant[{i}].host_cap"), message);
            }
        }
    }
}

#[cfg(test)]
mod tests;
