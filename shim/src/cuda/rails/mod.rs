//! Communicators of GPUs of several hosts: GPUs combine, the service moves data between hosts
//! (rails).
//!
//! A rank has up to three kinds of parts beside the *whole* (`host_staged`), which carries out what these do not take:
//!
//! - its *team*: the ranks of its host, whose kernels reach each other;
//! - its *rails*: communicators of one rank of each host, in memory of the host, which move what teams have combined. Teams of different
//!   sizes have as many rails as the least common multiple of their sizes, and a rank acts for several.
//!
//! ```text
//! caller's stream:  team reduce-scatter -> slot | ready = n | .................... | done >= n | combine | team all-gather
//! service:                                      | an all-gather on the rails' slots, done = n |
//! ```
//!
//! Long calls of large teams are forked: each segment, from one move to the next, has a stream (`lanes.rs`).
//!
//! `mccs_rails` says which stages a collective has, and in which order a stream comes to them; `call.rs` enqueues them.
//! Kernels read and write short slices in the slots themselves. Long ones are in the slots' twins on the GPU (`twin.rs`), where NICs reach
//! them; otherwise copy engines bring them to the slots and back (`moving.rs`). All ranks decide alike which calls go by rails: by
//! collective, payload and layout, and a number that they have agreed on.
//!
//! Sends and receives inside a host are its team's (`p2p.rs`).
//!
//! Graphs replay rails by communicators and slots of their own, as the whole's (`host_staged/captured.rs`).
//!
//! Absent on purpose: sends and receives between hosts, and short calls, which the whole carries out.

mod call;
mod lanes;
mod moving;
mod p2p;
mod sizes;
mod twin;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use mccs_cuda::{Capture, Context, Event, Kernels, RawStream};
use mccs_ipc::layout::{Layout, Seat};
use mccs_ipc::protocol::{Request, Response, Role, TEAMS_MAX};
use mccs_ipc::types::UniqueId;
use mccs_rails::{Forks, Plan, Ring, SLOTS_BYTES, forked_blocks};

use self::call::{By, RailedCall};
use self::lanes::{Beside, Lanes};
pub(super) use self::p2p::{RailsP2p, RailsP2pPlan};
use self::twin::Twin;
use super::call::{Call, checked};
use super::cuda_error;
use super::device_initiated::DeviceInitiatedCommunicator;
use super::host_staged::HostStagedCommunicator;
use super::host_staged::captured::{Captures, Replayed};
use super::host_staged::ordered_stream::{Access, OrderedStream};
use super::resources::kernels;
use super::service_executed::{Identity, Joined};
use crate::client::{locked, unexpected};
use crate::log::{LogLevel, log};
use crate::{Client, Communicator, Error};

/// Slots of a rail are whole pages.
const SLOT_ALIGN: u64 = 4096;
/// How long a wait for this rank's operations sleeps between looks.
const LOOK_AGAIN_AFTER: Duration = Duration::from_micros(50);
/// Masks that tell the ids of rails and teams from those that callers have made, which are random; numbers tell them from each
/// other.
const RAIL_MASK: u8 = 0x5a;
const TEAM_MASKS: [u8; TEAMS_MAX as usize] = [0x3c, 0x69];

/// A rank's parts, and the payload from which collectives go by them.
pub(super) struct Rails {
    layout: Layout,
    /// Ring of hosts, if the operator wants them to pass on what they reduce.
    ring: Option<Ring>,
    seat: Seat,
    rank: u32,
    from_bytes: u64,
    team: Team,
    rails: Vec<Rail>,
    /// Whether any rank's rails have their data copied to memory of the host: calls are cut alike on all ranks.
    is_bounced: bool,
    /// Bytes of all slots of a rail; a call has as many of them as suit it.
    slots_bytes: u64,
    /// Which calls have several streams.
    forks: Forks,
    /// Most blocks of their teams' kernels.
    forked_blocks: u32,
    beside: Beside,
    kernels: Arc<Kernels>,
    context: Context,
    order: Mutex<Order>,
    /// Copies of each rail for graphs.
    captures: Vec<Captures>,
    /// None for a rank that is alone at its host.
    p2p: Option<Arc<RailsP2p>>,
}

