//! Memory that the host has left for regions.
//!
//! The kernel makes a region's pages when somebody first writes to them. Without memory left the kernel ends a process, or raises
//! SIGBUS if it never overcommits (`vm.overcommit_memory=2`). [`HostMemory`] refuses a region before that, and counts what others
//! have been given and nobody has written yet.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// For how long what the kernel says is taken for true: reading it takes as long as allocating.
const READ_AGAIN_AFTER: Duration = Duration::from_millis(10);

/// Owner of a region's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// The service's, which made the memory: they go with the region, whoever holds the descriptor.
    Service,
    /// The tenant's, which registered it, and keeps it.
    Tenant,
}

/// The limit that leaves the least memory.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Limit {
    /// The host's memory and swap.
    Host,
    /// The kernel's promise at all, as it never overcommits.
    Commit,
    /// A cgroup that the service is in.
    Cgroup(PathBuf),
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Limit::Host => write!(f, "the host's memory (MemAvailable and SwapFree); end jobs or free memory"),
            Limit::Commit => {
                write!(f, "CommitLimit with vm.overcommit_memory=2; raise vm.overcommit_ratio, end jobs or free memory")
            }
            Limit::Cgroup(folder) => write!(
                f,
                "memory.max of the service's cgroup {}; raise MemoryMax= of its unit, end jobs or free memory",
                folder.display()
            ),
        }
    }
}

/// The kernel's reason.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Reading {
    left_bytes: u64,
    limit: Limit,
    /// Pages of shared memory that are there, on the whole host.
    shared_bytes: u64,
}

impl Reading {
    /// From `/proc` and the mount of cgroups (version 2). `None` where the kernel does not say.
    fn of(proc: &Path, cgroups: &Path) -> Option<Self> {
        let meminfo = std::fs::read_to_string(proc.join("meminfo")).ok()?;
        let bytes = |key: &str| meminfo_bytes(&meminfo, key);
        let mut limits = vec![(bytes("MemAvailable")? + bytes("SwapFree").unwrap_or(0), Limit::Host)];
        let overcommit = std::fs::read_to_string(proc.join("sys/vm/overcommit_memory")).unwrap_or_default();
        if overcommit.trim() == "2" {
            limits.push((bytes("CommitLimit")?.saturating_sub(bytes("Committed_AS")?), Limit::Commit));
        }
        limits.extend(cgroup_folders(proc, cgroups).into_iter().filter_map(|folder| {
            let limit = cgroup_limit_bytes(&folder)?;
            Some((limit.saturating_sub(cgroup_held_bytes(&folder)?), Limit::Cgroup(folder)))
        }));
        let (left_bytes, limit) = limits.into_iter().min_by_key(|(bytes, _)| *bytes)?;
        Some(Reading { left_bytes, limit, shared_bytes: bytes("Shmem")? })
    }
}

fn meminfo_bytes(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Folders of the cgroup that this process is in, and of those around it.
fn cgroup_folders(proc: &Path, cgroups: &Path) -> Vec<PathBuf> {
    let own = std::fs::read_to_string(proc.join("self/cgroup")).unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::/")).map(Path::new);
    path.into_iter().flat_map(Path::ancestors).map(|path| cgroups.join(path)).collect()
}

fn cgroup_limit_bytes(folder: &Path) -> Option<u64> {
    // "max" is no limit.
    std::fs::read_to_string(folder.join("memory.max")).ok()?.trim().parse().ok()
}

/// Memory that a cgroup has and cannot give back: without its cache of files.
fn cgroup_held_bytes(folder: &Path) -> Option<u64> {
    let current: u64 = std::fs::read_to_string(folder.join("memory.current")).ok()?.trim().parse().ok()?;
    let stat = std::fs::read_to_string(folder.join("memory.stat")).ok()?;
    let of = |line: &str| {
        let (key, value) = line.split_once(' ')?;
        ["inactive_file", "active_file", "slab_reclaimable"].contains(&key).then(|| value.parse::<u64>().ok())?
    };
    Some(current.saturating_sub(stat.lines().filter_map(of).sum()))
}

/// Memory that this process may use at most: the host's, or the least limit of its cgroups (version 2), with that one's folder.
pub(crate) fn least_limit() -> Option<(u64, Option<PathBuf>)> {
    least_limit_of(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
}

fn least_limit_of(proc: &Path, cgroups: &Path) -> Option<(u64, Option<PathBuf>)> {
    let host = std::fs::read_to_string(proc.join("meminfo")).ok();
    let host = host.and_then(|meminfo| Some((meminfo_bytes(&meminfo, "MemTotal")?, None)));
    let of_cgroups = cgroup_folders(proc, cgroups).into_iter();
    let of_cgroups = of_cgroups.filter_map(|folder| Some((cgroup_limit_bytes(&folder)?, Some(folder))));
    of_cgroups.chain(host).min_by_key(|(bytes, _)| *bytes)
}

/// The same without whose it is.
pub(crate) fn total_bytes() -> Option<u64> {
    least_limit().map(|(bytes, _)| bytes)
}

/// There is no room for a region.
#[derive(Debug, thiserror::Error)]
#[error(
    "{bytes} bytes are more than this host has left: {left_bytes}, without {unwritten_bytes} that are allocated and not \
     written yet and {min_free_bytes} that stay free (limits.min_free_memory). What limits it: {limit}"
)]
pub struct NoRoom {
    bytes: u64,
    left_bytes: u64,
    unwritten_bytes: u64,
    min_free_bytes: u64,
    limit: Limit,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct HostMemory {
    min_free_bytes: u64,
    proc: PathBuf,
    cgroups: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    read: Option<(Instant, Option<Reading>)>,
    /// Bytes of regions that the service made, which may be written or not.
    made_bytes: u64,
    /// Bytes of regions that tenants registered, which are all there.
    registered_bytes: u64,
}

impl HostMemory {
    /// This host's, of which regions leave so many bytes free.
    #[must_use]
    pub fn new(min_free_bytes: u64) -> Arc<Self> {
        Self::reading(min_free_bytes, "/proc".into(), "/sys/fs/cgroup".into())
    }

