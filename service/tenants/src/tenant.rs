//! Tenants: what each uses, charged and given back.
//!
//! A quota is taken by making a [`Charge`] and given back by dropping it, wherever that happens: nothing that ends can
//! forget to return what it held.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use mccs_ipc::types::UniqueId;
use mccs_model::rate_limit::SharedBucket;
use mccs_runtime::Share;
use mccs_telemetry::bandwidth::TenantTraffic;

use crate::fd_closer::FdCloser;
use crate::numbers::TenantNumber;
use crate::process_limits::{
    HELD, ProcessHoldings, descriptors_of_tenant, kept_descriptors_of_tenant, sent_descriptors_of_tenant,
};
use crate::quota::{IMPORTS_MAX, OverQuota, Quota, Resource, SessionResource};
use crate::token_bucket::TokenBucket;

/// Requests of a tenant that are served as they come, and those that follow a second while others are here. Each takes some 20 us of a thread that
/// all share, and as much of its process. A job makes some hundred, when it begins.
const REQUESTS_AT_ONCE: u32 = 4096;
const REQUESTS_PER_S: u32 = 1000;

/// A job's owner as the operator knows it.
#[derive(Debug)]
pub struct Tenant {
    /// Name from the configuration.
    pub name: String,
    /// The tenant of `policy.toml` whose rules hold for it.
    pub rules: String,
    /// Labels for operators beside its name.
    pub labels: BTreeMap<String, String>,
    /// Its limits.
    pub quota: Quota,
    /// Its part of engines that tenants share.
    pub share: Share,
    /// Traffic classes that its communicators may ask for.
    traffic_classes: Vec<u8>,
    /// Its collectives.
    pub traffic: Arc<TenantTraffic>,
    /// Closes what it has sent.
    pub closer: FdCloser<Charge>,
    /// Caps of its traffic to other hosts, together with all tenants of the same rules.
    caps: Arc<Caps>,
    /// Whether it is being taken away: its sessions end.
    is_removed: AtomicBool,
    _number: TenantNumber,
    /// Holdings of all tenants together.
    of_process: &'static ProcessHoldings,
    memory_bytes: AtomicU64,
    gpu_memory_bytes: AtomicU64,
    mappings: AtomicU64,
    sessions: AtomicU64,
    communicators: AtomicU64,
    /// Those that have ranks here, and their charges.
    by_id: Mutex<BTreeMap<UniqueId, Weak<Charge>>>,
    ranks: AtomicU64,
    imports: AtomicU64,
    mapped_bytes: AtomicU64,
    descriptors: AtomicU64,
    sent_descriptors: AtomicU64,
    kept_descriptors: AtomicU64,
    /// Bytes of regions that are freed and not gone yet: what they are charged for comes back in a moment.
    leaving_bytes: AtomicU64,
    requests: Mutex<TokenBucket>,
}

/// An operator's terms of a tenant besides its quota.
#[derive(Debug, Clone)]
pub struct Terms {
    /// See [`Tenant::name`].
    pub name: String,
    /// See [`Tenant::rules`].
    pub rules: String,
    /// See [`Tenant::labels`].
    pub labels: BTreeMap<String, String>,
    /// Its part of shared engines is in proportion to that.
    pub weight: u32,
    /// Traffic classes that its communicators may ask for.
    pub traffic_classes: Vec<u8>,
}

/// Caps of traffic of tenants of the same rules to other hosts, in bits per second, of those that some communicator keeps to.
#[derive(Debug, Default)]
pub struct Caps(Mutex<Vec<(u64, Weak<SharedBucket>)>>);

impl Caps {
    fn bucket(&self, cap_bps: u64) -> Arc<SharedBucket> {
        let mut capped = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Communicators hear of another cap one after the other, and some may hear of the one before once more.
        capped.retain(|(_, bucket)| bucket.strong_count() > 0);
        let same = capped.iter().find(|(of_bps, _)| *of_bps == cap_bps).and_then(|(_, bucket)| bucket.upgrade());
        same.unwrap_or_else(|| {
            let bucket = Arc::default();
            capped.push((cap_bps, Arc::downgrade(&bucket)));
            bucket
        })
    }
}

/// A part of a tenant's quota, held until dropped.
#[derive(Debug)]
pub struct Charge {
    tenant: Arc<Tenant>,
    resource: Resource,
    amount: u64,
    /// Charge that this is a part of, held as long.
    _of: Option<Arc<Charge>>,
}