/// The ranks of this host.
enum Team {
    /// There is no other.
    Alone,
    Several {
        first: Box<DeviceInitiatedCommunicator>,
        /// For segments behind moves of calls that are forked: its kernels run beside those of the first. None where no call is.
        beside: Option<Box<DeviceInitiatedCommunicator>>,
    },
}

/// A rail of this rank's.
struct Rail {
    /// Before what it names.
    comm: Arc<Communicator>,
    ordered: OrderedStream,
    twin: Twin,
}

/// Common parameters of joining a rank's parts.
struct Joining<'a> {
    client: &'a Client,
    /// The whole's.
    identity: &'a Identity,
    context: &'a Context,
    layout: &'a Layout,
    seat: Seat,
}

impl Joining<'_> {
    /// The ranks of this host, and the payload from which collectives of all hosts go by rails; none if any rank has none.
    fn agree_on_team(
        &self,
        from_bytes: u64,
        may_fork: bool,
        whole: &HostStagedCommunicator,
    ) -> Result<Option<(Team, u64)>, Error> {
        // Without an operator's wish there is no team to join; hosts whose operators wish for one are told.
        let wanted = (from_bytes != u64::MAX).then(|| Team::join(self, may_fork));
        let has_failed = matches!(wanted, Some(Err(_)));
        let own = if has_failed { u64::MAX } else { from_bytes };
        let from_bytes = whole.agree_on_max(own)?;
        Ok(match wanted {
            Some(Ok(team)) if from_bytes != u64::MAX => Some((team, from_bytes)),
            Some(Err(error)) => {
                tell_without(&error);
                None
            }
            _ => None,
        })
    }
}

/// State that is changed in one order, under one lock.
struct Order {
    /// Slices so far: the next one's slot goes on from there.
    slices: u64,
    /// The id of the caller's stream of the last call.
    last_stream: Option<u64>,
    /// Behind the last call.
    last_call: Event,
    left: bool,
}

fn tell_without(reason: &dyn std::fmt::Display) {
    log(LogLevel::Warning, || format!("GPUs of several hosts exchange by host memory alone: {reason}"));
}

/// Which calls of all ranks have several streams, and the most blocks of their teams' kernels.
fn agree_on_forks(
    forks: Forks,
    layout: &Layout,
    slots_bytes: u64,
    context: &Context,
    whole: &HostStagedCommunicator,
) -> Result<(Forks, u32), Error> {
    match forks {
        Forks::WhereItPays if Plan::may_fork(layout, slots_bytes) => {
            // The same on all ranks, by the smallest GPU.
            let most = u64::from(u32::MAX);
            let missing = whole.agree_on_max(most - u64::from(context.gpu().multiprocessors))?;
            Ok(match forked_blocks((most - missing.min(most)) as u32) {
                Some(blocks) => (Forks::WhereItPays, blocks),
                None => (Forks::Never, 0),
            })
        }
        Forks::WhereItPays => Ok((Forks::Never, 0)),
        other => Ok((other, 32)),
    }
}

