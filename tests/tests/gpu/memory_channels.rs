//! Memory channels of ranks on GPUs: kernels copy, signal and pass packets by `mccs/device.cuh`, and are let go when something goes wrong.

use anyhow::ensure;
use mccs::cuda::{MEMORY_CHANNEL_TAGS_MAX, MemoryChannels, MemoryChannelsPart};
use mccs_cuda::{DeviceMemory, Module};
use mccs_kernels::cuda::{
    MEMORY_BY_ALL, MEMORY_EXCHANGE, MEMORY_PARTS, MEMORY_PING_PONG, MEMORY_PUTS, MEMORY_WAITS, MemoryChannelsArgs,
};
use mccs_tests::TestService;

use super::port_channels::{image, partner, plays_with_a_seed, read, seed, write};
use super::ranks::{Place, Player, Rank, Role, TOGETHER, everybody, everybody_plays};
use super::{TENANTS, told};

pub const ROLES: &[(&str, Role)] = &[
    ("kernels_copy", kernels_copy),
    ("refuses_wrong_channels", refuses_wrong_channels),
    ("copying_kernels_wait_in_vain", copying_kernels_wait_in_vain),
    ("copying_kernels_wait_for_an_abort", copying_kernels_wait_for_an_abort),
];

const TAGS: u32 = 5;
const THREADS: u32 = 40;

/// A rank with channels to its partner, and kernels.
struct Side<'a> {
    rank: &'a Rank,
    peer: u32,
    module: Module,
    memory: DeviceMemory,
    part_bytes: u64,
    table: DeviceMemory,
    channels: MemoryChannels,
}

impl<'a> Side<'a> {
    fn new(place: &Place, rank: &'a Rank, part_bytes: u64) -> anyhow::Result<Self> {
        let comm = &rank.comm;
        let peer = partner(comm.rank(), place.nranks);
        // SAFETY: the image is whole.
        let module = unsafe { Module::load(&rank.context, &image()?)? };
        let bytes = MEMORY_PARTS * part_bytes;
        let memory = DeviceMemory::zeroed(&rank.context, bytes as usize + 16)?;
        let own = comm.prepare_memory_channels(memory.address(), bytes, TAGS)?;
        let names = comm.client().communicator(place.another_id(100), comm.rank(), place.nranks);
        let all = names.join_bootstrap()?.all_gather(&own.part().to_bytes())?;
        let parts: Vec<[u8; MemoryChannelsPart::BYTES]> =
            all.iter().map(|part| part.as_slice().try_into()).collect::<Result<_, _>>()?;
        let parts: Vec<_> = parts.iter().map(MemoryChannelsPart::from_bytes).collect();
        let channels = comm.open_memory_channels(own, &parts)?;
        // As many blocks as tags, each by its own.
        let pairs = (0..TAGS).map(|tag| channels.channel(peer, tag).map(|channel| [channel; 2]));
        let pairs: Vec<_> = pairs.collect::<Result<_, _>>()?;
        let pairs: &[u8] = bytemuck::cast_slice(pairs.as_flattened());
        let table = DeviceMemory::zeroed(&rank.context, pairs.len())?;
        write(table.address(), pairs)?;
        Ok(Side { rank, peer, module, memory, part_bytes, table, channels })
    }

    fn args(&self, bytes: u64, rounds: u64) -> MemoryChannelsArgs {
        let me = u64::from(self.rank.comm.rank());
        MemoryChannelsArgs {
            channels: self.table.address(),
            memory: self.memory.address(),
            bytes,
            part_bytes: self.part_bytes,
            rounds,
            own_seed: seed() + me,
            peer_seed: seed() + u64::from(self.peer),
            result: self.memory.address() + MEMORY_PARTS * self.part_bytes,
            packets: 0,
            begins: u64::from(me % 2 == 0),
        }
    }

    fn launch(&self, kernel: &str, blocks: u32, args: &MemoryChannelsArgs) -> anyhow::Result<()> {
        write(args.result, &[0; 16])?;
        let function = self.module.function(kernel)?;
        // SAFETY: the kernel takes this, and what it names lives until the stream has come to its end.
        unsafe { function.launch(self.rank.stream.raw(), blocks, THREADS, args)? };
        Ok(())
    }

    /// A kernel's result when it has ended.
    fn result(&self, args: &MemoryChannelsArgs) -> anyhow::Result<u64> {
        // SAFETY: the stream lives.
        unsafe { self.rank.stream.raw().synchronize()? };
        let mut result = [0; 8];
        read(&mut result, args.result)?;
        Ok(u64::from_ne_bytes(result))
    }

    fn runs_well(&self, kernel: &str, blocks: u32, args: &MemoryChannelsArgs) -> anyhow::Result<()> {
        self.rank.together.wait();
        self.launch(kernel, blocks, args)?;
        let wrong = self.result(args)?;
        let error = self.rank.comm.async_error();
        ensure!(wrong == 0 && error.is_none(), "{kernel}: {wrong} wrong, {error:?}");
        Ok(())
    }
}

