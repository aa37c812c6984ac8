//! Device-initiated communicators: GPUs that reach each other (NVLink, P2P), and their collectives
//! as kernels.
//!
//! A collective is a kernel in the caller's stream, which meets those of the other ranks in symmetric buffers of GPU memory. A large one is left
//! to the service's copy engines (`large.rs`). Both go in one order, under one lock, and sends and receives (`p2p.rs`) in another. A communicator
//! leaves when all its kernels have ended: the service may free what they use.

mod large;
mod launcher;
mod member;
mod one_sided;
mod order;
mod p2p;
mod prepared;
mod rate_limit;
mod recent;
mod regions;
mod staging;
mod symmetric_buffer;

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use mccs_cuda::{Capture, Context, DeviceAddress, RawStream, WordOperation};
use mccs_ipc::device_initiated::{DeviceInitiatedShare, Execution, LONG_BYTES, PublishedStrategy, Signal};
use mccs_ipc::large::LargeLayout;
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::strides::Strides;
use mccs_ipc::types::{CollectiveKind, Handle};
use mccs_kernels::cuda::{
    Algorithm, CollectiveCall, DeviceInitiatedStrategy, DirectArgs, Launch, Stamp, SymmetricBufferLayout,
};

use self::large::{Combine, LargeOrder};
use self::launcher::{GRAPHS, Launcher};
pub(super) use self::member::Member;
use self::one_sided::OneSided;
pub(super) use self::one_sided::Put;
pub use self::one_sided::SignalWait;
use self::order::LaunchOrder;
pub(super) use self::p2p::P2p;
use self::prepared::{Prepared, Way};
use self::rate_limit::RateLimit;
use self::recent::Recent;
pub(crate) use self::regions::GpuRegions;
pub use self::regions::REGISTERED_MAX;
use super::alone::run_alone;
use super::call::{Call, checked};
use super::{CudaStream, GpuMemory, cuda_error};
use crate::client::{locked, unexpected};
use crate::{Client, Error, PortChannels};

/// Programs ask for errors in loops; each look for freed memory calls the driver, which other threads' launches wait for.
const LOOK_FOR_FREED_EVERY: Duration = Duration::from_millis(1);
/// How long a call that the operator holds back, or a wait for this rank's kernels, sleeps between looks.
const LOOK_AGAIN_AFTER: Duration = Duration::from_micros(20);
/// Kinds of calls whose kernels are kept: a step of training has some, over and over.
const PREPARED: usize = 8;

/// A rank whose collectives are kernels that meet those of the other ranks.
pub(super) struct DeviceInitiatedCommunicator {
    member: Arc<Member>,
    /// Layout of the service's copy engines for it.
    large: Option<LargeLayout>,
    execution: Execution,
    /// Whether kernels tell when they run.
    is_timed: bool,
    /// From when calls are timed.
    joined: Instant,
    order: Mutex<Order>,
    looks_for_freed: RateLimit,
    /// Behind the order, whose graphs are of the member's kernels.
    p2p: Arc<P2p>,
    one_sided: OneSided,
    /// Those that are opened.
    port_channels: Mutex<Option<PortChannels>>,
}

/// State that is changed in one order, under one lock.
struct Order {
    launches: LaunchOrder,
    launcher: Launcher,
    /// Kernels of the collectives that were called last, of so many kinds of calls.
    prepared: Recent<Way, Prepared>,
    /// Kernels launched, without those that went into graphs.
    launched: u64,
    strategy: KnownStrategy,
    large: LargeOrder,
    /// Next words of a call's stream: those that no other work lies between go to the driver in one call.
    words: Vec<WordOperation>,
}

impl Order {
    /// Number of the next collective outside of graphs: all ranks count alike, whether kernels or copy engines carry it out.
    fn next_number(&self) -> u64 {
        self.launched + self.large.enqueued + 1
    }
}

