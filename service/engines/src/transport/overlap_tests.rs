//! Collectives that overlap, on a simulated network and clock: what they take, in latencies of the network.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_collective::{Algorithm, Problem, Strategy, build};
use mccs_config::service::AlgorithmChoice;
use mccs_device::host::{HostDevice, HostOptions};
use mccs_device::{Buffers, Collective, Device, Launched, Operand, RankCall, RankCalls};
use mccs_exchange::protocol::Name;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_model::link::{LinkEngines, LinksId};
use mccs_transport::memory::{MemoryNetwork, MemoryNetworkOptions};
use mccs_transport::{FlowOptions, ListenOptions};

use super::links::{MESSAGE_BYTES, PeerHost, Peers};
use super::*;

const LATENCY: Duration = Duration::from_millis(1);
/// The clock gets on by this much a poll.
const POLL: Duration = Duration::from_micros(20);
const CHANNELS: u32 = 3;
/// Bytes of a rank's contribution to each collective: several messages of each channel.
const BYTES: usize = 3 << 20;
const LINKS: LinksId = LinksId(1);

/// One rank, its host and its buffers: of each collective, what it contributes and what it gets.
struct Side {
    rank: u32,
    engine: TransportEngine,
    mail: TransportMail,
    network: Network,
    events: TransportEvents,
    proxy: Mailbox<TransportEvent>,
    buffers: Vec<[Vec<u8>; 2]>,
    launched: usize,
    ended: usize,
}

struct OwnCall(u32, Buffers);

impl RankCalls for OwnCall {
    fn count(&self) -> usize {
        1
    }

    fn call(&self, _: usize) -> RankCall<'_> {
        RankCall { rank: self.0, buffers: &self.1, scalar_bits: 0 }
    }
}

/// A rank's contribution to a collective.
fn contribution(rank: u32, number: usize) -> Vec<u8> {
    (0..BYTES).map(|at| (at * 7 + number * 31 + rank as usize * 101 + at / 251) as u8).collect()
}

impl Side {
    /// All-gathers of two ranks, each on a host of its own.
    fn pair(collectives: usize) -> [Side; 2] {
        let network = MemoryNetwork::new(MemoryNetworkOptions { latency: LATENCY, ..MemoryNetworkOptions::default() });
        let mut sides = [0, 1].map(|rank| {
            let (mailbox, proxy) = (Mailbox::new(TRANSPORT_MAILBOX_MAX), Mailbox::new(64));
            let (to_engine, sender) = (mailbox.sender(), proxy.sender());
            let listen = ListenOptions::new([127, 0, 0, 1].into());
            let links = Links::new(Box::new(network.add_host()), listen, FlowOptions::default());
            let engines = vec![TransportHandle { number: 0, sender: to_engine, is_near: false }];
            let activity = Activity::new(Instant::now());
            let buffers = (0..collectives).map(|number| [contribution(rank, number), vec![0xee; 2 * BYTES]]).collect();
            Side {
                rank,
                engine: TransportEngine::new(0, mailbox, Some(links)),
                mail: TransportMail::default(),
                network: Network { links: LINKS, epoch: 0, engines, placed: LinkEngines::round(1), activity },
                events: TransportEvents::to(move |event| sender.send(event)),
                proxy,
                buffers,
                launched: 0,
                ended: 0,
            }
        });
        let listeners = sides.each_mut().map(|side| side.engine.links.as_mut().unwrap().listen(LINKS).unwrap());
        let host = |(number, listener)| PeerHost {
            name: Name::new(&format!("h{number}")).unwrap(),
            listeners: vec![listener],
            engines: LinkEngines::round(1),
            pairs: Arc::default(),
        };
        let hosts = listeners.into_iter().enumerate().map(host).collect();
        let (host_of_rank, assignment, all) = (vec![0, 1], Arc::default(), Arc::default());
        let (to_gpus, nics_of_ranks) = Default::default();
        let message_bytes = MESSAGE_BYTES;
        let peers = Arc::new(Peers {
            share: Share::SERVICE,
            hosts,
            host_of_rank,
            assignment,
            all,
            to_gpus,
            message_bytes,
            nics_of_ranks,
        });
        for side in &mut sides {
            side.engine.links.as_mut().unwrap().set_peers(LINKS, Arc::clone(&peers));
        }
        sides
    }

