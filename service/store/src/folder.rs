//! A store in a folder that services of one machine share.
//!
//! One file has all keys and leases. It is replaced as a whole, under a lock (`flock`) of the folder, so that a process that dies
//! half-way leaves what was there. Leases run on the machine's clock since it was started; they end with it.
//!
//! Deliberately absent: folders of network file systems, whose locks and clocks promise less.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::{
    Change, Entry, Guard, Keys, LeaseId, Outcome, Revision, Snapshot, Store, StoreError, Transaction, VALUE_BYTES_MAX,
    Watch, WatchError, Write,
};

const FILE: &str = "store.json";
const NEXT: &str = "store.json.next";
const LOCK: &str = "lock";
/// Bytes of the file: far more than a cluster has in common.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// See the module's documentation.
pub struct FolderStore {
    folder: PathBuf,
    boot: String,
}

/// The file.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    revision: Revision,
    keys: BTreeMap<String, Kept>,
    leases: BTreeMap<u64, Lease>,
    /// Which start of the machine leases are of.
    boot: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    value: String,
    created: Revision,
    modified: Revision,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lease: Option<LeaseId>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Lease {
    ttl_ms: u64,
    /// When it ends, by the clock that counts from the machine's start.
    ends_ms: u64,
}

impl FolderStore {
    /// The store in a folder, which is made with the first call if it is not there.
    #[must_use]
    pub fn open(folder: &Path) -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
        FolderStore { folder: folder.to_owned(), boot }
    }

    /// Works on the state, alone among all processes. Changes are kept when `work` returns.
    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> Result<T, StoreError> {
        fs::create_dir_all(&self.folder).map_err(|error| failed(&self.folder, &error))?;
        let path = self.folder.join(LOCK);
        let lock = File::create(&path).map_err(|error| failed(&path, &error))?;
        let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| failed(&path, &error.into()))?;
        let mut state = self.load()?;
        let before = state.expire(&self.boot);
        let leases: Vec<_> = state.leases.iter().map(|(id, lease)| (*id, lease.ends_ms)).collect();
        let value = work(&mut state);
        let is_new = state.revision != before
            || !state.leases.iter().map(|(id, lease)| (*id, lease.ends_ms)).eq(leases.iter().copied());
        if is_new {
            self.keep(&state)?;
        }
        Ok(value)
    }

    fn load(&self) -> Result<State, StoreError> {
        let path = self.folder.join(FILE);
        match fs::metadata(&path) {
            Ok(found) if found.len() > FILE_BYTES_MAX => return Err(failed(&path, &ErrorKind::FileTooLarge.into())),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(State::default()),
            Ok(_) | Err(_) => {}
        }
        let text = fs::read(&path).map_err(|error| failed(&path, &error))?;
        serde_json::from_slice(&text).map_err(|error| StoreError::Invalid(format!("{}: {error}", path.display())))
    }

    fn keep(&self, state: &State) -> Result<(), StoreError> {
        let next = self.folder.join(NEXT);
        let text = serde_json::to_vec(state).map_err(|error| StoreError::Invalid(error.to_string()))?;
        if text.len() as u64 > FILE_BYTES_MAX {
            return Err(StoreError::Full(format!("{} has more than {FILE_BYTES_MAX} bytes", next.display())));
        }
        let written = File::create(&next).and_then(|mut file| {
            file.write_all(&text)?;
            file.sync_all()
        });
        let replaced = written.and_then(|()| fs::rename(&next, self.folder.join(FILE)));
        replaced.map_err(|error| failed(&next, &error))
    }
}

fn failed(path: &Path, error: &std::io::Error) -> StoreError {
    let reason = format!("{}: {error}", path.display());
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => StoreError::Full(reason),
        ErrorKind::PermissionDenied => StoreError::Refused(reason),
        _ => StoreError::Unavailable(reason),
    }
}

/// Since the machine was started, also while it slept.
fn clock_ms() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default();
    now.as_millis() as u64
}

impl State {
    /// Ends leases whose time is over. Returns the revision that was kept.
    fn expire(&mut self, boot: &str) -> Revision {
        let (before, now) = (self.revision, clock_ms());
        let is_other_boot = self.boot != boot;
        self.boot = boot.to_owned();
        let ended: Vec<u64> =
            self.leases.iter().filter(|(_, lease)| is_other_boot || lease.ends_ms <= now).map(|(id, _)| *id).collect();
        ended.into_iter().for_each(|id| self.end(LeaseId(id)));
        before
    }

    fn end(&mut self, lease: LeaseId) {
        self.leases.remove(&lease.0);
        let before = self.keys.len();
        self.keys.retain(|_, kept| kept.lease != Some(lease));
        if self.keys.len() != before {
            self.revision.0 += 1;
        }
    }

    fn holds(&self, guard: &Guard) -> bool {
        match guard {
            Guard::Absent(key) => !self.keys.contains_key(key),
            Guard::Created(key, at) => self.keys.get(key).is_some_and(|kept| kept.created == *at),
            Guard::Modified(key, at) => self.keys.get(key).is_some_and(|kept| kept.modified == *at),
        }
    }

    fn commit(&mut self, transaction: &Transaction) -> Result<Outcome, StoreError> {
        if !transaction.guards.iter().all(|guard| self.holds(guard)) {
            return Ok(Outcome::Conflict);
        }
        for write in &transaction.writes {
            if let Write::Put { key, value, lease } = write {
                if value.len() > VALUE_BYTES_MAX {
                    return Err(too_large(key, value));
                }
                if lease.is_some_and(|lease| !self.leases.contains_key(&lease.0)) {
                    return Err(StoreError::Refused(format!("{key} is to go with a lease that has ended")));
                }
            }
        }
        self.revision.0 += 1;
        let modified = self.revision;
        for write in &transaction.writes {
            match write {
                Write::Put { key, value, lease } => {
                    let created = self.keys.get(key).map_or(modified, |kept| kept.created);
                    let value = STANDARD.encode(value);
                    self.keys.insert(key.clone(), Kept { value, created, modified, lease: *lease });
                }
                Write::Delete { key } => {
                    self.keys.remove(key);
                }
            }
        }
        Ok(Outcome::Done(modified))
    }

