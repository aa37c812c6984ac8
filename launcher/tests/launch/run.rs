//! Runs of the launcher with scripts as service and ranks: output, exit statuses, failures, time-outs, dry runs.

use crate::support::{Done, Fixture, SERVICE, is_alive, wait_until};

const QUIET: &str = "[[job]]\nname = \"a\"\nranks = 2\ncommand = [\"true\"]\n";

#[test]
fn two_jobs_run_with_their_variables_and_their_output_is_kept() {
    let fixture = Fixture::with(
        "",
        "[[job]]\nname = \"alpha\"\nranks = 2\ncommand = [\"{dir}/rank\", \"x y\"]\nenv = { EXTRA = \"e\" }\n\
         [[job]]\nname = \"beta\"\ntenant = \"t\"\nranks = 1\ncommand = [\"./rank\"]\nworking_dir = \".\"\n",
    );
    fixture.script(
        "rank",
        "echo \"$MCCS_JOB $MCCS_RANK/$MCCS_NRANKS $MCCS_SOCKET $1 $EXTRA\"\necho err >&2\nprintf \"$MCCS_UNIQUE_ID\"\n",
    );
    let done = fixture.run(&[]);
    assert_eq!(done.code, 0, "{done:?}");
    let log = fixture.read("out/alpha.1.log");
    let lines: Vec<&str> = log.lines().collect();
    assert!(lines[0].starts_with("alpha 1/2 "), "{log}");
    assert!(lines[0].ends_with("/alpha.sock x y e"), "{log}");
    assert_eq!((lines[1], lines[2].len()), ("err", 32), "{log}");
    assert_eq!(fixture.read("out/alpha.0.log").lines().nth(2), Some(lines[2]));
    assert!(fixture.read("out/beta.0.log").contains("/t.sock"));
    for line in log.lines() {
        assert!(done.stdout.contains(&format!("[alpha 1] {line}\n")), "{done:?}");
    }
    assert!(done.stdout.contains("[beta 0] err\n"));
    assert!(done.stdout.contains("all processes ended well"));
    // The shell may mention the end of its sleeping child in between.
    let service = fixture.read("out/service.log");
    assert!(service.contains("\nmccs-service ready\n") && service.ends_with("asked\n"), "{service}");
    assert!(fixture.read("out/service.toml").contains("socket = \"t.sock\""));
    assert_eq!(fixture.private_folders(), 0);
}

#[test]
fn a_failing_rank_ends_the_others_and_nobody_else() {
    let jobs = "[[job]]\nname = \"a\"\nranks = 3\ncommand = [\"{dir}/rank\"]\n\
                [[job]]\nname = \"b\"\nranks = 1\ncommand = [\"sleep\", \"1000\"]\n";
    let fixture = Fixture::with("", jobs);
    fixture.script("rank", "[ $MCCS_RANK = 2 ] && exit 7\nexec sleep 1000\n");
    let mut bystander = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let done = fixture.run(&["--json"]);
    assert!(is_alive(i32::try_from(bystander.id()).unwrap()));
    bystander.kill().unwrap();
    bystander.wait().unwrap();
    assert_eq!(done.code, 7, "{done:?}");
    assert!(done.stderr.contains("[a 2] ended with exit 7"), "{done:?}");
    let summary: serde_json::Value = serde_json::from_str(&done.stdout).expect("only JSON on stdout");
    assert_eq!(summary["exit_code"], 7);
    let processes = summary["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 5);
    for line in processes {
        let pid = line["pid"].as_i64().expect("all were started");
        assert!(!is_alive(i32::try_from(pid).unwrap()), "{line}");
    }
    assert_eq!(processes[1]["status"], "SIGTERM");
    assert_eq!(processes[1]["ended_by_launcher"], true);
    assert_eq!(processes[3]["status"], "exit 7");
}

#[test]
fn a_rank_killed_by_a_signal_gives_128_and_its_number() {
    let job = "[[job]]\nname = \"a\"\nranks = 1\ncommand = [\"sh\", \"-c\", \"kill -9 $$\"]\n";
    let done = Fixture::with("", job).run(&[]);
    assert_eq!(done.code, 137, "{done:?}");
}

#[test]
fn time_outs_of_the_run_and_of_a_job_give_124() {
    let job = "[[job]]\nname = \"slow\"\nranks = 2\ncommand = [\"sleep\", \"1000\"]\n";
    let done = Fixture::with("timeout = \"150ms\"", job).run(&[]);
    assert_eq!(done.code, 124, "{done:?}");
    assert!(done.stderr.contains("the run took longer than 150ms"), "{done:?}");
    let done = Fixture::with("", &format!("{job}timeout = \"150ms\"\n")).run(&[]);
    assert_eq!(done.code, 124, "{done:?}");
    assert!(done.stderr.contains("job slow took longer than 150ms"), "{done:?}");
}

#[test]
fn a_rank_that_will_not_end_is_killed_after_the_grace_time() {
    let job = "[[job]]\nname = \"a\"\nranks = 1\ncommand = [\"{dir}/deaf\"]\n\
               [[job]]\nname = \"b\"\nranks = 1\ncommand = [\"{dir}/fails\"]\n";
    let fixture = Fixture::with("grace = \"100ms\"", job);
    fixture.script("deaf", "trap '' TERM\n: > deaf-is-on\nwhile :; do sleep 0.05; done\n");
    fixture.script("fails", "while ! [ -e deaf-is-on ]; do sleep 0.01; done\nexit 3\n");
    let done = fixture.run(&[]);
    assert_eq!(done.code, 3, "{done:?}");
    assert!(done.stdout.contains("SIGKILL (asked to end)"), "{done:?}");
}

#[test]
fn what_a_rank_leaves_in_its_group_is_ended_with_it() {
    let job = "[[job]]\nname = \"a\"\nranks = 1\ncommand = [\"sh\", \"-c\", \"sleep 1000 & echo $! > left\"]\n";
    let fixture = Fixture::with("", job);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 0, "{done:?}");
    let left = fixture.await_number("left");
    wait_until("the end of what was left", || !is_alive(left));
}

