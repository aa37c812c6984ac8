use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mccs_exchange::protocol::Name;
use mccs_model::link::{FlowWait, LinkEngines, LinkKey};
use mccs_model::rate_limit::{CappedFlow, Pace, SharedBucket};
use mccs_telemetry::placed::PaceUse;
use mccs_transport::memory::{MemoryNetwork, MemoryNetworkOptions};
use mccs_transport::{Fault, FlowOptions, ListenOptions};

use super::links::{MESSAGE_BYTES, PeerHost, Peers, ToGpus};
use super::*;

/// A channel whose links are broken.
struct Broken;

impl ChannelJob for Broken {
    fn step(&mut self, _: Option<&mut Links>, _: Instant) -> Result<Stepped, ChannelFault> {
        Err(TransportError::NoSuch("link").into())
    }

    fn has_posted(&self) -> bool {
        false
    }

    fn share(&self) -> Share {
        Share::SERVICE
    }

    fn take_work_ns(&mut self) -> u64 {
        0
    }

    fn waits(&self) -> Vec<FlowWait> {
        Vec::new()
    }

    fn release(&mut self, _: &mut Links) {}
}

/// Work of a step of [`Endless`].
const STEP_NS: u64 = 700;

/// A channel that never ends, and counts its steps.
struct Endless {
    share: Share,
    steps: Arc<AtomicU64>,
}

impl ChannelJob for Endless {
    fn step(&mut self, _: Option<&mut Links>, _: Instant) -> Result<Stepped, ChannelFault> {
        self.steps.fetch_add(1, Ordering::Relaxed);
        Ok(Stepped::Moved)
    }

    fn has_posted(&self) -> bool {
        false
    }

    fn share(&self) -> Share {
        self.share
    }

    fn take_work_ns(&mut self) -> u64 {
        STEP_NS
    }

    fn waits(&self) -> Vec<FlowWait> {
        Vec::new()
    }

    fn release(&mut self, _: &mut Links) {}
}

/// Pieces without end; counts what is taken of them.
struct Pieces {
    share: Share,
    taken: [AtomicU64; 2],
}

impl PieceJob for Pieces {
    fn run_piece(&self, quantum: Quantum) -> Piece {
        self.taken[usize::from(quantum == Quantum::Part)].fetch_add(1, Ordering::Relaxed);
        Piece::Ran
    }

    fn share(&self) -> Share {
        self.share
    }

    fn quantum_ns(&self, quantum: Quantum) -> u64 {
        if quantum == Quantum::Part { 6_000 } else { 24_000 }
    }
}

struct Setup {
    engine: TransportEngine,
    to_engine: Sender<TransportMessage>,
    to_proxy: TransportEvents,
    proxy: Mailbox<TransportEvent>,
}

impl Setup {
    fn new() -> Self {
        let mailbox = Mailbox::new(TRANSPORT_MAILBOX_MAX);
        let to_engine = mailbox.sender();
        let transport = MemoryNetwork::new(MemoryNetworkOptions::default()).add_host();
        let listen = ListenOptions::new([127, 0, 0, 1].into());
        let links = Links::new(Box::new(transport), listen, FlowOptions::default());
        let proxy = Mailbox::new(64);
        let sender = proxy.sender();
        let to_proxy = TransportEvents::to(move |event| sender.send(event));
        Setup { engine: TransportEngine::new(0, mailbox, Some(links)), to_engine, to_proxy, proxy }
    }

    fn tell(&self, message: TransportMessage) {
        assert!(self.to_engine.send(message).is_ok());
    }

    fn run(&self, job: Handle, links: Option<LinksId>) {
        self.run_channel(job, Box::new(Broken), links);
    }

    fn run_channel(&self, handle: Handle, job: Box<dyn ChannelJob>, links: Option<LinksId>) {
        let whole = WholeJob::new(handle, self.to_proxy.clone(), 1, None);
        self.tell(TransportMessage::RunChannel(ChannelWork { job, channel: 0, pair: None, links, whole }));
    }

    /// Channels of a tenant that never end. Returns how often each has been stepped, from then on.
    fn run_endless(&self, tenant: u32, weight: u32, count: usize) -> Vec<Arc<AtomicU64>> {
        let share = Share { tenant, weight };
        let run = |index| {
            let steps = Arc::<AtomicU64>::default();
            self.run_channel(handle(index as u32), Box::new(Endless { share, steps: Arc::clone(&steps) }), None);
            steps
        };
        (0..count).map(run).collect()
    }

