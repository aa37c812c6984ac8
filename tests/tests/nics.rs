//! Communicators over RDMA, on emulated devices (`tests/nics`): real services and the whole transport, without hardware.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mccs_config::service::TransportKind;
use mccs_control::{CommView, HostView};
use mccs_emulated_nics::control::{Carried, Fault, carried, make};
use mccs_eval::workload::Call;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_registry::Registry;
use mccs_tests::hosts::{Raise, TestHosts, in_threads, run_until_stopped};
use mccs_tests::nics::{library_in, list_nics};
use mccs_tests::{run_checked, watchdog};

/// Two hosts with two ranks each.
const PLACEMENT: [usize; 4] = [0, 0, 1, 1];
const MBIT_PER_S: u64 = 10_000;

/// Two hosts whose services have emulated devices alone: `h0` has n0, n1 and so on, `h1` as many more.
struct Fixture {
    hosts: TestHosts,
    folder: tempfile::TempDir,
    devices: usize,
}

impl Fixture {
    fn new(devices: usize) -> Self {
        watchdog();
        // Memory, not a disk.
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
        list_nics(folder.path(), &[devices; 2], 0, MBIT_PER_S);
        let library = library_in(folder.path());
        let hosts = TestHosts::start_each(2, |host| {
            let names: Vec<String> =
                (host * devices..(host + 1) * devices).map(|number| format!("n{number}")).collect();
            format!(
                "[rdma]\nuse = \"required\"\nlibrary = {library:?}\ndevices = {names:?}\n[host_device]\n\
                 shm_exchange_limit = \"0\"\n"
            )
        });
        Fixture { hosts, folder, devices }
    }

    /// Hosts with so many devices each, whose files say no more of RDMA than `keys` does: n0 and so on are of `h0`, further ones of `h1`. `before`
    /// is done to the devices first.
    fn by_default(devices: [usize; 2], keys: impl Fn(usize) -> String, before: impl Fn(&Path)) -> Self {
        watchdog();
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
        list_nics(folder.path(), &devices, 0, MBIT_PER_S);
        before(folder.path());
        let hosts = TestHosts::start_each(2, |host| {
            let own = folder.path().join(format!("h{host}"));
            std::fs::create_dir(&own).expect("a folder");
            let library = library_in(&own);
            format!("[rdma]\nlibrary = {library:?}\n{}[host_device]\nshm_exchange_limit = \"0\"\n", keys(host))
        });
        Fixture { hosts, folder, devices: devices[0] }
    }

    /// All ranks join and add up, checked; what `h0`'s service says of the communicator meanwhile.
    fn add_up(&self) -> CommView {
        let shown = std::sync::Mutex::new(None);
        let wrong = self.hosts.ranks(&PLACEMENT, |rank| {
            let wrong: u64 = (0..4).map(|seed| run_checked(&rank, &all_reduce(200_000, seed), false)).sum();
            if rank.comm.rank() == 0 {
                *shown.lock().expect("whole") = self.registry(0).comms().first().map(|comm| comm.view());
            }
            wrong
        });
        assert_eq!(wrong.into_iter().sum::<u64>(), 0, "wrong elements");
        shown.into_inner().expect("whole").expect("a communicator")
    }

    fn registry(&self, host: usize) -> &Registry {
        &self.hosts.service(host).service().registry
    }

    /// A host, as its own service shows it.
    fn own_view(&self, host: usize) -> HostView {
        let views = self.registry(host).host_views(Instant::now());
        views.into_iter().find(|view| view.own).expect("it knows itself")
    }

    fn host_of(&self, device: usize) -> String {
        format!("h{}", device / self.devices)
    }

    fn make(&self, device: usize, fault: Fault) {
        make(self.folder.path(), &self.host_of(device), &format!("n{device}"), fault).expect("a device");
    }

    fn carried(&self, device: usize) -> Carried {
        carried(self.folder.path(), &self.host_of(device), &format!("n{device}")).expect("a device")
    }

