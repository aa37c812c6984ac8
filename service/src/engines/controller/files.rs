//! The operator's files, read again when they change.
//!
//! Their folders are watched, not the files: editors put another file in the place of the old one. A moment after the last
//! change both are read, so that two that are changed together are checked together.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use crate::controller::basis::Text;

/// How long nothing has to change before files are read.
const QUIET_TIME: Duration = Duration::from_millis(100);
/// Bytes of a file: a topology of ten thousand hosts has two million.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// What has changed.
pub(super) struct Changed {
    pub(super) topology: Option<Text>,
    pub(super) policy: Option<Text>,
    /// Files, and why they could not be read.
    pub(super) unreadable: Vec<(String, String)>,
}

struct File {
    path: PathBuf,
    /// As it was last read; none if it could not be.
    last: Option<String>,
}

/// See the module's documentation.
pub(super) struct Files {
    topology: File,
    policy: File,
    inotify: Option<Inotify>,
    read_at: Option<Instant>,
}

impl Files {
    /// Both are read at the first [`Files::changed`].
    pub(super) fn new(topology: PathBuf, policy: PathBuf, now: Instant) -> Self {
        let inotify = watch(&[&topology, &policy]);
        let inotify = inotify.inspect_err(|error| {
            tracing::warn!(%error, "policy.toml and topology.toml are not watched; `mccsctl policy apply` still works");
        });
        let file = |path| File { path, last: None };
        Files { topology: file(topology), policy: file(policy), inotify: inotify.ok(), read_at: Some(now) }
    }

    /// Readable when something has changed.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    /// When [`Files::changed`] is next due.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.read_at
    }

    /// What has changed, a moment ago.
    pub(super) fn changed(&mut self, now: Instant) -> Option<Changed> {
        // Whatever happened in the folders: what counts is what is read.
        let events = self.inotify.as_ref().and_then(|inotify| inotify.read_events().ok());
        if events.is_some_and(|events| !events.is_empty()) && self.read_at.is_none_or(|at| at > now) {
            self.read_at = Some(now + QUIET_TIME);
        }
        self.read_at.take_if(|at| *at <= now)?;
        let mut unreadable = Vec::new();
        let mut read = |file: &mut File| match file.read() {
            Ok(text) => text,
            Err(error) => {
                unreadable.push((file.path.display().to_string(), error.to_string()));
                None
            }
        };
        let (topology, policy) = (read(&mut self.topology), read(&mut self.policy));
        Some(Changed { topology, policy, unreadable })
    }
}

impl File {
    /// Its text, if it is another than last time.
    fn read(&mut self) -> std::io::Result<Option<Text>> {
        if std::fs::metadata(&self.path)?.len() > FILE_BYTES_MAX {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        let text = std::fs::read_to_string(&self.path)?;
        if self.last.as_ref() == Some(&text) {
            return Ok(None);
        }
        self.last = Some(text.clone());
        Ok(Some(Text { name: self.path.display().to_string(), text }))
    }
}

fn watch(paths: &[&Path]) -> nix::Result<Inotify> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
    let changes = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_CREATE;
    for folder in paths.iter().filter_map(|path| path.parent()) {
        inotify.add_watch(folder, changes)?;
    }
    Ok(inotify)
}
