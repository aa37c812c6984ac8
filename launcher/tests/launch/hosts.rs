//! Several hosts: local ones side by side, and ones behind a program that stands in for ssh.

use nix::sys::signal::Signal;

use crate::support::{Done, Fixture, Pids, is_alive, send, wait_until};

/// Runs the command for `host` here, in a folder of its own; `down` cannot be reached, `deaf` never answers.
const SSH: &str = "echo \"$*\" >> ssh-calls\n\
    while [ \"$1\" != -- ]; do shift; done\n\
    host=$2; shift 2\n\
    case $host in\n\
    down) echo \"ssh: connect to host down port 22: Connection refused\" >&2; exit 255;;\n\
    deaf) exec sleep 1000;;\n\
    chatty) echo 'Welcome to chatty';;\n\
    esac\n\
    mkdir -p home && cd home && exec sh -c \"$*\"\n";

/// Two hosts of this machine, whose services could run side by side.
const TWO: &str = "[[host]]\nname = \"h0\"\naddress = \"127.0.0.1\"\nport = 7400\nruntime_parent = \"{dir}\"\n\
                   [[host]]\nname = \"h1\"\naddress = \"127.0.0.1\"\nport = 7401\nruntime_parent = \"{dir}\"\n";

/// A local host, and one over the ssh of the test.
fn remote(destination: &str) -> String {
    format!(
        "[ssh]\nprogram = \"{{dir}}/ssh\"\noptions = [\"-p\", \"2222\"]\nlost_after = \"1m\"\n\
         [[host]]\nname = \"h0\"\naddress = \"127.0.0.1\"\n\
         [[host]]\nname = \"h1\"\nssh = \"{destination}\"\naddress = \"127.0.0.2\"\nruntime_parent = \"{{dir}}\"\n"
    )
}

fn fixture(run: &str, hosts: &str, jobs: &str) -> Fixture {
    let fixture = Fixture::with(run, &format!("{hosts}{jobs}"));
    fixture.script("ssh", SSH);
    fixture
}

const ECHO: &str = "[[job]]\nname = \"a\"\nranks = 4\nplacement = \"round_robin\"\n\
    command = [\"sh\", \"-c\", \"echo $MCCS_RANK/$MCCS_NRANKS on $MCCS_HOST.$MCCS_DEVICE at $MCCS_ROOT_ADDRESS $MCCS_SOCKET\"]\n";

#[test]
fn ranks_are_placed_on_two_hosts_with_a_service_each() {
    let config = "[service.config.service]\nname = \"mccs-{host}-{port}\"\n";
    let jobs = format!("{config}{ECHO}[[run.operator]]\ncommand = [\"echo\", \"view\", \"{{control}}\"]\n");
    let fixture = fixture("", TWO, &jobs);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 0, "{done:?}");
    for (rank, host) in [(0, 0), (1, 1), (2, 0), (3, 1)] {
        let line = fixture.read(&format!("out/a.{rank}.log"));
        assert!(line.starts_with(&format!("{rank}/4 on h{host}.0 at mccs-h0-7400 ")), "{line}");
        assert!(line.ends_with(&format!("-h{host}/a.sock\n")), "{line}");
        assert!(done.stdout.contains(&format!("[a {rank} h{host}] {rank}/4")), "{done:?}");
    }
    for (host, port) in [("h0", 7400), ("h1", 7401)] {
        assert!(fixture.read(&format!("out/service.{host}.toml")).contains(&format!("name = \"mccs-{host}-{port}\"")));
        let log = fixture.read(&format!("out/service.{host}.log"));
        assert!(log.contains("mccs-service ready") && log.ends_with("asked\n"), "{log}");
        assert!(fixture.read(&format!("out/operator-0.{host}.log")).contains(&format!("-{host}/mccs-control.sock")));
        assert!(done.stdout.contains(&format!("service {host}")), "{done:?}");
    }
    assert_eq!(fixture.private_folders(), 0);
}