/// A strategy's choice for a collective.
struct Choice {
    /// Whether kernels carry it out where copy engines could.
    is_by_kernels: bool,
    /// The kernels' algorithm, and how many blocks.
    kernel: Option<(Algorithm, u32)>,
    /// Blocks of the kernels that combine what copy engines bring.
    combine_blocks: u32,
}

impl Choice {
    /// A strategy's choice for a collective, or for a batch of `times` collectives.
    fn of(strategy: &DeviceInitiatedStrategy, call: &CollectiveCall, payload_bytes: u64, times: u32) -> Self {
        Choice {
            is_by_kernels: strategy.choose(call.kind, payload_bytes).is_some(),
            kernel: match times {
                1 => strategy.kernel(call.kind, payload_bytes),
                _ => strategy.batch_kernel(call.kind, payload_bytes),
            },
            combine_blocks: strategy.combine_blocks,
        }
    }
}

/// Last reading of the control page.
struct KnownStrategy {
    /// Strategies that had been published.
    published: u64,
    /// Operations that run under it.
    operations: Range<u64>,
    strategy: DeviceInitiatedStrategy,
}

impl DeviceInitiatedCommunicator {
    /// Parts of a rank that has joined as `handle`; left if anything is missing.
    pub(super) fn join(
        client: &Client,
        handle: Handle,
        rank: u32,
        nranks: u32,
        context: Context,
        share: &DeviceInitiatedShare,
        fds: &[OwnedFd],
    ) -> Result<Self, Error> {
        let member = Member::new(client.clone(), handle, rank, nranks, context, share, fds);
        member.and_then(|member| Self::new(member, share)).inspect_err(|error| {
            let cuda_error = error.cuda_code();
            client.0.requests.send_and_forget(Request::AbortComm { comm: handle, cuda_error });
            client.0.requests.send_and_forget(Request::DestroyComm { comm: handle });
        })
    }

    fn new(member: Member, share: &DeviceInitiatedShare) -> Result<Self, Error> {
        let member = Arc::new(member);
        let awaited: Weak<Member> = Arc::downgrade(&member);
        member.client.0.watch.add(member.client.0.requests.socket(), awaited)?;
        let order = Order {
            launches: LaunchOrder::new(&member.context, Arc::clone(&member.graphs))?,
            launcher: member.launcher(GRAPHS, &Launch::<DirectArgs>::placeholder())?,
            prepared: Recent::new(PREPARED),
            launched: 0,
            strategy: KnownStrategy { published: 0, operations: 0..0, strategy: DeviceInitiatedStrategy::zeroed() },
            large: LargeOrder::new(&member, share)?,
            words: Vec::new(),
        };
        let p2p = Arc::new(P2p::new(Arc::clone(&member))?);
        let one_sided = OneSided::new(Arc::clone(&member));
        let &DeviceInitiatedShare { large, execution, is_timed, .. } = share;
        let (order, looks_for_freed) = (Mutex::new(order), RateLimit::new(LOOK_FOR_FREED_EVERY));
        let joined = Instant::now();
        let port_channels = Mutex::default();
        Ok(DeviceInitiatedCommunicator {
            member,
            large,
            execution,
            is_timed,
            joined,
            order,
            looks_for_freed,
            p2p,
            one_sided,
            port_channels,
        })
    }

    pub(super) fn rank(&self) -> u32 {
        self.member.rank
    }

    pub(super) fn nranks(&self) -> u32 {
        self.member.nranks
    }

    pub(super) fn p2p(&self) -> &Arc<P2p> {
        &self.p2p
    }

    pub(super) fn member(&self) -> &Arc<Member> {
        &self.member
    }

    /// The context that the communicator is of.
    pub(super) fn context(&self) -> &Context {
        &self.member.context
    }

    /// Whether ranks open what others name by the driver's handles.
    pub(super) fn opens_handles(&self) -> bool {
        self.member.shares_handles
    }

