//! A communicator as operators see it: what it is, its ranks' progress, counters and bus bandwidth.
//!
//! The data path only touches atomics of the communicator at hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mccs_ipc::protocol::HostRun;
use mccs_ipc::types::{CollectiveKind, UniqueId, WorkDone};
use mccs_telemetry::bandwidth::{PairSide, RecentTraffic, TenantTraffic, Traffic};
use mccs_telemetry::counter_sanity::CounterSanity;
use mccs_telemetry::failed::FailedView;
use mccs_telemetry::placed::Placed;
use mccs_telemetry::straggler;

use mccs_device::cuda::KernelBlocks;
use mccs_device::host::TenantShmExchange;
use mccs_device::{CarriedOutBy, DeviceInitiatedGroup, Reading, TimedCollective};
use mccs_model::SessionId;
use mccs_tenants::session::Session;

use super::family::{Family, Joining, PartOf, Whole};

/// How far a rank is: counts of collectives, so the last sequence number plus one.
#[derive(Debug)]
pub struct RankInfo {
    /// The rank.
    pub rank: u32,
    /// Its session.
    pub session: SessionId,
    /// Its process.
    pub pid: i32,
    /// Its GPU, by its number here.
    pub gpu: Option<u32>,
    /// Rounds of the shared-memory exchange that it has begun, as far as it has told.
    pub rounds: AtomicU64,
    /// Enqueued by the tenant; this and the following without rounds.
    pub enqueued: AtomicU64,
    /// Started on all ranks.
    pub started: AtomicU64,
    /// Completed.
    pub completed: AtomicU64,
    /// The last tag that it has given an operation of the service's; 0 is none.
    pub user_tag: AtomicU64,
    /// Time by which it has come later to started collectives than the first rank of this host. Operations of copy engines do not count.
    pub late_ns: AtomicU64,
}

impl RankInfo {
    /// A rank that has done nothing yet.
    #[must_use]
    pub fn new(rank: u32, session: &Session, gpu: Option<u32>) -> Self {
        RankInfo {
            rank,
            session: session.id,
            pid: session.peer.pid,
            gpu,
            rounds: 0.into(),
            enqueued: 0.into(),
            started: 0.into(),
            completed: 0.into(),
            user_tag: 0.into(),
            late_ns: 0.into(),
        }
    }
}

/// Device of communicators whose buffers are on GPUs, and that run in memory of the host.
pub const HOST_STAGED: &str = "host-staged";

