//! Ranks on GPUs, in processes of their own: memory cannot be imported into the process that exports it, which is the
//! service's, and the service of a test is in the test's own. A process runs a [`Role`], by this very binary.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use anyhow::ensure;
use mccs::cuda::CudaCommunicator;
use mccs::{Client, CollectiveKind, DataType, RedOp, ReduceOperator, UniqueId};
use mccs_cuda::{
    Context, DeviceAddress, DeviceMemory, Graph, OwnedStream, RawStream, copy_from_host, copy_to_host, gpus,
};
use mccs_device::cuda::{QUEUES_MAX, QUEUES_VARIABLE};
use mccs_eval::workload::{Call, POISON};
use mccs_tests::TestService;

/// Names the role to the process.
const ROLE: &str = "MCCS_GPU_ROLE";
/// Names the folder by which processes of one player wait for each other.
pub const TOGETHER: &str = "MCCS_GPU_TOGETHER";
/// Has each segment of a call's slices have a stream of its own, whatever the model says: teams of two are too small for that to pay.
pub const FORKS: &str = "MCCS_GPU_FORKS";

/// Work of a process, as one of those that run at the same time.
pub type Role = fn(&Place) -> anyhow::Result<()>;

/// Place of a process.
#[derive(Debug, Clone)]
pub struct Place {
    pub socket: PathBuf,
    pub id: UniqueId,
    /// This process' ranks: all of them, or one.
    pub ranks: std::ops::Range<u32>,
    pub nranks: u32,
    /// GPUs that ranks go round.
    pub gpus: usize,
    /// The root's address, where ranks are at several services.
    pub root: String,
}

/// A process that plays a role.
pub struct Player {
    pub process: Child,
    /// Whether all of its ranks are in it.
    is_alone: bool,
    out: BufReader<std::process::ChildStdout>,
}

impl Player {
    /// Starts a process. `place` says which ranks it plays.
    pub fn start(role: &str, place: &Place) -> Player {
        Player::start_with(role, place, &[])
    }

    /// The same, with more in its environment.
    pub fn start_with(role: &str, place: &Place, environment: &[(&str, PathBuf)]) -> Player {
        let mut command = to_play(role, place);
        command.envs(environment.iter().map(|(name, value)| (name, value))).stdout(Stdio::piped());
        let mut process = command.spawn().expect("a process");
        let out = BufReader::new(process.stdout.take().expect("its output"));
        Player { process, is_alone: !is_apart(place), out }
    }

    /// How what is said of its ranks begins: `(process` and its number, as far as that is known of others than the first.
    pub fn processes(&self) -> [String; 2] {
        let first = format!("(process {}", self.process.id());
        [format!("{first})"), if self.is_alone { format!("{first})") } else { "(process ".into() }]
    }

    /// Waits until it has said something.
    pub fn hears(&mut self, what: &str) {
        self.line_with(what);
    }

    /// The same, and returns that line.
    pub fn line_with(&mut self, what: &str) -> String {
        let mut line = String::new();
        while !line.contains(what) {
            line.clear();
            assert_ne!(self.out.read_line(&mut line).expect("its output"), 0, "it ended, and did not say {what:?}");
        }
        line
    }

    /// Kills it, and waits until it has ended.
    pub fn kill(&mut self) {
        self.process.kill().expect("killed");
        self.process.wait().expect("its end");
    }

    /// Waits until it ends well, and returns what it has said.
    pub fn ends_well(mut self) -> String {
        let mut said = String::new();
        self.out.read_to_string(&mut said).expect("its output");
        let status = self.process.wait().expect("its end");
        assert!(status.success(), "{status}: {said}");
        said
    }
}

/// Whether its ranks have a process each: they would share a GPU.
fn is_apart(place: &Place) -> bool {
    place.gpus == 1 && place.ranks.len() > 1
}

/// The command of a process that plays a role.
fn to_play(role: &str, place: &Place) -> Command {
    let Place { socket, id, ranks, nranks, gpus, root } = place;
    let (first, end, socket) = (ranks.start, ranks.end, socket.display());
    let text = format!("{role} {id} {first} {end} {nranks} {gpus} {root} {socket}");
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    if *gpus == 1 {
        // Several ranks' streams then wait on one GPU: more than its eight hardware queues, as docs/CUDA.md says.
        command.env(QUEUES_VARIABLE, QUEUES_MAX.to_string());
    }
    command.args(["--ignored", "--exact", "--nocapture", "--quiet", "plays_its_role"]).env(ROLE, text);
    command
}

/// A communicator of every test's: all ranks, at least two, on all GPUs.
pub fn everybody(service: &TestService, tenant: usize) -> Place {
    everybody_at(service.socket(tenant))
}

/// The same, of whatever service that is.
pub fn everybody_at(socket: PathBuf) -> Place {
    let gpus = gpus().expect("GPUs").len();
    let nranks = gpus.clamp(2, 8) as u32;
    let id = mccs::unique_id().expect("an id");
    Place { socket, id, ranks: 0..nranks, nranks, gpus, root: String::new() }
}