    /// See [`super::CudaCommunicator::put_signal`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn send(
        &self,
        to: u32,
        put: Option<Put>,
        signal: Signal,
        stream: RawStream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { self.one_sided.send(to, put, signal, stream) }.inspect_err(|error| self.member.end_if_lost(error))
    }

    /// See [`super::CudaCommunicator::wait_signals`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn wait_signals(&self, waits: &[SignalWait], stream: RawStream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { self.one_sided.wait(waits, stream) }.inspect_err(|error| self.member.end_if_lost(error))
    }

    /// See [`super::CudaCommunicator::port_channels_with`].
    pub(super) fn port_channels(&self, fifo_slots: u32) -> Result<PortChannels, Error> {
        let mut opened = locked(&self.port_channels);
        if let Some(channels) = &*opened {
            return Ok(channels.clone());
        }
        let (comm, gpu) = (Arc::clone(&self.member), Arc::clone(&self.member));
        Ok(opened.insert(PortChannels::open(&self.member.client, comm, Some(gpu), fifo_slots)?).clone())
    }

    /// Says what ranks of a part are called in the whole: for messages.
    pub(super) fn call_ranks(&self, names: Vec<u32>) {
        self.member.call_ranks(names);
    }

    /// Whether kernels leave stamps.
    pub(super) fn is_timed(&self) -> bool {
        self.is_timed
    }

    /// Collectives' kernels launched so far, without those that went into graphs.
    pub(super) fn kernels_launched(&self) -> u64 {
        locked(&self.order).launched
    }

    /// How the next collective would go, under the strategy of now: the kernels' algorithm for a payload, none where it goes by copy engines. Also
    /// the number of the kernel's stamp, if that is known: graphs that are replayed count too, on the GPU alone.
    pub(super) fn outlook(&self, kind: CollectiveKind, payload_bytes: u64) -> (Option<Algorithm>, Option<u64>) {
        let order = locked(&self.order);
        let stamp = (self.is_timed && !order.launches.has_captured()).then_some(order.launched + 1);
        let Some(chosen) = self.by_strategy_of_now(&order, |strategy| strategy.choose(kind, payload_bytes)) else {
            return (None, stamp);
        };
        let chosen = chosen.filter(|_| self.execution == Execution::Ranks);
        let algorithm = match (chosen, self.large) {
            (Some((algorithm, _)), _) => Some(algorithm),
            (None, Some(_)) => None,
            (None, None) => Some(Algorithm::SimpleTwoShot),
        };
        (algorithm, stamp)
    }

    /// Choice of the strategy of the next collective, which has not been announced: so what is read anew may change meanwhile, and is not
    /// kept.
    fn by_strategy_of_now<T>(&self, order: &Order, ask: impl FnOnce(&DeviceInitiatedStrategy) -> T) -> Option<T> {
        let (number, page, known) = (order.next_number(), &self.member.page, &order.strategy);
        if known.published == page.published() && known.operations.contains(&number) {
            return Some(ask(&known.strategy));
        }
        Some(ask(&strategy_of(&page.published_strategy(number)?)))
    }

    pub(super) fn client(&self) -> &Client {
        &self.member.client
    }

    /// Launches a collective.
    ///
    /// # Safety
    /// As for [`super::CudaCommunicator::all_reduce`].
    pub(super) unsafe fn collective(&self, call: &Call, stream: CudaStream) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe { self.enqueue(call, stream) }.inspect_err(|error| self.member.end_if_lost(error))
    }

    /// # Safety
    /// As for [`super::CudaCommunicator::all_reduce`].
    unsafe fn enqueue(&self, call: &Call, stream: CudaStream) -> Result<(), Error> {
        let checked = checked(call, self.member.rank, self.member.nranks)?;
        // SAFETY: the caller's contract is passed on.
        unsafe { self.enqueue_checked(call, &checked, None, RawStream::from_ptr(stream)) }
    }

    /// Launches a part of a larger collective, of several ranks, whose blocks lie apart, or a batch of such parts as one kernel: always by
    /// kernels, of at most so many blocks on all ranks. `call` has its addresses.
    ///
    /// # Safety
    /// As for [`super::CudaCommunicator::all_reduce`], of buffers whose blocks lie so far apart.
    pub(super) unsafe fn part(
        &self,
        call: &Call,
        checked: &CollectiveCall,
        strides: Strides,
        blocks_max: u32,
        stream: RawStream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe { self.enqueue_checked(call, checked, Some((strides, blocks_max)), stream) }
    }

    /// # Safety
    /// As for [`super::CudaCommunicator::all_reduce`].
    unsafe fn enqueue_checked(
        &self,
        call: &Call,
        checked: &CollectiveCall,
        part: Option<(Strides, u32)>,
        stream: RawStream,
    ) -> Result<(), Error> {
        let member = &*self.member;
        let mut order = locked(&self.order);
        if order.launches.has_left() {
            return Err(Error::argument("the communicator has been finalized"));
        }
        if call.is_empty() {
            return member.check_whole();
        }
        if member.nranks == 1 {
            member.check_whole()?;
            return self.run_alone(checked, call, stream);
        }
        let _entered = member.context.enter().map_err(cuda_error)?;
        let (strides, blocks_max) = part.unwrap_or((Strides::close(checked.count), u32::MAX));
        let count = checked.kind.payload_count(checked.count, member.nranks) * u64::from(strides.batch.times);
        let payload_bytes = count * checked.dtype.size_bytes() as u64;
        let ask =
            |strategy: &DeviceInitiatedStrategy| Choice::of(strategy, checked, payload_bytes, strides.batch.times);
        // SAFETY: the caller vouches for the stream.
        let (capture, choice) = unsafe {
            let is_captured = stream.is_capturing().map_err(cuda_error)?;
            let capture = if is_captured { stream.capture().map_err(cuda_error)? } else { None };
            (capture, self.begin(&mut order, stream, capture, ask)?)
        };
        let is_by_kernels = choice.is_by_kernels && self.execution == Execution::Ranks;
        // Commands cannot be part of a graph: there kernels carry everything out, on all ranks alike.
        if !is_by_kernels
            && capture.is_none()
            && part.is_none()
            && let Some(layout) = self.large_way(checked)
        {
            // SAFETY: the caller's contract is passed on.
            unsafe {
                let number = self.follow(&mut order, stream)?;
                let combine = Combine { layout, blocks: choice.combine_blocks.max(1) };
                self.enqueue_large(&mut order, combine, checked, call, stream, number)?;
                order.launches.comes_to(number);
                return order.launches.launched(stream);
            }
        }
        if self.execution == Execution::Service {
            return Err(Error::argument(format!("the service's engines have no way for {}", checked.kind)));
        }
        let no_way =
            || Error::argument(format!("the operator has no way for {} of {payload_bytes} bytes", checked.kind));
        let (algorithm, blocks) = choice.kernel.ok_or_else(no_way)?;
        let way = Way { call: *checked, strides, algorithm, blocks: blocks.min(blocks_max) };
        let stamp = if self.is_timed { Stamp::call(checked.kind, payload_bytes) } else { 0 };
        let place = order
            .prepared
            .place(way, |way| Prepared::new(way, member, stamp).and_then(|made| made.ok_or_else(no_way)))?;
        member.need(order.prepared[place].part)?;
        // Graphs that are replayed count too, on the GPU alone: from then on numbers here are others than stamps have.
        if self.is_timed && payload_bytes >= LONG_BYTES && !order.launches.has_captured() {
            let now_ns = self.joined.elapsed().as_nanos() as u64;
            member.page.called(member.rank, order.launched + 1, now_ns);
        }
        // SAFETY: the caller's contract is passed on.
        unsafe { self.launch(&mut order, place, call, stream, capture) }
    }

    /// Choice of the strategy of the next collective, as soon as the operator lets it begin. One that comes to nothing afterwards leaves
    /// its number to the next. A stream that is captured comes behind the operations before.
    ///
    /// # Safety
    /// The stream must live.
    unsafe fn begin<T>(
        &self,
        order: &mut Order,
        stream: RawStream,
        capture: Option<Capture>,
        ask: impl FnOnce(&DeviceInitiatedStrategy) -> T,
    ) -> Result<T, Error> {
        let page = &self.member.page;
        let Some(capture) = capture else {
            let number = order.next_number();
            if !page.announce(self.member.rank, number) {
                self.wait_while_held()?;
            }
            return self.strategy(order, number).map(ask);
        };
        let Order { launches, launched, large, .. } = order;
        // SAFETY: the symmetric buffer is mapped as long as `self`; the rest is the caller's contract.
        unsafe {
            let wait_for_rest = |stream, words: &mut Vec<_>| self.wait_for_large(large, stream, words);
            launches.capture(stream, capture, self.counter(), *launched, wait_for_rest)?;
        }
        self.wait_while_held()?;
        // Nobody counts what graphs run: they get a strategy of their own, and have it stay while they live.
        Ok(ask(&strategy_of(&published_strategy(page.captured_strategy())?)))
    }

    /// Waits while the operator holds operations back, which is but a moment; fails if it is for good.
    fn wait_while_held(&self) -> Result<(), Error> {
        while self.member.page.is_held() {
            self.member.check_whole()?;
            self.member.client.0.requests.check_alive()?;
            std::thread::sleep(LOOK_AGAIN_AFTER);
        }
        Ok(())
    }

    /// Launches the kernel that is prepared at a place.
    ///
    /// # Safety
    /// As for [`super::CudaCommunicator::all_reduce`].
    unsafe fn launch(
        &self,
        order: &mut Order,
        place: usize,
        call: &Call,
        stream: RawStream,
        capture: Option<Capture>,
    ) -> Result<(), Error> {
        let member = &*self.member;
        let number = order.launched + 1;
        let sequence = u32::try_from(number)
            .map_err(|_| Error::argument("a communicator of GPUs does 2^32 operations: make another".to_owned()))?;
        // SAFETY: the caller vouches for stream and buffers; symmetric buffers and control page live as long as `self`, which is not dropped
        // before its kernels have ended.
        unsafe {
            let stream_number = match capture {
                Some(_) => None,
                None => {
                    let stream_number = self.follow(order, stream)?;
                    stream.words(&order.words).map_err(cuda_error)?;
                    order.launches.comes_to(stream_number);
                    Some(stream_number)
                }
            };
            if call.user_tag != 0 && capture.is_none() {
                member.page.tag(member.rank, number, call.user_tag);
            }
            let Order { launches, launcher, prepared, .. } = &mut *order;
            let Prepared { launch, function, .. } = &mut prepared[place];
            (launch.args.send, launch.args.recv) = (call.send, call.recv);
            // A constant is faster, and wrong in what is replayed.
            launch.args.sequence = if launches.has_captured() { 0 } else { sequence };
            // There is no way back to one stream.
            if launches.has_several_streams() {
                launch.release();
            }
            launcher.launch(stream, stream_number, *function, launch).map_err(cuda_error)?;
            if let Some(capture) = capture {
                return launches.captured(stream, capture);
            }
            order.launched = number;
            member.page.launch(member.rank, number);
            order.launches.launched(stream)
        }
    }

    /// Has a stream wait for the operations before, if they are on another one, once it does what `order.words` has then. Returns the
    /// stream's number.
    ///
    /// # Safety
    /// The stream must live.
    unsafe fn follow(&self, order: &mut Order, stream: RawStream) -> Result<u64, Error> {
        let Order { launches, launched, large, words, .. } = order;
        words.clear();
        // SAFETY: the symmetric buffer is mapped as long as `self`; the rest is the caller's contract.
        unsafe {
            let wait_for_rest = |stream, words: &mut Vec<_>| self.wait_for_large(large, stream, words);
            launches.follow(stream, self.counter(), *launched, words, wait_for_rest)
        }
    }

    /// The word in which this rank's kernels count.
    fn counter(&self) -> DeviceAddress {
        self.member.buffer() + SymmetricBufferLayout::COUNTER_OFFSET
    }

    /// Runs a collective of a single rank: its contribution becomes its result.
    fn run_alone(&self, checked: &CollectiveCall, call: &Call, stream: RawStream) -> Result<(), Error> {
        let _entered = self.member.context.enter().map_err(cuda_error)?;
        // SAFETY: the caller of the collective vouches for stream and buffers.
        unsafe { run_alone(&self.member.kernels, checked, call.send, call.recv, stream) }
    }

    /// The strategy for operation `number`, which may begin.
    fn strategy<'a>(&self, order: &'a mut Order, number: u64) -> Result<&'a DeviceInitiatedStrategy, Error> {
        let published = self.member.page.published();
        if order.strategy.published != published || !order.strategy.operations.contains(&number) {
            let in_force = published_strategy(self.member.page.published_strategy(number))?;
            let (operations, strategy) = (in_force.from..in_force.until, strategy_of(&in_force));
            order.strategy = KnownStrategy { published, operations, strategy };
        }
        Ok(&order.strategy.strategy)
    }

    /// See [`super::CudaCommunicator::async_error`]: kernels of a communicator that has failed end at once.
    pub(super) fn async_error(&self) -> Option<Error> {
        // Programs that free memory ask this all the time.
        if self.looks_for_freed.admits() {
            self.look_for_freed();
        }
        self.one_sided.let_go_again();
        self.member.failure()
    }

    /// See [`super::CudaCommunicator::gpu_memory`].
    pub(super) fn gpu_memory(&self) -> Result<GpuMemory, Error> {
        match self.member.client.0.requests.call(Request::CommMemory { comm: self.member.handle }, &[])? {
            (Response::CommMemory { own_bytes, shared_bytes }, _) => Ok(GpuMemory { own_bytes, shared_bytes }),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Whether this rank has graphs with the communicator's collectives.
    pub(super) fn has_graphs(&self) -> bool {
        self.member.page.has_graphs(self.member.rank)
    }

    /// See [`super::CudaCommunicator::abort`].
    pub(super) fn abort(&self) -> Result<(), Error> {
        let asked = self.member.end(None);
        // The service knows it no more once it has left: then there is nothing to end.
        if self.member.has_left() { Ok(()) } else { asked }
    }

    /// The service may free symmetric buffers once all ranks have left: so not before this one's kernels have ended.
    pub(super) fn leave(&self) -> Result<(), Error> {
        let mut order = locked(&self.order);
        if order.launches.leave() {
            return Ok(());
        }
        let member = &*self.member;
        self.one_sided.leave();
        let ended = self.p2p.leave();
        let rest = || self.has_finished_large(&order) && self.one_sided.have_ended();
        let graphs = || order.launches.have_graphs_ended();
        let ended = ended.and(member.wait_for_kernels(self.counter(), order.launched, &graphs, &rest));
        // Operations that may still run must not meet what comes to lie there next: nobody uses again what has failed.
        let ended = ended.inspect_err(|error| {
            let _ = member.end(error.cuda_code());
        });
        member.leave();
        member.client.0.has_left(member.handle);
        member.client.0.requests.call(Request::DestroyComm { comm: member.handle }, &[])?;
        self.end_large(&mut order);
        member.graphs.keep((Arc::clone(&self.member), order.launches.event(), self.p2p.event()));
        ended
    }
}

fn published_strategy(in_force: Option<PublishedStrategy>) -> Result<PublishedStrategy, Error> {
    in_force.ok_or_else(|| Error::ServiceGone("it published no strategy".into()))
}

fn strategy_of(in_force: &PublishedStrategy) -> DeviceInitiatedStrategy {
    bytemuck::pod_read_unaligned(&bytemuck::cast_slice(&in_force.words)[..size_of::<DeviceInitiatedStrategy>()])
}

impl Drop for DeviceInitiatedCommunicator {
    fn drop(&mut self) {
        let _ = self.leave();
    }
}
