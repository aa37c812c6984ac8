//! `eval/scenarios/*.toml`: a network, jobs, and the variants to be compared. The same file can
//! drive a run on an emulated fabric: hosts, devices and tenants are named as there.

use std::collections::{BTreeMap, BTreeSet};

use mccs_config::limits::{self, Limit};
use mccs_config::policy::{PolicySection, Reserve, TenantRule};
use mccs_config::validate::{Problems, Validate, nearest};
use mccs_config::{Bytes, DurationText, PolicyFile, Rate};
use mccs_ipc::types::CollectiveKind;
use serde::{Deserialize, Serialize};

/// Runs of a variant.
const SEEDS: Limit<u32> = Limit { min: 1, max: 10_000, reason: "each is a run" };
/// Jobs of a scenario.
const JOBS: Limit<u32> = Limit { min: 0, max: 100_000, reason: "each has its state" };
/// Pauses between decisions.
const REFRESH: Limit<DurationText> = Limit {
    min: DurationText::millis(1),
    max: DurationText::secs(24 * 3600),
    reason: "each asks the policy about all jobs",
};
/// Times that are repeated.
const ITERATIONS: Limit<u64> = Limit { min: 1, max: 1 << 32, reason: "each is an operation" };
/// Lengths of collectives.
const BYTES: Limit<Bytes> =
    Limit { min: Bytes(1), max: Bytes::gib(1 << 20), reason: "a collective has something to send" };

/// A whole scenario.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Name, also of the results.
    pub name: String,
    /// Its question, in a sentence.
    pub question: String,
    /// Runs of each variant: each has hashes and placements of its own.
    #[serde(default = "one")]
    pub seeds: u32,
    /// File of the emulated fabric that is this network in small, relative to this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<String>,
    /// The network.
    pub topology: Network,
    /// The variants that are compared; the first is the baseline.
    #[serde(rename = "variant")]
    pub variants: Vec<Variant>,
    /// As in `policy.toml`.
    #[serde(default, rename = "tenant")]
    pub tenants: Vec<TenantRule>,
    /// As in `policy.toml`.
    #[serde(default, rename = "reserve")]
    pub reserves: Vec<Reserve>,
    /// Jobs, one by one.
    #[serde(default, rename = "job")]
    pub jobs: Vec<JobSpec>,
    /// Jobs in numbers.
    #[serde(default)]
    pub arrivals: Option<Arrivals>,
    /// How often the policy is asked anew though nothing came, went or failed: profiles change. Absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refresh: Option<DurationText>,
    /// Changes while jobs run.
    #[serde(default, rename = "phase")]
    pub phases: Vec<Phase>,
    /// Flows whose paths a network's hash was seen to choose; all others go as one of the simulator's own has it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hashed: Vec<SeenFlow>,
    /// Events on the emulated fabric while its one job runs; the simulator knows no such things.
    #[serde(default, rename = "moment", skip_serializing_if = "Vec::is_empty")]
    pub moments: Vec<Moment>,
}

fn one() -> u32 {
    1
}

/// `[topology]`: a regular network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Parts that only cores join.
    #[serde(default = "one")]
    pub pods: u32,
    /// Racks of a pod.
    pub racks_per_pod: u32,
    /// Hosts of a rack.
    pub hosts_per_rack: u32,
    /// Devices of a host.
    pub devices_per_host: u32,
    /// NICs of a host.
    pub nics_per_host: u32,
    /// Each NIC of a host hangs on a leaf of its own.
    #[serde(default)]
    pub rails: bool,
    /// Spines of a pod.
    #[serde(default)]
    pub spines_per_pod: u32,
    /// Cores that each spine has links to.
    #[serde(default)]
    pub cores_per_spine: u32,
    /// Between a NIC and its leaf.
    pub nic: Rate,
    /// Between a leaf and a spine.
    #[serde(default)]
    pub leaf_spine: Rate,
    /// Between a spine and a core.
    #[serde(default)]
    pub spine_core: Rate,
}

/// `[[variant]]`: a way to run the same jobs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// Name.
    pub name: String,
    /// Name of the policy.
    pub policy: String,
    /// Orders of ranks.
    #[serde(default)]
    pub rings: RingOrders,
    /// Parts of contended links, by tenant: as `share_percent` in `policy.toml`, in this variant alone.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub shares: BTreeMap<String, u32>,
}

