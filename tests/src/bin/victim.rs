//! Program of a tenant for tests that kill it: runs all-reduces until it dies, or puts between two
//! ranks. Or it ends itself without leaving, after so many calls.

use mccs::{Client, Communicator, DataType, RedOp, RemoteMemory};

/// How many calls are enqueued at a time.
const AT_A_TIME: u32 = 8;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next =
        || arguments.next().ok_or_else(|| anyhow::anyhow!("usage: victim SOCKET ID RANK NRANKS COUNT [ROOT]"));
    let (socket, id, rank, nranks, count) = (next()?, next()?, next()?, next()?, next()?);
    let root = arguments.next().unwrap_or_default();
    let client = Client::connect(socket)?;
    let id = id.parse().map_err(anyhow::Error::msg)?;
    let count: u64 = count.parse()?;
    let memory = client.allocate(4 * count)?;
    let stream = client.create_stream()?;
    let place = client.communicator(id, rank.parse()?, nranks.parse()?).root_address_or_empty(&root);
    let comm = place.join()?;
    if std::env::var_os("MCCS_VICTIM_FORKS").is_some() {
        // SAFETY: the child calls nothing but system calls: it reads until nobody has the other end of its input any more.
        unsafe {
            if libc::fork() == 0 {
                libc::read(0, [0u8].as_mut_ptr().cast(), 1);
                libc::_exit(0);
            }
        }
    }
    if std::env::var_os("MCCS_VICTIM_PUTS").is_some() {
        return put(&comm, &mut place.join_bootstrap()?, 4 * count);
    }
    if let Some(calls) = std::env::var_os("MCCS_VICTIM_CALLS") {
        let calls: u32 = calls.to_str().unwrap_or_default().parse()?;
        // SAFETY: nothing is under way yet.
        unsafe { memory.as_mut_slice() }.iter_mut().for_each(|byte| *byte = std::process::id() as u8 | 1);
        let waits = std::env::var_os("MCCS_VICTIM_WAITS").is_some();
        for _ in 0..calls {
            comm.all_reduce(memory.at(0), memory.at(0), 4 * count, DataType::U8, RedOp::Sum, &stream)?;
            if waits {
                stream.synchronize()?;
            }
        }
        // SAFETY: it ends the process.
        unsafe { libc::_exit(0) }
    }
    loop {
        for _ in 0..AT_A_TIME {
            comm.all_reduce(memory.at(0), memory.at(0), count, DataType::F32, RedOp::Sum, &stream)?;
        }
        stream.synchronize()?;
    }
}

/// Both ranks put from the first half of their memory into the second of the other's.
fn put(comm: &Communicator, bootstrap: &mut mccs::Bootstrap, bytes: u64) -> anyhow::Result<()> {
    let (channels, peer) = (comm.port_channels()?, 1 - comm.rank());
    let memory = comm.client().allocate(2 * bytes)?;
    let own = channels.register(memory.at(0), 2 * bytes)?;
    let told = bootstrap.all_gather(&own.remote().to_bytes())?;
    let channel = channels.channel(peer, 0, &own, &RemoteMemory::from_bytes(&told[peer as usize])?)?;
    loop {
        for _ in 0..AT_A_TIME {
            channel.put_with_signal(0, bytes, bytes)?;
        }
        (0..AT_A_TIME).try_for_each(|_| channel.wait())?;
        channel.flush()?;
    }
}
