//! Port channels of ranks on GPUs: kernels put, signal, wait and poll by `mccs/device.cuh`, threads do beside them, and what becomes of kernels that
//! wait when something goes wrong.
//!
//! On the emulated driver the kernels' source is compiled for the processor (`tests/driver/puts.cpp`).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use mccs::port_channels::DevicePortChannel;
use mccs::{PortChannel, PortChannels, RegisteredMemory, RemoteMemory};
use mccs_cuda::{
    Context, DeviceAddress, DeviceMemory, LARGE_PAGE_BYTES, MappedMemory, Module, Shared, copy_from_host, copy_to_host,
};
use mccs_kernels::cuda::{PUTS_BY_ALL, PUTS_EXCHANGE, PUTS_IMAGE, PUTS_TRIGGERS, PUTS_WAITS, PutsArgs};
use mccs_tests::TestService;
use mccs_tests::port_channels::random_seed;

use super::deaths::Serving;
use super::ranks::{Place, Player, Rank, Role, everybody, everybody_at, everybody_plays};
use super::{TENANTS, told, without_handles};

pub const ROLES: &[(&str, Role)] = &[
    ("kernels_put", kernels_put),
    ("threads_put", threads_put),
    ("refuses_memory_without_descriptors", refuses_memory_without_descriptors),
    ("kernels_wait_in_vain", kernels_wait_in_vain),
    ("kernels_wait_for_an_abort", kernels_wait_for_an_abort),
    ("kernels_wait_for_who_leaves", kernels_wait_for_who_leaves),
    ("kernels_put_where_nothing_is", kernels_put_where_nothing_is),
];

const TAG: u32 = 7;
/// Slots of the FIFOs: fewer than threads that write there.
const SLOTS: u32 = 8;
const THREADS: u32 = 24;

/// The kernels' image: what nvcc has made, or for the emulated driver a library of this processor.
pub(super) fn image() -> anyhow::Result<Vec<u8>> {
    if std::env::var_os("MCCS_EMULATED_GPUS").is_none() {
        return Ok(PUTS_IMAGE.context("built without nvcc")?.to_vec());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("a folder above")?;
    let folder = tempfile::tempdir()?;
    let library = folder.path().join("puts.so");
    let compiled = Command::new("c++")
        .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-shared", "-fPIC", "-I"])
        .arg(root.join("shim/include"))
        .arg(root.join("tests/driver/puts.cpp"))
        .arg("-o")
        .arg(&library)
        .status()?;
    ensure!(compiled.success(), "the kernels do not compile for a processor");
    Ok(std::fs::read(library)?)
}

/// Set where memory goes by descriptors alone.
const NO_HANDLES: &str = "MCCS_GPU_NO_HANDLES";

/// Memory that the service can open.
enum Memory {
    Allocated(DeviceMemory),
    Mapped(MappedMemory),
}

impl Memory {
    fn new(context: &Context, bytes: usize) -> anyhow::Result<Self> {
        if std::env::var_os(NO_HANDLES).is_none() {
            return Ok(Memory::Allocated(DeviceMemory::zeroed(context, bytes)?));
        }
        let pages = bytes.next_multiple_of(LARGE_PAGE_BYTES);
        Ok(Memory::Mapped(MappedMemory::new(context, &[pages], Shared::ByDescriptor)?))
    }

    fn address(&self) -> DeviceAddress {
        match self {
            Memory::Allocated(memory) => memory.address(),
            Memory::Mapped(memory) => memory.address(),
        }
    }
}

pub(super) fn read(into: &mut [u8], from: DeviceAddress) -> anyhow::Result<()> {
    // SAFETY: a part of a side's memory, which lives.
    unsafe { copy_to_host(into, from) }?;
    Ok(())
}

pub(super) fn write(into: DeviceAddress, from: &[u8]) -> anyhow::Result<()> {
    // SAFETY: as above.
    unsafe { copy_from_host(into, from) }?;
    Ok(())
}

/// A rank with a channel to its partner, and kernels.
struct Side<'a> {
    rank: &'a Rank,
    peer: u32,
    module: Module,
    /// `bytes` to put from, as many for the peer, and two words of a result.
    memory: Memory,
    bytes: u64,
    _source: RegisteredMemory,
    destination: RegisteredMemory,
    channels: PortChannels,
    channel: PortChannel,
}

