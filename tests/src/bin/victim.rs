//! Program of a tenant for tests that kill it: runs all-reduces until it dies.

use mccs::{Client, DataType, RedOp};

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
    let comm = client.communicator(id, rank.parse()?, nranks.parse()?).root_address(&*root).join()?;
    if std::env::var_os("MCCS_VICTIM_FORKS").is_some() {
        // SAFETY: the child calls nothing but system calls: it reads until nobody has the other end of its input any more.
        unsafe {
            if libc::fork() == 0 {
                libc::read(0, [0u8].as_mut_ptr().cast(), 1);
                libc::_exit(0);
            }
        }
    }
    loop {
        for _ in 0..8 {
            comm.all_reduce(memory.at(0), memory.at(0), count, DataType::F32, RedOp::Sum, &stream)?;
        }
        stream.synchronize()?;
    }
}
