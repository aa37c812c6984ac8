//! Ranks that a diagnosis names.

use super::*;

fn rank(rank: u32, called: u64, waits: bool) -> RankAccount {
    let waits_in = if waits { vec!["all_reduce".into()] } else { Vec::new() };
    let (pid, last) = (100 + rank as i32, if called > 0 { "barrier".into() } else { String::new() });
    RankAccount { rank, pid, called, last, waits_in, has_all_pairs: true, ..RankAccount::default() }
}

fn host(name: &str, ranks: Vec<RankAccount>, flows: Vec<FlowWait>) -> (String, Option<HostAccount>) {
    (name.into(), Some(HostAccount { ranks, flows, ..HostAccount::default() }))
}

fn receive(from: u32, to: u32) -> FlowWait {
    FlowWait { channel: 0, from, to, is_receive: true, step: 3 }
}

fn of(hosts: Vec<(String, Option<HostAccount>)>) -> (StuckClass, Vec<Option<u32>>, String) {
    let report = diagnose(1, hosts);
    let what = report.culprits.iter().map(|culprit| format!("{} {}; ", culprit.host, culprit.what)).collect();
    (report.class, report.culprits.iter().map(|culprit| culprit.rank).collect(), what)
}

#[test]
fn ranks_that_have_not_called_are_named() {
    let hosts = vec![
        host("a", vec![rank(0, 5, true), rank(1, 4, false)], Vec::new()),
        host("b", vec![rank(2, 5, true)], vec![receive(0, 2)]),
    ];
    let (class, ranks, what) = of(hosts);
    assert_eq!((class, ranks), (StuckClass::Rank, vec![Some(1)]));
    assert!(what.contains("a has called nothing after collective 3, barrier"), "{what}");
    let first = vec![host("a", vec![rank(0, 1, true)], Vec::new()), host("b", vec![rank(1, 0, false)], Vec::new())];
    assert!(of(first).2.contains("nothing yet"));
    // It has called more, behind that one.
    let behind = RankAccount { is_behind: true, behind_seq: Some(1), ..rank(1, 4, false) };
    let hosts = vec![host("a", vec![rank(0, 2, true), behind], Vec::new())];
    assert!(of(hosts).2.contains("has called collective 1, behind something else"));
}

#[test]
fn the_first_flow_of_a_chain_of_waits_is_named() {
    // 0 to 1 does not get through; 1 cannot pass on to 2.
    let hosts = vec![
        host("a", vec![rank(0, 3, true)], vec![FlowWait { is_receive: false, ..receive(0, 1) }]),
        host("b", vec![rank(1, 3, true)], vec![receive(0, 1)]),
        host("c", vec![rank(2, 3, true)], vec![receive(1, 2)]),
    ];
    let (class, ranks, what) = of(hosts);
    assert_eq!((class, ranks), (StuckClass::Flow, vec![Some(0)]));
    assert!(what.contains("a its data for rank 1 on b does not get through (channel 0)"), "{what}");
}

#[test]
fn how_the_flow_leaves_its_host_is_told() {
    let route = |to, route: &str| FlowRoute { channel: 0, from: 0, to, route: route.into() };
    let named = |routes: Vec<FlowRoute>| {
        let (_, sender) = host("a", vec![rank(0, 3, true)], Vec::new());
        let sender = ("a".into(), sender.map(|account| HostAccount { routes, ..account }));
        of(vec![sender, host("b", vec![rank(1, 3, true)], vec![receive(0, 1)])]).2
    };
    let what = named(vec![route(1, "rdma mlx5_0:1, dscp 26"), route(2, "tcp")]);
    assert!(what.contains("get through (channel 0, over rdma mlx5_0:1, dscp 26); "), "{what}");
    // Two strategies, the same and another.
    let what = named(vec![route(1, "tcp, ports 1-2"), route(1, "tcp, ports 1-2"), route(1, "tcp")]);
    assert!(what.contains("(channel 0, over tcp, over tcp, ports 1-2)"), "{what}");
}

#[test]
fn in_a_ring_whoever_has_done_least_waits_for_the_culprit() {
    let least = FlowWait { step: 2, ..receive(1, 2) };
    let hosts = vec![
        host("a", vec![rank(0, 3, true)], vec![receive(2, 0)]),
        host("b", vec![rank(1, 3, true)], vec![receive(0, 1)]),
        host("c", vec![rank(2, 3, true)], vec![least]),
    ];
    let (class, ranks, _) = of(hosts);
    assert_eq!((class, ranks), (StuckClass::Flow, vec![Some(1)]));
}

