//! The plugin beside a kubelet that is made up: it speaks kubelet's API over its sockets, and a real service serves the tenants.
//!
//! Needs `mccs-service`, `mccsctl` and `mccs-perf` in `MCCS_PROGRAMS` (default: `target/debug`). The test of namespaces needs root.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mccs::Client;
use mccs_config::KubernetesFile;
use mccs_device_plugin::api::device_plugin_client::DevicePluginClient;
use mccs_device_plugin::api::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};
use mccs_device_plugin::api::registration_server::{Registration, RegistrationServer};
use mccs_device_plugin::api::{
    AllocateRequest, ContainerAllocateRequest, ContainerDevices, ContainerResources, Empty, ListPodResourcesRequest,
    ListPodResourcesResponse, PodResources, PreStartContainerRequest, RegisterRequest,
};
use mccs_device_plugin::kubelet::connect;
use serde_json::Value;
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

fn program(name: &str) -> PathBuf {
    let own = std::env::var_os("MCCS_PROGRAMS").map(PathBuf::from);
    let folder = own.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/debug"));
    let path = folder.join(name);
    assert!(path.exists(), "{} is not there: cargo build --workspace --bins", path.display());
    path
}

/// Pods that kubelet knows.
type Pods = Arc<Mutex<Vec<PodResources>>>;

struct Kubelet {
    registered: mpsc::UnboundedSender<RegisterRequest>,
}

#[tonic::async_trait]
impl Registration for Kubelet {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let _ = self.registered.send(request.into_inner());
        Ok(Response::new(Empty {}))
    }
}

struct Lister(Pods);

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(&self, _: Request<ListPodResourcesRequest>) -> Result<Response<ListPodResourcesResponse>, Status> {
        let pod_resources = self.0.lock().expect("no panic").clone();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }
}

/// A node: kubelet, the service, and the plugin. All end with the value.
struct Node {
    folder: tempfile::TempDir,
    service: Option<Child>,
    pods: Pods,
    registrations: mpsc::UnboundedReceiver<RegisterRequest>,
    registered: mpsc::UnboundedSender<RegisterRequest>,
    tasks: Vec<JoinHandle<()>>,
    plugin: JoinHandle<()>,
    file: KubernetesFile,
}

