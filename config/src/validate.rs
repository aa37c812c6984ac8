//! Validation of configuration values: ranges, names, contradictions, and the nearest name to a
//! misspelt one.
//!
//! A check names the key it is about and says what would be right. It never stops at the first problem: an operator
//! mends a file once, not once for every mistake in it.

use std::fmt::Display;

use crate::limits::{FILE_BYTES_MAX, Limit, NAME_BYTES_MAX};
use crate::units::Bytes;

/// Problems that are told of. Whoever has mended so many may have mended all, and of each the line is looked for.
pub const PROBLEMS_MAX: usize = 64;

/// A type that a file is read into.
pub trait Validate {
    /// Longest text that it is read from.
    const BYTES_MAX: Bytes = FILE_BYTES_MAX;

    /// Reports everything about `self` that cannot be.
    fn validate(&self, problems: &mut Problems);
}

/// A value that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Its key, with those around it.
    pub key: String,
    /// Why, for a person.
    pub message: String,
}

/// The problems found so far.
#[derive(Debug, Default)]
pub struct Problems {
    /// Prepended to keys, where a whole file is nested in another (`service.config.`).
    prefix: String,
    found: Vec<Problem>,
    /// Beyond [`PROBLEMS_MAX`].
    untold: usize,
}

impl Problems {
    /// Reports that the value at `key` is wrong.
    pub fn add(&mut self, key: impl Display, message: impl Into<String>) {
        if self.found.len() == PROBLEMS_MAX {
            self.untold += 1;
            return;
        }
        self.found.push(Problem { key: format!("{}{key}", self.prefix), message: message.into() });
    }

    /// Whether there are more than are told of: what is dear to look for need not be.
    #[must_use]
    pub fn are_too_many(&self) -> bool {
        self.untold > 0
    }

    /// Reports a value outside its limit.
    pub fn within<T: PartialOrd + Display>(&mut self, key: impl Display, value: &T, limit: &Limit<T>) {
        if *value < limit.min || *value > limit.max {
            self.add(key, format!("must be from {} to {}, not {value}: {}", limit.min, limit.max, limit.reason));
        }
    }

    /// Reports a ring's slots that are outside the limit or no power of two.
    pub fn ring(&mut self, key: impl Display, slots: u32, limit: &Limit<u32>) {
        if slots.is_power_of_two() {
            self.within(key, &slots, limit);
        } else {
            let right = slots.checked_next_power_of_two().unwrap_or(limit.max).clamp(limit.min, limit.max);
            self.add(key, format!("must be a power of two, such as {right}, not {slots}"));
        }
    }

    /// Reports a name that cannot be part of a file name, a table or a metric's label.
    pub fn name(&mut self, key: impl Display, name: &str) {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(allowed) {
            self.add(key, format!("a name has 1 to {NAME_BYTES_MAX} letters, digits, '.', '_' or '-', not {name:?}"));
        } else if name.starts_with(['.', '-']) {
            self.add(key, format!("a name starts with a letter, a digit or '_', not as in {name:?}"));
        }
    }

    /// Runs the checks of a file nested at `key`.
    pub fn nested(&mut self, key: &str, inner: &impl Validate) {
        let outer = self.prefix.len();
        self.prefix.push_str(key);
        self.prefix.push('.');
        inner.validate(self);
        self.prefix.truncate(outer);
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.found.len() + self.untold
    }

    /// Every problem, up to [`PROBLEMS_MAX`].
    #[must_use]
    pub fn into_inner(self) -> Vec<Problem> {
        self.found
    }
}

/// The name among `known` that `wrong` was most likely meant to be, if one is near.
#[must_use]
pub fn nearest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let length = wrong.chars().count();
    let allowed = 1 + length / 3;
    known
        .into_iter()
        .filter_map(|name| match name.strip_prefix(wrong) {
            // Half a name is more likely than a like-sounding other one.
            Some(_) if wrong.len() >= 3 => Some((1, name)),
            // Each character that one has more is an edit; and texts may be of any length.
            _ if name.chars().count().abs_diff(length) > allowed => None,
            _ => Some((edits(wrong, name), name)),
        })
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// Insertions, deletions, replacements and swaps of neighbours that turn `a` into `b` (optimal string alignment).
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                let mut best = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                    best = best.min(rows[i - 2][j - 2] + 1);
                }
                best
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_name_finds_its_neighbour() {
        let known = ["socket", "uids", "max_memory", "max_sessions"];
        assert_eq!(nearest("sokcet", known), Some("socket"));
        assert_eq!(nearest("uid", known), Some("uids"));
        assert_eq!(nearest("max_mem", known), Some("max_memory"));
        assert_eq!(nearest("colour", known), None);
        assert_eq!(nearest(&"x".repeat(1 << 24), known), None);
        assert_eq!(edits("abcd", "acbd"), 1);
        assert_eq!(edits("", "abc"), 3);
    }

    #[test]
    fn names_that_would_leave_their_folder_are_refused() {
        for (name, good) in [
            ("a", true),
            ("job-1.x_y", true),
            ("", false),
            ("..", false),
            ("a/b", false),
            ("-x", false),
            ("ä", false),
            (&"x".repeat(65), false),
        ] {
            let mut problems = Problems::default();
            problems.name("name", name);
            assert_eq!(problems.into_inner().is_empty(), good, "{name:?}");
        }
    }
}
