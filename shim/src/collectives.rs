//! Collectives, sends and receives on typed slices: one interface over host memory and GPUs.

use std::fmt;
use std::ops::Range;

use mccs_cuda::RawStream;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};

use crate::communicator::Call;
use crate::cuda::{CudaCall, CudaCommunicator, CudaStream};
use crate::element::Element;
use crate::{Communicator, Error, ReduceOperator, Span, Stream};

/// A kind of memory: where its elements can begin.
pub trait Place: Copy + fmt::Debug {
    /// No place, for what has no elements.
    const NONE: Self;
    /// The place `bytes` further on.
    #[must_use]
    fn further(self, bytes: u64) -> Self;
}

impl Place for Span {
    const NONE: Span = Span::NONE;

    fn further(self, bytes: u64) -> Span {
        self.offset(bytes)
    }
}

/// An address of GPU memory, which [`CudaSlice::from_raw`] vouches for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaPlace(u64);

impl Place for CudaPlace {
    const NONE: CudaPlace = CudaPlace(0);

    fn further(self, bytes: u64) -> CudaPlace {
        CudaPlace(self.0.wrapping_add(bytes))
    }
}

/// Elements of one type, one behind the other: where they begin, how many there are, and which type they have.
#[derive(Debug, Clone, Copy)]
pub struct Slice<P> {
    place: P,
    count: u64,
    data_type: DataType,
}

/// Elements in memory that the service maps; see [`Span::elements`].
pub type HostSlice = Slice<Span>;
/// Elements in GPU memory.
pub type CudaSlice = Slice<CudaPlace>;

impl<P: Place> Slice<P> {
    /// How many elements there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their type.
    #[must_use]
    pub fn data_type(&self) -> DataType {
        self.data_type
    }

    /// Elements `range` of this slice.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a range that leaves the slice.
    pub fn range(self, range: Range<u64>) -> Result<Self, Error> {
        let Range { start, end } = range;
        if start > end || end > self.count {
            return Err(Error::argument(format!("elements {start}..{end} of {}", self.count)));
        }
        // Further than any memory where it is too large: refused by the call that uses it.
        let place = self.place.further(start.saturating_mul(self.data_type.size_bytes() as u64));
        Ok(Slice { place, count: end - start, ..self })
    }
}

impl Span {
    /// A slice of `count` elements of `T` that starts here. The call that uses it checks that they are inside the region, at an address that
    /// is a multiple of their size.
    #[must_use]
    pub fn elements<T: Element>(self, count: u64) -> HostSlice {
        self.elements_of(T::DATA_TYPE, count)
    }

    /// As [`Span::elements`], with the type as a value.
    #[must_use]
    pub fn elements_of(self, data_type: DataType, count: u64) -> HostSlice {
        Slice { place: self, count, data_type }
    }
}

impl CudaSlice {
    /// A slice of `count` elements that starts at a device address.
    ///
    /// # Safety
    /// The memory must be of the context of the communicators that it is used with, or reached by it, and stay so until all operations on
    /// it have ended. Nobody else may use it meanwhile.
    #[must_use]
    pub unsafe fn from_raw(address: u64, data_type: DataType, count: u64) -> Self {
        Slice { place: CudaPlace(address), count, data_type }
    }
}

/// A stream of the caller's, for communicators of GPUs.
#[derive(Debug, Clone, Copy)]
pub struct CudaStreamRef(RawStream);

impl CudaStreamRef {
    /// A `CUstream` or `cudaStream_t`; null is the default stream.
    ///
    /// # Safety
    /// It must be of the context of the communicators that it is used with, and live until all operations on it have ended.
    #[must_use]
    pub unsafe fn from_raw(stream: CudaStream) -> Self {
        CudaStreamRef(RawStream::from_ptr(stream))
    }
}

