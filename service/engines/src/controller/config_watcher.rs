//! Watches `policy.toml` and `topology.toml` (inotify), and reads them again when they change.
//!
//! Their folders are watched, not the files: editors put another file in the place of the old one; and the folders above these, since
//! others put another folder there, or another link to one. If a file or a folder above it is a link, so are the folders of its target,
//! link by link: that is written to as well. A moment after the last change both are read, so that two that are changed together are
//! checked together.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mccs_config::limits::{FILE_BYTES_MAX, POLICY_BYTES_MAX};
use mccs_config::{Bytes, document};
use mccs_controller::config::cluster_config::Text;
use mccs_controller::config::files_on_disk::FileRole;
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};

/// How long nothing has to change before files are read.
const QUIET_TIME: Duration = Duration::from_millis(100);
/// The same while a file is open to be written: it may be copied over a slow link, and half of it may be well-formed.
const WRITING_TIME: Duration = Duration::from_secs(2);

/// Files that have changed.
pub(super) struct Changed {
    pub(super) topology: Option<Text>,
    pub(super) policy: Option<Text>,
    /// Each is told once.
    pub(super) unreadable: Vec<Unreadable>,
}

/// A file that is gone or cannot be read.
#[derive(Debug)]
pub(super) struct Unreadable {
    pub(super) role: FileRole,
    pub(super) path: String,
    pub(super) error: String,
}

struct File {
    role: FileRole,
    path: PathBuf,
    bytes_max: Bytes,
    /// As it was last read, or why it could not be; none before.
    last: Option<Result<String, String>>,
}

/// See the module's documentation.
pub(super) struct ConfigWatcher {
    topology: File,
    policy: File,
    watch: Option<Watch>,
    read_at: Option<Instant>,
}

impl ConfigWatcher {
    /// Both are read at the first [`ConfigWatcher::changed`].
    pub(super) fn new(topology: PathBuf, policy: PathBuf, now: Instant) -> Self {
        let watch = Watch::new([&topology, &policy]);
        let watch = watch.inspect_err(|error| {
            tracing::warn!(%error, "policy.toml and topology.toml are not watched; `mccsctl policy apply` still works");
        });
        let file = |role, path, bytes_max| File { role, path, bytes_max, last: None };
        let topology = file(FileRole::Topology, topology, FILE_BYTES_MAX);
        let policy = file(FileRole::Policy, policy, POLICY_BYTES_MAX);
        ConfigWatcher { topology, policy, watch: watch.ok(), read_at: Some(now) }
    }

    /// Files' present texts are no news, if the store has another text that counts.
    pub(super) fn take_as_read(&mut self, has_topology: bool, has_policy: bool) {
        for (file, is_read) in [(&mut self.topology, has_topology), (&mut self.policy, has_policy)] {
            // A file that is gone is said to be, all the same.
            if is_read && file.read().is_some_and(|read| read.is_err()) {
                file.last = None;
            }
        }
    }

    /// Readable when something has changed.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.watch.as_ref().map(|watch| watch.inotify.as_fd())
    }

    /// When [`ConfigWatcher::changed`] is next due.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.read_at
    }

    /// Files that have changed, a moment ago.
    pub(super) fn changed(&mut self, now: Instant) -> Option<Changed> {
        // Whatever has happened: what counts is what is read.
        if let Some(watch) = &mut self.watch
            && watch.has_news()
            && self.read_at.is_none_or(|at| at > now)
        {
            self.read_at = Some(now + if watch.being_written.is_empty() { QUIET_TIME } else { WRITING_TIME });
        }
        self.read_at.take_if(|at| *at <= now)?;
        self.watch.iter_mut().for_each(|watch| watch.being_written.clear());
        let mut unreadable = Vec::new();
        let mut read = |file: &mut File| match file.read()? {
            Ok(text) => Some(text),
            Err(error) => {
                unreadable.push(Unreadable { role: file.role, path: file.path.display().to_string(), error });
                None
            }
        };
        let (topology, policy) = (read(&mut self.topology), read(&mut self.policy));
        Some(Changed { topology, policy, unreadable })
    }
}

