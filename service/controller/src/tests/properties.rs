//! Whatever happens in whatever order: in the end every communicator is as one decision over all that is there says, nothing was
//! ordered twice for one strategy, and agents harm nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use mccs_config::change::StrategyChange;
use mccs_config::service::FlowPath;
use proptest::prelude::*;

use super::fixture::{Fixture, name, policy, text, topology_with_nics};
use crate::config::cluster_config::Text;
use crate::inventory::{Interfaces, Inventory};
use crate::links::LinkState;
use crate::messages::answer::{ControllerRequest, Standing};
use crate::pace::HostPace;
use mccs_model::{Refused, Whose};
use mccs_policy::names;
use mccs_telemetry::profile::Measured;

#[derive(Debug, Clone)]
enum Happens {
    /// On which host its root is, and whose it is.
    Begin(usize, usize),
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
    /// NICs of a host, the first or the second, or both.
    NicsDown(usize, usize),
    /// A host is answered by another over a spine, or is not.
    Path {
        from: usize,
        to: usize,
        spine: usize,
        answers: bool,
    },
    /// The host of a communicator's root measures so many milliseconds between its bursts, or none.
    Sends(usize, Option<u64>),
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        5 => (0usize..4, 0usize..2).prop_map(|(host, tenant)| Happens::Begin(host, tenant)),
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
        3 => (0..names().len(), 0..TERMS.len()).prop_map(|(policy, terms)| Happens::Policy(policy, terms)),
        2 => (0..names().len()).prop_map(Happens::Apply),
        1 => any::<bool>().prop_map(Happens::Link),
        2 => (0usize..4, 0usize..4).prop_map(|(host, nics)| Happens::NicsDown(host, nics)),
        2 => (0usize..4, 1usize..4, 0usize..2, any::<bool>())
            .prop_map(|(from, hops, spine, answers)| Happens::Path { from, to: (from + hops) % 4, spine, answers }),
        2 => (0usize..8, proptest::option::of(20u64..200)).prop_map(|(pick, period)| Happens::Sends(pick, period)),
    ]
}

const HOSTS: [&str; 4] = ["host-a", "host-b", "host-c", "host-d"];
const TENANTS: [&str; 2] = ["t", "u"];
const NICS: [&str; 2] = ["eth0", "eth1"];
const SPINES: [&str; 2] = ["50000-50499", "50500-50999"];
/// Further rules of tenants in a file.
const TERMS: [&str; 6] = [
    "",
    "[[tenant]]\nname = \"t\"\ncap = \"3Gbit/s\"\n",
    "[[tenant]]\nname = \"t\"\nweight = 3\n",
    "[[tenant]]\nname = \"t\"\n[[window]]\ntenant = \"t\"\nperiod = \"100ms\"\noffset = \"10ms\"\nlength = \"40ms\"\n",
    "[[tenant]]\nname = \"t\"\npriority = 2\n[[tenant]]\nname = \"u\"\npriority = 1\n",
    "[[reserve]]\ntenant = \"u\"\npaths = [\"spine1\"]\n[[tenant]]\nname = \"u\"\nshare_percent = 60\n",
];

/// State besides the fixture.
struct World {
    fixture: Fixture,
    life: u64,
    /// Hosts whose links to the controller are lost.
    away: [bool; 4],
    /// Hosts that are not answered: by whom, and over which spine.
    dead: BTreeSet<(usize, usize, usize)>,
}

impl World {
    fn new() -> Self {
        let mut fixture = Fixture::new("ffa");
        fixture.topology = topology_with_nics(NICS);
        for host in HOSTS.map(name) {
            fixture.set_inventory(&host, Inventory { interfaces: Some(interfaces(0)), ..Inventory::default() });
        }
        fixture.controller.files(Some(fixture.topology.clone()), None, fixture.now);
        World { fixture, life: 1, away: [false; 4], dead: BTreeSet::new() }
    }

    fn restart_controller(&mut self, policy: Text) {
        self.life += 1;
        self.away = [false; 4];
        self.fixture.restart_controller(self.life, policy);
        // Its host's agent may have forgotten what its probes will say again.
        for (from, to, spine) in self.dead.clone().into_iter().filter(|(from, ..)| *from == 0) {
            self.path((from, to, spine), false);
        }
    }