impl Rails {
    /// Joins the parts of a whole that has been joined; none where ranks have none, which all learn alike.
    pub(super) fn join(
        client: &Client,
        joined: &Joined,
        context: &Context,
        whole: &HostStagedCommunicator,
    ) -> Result<Option<Self>, Error> {
        let &Joined { ref identity, ref hosts, rails_from: from_bytes, ref reduction_ring, forks, .. } = joined;
        let layout = match Layout::new(hosts) {
            Ok(layout) if layout.nranks() == identity.nranks => layout,
            Ok(_) => return Ok(None),
            Err(reason) => {
                if hosts.len() > 1 {
                    tell_without(&reason);
                }
                return Ok(None);
            }
        };
        let seat = layout.seat(identity.rank);
        let slots_bytes = SLOTS_BYTES / u64::from(layout.rails_each_max()) / SLOT_ALIGN * SLOT_ALIGN;
        let (forks, forked_blocks) = agree_on_forks(forks, &layout, slots_bytes, context, whole)?;
        let may_fork = forks != Forks::Never;
        let joining = Joining { client, identity, context, layout: &layout, seat };
        let Some((team, from_bytes)) = joining.agree_on_team(from_bytes, may_fork, whole)? else { return Ok(None) };
        let (kernels, whole_id) = (kernels(context)?, identity.id);
        let each = layout.rails_each(seat.host);
        let numbers = seat.local * each..(seat.local + 1) * each;
        let join = |number| Rail::join(&joining, number, slots_bytes);
        let rails = numbers.clone().map(join).collect::<Result<Vec<_>, _>>()?;
        let own = !rails.iter().all(|rail| rail.twin.is_direct());
        let is_bounced = whole.agree_on_max(u64::from(own))? != 0;
        let beside = Beside::new(context, may_fork)?;
        let replayed = |(number, rail): (u32, &Rail)| {
            let id = part_id(identity.id, RAIL_MASK, number);
            let identity = Identity { id, rank: seat.host, nranks: layout.hosts(), ..identity.clone() };
            let role = Role::GraphsOfRail { whole: whole_id, number };
            let (slots, kernels) = (slots_bytes, Some(Arc::clone(&kernels)));
            let replayed = Replayed { identity, role, slots, has_twins: true, kernels };
            Captures::new(client.clone(), context.clone(), rail.ordered.access.clone(), replayed)
        };
        let captures = numbers.zip(&rails).map(replayed).collect();
        let last_call = Event::new(context, false).map_err(cuda_error)?;
        let order = Mutex::new(Order { slices: 0, last_stream: None, last_call, left: false });
        let p2p = team.p2p(&layout, seat, whole, context)?;
        let (context, rank) = (context.clone(), identity.rank);
        Ok(Some(Rails {
            ring: Ring::new(reduction_ring, layout.hosts()),
            layout,
            seat,
            rank,
            from_bytes,
            team,
            rails,
            is_bounced,
            slots_bytes,
            forks,
            forked_blocks,
            beside,
            kernels,
            context,
            order,
            captures,
            p2p,
        }))
    }

    /// The payload in bytes from which collectives go by rails.
    pub(super) fn payload_min(&self) -> u64 {
        self.from_bytes
    }

    /// Means of sends and receives, if this rank has others at its host.
    pub(super) fn p2p(&self) -> Option<&Arc<RailsP2p>> {
        self.p2p.as_ref()
    }

    /// Whether NICs read and write memory of the GPU for all rails of this rank.
    pub(super) fn are_direct(&self) -> bool {
        self.rails.iter().all(|rail| rail.twin.is_direct())
    }

    /// Whether a collective goes by rails: the same on all ranks.
    pub(super) fn take(&self, call: &Call) -> bool {
        let payload = call.kind.payload_count(call.count, self.layout.nranks());
        let bytes = payload.saturating_mul(call.dtype.size_bytes() as u64);
        bytes >= self.from_bytes && Plan::takes(call.kind)
    }

    /// Enqueues a collective. A failure on its way goes to `give_up`: other ranks may wait for what this one has not enqueued.
    ///
    /// # Safety
    /// As for [`super::CudaCommunicator::all_reduce`].
    pub(super) unsafe fn collective(
        &self,
        call: &Call,
        stream: RawStream,
        give_up: impl FnOnce(&Error),
    ) -> Result<(), Error> {
        let whole = checked(call, self.rank, self.layout.nranks())?;
        let mut order = locked(&self.order);
        if order.left {
            return Err(Error::argument("the communicator has been finalized"));
        }
        let _entered = self.context.enter().map_err(cuda_error)?;
        // SAFETY: the stream is the caller's, and lives; buffers are the caller's contract.
        let enqueued = unsafe {
            let id = stream.id().map_err(cuda_error)?;
            if order.last_stream.is_some_and(|last| last != id) {
                stream.wait(&order.last_call).map_err(cuda_error)?;
            }
            let lanes = Lanes::of(stream, &self.beside);
            let enqueued = RailedCall::new(self, call, &whole, lanes, By::Calling).enqueue(&mut order.slices);
            order.last_stream = Some(id);
            // Behind what was enqueued in spite of an error, too.
            enqueued.and(order.last_call.record(stream).map_err(cuda_error))
        };
        enqueued.inspect_err(give_up)
    }

