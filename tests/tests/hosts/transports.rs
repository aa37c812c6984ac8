//! The transport of a communicator's flows changes while its collectives run: sockets, and queue pairs of a fake verbs
//! driver.

use std::sync::atomic::{AtomicU64, Ordering};

use mccs_config::service::TransportKind;
use mccs_control::ControlAnswer;
use mccs_service::service::{Settings, VerbsFrom};
use mccs_telemetry::flows::FlowView;
use mccs_tests::Rank;
use mccs_tests::hosts::{Raise, TestHosts, in_threads, run_until_stopped};
use mccs_transport::rdma::fake::{Fabric, FabricOptions};

use crate::changes::{epochs, mixture, reconfigure};

/// Gives each host that wants RDMA a device of one fabric.
pub(crate) fn on(fabric: &Fabric) -> impl Fn(&mut Settings) {
    |settings| {
        let rdma = settings.network.as_mut().and_then(|network| network.rdma.as_mut());
        rdma.into_iter().for_each(|rdma| rdma.verbs = VerbsFrom::Driver(fabric.add_host(1)));
    }
}

fn start(count: usize, usage: impl Fn(usize) -> &'static str) -> TestHosts {
    let fabric = Fabric::new(FabricOptions::default());
    TestHosts::start_tuned(count, |host| format!("[rdma]\nuse = {:?}\n", usage(host)), on(&fabric))
}

/// Flows of collectives on a host, of the strategy with this number.
pub(crate) fn flows(hosts: &TestHosts, host: usize, epoch: u64) -> Vec<FlowView> {
    let flows = hosts.service(host).service().registry.flows.flows(1000).0;
    flows.into_iter().filter(|flow| flow.name.epoch.map(u64::from) == Some(epoch)).collect()
}

/// Collectives that run meanwhile.
pub(crate) struct Work<'a> {
    done: &'a AtomicU64,
    /// A rank has failed.
    is_over: &'a dyn Fn() -> bool,
}

impl Work<'_> {
    /// Waits until something is so.
    pub(crate) fn until(&self, mut is_so: impl FnMut() -> bool) {
        while !is_so() {
            assert!(!(self.is_over)(), "the collectives are over");
            std::thread::yield_now();
        }
    }

    /// Waits until some more collectives have ended.
    pub(crate) fn more(&self) {
        let goal = self.done.load(Ordering::Relaxed) + 10;
        self.until(|| self.done.load(Ordering::Relaxed) >= goal);
    }
}