impl File {
    /// Its text, or why there is none, if that is another than last time.
    fn read(&mut self) -> Option<Result<Text, String>> {
        let read = document::read_text(&self.path, self.bytes_max).map_err(|error| error.to_string());
        if self.last.as_ref() == Some(&read) {
            return None;
        }
        self.last = Some(read.clone());
        Some(read.map(|text| Text { name: self.path.display().to_string(), text }))
    }
}

/// Links on the way to a file that are followed: as many as the kernel follows.
const LINKS_MAX: usize = 40;

/// A file's path as it is written, and as it is after each link on the way.
fn along_links(file: &Path) -> Vec<PathBuf> {
    let mut paths = vec![file.to_owned()];
    while let Some(next) = paths.last().filter(|_| paths.len() <= LINKS_MAX).and_then(|path| behind_link(path)) {
        paths.push(next);
    }
    paths
}

/// The same file behind the first link on the way to it, counted from the root.
fn behind_link(path: &Path) -> Option<PathBuf> {
    let mut parts: Vec<&Path> = path.ancestors().collect();
    parts.reverse();
    let (link, leads_to) = parts.into_iter().find_map(|part| Some((part, std::fs::read_link(part).ok()?)))?;
    // Relative to the folder of the link, if it is.
    let leads_to = link.parent()?.join(leads_to);
    let rest = path.strip_prefix(link).ok()?;
    Some(if rest.as_os_str().is_empty() { leads_to } else { leads_to.join(rest) })
}

/// Names of which something is to be heard in a folder: of the file, or of a link to it, or of a folder that leads there.
type Names = BTreeSet<OsString>;

/// Watches of all folders above files.
struct Watch {
    inotify: Inotify,
    /// Absolute.
    files: Vec<PathBuf>,
    names: HashMap<WatchDescriptor, Names>,
    /// Files that were written to, and not closed since.
    being_written: BTreeSet<OsString>,
}

