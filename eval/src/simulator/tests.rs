use mccs_collective::{Algorithm, Problem, Strategy, build};

use super::cluster::{Free, Wants, topology};
use super::scenario::{Collective, Placement, Ring, Work};
use super::*;

const TESTBED: &str = "name = \"t\"\nquestion = \"\"\n[topology]\nracks_per_pod = 2\nhosts_per_rack = 2\ndevices_per_host = 2\n\
    nics_per_host = 2\nspines_per_pod = 2\nnic = \"50Gbit/s\"\nleaf_spine = \"50Gbit/s\"\n";
const ALL: &str = "\"h0:0\", \"h0:1\", \"h1:0\", \"h1:1\", \"h2:0\", \"h2:1\", \"h3:0\", \"h3:1\"";

fn variant(policy: &str, rings: &str) -> String {
    format!("[[variant]]\nname = \"v\"\npolicy = \"{policy}\"\nrings = \"{rings}\"\n")
}

fn job(name: &str, ranks: &str, rest: &str) -> String {
    format!("[[job]]\nname = \"{name}\"\nranks = [{ranks}]\n{rest}\n")
}

fn run(text: &str, seed: u64) -> Vec<JobResult> {
    run_on(TESTBED, text, seed)
}

fn run_on(topology: &str, text: &str, seed: u64) -> Vec<JobResult> {
    let scenario = Scenario::parse(&format!("{topology}{text}"), "scenario.toml").expect("right");
    simulate(&scenario, &scenario.variants[0], seed).expect("ends")
}

fn near(actual: f64, expected: f64) {
    assert!((actual - expected).abs() <= 1e-6 * expected.abs(), "{actual}, not {expected}");
}

#[test]
fn one_job_is_as_fast_as_arithmetic_says() {
    let job = job("A", ALL, "bytes = \"512MiB\"\niterations = 3\ncompute = \"10ms\"");
    // Two channels, each a flow of 50 Gbit/s over a spine of its own.
    let good = &run(&(variant("ffa", "local") + &job), 1)[0];
    near(good.busbw, 12.5e9);
    let operation_s = 2.0 * 7.0 / 8.0 * f64::from(512 << 20) / 12.5e9;
    near(good.ended_ns as f64 / 1e9, 3.0 * (operation_s + 0.01));
    // Hosts in turns: both channels cross twice each way, four flows on two paths.
    near(run(&(variant("ffa", "scattered") + &job), 1)[0].busbw, 6.25e9);
    // A hash puts two flows of one direction on one spine, or not.
    for seed in 0..50 {
        let hashed = run(&(variant("ecmp", "local") + &job), seed)[0].busbw;
        assert!([6.25e9, 12.5e9].iter().any(|rate| (hashed / rate - 1.0).abs() < 1e-6), "{hashed}");
    }
    let gather = job.replace("bytes", "collective = \"all_gather\"\nbytes");
    near(run(&(variant("ffa", "local") + &gather), 1)[0].busbw, 12.5e9);
}