#[test]
fn a_host_over_ssh_is_as_any_other() {
    let fixture = fixture("", &remote("user@n1"), &format!("{ECHO}env = {{ QUOTED = \"it's $HOME\" }}\n"));
    let done = fixture.run(&[]);
    assert_eq!(done.code, 0, "{done:?}");
    assert!(fixture.read("out/a.3.log").starts_with("3/4 on h1.0 at h0 "));
    let call = fixture.read("ssh-calls");
    assert!(call.starts_with("-T -x -p 2222 -o BatchMode=yes "), "{call}");
    assert!(call.ends_with(" agent\n") && call.contains(" -- user@n1 exec "), "{call}");
    assert_eq!(call.lines().count(), 1, "one connection: {call}");
    assert_eq!(fixture.private_folders(), 0);
}

#[test]
fn a_host_that_cannot_be_reached_is_named_with_its_reason() {
    let fixture = fixture("", &remote("down"), ECHO);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("host \"h1\" cannot be reached (exit status: 255)"), "{done:?}");
    assert!(done.stderr.contains("    ssh: connect to host down port 22: Connection refused"), "{done:?}");
    assert!(done.stdout.contains("not started") && !fixture.path("out/service.h0.log").exists(), "{done:?}");
    assert_eq!(fixture.private_folders(), 0);
}

#[test]
fn a_host_that_does_not_answer_is_a_time_out() {
    let fixture = fixture("connect_timeout = \"4s\"", &remote("deaf"), ECHO);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 124, "{done:?}");
    assert!(done.stderr.contains("no answer from h1 within 4s"), "{done:?}");
    fixture.nobody_is_left();
}

#[test]
fn a_host_whose_shell_talks_first_is_refused() {
    let done = fixture("", &remote("chatty"), ECHO).run(&[]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("it wrote \"Welcome \" where its greeting should be"), "{done:?}");
}

#[test]
fn a_far_host_without_a_program_is_refused_before_anything_starts() {
    let job = "[[job]]\nname = \"a\"\nranks = 1\nhosts = [\"h1\"]\ncommand = [\"no-such-program\"]\n";
    let fixture = fixture("", &remote("n1"), job);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("host \"h1\" has no executable no-such-program"), "{done:?}");
    assert!(!fixture.path("out/service.h0.log").exists());
    assert_eq!(fixture.private_folders(), 0);
}

#[test]
fn a_folder_that_cannot_be_made_refuses_its_host() {
    let fixture = fixture("", &TWO.replace("\"{dir}\"\n[[host]]", "\"{dir}/none\"\n[[host]]"), ECHO);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("host \"h0\": the private folder"), "{done:?}");
    assert_eq!(fixture.private_folders(), 0);
}

#[test]
fn a_service_of_one_host_that_is_not_ready_is_shown_with_its_tail() {
    let service = "case $2 in *-h1/*) echo waiting for a door; exec sleep 1000;; esac\n\
                   echo mccs-service ready\nexec sleep 1000\n";
    let fixture = Fixture::new(service, &format!("service.ready_timeout = \"4s\"\n{}{TWO}{ECHO}", Fixture::head()));
    let done = fixture.run(&[]);
    assert_eq!(done.code, 124, "{done:?}");
    let text =
        "the service on h1 did not say \"mccs-service ready\" within 4s; its last lines:\n    waiting for a door";
    assert!(done.stderr.contains(text), "{done:?}");
    fixture.nobody_is_left();
}

/// Ranks on both hosts, each with a child of its own.
fn busy(hosts: &str) -> (Fixture, std::process::Child, Pids) {
    let job = "[[job]]\nname = \"a\"\nranks = 2\nplacement = \"round_robin\"\ncommand = [\"{dir}/rank\"]\n\
               env = { HERE = \"{dir}\" }\n";
    let fixture = fixture("", hosts, job);
    fixture.script(
        "rank",
        "cd $HERE\nsleep 1000 &\necho $! > child.$MCCS_RANK\necho $PPID > agent.$MCCS_RANK\necho $$ > rank.$MCCS_RANK\nwait\n",
    );
    let launcher = fixture.start();
    let pids = ["rank.0", "rank.1", "child.0", "child.1"].map(|name| fixture.await_number(name));
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    (fixture, launcher, Pids(pids.to_vec()))
}