/// A communicator as the operator sees it.
#[derive(Debug)]
pub struct CommInfo {
    /// Its number, for the life of the service.
    pub number: u64,
    /// The tenant's name for it.
    pub id: UniqueId,
    /// Its tenant's name for it; empty if it has none.
    pub name: String,
    /// The job that it is part of, as its launcher calls it; empty where that is not known.
    pub job: String,
    /// Traffic class of its packets to other hosts, where its tenant has asked for one that the operator allows.
    pub traffic_class: Option<u8>,
    /// Its owner.
    pub tenant: String,
    /// The tenant of `policy.toml` whose rules hold for it.
    pub rules: String,
    /// Device it runs on.
    pub device: String,
    /// Its ranks on all hosts.
    pub nranks: u32,
    /// Its hosts, this one included; none where all ranks are here.
    pub hosts: Vec<String>,
    /// Its ranks in order, by their hosts, if all are on GPUs and several hosts have some.
    pub host_runs: Vec<HostRun>,
    /// The order in which its hosts pass on what GPUs reduce, by their places among `host_runs`; empty where each exchanges with every other.
    pub reduction_ring: Vec<u32>,
    /// Family of its parts, or of the whole that it is a part of.
    pub family: Arc<Family>,
    /// Its relation to another communicator, if it is a part.
    pub part: Option<PartOf>,
    /// Ranks of this host, ascending.
    pub ranks: Vec<RankInfo>,
    /// Collectives and point-to-point pairs completed.
    pub operations: AtomicU64,
    /// Their payload, counted as nccl-tests does.
    pub bytes: AtomicU64,
    /// Payload times the collective's bus factor: what an ideal ring moves over each link.
    pub bus_bytes: AtomicU64,
    /// Time in which a collective was running. Operations of ranks among themselves are timed by a sample, here and in what follows, which
    /// stands for the rest.
    pub busy_ns: AtomicU64,
    /// Time that ranks' kernels held multiprocessors, of all ranks and multiprocessors together. Operations of copy engines hold none, but
    /// for combining, which is not counted.
    pub multiprocessor_ns: AtomicU64,
    /// Collectives that end on no rank before all have come, and the part of `busy_ns` that is theirs.
    pub joint: [AtomicU64; 2],
    /// Point-to-point pairs among `operations`; without those of ranks on GPUs, which [`CommInfo::pairs`] has.
    pub pairs: AtomicU64,
    /// Puts of port channels that have ended, and their bytes. They are no operations.
    pub puts: AtomicU64,
    /// See `puts`.
    pub put_bytes: AtomicU64,
    /// Recent rates of its collectives.
    pub recent: RecentTraffic,
    /// All its tenant's collectives.
    pub traffic: Arc<TenantTraffic>,
    /// Its number in flows' names, if it has other hosts.
    pub links: Option<u64>,
    /// Why its flows began over TCP, if they did.
    pub transport_reason: Option<String>,
    /// Operations that failed.
    pub failed: AtomicU64,
    /// Number of the strategy in force.
    pub epoch: AtomicU64,
    /// Exchange by which its ranks do small collectives among themselves.
    pub shm_exchange: Option<Arc<TenantShmExchange>>,
    /// Group of its ranks, on GPUs, that do collectives among themselves.
    pub device_initiated: Option<Arc<DeviceInitiatedGroup>>,
    /// State for a controller, if there are other hosts.
    pub placed: Option<Placed>,
    /// Last check of its ranks' counts of collectives.
    pub operation_sanity: CounterSanity,
    /// The same of point-to-point pairs.
    pub pair_sanity: CounterSanity,
}

impl CommInfo {
    /// The caller's number for one of its ranks: parts have other numbers than their whole.
    #[must_use]
    pub fn name_of(&self, rank: u32) -> u32 {
        self.part.as_ref().map_or(rank, |part| part.name_of(rank))
    }

    /// The number of the caller's communicator: its own, or that of the whole that it is a part of.
    #[must_use]
    pub fn whole(&self) -> u64 {
        self.part.as_ref().map_or(self.number, |part| part.whole)
    }

    /// Whether all its ranks are on GPUs of this service that do not all reach each other.
    #[must_use]
    pub fn has_sites_here(&self) -> bool {
        self.hosts.len() <= 1 && !self.host_runs.is_empty()
    }

    /// The part that a rank joins that is `rank` here.
    ///
    /// # Errors
    /// Why it is no part of this.
    pub fn part_for(&self, rank: u32, joining: Joining) -> Result<PartOf, String> {
        if self.part.is_some() {
            return Err("it is itself a part of another communicator".into());
        }
        let CommInfo { number, nranks, host_runs, reduction_ring, family, .. } = self;
        let (number, nranks, spans_services) = (*number, *nranks, self.hosts.len() > 1);
        PartOf::new(Whole { number, nranks, spans_services, host_runs, reduction_ring, family }, rank, joining)
    }

    /// The first ranks of hosts, or of their groups of GPUs, in the order in which these pass on what they reduce; none where they do not.
    #[must_use]
    pub fn reduction_ring_of_ranks(&self) -> Vec<u32> {
        let first = |place: &u32| self.host_runs.iter().take(*place as usize).map(|run| run.ranks).sum();
        self.reduction_ring.iter().map(first).collect()
    }

