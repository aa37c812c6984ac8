//! Maps of all files, written from the sources and refused when stale: `docs/FILES.md`, with each file's first
//! sentence, and the module map of `docs/ARCHITECTURE.md`, with names and the hints that people have written there.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use super::{SENTENCE_WORDS, long_sentences, root};

/// The page, and what writes it.
const PAGE: &str = "docs/FILES.md";
const COMMAND: &str = "MCCS_WRITE=1 cargo test --workspace --test documents map_of_files";

/// The page with the module map, and what the map stands between.
const ARCHITECTURE: &str = "docs/ARCHITECTURE.md";
const MAP: [&str; 2] = ["<!-- modules -->\n\n```text\n", "```\n\n<!-- end of modules -->\n"];
/// Folders of programs and scripts that the module map leaves to FILES.
const LEFT_OUT: [&str; 4] = ["eval/baselines", "python/examples", "shim/examples", "tests/rdma-vm"];
/// Longest line of a page.
const LINE_CHARS: usize = 100;
/// Most words of a hint.
const HINT_WORDS: usize = 6;

/// Words in parentheses behind a name of the module map, by folder and name; a folder's own has no name.
type Hints = BTreeMap<(String, String), String>;

const BEGINNING: &str = "# Files

This page is for whoever looks for a file: each one, with the first sentence of its documentation.
Crates stand in the order of [ARCHITECTURE](ARCHITECTURE.md). Paths are below the crate's folder.
[tests/README.md](../tests/README.md) maps tests; tests of crates are left out here.

`MCCS_WRITE=1 cargo test --workspace --test documents map_of_files` writes it from the sources.
";

/// Folders of the crate map, in its order, and that of the tests.
fn crates() -> Vec<String> {
    let page = fs::read_to_string(root().join("docs/ARCHITECTURE.md")).expect("a page");
    let (_, map) = page.split_once("## Crate map").expect("the crate map");
    let (map, _) = map.split_once("\n## ").expect("its end");
    let folders = map.lines().filter_map(|row| row.split(" | ").nth(1).filter(|_| row.starts_with("| ")));
    let folders = folders.flat_map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_owned));
    folders.chain(["tests".to_owned()]).collect()
}

/// Tracked files with a first sentence to be had, but tests.
fn sources() -> Vec<String> {
    let listed = Command::new("git").arg("ls-files").current_dir(root()).output().expect("git runs");
    let is_source = |name: &&str| {
        let (folders, file) = name.rsplit_once('/').unwrap_or(("", name));
        let below_crate = folders.strip_prefix("tests").unwrap_or(folders);
        let is_test = below_crate.split('/').any(|folder| folder == "tests" || folder.ends_with("_tests"))
            || file == "tests.rs"
            || file.ends_with("_tests.rs");
        let is_script = !file.contains('.') && name.starts_with("tests/");
        let ending = Path::new(file).extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        !is_test && (is_script || ["rs", "py", "sh", "c", "h", "cpp", "cu", "cuh"].contains(&ending))
    };
    let names = String::from_utf8(listed.stdout).expect("names are UTF-8");
    names.lines().filter(is_source).map(str::to_owned).collect()
}

/// The first paragraph that a file says of itself.
fn first_paragraph(name: &str, text: &str) -> String {
    let lines = text.lines().skip_while(|line| line.starts_with("#!") || line.trim().is_empty());
    let of_prefix = |prefix: &str| {
        let said = lines.clone().map_while(|line| line.strip_prefix(prefix).map(str::trim));
        said.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
    };
    let between = |begin: &str, end: &str| {
        let rest: Vec<&str> = lines.clone().collect();
        let rest = rest.join("\n");
        let said = rest.strip_prefix(begin).and_then(|rest| rest.split_once(end)).map_or("", |(said, _)| said);
        let said = said.lines().map(|line| line.trim().trim_start_matches('*').trim());
        said.take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
    };
    let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
    match ending {
        "rs" => of_prefix("//!"),
        "py" => between("\"\"\"", "\"\"\""),
        "c" | "h" | "cpp" | "cu" | "cuh" if text.starts_with("/*") => between("/*", "*/"),
        "c" | "h" | "cpp" | "cu" | "cuh" => of_prefix("//"),
        _ => of_prefix("#"),
    }
}