#[test]
fn who_is_in_a_later_collective_waits_for_the_same_culprit() {
    // 0 to 1 does not get through on channel 0, and 1 has ended channel 1. 2 and 0 have all of that collective, and are in the next one.
    let on = |channel, from, to, step| FlowWait { channel, step, ..receive(from, to) };
    let mut hosts = vec![
        host("a", vec![rank(0, 3, true)], vec![on(0, 2, 0, 1), on(1, 2, 0, 1)]),
        host("b", vec![rank(1, 3, true)], vec![on(0, 0, 1, 9)]),
        host("c", vec![rank(2, 3, true)], vec![on(0, 1, 2, 1), on(1, 1, 2, 1)]),
    ];
    for ((_, account), started) in hosts.iter_mut().zip([3, 2, 3]) {
        account.as_mut().expect("told").started = started;
    }
    let (class, ranks, what) = of(hosts);
    assert_eq!((class, ranks), (StuckClass::Flow, vec![Some(0)]), "{what}");
}

#[test]
fn failures_and_silent_hosts_come_first() {
    let well = || host("a", vec![rank(0, 3, true)], Vec::new());
    assert_eq!(of(vec![well(), ("b".into(), None)]).0, StuckClass::Host);
    let failed = HostAccount { failure: Some("a link broke".into()), ..HostAccount::default() };
    let (class, _, what) = of(vec![well(), ("b".into(), Some(failed)), ("c".into(), None)]);
    assert_eq!(class, StuckClass::Failed);
    assert!(what.contains("b a link broke"), "{what}");
}

#[test]
fn who_waits_for_nobody_is_not_stuck() {
    let idle = vec![host("a", vec![rank(0, 3, false)], Vec::new()), host("b", vec![rank(1, 3, false)], Vec::new())];
    assert_eq!(of(idle).0, StuckClass::NotStuck);
    // One is ahead in time, as always: nothing waits yet.
    let ahead = vec![host("a", vec![rank(0, 3, false), rank(1, 2, false)], Vec::new())];
    assert_eq!(of(ahead).0, StuckClass::NotStuck);
    let gone = RankAccount { has_left: true, ..rank(1, 2, false) };
    assert_eq!(of(vec![host("a", vec![rank(0, 3, false), gone], Vec::new())]).0, StuckClass::NotStuck);
}

fn with_pair(rank: RankAccount, pair: PairAccount) -> RankAccount {
    let waits_in = match (pair.open_sends, pair.open_recvs) {
        (0, 0) => rank.waits_in,
        (0, _) => vec![format!("recv(1 x u8, from {})", pair.peer)],
        _ => vec![format!("send(1 x u8, to {})", pair.peer)],
    };
    RankAccount { pairs: vec![pair], waits_in, ..rank }
}

#[test]
fn who_has_not_called_the_other_half_of_a_message_is_named_and_no_flow_is() {
    let receives = PairAccount { peer: 1, recvs: 6, open_recvs: 1, ..PairAccount::default() };
    let sends = PairAccount { peer: 1, sends: 3, open_sends: 2, ..PairAccount::default() };
    let of_pair = FlowWait { channel: LinkKey::PAIRS, ..receive(1, 0) };
    let sent = |sends, recvs| PairAccount { peer: 0, sends, recvs, ..PairAccount::default() };
    let asked = |own: PairAccount, theirs: RankAccount| {
        diagnose(
            1,
            vec![
                host("a", vec![with_pair(rank(0, 3, false), own)], vec![of_pair]),
                host("b", vec![theirs], Vec::new()),
            ],
        )
    };
    let report = asked(receives, with_pair(rank(1, 3, false), sent(5, 0)));
    assert_eq!(report.class, StuckClass::Rank, "{report:?}");
    let culprit = &report.culprits[0];
    assert_eq!((culprit.rank, culprit.pid, culprit.seq, culprit.peer), (Some(1), Some(101), Some(5), Some(0)));
    assert_eq!(culprit.what, "has come to no send to rank 0 after number 4, which waits in a receive from it");
    // Its sends are all that it has called, and none is this one's.
    let report = asked(receives, rank(1, 3, false));
    assert!(report.culprits[0].what.starts_with("has not come to any send to rank 0"), "{report:?}");
    let report = asked(sends, with_pair(rank(1, 3, false), sent(0, 1)));
    assert_eq!((report.class, report.culprits[0].seq), (StuckClass::Rank, Some(1)), "{report:?}");
    assert!(report.culprits[0].what.contains("no receive from rank 0 after number 0"), "{report:?}");
    // Its message is on its way.
    let report = asked(receives, with_pair(rank(1, 3, false), sent(6, 0)));
    assert_eq!((report.class, report.culprits.len()), (StuckClass::Flow, 1), "{report:?}");
    // A host of an earlier version does not say what it has sent: that nothing holds it up is all that is known.
    let report = asked(receives, RankAccount { has_all_pairs: false, ..rank(1, 3, false) });
    assert_eq!(report.class, StuckClass::Rank);
    assert!(report.culprits[0].what.starts_with("waits for nobody"), "{report:?}");
    let report = asked(receives, RankAccount { has_left: true, has_all_pairs: false, ..rank(1, 0, false) });
    assert!(report.culprits[0].what.starts_with("has left"), "{report:?}");
}

