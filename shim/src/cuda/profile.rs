//! What profilers are told of collectives: how they are carried out, and when they ran on the GPU.
//!
//! Kernels leave stamps in their rank's symmetric buffer (`docs/decisions/035-stamps.md`). A reader copies them now and then, so a call costs
//! nothing for it. A stamp is found by its kernel's number, which is known until the communicator's first capture: replays count on
//! the GPU alone. What the service carries out has no stamps.

use std::sync::Arc;

use mccs_cuda::{DriverError, OwnedStream, while_capturing};
use mccs_ipc::types::{CollectiveKind, DataType};
use mccs_kernels::cuda::{Algorithm, AreaCounts};

use super::communicator::{Backend, CudaCommunicator};
use super::cuda_error;
use super::device_initiated::Member;
use crate::Error;

/// Who carries a collective out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// A kernel in the caller's stream.
    Kernel {
        /// Whether data goes by way of the owners of its shards.
        is_two_shot: bool,
        /// NCCL's name for how data and flags go: `LL`, `LL128` or `SIMPLE`.
        protocol: &'static str,
        /// Whether the kernel leaves a stamp that can be told from others.
        is_stamped: bool,
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

/// Reads a rank's stamps.
pub struct StampReader {
    stream: OwnedStream,
    member: Arc<Member>,
    counts: AreaCounts,
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
        let Some(algorithm) = comm.algorithm(kind, bytes) else { return Carrier::CopyEngines };
        let protocol = match algorithm {
            Algorithm::LlOneShot | Algorithm::LlTwoShot => "LL",
            Algorithm::Ll128OneShot | Algorithm::Ll128TwoShot => "LL128",
            Algorithm::SimpleOneShot | Algorithm::SimpleTwoShot | Algorithm::SimpleChain => "SIMPLE",
        };
        let is_two_shot =
            matches!(algorithm, Algorithm::LlTwoShot | Algorithm::Ll128TwoShot | Algorithm::SimpleTwoShot);
        Carrier::Kernel { is_two_shot, protocol, is_stamped: comm.has_known_stamps() }
    }

    /// Kernels of collectives that were launched outside of graphs: the last one's number on the symmetric buffer.
    #[must_use]
    pub fn kernels_launched(&self) -> u64 {
        match self.backend() {
            Backend::DeviceInitiated(comm) => comm.kernels_launched(),
            Backend::ServiceExecuted(_) => 0,
        }
    }

    /// What reads the stamps of this rank's kernels; none where they leave none.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn stamp_reader(&self) -> Result<Option<StampReader>, Error> {
        let Backend::DeviceInitiated(comm) = self.backend() else { return Ok(None) };
        if !comm.is_timed() || self.nranks() == 1 {
            return Ok(None);
        }
        let member = Arc::clone(comm.member());
        let stream = OwnedStream::new(&member.context).map_err(cuda_error)?;
        Ok(Some(StampReader { stream, member, counts: AreaCounts::default() }))
    }
}

impl StampReader {
    /// Copies what kernels have left so far.
    ///
    /// # Errors
    /// [`Error::Cuda`], [`Error::InvalidArgument`] once the rank has left.
    pub fn read(&mut self) -> Result<(), Error> {
        if self.member.has_left() {
            return Err(Error::argument("the communicator has been finalized"));
        }
        let (stream, area, to) = (&self.stream, self.member.area(), self.counts.as_bytes_mut());
        // Another thread may be capturing, which must not be disturbed.
        // SAFETY: the symmetric buffer is mapped as long as the member lives, and begins with as many bytes.
        let read: Result<Result<(), DriverError>, DriverError> = while_capturing(|| unsafe { stream.read(to, area) });
        read.and_then(|read| read).map_err(cuda_error)
    }

    /// Collectives that had ended when it was read.
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
