//! Communicators of GPUs that reach each other, and their collectives.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytemuck::Zeroable;
use mccs_cuda::{Context, DeviceAddress, Event, HostRegistration, ImportedMemory, IpcHandle, OwnedStream, RawStream};
use mccs_ipc::direct::{DIRECT_RANKS_MAX, DirectPage, DirectShare, DirectTerms};
use mccs_ipc::large::LargeLayout;
use mccs_ipc::protocol::Request;
use mccs_ipc::types::{CollectiveKind, DataType, Handle, RedOp};
use mccs_kernels::cuda::{Algorithm, AreaLayout, DirectCall, DirectStrategy, Launch};

use super::large::LargeOrder;
use super::points::{Points, PointsOrder};
use super::resources::{Kernels, import};
use super::{CudaStream, cuda_error};
use crate::client::locked;
use crate::{Client, Error, ReduceOperator};

/// Blocks of what is longer than the strategy's table, where it does not go by copy engines.
const LONGEST_BLOCKS: u32 = 64;
/// How long a call that the operator holds back sleeps before it looks again.
const HELD_BACK_FOR: Duration = Duration::from_micros(20);

/// A rank whose collectives are kernels that meet those of the other ranks.
pub(super) struct DirectCommunicator {
    pub(super) client: Client,
    pub(super) handle: Handle,
    pub(super) rank: u32,
    pub(super) nranks: u32,
    pub(super) context: Context,
    pub(super) kernels: Arc<Kernels>,
    layout: AreaLayout,
    /// Where the service has copy engines for it.
    pub(super) large: Option<LargeLayout>,
    /// First bytes of the ranks' areas, as this context sees them.
    pub(super) areas: [DeviceAddress; DIRECT_RANKS_MAX as usize],
    _imports: Vec<Arc<ImportedMemory>>,
    /// Before the page, whose memory it names.
    pub(super) registration: Arc<HostRegistration>,
    pub(super) page: Arc<DirectPage>,
    order: Mutex<Order>,
    points: Arc<Points>,
}

/// What is done in one order, under one lock.
pub(super) struct Order {
    /// Operations launched, without those that went into graphs.
    launched: u64,
    /// The stream of the last one. Another stream waits for it: kernels of a communicator use the same areas.
    last_stream: Option<RawStream>,
    /// Whether operations went into graphs: then nobody but the GPU knows how many have run.
    has_captured: bool,
    /// Recorded behind every launch from then on.
    last_launch: Event,
    is_recorded: bool,
    /// The strategy in force, as it was when so many had been published.
    strategy: (u64, DirectStrategy),
    left: bool,
    pub(super) large: LargeOrder,
}

/// A collective, before it is checked.
pub(super) struct Call {
    pub(super) kind: CollectiveKind,
    pub(super) send: DeviceAddress,
    pub(super) recv: DeviceAddress,
    pub(super) count: u64,
    pub(super) dtype: DataType,
    pub(super) op: ReduceOperator,
    pub(super) root: u32,
}

/// Checks a call's arguments.
pub(super) fn checked(call: &Call, rank: u32, nranks: u32) -> Result<DirectCall, Error> {
    let Call { kind, send, recv, count, dtype, op, root } = *call;
    if root >= nranks {
        return Err(Error::argument(format!("rank {root} of a communicator of {nranks}")));
    }
    let size = dtype.size_bytes() as u64;
    let bytes = |what: &str, count: Option<u64>, address: DeviceAddress| {
        let bytes =
            count.and_then(|count| count.checked_mul(size)).filter(|bytes| bytes.checked_add(address).is_some());
        let bytes = bytes.ok_or_else(|| Error::argument(format!("the {what} buffer would be larger than memory")))?;
        if bytes > 0 && (address == 0 || !address.is_multiple_of(size)) {
            return Err(Error::argument(format!("the {what} buffer at {address:#x} is no place for {dtype}")));
        }
        Ok(bytes)
    };
    let send_bytes = bytes("send", kind.send_count(count, nranks, rank, root), send)?;
    let recv_bytes = bytes("receive", kind.recv_count(count, nranks, rank, root), recv)?;
    if !kind.accepts_buffers(rank, root, (send, send_bytes), (recv, recv_bytes)) {
        return Err(Error::argument(format!("{kind}: send and receive buffers overlap, and not as in-place calls do")));
    }
    let (op, scalar_bits, is_scalar_address) = match op {
        _ if !kind.reduces() => (RedOp::Sum, 0, false),
        ReduceOperator::PreMulSumAt(address) if address == 0 || !address.is_multiple_of(size) => {
            return Err(Error::argument(format!("the factor at {address:#x} is no place for {dtype}")));
        }
        ReduceOperator::PreMulSumAt(address) => (RedOp::PreMulSum, address, true),
        op => op.to_wire(dtype).map(|(op, bits)| (op, bits, false))?,
    };
    Ok(DirectCall { kind, dtype, op, count, root, scalar_bits, is_scalar_address, rank, nranks })
}

