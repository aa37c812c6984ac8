//! A folder with a job file, scripts that play the service and the ranks, and the launcher's executable.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// No test waits longer than this for something that must happen.
const WATCHDOG: Duration = Duration::from_secs(60);

/// Says that it is ready, keeps its configuration's path, ends well on SIGTERM.
pub const SERVICE: &str = "echo \"config $2\"\n\
    trap 'echo asked; exit 0' TERM\n\
    echo mccs-service ready\n\
    while :; do sleep 0.05; done\n";

pub struct Fixture {
    pub dir: TempDir,
}

impl Fixture {
    /// A folder whose service is the script `service`, and whose job file is `job_file` with `{dir}` replaced.
    pub fn new(service: &str, job_file: &str) -> Self {
        let dir = tempfile::tempdir().expect("a folder for the test");
        let fixture = Fixture { dir };
        fixture.script("service", service);
        fixture.job_file(job_file);
        fixture
    }

    /// Writes the job file, with `{dir}` replaced.
    pub fn job_file(&self, text: &str) {
        let text = text.replace("{dir}", &self.dir.path().display().to_string());
        std::fs::write(self.path("job.toml"), text).expect("the job file");
    }

    /// A fixture with the usual service; `run` are more lines of `[run]`, `jobs` the rest of the file.
    pub fn with(run: &str, jobs: &str) -> Self {
        Fixture::new(SERVICE, &format!("{}{run}\n{jobs}", Self::head()))
    }

    /// The start of a job file, up to within `[run]`.
    pub fn head() -> &'static str {
        "service.binary = \"{dir}/service\"\n[run]\noutput_dir = \"{dir}/out\"\n"
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn script(&self, name: &str, body: &str) {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path(name);
        std::fs::write(&path, format!("#!/bin/sh\n{body}")).expect("a script");
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&path, mode).expect("its mode");
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mccs-launch"));
        command
            .args(arguments)
            .current_dir(self.dir.path())
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .env_remove("CARGO")
            .stdin(Stdio::null());
        command
    }

    pub fn run(&self, more: &[&str]) -> Done {
        let mut arguments = vec!["run", "job.toml"];
        arguments.extend(more);
        Done::new(self.command(&arguments).output().expect("the launcher"))
    }

    pub fn start(&self) -> Child {
        self.command(&["run", "job.toml"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the launcher")
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Waits until the file `name` holds a whole line, and returns the number in it.
    pub fn await_number(&self, name: &str) -> i32 {
        let read = || std::fs::read_to_string(self.path(name)).unwrap_or_default();
        wait_until(name, || read().ends_with('\n'));
        read().trim().parse().expect("a number")
    }

    /// Waits until no process names this folder, and no private folder is left in it.
    pub fn nobody_is_left(&self) {
        let folder = self.dir.path().display().to_string();
        let mentions = |entry: std::fs::DirEntry| {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(&folder)
        };
        wait_until("the end of services, agents and guards", || {
            !std::fs::read_dir("/proc").expect("processes").filter_map(Result::ok).any(mentions)
        });
        wait_until("the end of the private folders", || self.private_folders() == 0);
    }

    /// Private folders of runs that were not removed.
    pub fn private_folders(&self) -> usize {
        let entries = std::fs::read_dir(self.dir.path()).expect("the folder");
        entries.filter_map(Result::ok).filter(|entry| entry.file_name().to_string_lossy().starts_with("mccs-")).count()
    }
}

/// Output of an ended launcher.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Done {
    pub fn new(output: Output) -> Self {
        Done {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Processes that must end.
pub struct Pids(pub Vec<i32>);

impl Pids {
    pub fn gone(&self) {
        wait_until("the end of all processes", || !self.0.iter().any(|pid| is_alive(*pid)));
    }
}

pub fn send(launcher: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(launcher.id()).expect("a process's number"));
    kill(pid, signal).expect("a launcher to signal");
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
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    stat.is_ok_and(|stat| {
        let state = stat.rsplit(") ").next().unwrap_or_default();
        !state.starts_with(['Z', 'X'])
    })
}
