//! Sends and receives of GPUs that reach each other: those of a group in one kernel a communicator.
//!
//! They are in no order with the communicator's collectives but that of streams. Groups run one after the other, in the
//! order of the calls that end them, whatever their streams. Deliberately absent: numbers that ranks would have to agree
//! on; messages of a direction are matched by their order, which GPUs count (`kernels/cuda/include/p2p.cuh`).

use std::sync::{Arc, Mutex};

use mccs_cuda::{DeviceAddress, Event, RawStream};
use mccs_ipc::device_initiated::{ControlPage, P2pLaunched, SymmetricBufferPart};
use mccs_kernels::cuda::{MESSAGES_MAX, P2pLaunch, P2pMessage, SymmetricBufferLayout};

use super::launcher::{GRAPHS, Launcher};
use super::member::Member;
use super::order::LaunchOrder;
use crate::Error;
use crate::client::locked;
use crate::cuda::cuda_error;
use crate::cuda::p2p::capture_of;

/// Ll' flags have 32 bits.
const MESSAGES_OF_A_PAIR_MAX: u64 = u32::MAX as u64 - MESSAGES_MAX as u64;

/// Parts of a communicator's sends and receives: kept by the communicator, and by groups to their end.
pub(crate) struct P2p {
    /// Before the member, whose kernels its graphs are of.
    order: Mutex<Order>,
    member: Arc<Member>,
}

/// State that is changed in one order, under one lock: as for collectives, but apart from them.
struct Order {
    launches: LaunchOrder,
    launcher: Launcher,
    /// Without what went into graphs.
    launched: P2pLaunched,
    /// To order streams of one group.
    joint: Event,
}

impl P2p {
    pub(super) fn new(member: Arc<Member>) -> Result<Self, Error> {
        let launches = LaunchOrder::new(&member.context, Arc::clone(&member.graphs))?;
        let joint = Event::new(&member.context, false).map_err(cuda_error)?;
        let launcher = member.launcher(GRAPHS, &P2pLaunch::placeholder())?;
        let order = Order { launches, launcher, launched: P2pLaunched::default(), joint };
        Ok(P2p { member, order: Mutex::new(order) })
    }

    pub(crate) fn nranks(&self) -> u32 {
        self.member.nranks
    }

    /// The word in which this rank's kernels count groups.
    fn counter(&self) -> DeviceAddress {
        self.member.buffer() + SymmetricBufferLayout::P2P_COUNTER_OFFSET
    }

    /// Event that graphs refer to, and must not outlive.
    pub(super) fn event(&self) -> Arc<Event> {
        locked(&self.order).launches.event()
    }

    /// Waits for what was launched. Nothing is from here on.
    pub(super) fn leave(&self) -> Result<(), Error> {
        let mut order = locked(&self.order);
        order.launches.leave();
        let graphs = || order.launches.have_graphs_ended();
        self.member.wait_for_kernels(self.counter(), order.launched.groups, &graphs, &|| true)
    }

    /// Checks a group as a whole.
    pub(crate) fn plan(&self, list: &[P2pMessage], streams: &[RawStream]) -> Result<P2pLaunch, Error> {
        let order = locked(&self.order);
        if order.launches.has_left() {
            return Err(Error::argument(
                "a communicator was destroyed inside a group that uses it; the group is dropped",
            ));
        }
        let counts = order.launched.sent.iter().chain(&order.launched.received);
        if counts.max().is_some_and(|most| *most >= MESSAGES_OF_A_PAIR_MAX) {
            return Err(Error::argument("two ranks of a communicator of GPUs exchange 2^32 messages: make another"));
        }
        drop(order);
        let member = &self.member;
        member.check_whole()?;
        if streams.len() > 1 {
            let _entered = member.context.enter().map_err(cuda_error)?;
            // One that is not captured would become so by waiting for one that is.
            capture_of(streams)?;
        }
        P2pLaunch::new(list, &member.layout, member.rank, member.nranks)
            .map_err(|error| Error::argument(error.to_string()))
    }

    /// Launches a group. Its streams and buffers are as the callers of
    /// [`CudaCommunicator::send`](crate::cuda::CudaCommunicator::send) have promised.
    pub(crate) fn launch(&self, list: &[P2pMessage], launch: P2pLaunch, streams: &[RawStream]) -> Result<(), Error> {
        self.enqueue(list, launch, streams).inspect_err(|error| self.member.end_if_lost(error))
    }

    fn enqueue(&self, list: &[P2pMessage], mut launch: P2pLaunch, streams: &[RawStream]) -> Result<(), Error> {
        let Some((&main, others)) = streams.split_first() else { return Ok(()) };
        let member = &*self.member;
        member.need(SymmetricBufferPart::P2p)?;
        let head = launch.head_mut();
        head.symmetric = member.buffers;
        head.abort_word = member.on_page(ControlPage::ABORT_OFFSET);
        head.fault = member.on_page(ControlPage::fault_offset(member.rank));
        let mut order = locked(&self.order);
        let order = &mut *order;
        let _entered = member.context.enter().map_err(cuda_error)?;
        // SAFETY: callers vouch for streams and buffers; symmetric buffers and control page live as long as the communicator, which does not go
        // before its kernels have ended.
        unsafe {
            let is_captured = main.is_capturing().map_err(cuda_error)?;
            let capture = if is_captured { main.capture().map_err(cuda_error)? } else { None };
            for other in others {
                order.joint.record(*other).and_then(|()| main.wait(&order.joint)).map_err(cuda_error)?;
            }
            let (counter, launched) = (self.counter(), order.launched.groups);
            let number = match capture {
                Some(capture) => {
                    order.launches.capture(main, capture, counter, launched, |_, _| Ok(()))?;
                    None
                }
                None => {
                    let mut words = Vec::new();
                    let number = order.launches.follow(main, counter, launched, &mut words, |_, _| Ok(()))?;
                    main.words(&words).map_err(cuda_error)?;
                    order.launches.comes_to(number);
                    Some(number)
                }
            };
            match &launch {
                P2pLaunch::Few(few) => order.launcher.launch(main, number, member.function(few.function)?, few),
                P2pLaunch::Many(many) => {
                    member.function(many.function)?.launch(main, many.grid, many.block, &many.args)
                }
            }
            .map_err(cuda_error)?;
            if let Some(capture) = capture {
                order.launches.captured(main, capture)?;
            } else {
                self.count(&mut order.launched, list);
                order.launches.launched(main)?;
            }
            if !others.is_empty() {
                order.joint.record(main).map_err(cuda_error)?;
                others.iter().try_for_each(|other| other.wait(&order.joint)).map_err(cuda_error)?;
            }
        }
        Ok(())
    }

    /// Tells the control page of a group.
    fn count(&self, launched: &mut P2pLaunched, list: &[P2pMessage]) {
        launched.groups += 1;
        for message in list.iter().filter(|message| message.peer != self.member.rank) {
            let counts = if message.is_send { &mut launched.sent } else { &mut launched.received };
            counts[message.peer as usize] += 1;
        }
        self.member.page.launch_p2p(self.member.rank, launched);
    }
}
