//! Bad luck of GPUs and NICs of several hosts: what the job hears that it strikes, while another tenant's checked job goes on beside it. If
//! a whole host is struck, services are processes of their own.

use std::path::{Path, PathBuf};

use anyhow::ensure;
use mccs_config::service::TransportKind;
use mccs_control::overview::Overview;
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_cuda::DeviceMemory;
use mccs_emulated_nics::control::Fault;
use mccs_tests::hosts::{HostSettings, TestHosts, host_name};
use mccs_tests::nics::NicKind;
use mccs_tests::watchdog;

use super::changes::sign;
use super::deaths::{HOST, Serving};
use super::emulated_nics::EmulatedNics;
use super::rails::{both_play, everything, play_as, synchronize};
use super::ranks::{Buffers, Place, Player, Role, call, enqueue, everybody_at};
use super::{told, wait_until};

pub const ROLES: &[(&str, Role)] =
    &[("loses_its_gpu", loses_its_gpu), ("calls_and_does_not_come", calls_and_does_not_come)];

/// A folder of GPUs that have broken, for processes of their host.
const LOST: &str = "MCCS_EMULATED_LOST";
const NICS: [NicKind; 2] = [NicKind::ethernet(20_000); 2];
/// The tenants, by their places: whose job is struck, and whose is not.
const STRUCK: usize = 0;
const BESIDE: usize = 1;

/// Hosts with two NICs each, whose services are processes.
struct Hosts {
    serving: Vec<Option<Serving>>,
    nics: EmulatedNics,
    settings: HostSettings,
    /// Folder of the last host.
    lost: tempfile::TempDir,
}

/// Ranks of a job: so many on each of these hosts.
type Team = (usize, u32);

/// A job's processes, one a host.
struct Job {
    whole: Place,
    players: Vec<Player>,
}

impl Hosts {
    /// So many, with more in their settings.
    fn start(count: usize, more: &str) -> Hosts {
        let nics = EmulatedNics::new(&vec![&NICS[..]; count]);
        let section = |host| nics.section(host, "use = \"required\"\n");
        let settings = HostSettings::new(count, |host| everything() + &section(host) + more);
        let lost = tempfile::tempdir().expect("a folder");
        let mut hosts = Hosts { serving: Vec::new(), nics, settings, lost };
        hosts.serving = (0..count).map(|host| Some(hosts.serve(host))).collect();
        hosts
    }

    fn serve(&self, host: usize) -> Serving {
        let environment = [self.environment(host), vec![(HOST, host_name(host).into())]].concat();
        Serving::start("serves", &self.settings.texts[host], &environment)
    }

    /// Environment of all processes of a host.
    fn environment(&self, host: usize) -> Vec<(&'static str, PathBuf)> {
        let is_last = host + 1 == self.settings.texts.len();
        if is_last { vec![(LOST, self.lost.path().into())] } else { Vec::new() }
    }

    /// Breaks a GPU of the last host.
    fn break_gpu(&self, gpu: usize) {
        std::fs::write(self.lost.path().join(gpu.to_string()), "").expect("a file");
    }

    fn socket(&self, host: usize, tenant: usize) -> PathBuf {
        let first = &self.serving[host].as_ref().expect("a running service").socket;
        first.with_file_name(["a", "b"][tenant])
    }

    /// Starts a job, of which all ranks play a role.
    fn job(&self, tenant: usize, role: &str, teams: &[Team]) -> Job {
        let nranks = teams.iter().map(|(_, count)| count).sum();
        let (root, _) = teams[0];
        let whole = Place { nranks, root: host_name(root), ..everybody_at(self.socket(root, tenant)) };
        let mut first = 0;
        let place = |(host, count): &Team| {
            let ranks = first..first + count;
            first = ranks.end;
            let place = Place { ranks, socket: self.socket(*host, tenant), ..whole.clone() };
            Player::start_with(role, &place, &self.environment(*host))
        };
        let players = teams.iter().map(place).collect();
        Job { whole, players }
    }

