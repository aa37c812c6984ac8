//! Registry of what lives in the service: sessions, tenants, communicators, GPUs. Its locks are
//! taken when something begins or ends, and by the operator's queries.
//!
//! It imports devices and the operator's protocol, whose views it makes, and knows no engine.
//!
//! The most important: [`Registry`], all that lives; [`CommInfo`], a communicator as everybody but its proxy engine sees it; [`Overseer`],
//! the views of the whole.

mod comm_info;
mod family;
pub mod missing_ranks;
mod overseer;
mod views;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use mccs_control::overview::PushesView;
use mccs_control::{HostView, OfficeView};
use mccs_ipc::types::WorkDone;
use mccs_model::gathering::Late;
use mccs_model::{Reductions, SessionId};
use mccs_runtime::WakerSlot;
use mccs_telemetry::failed::FailedComms;
use mccs_telemetry::flows::FlowTable;
use mccs_telemetry::missing_ranks::LateView;
use mccs_telemetry::recorder::Recorders;
use mccs_telemetry::{CommonTime, GpuInfo, HostInfo};
use mccs_tenants::session::Session;
use mccs_tenants::{Resource, Tenant};

pub use self::comm_info::{CommInfo, HOST_STAGED, RankInfo, RankProgress};
pub use self::family::{Family, Joining, PartOf};
pub use self::overseer::Overseer;
pub use self::views::session_view;

/// Totals of a tenant's communicators, those included that have ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TenantTotals {
    /// Operations completed.
    pub operations: u64,
    /// Point-to-point pairs among them.
    pub pairs: u64,
    /// Their payload.
    pub bytes: u64,
    /// Operations that failed.
    pub failed: u64,
}

impl TenantTotals {
    fn add(&mut self, comm: &CommInfo) {
        // First, since there may be more of them meanwhile, but not more than of all.
        self.pairs = self.pairs.saturating_add(comm.pairs());
        let WorkDone { operations, bytes } = comm.totals();
        self.operations = self.operations.saturating_add(operations);
        self.bytes = self.bytes.saturating_add(bytes);
        self.failed = self.failed.saturating_add(comm.failed.load(Ordering::Relaxed));
    }
}

/// Live ones, and what those that have ended have left behind, by tenant: together, so that nothing counts twice.
#[derive(Default)]
struct Comms {
    live: BTreeMap<u64, Arc<CommInfo>>,
    /// Over, but for what their GPUs have still to say.
    leaving: BTreeMap<u64, Arc<CommInfo>>,
    /// Totals of present tenants.
    ended: BTreeMap<String, TenantTotals>,
}

impl Comms {
    /// Nothing of a communicator will come to be known any more. Whoever drops it must not hold the lock: memory goes with it.
    fn left(&mut self, number: u64) -> Option<Arc<CommInfo>> {
        let comm = self.leaving.remove(&number)?;
        comm.count_times();
        // A tenant that has gone has no totals.
        self.ended.entry(comm.tenant.clone()).and_modify(|totals| totals.add(&comm));
        Some(comm)
    }
}

/// Connections that were refused, by who would have served them.
#[derive(Debug, Default)]
pub struct Refused {
    /// Tenants' sockets: no tenant, over a quota, or while the host is drained.
    pub tenants: AtomicU64,
    /// The operator's socket.
    pub control: AtomicU64,
    /// The exchange: strangers.
    pub exchange: AtomicU64,
    /// Metrics: too many at once, too slow, or not HTTP.
    pub metrics: AtomicU64,
}

impl Refused {
    /// All of them, as another program goes on with them.
    #[must_use]
    pub fn counters(&self) -> [&AtomicU64; 4] {
        [&self.tenants, &self.control, &self.exchange, &self.metrics]
    }
}