    fn poll(&mut self) -> Progress {
        self.engine.poll(&Context::new(Instant::now(), 64))
    }

    /// Jobs that have ended, all as failed.
    fn failed_jobs(&mut self) -> Vec<Handle> {
        let messages = std::iter::from_fn(|| self.proxy.pop());
        let failed = messages.filter_map(|message| match message {
            TransportEvent::JobDone { job, fault } => Some((job, fault)),
            _ => None,
        });
        failed.map(|(job, fault)| fault.map(|_| job).unwrap()).collect()
    }
}

fn handle(index: u32) -> Handle {
    Handle { index, generation: 1 }
}

#[test]
fn one_tenants_many_channels_are_stepped_some_at_a_time_while_another_has_one() {
    let mut setup = Setup::new();
    let many = setup.run_endless(1, 1, 100);
    let steps = |channels: &[Arc<AtomicU64>]| channels.iter().map(|one| one.load(Ordering::Relaxed)).sum::<u64>();
    setup.poll();
    assert_eq!(steps(&many), 100, "alone it has whole polls");
    let (one, heavy) = (setup.run_endless(2, 1, 1), setup.run_endless(3, 2, 50));
    let polls = 100_u64.div_ceil(CHANNELS_AT_A_TIME as u64);
    for poll in 1..=polls {
        assert_eq!(setup.poll(), Progress::Busy);
        assert_eq!(steps(&one), poll);
        assert_eq!(steps(&many), 100 + poll * CHANNELS_AT_A_TIME as u64);
        assert_eq!(steps(&heavy), poll * 2 * CHANNELS_AT_A_TIME as u64, "its weight is 2");
    }
    let stepped = many.iter().chain(&heavy).map(|one| one.load(Ordering::Relaxed));
    assert!(stepped.clone().min() >= Some(2), "each has had its turn: {:?}", stepped.collect::<Vec<_>>());
}

#[test]
fn steps_of_channels_count_as_work_of_their_tenants_and_of_nobody_else() {
    let mut setup = Setup::new();
    let (one, three) = (setup.run_endless(1, 1, 1), setup.run_endless(3, 1, 3));
    (0..10).for_each(|_| assert_eq!(setup.poll(), Progress::Busy));
    let work =
        |channels: &[Arc<AtomicU64>]| channels.iter().map(|steps| STEP_NS * steps.load(Ordering::Relaxed)).sum::<u64>();
    let mut done = setup.engine.account().expect("it works for tenants").read();
    done.sort_unstable();
    assert_eq!(done, [(1, work(&one)), (3, work(&three))]);
    assert!(work(&one) > 0 && work(&three) > work(&one), "{done:?}");
}

#[test]
fn who_waits_for_the_thread_waits_for_a_part_of_anothers_piece_and_a_tenant_alone_has_whole_ones() {
    let mut setup = Setup::new();
    let job = Arc::new(Pieces { share: Share { tenant: 1, weight: 1 }, taken: Default::default() });
    let assigned = AssignedJob { job: Arc::clone(&job) as _, handle: handle(1), done: setup.to_proxy.clone() };
    setup.tell(TransportMessage::Run(assigned));
    let mut poll = |tenants| {
        setup.engine.poll(&Context { tenants, ..Context::new(Instant::now(), 64) });
        [0, 1].map(|quantum: usize| job.taken[quantum].load(Ordering::Relaxed))
    };
    assert_eq!(poll(AwakeTenants::None), [1, 0]);
    assert_eq!(poll(AwakeTenants::One(1)), [2, 0], "its own sessions");
    assert_eq!(poll(AwakeTenants::One(2)), [2, 1]);
    assert_eq!(poll(AwakeTenants::Several), [2, 2]);
    assert_eq!(poll(AwakeTenants::One(1)), [3, 2]);
}