    fn overview(&self, host: usize) -> Overview {
        let control = self.socket(host, STRUCK).with_file_name("mccs-control.sock");
        match ask(&control, &ControlRequest::Overview).expect("an answer") {
            ControlAnswer::Overview(overview) => *overview,
            other => panic!("{other:?}"),
        }
    }

    /// Operations that a host has carried out for a tenant.
    fn operations(&self, host: usize, tenant: usize) -> u64 {
        self.overview(host).tenants[tenant].operations
    }

    /// Waits until the job beside has done much more.
    fn goes_on(&self, host: usize) {
        let goal = self.operations(host, BESIDE) + 100;
        wait_until(|| self.operations(host, BESIDE) >= goal);
        watchdog();
    }

    /// Waits until a host holds nothing of a tenant's.
    fn has_let_go(&self, host: usize, tenant: usize) {
        wait_until(|| {
            let overview = self.overview(host);
            let own = &overview.tenants[tenant];
            own.communicators == 0 && own.quotas.iter().all(|quota| quota.used == 0)
        });
    }

    /// Kills all services.
    fn end(self) {
        self.serving.into_iter().flatten().for_each(Serving::kill);
    }

    /// Waits until a host holds nothing at all.
    fn is_empty(&self, host: usize) {
        [STRUCK, BESIDE].into_iter().for_each(|tenant| self.has_let_go(host, tenant));
        wait_until(|| {
            let overview = self.overview(host);
            // Each keeps a queue pair on each NIC, to flush by.
            let engines = overview.engines.iter().filter(|engine| engine.name.starts_with("transport"));
            overview.flows.is_empty() && self.nics.queue_pairs(host) <= engines.count() * NICS.len()
        });
    }
}

impl Job {
    /// Waits until all its processes have said something.
    fn all_hear(&mut self, what: &str) {
        self.players.iter_mut().for_each(|player| player.hears(what));
    }

    /// Ends a job that goes on until it is told; all it has done was right.
    fn ends_well(self) {
        std::fs::write(sign(&self.whole, "ends"), "").expect("a sign");
        self.players.into_iter().for_each(|player| drop(player.ends_well()));
    }

    /// Messages of its processes at its end: each rank why.
    fn failures(self) -> Vec<Vec<String>> {
        let failed = |said: String| said.lines().filter(|line| line.contains(" failed: ")).map(String::from).collect();
        self.players.into_iter().map(|player| failed(player.ends_well())).collect()
    }
}

/// All-reduces, of which some slices are under way at any time, until one fails; the rank whose GPU has broken asks why.
fn loses_its_gpu(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let own = rank.comm.rank();
        let call = call(0, place.nranks, 400_001);
        let at = Buffers::of(&rank.context, &call)?;
        at.fill(&call, own)?;
        rank.together.wait();
        for number in 0.. {
            let done = enqueue(&rank.comm, &call, &at, rank.stream.raw()).and_then(|()| synchronize(&rank.stream));
            if done.is_err() {
                // As programs do that look at the next call's error only.
                ensure!(enqueue(&rank.comm, &call, &at, rank.stream.raw()).is_err());
            }
            if done.is_err() || rank.comm.async_error().is_some() {
                break;
            }
            at.check(&call, own)?;
            if number == 5 {
                println!("is under way");
            }
        }
        println!("rank {own} failed: {}", told(&rank));
        rank.together.wait();
        std::process::exit(0)
    })
}

