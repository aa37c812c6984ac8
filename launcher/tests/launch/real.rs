//! Hosts as they really are: namespaces of a fabric and by name, and a daemon of ssh on a port of the loopback.
//!
//! Needs root, `mccs-fabric` beside the launcher, and openssh-server; `.ci/run` runs it in a lane of its own. A
//! missing part makes it fail.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::Signal;

use crate::support::{Done, Fixture, Pids, is_alive, send, wait_until};

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Something of this machine, removed with the value by the command of its name.
struct Made(Vec<String>);

impl Drop for Made {
    fn drop(&mut self) {
        let _ = Command::new(&self.0[0]).args(&self.0[1..]).stdout(Stdio::null()).status();
    }
}

fn made(words: &[&str]) -> Made {
    Made(words.iter().map(|word| (*word).to_owned()).collect())
}

/// A fabric of two hosts in two racks.
fn fabric(fixture: &Fixture, name: &str) -> Made {
    let program = Path::new(env!("CARGO_BIN_EXE_mccs-launch")).with_file_name("mccs-fabric").display().to_string();
    let text = include_str!("../../../eval/fabric/small.toml").replace("\"small\"", &format!("{name:?}"));
    std::fs::write(fixture.path("fabric.toml"), text).unwrap();
    let removal = made(&[&program, "down", name]);
    run(&program, &["up", &fixture.path("fabric.toml").display().to_string()]);
    removal
}

fn on_fabric(name: &str, command: &str) -> String {
    format!(
        "[[host]]\nname = \"h0\"\nfabric = \"{name}\"\nport = 7400\n[[host]]\nname = \"far\"\nfabric = \"{name}\"\nnode = \"h1\"\n\
         [[job]]\nname = \"a\"\nranks = 2\ncommand = [\"{command}\"]\nenv = {{ HERE = \"{{dir}}\" }}\n"
    )
}

#[test]
#[ignore = "needs root"]
fn ranks_run_in_the_namespaces_of_a_fabric() {
    let name = format!("l{}a", std::process::id());
    let fixture = Fixture::with("", &on_fabric(&name, "{dir}/rank"));
    fixture.script("rank", "echo root $MCCS_ROOT_ADDRESS\nip -o -4 address\n");
    let done = fixture.run(&[]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("is not up") && done.stderr.contains("mccs-fabric up FILE"), "{done:?}");
    let _fabric = fabric(&fixture, &name);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 0, "{done:?}");
    for (rank, address) in [(0, "10.0.0.1/"), (1, "10.1.0.1/")] {
        let log = fixture.read(&format!("out/a.{rank}.log"));
        assert!(log.starts_with("root h0\n") && log.contains(address), "{log}");
    }
    fixture.nobody_is_left();
}

const BUSY: &str = "cd $HERE\nsleep 1000 &\necho $! > child.$MCCS_RANK\necho $$ > rank.$MCCS_RANK\nwait\n";

fn busy(fixture: &Fixture) -> (Child, Pids) {
    fixture.script("rank", BUSY);
    let launcher = fixture.start();
    let pids = ["rank.0", "rank.1", "child.0", "child.1"].map(|name| fixture.await_number(name));
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    (launcher, Pids(pids.to_vec()))
}

#[test]
#[ignore = "needs root"]
fn kill_9_of_the_launcher_empties_the_namespaces() {
    let name = format!("l{}b", std::process::id());
    let fixture = Fixture::with("", &on_fabric(&name, "{dir}/rank"));
    let _fabric = fabric(&fixture, &name);
    let (mut launcher, pids) = busy(&fixture);
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    pids.gone();
    fixture.nobody_is_left();
    assert_eq!(run("ip", &["netns", "pids", &format!("mccs-{name}-h1")]), "");
}

#[test]
#[ignore = "needs root"]
fn a_fabric_that_is_removed_under_its_jobs_ends_the_run() {
    let name = format!("l{}d", std::process::id());
    let fixture = Fixture::with("", &on_fabric(&name, "{dir}/rank"));
    let fabric = fabric(&fixture, &name);
    let (launcher, pids) = busy(&fixture);
    drop(fabric);
    let done = Done::new(launcher.wait_with_output().unwrap());
    assert_ne!(done.code, 0, "{done:?}");
    assert!(done.stdout.contains("failed: "), "{done:?}");
    pids.gone();
    fixture.nobody_is_left();
}

#[test]
#[ignore = "needs root"]
fn a_namespace_by_name_is_a_host_and_one_that_is_not_there_is_told() {
    let name = format!("l{}c", std::process::id());
    let file = format!(
        "[[host]]\nname = \"h0\"\nnamespace = \"{name}\"\n\
         [[job]]\nname = \"a\"\nranks = 1\ncommand = [\"ip\", \"netns\", \"identify\"]\n"
    );
    let fixture = Fixture::with("", &file);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("host \"h0\" cannot be reached") && done.stderr.contains(&name), "{done:?}");
    let _namespace = made(&["ip", "netns", "delete", &name]);
    run("ip", &["netns", "add", &name]);
    let done = fixture.run(&[]);
    assert_eq!(done.code, 0, "{done:?}");
    assert_eq!(fixture.read("out/a.0.log"), format!("{name}\n"));
}

