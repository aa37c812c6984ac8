//! Reads a TOML file into a checked value: unknown and renamed keys, line and column of a mistake.
//!
//! `text -> serde -> T -> T::validate -> T`. The structs are plain, without source positions; a complaint names a key
//! path, and the line is looked up in the document when there is something to complain about.

use std::io::Read;
use std::ops::Range;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::error::{ConfigError, Diagnostic};
use crate::units::Bytes;
use crate::validate::{Problem, Problems, Validate, nearest};

/// Reads and checks the file at `path`.
///
/// # Errors
/// The file cannot be read or says nothing, or its content is refused; see [`parse`].
pub fn load<T: DeserializeOwned + Validate>(path: &Path) -> Result<T, ConfigError> {
    let (text, name) = (read_text(path, T::BYTES_MAX)?, path.display().to_string());
    if says_nothing(&text) {
        return Err(ConfigError::Invalid(vec![diagnostic(&text, &name, 0, String::new(), SAYS_NOTHING.to_owned())]));
    }
    parse(&text, &name)
}

/// The complaint about a file without a key. Nobody writes one on purpose; a full disk and a slip with `>` do.
const SAYS_NOTHING: &str = "the file says nothing: was its content lost?";

/// Whether a text is TOML without any key: empty, or comments alone.
fn says_nothing(text: &str) -> bool {
    DeTable::parse(text).is_ok_and(|root| root.get_ref().is_empty())
}

/// The text of the file at `path`, whatever it says.
///
/// # Errors
/// The file cannot be read, is longer than that, or is no UTF-8.
pub fn read_text(path: &Path, bytes_max: Bytes) -> Result<String, ConfigError> {
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    // No more is read than that, also of what has no end or no length.
    file.take(bytes_max.0 + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > bytes_max.0 {
        return Err(ConfigError::TooLong(path.to_owned(), bytes_max));
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = error.utf8_error().valid_up_to();
        let text = String::from_utf8_lossy(&error.as_bytes()[..good]).into_owned();
        let message = format!("byte 0x{:02x} is no UTF-8, which these files are in", error.as_bytes()[good]);
        ConfigError::Invalid(vec![diagnostic(&text, &path.display().to_string(), good, String::new(), message)])
    })
}

/// Reads and checks `text`, which complaints call `file_name`.
///
/// # Errors
/// Too long, not TOML, an unknown key, a value of the wrong type (the first such), or values that cannot be (all of them, or very many).
pub fn parse<T: DeserializeOwned + Validate>(text: &str, file_name: &str) -> Result<T, ConfigError> {
    if text.len() as u64 > T::BYTES_MAX.0 {
        return Err(ConfigError::TooLong(file_name.into(), T::BYTES_MAX));
    }
    let value: T = read(text, file_name)?;
    let found = check(&value, text, file_name);
    if found.is_empty() { Ok(value) } else { Err(ConfigError::Invalid(found)) }
}

/// Defines how a file is read: its type's `load` and `parse`; and with `written` also `to_toml`.
#[macro_export]
macro_rules! document {
    ($file:ty) => {
        impl $file {
            /// Reads and checks the file at `path`.
            ///
            /// # Errors
            /// The file cannot be read or is refused; the error's text names file, line, key and what would be right.
            pub fn load(path: &::std::path::Path) -> Result<Self, $crate::ConfigError> {
                $crate::document::load(path)
            }

            /// Reads and checks `text`, by itself, which complaints call `file_name`.
            ///
            /// # Errors
            /// The text is refused.
            pub fn parse(text: &str, file_name: &str) -> Result<Self, $crate::ConfigError> {
                $crate::document::parse(text, file_name)
            }
        }
    };
    ($file:ty, written) => {
        $crate::document!($file);

        impl $file {
            /// The file's text with every default said; reads back to the same value.
            #[must_use]
            pub fn to_toml(&self) -> String {
                $crate::document::write(self)
            }
        }
    };
}

/// The text of a file.
pub fn write<T: Serialize>(file: &T) -> String {
    toml::to_string(file).expect("invariant: files are plain structs with string keys, which are TOML")
}

/// Reads `text` without checks on values.
pub(crate) fn read<T: DeserializeOwned>(text: &str, file_name: &str) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| ConfigError::Invalid(vec![explain(text, file_name, &error)]))
}

/// Everything that is wrong with a value that was read from `text`, in its order; of very much the first that was found.
pub(crate) fn check(value: &impl Validate, text: &str, file_name: &str) -> Vec<Diagnostic> {
    let mut problems = Problems::default();
    value.validate(&mut problems);
    let are_too_many = problems.are_too_many();
    let problems = problems.into_inner();
    if problems.is_empty() {
        return Vec::new();
    }
    let root = DeTable::parse(text).ok();
    let offset = |key: &str| root.as_ref().map_or(0, |root| offset_of(root.get_ref(), key));
    let problems = problems.into_iter();
    let found = problems.map(|Problem { key, message }| diagnostic(text, file_name, offset(&key), key, message));
    let mut found: Vec<Diagnostic> = found.collect();
    found.sort_by_key(|diagnostic| (diagnostic.line, diagnostic.column));
    if let Some(last) = found.last_mut().filter(|_| are_too_many) {
        last.message.push_str("; and there is more, which is told when this is mended");
    }
    found
}