    /// The same, from other folders than the kernel's.
    pub(crate) fn reading(min_free_bytes: u64, proc: PathBuf, cgroups: PathBuf) -> Arc<Self> {
        Arc::new(HostMemory { min_free_bytes, proc, cgroups, state: Mutex::default() })
    }

    /// Counts a region of so many bytes, until what is returned is dropped.
    ///
    /// # Errors
    /// The service is to make the region, and the host has no room for it.
    pub fn reserve(self: &Arc<Self>, bytes: u64, pages: Pages) -> Result<Reservation, NoRoom> {
        self.reserve_at(bytes, pages, Instant::now())
    }

    /// Counts memory that is there already: another program has made the region.
    #[must_use]
    pub fn reserve_made(self: &Arc<Self>, bytes: u64, pages: Pages) -> Reservation {
        *self.state().bytes_of(pages) += bytes;
        Reservation { memory: Arc::clone(self), bytes, pages }
    }

    fn reserve_at(self: &Arc<Self>, bytes: u64, pages: Pages, now: Instant) -> Result<Reservation, NoRoom> {
        let mut state = self.state();
        if pages == Pages::Service {
            self.check(&mut state, bytes, now)?;
        }
        *state.bytes_of(pages) += bytes;
        Ok(Reservation { memory: Arc::clone(self), bytes, pages })
    }

