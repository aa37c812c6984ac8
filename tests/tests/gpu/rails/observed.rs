//! Moves of rails and work of kernels, as the service counts them and operators see them: right results do
//! not tell.

use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_eval::workload::Call;
use mccs_tests::hosts::TestHosts;

use super::{KINDS, everything, round_a_ring, synchronize, teams};
use crate::ranks::{Buffers, Place, Player, Rank, call, capture, enqueue, everybody};
use crate::wait_until;

/// Launches of a graph with a collective.
const REPLAYS: u64 = 3;

/// A call of each kind and a graph's, long enough for all rails to have a part, and stays.
pub(super) fn counts_what_rails_move(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        for kind in KINDS {
            let call = Call { kind, ..call(0, place.nranks, 20_000) };
            let at = Buffers::of(&context, &call)?;
            at.fill(&call, comm.rank())?;
            together.wait();
            enqueue(&comm, &call, &at, stream.raw())?;
            synchronize(&stream)?;
            at.check(&call, comm.rank())?;
        }
        let call = call(1, place.nranks, 20_000);
        let at = Buffers::of(&context, &call)?;
        let mut graph = capture(&stream, &together, |stream| enqueue(&comm, &call, &at, stream))?;
        for _ in 0..REPLAYS {
            at.fill(&call, comm.rank())?;
            // SAFETY: communicator, buffers and stream live.
            unsafe { graph.launch(stream.raw())? };
            synchronize(&stream)?;
            at.check(&call, comm.rank())?;
        }
        together.wait();
        if comm.rank() == place.ranks.start {
            println!("is done");
        }
        loop {
            std::thread::park();
        }
    })
}

/// All but the last rank call, and wait for it.
pub(super) fn waits_for_the_last(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let call = call(0, place.nranks, 50_000);
        let at = Buffers::of(&context, &call)?;
        at.fill(&call, comm.rank())?;
        together.wait();
        if comm.rank() + 1 < place.nranks {
            enqueue(&comm, &call, &at, stream.raw())?;
        }
        println!("has called");
        loop {
            std::thread::park();
        }
    })
}

/// The operator hears of the job's ranks and their GPUs, not of a rail's.
#[test]
#[ignore = "needs two GPUs"]
fn a_rank_for_which_rails_wait_is_named_as_the_caller_knows_it() {
    let hosts = TestHosts::start(2, &everything());
    let whole = Place { nranks: 4, root: "h0".into(), ..everybody(hosts.service(0), 0) };
    let place = |host: u32| Place {
        ranks: host * 2..host * 2 + 2,
        socket: hosts.service(host as usize).socket(0),
        ..whole.clone()
    };
    let mut players = [0, 1].map(|host| Player::start("waits_for_the_last", &place(host)));
    players.iter_mut().for_each(|player| player.hears("has called"));
    let comms = hosts.service(0).service().registry.comms();
    let found =
        comms.iter().find_map(|comm| comm.part.as_ref().filter(|part| part.name == "rail 2 of 2").zip(Some(comm)));
    let (part_of, rail) = found.expect("the last rank's rail");
    let (request, gpu) = (ControlRequest::WhyStuck { communicator: rail.number }, Some(3 % whole.gpus as u32));
    wait_until(|| {
        let Ok(ControlAnswer::Stuck(report)) = ask(&hosts.service(0).control_socket(), &request) else {
            panic!("no report")
        };
        let part = report.part.as_ref().expect("a part");
        assert_eq!((part.whole, part.name.as_str()), (part_of.whole, "rail 2 of 2"));
        let ranks: Vec<_> = report.hosts.iter().flat_map(|(_, told)| told).flat_map(|told| &told.ranks).collect();
        assert!(ranks.iter().all(|rank| [1, 3].contains(&rank.rank)), "{ranks:?}");
        report.culprits.iter().any(|one| (one.host.as_str(), one.rank, one.gpu) == ("h1", Some(3), gpu))
    });
    players.iter_mut().for_each(Player::kill);
}