/// A complaint about the byte at `offset` of `text`.
pub(crate) fn diagnostic(text: &str, file: &str, offset: usize, key: String, message: String) -> Diagnostic {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    Diagnostic {
        file: file.to_owned(),
        line: before.matches('\n').count() + 1,
        column: before[line_start..].chars().count() + 1,
        key,
        message,
    }
}

/// Turns what serde or the TOML parser says into a complaint with a key path and, for a misspelling, a suggestion.
fn explain(text: &str, file: &str, error: &toml::de::Error) -> Diagnostic {
    let span = error.span().unwrap_or(0..0);
    if says_nothing(text) {
        let message = format!("{SAYS_NOTHING} ({})", error.message().trim());
        return diagnostic(text, file, 0, String::new(), message);
    }
    let key = match DeTable::parse(text) {
        // What the file as a whole lacks stands nowhere.
        Ok(root) if !span.is_empty() => path_to(&root, &span),
        _ => String::new(),
    };
    let message = in_our_words(error.message().trim().replace('\n', "; "), &key);
    // serde's texts for an unknown name are fixed: the wrong one first, then the known ones, each in backticks.
    let mut names = message.split('`').skip(1).step_by(2);
    let message = match names.next() {
        Some(wrong) if message.starts_with("unknown ") => advise(&message, wrong, names),
        _ => message,
    };
    diagnostic(text, file, span.start, key, message)
}

/// Keys and values whose name is another one now, which files may still have.
const RENAMED: &[(&str, &str)] = &[
    ("lines", "ll128"),
    ("direct", "single_pass"),
    ("direct_limit", "shm_exchange_limit"),
    ("spin_for_others", "spin_while_waiting"),
];

/// Adds to a complaint about an unknown name what to write in its place.
fn advise<'a>(message: &str, wrong: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    let renamed = RENAMED.iter().find(|(old, new)| *old == wrong && known.clone().any(|name| name == *new));
    match (renamed, nearest(wrong, known)) {
        (Some((old, new)), _) => format!("`{old}` is called `{new}` now: rename it"),
        (None, Some(name)) => format!("{message}; did you mean `{name}`?"),
        (None, None) => message.to_owned(),
    }
}

/// What serde says of types, for people who write files.
fn in_our_words(message: String, key: &str) -> String {
    if message == "invalid IP address syntax" {
        return "is no IP address, such as \"10.0.0.1\" (names are not looked up)".into();
    }
    let Some((found, expected)) = message.rsplit_once(", expected ") else { return message };
    let table = key.rsplit_once('[').map_or(key, |(table, _)| table);
    match (found, expected) {
        ("invalid type: map", "a sequence") => format!("is a list of tables: write [[{key}]]"),
        ("invalid type: map", _) if key.ends_with(']') => {
            format!("there is only one: write [{table}], not [[{table}]]")
        }
        (_, "a sequence") => format!("{found}, expected a list, such as [a, b]"),
        (_, "u8" | "u16" | "u32" | "u64" | "usize") => {
            let most = match expected {
                "u8" => format!(" to {}", u8::MAX),
                "u16" => format!(" to {}", u16::MAX),
                "u32" => format!(" to {}", u32::MAX),
                _ => " on".into(),
            };
            format!("{found}, expected a whole number from 0{most}")
        }
        _ => message,
    }
}

/// The key path of the innermost place that holds `span`.
fn path_to(root: &Spanned<DeTable<'_>>, span: &Range<usize>) -> String {
    let mut path = String::new();
    descend_table(root.get_ref(), span, &mut path);
    path
}

fn holds(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

/// Appends the way to `span` and says whether it lies in this table.
fn descend_table(table: &DeTable<'_>, span: &Range<usize>, path: &mut String) -> bool {
    table.iter().any(|(key, value)| {
        let before = path.len();
        if !path.is_empty() {
            path.push('.');
        }
        path.push_str(key.get_ref());
        let found = descend_value(value, span, path) || holds(&key.span(), span);
        if !found {
            path.truncate(before);
        }
        found
    })
}

fn descend_value(value: &Spanned<DeValue<'_>>, span: &Range<usize>, path: &mut String) -> bool {
    // A table's own span is only its header, so its content is searched whether or not the span holds.
    let inside = match value.get_ref() {
        DeValue::Table(table) => descend_table(table, span, path),
        DeValue::Array(items) => items.iter().enumerate().any(|(index, item)| {
            let before = path.len();
            path.push_str(&format!("[{index}]"));
            let found = descend_value(item, span, path);
            if !found {
                path.truncate(before);
            }
            found
        }),
        _ => false,
    };
    inside || holds(&value.span(), span)
}

/// Where `path` (`tenant[1].uids`) stands in a text; its innermost parent that is written where it is a default.
fn offset_of(root: &DeTable<'_>, path: &str) -> usize {
    let mut offset = 0;
    let mut table = Some(root);
    for segment in path.split('.') {
        let (name, indices) = segment.split_at(segment.find('[').unwrap_or(segment.len()));
        let Some((key, mut value)) = table.and_then(|t| t.get_key_value(name)) else {
            break;
        };
        offset = key.span().start;
        for index in indices.split_terminator(']') {
            let Ok(index) = index.trim_start_matches('[').parse::<usize>() else {
                return offset;
            };
            let Some(item) = value.get_ref().get(index) else {
                return offset;
            };
            value = item;
            offset = item.span().start;
        }
        table = value.get_ref().as_table();
    }
    offset
}
