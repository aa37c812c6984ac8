//! Barriers and exchanged numbers of a benchmark's ranks, in host memory.

use std::path::Path;

use mccs::{Client, Communicator, DataType, RedOp, Stream, UniqueId};

/// A rank's connection to a service, and a communicator of host memory.
pub struct Meeting {
    communicator: Communicator,
    stream: Stream,
    client: Client,
}

impl Meeting {
    /// Joins, at a service's socket and with a root address.
    ///
    /// # Errors
    /// The service's.
    pub fn join(socket: &Path, root: &str, id: UniqueId, rank: u32, nranks: u32) -> Result<Self, mccs::Error> {
        let client = Client::connect(socket)?;
        let communicator = client.communicator(id, rank, nranks).root_address_or_empty(root).join()?;
        Ok(Meeting { communicator, stream: client.create_stream()?, client })
    }

    /// The connection.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The communicator of host memory.
    #[must_use]
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    /// Rank 0's bytes, on all ranks; all name as many.
    ///
    /// # Errors
    /// The service's.
    pub fn broadcast(&self, bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
        let memory = self.client.allocate(bytes.len() as u64)?;
        // SAFETY: nothing in flight uses this new region.
        unsafe { memory.as_mut_slice()[..bytes.len()].copy_from_slice(bytes) };
        let (at, count) = (memory.at(0), bytes.len() as u64);
        self.communicator.broadcast(at, at, count, DataType::U8, 0, &self.stream)?;
        self.stream.synchronize()?;
        // SAFETY: the operation has ended.
        Ok(unsafe { memory.as_slice() }[..bytes.len()].to_vec())
    }

    /// The largest of all ranks' numbers, on all ranks; also a barrier.
    ///
    /// # Errors
    /// The service's.
    pub fn largest(&self, number: f64) -> anyhow::Result<f64> {
        self.combine(number, RedOp::Max)
    }

    /// The sum of all ranks' numbers.
    ///
    /// # Errors
    /// The service's.
    pub fn sum(&self, number: f64) -> anyhow::Result<f64> {
        self.combine(number, RedOp::Sum)
    }

    fn combine(&self, number: f64, op: RedOp) -> anyhow::Result<f64> {
        let memory = self.client.allocate(8)?;
        // SAFETY: nothing in flight uses this new region.
        unsafe { memory.as_mut_slice()[..8].copy_from_slice(&number.to_le_bytes()) };
        self.communicator.all_reduce(memory.at(0), memory.at(0), 1, DataType::F64, op, &self.stream)?;
        self.stream.synchronize()?;
        // SAFETY: the operation has ended.
        Ok(f64::from_le_bytes(unsafe { memory.as_slice() }[..8].try_into()?))
    }
}
