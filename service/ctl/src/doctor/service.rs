//! Facts of the running service, by its own answers and by the kernel's files of its process.

use std::path::{Path, PathBuf};

use mccs_config::cpus::CpuSet;
use mccs_config::error::in_words;
use mccs_control::overview::MemoryView;
use mccs_control::{ControlAnswer, ControlRequest, GpuView, HostView, call};

/// The process of a service.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ProcessFacts {
    /// Whether its program has been replaced or removed.
    pub is_replaced: bool,
    /// Descriptors that it may have.
    pub descriptors: Option<u64>,
    /// Bytes that it may lock; unlimited, if `None`.
    pub locked_bytes: Option<u64>,
    pub oom_score_adj: i32,
    /// Whether it sees processes of its own container alone.
    pub has_own_pid_namespace: bool,
    /// Whether `/proc` keeps other users' processes from it.
    pub sees_own_user_alone: bool,
    /// CPUs that it may use.
    pub cpus: CpuSet,
}

/// A service's answers.
#[derive(Debug, Clone, Default)]
pub(super) struct ServiceFacts {
    pub version: String,
    /// Why it takes no new processes, if it does not.
    pub draining: Option<String>,
    pub hosts: Vec<HostView>,
    pub gpus: Vec<GpuView>,
    /// End of its certificate, in seconds of the Unix epoch.
    pub certificate_end: Option<u64>,
    /// The most memory that it can come to hold; none of an earlier version.
    pub memory: Option<MemoryView>,
    /// None where the kernel does not tell this user.
    pub process: Option<ProcessFacts>,
}

/// The service of this host.
pub(super) enum ServiceState {
    /// It does not answer on this socket, for this reason.
    Silent(PathBuf, String),
    Answers(Box<ServiceFacts>),
}

/// The process that listens on a Unix socket, by the kernel's table and that process' descriptors. Credentials of the socket name whoever
/// has made it: after an upgrade that one has gone.
fn listener(root: &Path, socket: &Path) -> Option<i32> {
    /// `SO_ACCEPTCON`, as the table has it.
    const LISTENS: &str = "00010000";
    let table = std::fs::read_to_string(root.join("proc/net/unix")).ok()?;
    // "0000000000000000: 00000002 00000000 00010000 0005 01 4711 /run/mccs/mccs-control.sock".
    let inode_of = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, _, _, flags, _, _, inode, path] = fields[..] else { return None };
        (flags == LISTENS && Path::new(path) == socket).then(|| inode.to_owned())
    };
    let wanted = format!("socket:[{}]", table.lines().find_map(inode_of)?);
    let processes = std::fs::read_dir(root.join("proc")).ok()?.flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let has_it = |pid: &i32| {
        let descriptors = std::fs::read_dir(root.join("proc").join(pid.to_string()).join("fd"));
        let mut descriptors = descriptors.into_iter().flatten().flatten();
        descriptors.any(|fd| std::fs::read_link(fd.path()).is_ok_and(|link| link.as_os_str() == wanted.as_str()))
    };
    pids.into_iter().find(has_it)
}

impl ProcessFacts {
    /// The facts of a process, below a root that is `/` but for tests.
    pub(super) fn read(root: &Path, pid: i32) -> Option<Self> {
        let folder = root.join("proc").join(pid.to_string());
        let text = |file: &str| std::fs::read_to_string(folder.join(file)).ok();
        let (limits, status) = (text("limits")?, text("status")?);
        // "Max open files            1048576              1048576              files".
        let limit = |name: &str| limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next();
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let uid = field("Uid:").and_then(|uids| uids.split_whitespace().next()).unwrap_or("0");
        let hides = |line: &str| {
            let mut words = line.split_whitespace().skip(1);
            let (at, kind, options) = (words.next(), words.next(), words.next().unwrap_or_default());
            let hidden =
                ["hidepid=1", "hidepid=2", "hidepid=4", "hidepid=noaccess", "hidepid=invisible", "hidepid=ptraceable"];
            at == Some("/proc") && kind == Some("proc") && options.split(',').any(|option| hidden.contains(&option))
        };
        let program = std::fs::read_link(folder.join("exe")).unwrap_or_default();
        Some(ProcessFacts {
            is_replaced: program.to_string_lossy().ends_with(" (deleted)"),
            descriptors: limit("Max open files").and_then(|limit| limit.parse().ok()),
            locked_bytes: limit("Max locked memory").and_then(|limit| limit.parse().ok()),
            oom_score_adj: text("oom_score_adj").and_then(|score| score.trim().parse().ok()).unwrap_or(0),
            has_own_pid_namespace: field("NSpid:").is_some_and(|numbers| numbers.split_whitespace().count() > 1),
            sees_own_user_alone: uid != "0" && text("mounts").unwrap_or_default().lines().any(hides),
            cpus: field("Cpus_allowed_list:").and_then(|cpus| cpus.parse().ok()).unwrap_or_default(),
        })
    }
}

