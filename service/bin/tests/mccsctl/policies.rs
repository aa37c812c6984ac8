//! Policies, links and strategies: what operators change for a cluster.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::fixture::{Fixture, sum_until};

#[test]
fn policies_are_checked_compared_put_in_force_and_remembered() {
    let fixture = Fixture::start();
    let good = fixture.write("good.toml", "[policy]\nname = \"ffa\"\n");
    let unknown = fixture.write("unknown.toml", "[policy]\nname = \"best\"\n");
    let elsewhere = fixture
        .write("elsewhere.toml", "[policy]\nname = \"pfa\"\n[[reserve]]\ntenant = \"a\"\npaths = [\"spine9\"]\n");
    let topology = fixture.at("topology.toml").display().to_string();
    // Files are read, and hosts report, a moment after the service answers.
    let is_begun = |shown: String| shown.contains("policy ecmp") && shown.contains("host h0: reports");
    while !is_begun(fixture.says(&["policy", "show"])) {
        std::thread::sleep(Duration::from_millis(2));
    }

    assert!(fixture.says(&["policy", "check", &good]).contains("no mistakes found"));
    let idle = "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\npriority = 1\n";
    let idle = fixture.write("idle.toml", idle);
    for command in ["check", "diff"] {
        assert!(fixture.says(&["policy", command, &idle]).contains("priorities (of t): policy ffa has none"));
    }
    // A host that says no tenant has one, called default.
    let typo = fixture.write("typo.toml", "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"defualt\"\nweight = 2\n");
    let service = fixture.at("service.toml").display().to_string();
    for command in [&["check", &typo, "--service", &service][..], &["diff", &typo], &["apply", &typo], &["show"]] {
        let text = fixture.says(&[&["policy"], command].concat());
        assert!(
            text.contains("rules for tenant \"defualt\": nobody is called so now; did you mean \"default\"?"),
            "{text}"
        );
    }
    fixture.says(&["policy", "apply", &fixture.at("policy.toml").display().to_string()]);
    assert_eq!(fixture.says_in_json(&["policy", "check", &good])["policy"], "ffa");
    let why = fixture.complains(&["policy", "check", &unknown]);
    assert!(why.contains("unknown.toml") && why.contains("best") && why.contains("pfa_ts"), "{why}");
    let why = fixture.complains(&["policy", "check", &elsewhere, "--topology", &topology]);
    assert!(why.contains("elsewhere.toml") && why.contains("spine9"), "{why}");
    let why = fixture.complains(&["policy", "check", "/nowhere/policy.toml"]);
    assert!(why.contains("/nowhere/policy.toml"), "{why}");

    assert!(fixture.says(&["policy", "show"]).contains("policy ecmp"));
    fixture.says(&["policy", "diff", &good]);
    assert!(fixture.says(&["policy", "show"]).contains("policy ecmp"), "a comparison changes nothing");
    assert!(fixture.says(&["policy", "apply", &good]).contains("in force"));
    assert!(fixture.says(&["policy", "show"]).contains("policy ffa"));
    for bad in [&unknown, &elsewhere] {
        let why = fixture.complains(&["policy", "apply", bad]);
        assert!(why.contains(Path::new(bad).file_name().and_then(|name| name.to_str()).expect("a name")), "{why}");
        assert!(fixture.says(&["policy", "show"]).contains("policy ffa"), "a mistake changes nothing");
    }
    assert!(fixture.says(&["policy", "history"]).contains("good.toml"));
    let history = fixture.says_in_json(&["policy", "history"]);
    assert!(history["controller"]["history"].as_array().is_some_and(|entries| !entries.is_empty()), "{history}");
    let why = fixture.complains(&["link", "leaf-h0", "spine7", "down"]);
    assert!(why.contains("spine7"), "{why}");
}

