//! Sends and receives between GPUs: collects those of a group, which go together. Those of a group
//! go together: none of them waits for another one of the group. One outside of a group is a group
//! of its own.

use std::collections::BTreeMap;
use std::sync::Arc;

use mccs_cuda::{DeviceAddress, RawStream};
use mccs_ipc::types::DataType;
use mccs_kernels::cuda::{MESSAGES_MAX, P2pError, P2pLaunch, P2pMessage};

use super::device_initiated::P2p;
use super::host_staged::HostStagedP2p;
use super::rails::{RailsP2p, RailsP2pPlan};
use super::surfacing::Surfacing;
use super::{CudaCommunicator, CudaStream, cuda_error};
use crate::Error;

/// Parts of a communicator's sends and receives: kept by the communicator, and by groups to their end.
#[derive(Clone)]
pub(super) enum AnyP2p {
    /// A kernel does them.
    DeviceInitiated(Arc<P2p>),
    /// The service does.
    HostStaged(Arc<HostStagedP2p>),
    /// A kernel does those inside a host, and the service the others.
    Rails(Arc<RailsP2p>),
}

/// A communicator's part of a group, checked as a whole.
enum Planned {
    Kernel(P2pLaunch),
    HostStaged,
    Rails(RailsP2pPlan),
}

/// A send or receive that waits for the end of its group.
pub(crate) struct Collected {
    p2p: AnyP2p,
    surfacing: Arc<Surfacing>,
    message: P2pMessage,
    stream: RawStream,
}

impl Collected {
    /// As for collectives, along with all that goes with it in one kernel: the bytes that it sends. Nothing where the service carries it out.
    pub(crate) fn sends(&self) -> Option<(usize, u64)> {
        let AnyP2p::DeviceInitiated(p2p) = &self.p2p else { return None };
        Some((Arc::as_ptr(p2p) as usize, if self.message.is_send { self.message.bytes } else { 0 }))
    }
}

/// How long sends of so many bytes take a rank, in microseconds.
pub(crate) fn estimate_us(bytes: u64) -> f64 {
    super::estimate::over_link_us(bytes as f64)
}

/// A communicator's part of a group.
struct Part {
    p2p: AnyP2p,
    surfacing: Arc<Surfacing>,
    list: Vec<P2pMessage>,
    /// Without repetition; the first one has to wait for the others.
    streams: Vec<RawStream>,
}

/// Launches what a group has collected, on each communicator together; or, where there is more than a kernel is told at a time, in rounds.
///
/// # Errors
/// [`Error::InvalidArgument`] if a communicator was destroyed or its list cannot be, and [`Error::Failed`] if it has failed:
/// then nothing is launched. [`Error::Cuda`].
pub(crate) fn launch_together(collected: Vec<Collected>) -> Result<(), Error> {
    let mut parts: Vec<Part> = Vec::new();
    for Collected { p2p, surfacing, message, stream } in collected {
        let index = parts.iter().position(|part| part.p2p.is(&p2p)).unwrap_or_else(|| {
            parts.push(Part { p2p, surfacing, list: Vec::new(), streams: Vec::new() });
            parts.len() - 1
        });
        parts[index].list.push(message);
        if !parts[index].streams.contains(&stream) {
            parts[index].streams.push(stream);
        }
    }
    let parts: Vec<_> = parts.into_iter().flat_map(Part::rounds).collect();
    let plans = parts.iter().map(Part::plan).collect::<Result<Vec<_>, _>>()?;
    // Nothing comes of what was passed over.
    let mut planned = parts.iter().zip(plans).filter_map(|(part, plan)| Some((part, plan?)));
    planned.try_for_each(|(part, plan)| part.launch(plan))
}

