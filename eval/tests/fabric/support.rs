//! A fabric's file under a name of its own, the program, and what is left of the fabric.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// No test waits longer than this for something that must happen.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A fabric of two hosts in two racks. The rest of it is removed with the value.
pub struct Fixture {
    pub name: String,
    dir: TempDir,
}

impl Fixture {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("t{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let fixture = Fixture { name, dir: tempfile::tempdir().expect("a folder for the test") };
        let text = include_str!("../../fabric/small.toml").replace("\"small\"", &format!("{:?}", fixture.name));
        std::fs::write(fixture.path("fabric.toml"), text).expect("the fabric's file");
        fixture
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn file(&self) -> String {
        self.path("fabric.toml").display().to_string()
    }

    /// Puts a script in a folder that `command` looks in first.
    pub fn script(&self, name: &str, body: &str) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::create_dir_all(self.path("bin")).expect("a folder");
        let path = self.path("bin").join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).expect("a script");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    }

    /// Runs `body` before the builder's `call`th run of the tool `ip`; there `$PPID` is the builder.
    pub fn at_call(&self, call: u32, body: &str) {
        let calls = self.path("calls");
        std::fs::write(&calls, "").expect("a count of calls");
        let count = format!("echo >> {0}; calls=$(wc -l < {0})", calls.display());
        let then = "PATH=${PATH#*:}; exec ip \"$@\"";
        self.script("ip", &format!("{count}\nif [ $calls = {call} ]; then {body}; fi\n{then}"));
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mccs-fabric"));
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap_or_default());
        command.args(arguments).env("PATH", path).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).spawn().expect("mccs-fabric")
    }

    pub fn run(&self, arguments: &[&str]) -> Done {
        Done::new(self.command(arguments).output().expect("mccs-fabric"))
    }

    pub fn up(&self) {
        let done = self.run(&["up", &self.file()]);
        assert_eq!(done.code, 0, "{done:?}");
    }

    /// Namespaces and files of the fabric.
    pub fn left(&self) -> Vec<String> {
        let (namespace, file) = (format!("mccs-{}-", self.name), format!("{}.", self.name));
        let names = |folder: &str, prefix: String| -> Vec<String> {
            let entries = Path::new(folder).read_dir().into_iter().flatten();
            let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
            names.filter(|name| name.starts_with(&prefix)).collect()
        };
        [names("/run/netns", namespace), names("/run/mccs-fabric", file)].concat()
    }

    pub fn is_gone(&self) {
        assert_eq!(self.left(), Vec::<String>::new());
    }

    /// Waits until the file `name` holds a whole line, and returns the number in it.
    pub fn await_number(&self, name: &str) -> i32 {
        let read = || std::fs::read_to_string(self.path(name)).unwrap_or_default();
        wait_until(name, || read().ends_with('\n'));
        read().trim().parse().expect("a number")
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if !self.left().is_empty() {
            let _ = self.command(&["down", &self.name]).output();
        }
    }
}

/// The output of an ended program.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Done {
    /// Waits for a program and, because it shares standard error, for its guard.
    pub fn of(child: Child) -> Self {
        Done::new(child.wait_with_output().expect("its output"))
    }

    fn new(output: Output) -> Self {
        Done {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < WATCHDOG, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process exists and is no zombie.
pub fn is_alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.rsplit(") ").next().unwrap_or_default().starts_with(['Z', 'X']))
}

/// The guard of a program that runs.
pub fn guard_of(parent: u32) -> Option<i32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    let is_guard = |pid: &i32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).nth(1) == Some(b"guard")
    };
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(is_guard)
}
