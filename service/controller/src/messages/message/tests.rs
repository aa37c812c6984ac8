//! Messages are understood, refused where they say what cannot be, and not changed without another version.

use super::*;
use crate::inventory::{INTERFACES_MAX, Interfaces, TENANTS_MAX};
use crate::links::LinkState;
use crate::links::link_overrides::WordNumber;
use crate::pace::{FlowCap, YieldCap};
use crate::rates::PathRate;
use mccs_exchange::protocol::VERSION;
use mccs_policy::Window;

fn report() -> Report {
    let host = |host: &str, ranks: &[u32]| HostRanks {
        host: host.into(),
        ranks: ranks.to_vec(),
        devices: if ranks.len() == 2 { vec![3, 2] } else { Vec::new() },
    };
    Report {
        comm: CommId { root: Name::new("a").unwrap(), incarnation: u64::MAX, number: 3 },
        number: 7,
        tenant: "t".into(),
        hosts: vec![host("a", &[0, 2]), host("b", &[1])],
        began_ms: 5,
        arrival: Some(6),
        profile: Some(Profile { period_ns: 9, busy_ns: 9, phase_ns: 1000 }),
        is_pinned: true,
        began: Began { channels: 2, algorithm: AlgorithmChoice::Ring, transport: Some(TransportKind::Tcp) },
        chosen: Chosen { rings: vec![vec![2, 0, 1]], transport: Some(TransportKind::Rdma), ..Chosen::default() },
    }
}

fn decoded(report: Report) -> Result<AgentMessage, BodyError> {
    let body = AgentMessage::Report(Box::new(report)).encode().unwrap();
    AgentMessage::decode(&body, &Name::new("a").unwrap())
}

#[test]
fn what_is_told_is_understood() {
    assert_eq!(decoded(report()), Ok(AgentMessage::Report(Box::new(report()))));
    let change = whole_change(vec![vec![0, 1]], AlgorithmChoice::Ring, None, vec![FlowPath::default()], Vec::new());
    let order = Order { life: u64::MAX, order: 2, comm: report().comm, expected_epoch: 4, change };
    let message = ControllerMessage::Order(Box::new(order));
    assert_eq!(ControllerMessage::decode(&message.encode().unwrap()), Ok(message));
}