/// Runs collectives of every kind, checked, on `placement` while `body` does what it likes.
pub(crate) fn beside_collectives(hosts: &TestHosts, placement: &[usize], body: impl FnOnce(&Work<'_>)) {
    let ranks = hosts.join(placement);
    let nranks = placement.len() as u32;
    let (stop, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let run = |rank: Rank| run_until_stopped(&rank, &stop, &done, |seed| mixture(nranks, seed));
    std::thread::scope(|scope| {
        let stopping = Raise(&stop);
        let work = scope.spawn(move || in_threads(ranks, run));
        body(&Work { done: &done, is_over: &|| work.is_finished() });
        drop(stopping);
        work.join().expect("ranks");
    });
}

#[test]
fn flows_go_over_rdma_and_back_while_collectives_run() {
    for usage in ["standby", "required"] {
        let hosts = start(3, |_| usage);
        beside_collectives(&hosts, &[0, 1, 1, 2], |work| {
            let first = if usage == "standby" { TransportKind::Tcp } else { TransportKind::Rdma };
            let mut now = first;
            for epoch in 0..20 {
                // The third change of three is another one: what is absent stays.
                if epoch > 0 {
                    now = match (epoch % 3, now) {
                        (0, same) => same,
                        (_, TransportKind::Tcp) => TransportKind::Rdma,
                        (_, TransportKind::Rdma) => TransportKind::Tcp,
                    };
                    let change = if epoch % 3 == 0 { "channels = 2".into() } else { format!("transport = '{now}'") };
                    let answer = reconfigure(hosts.service(epoch as usize % 3), &change);
                    assert!(
                        matches!(answer, ControlAnswer::Reconfigured { epoch: made, .. } if made == epoch),
                        "{answer:?}"
                    );
                }
                // Its first collective comes when all hosts have heard, and any operation in the window has ended.
                let by_port = now == TransportKind::Rdma;
                let carries = |flow: &FlowView| {
                    flow.name.transport == Some(now) && flow.messages > 0 && flow.port.is_some() == by_port
                };
                work.until(|| (0..3).all(|host| flows(&hosts, host, epoch).iter().any(carries)));
                assert!(flows(&hosts, 0, epoch).iter().all(|flow| flow.name.transport == Some(now)));
            }
        });
    }
}

#[test]
fn who_lacks_rdma_refuses_and_all_goes_on() {
    let hosts = start(2, |host| if host == 0 { "standby" } else { "off" });
    beside_collectives(&hosts, &[0, 1, 1], |work| {
        let answer = reconfigure(hosts.service(0), "transport = 'rdma'");
        let refusal = |text: &str| text.contains("cannot prepare") && text.contains("no flows over rdma");
        assert!(matches!(&answer, ControlAnswer::Refused(text) if refusal(text)), "{answer:?}");
        work.more();
        assert_eq!(epochs(&hosts), [0, 0]);
        let answer = reconfigure(hosts.service(0), "transport = 'tcp'\nchannels = 2");
        let ControlAnswer::Reconfigured { epoch, .. } = answer else { panic!("{answer:?}") };
        work.until(|| flows(&hosts, 1, epoch).iter().any(|flow| flow.messages > 0));
        assert!(flows(&hosts, 1, epoch).iter().all(|flow| flow.name.transport == Some(TransportKind::Tcp)));
    });
}

/// Ports that RoCE cannot send from: the device's host says which it can.
#[test]
fn a_way_that_rdma_has_not_is_refused() {
    let hosts = start(2, |_| "standby");
    beside_collectives(&hosts, &[0, 1], |work| {
        let low = reconfigure(hosts.service(0), "transport = 'rdma'\n[[path]]\nsource_ports = '20000-20999'");
        assert!(matches!(&low, ControlAnswer::Refused(text) if text.contains("49152")), "{low:?}");
        work.more();
        assert_eq!(epochs(&hosts), [0, 0]);
        let high = reconfigure(hosts.service(0), "transport = 'rdma'\n[[path]]\nsource_ports = '50000-50999'");
        let ControlAnswer::Reconfigured { epoch, .. } = high else { panic!("{high:?}") };
        let carries = |flow: &FlowView| flow.name.path == "ports 50000-50999" && flow.messages > 0;
        work.until(|| flows(&hosts, 0, epoch).iter().any(carries));
    });
}

#[test]
fn a_single_host_has_no_flows_to_change() {
    let hosts = start(2, |_| "standby");
    let ranks = hosts.join(&[0, 0]);
    let answer = reconfigure(hosts.service(0), "transport = 'rdma'");
    assert!(matches!(&answer, ControlAnswer::Refused(text) if text.contains("it has no flows")), "{answer:?}");
    drop(ranks);
}

/// Hosts whose flows would begin over different transports would never meet: that is said when ranks join.
#[test]
fn hosts_that_begin_otherwise_are_refused_by_name() {
    let hosts = start(2, |host| if host == 0 { "standby" } else { "required" });
    let (id, clients) = (mccs::unique_id().expect("an id"), [0, 1].map(|host| (host, hosts.service(host).connect(0))));
    let refusals = in_threads(clients.into(), |(host, client)| {
        let joined = client.communicator(id, host as u32, 2).root_address("h0").join();
        joined.map(drop).expect_err("they begin otherwise").to_string()
    });
    for refusal in refusals {
        let says = ["host h1 has rdma.use = \"required\"", "host h0: rdma.use is \"standby\""]
            .iter()
            .all(|what| refusal.contains(what));
        assert!(says, "{refusal}");
    }
}