impl DirectCommunicator {
    pub(super) fn new(
        client: Client,
        handle: Handle,
        (rank, nranks): (u32, u32),
        context: Context,
        share: &DirectShare,
        fds: &[OwnedFd],
    ) -> Result<Self, Error> {
        let malformed = |what: &str| Error::ServiceGone(format!("it sent a communicator without {what}"));
        if share.areas.len() != nranks as usize || nranks > DIRECT_RANKS_MAX {
            return Err(malformed("all areas"));
        }
        let layout: AreaLayout = bytemuck::cast(share.layout);
        if !layout.is_valid() || layout.nranks != nranks.max(2) {
            return Err(malformed("a layout of its areas"));
        }
        let page = fds.first().ok_or_else(|| malformed("its page"))?;
        let page = DirectPage::map(page.as_fd()).map_err(|error| Error::System(error.to_string()))?;
        // SAFETY: the page is mapped longer than it is registered: fields are dropped in order.
        let registration = unsafe {
            HostRegistration::register(&context, page.as_ptr(), mccs_ipc::direct::DIRECT_PAGE_BYTES as usize)
        };
        let (registration, page) = (Arc::new(registration.map_err(cuda_error)?), Arc::new(page));
        let (mut areas, mut imports) = ([0; DIRECT_RANKS_MAX as usize], Vec::new());
        for (address, area) in areas.iter_mut().zip(&share.areas) {
            let bytes = area.ipc_handle.as_slice().try_into().map_err(|_| malformed("whole handles"))?;
            let imported = import(&context, IpcHandle(bytes))?;
            *address = imported.address();
            imports.push(imported);
        }
        let kernels = Kernels::of(&context)?;
        let order = Order {
            launched: 0,
            last_stream: None,
            has_captured: false,
            last_launch: Event::new(&context, false).map_err(cuda_error)?,
            is_recorded: false,
            strategy: (0, DirectStrategy::zeroed()),
            left: false,
            large: LargeOrder::default(),
        };
        let _imports = imports;
        let points = Arc::new(Points {
            client: client.clone(),
            handle,
            rank,
            nranks,
            context: context.clone(),
            kernels: Arc::clone(&kernels),
            layout,
            areas,
            _imports: _imports.clone(),
            registration: Arc::clone(&registration),
            page: Arc::clone(&page),
            order: Mutex::new(PointsOrder::new(&context)?),
            is_told: AtomicBool::new(false),
        });
        Ok(DirectCommunicator {
            client,
            handle,
            rank,
            nranks,
            context,
            kernels,
            layout,
            large: share.large,
            areas,
            _imports,
            registration,
            page,
            order: Mutex::new(order),
            points,
        })
    }

    /// This rank.
    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub(super) fn nranks(&self) -> u32 {
        self.nranks
    }

    pub(super) fn points(&self) -> &Arc<Points> {
        &self.points
    }

