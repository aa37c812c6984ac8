//! An idle session: joins a communicator of its own, runs one all-reduce, and waits until standard
//! input is closed. It says when it waits.

use std::io::Read;

use mccs::{Client, DataType, RedOp};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let client = Client::from_env()?;
    let comm = client.communicator(mccs::unique_id()?, 0, 1).join()?;
    let stream = client.create_stream()?;
    let memory = client.allocate(4096)?;
    comm.all_reduce(memory.at(0), memory.at(0), 1024, DataType::F32, RedOp::Sum, &stream)?;
    stream.synchronize()?;
    println!("idle");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
