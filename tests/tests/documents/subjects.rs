//! Sentences of pages, comments and messages begin with their subject. None begins with a clause, as
//! in "What is ...".

use std::fs;
use std::process::Command;

use super::{root, sentences};

/// First words of a clause in the place of a subject. Questions may begin with them.
const CLAUSES: [&str; 6] = ["What", "Who", "Whose", "Whom", "Where", "Of"];

/// Files whose words are looked at.
const PATTERNS: [&str; 11] =
    ["*.rs", "*.cu", "*.cuh", "*.c", "*.cpp", "*.h", "*.py", "*.sh", "*.toml", "*.md", "*.rst"];

fn is_clause(sentence: &str) -> bool {
    let text = sentence.trim_start_matches(['-', '*', ' ', '#', '"', '`', '(']);
    let word = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
    CLAUSES.contains(&word) && !sentence.contains('?')
}

/// What stands behind the mark of a line that is a comment alone.
fn comment<'a>(line: &'a str, marks: &[&str]) -> Option<&'a str> {
    let line = line.trim_start();
    let rest = marks.iter().find_map(|mark| line.strip_prefix(mark))?;
    Some(rest.trim_end_matches("*/"))
}

/// A source's comments line for line, with empty lines for all else.
fn comments(name: &str, source: &str) -> String {
    let marks: &[&str] = match name.rsplit('.').next() {
        Some("py" | "sh" | "toml") => &["\"\"\"", "#"],
        Some("c" | "h" | "cpp") => &["/**", "/*", "* ", "///", "//"],
        _ => &["///", "//!", "//"],
    };
    source.lines().map(|line| comment(line, marks).unwrap_or_default().to_owned() + "\n").collect()
}

/// Texts between quotation marks of a source's lines.
fn literals(source: &str) -> impl Iterator<Item = (usize, &str)> {
    let is_comment = |line: &str| line.starts_with(['/', '#', '*']) || line.starts_with("\"\"\"");
    let lines = (1..).zip(source.lines()).filter(move |(_, line)| !is_comment(line.trim_start()));
    lines.flat_map(|(number, line)| line.split('"').skip(1).step_by(2).map(move |text| (number, text)))
}

/// Sentences of a file that begin with a clause, each with its place.
fn clauses(name: &str, text: &str) -> Vec<String> {
    let is_page = name.ends_with(".md");
    let said = if is_page { text.to_owned() } else { comments(name, text) };
    let headings = (1..).zip(text.lines()).filter(|(_, line)| is_page && line.starts_with('#'));
    let headings = headings.map(|(number, line)| (number, line.to_owned()));
    let messages = literals(text).filter(|(_, text)| !is_page && text.contains(' '));
    let messages = messages.map(|(number, text)| (number, text.to_owned()));
    let all = sentences(&said).into_iter().chain(headings).chain(messages);
    let wrong = all.filter(|(_, sentence)| is_clause(sentence));
    wrong.map(|(number, sentence)| format!("{name}:{number}: {sentence}")).collect()
}

#[test]
fn sentences_begin_with_their_subject() {
    let mut git = Command::new("git");
    let listed = git.arg("ls-files").args(PATTERNS).current_dir(root()).output().expect("git runs");
    let listed = String::from_utf8(listed.stdout).expect("names are UTF-8");
    // Decisions and results are records, and keep their words. Figures name the text of `plot.py` that has drawn them, and
    // schemas have the words of `config`. This file has the words that it looks for.
    let kept = ["docs/decisions/", "eval/results/", "eval/plot.py", "tests/tests/documents/subjects.rs", "config/src/"];
    let is_kept = |name: &str| kept.iter().any(|part| name.starts_with(part));
    let (mut wrong, mut files) = (Vec::new(), 0);
    for name in listed.lines().filter(|name| !is_kept(name)) {
        let text = fs::read_to_string(root().join(name)).expect("a tracked file");
        wrong.extend(clauses(name, &text));
        files += 1;
    }
    assert!(files > 1_000, "git lists only {files} files");
    assert!(wrong.is_empty(), "name the subject first, then the verb:\n{}", wrong.join("\n"));
}

#[test]
fn clauses_in_the_place_of_subjects_are_found_and_questions_are_not() {
    let source = "/// What it does. It ends.\nfn a() {}\n// A ring. Who waits\n// spins.\nlet text = \"Where it is\";\n\
                  // What is it?\nlet code = \"Office\"; // Of two\n";
    let found = clauses("a.rs", source);
    assert_eq!(found, ["a.rs:1: What it does.", "a.rs:3: Who waits spins.", "a.rs:5: Where it is"]);
    let page = "# Who pays\n\nA line. Of two\none stays.\n\n- What ends\n\n| Who | what |\n";
    assert_eq!(clauses("a.md", page), ["a.md:3: Of two one stays.", "a.md:6: - What ends", "a.md:1: # Who pays"]);
    assert_eq!(clauses("a.py", "\"\"\"Whose it is.\"\"\"\n# Whom it calls.\n").len(), 2);
}