/// Raises a flag when it is dropped, also where a test fails.
struct Stopping<'a>(&'a AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn what_goes_over_the_network_is_shown_while_it_does() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let (first, second) = fixture.join_across();
    let stop = AtomicBool::new(false);
    let seen = |is_it: &dyn Fn(&str) -> bool| {
        while !is_it(&fixture.says(&["policy", "show"])) {
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    std::thread::scope(|scope| {
        let (stop, ranks) = (&stop, [&first, &second]);
        let stopping = Stopping(stop);
        for rank in ranks {
            scope.spawn(move || sum_until(rank, stop));
        }
        // With a single spine there is one way, also where nobody has chosen it.
        for (part, capacity) in [
            ("  h0 -> h1 by hash: ", "50000.0"),
            ("  h1 -> h0 by hash: ", "50000.0"),
            ("  link h0 -> leaf-h0: ", "100000.0"),
            ("  link spine0 -> leaf-h0: ", "50000.0"),
        ] {
            let is_it = |line: &str| line.starts_with(part) && line.ends_with(&format!(" of {capacity} Mbit/s"));
            seen(&|text| text.lines().any(is_it));
        }
        let json = fixture.says_in_json(&["policy", "show"]);
        let rates = &json["controller"]["show"]["rates"];
        assert!(rates["paths"][0]["bps"].is_u64() && rates["links"].is_array(), "{json}");
        drop(stopping);
    });
    seen(&|text| !text.contains(" by hash: "));
}

/// A policy that moves no flow is no less of a change: everything that it says differently is there to be read.
#[test]
fn what_a_policy_would_change_is_told_also_where_no_flow_moves() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let _ranks = fixture.join_across();
    // Hosts have met, reported, and agreed on what is in force.
    while !fixture.says(&["policy", "show"]).contains("as decided") {
        std::thread::sleep(Duration::from_millis(2));
    }
    let tenant = "[[tenant]]\nname = \"default\"\n";
    let window = "[[window]]\ntenant = \"default\"\nperiod = \"10ms\"\nlength = \"5ms\"\n";
    let rules = format!("[policy]\nname = \"ecmp\"\n{tenant}cap = \"10Gbit/s\"\nweight = 3\n{window}");
    let paced = fixture.write("paced.toml", &rules);
    let text = fixture.says(&["policy", "diff", &paced]);
    let now = "- from h1: as they like";
    let then = "+ from h1: 10000.0 Mbit/s a flow";
    for part in ["tenant default: its rings and flows stay", now, then, "5.00 ms of each 10.00", "weight 3"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("nothing would change"), "{text}");
    let json = fixture.says_in_json(&["policy", "diff", &paced]);
    let told = &json["controller"]["diff"]["communicators"][0];
    assert_eq!((&told["changes"], &told["changes_strategy"]), (&true.into(), &false.into()), "{json}");
    assert_eq!(told["paces_before"].as_array().map(Vec::len), Some(0), "{json}");
    assert_eq!(told["paces_after"][1][1]["cap_bps"], 10_000_000_000_u64, "{json}");
    assert!(fixture.says(&["policy", "apply", &paced]).contains("0 communicators changed, 1 paced otherwise"));
    assert!(fixture.says(&["policy", "history"]).contains("caps, shares, windows"));
    let text = fixture.says(&["policy", "diff", &paced]);
    assert!(text.contains("nothing would change") && text.contains("default: stays"), "{text}");
    // Taken back, and another queue instead.
    let marked = fixture.write("marked.toml", &format!("[policy]\nname = \"priority\"\n{tenant}priority = 2\n"));
    let text = fixture.says(&["policy", "diff", &marked]);
    let mark = ", priority 2, class of code point 16";
    let added: Vec<&str> = text.lines().filter(|line| line.trim_start().starts_with("+ ")).collect();
    assert!(added.iter().any(|line| line.contains(mark)), "{text}");
    assert!(text.lines().filter(|line| line.contains(mark)).all(|line| added.contains(&line)), "{text}");
    assert!(
        text.contains("~ communicator") && added.iter().any(|line| line.ends_with("from h0: as they like")),
        "{text}"
    );
    // Unchanged lines are there, without a mark.
    assert!(text.lines().any(|line| line.trim_start().starts_with("channel 0: ring")), "{text}");
}

