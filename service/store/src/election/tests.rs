//! Elections in a simulated store, under a seed: calls are slow, fail before or after they were done, and clocks run apart. `MCCS_SEED=n`
//! runs that seed alone, `MCCS_SEEDS=n` so many.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::{Entry, Snapshot, Watch};

const TTL: Duration = Duration::from_secs(2);

/// Keys and leases on a true clock.
struct World {
    now: Duration,
    rng: StdRng,
    revision: u64,
    /// The office: holder, lease, term.
    office: Option<(Vec<u8>, u64, u64)>,
    /// Leases and when they end, by a clock of the store's that runs a little faster or slower.
    leases: BTreeMap<u64, Duration>,
    rate: f64,
    /// Percent of calls that are slow; half as many fail, before they were done or after.
    trouble: u32,
}

impl World {
    /// Time passes.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        let World { leases, now, .. } = self;
        leases.retain(|_, ends| *ends > *now);
        self.office.take_if(|(_, lease, _)| !leases.contains_key(lease));
    }

    /// How long a message is under way.
    fn way(&mut self) -> Duration {
        let is_slow = self.rng.random_range(0..100) < self.trouble;
        Duration::from_millis(self.rng.random_range(0..if is_slow { 1500 } else { 5 }))
    }

    fn is_lost(&mut self) -> bool {
        self.rng.random_range(0..400) < self.trouble
    }

    fn ends(&self) -> Duration {
        self.now + TTL.div_f64(self.rate)
    }
}

/// One candidate's way to the store.
struct Network {
    world: Arc<Mutex<World>>,
    is_cut: bool,
}

impl Network {
    /// A call's way there, what it does, and its way back.
    fn call<T>(&mut self, does: impl FnOnce(&mut World) -> T) -> Result<T, StoreError> {
        let mut world = self.world.lock().unwrap();
        let way = world.way();
        world.pass(way);
        if self.is_cut || world.is_lost() {
            return Err(StoreError::Unavailable("cut".into()));
        }
        let value = does(&mut world);
        let way = world.way();
        world.pass(way);
        if world.is_lost() { Err(StoreError::Unknown("no answer".into())) } else { Ok(value) }
    }
}

impl Store for Network {
    fn read(&mut self, _: Keys<'_>) -> Result<Snapshot, StoreError> {
        self.call(|world| {
            let entry = world.office.clone().map(|(value, lease, term)| Entry {
                key: "office".into(),
                value,
                created: Revision(term),
                modified: Revision(term),
                lease: Some(LeaseId(lease)),
            });
            Snapshot { revision: Revision(world.revision), entries: entry.into_iter().collect() }
        })
    }

    fn commit(&mut self, transaction: &Transaction) -> Result<Outcome, StoreError> {
        let [Write::Put { value, lease: Some(lease), .. }] = &transaction.writes[..] else { panic!("{transaction:?}") };
        self.call(|world| {
            if world.office.is_some() || !world.leases.contains_key(&lease.0) {
                return Outcome::Conflict;
            }
            world.revision += 1;
            world.office = Some((value.clone(), lease.0, world.revision));
            Outcome::Done(Revision(world.revision))
        })
    }

    fn grant(&mut self, _: Duration) -> Result<LeaseId, StoreError> {
        self.call(|world| {
            world.revision += 1;
            let ends = world.ends();
            world.leases.insert(world.revision, ends);
            LeaseId(world.revision)
        })
    }

    fn keep_alive(&mut self, lease: LeaseId) -> Result<Option<Duration>, StoreError> {
        self.call(|world| {
            let ends = world.ends();
            world.leases.get_mut(&lease.0).map(|kept| {
                *kept = ends;
                TTL
            })
        })
    }

    fn revoke(&mut self, lease: LeaseId) -> Result<(), StoreError> {
        self.call(|world| {
            world.leases.remove(&lease.0);
            world.pass(Duration::ZERO);
        })
    }

    fn watch(&mut self, _: Revision) -> Result<Box<dyn Watch>, StoreError> {
        Err(StoreError::Unavailable("nobody watches here".into()))
    }
}

struct Candidate {
    campaign: Campaign,
    network: Network,
    /// Its clock runs so much faster.
    rate: f64,
    office: Option<Office>,
    /// When it looks next, by the true clock; never if it has died.
    next: Option<Duration>,
}

