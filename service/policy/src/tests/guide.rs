//! `docs/POLICIES.md` lists the policies that exist; `docs/guides/policy.md` shows how to add one.

use super::*;

const PAGE: &str = include_str!("../../../../docs/POLICIES.md");
const GUIDE: &str = include_str!("../../../../docs/guides/policy.md");

#[test]
fn each_policy_is_found_by_a_name_of_its_own() {
    let mut names = names();
    for name in &names {
        assert_eq!(by_name(name).map(Policy::name), Some(*name));
    }
    names.sort_unstable();
    let all = names.len();
    names.dedup();
    assert_eq!((names.len(), ALL.len()), (all, all), "two have one name: {names:?}");
    assert!(by_name("nothing").is_none());
}

/// Not the other way round: who tries a policy out need not write about it.
#[test]
fn the_policies_of_the_page_are_there() {
    let row = |line: &'static str| line.strip_prefix("| `")?.split_once('`').map(|(name, _)| name);
    let listed: Vec<&str> = PAGE.lines().filter_map(row).collect();
    assert!(listed.contains(&"ecmp") && listed.contains(&"yield"), "{listed:?}");
    assert!(listed.iter().all(|name| by_name(name).is_some()), "{listed:?}");
}

/// The guide's example is compiled, and the policy below its name is registered, so what holds for the one holds for the other.
#[test]
fn the_policy_that_the_guide_shows_is_one_file_and_one_line() {
    let (_, shown) = include_str!("../in_turn.rs").split_once("flows, shares};\n\n").expect("behind its imports");
    assert!(GUIDE.contains(shown.trim_end()), "the guide and service/policy/src/in_turn.rs differ");
    let line = include_str!("../lib.rs").lines().filter(|line| line.contains("in_turn"));
    assert_eq!(line.collect::<Vec<_>>(), ["    in_turn::InTurn,"]);
    assert!(by_name("in_turn").is_some());
}