#[test]
fn retired_engine_fails_what_comes_until_broken_links_are_closed() {
    let mut setup = Setup::new();
    let links = LinksId(7);
    setup.tell(TransportMessage::Listen { links, engine: 0, reply: setup.to_proxy.clone() });
    setup.tell(TransportMessage::Retire);
    assert_ne!(setup.poll(), Progress::Done, "a communicator may still use its links");
    setup.run(handle(1), Some(links));
    assert_ne!(setup.poll(), Progress::Done, "the communicator has not heard that its links have broken");
    assert_eq!(setup.failed_jobs(), [handle(1)]);
    // On its way before the proxy engine knew.
    setup.run(handle(2), Some(links));
    assert_ne!(setup.poll(), Progress::Done);
    assert_eq!(setup.failed_jobs(), [handle(2)]);
    setup.tell(TransportMessage::CloseLinks { links });
    assert_eq!(setup.poll(), Progress::Done);
}

#[test]
fn channel_that_fails_without_links_ends_its_job() {
    let mut setup = Setup::new();
    setup.run(handle(3), None);
    setup.poll();
    assert_eq!(setup.failed_jobs(), [handle(3)]);
}

/// Rank 1 sends more than rank 0 waits for, and has closed all its links when rank 0 first looks: at the one to rank 1.
#[test]
fn message_of_another_call_is_the_reason_though_the_end_of_another_link_is_seen_first() {
    let (network, id, start) = (MemoryNetwork::new(MemoryNetworkOptions::default()), LinksId(7), Instant::now());
    let links = |_| {
        let listen = ListenOptions::new([127, 0, 0, 1].into());
        Links::new(Box::new(network.add_host()), listen, FlowOptions::default())
    };
    let mut hosts = [0, 1].map(links);
    let listeners = hosts.each_mut().map(|host| host.listen(id).unwrap());
    let names = ["h0", "h1"].map(|name| Name::new(name).unwrap());
    let peer = |(name, listener)| PeerHost {
        name,
        listeners: vec![listener],
        engines: LinkEngines::round(1),
        pairs: Arc::default(),
    };
    let peers = names.into_iter().zip(listeners).map(peer).collect();
    let peers = Arc::new(Peers {
        share: Share::SERVICE,
        hosts: peers,
        host_of_rank: vec![0, 1],
        assignment: Arc::default(),
        all: Arc::default(),
        to_gpus: ToGpus::Never,
        message_bytes: MESSAGE_BYTES,
        nics_of_ranks: BTreeMap::new(),
    });
    hosts.iter_mut().for_each(|host| host.set_peers(id, Arc::clone(&peers)));

    let link = |src, dst| LinkKey { epoch: 0, channel: 0, src, dst };
    let [own, other] = &mut hosts;
    let (sends, _) = own.send_flow(id, link(0, 1), start).unwrap();
    other.recv_flow(id, link(0, 1), start).unwrap();
    let (recvs, _) = own.recv_flow(id, link(1, 0), start).unwrap();
    let (their_sends, _) = other.send_flow(id, link(1, 0), start).unwrap();
    let cx = |ms| Context::new(start + Duration::from_millis(ms), 64);
    for ms in 0..100 {
        own.poll(&cx(ms));
        other.poll(&cx(ms));
    }
    let (their_staging, staging) = (other.take_staging().unwrap(), own.take_staging().unwrap());
    own.transport.irecv(recvs, staging.span(12)).unwrap().expect("connected");
    other.transport.isend(their_sends, their_staging.span(64), 0).unwrap().expect("connected");
    for ms in 100..200 {
        other.poll(&cx(ms));
    }
    other.break_off(id);
    own.poll(&cx(200));

    let seen = own.transport.state(sends.into()).unwrap_err();
    assert_eq!(seen.fault(), Some(Fault::Closed));
    match own.reason(id, seen.into()) {
        ChannelFault::Mismatch { rank: 1, host: Some(host), is_pair: false, bytes: 64, expected_bytes: 12 } => {
            assert_eq!(host.as_str(), "h1");
        }
        other => panic!("{other:?}"),
    }
}

const MBPS: u64 = 1_000_000;

/// Two engines of a host of a communicator whose ranks 0 and 1 are here, 2 and 3 on another host, and 4 on a third.
struct PacedHost {
    engines: [Links; 2],
    now: Instant,
    /// Whether whoever has waited for longest is looked at first.
    in_turn: bool,
}

const PACED: LinksId = LinksId(7);
/// Another of the same tenant, with the same hosts.
const BESIDE: LinksId = LinksId(8);