#[test]
fn a_service_that_is_never_ready_is_a_time_out_with_its_last_lines() {
    let service = "echo opening the door\nexec sleep 1000\n";
    let file = format!("service.ready_timeout = \"300ms\"\n{}{QUIET}", Fixture::head());
    let fixture = Fixture::new(service, &file);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 124, "{done:?}");
    assert!(done.stderr.contains("did not say"), "{done:?}");
    assert!(done.stdout.contains("not started"), "{done:?}");
}

#[test]
fn a_service_that_ends_early_is_a_failure_with_its_last_lines() {
    let file = format!("{}{QUIET}", Fixture::head());
    let done = Fixture::new("echo the port is taken >&2\nexit 9\n", &file).run(&[]);
    assert_eq!(done.code, 9, "{done:?}");
    assert!(done.stderr.contains("    the port is taken"), "{done:?}");
    let done = Fixture::new("exit 0\n", &file).run(&[]);
    assert_eq!(done.code, 1, "{done:?}");
    assert!(done.stderr.contains("it wrote nothing"), "{done:?}");
}

#[test]
fn a_service_that_dies_under_its_jobs_is_a_failure() {
    let job = "[[job]]\nname = \"a\"\nranks = 2\ncommand = [\"sh\", \"-c\", \": > up; exec sleep 1000\"]\n";
    let service = "echo mccs-service ready\nwhile ! [ -e up ]; do sleep 0.01; done\nkill -SEGV $$\n";
    let done = Fixture::new(service, &format!("{}{job}", Fixture::head())).run(&[]);
    assert_eq!(done.code, 139, "{done:?}");
    assert!(done.stderr.contains("the service ended (SIGSEGV) before its jobs"), "{done:?}");
}

#[test]
fn a_service_that_ends_badly_when_asked_is_a_failure() {
    let service = SERVICE.replace("exit 0", "exit 5");
    let done = Fixture::new(&service, &format!("{}{QUIET}", Fixture::head())).run(&[]);
    assert_eq!(done.code, 5, "{done:?}");
    assert!(done.stderr.contains("when asked to end"), "{done:?}");
}

#[test]
fn the_operator_looks_before_the_service_ends() {
    let jobs = "[[run.operator]]\ncommand = [\"{dir}/view\", \"{control}\", \"{output}\"]\n\
                [[run.operator]]\ncommand = [\"sh\", \"-c\", \": > timed\"]\nafter = \"20ms\"\n\
                [[job]]\nname = \"a\"\nranks = 1\ncommand = [\"{dir}/rank\"]\n\
                [[job]]\nname = \"late\"\nranks = 1\ncommand = [\"sh\", \"-c\", \": > late\"]\nstart_after = \"50ms\"\n";
    let fixture = Fixture::with("", jobs);
    // The first job ends only once the timed view and the late job have been.
    fixture.script("rank", "while ! [ -e timed ] || ! [ -e late ]; do sleep 0.01; done\n");
    fixture.script("view", "echo \"control $1\"\ngrep -c asked \"$2/service.log\"\nexit 0\n");
    let done = fixture.run(&[]);
    assert_eq!(done.code, 0, "{done:?}");
    let log = fixture.read("out/operator-0.log");
    assert!(log.contains("/mccs-control.sock\n0\n"), "{log}");
    assert!(done.stdout.contains(&format!("\n{log}")), "no prefix: {done:?}");
}