/// Has all ranks of the first tenant play a role, through a service of each configuration.
pub fn everybody_plays(role: &str, configs: &[&str]) {
    for config in configs {
        let service = TestService::start(config);
        Player::start(role, &everybody(&service, 0)).ends_well();
    }
}

/// In a process that is to play a role: plays it.
pub fn play(roles: &[(&str, Role)]) {
    let Ok(text) = std::env::var(ROLE) else { return };
    let words: Vec<_> = text.splitn(8, ' ').collect();
    let number = |index: usize| words[index].parse::<u32>().expect("a number");
    let place = Place {
        socket: words[7].into(),
        root: words[6].into(),
        id: words[1].parse().expect("an id"),
        ranks: number(2)..number(3),
        nranks: number(4),
        gpus: number(5) as usize,
    };
    let called = roles.iter().filter(|(name, _)| *name == words[0]).collect::<Vec<_>>();
    let [(name, role)] = called[..] else { panic!("{} roles are called {}", called.len(), words[0]) };
    if is_apart(&place) {
        return play_apart(name, *role, &place);
    }
    role(&place).expect("a role played well");
}

/// Ranks of one GPU have a process each, as the service wants it: this one, of the first, and others, which end with it.
fn play_apart(name: &str, role: Role, place: &Place) {
    assert_eq!(place.ranks, 0..place.nranks, "all wait for each other");
    let folder = tempfile::tempdir().expect("a folder");
    let own = |rank| Place { ranks: rank..rank + 1, ..place.clone() };
    let others: Vec<_> = place
        .ranks
        .clone()
        .skip(1)
        .map(|rank| {
            let mut command = to_play(name, &own(rank));
            command.env(TOGETHER, folder.path());
            // SAFETY: the call is one that may be made between fork and exec.
            unsafe {
                command.pre_exec(|| Ok(nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?));
            }
            command.spawn().expect("a process")
        })
        .collect();
    // SAFETY: of this process' threads none but the test harness', which waits for this one, lives by now.
    unsafe { std::env::set_var(TOGETHER, folder.path()) };
    role(&own(place.ranks.start)).expect("a role played well");
    for mut other in others {
        let status = other.wait().expect("its end");
        assert!(status.success(), "{status}");
    }
}

/// Barrier of all ranks of a player.
pub enum Together {
    /// Threads of one process.
    Threads(Barrier),
    /// So many processes, of which this is one: a file each and round.
    Processes { folder: PathBuf, own: u32, count: usize, round: AtomicU32 },
}

