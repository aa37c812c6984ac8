//! Services of a cluster as processes, and jobs on them whose every result is checked.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use mccs::{Client, Communicator, DataType, RedOp, Stream, UniqueId};
use mccs_control::{CommView, ControlAnswer, ControlRequest, OfficeView, call};
use mccs_controller::messages::answer::{ControllerAnswer, ControllerRequest, PolicyView, Standing};

use super::programs::{Program, address, make_keys};

/// Hosts that may decide: first in the order of names, so that they connect to the others, from whatever address.
pub const CONTROLLERS: [&str; 2] = ["a0", "a1"];
/// Hosts with ranks.
pub const WORKERS: [&str; 2] = ["h0", "h1"];
/// Communicators, each with a rank on both of them.
pub const JOBS: u64 = 3;
const SPINES: [u16; 2] = [23_000, 24_000];

/// Services' configurations, and those that run.
pub struct Cluster {
    folder: tempfile::TempDir,
    addresses: Vec<(&'static str, Ipv4Addr)>,
}

pub fn policy(name: &str) -> String {
    format!("[policy]\nname = {name:?}\n")
}

impl Cluster {
    /// The cluster of the workers and the first so many that may decide.
    pub fn new(controllers: usize) -> Self {
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

    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts the service of a host, in a folder of its own, which obeys `controller`; with a policy if that is itself.
    pub fn start(&self, name: &str, controller: &str, policy: Option<&str>) -> Program {
        let known = self.addresses.iter().find(|(host, _)| *host == name).expect("a host");
        self.start_at(name, name, known.1, controller, policy)
    }

    /// Starts the service of a host of a cluster that elects one of these; `others` are sections of the file.
    pub fn start_elected(&self, name: &str, candidates: &[&str], policy: Option<&str>, others: &str) -> Program {
        let known = self.addresses.iter().find(|(host, _)| *host == name).expect("a host");
        self.start_with(name, name, known.1, &format!("hosts = {candidates:?}"), policy, others)
    }

    /// As [`Cluster::start`], in another folder and at another address than the others know.
    pub fn start_at(&self, name: &str, folder: &str, own: Ipv4Addr, controller: &str, policy: Option<&str>) -> Program {
        self.start_with(name, folder, own, &format!("host = {controller:?}"), policy, "")
    }

    fn start_with(
        &self,
        name: &str,
        folder: &str,
        own: Ipv4Addr,
        controller: &str,
        policy: Option<&str>,
        others: &str,
    ) -> Program {
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
             \"3s\"\nhost_timeout = \"6s\"\n[controller]\n{controller}\n{}{}{others}",
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
    pub fn ask(&self, folder: &str, request: ControllerRequest) -> Result<ControllerAnswer, String> {
        let socket = self.at(folder).join("mccs-control.sock");
        match call(&socket, &ControlRequest::Controller { request }) {
            Ok(ControlAnswer::Controller(answer)) => Ok(*answer),
            Ok(ControlAnswer::Refused(reason)) => Err(reason),
            Ok(other) => panic!("{other:?}"),
            Err(gone) => Err(gone.to_string()),
        }
    }

    /// The controller, as a host knows.
    pub fn office(&self, folder: &str) -> OfficeView {
        match self.ask(folder, ControllerRequest::Office) {
            Ok(ControllerAnswer::Office(view)) => view,
            other => panic!("{other:?}"),
        }
    }

    pub fn apply(&self, folder: &str, name: &str) -> Result<ControllerAnswer, String> {
        self.ask(folder, ControllerRequest::Apply { name: "apply.toml".into(), text: policy(name) })
    }

    pub fn show(&self, folder: &str) -> PolicyView {
        match self.ask(folder, ControllerRequest::Show) {
            Ok(ControllerAnswer::Show(view)) => view,
            other => panic!("{other:?}"),
        }
    }

    /// Whether a policy is in force everywhere, as that controller sees it and workers run it.
    pub fn is_in_force(&self, folder: &str, name: &str) -> bool {
        // A host that is no controller now has none in force.
        let Ok(ControllerAnswer::Show(view)) = self.ask(folder, ControllerRequest::Show) else { return false };
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
    pub fn epochs(&self) -> [Vec<u64>; 2] {
        WORKERS.map(|name| {
            let answer = call(&self.at(name).join("mccs-control.sock"), &ControlRequest::Communicators);
            let Ok(ControlAnswer::Communicators(comms)) = answer else { panic!("{answer:?}") };
            let mut epochs: Vec<_> = comms.iter().map(|comm: &CommView| (comm.unique_id.clone(), comm.epoch)).collect();
            epochs.sort();
            epochs.into_iter().map(|(_, epoch)| epoch).collect()
        })
    }

    /// Runs checked jobs on the workers while `meanwhile` goes on.
    pub fn with_jobs(&self, meanwhile: impl FnOnce(&Jobs)) {
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

pub struct Jobs {
    stop: AtomicBool,
    /// Checked calls of each job, counted by both of its ranks.
    done: [AtomicU64; JOBS as usize],
    /// Some rank has ended.
    is_over: AtomicBool,
}

impl Jobs {
    pub fn wait_until(&self, mut condition: impl FnMut() -> bool) {
        while !condition() {
            assert!(!self.is_over.load(Ordering::Relaxed), "a job has ended");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Until every job has made some calls more.
    pub fn go_on(&self) {
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
