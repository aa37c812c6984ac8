//! History of the controller: what was done, why, by whom, and how it went. It keeps the last so
//! many of each kind. Operators' acts, events of the cluster and orders of single communicators
//! push out none of each other: tenants make communicators as they like, and hosts come and go by
//! the hundred in a bad hour.

use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// Entries of each kind that are kept.
pub const HISTORY_MAX: usize = 512;
/// Bytes of a text of an entry; what is longer is cut.
const TEXT_BYTES_MAX: usize = 2048;

/// How something went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Went {
    /// It is under way.
    Pending,
    /// As it was to.
    Done,
    /// As it was to, but for some communicators: which, and why.
    DoneBut(String),
    /// It is not in force, and why.
    Failed(String),
}

/// Authors of entries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// An operator's, by a command or a file.
    Act,
    /// Something happened in the cluster.
    #[default]
    Event,
    /// The controller's, of a single communicator.
    Communicator,
}

/// Something that was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its number; ascends.
    pub number: u64,
    /// When.
    pub at: Instant,
    /// The fault.
    pub what: String,
    /// Why.
    pub why: String,
    /// How it went.
    pub went: Went,
    /// Its author.
    pub kind: EntryKind,
    /// The operator, where one did it: user and command, or file.
    pub by: Option<String>,
}

/// Why something is done, and which operator wants it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cause {
    /// Why.
    pub why: String,
    /// User and command, or file.
    pub by: Option<String>,
}

impl Cause {
    /// An operator's word, or file.
    #[must_use]
    pub fn of_operator(why: &str, by: &str) -> Self {
        Cause { why: why.to_owned(), by: Some(by.to_owned()) }
    }