/// Long calls go by rails: right results do not tell.
#[test]
#[ignore = "needs a GPU"]
fn the_whole_moves_nothing_that_rails_do() {
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), &everything());
    let whole = Place { nranks: teams.iter().sum(), root: "h0".into(), ..everybody(hosts.service(0), 0) };
    let place = |host: u32| Place {
        ranks: host * teams[0]..(host + 1) * teams[0],
        socket: hosts.service(host as usize).socket(0),
        ..whole.clone()
    };
    let mut players = [0, 1].map(|host| Player::start("counts_what_rails_move", &place(host)));
    players.iter_mut().for_each(|player| player.hears("is done"));
    let comms = hosts.service(0).service().registry.comms();
    let of_whole: Vec<_> = comms.iter().filter(|comm| comm.id == whole.id && comm.is_staged()).collect();
    // Ranks have agreed on what goes by rails, and on whether its data are copied to memory of the host.
    assert_eq!(of_whole.iter().map(|comm| comm.totals().operations).collect::<Vec<_>>(), [2]);
    let named = |words: &str| {
        let is_named = |comm: &&std::sync::Arc<mccs_registry::CommInfo>| {
            comm.part.as_ref().is_some_and(|part| part.name.starts_with(words))
        };
        comms.iter().filter(is_named).collect::<Vec<_>>()
    };
    let graphs = named("graphs on rail");
    assert_eq!(
        graphs.iter().map(|comm| comm.totals().operations).collect::<Vec<_>>(),
        vec![REPLAYS; teams[0] as usize]
    );
    let rails = named("rail");
    assert_eq!(rails.len(), teams[0] as usize);
    assert!(rails.iter().all(|rail| rail.totals().operations >= KINDS.len() as u64 && rail.nranks == 2));
    players.iter_mut().for_each(Player::kill);
}

/// A team has one kernel for all other hosts, however many there are.
#[test]
#[ignore = "needs two GPUs"]
fn a_team_has_one_kernel_for_all_hosts() {
    const TEAM: u32 = 2;
    // Two of each call but a reduce-scatter, which has one, and of each replay of an all-gather.
    const KERNELS: u64 = 2 * (KINDS.len() as u64 + REPLAYS) - 1;
    for count in [2, 3] {
        let hosts = TestHosts::start(count as usize, &everything());
        let whole = Place { nranks: count * TEAM, root: "h0".into(), ..everybody(hosts.service(0), 0) };
        let place = |host: u32| Place {
            ranks: host * TEAM..(host + 1) * TEAM,
            socket: hosts.service(host as usize).socket(0),
            ..whole.clone()
        };
        let mut players: Vec<_> =
            (0..count).map(|host| Player::start("counts_what_rails_move", &place(host))).collect();
        players.iter_mut().for_each(|player| player.hears("is done"));
        let comms = hosts.service(0).service().registry.comms();
        let is_team = |comm: &&std::sync::Arc<mccs_registry::CommInfo>| {
            comm.part.as_ref().is_some_and(|part| part.name.starts_with("team"))
        };
        let team = comms.iter().find(is_team).expect("a team");
        wait_until(|| {
            // Counts of kernels are read when somebody asks.
            team.ask();
            team.totals().operations >= KERNELS
        });
        assert_eq!(team.totals().operations, KERNELS, "{count} hosts");
        players.iter_mut().for_each(Player::kill);
    }
}

/// That results are right does not tell that they went round a ring: of three hosts an all-reduce and a reduce-scatter take a move more, and a
/// reduce two.
#[test]
#[ignore = "needs a GPU"]
fn a_ring_takes_a_move_for_each_hop() {
    let moves = |settings: &str| {
        let hosts = TestHosts::start(3, settings);
        let whole = Place { nranks: 3, root: "h0".into(), ..everybody(hosts.service(0), 0) };
        let place = |host: u32| Place {
            ranks: host..host + 1,
            socket: hosts.service(host as usize).socket(0),
            ..whole.clone()
        };
        let mut players = [0, 1, 2].map(|host| Player::start("counts_what_rails_move", &place(host)));
        players.iter_mut().for_each(|player| player.hears("is done"));
        let comms = hosts.service(0).service().registry.comms();
        let is_rail = |part: &mccs_registry::PartOf| part.name.starts_with("rail");
        let rails = comms.iter().filter(|comm| comm.part.as_ref().is_some_and(is_rail));
        let count: u64 = rails.map(|comm| comm.totals().operations).sum();
        let rings: Vec<_> = comms.iter().map(|comm| comm.reduction_ring_of_ranks()).collect();
        players.iter_mut().for_each(Player::kill);
        (count, rings.into_iter().filter(|ring| !ring.is_empty()).collect::<Vec<_>>())
    };
    let (exchanged, gone_round) = (moves(&everything()), moves(&round_a_ring()));
    assert!(gone_round.0 >= exchanged.0 + 4, "{exchanged:?}, {gone_round:?}");
    assert_eq!((exchanged.1, gone_round.1), (Vec::new(), vec![vec![0, 1, 2]]), "of the whole alone");
}