/// Everything that lives in the service, by number; and the hosts and tenants it knows, by name.
#[derive(Default)]
pub struct Registry {
    hosts: Mutex<BTreeMap<String, HostInfo>>,
    tenants: Mutex<BTreeMap<String, Arc<Tenant>>>,
    sessions: Mutex<BTreeMap<SessionId, Arc<Session>>>,
    comms: Arc<Mutex<Comms>>,
    /// By who gathers their ranks.
    late: Mutex<BTreeMap<String, Vec<Late>>>,
    next_number: AtomicU64,
    /// Grows when a communicator of several hosts begins, ends, or gets another strategy.
    comm_changes: AtomicU64,
    /// Grows when a burst is foreseen.
    bursts: AtomicU64,
    /// In nanoseconds; 0 where the clock is not known, or not needed.
    clock_error: AtomicU64,
    /// Last time of the cluster's common clock, and when it was read.
    clock: Mutex<Option<(Instant, CommonTime)>>,
    /// Why the operator empties the host; empty where nothing was said.
    draining: Mutex<Option<String>>,
    /// The controller's word on how GPUs are to reduce, if it has said any.
    reductions: Mutex<Option<Reductions>>,
    /// The controller's office, if there is one.
    office: Mutex<Option<OfficeView>>,
    /// Results of pushes to the collector of metrics, if there is one.
    pushes: Mutex<Option<PushesView>>,
    is_draining: AtomicBool,
    /// In seconds of the Unix epoch; 0 where there is none.
    certificate_end: AtomicU64,
    watcher: OnceLock<WakerSlot>,
    gpus: OnceLock<Arc<[GpuInfo]>>,
    rdma: OnceLock<Result<String, String>>,
    /// Flows to and from other hosts.
    pub flows: Arc<FlowTable>,
    /// Communicators that have failed.
    pub failed: FailedComms,
    /// Connections refused.
    pub refused: Refused,
    /// Last records of engines.
    pub recorders: Arc<Recorders>,
}