impl Node {
    async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("plugins")).expect("a folder");
        let text = format!(
            "runtime_dir = {:?}\nplugin_dir = {:?}\npod_resources = {:?}\ncdi_dir = {:?}\nlibrary_dir = \"/usr/lib/mccs\"\n\
             look_every = \"50ms\"\n[tenant.training]\nslots = 4\n[tenant.training.terms]\nweight = 3\nmax_memory = \"64MiB\"\n",
            at("run"),
            at("plugins"),
            at("pods.sock"),
            at("cdi"),
        );
        let file = KubernetesFile::parse(&text, "kubernetes.toml").expect("right");
        let (pods, (registered, registrations)) = (Pods::default(), mpsc::unbounded_channel());
        let plugin = tokio::spawn(async {});
        let mut node = Node { folder, service: None, pods, registrations, registered, tasks: Vec::new(), plugin, file };
        node.start_service();
        node.start_lister();
        node.start_kubelet();
        let own = node.file.clone();
        node.plugin = tokio::spawn(async move { mccs_device_plugin::run(own).await.expect("runs") });
        node
    }

    fn start_service(&mut self) {
        let config = self.folder.path().join("service.toml");
        let text = format!("[service]\nruntime_dir = {:?}\n[cuda]\nuse = \"off\"\n", self.file.runtime_dir);
        std::fs::write(&config, text).expect("a file");
        let mut command = Command::new(program("mccs-service"));
        let command = command.arg("--config").arg(config).env("RUST_LOG", "error").stdout(Stdio::piped());
        let mut service = command.spawn().expect("starts");
        let said = BufReader::new(service.stdout.take().expect("piped")).lines().next();
        assert!(said.is_some_and(|line| line.is_ok_and(|line| line.contains("ready"))));
        self.service = Some(service);
    }

    fn stop_service(&mut self) {
        if let Some(mut service) = self.service.take() {
            service.kill().expect("killed");
            service.wait().expect("ended");
        }
    }

    fn start_kubelet(&mut self) {
        let listener = UnixListener::bind(self.file.plugin_dir.join("kubelet.sock")).expect("listens");
        let kubelet = RegistrationServer::new(Kubelet { registered: self.registered.clone() });
        self.tasks.push(tokio::spawn(async move {
            let serving = Server::builder().add_service(kubelet).serve_with_incoming(UnixListenerStream::new(listener));
            serving.await.expect("served");
        }));
    }

    /// kubelet tells of its pods, at a socket that it makes when it starts.
    fn start_lister(&mut self) {
        let _ = std::fs::remove_file(&self.file.pod_resources);
        let lister = PodResourcesListerServer::new(Lister(Arc::clone(&self.pods)));
        let listener = UnixListener::bind(&self.file.pod_resources).expect("listens");
        self.tasks.push(tokio::spawn(async move {
            let serving = Server::builder().add_service(lister).serve_with_incoming(UnixListenerStream::new(listener));
            serving.await.expect("served");
        }));
    }

    /// The plugin, once it has made itself known.
    async fn plugin(&mut self) -> DevicePluginClient<Channel> {
        let request = self.registrations.recv().await.expect("a registration");
        assert_eq!((&*request.version, &*request.resource_name), ("v1beta1", "mccs.io/tenant-training"));
        assert!(request.options.is_some_and(|options| options.pre_start_required));
        DevicePluginClient::new(connect(&self.file.plugin_dir.join(&request.endpoint)).await.expect("it listens"))
    }

    /// kubelet has a pod whose container has a device.
    fn admit(&self, namespace: &str, name: &str, device: &str) {
        let devices =
            ContainerDevices { resource_name: "mccs.io/tenant-training".into(), device_ids: vec![device.into()] };
        // Another resource has a device of the same name, which is none of the plugin's.
        let other = ContainerDevices { resource_name: "example.com/x".into(), device_ids: vec!["training-3".into()] };
        let container = ContainerResources { name: "trainer".into(), devices: vec![devices, other] };
        let pod = PodResources { name: name.into(), namespace: namespace.into(), containers: vec![container] };
        self.pods.lock().expect("no panic").push(pod);
    }

    fn forget(&self, name: &str) {
        self.pods.lock().expect("no panic").retain(|pod| pod.name != name);
    }

    async fn asks(&self, arguments: &[&str]) -> Value {
        let mut command = tokio::process(program("mccsctl"), &self.file, arguments);
        let output = tokio::task::spawn_blocking(move || command.output().expect("runs")).await.expect("ran");
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    async fn tenants(&self) -> Vec<Value> {
        let told = self.asks(&["tenants"]).await;
        told["tenants"].as_array().expect("a list").iter().filter(|row| row["tenant"] != "default").cloned().collect()
    }

    async fn until_no_tenant_is_left(&self) {
        while !self.tenants().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn socket(&self, device: &str) -> PathBuf {
        self.file.tenant_folder(&format!("k8s-{device}")).join("mccs.sock")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.plugin.abort();
        self.tasks.iter().for_each(JoinHandle::abort);
        self.stop_service();
    }
}

/// Commands of the operator's tool.
mod tokio {
    pub use ::tokio::*;

    /// The command with the service's socket.
    pub fn process(
        program: std::path::PathBuf,
        file: &mccs_config::KubernetesFile,
        arguments: &[&str],
    ) -> std::process::Command {
        let mut command = std::process::Command::new(program);
        command.arg("--json").arg("--socket").arg(file.control_socket()).args(arguments);
        command
    }
}

fn start_request(device: &str) -> PreStartContainerRequest {
    PreStartContainerRequest { devices_ids: vec![device.into()] }
}

fn allocate_request(devices: &[&str]) -> AllocateRequest {
    let devices_ids = devices.iter().map(|device| (*device).to_owned()).collect();
    AllocateRequest { container_requests: vec![ContainerAllocateRequest { devices_ids }] }
}

/// Ends the tests when they hang.
fn watchdog() {
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_secs(300));
        eprintln!("watchdog: the test hangs");
        std::process::abort();
    });
}

