//! Controller's history on disk, which outlives the service.
//!
//! Lines of JSON, an entry each; an entry that has gone on since has another line, and the last one counts. Lines are added as long as
//! there is room; then the entries that the controller still knows take the place of all. So are they written anew after a line was written
//! by half, as when a disk is full or a host loses its power.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mccs_controller::history::{Entry, EntryKind, History, Went};
use serde::{Deserialize, Serialize};

use super::kept_file::{put_aside, read, replace};
use super::unix_time;

/// Bytes of the file: some entries more than the controller knows, for who reads the file.
const FILE_BYTES_MAX: usize = 16 << 20;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    number: u64,
    /// When, in milliseconds of the Unix epoch.
    unix_ms: u64,
    what: String,
    why: String,
    went: Went,
    /// Earlier versions wrote so that it is of a single communicator.
    #[serde(default, skip_serializing)]
    of_comm: bool,
    #[serde(default)]
    kind: EntryKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    by: Option<String>,
}

/// See the module's documentation.
pub(super) struct HistoryStore {
    path: PathBuf,
    bytes_max: usize,
    /// Bytes of the file; `None` where it is to be written anew.
    bytes: Option<usize>,
    /// It could not be written, which was said.
    is_failing: bool,
}

impl HistoryStore {
    pub(super) fn new(path: PathBuf) -> Self {
        HistoryStore { path, bytes_max: FILE_BYTES_MAX, bytes: None, is_failing: false }
    }

    /// Kept entries, in order. Nothing, where there is no file yet.
    ///
    /// # Errors
    /// It is there and cannot be read: in words. The file is put aside.
    pub(super) fn load(&mut self, now: Instant) -> Result<Vec<Entry>, String> {
        let Some(text) = read(&self.path, 2 * self.bytes_max as u64)? else { return Ok(Vec::new()) };
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let mut entries = BTreeMap::new();
        for line in text[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let entry = entry_of(line, now).map_err(|error| put_aside(&self.path, &error))?;
            entries.insert(entry.number, entry);
        }
        self.bytes = Some(whole).filter(|whole| *whole == text.len());
        Ok(entries.into_values().collect())
    }

    /// Keeps what is news of a history.
    ///
    /// # Errors
    /// In words, once: it is tried again with the next news.
    pub(super) fn store(&mut self, history: &mut History, now: Instant) -> Result<(), String> {
        let news = lines(history.take_news(), now);
        if news.is_empty() {
            return Ok(());
        }
        let added = self.bytes.map(|bytes| bytes + news.len()).filter(|bytes| *bytes <= self.bytes_max);
        let (written, bytes) = match added {
            Some(bytes) => {
                let file = OpenOptions::new().append(true).create(true).open(&self.path);
                (file.and_then(|mut file| file.write_all(&news)), bytes)
            }
            None => {
                let all = lines(history.iter(), now);
                (replace(&self.path, &all), all.len())
            }
        };
        // Whatever was written by half is written anew.
        self.bytes = written.is_ok().then_some(bytes);
        match written {
            Ok(()) => {
                self.is_failing = false;
                Ok(())
            }
            Err(_) if self.is_failing => Ok(()),
            Err(error) => {
                self.is_failing = true;
                Err(format!("{} cannot be written: {error}", self.path.display()))
            }
        }
    }
}

fn lines<'a>(entries: impl IntoIterator<Item = &'a Entry>, now: Instant) -> Vec<u8> {
    let line = |entry| [line_of(entry, now), vec![b'\n']].concat();
    entries.into_iter().flat_map(line).collect()
}

/// An entry as it is kept.
pub(super) fn line_of(entry: &Entry, now: Instant) -> Vec<u8> {
    let Entry { number, at, what, why, went, kind, by } = entry.clone();
    let ago_ms = now.saturating_duration_since(at).as_millis() as u64;
    let unix_ms = (unix_time().as_millis() as u64).saturating_sub(ago_ms);
    let line = Line { number, unix_ms, what, why, went, of_comm: false, kind, by };
    // Text and numbers can be written.
    serde_json::to_vec(&line).unwrap_or_default()
}

/// An entry that was kept.
///
/// # Errors
/// The mistake.
pub(super) fn entry_of(line: &[u8], now: Instant) -> Result<Entry, String> {
    let line = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    let Line { number, unix_ms, what, why, went, of_comm, kind, by } = line;
    let kind = if of_comm { EntryKind::Communicator } else { kind };
    // By this clock: another host's, or one that was set since, may be ahead.
    let ago = Duration::from_millis((unix_time().as_millis() as u64).saturating_sub(unix_ms));
    let at = now.checked_sub(ago).unwrap_or(now);
    Ok(Entry { number, at, what, why, went, kind, by })
}

