//! Holdings of a service's process: descriptors, resident pages, and pages of tenants.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Memory that counts against tenants' quotas, as the service names it.
const OF_TENANTS: [&str; 4] =
    ["/memfd:mccs-region", "/memfd:mccs-shm-exchange", "/memfd:mccs-port-channels", "/memfd:mccs-put-frames"];
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Open descriptors.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("descriptors").count()
}

/// Value of `/proc/self/status` under a name, without its unit.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line of this name");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Resident bytes.
pub fn resident_bytes() -> u64 {
    status("VmRSS:") << 10
}

/// Threads.
pub fn threads() -> u64 {
    status("Threads:")
}

/// Bytes of the pages that there are of files of memory with these names, each file once: of those that are open, and of those that
/// are mapped, which only root may look at.
fn bytes_of(names: &[&str]) -> u64 {
    let mut files = BTreeMap::new();
    for folder in ["/proc/self/fd", "/proc/self/map_files"] {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let is_of = |link: &Path| names.iter().any(|name| link.to_string_lossy().starts_with(name));
            // Others open, map and close meanwhile.
            if std::fs::read_link(entry.path()).is_ok_and(|link| is_of(&link))
                && let Ok(file) = std::fs::metadata(entry.path())
            {
                files.insert((file.dev(), file.ino()), file.blocks() * 512);
            }
        }
    }
    files.values().sum()
}

/// Looks again and again, until it is over; returns the most bytes that tenants' memory had.
pub fn most_bytes_of_tenants(is_over: &AtomicBool) -> u64 {
    let mut most = 0;
    loop {
        let is_last = is_over.load(Ordering::Relaxed);
        most = most.max(bytes_of(&OF_TENANTS));
        if is_last {
            return most;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

#[test]
fn pages_that_are_written_are_counted_once_and_pages_that_are_not_are_not() {
    const NAME: &str = "/memfd:counted-by-a-test";
    let (file, mapping) = mccs_ipc::shm::Mapping::create("counted-by-a-test", 64 << 10).expect("memory");
    assert_eq!(bytes_of(&[NAME]), 0);
    // SAFETY: nobody else uses the mapping.
    unsafe { mapping.as_ptr().write_bytes(1, 10 << 12) };
    let again = mccs_ipc::shm::Mapping::map(std::os::fd::AsFd::as_fd(&file), 64 << 10).expect("mapped again");
    assert_eq!(bytes_of(&[NAME]), 10 << 12);
    drop((mapping, again));
}
