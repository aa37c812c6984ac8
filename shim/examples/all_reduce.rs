//! Example: one rank of an all-reduce in host memory, and of a ring of sends and receives. Start one
//! process a rank, with mccs-launch or by hand. It fills memory, hands it on, and checks what comes.
//!
//! `MCCS_UNIQUE_ID=00112233445566778899aabbccddeeff MCCS_NRANKS=2 MCCS_RANK=0 all_reduce`

use mccs::{Client, Collective, Collectives, Communicator, CommunicatorBuilder, Error, Group, RedOp};

const COUNT: usize = 1_000_003;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let client = Client::from_env()?;
    let comm = CommunicatorBuilder::from_env(&client)?.name("example").join()?;
    let wrong = wrong_elements(&client, &comm)?;
    println!("rank {} of {}: {COUNT} elements, {wrong} wrong", comm.rank(), comm.nranks());
    comm.destroy()?;
    if wrong == 0 { Ok(()) } else { Err("wrong results".into()) }
}

/// Runs the calls, and counts what is not as it should be.
pub fn wrong_elements(client: &Client, comm: &Communicator) -> Result<usize, Error> {
    let (rank, nranks, count) = (comm.rank(), comm.nranks(), COUNT as u64);
    let (next, last) = ((rank + 1) % nranks, (rank + nranks - 1) % nranks);
    let value = |rank: u32, at: usize| ((at as u32 + rank) % 7) as f32;
    // Memory that the service maps: nothing is copied on the way to it.
    let (sent, received) = (client.allocate(4 * count)?, client.allocate(4 * count)?);
    // SAFETY: no operation is in flight.
    let elements = unsafe { sent.slice_mut::<f32>(0..COUNT) }?;
    elements.iter_mut().enumerate().for_each(|(at, element)| *element = value(rank, at));

    let (stream, data) = (client.create_stream()?, sent.at(0).elements::<f32>(count));
    // Both start together: neither end waits for the other to come first.
    let group = Group::begin();
    comm.enqueue(&Collective::Send { send: data, peer: next }, &stream)?;
    comm.enqueue(&Collective::Recv { recv: received.at(0).elements::<f32>(count), peer: last }, &stream)?;
    group.end()?;
    // Behind the group, as it is on the same stream.
    comm.enqueue(&Collective::AllReduce { send: data, recv: data, op: RedOp::Sum.into() }, &stream)?;
    stream.synchronize()?;

    // SAFETY: all operations have ended.
    let (sums, received) = unsafe { (sent.slice::<f32>(0..COUNT)?, received.slice::<f32>(0..COUNT)?) };
    let sum = |at| (0..nranks).map(|rank| value(rank, at)).sum::<f32>();
    let is_wrong = |at: &usize| sums[*at] != sum(*at) || received[*at] != value(last, *at);
    Ok((0..COUNT).filter(is_wrong).count())
}
