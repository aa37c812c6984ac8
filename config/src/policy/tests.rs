use super::*;
use crate::error::Diagnostic;

const POLICIES: [&str; 3] = ["ecmp", "ffa", "pfa"];

fn topology() -> TopologyFile {
    TopologyFile::parse(include_str!("../../examples/topology.toml"), "topology.toml").expect("the example is right")
}

/// Behind rules, so that these keep their lines.
const FFA: &str = "[policy]\nname = \"ffa\"\n";

/// Reads a whole file, or rules of one that names its policy.
fn parse(text: &str) -> Result<PolicyFile, ConfigError> {
    let behind = if text.contains("[policy]") { "" } else { FFA };
    PolicyFile::parse_for(&format!("{text}{behind}"), "policy.toml", &topology(), &POLICIES)
}

/// Line, key, and a part of the message, of the only complaint.
fn only(text: &str, line: usize, key: &str, part: &str) {
    let all: Vec<Diagnostic> = parse(text).expect_err("the file is wrong").diagnostics().to_vec();
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!((all[0].line, all[0].key.as_str()), (line, key), "{}", all[0]);
    assert!(all[0].message.contains(part), "{}", all[0]);
}

/// A disk that was full, or a slip with `>`, leaves no policy that caps nothing.
#[test]
fn a_file_that_lost_its_content_or_its_policy_is_refused() {
    let refused = |text: &str, part: &str| {
        let error = PolicyFile::parse_for(text, "policy.toml", &topology(), &POLICIES).expect_err(text).to_string();
        assert!(error.starts_with("policy.toml:") && error.contains(part), "{error}");
    };
    for empty in ["", "\n \n", "# policy.toml, as it was\n"] {
        refused(empty, "the file says nothing");
    }
    refused("[[tenant]]\nname = \"a\"\n", "missing field `policy`");
    refused("[policy]\n", "missing field `name`");
    refused("[policy]\nrings = \"kept\"\n", "missing field `name`");
    let least = PolicyFile::parse(FFA, "policy.toml").expect("a policy alone");
    assert_eq!((least.policy, least.tenants), (PolicySection::new("ffa"), Vec::new()));
}

#[test]
fn the_example_round_trips() {
    let file = parse(include_str!("../../examples/policy.toml")).expect("the example is right");
    assert_eq!(parse(&file.to_toml()).expect("reads back"), file);
}

#[test]
fn channels_are_a_number_or_those_of_nics() {
    let parsed = |text: &str| parse(&format!("{FFA}{text}\n")).expect("right").policy;
    let section = parsed("channels = 4\nalgorithm = \"host_ring\"");
    assert_eq!((section.channels, section.algorithm), (Some(Channels::Count(4)), Some(AlgorithmChoice::HostRing)));
    assert_eq!(parsed("channels = \"nics\"").channels, Some(Channels::Nics));
    assert_eq!((parsed("").channels, parsed("").algorithm), (None, None));
    for text in ["channels = 64", "channels = \"nics\"\nalgorithm = \"tree\""] {
        let file = parse(&format!("{FFA}{text}\n")).expect("right");
        assert_eq!(parse(&file.to_toml()).expect("reads back"), file);
    }
    for wrong in ["0", "65"] {
        only(&format!("{FFA}channels = {wrong}\n"), 3, "policy.channels", "from 1 to 64");
    }
    for wrong in ["-1", "9000000000", "1.5", "\"nic\""] {
        only(&format!("{FFA}channels = {wrong}\n"), 3, "policy.channels", "a number of channels, or \"nics\"");
    }
    only(&format!("{FFA}algorithm = \"rings\"\n"), 3, "policy.algorithm", "host_ring");
    only(&format!("{FFA}rings = \"kept\"\nchannels = 2\n"), 4, "policy.channels", "one of the two");
}

#[test]
fn shares_are_at_most_the_whole() {
    let tenant = |name: &str, rest: &str| format!("[[tenant]]\nname = \"{name}\"\n{rest}\n");
    let share = |name: &str, percent: u32| tenant(name, &format!("share_percent = {percent}"));
    parse(&(share("a", 60) + &share("b", 40))).expect("100%");
    only(&(share("a", 60) + &share("b", 41)), 6, "tenant[1].share_percent", "101%");
    only(&(share("a", 60) + &share("b", 40) + &tenant("c", "")), 7, "tenant[2]", "starve");
    only(&share("a", 101), 3, "tenant[0].share_percent", "from 1 to 100");
    only(&tenant("a", "weight = 0"), 3, "tenant[0].weight", "from 1 to 1000");
    only(&tenant("a", "cap = \"200Gbit/s\""), 3, "tenant[0].cap", "100Gbit/s");
}