/// Engines of each host.
const ENGINES: LinkEngines = LinkEngines { round: 2, near: None };

impl PacedHost {
    fn new(pace: Pace) -> Self {
        let (network, now) = (MemoryNetwork::new(MemoryNetworkOptions::default()), Instant::now());
        let listen = ListenOptions::new([127, 0, 0, 1].into());
        let mut engines =
            [0, 1].map(|_| Links::new(Box::new(network.add_host()), listen.clone(), FlowOptions::default()));
        let tenant = pace.host_cap_bps.map(|_| Arc::default());
        let here = PaceHere { pace: Arc::new(pace), pace_use: Arc::default(), tenant };
        for id in [PACED, BESIDE] {
            let listeners: Vec<_> = engines.iter_mut().map(|engine| engine.listen(id).unwrap()).collect();
            let host = |name: &str| PeerHost {
                name: Name::new(name).unwrap(),
                listeners: listeners.clone(),
                engines: ENGINES,
                pairs: Arc::default(),
            };
            let (hosts, host_of_rank) = (["h0", "h1", "h2"].map(host).to_vec(), vec![0, 0, 1, 1, 2]);
            let peers = Arc::new(Peers {
                share: Share::SERVICE,
                hosts,
                host_of_rank,
                assignment: Arc::default(),
                all: Arc::default(),
                to_gpus: ToGpus::Never,
                message_bytes: MESSAGE_BYTES,
                nics_of_ranks: BTreeMap::new(),
            });
            for engine in &mut engines {
                engine.set_peers(id, Arc::clone(&peers));
                engine.set_pace(id, here.clone(), now);
            }
        }
        PacedHost { engines, now, in_turn: true }
    }

    fn repace(&mut self, pace: Pace, tenant: &Arc<SharedBucket>) {
        let (pace, pace_use) = (Arc::new(pace), Arc::new(PaceUse::default()));
        let here = PaceHere { pace, pace_use, tenant: Some(Arc::clone(tenant)) };
        for engine in &mut self.engines {
            [PACED, BESIDE].into_iter().for_each(|id| engine.set_pace(id, here.clone(), self.now));
        }
    }

    /// Bits per second that leave on each link when all send all they may for two seconds.
    fn send_on(&mut self, links: &[LinkKey]) -> Vec<f64> {
        self.send_of(&links.iter().map(|link| (PACED, *link)).collect::<Vec<_>>())
    }

    fn send_of(&mut self, links: &[(LinksId, LinkKey)]) -> Vec<f64> {
        const BYTES: u64 = 64 << 10;
        for (id, link) in links {
            self.engines[ENGINES.of(*link)].send_flow(*id, *link, self.now).unwrap();
        }
        let (end, mut bits) = (self.now + Duration::from_secs(2), vec![0.0; links.len()]);
        let mut turn = 0;
        while self.now < end {
            let mut has_sent = false;
            for place in (0..links.len()).map(|place| (place + turn) % links.len()) {
                let ((id, link), engine) = (links[place], &mut self.engines[ENGINES.of(links[place].1)]);
                if engine.may_send(id, link, 0, BYTES, self.now) {
                    engine.sent(id, link, BYTES, self.now);
                    (bits[place], has_sent) = (bits[place] + BYTES as f64 * 8.0, true);
                }
            }
            turn += usize::from(has_sent && self.in_turn);
            let wake_at = self.engines.iter_mut().filter_map(Links::take_wake_at).min();
            // On a link of 100 Gbit/s.
            self.now = if has_sent { self.now + Duration::from_nanos(5_243) } else { wake_at.expect("all wait") };
        }
        bits.iter().map(|bits| bits / 2.0).collect()
    }
}

fn link(channel: u16, src: u32, dst: u32) -> LinkKey {
    LinkKey { epoch: 0, channel, src, dst }
}

fn is_about(bps: f64, expected: u64) -> bool {
    (bps / expected as f64 - 1.0).abs() < 0.02
}