/// The same for all ranks of a run, and another one in each.
pub(super) fn seed() -> u64 {
    std::env::var("MCCS_GPU_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

/// Partner of a rank: neighbours with each other, a last one with itself.
pub(super) fn partner(rank: u32, nranks: u32) -> u32 {
    if rank ^ 1 < nranks { rank ^ 1 } else { rank }
}

impl<'a> Side<'a> {
    fn new(place: &Place, rank: &'a Rank, bytes: u64) -> anyhow::Result<Self> {
        let peer = partner(rank.comm.rank(), place.nranks);
        // SAFETY: the image is whole.
        let module = unsafe { Module::load(&rank.context, &image()?)? };
        let memory = Memory::new(&rank.context, 2 * bytes as usize + 16)?;
        let channels = rank.comm.port_channels_with(SLOTS)?;
        // SAFETY: the memory lives longer: fields are dropped in order, behind all kernels.
        let register = |at| unsafe { channels.register_gpu(memory.address() + at, bytes) };
        let (source, destination) = (register(0)?, register(bytes)?);
        let client = rank.comm.client();
        let names = client.communicator(place.another_id(100), rank.comm.rank(), place.nranks);
        let all = names.join_bootstrap()?.all_gather(&destination.remote().to_bytes())?;
        let theirs = RemoteMemory::from_bytes(&all[peer as usize])?;
        let channel = channels.channel(peer, TAG, &source, &theirs)?;
        Ok(Side { rank, peer, module, memory, bytes, _source: source, destination, channels, channel })
    }

    fn args(&self) -> anyhow::Result<PutsArgs> {
        let channel: DevicePortChannel = self.channel.device().context("a channel of a GPU")?;
        let channel = bytemuck::cast(channel);
        let (seed, rank) = (seed(), u64::from(self.rank.comm.rank()));
        Ok(PutsArgs {
            out: [channel; 2],
            receive: [channel; 2],
            source: self.memory.address(),
            destination: self.memory.address() + self.bytes,
            bytes: self.bytes,
            rounds: 1,
            own_seed: seed + rank,
            peer_seed: seed + u64::from(self.peer),
            result: self.memory.address() + 2 * self.bytes,
            begins: 0,
        })
    }

    fn launch(&self, kernel: &str, threads: u32, args: &PutsArgs) -> anyhow::Result<()> {
        write(args.result, &[0; 16])?;
        let function = self.module.function(kernel)?;
        self.channels.wake();
        // SAFETY: the kernel takes this, and what it names lives until the stream has come to its end.
        unsafe { function.launch(self.rank.stream.raw(), 1, threads, args)? };
        Ok(())
    }

    /// A kernel's result when it has ended.
    fn result(&self, args: &PutsArgs) -> anyhow::Result<u64> {
        // SAFETY: the stream lives.
        unsafe { self.rank.stream.raw().synchronize()? };
        let mut result = [0; 8];
        read(&mut result, args.result)?;
        Ok(u64::from_ne_bytes(result))
    }

    fn runs_well(&self, kernel: &str, threads: u32, args: &PutsArgs) -> anyhow::Result<()> {
        self.launch(kernel, threads, args)?;
        let wrong = self.result(args)?;
        let error = self.rank.comm.async_error();
        ensure!(wrong == 0 && error.is_none(), "{kernel}: {wrong} wrong, {error:?}");
        Ok(())
    }
}

fn kernels_put(place: &Place) -> anyhow::Result<()> {
    const BYTES: u64 = 3 << 20;
    place.each_rank(|rank| {
        let side = Side::new(place, &rank, 2 * BYTES)?;
        rank.together.wait();
        for (bytes, rounds) in [(8, 20), (4 << 10, 20), (BYTES, 3)] {
            side.runs_well(PUTS_EXCHANGE, THREADS, &PutsArgs { bytes, rounds, ..side.args()? })?;
        }
        rank.together.wait();
        for _ in 0..3 {
            side.runs_well(PUTS_BY_ALL, THREADS, &PutsArgs { bytes: 4 << 10, ..side.args()? })?;
            rank.together.wait();
        }
        Ok(())
    })
}

pub(super) fn plays_with_a_seed(role: &str, config: &str) {
    let service = TestService::start(config);
    let seed = random_seed() >> 1;
    println!("seed {seed}");
    let environment = [("MCCS_GPU_SEED", PathBuf::from(seed.to_string()))];
    Player::start_with(role, &everybody(&service, 0), &environment).ends_well();
}

#[test]
#[ignore = "needs a GPU"]
fn kernels_put_into_each_others_memory_from_any_number_of_threads() {
    plays_with_a_seed("kernels_put", TENANTS);
}

/// Threads put for their peer's kernel, and wait for it.
fn threads_put(place: &Place) -> anyhow::Result<()> {
    const BYTES: usize = 100_000;
    place.each_rank(|rank| {
        let side = Side::new(place, &rank, BYTES as u64)?;
        let byte_of = |rank: u32, at: usize| (at as u32).wrapping_mul(31).wrapping_add(rank * 7 + 1) as u8;
        let pattern = |rank| (0..BYTES).map(|at| byte_of(rank, at)).collect::<Vec<_>>();
        write(side.memory.address(), &pattern(rank.comm.rank()))?;
        rank.together.wait();
        let args = side.args()?;
        side.launch(PUTS_WAITS, 1, &args)?;
        side.channel.put_with_signal_and_flush(0, 0, BYTES as u64)?;
        ensure!(side.result(&args)? == 2, "a kernel's wait: {:?}", rank.comm.async_error());
        let mut came = vec![0; BYTES];
        read(&mut came, args.destination)?;
        ensure!(came == pattern(side.peer), "what came is not what was put");
        // The library finds what leaves a memory.
        let refused = side.channel.put(0, 1, BYTES as u64).expect_err("it leaves the memory").to_string();
        ensure!(refused.contains("leave the memory to put into"), "{refused}");
        let region = rank.comm.client().allocate(4096)?;
        let refused = side.channels.register(region.at(0), 4096).expect_err("memory of the host").to_string();
        ensure!(refused.contains("register_gpu"), "{refused}");
        // SAFETY: refused.
        let unknown = unsafe { side.channels.register_gpu(side.memory.address(), 1 << 50) };
        ensure!(unknown.is_err(), "more memory than there is");
        rank.together.wait();
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn threads_put_for_kernels() {
    everybody_plays("threads_put", &[TENANTS]);
}

#[test]
#[ignore = "needs a GPU"]
fn puts_go_to_memory_by_descriptors() {
    let service = TestService::start(&without_handles(TENANTS));
    let environment = [(NO_HANDLES, PathBuf::new())];
    Player::start_with("kernels_put", &everybody(&service, 0), &environment).ends_well();
    let refused = Player::start("refuses_memory_without_descriptors", &everybody(&service, 0)).ends_well();
    assert!(refused.contains("memory of this kind cannot be opened by the service"), "{refused}");
}

/// Memory of `cudaMalloc` has no descriptors.
fn refuses_memory_without_descriptors(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let memory = DeviceMemory::zeroed(&rank.context, 4096)?;
        let channels = rank.comm.port_channels()?;
        // SAFETY: refused.
        let refused = unsafe { channels.register_gpu(memory.address(), 4096) }.expect_err("memory without descriptors");
        println!("{refused}");
        rank.together.wait();
        Ok(())
    })
}

/// A kernel waits for a signal that does not come, until it is let go: says why.
fn waits(side: &Side, then: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<String> {
    let args = side.args()?;
    side.launch(PUTS_WAITS, 1, &args)?;
    then()?;
    ensure!(side.result(&args)? == 1, "a wait for a signal that nobody sent has ended well");
    Ok(told(side.rank).to_string())
}

fn kernels_wait_in_vain(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let side = Side::new(place, &rank, 4096)?;
        rank.together.wait();
        let error = match rank.comm.rank() {
            0 => waits(&side, || {
                println!("waits");
                Ok(())
            })?,
            _ => told(&rank).to_string(),
        };
        println!("rank {} was told: {error}", rank.comm.rank());
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn a_kernel_that_waits_too_long_is_let_go_and_named() {
    let service = TestService::start(&format!("{TENANTS}[limits]\noperation_timeout = \"1s\"\n"));
    let said = Player::start("kernels_wait_in_vain", &everybody(&service, 0)).ends_well();
    assert!(said.contains("rank 0 was told") && said.contains("rank 0 waits for signal 1 of (1, tag 7)"), "{said}");
}

#[test]
#[ignore = "needs a GPU"]
fn a_kernel_that_waits_is_let_go_when_the_service_dies() {
    let serving = Serving::start("serves", TENANTS, &[]);
    let mut player = Player::start("kernels_wait_in_vain", &everybody_at(serving.socket.clone()));
    player.hears("waits");
    serving.kill();
    let said = player.ends_well();
    assert!(said.contains("rank 0 was told"), "{said}");
}

#[test]
#[ignore = "needs two GPUs"]
fn a_kernel_that_waits_is_let_go_when_its_peer_is_killed() {
    let service = TestService::start(TENANTS);
    let all = everybody(&service, 0);
    let folder = tempfile::tempdir().expect("a folder");
    let together = [(super::ranks::TOGETHER, folder.path().to_owned())];
    let players = all.ranks.clone().map(|rank| {
        let own = Place { ranks: rank..rank + 1, ..all.clone() };
        Player::start_with("kernels_wait_in_vain", &own, &together)
    });
    let mut players: Vec<_> = players.collect();
    players[0].hears("waits");
    players.remove(1).kill();
    let said = players.remove(0).ends_well();
    assert!(said.contains("rank 0 was told") && said.contains("rank 1"), "{said}");
    players.into_iter().for_each(|player| drop(player.ends_well()));
}

fn kernels_wait_for_an_abort(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let side = Side::new(place, &rank, 4096)?;
        rank.together.wait();
        match rank.comm.rank() {
            0 => ensure!(waits(&side, || Ok(()))?.contains("rank 1 aborted")),
            1 => super::aborts_later(&rank)?,
            _ => {}
        }
        super::hears_of_the_abort(&rank)
    })
}

#[test]
#[ignore = "needs a GPU"]
fn a_kernel_that_waits_is_let_go_by_an_abort() {
    everybody_plays("kernels_wait_for_an_abort", &[TENANTS]);
}

fn kernels_wait_for_who_leaves(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let side = Side::new(place, &rank, 4096)?;
        rank.together.wait();
        if rank.comm.rank() == 0 {
            let args = side.args()?;
            side.launch(PUTS_WAITS, 1, &args)?;
            ensure!(side.result(&args)? == 1, "a signal of a rank that has left");
        } else {
            rank.comm.finalize()?;
        }
        rank.together.wait();
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn a_kernel_that_waits_is_let_go_when_its_peer_leaves() {
    everybody_plays("kernels_wait_for_who_leaves", &[TENANTS]);
}

/// Puts of rank 0's kernel that cannot be, each in a communicator of its own, end it with an error that says what was wrong; memory stays as it was.
fn kernels_put_where_nothing_is(place: &Place) -> anyhow::Result<()> {
    const BYTES: u64 = 64 << 10;
    let cases = ["takes 65544 bytes at offset 0 of memory", "which was freed", "port channel 0 is not open"];
    place.each_rank(|first| {
        for (case, expected) in (0..).zip(cases) {
            let id = place.another_id(10 + case);
            let rank = place.join(first.comm.rank(), id, Arc::clone(&first.together))?;
            let side = Side::new(&Place { id, ..place.clone() }, &rank, BYTES)?;
            let bytes = if case == 0 { BYTES + 8 } else { BYTES };
            let args = PutsArgs { bytes, ..side.args()? };
            let Side { destination, channel, channels, memory, module, .. } = side;
            let (mut destination, mut channel) = (Some(destination), Some(channel));
            // Both have made their channels.
            first.together.wait();
            match (case, rank.comm.rank()) {
                (1, 1) => destination = None,
                (2, 0) => channel = None,
                _ => {}
            }
            // A request without an answer has been done when another is answered. SAFETY: nothing
            // is put from it or into it.
            let _later = unsafe { channels.register_gpu(memory.address(), 8)? };
            first.together.wait();
            if rank.comm.rank() == 0 {
                let function = module.function(PUTS_TRIGGERS)?;
                // SAFETY: as for [`Side::launch`]. The kernel's own copy of a channel that is closed is of use to nobody.
                unsafe {
                    function.launch(rank.stream.raw(), 1, 1, &args)?;
                    rank.stream.raw().synchronize()?;
                }
            }
            let error = told(&rank).to_string();
            ensure!(error.contains("rank 0 made an invalid call") && error.contains(expected), "{error}");
            let mut all = vec![0; 2 * BYTES as usize];
            read(&mut all, memory.address())?;
            ensure!(all.iter().all(|byte| *byte == 0), "memory was written, case {case}");
            first.together.wait();
            drop((destination, channel));
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn puts_that_cannot_be_fail_their_communicator_and_write_nothing() {
    everybody_plays("kernels_put_where_nothing_is", &[TENANTS]);
}