#[tokio::test]
async fn a_container_has_a_tenant_from_its_start_to_the_end_of_its_pod() {
    watchdog();
    let mut node = Node::start().await;
    let mut plugin = node.plugin().await;
    // A tenant of somebody else, however it is called.
    node.asks(&["tenant", "add", "k8s-training-2"]).await;
    let answer = plugin.allocate(allocate_request(&["training-1"])).await.expect("allocated").into_inner();
    let [container] = &answer.container_responses[..] else { panic!("{answer:?}") };
    assert_eq!(container.cdi_devices[0].name, "mccs.io/tenant=training-1");
    let why = plugin.pre_start_container(start_request("training-1")).await.expect_err("nobody has it");
    assert!(why.message().contains("kubelet names no pod that has training-1"), "{why}");
    node.admit("ml", "llm-0", "training-1");
    for _ in 0..2 {
        // A container that crashes starts again.
        plugin.pre_start_container(start_request("training-1")).await.expect("it may start");
    }
    let rows = node.tenants().await;
    let row = rows.iter().find(|row| row["tenant"] == "k8s-training-1").expect("a tenant");
    assert_eq!((&row["rules"], &row["weight"]), (&"training".into(), &3.into()));
    let labels = serde_json::json!({"container": "trainer", "job": "llm-0", "namespace": "ml", "pod": "llm-0"});
    assert_eq!(row["labels"], labels);
    let client = Client::connect(node.socket("training-1")).expect("a session");
    node.forget("llm-0");
    while node.tenants().await.len() > 1 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let why = client.create_stream().expect_err("its pod has ended").to_string();
    assert!(why.contains("has taken tenant k8s-training-1 away"), "{why}");
    assert_eq!(node.tenants().await[0]["tenant"], "k8s-training-2", "what is somebody else's stays");
}

#[tokio::test]
async fn what_no_container_may_have_is_refused() {
    watchdog();
    let mut node = Node::start().await;
    let mut plugin = node.plugin().await;
    let why = plugin.allocate(allocate_request(&["training-0", "training-1"])).await.expect_err("two");
    assert!(why.message().contains("ask for 1 of mccs.io/tenant-training, not 2"), "{why}");
    for device in ["training-4", "training-01", "training-", "other-0", "../x", ""] {
        let why = plugin.allocate(allocate_request(&[device])).await.expect_err(device);
        assert!(why.message().contains("has no device"), "{device}: {why}");
        node.admit("ml", "wrong", device);
        let why = plugin.pre_start_container(start_request(device)).await.expect_err(device);
        assert!(why.message().contains("has no device"), "{device}: {why}");
    }
    assert!(node.tenants().await.is_empty());
}

#[tokio::test]
async fn a_slot_of_another_pod_is_taken_over_without_anything_of_it() {
    watchdog();
    let mut node = Node::start().await;
    let mut plugin = node.plugin().await;
    node.admit("ml", "first", "training-0");
    plugin.pre_start_container(start_request("training-0")).await.expect("it may start");
    let client = Client::connect(node.socket("training-0")).expect("a session");
    // In one step, so that no look sees neither.
    {
        let mut pods = node.pods.lock().expect("no panic");
        pods[0].name = "second".into();
        pods[0].namespace = "other".into();
    }
    plugin.pre_start_container(start_request("training-0")).await.expect("it may start");
    let why = client.create_stream().expect_err("the first pod's").to_string();
    assert!(why.contains("has taken tenant k8s-training-0 away"), "{why}");
    let rows = node.tenants().await;
    assert_eq!((&rows[0]["labels"]["pod"], &rows[0]["labels"]["namespace"]), (&"second".into(), &"other".into()));
    node.forget("second");
    node.until_no_tenant_is_left().await;
}

/// As of a StatefulSet: kubelet's list is the same before and after, and only the gift of the slot tells the pods apart.
#[tokio::test]
async fn a_slot_begins_anew_for_a_pod_of_the_same_name() {
    watchdog();
    let mut node = Node::start().await;
    let mut plugin = node.plugin().await;
    node.admit("ml", "llm-0", "training-0");
    let mut before: Option<Client> = None;
    for _ in 0..3 {
        plugin.allocate(allocate_request(&["training-0"])).await.expect("allocated");
        if let Some(client) = before.take() {
            let why = client.create_stream().err().map(|error| error.to_string());
            // The plugin's look may come before or after.
            assert!(why.is_none_or(|why| why.contains("has taken tenant k8s-training-0 away")));
            plugin.pre_start_container(start_request("training-0")).await.expect("it may start");
            let why = client.create_stream().expect_err("the first pod's").to_string();
            assert!(why.contains("has taken tenant k8s-training-0 away"), "{why}");
        } else {
            plugin.pre_start_container(start_request("training-0")).await.expect("it may start");
        }
        let client = Client::connect(node.socket("training-0")).expect("a session");
        // A container that crashes is of the same pod: others of it go on.
        plugin.pre_start_container(start_request("training-0")).await.expect("it may start again");
        tokio::time::sleep(node.file.look_every.0 * 3).await;
        drop(client.create_stream().expect("the session goes on"));
        before = Some(client);
    }
    // Nothing of the former pod waits for the next one's start, which may take as long as an image does.
    plugin.allocate(allocate_request(&["training-0"])).await.expect("allocated");
    node.until_no_tenant_is_left().await;
}