#[test]
fn what_hosts_have_is_told_with_names_or_not_at_all() {
    let host = Name::new("a").unwrap();
    let decoded = |inventory: &Inventory| {
        AgentMessage::decode(&AgentMessage::Has(Box::new(inventory.clone())).encode().unwrap(), &host)
    };
    let name = |number: usize| format!("{number:063}");
    let there = |all: Vec<String>| Some(Interfaces { down: (0..all.len() as u16).collect(), all });
    let tenants = |count| Some((0..count).map(name).collect::<Vec<_>>());
    let interfaces = there((0..INTERFACES_MAX).map(name).collect());
    let most = Inventory { interfaces, tenants: tenants(TENANTS_MAX), ..Inventory::default() };
    assert!(decoded(&Inventory { tenants: tenants(TENANTS_MAX + 1), ..Inventory::default() }).is_err());
    for inventory in [Inventory { gpus: 3, ..Inventory::default() }, most] {
        assert_eq!(decoded(&inventory), Ok(AgentMessage::Has(Box::new(inventory))));
    }
    // Whoever does not say what it has besides is not compared with it.
    let less = AgentMessage::decode(&ControlBody::new(b"{\"has\":{\"gpus\":3}}").unwrap(), &host);
    assert_eq!(less, Ok(AgentMessage::Has(Box::new(Inventory { gpus: 3, ..Inventory::default() }))));
    let too_many = (0..=INTERFACES_MAX).map(name).collect();
    for interfaces in [vec![String::new()], vec!["a b".to_owned()], too_many] {
        assert!(decoded(&Inventory { interfaces: there(interfaces), ..Inventory::default() }).is_err());
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |spoil: &dyn Fn(&mut Report)| {
        let mut report = report();
        spoil(&mut report);
        decoded(report).unwrap_err()
    };
    refused(&|report| report.hosts.clear());
    refused(&|report| report.profile = Some(Profile { period_ns: 0, busy_ns: 0, phase_ns: 0 }));
    refused(&|report| report.profile = Some(Profile { period_ns: u64::MAX, busy_ns: 1, phase_ns: 0 }));
    refused(&|report| report.hosts[1].ranks = vec![2]);
    refused(&|report| report.hosts[1].ranks = vec![9]);
    refused(&|report| report.hosts[1].host = "a".into());
    refused(&|report| report.hosts[1].devices = vec![0, 1]);
    refused(&|report| report.chosen.rings = vec![vec![0, 1]]);
    refused(&|report| report.began.channels = 0);
    refused(&|report| report.began.channels = CHANNELS_MAX as u32 + 1);
    refused(&|report| report.chosen.rings = vec![vec![0, 1, 1]]);
    refused(&|report| report.chosen.rings = vec![vec![0, 1, 2]; CHANNELS_MAX + 1]);
    refused(&|report| {
        report.chosen.flows = vec![FlowChoice { channel: 0, from: "a".into(), to: "b".into(), path: 0 }];
    });
    assert!(refused(&|report| report.comm.root = Name::new("b").unwrap()).to_string().contains("another host"));
    for garbage in [&b""[..], b"{}", b"\xff", b"{\"sync\":{\"life\":-1}}", b"{\"sync\":{\"life\":1,\"x\":2}}"] {
        let body = ControlBody::new(garbage).unwrap();
        assert!(ControllerMessage::decode(&body).is_err(), "{garbage:?}");
        assert!(AgentMessage::decode(&body, &Name::new("a").unwrap()).is_err(), "{garbage:?}");
    }
    let long = whole_change(vec![(0..NRANKS_MAX).collect(); 8], AlgorithmChoice::Auto, None, Vec::new(), Vec::new());
    let order = Order { life: 1, order: 2, comm: report().comm, expected_epoch: 4, change: long };
    assert!(matches!(ControllerMessage::Order(Box::new(order)).encode(), Err(BodyError::TooLong(_))));
}

/// One of each kind, with all that it may have.
fn one_of_each() -> Vec<String> {
    let comm = report().comm;
    let path = FlowPath {
        device: Some("mlx5_0:1".parse().unwrap()),
        source_ports: Some("1-2".parse().unwrap()),
        dscp: Some(3),
        priority: Some(4),
    };
    let change =
        whole_change(vec![vec![0, 1]], AlgorithmChoice::Ring, Some(TransportKind::Rdma), vec![path.clone()], vec![]);
    let link = LinkOverride {
        lower: "l".into(),
        upper: "u".into(),
        state: LinkState::Down,
        number: WordNumber { life: 1, count: 2 },
    };
    let burst = CommonBurst { begins_ns: 1, lasts_ns: 2 };
    let window = Window { period_ns: 3, offset_ns: 1, length_ns: 2 };
    let pace = HostPace {
        cap_bps: Some(1),
        host_cap_bps: Some(4),
        flows: vec![FlowCap { channel: 1, to: "b".into(), cap_bps: 2 }],
        window: Some(window),
        yields: vec![YieldCap { to: comm.clone(), window, early_ns: 7, cap_bps: 3 }],
        weight_milli: Some(1500),
        is_watched: true,
    };
    let (interfaces, rdma_ports) = (
        Some(Interfaces { all: vec!["eth0".to_owned()], down: vec![0] }),
        path.device.clone().map(|device| vec![device]),
    );
    let tenants = Some(vec!["t".to_owned()]);
    let inventory = Inventory { gpus: 8, interfaces, rdma_ports, tenants };
    let refused = Outcome::Refused { whose: Whose::Change, reason: "r".into() };
    let outcomes = [Outcome::Done { epoch: 1, cut: 2 }, Outcome::Stale { epoch: 3 }, refused];
    let of_agents = [
        AgentMessage::Has(Box::new(inventory)),
        AgentMessage::Report(Box::new(report())),
        AgentMessage::Gone { comm: comm.clone() },
        AgentMessage::Kept { links: vec![link.clone()] },
        AgentMessage::Synced { life: 1, is_paced: true },
        AgentMessage::Suspects,
        AgentMessage::Path { peer: "p".into(), path: path.clone(), answers: false },
        AgentMessage::Rates {
            rates: HostRates { paths: vec![PathRate { to: "b".into(), path, bps: 1 }], others_bps: 2 },
        },
        AgentMessage::Wants { comm: comm.clone(), bps: Some(1) },
        AgentMessage::Burst { comm: comm.clone(), burst },
        AgentMessage::AskTime { question: 1 },
        AgentMessage::Behind,
        AgentMessage::Obeys { controller: "c".into() },
        AgentMessage::Superseded { by: 1 },
        AgentMessage::Vote { question: 1, term: 2, vote: Vote::Granted },
        AgentMessage::Vote { question: 1, term: 2, vote: Vote::Held { by: "c".into() } },
        AgentMessage::Vote { question: 1, term: 2, vote: Vote::Later { term: 3 } },
        AgentMessage::Vote { question: 1, term: 2, vote: Vote::Started },
    ];
    let order = Order { life: 1, order: 2, comm: comm.clone(), expected_epoch: 3, change };
    let of_controllers = [
        ControllerMessage::Claim { question: 1, term: 2 },
        ControllerMessage::Sync { life: 1, with_profiles: true },
        ControllerMessage::Order(Box::new(order)),
        ControllerMessage::Keep { life: 1, links: vec![link] },
        ControllerMessage::Arrived { life: 1, comm: comm.clone(), arrival: 2 },
        ControllerMessage::TestLinks,
        ControllerMessage::Pace { life: 1, comm: comm.clone(), pace },
        ControllerMessage::Reductions { life: 1, reductions: Some(Reductions::AcrossLeaves { leaf: 1, place: 2 }) },
        ControllerMessage::Burst { life: 1, comm, burst },
        ControllerMessage::Time { question: 1, common_ns: 2 },
    ];
    let answers = outcomes.map(|outcome| AgentMessage::Answer { order: 1, outcome });
    let acted = AgentMessage::Acted(Box::new(Act { what: "w".into(), by: "b".into(), went: Went::Done }));
    let json = |value: Result<String, serde_json::Error>| value.unwrap();
    let agents = of_agents.iter().chain(&answers).map(|message| json(serde_json::to_string(message)));
    let controllers = of_controllers.iter().map(|message| json(serde_json::to_string(message)));
    agents.chain(controllers).chain([json(serde_json::to_string(&acted))]).collect()
}

/// Services of different versions refuse each other by name when they meet; without another version they would meet, and then
/// refuse each other's messages one by one.
#[test]
fn who_changes_messages_raises_the_version() {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let digest = one_of_each().join("\n").bytes().fold(0xcbf2_9ce4_8422_2325, fnv);
    assert_eq!(
        (VERSION, digest),
        (19, 0xd8a5_716e_50f7_a4f2),
        "raise VERSION of the exchange protocol, and note both here"
    );
}