    /// The session it belongs to.
    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Launches a collective.
    ///
    /// # Safety
    /// As for [`super::CudaCommunicator::all_reduce`].
    pub(super) unsafe fn collective(&self, call: &Call, stream: CudaStream) -> Result<(), Error> {
        let checked = checked(call, self.rank, self.nranks)?;
        let stream = RawStream::from_ptr(stream);
        let mut order = locked(&self.order);
        let number = order.launched + 1;
        while self.page.limit() < number {
            self.check_whole()?;
            self.client.0.requests.check_alive()?;
            std::thread::sleep(HELD_BACK_FOR);
        }
        if self.nranks == 1 {
            return self.run_alone(&checked, call, stream);
        }
        let strategy = self.strategy(&mut order, number)?;
        let payload_bytes = checked.kind.payload_count(checked.count, self.nranks) * checked.dtype.size_bytes() as u64;
        let launch = strategy.choose(checked.kind, payload_bytes);
        let _entered = self.context.enter().map_err(cuda_error)?;
        // SAFETY: the caller vouches for the stream.
        let is_captured = unsafe { stream.is_capturing().map_err(cuda_error)? };
        // Commands cannot be part of a graph: there everything goes the direct way, on all ranks alike.
        if launch.is_none()
            && !is_captured
            && let Some(layout) = self.large_way(&checked)
        {
            // SAFETY: the caller's contract is passed on.
            unsafe {
                self.follow(&order, stream)?;
                self.enqueue_large(&mut order, layout, &checked, call, stream)?;
            }
            order.last_stream = Some(stream);
            return Ok(());
        }
        let launch = launch.or_else(|| self.large.map(|_| (Algorithm::BulkTwoShot, LONGEST_BLOCKS)));
        // What does not fit the areas goes in chunks that do; all ranks come to the same.
        let launch = launch.and_then(|(chosen, blocks)| {
            let ways = [chosen, Algorithm::BulkTwoShot, Algorithm::BulkOneShot];
            ways.into_iter().find_map(|algorithm| Launch::direct(&checked, &self.layout, algorithm, blocks))
        });
        let mut launch = launch.ok_or_else(|| {
            Error::argument(format!("the operator has no way for {} of {payload_bytes} bytes", checked.kind))
        })?;
        (launch.args.send, launch.args.recv) = (call.send, call.recv);
        launch.args.areas = self.areas;
        launch.args.abort_word = self.registration.address() + DirectPage::ABORT_OFFSET;
        // A constant is faster, and wrong in what is replayed.
        launch.args.sequence = u32::try_from(number)
            .map_err(|_| Error::argument("a communicator of GPUs does 2^32 operations: make another".to_owned()))?;
        let function = self.kernels.function(launch.function)?;
        // SAFETY: the caller vouches for stream and buffers; areas and page live as long as `self`, which is not dropped
        // before its kernels have ended.
        unsafe {
            order.has_captured |= is_captured;
            if order.has_captured {
                launch.args.sequence = 0;
            }
            if !is_captured {
                self.follow(&order, stream)?;
            }
            function.launch(stream, launch.grid, launch.block, &launch.args).map_err(cuda_error)?;
            if is_captured {
                return Ok(());
            }
            order.launched = number;
            order.last_stream = Some(stream);
            self.page.launch(self.rank, number);
            if order.has_captured {
                order.last_launch.record(stream).map_err(cuda_error)?;
                order.is_recorded = true;
            }
        }
        Ok(())
    }

    /// Has a stream wait for the operations before, if they are on another one.
    ///
    /// # Safety
    /// The stream must live.
    unsafe fn follow(&self, order: &Order, stream: RawStream) -> Result<(), Error> {
        if order.last_stream.is_none_or(|last| last == stream) {
            return Ok(());
        }
        // SAFETY: the area is mapped, and the event lives, as long as `self`; the rest is the caller's contract.
        unsafe {
            let waits = if order.is_recorded {
                stream.wait(&order.last_launch)
            } else {
                stream.wait_word(self.counter(), AreaLayout::word_of(order.launched))
            };
            waits.map_err(cuda_error)?;
            self.wait_for_large(order, stream)
        }
    }

    /// The word in which this rank's kernels count.
    fn counter(&self) -> DeviceAddress {
        self.areas[self.rank as usize] + AreaLayout::COUNTER_OFFSET
    }

    /// What a collective is to a single rank: its contribution becomes its result.
    fn run_alone(&self, checked: &DirectCall, call: &Call, stream: RawStream) -> Result<(), Error> {
        const BLOCKS: u32 = 64;
        let bytes = checked.count * checked.dtype.size_bytes() as u64;
        if bytes == 0 || checked.kind == CollectiveKind::Barrier {
            return Ok(());
        }
        let _entered = self.context.enter().map_err(cuda_error)?;
        // SAFETY: the caller of the collective vouches for stream and buffers.
        unsafe {
            if checked.op == RedOp::PreMulSum {
                let mut launch = Launch::reduce(checked.dtype, checked.op, None, true, BLOCKS);
                let args = &mut launch.args;
                (args.sources[0], args.destinations[0], args.scalars[0]) = (call.send, call.recv, checked.scalar_bits);
                (args.source_count, args.destination_count, args.pieces) = (1, 1, 1);
                (args.bytes, args.piece_bytes) = (bytes, bytes.next_multiple_of(16));
                if checked.is_scalar_address {
                    launch.scaled_from(checked.scalar_bits);
                }
                let function = self.kernels.function(launch.function)?;
                function.launch(stream, launch.grid, launch.block, &launch.args).map_err(cuda_error)
            } else if call.send == call.recv {
                Ok(())
            } else {
                stream.copy(call.recv, call.send, bytes as usize).map_err(cuda_error)
            }
        }
    }