impl Watch {
    fn new(files: [&Path; 2]) -> std::io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        let files = files.into_iter().map(std::path::absolute).collect::<Result<_, _>>()?;
        let mut watch = Watch { inotify, files, names: HashMap::new(), being_written: BTreeSet::new() };
        watch.look_at_folders()?;
        Ok(watch)
    }

    /// Watches what stands where folders are to be now, and nothing else. From the root down: whatever comes into a folder that is not
    /// looked at yet is found there, or heard of.
    fn look_at_folders(&mut self) -> nix::Result<()> {
        let mut names: HashMap<WatchDescriptor, Names> = HashMap::new();
        for file in self.files.iter().flat_map(|file| along_links(file)) {
            let folders: Vec<&Path> = file.ancestors().skip(1).collect();
            for (height, folder) in folders.iter().enumerate().rev() {
                let written = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_CREATE;
                let gone = AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVED_FROM;
                // Whoever could not read a file may be let to. While one is being written it is not whole.
                let being_written = if height == 0 { AddWatchFlags::IN_MODIFY } else { AddWatchFlags::empty() };
                // A folder may have one file, and lead to another.
                let besides = AddWatchFlags::from_bits_retain(libc::IN_MASK_ADD);
                let changes = written | gone | being_written | AddWatchFlags::IN_ATTRIB | besides;
                let watch = match self.inotify.add_watch(*folder, changes) {
                    Ok(watch) => watch,
                    // Whoever puts it there is heard of above.
                    Err(Errno::ENOENT | Errno::ENOTDIR) => break,
                    // A folder that may be passed and not read is seldom replaced.
                    Err(Errno::EACCES) if height > 0 => continue,
                    Err(errno) => return Err(errno),
                };
                let below = if height == 0 { file.file_name() } else { folders[height - 1].file_name() };
                names.entry(watch).or_default().extend(below.map(OsStr::to_owned));
            }
        }
        for gone in self.names.keys().filter(|watch| !names.contains_key(watch)) {
            // The kernel has forgotten it already where the folder is gone.
            let _ = self.inotify.rm_watch(*gone);
        }
        self.names = names;
        Ok(())
    }

    /// Whether something may have happened to the files.
    fn has_news(&mut self) -> bool {
        let Ok(events) = self.inotify.read_events() else { return false };
        let is_news = |event: &InotifyEvent| match (self.names.get(&event.wd), &event.name) {
            (Some(names), Some(name)) => names.contains(name),
            // More has happened than the kernel has told; or it was a folder that stands there no more.
            _ => event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW),
        };
        let news: Vec<&InotifyEvent> = events.iter().filter(|event| is_news(event)).collect();
        let has_news = !news.is_empty();
        for event in news {
            let Some(name) = &event.name else { continue };
            if event.mask.contains(AddWatchFlags::IN_MODIFY) {
                self.being_written.insert(name.clone());
            } else {
                self.being_written.remove(name);
            }
        }
        if has_news && let Err(error) = self.look_at_folders() {
            tracing::warn!(%error, "policy.toml and topology.toml may be watched no more; `mccsctl policy apply` still works");
        }
        has_news
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    struct Fixture {
        folder: tempfile::TempDir,
        watcher: ConfigWatcher,
        now: Instant,
    }

    impl Fixture {
        /// Files in a folder `conf`, which `make` makes in a folder of the test's own.
        fn new(make: impl FnOnce(&Path)) -> Self {
            let folder = tempfile::tempdir().unwrap();
            make(folder.path());
            let now = Instant::now();
            let path = |name: &str| folder.path().join("conf").join(name);
            let watcher = ConfigWatcher::new(path("topology.toml"), path("policy.toml"), now);
            let mut fixture = Fixture { folder, watcher, now };
            fixture.watcher.changed(now).expect("they are read at once");
            fixture
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        /// Waits for a change, and returns the policy that is read then.
        fn policy(&mut self) -> Option<String> {
            loop {
                let mut fds = [PollFd::new(self.watcher.descriptor().unwrap(), PollFlags::POLLIN)];
                poll(&mut fds, PollTimeout::NONE).unwrap();
                assert!(self.watcher.changed(self.now).is_none(), "not before it is quiet");
                if self.watcher.next_deadline().is_some() {
                    self.now += QUIET_TIME;
                    return self.watcher.changed(self.now).unwrap().policy.map(|text| text.text);
                }
            }
        }
    }

    fn make_conf(at: &Path, policy: &str) {
        std::fs::create_dir_all(at).unwrap();
        std::fs::write(at.join("policy.toml"), policy).unwrap();
        std::fs::write(at.join("topology.toml"), "t").unwrap();
    }

    /// Half of a file may be well-formed.
    #[test]
    fn a_file_that_is_being_written_is_read_when_it_is_closed() {
        use std::io::Write as _;
        let mut fixture = Fixture::new(|folder| make_conf(&folder.join("conf"), "1"));
        let mut file = std::fs::File::create(fixture.path("conf/policy.toml")).unwrap();
        file.write_all(b"weight = 3").unwrap();
        assert!(fixture.watcher.changed(fixture.now).is_none());
        fixture.now += 10 * QUIET_TIME;
        assert!(fixture.watcher.changed(fixture.now).is_none());
        file.write_all(b"0").unwrap();
        drop(file);
        assert_eq!(fixture.policy().as_deref(), Some("weight = 30"));
        // A writer that never closes a file is not waited for; and a file beside it is no news, however often
        // it is written.
        let mut file = std::fs::File::create(fixture.path("conf/policy.toml")).unwrap();
        file.write_all(b"2").unwrap();
        assert!(fixture.watcher.changed(fixture.now).is_none());
        for beside in 0..10 {
            std::fs::write(fixture.path("conf/beside"), beside.to_string()).unwrap();
            fixture.now += WRITING_TIME / 10;
            let read = fixture.watcher.changed(fixture.now);
            assert_eq!(read.is_some_and(|read| read.policy.is_some()), beside == 9);
        }
    }

    /// The configuration in force stays; that the file is gone is told, once, and that it is back as well.
    #[test]
    fn a_file_that_is_deleted_is_told_once_and_read_again_when_it_is_back() {
        let mut fixture = Fixture::new(|folder| make_conf(&folder.join("conf"), "1"));
        let changed = |fixture: &mut Fixture| {
            let mut fds = [PollFd::new(fixture.watcher.descriptor().unwrap(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::NONE).unwrap();
            fixture.watcher.changed(fixture.now);
            fixture.now += WRITING_TIME;
            fixture.watcher.changed(fixture.now).expect("something has happened")
        };
        std::fs::remove_file(fixture.path("conf/policy.toml")).unwrap();
        let gone = changed(&mut fixture);
        let [Unreadable { role: FileRole::Policy, path: file, error: why }] = &gone.unreadable[..] else {
            panic!("{:?}", gone.unreadable)
        };
        assert!(file.ends_with("policy.toml") && why.contains("No such file"), "{file}: {why}");
        std::fs::write(fixture.path("conf/topology.toml"), "other").unwrap();
        assert!(changed(&mut fixture).unreadable.is_empty(), "it was told");
        std::fs::write(fixture.path("conf/policy.toml"), "1").unwrap();
        assert_eq!(changed(&mut fixture).policy.map(|text| text.text).as_deref(), Some("1"), "it is readable again");
    }

    #[test]
    fn a_folder_that_is_replaced_is_watched() {
        let mut fixture = Fixture::new(|folder| make_conf(&folder.join("conf"), "1"));
        for (number, policy) in [(1, "2"), (2, "3")] {
            make_conf(&fixture.path("new"), policy);
            std::fs::rename(fixture.path("conf"), fixture.path(&format!("old{number}"))).unwrap();
            std::fs::rename(fixture.path("new"), fixture.path("conf")).unwrap();
            assert_eq!(fixture.policy().as_deref(), Some(policy));
            // In the new one files are watched as well, and in the old one nothing.
            let again = format!("{policy} again");
            std::fs::write(fixture.path(&format!("old{number}/policy.toml")), "old").unwrap();
            std::fs::write(fixture.path("conf/policy.toml"), &again).unwrap();
            assert_eq!(fixture.policy(), Some(again));
        }
        assert!(fixture.watcher.watch.as_ref().unwrap().names.len() <= fixture.path("conf").ancestors().count());
    }

    #[test]
    fn a_link_to_a_folder_that_is_replaced_is_followed() {
        use std::os::unix::fs::symlink;
        let mut fixture = Fixture::new(|folder| {
            make_conf(&folder.join("a"), "1");
            make_conf(&folder.join("b"), "2");
            symlink("a", folder.join("conf")).unwrap();
        });
        symlink("b", fixture.path("link")).unwrap();
        std::fs::rename(fixture.path("link"), fixture.path("conf")).unwrap();
        assert_eq!(fixture.policy().as_deref(), Some("2"));
        std::fs::write(fixture.path("b/policy.toml"), "3").unwrap();
        assert_eq!(fixture.policy().as_deref(), Some("3"));
    }

    #[test]
    fn files_behind_links_are_watched_where_they_are() {
        use std::os::unix::fs::symlink;
        let mut fixture = Fixture::new(|folder| {
            make_conf(&folder.join("elsewhere/1"), "1");
            std::fs::create_dir(folder.join("conf")).unwrap();
            // By two links, one of them relative, and through a link to a folder.
            symlink("1", folder.join("elsewhere/now")).unwrap();
            symlink("../link.toml", folder.join("conf/policy.toml")).unwrap();
            symlink(folder.join("elsewhere/now/policy.toml"), folder.join("link.toml")).unwrap();
            symlink("../elsewhere/1/topology.toml", folder.join("conf/topology.toml")).unwrap();
        });
        // As editors save it, and written in place.
        std::fs::write(fixture.path("elsewhere/1/new"), "2").unwrap();
        std::fs::rename(fixture.path("elsewhere/1/new"), fixture.path("elsewhere/1/policy.toml")).unwrap();
        assert_eq!(fixture.policy().as_deref(), Some("2"));
        std::fs::write(fixture.path("elsewhere/1/policy.toml"), "3").unwrap();
        assert_eq!(fixture.policy().as_deref(), Some("3"));
        // Another folder, another link to the file, and a file in the link's place.
        make_conf(&fixture.path("elsewhere/2"), "4");
        symlink("2", fixture.path("elsewhere/next")).unwrap();
        std::fs::rename(fixture.path("elsewhere/next"), fixture.path("elsewhere/now")).unwrap();
        assert_eq!(fixture.policy().as_deref(), Some("4"));
        std::fs::write(fixture.path("elsewhere/2/policy.toml"), "5").unwrap();
        assert_eq!(fixture.policy().as_deref(), Some("5"));
        symlink("elsewhere/1/policy.toml", fixture.path("other")).unwrap();
        std::fs::rename(fixture.path("other"), fixture.path("link.toml")).unwrap();
        assert_eq!(fixture.policy().as_deref(), Some("3"));
        std::fs::write(fixture.path("elsewhere/1/policy.toml"), "6").unwrap();
        assert_eq!(fixture.policy().as_deref(), Some("6"));
        std::fs::write(fixture.path("plain"), "7").unwrap();
        std::fs::rename(fixture.path("plain"), fixture.path("conf/policy.toml")).unwrap();
        assert_eq!(fixture.policy().as_deref(), Some("7"));
    }

    /// As Kubernetes mounts a ConfigMap: a link for each file, into a folder that is replaced by way of another.
    #[test]
    fn files_of_a_config_map_are_watched() {
        use std::os::unix::fs::symlink;
        let mut fixture = Fixture::new(|folder| {
            let conf = folder.join("conf");
            make_conf(&conf.join("..1"), "1");
            symlink("..1", conf.join("..data")).unwrap();
            ["policy.toml", "topology.toml"]
                .iter()
                .for_each(|file| symlink(Path::new("..data").join(file), conf.join(file)).unwrap());
        });
        for (number, policy) in [("..2", "2"), ("..3", "3")] {
            make_conf(&fixture.path("conf").join(number), policy);
            symlink(number, fixture.path("conf/..data_tmp")).unwrap();
            std::fs::rename(fixture.path("conf/..data_tmp"), fixture.path("conf/..data")).unwrap();
            assert_eq!(fixture.policy().as_deref(), Some(policy));
        }
    }

    /// A file that could not be read may become readable, and a file that was written by another name is noticed then.
    #[test]
    fn a_file_whose_mode_changes_is_read() {
        use std::os::unix::fs::PermissionsExt;
        let mut fixture = Fixture::new(|folder| {
            make_conf(&folder.join("conf"), "1");
            std::fs::create_dir(folder.join("elsewhere")).unwrap();
            std::fs::hard_link(folder.join("conf/policy.toml"), folder.join("elsewhere/policy.toml")).unwrap();
        });
        std::fs::write(fixture.path("elsewhere/policy.toml"), "2").unwrap();
        std::fs::set_permissions(fixture.path("conf/policy.toml"), std::fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(fixture.policy().as_deref(), Some("2"));
    }

    #[test]
    fn links_that_lead_to_themselves_end_nowhere() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        symlink("round", folder.path().join("round")).unwrap();
        assert!(along_links(&folder.path().join("round/policy.toml")).len() <= LINKS_MAX + 1);
    }

    #[test]
    fn a_policy_that_no_request_could_bring_is_not_read() {
        let mut fixture = Fixture::new(|folder| make_conf(&folder.join("conf"), "1"));
        let most = " ".repeat(POLICY_BYTES_MAX.0 as usize);
        std::fs::write(fixture.path("conf/policy.toml"), &most).unwrap();
        assert_eq!(fixture.policy().as_ref(), Some(&most));
        std::fs::write(fixture.path("conf/policy.toml"), most + " ").unwrap();
        assert!(fixture.watcher.changed(fixture.now).is_none());
        fixture.now += QUIET_TIME;
        let changed = fixture.watcher.changed(fixture.now).unwrap();
        let [Unreadable { path: file, error: why, .. }] = &changed.unreadable[..] else {
            panic!("{:?}", changed.unreadable)
        };
        assert!(
            changed.policy.is_none() && file.ends_with("policy.toml") && why.contains("longer than 120KiB"),
            "{why}"
        );
    }

    #[test]
    fn a_folder_may_come_later() {
        let mut fixture = Fixture::new(|_| ());
        // Events beside it are no news.
        std::fs::write(fixture.path("other"), "").unwrap();
        make_conf(&fixture.path("new"), "1");
        std::fs::rename(fixture.path("new"), fixture.path("conf")).unwrap();
        assert_eq!(fixture.policy().as_deref(), Some("1"));
    }
}
