//! Ranks on GPUs of several hosts that combine among themselves what the services move.

mod failures;
mod observed;
mod roles;

use std::path::PathBuf;

use mccs::CollectiveKind;
use mccs_cuda::OwnedStream;
use mccs_device::cuda::QUEUES_VARIABLE;
use mccs_eval::workload::Call;
use mccs_tests::TestService;
use mccs_tests::hosts::TestHosts;

use super::TENANTS;
use super::ranks::{FORKS, Place, Player, Role, call, everybody};

/// Roles of processes of these tests, besides those of others.
pub const ROLES: &[(&str, Role)] = &[
    ("combines", roles::combines),
    ("combines_all_types", roles::combines_all_types),
    ("combines_in_place", roles::combines_in_place),
    ("combines_in_turns", roles::combines_in_turns),
    ("combines_late", roles::combines_late),
    ("combines_long", roles::combines_long),
    ("combines_until_it_fails", roles::combines_until_it_fails),
    ("combines_in_graphs", roles::combines_in_graphs),
    ("counts_what_rails_move", observed::counts_what_rails_move),
    ("waits_for_the_last", observed::waits_for_the_last),
];

const KINDS: [CollectiveKind; 8] = [
    CollectiveKind::AllReduce,
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllToAll,
    CollectiveKind::Broadcast,
    CollectiveKind::Reduce,
    CollectiveKind::Gather,
    CollectiveKind::Scatter,
];

/// With a block for each rank, none of which is combined.
const MOVING: [CollectiveKind; 2] = [CollectiveKind::AllGather, CollectiveKind::AllToAll];

/// Services where GPUs combine payloads of all sizes.
pub fn everything() -> String {
    TENANTS.replacen("[cuda]\n", "[cuda]\nrails_from = \"1B\"\n", 1)
}

/// The same, where what GPUs reduce goes round a ring of hosts.
fn round_a_ring() -> String {
    everything().replacen("[cuda]\n", "[strategy]\nreductions = \"ring\"\n[cuda]\n", 1)
}

/// Has teams of so many ranks, with a service each, play a role.
pub fn play_in_teams(role: &str, hosts: &TestHosts, teams: &[u32]) -> Vec<String> {
    play_as(0, role, hosts, teams)
}

/// The same, as a tenant.
pub fn play_as(tenant: usize, role: &str, hosts: &TestHosts, teams: &[u32]) -> Vec<String> {
    play_with(tenant, role, hosts, teams, &[])
}

/// The same, with more in the environment.
fn play_with(
    tenant: usize,
    role: &str,
    hosts: &TestHosts,
    teams: &[u32],
    environment: &[(&str, PathBuf)],
) -> Vec<String> {
    let nranks = teams.iter().sum();
    let whole = Place { nranks, root: "h0".into(), ..everybody(hosts.service(0), tenant) };
    let mut first = 0;
    let players: Vec<_> = teams
        .iter()
        .enumerate()
        .map(|(host, team)| {
            let ranks = first..first + team;
            first = ranks.end;
            let place = Place { ranks, socket: hosts.service(host).socket(tenant), ..whole.clone() };
            Player::start_with(role, &place, environment)
        })
        .collect();
    players.into_iter().map(Player::ends_well).collect()
}

/// Both tenants' ranks play a role at once, in teams of so many.
pub fn both_play(role: &str, hosts: &TestHosts, teams: &[u32]) {
    std::thread::scope(|scope| {
        let play = |tenant| scope.spawn(move || play_as(tenant, role, hosts, teams));
        let players = [0, 1].map(play);
        players.into_iter().for_each(|player| drop(player.join().expect("a tenant's ranks")));
    });
}

