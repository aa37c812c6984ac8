//! Sends and receives of GPUs of several hosts: by the team's kernel within a host, by the service
//! between hosts.
//!
//! A pair of ranks always goes one way, so that its messages keep their order. A group with both is carried out at once: the kernel
//! has a stream beside the caller's.
//!
//! ```text
//! caller's stream:  forked | what the service moves .. | joined
//! beside it:        forked | the team's kernel ....... | joined
//! ```

use std::sync::{Arc, Mutex};

use mccs_cuda::{Context, Event, OwnedStream, RawStream};
use mccs_ipc::layout::{Layout, Seat};
use mccs_kernels::cuda::{P2pLaunch, P2pMessage};

use crate::Error;
use crate::client::locked;
use crate::cuda::cuda_error;
use crate::cuda::device_initiated::P2p;
use crate::cuda::host_staged::HostStagedP2p;

/// Means of sends and receives of a rank with a team: kept by the communicator, and by groups to their end.
pub(crate) struct RailsP2p {
    layout: Layout,
    seat: Seat,
    team: Arc<P2p>,
    others: Arc<HostStagedP2p>,
    context: Context,
    beside: Mutex<Beside>,
}

/// Stream of a team's kernel that is not alone in its group.
struct Beside {
    stream: OwnedStream,
    /// The same in graphs: a stream stays in its capture until that ends.
    captured: OwnedStream,
    forked: Event,
    joined: Event,
}

/// A group, checked as a whole.
pub(crate) struct RailsP2pPlan {
    team: Option<TeamPart>,
    others: Vec<P2pMessage>,
}

/// Part of a group that stays within the host.
struct TeamPart {
    /// With the numbers that ranks have in the team.
    messages: Vec<P2pMessage>,
    launch: P2pLaunch,
}

impl RailsP2p {
    pub(super) fn new(
        layout: Layout,
        seat: Seat,
        team: Arc<P2p>,
        others: Arc<HostStagedP2p>,
        context: Context,
    ) -> Result<Self, Error> {
        let make = || {
            let (stream, captured) = (OwnedStream::new(&context)?, OwnedStream::new(&context)?);
            let (forked, joined) = (Event::new(&context, false)?, Event::new(&context, false)?);
            Ok(Beside { stream, captured, forked, joined })
        };
        let beside = Mutex::new(make().map_err(cuda_error)?);
        Ok(RailsP2p { layout, seat, team, others, context, beside })
    }

    pub(crate) fn nranks(&self) -> u32 {
        self.layout.nranks()
    }

    /// Checks a group as a whole.
    pub(crate) fn plan(&self, list: &[P2pMessage], streams: &[RawStream]) -> Result<RailsP2pPlan, Error> {
        let (mut team, mut others) = (Vec::new(), Vec::new());
        for message in list {
            let peer = self.layout.seat(message.peer);
            match peer.host == self.seat.host {
                true => team.push(P2pMessage { peer: peer.local, ..*message }),
                false => others.push(*message),
            }
        }
        if !others.is_empty() {
            self.others.plan(&others, streams)?;
        }
        let launch = if team.is_empty() { None } else { Some(self.team.plan(&team, streams)?) };
        Ok(RailsP2pPlan { team: launch.map(|launch| TeamPart { messages: team, launch }), others })
    }

    /// Enqueues a group that has been planned. Its streams and buffers are as the callers of
    /// [`CudaCommunicator::send`](crate::cuda::CudaCommunicator::send) have promised.
    pub(crate) fn launch(&self, plan: RailsP2pPlan, streams: &[RawStream]) -> Result<(), Error> {
        match plan.team {
            None => self.others.launch(&plan.others, streams),
            Some(part) if plan.others.is_empty() => self.team.launch(&part.messages, part.launch, streams),
            Some(part) => self.launch_both(part, &plan.others, streams),
        }
    }

    fn launch_both(&self, part: TeamPart, others: &[P2pMessage], streams: &[RawStream]) -> Result<(), Error> {
        let Some(&main) = streams.first() else { return Ok(()) };
        let Beside { stream, captured, forked, joined } = &*locked(&self.beside);
        let _entered = self.context.enter().map_err(cuda_error)?;
        // SAFETY: callers vouch for their streams; what is here lives as long as the communicator.
        unsafe {
            let is_captured = main.is_capturing().map_err(cuda_error)?;
            let beside = if is_captured { captured.raw() } else { stream.raw() };
            for stream in streams {
                forked.record(*stream).and_then(|()| beside.wait(forked)).map_err(cuda_error)?;
            }
            let launched = self.team.launch(&part.messages, part.launch, &[beside]);
            // Forked work joins in spite of an error, too: a capture cannot end before.
            let launched = launched.and_then(|()| self.others.launch(others, streams));
            joined.record(beside).map_err(cuda_error)?;
            streams.iter().try_for_each(|stream| stream.wait(joined)).map_err(cuda_error)?;
            launched
        }
    }
}