#[test]
fn a_cap_of_a_host_is_a_rate_that_it_could_reach() {
    let caps = |text: &str| format!("[[tenant]]\nname = \"a\"\n{text}\n");
    parse(&caps("host_cap = \"100Gbit/s\"\ncap = \"100Gbit/s\"")).expect("all that a NIC carries");
    only(&caps("host_cap = \"0\""), 3, "tenant[0].host_cap", "from 1Mbit/s");
    only(&caps("host_cap = \"-1Gbit/s\""), 3, "tenant[0].host_cap", "whole number");
    only(&caps("host_cap = \"101Gbit/s\""), 3, "tenant[0].host_cap", "100Gbit/s");
    only(&caps("host_cap = \"20Gbit/s\"\ncap = \"21Gbit/s\""), 4, "tenant[0].cap", "beyond host_cap, 20Gbit/s");
    // Of several NICs the sum counts.
    let rails = TopologyFile::parse(include_str!("../../examples/topology-rails.toml"), "t").expect("right");
    let most = most_of_a_host(&rails);
    assert!(most > rails.rates.host_leaf, "{most}");
    let against = |rate: Rate| {
        let text = caps(&format!("host_cap = \"{}bit/s\"", rate.0));
        PolicyFile::parse_for(&(text + FFA), "policy.toml", &rails, &POLICIES)
    };
    against(most).expect("what all carry together");
    assert!(against(Rate(most.0 + 1)).expect_err("more").to_string().contains("caps nothing"));
}

#[test]
fn paths_and_policies_exist_and_something_is_left() {
    let reserve = |tenant: &str, paths: &str| format!("[[reserve]]\ntenant = \"{tenant}\"\npaths = [{paths}]\n");
    parse(&reserve("a", "\"spine0\"")).expect("one of two");
    only(&reserve("a", "\"spine2\""), 3, "reserve[0].paths", "no path \"spine2\"");
    only(&reserve("a", "\"spine0\", \"spine1\""), 3, "reserve[0].paths", "starve");
    only(&(reserve("a", "\"spine0\"") + &reserve("b", "\"spine1\"")), 6, "reserve[1].paths", "starve");
    only(&reserve("a", ""), 3, "reserve[0].paths", "reserves nothing");
    only("[policy]\nname = \"pfaa\"\n", 2, "policy.name", "did you mean \"pfa\"?");
    let mut blind = topology();
    blind.spines[0].source_ports = None;
    let text = reserve("a", "\"spine0\"") + FFA;
    let error = PolicyFile::parse_for(&text, "p", &blind, &POLICIES).expect_err("no steering");
    assert!(error.to_string().contains("nothing steers"), "{error}");
}

#[test]
fn windows_neither_overlap_nor_starve() {
    let window = |tenant: &str, period: u32, offset: u32, length: u32| {
        format!(
            "[[window]]\ntenant = \"{tenant}\"\nperiod = \"{period}ms\"\noffset = \"{offset}ms\"\nlength = \"{length}ms\"\n"
        )
    };
    parse(&(window("a", 20, 0, 10) + &window("b", 20, 10, 10))).expect("side by side");
    parse(&(window("a", 20, 0, 5) + &window("b", 40, 15, 5))).expect("in every other gap");
    only(&(window("a", 20, 0, 10) + &window("b", 20, 9, 10)), 6, "window[1]", "overlaps window[0]");
    only(&(window("a", 20, 0, 10) + &window("b", 30, 10, 5)), 6, "window[1]", "overlaps window[0]");
    only(&window("a", 200, 0, 1), 5, "window[0].length", "starve");
    only(&window("a", 20, 20, 1), 4, "window[0].offset", "below the period");
    only(&window("a", 20, 0, 21), 5, "window[0].length", "at most the period");
    only(&(window("a", 20, 0, 1) + &window("a", 20, 10, 1)), 7, "window[1].tenant", "already");
}

#[test]
fn windows_that_meet_late_are_found() {
    // Against a simulation of openings, for all small cases.
    for (pa, pb) in [(4_u64, 6_u64), (3, 5), (6, 6), (4, 8)] {
        for (oa, ob) in (0..pa).flat_map(|oa| (0..pb).map(move |ob| (oa, ob))) {
            for (la, lb) in [(1, 1), (1, 2), (2, 1)] {
                let open = |t: u64, period, offset, length| (t + period - offset) % period < length;
                let meets = (0..pa * pb).any(|t| open(t, pa, oa, la) && open(t, pb, ob, lb));
                let window = |period, offset, length| Window {
                    tenant: String::new(),
                    period: DurationText::millis(period),
                    offset: DurationText::millis(offset),
                    length: DurationText::millis(length),
                };
                let said = overlap(&window(pa, oa, la), &window(pb, ob, lb));
                assert_eq!(said, meets, "{pa} {oa} {la}, {pb} {ob} {lb}");
            }
        }
    }
}

/// A text of entries, as many as a policy that is named behind them may have bytes for.
fn longest(entry: impl Fn(usize) -> String) -> String {
    let mut text = String::new();
    for entry in (0..).map(entry) {
        if text.len() + entry.len() + FFA.len() > limits::POLICY_BYTES_MAX.0 as usize {
            break;
        }
        text.push_str(&entry);
    }
    text
}