/// Kind of an operation, and its elements. Buffers that only the root has are `None` elsewhere. In place: as each kind says.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "fields: what is sent, where the result comes to, how elements are combined, and the root's rank"
)]
pub enum Collective<P> {
    /// Combines all ranks' elements; every rank gets the result. As many are received as sent. In place: the same place twice.
    AllReduce { send: Slice<P>, recv: Slice<P>, op: ReduceOperator },
    /// Combines all ranks' elements; each rank gets its part, of n equal ones. In place: `recv` is the rank's part of `send`.
    ReduceScatter { send: Slice<P>, recv: Slice<P>, op: ReduceOperator },
    /// Combines all ranks' elements; the root gets the result. In place: the same place twice.
    Reduce { send: Slice<P>, recv: Option<Slice<P>>, op: ReduceOperator, root: u32 },
    /// Every rank gets all ranks' elements, in rank order. In place: `send` is the rank's part of `recv`.
    AllGather { send: Slice<P>, recv: Slice<P> },
    /// Every rank gets the root's elements. In place: the same place twice.
    Broadcast { send: Option<Slice<P>>, recv: Slice<P>, root: u32 },
    /// Part s of rank r's n equal parts goes to rank s, as its part r. Never in place.
    AllToAll { send: Slice<P>, recv: Slice<P> },
    /// The root gets all ranks' elements, in rank order. In place: the root's `send` is its part of `recv`.
    Gather { send: Slice<P>, recv: Option<Slice<P>>, root: u32 },
    /// Each rank gets its part of the root's elements. In place: the root's `recv` is its part of `send`.
    Scatter { send: Option<Slice<P>>, recv: Slice<P>, root: u32 },
    /// Ends when all ranks have come to it.
    Barrier,
    /// Rank `peer` gets the elements, by [`Collective::Recv`]. Those of one group do not wait for each other.
    Send { send: Slice<P>, peer: u32 },
    /// Gets what rank `peer` sends: as many elements.
    Recv { recv: Slice<P>, peer: u32 },
}

/// An operation, taken apart.
#[derive(Clone, Copy)]
enum Parts<P> {
    Collective(CollectiveParts<P>),
    PointToPoint(PointToPoint<P>),
}

#[derive(Clone, Copy)]
struct CollectiveParts<P> {
    kind: CollectiveKind,
    send: Option<Slice<P>>,
    recv: Option<Slice<P>>,
    op: ReduceOperator,
    root: u32,
}

#[derive(Clone, Copy)]
struct PointToPoint<P> {
    is_send: bool,
    slice: Slice<P>,
    peer: u32,
}

/// A collective's count and type, as calls take them.
#[derive(Debug, PartialEq, Eq)]
struct Counts {
    /// By the kind's rule.
    count: u64,
    data_type: DataType,
}

impl<P: Place> Collective<P> {
    fn parts(&self) -> Parts<P> {
        use Collective as C;
        use CollectiveKind as K;
        let of = |kind, send, recv, op, root| Parts::Collective(CollectiveParts { kind, send, recv, op, root });
        let sum = RedOp::Sum.into();
        match *self {
            C::AllReduce { send, recv, op } => of(K::AllReduce, Some(send), Some(recv), op, 0),
            C::ReduceScatter { send, recv, op } => of(K::ReduceScatter, Some(send), Some(recv), op, 0),
            C::Reduce { send, recv, op, root } => of(K::Reduce, Some(send), recv, op, root),
            C::AllGather { send, recv } => of(K::AllGather, Some(send), Some(recv), sum, 0),
            C::Broadcast { send, recv, root } => of(K::Broadcast, send, Some(recv), sum, root),
            C::AllToAll { send, recv } => of(K::AllToAll, Some(send), Some(recv), sum, 0),
            C::Gather { send, recv, root } => of(K::Gather, Some(send), recv, sum, root),
            C::Scatter { send, recv, root } => of(K::Scatter, send, Some(recv), sum, root),
            C::Barrier => of(K::Barrier, None, None, sum, 0),
            C::Send { send, peer } => Parts::PointToPoint(PointToPoint { is_send: true, slice: send, peer }),
            C::Recv { recv, peer } => Parts::PointToPoint(PointToPoint { is_send: false, slice: recv, peer }),
        }
    }
}

impl<P: Place> CollectiveParts<P> {
    /// Begins of the elements of both buffers.
    fn places(&self) -> [P; 2] {
        [self.send, self.recv].map(|slice| slice.map_or(P::NONE, |slice| slice.place))
    }