/// Runs an election. Returns how many terms there were.
fn run(seed: u64) -> u64 {
    let mut rng = StdRng::seed_from_u64(seed);
    // A rate of either side, so that both together stay within the margin.
    let mut rate = || 1.0 + rng.random_range(-45..=45) as f64 / 1000.0;
    let (of_store, rates) = (rate(), [rate(), rate(), rate()]);
    let world = Arc::new(Mutex::new(World {
        now: Duration::from_secs(1),
        rng: StdRng::seed_from_u64(!seed),
        revision: 1,
        office: None,
        leases: BTreeMap::new(),
        rate: of_store,
        trouble: [0, 10, 40][rng.random_range(0..3)],
    }));
    let now = |at_least: Duration| {
        let mut world = world.lock().unwrap();
        let late = at_least.saturating_sub(world.now);
        world.pass(late);
        world.now
    };
    let base = Instant::now();
    let campaign = |number: usize| Campaign::new("office", &format!("host-{number}"), TTL);
    let mut candidates: Vec<Candidate> = rates
        .into_iter()
        .enumerate()
        .map(|(number, rate)| Candidate {
            campaign: campaign(number),
            network: Network { world: Arc::clone(&world), is_cut: false },
            rate,
            office: None,
            next: Some(Duration::from_secs(1)),
        })
        .collect();
    // When each office is held, by the true clock: no two at once.
    let mut held: Vec<(usize, Revision, Duration, Duration)> = Vec::new();
    let (storm_ends, ends) = (Duration::from_secs(60), Duration::from_secs(90));
    while let Some(number) =
        (0..3).filter(|number| candidates[*number].next.is_some()).min_by_key(|number| candidates[*number].next)
    {
        let candidate = &mut candidates[number];
        let due = candidate.next.expect("a living candidate");
        // Steps follow each other: what one takes passes for all.
        let began = now(due);
        let is_calm = began >= storm_ends;
        if is_calm {
            world.lock().unwrap().trouble = 0;
        }
        if began >= ends {
            break;
        }
        let misfortune = if is_calm { 0 } else { rng.random_range(0..100) };
        candidate.network.is_cut = (90..95).contains(&misfortune) || candidate.network.is_cut && misfortune > 20;
        if misfortune >= 98 {
            // Its process dies, with what it knew, and another one starts.
            (candidate.campaign, candidate.office) = (campaign(number), None);
        }
        let rate = candidate.rate;
        let clock = || base + now(Duration::ZERO).mul_f64(rate);
        match candidate.campaign.step(&mut candidate.network, &clock) {
            Ok(Holder::Own(office)) => {
                let from = now(Duration::ZERO);
                let until = office.until.saturating_duration_since(base).div_f64(rate);
                if candidate.office.map(|before| before.term) != Some(office.term) {
                    assert!(
                        held.iter().all(|(_, term, ..)| *term <= office.term),
                        "seed {seed}: terms ascend: {held:?}"
                    );
                }
                candidate.office = Some(office);
                if from < until {
                    held.push((number, office.term, from, until));
                }
            }
            Ok(Holder::Other { .. } | Holder::Nobody) => candidate.office = None,
            Err(_) => {}
        }
        let pause = if misfortune == 97 { Duration::from_secs(5) } else { candidate.campaign.interval() };
        candidate.next = Some(now(Duration::ZERO) + pause + Duration::from_millis(rng.random_range(0..50)));
    }
    for (place, (number, term, from, until)) in held.iter().enumerate() {
        for (other, other_term, other_from, other_until) in &held[..place] {
            assert_eq!(number == other && term == other_term, term == other_term, "seed {seed}: a term has one holder");
            let is_apart = until <= other_from || other_until <= from;
            assert!(number == other || is_apart, "seed {seed}: {number} and {other} act at once: {held:?}");
        }
    }
    let last = held.last().map_or(Duration::ZERO, |(.., until)| *until);
    assert!(last >= ends, "seed {seed}: once all is calm somebody is in office to the end, not to {last:?}");
    let in_storm = held.iter().filter(|(.., from, _)| *from < storm_ends + Duration::from_secs(5));
    assert!(in_storm.count() > 0, "seed {seed}");
    held.iter().map(|(_, term, ..)| term).collect::<BTreeSet<_>>().len() as u64
}

#[test]
fn no_two_act_at_once_and_somebody_does() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let terms: u64 = match number("MCCS_SEED") {
        Some(seed) => run(seed),
        None => (0..number("MCCS_SEEDS").unwrap_or(500)).map(run).sum(),
    };
    assert!(terms > 0);
}
