//! Whatever happens in whatever order: in the end every communicator is as one decision over all that is there says, nothing was
//! ordered twice for one strategy, and agents harm nothing.

use std::time::Duration;

use proptest::prelude::*;

use super::bed::{Bed, TOPOLOGY, name, policy, text};
use crate::controller::answer::{ControllerRequest, Standing};
use crate::controller::links::LinkState;
use crate::engines::proxy::Refused;
use crate::exchange::protocol::Whose;
use mccs_config::change::StrategyChange;

#[derive(Debug, Clone)]
enum Happens {
    Begin(usize),
    End(usize),
    Steps(usize),
    Pass(u64),
    Lose(usize),
    Meet(usize),
    Restart(bool),
    ByHand(usize),
    Unpin(usize),
    Refuse(usize, Option<Whose>),
    Policy(usize, usize),
    Apply(usize),
    Link(bool),
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        5 => (0usize..4).prop_map(Happens::Begin),
        2 => (0usize..8).prop_map(Happens::End),
        12 => (1usize..12).prop_map(Happens::Steps),
        3 => (1u64..15_000).prop_map(Happens::Pass),
        1 => (1usize..4).prop_map(Happens::Lose),
        2 => (1usize..4).prop_map(Happens::Meet),
        1 => any::<bool>().prop_map(Happens::Restart),
        2 => (0usize..8).prop_map(Happens::ByHand),
        1 => (0usize..8).prop_map(Happens::Unpin),
        2 => (0usize..4, 0usize..4).prop_map(|(host, whose)| {
            let whose = [Some(Whose::Communicator), Some(Whose::Change)].get(whose).copied().flatten();
            Happens::Refuse(host, whose)
        }),
        3 => (0usize..3, 0usize..4).prop_map(|(policy, terms)| Happens::Policy(policy, terms)),
        2 => (0usize..3).prop_map(Happens::Apply),
        1 => any::<bool>().prop_map(Happens::Link),
    ]
}

const HOSTS: [&str; 4] = ["host-a", "host-b", "host-c", "host-d"];
const POLICIES: [&str; 3] = ["ffa", "ecmp", "pfa"];
/// What a file says of tenants besides.
const TERMS: [&str; 4] = [
    "",
    "[[tenant]]\nname = \"t\"\ncap = \"3Gbit/s\"\n",
    "[[tenant]]\nname = \"t\"\nweight = 3\n",
    "[[tenant]]\nname = \"t\"\n[[window]]\ntenant = \"t\"\nperiod = \"100ms\"\noffset = \"10ms\"\nlength = \"40ms\"\n",
];

fn befall(bed: &mut Bed, what: Happens, life: &mut u64, away: &mut [bool; 4]) {
    let some_comm = |bed: &Bed, pick: usize| {
        let all: Vec<_> = bed.hosts.values().flat_map(|host| host.comms.keys().cloned()).collect();
        (!all.is_empty()).then(|| all[pick % all.len()].clone())
    };
    match what {
        Happens::Begin(host) => {
            let (other, third) = (HOSTS[(host + 1) % 4], HOSTS[(host + 2) % 4]);
            bed.begin("t", &[(HOSTS[host], &[0, 3]), (other, &[1]), (third, &[2])]);
        }
        Happens::End(pick) => {
            if let Some(comm) = some_comm(bed, pick) {
                bed.end(&comm);
            }
        }
        Happens::Steps(steps) => drop((0..steps).take_while(|_| bed.step()).count()),
        Happens::Pass(ms) => bed.pass(Duration::from_millis(ms)),
        Happens::Lose(host) => {
            away[host] = true;
            let host = name(HOSTS[host]);
            bed.to_agents.retain(|(to, _)| *to != host);
            bed.to_controller.retain(|(from, _)| *from != host);
            bed.controller.lost(&host, bed.now);
            bed.host(&host).agent.lost(&name("host-a"));
        }
        Happens::Meet(host) => {
            if std::mem::take(&mut away[host]) {
                bed.controller.met(&name(HOSTS[host]), bed.now);
            }
        }
        Happens::Restart(with_ffa) => {
            *life += 1;
            *away = [false; 4];
            bed.restart_controller(*life, policy(if with_ffa { "ffa" } else { "ecmp" }));
        }
        Happens::ByHand(pick) => {
            if let Some(comm) = some_comm(bed, pick) {
                let rings = Some(vec![vec![3, 2, 1, 0]]);
                bed.change_by_hand(&comm, StrategyChange { rings, ..StrategyChange::default() });
            }
        }
        Happens::Unpin(pick) => {
            if let Some(comm) = some_comm(bed, pick) {
                bed.unpin(&comm);
            }
        }
        Happens::Refuse(host, whose) => {
            bed.host(&name(HOSTS[host])).refuses = whose.map(|whose| Refused { whose, reason: "it cannot".into() });
        }
        Happens::Policy(which, terms) => {
            let file = format!("{}{}", policy(POLICIES[which]).text, TERMS[terms]);
            bed.controller.files(None, Some(text("policy.toml", &file)), bed.now);
        }
        Happens::Apply(which) => {
            let text = format!("[policy]\nname = {:?}\n", POLICIES[which]);
            bed.ask(ControllerRequest::Apply { name: "apply.toml".into(), text });
        }
        Happens::Link(down) => {
            let state = if down { LinkState::Down } else { LinkState::Up };
            bed.ask(ControllerRequest::Link { lower: "leaf1".into(), upper: "spine0".into(), state });
        }
    }
}