#[test]
fn ctrl_c_ends_everything_on_every_host() {
    for hosts in [TWO.to_owned(), remote("n1")] {
        let (fixture, launcher, pids) = busy(&hosts);
        send(&launcher, Signal::SIGINT);
        let done = Done::new(launcher.wait_with_output().unwrap());
        assert_eq!(done.code, 130, "{done:?}");
        for host in ["h0", "h1"] {
            assert!(fixture.read(&format!("out/service.{host}.log")).ends_with("asked\n"), "{done:?}");
        }
        pids.gone();
        fixture.nobody_is_left();
    }
}

#[test]
fn kill_9_of_the_launcher_ends_everything_on_every_host() {
    for hosts in [TWO.to_owned(), remote("n1")] {
        let (fixture, mut launcher, pids) = busy(&hosts);
        launcher.kill().unwrap();
        launcher.wait().unwrap();
        pids.gone();
        fixture.nobody_is_left();
    }
}

#[test]
fn kill_9_of_an_agent_ends_its_processes_and_the_run() {
    for hosts in [TWO.to_owned(), remote("n1")] {
        let (fixture, launcher, pids) = busy(&hosts);
        let agent = nix::unistd::Pid::from_raw(fixture.await_number("agent.1"));
        nix::sys::signal::kill(agent, Signal::SIGKILL).unwrap();
        let done = Done::new(launcher.wait_with_output().unwrap());
        assert_eq!(done.code, 1, "{done:?}");
        assert!(done.stderr.contains("host \"h1\" is lost: its agent ended (signal: 9 (SIGKILL))"), "{done:?}");
        assert!(done.stdout.contains("lost\n"), "{done:?}");
        pids.gone();
        fixture.nobody_is_left();
    }
}

#[test]
fn a_far_host_that_hears_nothing_ends_by_itself() {
    let hosts = remote("n1").replace("\"1m\"", "\"4s\"");
    let (fixture, launcher, Pids(pids)) = busy(&hosts);
    send(&launcher, Signal::SIGSTOP);
    wait_until("the end of rank 1", || !is_alive(pids[1]) && !is_alive(pids[3]));
    assert!(is_alive(pids[0]), "a local host waits for its launcher");
    send(&launcher, Signal::SIGCONT);
    let done = Done::new(launcher.wait_with_output().unwrap());
    assert_eq!(done.code, 1, "{done:?}");
    assert!(done.stderr.contains("the launcher has said nothing for 4s"), "{done:?}");
    Pids(pids).gone();
    fixture.nobody_is_left();
}

#[test]
fn a_rank_that_fails_ends_those_on_other_hosts() {
    let job = "[[job]]\nname = \"a\"\nranks = 2\n\
               command = [\"sh\", \"-c\", \"[ $MCCS_RANK = 1 ] && exit 7; exec sleep 1000\"]\n";
    let fixture = fixture("", TWO, job);
    let done = fixture.run(&["--json"]);
    assert_eq!(done.code, 7, "{done:?}");
    assert!(done.stderr.contains("[a 1 h1] ended with exit 7"), "{done:?}");
    let summary: serde_json::Value = serde_json::from_str(&done.stdout).expect("JSON");
    assert_eq!(summary["processes"][2]["status"], "SIGTERM");
    assert_eq!(summary["processes"][3]["host"], "h1");
    fixture.nobody_is_left();
}

#[test]
fn a_rank_that_hangs_is_a_time_out() {
    let job = "[[job]]\nname = \"a\"\nranks = 2\ntimeout = \"200ms\"\n\
               command = [\"sh\", \"-c\", \"[ $MCCS_RANK = 0 ] || exec sleep 1000\"]\n";
    let fixture = fixture("", TWO, job);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 124, "{done:?}");
    assert!(done.stderr.contains("job a took longer than 200ms"), "{done:?}");
    fixture.nobody_is_left();
}

