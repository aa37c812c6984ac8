//! Parts of a decision that hosts cannot be told are left, and said.

use mccs_config::TopologyFile;

use super::fixture::{TOPOLOGY, name};
use crate::communicators::plan::{Plan, plan};
use crate::messages::message::ControllerMessage;
use mccs_model::CommId;
use mccs_policy::topology::{HostId, Port, Topology};
use mccs_policy::{Decision, Flow, PathSelection, Window};

fn comm() -> CommId {
    CommId { root: name(&"h".repeat(63)), incarnation: u64::MAX, number: u64::MAX }
}

/// The plan of so many flows from the first host to the third.
fn planned(channels: u32, window: Option<Window>, rate: Option<f64>) -> Plan {
    let topology = Topology::from_file(&TopologyFile::parse(TOPOLOGY, "topology.toml").unwrap()).unwrap();
    let port = |host: u32| Port { host: HostId(host), nic: 0 };
    let decision = Decision {
        comm: 1,
        ring_orders: Vec::new(),
        flows: (0..channels)
            .map(|channel| Flow { channel, from: port(0), to: port(2), path: PathSelection::Hash })
            .collect(),
        weight: 1.0,
        cap_bps: Some(2e9),
        host_cap_bps: None,
        priority: 0,
        window,
        yields: Vec::new(),
    };
    let rates = rate.map(|rate| vec![rate; channels as usize]);
    plan(&topology, &decision, None, rates.as_deref(), |_| Some(comm()))
}

fn can_be_told(plan: &Plan) -> bool {
    plan.paces.iter().all(|(_, pace)| {
        let message = ControllerMessage::Pace { life: u64::MAX, comm: comm(), pace: pace.clone() };
        message.encode().is_ok_and(|body| ControllerMessage::decode(&body) == Ok(message))
    })
}

#[test]
fn times_that_hosts_would_refuse_leave_caps_and_shares() {
    let window = |period_ns: u64| Window { period_ns, offset_ns: 0, length_ns: period_ns / 4 };
    for (period_ns, is_left) in [(1_000_000, false), (2 * 3_600_000_000_000, true)] {
        let plan = planned(2, Some(window(period_ns)), Some(1e9));
        let pace = &plan.paces[0].1;
        assert!(can_be_told(&plan), "{pace:?}");
        assert_eq!((pace.window.is_none(), pace.cap_bps, pace.flows.len()), (is_left, Some(2_000_000_000), 2));
        assert_eq!(plan.not_enforced.iter().any(|what| what.contains("host-a") && what.contains("times")), is_left);
    }
}

#[test]
fn shares_that_do_not_fit_a_message_leave_caps() {
    for (channels, is_left) in [(100, false), (4000, true)] {
        let plan = planned(channels, None, Some(1e9));
        let pace = &plan.paces[0].1;
        assert!(can_be_told(&plan));
        assert_eq!((pace.flows.is_empty(), pace.cap_bps), (is_left, Some(2_000_000_000)));
        assert_eq!(plan.not_enforced.iter().any(|what| what.contains("host-a") && what.contains("4000")), is_left);
    }
}
