//! Services of a cluster as programs, and ranks at them.

use std::path::PathBuf;
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};

use mccs::{Client, Communicator, DataType, RedOp, Stream};

use super::programs::{Program, address, make_keys, mccsctl};

/// The job of all communicators.
pub const JOB: &str = "training-7";

pub type Rank = (Client, Communicator, Stream);

/// Services of a cluster, of which that of the first host is the controller. End with the value.
pub struct Fixture {
    pub services: Vec<Program>,
    pub folder: tempfile::TempDir,
}

fn topology(hosts: &[&str]) -> String {
    let rack =
        |host: &&str| format!("[[leaf]]\nname = \"leaf-{host}\"\n[[host]]\nname = {host:?}\nleaf = \"leaf-{host}\"\n");
    let racks: String = hosts.iter().map(rack).collect();
    format!(
        "[rates]\nhost_leaf = \"100Gbit/s\"\nleaf_spine = \"50Gbit/s\"\n{racks}[[spine]]\nname = \"spine0\"\nsource_ports = \
         \"23000-23019\"\n[[class]]\npriority = 2\ndscp = 16\n"
    )
}

impl Fixture {
    /// With a single host.
    pub fn start() -> Self {
        Fixture::of(&["h0"])
    }

    pub fn of(hosts: &[&str]) -> Self {
        Fixture::with(hosts, true)
    }

    pub fn with(hosts: &[&str], has_controller: bool) -> Self {
        let folder = tempfile::tempdir().expect("a directory");
        let at = |name: &str| folder.path().join(name);
        make_keys(hosts, folder.path());
        std::fs::write(at("topology.toml"), topology(hosts)).expect("a file");
        std::fs::write(at("policy.toml"), "[policy]\nname = \"ecmp\"\n").expect("a file");
        let addresses: Vec<_> = hosts.iter().map(|host| (host, address())).collect();
        let list: String = addresses
            .iter()
            .map(|(host, address)| format!("[[host]]\nname = {host:?}\naddress = \"{address}:7400\"\n"))
            .collect();
        let start = |(host, address): &(&&str, std::net::Ipv4Addr)| {
            // The first has its sockets in the folder itself.
            let runtime = if **host == hosts[0] { folder.path().to_owned() } else { at(host) };
            std::fs::create_dir_all(&runtime).expect("a directory");
            let controller = format!(
                "[controller]\nhost = {:?}\ntopology = {:?}\npolicy = {:?}\n",
                hosts[0],
                at("topology.toml"),
                at("policy.toml")
            );
            let controller = if has_controller { &*controller } else { "" };
            let config = format!(
                "[service]\nname = {host:?}\nruntime_dir = {runtime:?}\n[cuda]\nuse = \"off\"\n[exchange]\nlisten = \"{address}:7400\"\ncertificate = \
                 {:?}\nkey = {:?}\nauthority = {:?}\n{controller}{list}",
                at(&format!("{host}.crt")),
                at(&format!("{host}.key")),
                at("authority.crt"),
            );
            std::fs::write(runtime.join("service.toml"), config).expect("a file");
            Program::start(&runtime.join("service.toml"))
        };
        Fixture { services: addresses.iter().map(start).collect(), folder }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> String {
        std::fs::write(self.at(name), text).expect("a file");
        self.at(name).display().to_string()
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        mccsctl().arg("--socket").arg(self.at("mccs-control.sock")).args(arguments).output().expect("runs")
    }

    /// Its output.
    pub fn says(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    pub fn says_in_json(&self, arguments: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.says(&[&["--json"], arguments].concat())).expect("JSON")
    }

    /// Why it fails.
    pub fn complains(&self, arguments: &[&str]) -> String {
        complaint(&self.run(arguments))
    }

    pub fn join(&self, id: mccs::UniqueId, rank: u32) -> (Client, Communicator, Stream) {
        let client = Client::connect(self.at("mccs.sock")).expect("a session");
        let comm = client.communicator(id, rank, 2).job(JOB).join().expect("a communicator");
        let stream = client.create_stream().expect("a stream");
        (client, comm, stream)
    }

    /// A communicator of a rank on each of two hosts, of the job [`JOB`].
    pub fn join_across(&self) -> (Rank, Rank) {
        let id = mccs::unique_id().expect("an id");
        let rank = |rank: u32, socket: PathBuf| {
            let client = Client::connect(socket).expect("a session");
            let comm = client.communicator(id, rank, 2).root_address("h0").job(JOB).join().expect("a communicator");
            let stream = client.create_stream().expect("a stream");
            (client, comm, stream)
        };
        std::thread::scope(|scope| {
            let second = scope.spawn(|| rank(1, self.at("h1").join("mccs.sock")));
            (rank(0, self.at("mccs.sock")), second.join().expect("a rank"))
        })
    }
}

pub fn complaint(output: &Output) -> String {
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Both calls: what is summed up first says whether a rank is to stop, so that both do after the same call.
pub fn sum_until((client, comm, stream): &Rank, stop: &AtomicBool) {
    const COUNT: u64 = 100_000;
    let memory = client.allocate(4 * COUNT).expect("memory");
    loop {
        // SAFETY: nothing is in flight.
        let bytes = unsafe { memory.as_mut_slice() };
        bytes.fill(0);
        bytes[0] = u8::from(stop.load(Ordering::Relaxed));
        comm.all_reduce(memory.at(0), memory.at(0), COUNT, DataType::I32, RedOp::Sum, stream).expect("enqueued");
        stream.synchronize().expect("completed");
        // SAFETY: as above.
        if unsafe { memory.as_mut_slice() }[0] > 0 {
            return;
        }
    }
}
