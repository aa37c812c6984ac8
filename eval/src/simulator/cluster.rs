//! Jobs of a scenario: arrivals, sizes and placement on hosts.

use mccs_config::PolicyFile;
use mccs_config::policy::{PolicySection, TenantRule};
use mccs_policy::random::Random;
use mccs_policy::topology::{Clos, HostId, Topology, TopologyError};
use mccs_policy::{CommId, Job, Placed, PlacedRank, RingChoice, Rules, rings};

use super::engine::SimulationError;
use super::scenario::{Arrivals, Placement, RingOrders, Scenario, SeenFlow, Variant, Work};

/// A job that has not come yet.
#[derive(Debug, Clone)]
pub struct Coming {
    /// Name.
    pub name: String,
    /// Its tenant.
    pub tenant: String,
    /// Its work.
    pub work: Work,
    /// When it comes.
    pub start_ns: u64,
    /// The place that it wants.
    pub wants: Wants,
    /// How a network's hash was seen to send its flows.
    pub hashed: Vec<Hashed>,
}

/// How a network's hash was seen to send a flow.
#[derive(Debug, Clone, Copy)]
pub struct Hashed {
    /// Its channel.
    pub channel: u32,
    /// The sender.
    pub from: HostId,
    /// The receiver.
    pub to: HostId,
    /// Over which spine.
    pub spine: u32,
}

/// The place that a job wants.
#[derive(Debug, Clone)]
pub enum Wants {
    /// Host and device of every rank.
    These(Vec<(HostId, u32)>),
    /// So many devices.
    Devices(u32, Placement),
}

/// The network of a scenario.
///
/// # Errors
/// Numbers that make no network.
pub fn topology(scenario: &Scenario) -> Result<Topology, TopologyError> {
    let network = &scenario.topology;
    Topology::clos(&Clos {
        pods: network.pods,
        racks_per_pod: network.racks_per_pod,
        hosts_per_rack: network.hosts_per_rack,
        devices_per_host: network.devices_per_host,
        nics_per_host: network.nics_per_host,
        rails: network.rails,
        spines_per_pod: network.spines_per_pod,
        cores_per_spine: network.cores_per_spine,
        nic_bps: network.nic.0 as f64,
        leaf_spine_bps: network.leaf_spine.0 as f64,
        spine_core_bps: network.spine_core.0 as f64,
    })
}

/// The operator's rules in a variant.
#[must_use]
pub fn rules(scenario: &Scenario, variant: &Variant, topology: &Topology) -> Rules {
    let mut tenants = scenario.tenants.clone();
    for (name, percent) in &variant.shares {
        let place = tenants.iter().position(|tenant| tenant.name == *name).unwrap_or_else(|| {
            tenants.push(TenantRule::new(name));
            tenants.len() - 1
        });
        tenants[place].share_percent = Some(*percent);
    }
    let file = PolicyFile {
        policy: PolicySection::new("ffa"),
        tenants,
        reserves: scenario.reserves.clone(),
        windows: Vec::new(),
    };
    let rings = if variant.rings == RingOrders::Local { RingChoice::Local } else { RingChoice::Kept };
    Rules { rings, ..Rules::from_file(&file, topology) }
}

/// All jobs, in the order of their coming.
///
/// # Errors
/// A rank on a host or device, or a reserved path, that is not there.
pub fn coming(scenario: &Scenario, topology: &Topology, seed: u64) -> Result<Vec<Coming>, SimulationError> {
    let mut reserved = scenario.reserves.iter().flat_map(|reserve| &reserve.paths);
    if let Some(path) = reserved.find(|path| topology.spine_named(path).is_none()) {
        return Err(SimulationError::NoSuchPath(path.clone()));
    }
    let mut all = Vec::new();
    for job in &scenario.jobs {
        let place = |text: &String| {
            let (host, device) = text.split_once(':').unwrap_or((text, "0"));
            let found = topology.host_named(host).zip(device.parse().ok());
            found
                .filter(|(host, device)| *device < topology.device_count(*host))
                .ok_or_else(|| SimulationError::NoSuchPlace { job: job.name.clone(), place: text.clone() })
        };
        let places = job.ranks.iter().map(place).collect::<Result<Vec<_>, _>>()?;
        all.push(Coming {
            name: job.name.clone(),
            tenant: job.name.clone(),
            work: job.work.clone(),
            start_ns: u64::try_from(job.start.0.as_nanos()).unwrap_or(u64::MAX),
            wants: Wants::These(places),
            hashed: hashed(scenario, topology, &job.name)?,
        });
    }
    if let Some(arrivals) = &scenario.arrivals {
        all.extend(draw(arrivals, seed));
    }
    all.sort_by_key(|job| job.start_ns);
    Ok(all)
}

fn hashed(scenario: &Scenario, topology: &Topology, job: &str) -> Result<Vec<Hashed>, SimulationError> {
    let host = |name: &String| {
        let no_such = || SimulationError::NoSuchPlace { job: job.to_owned(), place: name.clone() };
        topology.host_named(name).ok_or_else(no_such)
    };
    let spine = |name: &String| topology.spine_named(name).ok_or_else(|| SimulationError::NoSuchPath(name.clone()));
    let own = scenario.hashed.iter().filter(|hashed| hashed.job == job);
    own.map(|SeenFlow { channel, from, to, way, .. }| {
        Ok(Hashed { channel: *channel, from: host(from)?, to: host(to)?, spine: spine(way)? })
    })
    .collect()
}

