//! A tenant's crash on a GPU, and tenants that share an MPS server which the service is no client of. The tests of the latter
//! need that server: `tests/gpu.sh` starts one, and names its folder in `MCCS_GPU_MPS`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use mccs_cuda::{Module, copy_to_host, gpus};
use mccs_device::cuda::QUEUES_VARIABLE;
use mccs_tests::TestService;

use super::ranks::{Buffers, Place, Player, Rank, Role, call, enqueue, everybody, everybody_at};
use super::{TENANTS, wait_until};

pub const ROLES: &[(&str, Role)] = &[("crashes", crashes), ("keeps_calling", keeps_calling)];

/// Writes where nothing is.
pub const STRAY: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .entry stray(.param .u64 at)
{
    .reg .b64 %d<2>;
    ld.param.u64 %d1, [at];
    st.global.u32 [%d1], 1;
    ret;
}
";

/// Variable with the path at which a role finds that it is enough.
pub const UNTIL: &str = "MCCS_GPU_UNTIL";

/// Calls until the process is at home, then ruins its context.
fn crashes(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let call = call(0, place.nranks, 10_000);
        let at = Buffers::of(&context, &call)?;
        let module = Module::load_ptx(&context, STRAY)?;
        let stray = module.function("stray")?;
        together.wait();
        at.fill(&call, comm.rank())?;
        enqueue(&comm, &call, &at, stream.raw())?;
        // SAFETY: the stream lives.
        unsafe { stream.raw().synchronize()? };
        at.check(&call, comm.rank())?;
        together.wait();
        // SAFETY: none: that is what the test is about. The context is of no use afterwards.
        let crashed = unsafe { stray.launch(stream.raw(), 1, 1, &8_u64).and_then(|()| stream.raw().synchronize()) };
        println!("rank {} has crashed: {:?}", comm.rank(), crashed.err().map(|error| error.to_string()));
        // Nothing can be given back in order.
        std::process::exit(0)
    })
}

/// Calls, and checks, until it hears that it is enough.
fn keeps_calling(place: &Place) -> anyhow::Result<()> {
    let until = std::env::var_os(UNTIL).map(PathBuf::from);
    place.each_rank(|Rank { context, comm, stream, together }| {
        let calls: Vec<_> = (0..4).map(|n| call(n, place.nranks, 1 + n * 9000)).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        // Allocations may wait for kernels, and those for ranks: all are made before any is called.
        let (mut enough, last) = ([0; 1], Buffers::of(&context, &call(4, place.nranks, 1))?);
        for turn in 0_u64.. {
            together.wait();
            if comm.rank() == 0 && until.as_ref().is_none_or(|path| path.exists()) {
                enough[0] = 1;
            }
            // All ranks stop after the same turn: rank 0 says so in its data.
            // SAFETY: both have room for an element, and nothing is in flight.
            unsafe { mccs_cuda::copy_from_host(last.send.address(), &[enough[0], 0, 0, 0])? };
            for (call, at) in calls.iter().zip(&at) {
                at.fill(call, comm.rank())?;
                enqueue(&comm, call, at, stream.raw())?;
            }
            // SAFETY: the buffers have room, and live until the stream was synchronized.
            unsafe {
                comm.broadcast(
                    last.send.address(),
                    last.recv.address(),
                    1,
                    mccs::DataType::I32,
                    0,
                    stream.raw().as_ptr(),
                )?;
                stream.raw().synchronize()?;
                copy_to_host(&mut enough, last.recv.address())?;
            }
            calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))?;
            if turn == 2 && comm.rank() == 0 {
                println!("keeps calling");
            }
            if enough[0] != 0 && turn > 2 {
                break;
            }
        }
        Ok(())
    })
}

