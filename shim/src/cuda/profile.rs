//! Profiler data of GPU collectives: how they are carried out, and when they ran on the GPU.
//!
//! Kernels leave stamps in their rank's symmetric buffer (`docs/decisions/035-stamps.md`). A reader copies them now and then, so a call
//! costs nothing for them. A stamp is found by its kernel's number, which is known until the communicator's first capture: replays count on
//! the GPU alone. Operations of the service have no stamps.

use std::sync::Arc;

use mccs_cuda::{DriverError, OwnedStream, PinnedMemory, while_capturing};
use mccs_ipc::types::{CollectiveKind, DataType};
use mccs_kernels::cuda::{Algorithm, SymmetricBufferCounts, SymmetricBufferLayout};

use super::communicator::{Backend, CudaCommunicator};
use super::cuda_error;
use super::device_initiated::Member;
use crate::Error;

/// Executor of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// A kernel in the caller's stream.
    Kernel {
        /// Whether data goes by way of the owners of its shards.
        is_two_shot: bool,
        /// NCCL's name for how data and flags go: `LL`, `LL128` or `SIMPLE`.
        protocol: &'static str,
        /// The number of the stamp that the kernel leaves, if it is the next one; none where it cannot be told from others.
        stamp: Option<u64>,
    },
    /// The service's copy engines.
    CopyEngines,
    /// The service, in memory of the host.
    Service,
    /// Nobody: a rank is alone, or there are no elements.
    Nobody,
}

/// When a collective's kernel ran, in nanoseconds of its GPU's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RanAt {
    /// It began.
    pub began_ns: u64,
    /// It had done everything.
    pub ended_ns: u64,
}

/// Reads a rank's stamps. Nobody waits for a copy, and the driver is called twice for one: other threads' launches wait for each call.
pub struct StampReader {
    stream: OwnedStream,
    member: Arc<Member>,
    /// Memory of copies.
    copied: PinnedMemory,
    is_under_way: bool,
    /// Why no copy could be begun.
    failed: Option<Error>,
    counts: SymmetricBufferCounts,
}

impl CudaCommunicator {
    /// How a collective of `count` elements would be carried out now: the operator may change it until it is called.
    #[must_use]
    pub fn carrier(&self, kind: CollectiveKind, count: u64, dtype: DataType) -> Carrier {
        if self.nranks() == 1 || count == 0 {
            return Carrier::Nobody;
        }
        let Backend::DeviceInitiated(comm) = self.backend() else { return Carrier::Service };
        let bytes = kind.payload_count(count, self.nranks()).saturating_mul(dtype.size_bytes() as u64);
        let (algorithm, stamp) = comm.outlook(kind, bytes);
        let Some(algorithm) = algorithm else { return Carrier::CopyEngines };
        let protocol = match algorithm {
            Algorithm::LlOneShot | Algorithm::LlTwoShot => "LL",
            Algorithm::Ll128OneShot | Algorithm::Ll128TwoShot => "LL128",
            Algorithm::SimpleOneShot | Algorithm::SimpleTwoShot | Algorithm::SimpleChain => "SIMPLE",
        };
        let is_two_shot =
            matches!(algorithm, Algorithm::LlTwoShot | Algorithm::Ll128TwoShot | Algorithm::SimpleTwoShot);
        Carrier::Kernel { is_two_shot, protocol, stamp }
    }

    /// Kernels of collectives that were launched outside of graphs: the last one's number on the symmetric buffer.
    #[must_use]
    pub fn kernels_launched(&self) -> u64 {
        match self.backend() {
            Backend::DeviceInitiated(comm) => comm.kernels_launched(),
            Backend::ServiceExecuted(_) => 0,
        }
    }

    /// Reader of the stamps of this rank's kernels; none if they leave none.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn stamp_reader(&self) -> Result<Option<StampReader>, Error> {
        let Backend::DeviceInitiated(comm) = self.backend() else { return Ok(None) };
        if !comm.is_timed() || self.nranks() == 1 {
            return Ok(None);
        }
        let member = Arc::clone(comm.member());
        // Another thread may be capturing, which must not be disturbed.
        let made = while_capturing(|| {
            let copied = PinnedMemory::new(&member.context, SymmetricBufferLayout::COUNTED_BYTES)?;
            Ok((OwnedStream::new(&member.context)?, copied))
        });
        let (stream, copied) = made.and_then(|made: Result<_, DriverError>| made).map_err(cuda_error)?;
        let (is_under_way, failed, counts) = (false, None, SymmetricBufferCounts::default());
        Ok(Some(StampReader { stream, member, copied, is_under_way, failed, counts }))
    }
}

impl StampReader {
    /// Begins to copy what kernels have left so far, unless a copy is under way. [`StampReader::has_come`] has the error, if it fails.
    pub fn begin(&mut self) {
        if self.is_under_way || self.failed.is_some() {
            return;
        }
        let (stream, buffer, to) = (&self.stream, self.member.buffer(), self.copied.address());
        // SAFETY: the symmetric buffer is mapped as long as the member lives, and begins with as many bytes; so many are at the other end, too,
        // until the stream is idle.
        let begun = self.in_context(|| unsafe { stream.raw().copy(to, buffer, SymmetricBufferLayout::COUNTED_BYTES) });
        match begun {
            Ok(()) => self.is_under_way = true,
            Err(error) => self.failed = Some(error),
        }
    }

    /// Whether a copy has ended since the last time: then the functions below tell what it has brought.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::InvalidArgument`] once the rank has left.
    pub fn has_come(&mut self) -> Result<bool, Error> {
        if self.member.has_left() {
            return Err(Error::argument("the communicator has been finalized"));
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        // SAFETY: the stream is the reader's.
        if !self.is_under_way || !self.in_context(|| unsafe { self.stream.raw().is_idle() })? {
            return Ok(false);
        }
        self.is_under_way = false;
        // SAFETY: the copy has ended, and no other was begun.
        self.counts.as_bytes_mut().copy_from_slice(unsafe { self.copied.bytes() });
        Ok(true)
    }

    /// Calls the driver, also while another thread captures, which must not be disturbed.
    fn in_context<T>(&self, call: impl FnOnce() -> Result<T, DriverError>) -> Result<T, Error> {
        let _entered = self.member.context.enter().map_err(cuda_error)?;
        while_capturing(call).and_then(|called| called).map_err(cuda_error)
    }

    /// Collectives that had ended when the last copy was begun.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.counts.operations()
    }

    /// When a collective ran, if it had ended and was among the last 512.
    #[must_use]
    pub fn ran_at(&self, number: u64) -> Option<RanAt> {
        let stamp = self.counts.stamp(u32::try_from(number).ok()?)?;
        Some(RanAt { began_ns: stamp.began_ns, ended_ns: stamp.ended_ns })
    }

    /// Whether the communicator was aborted: kernels may leave no stamps any more.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.member.has_left() || self.member.page.is_aborted()
    }
}

impl Drop for StampReader {
    fn drop(&mut self) {
        if self.is_under_way {
            // SAFETY: the stream is the reader's. Its copy waits for nobody, and must not go to memory that is not there any more.
            let _ = self.in_context(|| unsafe { self.stream.raw().synchronize() });
        }
    }
}