/// Teams of as many ranks as there are GPUs, and fewer, on several hosts.
pub fn teams() -> Vec<Vec<u32>> {
    match mccs_cuda::gpus().expect("GPUs").len() {
        0 => panic!("needs a GPU"),
        1 => vec![vec![1, 1], vec![1, 1, 1]],
        2 => vec![vec![2, 2], vec![2, 1], vec![2, 2, 2], vec![1, 1, 1]],
        3 => vec![vec![3, 3], vec![3, 1], vec![2, 3]],
        _ => vec![vec![4, 4], vec![4, 2], vec![3, 1], vec![2, 4, 1]],
    }
}

pub fn every_kind(number: u64, nranks: u32, count: u64) -> Call {
    let kind = KINDS[number as usize % KINDS.len()];
    let root = if kind.has_root() { (number / 3) as u32 % nranks } else { 0 };
    Call { kind, root, ..call(number, nranks, count) }
}

pub fn synchronize(stream: &OwnedStream) -> anyhow::Result<()> {
    // SAFETY: the stream lives.
    unsafe { stream.raw().synchronize()? };
    Ok(())
}

/// Processes of all ranks of two hosts with two each.
pub fn four_processes(hosts: &TestHosts, environment: &[(&str, PathBuf)]) -> Vec<Player> {
    four_play("combines_until_it_fails", hosts, environment)
}

/// The same, in another role.
pub fn four_play(role: &str, hosts: &TestHosts, environment: &[(&str, PathBuf)]) -> Vec<Player> {
    let whole = Place { nranks: 4, root: "h0".into(), ..everybody(hosts.service(0), 0) };
    let place = |rank: u32| Place {
        ranks: rank..rank + 1,
        socket: hosts.service(rank as usize / 2).socket(0),
        ..whole.clone()
    };
    (0..4).map(|rank| Player::start_with(role, &place(rank), environment)).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn gpus_of_several_hosts_combine_what_the_services_move() {
    for teams in teams() {
        let hosts = TestHosts::start(teams.len(), &everything());
        play_in_teams("combines_long", &hosts, &teams);
    }
}

/// Segments of all calls of several slices have streams of their own: calls of all kinds in streams that change, in place, late, and in graphs.
#[test]
#[ignore = "needs a GPU"]
fn segments_of_long_calls_have_streams_of_their_own() {
    let forked = [(FORKS, "1".into())];
    for teams in teams() {
        let roles = ["combines_in_place", "combines_late", "combines_in_graphs"];
        for role in roles {
            let hosts = TestHosts::start(teams.len(), &everything());
            play_with(0, role, &hosts, &teams, &forked);
        }
    }
    let teams = &teams()[0];
    play_with(0, "combines_long", &TestHosts::start(teams.len(), &everything()), teams, &forked);
}

/// All streams of a GPU share one queue, which takes their work in the order of the calls.
#[test]
#[ignore = "needs a GPU"]
fn segments_go_on_in_one_queue() {
    let environment = [(FORKS, "1".into()), (QUEUES_VARIABLE, "1".into())];
    let teams = &teams()[0];
    for role in ["combines_in_place", "combines_in_graphs"] {
        play_with(0, role, &TestHosts::start(teams.len(), &everything()), teams, &environment);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_type_and_operator_goes_by_rails() {
    let teams = teams();
    for teams in [&teams[0], &teams[1]] {
        let hosts = TestHosts::start(teams.len(), &everything());
        play_in_teams("combines_all_types", &hosts, teams);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn calls_in_place_go_by_rails() {
    for teams in teams() {
        let hosts = TestHosts::start(teams.len(), &everything());
        play_in_teams("combines_in_place", &hosts, &teams);
    }
}

/// Memory goes from process to process by descriptors alone.
#[test]
#[ignore = "needs a GPU"]
fn rails_need_no_handles() {
    let teams = &teams()[1];
    let hosts = TestHosts::start(teams.len(), &super::without_handles(&everything()));
    ["combines_late", "exchanges"].into_iter().for_each(|role| drop(play_in_teams(role, &hosts, teams)));
}

/// Two tenants' communicators use the same GPUs and hosts at once.
#[test]
#[ignore = "needs a GPU"]
fn two_tenants_go_by_rails_at_once() {
    let teams = &teams()[1];
    both_play("combines_late", &TestHosts::start(teams.len(), &everything()), teams);
}

#[test]
#[ignore = "needs a GPU"]
fn short_and_long_calls_take_turns() {
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), TENANTS);
    play_in_teams("combines_in_turns", &hosts, teams);
}

#[test]
#[ignore = "needs a GPU"]
fn a_rank_may_come_late_to_what_rails_move() {
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), &everything());
    play_in_teams("combines_late", &hosts, teams);
}

#[test]
#[ignore = "needs a GPU"]
fn communicators_with_rails_do_not_wait_for_each_other() {
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), &everything());
    play_in_teams("mixes_communicators", &hosts, teams);
}

