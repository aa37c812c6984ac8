//! Parameters: none is a tuple that the function takes apart, which would hide what its parts are.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Text between an opening bracket and the one that closes it.
fn inside(text: &str) -> &str {
    let mut depth = 0;
    for (at, character) in text.char_indices() {
        match character {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[1..at];
        }
    }
    text
}

/// Parameters of a list, each with its type.
fn parameters(list: &str) -> Vec<String> {
    let (mut found, mut depth) = (vec![String::new()], 0);
    for character in list.chars() {
        match character {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' | '>' => depth -= 1,
            ',' if depth == 0 => {
                found.push(String::new());
                continue;
            }
            _ => {}
        }
        found.last_mut().expect("there is one").push(character);
    }
    found.iter().map(|one| one.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// Parameters `(a, b): (A, B)` of a source's functions, with the functions' names. `From::from` has to take its tuple.
fn tuples_taken_apart(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in source.match_indices("fn ") {
        let rest = &source[at + 3..];
        let name: String = rest.chars().take_while(|one| one.is_alphanumeric() || *one == '_').collect();
        let behind = &rest[name.len()..];
        let Some(list) =
            behind.find('(').filter(|list| *list == 0 || behind.starts_with('<')).map(|list| &behind[list..])
        else {
            continue;
        };
        if name.is_empty() || name == "from" {
            continue;
        }
        let is_tuple = |one: &String| {
            let type_of = one.split_once("): ").map_or("", |(_, type_of)| type_of);
            one.starts_with('(') && type_of.trim_start_matches('&').starts_with('(')
        };
        found.extend(parameters(inside(list)).into_iter().filter(is_tuple).map(|one| format!("{name}: {one}")));
    }
    found
}

#[test]
fn functions_name_each_of_their_parameters() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let listed = Command::new("git").args(["ls-files", "*.rs"]).current_dir(&root).output().expect("git runs");
    let listed = String::from_utf8(listed.stdout).expect("names are UTF-8");
    let is_of_tests = |name: &&str| name.contains("/tests/") || name.ends_with("tests.rs");
    let (mut wrong, mut files) = (Vec::new(), 0);
    for name in listed.lines().filter(|name| !is_of_tests(name)) {
        let source = fs::read_to_string(root.join(name)).expect("a tracked file");
        wrong.extend(tuples_taken_apart(&source).into_iter().map(|one| format!("{name}: {one}")));
        files += 1;
    }
    assert!(files > 300, "git lists only {files} sources");
    assert!(wrong.is_empty(), "parameters without names of their own:\n{}", wrong.join("\n"));
}

#[test]
fn a_tuple_among_parameters_is_found_and_other_types_are_not() {
    let source = "fn a(x: u32,\n    (b, c): (u32, Vec<u8>),\n) {}\nfn b<T>((c, d): &(T, T)) {}\nfn c((d, e): Named) {}\n\
                  fn d(e: (u32, u32), f: impl Fn(u32, u32)) {}\nfn from((a, b): (u32, u32)) {}\n";
    assert_eq!(tuples_taken_apart(source), ["a: (b, c): (u32, Vec<u8>)", "b: (c, d): &(T, T)"]);
}