impl Registry {
    /// A number that no session or communicator has had.
    pub fn next_number(&self) -> u64 {
        self.next_number.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The last number that a session or communicator has had.
    #[must_use]
    pub fn last_number(&self) -> u64 {
        self.next_number.load(Ordering::Relaxed)
    }

    /// Numbers up to this one were given by another program.
    pub fn resume_numbers(&self, last: u64) {
        self.next_number.fetch_max(last, Ordering::Relaxed);
    }

    /// A session has begun.
    pub fn add_session(&self, session: Arc<Session>) {
        lock(&self.sessions).insert(session.id, session);
    }

    /// A session has ended.
    pub fn remove_session(&self, session: SessionId) {
        lock(&self.sessions).remove(&session);
    }

    /// Whether sessions of others than this tenant are here.
    #[must_use]
    pub fn has_others(&self, tenant: &Tenant) -> bool {
        // A session is charged before it is in the list, and longer.
        lock(&self.sessions).len() as u64 > tenant.used(Resource::Sessions)
    }

    /// Results of pushes to the collector, if there is one.
    #[must_use]
    pub fn pushes(&self) -> Option<PushesView> {
        lock(&self.pushes).clone()
    }

    /// Metrics were pushed, or could not be.
    pub fn count_push(&self, outcome: Result<(), String>) {
        let mut pushes = lock(&self.pushes);
        let pushes = pushes.get_or_insert_default();
        match &outcome {
            Ok(()) => pushes.accepted += 1,
            Err(_) => pushes.failed += 1,
        }
        pushes.trouble = outcome.err();
    }

    /// The service has GPUs. Said once.
    pub fn set_gpus(&self, gpus: Arc<[GpuInfo]>) {
        let _ = self.gpus.set(gpus);
    }

    /// Those that it has.
    #[must_use]
    pub fn gpus(&self) -> &[GpuInfo] {
        self.gpus.get().map_or(&[], |gpus| gpus)
    }

    /// How GPUs of communicators that begin from now on are to reduce; `None`: as the host's configuration says.
    pub fn set_reductions(&self, reductions: Option<Reductions>) {
        *lock(&self.reductions) = reductions;
    }

    /// See [`Registry::set_reductions`].
    #[must_use]
    pub fn reductions(&self) -> Option<Reductions> {
        *lock(&self.reductions)
    }

    /// Sets the controller, as this host knows it.
    pub fn set_office(&self, office: OfficeView) {
        *lock(&self.office) = Some(office);
    }

    /// The last office; none if there is no controller.
    #[must_use]
    pub fn office(&self) -> Option<OfficeView> {
        lock(&self.office).clone()
    }

    /// RDMA ports that flows to other hosts may leave by, in words; or why there are none. Said once.
    pub fn set_rdma(&self, rdma: Result<String, String>) {
        let _ = self.rdma.set(rdma);
    }

    /// The NICs of each GPU, nearest first. Said once.
    pub fn set_nics_of_gpus(&self, nics: Vec<Vec<String>>) {
        for (gpu, nics) in self.gpus().iter().zip(nics) {
            let _ = gpu.nics.set(nics);
        }
    }

    /// The same, where there are other hosts.
    #[must_use]
    pub fn rdma(&self) -> Option<&Result<String, String>> {
        self.rdma.get()
    }

    /// All hosts now, as the operator sees them.
    #[must_use]
    pub fn host_views(&self, now: Instant) -> Vec<HostView> {
        self.hosts().iter().map(|host| HostView::of(host, self.rdma(), now)).collect()
    }

    /// A host's state has changed.
    pub fn set_host(&self, host: HostInfo) {
        lock(&self.hosts).insert(host.name.clone(), host);
    }

    /// All hosts now.
    #[must_use]
    pub fn hosts(&self) -> Vec<HostInfo> {
        lock(&self.hosts).values().cloned().collect()
    }

    /// A tenant that may connect.
    pub fn add_tenant(&self, tenant: Arc<Tenant>) {
        lock(&self.comms).ended.entry(tenant.name.clone()).or_default();
        lock(&self.tenants).insert(tenant.name.clone(), tenant);
    }

    /// A tenant has gone, with its totals.
    pub fn remove_tenant(&self, name: &str) {
        lock(&self.tenants).remove(name);
        lock(&self.comms).ended.remove(name);
    }

    /// The tenant of this name.
    #[must_use]
    pub fn tenant(&self, name: &str) -> Option<Arc<Tenant>> {
        lock(&self.tenants).get(name).cloned()
    }

    /// All tenants.
    #[must_use]
    pub fn tenants(&self) -> Vec<Arc<Tenant>> {
        lock(&self.tenants).values().cloned().collect()
    }

    /// A communicator is complete.
    pub fn add_comm(&self, comm: Arc<CommInfo>) {
        let is_watched = comm.placed.is_some();
        lock(&self.comms).live.insert(comm.number, comm);
        if is_watched {
            self.note_comms();
        }
    }

    /// A communicator is over.
    pub fn remove_comm(&self, number: u64) {
        let mut comms = lock(&self.comms);
        let Some(comm) = comms.live.remove(&number) else { return };
        comms.leaving.insert(number, Arc::clone(&comm));
        drop(comms);
        let all = Arc::clone(&self.comms);
        let is_told = move || {
            let comm = lock(&all).left(number);
            drop(comm);
        };
        match &comm.device_initiated {
            Some(group) => group.ask_at_last(Box::new(is_told)),
            None => is_told(),
        }
        if comm.placed.is_some() {
            self.note_comms();
        }
    }

    /// Communicators that wait for ranks for long, all of which the same one gathers.
    pub fn set_late(&self, gatherer: &str, late: Vec<Late>) {
        lock(&self.late).insert(gatherer.to_owned(), late);
    }

    /// All of them.
    #[must_use]
    pub fn late(&self) -> Vec<Late> {
        lock(&self.late).values().flatten().cloned().collect()
    }

    /// All of them, as the operator sees them.
    #[must_use]
    pub fn late_views(&self, now: Instant) -> Vec<LateView> {
        self.late().iter().map(|late| LateView::of(late, now)).collect()
    }

    /// Something has become of a communicator of several hosts: who watches is woken.
    pub fn note_comms(&self) {
        self.comm_changes.fetch_add(1, Ordering::Release);
        if let Some(watcher) = self.watcher.get() {
            watcher.wake();
        }
    }

    /// Sets this host's time of the cluster's common clock, if it needs one.
    pub fn set_clock(&self, time: Option<CommonTime>, now: Instant) {
        self.clock_error.store(time.map_or(0, |time| time.error_ns.max(1)), Ordering::Relaxed);
        if let Some(time) = time {
            *lock(&self.clock) = Some((now, time));
        }
    }

    /// The last time, and when it was read.
    #[must_use]
    pub fn clock(&self) -> Option<(Instant, CommonTime)> {
        *lock(&self.clock)
    }

    /// The last error.
    #[must_use]
    pub fn clock_error_ns(&self) -> Option<u64> {
        Some(self.clock_error.load(Ordering::Relaxed)).filter(|ns| *ns > 0)
    }

    /// The operator wants the host empty, or in use again: whether processes without a session are refused.
    pub fn set_draining(&self, drains: bool, reason: Option<String>) {
        let mut why = lock(&self.draining);
        // A second request without a reason leaves the one that was given.
        *why = if drains { reason.or(why.take()) } else { None };
        self.is_draining.store(drains, Ordering::Relaxed);
    }

    /// Why the host is being emptied, where the operator has said.
    #[must_use]
    pub fn draining_reason(&self) -> Option<String> {
        lock(&self.draining).clone()
    }

    /// Until when other hosts take this one for who it is, in seconds of the Unix epoch.
    pub fn set_certificate_end(&self, unix_s: u64) {
        self.certificate_end.store(unix_s, Ordering::Relaxed);
    }

    /// The last error.
    #[must_use]
    pub fn certificate_end(&self) -> Option<u64> {
        Some(self.certificate_end.load(Ordering::Relaxed)).filter(|unix_s| *unix_s > 0)
    }

    /// The last error.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    /// A burst is foreseen of a communicator for which others make room: who watches is woken.
    pub fn note_burst(&self) {
        self.bursts.fetch_add(1, Ordering::Release);
        if let Some(watcher) = self.watcher.get() {
            watcher.wake();
        }
    }

    /// Differs after a burst was foreseen.
    #[must_use]
    pub fn bursts(&self) -> u64 {
        self.bursts.load(Ordering::Acquire)
    }

    /// Differs after something has become of a communicator.
    #[must_use]
    pub fn comm_changes(&self) -> u64 {
        self.comm_changes.load(Ordering::Acquire)
    }

    /// Sets the watcher to wake when something becomes of a communicator; the first counts.
    pub fn set_watcher(&self, watcher: WakerSlot) {
        let _ = self.watcher.set(watcher);
    }

    /// Totals of each tenant's communicators since the service began, and those of them that live.
    #[must_use]
    pub fn totals(&self) -> (BTreeMap<String, TenantTotals>, Vec<Arc<CommInfo>>) {
        let comms = lock(&self.comms);
        let mut totals = comms.ended.clone();
        for comm in comms.live.values().chain(comms.leaving.values()) {
            totals.entry(comm.tenant.clone()).or_default().add(comm);
        }
        (totals, comms.live.values().cloned().collect())
    }

    /// Totals of each tenant's communicators since the service began, without those of which another program goes on with the numbers.
    #[must_use]
    pub fn totals_besides(&self, goes_on: impl Fn(u64) -> bool) -> BTreeMap<String, TenantTotals> {
        let comms = lock(&self.comms);
        let mut totals = comms.ended.clone();
        let live = comms.live.values().filter(|comm| !goes_on(comm.number));
        for comm in live.chain(comms.leaving.values()) {
            totals.entry(comm.tenant.clone()).or_default().add(comm);
        }
        totals
    }

    /// Counts what communicators of a tenant have done that ended with another program.
    pub fn resume_totals(&self, tenant: &str, totals: TenantTotals) {
        lock(&self.comms).ended.insert(tenant.to_owned(), totals);
    }

    /// All sessions now.
    #[must_use]
    pub fn sessions(&self) -> Vec<Arc<Session>> {
        lock(&self.sessions).values().cloned().collect()
    }

    /// All communicators now.
    #[must_use]
    pub fn comms(&self) -> Vec<Arc<CommInfo>> {
        lock(&self.comms).live.values().cloned().collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
