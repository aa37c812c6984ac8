//! For libraries with APIs of other languages, where begin and end of a group are calls, buffers are
//! addresses, and objects have handles. Programs in Rust use [`crate::Group`] and [`crate::Slice`].

pub use mccs_ipc::protocol::JoinOptions;
use mccs_ipc::types::{CollectiveKind, DataType};

use crate::builder::Joining;
use crate::communicator::Call as HostCall;
use crate::cuda::{CudaCall, CudaCommunicator, CudaStream};
pub use crate::group::{group_drop, group_end, group_estimate_us, group_refuse, group_start};
pub use crate::handles::{Held, MARK, Table};
pub use crate::process_client::ProcessClient;
use crate::{Client, Communicator, CommunicatorBuilder, Error, ReduceOperator, Span, Stream};

/// The place in a region that an address names; no buffer, which calls refuse where they need one, where it is in none. As in NCCL any
/// address will do for a buffer that a rank does not use.
#[must_use]
pub fn span_at(client: &Client, address: usize) -> Span {
    match client.0.regions().place(address) {
        Some((buffer, available_bytes)) => Span { buffer, client_number: client.0.number, available_bytes },
        None => Span::NONE,
    }
}

/// A rank in the host's memory that has asked to join, and does not wait for the others yet.
pub struct JoiningRank {
    rank: CommunicatorBuilder,
    joining: Joining,
}

impl JoiningRank {
    /// Asks to join.
    ///
    /// # Errors
    /// [`Error::Disconnected`].
    pub fn announce(rank: CommunicatorBuilder) -> Result<Self, Error> {
        Ok(JoiningRank { joining: rank.send_join()?, rank })
    }

    /// Waits until all have joined.
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::join`].
    pub fn finish(&self) -> Result<Communicator, Error> {
        self.rank.finish_join(&self.joining)
    }
}

/// A collective as C has it: a count by the kind's rule, and buffers without lengths.
#[allow(missing_docs, reason = "as those of `Collective`")]
pub struct Call<Buffer> {
    pub kind: CollectiveKind,
    pub send: Buffer,
    pub recv: Buffer,
    pub count: u64,
    pub dtype: DataType,
    pub op: ReduceOperator,
    pub root: u32,
}

impl Call<Span> {
    /// Enqueues it, or keeps it for the end of the thread's group.
    ///
    /// # Errors
    /// As [`crate::Collectives::enqueue`].
    pub fn enqueue(&self, comm: &Communicator, stream: &Stream) -> Result<(), Error> {
        let Call { kind, send, recv, count, dtype, op, root } = *self;
        let call = HostCall { kind, send, recv, count, dtype, op, scalar_at: None, root, user_tag: 0, one_hop: false };
        comm.collective(&call, stream)
    }
}

impl Call<u64> {
    /// The same on addresses of GPU memory.
    ///
    /// # Errors
    /// As [`crate::Collectives::enqueue`].
    ///
    /// # Safety
    /// As for [`CudaCommunicator::all_reduce`].
    pub unsafe fn enqueue_cuda(&self, comm: &CudaCommunicator, stream: CudaStream) -> Result<(), Error> {
        let Call { kind, send, recv, count, dtype, op, root } = *self;
        let call = CudaCall { kind, send, recv, count, dtype, op, root, user_tag: 0 };
        // SAFETY: the caller's contract.
        unsafe { comm.collective(&call, stream) }
    }
}