/// A communicator of two hosts as the controller shows it.
struct Shown {
    rings: serde_json::Value,
    state: serde_json::Value,
    epoch: u64,
}

impl Fixture {
    fn shown(&self) -> Shown {
        let json = self.says_in_json(&["policy", "show"]);
        let view = &json["controller"]["show"]["communicators"][0];
        let (rings, state) = (view["strategy"]["rings"].clone(), view["state"].clone());
        Shown { rings, state, epoch: view["epoch"].as_u64().expect("a communicator") }
    }

    /// Waits until it is.
    fn shown_with(&self, is_so: impl Fn(&Shown) -> bool) -> Shown {
        std::iter::repeat_with(|| self.shown()).find(is_so).expect("without an end")
    }
}

fn reconfigure<'a>(number: &'a str, arguments: &[&'a str]) -> Vec<&'a str> {
    [&["reconfigure", number][..], arguments].concat()
}

#[test]
fn a_strategy_is_chosen_by_hand_and_given_back() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let (first, second) = fixture.join_across();
    // A collective by whatever strategy is in force.
    let sum = || {
        let once = &AtomicBool::new(true);
        std::thread::scope(|scope| {
            [&first, &second].into_iter().for_each(|rank| drop(scope.spawn(move || sum_until(rank, once))));
        });
    };
    while !fixture.says(&["policy", "show"]).contains("as decided") {
        std::thread::sleep(Duration::from_millis(2));
    }
    let decided = fixture.shown();
    assert_eq!(decided.state, "as_decided");
    let number = fixture.says_in_json(&["communicators"])["communicators"][0]["communicator"].to_string();
    let number = number.as_str();
    let why = fixture.complains(&reconfigure(number, &["--ring", "0,0"]));
    assert!(why.contains("refused") && why.contains("ring 0 names rank 0 twice"), "{why}");
    let why = fixture.complains(&reconfigure(number, &["--ring", "0,1,2"]));
    assert!(why.contains("refused") && why.contains("ring 0"), "{why}");
    let why = fixture.complains(&reconfigure(number, &["--unpin"]));
    assert!(why.contains("is not pinned"), "{why}");
    let after = fixture.shown();
    assert_eq!((after.epoch, after.rings, after.state), (decided.epoch, decided.rings.clone(), "as_decided".into()));

    let holds = |text: &str, epoch: u64| text.starts_with(&format!("strategy {epoch} holds from collective "));
    let by_hand = decided.epoch + 1;
    let text = fixture.says(&reconfigure(number, &["--ring", "1,0"]));
    assert!(holds(&text, by_hand), "{text}");
    let is_pinned = |shown: &Shown, epoch: u64| shown.epoch == epoch && shown.state == "pinned";
    let shown = fixture.shown_with(|shown| is_pinned(shown, by_hand));
    assert_eq!(shown.rings, serde_json::json!([[1, 0]]));
    sum();
    // From a file; and options come on top of it.
    let file = fixture.write("change.toml", "algorithm = \"ring\"\nrings = [[0, 1], [1, 0], [0, 1]]\n");
    let text = fixture.says(&reconfigure(number, &["--file", &file]));
    assert!(holds(&text, by_hand + 1), "{text}");
    sum();
    let shown = fixture.shown_with(|shown| is_pinned(shown, by_hand + 1));
    assert_eq!(shown.rings, serde_json::json!([[0, 1], [1, 0], [0, 1]]));
    let channels = decided.rings.as_array().map_or(0, Vec::len);
    let turned = ["--ring", "1,0"].repeat(channels);
    let made = fixture.says_in_json(&reconfigure(number, &[&["--file", file.as_str()][..], &turned].concat()));
    assert_eq!(made["reconfigured"]["epoch"], by_hand + 2, "{made}");
    sum();
    let shown = fixture.shown_with(|shown| is_pinned(shown, by_hand + 2));
    assert_eq!(shown.rings, serde_json::json!(vec![[1, 0]; channels]));
    let wrong = fixture.write("wrong.toml", "rings = [[0, 1]]\nchannels = 2\n");
    for (wrong, why) in [(wrong.as_str(), "wrong.toml:2:1"), ("/nowhere/change.toml", "/nowhere/change.toml")] {
        let complaint = fixture.complains(&reconfigure(number, &["--file", wrong]));
        assert!(complaint.contains(why), "{complaint}");
    }
    let why = fixture.complains(&reconfigure(number, &["--channels", "2", "--window", "0"]));
    assert!(why.contains("the window is 1 to"), "{why}");
    let why = fixture.complains(&reconfigure(number, &["--transport", "rdma"]));
    assert!(why.contains("refused"), "{why}");
    assert_eq!(fixture.shown().epoch, by_hand + 2, "a mistake changes nothing");
    let text = "--algorithm host_tree --channels 3 --transport tcp --window 5".split(' ').collect::<Vec<_>>();
    let made = fixture.says_in_json(&reconfigure(number, &text));
    // A strategy that hosts refuse has had a number as well.
    let by_options = made["reconfigured"]["epoch"].as_u64().expect("a number");
    assert!(by_options > by_hand + 2, "{made}");
    sum();
    let shown = fixture.shown_with(|shown| is_pinned(shown, by_options));
    assert_eq!(shown.rings.as_array().map(Vec::len), Some(3));
    let text = fixture.says(&["policy", "show"]);
    assert!(text.contains("  algorithm host_tree\n") && text.contains("  flows over tcp\n"), "{text}");

    // The policy decides again.
    assert_eq!(fixture.says(&reconfigure(number, &["--unpin"])).trim(), "done");
    // History has who did what by hand.
    let history = fixture.says_in_json(&["policy", "history", "--acts"])["controller"]["history"].clone();
    let acts = history.as_array().expect("a list");
    let own = format!("uid {}", nix::unistd::getuid());
    for (what, count) in [("changed by hand", 4), ("unpinned", 1)] {
        let of = acts.iter().filter(|act| act["what"].as_str().is_some_and(|said| said.contains(what)));
        let by_own = of.filter(|act| act["by"].as_str().is_some_and(|by| by.contains(&own))).count();
        assert!(by_own >= count, "{what}: {by_own} by {own} of {history}");
    }
    let shown = fixture.shown_with(|shown| shown.state == "as_decided");
    assert_eq!((shown.rings, shown.epoch), (decided.rings, by_options + 1));
    sum();
}