/// A paragraph's first sentence, without links and with its bars escaped.
fn first_sentence(paragraph: &str) -> String {
    let sentence = paragraph.split_once(". ").map_or(paragraph, |(sentence, _)| sentence).trim_end_matches('.');
    let mut plain = String::new();
    for (index, part) in sentence.split("`](").enumerate() {
        let behind_link = if index == 0 { part } else { part.split_once(')').map_or(part, |(_, behind)| behind) };
        plain += if index == 0 { "" } else { "`" };
        plain += behind_link;
    }
    plain.replace("[`", "`").replace("`]", "`").replace('|', "\\|")
}

/// A folder's own file stands before what is below it.
fn place(path: &str) -> String {
    let stem = path.strip_suffix(".rs").unwrap_or(path);
    let own = stem.strip_suffix("/mod").or_else(|| stem.strip_suffix("/lib")).or_else(|| stem.strip_suffix("/main"));
    own.map_or(stem.to_owned(), |folder| format!("{folder}/"))
}

/// The page as it must be, and what is wrong with files.
fn written() -> (String, Vec<String>) {
    let crates = crates();
    let mut rows: BTreeMap<usize, BTreeMap<(String, &str), String>> = BTreeMap::new();
    let mut wrong = Vec::new();
    let sources = sources();
    for name in &sources {
        let below = |folder: &String| name.strip_prefix(&format!("{folder}/")).map(|path| (folder.len(), path));
        let within = crates.iter().enumerate().filter_map(|(index, folder)| Some((below(folder)?, index)));
        let Some(((_, path), index)) = within.max() else {
            wrong.push(format!("{name}: in no folder of the crate map"));
            continue;
        };
        let text = fs::read_to_string(root().join(name)).expect("a tracked file");
        let sentence = first_sentence(&first_paragraph(name, &text));
        if sentence.is_empty() {
            wrong.push(format!("{name}: says nothing of itself"));
        }
        wrong.extend(long_sentences(name, &sentence, SENTENCE_WORDS));
        rows.entry(index).or_default().insert((place(path), path), format!("| `{path}` | {sentence} |\n"));
    }
    let section = |(index, rows): (usize, BTreeMap<(String, &str), String>)| {
        let folder = &crates[index];
        let rows: String = rows.into_values().collect();
        format!("\n## [{folder}](../{folder})\n\n| file | what |\n| --- | --- |\n{rows}")
    };
    (BEGINNING.to_owned() + &rows.into_iter().map(section).collect::<String>(), wrong)
}

/// Parts of a text between a character, wherever that stands outside of parentheses.
fn split_outside(text: &str, at: char) -> Vec<&str> {
    let mut depth = 0_i32;
    let is_between = |char: char| {
        depth += i32::from(char == '(') - i32::from(char == ')');
        depth == 0 && char == at
    };
    text.split(is_between).map(str::trim).collect()
}

/// Hints of a module map.
fn hints_of(map: &str) -> Hints {
    let mut hints = Hints::new();
    for line in map.replace("\n  ", " ").lines() {
        let [folder, names] = split_outside(line, ':')[..] else { continue };
        let hinted = |text: &str| text.strip_suffix(')').and_then(|text| text.split_once(" (")).map(own);
        let (folder, of_folder) = hinted(folder).unwrap_or_else(|| own((folder, "")));
        hints.insert((folder.clone(), String::new()), of_folder);
        let of_names = split_outside(names, ',').into_iter().filter_map(hinted);
        hints.extend(of_names.map(|(name, hint)| ((folder.clone(), name), hint)));
    }
    hints.retain(|_, hint| !hint.is_empty());
    hints
}

fn own((one, other): (&str, &str)) -> (String, String) {
    (one.to_owned(), other.to_owned())
}

/// A folder of the module map with its names and hints, wrapped.
fn folder_lines(folder: &str, names: &[&str], hints: &Hints) -> String {
    let hinted = |name: &str| match hints.get(&own((folder, name))) {
        Some(hint) => format!(" ({hint})"),
        None => String::new(),
    };
    let names: Vec<String> = names.iter().map(|name| format!("{name}{}", hinted(name))).collect();
    let text = format!("{folder}{}: {}", hinted(""), names.join(", "));
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut().filter(|line| line.chars().count() + 1 + word.chars().count() <= LINE_CHARS) {
            Some(line) if line.is_empty() => *line += word,
            Some(line) => *line += &format!(" {word}"),
            None => lines.push(format!("  {word}")),
        }
    }
    lines.join("\n") + "\n"
}

