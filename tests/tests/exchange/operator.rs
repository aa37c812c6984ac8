//! Whole services that know each other from their configuration, and what the operator sees of it.

use mccs_config::ServiceConfig;
use mccs_control::{ControlAnswer, ControlRequest, HostView, call};
use mccs_exchange::keys;
use mccs_service::service::{Service, Settings};
use mccs_tests::{TestService, watchdog};

use crate::fixture::free_address;

struct Two {
    directory: tempfile::TempDir,
    addresses: [std::net::SocketAddr; 2],
}

impl Two {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        keys::make(&["host-a", "host-b"], directory.path(), false).unwrap();
        Two { directory, addresses: [free_address(), free_address()] }
    }

    fn name(own: usize) -> &'static str {
        ["host-a", "host-b"][own]
    }

    fn start(&self, own: usize, rest: &str) -> TestService {
        TestService::start_named(Self::name(own), &self.settings(own, rest))
    }

    /// A host's file, without `[service]`.
    fn settings(&self, own: usize, rest: &str) -> String {
        let name = Self::name(own);
        let files = keys::files(self.directory.path(), name);
        let [a, b] = self.addresses;
        format!(
            "[exchange]\nlisten = \"{}\"\ncertificate = {:?}\nkey = {:?}\nauthority = {:?}\n\
             reconnect_max = \"50ms\"\n[[host]]\nname = \"host-a\"\naddress = \"{a}\"\n\
             [[host]]\nname = \"host-b\"\naddress = \"{b}\"\n{rest}",
            self.addresses[own], files.certificate, files.key, files.authority
        )
    }
}

fn hosts(service: &TestService) -> Vec<HostView> {
    match call(&service.control_socket(), &ControlRequest::Hosts).unwrap() {
        ControlAnswer::Hosts(hosts) => hosts,
        other => panic!("{other:?}"),
    }
}

fn until_shown(service: &TestService, other: &str, up: bool) -> HostView {
    loop {
        if let Some(view) = hosts(service).into_iter().find(|view| view.host == other && view.up == up) {
            return view;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn services_find_each_other_and_the_operator_sees_it() {
    watchdog();
    let two = Two::new();
    let a = two.start(0, "");
    until_shown(&a, "host-b", false);
    let mut b = two.start(1, "[runtime]\nplacement = \"dedicated\"\n");
    let seen = until_shown(&a, "host-b", true);
    assert_eq!((seen.address, seen.own), (two.addresses[1], false));
    until_shown(&b, "host-a", true);
    assert!(hosts(&b).iter().any(|view| view.host == "host-b" && view.own));
    b.stop();
    assert!(until_shown(&a, "host-b", false).last_error.is_some());
    drop(b);
    let b = two.start(1, "");
    until_shown(&a, "host-b", true);
    until_shown(&b, "host-a", true);
}

#[test]
fn a_single_host_has_no_hosts() {
    assert_eq!(hosts(&TestService::start("")), []);
}

#[test]
fn a_service_that_cannot_listen_or_prove_itself_does_not_start() {
    watchdog();
    let two = Two::new();
    let _a = two.start(0, "");
    let start = |own: usize, settings: &str| {
        let (directory, name) = (tempfile::tempdir().unwrap(), Two::name(own));
        let text = format!("[service]\nname = {name:?}\nruntime_dir = {:?}\n{settings}", directory.path());
        let config = ServiceConfig::parse(&text, "test").unwrap();
        Service::start(&Settings::from_config(&config)).err().map(|error| format!("{error:#}")).unwrap_or_default()
    };
    let error = start(0, &two.settings(0, ""));
    assert!(error.contains("exchange.listen") && error.contains(&two.addresses[0].to_string()), "{error}");
    let error = start(1, &two.settings(1, "").replace("host-b.key", "host-a.key"));
    assert!(error.contains("exchange.key") && error.contains("host-a.key"), "{error}");
}