fn kernels_copy(place: &Place) -> anyhow::Result<()> {
    const BYTES: u64 = 300 << 10;
    place.each_rank(|rank| {
        let side = Side::new(place, &rank, BYTES)?;
        for (bytes, rounds) in [(8, 20), (4096 + 8, 20), (BYTES, 4)] {
            side.runs_well(MEMORY_EXCHANGE, 1, &side.args(bytes, rounds))?;
            // The flags of its packets come again.
            side.rank.together.wait();
            write(side.memory.address(), &vec![0; (MEMORY_PARTS * BYTES) as usize])?;
        }
        side.runs_well(MEMORY_BY_ALL, 1, &side.args(0, 3))?;
        if side.peer == rank.comm.rank() {
            // Blocks of one rank do not play both ends here.
            (0..3).for_each(|_| rank.together.wait());
            return Ok(());
        }
        for packets in [0, 1] {
            let flags = MemoryChannelsArgs { own_seed: 1, packets, ..side.args(4096, 10) };
            side.runs_well(MEMORY_PING_PONG, 1, &flags)?;
        }
        // The last block's share is shorter, and by its own tag.
        let own: Vec<u8> = (0..BYTES).map(|at| (at * 7 + u64::from(rank.comm.rank()) + seed()) as u8).collect();
        write(side.memory.address(), &own)?;
        side.runs_well(MEMORY_PUTS, TAGS, &side.args(BYTES - 24, 2))?;
        let mut came = vec![0; BYTES as usize];
        read(&mut came, side.memory.address() + side.part_bytes)?;
        let theirs = |at: u64| (at * 7 + u64::from(side.peer) + seed()) as u8;
        ensure!((0..BYTES - 24).zip(&came).all(|(at, byte)| theirs(at) == *byte), "what came is not what was put");
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn kernels_copy_signal_and_pass_packets() {
    plays_with_a_seed("kernels_copy", TENANTS);
}

fn refuses_wrong_channels(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let side = Side::new(place, &rank, 4096)?;
        let comm = &rank.comm;
        let prepare = |address, bytes, tags| {
            let refused = comm.prepare_memory_channels(address, bytes, tags).map(|_| ());
            refused.expect_err("it cannot be").to_string()
        };
        let at = side.memory.address();
        for tags in [0, MEMORY_CHANNEL_TAGS_MAX + 1] {
            ensure!(prepare(at, 4096, tags).contains("give 1 to 1024"));
        }
        ensure!(prepare(at, 1 << 50, 1).contains("bytes of memory"));
        let channel = |peer, tag| side.channels.channel(peer, tag).expect_err("there is none").to_string();
        ensure!(channel(side.peer, TAGS).contains("tag 5 of memory channels of 5 tags"));
        ensure!(channel(place.nranks, 0).contains("rank"));
        let own = || comm.prepare_memory_channels(at, 4096, 2);
        let few = comm.open_memory_channels(own()?, &[]).map(|_| ()).expect_err("no parts").to_string();
        ensure!(few.contains("0 parts"), "{few}");
        let other = comm.prepare_memory_channels(at, 4096, 3)?;
        let parts = vec![*other.part(); place.nranks as usize];
        let differs = comm.open_memory_channels(own()?, &parts).map(|_| ()).expect_err("other tags").to_string();
        ensure!(differs.contains("rank 0 has memory channels of 3 tags, this one of 2"), "{differs}");
        rank.together.wait();
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn channels_that_cannot_be_are_refused_with_the_reason() {
    everybody_plays("refuses_wrong_channels", &[TENANTS]);
}

/// A kernel waits for a signal that does not come, until it is let go: says why.
fn waits(side: &Side, then: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<String> {
    let args = side.args(0, 1);
    side.launch(MEMORY_WAITS, 1, &args)?;
    then()?;
    ensure!(side.result(&args)? == 1, "a wait for a signal that nobody sent has ended well");
    Ok(told(side.rank).to_string())
}

fn copying_kernels_wait_in_vain(place: &Place) -> anyhow::Result<()> {
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
#[ignore = "needs two GPUs"]
fn a_kernel_that_waits_is_let_go_when_its_peer_is_killed() {
    let service = TestService::start(TENANTS);
    let all = everybody(&service, 0);
    let folder = tempfile::tempdir().expect("a folder");
    let together = [(TOGETHER, folder.path().to_owned())];
    let players = all.ranks.clone().map(|rank| {
        let own = Place { ranks: rank..rank + 1, ..all.clone() };
        Player::start_with("copying_kernels_wait_in_vain", &own, &together)
    });
    let mut players: Vec<_> = players.collect();
    players[0].hears("waits");
    players.remove(1).kill();
    let said = players.remove(0).ends_well();
    assert!(said.contains("rank 0 was told") && said.contains("rank 1"), "{said}");
    players.into_iter().for_each(|player| drop(player.ends_well()));
}

fn copying_kernels_wait_for_an_abort(place: &Place) -> anyhow::Result<()> {
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
    everybody_plays("copying_kernels_wait_for_an_abort", &[TENANTS]);
}