    fn path(&mut self, path: (usize, usize, usize), answers: bool) {
        if answers {
            self.dead.remove(&path);
        } else {
            self.dead.insert(path);
        }
        let (from, to, spine) = path;
        let (from, to) = (name(HOSTS[from]), name(HOSTS[to]));
        let path = FlowPath { source_ports: SPINES[spine].parse().ok(), ..FlowPath::default() };
        let told = self.fixture.host(&from).agent.path(&to, path, answers);
        self.fixture.execute(&from, told);
    }
}

/// Both NICs, of which those in the mask are down.
fn interfaces(down: usize) -> Interfaces {
    let down = (0..2).filter(|nic| down & 1 << nic != 0).collect();
    Interfaces { all: NICS.map(String::from).to_vec(), down }
}

fn befall(world: &mut World, what: Happens) {
    let World { fixture, away, .. } = world;
    let some_comm = |fixture: &Fixture, pick: usize| {
        let all: Vec<_> = fixture.hosts.values().flat_map(|host| host.comms.keys().cloned()).collect();
        (!all.is_empty()).then(|| all[pick % all.len()].clone())
    };
    match what {
        Happens::Begin(host, tenant) => {
            let (other, third) = (HOSTS[(host + 1) % 4], HOSTS[(host + 2) % 4]);
            fixture.begin(TENANTS[tenant], &[(HOSTS[host], &[0, 3]), (other, &[1]), (third, &[2])]);
        }
        Happens::End(pick) => {
            if let Some(comm) = some_comm(fixture, pick) {
                fixture.end(&comm);
            }
        }
        Happens::Steps(steps) => drop((0..steps).take_while(|_| fixture.step()).count()),
        Happens::Pass(ms) => fixture.pass(Duration::from_millis(ms)),
        Happens::Lose(host) => {
            away[host] = true;
            let host = name(HOSTS[host]);
            fixture.to_agents.retain(|(to, _)| *to != host);
            fixture.to_controller.retain(|(from, _)| *from != host);
            fixture.controller.lost(&host, fixture.now);
            fixture.host(&host).agent.lost(&name("host-a"));
        }
        Happens::Meet(host) => {
            if std::mem::take(&mut away[host]) {
                fixture.controller.met(&name(HOSTS[host]), fixture.now);
            }
        }
        Happens::Restart(with_ffa) => world.restart_controller(policy(if with_ffa { "ffa" } else { "ecmp" })),
        Happens::ByHand(pick) => {
            if let Some(comm) = some_comm(fixture, pick) {
                let rings = Some(vec![vec![3, 2, 1, 0]]);
                fixture.change_by_hand(&comm, StrategyChange { rings, ..StrategyChange::default() });
            }
        }
        Happens::Unpin(pick) => {
            if let Some(comm) = some_comm(fixture, pick) {
                fixture.unpin(&comm);
            }
        }
        Happens::Refuse(host, whose) => {
            fixture.host(&name(HOSTS[host])).refuses = whose.map(|whose| Refused { whose, reason: "it cannot".into() });
        }
        Happens::Policy(which, terms) => {
            let file = format!("{}{}", policy(names()[which]).text, TERMS[terms]);
            fixture.controller.files(None, Some(text("policy.toml", &file)), fixture.now);
        }
        Happens::Apply(which) => {
            let text = format!("[policy]\nname = {:?}\n", names()[which]);
            fixture.ask(ControllerRequest::Apply { name: "apply.toml".into(), text });
        }
        Happens::Link(down) => {
            let state = if down { LinkState::Down } else { LinkState::Up };
            fixture.ask(ControllerRequest::Link { lower: "leaf1".into(), upper: "spine0".into(), state });
        }
        Happens::NicsDown(host, nics) => fixture.has_interfaces(&name(HOSTS[host]), Some(interfaces(nics))),
        Happens::Path { from, to, spine, answers } => world.path((from, to, spine), answers),
        Happens::Sends(pick, period) => {
            if let Some(comm) = some_comm(fixture, pick) {
                let measured = |ms| Measured {
                    period: Duration::from_millis(ms),
                    busy: Duration::from_millis(ms / 4),
                    began: fixture.now - Duration::from_millis(2 * ms),
                };
                let profile = period.map(measured);
                fixture.host(&comm.root).comms.get_mut(&comm).unwrap().profile = profile;
                fixture.look(&comm.root);
            }
        }
    }
}