#[test]
fn a_job_across_pods_is_as_fast_as_its_links_to_cores() {
    // A host a rack. Two spines of each pod have links to two cores each: four paths from one pod to the other.
    const FAT_TREE: &str = "name = \"t\"\nquestion = \"\"\n[topology]\npods = 2\nracks_per_pod = 2\nhosts_per_rack = 1\n\
        devices_per_host = 1\nnics_per_host = 1\nspines_per_pod = 2\ncores_per_spine = 2\nnic = \"100Gbit/s\"\n\
        leaf_spine = \"100Gbit/s\"\nspine_core = \"20Gbit/s\"\n";
    let run = |policy: &str, ranks: &str, channels: u32, seed: u64| {
        let rest = format!("bytes = \"512MiB\"\niterations = 3\nchannels = {channels}");
        run_on(FAT_TREE, &(variant(policy, "local") + &job("A", ranks, &rest)), seed).remove(0)
    };
    let all = "\"h0:0\", \"h1:0\", \"h2:0\", \"h3:0\"";
    // Each channel crosses once each way, and has the 20 Gbit/s of a core's links for itself: 2.5 GB/s.
    for channels in [1, 2, 4] {
        let job = run("ffa", all, channels, 1);
        near(job.busbw, f64::from(channels) * 2.5e9);
        // A flow carries a channel's part of twice three quarters of the bytes.
        let operation_s = 2.0 * 3.0 / 4.0 * f64::from(512 << 20) / f64::from(channels) / 2.5e9;
        near(job.ended_ns as f64 / 1e9, 3.0 * operation_s);
    }
    // Two channels on each of the four paths: no faster than four. A NIC would carry more, 12.5 GB/s.
    near(run("ffa", all, 8, 1).busbw, 10e9);
    // Within a pod nothing but NICs and leaves is in the way.
    near(run("ffa", "\"h0:0\", \"h1:0\"", 1, 1).busbw, 12.5e9);
    // A hash puts both channels on one core's link in one direction, or in none.
    let mut hashed: Vec<f64> = (0..50).map(|seed| run("ecmp", all, 2, seed).busbw).collect();
    hashed.sort_by(f64::total_cmp);
    near(hashed[0], 2.5e9);
    near(hashed[49], 5e9);
    assert!(hashed.iter().all(|busbw| [2.5e9, 5e9].iter().any(|rate| (busbw / rate - 1.0).abs() < 1e-6)), "{hashed:?}");
}

#[test]
fn a_job_on_rails_is_as_fast_as_what_leaves_the_leaf_of_a_rail() {
    // Four NICs of each host, each on the leaf of its rail or all on one leaf; a leaf has links of 30 Gbit/s to two spines.
    let network = |rails: bool| {
        format!(
            "name = \"t\"\nquestion = \"\"\n[topology]\nracks_per_pod = 2\nhosts_per_rack = 2\ndevices_per_host = 4\n\
             nics_per_host = 4\nrails = {rails}\nspines_per_pod = 2\nnic = \"100Gbit/s\"\nleaf_spine = \"30Gbit/s\"\n"
        )
    };
    let ranks = |hosts: u32| {
        let all: Vec<String> = (0..4 * hosts).map(|rank| format!("\"h{}:{}\"", rank / 4, rank % 4)).collect();
        all.join(", ")
    };
    let busbw = |rails: bool, hosts: u32, channels: u32| {
        let rest = format!("bytes = \"512MiB\"\niterations = 3\nchannels = {channels}");
        let text = variant("ffa", "local") + &job("A", &ranks(hosts), &rest);
        run_on(&network(rails), &text, 1)[0].busbw
    };
    // In a rack a rail does not leave its leaf: four channels, each with a NIC of 12.5 GB/s in and out.
    near(busbw(true, 2, 4), 4.0 * 12.5e9);
    // To the other rack each channel has one of its leaf's links, of 3.75 GB/s, and eight channels have all of them.
    near(busbw(true, 4, 4), 4.0 * 3.75e9);
    near(busbw(true, 4, 8), 8.0 * 3.75e9);
    // On one leaf four channels share two such links, and eight do.
    near(busbw(false, 4, 4), 2.0 * 3.75e9);
    near(busbw(false, 4, 8), 2.0 * 3.75e9);
}

#[test]
fn jobs_share_links_fairly_until_one_ends() {
    // Both on the same two hosts, each with one channel and its own NIC; the reserved spine is nobody's they know.
    let tenant = "[[tenant]]\nname = \"X\"\n[[reserve]]\ntenant = \"X\"\npaths = [\"spine0\"]\n";
    let rest = |iterations: u64| format!("channels = 1\nbytes = \"125000000\"\niterations = {iterations}");
    let text = variant("pfa", "local")
        + tenant
        + &job("A", "\"h0:0\", \"h2:0\"", &rest(10))
        + &job("B", "\"h0:1\", \"h2:1\"", &rest(30));
    let results = run(&text, 1);
    // 1 Gbit each time: 40 ms at half the link, 20 ms alone.
    assert_eq!((results[0].name.as_str(), results[1].name.as_str()), ("A", "B"));
    near(results[0].ended_ns as f64, 400e6);
    near(results[1].ended_ns as f64, 400e6 + 20.0 * 20e6);
}