/// Source of ring orders.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RingOrders {
    /// The policy: as few crossings between racks as possible.
    #[default]
    Local,
    /// Another rack after every host.
    Scattered,
    /// Hosts at random.
    RandomHosts,
    /// Ranks at random.
    RandomRanks,
}

/// A collective.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collective {
    /// Everybody gets the sum.
    #[default]
    AllReduce,
    /// Everybody gets everything.
    AllGather,
    /// Everybody gets a part of the sum.
    ReduceScatter,
}

impl Collective {
    /// As the service calls it.
    #[must_use]
    pub fn kind(self) -> CollectiveKind {
        match self {
            Collective::AllReduce => CollectiveKind::AllReduce,
            Collective::AllGather => CollectiveKind::AllGather,
            Collective::ReduceScatter => CollectiveKind::ReduceScatter,
        }
    }
}

/// Members of the ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ring {
    /// Ranks.
    #[default]
    Ring,
    /// Hosts, each for all its ranks.
    HostRing,
}

/// `[[job]]`: a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "JobKeys", into = "JobKeys")]
pub struct JobSpec {
    /// Name, also its tenant's.
    pub name: String,
    /// Host and device of every rank, such as `"h0:1"`.
    pub ranks: Vec<String>,
    /// Its work.
    pub work: Work,
    /// When it starts.
    pub start: DurationText,
    /// Spine over which all its flows go at first, on the emulated fabric where no policy decides.
    pub way: Option<String>,
}

/// A job's work, again and again: it computes, then there is one collective.
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// Channels.
    pub channels: u32,
    /// The collective.
    pub collective: Collective,
    /// The algorithm.
    pub algorithm: Ring,
    /// Length of the longest buffer, as in nccl-tests.
    pub bytes: Bytes,
    /// Between two collectives.
    pub compute: DurationText,
    /// How much longer or shorter than `compute` it computes, at random.
    pub jitter_percent: f64,
    /// How often.
    pub iterations: u64,
}

/// The keys of a `[[job]]`. One table, so that a complaint names the key and its line, which `flatten` forgets.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct JobKeys {
    name: String,
    ranks: Vec<String>,
    #[serde(default = "two")]
    channels: u32,
    #[serde(default)]
    collective: Collective,
    #[serde(default)]
    algorithm: Ring,
    bytes: Bytes,
    #[serde(default)]
    compute: DurationText,
    #[serde(default)]
    jitter_percent: f64,
    iterations: u64,
    #[serde(default)]
    start: DurationText,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    way: Option<String>,
}

impl From<JobKeys> for JobSpec {
    fn from(keys: JobKeys) -> Self {
        let JobKeys { channels, collective, algorithm, bytes, compute, jitter_percent, iterations, .. } = keys;
        let work = Work { channels, collective, algorithm, bytes, compute, jitter_percent, iterations };
        JobSpec { name: keys.name, ranks: keys.ranks, work, start: keys.start, way: keys.way }
    }
}

impl From<JobSpec> for JobKeys {
    fn from(JobSpec { name, ranks, work, start, way }: JobSpec) -> Self {
        let Work { channels, collective, algorithm, bytes, compute, jitter_percent, iterations } = work;
        JobKeys { name, ranks, channels, collective, algorithm, bytes, compute, jitter_percent, iterations, start, way }
    }
}

fn two() -> u32 {
    2
}

/// `[arrivals]`: jobs that come as a seed decides.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arrivals {
    /// How many.
    pub jobs: u32,
    /// Numbers of devices that they want, each equally likely.
    pub devices: Vec<u32>,
    /// Mean time from one to the next; 0: all at once.
    #[serde(default)]
    pub interval: DurationText,
    /// Least and most iterations; every magnitude is equally likely.
    pub iterations: [u64; 2],
    /// Lengths of collectives, each equally likely.
    pub bytes: Vec<Bytes>,
    /// Times between collectives, each equally likely.
    pub compute: Vec<DurationText>,
    /// Channels.
    #[serde(default = "two")]
    pub channels: u32,
    /// The algorithm.
    #[serde(default)]
    pub algorithm: Ring,
    /// Their placement.
    pub placement: Placement,
}

/// Placement of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Free devices host by host, rack by rack.
    Packed,
    /// Hosts in random order, all free devices of one before the next.
    Hosts,
    /// Any free devices.
    Devices,
}