#[cfg(test)]
mod tests {
    use mccs_controller::history::HISTORY_MAX;

    use super::*;

    /// A history and what keeps it, as after a start.
    fn start(path: &std::path::Path, now: Instant) -> (HistoryStore, History) {
        let (mut store, mut history) = (HistoryStore::new(path.to_owned()), History::default());
        history.remember(store.load(now).unwrap());
        (store, history)
    }

    fn told(history: &History) -> Vec<(u64, String, Went)> {
        history.iter().map(|entry| (entry.number, entry.what.clone(), entry.went.clone())).collect()
    }

    #[test]
    fn what_was_done_is_known_again_and_how_it_went() {
        let folder = tempfile::tempdir().unwrap();
        let (path, now) = (folder.path().join("history.jsonl"), Instant::now());
        let (mut store, mut history) = start(&path, now);
        let first = history.note("first", "why", Went::Pending, now);
        store.store(&mut history, now).unwrap();
        history.went(first, Went::DoneBut("one".into()));
        history.note("second", "", Went::Failed("no\nway".into()), now);
        store.store(&mut history, now).unwrap();
        let later = now + Duration::from_secs(5);
        let (mut store, mut again) = start(&path, later);
        assert_eq!(told(&again), told(&history));
        let at = again.iter().next().unwrap().at;
        assert!(later.duration_since(at) < Duration::from_secs(5) && at <= later, "by the wall clock, not the test's");
        again.note("third", "", Went::Done, later);
        store.store(&mut again, later).unwrap();
        let (_, last) = start(&path, later);
        assert_eq!(told(&last).iter().map(|(number, ..)| *number).collect::<Vec<_>>(), [1, 2, 3]);
    }

    #[test]
    fn a_line_that_was_written_by_half_is_left_out_and_the_file_mended() {
        let folder = tempfile::tempdir().unwrap();
        let (path, now) = (folder.path().join("history.jsonl"), Instant::now());
        let (mut store, mut history) = start(&path, now);
        history.note("first", "", Went::Done, now);
        history.note("second", "", Went::Done, now);
        store.store(&mut history, now).unwrap();
        let whole = std::fs::read(&path).unwrap();
        let first_line = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        for length in first_line..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            let (mut store, mut history) = start(&path, now);
            assert_eq!(told(&history).len(), 1, "{length}");
            history.note("another", "", Went::Done, now);
            store.store(&mut history, now).unwrap();
            assert_eq!(told(&start(&path, now).1), told(&history), "{length}");
        }
    }

    #[test]
    fn the_file_has_a_bound_and_what_is_none_of_ours_is_put_aside() {
        let folder = tempfile::tempdir().unwrap();
        let (path, now) = (folder.path().join("history.jsonl"), Instant::now());
        let (mut store, mut history) = start(&path, now);
        store.bytes_max = 100 * HISTORY_MAX;
        for number in 0..3 * HISTORY_MAX {
            history.note(format!("{number:050}"), "", Went::Done, now);
            store.store(&mut history, now).unwrap();
            assert!(std::fs::metadata(&path).unwrap().len() <= 200 * HISTORY_MAX as u64);
        }
        assert_eq!(told(&start(&path, now).1), told(&history));
        std::fs::write(&path, "host = \"a\"\n").unwrap();
        let why = HistoryStore::new(path.clone()).load(now).unwrap_err();
        assert!(why.contains("history.jsonl.unreadable") && !path.exists(), "{why}");
    }

    #[test]
    fn a_file_that_cannot_be_written_is_said_once_and_written_whole_when_it_can() {
        let folder = tempfile::tempdir().unwrap();
        let (path, now) = (folder.path().join("missing").join("history.jsonl"), Instant::now());
        let (mut store, mut history) = start(&path, now);
        history.note("first", "", Went::Done, now);
        assert!(store.store(&mut history, now).unwrap_err().contains("cannot be written"));
        history.note("second", "", Went::Done, now);
        store.store(&mut history, now).unwrap();
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        history.note("third", "", Went::Done, now);
        store.store(&mut history, now).unwrap();
        assert_eq!(told(&start(&path, now).1), told(&history));
    }
}