#[test]
fn priorities_weights_and_caps_hold() {
    let jobs = |tenants: &str, policy: &str| {
        let rest = "channels = 1\nbytes = \"125000000\"\niterations = 10";
        let text = variant(policy, "local")
            + tenants
            + "[[tenant]]\nname = \"X\"\n[[reserve]]\ntenant = \"X\"\npaths = [\"spine0\"]\n"
            + &job("A", "\"h0:0\", \"h2:0\"", rest)
            + &job("B", "\"h0:1\", \"h2:1\"", rest);
        let results = run(&text, 1);
        results.into_iter().map(|job| (job.name, job.ended_ns as f64 / 1e6)).collect::<Vec<_>>()
    };
    let tenant = |name: &str, rest: &str| format!("[[tenant]]\nname = \"{name}\"\n{rest}\n");
    // Three to one: A ends at 10 Gbit / 37.5, B has sent a third of its own by then.
    let weighted = jobs(&(tenant("A", "weight = 3") + &tenant("B", "")), "pfa");
    near(weighted[0].1, 10e3 / 37.5);
    near(weighted[1].1, 400.0);
    let shared = jobs(&format!("[variant.shares]\nA = 75\nB = 25\n{}", tenant("A", "")), "pfa");
    assert_eq!(shared, weighted, "shares of a variant are those of its tenants");
    let capped = jobs(&tenant("A", "cap = \"10Gbit/s\""), "pfa");
    assert_eq!(capped[0].0, "B");
    near(capped[0].1, 10e3 / 40.0);
    near(capped[1].1, 1000.0);
    let of_host = jobs(&tenant("A", "host_cap = \"10Gbit/s\""), "pfa");
    assert_eq!(of_host, capped, "it has one flow out of each host");
    // Two channels, which come to a fifth of what the two NICs of a host carry.
    let tenant = tenant("A", "host_cap = \"20Gbit/s\"");
    let text = variant("ffa", "local") + &tenant + &job("A", ALL, "bytes = \"64MiB\"\niterations = 3");
    near(run(&text, 1)[0].busbw, 2.5e9);
}

#[test]
fn shares_of_a_variant_are_of_jobs_and_come_to_a_whole_at_most() {
    let problem = |shares: &str| {
        let text = variant("ffa", "local") + &format!("[variant.shares]\n{shares}\n");
        let text = format!("{TESTBED}{text}{}", job("A", ALL, "bytes = \"1MiB\"\niterations = 1"));
        Scenario::parse(&text, "scenario.toml").expect_err("wrong").to_string()
    };
    assert!(problem("A = 50\nB = 50").contains("there is no job \"B\""));
    assert!(problem("A = 101").contains("variant[0].shares"));
    assert!(problem("A = 60\nB = 60").contains("come to 120%"));
}

#[test]
fn what_is_skipped_is_as_if_simulated() {
    let quiet = variant("ffa", "local") + &job("A", ALL, "bytes = \"64MiB\"\niterations = 100\ncompute = \"3ms\"");
    let expected = &run(&quiet, 1)[0];
    // Changes that change nothing, in the middle of computing and of sending.
    for at in ["1us", "2ms", "5ms", "500ms", "777777us"] {
        let phase = format!("[[phase]]\nat = \"{at}\"\nlink = [\"leaf0\", \"spine0\"]\nrate = \"50Gbit/s\"\n");
        let disturbed = &run(&(quiet.clone() + &phase), 1)[0];
        assert!(disturbed.ended_ns.abs_diff(expected.ended_ns) <= 200, "{at}: {disturbed:?}, not {expected:?}");
        assert!(disturbed.sending_ns.abs_diff(expected.sending_ns) <= 200, "{at}: {disturbed:?}, not {expected:?}");
    }
}

