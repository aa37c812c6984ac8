//! Controllers that are killed, doubled, stopped and let go again, as processes, while jobs run whose every result is checked: what is in
//! force stays in force, and in the end one controller alone decides.

mod programs;

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use mccs::{Client, Communicator, DataType, RedOp, Stream, UniqueId};
use mccs_control::{CommView, ControlAnswer, ControlRequest, call};
use mccs_controller::messages::answer::{ControllerAnswer, ControllerRequest, PolicyView, Standing};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::programs::{Program, address, make_keys};

/// Hosts that may decide: first in the order of names, so that they connect to the others, from whatever address.
const CONTROLLERS: [&str; 2] = ["a0", "a1"];
/// Hosts with ranks.
const WORKERS: [&str; 2] = ["h0", "h1"];
/// Communicators, each with a rank on both of them.
const JOBS: u64 = 3;
const SPINES: [u16; 2] = [23_000, 24_000];

/// Services' configurations, and those that run.
struct Cluster {
    folder: tempfile::TempDir,
    addresses: Vec<(&'static str, Ipv4Addr)>,
}

fn policy(name: &str) -> String {
    format!("[policy]\nname = {name:?}\n")
}

impl Cluster {
    /// Of the workers and the first so many that may decide.
    fn new(controllers: usize) -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        let names = [&CONTROLLERS[..controllers], &WORKERS[..]].concat();
        make_keys(&names, folder.path());
        let mut topology = "[rates]\nhost_leaf = \"100Gbit/s\"\nleaf_spine = \"50Gbit/s\"\n".to_owned();
        for name in &names {
            topology +=
                &format!("[[leaf]]\nname = \"leaf-{name}\"\n[[host]]\nname = {name:?}\nleaf = \"leaf-{name}\"\n");
        }
        for (spine, first) in SPINES.iter().enumerate() {
            topology += &format!("[[spine]]\nname = \"spine{spine}\"\nsource_ports = \"{first}-{}\"\n", first + 19);
        }
        std::fs::write(folder.path().join("topology.toml"), topology).expect("a file");
        Cluster { folder, addresses: names.into_iter().map(|name| (name, address())).collect() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts the service of a host, in a folder of its own, which obeys `controller`; with a policy if that is itself.
    fn start(&self, name: &str, controller: &str, policy: Option<&str>) -> Program {
        let known = self.addresses.iter().find(|(host, _)| *host == name).expect("a host");
        self.start_at(name, name, known.1, controller, policy)
    }

    /// As [`Cluster::start`], in another folder and at another address than the others know.
    fn start_at(&self, name: &str, folder: &str, own: Ipv4Addr, controller: &str, policy: Option<&str>) -> Program {
        let runtime = self.at(folder);
        std::fs::create_dir_all(&runtime).expect("a directory");
        let files = policy.map(|text| {
            std::fs::write(runtime.join("policy.toml"), text).expect("a file");
            format!("topology = {:?}\npolicy = {:?}\n", self.at("topology.toml"), runtime.join("policy.toml"))
        });
        let hosts = self.addresses.iter().map(|(host, address)| {
            let address = if *host == name { own } else { *address };
            format!("[[host]]\nname = {host:?}\naddress = \"{address}:7400\"\n")
        });
        let config = format!(
            "[service]\nname = {name:?}\nruntime_dir = {runtime:?}\n[cuda]\nuse = \"off\"\n[strategy]\nalgorithm = \"ring\"\n[exchange]\nlisten = \
             \"{own}:7400\"\ncertificate = {:?}\nkey = {:?}\nauthority = {:?}\nkeep_alive = \"200ms\"\nlink_timeout = \
             \"3s\"\nhost_timeout = \"6s\"\n[controller]\nhost = {controller:?}\n{}{}",
            self.at(&format!("{name}.crt")),
            self.at(&format!("{name}.key")),
            self.at("authority.crt"),
            files.unwrap_or_default(),
            hosts.collect::<String>(),
        );
        std::fs::write(runtime.join("service.toml"), config).expect("a file");
        Program::start(&runtime.join("service.toml"))
    }

    /// Asks the controller whose folder that is.
    fn ask(&self, folder: &str, request: ControllerRequest) -> Result<ControllerAnswer, String> {
        let socket = self.at(folder).join("mccs-control.sock");
        match call(&socket, &ControlRequest::Controller { request }) {
            Ok(ControlAnswer::Controller(answer)) => Ok(*answer),
            Ok(ControlAnswer::Refused(reason)) => Err(reason),
            Ok(other) => panic!("{other:?}"),
            Err(gone) => Err(gone.to_string()),
        }
    }

    fn apply(&self, folder: &str, name: &str) -> Result<ControllerAnswer, String> {
        self.ask(folder, ControllerRequest::Apply { name: "apply.toml".into(), text: policy(name) })
    }

    fn show(&self, folder: &str) -> PolicyView {
        match self.ask(folder, ControllerRequest::Show) {
            Ok(ControllerAnswer::Show(view)) => view,
            other => panic!("{other:?}"),
        }
    }

    /// Whether a policy is in force everywhere, as that controller sees it and workers run it.
    fn is_in_force(&self, folder: &str, name: &str) -> bool {
        let view = self.show(folder);
        let is_steered = |flow: &str| flow.starts_with("spine") == (name == "ffa");
        let mut decided: Vec<u64> = view.communicators.iter().map(|comm| comm.epoch).collect();
        decided.sort_unstable();
        let run = self.epochs().map(|mut epochs| {
            epochs.sort_unstable();
            epochs
        });
        view.policy.as_deref() == Some(name)
            && decided.len() == JOBS as usize
            && run.iter().all(|epochs| *epochs == decided)
            && view.communicators.iter().all(|comm| {
                comm.state == Standing::AsDecided && comm.strategy.flows.iter().all(|flow| is_steered(&flow.path))
            })
    }

    /// The number of the strategy that each communicator's last call was under, as both hosts say it; they may have agreed on another.
    fn epochs(&self) -> [Vec<u64>; 2] {
        WORKERS.map(|name| {
            let answer = call(&self.at(name).join("mccs-control.sock"), &ControlRequest::Communicators);
            let Ok(ControlAnswer::Communicators(comms)) = answer else { panic!("{answer:?}") };
            let mut epochs: Vec<_> = comms.iter().map(|comm: &CommView| (comm.unique_id.clone(), comm.epoch)).collect();
            epochs.sort();
            epochs.into_iter().map(|(_, epoch)| epoch).collect()
        })
    }

    /// Runs checked jobs on the workers while `meanwhile` goes on.
    fn with_jobs(&self, meanwhile: impl FnOnce(&Jobs)) {
        let jobs = Jobs { stop: AtomicBool::new(false), done: Default::default(), is_over: AtomicBool::new(false) };
        let ids: Vec<UniqueId> = (0..JOBS).map(|_| mccs::unique_id().expect("an id")).collect();
        std::thread::scope(|scope| {
            let stopping = Stopping(&jobs.stop);
            for (job, rank) in (0..JOBS).flat_map(|job| [(job, 0), (job, 1)]) {
                let (id, jobs, socket) = (ids[job as usize], &jobs, self.at(WORKERS[rank as usize]).join("mccs.sock"));
                scope.spawn(move || {
                    let _over = Stopping(&jobs.is_over);
                    let client = Client::connect(socket).expect("a session");
                    let comm =
                        client.communicator(id, rank, 2).root_address(WORKERS[0]).join().expect("a communicator");
                    let stream = client.create_stream().expect("a stream");
                    work(&(client, comm, stream), rank, jobs, &jobs.done[job as usize]);
                });
            }
            meanwhile(&jobs);
            drop(stopping);
        });
    }
}

/// Raises a flag when it is dropped, also where a test fails.
struct Stopping<'a>(&'a AtomicBool);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Jobs {
    stop: AtomicBool,
    /// Checked calls of each job, counted by both of its ranks.
    done: [AtomicU64; JOBS as usize],
    /// Some rank has ended.
    is_over: AtomicBool,
}

impl Jobs {
    fn wait_until(&self, mut condition: impl FnMut() -> bool) {
        while !condition() {
            assert!(!self.is_over.load(Ordering::Relaxed), "a job has ended");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Until every job has made some calls more.
    fn go_on(&self) {
        let goals = self.done.each_ref().map(|done| done.load(Ordering::Relaxed) + 20);
        self.wait_until(|| self.done.iter().zip(goals).all(|(done, goal)| done.load(Ordering::Relaxed) >= goal));
    }
}

/// All-reduces of numbers that differ by rank, element and call, each checked, until both ranks have seen that they are to stop.
fn work((client, comm, stream): &(Client, Communicator, Stream), rank: u32, jobs: &Jobs, done: &AtomicU64) {
    const COUNTS: [u64; 3] = [1000, 40_001, 150_003];
    let memory = client.allocate(4 * (COUNTS[2] + 1)).expect("memory");
    for call in 0_u64.. {
        let count = COUNTS[call as usize % 3] as usize;
        let value = |rank: u32, place: usize| (call as i32).wrapping_mul(7 + rank as i32).wrapping_add(place as i32);
        // The last element is how many ranks have been told to stop.
        let stops = i32::from(jobs.stop.load(Ordering::Relaxed));
        // SAFETY: nothing is in flight.
        let bytes = unsafe { memory.as_mut_slice() };
        for (place, bytes) in bytes.chunks_exact_mut(4).enumerate().take(count + 1) {
            let number = if place < count { value(rank, place) } else { stops };
            bytes.copy_from_slice(&number.to_le_bytes());
        }
        let place = memory.at(0);
        comm.all_reduce(place, place, count as u64 + 1, DataType::I32, RedOp::Sum, stream).expect("enqueued");
        stream.synchronize().expect("completed");
        // SAFETY: as above.
        let bytes = unsafe { memory.as_mut_slice() };
        let mut numbers = bytes
            .chunks_exact(4)
            .map(|bytes| i32::from_le_bytes(bytes.try_into().expect("four bytes")))
            .take(count + 1);
        for (place, sum) in numbers.by_ref().take(count).enumerate() {
            assert_eq!(sum, value(0, place).wrapping_add(value(1, place)), "element {place} of call {call}");
        }
        done.fetch_add(1, Ordering::Relaxed);
        if numbers.next() != Some(0) {
            return;
        }
    }
}

/// Kills in one run; set MCCS_CONTROLLER_KILLS for more.
fn kills() -> u64 {
    std::env::var("MCCS_CONTROLLER_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(12)
}

#[test]
fn a_controller_killed_at_any_instant_of_a_roll_out_harms_no_job_and_the_next_one_decides() {
    let [own, _] = CONTROLLERS;
    let cluster = Cluster::new(1);
    let _workers = WORKERS.map(|name| cluster.start(name, own, None));
    let mut controller = cluster.start(own, own, Some(&policy("ffa")));
    cluster.with_jobs(|jobs| {
        let mut seed = 1_u64;
        let mut in_force = "ffa";
        jobs.wait_until(|| cluster.is_in_force(own, in_force));
        for round in 0..kills() {
            let wanted = if in_force == "ffa" { "ecmp" } else { "ffa" };
            let before = cluster.epochs();
            std::thread::scope(|scope| {
                let asking = scope.spawn(|| cluster.apply(own, wanted));
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Up to the time that a roll-out to these jobs takes.
                std::thread::sleep(Duration::from_micros((seed >> 33) % 15_000));
                controller.0.kill().expect("killed");
                controller.0.wait().expect("a child");
                // It was in force, or the operator is told that the service has gone.
                if let Ok(answer) = asking.join().expect("asked") {
                    assert!(matches!(&answer, ControllerAnswer::Applied(made) if made.failed.is_empty()), "{answer:?}");
                }
            });
            jobs.go_on();
            // What was ordered is agreed on without it, by both hosts or by none, and once.
            jobs.wait_until(|| cluster.epochs()[0] == cluster.epochs()[1]);
            let after = cluster.epochs();
            assert!(after[0].iter().zip(&before[0]).all(|(after, before)| after - before <= 1), "{before:?} {after:?}");
            // The next one wants now what the last one wanted, now what was before.
            in_force = if round % 2 == 0 { wanted } else { in_force };
            controller = cluster.start(own, own, Some(&policy(in_force)));
            jobs.wait_until(|| cluster.is_in_force(own, in_force));
            jobs.go_on();
        }
    });
}

#[test]
fn of_two_controllers_the_one_that_hosts_obey_decides_and_the_other_is_told_so() {
    let [own, other] = CONTROLLERS;
    let cluster = Cluster::new(2);
    let _workers = WORKERS.map(|name| cluster.start(name, own, None));
    let _first = cluster.start(own, own, Some(&policy("ffa")));
    cluster.with_jobs(|jobs| {
        jobs.wait_until(|| cluster.is_in_force(own, "ffa"));
        let before = cluster.epochs();
        let second = cluster.start(other, other, Some(&policy("ecmp")));
        let obey_the_first: Vec<_> = [own, WORKERS[0], WORKERS[1]].map(|host| (host.to_owned(), own.to_owned())).into();
        jobs.wait_until(|| cluster.show(other).elsewhere == obey_the_first);
        let refused = cluster.apply(other, "ecmp").expect_err("nobody obeys it");
        assert!(refused.contains("h0 obeys a0"), "{refused}");
        assert!(cluster.show(other).communicators.is_empty());
        jobs.go_on();
        assert_eq!(cluster.epochs(), before, "nothing was changed");
        // The rightful one says who does not obey it, and decides as before.
        jobs.wait_until(|| cluster.show(own).elsewhere == [(other.to_owned(), other.to_owned())]);
        cluster.apply(own, "ecmp").expect("in force");
        jobs.wait_until(|| cluster.is_in_force(own, "ecmp"));
        drop(second);
        jobs.go_on();
        jobs.wait_until(|| cluster.show(own).elsewhere.is_empty());
        assert!(cluster.is_in_force(own, "ecmp"));
    });
}

/// As docs/CONTROLLER.md has it: the old one is stopped, and a service of the same name starts on another machine, with the same files.
#[test]
fn the_role_moves_to_another_machine_while_jobs_run_and_changes_nothing() {
    let [own, _] = CONTROLLERS;
    let cluster = Cluster::new(1);
    let _workers = WORKERS.map(|name| cluster.start(name, own, None));
    let old = cluster.start(own, own, Some(&policy("ffa")));
    cluster.with_jobs(|jobs| {
        jobs.wait_until(|| cluster.is_in_force(own, "ffa"));
        let before = cluster.epochs();
        drop(old);
        jobs.go_on();
        let _new = cluster.start_at(own, "new", address(), own, Some(&policy("ffa")));
        jobs.wait_until(|| cluster.is_in_force("new", "ffa"));
        jobs.go_on();
        assert_eq!(cluster.epochs(), before, "what was in force was as decided");
        let history = cluster.ask("new", ControllerRequest::History { acts: false });
        let Ok(ControllerAnswer::History(history)) = history else { panic!("{history:?}") };
        assert!(!history.iter().any(|entry| entry.what.starts_with("order")), "{history:?}");
        cluster.apply("new", "ecmp").expect("it decides");
        jobs.wait_until(|| cluster.is_in_force("new", "ecmp"));
    });
}

/// A mistake: a second service with the controller's name, other files and another address, while the first one works.
#[test]
fn a_second_service_of_the_controllers_name_harms_nothing_and_is_told_so() {
    let [own, _] = CONTROLLERS;
    let cluster = Cluster::new(1);
    let _workers = WORKERS.map(|name| cluster.start(name, own, None));
    let _first = cluster.start(own, own, Some(&policy("ffa")));
    cluster.with_jobs(|jobs| {
        jobs.wait_until(|| cluster.is_in_force(own, "ffa"));
        let (before, life) = (cluster.epochs(), cluster.show(own).life);
        let second = cluster.start_at(own, "second", address(), own, Some(&policy("ecmp")));
        let is_turned_away = |refused: &str| refused.contains("another service called a0 is connected to h");
        jobs.wait_until(|| cluster.apply("second", "ecmp").is_err_and(|refused| is_turned_away(&refused)));
        jobs.wait_until(|| cluster.show("second").turned_away.len() == WORKERS.len());
        jobs.go_on();
        assert_eq!(cluster.epochs(), before, "nothing was changed");
        assert!(cluster.is_in_force(own, "ffa") && cluster.show(own).life == life, "the first one did not notice");
        drop(second);
        cluster.apply(own, "ecmp").expect("the first one decides as before");
        jobs.wait_until(|| cluster.is_in_force(own, "ecmp"));
        jobs.go_on();
    });
}

#[test]
fn an_old_controller_that_comes_back_beside_a_new_one_is_not_obeyed_until_that_has_gone() {
    let [own, _] = CONTROLLERS;
    let cluster = Cluster::new(1);
    let _workers = WORKERS.map(|name| cluster.start(name, own, None));
    let old = cluster.start(own, own, Some(&policy("ffa")));
    let signal = |signal: Signal| kill(Pid::from_raw(old.0.id() as i32), signal).expect("signalled");
    cluster.with_jobs(|jobs| {
        jobs.wait_until(|| cluster.is_in_force(own, "ffa"));
        // Its host hangs; another one takes its place, by the same name, when nothing was heard of it for link_timeout.
        signal(Signal::SIGSTOP);
        let new = cluster.start_at(own, "new", address(), own, Some(&policy("ecmp")));
        jobs.wait_until(|| cluster.is_in_force("new", "ecmp"));
        let before = cluster.epochs();
        signal(Signal::SIGCONT);
        jobs.wait_until(|| cluster.apply(own, "ffa").is_err_and(|why| why.contains("another service called a0")));
        jobs.go_on();
        assert_eq!(cluster.epochs(), before, "the old policy is not in force again");
        assert!(cluster.is_in_force("new", "ecmp"));
        // The new one goes, and the old one is let in again, and obeyed.
        drop(new);
        jobs.wait_until(|| cluster.apply(own, "ffa").is_ok());
        jobs.wait_until(|| cluster.is_in_force(own, "ffa"));
        jobs.go_on();
    });
}