impl Tenant {
    /// A tenant that uses nothing yet, of weight 1.
    #[must_use]
    pub fn new(name: String, quota: Quota) -> Arc<Self> {
        Self::weighted(name, quota, 1)
    }

    /// The same, with a part of shared engines in proportion to `weight`.
    #[must_use]
    pub fn weighted(name: String, quota: Quota, weight: u32) -> Arc<Self> {
        let (rules, labels, traffic_classes) = (name.clone(), BTreeMap::new(), Vec::new());
        Self::on_terms(Terms { name, rules, labels, weight, traffic_classes }, quota, Arc::default())
    }

    /// Whether its communicators may ask for a traffic class.
    #[must_use]
    pub fn allows_class(&self, class: u8) -> bool {
        self.traffic_classes.contains(&class)
    }

    /// A tenant on an operator's terms, which shares `caps` with all of the same rules.
    #[must_use]
    pub fn on_terms(terms: Terms, quota: Quota, caps: Arc<Caps>) -> Arc<Self> {
        let Terms { name, rules, labels, weight, traffic_classes } = terms;
        let number = TenantNumber::take();
        Arc::new(Tenant {
            name,
            rules,
            labels,
            quota,
            traffic_classes,
            share: Share { tenant: number.get(), weight },
            traffic: Arc::default(),
            closer: FdCloser::default(),
            caps,
            is_removed: AtomicBool::new(false),
            _number: number,
            of_process: &HELD,
            memory_bytes: AtomicU64::new(0),
            gpu_memory_bytes: AtomicU64::new(0),
            mappings: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
            communicators: AtomicU64::new(0),
            by_id: Mutex::default(),
            ranks: AtomicU64::new(0),
            imports: AtomicU64::new(0),
            mapped_bytes: AtomicU64::new(0),
            descriptors: AtomicU64::new(0),
            sent_descriptors: AtomicU64::new(0),
            kept_descriptors: AtomicU64::new(0),
            leaving_bytes: AtomicU64::new(0),
            requests: Mutex::new(TokenBucket::new(REQUESTS_AT_ONCE, REQUESTS_PER_S)),
        })
    }

    /// By which all its engines, and those of other tenants of its rules, know what they have sent to other hosts, under a cap in bits per
    /// second. Debts under one are not paid under another, nor are turns kept.
    #[must_use]
    pub fn capped(&self, cap_bps: u64) -> Arc<SharedBucket> {
        self.caps.bucket(cap_bps)
    }

    /// The job that it is, where the operator has said; empty otherwise.
    #[must_use]
    pub fn job(&self) -> &str {
        self.labels.get("job").map_or("", String::as_str)
    }

    /// The operator takes it away: sessions that look end. They are to be woken.
    pub fn remove(&self) {
        self.is_removed.store(true, Ordering::Release);
    }

    /// Why its sessions end then.
    #[must_use]
    pub fn removal(&self) -> String {
        format!("the operator has taken tenant {} away: its job is over", self.name)
    }

    /// Whether it holds anything that ends with its sessions and communicators.
    #[must_use]
    pub fn has_some(&self) -> bool {
        let held = [Resource::Sessions, Resource::Communicators, Resource::MemoryBytes, Resource::GpuMemoryBytes];
        held.into_iter().any(|resource| self.used(resource) > 0)
    }