#[test]
fn a_link_that_fails_is_avoided_or_waited_for() {
    let phases = "[[phase]]\nat = \"1s\"\nlink = [\"leaf0\", \"spine0\"]\nrate = \"0\"\n[[phase]]\nat = \"2s\"\n\
        link = [\"leaf0\", \"spine0\"]\nrate = \"50Gbit/s\"\n";
    // 12.5 GB/s of bus bandwidth: 1.75 times the bytes in 40 operations.
    let job = job("A", ALL, "bytes = \"512MiB\"\niterations = 40") + phases;
    let alone_s = 40.0 * 1.75 * f64::from(512 << 20) / 12.5e9;
    let assigned = &run(&(variant("ffa", "local") + &job), 1)[0];
    near(assigned.ended_ns as f64 / 1e9, alone_s + 0.5);
    let hit = (0..20).map(|seed| run(&(variant("ecmp", "local") + &job), seed)[0].ended_ns as f64 / 1e9);
    assert!(hit.fold(0.0, f64::max) >= 2.0 * alone_s, "some hash puts both channels on one spine");
}

#[test]
fn the_same_seed_is_the_same_run() {
    let text = variant("ecmp", "random_ranks")
        + "[arrivals]\njobs = 30\ndevices = [1, 2, 4]\ninterval = \"10ms\"\niterations = [3, 30]\nbytes = [\"8MiB\", \"1MiB\"]\n\
           compute = [\"0\", \"2ms\"]\nplacement = \"devices\"\n";
    assert_eq!(run(&text, 7), run(&text, 7));
    assert_ne!(run(&text, 7), run(&text, 8));
    // First come, first served, and never more devices than there are.
    let mut results = run(&text, 7);
    assert_eq!(results.len(), 30);
    results.sort_by_key(|job| (job.came_ns, job.name.clone()));
    assert!(results.is_sorted_by_key(|job| job.started_ns));
}

#[test]
fn devices_are_given_once() {
    let scenario = Scenario::parse(
        &format!("{TESTBED}{}{}", variant("ffa", "local"), job("A", ALL, "bytes = \"1\"\niterations = 1")),
        "x",
    );
    let network = topology(&scenario.expect("right")).expect("right");
    for placement in [Placement::Packed, Placement::Hosts, Placement::Devices] {
        let mut free = Free::all(&network, 3);
        let wants = |count| Wants::Devices(count, placement);
        let (a, b) = (free.take(&wants(3)).expect("free"), free.take(&wants(5)).expect("free"));
        let mut all = [a.clone(), b].concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 8, "{placement:?}");
        assert!(free.take(&wants(1)).is_none());
        free.give_back(&wants(3), &a);
        assert_eq!(free.take(&wants(3)).expect("free again").len(), 3);
    }
}

#[test]
fn bytes_are_those_of_the_services_schedules() {
    let hosts = vec![vec![0, 1], vec![2, 3], vec![4, 5, 6]];
    for (ring, algorithm) in [(Ring::Ring, Algorithm::Ring), (Ring::HostRing, Algorithm::HostRing)] {
        for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
            // Host rings of these kinds move blocks of ranks: a host of three has more of them.
            if ring == Ring::HostRing && collective != Collective::AllReduce {
                continue;
            }
            let count = 7 * 6 * 64 * 1024;
            let elements = if collective == Collective::AllReduce { count } else { count / 7 };
            let strategy = Strategy::initial(algorithm.into(), 7, 2, &hosts);
            let problem = Problem {
                kind: collective.kind(),
                nranks: 7,
                root: 0,
                count: elements,
                premultiply: false,
                leaves_own: false,
                one_hop: false,
            };
            let counts = build(&problem, algorithm, &strategy).expect("has a form").counts_between(&hosts);
            let work = Work {
                channels: 2,
                collective,
                algorithm: ring,
                bytes: mccs_config::Bytes(4 * count),
                compute: mccs_config::DurationText::default(),
                jitter_percent: 0.0,
                iterations: 1,
            };
            let bytes = 2.0 * traffic::bits_per_flow(&work, 7, 3) / 8.0;
            for (from, to) in [(0, 1), (1, 2), (2, 0)] {
                let actual = 4.0 * counts[from][to] as f64;
                assert!(
                    (actual / bytes - 1.0).abs() < 0.01,
                    "{collective:?} {ring:?} {from} {to}: {actual}, not {bytes}"
                );
            }
        }
    }
}