    /// Whether it is a rail whose ranks pass on what they reduce.
    #[must_use]
    pub fn has_reduction_ring(&self) -> bool {
        self.part.as_ref().is_some_and(|part| !part.reduction_ring.is_empty())
    }

    /// The last tag that a rank has given an operation, whoever carries it out; 0 is none.
    #[must_use]
    pub fn user_tag(&self, rank: &RankInfo) -> u64 {
        match &self.device_initiated {
            Some(group) if group.page().last_tag(rank.rank) != 0 => group.page().last_tag(rank.rank),
            _ => rank.user_tag.load(Ordering::Relaxed),
        }
    }

    /// A message about it, with its name where it has one, and with the part in which it arose.
    #[must_use]
    pub fn named(&self, message: &Arc<str>) -> Arc<str> {
        let name = format!(" (communicator {})", self.name);
        let name = Some(name).filter(|name| !self.name.is_empty() && !message.contains(name.as_str()));
        match (self.part.as_ref().and_then(|part| part.remark(message)), name) {
            (None, None) => Arc::clone(message),
            (part, name) => format!("{message}{}{}", part.unwrap_or_default(), name.unwrap_or_default()).into(),
        }
    }

    /// View that is kept of it when it has failed.
    #[must_use]
    pub fn failed_view(&self, reason: &str) -> FailedView {
        FailedView {
            communicator: self.number,
            unique_id: self.id.to_string(),
            tenant: self.tenant.clone(),
            job: self.job.clone(),
            nranks: self.nranks,
            hosts: self.hosts.clone(),
            operations: self.totals().operations,
            reason: reason.into(),
            age_seconds: 0,
        }
    }

    /// Whether its buffers are on GPUs, and it runs in memory of the host.
    #[must_use]
    pub fn is_staged(&self) -> bool {
        self.device == HOST_STAGED
    }
}

/// Raises a counter of a communicator that its proxy engine alone writes, which costs less than to add together with others.
fn raise(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// How far a rank is with all its collectives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankProgress {
    /// Begun by the tenant.
    pub enqueued: u64,
    /// Begun by all ranks.
    pub started: u64,
    /// Ended.
    pub completed: u64,
}

impl CommInfo {
    /// Counts a completed collective.
    pub fn count_collective(&self, kind: CollectiveKind, count: u64, dtype_bytes: usize, took: Duration) {
        let traffic = Traffic::new(kind, count.saturating_mul(dtype_bytes as u64), u64::from(self.nranks));
        self.count_operation(traffic.payload_bytes);
        self.count_time(kind, traffic, took, 1, straggler::is_joint(kind));
    }

    /// Counts the time of collectives that are alike: how many, and whether none ends before all ranks have come. The proxy engine does so, and who looks at
    /// what ranks did.
    fn count_time(&self, kind: CollectiveKind, traffic: Traffic, took: Duration, times: u64, is_joint: bool) {
        let Traffic { payload_bytes, bus_bytes } = traffic;
        let took_ns = (took.as_nanos() as u64).saturating_mul(times);
        self.bus_bytes.fetch_add(bus_bytes.saturating_mul(times), Ordering::Relaxed);
        self.busy_ns.fetch_add(took_ns, Ordering::Relaxed);
        if is_joint {
            let [operations, time_ns] = &self.joint;
            operations.fetch_add(times, Ordering::Relaxed);
            time_ns.fetch_add(took_ns, Ordering::Relaxed);
        }
        self.recent.count(kind, bus_bytes, took);
        self.traffic.count(kind, payload_bytes, took, times);
    }

    /// Counts what has come to be known of how long collectives took that ranks did among themselves, and copy engines.
    pub(super) fn count_times(&self) {
        if let Some(group) = &self.device_initiated {
            let blocks = group.strategies().blocks();
            group.take_times(|reading, by| {
                self.count_reading(reading);
                if by == CarriedOutBy::Kernels {
                    self.count_multiprocessors(reading, &blocks);
                }
            });
        }
        if let Some(shm_exchange) = &self.shm_exchange {
            self.count_reading(&shm_exchange.take_times(Instant::now()));
        }
    }