#[test]
#[ignore = "needs a GPU"]
fn factors_in_memory_of_gpus_go_by_rails() {
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), &everything());
    play_in_teams("scales", &hosts, teams);
}

/// Hosts' combinations go on from one to the next: of every length, type and operator, out of and in place, and in graphs.
#[test]
#[ignore = "needs a GPU"]
fn reductions_go_round_a_ring_of_hosts() {
    let most = mccs_cuda::gpus().expect("GPUs").len().min(2) as u32;
    for teams in [vec![most; 3], vec![most, 1, most], vec![1; 4]] {
        let hosts = TestHosts::start(teams.len(), &round_a_ring());
        ["combines_long", "combines_in_place"].into_iter().for_each(|role| drop(play_in_teams(role, &hosts, &teams)));
    }
    let hosts = TestHosts::start(3, &round_a_ring());
    let roles = ["combines_all_types", "combines_late", "replays_beside_calls"];
    roles.into_iter().for_each(|role| drop(play_in_teams(role, &hosts, &[1; 3])));
}

/// Sends and receives: inside hosts by kernels, between them by the services, in one group.
#[test]
#[ignore = "needs a GPU"]
fn messages_inside_hosts_and_between_them_go_in_one_group() {
    for teams in &teams()[..2] {
        let hosts = TestHosts::start(teams.len(), &everything());
        play_in_teams("exchanges", &hosts, teams);
    }
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), &everything());
    ["exchanges_in_graphs", "pipelines", "errs"].into_iter().for_each(|role| drop(play_in_teams(role, &hosts, teams)));
}

/// Graphs replay what goes by rails, in any order with calls, by sums whose factors change.
#[test]
#[ignore = "needs a GPU"]
fn graphs_go_by_rails() {
    let teams = &teams()[1];
    for role in ["replays", "replays_beside_calls", "scales_in_graphs", "leaves_while_a_graph_waits"] {
        let hosts = TestHosts::start(teams.len(), &everything());
        play_in_teams(role, &hosts, teams);
    }
}

/// GPUs of one service: `tests/gpu-emulated.sh` emulates them.
#[test]
#[ignore = "needs two GPUs without peer access"]
fn gpus_that_do_not_reach_each_other_go_by_rails() {
    let service = TestService::start(&everything());
    let place = everybody(&service, 0);
    assert!(place.gpus > 1, "needs two GPUs");
    Player::start("combines_long", &place).ends_well();
}

/// One operator who wants no rails decides for all.
#[test]
#[ignore = "needs a GPU"]
fn one_host_without_rails_is_one_for_all() {
    let settings = |host: usize| match host {
        0 => everything(),
        _ => TENANTS.replacen("[cuda]\n", "[cuda]\nrails_from = \"0\"\n", 1),
    };
    let hosts = TestHosts::start_each(2, settings);
    play_in_teams("stages", &hosts, &[1, 1]);
    for host in [0, 1] {
        super::wait_until(|| hosts.service(host).service().registry.comms().is_empty());
    }
}