#[tokio::test]
async fn pods_of_an_indexed_job_have_its_name_as_their_job() {
    watchdog();
    let mut node = Node::start().await;
    let mut plugin = node.plugin().await;
    for (pod, device) in [("llm-70b-0-x7k2p", "training-0"), ("llm-70b-1-9tq4w", "training-1")] {
        node.admit("ml", pod, device);
        plugin.pre_start_container(start_request(device)).await.expect("it may start");
    }
    let rows = node.tenants().await;
    assert!(rows.len() == 2 && rows.iter().all(|row| row["labels"]["job"] == "llm-70b"), "{rows:?}");
}

#[tokio::test]
async fn a_service_that_is_away_takes_no_container_and_a_kubelet_that_restarts_is_told_again() {
    watchdog();
    let mut node = Node::start().await;
    let mut plugin = node.plugin().await;
    let mut lists = plugin.list_and_watch(Empty {}).await.expect("watched").into_inner();
    async fn until(lists: &mut tonic::Streaming<mccs_device_plugin::api::ListAndWatchResponse>, health: &str) {
        loop {
            let list = lists.message().await.expect("told").expect("the stream goes on");
            let ids: Vec<_> = list.devices.iter().map(|device| device.id.as_str()).collect();
            assert_eq!(ids, ["training-0", "training-1", "training-2", "training-3"]);
            if list.devices.iter().all(|device| device.health == health) {
                return;
            }
        }
    }
    until(&mut lists, "Healthy").await;
    node.stop_service();
    until(&mut lists, "Unhealthy").await;
    node.admit("ml", "llm-0", "training-0");
    let why = plugin.pre_start_container(start_request("training-0")).await.expect_err("no service");
    assert!(why.message().contains("no mccs-service listens"), "{why}");
    node.start_service();
    until(&mut lists, "Healthy").await;
    plugin.pre_start_container(start_request("training-0")).await.expect("it may start");
    // kubelet starts anew: sockets go, plugins come again. Tenants stay.
    for entry in std::fs::read_dir(&node.file.plugin_dir).expect("a folder") {
        std::fs::remove_file(entry.expect("an entry").path()).expect("removed");
    }
    node.start_kubelet();
    let mut plugin = node.plugin().await;
    plugin.allocate(allocate_request(&["training-1"])).await.expect("it answers");
    assert_eq!(node.tenants().await.len(), 1);
}

/// Until the API server answers it, a kubelet that starts anew names no pod at all; then one after the other.
#[tokio::test]
async fn a_kubelet_that_starts_and_knows_no_pod_yet_ends_no_session() {
    watchdog();
    let mut node = Node::start().await;
    let mut plugin = node.plugin().await;
    for (name, device) in [("first", "training-0"), ("second", "training-1"), ("third", "training-2")] {
        node.admit("ml", name, device);
        plugin.pre_start_container(start_request(device)).await.expect("it may start");
    }
    // This kubelet has settled: who ends is taken away.
    node.forget("third");
    while node.tenants().await.len() > 2 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let client = Client::connect(node.socket("training-1")).expect("a session");
    let knows = std::mem::take(&mut *node.pods.lock().expect("no panic"));
    node.start_lister();
    // More looks than a kubelet settles in.
    tokio::time::sleep(node.file.look_every.0 * 30).await;
    assert_eq!(node.tenants().await.len(), 2, "none has ended");
    node.pods.lock().expect("no panic").push(knows[0].clone());
    tokio::time::sleep(node.file.look_every.0 * 3).await;
    drop(client.create_stream().expect("the session goes on, though kubelet has not named its pod yet"));
    node.pods.lock().expect("no panic").push(knows[1].clone());
    tokio::time::sleep(node.file.look_every.0 * 30).await;
    drop(client.create_stream().expect("the session goes on"));
    node.forget("second");
    while node.tenants().await.len() > 1 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    client.create_stream().expect_err("its pod has ended");
}