    fn launch(&mut self) {
        let hosts = [vec![0], vec![1]];
        let strategy = Strategy::initial(AlgorithmChoice::Ring, 2, CHANNELS, &hosts);
        let (kind, count) = (CollectiveKind::AllGather, BYTES as u64);
        let problem =
            Problem { kind, nranks: 2, root: 0, count, premultiply: false, leaves_own: false, one_hop: false };
        let schedule = Arc::new(build(&problem, Algorithm::Ring, &strategy).unwrap());
        let [send, recv] = &mut self.buffers[self.launched];
        // SAFETY: the buffers stay where they are until the engines are dropped.
        let [send, recv] =
            [send, recv].map(|memory| unsafe { Operand::from_raw(memory.as_mut_ptr(), memory.len() as u64) });
        let call = OwnCall(self.rank, Buffers::Host { send, recv });
        let collective = Collective {
            comm: Handle::NONE,
            schedule: &schedule,
            dtype: DataType::U8,
            redop: RedOp::Sum,
            share: Share::SERVICE,
            ranks: &call,
            spans_hosts: true,
        };
        let job = Handle { index: self.launched as u32, generation: 1 };
        let network = Some((&self.network, Tag::of(self.launched as u32)));
        let mut workers = PoolWorkers::new(&mut self.mail, self.events.clone(), network);
        let options = HostOptions {
            inline_bytes: 0,
            piece_bytes: 64 << 10,
            streaming_bytes: u64::MAX,
            shm_exchange_slot_bytes: 0,
        };
        let launched = HostDevice::new(options).launch(&collective, job, &mut workers);
        assert!(matches!(launched, Ok(Launched::Running)));
        self.launched += 1;
    }

    fn poll(&mut self, now: Instant) {
        self.engine.poll(&Context::new(now, 64));
        while let Some(event) = self.proxy.pop() {
            let TransportEvent::JobDone { fault: None, .. } = event else { panic!("it fails") };
            self.ended += 1;
        }
    }
}

/// Latencies that collectives take, of which each side has so many at a time. The second side begins `late` after the first.
fn latencies(collectives: usize, at_a_time: usize, late: Duration) -> f64 {
    // One more, first, that connects the flows.
    let (mut sides, mut now) = (Side::pair(collectives + 1), Instant::now());
    let mut run = |sides: &mut [Side; 2], until: usize, late: Duration| {
        let begin = now;
        while sides.iter().any(|side| side.ended < until) {
            now += POLL;
            for side in sides.iter_mut() {
                let may_begin = side.rank == 0 || now >= begin + late;
                while may_begin && side.launched < until && side.launched - side.ended < at_a_time {
                    side.launch();
                }
                side.poll(now);
            }
        }
        now - begin
    };
    run(&mut sides, 1, Duration::ZERO);
    let took = run(&mut sides, collectives + 1, late);
    for side in &sides {
        for (number, [_, got]) in side.buffers.iter().enumerate() {
            let expected = [contribution(0, number), contribution(1, number)].concat();
            assert!(*got == expected, "collective {number} on rank {} is wrong", side.rank);
        }
    }
    took.as_secs_f64() / LATENCY.as_secs_f64()
}

#[test]
fn what_overlaps_shares_the_networks_latency() {
    let one = latencies(1, 1, Duration::ZERO);
    assert!((1.0..2.0).contains(&one), "{one}");
    let one_by_one = latencies(6, 1, Duration::ZERO);
    assert!(one_by_one >= 6.0, "{one_by_one}");
    let all = latencies(6, 6, Duration::ZERO);
    assert!(
        all < one_by_one / 2.0,
        "{all}: one latency, and what copies take, which one hides behind its latency; {one_by_one} one by one"
    );
    let some = latencies(6, 3, Duration::ZERO);
    assert!(all < some && some < one_by_one, "{all}, {some}, {one_by_one}");
}

#[test]
fn a_side_that_is_late_gets_what_overlaps_in_order() {
    let late = 10 * LATENCY;
    let took = latencies(5, 4, late);
    assert!(took >= 10.0, "{took}");
    // One side has several at a time, and the other one by one: they are the same to each other.
    assert!(latencies(5, 5, late) >= 10.0);
}
