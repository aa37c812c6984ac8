//! Which texts go together, and what is taken back with what.

use super::*;

const TOPOLOGY: &str = include_str!("../../../../../config/examples/topology.toml");
const HOSTS: [&str; 4] = ["host-a", "host-b", "host-c", "host-d"];

fn text(name: &str, text: &str) -> Option<Text> {
    Some(Text { name: name.into(), text: text.into() })
}

fn topology(spine: &str) -> Texts {
    Texts { topology: text("topology.toml", &TOPOLOGY.replace("spine1", spine)), policy: None }
}

/// A policy that reserves a path.
fn policy(spine: &str) -> Texts {
    let rules = format!("[policy]\nname = \"pfa\"\n[[reserve]]\ntenant = \"t\"\npaths = [{spine:?}]\n");
    Texts { topology: None, policy: text("policy.toml", &rules) }
}

/// Result of reading texts.
#[derive(Default)]
struct Read {
    is_put_in_force: bool,
    before: Option<Arc<ClusterConfig>>,
    /// Why a file is not in force.
    refused: Option<String>,
}

/// Puts in force what the texts come to, as the controller does.
fn read(store: &mut ConfigStore, texts: &Texts) -> Result<Read, String> {
    let cluster = HOSTS.map(ActualHost::named);
    let Chosen { config, refused } = store.choose(texts, &cluster, Instant::now())?;
    let is_put_in_force = config.is_some();
    let before = config.and_then(|config| store.put_in_force(Arc::new(config)));
    Ok(Read { is_put_in_force, before, refused })
}

/// Texts that go together.
fn read_well(store: &mut ConfigStore, texts: &Texts) -> Read {
    let read = read(store, texts).expect("they go together");
    assert_eq!(read.refused, None);
    read
}

/// The spine of either text in force.
fn in_force(store: &ConfigStore) -> [&'static str; 2] {
    let config = store.in_force().expect("something is in force");
    let spine = |text: &Text| if text.text.contains("spine9") { "spine9" } else { "spine1" };
    [spine(&config.network.text), spine(&config.policy_text)]
}

#[test]
fn nothing_is_in_force_before_both_files_were_read() {
    let mut store = ConfigStore::default();
    assert!(!read_well(&mut store, &policy("spine1")).is_put_in_force && store.in_force().is_none());
    assert!(read_well(&mut store, &topology("spine1")).is_put_in_force);
    assert_eq!(in_force(&store), ["spine1", "spine1"]);
    assert!(!read_well(&mut store, &topology("spine1")).is_put_in_force, "it says the same");
}

#[test]
fn a_file_that_fits_no_other_is_refused_until_the_other_one_comes() {
    let mut store = ConfigStore::default();
    read_well(&mut store, &topology("spine1").or(policy("spine1")));
    let refused = read(&mut store, &policy("spine9")).map(drop).expect_err("no such path");
    assert!(refused.starts_with("policy.toml") && refused.contains("spine9"), "{refused}");
    assert_eq!(in_force(&store), ["spine1", "spine1"]);
    assert!(read_well(&mut store, &topology("spine9")).is_put_in_force);
    assert_eq!(in_force(&store), ["spine9", "spine9"]);
}

#[test]
fn files_that_were_taken_back_together_come_back_together() {
    let mut store = ConfigStore::default();
    read_well(&mut store, &topology("spine1").or(policy("spine1")));
    let second = read_well(&mut store, &topology("spine9").or(policy("spine9")));
    store.take_back(second.before.expect("the first"));
    assert_eq!(in_force(&store), ["spine1", "spine1"]);
    let mut mended = policy("spine9");
    mended.policy.iter_mut().for_each(|policy| policy.text += "# mended\n");
    assert!(read_well(&mut store, &mended).is_put_in_force);
    assert_eq!(in_force(&store), ["spine9", "spine9"], "the policy fits no other topology");
}

#[test]
fn files_are_tried_again_only_when_hosts_have_changed_after_a_refusal() {
    let mut store = ConfigStore::default();
    read_well(&mut store, &topology("spine1").or(policy("spine1")));
    store.hosts_have_changed();
    assert!(!store.take_try_again(), "nothing was refused");
    read(&mut store, &policy("spine9")).map(drop).expect_err("no such path");
    store.hosts_have_changed();
    assert!(store.take_try_again() && !store.take_try_again(), "once");
    assert!(store.try_again(&HOSTS.map(ActualHost::named)).is_none(), "it is as wrong as before");
}