    /// Checks that its slices are as long as the kind says, and of one type, on this rank.
    fn counts(&self, rank: u32, nranks: u32) -> Result<Counts, Error> {
        let CollectiveParts { kind, send, recv, root, .. } = *self;
        let Some(some) = send.or(recv) else { return Ok(Counts { count: 0, data_type: DataType::U8 }) };
        let data_type = some.data_type;
        if [send, recv].iter().flatten().any(|slice| slice.data_type != data_type) {
            return Err(Error::argument(format!("{kind}: elements sent and received have different types")));
        }
        // The buffer that has `count` elements by the kind's rule, or a part of them for each rank.
        let count = match kind {
            CollectiveKind::AllToAll => some.count / u64::from(nranks.max(1)),
            CollectiveKind::ReduceScatter | CollectiveKind::Broadcast | CollectiveKind::Scatter => {
                recv.map_or(0, |recv| recv.count)
            }
            _ => some.count,
        };
        let sides = [
            ("send", send, kind.send_count(count, nranks, rank, root)),
            ("receive", recv, kind.recv_count(count, nranks, rank, root)),
        ];
        for (side, slice, needed) in sides {
            let found = slice.map_or(0, |slice| slice.count);
            // A slice that the rank has no use for may be of any length: that to be broadcast, where the rank is not root.
            if needed != Some(found) && needed != Some(0) {
                let needed = needed.map_or_else(|| "more than memory has".into(), |needed| needed.to_string());
                return Err(Error::argument(format!(
                    "{kind}: rank {rank}'s {side} slice has {found} elements, expected {needed}"
                )));
            }
        }
        Ok(Counts { count, data_type })
    }
}

/// A rank that takes part in collectives, sends and receives: of the host's memory, or of GPUs. Calls return at once, and complete in the order of their
/// stream; all ranks make the same calls in the same order. Calls may be made from any thread.
pub trait Collectives {
    /// Place of elements.
    type Place: Place;
    /// Stream that orders operations.
    type Stream: ?Sized;

    /// This rank.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn nranks(&self) -> u32;

    /// Enqueues an operation, or keeps it for the end of the thread's group.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where slices are not as long as the collective says or of different types, and nothing is enqueued;
    /// [`Error::Failed`] on GPUs once the communicator has failed. In the host's memory calls are enqueued then, and the stream's next
    /// [`Stream::synchronize`] fails. Failures of the operation come from that stream, or from [`Collectives::async_error`].
    fn enqueue(&self, collective: &Collective<Self::Place>, stream: &Self::Stream) -> Result<(), Error>;

    /// The error that ended the communicator, if one did: on any rank.
    fn async_error(&self) -> Option<Error>;
}

impl Collectives for Communicator {
    type Place = Span;
    type Stream = Stream;

    fn rank(&self) -> u32 {
        self.rank()
    }

    fn nranks(&self) -> u32 {
        self.nranks()
    }

    fn enqueue(&self, collective: &Collective<Span>, stream: &Stream) -> Result<(), Error> {
        let parts = match collective.parts() {
            Parts::Collective(parts) => parts,
            Parts::PointToPoint(PointToPoint { is_send, slice: Slice { place, count, data_type }, peer }) => {
                let call = if is_send { Communicator::send } else { Communicator::recv };
                return call(self, place, count, data_type, peer, stream);
            }
        };
        let Counts { count, data_type: dtype } = parts.counts(self.rank(), self.nranks())?;
        let (CollectiveParts { kind, op, root, .. }, [send, recv]) = (parts, parts.places());
        let call = Call { kind, send, recv, count, dtype, op, scalar_at: None, root, user_tag: 0, one_hop: false };
        self.collective(&call, stream)
    }

    fn async_error(&self) -> Option<Error> {
        self.async_error()
    }
}

impl Collectives for CudaCommunicator {
    type Place = CudaPlace;
    type Stream = CudaStreamRef;

    fn rank(&self) -> u32 {
        self.rank()
    }

    fn nranks(&self) -> u32 {
        self.nranks()
    }