    /// Waits until a device carries bytes.
    fn wait_until_used(&self, device: usize) {
        let before = self.carried(device).out_bytes;
        while self.carried(device).out_bytes < before + 100_000 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Checked all-reduces on all ranks, while `body` runs and until it returns.
    fn under_load(&self, body: impl FnOnce(&AtomicU64)) -> u64 {
        let (stop, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let ranks = self.hosts.join(&PLACEMENT);
        std::thread::scope(|scope| {
            let _ends = Raise(&stop);
            let threads: Vec<_> = ranks
                .iter()
                .map(|rank| scope.spawn(|| run_until_stopped(rank, &stop, &done, |number| all_reduce(50_000, number))))
                .collect();
            body(&done);
            stop.store(1, Ordering::Relaxed);
            threads.into_iter().map(|thread| thread.join().expect("checked")).max().expect("ranks")
        })
    }
}

/// The library, in the folder of its devices: each copy is a library of its own.
fn all_reduce(count: u64, seed: u64) -> Call {
    let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::F32, RedOp::Sum);
    Call { kind, dtype, redop, root: 0, count, nranks: PLACEMENT.len() as u32, seed }
}

/// Waits until so many more operations have ended.
fn wait_for(done: &AtomicU64, more: u64) {
    let goal = done.load(Ordering::Relaxed) + more;
    while done.load(Ordering::Relaxed) < goal {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn every_collective_is_right_over_emulated_nics() {
    let fixture = Fixture::new(1);
    let before = fixture.carried(0);
    let wrong: u64 = fixture
        .hosts
        .ranks(&PLACEMENT, |rank| {
            let mut wrong = 0;
            for (number, kind) in CollectiveKind::ALL.iter().enumerate() {
                for count in [1, 1000, 300_000] {
                    let seed = number as u64 * 1000 + count;
                    let count = if *kind == CollectiveKind::Barrier { 0 } else { count };
                    let root = if kind.has_root() { seed as u32 % 4 } else { 0 };
                    let call = Call { kind: *kind, root, ..all_reduce(count, seed) };
                    wrong += run_checked(&rank, &call, false);
                }
            }
            wrong
        })
        .into_iter()
        .sum();
    assert_eq!(wrong, 0, "wrong elements");
    assert!(fixture.carried(0).out_bytes > before.out_bytes + 300_000, "the bytes went by the device");
}

#[test]
fn hosts_with_nics_use_all_of_them_without_any_key() {
    let fixture = Fixture::by_default([2, 2], |_| String::new(), |_| ());
    let shown = fixture.add_up();
    assert_eq!((shown.transport, shown.transport_reason), (Some(TransportKind::Rdma), None));
    for device in 0..4 {
        assert!(fixture.carried(device).out_bytes > 100_000, "n{device} carries a part");
    }
    let own = fixture.own_view(0);
    let ports = own.rdma.expect("NICs");
    assert!(ports.contains("n0 port 1") && ports.contains("n1 port 1") && !ports.contains("n2"), "{ports}");
}

#[test]
fn hosts_with_other_numbers_of_nics_use_all_of_them() {
    let fixture = Fixture::by_default([3, 1], |_| String::new(), |_| ());
    assert_eq!(fixture.add_up().transport, Some(TransportKind::Rdma));
    for device in 0..4 {
        assert!(fixture.carried(device).out_bytes > 100_000, "n{device} carries a part");
    }
}

#[test]
fn one_host_without_nics_has_all_go_over_tcp_and_says_why() {
    for (devices, keys, reason) in [
        ([2, 0], "", "host h1: this host has no RDMA device"),
        ([1, 1], "use = \"off\"\n", "host h1: rdma.use is \"off\""),
        ([1, 1], "timeout = 22\n", "host h1: rdma.timeout: 22"),
    ] {
        let keys_of = |host| if host == 1 { keys.to_owned() } else { String::new() };
        let fixture = Fixture::by_default(devices, keys_of, |_| ());
        let shown = fixture.add_up();
        assert_eq!(shown.transport, Some(TransportKind::Tcp));
        let told = shown.transport_reason.expect("a reason");
        assert!(told.starts_with(reason), "{told}");
        assert_eq!(fixture.carried(0).out_bytes, 0, "nothing goes by n0");
        let own = fixture.own_view(1);
        assert!(told.ends_with(&own.no_rdma.expect("none")), "{told}");
    }
}

#[test]
fn a_host_whose_port_is_down_has_all_go_over_tcp() {
    let down = |folder: &Path| make(folder, "h1", "n1", Fault::Down).expect("a device");
    let fixture = Fixture::by_default([1, 1], |_| String::new(), down);
    let told = fixture.add_up().transport_reason.expect("a reason");
    assert!(told.starts_with("host h1: ") && told.contains("n1 port 1: its link is down"), "{told}");
}

#[test]
fn who_requires_rdma_of_a_host_without_is_refused_with_what_that_lacks() {
    let keys = |host| if host == 0 { "use = \"required\"\n".to_owned() } else { String::new() };
    let fixture = Fixture::by_default([1, 0], keys, |_| ());
    let id = mccs::unique_id().expect("an id");
    let clients = (0..).zip(PLACEMENT).map(|(rank, host)| (rank, fixture.hosts.service(host).connect(0)));
    let refusals = in_threads(clients.collect(), |(rank, client): (u32, mccs::Client)| {
        let joining = client.communicator(id, rank, 4).root_address(Some("h0"));
        joining.join().map(drop).expect_err("no communicator").to_string()
    });
    for refusal in refusals {
        assert!(
            refusal.contains("host h0 has rdma.use = \"required\", and host h1: this host has no RDMA"),
            "{refusal}"
        );
    }
}

#[test]
fn a_lossy_device_sends_again() {
    let fixture = Fixture::new(1);
    fixture.make(0, Fault::LossPpm(20_000));
    fixture.under_load(|done| wait_for(done, 100));
}

#[test]
fn a_port_that_goes_down_is_left_and_used_again_when_it_is_back() {
    let fixture = Fixture::new(2);
    let calls = fixture.under_load(|done| {
        wait_for(done, 40);
        let used: Vec<usize> = (0..2).filter(|device| fixture.carried(*device).out_bytes > 0).collect();
        assert!(!used.is_empty(), "h0 sends by a device");
        let home = used[0];
        fixture.make(home, Fault::Down);
        wait_for(done, 40);
        let other = 1 - home;
        assert!(fixture.carried(other).out_bytes > 0, "what the port carried goes by the other one");
        fixture.make(home, Fault::Up);
        fixture.wait_until_used(home);
        wait_for(done, 40);
    });
    assert!(calls >= 30, "no call has failed");
}

#[test]
fn late_completions_and_a_slow_port_cost_time_alone() {
    let fixture = Fixture::new(1);
    fixture.under_load(|done| {
        fixture.make(0, Fault::CompletionDelay(2_000_000));
        wait_for(done, 40);
        fixture.make(0, Fault::CompletionDelay(0));
        fixture.make(1, Fault::Rate(200));
        wait_for(done, 40);
    });
}