#[tokio::test]
async fn nothing_is_left_of_pods_that_come_and_go() {
    watchdog();
    let pods: usize = std::env::var("MCCS_PODS").ok().and_then(|pods| pods.parse().ok()).unwrap_or(40);
    let mut node = Node::start().await;
    let mut plugin = node.plugin().await;
    let service = node.service.as_ref().expect("it runs").id();
    let held = || {
        let count = |what: &str| std::fs::read_dir(format!("/proc/{service}/{what}")).expect("a process").count();
        (count("fd"), count("task"))
    };
    let mut before = None;
    for round in 0..pods.div_ceil(4) {
        for slot in 0..4 {
            let (device, name) = (format!("training-{slot}"), format!("pod-{round}-{slot}"));
            node.admit("ml", &name, &device);
            plugin.pre_start_container(start_request(&device)).await.expect("it may start");
            let client = Client::connect(node.socket(&device)).expect("a session");
            assert!(client.allocate(4096).is_ok());
        }
        node.pods.lock().expect("no panic").clear();
        if round == 0 {
            node.until_no_tenant_is_left().await;
            // Connections of those who have asked are closed in a moment.
            while before.replace(held()) != Some(held()) {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
    node.until_no_tenant_is_left().await;
    // A tenant that is left for good ends the test as hanging.
    while Some(held()) != before {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let left = std::fs::read_dir(node.file.runtime_dir.join("tenants")).expect("a folder").count();
    assert_eq!(left, 0);
}

/// As a container runtime makes a container by the CDI specification: own mounts, processes, shared memory, network.
#[tokio::test]
#[ignore = "needs root"]
async fn a_pod_of_own_namespaces_reduces_by_what_cdi_gives_it() {
    watchdog();
    let mut node = Node::start().await;
    let mut plugin = node.plugin().await;
    node.admit("ml", "llm-0", "training-2");
    plugin.pre_start_container(start_request("training-2")).await.expect("it may start");
    let text = std::fs::read_to_string(node.file.cdi_dir.join("mccs.io-tenant.json")).expect("a specification");
    let specification: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(specification["kind"], "mccs.io/tenant");
    let devices = specification["devices"].as_array().expect("devices");
    let edits = &devices.iter().find(|device| device["name"] == "training-2").expect("the device")["containerEdits"];
    let env: Vec<&str> = edits["env"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    assert_eq!(env, ["MCCS_SOCKET=/run/mccs/mccs.sock"]);
    let mount = &edits["mounts"][0];
    assert_eq!(mount["containerPath"], "/run/mccs");
    assert!(mount["options"].as_array().is_some_and(|options| options.contains(&"ro".into())));
    let script = "mount -t tmpfs none /run && mkdir /run/mccs && mount --bind \"$1\" /run/mccs && mount -o remount,bind,ro /run/mccs || exit 9
        if touch /run/mccs/x 2> /dev/null; then exit 8; fi
        [ \"$(echo /proc/[0-9]*)\" != \"\" ] && [ \"$$\" = 1 ] || exit 7
        export MCCS_NRANKS=2 MCCS_ROOT_ADDRESS=
        MCCS_RANK=0 \"$2\" --check --end 1MiB --operation all & MCCS_RANK=1 \"$2\" --check --end 1MiB --operation all && wait $!";
    let mut pod = Command::new("unshare");
    pod.args(["--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--mount-proc", "sh", "-c", script, "sh"]);
    pod.arg(mount["hostPath"].as_str().expect("a path")).arg(program("mccs-perf"));
    pod.env("MCCS_UNIQUE_ID", format!("{:032x}", rand::random::<u128>()));
    env.iter().filter_map(|pair| pair.split_once('=')).for_each(|(name, value)| {
        pod.env(name, value);
    });
    let output = tokio::task::spawn_blocking(move || pod.output().expect("runs")).await.expect("ran");
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("all_reduce"), "{output:?}");
    node.forget("llm-0");
    node.until_no_tenant_is_left().await;
}