fn draw(arrivals: &Arrivals, seed: u64) -> Vec<Coming> {
    let mut random = Random::new(seed);
    let mut now_ns = 0.0;
    let draw = |number: u32| {
        let work = Work {
            channels: arrivals.channels,
            collective: super::scenario::Collective::AllReduce,
            algorithm: arrivals.algorithm,
            bytes: arrivals.bytes[random.below(arrivals.bytes.len())],
            compute: arrivals.compute[random.below(arrivals.compute.len())],
            jitter_percent: 0.0,
            iterations: between(arrivals.iterations, random.unit()),
        };
        let devices = arrivals.devices[random.below(arrivals.devices.len())];
        let start_ns = now_ns as u64;
        now_ns -= arrivals.interval.0.as_nanos() as f64 * (1.0 - random.unit()).ln();
        let name = format!("job{number}");
        let wants = Wants::Devices(devices, arrivals.placement);
        Coming { tenant: name.clone(), name, work, start_ns, wants, hashed: Vec::new() }
    };
    (0..arrivals.jobs).map(draw).collect()
}

/// A number of the range, every magnitude equally likely.
fn between([least, most]: [u64; 2], unit: f64) -> u64 {
    let (least, most) = (least as f64, most as f64);
    (least * (most / least).powf(unit)).round() as u64
}

/// Devices that nobody has.
#[derive(Debug)]
pub struct Free {
    /// By host: which devices.
    devices: Vec<Vec<u32>>,
    count: usize,
    random: Random,
}

impl Free {
    /// All of a topology.
    #[must_use]
    pub fn all(topology: &Topology, seed: u64) -> Self {
        let hosts = (0..topology.host_count() as u32).map(HostId);
        let devices: Vec<Vec<u32>> = hosts.map(|host| (0..topology.device_count(host)).rev().collect()).collect();
        Free { count: devices.iter().map(Vec::len).sum(), devices, random: Random::new(seed ^ 0x706c_6163) }
    }

    /// Takes what a job wants; `None` while it is not free. Fixed places are taken as they are, whoever has them.
    pub fn take(&mut self, wants: &Wants) -> Option<Vec<(HostId, u32)>> {
        let (count, placement) = match wants {
            Wants::These(places) => return Some(places.clone()),
            Wants::Devices(count, placement) => (*count as usize, *placement),
        };
        if self.count < count {
            return None;
        }
        self.count -= count;
        let mut places = Vec::with_capacity(count);
        if placement == Placement::Devices {
            let mut all: Vec<(u32, u32)> = Vec::with_capacity(self.count + count);
            for (host, devices) in (0..).zip(&self.devices) {
                all.extend(devices.iter().map(|device| (host, *device)));
            }
            self.random.shuffle(&mut all);
            for (host, device) in all.into_iter().take(count) {
                self.devices[host as usize].retain(|free| *free != device);
                places.push((HostId(host), device));
            }
            return Some(places);
        }
        let mut hosts: Vec<u32> = (0..self.devices.len() as u32).collect();
        match placement {
            Placement::Hosts => self.random.shuffle(&mut hosts),
            // Hosts of which nobody has anything come first, so that few jobs are torn.
            _ => hosts.sort_by_key(|host| std::cmp::Reverse(self.devices[*host as usize].len())),
        }
        for host in hosts {
            let free = &mut self.devices[host as usize];
            while places.len() < count
                && let Some(device) = free.pop()
            {
                places.push((HostId(host), device));
            }
        }
        Some(places)
    }

    /// Gives back what a job had.
    pub fn give_back(&mut self, wants: &Wants, places: &[(HostId, u32)]) {
        if let Wants::Devices(..) = wants {
            self.count += places.len();
            for (host, device) in places {
                self.devices[host.0 as usize].push(*device);
            }
        }
    }
}

/// The communicator of a job at these places, with the ring orders of a variant.
#[must_use]
pub fn communicator(
    comm: CommId,
    coming: &Coming,
    places: &[(HostId, u32)],
    orders: RingOrders,
    seed: u64,
    topology: &Topology,
) -> Job {
    let mut hosts: Vec<Placed> = Vec::new();
    let mut numbers = std::collections::HashMap::new();
    for (rank, (host, device)) in (0..).zip(places) {
        let number = *numbers.entry(*host).or_insert_with(|| {
            hosts.push(Placed { host: *host, ranks: Vec::new() });
            hosts.len() - 1
        });
        hosts[number].ranks.push(PlacedRank { rank, device: *device });
    }
    let mut job = Job {
        comm,
        tenant: coming.tenant.clone(),
        hosts,
        channels: coming.work.channels,
        ring_orders: Vec::new(),
        profile: None,
        pinned: None,
    };
    let seed = seed ^ comm.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    job.ring_orders = match orders {
        RingOrders::Local => Vec::new(),
        RingOrders::Scattered => rings::scattered(topology, &job),
        RingOrders::RandomHosts => rings::shuffled_hosts(topology, &job, seed),
        RingOrders::RandomRanks => rings::shuffled_ranks(&job, seed),
    };
    job
}
