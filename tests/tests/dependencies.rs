//! Crates that are built into mccs: their licences, versions and sources, by `deny.toml`. `cargo deny check licenses bans sources`
//! reads the same file, and says the same.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Whether a licence expression can be met with licences that are allowed; `None` where it is no expression.
///
/// SPDX's grammar, with the slash that crates had before for `OR`. An exception is a licence of its own: `A WITH B`.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> Option<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<_> = spaced.split_whitespace().collect();
    let mut left = words.as_slice();
    let met = any(&mut left, allowed)?;
    left.is_empty().then_some(met)
}

/// `OR` binds less than `AND`.
fn any(words: &mut &[&str], allowed: &BTreeSet<String>) -> Option<bool> {
    let mut met = all(words, allowed)?;
    while next_is(words, "OR") {
        met |= all(words, allowed)?;
    }
    Some(met)
}

fn all(words: &mut &[&str], allowed: &BTreeSet<String>) -> Option<bool> {
    let mut met = one(words, allowed)?;
    while next_is(words, "AND") {
        met &= one(words, allowed)?;
    }
    Some(met)
}

/// A licence, or an expression in parentheses.
fn one(words: &mut &[&str], allowed: &BTreeSet<String>) -> Option<bool> {
    let is_name = |word: &str| !["(", ")", "AND", "OR", "WITH"].contains(&word);
    if next_is(words, "(") {
        let met = any(words, allowed)?;
        return next_is(words, ")").then_some(met);
    }
    let licence = take(words).filter(|word| is_name(word))?.to_owned();
    if !next_is(words, "WITH") {
        return Some(allowed.contains(&licence));
    }
    let exception = take(words).filter(|word| is_name(word))?;
    Some(allowed.contains(&format!("{licence} WITH {exception}")))
}

fn take<'a>(words: &mut &[&'a str]) -> Option<&'a str> {
    let (first, rest) = words.split_first()?;
    *words = rest;
    Some(first)
}

/// Takes the next word if it is this one.
fn next_is(words: &mut &[&str], word: &str) -> bool {
    let is = words.first() == Some(&word);
    if is {
        *words = &words[1..];
    }
    is
}

/// Packages with a fault, as cargo's metadata has them.
fn refused(packages: &[Value], allowed: &BTreeSet<String>) -> Vec<String> {
    let mut wrong = Vec::new();
    for package in packages {
        let name = format!("{} {}", text(&package["name"]), text(&package["version"]));
        match package["license"].as_str().map(|expression| (expression, is_allowed(expression, allowed))) {
            Some((_, Some(true))) => {}
            Some((expression, Some(false))) => wrong.push(format!("{name} has the licence {expression}")),
            Some((expression, None)) => wrong.push(format!("{name} has a licence that cannot be read: {expression}")),
            None => wrong.push(format!("{name} names no licence")),
        }
        if let Some(source) = package["source"].as_str().filter(|source| *source != CRATES_IO) {
            wrong.push(format!("{name} comes from {source}"));
        }
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            if dependency["req"] == "*" && dependency["path"].is_null() {
                wrong.push(format!("{name} takes any version of {}", text(&dependency["name"])));
            }
        }
    }
    wrong
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

/// `deny.toml` says what else is denied; this file has no other rules.
fn allowed_licences() -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deny.toml");
    let mut rules: toml::Table = fs::read_to_string(path).expect("deny.toml").parse().expect("TOML");
    let licences = rules["licenses"].as_table_mut().and_then(|licences| licences.remove("allow")).expect("licences");
    let others = "[licenses]\n[bans]\nmultiple-versions = \"allow\"\nwildcards = \"deny\"\nallow-wildcard-paths = true\n\
                  [sources]\nunknown-registry = \"deny\"\nunknown-git = \"deny\"\n";
    assert_eq!(rules, others.parse().expect("TOML"), "deny.toml has a rule that nothing here knows");
    licences.try_into().expect("a list of texts")
}

/// Crates for other platforms and for tests count too, as for `cargo deny`.
#[test]
#[ignore = "asks the registry for crates of other platforms; see .ci/run"]
fn all_crates_have_licences_versions_and_sources_that_are_allowed() {
    // The Python package has a workspace and a lock file of its own.
    for folder in [".", "../python"] {
        let arguments = ["metadata", "--format-version", "1", "--locked"];
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let output = Command::new(env!("CARGO")).args(arguments).current_dir(folder).output().expect("cargo runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let packages = metadata["packages"].as_array().expect("a list");
        assert!(packages.iter().any(|package| package["source"] == CRATES_IO), "crates of the registry are among them");
        let wrong = refused(packages, &allowed_licences());
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

#[test]
fn a_licence_expression_is_met_as_its_operators_say() {
    let allowed = ["MIT", "ISC", "X WITH Y"].map(str::to_owned).into();
    for (expression, met) in [
        ("MIT", Some(true)),
        ("GPL-3.0", Some(false)),
        ("MIT/GPL-3.0", Some(true)),
        ("GPL-3.0 OR MIT AND ISC", Some(true)),
        ("GPL-3.0 AND MIT OR ISC", Some(true)),
        ("GPL-3.0 AND (MIT OR ISC)", Some(false)),
        ("(MIT OR GPL-3.0) AND ISC", Some(true)),
        ("X", Some(false)),
        ("X WITH Y", Some(true)),
        ("MIT WITH Y", Some(false)),
        ("MIT ISC", None),
        ("MIT OR", None),
        ("(MIT", None),
        ("X WITH OR", None),
        ("", None),
    ] {
        assert_eq!(is_allowed(expression, &allowed), met, "{expression:?}");
    }
}

#[test]
fn a_crate_without_licence_from_elsewhere_or_with_any_version_is_found() {
    let package = |license: Option<&str>, source: Option<&str>, req: &str, path: Option<&str>| {
        let dependency = serde_json::json!({ "name": "d", "req": req, "path": path });
        serde_json::json!({ "name": "p", "version": "1.0.0", "license": license, "source": source, "dependencies": [dependency] })
    };
    let (allowed, git) = (["MIT".to_owned()].into(), "git+https://example.org/p");
    for (package, wrong) in [
        (package(Some("MIT"), Some(CRATES_IO), "^1", None), None),
        (package(Some("MIT"), None, "*", Some("/d")), None),
        (package(Some("GPL-3.0"), None, "^1", None), Some("p 1.0.0 has the licence GPL-3.0")),
        (package(Some("MIT OR"), None, "^1", None), Some("p 1.0.0 has a licence that cannot be read: MIT OR")),
        (package(None, None, "^1", None), Some("p 1.0.0 names no licence")),
        (package(Some("MIT"), Some(git), "^1", None), Some("p 1.0.0 comes from git+https://example.org/p")),
        (package(Some("MIT"), None, "*", None), Some("p 1.0.0 takes any version of d")),
    ] {
        assert_eq!(refused(&[package], &allowed), wrong.map(str::to_owned).into_iter().collect::<Vec<_>>());
    }
}