/// A daemon of ssh for this user alone, with keys of its own.
struct Sshd {
    child: Child,
    /// Whether its folder in `/run` was made for it.
    has_folder: bool,
}

/// Folder in which a daemon of root locks up its unprivileged part.
const SSHD_FOLDER: &str = "/run/sshd";

impl Sshd {
    /// Also returns the `[ssh]` of a job file that reaches it.
    fn start(fixture: &Fixture) -> (Self, String) {
        let path = |name: &str| fixture.path(name).display().to_string();
        for key in ["host", "user"] {
            run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", &path(key)]);
        }
        std::fs::copy(fixture.path("user.pub"), fixture.path("authorized")).unwrap();
        // Nobody else is given this port soon: the kernel hands out others first.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let known = format!("[127.0.0.1]:{port} {}", fixture.read("host.pub"));
        std::fs::write(fixture.path("known"), known).unwrap();
        let config = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nStrictModes no\nUsePAM no\n\
             PasswordAuthentication no\nKbdInteractiveAuthentication no\n",
            path("host"),
            path("authorized")
        );
        std::fs::write(fixture.path("sshd_config"), config).unwrap();
        let has_folder = std::fs::create_dir(SSHD_FOLDER).is_ok();
        let mut child = Command::new("/usr/sbin/sshd")
            .args(["-D", "-e", "-f", &path("sshd_config")])
            .stderr(Stdio::piped())
            .spawn()
            .expect("openssh-server is installed");
        let errors = BufReader::new(child.stderr.take().unwrap());
        let sshd = Sshd { child, has_folder };
        let mut lines = errors.lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains("Server listening")), "sshd does not listen");
        std::thread::spawn(move || lines.for_each(drop));
        let (user, known) = (path("user"), path("known"));
        let ssh = format!(
            "[ssh]\noptions = [\"-F\", \"none\", \"-p\", \"{port}\", \"-i\", \"{user}\", \"-o\", \"IdentitiesOnly=yes\", \
             \"-o\", \"UserKnownHostsFile={known}\"]\n"
        );
        (sshd, ssh)
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if self.has_folder {
            let _ = std::fs::remove_dir(SSHD_FOLDER);
        }
    }
}

fn over_ssh() -> (Fixture, Sshd) {
    let fixture = Fixture::new(crate::support::SERVICE, "");
    let (sshd, ssh) = Sshd::start(&fixture);
    let hosts = "[[host]]\nname = \"h0\"\naddress = \"127.0.0.1\"\n\
                 [[host]]\nname = \"h1\"\nssh = \"127.0.0.1\"\naddress = \"127.0.0.1\"\nruntime_parent = \"{dir}\"\nenv = { OF_HOST = \"it's h1\" }\n\
                 [[job]]\nname = \"a\"\nranks = 2\ncommand = [\"{dir}/rank\", \"$HOME 'x'\"]\nenv = { HERE = \"{dir}\" }\n";
    fixture.job_file(&format!("{}{ssh}{hosts}", Fixture::head()));
    (fixture, sshd)
}

#[test]
#[ignore = "needs openssh-server"]
fn ranks_run_over_ssh() {
    let (fixture, _sshd) = over_ssh();
    fixture.script("rank", "echo \"$MCCS_HOST $1 $OF_HOST\"\n[ $MCCS_RANK = 0 ] || [ -n \"$SSH_CONNECTION\" ]\n");
    let done = fixture.run(&[]);
    assert_eq!(done.code, 0, "{done:?}");
    assert_eq!(fixture.read("out/a.1.log"), "h1 $HOME 'x' it's h1\n");
    assert!(fixture.read("out/service.h1.log").ends_with("asked\n"));
    assert_eq!(fixture.private_folders(), 0);
    std::fs::write(fixture.path("known"), "").unwrap();
    let done = fixture.run(&[]);
    assert_eq!(done.code, 2, "{done:?}");
    assert!(done.stderr.contains("    Host key verification failed."), "{done:?}");
}

#[test]
#[ignore = "needs openssh-server"]
fn ctrl_c_and_kill_9_of_the_launcher_end_what_runs_over_ssh() {
    for signal in [Signal::SIGINT, Signal::SIGKILL] {
        let (fixture, _sshd) = over_ssh();
        let (launcher, pids) = busy(&fixture);
        send(&launcher, signal);
        let done = Done::new(launcher.wait_with_output().unwrap());
        assert_eq!(done.code, if signal == Signal::SIGINT { 130 } else { -1 }, "{done:?}");
        pids.gone();
        wait_until("the end of the private folders", || fixture.private_folders() == 0);
    }
}