#[test]
fn scenarios_are_read_and_mistakes_named() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios");
    let files = std::fs::read_dir(folder).expect("there");
    let mut count = 0;
    for file in files {
        let scenario = Scenario::load(&file.expect("readable").path()).expect("right");
        topology(&scenario).expect("a network");
        count += 1;
    }
    assert!(count >= 10, "{count}");
    let refused = |text: &str| Scenario::parse(&format!("{TESTBED}{text}"), "x").expect_err("wrong").to_string();
    let good = job("A", ALL, "bytes = \"1\"\niterations = 1");
    assert!(refused(&(variant("fffa", "local") + &good)).contains("there are ecmp"));
    assert!(refused(&variant("ffa", "local")).contains("nobody does anything"));
    assert!(
        refused(&(variant("ffa", "local") + &job("A", ALL, "bytes = \"1\"\niteratoins = 1"))).contains("iterations")
    );
    let twice = "[[moment]]\nname = \"a\"\nwhat = \"x\"\nat = \"2s\"\nvariants = [\"none\"]\n".repeat(2);
    let why = refused(&(variant("ffa", "local") + &good + &twice));
    assert!(
        ["name the fabric", "names of their own", "no variant \"none\""].iter().all(|part| why.contains(part)),
        "{why}"
    );
    let nowhere = variant("ffa", "local") + &job("A", "\"h9:0\"", "bytes = \"1\"\niterations = 1");
    let scenario = Scenario::parse(&format!("{TESTBED}{nowhere}"), "x").expect("reads");
    assert!(matches!(simulate(&scenario, &scenario.variants[0], 1), Err(SimulationError::NoSuchPlace { .. })));
    let endless = variant("ffa", "local")
        + "[arrivals]\njobs = 1\ndevices = [9]\niterations = [1, 1]\nbytes = [\"1\"]\ncompute = [\"0\"]\nplacement = \"packed\"\n";
    let scenario = Scenario::parse(&format!("{TESTBED}{endless}"), "x").expect("reads");
    assert!(matches!(simulate(&scenario, &scenario.variants[0], 1), Err(SimulationError::Stuck(1))));
}

/// A scenario of the folder, shortened.
fn scenario(name: &str, shorter: u64, seeds: u32) -> Vec<report::VariantFigures> {
    let path = format!("{}/scenarios/{name}.toml", env!("CARGO_MANIFEST_DIR"));
    let mut scenario = Scenario::load(std::path::Path::new(&path)).expect("right");
    scenario.seeds = seeds;
    scenario.jobs.iter_mut().for_each(|job| job.work.iterations = (job.work.iterations / shorter).max(1));
    report::run(&scenario).expect("ends")
}

#[test]
fn ring_order_and_flow_assignment_are_worth_what_mccs_found_or_more() {
    let all = scenario("single", 20, 60);
    let busbw = |number: usize| all[number].jobs["A"].busbw_gb_s;
    assert!(busbw(3).mean / busbw(0).mean >= 2.6, "{} against {}", busbw(3).mean, busbw(0).mean);
    assert!(busbw(3).cv <= 0.01 && busbw(0).cv > 0.1 && busbw(2).cv > 0.1);
}

#[test]
fn what_matters_first_gains_the_same_and_the_others_lose_less() {
    for name in ["qos", "qos-second"] {
        let all = scenario(name, 8, 1);
        let seconds = |variant: &str, job: &str| {
            let variant = all.iter().find(|figures| figures.name == variant).expect("there");
            variant.jobs[job].completion_s.mean
        };
        for ours in ["ours, queues", "ours, paced"] {
            near(seconds(ours, "A"), seconds("PFA", "A"));
            for other in ["B", "C"] {
                let (ours_s, pfa_s) = (seconds(ours, other), seconds("PFA", other));
                assert!(ours_s < pfa_s, "{name}, {ours}, {other}: {ours_s} s, {pfa_s} s with a reserved path");
            }
        }
        if name == "qos-second" {
            let sum = |variant: &str| seconds(variant, "B") + seconds(variant, "C");
            assert!(sum("ours, queues") < sum("PFA+TS"));
        }
    }
}