#[test]
fn jobs_overlap_and_follow_each_other() {
    // Each half of the pair waits for the other, so they must overlap; the others only write down their order.
    let pair = |own: &str, other: &str| {
        format!(
            "[[job]]\nname = \"{own}\"\nranks = 2\ncommand = [\"sh\", \"-c\", \
             \": > {own}.$MCCS_RANK; while ! [ -e {other}.$MCCS_RANK ]; do sleep 0.01; done\"]\n"
        )
    };
    let after = |name: &str, after: &str, start: &str| {
        format!(
            "[[job]]\nname = \"{name}\"\nranks = 1\nafter = \"{after}\"\nstart = \"{start}\"\n\
             command = [\"sh\", \"-c\", \"ls a.0 b.1 && echo {name} >> order\"]\n"
        )
    };
    let jobs = [pair("a", "b"), pair("b", "a"), after("c", "b", "200ms"), after("d", "c", "0s"), after("e", "b", "0s")];
    let fixture = fixture("", TWO, &jobs.concat());
    let done = fixture.run(&[]);
    assert_eq!(done.code, 0, "{done:?}");
    let order = fixture.read("order");
    let place = |name: &str| order.lines().position(|line| line == name).expect("all ran");
    assert_eq!(order.lines().count(), 3);
    assert!(place("c") < place("d"), "{order}");
}

#[test]
fn a_job_whose_forerunner_fails_never_starts() {
    let jobs = "[[job]]\nname = \"a\"\nranks = 1\ncommand = [\"false\"]\n\
                [[job]]\nname = \"b\"\nranks = 1\nafter = \"a\"\ncommand = [\"sh\", \"-c\", \": > started\"]\n";
    let fixture = fixture("", TWO, jobs);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 1, "{done:?}");
    assert!(!fixture.path("started").exists());
    assert!(done.stdout.contains("b 0 h0") && done.stdout.contains("not started"), "{done:?}");
}

#[test]
fn an_unknown_host_or_device_is_refused_with_its_line() {
    let jobs = "[[job]]\nname = \"a\"\nplace = [\"h0\", \"h3\"]\ncommand = [\"true\"]\n\
                [[job]]\nname = \"b\"\nplace = [\"h1:4\"]\ncommand = [\"true\"]\n";
    let done = fixture("", TWO, jobs).run(&[]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(
        done.stderr.contains("job.toml:17:16: job[0].place[1]: there is no host \"h3\"; did you mean \"h0\"?"),
        "{done:?}"
    );
    assert!(done.stderr.contains("job.toml:21:10: job[1].place[0]: host \"h1\" has no device 4"), "{done:?}");
}

#[test]
fn much_output_of_many_ranks_arrives_whole() {
    let job = "[[job]]\nname = \"a\"\nranks = 4\n\
               command = [\"sh\", \"-c\", \"i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; printf end\"]\n";
    let fixture = fixture("prefix = \"none\"", TWO, job);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    let expected: String = (0..20_000).map(|i| format!("line {i}\n")).chain(["end".to_owned()]).collect();
    for rank in 0..4 {
        assert!(fixture.read(&format!("out/a.{rank}.log")) == expected, "rank {rank}");
    }
}

#[test]
fn a_dry_run_shows_the_way_to_every_host() {
    let fixture = fixture(
        "",
        &remote("n1"),
        &format!("{ECHO}[[job]]\nname = \"b\"\nranks = 1\nafter = \"a\"\nstart = \"2s\"\ncommand = [\"true\"]\n"),
    );
    let done = Done::new(fixture.command(&["plan", "job.toml"]).output().unwrap());
    assert_eq!(done.code, 0, "{done:?}");
    for part in
        ["# host h1\nagent    ", " -- n1 'exec ", "[a 1 h1] MCCS_DEVICE=0 ", "# job b at 2s after the end of a\n"]
    {
        assert!(done.stdout.contains(part), "{part}: {}", done.stdout);
    }
    assert!(!fixture.path("ssh-calls").exists() && !fixture.path("out").exists());
}