    /// Whether its sessions are to end.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Acquire)
    }

    fn counter(&self, resource: Resource) -> (&AtomicU64, u64) {
        match resource {
            Resource::MemoryBytes => (&self.memory_bytes, self.quota.memory_bytes),
            Resource::GpuMemoryBytes => (&self.gpu_memory_bytes, self.quota.gpu_memory_bytes),
            Resource::Mappings => (&self.mappings, self.quota.mappings),
            Resource::Sessions => (&self.sessions, self.quota.sessions),
            Resource::Communicators => (&self.communicators, self.quota.communicators),
            Resource::Ranks => (&self.ranks, self.quota.ranks()),
            Resource::Imports => (&self.imports, IMPORTS_MAX),
            Resource::MappedBytes => (&self.mapped_bytes, u64::MAX),
            Resource::Descriptors => (&self.descriptors, descriptors_of_tenant()),
            Resource::SentDescriptors => (&self.sent_descriptors, sent_descriptors_of_tenant()),
            Resource::KeptDescriptors => (&self.kept_descriptors, kept_descriptors_of_tenant()),
        }
    }

    /// Why a session gets no more of something.
    #[must_use]
    pub fn session_is_full(&self, resource: SessionResource) -> String {
        let limit = match resource {
            SessionResource::Streams => u64::from(self.quota.streams),
            SessionResource::Regions | SessionResource::GpuRegions => u64::from(self.quota.regions),
            SessionResource::Ranks => self.quota.ranks_of_session(),
            SessionResource::GroupLength => self.quota.operations_in_flight,
        };
        let (tenant, what, remedy) = (&self.name, resource.name(), resource.remedy());
        format!("a session of tenant {tenant} has at most {limit} {what}; {remedy}")
    }

    /// Counts bytes of regions that are on their way out.
    pub(crate) fn note_leaving(&self, by_bytes: i64) {
        self.leaving_bytes.fetch_add(by_bytes as u64, Ordering::AcqRel);
    }

    /// Bytes of memory that is freed and not gone yet.
    #[must_use]
    pub fn leaving_bytes(&self) -> u64 {
        self.leaving_bytes.load(Ordering::Acquire)
    }

    /// Whether some memory is freed and not gone yet: a quota that is used up now may not be in a moment.
    #[must_use]
    pub fn is_memory_leaving(&self) -> bool {
        self.leaving_bytes() > 0
    }

    /// Whether a request is within its rate.
    #[must_use]
    pub fn may_request(&self, now: Instant) -> bool {
        self.requests().has_token(now)
    }

    /// Counts a request, if it is within its rate.
    pub fn note_request(&self, now: Instant) {
        self.requests().take(now);
    }

    fn requests(&self) -> MutexGuard<'_, TokenBucket> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How much is in use now.
    #[must_use]
    pub fn used(&self, resource: Resource) -> u64 {
        self.counter(resource).0.load(Ordering::Relaxed)
    }

    /// Takes `amount` of the quota.
    ///
    /// # Errors
    /// [`OverQuota`], and nothing is taken.
    pub fn charge(self: &Arc<Self>, resource: Resource, amount: u64) -> Result<Charge, OverQuota> {
        self.charge_within(resource, amount, u64::MAX)
    }

    /// The same, where there may be so much of it besides.
    ///
    /// # Errors
    /// As [`Tenant::charge`].
    pub fn charge_within(self: &Arc<Self>, resource: Resource, amount: u64, limit: u64) -> Result<Charge, OverQuota> {
        let (counter, own) = self.counter(resource);
        let limit = own.min(limit);
        let refused = |tenant: &str, used, limit| {
            let (tenant, what, remedy) = (tenant.to_owned(), resource.name(), resource.remedy());
            OverQuota { tenant, what, asked: amount, used, limit, remedy }
        };
        let of_all = self.of_process.of(resource);
        if let Some(of_all) = of_all {
            let with_all = |used| refused(&format!("{}, with all others together,", self.name), used, of_all.most());
            of_all.take(amount).map_err(with_all)?;
        }
        let add = |used: u64| used.checked_add(amount).filter(|sum| *sum <= limit);
        match counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(Charge { tenant: Arc::clone(self), resource, amount, _of: None }),
            Err(used) => {
                of_all.inspect(|of_all| of_all.give_back(amount));
                Err(refused(&self.name, used, limit))
            }
        }
    }
}

impl Tenant {
    /// A rank joins the communicator of an id: the first one takes it of the quota, and the last one to end gives it back.
    ///
    /// # Errors
    /// [`OverQuota`], and nothing is taken.
    pub fn charge_rank(self: &Arc<Self>, id: UniqueId) -> Result<Charge, OverQuota> {
        let mut rank = self.charge(Resource::Ranks, 1)?;
        let mut by_id = self.by_id.lock().unwrap_or_else(PoisonError::into_inner);
        let communicator = match by_id.get(&id).and_then(Weak::upgrade) {
            Some(communicator) => communicator,
            None => {
                let communicator = Arc::new(self.charge(Resource::Communicators, 1)?);
                // Those that have ended go when they are as many as those that have not.
                if by_id.len() as u64 >= 2 * self.used(Resource::Communicators) {
                    by_id.retain(|_, charge| charge.strong_count() > 0);
                }
                by_id.insert(id, Arc::downgrade(&communicator));
                communicator
            }
        };
        rank._of = Some(communicator);
        Ok(rank)
    }
}