/// `[[phase]]`: from a time on, a link carries something else.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// When.
    pub at: DurationText,
    /// Lower and upper end, such as `["leaf0", "spine1"]`.
    pub link: [String; 2],
    /// Each direction; 0: the link is down.
    pub rate: Rate,
}

/// `[[hashed]]`: a flow whose way nobody has decided, and the way that it took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeenFlow {
    /// Its job.
    pub job: String,
    /// Its channel.
    pub channel: u32,
    /// Host that sends.
    pub from: String,
    /// Host that receives.
    pub to: String,
    /// Spine over which it goes.
    pub way: String,
}

/// `[[moment]]`: something that happens on the emulated fabric; one of the two, or nothing but a mark in time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moment {
    /// Its name in results.
    pub name: String,
    /// Its description in figures.
    pub what: String,
    /// When, from the time at which the job begins.
    pub at: DurationText,
    /// Variants in which it happens; in the others it is but a mark. Absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variants: Option<Vec<String>>,
    /// A TCP flow that is not the service's begins, and goes on to the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flow: Option<ForeignFlow>,
    /// The operator changes a strategy by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reconfigure: Option<ByHand>,
}

/// A flow that fills a path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForeignFlow {
    /// Host that sends.
    pub from: String,
    /// Host that receives.
    pub to: String,
    /// Spine over which it goes.
    pub way: String,
}

/// A change by hand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ByHand {
    /// Spine over which all flows of the job go from then on.
    pub way: String,
}

mccs_config::document!(Scenario);

impl Validate for Scenario {
    fn validate(&self, problems: &mut Problems) {
        problems.name("name", &self.name);
        problems.within("seeds", &self.seeds, &SEEDS);
        if self.variants.is_empty() {
            problems.add("variant", "there is nothing to compare; add [[variant]]");
        }
        self.topology.validate(problems);
        self.validate_tenants(problems);
        if let Some(refresh) = &self.refresh {
            problems.within("refresh", refresh, &REFRESH);
        }
        let policies = mccs_policy::names();
        for (i, variant) in self.variants.iter().enumerate() {
            if !policies.contains(&variant.policy.as_str()) {
                let message = format!("there is no policy {:?}; there are {}", variant.policy, policies.join(", "));
                problems.add(format!("variant[{i}].policy"), message);
            }
            if self.variants[..i].iter().any(|other| other.name == variant.name) {
                problems.add(format!("variant[{i}].name"), format!("there is another {:?}", variant.name));
            }
            let key = format!("variant[{i}].shares");
            for name in variant.shares.keys().filter(|name| self.jobs.iter().all(|job| job.name != **name)) {
                problems.add(&key, format!("there is no job {name:?}"));
            }
            for percent in variant.shares.values() {
                problems.within(&key, percent, &limits::SHARE_PERCENT);
            }
            let percent = variant.shares.values().fold(0_u32, |sum, percent| sum.saturating_add(*percent));
            if percent > 100 {
                problems.add(&key, format!("come to {percent}%; all together are at most 100%"));
            }
        }
        if self.jobs.is_empty() && self.arrivals.is_none() {
            problems.add("job", "nobody does anything; add [[job]] or [arrivals]");
        }
        let mut names = BTreeSet::new();
        for (i, job) in self.jobs.iter().enumerate() {
            let key = format!("job[{i}]");
            problems.name(format!("{key}.name"), &job.name);
            problems.within(format!("{key}.iterations"), &job.work.iterations, &ITERATIONS);
            problems.within(format!("{key}.channels"), &job.work.channels, &limits::CHANNELS);
            problems.within(format!("{key}.bytes"), &job.work.bytes, &BYTES);
            for (j, place) in job.ranks.iter().enumerate().filter(|(j, place)| job.ranks[..*j].contains(place)) {
                problems.add(format!("{key}.ranks[{j}]"), format!("another rank of the job is on {place:?}"));
            }
            if !(0.0..=100.0).contains(&job.work.jitter_percent) {
                problems.add(format!("{key}.jitter_percent"), "no time is negative: 0 to 100");
            }
            if job.ranks.is_empty() {
                problems.add(format!("{key}.ranks"), "has no ranks");
            }
            if !names.insert(&job.name) {
                problems.add(format!("{key}.name"), format!("there is another {:?}", job.name));
            }
        }
        if let Some(arrivals) = &self.arrivals {
            arrivals.validate(problems);
        }
        self.validate_moments(problems);
    }
}