#[test]
fn who_takes_turns_is_nearly_as_fast_as_alone() {
    let all = scenario("turns", 3, 5);
    // Two ranks send 80 MiB as much, at 50 Gbit/s.
    let alone_s = 300.0 * (0.02 + f64::from(80 << 23) / 50e9);
    for job in ["A", "B"] {
        let [shared, in_turn] = [0, 1].map(|variant: usize| all[variant].jobs[job].completion_s);
        assert!(in_turn.max <= 1.1 * alone_s && in_turn.mean < shared.mean, "{job}: {in_turn:?} {shared:?} {alone_s}");
    }
}

#[test]
fn flows_go_where_a_networks_hash_was_seen_to_send_them() {
    let job = job("A", "\"h0:0\", \"h0:1\", \"h2:0\", \"h2:1\"", "bytes = \"100MiB\"\niterations = 3");
    let seen = |job: &str, channel: usize, from: &str, to: &str, spine: u32| {
        format!(
            "[[hashed]]\njob = {job:?}\nchannel = {channel}\nfrom = {from:?}\nto = {to:?}\nway = \"spine{spine}\"\n"
        )
    };
    let busbw = |spines: [u32; 2]| {
        let of_channel = |(channel, spine): (usize, &u32)| {
            seen("A", channel, "h0", "h2", *spine) + &seen("A", channel, "h2", "h0", *spine)
        };
        let text = variant("ecmp", "local") + &job + &spines.iter().enumerate().map(of_channel).collect::<String>();
        let all: Vec<f64> = (1..9).map(|seed| run(&text, seed)[0].busbw).collect();
        all.iter().for_each(|busbw| near(*busbw, all[0]));
        all[0]
    };
    for (spines, expected) in [([0, 0], 6.25e9), ([1, 1], 6.25e9), ([0, 1], 12.5e9), ([1, 0], 12.5e9)] {
        near(busbw(spines), expected);
    }
    let text = format!("{TESTBED}{}{job}{}", variant("ecmp", "local"), seen("B", 0, "h0", "h2", 0));
    let why = Scenario::parse(&text, "x").expect_err("no such job").to_string();
    assert!(why.contains("hashed[0].job: there is no job \"B\""), "{why}");
}

#[test]
fn what_changes_nothing_or_cannot_be_is_refused_with_its_key() {
    let job = job("A", "\"h0:0\", \"h2:0\"", "bytes = \"1MiB\"\niterations = 1");
    let good = format!("{TESTBED}{}{job}", variant("pfa", "local"));
    Scenario::parse(&good, "scenario.toml").expect("right");
    let refused = |text: &str, part: &str| {
        let error = Scenario::parse(text, "scenario.toml").expect_err("wrong").to_string();
        assert!(error.contains(part), "{error}");
    };
    let replaced = |from: &str, to: &str| good.replacen(from, to, 1);
    refused(&replaced("1MiB", "1MB"), "job[0].bytes: unknown unit");
    refused(&replaced("bytes =", "byte ="), "job[0].byte: unknown field `byte`");
    refused(&replaced("1MiB", "0"), "job[0].bytes: must be from 1B");
    refused(&replaced("h2:0", "h0:0"), "job[0].ranks[1]: another rank");
    refused(&replaced("50Gbit/s", "1bit/s"), "topology.nic: must be from 1Mbit/s");
    refused(&replaced("leaf_spine = \"50Gbit/s\"\n", ""), "topology.leaf_spine: must be from");
    refused(&replaced("hosts_per_rack = 2", "hosts_per_rack = 0"), "topology.hosts_per_rack: is 0");
    refused(&format!("{good}{}", variant("ffa", "local")), "variant[1].name: there is another \"v\"");
    let reserve = |tenant: &str, paths: &str| format!("{good}[[reserve]]\ntenant = {tenant:?}\npaths = [{paths}]\n");
    refused(&reserve("AA", "\"spine0\""), "reserve[0].tenant: there is no job \"AA\"");
    refused(&reserve("A", ""), "reserve[0].paths: reserves nothing");
    let nowhere = Scenario::parse(&reserve("A", "\"spine7\""), "scenario.toml").expect("well-formed");
    let error = simulate(&nowhere, &nowhere.variants[0], 1).expect_err("no such path").to_string();
    assert!(error.contains("no path \"spine7\""), "{error}");
}