    fn check(&self, state: &mut State, bytes: u64, now: Instant) -> Result<(), NoRoom> {
        let is_fresh = state.read.as_ref().is_some_and(|(at, _)| now.saturating_duration_since(*at) < READ_AGAIN_AFTER);
        if !is_fresh {
            state.read = Some((now, Reading::of(&self.proc, &self.cgroups)));
        }
        // If the kernel does not say how much there is, quotas alone count.
        let Some((_, Some(reading))) = &state.read else { return Ok(()) };
        // Shared memory that is there and was not registered may be what was allocated here. So memory of other programs has this
        // refuse too little, and never too much.
        let written_bytes = reading.shared_bytes.saturating_sub(state.registered_bytes).min(state.made_bytes);
        let unwritten_bytes = state.made_bytes - written_bytes;
        let needed = bytes.saturating_add(unwritten_bytes).saturating_add(self.min_free_bytes);
        if needed <= reading.left_bytes {
            return Ok(());
        }
        Err(NoRoom {
            bytes,
            left_bytes: reading.left_bytes,
            unwritten_bytes,
            min_free_bytes: self.min_free_bytes,
            limit: reading.limit.clone(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn bytes_of(&mut self, pages: Pages) -> &mut u64 {
        match pages {
            Pages::Service => &mut self.made_bytes,
            Pages::Tenant => &mut self.registered_bytes,
        }
    }
}

/// Room for a region. Given back on drop.
#[derive(Debug)]
pub struct Reservation {
    memory: Arc<HostMemory>,
    bytes: u64,
    pages: Pages,
}

impl Reservation {
    /// For how many bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Maker of the pages.
    #[must_use]
    pub fn pages(&self) -> Pages {
        self.pages
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        *self.memory.state().bytes_of(self.pages) -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A host in files.
    struct Host {
        folder: tempfile::TempDir,
        memory: Arc<HostMemory>,
        now: Instant,
    }

    impl Host {
        fn new(min_free_mib: u64) -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            for folders in ["proc/self", "proc/sys/vm", "cgroup/system/mccs"] {
                fs::create_dir_all(folder.path().join(folders)).expect("made");
            }
            let memory =
                HostMemory::reading(min_free_mib * MIB, folder.path().join("proc"), folder.path().join("cgroup"));
            Host { folder, memory, now: Instant::now() }
        }

        fn write(&self, name: &str, text: impl AsRef<[u8]>) {
            fs::write(self.folder.path().join(name), text).expect("written");
        }

        /// Sets the kernel's figures from now on.
        fn has(&mut self, available_mib: u64, shared_mib: u64) {
            let [available, shared] = [available_mib, shared_mib].map(|mib| mib * 1024);
            self.write(
                "proc/meminfo",
                format!(
                    "MemTotal: 8388608 kB\nMemAvailable: {available} kB\nSwapFree: 0 kB\nShmem: {shared} kB\nShmemHugePages: 7 kB\n\
                     CommitLimit: 4194304 kB\nCommitted_AS: 4087808 kB\n"
                ),
            );
            self.now += READ_AGAIN_AFTER;
        }

        fn reserve(&self, mib: u64, pages: Pages) -> Result<Reservation, String> {
            self.memory.reserve_at(mib * MIB, pages, self.now).map_err(|refused| refused.to_string())
        }
    }

    #[test]
    fn what_was_allocated_and_not_written_is_there_for_nobody_else() {
        let mut host = Host::new(10);
        host.has(100, 0);
        let first = host.reserve(60, Pages::Service).expect("room");
        let refused = host.reserve(31, Pages::Service).expect_err("90 are left, of which 60 are not written yet");
        assert!(refused.starts_with(&format!("{} bytes", 31 * MIB)) && refused.contains("MemAvailable"), "{refused}");
        drop(host.reserve(30, Pages::Service).expect("all that is left"));
        // Half of it is written.
        host.has(70, 30);
        assert!(host.reserve(31, Pages::Service).is_err());
        drop(host.reserve(30, Pages::Service).expect("all that is left"));
        // Registered memory of a tenant is there, and none of what was written.
        let registered = host.reserve(20, Pages::Tenant).expect("never refused");
        host.has(50, 50);
        assert!(host.reserve(11, Pages::Service).is_err());
        drop(host.reserve(10, Pages::Service).expect("all that is left"));
        drop(registered);
        assert!(host.reserve(20, Pages::Service).is_ok(), "others may have had what was registered");
        drop(first);
        host.has(100, 0);
        assert!(host.reserve(90, Pages::Service).is_ok());
        assert!(host.reserve(u64::MAX / MIB, Pages::Service).is_err());
    }

    #[test]
    fn the_kernel_is_asked_again_in_a_moment() {
        let mut host = Host::new(0);
        host.has(100, 0);
        drop(host.reserve(100, Pages::Service).expect("room"));
        let before = host.now;
        host.has(1, 0);
        assert!(host.memory.reserve_at(100 * MIB, Pages::Service, before).is_ok());
        assert!(host.reserve(2, Pages::Service).is_err());
    }

    #[test]
    fn a_kernel_that_never_overcommits_has_what_it_has_not_promised() {
        let mut host = Host::new(0);
        host.has(1000, 0);
        for (mode, has_room) in [("0\n", true), ("1\n", true), ("2\n", false)] {
            host.write("proc/sys/vm/overcommit_memory", mode);
            host.now += READ_AGAIN_AFTER;
            assert_eq!(host.reserve(105, Pages::Service).is_ok(), has_room, "{mode}");
            assert!(host.reserve(104, Pages::Service).is_ok(), "{mode}");
        }
        assert!(host.reserve(105, Pages::Service).expect_err("promised").contains("vm.overcommit_ratio"));
    }

    #[test]
    fn a_cgroup_around_the_services_may_have_the_least() {
        let mut host = Host::new(0);
        host.has(1000, 0);
        host.write("proc/self/cgroup", "1:name=systemd:/\n0::/system/mccs\n");
        for (folder, limit, current) in
            [("system/mccs", "max".to_owned(), 90), ("system", (300 * MIB).to_string(), 280)]
        {
            host.write(&format!("cgroup/{folder}/memory.max"), format!("{limit}\n"));
            host.write(&format!("cgroup/{folder}/memory.current"), format!("{}\n", current * MIB));
            let stat = format!("anon 5\ninactive_file {}\nactive_file {}\nshmem 4\n", 50 * MIB, 30 * MIB);
            host.write(&format!("cgroup/{folder}/memory.stat"), stat);
        }
        host.now += READ_AGAIN_AFTER;
        let refused = host.reserve(101, Pages::Service).expect_err("200 of 300 are held");
        assert!(refused.contains("cgroup/system;") && refused.contains("MemoryMax="), "{refused}");
        assert!(host.reserve(100, Pages::Service).is_ok());
    }

    #[test]
    fn this_host_has_room_for_a_page() {
        assert!(HostMemory::new(0).reserve(4096, Pages::Service).is_ok());
        assert!(total_bytes().is_some_and(|bytes| bytes > MIB));
        // If nothing is known quotas alone count.
        let nowhere = HostMemory::reading(0, "/nonexistent".into(), "/nonexistent".into());
        assert!(nowhere.reserve(u64::MAX / 2, Pages::Service).is_ok());
    }
}
