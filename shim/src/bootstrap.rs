//! Application-level bootstrap on a host: all-gather of bytes and barrier, before or beside a
//! communicator.

use mccs_ipc::types::{DataType, UniqueId};

use crate::{Communicator, CommunicatorBuilder, Error, Region, Stream};

/// Ranks that exchange bytes: addresses, handles, settings. Calls wait for all ranks, which make them in the same order. It has a
/// communicator of host memory of its own, and ends with it.
pub struct Bootstrap {
    comm: Communicator,
    stream: Stream,
}

/// How long a rank's bytes are, as ranks tell each other.
const LENGTH_BYTES: usize = size_of::<u64>();

impl CommunicatorBuilder {
    /// Joins the ranks that exchange bytes. The id may be one that a communicator has, too. Returns when all ranks have joined.
    ///
    /// # Errors
    /// As for [`CommunicatorBuilder::join`].
    pub fn join_bootstrap(&self) -> Result<Bootstrap, Error> {
        let id = UniqueId(self.id.0.map(|byte| byte ^ 0xb5));
        let comm = CommunicatorBuilder { id, ..self.clone() }.join()?;
        Ok(Bootstrap { stream: self.client.create_stream()?, comm })
    }
}

impl Bootstrap {
    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.comm.rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn nranks(&self) -> u32 {
        self.comm.nranks()
    }

    /// Every rank gets all ranks' bytes, in the order of ranks. Lengths may differ.
    ///
    /// # Errors
    /// [`Error::Failed`] where a rank has gone, [`Error::Refused`] for more memory than the tenant may have.
    pub fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let lengths = self.gather_equal(&(own.len() as u64).to_le_bytes())?;
        let lengths: Vec<_> = lengths.chunks_exact(LENGTH_BYTES).map(length_of).collect();
        let most = lengths.iter().copied().max().unwrap_or(0);
        if most == 0 {
            return Ok(lengths.iter().map(|_| Vec::new()).collect());
        }
        let mut padded = own.to_vec();
        padded.resize(most, 0);
        let all = self.gather_equal(&padded)?;
        Ok(all.chunks_exact(most).zip(lengths).map(|(bytes, length)| bytes[..length.min(most)].to_vec()).collect())
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// [`Error::Failed`] where a rank has gone.
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.comm.barrier(&self.stream)?;
        self.stream.synchronize()
    }

    /// All ranks' bytes one behind the other, of which all have as many, and some.
    fn gather_equal(&self, own: &[u8]) -> Result<Vec<u8>, Error> {
        let (bytes, nranks) = (own.len() as u64, u64::from(self.nranks()));
        let too_long = || Error::argument(format!("{bytes} bytes of each of {nranks} ranks are more than memory has"));
        let memory: Region = self.comm.client().allocate(bytes.checked_mul(nranks).ok_or_else(too_long)?)?;
        let at = own.len() * self.rank() as usize;
        // SAFETY: nothing in flight uses this new region.
        let all = unsafe { memory.as_mut_slice() };
        all[at..at + own.len()].copy_from_slice(own);
        self.comm.all_gather(memory.at(at as u64), memory.at(0), bytes, DataType::U8, &self.stream)?;
        self.stream.synchronize()?;
        // SAFETY: the operation has ended.
        Ok(unsafe { memory.as_slice() }[..own.len() * self.nranks() as usize].to_vec())
    }
}

fn length_of(bytes: &[u8]) -> usize {
    let mut length = [0; LENGTH_BYTES];
    length.copy_from_slice(bytes);
    usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX)
}