/// A crash of one tenant beside another that goes on, each started with its environment.
fn crash_beside(crashing: &[(&str, PathBuf)]) {
    let service = TestService::start(TENANTS);
    let directory = tempfile::tempdir().expect("a directory");
    let until = directory.path().join("enough");
    let mut other = Player::start_with("keeps_calling", &everybody(&service, 1), &[(UNTIL, until.clone())]);
    other.hears("keeps calling");
    let said = Player::start_with("crashes", &everybody(&service, 0), crashing).ends_well();
    assert!(said.contains("CUDA_ERROR"), "{said}");
    // Its communicator ends with its process; the other's goes on.
    wait_until(|| service.service().registry.comms().len() == 1);
    std::fs::write(&until, "").expect("written");
    other.ends_well();
    for tenant in [0, 1] {
        Player::start("checks", &everybody(&service, tenant)).ends_well();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_crash_on_a_gpu_harms_nobody_else() {
    crash_beside(&[]);
}

fn mps() -> Vec<(&'static str, PathBuf)> {
    let folder =
        std::env::var_os("MCCS_GPU_MPS").expect("MCCS_GPU_MPS names the folder of an MPS server: tests/gpu.sh mps");
    let mut environment = vec![("CUDA_MPS_PIPE_DIRECTORY", folder.into())];
    if gpus().expect("GPUs").len() == 1 {
        // All ranks are clients of one GPU then, and an H100 has no room for the queues of six at 32 each (`CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED`).
        environment.push((QUEUES_VARIABLE, "8".into()));
    }
    environment
}

#[test]
#[ignore = "needs a GPU, and an MPS server"]
fn under_mps_tenants_get_their_own_results() {
    let service = TestService::start(TENANTS);
    let players = [("checks", 0), ("exchanges", 1), ("exchanges", 0)];
    let players = players.map(|(role, tenant)| Player::start_with(role, &everybody(&service, tenant), &mps()));
    players.into_iter().for_each(|player| drop(player.ends_well()));
}

/// Those that share the server fall with the one that crashes: that is MPS. The service and those outside do not.
#[test]
#[ignore = "needs a GPU, and an MPS server"]
fn under_mps_a_crash_harms_nobody_outside() {
    crash_beside(&mps());
    // The next ones get a new server.
    let service = TestService::start(TENANTS);
    Player::start_with("checks", &everybody(&service, 0), &mps()).ends_well();
}

/// An MPS server where programs look by themselves. Ends with the value.
struct DefaultServer {
    program: PathBuf,
    logs: tempfile::TempDir,
}

impl DefaultServer {
    fn start() -> Self {
        let path = std::env::var("PATH").unwrap_or_default();
        let folders = path.split(':').chain(["/usr/local/nvidia/bin"]);
        let program = folders.map(|folder| Path::new(folder).join("nvidia-cuda-mps-control")).find(|at| at.exists());
        let logs = tempfile::tempdir().expect("a directory");
        let server = DefaultServer { program: program.expect("nvidia-cuda-mps-control"), logs };
        let started = server.command().arg("-d").status().expect("runs");
        assert!(started.success(), "no server, or there is another one already");
        server
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env_remove("CUDA_MPS_PIPE_DIRECTORY").env("CUDA_MPS_LOG_DIRECTORY", self.logs.path());
        command
    }

    /// Log lines of processes that came to it.
    fn clients(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.logs.path().join("control.log")).expect("a log");
        log.lines().filter_map(|line| line.split_once("NEW CLIENT ")).map(|(_, of)| of.to_owned()).collect()
    }
}

impl Drop for DefaultServer {
    fn drop(&mut self) {
        let quitting = self.command().stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        if let Ok(mut quitting) = quitting {
            let _ = quitting.stdin.take().map(|mut input| input.write_all(b"quit\n"));
            let _ = quitting.wait();
        }
    }
}

/// Killed with the value.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The server is the tenants'. `MCCS_BIN` names the service's folder.
#[test]
#[ignore = "needs a GPU, and that no MPS server is where programs look by themselves"]
fn under_mps_the_service_is_no_client_of_the_server_that_programs_find() {
    let bin = PathBuf::from(std::env::var_os("MCCS_BIN").expect("MCCS_BIN names the folder of mccs-service"));
    let server = DefaultServer::start();
    let folder = tempfile::tempdir().expect("a directory");
    let config = folder.path().join("service.toml");
    let (name, runtime_dir) = ("gpu-host", folder.path());
    let text = format!("[service]\nname = {name:?}\nruntime_dir = {runtime_dir:?}\n{TENANTS}");
    std::fs::write(&config, text).expect("written");
    let mut service = Command::new(bin.join("mccs-service"));
    let service = service.arg("--config").arg(config).env_remove("CUDA_MPS_PIPE_DIRECTORY").stdout(Stdio::piped());
    let mut service = Process(service.spawn().expect("starts"));
    let said = BufReader::new(service.0.stdout.take().expect("piped")).lines().next();
    assert!(said.is_some_and(|line| line.is_ok_and(|line| line.contains("ready"))));
    let tenant = Player::start("checks", &everybody_at(folder.path().join("a")));
    let [tenants, services] = [tenant.process.id(), service.0.id()].map(|process| format!("{process} from"));
    tenant.ends_well();
    let clients = server.clients();
    let has = |process: &String| clients.iter().any(|client| client.starts_with(process));
    assert!(has(&tenants) && !has(&services), "{clients:?}, of the service {services}");
}