#[test]
fn links_are_spoken_of() {
    let fixture = Fixture::of(&["h0", "h1"]);
    let _ranks = fixture.join_across();
    while !fixture.says(&["policy", "show"]).contains("as decided") {
        std::thread::sleep(Duration::from_millis(2));
    }
    for (state, shown) in [("down", "down"), ("25Gbit/s", "25Gbit/s"), ("up", "up"), ("down", "down")] {
        let said = fixture.says(&["link", "leaf-h0", "spine0", state]);
        assert!(said.starts_with("in force"), "{said}");
        let text = fixture.says(&["policy", "show"]);
        let line = format!("  link leaf-h0 spine0: {shown}");
        assert_eq!(text.lines().any(|other| other == line), state != "up", "{state}: {text}");
        let history = fixture.says(&["policy", "history"]);
        assert!(history.contains(&format!("link leaf-h0 spine0 {state}")), "{history}");
    }
    let json = fixture.says_in_json(&["policy", "show"]);
    assert_eq!(json["controller"]["show"]["links"], serde_json::json!([["leaf-h0", "spine0", "down"]]));
    let why = fixture.complains(&["link", "leaf-h0", "spine0", "sideways"]);
    assert!(why.contains("sideways") && why.contains("or say up, or down"), "{why}");
}