/// Whether there is anything in what a host is told that its engines keep to.
fn holds(pace: &HostPace) -> bool {
    *pace != HostPace { weight_milli: pace.weight_milli, is_watched: pace.is_watched, ..HostPace::default() }
}

/// Paces of engines, but for times, which are of one life's clock.
fn paces(fixture: &Fixture) -> Vec<(String, String, Option<u64>, usize, bool)> {
    let told =
        fixture.hosts.iter().flat_map(|(host, state)| state.paces.iter().map(move |(comm, pace)| (host, comm, pace)));
    let told = told.filter(|(_, _, pace)| !pace.is_free());
    told.map(|(host, comm, pace)| {
        (host.to_string(), comm.to_string(), pace.cap_bps, pace.flows.len(), pace.window.is_some())
    })
    .collect()
}

/// Happenings, and then what holds in the end.
fn all_is_as_decided_after(happenings: Vec<Happens>) -> Result<(), TestCaseError> {
    let mut world = World::new();
    for what in happenings {
        befall(&mut world, what);
    }
    // All hosts are there and willing, and something changes.
    world.fixture.hosts.values_mut().for_each(|host| host.refuses = None);
    for host in 1..4 {
        befall(&mut world, Happens::Meet(host));
    }
    let fixture = &mut world.fixture;
    fixture.pass(Duration::from_secs(100));
    fixture.controller.files(
        Some(text("topology.toml", &format!("{}\n# again", fixture.topology.text))),
        None,
        fixture.now,
    );
    fixture.pass(Duration::from_secs(100));
    let view = fixture.show();
    let there: usize = fixture.hosts.values().map(|host| host.comms.len()).sum();
    prop_assert_eq!(view.communicators.len(), there);
    let live = fixture.hosts.values().flat_map(|host| host.comms.values());
    let pinned: Vec<String> = live.filter(|live| live.is_pinned).map(|live| live.comm.to_string()).collect();
    for comm in &view.communicators {
        let is_pinned = pinned.contains(&comm.name);
        let expected = if is_pinned { Standing::Pinned } else { Standing::AsDecided };
        prop_assert_eq!(&comm.state, &expected, "{:?}", fixture.history());
        prop_assert!(!is_pinned || comm.strategy.rings == [[3, 2, 1, 0]]);
    }
    HOSTS.iter().for_each(|host| fixture.pace(&name(host)));
    let told = paces(fixture);
    // Engines keep to what is shown, host by host.
    for (host, state) in &fixture.hosts {
        for (comm, pace) in &state.paces {
            let shown = view.communicators.iter().filter(|view| view.name == comm.to_string());
            let shown = shown.flat_map(|view| &view.paces).filter(|(of, _)| *of == host.as_str());
            prop_assert_eq!(shown.filter(|(_, pace)| holds(pace)).count(), usize::from(!pace.is_free()), "{:?}", pace);
        }
    }
    // A controller that knows nothing comes to the same.
    let made = fixture.changes_made();
    world.restart_controller(text("policy.toml", &view.policy_text.unwrap()));
    let fixture = &mut world.fixture;
    fixture.run();
    prop_assert_eq!(fixture.changes_made(), made);
    fixture.pass(Duration::from_secs(1));
    prop_assert_eq!(paces(fixture), told);
    let again = fixture.show();
    prop_assert_eq!((again.links, again.dead_links), (view.links, view.dead_links));
    // Every question was answered.
    prop_assert!(fixture.hosts.values().all(|host| host.asked.is_empty()));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn in_the_end_all_is_as_decided(happenings in proptest::collection::vec(happens(), 0..60)) {
        all_is_as_decided_after(happenings)?;
    }
}

/// A profile that is measured before the agent has asked for the time is told by the first life of the controller, as by the next.
#[test]
fn a_profile_that_comes_before_the_time_is_known_is_told_without_a_new_controller() {
    use Happens::{Begin, Pass, Policy, Sends};
    let yields = names().iter().position(|name| *name == "yield").expect("a policy");
    let happenings = vec![Policy(yields, 4), Begin(0, 0), Pass(1), Sends(0, Some(20)), Begin(1, 1)];
    all_is_as_decided_after(happenings).unwrap_or_else(|wrong| panic!("{wrong}"));
}
