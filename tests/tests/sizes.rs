//! Sizes: a file fits what a reader keeps in mind, and a function a screen. Tests may be longer.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lines of a file.
const FILE_LINES: usize = 600;
/// Lines of a function, its signature included.
const FUNCTION_LINES: usize = 70;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Tracked files of these patterns that are not tests.
fn sources(patterns: &[&str]) -> Vec<(String, String)> {
    let listed = Command::new("git").arg("ls-files").args(patterns).current_dir(root()).output().expect("git runs");
    let listed = String::from_utf8(listed.stdout).expect("names are UTF-8");
    let is_of_tests = |name: &str| name.contains("/tests/") || name.ends_with("tests.rs");
    let read = |name: &str| (name.to_owned(), fs::read_to_string(root().join(name)).expect("a tracked file"));
    let sources: Vec<_> = listed.lines().filter(|name| !is_of_tests(name)).map(read).collect();
    assert!(sources.len() > 300, "git lists only {} sources", sources.len());
    sources
}

/// A line that begins a function: its indentation, and the function's name.
fn begun(line: &str) -> Option<(&str, &str)> {
    let text = line.trim_start();
    let (before, rest) = text.split_once("fn ")?;
    let is_qualifier =
        |word: &str| matches!(word, "const" | "async" | "unsafe" | "extern" | "\"C\"") || word.starts_with("pub");
    let is_function = before.split_whitespace().all(is_qualifier);
    let name = &rest[..rest.find(|c: char| !c.is_alphanumeric() && c != '_')?];
    (is_function && !name.is_empty()).then(|| (&line[..line.len() - text.len()], name))
}

/// Functions with a body: names, and numbers of lines. Relies on rustfmt: the closing brace stands below the beginning.
fn functions(source: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = source.lines().collect();
    let mut found = Vec::new();
    for (first, line) in lines.iter().enumerate() {
        let Some((indent, name)) = begun(line) else { continue };
        let ends = |line: &str| line.strip_prefix(indent).is_some_and(|rest| rest == "}");
        let is_next = |line: &str| begun(line).is_some_and(|(other, _)| other == indent);
        let behind = &lines[first + 1..];
        let next = behind.iter().position(|line| is_next(line)).unwrap_or(behind.len());
        if let Some(last) = behind[..next].iter().position(|line| ends(line)) {
            found.push((name, last + 2));
        }
    }
    found
}

#[test]
fn files_are_no_longer_than_a_reader_can_keep_in_mind() {
    let sources = sources(&["*.rs", "*.cu", "*.cuh", "*.py", "*.sh"]);
    let long = sources.iter().map(|(name, text)| (name, text.lines().count())).filter(|(_, lines)| *lines > FILE_LINES);
    let long: Vec<String> = long.map(|(name, lines)| format!("{name}: {lines}")).collect();
    assert!(long.is_empty(), "files of more than {FILE_LINES} lines; split them by concept:\n{}", long.join("\n"));
}

#[test]
fn functions_are_no_longer_than_a_screen() {
    let (mut long, mut count) = (Vec::new(), 0);
    for (file, text) in sources(&["*.rs"]) {
        for (name, lines) in functions(&text) {
            count += 1;
            if lines > FUNCTION_LINES {
                long.push(format!("{file}: {name} has {lines}"));
            }
        }
    }
    assert!(count > 5_000, "only {count} functions were found");
    assert!(long.is_empty(), "functions of more than {FUNCTION_LINES} lines; name their steps:\n{}", long.join("\n"));
}

#[test]
fn functions_are_found_with_their_lengths() {
    let source = "trait A {\n    fn declared(&self);\n    pub(crate) const unsafe fn b<T>(\n        x: T,\n    ) {\n        if x {\n        }\n    }\n}\n\
                  fn one_line() {}\n// a fn in words\nfn c() {\n    fn inner() {\n    }\n}\n";
    assert_eq!(functions(source), [("b", 6), ("c", 4), ("inner", 2)]);
}