    fn enqueue(&self, collective: &Collective<CudaPlace>, stream: &CudaStreamRef) -> Result<(), Error> {
        let parts = match collective.parts() {
            Parts::Collective(parts) => parts,
            Parts::PointToPoint(PointToPoint { is_send, slice: Slice { place, count, data_type }, peer }) => {
                let (address, stream) = (place.0, stream.0.as_ptr());
                // SAFETY: whoever made the slice and the stream has vouched for them (`from_raw`).
                return unsafe {
                    match is_send {
                        true => self.send(address, count, data_type, peer, stream),
                        false => self.recv(address, count, data_type, peer, stream),
                    }
                };
            }
        };
        let Counts { count, data_type: dtype } = parts.counts(self.rank(), self.nranks())?;
        let (CollectiveParts { kind, op, root, .. }, [CudaPlace(send), CudaPlace(recv)]) = (parts, parts.places());
        if matches!(op, ReduceOperator::PreMulSumAt(_)) {
            let reason = "nobody vouches for the scalar's address here: use the call of CudaCommunicator";
            return Err(Error::InvalidArgument(reason.into()));
        }
        let call = CudaCall { kind, send, recv, count, dtype, op, root, user_tag: 0 };
        // SAFETY: whoever made the slices and the stream has vouched for them (`from_raw`). The operator names no memory.
        unsafe { self.collective(&call, stream.0.as_ptr()) }
    }

    fn async_error(&self) -> Option<Error> {
        self.async_error()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(count: u64) -> CudaSlice {
        // SAFETY: of no communicator.
        unsafe { CudaSlice::from_raw(4096, DataType::F32, count) }
    }

    fn counts(collective: &Collective<CudaPlace>, rank: u32, nranks: u32) -> Result<Counts, Error> {
        match collective.parts() {
            Parts::Collective(parts) => parts.counts(rank, nranks),
            Parts::PointToPoint(_) => panic!("{collective:?}"),
        }
    }

    #[test]
    fn elements_behind_all_memory_are_no_others() {
        let all = Span::NONE.elements::<f64>(u64::MAX);
        let behind = all.range(1 << 61..(1 << 61) + 8).expect("inside");
        assert_eq!((behind.place.buffer.offset_bytes, behind.place.available_bytes), (u64::MAX, 0));
    }

    #[test]
    fn counts_follow_from_slices_on_every_rank() {
        let (op, nranks, root) = (RedOp::Sum.into(), 4, 2);
        for rank in 0..nranks {
            let at_root = |count| (rank == root).then(|| slice(count));
            let whole = slice(12);
            let (one, all) = (slice(3), slice(12));
            let right = [
                (Collective::AllReduce { send: whole, recv: whole, op }, 12),
                (Collective::ReduceScatter { send: all, recv: one, op }, 3),
                (Collective::Reduce { send: whole, recv: at_root(12), op, root }, 12),
                (Collective::AllGather { send: one, recv: all }, 3),
                (Collective::Broadcast { send: at_root(12), recv: whole, root }, 12),
                (Collective::AllToAll { send: all, recv: all }, 3),
                (Collective::Gather { send: one, recv: at_root(12), root }, 3),
                (Collective::Scatter { send: at_root(12), recv: one, root }, 3),
            ];
            for (collective, count) in right {
                let counts = counts(&collective, rank, nranks).expect("right");
                assert_eq!((counts.count, counts.data_type), (count, DataType::F32), "{collective:?}, rank {rank}");
            }
        }
    }

    #[test]
    fn lengths_and_types_that_contradict_each_other_are_refused() {
        let op = RedOp::Sum.into();
        let other = Slice { data_type: DataType::I32, ..slice(4) };
        let wrong = [
            Collective::AllReduce { send: slice(4), recv: slice(5), op },
            Collective::AllReduce { send: slice(4), recv: other, op },
            Collective::ReduceScatter { send: slice(4), recv: slice(4), op },
            Collective::AllGather { send: slice(4), recv: slice(4) },
            Collective::AllToAll { send: slice(5), recv: slice(5) },
            Collective::Reduce { send: slice(4), recv: None, op, root: 0 },
            Collective::Broadcast { send: None, recv: slice(4), root: 0 },
        ];
        for collective in wrong {
            let error = counts(&collective, 0, 2).expect_err("wrong");
            assert!(matches!(error, Error::InvalidArgument(_)), "{collective:?}: {error}");
        }
        assert_eq!(slice(9).range(2..5).expect("inside").place, CudaPlace(4096 + 8));
        assert!(slice(9).range(2..10).is_err());
    }
}