    /// Enqueues a collective on a stream that is captured.
    ///
    /// # Safety
    /// As for [`Rails::collective`]. The capture must go on.
    pub(super) unsafe fn capture(&self, call: &Call, stream: RawStream, capture: Capture) -> Result<(), Error> {
        let whole = checked(call, self.rank, self.layout.nranks())?;
        let order = locked(&self.order);
        if order.left {
            return Err(Error::argument("the communicator has been finalized"));
        }
        let _entered = self.context.enter().map_err(cuda_error)?;
        let mut rails = self.captures.iter().map(Captures::made).collect::<Result<Vec<_>, _>>()?;
        let mut slices = rails.first().map_or(0, |rail| rail.pieces);
        // SAFETY: the caller's contract is passed on. Memory of graphs is kept as long as they live.
        unsafe {
            rails.iter_mut().try_for_each(|rail| rail.begin(stream, capture))?;
            let (lanes, by) = (Lanes::captured(stream), By::Replaying(&rails));
            let enqueued = RailedCall::new(self, call, &whole, lanes, by).enqueue(&mut slices);
            // Behind what was enqueued in spite of an error, too.
            rails.iter_mut().fold(enqueued, |result, rail| {
                rail.pieces = slices;
                result.and(rail.end(stream, capture))
            })
        }
    }

    /// The error that ended a part, if one did.
    pub(super) fn async_error(&self) -> Option<Error> {
        let of_team = self.team.all().find_map(DeviceInitiatedCommunicator::async_error);
        let of_rail = |rail: &Rail| rail.comm.client().0.comm_failure(rail.comm.handle());
        let of_graphs = || self.captures.iter().find_map(Captures::failure);
        self.rails.iter().find_map(of_rail).or(of_team).or_else(of_graphs)
    }

    /// Ends the parts on all ranks, and streams go on: in this order, or others would take for a contribution what was never copied.
    pub(super) fn give_up(&self, error: &Error) {
        let release = || self.rails.iter().for_each(|rail| rail.ordered.release());
        for rail in &self.rails {
            let _ = rail.comm.abort_for(error.cuda_code(), release);
        }
        release();
        for team in self.team.all() {
            let _ = team.abort();
        }
    }

    /// See [`super::CudaCommunicator::abort`]. The service lets streams go on.
    pub(super) fn abort(&self) -> Result<(), Error> {
        self.captures.iter().for_each(Captures::abort);
        let rails = self.rails.iter().map(|rail| rail.comm.abort()).fold(Ok(()), Result::and);
        self.team.all().map(DeviceInitiatedCommunicator::abort).fold(rails, Result::and)
    }

    /// Leaves when this rank's operations have ended.
    pub(super) fn leave(&self) -> Result<(), Error> {
        let mut order = locked(&self.order);
        if std::mem::replace(&mut order.left, true) {
            return Ok(());
        }
        let ended = self.wait_for_calls(&order);
        let team = self.team.all().map(DeviceInitiatedCommunicator::leave).fold(Ok(()), Result::and);
        let graphs = self.captures.iter().map(Captures::leave).fold(Ok(()), Result::and);
        let rails = self.rails.iter().map(|rail| rail.comm.leave()).fold(Ok(()), Result::and);
        ended.and(team).and(graphs).and(rails)
    }

    fn wait_for_calls(&self, order: &Order) -> Result<(), Error> {
        if order.last_stream.is_none() {
            return Ok(());
        }
        while !order.last_call.has_happened().map_err(cuda_error)? {
            std::thread::sleep(LOOK_AGAIN_AFTER);
        }
        let _entered = self.context.enter().map_err(cuda_error)?;
        self.beside.wait()
    }
}

