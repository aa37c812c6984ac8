//! A tenant's crash on a GPU, and tenants that share an MPS server which the service is no client of. The tests of the latter
//! need that server: `tests/gpu.sh` starts one, and names its folder in `MCCS_GPU_MPS`.

use std::path::PathBuf;

use mccs_cuda::{Module, copy_to_host};
use mccs_tests::TestService;

use super::ranks::{Buffers, Place, Player, Rank, Role, call, enqueue, everybody};
use super::{TENANTS, wait_until};

pub const ROLES: &[(&str, Role)] = &[("crashes", crashes), ("keeps_calling", keeps_calling)];

/// Writes where nothing is.
const STRAY: &[u8] = br"
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

/// Calls until the process is at home, then ruins its context.
fn crashes(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let call = call(0, place.nranks, 10_000);
        let at = Buffers::of(&context, &call)?;
        let module = Module::load(&context, STRAY)?;
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
    let until = std::env::var_os("MCCS_GPU_UNTIL").map(PathBuf::from);
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
    let mut other = Player::start_with("keeps_calling", &everybody(&service, 1), &[("MCCS_GPU_UNTIL", until.clone())]);
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

fn mps() -> [(&'static str, PathBuf); 1] {
    let folder =
        std::env::var_os("MCCS_GPU_MPS").expect("MCCS_GPU_MPS names the folder of an MPS server: tests/gpu.sh mps");
    [("CUDA_MPS_PIPE_DIRECTORY", folder.into())]
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