    fn count_reading(&self, reading: &Reading) {
        for (timed, times) in reading.weighted() {
            let TimedCollective { kind, payload_bytes, took, late } = timed;
            let count_bytes = payload_bytes / kind.payload_count(1, self.nranks).max(1);
            // None of them ends before all ranks have come.
            let traffic = Traffic::new(*kind, count_bytes, u64::from(self.nranks));
            self.count_time(*kind, traffic, *took, times, true);
            for rank in &self.ranks {
                let late = late.get(rank.rank as usize).map_or(0, |late| late.as_nanos() as u64);
                rank.late_ns.fetch_add(late.saturating_mul(times), Ordering::Relaxed);
            }
        }
    }

    /// Counts what ranks' kernels held: a block has a multiprocessor for itself, also while it waits for other ranks.
    fn count_multiprocessors(&self, reading: &Reading, blocks: &KernelBlocks) {
        for (timed, times) in reading.weighted() {
            let ran_ns = timed.ran_on_all(self.nranks).as_nanos() as u64;
            let held_ns = ran_ns.saturating_mul(u64::from(blocks.of(timed.kind, timed.payload_bytes)));
            self.multiprocessor_ns.fetch_add(held_ns.saturating_mul(times), Ordering::Relaxed);
        }
    }

    /// Counts a collective that was handed to GPUs: how long it takes is not known yet.
    pub fn count_handed_out(&self, kind: CollectiveKind, count: u64, dtype_bytes: usize) {
        let traffic = Traffic::new(kind, count.saturating_mul(dtype_bytes as u64), u64::from(self.nranks));
        self.count_operation(traffic.payload_bytes);
    }

    fn count_operation(&self, bytes: u64) {
        raise(&self.operations, 1);
        raise(&self.bytes, bytes);
        for rank in &self.ranks {
            raise(&rank.completed, 1);
        }
    }

    /// Whether the proxy engine knows when its collectives begin and end: those of ranks on GPUs are handed out, and end there.
    #[must_use]
    pub fn is_timed(&self) -> bool {
        self.device_initiated.is_none()
    }

    /// Collectives that were handed to GPUs and have ended there.
    fn of_handed_out(&self, handed_out: u64) -> u64 {
        let large = self.device_initiated.as_ref().and_then(|group| group.large());
        large.map_or(handed_out, |large| handed_out.min(large.operations().ended))
    }

    /// Counts a completed send and its receive; where they are on two hosts, the sender's counts.
    pub fn count_pair(&self, bytes: u64) {
        raise(&self.operations, 1);
        raise(&self.pairs, 1);
        raise(&self.bytes, bytes);
    }

    /// Counts a put of a port channel that has ended.
    pub fn count_put(&self, bytes: u64) {
        raise(&self.puts, 1);
        raise(&self.put_bytes, bytes);
    }

    /// Sides of a point-to-point operation on this host took so long, from when it could begin here. A pair that ends at once has
    /// no time.
    pub fn time_pair(&self, sides: &[PairSide], bytes: u64, took: Duration) {
        if self.is_timed() && !took.is_zero() {
            sides.iter().for_each(|side| self.recent.count_pair(*side, bytes, took));
        }
    }

    /// Asks GPUs how far they are: [`CommInfo::progress`] and [`CommInfo::totals`] tell what was last known, as do the times.
    pub fn ask(&self) {
        self.count_times();
        if let Some(group) = &self.device_initiated {
            group.ask();
        }
    }