impl Drop for Rails {
    fn drop(&mut self) {
        let _ = self.leave();
    }
}

impl Team {
    /// The parts that sends and receives use; none for a rank that is alone at its host.
    fn p2p(
        &self,
        layout: &Layout,
        seat: Seat,
        whole: &HostStagedCommunicator,
        context: &Context,
    ) -> Result<Option<Arc<RailsP2p>>, Error> {
        let Team::Several { first, .. } = self else { return Ok(None) };
        let (team, others) = (Arc::clone(first.p2p()), Arc::clone(whole.p2p()));
        Ok(Some(Arc::new(RailsP2p::new(layout.clone(), seat, team, others, context.clone())?)))
    }

    fn join(joining: &Joining<'_>, may_fork: bool) -> Result<Self, Error> {
        let &Joining { client, identity, context, layout, seat } = joining;
        let (rank, nranks) = (seat.local, layout.team(seat.host));
        if nranks == 1 {
            return Ok(Team::Alone);
        }
        let join = |number: u32| {
            let &Identity { id, gpu, whole, .. } = identity;
            let id = part_id(id, TEAM_MASKS[number as usize], seat.host);
            let (gpu, root_address, role) = (Some(gpu), String::new(), Role::Team { whole, number });
            let options = identity.options.clone();
            let request = Request::InitRank { id, rank, nranks, gpu, root_address, role, options };
            match client.0.requests.call(request, &[])? {
                (Response::Comm { comm, device_initiated: Some(share), .. }, fds) => {
                    let made =
                        DeviceInitiatedCommunicator::join(client, comm, rank, nranks, context.clone(), &share, &fds)?;
                    made.call_ranks(layout.ranks_of_host(seat.host));
                    Ok(Box::new(made))
                }
                (other, _) => Err(unexpected(&other)),
            }
        };
        let first = join(0)?;
        let beside = may_fork.then(|| join(1)).transpose()?;
        Ok(Team::Several { first, beside })
    }

    /// Its communicators.
    fn all(&self) -> impl Iterator<Item = &DeviceInitiatedCommunicator> {
        let (first, beside) = match self {
            Team::Alone => (None, None),
            Team::Several { first, beside } => (Some(first), beside.as_ref()),
        };
        first.into_iter().chain(beside).map(|team| &**team)
    }
}

impl Rail {
    /// `number` is among all rails; slots have so many bytes together.
    fn join(joining: &Joining<'_>, number: u32, bytes: u64) -> Result<Self, Error> {
        let &Joining { client, identity, context, layout, seat } = joining;
        let (rank, nranks) = (seat.host, layout.hosts());
        let Identity { gpu, whole, ref root_address, ref options, .. } = *identity;
        let (id, role) = (part_id(identity.id, RAIL_MASK, number), Role::Rail { whole, number });
        let (gpu, root_address, options) = (Some(gpu), root_address.clone(), options.clone());
        let request = Request::InitRank { id, rank, nranks, gpu, root_address, role, options };
        match client.0.requests.call(request, &[])? {
            (Response::Comm { comm, device_initiated: None, access, .. }, _) => {
                // From here on it is left if anything fails.
                let comm = Arc::new(Communicator::new(client.clone(), comm, rank, nranks, None));
                client.0.begin_comm(comm.handle());
                let ordered = OrderedStream::overlapping(client, context, Access::new(context, access)?, bytes)?;
                let twin = Twin::new(&comm, context, number, &ordered, bytes)?;
                Ok(Rail { comm, ordered, twin })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }
}

/// The id of a rail of a whole, or of the team of a host: one service may have several, of GPUs that do not reach each other.
fn part_id(UniqueId(whole): UniqueId, mask: u8, number: u32) -> UniqueId {
    let mut id = whole.map(|byte| byte ^ mask);
    id.iter_mut().zip(number.to_le_bytes()).for_each(|(byte, part)| *byte ^= part);
    UniqueId(id)
}