    fn entry(&self, key: &str) -> Result<Entry, StoreError> {
        let kept = self.keys.get(key).ok_or_else(|| StoreError::Invalid(format!("{key} is not there")))?;
        let value = STANDARD.decode(&kept.value);
        let value = value.map_err(|error| StoreError::Invalid(format!("{key}: {error}")))?;
        let Kept { created, modified, lease, .. } = *kept;
        Ok(Entry { key: key.to_owned(), value, created, modified, lease })
    }
}

pub(crate) fn too_large(key: &str, value: &[u8]) -> StoreError {
    StoreError::Refused(format!("{key} has {} bytes, more than {VALUE_BYTES_MAX}", value.len()))
}

impl Store for FolderStore {
    fn read(&mut self, keys: Keys<'_>) -> Result<Snapshot, StoreError> {
        self.with(|state| {
            let is_one = |key: &&String| match keys {
                Keys::Only(only) => *key == only,
                Keys::Under(prefix) => key.starts_with(prefix),
            };
            let entries: Result<_, _> = state.keys.keys().filter(is_one).map(|key| state.entry(key)).collect();
            Ok(Snapshot { revision: state.revision, entries: entries? })
        })?
    }

    fn commit(&mut self, transaction: &Transaction) -> Result<Outcome, StoreError> {
        self.with(|state| state.commit(transaction))?
    }

    fn grant(&mut self, ttl: Duration) -> Result<LeaseId, StoreError> {
        let ttl_ms = ttl.as_millis().div_ceil(1000) as u64 * 1000;
        self.with(|state| {
            let id = state.leases.last_key_value().map_or(0, |(id, _)| *id).max(state.revision.0) + 1;
            state.revision.0 += 1;
            state.leases.insert(id, Lease { ttl_ms, ends_ms: clock_ms() + ttl_ms });
            LeaseId(id)
        })
    }

    fn keep_alive(&mut self, lease: LeaseId) -> Result<Option<Duration>, StoreError> {
        self.with(|state| {
            let kept = state.leases.get_mut(&lease.0)?;
            kept.ends_ms = clock_ms() + kept.ttl_ms;
            Some(Duration::from_millis(kept.ttl_ms))
        })
    }

    fn revoke(&mut self, lease: LeaseId) -> Result<(), StoreError> {
        self.with(|state| state.end(lease))
    }

    fn watch(&mut self, after: Revision) -> Result<Box<dyn Watch>, StoreError> {
        self.with(|_| ())?;
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .and_then(|inotify| inotify.add_watch(&self.folder, AddWatchFlags::IN_MOVED_TO).map(|_| inotify))
            .map_err(|error| failed(&self.folder, &error.into()))?;
        let store = FolderStore { folder: self.folder.clone(), boot: self.boot.clone() };
        // Keys that have gone since then are not known any more: only a watch from now on knows all.
        let (revision, seen) = store.with(|state| {
            let seen = state.keys.iter().filter(|(_, kept)| kept.modified <= after);
            (state.revision, seen.map(|(key, kept)| (key.clone(), kept.modified)).collect())
        })?;
        Ok(Box::new(FolderWatch { store, inotify, seen, is_behind: revision > after }))
    }
}

struct FolderWatch {
    store: FolderStore,
    inotify: Inotify,
    /// Keys that were told, and when they were put.
    seen: BTreeMap<String, Revision>,
    /// There were changes before the watch began, of which those that have removed keys are not known.
    is_behind: bool,
}

impl Watch for FolderWatch {
    fn next(&mut self, timeout: Duration) -> Result<Vec<Change>, WatchError> {
        if std::mem::take(&mut self.is_behind) {
            return Err(WatchError::Compacted);
        }
        let until = Instant::now() + timeout;
        loop {
            while self.inotify.read_events().is_ok_and(|events| !events.is_empty()) {}
            let (changes, ends_ms) = self.store.with(|state| untold_changes(state, &mut self.seen))?;
            let left = until.saturating_duration_since(Instant::now());
            let changes = changes?;
            if !changes.is_empty() || left.is_zero() {
                return Ok(changes);
            }
            // The next lease may end before anybody writes.
            let lease = ends_ms.map(|ends| Duration::from_millis(ends.saturating_sub(clock_ms()) + 1));
            let wait = lease.map_or(left, |lease| lease.min(left)).max(Duration::from_millis(1));
            let wait = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
            let _ = poll(&mut [PollFd::new(self.inotify.as_fd(), PollFlags::POLLIN)], wait);
        }
    }
}

/// Changes since it was told, and when the next lease ends.
fn untold_changes(
    state: &State,
    seen: &mut BTreeMap<String, Revision>,
) -> (Result<Vec<Change>, StoreError>, Option<u64>) {
    let gone: Vec<String> = seen.keys().filter(|key| !state.keys.contains_key(*key)).cloned().collect();
    let mut changes = Vec::new();
    for key in gone {
        seen.remove(&key);
        changes.push(Ok(Change { key, entry: None }));
    }
    for (key, kept) in &state.keys {
        if seen.insert(key.clone(), kept.modified) != Some(kept.modified) {
            changes.push(state.entry(key).map(|entry| Change { key: key.clone(), entry: Some(entry) }));
        }
    }
    (changes.into_iter().collect(), state.leases.values().map(|lease| lease.ends_ms).min())
}