/// All ranks send to all others, point to point as well, by whichever engine: a cap is of each channel to a host, and of all that is sent
/// there point to point.
#[test]
fn a_cap_is_of_all_that_goes_to_a_host_on_a_channel_however_many_links_that_are() {
    let cap_bps = 400 * MBPS;
    let mut host = PacedHost::new(Pace { cap_bps: Some(cap_bps), ..Pace::default() });
    let pairs = [(0, 2), (0, 3), (1, 2), (1, 3)];
    let mut links = pairs.map(|(src, dst)| link(0, src, dst)).to_vec();
    links.extend(pairs.map(|(src, dst)| LinkKey::of_pair(src, dst, 0)));
    links.extend([link(0, 0, 4), link(1, 0, 2), LinkKey::of_pair(0, 4, 0)]);
    let bps = host.send_on(&links);
    let flows = [&bps[..4], &bps[4..8], &bps[8..9], &bps[9..10], &bps[10..]];
    for flow in flows {
        assert!(is_about(flow.iter().sum(), cap_bps), "{bps:?}");
    }
    assert!(pairs.iter().any(|(src, dst)| ENGINES.of(LinkKey::of_pair(*src, *dst, 0)) == 1), "by both engines");
}

/// Two communicators send all they can to two hosts, on two channels and point to point, by two engines, and the same ones are always looked at first:
/// the cap of their tenant is of all of it together, and all have equal parts.
#[test]
fn a_cap_of_a_host_is_of_all_that_a_tenant_sends_out_of_it_and_all_take_turns() {
    let (low_bps, high_bps) = (400 * MBPS, 2_000 * MBPS);
    let mut host = PacedHost::new(Pace { host_cap_bps: Some(low_bps), ..Pace::default() });
    host.in_turn = false;
    let all = [link(0, 0, 2), link(1, 0, 2), link(0, 1, 4), LinkKey::of_pair(0, 2, 0), LinkKey::of_pair(1, 4, 0)];
    assert!(ENGINES.of(all[3]) != ENGINES.of(all[4]), "by both engines");
    let both = [PACED, BESIDE].map(|id| all.map(|link| (id, link))).concat();
    let bps = host.send_of(&both);
    assert!(is_about(bps.iter().sum(), low_bps), "{bps:?}");
    let part = low_bps as f64 / both.len() as f64;
    assert!(bps.iter().all(|bps| (bps / part - 1.0).abs() < 0.05), "{bps:?}");
    // Whoever is alone has all of it.
    assert!(is_about(host.send_of(&both[..1])[0], low_bps));
    // Under another cap nobody waits for what was owed under this one.
    host.repace(Pace { host_cap_bps: Some(high_bps), ..Pace::default() }, &Arc::default());
    assert!(is_about(host.send_of(&both).iter().sum(), high_bps));
    // A flow's own cap holds besides.
    host.repace(Pace { host_cap_bps: Some(high_bps), cap_bps: Some(low_bps), ..Pace::default() }, &Arc::default());
    assert!(is_about(host.send_of(&both[..1])[0], low_bps));
    assert!(is_about(host.send_of(&both).iter().sum(), high_bps));
}

/// If flows are allotted rates, traffic to other hosts than theirs, on other channels or point to point has no more than what they
/// leave of it.
#[test]
fn what_no_flow_of_the_strategy_carries_is_held_to_what_its_flows_are_allotted() {
    let to_next = Name::new("h1").unwrap();
    let flow = |channel, cap_bps| CappedFlow { channel, to: to_next.clone(), cap_bps };
    let flows = vec![flow(0, 300 * MBPS), flow(1, 100 * MBPS)];
    let pace = Pace { flows, ..Pace::default() };
    let others = [link(0, 0, 4), link(2, 0, 2), link(3, 1, 4), LinkKey::of_pair(0, 2, 0), LinkKey::of_pair(1, 4, 0)];
    let bps = PacedHost::new(pace.clone()).send_on(&others);
    assert!(is_about(bps.iter().sum(), 400 * MBPS), "{bps:?}");
    let rings = [link(0, 0, 2), link(0, 1, 3), link(1, 0, 2)];
    let bps = PacedHost::new(pace.clone()).send_on(&rings);
    assert!(is_about(bps[0] + bps[1], 300 * MBPS) && is_about(bps[2], 100 * MBPS), "{bps:?}");
    let all: Vec<LinkKey> = rings.into_iter().chain(others).collect();
    let bps = PacedHost::new(pace).send_on(&all);
    assert!(is_about(bps.iter().sum(), 400 * MBPS), "{bps:?}");
    assert!(bps.iter().all(|bps| *bps > 0.0), "{bps:?}");
}