impl ServiceState {
    /// Starts a console for the service that listens on `socket`.
    pub(super) fn ask(root: &Path, socket: &Path) -> Self {
        let silent = |reason: String| ServiceState::Silent(socket.to_owned(), reason);
        let overview = match call(socket, &ControlRequest::Overview) {
            Ok(ControlAnswer::Overview(overview)) => *overview,
            Ok(ControlAnswer::Refused(reason)) => return silent(reason),
            Ok(_) => return silent("it answered something else".to_owned()),
            Err(error) => return silent(in_words(&error)),
        };
        let process = listener(root, socket).and_then(|pid| ProcessFacts::read(root, pid));
        ServiceState::Answers(Box::new(ServiceFacts {
            version: overview.version,
            draining: overview.draining.then_some(overview.draining_reason.unwrap_or_default()),
            hosts: overview.hosts,
            gpus: overview.gpus,
            certificate_end: overview.certificate_end,
            memory: overview.memory,
            process,
        }))
    }

    pub(super) fn facts(&self) -> Option<&ServiceFacts> {
        if let ServiceState::Answers(facts) = self { Some(facts) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up process 7.
    fn process(status: &str, mounts: &str, program: &str) -> ProcessFacts {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path().join("proc/7");
        std::fs::create_dir_all(&at).expect("a folder");
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max locked memory         unlimited            unlimited            bytes     \n\
                      Max open files            1024                 4096                 files     \n";
        for (file, text) in [("limits", limits), ("status", status), ("mounts", mounts), ("oom_score_adj", "-900\n")] {
            std::fs::write(at.join(file), text).expect("a file");
        }
        std::os::unix::fs::symlink(program, at.join("exe")).expect("a link");
        ProcessFacts::read(folder.path(), 7).expect("facts")
    }

    #[test]
    fn a_process_is_read_from_its_files() {
        let status = "Name:\tmccs-service\nUid:\t999\t999\t999\t999\nNSpid:\t7\nCpus_allowed_list:\t0-3\n";
        let facts = process(status, "proc /proc proc rw,nosuid 0 0\n", "/usr/bin/mccs-service");
        let expected = ProcessFacts {
            descriptors: Some(1024),
            oom_score_adj: -900,
            cpus: "0-3".parse().expect("CPUs"),
            ..ProcessFacts::default()
        };
        assert_eq!(facts, expected);
    }

    #[test]
    fn replaced_programs_containers_and_hidden_processes_are_seen() {
        let hidden = "proc /proc proc rw,hidepid=invisible 0 0\n";
        let facts = process("Uid:\t999\nNSpid:\t7\t1\n", hidden, "/usr/bin/mccs-service (deleted)");
        assert!(facts.is_replaced && facts.has_own_pid_namespace && facts.sees_own_user_alone, "{facts:?}");
        // From root nothing is hidden, and what is mounted elsewhere hides nothing.
        assert!(!process("Uid:\t0\n", hidden, "/x").sees_own_user_alone);
        assert!(!process("Uid:\t9\n", "proc /x proc rw,hidepid=2 0 0\n", "/x").sees_own_user_alone);
    }

    #[test]
    fn who_listens_is_found_by_its_descriptors() {
        let folder = tempfile::tempdir().expect("a folder");
        let proc = folder.path().join("proc");
        for (pid, socket) in [("7", "socket:[99]"), ("8", "socket:[4711]"), ("9", "/dev/null")] {
            std::fs::create_dir_all(proc.join(pid).join("fd")).expect("a folder");
            std::os::unix::fs::symlink(socket, proc.join(pid).join("fd/3")).expect("a link");
        }
        std::fs::create_dir_all(proc.join("net")).expect("a folder");
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
                     0000000000000000: 00000003 00000000 00000000 0005 03 99 /run/mccs/mccs-control.sock\n\
                     0000000000000000: 00000002 00000000 00010000 0005 01 4711 /run/mccs/mccs-control.sock\n\
                     0000000000000000: 00000002 00000000 00010000 0001 01 99\n";
        std::fs::write(proc.join("net/unix"), table).expect("a file");
        let find = |socket: &str| listener(folder.path(), Path::new(socket));
        assert_eq!((find("/run/mccs/mccs-control.sock"), find("/elsewhere.sock")), (Some(8), None));
    }

    #[test]
    fn a_process_that_has_gone_has_no_facts() {
        assert_eq!(ProcessFacts::read(Path::new("/nowhere"), 7), None);
    }
}