    /// How far one of `ranks` is. Counts in a shared-memory exchange are the tenant's word.
    #[must_use]
    pub fn progress(&self, info: &RankInfo) -> RankProgress {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (mut by_all, mut ended) = (0, 0);
        if let Some(shm_exchange) = &self.shm_exchange {
            by_all = self.rank_numbers().map(|rank| shm_exchange.posted(rank)).min().unwrap_or(0);
            ended = shm_exchange.completed(info.rank).operations;
        }
        if let Some(group) = &self.device_initiated {
            by_all = self.rank_numbers().map(|rank| group.page().launched(rank)).min().unwrap_or(0);
            ended = group.ended(info.rank);
        }
        RankProgress {
            enqueued: load(&info.enqueued).saturating_add(self.rounds(info)),
            started: load(&info.started).saturating_add(by_all),
            completed: self.of_handed_out(load(&info.completed)).saturating_add(ended),
        }
    }

    /// Rounds that one of `ranks` has begun.
    #[must_use]
    pub fn rounds(&self, info: &RankInfo) -> u64 {
        let told = info.rounds.load(Ordering::Relaxed);
        let launched = self.device_initiated.as_ref().map_or(0, |group| group.page().launched(info.rank));
        self.shm_exchange.as_ref().map_or(told, |shm_exchange| shm_exchange.posted(info.rank).max(told)).max(launched)
    }

    fn rank_numbers(&self) -> std::ops::Range<u32> {
        0..self.nranks
    }

    /// Operations completed on all ranks, and their payload. Ranks' counts are taken as far as they can be true: a tenant's sums are of all
    /// its communicators, those included that have ended.
    #[must_use]
    pub fn totals(&self) -> WorkDone {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counted = WorkDone { operations: self.of_handed_out(load(&self.operations)), bytes: load(&self.bytes) };
        counted.plus(self.told_rounds()).plus(self.pairs_on_gpus())
    }

    /// Operations of ranks among themselves, in [`CommInfo::totals`].
    #[must_use]
    pub fn told_rounds(&self) -> WorkDone {
        let rounds = self
            .shm_exchange
            .iter()
            .flat_map(|shm_exchange| self.rank_numbers().map(|rank| shm_exchange.completed(rank)))
            .min();
        let mut said = rounds.unwrap_or_default();
        if let Some(group) = &self.device_initiated {
            said.operations = self.rank_numbers().map(|rank| group.ended(rank)).min().unwrap_or(0);
            said.bytes = self.rank_numbers().map(|rank| group.payload_bytes(rank)).min().unwrap_or(0);
        }
        // All ranks together contribute no more than all slots hold.
        let layout = self.shm_exchange.as_ref().map(|shm_exchange| shm_exchange.layout());
        let bytes_max =
            layout.map_or(GPU_PAYLOAD_MAX, |layout| u64::from(layout.nranks) * u64::from(layout.slot_bytes));
        self.operation_sanity.told(Instant::now(), said, bytes_max)
    }

    /// Point-to-point pairs among the operations of [`CommInfo::totals`].
    #[must_use]
    pub fn pairs(&self) -> u64 {
        self.pairs.load(Ordering::Relaxed).saturating_add(self.pairs_on_gpus().operations)
    }

    /// Sends that ranks on GPUs have done among themselves, and their bytes.
    fn pairs_on_gpus(&self) -> WorkDone {
        let Some(group) = &self.device_initiated else { return WorkDone::default() };
        let said = self.rank_numbers().map(|rank| group.sent(rank)).fold(WorkDone::default(), WorkDone::plus);
        self.pair_sanity.told(Instant::now(), said, GPU_PAYLOAD_MAX)
    }

    /// Average bus bandwidth while busy, in GB/s.
    #[must_use]
    pub fn busbw_gbps(&self) -> f64 {
        let busy_ns = self.busy_ns.load(Ordering::Relaxed);
        if busy_ns == 0 { 0.0 } else { self.bus_bytes.load(Ordering::Relaxed) as f64 / busy_ns as f64 }
    }
}

/// More than the memory of all GPUs of a host, of which no collective's payload is longer.
const GPU_PAYLOAD_MAX: u64 = 1 << 43;
