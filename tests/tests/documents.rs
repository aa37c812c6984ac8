//! Documents: links lead to what exists, indexes name every page, the map of files is up to date, and lines are short.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "documents/files.rs"]
mod files;
#[path = "documents/manifests.rs"]
mod manifests;
#[path = "documents/subjects.rs"]
mod subjects;

/// Characters of a line, outside of tables and code, and without the targets of links.
const LINE_CHARS: usize = 100;
/// Words of a sentence, between two stops, colons or semicolons.
const SENTENCE_WORDS: usize = 32;
/// The same on pages for users and contributors.
const PAGES_SENTENCE_WORDS: usize = 25;
/// Folders with an index, and the folders whose pages it names.
const INDEXES: [(&str, &str); 5] = [
    ("docs", "docs"),
    ("docs/decisions", "docs/decisions"),
    ("docs/guides", "docs/guides"),
    ("docs/internals", "docs/internals"),
    ("eval/results", "eval/results/experiments"),
];

/// Tables and reports that scripts write beside data.
fn is_written_by_a_script(name: &str) -> bool {
    name.strip_prefix("eval/results/").is_some_and(|rest| !rest.contains('/') && rest != "README.md")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every Markdown file of the repository, with its text.
fn documents() -> Vec<(String, String)> {
    let listed = Command::new("git").args(["ls-files", "*.md"]).current_dir(root()).output().expect("git runs");
    let names = String::from_utf8(listed.stdout).expect("names are UTF-8");
    let read = |name: &str| (name.to_owned(), fs::read_to_string(root().join(name)).expect("a tracked file"));
    let documents: Vec<_> = names.lines().map(read).collect();
    assert!(documents.len() > 50, "git lists only {} documents", documents.len());
    documents
}

/// Lines outside of code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        (!in_code && !is_fence).then_some((index + 1, line))
    })
}

/// Targets of the links in a line: what stands in `](...)`.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target)
}

