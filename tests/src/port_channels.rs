//! Ranks with port channels: memory that all know, and random puts that are checked.

use mccs::{DataType, PortChannel, PortChannels, Region, RegisteredMemory, RemoteMemory};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::Rank;

/// A rank's port channels, with a memory that all ranks know.
pub struct Opened {
    /// The channels.
    pub channels: PortChannels,
    /// The region.
    pub region: Region,
    /// All of the region.
    pub memory: RegisteredMemory,
    /// Each rank's.
    pub remote: Vec<RemoteMemory>,
}

/// Opens a rank's port channels, with a FIFO of so many slots, and tells all ranks of `bytes` bytes of memory. All ranks call it.
///
/// # Panics
/// If something of it fails.
#[must_use]
pub fn open(rank: &Rank, bytes: u64, fifo_slots: u32) -> Opened {
    let channels = rank.comm.port_channels_with(fifo_slots).expect("opened");
    let region = rank.client.allocate(bytes).expect("memory");
    let memory = channels.register(region.at(0), bytes).expect("registered");
    let remote = tell(rank, &memory.remote());
    Opened { channels, region, memory, remote }
}

/// Tells all ranks of a memory, and hears of theirs. All ranks call it.
///
/// # Panics
/// If a collective fails.
#[must_use]
pub fn tell(rank: &Rank, own: &RemoteMemory) -> Vec<RemoteMemory> {
    let told = rank.client.allocate(RemoteMemory::BYTES as u64 * (1 + u64::from(rank.comm.nranks()))).expect("memory");
    // SAFETY: nothing is in flight.
    let bytes = unsafe { told.as_mut_slice() };
    let (sent, received) = bytes.split_at_mut(RemoteMemory::BYTES);
    sent.copy_from_slice(&own.to_bytes());
    let (from, into, count) = (told.at(0), told.at(RemoteMemory::BYTES as u64), RemoteMemory::BYTES as u64);
    rank.comm.all_gather(from, into, count, DataType::U8, &rank.stream).expect("enqueued");
    rank.stream.synchronize().expect("completed");
    received.chunks_exact(RemoteMemory::BYTES).map(|bytes| RemoteMemory::from_bytes(bytes).expect("a memory")).collect()
}

impl Opened {
    /// A channel between the memories that all know.
    ///
    /// # Panics
    /// If it cannot be made.
    #[must_use]
    pub fn channel(&self, peer: u32, tag: u32) -> PortChannel {
        self.channels.channel(peer, tag, &self.memory, &self.remote[peer as usize]).expect("a channel")
    }

    /// Bytes of the region.
    ///
    /// # Safety
    /// Bytes that are read are not written meanwhile, and lie in the region.
    #[must_use]
    pub unsafe fn read(&self, offset: u64, bytes: u64) -> Vec<u8> {
        // SAFETY: the caller's contract. Peers write elsewhere.
        unsafe { std::slice::from_raw_parts(self.region.as_ptr().add(offset as usize), bytes as usize).to_vec() }
    }

    /// Writes to the region.
    ///
    /// # Safety
    /// Nobody reads or writes there meanwhile, and it lies in the region.
    pub unsafe fn write(&self, offset: u64, bytes: &[u8]) {
        // SAFETY: the caller's contract.
        unsafe { self.region.as_ptr().add(offset as usize).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

fn bytes_of(seed: u64, count: u64) -> Vec<u8> {
    let mut bytes = vec![0; count as usize];
    StdRng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}

/// A seed that is another one each time, unless `MCCS_SEED` says which.
///
/// # Panics
/// If there is no randomness.
#[must_use]
pub fn random_seed() -> u64 {
    let asked = std::env::var("MCCS_SEED").ok().and_then(|seed| seed.parse().ok());
    let random = || u64::from_le_bytes(mccs::unique_id().expect("an id").0[..8].try_into().expect("eight bytes"));
    asked.unwrap_or_else(random)
}

/// Threads of each rank put random bytes into all ranks, itself included, and each looks at what it was put, for some rounds. Most are short, and
/// some longer than what is put at once. All ranks call it with one seed.
///
/// # Panics
/// If a byte is wrong, or a call fails.
pub fn put_at_random(rank: &Rank, threads: u32, rounds: u64, seed: u64) {
    // Part of each rank: from which it puts, and into which each thread of each rank puts.
    const PART: u64 = 600 << 10;
    let (me, nranks) = (rank.comm.rank(), rank.comm.nranks());
    let parts = u64::from(1 + nranks);
    let opened = open(rank, PART * parts * u64::from(threads), 8);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (opened, lane) = (&opened, PART * parts * u64::from(thread));
            scope.spawn(move || {
                let channels: Vec<_> = (0..nranks).map(|peer| opened.channel(peer, 100 + thread)).collect();
                let of = |from: u32, to: u32, round: u64| {
                    let key = (u64::from(from) << 40) ^ (u64::from(to) << 32) ^ (u64::from(thread) << 24) ^ round;
                    let mut rng = StdRng::seed_from_u64(seed ^ key.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                    let length = if rng.random_range(0..3) == 0 { PART / 2 } else { 5000 };
                    let (length, at) = (rng.random_range(0..=length), rng.random_range(0..PART / 2));
                    (at, bytes_of(rng.random(), length))
                };
                for round in 0..rounds {
                    for (peer, channel) in (0..nranks).zip(&channels) {
                        let (at, bytes) = of(me, peer, round);
                        // SAFETY: nothing is put from here: the last put was flushed.
                        unsafe { opened.write(lane, &bytes) };
                        let into = lane + PART * u64::from(1 + me) + at;
                        if round % 2 == 0 {
                            channel.put_with_signal_and_flush(lane, into, bytes.len() as u64).expect("put");
                        } else {
                            channel.put(lane, into, bytes.len() as u64).expect("put");
                            channel.signal().expect("signalled");
                            channel.flush().expect("flushed");
                        }
                    }
                    for (peer, channel) in (0..nranks).zip(&channels) {
                        channel.wait().expect("signalled");
                        let (at, bytes) = of(peer, me, round);
                        let from = lane + PART * u64::from(1 + peer) + at;
                        // SAFETY: the peer puts there again behind this rank's signal alone.
                        let found = unsafe { opened.read(from, bytes.len() as u64) };
                        assert!(found == bytes, "seed {seed}, rank {me}, thread {thread}, round {round}, from {peer}");
                    }
                    // All have looked.
                    channels.iter().for_each(|channel| channel.signal().expect("signalled"));
                    channels.iter().for_each(|channel| channel.wait().expect("signalled"));
                }
            });
        }
    });
}