/// What engines were told, but for times, which are of one life's clock.
fn paces(bed: &Bed) -> Vec<(String, String, Option<u64>, usize, bool)> {
    let told =
        bed.hosts.iter().flat_map(|(host, state)| state.paces.iter().map(move |(comm, pace)| (host, comm, pace)));
    let told = told.filter(|(_, _, pace)| !pace.is_free());
    told.map(|(host, comm, pace)| {
        (host.to_string(), comm.to_string(), pace.cap_bps, pace.flows.len(), pace.window.is_some())
    })
    .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn in_the_end_all_is_as_decided(happenings in proptest::collection::vec(happens(), 0..60)) {
        let (mut bed, mut life, mut away) = (Bed::new("ffa"), 1, [false; 4]);
        for what in happenings {
            befall(&mut bed, what, &mut life, &mut away);
        }
        // All is well again, and something changes.
        bed.hosts.values_mut().for_each(|host| host.refuses = None);
        for host in 1..4 {
            befall(&mut bed, Happens::Meet(host), &mut life, &mut away);
        }
        bed.pass(Duration::from_secs(100));
        bed.controller.files(Some(text("topology.toml", &format!("{TOPOLOGY}\n# again"))), None, bed.now);
        bed.pass(Duration::from_secs(100));
        let view = bed.show();
        let there: usize = bed.hosts.values().map(|host| host.comms.len()).sum();
        prop_assert_eq!(view.communicators.len(), there);
        let live = bed.hosts.values().flat_map(|host| host.comms.values());
        let pinned: Vec<String> = live.filter(|live| live.is_pinned).map(|live| live.comm.to_string()).collect();
        for comm in &view.communicators {
            let is_pinned = pinned.contains(&comm.name);
            let expected = if is_pinned { Standing::Pinned } else { Standing::AsDecided };
            prop_assert_eq!(&comm.state, &expected, "{:?}", bed.history());
            prop_assert!(!is_pinned || comm.strategy.rings == [[3, 2, 1, 0]]);
        }
        HOSTS.iter().for_each(|host| bed.pace(&name(host)));
        let told = paces(&bed);
        for host in bed.hosts.values() {
            for (comm, pace) in &host.paces {
                let shown = view.communicators.iter().any(|view| view.name == comm.to_string() && !view.paces.is_empty());
                // What is pinned may have a host's flows on a link that is down: they have nothing to keep to.
                let may_be_free = pinned.contains(&comm.to_string());
                prop_assert!(shown != pace.is_free() || (may_be_free && pace.is_free()), "{:?}", &pace);
            }
        }
        // A controller that knows nothing comes to the same.
        let made = bed.changes_made();
        let file = view.policy_text.unwrap();
        let topology = bed.controller.topology_text().unwrap();
        bed.restart_controller(life + 1, text("policy.toml", &file));
        bed.controller.files(Some(topology), None, bed.now);
        bed.run();
        prop_assert_eq!(bed.changes_made(), made);
        bed.pass(Duration::from_secs(1));
        prop_assert_eq!(paces(&bed), told);
        prop_assert_eq!(bed.show().links, view.links);
        // Every question was answered.
        prop_assert!(bed.hosts.values().all(|host| host.asked.is_empty()));
    }
}