#[test]
fn lists_are_as_long_as_they_can_be_of_use() {
    let refused = |text: &str, key: &str, part: &str| {
        let error = parse(text).expect_err("too many");
        let of = error.diagnostics().iter().find(|of| of.key == key).expect(key);
        assert!(of.message.contains(part), "{of}");
    };
    let tenants = |count: usize| -> String { (0..count).map(|i| format!("[[tenant]]\nname = \"t{i}\"\n")).collect() };
    parse(&tenants(1024)).expect("as many as a service has");
    refused(&tenants(1025), "tenant", "from 0 to 1024");
    let reserves = |count: usize| -> String {
        (0..count).map(|i| format!("[[reserve]]\ntenant = \"t{i}\"\npaths = [\"spine0\"]\n")).collect()
    };
    parse(&reserves(1024)).expect("one each");
    refused(&reserves(1025), "reserve", "from 0 to 1024");
    refused(
        &format!("[[reserve]]\ntenant = \"t\"\npaths = [{}]\n", "\"spine0\",".repeat(257)),
        "reserve[0].paths",
        "256",
    );
    let windows = |count: usize| -> String {
        let window =
            |i| format!("[[window]]\ntenant = \"t{i}\"\nperiod = \"1s\"\noffset = \"{i}0ms\"\nlength = \"10ms\"\n");
        (0..count.min(100)).map(window).chain((100..count).map(|i| window(i - 100))).collect()
    };
    parse(&windows(100)).expect("all of the period");
    refused(&windows(101), "window", "from 0 to 100");
    let long = " ".repeat(limits::POLICY_BYTES_MAX.0 as usize - FFA.len());
    parse(&long).expect("as long as it may be");
    assert_eq!(
        parse(&(long + " ")).expect_err("longer").to_string(),
        "policy.toml: is longer than 120KiB, the most that such a file may have"
    );
}

/// The thread that checks a policy decides for all communicators. What takes the square of a file's length does not end in the time that a test has.
#[test]
fn the_worst_of_policies_are_refused_with_what_is_worth_telling() {
    let spine = |i: usize| format!("[[spine]]\nname = \"{i:x>64}\"\nsource_ports = \"{0}-{0}\"\n", 20_000 + i);
    let example = include_str!("../../examples/topology.toml");
    let (before, after) = (example.find("[[spine]]").expect("spines"), example.find("[[host]]").expect("hosts"));
    let spines: String = (0..256).map(spine).collect();
    let topology = format!("{}{spines}{}", &example[..before], &example[after..]);
    let topology = TopologyFile::parse(&topology, "topology.toml").expect("right");
    let window = |i: usize, offset_us: usize| {
        let period_us = 10_000_000 - 7 * i;
        format!("[[window]]\ntenant=\"t{i}\"\nperiod=\"{period_us}us\"\noffset=\"{offset_us}us\"\nlength=\"1s\"\n")
    };
    let reserve = |i: usize, name: &dyn Fn(usize) -> String| {
        let paths: Vec<String> = (0..150).map(|j| format!("\"{}\"", name(150 * i + j))).collect();
        format!("[[reserve]]\ntenant=\"t{i}\"\npaths=[{}]\n", paths.join(","))
    };
    let texts = [
        (longest(|_| "[[tenant]]\nname=\"\"\n".into()), 64),
        (longest(|i| format!("[[tenant]]\nname=\"{i}\"\n")), 1),
        (longest(|i| format!("[[reserve]]\ntenant=\"{i}\"\npaths=[\"x\"]\n")), 1),
        (longest(|i| window(i, 0)), 64),
        (longest(|i| window(0, i)), 64),
        // Names that are near those of spines, and such that are far from all others.
        (longest(|i| reserve(i, &|j| format!("{j:x>90}"))), 64),
        (longest(|i| reserve(i, &|j| format!("{j:z>60}"))), 64),
        (longest(|i| reserve(i, &|j| format!("{:x>64}", j % 255))), 0),
        (format!("policy.name=\"{}\"", "x".repeat(122_000)), 1),
        (longest(|i| if i == 0 { "a=".into() } else { "[".into() }), 1),
        (longest(|i| format!("a{i}=0\n")), 1),
    ];
    for (text, told) in &texts {
        let start: String = text.chars().take(60).collect();
        let behind = if text.starts_with("policy") { "" } else { FFA };
        let parsed = PolicyFile::parse_for(&format!("{text}{behind}"), "policy.toml", &topology, &POLICIES);
        let found = parsed.as_ref().map_or_else(ConfigError::diagnostics, |_| &[]);
        assert_eq!((found.len(), parsed.is_ok()), (*told, *told == 0), "{start}");
        let has_more = found.last().is_some_and(|last| last.message.ends_with("told when this is mended"));
        assert_eq!(has_more, *told == 64, "{start}");
    }
}