impl Scenario {
    fn validate_moments(&self, problems: &mut Problems) {
        if !self.moments.is_empty() && (self.fabric.is_none() || self.jobs.len() != 1) {
            problems.add("moment", "things happen on a fabric, to one job: name the fabric, and one [[job]]");
        }
        for (i, moment) in self.moments.iter().enumerate() {
            let key = format!("moment[{i}]");
            if moment.flow.is_some() && moment.reconfigure.is_some() {
                problems.add(&key, "one thing happens at a time: add another [[moment]]");
            }
            if self.moments[..i].iter().any(|other| other.name == moment.name || other.at > moment.at) {
                problems.add(&key, "moments have names of their own, and come one after the other");
            }
            let variants = moment.variants.iter().flatten();
            for name in variants.filter(|name| self.variants.iter().all(|variant| variant.name != **name)) {
                problems.add(format!("{key}.variants"), format!("there is no variant {name:?}"));
            }
        }
    }
}

impl Scenario {
    /// Checks as of `policy.toml`; and whether tenants and jobs come that paths are reserved for, or that are spoken of: a
    /// rule for nobody changes nothing, and nobody would see why.
    fn validate_tenants(&self, problems: &mut Problems) {
        let jobs = self.jobs.iter().map(|job| job.name.as_str());
        let names: Vec<&str> = jobs.chain(self.tenants.iter().map(|tenant| tenant.name.as_str())).collect();
        // Jobs that come by themselves are called job0, job1, ...
        let strangers = self
            .reserves
            .iter()
            .enumerate()
            .filter(|(_, reserve)| self.arrivals.is_none() && !names.contains(&reserve.tenant.as_str()));
        for (i, Reserve { tenant, .. }) in strangers {
            let hint = nearest(tenant, names.iter().copied());
            let hint = hint.map(|near| format!("; did you mean {near:?}?")).unwrap_or_default();
            problems
                .add(format!("reserve[{i}].tenant"), format!("there is no job {tenant:?}, and jobs are tenants{hint}"));
        }
        for (i, SeenFlow { job, .. }) in self.hashed.iter().enumerate() {
            if !names.contains(&job.as_str()) {
                problems.add(format!("hashed[{i}].job"), format!("there is no job {job:?}"));
            }
        }
        let file = PolicyFile {
            policy: PolicySection::new("ffa"),
            tenants: self.tenants.clone(),
            reserves: self.reserves.clone(),
            windows: Vec::new(),
        };
        file.validate(problems);
    }
}

impl Network {
    fn validate(&self, problems: &mut Problems) {
        let counts = [
            ("pods", self.pods),
            ("racks_per_pod", self.racks_per_pod),
            ("hosts_per_rack", self.hosts_per_rack),
            ("devices_per_host", self.devices_per_host),
            ("nics_per_host", self.nics_per_host),
        ];
        for (key, _) in counts.iter().filter(|(_, count)| *count == 0) {
            problems.add(format!("topology.{key}"), "is 0: a network has at least one");
        }
        let (has_spines, has_cores) = (self.spines_per_pod > 0, self.cores_per_spine > 0);
        for (key, rate, is_used) in [
            ("nic", &self.nic, true),
            ("leaf_spine", &self.leaf_spine, has_spines),
            ("spine_core", &self.spine_core, has_cores),
        ] {
            if is_used {
                problems.within(format!("topology.{key}"), rate, &limits::LINK_RATE);
            }
        }
    }
}

impl Arrivals {
    fn validate(&self, problems: &mut Problems) {
        problems.within("arrivals.jobs", &self.jobs, &JOBS);
        problems.within("arrivals.channels", &self.channels, &limits::CHANNELS);
        for (i, bytes) in self.bytes.iter().enumerate() {
            problems.within(format!("arrivals.bytes[{i}]"), bytes, &BYTES);
        }
        for count in self.iterations {
            problems.within("arrivals.iterations", &count, &ITERATIONS);
        }
        if self.iterations[0] > self.iterations[1] {
            problems.add("arrivals.iterations", "the smaller one first");
        }
        let lists = [("devices", self.devices.len()), ("bytes", self.bytes.len()), ("compute", self.compute.len())];
        for (key, _) in lists.iter().filter(|(_, len)| *len == 0) {
            problems.add(format!("arrivals.{key}"), "lists nothing");
        }
        if self.devices.contains(&0) {
            problems.add("arrivals.devices", "a job has at least one device");
        }
    }
}