    /// The strategy for operation `number`.
    fn strategy(&self, order: &mut Order, number: u64) -> Result<DirectStrategy, Error> {
        let epochs = self.page.epochs();
        if order.strategy.0 == epochs {
            return Ok(order.strategy.1);
        }
        let terms = self.page.terms(number);
        let DirectTerms { words, from, .. } =
            terms.ok_or_else(|| Error::ServiceGone("it published no strategy".into()))?;
        let bytes = &bytemuck::cast_slice(&words)[..size_of::<DirectStrategy>()];
        let strategy = bytemuck::pod_read_unaligned(bytes);
        // Until its number comes, the next strategy is looked for at every call.
        let is_last = self.page.terms(u64::MAX).is_some_and(|last| last.from == from);
        order.strategy = (if is_last { epochs } else { 0 }, strategy);
        Ok(strategy)
    }

    /// Fails if the communicator has.
    fn check_whole(&self) -> Result<(), Error> {
        if !self.page.is_aborted() {
            return Ok(());
        }
        Err(self.async_error().unwrap_or_else(|| {
            let class = mccs_ipc::types::ErrorClass::Remote;
            Error::Failed { class, message: "the communicator was aborted".into() }
        }))
    }

    /// The error that ended the communicator, if one did: on any rank. To be asked for after a stream was synchronized:
    /// kernels of a communicator that has failed end at once, whatever is in their buffers.
    pub(super) fn async_error(&self) -> Option<Error> {
        let failure = self.points.contradiction().or_else(|| self.client.0.comm_failure(self.handle));
        failure.or_else(|| self.client.0.requests.check_alive().err())
    }

    /// Ends the communicator on all ranks: operations outstanding end without a result.
    ///
    /// # Errors
    /// [`Error::ServiceGone`].
    pub(super) fn abort(&self) -> Result<(), Error> {
        self.page.abort();
        self.client.0.requests.call(Request::AbortComm { comm: self.handle }, &[]).map(drop)
    }

    /// The service may free areas once all ranks have left: so not before this one's kernels have ended.
    pub(super) fn leave(&self) -> Result<(), Error> {
        let mut order = locked(&self.order);
        if std::mem::replace(&mut order.left, true) {
            return Ok(());
        }
        let (groups, has_captured) = self.points.leave();
        let ended = self.wait_for_kernels(self.points.counter(), groups, has_captured, &|| true);
        let large = || self.has_finished_large(&order);
        let ended = ended.and(self.wait_for_kernels(self.counter(), order.launched, order.has_captured, &large));
        self.client.0.requests.call(Request::DestroyComm { comm: self.handle }, &[])?;
        self.end_large(&mut order);
        ended
    }

    /// Waits for kernels that count in a word, and for what else there is.
    fn wait_for_kernels(
        &self,
        counter: DeviceAddress,
        launched: u64,
        has_captured: bool,
        has_rest_ended: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        if launched == 0 && !has_captured {
            return Ok(());
        }
        let stream = OwnedStream::new(&self.context).map_err(cuda_error)?;
        let has_ended = || {
            // SAFETY: the area is mapped in this context as long as `self` lives.
            let word = unsafe { stream.read_word(counter) }.map_err(cuda_error)?;
            Ok::<_, Error>(AreaLayout::ended(word) >= launched && has_rest_ended())
        };
        while !self.page.is_aborted() && !has_ended()? {
            if self.client.0.requests.check_alive().is_err() {
                // Nobody else would stop what waits for a rank that has gone.
                self.page.abort();
                self.page.release_all();
            }
            std::thread::sleep(HELD_BACK_FOR);
        }
        // Kernels that were stopped do not count, and those in graphs only by number.
        let is_known = !has_captured && !self.page.is_aborted();
        if is_known { Ok(()) } else { self.context.synchronize().map_err(cuda_error) }
    }
}

impl Drop for DirectCommunicator {
    fn drop(&mut self) {
        let _ = self.leave();
    }
}
