//! Tasks and jobs whose host has lost its service: each is told why, in the place where its user or operator looks.

use std::path::Path;
use std::process::{Command, Output};

fn run(config: &Path, hook: &str, local: &str) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_mccs-slurm"));
    let environment = [("SLURM_JOB_ID", "7"), ("SLURM_LOCALID", local), ("MCCS_SOCKET", "/of/another")];
    program.arg("--config").arg(config).arg(hook).envs(environment).output().expect("runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A folder with `slurm.toml`, and the job's tenant.
struct Host {
    folder: tempfile::TempDir,
}

impl Host {
    fn new(without_service: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        let places = format!("runtime_dir = {:?}\nstate_dir = {:?}\ntimeout = \"1s\"\n", at("run"), at("notes"));
        let rest = format!("without_service = \"{without_service}\"\npreload = \"/x.so\"\n[default]\ntenant = \"a\"\n");
        std::fs::write(at("slurm.toml"), places + &rest).expect("a file");
        std::fs::create_dir_all(at("run/tenants/slurm-7")).expect("a folder");
        Host { folder }
    }

    fn run(&self, hook: &str, local: &str) -> Output {
        run(&self.folder.path().join("slurm.toml"), hook, local)
    }

    fn tenant(&self) -> std::path::PathBuf {
        self.folder.path().join("run/tenants/slurm-7")
    }
}

#[test]
fn a_task_whose_service_has_gone_is_told_and_fails() {
    let host = Host::new("refuse");
    let task = host.run("task-prolog", "1");
    let said = text(&task.stdout);
    assert!(!task.status.success() && said.lines().count() == 1, "{task:?}");
    assert!(
        said.starts_with("print mccs: the service of this host has gone while the job runs: no mccs-service"),
        "{said}"
    );
    std::fs::remove_dir(host.tenant()).expect("removed");
    let task = host.run("task-prolog", "1");
    assert!(!task.status.success(), "it would run beside mccs: {task:?}");
    assert_eq!(text(&task.stdout), "print mccs: this job has no tenant on this host\n");
}

#[test]
fn a_task_that_may_run_without_is_told_once_a_host() {
    let host = Host::new("run");
    let first = host.run("task-prolog", "0");
    let said = text(&first.stdout);
    assert!(first.status.success() && said.starts_with("print mccs: the service of this host has gone"), "{first:?}");
    assert!(said.ends_with("; its tasks here run without mccs\nunset MCCS_SOCKET\n"), "{said}");
    let second = host.run("task-prolog", "1");
    assert!(second.status.success());
    assert_eq!(text(&second.stdout), "unset MCCS_SOCKET\n");
}

/// One that restarts while a task begins.
#[test]
fn a_task_waits_for_a_service_that_restarts() {
    let host = Host::new("refuse");
    let config = std::fs::read_to_string(host.folder.path().join("slurm.toml")).expect("a file");
    // More than the test's watchdog allows, if it were waited for to its end.
    std::fs::write(host.folder.path().join("slurm.toml"), config.replace("1s", "60s")).expect("a file");
    let socket = host.tenant().join("mccs.sock");
    let task = std::thread::spawn({
        let config = host.folder.path().join("slurm.toml");
        move || run(&config, "task-prolog", "0")
    });
    std::thread::sleep(std::time::Duration::from_millis(200));
    let listener = mccs_ipc::handshake::Listener::bind(&socket).expect("listens");
    let task = task.join().expect("it ends");
    drop(listener);
    assert!(task.status.success(), "{task:?}");
    let expected = format!("export MCCS_SOCKET={}\nexport LD_PRELOAD=/x.so\n", socket.display());
    assert_eq!(text(&task.stdout), expected);
}

#[test]
fn a_job_that_ends_without_its_service_says_so() {
    let host = Host::new("refuse");
    let epilog = host.run("epilog", "0");
    assert!(epilog.status.success(), "the host would be drained: {epilog:?}");
    let said = text(&epilog.stderr);
    assert!(said.contains("job 7 ends without a service") && said.contains("no mccs-service listens"), "{said}");
    assert!(!host.tenant().exists());
    // Twice is once.
    let again = host.run("epilog", "0");
    assert!(again.status.success() && again.stderr.is_empty(), "{again:?}");
}

#[test]
fn a_mistyped_tenant_is_warned_of() {
    let host = Host::new("run");
    let policy = host.folder.path().join("policy.toml");
    std::fs::write(&policy, "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"aa\"\n").expect("a file");
    let config = host.folder.path().join("slurm.toml");
    let check = |arguments: &[&str]| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_mccs-slurm"));
        program.arg("--config").arg(&config).arg("check").args(arguments).output().expect("runs")
    };
    let compared = check(&["--policy", policy.to_str().expect("text")]);
    assert!(compared.status.success(), "{compared:?}");
    let said = text(&compared.stderr);
    assert!(said.contains("warning: default.tenant: the policy says nothing about tenant \"a\""), "{said}");
    // Without a service nobody knows the policy.
    let alone = check(&[]);
    assert!(
        alone.status.success() && text(&alone.stderr).contains("compared with no policy: no mccs-service"),
        "{alone:?}"
    );
    assert!(!check(&["--policy", "/nowhere/policy.toml"]).status.success());
}