/// Names of the files of each folder, in the order of the crate map, with those hints whose files are there.
fn modules(hints: &Hints) -> String {
    let mut folders: BTreeMap<(usize, &str), Vec<&str>> = BTreeMap::new();
    let (crates, sources) = (crates(), sources());
    for name in &sources {
        let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
        let is_code = [".rs", ".cu", ".cuh", ".py"].iter().any(|ending| file.ends_with(ending));
        let (stem, _) = file.rsplit_once('.').unwrap_or((file, ""));
        let is_own = ["mod", "lib", "main", "__init__"].contains(&stem);
        let is_below = |of: &str| folder == of || folder.starts_with(&format!("{of}/"));
        if !is_code || is_own || LEFT_OUT.into_iter().any(is_below) {
            continue;
        }
        let within = crates.iter().enumerate().filter(|(_, of)| is_below(of));
        let index = within.max_by_key(|(_, of)| of.len()).map_or(crates.len(), |(index, _)| index);
        folders.entry((index, folder)).or_default().push(stem);
    }
    folders.iter().map(|((_, folder), names)| folder_lines(folder, names, hints)).collect()
}

#[test]
fn the_map_of_files_has_each_module() {
    let page = fs::read_to_string(root().join(ARCHITECTURE)).expect("a page");
    let (before, rest) = page.split_once(MAP[0]).expect("the map's beginning");
    let (map, after) = rest.split_once(MAP[1]).expect("the map's end");
    let hints = hints_of(map);
    let long: Vec<_> = hints.iter().filter(|(_, hint)| hint.split(' ').count() > HINT_WORDS).collect();
    assert!(long.is_empty(), "hints have at most {HINT_WORDS} words: {long:?}");
    let written = format!("{before}{}{}{}{after}", MAP[0], modules(&hints), MAP[1]);
    if std::env::var_os("MCCS_WRITE").is_some() {
        fs::write(root().join(ARCHITECTURE), &written).expect("the page");
    }
    let committed = fs::read_to_string(root().join(ARCHITECTURE)).expect("a page");
    assert!(written == committed, "the module map of {ARCHITECTURE} is stale: run {COMMAND}");
}

#[test]
fn hints_of_the_module_map_stay_with_their_names() {
    let map = "a/src (what it is: all): one (a hint, in\n  parts), two, three (gone)\na/src/b: one\n";
    let hints = hints_of(map);
    let lines = folder_lines("a/src", &["four", "one", "two"], &hints) + &folder_lines("a/src/b", &["one"], &hints);
    assert_eq!(lines, "a/src (what it is: all): four, one (a hint, in parts), two\na/src/b: one\n");
    let many = folder_lines("c", &["a_name_of_20_letters"; 9], &Hints::new());
    assert!(many.lines().all(|line| line.chars().count() <= LINE_CHARS), "{many}");
    assert_eq!(many.replace("\n  ", " "), format!("c: {}\n", ["a_name_of_20_letters"; 9].join(", ")));
}

#[test]
fn the_map_of_files_has_each_files_first_sentence() {
    let (page, wrong) = written();
    if std::env::var_os("MCCS_WRITE").is_some() {
        fs::write(root().join(PAGE), &page).expect("the page");
    }
    assert!(wrong.is_empty(), "each file says first what it is, in few words:\n{}", wrong.join("\n"));
    let committed = fs::read_to_string(root().join(PAGE)).unwrap_or_default();
    let stale: Vec<&str> = page.lines().filter(|line| !committed.lines().any(|other| other == *line)).collect();
    assert!(page == committed, "{PAGE} is stale: run {COMMAND}\n{}", stale.join("\n"));
}

#[test]
fn first_sentences_are_found_in_every_language() {
    let said = |name: &str, text: &str| first_sentence(&first_paragraph(name, text));
    assert_eq!(said("a.rs", "#![no_std]\n//! One [`A`]\n//! | two. Three.\n//!\n//! Four.\n"), "One `A` \\| two");
    assert_eq!(said("a.py", "#!/usr/bin/env python3\n\"\"\"One\ntwo.\n\nThree.\"\"\"\n"), "One two");
    assert_eq!(said("a.sh", "#!/bin/sh\n# One\n# two. Three.\nset -e\n"), "One two");
    assert_eq!(said("a.c", "/* One\n * two. Three. */\n"), "One two");
    assert_eq!(said("a.cuh", "// One.\n#pragma once\n"), "One");
    assert_eq!(said("a.rs", "//! One [`A`](b::A), two.\n"), "One `A`, two");
    assert_eq!(said("a.rs", "use a::B;\n"), "");
}