impl Charge {
    /// The tenant's quota for a part of what this is for, which counts as that: it is given back when both have ended.
    #[must_use]
    pub fn part(self: &Arc<Self>) -> Charge {
        Charge { tenant: Arc::clone(&self.tenant), resource: Resource::Ranks, amount: 0, _of: Some(Arc::clone(self)) }
    }

    /// How much it is.
    #[must_use]
    pub fn amount(&self) -> u64 {
        self.amount
    }

    /// Its owner.
    #[must_use]
    pub fn tenant(&self) -> &Arc<Tenant> {
        &self.tenant
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.tenant.counter(self.resource).0.fetch_sub(self.amount, Ordering::Relaxed);
        self.tenant.of_process.of(self.resource).inspect(|of_all| of_all.give_back(self.amount));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_communicator_count_once_until_the_last_has_left() {
        let tenant = Tenant::new("a".into(), Quota { communicators: 2, ..Quota::least() });
        let id = |number| UniqueId([number; 16]);
        let join = |number| tenant.charge_rank(id(number));
        let used = || (tenant.used(Resource::Communicators), tenant.used(Resource::Ranks));
        let mut ranks: Vec<_> = (0..8).map(|_| join(1).expect("one communicator")).collect();
        assert_eq!(used(), (1, 8));
        let other = join(2).expect("another");
        let refused = join(3).expect_err("a third").to_string();
        assert!(refused.contains("2 of 2"), "{refused}");
        assert_eq!(used(), (2, 9), "nothing is taken by what is refused");
        ranks.truncate(1);
        assert_eq!(used(), (2, 2));
        drop((ranks, other));
        assert_eq!(used(), (0, 0));
        for number in 4..100 {
            drop(join(number).expect("free again"));
        }
        assert!(tenant.by_id.lock().expect("no panic").len() <= 2, "what has ended is forgotten");
    }

    #[test]
    fn engines_share_what_a_tenant_sends_until_its_cap_is_another() {
        let (tenant, other) = (Tenant::new("a".into(), Quota::least()), Tenant::new("b".into(), Quota::least()));
        let first = tenant.capped(1);
        assert!(Arc::ptr_eq(&first, &tenant.capped(1)) && !Arc::ptr_eq(&first, &other.capped(1)));
        let second = tenant.capped(2);
        assert!(!Arc::ptr_eq(&first, &second) && Arc::ptr_eq(&second, &tenant.capped(2)));
        // A tenant that hears of the cap before once more does not part those who have heard of the new one.
        assert!(Arc::ptr_eq(&first, &tenant.capped(1)) && Arc::ptr_eq(&second, &tenant.capped(2)));
        drop(first);
        drop(tenant.capped(2));
        assert_eq!(tenant.caps.0.lock().expect("no panic").len(), 1, "what nobody keeps to is forgotten");
    }

    #[test]
    fn tenants_of_the_same_rules_keep_to_one_cap() {
        let caps = Arc::<Caps>::default();
        let of = |name: &str| {
            let (rules, labels) = ("physics".into(), BTreeMap::from([("job".into(), name.into())]));
            let terms = Terms { name: name.into(), rules, labels, weight: 3, traffic_classes: vec![104] };
            Tenant::on_terms(terms, Quota::least(), Arc::clone(&caps))
        };
        let (first, second) = (of("1"), of("2"));
        assert!(Arc::ptr_eq(&first.capped(7), &second.capped(7)));
        assert_eq!((first.job(), second.job(), first.share.weight), ("1", "2", 3));
        assert_ne!(first.share.tenant, second.share.tenant);
        assert!(first.allows_class(104) && !first.allows_class(0));
        first.remove();
        assert!(first.is_removed() && !second.is_removed());
    }

    #[test]
    fn what_has_no_limit_of_its_own_has_the_one_that_is_named() {
        let tenant = Tenant::new("a".into(), Quota::least());
        let charge = |amount, limit| tenant.charge_within(Resource::MappedBytes, amount, limit);
        let held = charge(70, 100).expect("room");
        let refused = charge(31, 100).expect_err("no room").to_string();
        assert!(refused.contains("31 more mapped bytes of GPU memory asked for, 70 of 100 in use"), "{refused}");
        drop(held);
        assert_eq!(tenant.used(Resource::MappedBytes), 0);
        let refused = tenant.charge_within(Resource::MemoryBytes, 101, 1000);
        assert!(refused.is_err(), "its own is less");
    }

    #[test]
    fn a_charge_is_refused_over_the_quota_and_returned_on_drop() {
        let tenant = Tenant::new("a".into(), Quota::least());
        let first = tenant.charge(Resource::MemoryBytes, 60).expect("within quota");
        let refused = tenant.charge(Resource::MemoryBytes, 41).expect_err("over quota");
        let text = "tenant a is over its quota: 41 more bytes of memory asked for, 60 of 100 in use; raise [[tenant]] \
                    max_memory in service.toml";
        assert_eq!(refused.to_string(), text);
        assert!(tenant.charge(Resource::MemoryBytes, u64::MAX).is_err());
        drop(first);
        assert_eq!(tenant.used(Resource::MemoryBytes), 0);
        assert!(tenant.charge(Resource::MemoryBytes, 100).is_ok());
    }

    /// Tenants come while the service runs, so that no quota of one bounds what all hold.
    #[test]
    fn tenants_together_hold_no_more_than_the_process_has() {
        let process: &'static ProcessHoldings = Box::leak(Box::new(ProcessHoldings::new(|| 100, || 10, || 11, || 12)));
        let added = |name: &str| {
            let mut tenant = Tenant::new(name.into(), Quota { mappings: 80, ..Quota::least() });
            Arc::get_mut(&mut tenant).expect("nobody else has it").of_process = process;
            tenant
        };
        let (first, second) = (added("a"), added("b"));
        let held = first.charge(Resource::Mappings, 80).expect("within its quota");
        assert!(first.charge(Resource::Mappings, 1).is_err(), "its own quota holds");
        let refused = second.charge(Resource::Mappings, 21).expect_err("all have 100").to_string();
        let text = "tenant b, with all others together, is over its quota: 21 more mappings";
        assert!(refused.starts_with(text) && refused.contains("80 of 100 in use"), "{refused}");
        let rest = second.charge(Resource::Mappings, 20).expect("what the first has been refused is nobody's");
        drop(held);
        let more = second.charge(Resource::Mappings, 60).expect("the first has given all back");
        drop((rest, more));
        assert_eq!(first.charge(Resource::Mappings, 80).map(|charge| charge.amount()).ok(), Some(80));
        let descriptors =
            [(Resource::Descriptors, 10), (Resource::SentDescriptors, 11), (Resource::KeptDescriptors, 12)];
        for (resource, most) in descriptors {
            let held = first.charge(resource, most).expect("as many as there are");
            assert!(second.charge(resource, 1).is_err(), "{resource:?}");
            drop(held);
            assert!(second.charge(resource, 1).is_ok(), "{resource:?}");
        }
        assert!(second.charge(Resource::MemoryBytes, 100).is_ok(), "has no such limit");
    }

    /// An error names a key that the configuration has.
    #[test]
    fn refusals_name_keys_that_exist() {
        let (bytes, count) = (Some(mccs_config::Bytes(1)), Some(1));
        let mut config = mccs_config::service::TenantConfig::new("a", "s");
        (config.max_memory, config.max_gpu_memory) = (bytes, bytes);
        (config.max_sessions, config.max_communicators) = (count, count);
        let keys = serde_json::to_value(config).expect("a table");
        let tenant =
            Tenant::new("a".into(), Quota { sessions: 0, communicators: 0, memory_bytes: 0, ..Quota::least() });
        let of_tenant = [Resource::MemoryBytes, Resource::GpuMemoryBytes, Resource::Sessions, Resource::Communicators];
        let of_session = [
            SessionResource::Streams,
            SessionResource::Regions,
            SessionResource::GpuRegions,
            SessionResource::Ranks,
            SessionResource::GroupLength,
        ];
        let refusals = of_tenant.map(|resource| tenant.charge(resource, 1).expect_err("nothing is left").to_string());
        let refusals = refusals.into_iter().chain(of_session.map(|resource| tenant.session_is_full(resource)));
        for refusal in refusals {
            let key = refusal.split("raise [[tenant]] ").nth(1).and_then(|rest| rest.split(' ').next());
            let key = key.unwrap_or_else(|| panic!("{refusal}"));
            assert!(keys.get(key).is_some(), "{refusal}: {keys}");
        }
    }
}