#[test]
fn of_a_chain_of_receives_the_one_that_waits_for_nobody_is_named() {
    // 0 waits for 1, which waits for 2, which has called nothing; 3 is in a collective with all of them.
    let waits_for = |peer| PairAccount { peer, recvs: 1, open_recvs: 1, ..PairAccount::default() };
    let ranks = |last: RankAccount| {
        let first = [with_pair(rank(0, 3, false), waits_for(1)), with_pair(rank(1, 3, false), waits_for(2))];
        vec![host("a", first.into_iter().chain([last, rank(3, 4, true)]).collect(), Vec::new())]
    };
    let (class, named, _) = of(ranks(rank(2, 3, false)));
    assert_eq!((class, named), (StuckClass::Rank, vec![Some(2), Some(2)]));
    // They wait in a ring.
    let (class, named, what) = of(ranks(with_pair(rank(2, 3, false), waits_for(0))));
    assert_eq!(class, StuckClass::Rank);
    assert!([0, 1, 2].iter().all(|rank| named.contains(&Some(*rank))), "{what}");
    assert!(what.contains("waits in recv(1 x u8, from 1) itself"), "{what}");
}

#[test]
fn gpus_are_told_of_where_no_rank_can_be_blamed() {
    let account = |late: Option<&str>| {
        let last = RankAccount { holds_up: late.map(Into::into), ..rank(1, 3, late.is_none()) };
        let ranks = vec![rank(0, 3, true), last];
        let gpus_wait = Some("operation 3 does not end".into());
        vec![("a".into(), Some(HostAccount { ranks, gpus_wait, ..HostAccount::default() }))]
    };
    let (class, named, what) = of(account(None));
    assert_eq!((class, named, what.as_str()), (StuckClass::Gpu, vec![None], "a operation 3 does not end; "));
    assert_eq!(of(account(Some("its stream has not come"))).1, [Some(1)]);
}

#[test]
fn hosts_whose_ranks_have_left_are_not_accused() {
    let left = (String::from("b"), Some(HostAccount::of_departed(&[1, 2])));
    assert_eq!(of(vec![host("a", vec![rank(0, 3, false)], Vec::new()), left.clone()]).0, StuckClass::NotStuck);
    let hosts = vec![host("a", vec![rank(0, 3, true), rank(3, 2, false)], Vec::new()), left];
    assert_eq!(of(hosts).1, [Some(3)]);
}

#[test]
fn hosts_that_are_too_busy_to_say_are_not_accused_nor_are_those_who_may_wait_for_them() {
    let with_busy = |ranks, flows| of(vec![host("a", ranks, flows), ("b".into(), Some(HostAccount::of_busy()))]);
    assert_eq!(with_busy(vec![rank(0, 5, true)], vec![receive(2, 0)]), (StuckClass::Busy, Vec::new(), String::new()));
    assert_eq!(with_busy(vec![rank(0, 5, false)], Vec::new()).0, StuckClass::Busy);
    // Things known without it are said.
    let late = with_busy(vec![rank(0, 5, true), rank(1, 4, false)], Vec::new());
    assert_eq!((late.0, late.1), (StuckClass::Rank, vec![Some(1)]));
    let silent = vec![("b".into(), Some(HostAccount::of_busy())), ("c".into(), None)];
    assert_eq!(of(silent), (StuckClass::Host, vec![None], "c its service does not answer; ".into()));
}

#[test]
fn accounts_of_earlier_versions_are_understood() {
    let told = r#"{"ranks":[{"rank":0,"pid":1,"called":2,"is_behind":false,"waits_in":[],"has_left":false}],"started":2,
        "last":"","is_running":false,"idle_ms":1,"flows":[],"failure":null}"#;
    let account: HostAccount = serde_json::from_str(told).expect("understood");
    assert!(!account.ranks[0].has_all_pairs && account.gpus_wait.is_none() && !account.is_busy);
}