#[test]
fn a_failing_view_fails_the_run() {
    let jobs = format!("[[run.operator]]\ncommand = [\"sh\", \"-c\", \"exit 6\"]\n{QUIET}");
    let done = Fixture::with("", &jobs).run(&[]);
    assert_eq!(done.code, 6, "{done:?}");
}

#[test]
fn output_can_be_dropped_and_prefixes_left_out() {
    let job = "[[job]]\nname = \"a\"\nranks = 1\ncommand = [\"sh\", \"-c\", \"echo plain; exit $CODE\"]\n";
    let fixture = Fixture::with("keep_output = false\nprefix = \"none\"", job);
    let with = |code: &str| Done::new(fixture.command(&["run", "job.toml"]).env("CODE", code).output().unwrap());
    let done = with("0");
    assert!(done.stdout.contains("\nplain\n"), "{done:?}");
    assert!(!fixture.path("out").exists());
    assert_eq!(with("4").code, 4);
    assert!(fixture.path("out/a.0.log").exists());
}

#[test]
fn a_running_service_is_used_and_left_alone() {
    let file = "[service]\nstart = false\nconfig_file = \"service.toml\"\n[run]\noutput_dir = \"{dir}/out\"\n\
                [[job]]\nname = \"a\"\nranks = 1\ncommand = [\"sh\", \"-c\", \"echo $MCCS_SOCKET\"]\n";
    let fixture = Fixture::new("exit 1\n", file);
    let service = "[service]\nruntime_dir = \"/run/x\"\n[[tenant]]\nname = \"a\"\nsocket = \"s\"\n";
    std::fs::write(fixture.path("service.toml"), service).unwrap();
    let done = fixture.run(&[]);
    assert_eq!(done.code, 0, "{done:?}");
    assert_eq!(fixture.read("out/a.0.log"), "/run/x/s\n");
    std::fs::write(fixture.path("service.toml"), "[[tenant]]\nname = \"z\"\n").unwrap();
    let done = fixture.run(&[]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("no tenant \"a\""), "{done:?}");
}

#[test]
fn a_dry_run_shows_everything_and_starts_nothing() {
    let fixture = Fixture::with("", "[[job]]\nname = \"a\"\nranks = 2\ncommand = [\"no-such\", \"x y\"]\n");
    let done = fixture.run(&["--dry-run"]);
    assert_eq!(done.code, 0, "{done:?}");
    for part in ["[a 1] ", "MCCS_RANK=1", "no-such (not found) 'x y'", "[[tenant]]", "service.log"] {
        assert!(done.stdout.contains(part), "{part}: {done:?}");
    }
    let plan = Done::new(fixture.command(&["plan", "job.toml"]).output().unwrap());
    let without_id = |text: &str| text.lines().filter(|line| !line.contains("MCCS_UNIQUE_ID")).count();
    assert_eq!(without_id(&plan.stdout), without_id(&done.stdout));
    let json = fixture.run(&["--dry-run", "--json"]);
    let plan: serde_json::Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!(plan["jobs"][0]["ranks"][1]["env"]["MCCS_RANK"], "1");
    assert!(!fixture.path("out").exists());
    assert_eq!(fixture.private_folders(), 0);
}

#[test]
fn what_cannot_run_is_refused_before_anything_starts() {
    let fixture = Fixture::with("", "[[job]]\nname = \"a\"\nranks = 0\ncommand = [\"true\"]\n");
    for arguments in [["run", "job.toml"], ["check", "job.toml"]] {
        let done = Done::new(fixture.command(&arguments).output().unwrap());
        assert_eq!(done.code, 2, "{done:?}");
        assert!(done.stderr.contains("job.toml:7:1: job[0].ranks: must be"), "{done:?}");
    }
    let fixture = Fixture::with("", "[[job]]\nname = \"a\"\nranks = 1\ncommand = [\"no-such-program\"]\n");
    let done = fixture.run(&[]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("no executable no-such-program"), "{done:?}");
    assert!(!fixture.path("out").exists());
    assert_eq!(fixture.private_folders(), 0);
}

#[test]
fn a_program_that_cannot_be_executed_is_the_cause() {
    let fixture = Fixture::with("", "[[job]]\nname = \"a\"\nranks = 1\ncommand = [\"{dir}/odd\"]\n");
    fixture.script("odd", "");
    std::fs::write(fixture.path("odd"), "#!/no/such/interpreter\n").unwrap();
    let done = fixture.run(&[]);
    assert_eq!(done.code, 1, "{done:?}");
    assert!(done.stderr.contains("[a 0]") && done.stderr.contains("odd"), "{done:?}");
}