impl Together {
    pub fn wait(&self) {
        match self {
            Together::Threads(barrier) => drop(barrier.wait()),
            Together::Processes { folder, own, count, round } => {
                let round = folder.join(round.fetch_add(1, Ordering::Relaxed).to_string());
                std::fs::create_dir_all(&round).expect("a folder");
                std::fs::write(round.join(own.to_string()), "").expect("a file");
                while std::fs::read_dir(&round).expect("a folder").count() < *count {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }
}

/// A rank: its context, session and communicator.
pub struct Rank {
    pub context: Context,
    pub comm: CudaCommunicator,
    pub stream: OwnedStream,
    /// All ranks of this player. Some of the driver's calls wait for kernels of other GPUs of the process, and those for ranks that have not
    /// called yet: so everything is made before anything is called.
    pub together: Arc<Together>,
}

impl Place {
    /// Runs `body` on a thread for each rank of this process.
    pub fn each_rank(&self, body: impl Fn(Rank) -> anyhow::Result<()> + Sync) -> anyhow::Result<()> {
        let together = Arc::new(self.together());
        std::thread::scope(|scope| {
            let run = |rank| {
                let (body, together) = (&body, Arc::clone(&together));
                scope.spawn(move || {
                    let done = self.join(rank, self.id, together).and_then(body);
                    if let Err(error) = done {
                        // Others wait for it.
                        eprintln!("rank {rank}: {error:#}");
                        std::process::exit(1);
                    }
                })
            };
            let ranks: Vec<_> = self.ranks.clone().map(run).collect();
            ranks.into_iter().for_each(|rank| rank.join().expect("a rank that does not panic"));
        });
        Ok(())
    }

    /// Barrier of its ranks.
    pub fn together(&self) -> Together {
        match std::env::var_os(TOGETHER) {
            Some(folder) => {
                let (own, count, round) = (self.ranks.start, self.nranks as usize, AtomicU32::new(0));
                Together::Processes { folder: folder.into(), own, count, round }
            }
            None => Together::Threads(Barrier::new(self.ranks.len())),
        }
    }

    /// The id of another communicator of the same ranks, by its number: the same for all of them.
    pub fn another_id(&self, number: u8) -> UniqueId {
        let UniqueId(mut id) = self.id;
        id[0] ^= number + 1;
        UniqueId(id)
    }

    /// A rank of a communicator. Its GPU's context stays current.
    pub fn join(&self, rank: u32, id: UniqueId, together: Arc<Together>) -> anyhow::Result<Rank> {
        mccs_cuda::driver()?;
        let all = gpus()?;
        let context = Context::primary(&all[rank as usize % self.gpus])?;
        // Current on this thread until it ends, and there until the process does.
        std::mem::forget(context.enter()?);
        std::mem::forget(context.clone());
        let client = Client::connect(&self.socket)?;
        let builder = client.communicator(id, rank, self.nranks).root_address_or_empty(&self.root);
        let forks_all = std::env::var_os(FORKS).is_some();
        let comm = if forks_all { builder.fork_all_calls() } else { builder }.join_cuda()?;
        let stream = OwnedStream::new(&context)?;
        Ok(Rank { context, comm, stream, together })
    }
}

/// Captures a graph, on all ranks before any can launch its own: the driver waits for the GPU to make one, and there kernels of another
/// rank of this process may wait for this one.
pub fn capture(
    stream: &OwnedStream,
    together: &Together,
    enqueue: impl FnOnce(RawStream) -> anyhow::Result<()>,
) -> anyhow::Result<Graph> {
    let graph = Graph::capture(stream, enqueue)?;
    together.wait();
    Ok(graph)
}

/// Buffers of a call, out of place.
pub struct Buffers {
    pub send: DeviceMemory,
    pub recv: DeviceMemory,
}

impl Buffers {
    /// Buffers with room for a call on any rank.
    pub fn of(context: &Context, call: &Call) -> anyhow::Result<Self> {
        let bytes = |count: usize| (count * call.dtype.size_bytes()).max(1);
        let send = (0..call.nranks).map(|rank| bytes(call.send_count(rank))).max().unwrap_or(1);
        let recv = (0..call.nranks).map(|rank| bytes(call.recv_count(rank))).max().unwrap_or(1);
        Ok(Buffers { send: DeviceMemory::zeroed(context, send)?, recv: DeviceMemory::zeroed(context, recv)? })
    }

    /// The call's input, and poison where its output goes. Nothing may be in flight.
    pub fn fill(&self, call: &Call, rank: u32) -> anyhow::Result<()> {
        // SAFETY: both have that room, as `of` sees to.
        unsafe {
            copy_from_host(self.send.address(), &call.input(rank))?;
            Ok(copy_from_host(self.recv.address(), &vec![POISON; self.recv.len_bytes()])?)
        }
    }

    /// A rank's output. Nothing may be in flight.
    pub fn output(&self, call: &Call, rank: u32) -> anyhow::Result<Vec<u8>> {
        let mut output = vec![0; call.recv_count(rank) * call.dtype.size_bytes()];
        // SAFETY: it has that many bytes.
        unsafe { copy_to_host(&mut output, self.recv.address())? };
        Ok(output)
    }

    /// Fails if the output is wrong. Nothing may be in flight.
    pub fn check(&self, call: &Call, rank: u32) -> anyhow::Result<()> {
        let wrong = call.wrong_elements(rank, &self.output(call, rank)?);
        ensure!(wrong == 0, "{wrong} wrong elements of {call:?} on rank {rank}");
        Ok(())
    }
}

/// A call that differs from others by its number.
pub fn call(number: u64, nranks: u32, count: u64) -> Call {
    let kinds = [
        CollectiveKind::AllReduce,
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllToAll,
        CollectiveKind::Broadcast,
        CollectiveKind::Reduce,
    ];
    let kind = kinds[number as usize % kinds.len()];
    let root = if kind.has_root() { number as u32 % nranks } else { 0 };
    Call { kind, dtype: DataType::F32, redop: RedOp::Sum, root, count, nranks, seed: number }
}

/// Enqueues a call.
pub fn enqueue(comm: &CudaCommunicator, call: &Call, at: &Buffers, stream: RawStream) -> anyhow::Result<()> {
    enqueue_with(comm, call, call.redop.into(), at, stream)
}

/// Enqueues a call with an operator that says more than its own.
pub fn enqueue_with(
    comm: &CudaCommunicator,
    call: &Call,
    op: ReduceOperator,
    at: &Buffers,
    stream: RawStream,
) -> anyhow::Result<()> {
    enqueue_at(comm, call, op, at.send.address(), at.recv.address(), stream)
}

/// Enqueues a call on memory of whatever kind.
pub fn enqueue_at(
    comm: &CudaCommunicator,
    call: &Call,
    op: ReduceOperator,
    send: DeviceAddress,
    recv: DeviceAddress,
    stream: RawStream,
) -> anyhow::Result<()> {
    // SAFETY: buffers have room for the call; tests keep them until their streams were synchronized, or the process ends.
    unsafe { mccs_eval::cuda::rank::enqueue(comm, call, op, send, recv, stream.as_ptr()) }
}
