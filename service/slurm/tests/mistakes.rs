//! A `slurm.toml` with mistakes drains no host, and leaves nothing of jobs that end: no service is needed to see that.

use std::path::Path;
use std::process::{Command, Output};

fn run(config: &Path, hook: &str) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_mccs-slurm"));
    let program =
        program.arg("--config").arg(config).arg(hook).envs([("SLURM_JOB_ID", "7"), ("SLURM_JOB_UID", "1000")]);
    program.output().expect("runs")
}

#[test]
fn a_file_with_mistakes_refuses_jobs_and_ends_those_that_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let places = format!("runtime_dir = {:?}\nstate_dir = {:?}\ntimeout = \"1s\"\n", at("run"), at("notes"));
    // A mistyped key, and a file that is half there.
    for rest in ["[acount.physics]\n", "[account.phys"] {
        std::fs::write(at("slurm.toml"), format!("{places}{rest}")).expect("a file");
        let tenant = at("run/tenants/slurm-7");
        std::fs::create_dir_all(&tenant).expect("a folder");
        std::fs::write(tenant.join("tenant.toml"), "name = \"slurm-7\"\n").expect("a file");
        let prolog = run(&at("slurm.toml"), "prolog");
        assert!(prolog.status.success(), "the host would be drained: {prolog:?}");
        let task = run(&at("slurm.toml"), "task-prolog");
        let said = String::from_utf8_lossy(&task.stdout).into_owned();
        assert!(!task.status.success() && said.starts_with("print mccs: this job is refused: "), "{task:?}");
        assert!(said.contains("slurm.toml:4:") && said.lines().count() == 1, "{said}");
        let epilog = run(&at("slurm.toml"), "epilog");
        assert!(epilog.status.success(), "the host would be drained: {epilog:?}");
        assert!(!tenant.exists(), "a service that starts would have the tenant");
        assert_eq!(std::fs::read_dir(at("notes")).expect("a folder").count(), 0);
        // The job's own prolog had a good file: its later tasks are not to run beside mccs.
        let task = run(&at("slurm.toml"), "task-prolog");
        assert!(!task.status.success() && task.stdout.is_empty(), "{task:?}");
    }
    let check = run(&at("slurm.toml"), "check");
    assert!(!check.status.success(), "{check:?}");
}