#[test]
fn links_of_documents_lead_to_files() {
    let mut missing = Vec::new();
    for (name, text) in documents() {
        let folder = root().join(&name).parent().map(Path::to_owned).expect("a file has a folder");
        for (number, line) in prose(&text) {
            let of_files = targets(line).filter(|target| !target.contains("://") && !target.starts_with('#'));
            for target in of_files {
                let file = target.split('#').next().unwrap_or(target);
                if !folder.join(file).exists() {
                    missing.push(format!("{name}:{number}: {target}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "links lead nowhere:\n{}", missing.join("\n"));
}

#[test]
fn indexes_name_every_page() {
    for (index, folder) in INDEXES {
        let linked = if index == folder { "" } else { &format!("{}/", folder.rsplit('/').next().expect("a name")) };
        let text = fs::read_to_string(root().join(index).join("README.md")).expect("an index");
        let pages =
            fs::read_dir(root().join(folder)).expect("a folder").map(|entry| entry.expect("an entry").file_name());
        let names = pages.map(|name| name.to_string_lossy().into_owned());
        let is_page = |name: &String| name.ends_with(".md") && name != "README.md";
        let unnamed: Vec<_> =
            names.filter(is_page).filter(|name| !text.contains(&format!("({linked}{name})"))).collect();
        assert!(unnamed.is_empty(), "{index}/README.md does not name {unnamed:?}");
    }
}

/// Rust code blocks of a page: what their fence says behind `rust`, and the code.
fn rust_blocks(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("```rust").skip(1).filter_map(|rest| {
        let (block, _) = rest.split_once("```")?;
        block.split_once('\n')
    })
}

/// A page's code is a doc test of a crate, or stands in the sources as the page quotes it.
#[test]
fn code_of_pages_is_compiled() {
    let listed = Command::new("git").args(["ls-files", "*.rs"]).current_dir(root()).output().expect("git runs");
    let names = String::from_utf8(listed.stdout).expect("names are UTF-8");
    let read = |name: &str| fs::read_to_string(root().join(name)).expect("a tracked file");
    let sources: Vec<String> = names.lines().map(read).collect();
    let without_spaces = |text: &str| text.split_whitespace().collect::<String>();
    let dense: Vec<String> = sources.iter().map(|source| without_spaces(source)).collect();

    let (mut wrong, mut blocks) = (Vec::new(), 0);
    for (name, text) in
        documents().into_iter().filter(|(name, _)| name.starts_with("docs/") && !name.starts_with("docs/decisions/"))
    {
        let is_doc_test = sources.iter().any(|source| source.contains(&format!("{name}\")]")));
        for (kind, code) in rust_blocks(&text) {
            blocks += 1;
            let is_compiled = match kind {
                ",quoted" | ",ignore,quoted" => dense.iter().any(|source| source.contains(&without_spaces(code))),
                "" => is_doc_test,
                _ => false,
            };
            if !is_compiled {
                wrong.push(format!("{name}:\n{code}"));
            }
        }
    }
    assert!(blocks >= 8, "the pages have only {blocks} blocks of code");
    assert!(wrong.is_empty(), "neither a doc test nor in the sources; show what is there now:\n{}", wrong.join("\n"));
}

/// A page's drop-in, with the packaged unit. `systemd-analyze` warns about what it does not know, and succeeds.
#[test]
#[ignore = "needs systemd-analyze"]
fn drop_ins_of_pages_are_what_systemd_reads() {
    let folder = std::env::temp_dir().join(format!("mccs-units-{}", std::process::id()));
    let packaged = fs::read_to_string(root().join("packaging/mccs-service.service")).expect("the packaged unit");
    // The programs need not be installed here.
    let programs = ["/usr/bin/mccs-service", "/usr/bin/mccsctl"];
    let without_installed_programs =
        programs.iter().fold(packaged, |unit, program| unit.replace(&format!("={program}"), "=/bin/true"));
    let blocks = documents().into_iter().flat_map(|(_, text)| {
        let blocks = text.split("```ini\n").skip(1).filter_map(|rest| rest.split("```").next());
        blocks.map(str::to_owned).collect::<Vec<_>>()
    });
    let mut drop_ins = 0;
    for block in blocks {
        let (first, drop_in) = block.split_once('\n').expect("lines");
        let path = first.strip_prefix("# /etc/systemd/system/").expect("a comment with the drop-in's path");
        let file = folder.join(path);
        fs::create_dir_all(file.parent().expect("a folder")).expect("made");
        fs::write(&file, drop_in).expect("written");
        let unit = folder.join("mccs-service.service");
        fs::write(&unit, &without_installed_programs).expect("written");
        let verify = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit).output().expect("it runs");
        let said = String::from_utf8_lossy(&verify.stderr);
        assert!(verify.status.success() && said.is_empty(), "{path}: {said}");
        drop_ins += 1;
    }
    assert!(drop_ins >= 1, "no page has a drop-in");
    fs::remove_dir_all(folder).expect("removed");
}

#[test]
fn lines_of_documents_are_short() {
    let mut long = Vec::new();
    for (name, text) in documents() {
        if is_written_by_a_script(&name) {
            continue;
        }
        long.extend(long_lines(&text).map(|number| format!("{name}:{number}")));
    }
    assert!(long.is_empty(), "lines of more than {LINE_CHARS} characters:\n{}", long.join("\n"));
}

/// Characters of a line without the targets of its links, which cannot be wrapped.
fn chars_to_wrap(line: &str) -> usize {
    line.chars().count() - targets(line).map(|target| target.chars().count()).sum::<usize>()
}

/// Numbers of lines that are too long. Rows of tables cannot be wrapped.
fn long_lines(text: &str) -> impl Iterator<Item = usize> {
    let is_long = |line: &str| chars_to_wrap(line) > LINE_CHARS && !line.starts_with('|');
    prose(text).filter(move |(_, line)| is_long(line)).map(|(number, _)| number)
}

#[test]
fn a_long_line_is_found_and_a_row_a_links_target_and_code_are_not() {
    let long = "x".repeat(LINE_CHARS + 1);
    let text = format!("short\n{long}\n| {long} |\n[a]({long})\n```\n{long}\n```\n{long}\n{long} [a](b)\n");
    assert_eq!(long_lines(&text).collect::<Vec<_>>(), [2, 8, 9]);
}

/// Sentences of a page's paragraphs and list items, with the line on which each paragraph begins.
fn sentences(text: &str) -> Vec<(usize, String)> {
    let mut paragraphs: Vec<(usize, String)> = Vec::new();
    let mut is_open = false;
    for (number, line) in prose(text) {
        let line = line.trim();
        let is_apart = line.is_empty() || line.starts_with(['|', '#', '<']);
        let begins_item = line.starts_with("- ") || line.split_once(". ").is_some_and(|(n, _)| n.parse::<u8>().is_ok());
        match paragraphs.last_mut() {
            Some((_, paragraph)) if is_open && !is_apart && !begins_item => *paragraph += &format!(" {line}"),
            _ if !is_apart => paragraphs.push((number, line.to_owned())),
            _ => {}
        }
        is_open = !is_apart;
    }
    let ends = |word: &str| word.trim_end_matches(['*', ')', '"']).ends_with(['.', ':', ';', '!', '?']);
    let of = |(number, paragraph): (usize, String)| {
        let words: Vec<&str> = paragraph.split_whitespace().collect();
        let each = words.split_inclusive(|word| ends(word)).map(|words| (number, words.join(" ")));
        each.collect::<Vec<_>>()
    };
    paragraphs.into_iter().flat_map(of).collect()
}

/// Sentences with more words than `most`, each with its place in a file of this name.
fn long_sentences(name: &str, text: &str, most: usize) -> Vec<String> {
    let is_long = |sentence: &str| sentence.split_whitespace().count() > most;
    let long = sentences(text).into_iter().filter(|(_, sentence)| is_long(sentence));
    long.map(|(number, sentence)| format!("{name}:{number}: {sentence}")).collect()
}

#[test]
fn sentences_of_pages_are_short() {
    let mut long = Vec::new();
    // Decisions are records, and keep their words.
    for (name, text) in documents().into_iter().filter(|(name, _)| !name.starts_with("docs/decisions/")) {
        if is_written_by_a_script(&name) {
            continue;
        }
        let is_page = name.starts_with("docs/") || !name.contains('/');
        long.extend(long_sentences(&name, &text, if is_page { PAGES_SENTENCE_WORDS } else { SENTENCE_WORDS }));
    }
    let (pages, others) = (PAGES_SENTENCE_WORDS, SENTENCE_WORDS);
    assert!(long.is_empty(), "sentences of more than {pages} words, or {others} outside docs:\n{}", long.join("\n"));
}

/// The documentation of a source, line for line.
fn documentation(source: &str) -> String {
    let of_line = |line: &str| {
        let line = line.trim_start();
        line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).unwrap_or_default().to_owned() + "\n"
    };
    source.lines().map(of_line).collect()
}

/// The documentation of the API.
#[test]
fn sentences_of_the_librarys_documentation_are_short() {
    let mut git = std::process::Command::new("git");
    let listed = git.args(["ls-files", "shim/src/*.rs", "cuda/src/*.rs"]).current_dir(root()).output().expect("git");
    let mut long = Vec::new();
    for name in String::from_utf8(listed.stdout).expect("names").lines() {
        let source = fs::read_to_string(root().join(name)).expect("a tracked file");
        long.extend(long_sentences(name, &documentation(&source), SENTENCE_WORDS));
    }
    assert!(long.is_empty(), "sentences of more than {SENTENCE_WORDS} words:\n{}", long.join("\n"));
}

#[test]
fn sentences_are_found_in_paragraphs_and_items() {
    let text = "# A b\n\nOne two\nthree. Four: five.\n\n- six\n  seven\n1. eight\n| nine |\n```\nten\n```\n";
    let found: Vec<String> = sentences(text).into_iter().map(|(_, sentence)| sentence).collect();
    assert_eq!(found, ["One two three.", "Four:", "five.", "- six seven", "1.", "eight"]);
}

/// Files that pages and comments name in backticks, by any part of their path's end.
#[test]
fn files_that_pages_and_comments_name_are_there() {
    let listed = std::process::Command::new("git").args(["ls-files"]).current_dir(root()).output().expect("git");
    let listed = String::from_utf8(listed.stdout).expect("names");
    let files: Vec<&str> = listed.lines().collect();
    let is_there = |name: &str| files.iter().any(|file| *file == name || file.ends_with(&format!("/{name}")));
    let mut missing = Vec::new();
    for file in
        files.iter().filter(|file| file.ends_with(".rs") || (file.starts_with("docs/") && file.ends_with(".md")))
    {
        let Ok(text) = std::fs::read_to_string(root().join(file)) else { continue };
        for (number, line) in (1..).zip(text.lines()) {
            let said =
                if file.ends_with(".rs") { line.split_once("//").map_or("", |(_, comment)| comment) } else { line };
            let quoted = said.split('`').skip(1).step_by(2);
            let names = quoted.filter(|name| name.ends_with(".rs") || name.ends_with(".cuh"));
            for name in names.filter(|name| !name.contains(|c: char| c.is_whitespace() || "{}*<>".contains(c))) {
                let plain = name.trim_start_matches("../").trim_start_matches("./");
                if !is_there(plain) {
                    missing.push(format!("{file}:{number}: {name}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "named, and not there:\n{}", missing.join("\n"));
}

/// The page on NCCL says what becomes of each field that a program can set.
#[test]
fn every_field_of_nccls_configuration_has_a_row() {
    let read = |file: &str| fs::read_to_string(root().join(file)).expect("a tracked file");
    let header = read("tests/tests/nccl_functions.h");
    let (before, _) = header.split_once("} ncclConfig_t;").expect("the structure");
    let (_, structure) = before.rsplit_once("typedef struct {").expect("its beginning");
    let declared = structure.split([';', ',']).filter_map(|one| one.trim().rsplit([' ', '*']).next());
    let declared: BTreeSet<&str> = declared.filter(|field| !field.is_empty()).collect();
    assert!(declared.len() > 20, "{declared:?}");
    let page = read("docs/NCCL.md");
    let (_, section) = page.split_once("## Fields of `ncclConfig_t`\n").expect("the section");
    let rows = section.split("\n## ").next().expect("some text").lines().filter(|line| line.starts_with("| `"));
    let named = rows.filter_map(|row| row.split(" | ").next()).flat_map(|fields| fields.split('`').skip(1).step_by(2));
    assert_eq!(named.collect::<BTreeSet<&str>>(), declared, "rows of docs/NCCL.md, fields of the header");
}