/// All ranks call; the last one's stream waits for something else first, for ever.
fn calls_and_does_not_come(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let call = call(0, place.nranks, 50_000);
        let (at, word) = (Buffers::of(&rank.context, &call)?, DeviceMemory::zeroed(&rank.context, 8)?);
        at.fill(&call, rank.comm.rank())?;
        rank.together.wait();
        if rank.comm.rank() + 1 == place.nranks {
            // SAFETY: word and stream live as long as the process.
            unsafe { rank.stream.raw().wait_word(word.address(), 1)? };
        }
        enqueue(&rank.comm, &call, &at, rank.stream.raw())?;
        println!("has called");
        loop {
            std::thread::park();
        }
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn a_service_that_is_killed_in_the_middle_of_a_slice_is_named_and_its_like_go_on() {
    const DEAD: usize = 1;
    let mut hosts = Hosts::start(3, "");
    let mut beside = hosts.job(BESIDE, "goes_on_until_told", &[(0, 2), (2, 2)]);
    beside.players[0].hears("runs");
    let mut struck = hosts.job(STRUCK, "combines_until_a_part_fails", &[(0, 2), (DEAD, 2)]);
    struck.all_hear("is under way");
    // Some seconds for a slice.
    hosts.nics.make_all(DEAD, Fault::Rate(1));
    let before = hosts.nics.sent_bytes(DEAD);
    wait_until(|| hosts.nics.sent_bytes(DEAD) > before);
    hosts.serving[DEAD].take().expect("a running service").kill();
    let failures = struck.failures();
    assert!(failures.iter().all(|of_host| of_host.len() == 2), "{failures:?}");
    assert!(failures[0].iter().all(|failure| failure.contains(&host_name(DEAD))), "{failures:?}");
    hosts.has_let_go(0, STRUCK);
    hosts.goes_on(0);
    // A service that comes in its place serves, and what its like there were in is not in its way.
    hosts.nics.make_all(DEAD, Fault::Rate(NICS[0].mbit_per_s));
    hosts.serving[DEAD] = Some(hosts.serve(DEAD));
    let again = hosts.job(STRUCK, "combines_late", &[(0, 2), (DEAD, 2)]);
    again.players.into_iter().for_each(|player| drop(player.ends_well()));
    hosts.goes_on(0);
    beside.ends_well();
    for host in [0, 2] {
        hosts.is_empty(host);
    }
    hosts.end();
}

#[test]
#[ignore = "needs two GPUs"]
fn a_gpu_that_breaks_on_one_host_is_named_and_who_does_not_use_it_goes_on() {
    const STRUCK_HOST: usize = 1;
    let hosts = Hosts::start(2, "");
    // On the first GPU of the host alone.
    let mut beside = hosts.job(BESIDE, "goes_on_until_told", &[(0, 2), (STRUCK_HOST, 1)]);
    beside.players[0].hears("runs");
    let mut struck = hosts.job(STRUCK, "loses_its_gpu", &[(0, 2), (STRUCK_HOST, 2)]);
    struck.all_hear("is under way");
    hosts.nics.make(STRUCK_HOST, 1, Fault::Rate(100));
    let before = hosts.nics.sent_bytes(STRUCK_HOST);
    wait_until(|| hosts.nics.sent_bytes(STRUCK_HOST) > before);
    hosts.break_gpu(1);
    let failures = struck.failures();
    assert!(failures.iter().all(|of_host| of_host.len() == 2), "{failures:?}");
    assert!(failures.iter().flatten().all(|failure| failure.contains("CUDA_ERROR_ECC_UNCORRECTABLE")), "{failures:?}");
    for host in [0, 1] {
        hosts.has_let_go(host, STRUCK);
    }
    hosts.nics.make(STRUCK_HOST, 1, Fault::Rate(NICS[1].mbit_per_s));
    hosts.goes_on(0);
    beside.ends_well();
    for host in [0, 1] {
        hosts.is_empty(host);
    }
    hosts.end();
}

/// A NIC that its flows cannot leave by, and that cannot read back, is told on both hosts when it is down for too long.
#[test]
#[ignore = "needs two GPUs"]
fn a_host_all_of_whose_ports_go_down_fails_its_calls_with_the_reason() {
    const CUT_OFF: usize = 1;
    let hosts = Hosts::start(3, "[tcp]\nsilence_timeout = \"10s\"\n");
    let mut beside = hosts.job(BESIDE, "goes_on_until_told", &[(0, 2), (2, 2)]);
    beside.players[0].hears("runs");
    let mut struck = hosts.job(STRUCK, "combines_until_a_part_fails", &[(0, 2), (CUT_OFF, 2)]);
    struck.all_hear("is under way");
    hosts.nics.make_all(CUT_OFF, Fault::Down);
    let failures = struck.failures();
    assert!(failures.iter().all(|of_host| of_host.len() == 2), "{failures:?}");
    assert!(failures.iter().flatten().all(|failure| failure.contains("port")), "{failures:?}");
    for host in [0, CUT_OFF] {
        hosts.has_let_go(host, STRUCK);
    }
    hosts.goes_on(0);
    hosts.nics.make_all(CUT_OFF, Fault::Up);
    let again = hosts.job(STRUCK, "combines_late", &[(0, 2), (CUT_OFF, 2)]);
    again.players.into_iter().for_each(|player| drop(player.ends_well()));
    beside.ends_well();
    for host in [0, 1, 2] {
        hosts.is_empty(host);
    }
    hosts.end();
}

#[test]
#[ignore = "needs two GPUs"]
fn a_rank_whose_stream_never_comes_is_named_and_holds_up_nobody_else() {
    let nics = EmulatedNics::new(&[&NICS, &NICS]);
    let hosts = TestHosts::start_each(2, |host| everything() + &nics.section(host, "use = \"required\"\n"));
    let mut waiting = stay(&hosts, "calls_and_does_not_come");
    let comms = hosts.service(0).service().registry.comms();
    let rail = comms.iter().find(|comm| comm.part.as_ref().is_some_and(|part| part.name == "rail 2 of 2"));
    let request = ControlRequest::WhyStuck { communicator: rail.expect("the last rank's rail").number };
    wait_until(|| {
        let Ok(ControlAnswer::Stuck(report)) = ask(&hosts.service(0).control_socket(), &request) else {
            panic!("no report")
        };
        report.culprits.iter().any(|one| (one.host.as_str(), one.rank, one.gpu) == ("h1", Some(3), Some(1)))
    });
    play_as(BESIDE, "combines", &hosts, &[2, 2]);
    waiting.iter_mut().for_each(Player::kill);
    drop(comms);
    for host in [0, 1] {
        wait_until(|| hosts.service(host).service().registry.comms().is_empty());
    }
}

/// Over what the rails of a host have begun, and why not over what is faster.
fn begun_over(hosts: &TestHosts, host: usize) -> (Option<TransportKind>, String) {
    let answer = ask(&hosts.service(host).control_socket(), &ControlRequest::Communicators).expect("an answer");
    let ControlAnswer::Communicators(comms) = answer else { panic!("{answer:?}") };
    let comm = comms.into_iter().find(|comm| comm.hosts.len() > 1).expect("a communicator of several hosts");
    (comm.transport, comm.transport_reason.unwrap_or_default())
}

#[test]
#[ignore = "needs two GPUs"]
fn hosts_with_other_nics_work_together() {
    const FAST: NicKind = NicKind::ethernet(100_000);
    const SLOW: NicKind = NicKind::ethernet(10_000);
    let infiniband = NicKind { is_infiniband: true, ..FAST };
    for (kinds, is_rdma) in [
        ([&[FAST, FAST][..], &[SLOW]], true),
        ([&[SLOW], &[FAST; 4]], true),
        ([&[infiniband, infiniband], &[infiniband]], true),
        ([&[FAST, FAST], &[infiniband, infiniband]], false),
    ] {
        let nics = EmulatedNics::new(&kinds);
        let hosts = TestHosts::start_each(2, |host| everything() + &nics.section(host, "use = \"auto\"\n"));
        let stays = stay(&hosts, "waits_for_the_last");
        let (transport, reason) = begun_over(&hosts, 0);
        let over = if is_rdma { TransportKind::Rdma } else { TransportKind::Tcp };
        assert_eq!(transport, Some(over), "{kinds:?}: {reason}");
        assert_eq!(reason.contains("two kinds: InfiniBand and Ethernet"), !is_rdma, "{reason}");
        both_play("combines", &hosts, &[2, 2]);
        for host in [0, 1] {
            for nic in 0..kinds[host].len() {
                assert_eq!(nics.carried(host, nic).out_bytes > 0, is_rdma, "n{nic} of h{host}");
            }
        }
        stays.into_iter().for_each(|mut player| player.kill());
    }
}

/// The first tenant's ranks, which have called by the role that they play, and stay.
fn stay(hosts: &TestHosts, role: &str) -> Vec<Player> {
    let whole = Place { nranks: 4, root: host_name(0), ..everybody_at(hosts.service(0).socket(STRUCK)) };
    let place = |host: usize| Place {
        ranks: host as u32 * 2..host as u32 * 2 + 2,
        socket: hosts.service(host).socket(STRUCK),
        ..whole.clone()
    };
    let mut players: Vec<_> = [0, 1].map(|host| Player::start(role, &place(host))).into();
    players.iter_mut().for_each(|player| player.hears("has called"));
    players
}

/// A machine's bus as sysfs has it: nodes of NICs and GPUs, by their numbers.
fn sysfs(nics: &[u32], gpus: &[u32]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let device = |link: &Path, node: u32, number: usize| {
        // Each has a host bridge of its own.
        let at = folder.path().join(format!("devices/pci0000:{number:02x}/0000:{number:02x}:00.0"));
        std::fs::create_dir_all(&at).expect("a folder");
        std::fs::write(at.join("numa_node"), format!("{node}\n")).expect("a file");
        std::fs::create_dir_all(link.parent().expect("a folder")).expect("a folder");
        std::os::unix::fs::symlink(&at, link).expect("a link");
    };
    for (nic, node) in nics.iter().enumerate() {
        device(&folder.path().join(format!("class/infiniband/n{nic}/device")), *node, nic);
    }
    for (number, (gpu, node)) in mccs_cuda::gpus().expect("GPUs").iter().zip(gpus).enumerate() {
        device(&folder.path().join("bus/pci/devices").join(&gpu.pci_bus_id), *node, nics.len() + number);
    }
    folder
}

/// NICs of the other socket are used where there are no nearer ones, and only there.
#[test]
#[ignore = "needs two GPUs"]
fn gpus_are_served_by_nics_of_their_socket_or_by_those_that_there_are() {
    for (of_nics, own) in [([1, 0], [["n1:1"], ["n0:1"]]), ([1, 1], [["n0:1"], ["n1:1"]])] {
        let nics = EmulatedNics::new(&[&NICS, &NICS]);
        let sysfs = sysfs(&of_nics, &[0, 1]);
        let settings = |host| everything() + &nics.section(host, "use = \"required\"\n");
        let hosts = TestHosts::start_tuned(2, settings, |settings| settings.sysfs = sysfs.path().into());
        let answer = ask(&hosts.service(0).control_socket(), &ControlRequest::Gpus).expect("an answer");
        let ControlAnswer::Gpus(gpus) = answer else { panic!("{answer:?}") };
        let found: Vec<_> = gpus.iter().map(|gpu| gpu.nics.clone()).collect();
        assert_eq!(found, own, "NICs on nodes {of_nics:?}, GPUs on 0 and 1");
        assert!(gpus.iter().all(|gpu| gpu.nic_access.as_deref() == Some("dma-buf")), "{gpus:?}");
        both_play("combines", &hosts, &[2, 2]);
        assert!((0..2).all(|nic| nics.carried(0, nic).out_bytes > 0));
    }
}