impl AnyP2p {
    fn is(&self, other: &AnyP2p) -> bool {
        match (self, other) {
            (AnyP2p::DeviceInitiated(a), AnyP2p::DeviceInitiated(b)) => Arc::ptr_eq(a, b),
            (AnyP2p::HostStaged(a), AnyP2p::HostStaged(b)) => Arc::ptr_eq(a, b),
            (AnyP2p::Rails(a), AnyP2p::Rails(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }

    fn nranks(&self) -> u32 {
        match self {
            AnyP2p::DeviceInitiated(p2p) => p2p.nranks(),
            AnyP2p::HostStaged(p2p) => p2p.nranks(),
            AnyP2p::Rails(p2p) => p2p.nranks(),
        }
    }
}

impl Part {
    /// Messages that go together: of each direction of a pair as many, so that both ends have them in rounds that begin when those before
    /// have ended on all ranks.
    fn rounds(self) -> Vec<Part> {
        if self.list.len() <= MESSAGES_MAX {
            return vec![self];
        }
        let Part { p2p, surfacing, list, streams } = self;
        let in_round = (MESSAGES_MAX / (2 * p2p.nranks() as usize)).max(1);
        let mut counts: BTreeMap<(u32, bool), usize> = BTreeMap::new();
        let mut rounds: Vec<Part> = Vec::new();
        for message in list {
            let count = counts.entry((message.peer, message.is_send)).or_default();
            let round = *count / in_round;
            *count += 1;
            if round == rounds.len() {
                let (p2p, surfacing) = (p2p.clone(), Arc::clone(&surfacing));
                rounds.push(Part { p2p, surfacing, list: Vec::new(), streams: streams.clone() });
            }
            rounds[round].list.push(message);
        }
        rounds
    }

    /// Checks it as a whole; nothing where it is passed over.
    fn plan(&self) -> Result<Option<Planned>, Error> {
        let plan = match &self.p2p {
            AnyP2p::DeviceInitiated(p2p) => p2p.plan(&self.list, &self.streams).map(Planned::Kernel),
            AnyP2p::HostStaged(p2p) => p2p.plan(&self.list, &self.streams).map(|()| Planned::HostStaged),
            AnyP2p::Rails(p2p) => p2p.plan(&self.list, &self.streams).map(Planned::Rails),
        };
        let error = match plan {
            Ok(planned) => return Ok(Some(planned)),
            Err(error) => Err(error),
        };
        // SAFETY: callers of sends and receives vouch for their streams.
        unsafe { self.surfacing.of_call(error, &self.streams) }.map(|()| None)
    }

    fn launch(&self, plan: Planned) -> Result<(), Error> {
        match (&self.p2p, plan) {
            (AnyP2p::DeviceInitiated(p2p), Planned::Kernel(kernel)) => p2p.launch(&self.list, kernel, &self.streams),
            (AnyP2p::HostStaged(p2p), Planned::HostStaged) => p2p.launch(&self.list, &self.streams),
            (AnyP2p::Rails(p2p), Planned::Rails(plan)) => p2p.launch(plan, &self.streams),
            _ => Err(Error::argument("a bug in mccs: a group was planned as another")),
        }
    }
}

/// The capture that a group's streams are in, if they are in one.
pub(super) fn capture_of(streams: &[RawStream]) -> Result<Option<u64>, Error> {
    // SAFETY: callers of sends and receives vouch for their streams.
    let id = |stream: &RawStream| Ok(unsafe { stream.capture() }.map_err(cuda_error)?.map(|capture| capture.id));
    let captures = streams.iter().map(id).collect::<Result<Vec<_>, Error>>()?;
    let first = captures.first().copied().flatten();
    if captures.iter().any(|capture| *capture != first) {
        let message = "the streams of a group of sends and receives are captured into one graph, or none of them is";
        return Err(Error::argument(message));
    }
    Ok(first)
}

fn checked(
    is_send: bool,
    buffer: DeviceAddress,
    count: u64,
    dtype: DataType,
    peer: u32,
    nranks: u32,
) -> Result<P2pMessage, Error> {
    let size = dtype.size_bytes() as u64;
    let bytes = count.checked_mul(size).filter(|bytes| bytes.checked_add(buffer).is_some());
    let bytes = bytes.ok_or_else(|| Error::argument("the buffer would be larger than memory"))?;
    if bytes > 0 && (buffer == 0 || !buffer.is_multiple_of(size)) {
        return Err(Error::argument(format!("the buffer at {buffer:#x} is no place for {dtype}")));
    }
    if peer >= nranks {
        return Err(Error::argument(P2pError::NoPeer { peer, nranks }.to_string()));
    }
    Ok(P2pMessage { is_send, peer, buffer, bytes, dtype })
}

/// Defines `send` and `recv`.
macro_rules! p2p {
    ($($(#[$meta:meta])* $name:ident => $is_send:expr;)+) => {
        impl CudaCommunicator {
            $(
                $(#[$meta])*
                ///
                /// # Safety
                /// The buffer must be of the communicator's context, or of memory that it reaches, `count` elements long, and stay so
                /// until the operation has ended. Nobody else may use it meanwhile, but others may send from it. The stream must be of that
                /// context, and live until then.
                ///
                /// # Errors
                /// [`Error::InvalidArgument`], and nothing is enqueued; outside of a group also those of
                /// [`Group::end`](crate::Group::end). Failures of the operation itself: [`CudaCommunicator::async_error`].
                pub unsafe fn $name(
                    &self,
                    buffer: DeviceAddress,
                    count: u64,
                    dtype: DataType,
                    peer: u32,
                    stream: CudaStream,
                ) -> Result<(), Error> {
                    let p2p = self.p2p();
                    let message = checked($is_send, buffer, count, dtype, peer, p2p.nranks())?;
                    let (surfacing, stream) = (Arc::clone(self.surfacing()), RawStream::from_ptr(stream));
                    let collected = Collected { p2p, surfacing, message, stream };
                    crate::group::collect_p2p(collected).unwrap_or_else(|alone| launch_together(vec![alone]))
                }
            )+
        }
    };
}

p2p! {
    /// Sends `count` elements to rank `peer`, which receives as many of the same type; its receives from this rank match
    /// this rank's sends to it by their order. Inside a group the message goes with the group; to oneself only there.
    /// Short messages are on their way when the receiver has not called yet; long ones wait for it.
    send => true;
    /// Receives `count` elements from rank `peer`: see [`CudaCommunicator::send`].
    recv => false;
}