    /// No operator's.
    #[must_use]
    pub fn of_cluster(why: &str) -> Self {
        Cause { why: why.to_owned(), by: None }
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct History {
    entries: VecDeque<Entry>,
    next: u64,
    /// Numbers of those that are other than when they were last taken to be kept.
    untold: BTreeSet<u64>,
}

impl History {
    /// Knows entries of an earlier life, in order; before anything is noted.
    pub fn remember(&mut self, entries: impl IntoIterator<Item = Entry>) {
        for entry in entries.into_iter().filter(|entry| (1..u64::MAX).contains(&entry.number)) {
            self.next = entry.number - 1;
            let is_pending = entry.went == Went::Pending;
            let number = self.add(entry);
            self.untold.remove(&number);
            if is_pending {
                self.went(number, Went::Failed("its controller ended before it was heard how it went".to_owned()));
            }
        }
    }

    /// Numbers up to that one were given by others.
    pub fn go_on_behind(&mut self, number: u64) {
        self.next = self.next.max(number);
    }

    /// Those that are other than when this was last asked.
    pub fn take_news(&mut self) -> Vec<&Entry> {
        let numbers = std::mem::take(&mut self.untold);
        self.entries.iter().filter(|entry| numbers.contains(&entry.number)).collect()
    }

    /// Notes something that happened in the cluster. Returns its number.
    pub fn note(&mut self, what: impl Into<String>, why: impl Into<String>, went: Went, now: Instant) -> u64 {
        let (kind, by) = (EntryKind::Event, None);
        self.add(Entry { number: 0, at: now, what: what.into(), why: why.into(), went, kind, by })
    }

    /// Notes what was done for a cause: an operator's act, where one is the cause. Returns its number.
    pub fn note_caused(&mut self, what: impl Into<String>, cause: &Cause, went: Went, now: Instant) -> u64 {
        let (why, by) = (cause.why.clone(), cause.by.clone());
        let kind = if by.is_some() { EntryKind::Act } else { EntryKind::Event };
        self.add(Entry { number: 0, at: now, what: what.into(), why, went, kind, by })
    }

    /// Notes something of a single communicator. Returns its number.
    pub fn note_of_comm(&mut self, what: impl Into<String>, why: impl Into<String>, went: Went, now: Instant) -> u64 {
        let (kind, by) = (EntryKind::Communicator, None);
        self.add(Entry { number: 0, at: now, what: what.into(), why: why.into(), went, kind, by })
    }

    /// The entry gets the next number.
    fn add(&mut self, entry: Entry) -> u64 {
        self.next += 1;
        let of_its_kind = |other: &Entry| other.kind == entry.kind;
        if self.entries.iter().filter(|other| of_its_kind(other)).count() >= HISTORY_MAX {
            let oldest = self.entries.iter().position(of_its_kind);
            let forgotten = oldest.and_then(|at| self.entries.remove(at));
            forgotten.iter().for_each(|entry| _ = self.untold.remove(&entry.number));
        }
        let Entry { at, what, why, went, kind, by, .. } = entry;
        let (what, why, went, by) = (cut(what), cut(why), cut_went(went), by.map(cut));
        self.entries.push_back(Entry { number: self.next, at, what, why, went, kind, by });
        self.untold.insert(self.next);
        self.next
    }

    /// Says how something went that is not forgotten.
    pub fn went(&mut self, number: u64, went: Went) {
        if let Ok(place) = self.entries.binary_search_by_key(&number, |entry| entry.number) {
            self.entries[place].went = cut_went(went);
            self.untold.insert(number);
        }
    }

    /// From the oldest on.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter()
    }
}

fn cut_went(went: Went) -> Went {
    match went {
        Went::Failed(reason) => Went::Failed(cut(reason)),
        Went::DoneBut(exceptions) => Went::DoneBut(cut(exceptions)),
        went => went,
    }
}

fn cut(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        let end = (0..=TEXT_BYTES_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_are_kept_and_texts_are_cut() {
        let (mut history, now) = (History::default(), Instant::now());
        let first = history.note("first", "", Went::Pending, now);
        for number in 0..HISTORY_MAX {
            history.note("x".repeat(number * 100), "why", Went::Pending, now);
        }
        history.went(first, Went::Done);
        history.went(first + 1, Went::Failed("ä".repeat(TEXT_BYTES_MAX)));
        let entries: Vec<_> = history.iter().collect();
        assert_eq!((entries.len(), entries[0].number), (HISTORY_MAX, first + 1));
        assert!(matches!(&entries[0].went, Went::Failed(reason) if reason.len() <= TEXT_BYTES_MAX));
        assert!(entries.iter().all(|entry| entry.what.len() <= TEXT_BYTES_MAX));
    }

    #[test]
    fn communicators_and_hosts_that_come_and_go_push_out_nothing_of_operators() {
        let (mut history, now) = (History::default(), Instant::now());
        let cause = Cause::of_operator("an operator asked", "root (uid 0): mccsctl policy apply p.toml");
        let applied = history.note_caused("policy", &cause, Went::Done, now);
        (0..2 * HISTORY_MAX).for_each(|_| _ = history.note("host lost", "", Went::Done, now));
        let act = history.iter().next().expect("kept").clone();
        assert_eq!((act.number, act.by), (applied, cause.by.clone()));
        let (mut history, now) = (History::default(), Instant::now());
        let applied = history.note_caused("policy", &cause, Went::Done, now);
        let orders: Vec<u64> =
            (0..2 * HISTORY_MAX).map(|_| history.note_of_comm("order", "", Went::Done, now)).collect();
        let kept: Vec<u64> = history.iter().map(|entry| entry.number).collect();
        assert_eq!(kept, [&[applied], &orders[HISTORY_MAX..]].concat());
        let mut next = History::default();
        next.remember(history.iter().cloned().collect::<Vec<_>>());
        next.note_of_comm("order", "", Went::Done, now);
        assert_eq!(
            next.iter().map(|entry| entry.number).take(2).collect::<Vec<_>>(),
            [applied, orders[HISTORY_MAX + 1]]
        );
    }

    #[test]
    fn news_are_what_was_noted_or_went_and_numbers_go_on() {
        let (mut history, now) = (History::default(), Instant::now());
        let numbers =
            |history: &mut History| -> Vec<u64> { history.take_news().into_iter().map(|entry| entry.number).collect() };
        let first = history.note("first", "", Went::Pending, now);
        let second = history.note("second", "", Went::Pending, now);
        assert_eq!((numbers(&mut history), numbers(&mut history)), (vec![first, second], vec![]));
        history.went(first, Went::Done);
        assert_eq!(numbers(&mut history), [first]);
        let entries: Vec<Entry> = history.iter().cloned().collect();
        let mut next = History::default();
        next.remember(entries.clone());
        next.go_on_behind(1);
        let third = next.note("third", "", Went::Done, now);
        assert_eq!(
            (third, numbers(&mut next)),
            (3, vec![second, third]),
            "of what was under way nothing more is heard"
        );
        next.go_on_behind(8);
        assert_eq!((next.note("another", "", Went::Done, now), numbers(&mut next)), (9, vec![9]));
        assert_eq!(next.iter().next(), entries.first());
        assert!(matches!(&next.iter().nth(1).unwrap().went, Went::Failed(why) if why.contains("ended")));
    }
}
