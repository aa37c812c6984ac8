//! Large GPU collectives by copy engines, the rank's part: a command to the service, and waits and
//! combining in the caller's stream. See [`mccs_ipc::large`].

use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use mccs_cuda::{Context, DeviceAddress, Event, Function, IpcHandle, RawStream, WordOperation, while_capturing};
use mccs_ipc::command::{Command, FLAG_COPIED, Opcode};
use mccs_ipc::device_initiated::{ControlPage, DeviceInitiatedShare, Execution};
use mccs_ipc::large::{
    CALLED_EVENTS, LargeLayout, LargeWord, OwnPart, RELEASED, RankEvents, Shards, SlotKind, called_event, has_large,
    own_part, stage,
};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::types::{DataType, Handle, RedOp};
use mccs_kernels::cuda::{CollectiveCall, LargeBuffers, Launch, ReduceArgs};

use super::launcher::Launcher;
use super::member::{Member, Opened};
use super::regions::Found;
use super::staging::Staging;
use super::{DeviceInitiatedCommunicator, LOOK_AGAIN_AFTER, Order};
use crate::Error;
use crate::client::{locked, unexpected};
use crate::cuda::call::Call;
use crate::cuda::cuda_error;

/// How long a call spins for the service's answer before it sleeps between looks.
const SPIN_FOR: Duration = Duration::from_micros(200);

/// How far a communicator is in large operations.
pub(super) struct LargeOrder {
    /// Operations enqueued.
    pub(super) enqueued: u64,
    /// Events by which streams tell and wait instead of words.
    events: Option<StreamEvents>,
    /// Stream of the service's that they are commands of; made with the first.
    stream: Option<Handle>,
    /// For what is sent, and what is received.
    staging: [Staging; 2],
    /// Slots on this rank's GPU, opened when a call first combines there: the communicator's own, and those that it shares.
    slots: [Option<Opened>; 2],
    /// For kernels that combine, where the rank's stream does.
    launcher: Option<Launcher>,
}

/// Combining kernels take turns by type of element: a step of training has two.
const COMBINE_GRAPHS: usize = 2;

/// Events of a rank. All but the last are the service's.
struct StreamEvents {
    called: Vec<Event>,
    done: Event,
    /// The rank's stream is past the last operation.
    past: Event,
}

impl LargeOrder {
    pub(super) fn new(member: &Member, share: &DeviceInitiatedShare) -> Result<Self, Error> {
        let events = share.events.first().map(|events| StreamEvents::open(&member.context, events)).transpose()?;
        // Made now: once kernels run, the driver may wait for them to make a graph.
        let combines = share.large.is_some() && share.execution == Execution::Ranks;
        let any = Launch::reduce(DataType::F32, RedOp::Sum, None, false, 1);
        let launcher = combines.then(|| member.launcher(COMBINE_GRAPHS, &any)).transpose()?;
        Ok(LargeOrder { enqueued: 0, events, stream: None, staging: Default::default(), slots: [None, None], launcher })
    }
}

impl StreamEvents {
    fn open(context: &Context, events: &RankEvents) -> Result<Self, Error> {
        let malformed = || Error::ServiceGone("it sent a communicator without whole handles of events".into());
        let open = |handle: &Vec<u8>| {
            let handle = IpcHandle(handle.as_slice().try_into().map_err(|_| malformed())?);
            Event::open(context, &handle).map_err(cuda_error)
        };
        let called = events.called.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        if called.len() != CALLED_EVENTS {
            return Err(malformed());
        }
        Ok(StreamEvents { called, done: open(&events.done)?, past: Event::new(context, false).map_err(cuda_error)? })
    }
}

/// The next step of a stream. Words that no other work lies between go to the driver in one call: each call costs the caller a
/// microsecond.
struct Work<'a> {
    stream: RawStream,
    number: u64,
    next: &'a mut Vec<WordOperation>,
    launcher: &'a mut Option<Launcher>,
}

impl Work<'_> {
    fn push(&mut self, operation: WordOperation) {
        self.next.push(operation);
    }

    /// The stream, behind all that was pushed.
    ///
    /// # Safety
    /// As [`RawStream::words`].
    unsafe fn stream(&mut self) -> Result<RawStream, Error> {
        // SAFETY: the caller's contract.
        unsafe { self.stream.words(self.next).map_err(cuda_error)? };
        self.next.clear();
        Ok(self.stream)
    }

    /// Launches a kernel that combines, behind all that was pushed.
    ///
    /// # Safety
    /// As [`Function::launch`], for the function and the argument.
    unsafe fn launch(&mut self, function: Function, launch: &Launch<ReduceArgs>) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe {
            let stream = self.stream()?;
            let launched = match self.launcher {
                Some(launcher) => launcher.launch(stream, Some(self.number), function, launch),
                None => function.launch(stream, launch.grid, launch.block, &launch.args),
            };
            launched.map_err(cuda_error)
        }
    }
}

/// A call, and where the service reaches its buffers: there, or in copies.
struct Reached<'a> {
    call: &'a Call,
    send: DeviceAddress,
    recv: DeviceAddress,
    send_bytes: u64,
    recv_bytes: u64,
}

impl Reached<'_> {
    fn is_copied(&self) -> bool {
        (self.send, self.recv) != (self.call.send, self.call.recv)
    }

    /// Copies what the call sends to where it is reached.
    ///
    /// # Safety
    /// As [`RawStream::copy`].
    unsafe fn copy_in(&self, stream: RawStream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { stream.copy(self.send, self.call.send, self.send_bytes as usize) }.map_err(cuda_error)
    }

    /// Copies what has come to where the call wants it.
    ///
    /// # Safety
    /// As [`RawStream::copy`].
    unsafe fn copy_out(&self, stream: RawStream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { stream.copy(self.call.recv, self.recv, self.recv_bytes as usize) }.map_err(cuda_error)
    }
}

/// How a rank combines what copy engines bring.
#[derive(Clone, Copy)]
pub(super) struct Combine {
    /// Layout of its slots.
    pub(super) layout: LargeLayout,
    /// Blocks of each kernel.
    pub(super) blocks: u32,
}

impl DeviceInitiatedCommunicator {
    /// How a call goes that is too large for the ranks alone; `None` where the service has no way for it.
    pub(super) fn large_way(&self, call: &CollectiveCall) -> Option<LargeLayout> {
        self.large.filter(|_| has_large(call.kind, call.op))
    }

    fn word(&self, rank: u32, word: LargeWord) -> DeviceAddress {
        self.member.on_page(ControlPage::large_offset(rank, word))
    }

    /// Has a stream wait for the large operations before: for an event, at once, or by `words`.
    ///
    /// # Safety
    /// The stream must live.
    pub(super) unsafe fn wait_for_large(
        &self,
        large: &LargeOrder,
        stream: RawStream,
        words: &mut Vec<WordOperation>,
    ) -> Result<(), Error> {
        let (number, word) = (large.enqueued, self.word(self.member.rank, LargeWord::Finished));
        match &large.events {
            _ if number == 0 => {}
            None => words.push(WordOperation::Wait(word, number)),
            // SAFETY: the event lives with the order; the rest is the caller's contract.
            Some(events) => unsafe { stream.wait(&events.past).map_err(cuda_error)? },
        }
        Ok(())
    }

    /// Whether this rank's large operations have ended.
    pub(super) fn has_finished_large(&self, order: &Order) -> bool {
        let (Member { page, rank, .. }, number) = (&*self.member, order.large.enqueued);
        let is_past = || match &order.large.events {
            // If all words were released, only the stream can tell.
            None => {
                page.has_come(*rank, LargeWord::Finished, number)
                    && page.large_word(*rank, LargeWord::Finished) != RELEASED
            }
            // A stream that has failed is past everything.
            Some(events) => events.past.has_happened().unwrap_or(true),
        };
        number == 0 || is_past()
    }

    /// Gives the service its stream back, and then the memory. Operations have ended.
    pub(super) fn end_large(&self, order: &mut Order) {
        let member = &*self.member;
        let requests = &member.client.0.requests;
        if let Some(stream) = order.large.stream.take() {
            requests.send_and_forget(Request::DestroyStream { stream });
        }
        locked(&member.client.0.gpu_regions).forget_of(member.handle, requests);
    }

    fn large_stream(&self, order: &mut Order) -> Result<Handle, Error> {
        if let Some(stream) = order.large.stream {
            return Ok(stream);
        }
        match self.member.client.0.requests.call(Request::CreateStream, &[])? {
            (Response::Stream { stream, .. }, _) => Ok(*order.large.stream.insert(stream)),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Enqueues a large operation into a stream with a number, behind what `order.words` has it wait for. Its context must be current.
    ///
    /// # Safety
    /// As for [`super::super::CudaCommunicator::all_reduce`].
    pub(super) unsafe fn enqueue_large(
        &self,
        order: &mut Order,
        combine: Combine,
        checked: &CollectiveCall,
        call: &Call,
        stream: RawStream,
        number_of_stream: u64,
    ) -> Result<(), Error> {
        let member = &*self.member;
        member.client.0.requests.check_alive()?;
        let (kind, rank, root) = (checked.kind, member.rank, checked.root);
        let size = checked.dtype.size_bytes() as u64;
        let send_bytes = kind.send_count(checked.count, member.nranks, rank, root).unwrap_or(0) * size;
        let recv_bytes = kind.recv_count(checked.count, member.nranks, rank, root).unwrap_or(0) * size;
        let [for_send, for_recv] = &mut order.large.staging;
        // Another thread may be capturing, which must not be disturbed.
        let reached = while_capturing(|| -> Result<_, Error> {
            let send = self.reach(for_send, call.send, send_bytes)?;
            Ok((send, self.reach(for_recv, call.recv, recv_bytes)?))
        });
        let ((at_send, send), (at_recv, recv)) = reached.map_err(cuda_error).flatten()?;
        let reached = Reached { call, send: at_send, recv: at_recv, send_bytes, recv_bytes };
        // Before the service is told: a call that fails here has told it of nothing.
        let slots = self.slots(order, combine.layout, checked)?;
        let number = order.large.enqueued + 1;
        let command = Command {
            opcode: Opcode::Collective as u32,
            flags: if reached.is_copied() { FLAG_COPIED } else { 0 },
            comm: member.handle,
            stream: self.large_stream(order)?,
            ticket: number,
            kind: kind as u32,
            dtype: checked.dtype as u32,
            redop: checked.op as u32,
            root,
            count: checked.count,
            send: send.buffer,
            recv: recv.buffer,
            user_tag: call.user_tag,
            ..Command::zeroed()
        };
        // SAFETY: the caller's contract is passed on.
        let enqueued = unsafe {
            if order.large.events.is_some() {
                self.enqueue_by_events(order, &command, &reached, stream)
            } else {
                member.client.0.submit_on_gpus(&command)?;
                order.large.enqueued = number;
                let Order { words: next, large: LargeOrder { launcher, .. }, .. } = order;
                let work = Work { stream, number: number_of_stream, next, launcher };
                let enqueued = self.enqueue_by_words(combine, slots, checked, &reached, number, work);
                // The service was told of what this rank's stream never comes to.
                enqueued.inspect_err(|error| member.give_up(error))
            }
        };
        // Now that the GPU has its work.
        self.look_for_freed();
        enqueued
    }

    /// Slots of the others' parts, if this rank's stream combines them; opened with the first call that does.
    fn slots(&self, order: &mut Order, layout: LargeLayout, call: &CollectiveCall) -> Result<DeviceAddress, Error> {
        if self.execution != Execution::Ranks || !call.kind.reduces() {
            return Ok(0);
        }
        let shards = Shards::new(layout, call.kind, call.nranks, call.count * call.dtype.size_bytes() as u64);
        let opened = match shards.slots() {
            SlotKind::Own => &mut order.large.slots[0],
            SlotKind::Shared => &mut order.large.slots[1],
        };
        if opened.is_none() {
            *opened = Some(self.member.open_slots(shards.slots())?);
        }
        opened.as_ref().map(Opened::address).ok_or_else(|| Error::ServiceGone("it sent no slots".into()))
    }

    /// Place by which the service reaches a buffer: there, if it can, or in a copy; and its name there. The context must be current, and
    /// nothing that the driver is called for be captured.
    fn reach(
        &self,
        staging: &mut Staging,
        address: DeviceAddress,
        bytes: u64,
    ) -> Result<(DeviceAddress, Found), Error> {
        if bytes == 0 {
            return Ok((address, Found::NONE));
        }
        let member = &*self.member;
        let place = |address| locked(&member.client.0.gpu_regions).place(member, address, bytes);
        match place(address) {
            Ok(buffer) => Ok((address, buffer)),
            Err(gone @ Error::ServiceGone(_)) => Err(gone),
            Err(_) => {
                let copy = staging.room(&member.context, bytes)?;
                Ok((copy, place(copy)?))
            }
        }
    }

    /// Gives back memory of the caller's that was freed, unless a call is about to do so.
    pub(super) fn look_for_freed(&self) {
        if let Ok(mut regions) = self.member.client.0.gpu_regions.try_lock() {
            regions.look(&self.member);
        }
    }

    /// Enqueues an operation between words. The service was told of it.
    ///
    /// # Safety
    /// As for [`super::super::CudaCommunicator::all_reduce`].
    unsafe fn enqueue_by_words(
        &self,
        combine: Combine,
        slots: DeviceAddress,
        checked: &CollectiveCall,
        reached: &Reached<'_>,
        number: u64,
        mut work: Work<'_>,
    ) -> Result<(), Error> {
        let member = &*self.member;
        let rank = member.rank;
        let buffers = LargeBuffers { send: reached.send, recv: reached.recv, slots };
        // SAFETY: words are on the registered page, which lives as long as `self`; the rest is the caller's contract.
        unsafe {
            if reached.send != reached.call.send {
                reached.copy_in(work.stream()?)?;
            }
            work.push(WordOperation::Write(self.word(rank, LargeWord::Ready), number));
            match self.execution {
                Execution::Ranks => self.keep(combine, checked, buffers, number, &mut work)?,
                Execution::Service => work.push(WordOperation::Wait(self.word(rank, LargeWord::Kept), number)),
            }
            for peer in 0..member.nranks {
                work.push(WordOperation::Wait(self.word(peer, LargeWord::Arrived), number));
            }
            if reached.recv != reached.call.recv {
                reached.copy_out(work.stream()?)?;
            }
            work.push(WordOperation::Write(self.word(rank, LargeWord::Finished), number));
            work.stream().map(drop)
        }
    }

    /// Enqueues an operation between events, the service's command first. Waits on the processor until the service has promised it.
    ///
    /// # Safety
    /// As for [`super::super::CudaCommunicator::all_reduce`].
    unsafe fn enqueue_by_events(
        &self,
        order: &mut Order,
        command: &Command,
        reached: &Reached<'_>,
        stream: RawStream,
    ) -> Result<(), Error> {
        let (member, number) = (&*self.member, command.ticket);
        let Some(events) = &order.large.events else { return Ok(()) };
        // Its event is free when the service has seen it.
        self.wait_for_word(LargeWord::Ready, number.saturating_sub(CALLED_EVENTS as u64))?;
        // SAFETY: events live with the order, which outlives its operations; the rest is the caller's contract.
        unsafe {
            stream.words(&order.words).map_err(cuda_error)?;
            if reached.send != reached.call.send {
                reached.copy_in(stream)?;
            }
            events.called[called_event(number)].record(stream).map_err(cuda_error)?;
            member.client.0.submit_on_gpus(command)?;
            order.large.enqueued = number;
            let promised = self.wait_for_word(LargeWord::Promised, number);
            let enqueued = promised.and_then(|()| {
                stream.wait(&events.done).map_err(cuda_error)?;
                if reached.recv != reached.call.recv {
                    reached.copy_out(stream)?;
                }
                events.past.record(stream).map_err(cuda_error)
            });
            enqueued.inspect_err(|error| member.give_up(error))
        }
    }

    /// Waits on the processor until the service has told of an operation.
    fn wait_for_word(&self, word: LargeWord, number: u64) -> Result<(), Error> {
        let since = Instant::now();
        while !self.member.page.has_come(self.member.rank, word, number) {
            self.member.check_whole()?;
            self.member.client.0.requests.check_alive()?;
            if since.elapsed() < SPIN_FOR {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(LOOK_AGAIN_AFTER);
            }
        }
        // Words of a communicator that has failed let everybody through.
        self.member.check_whole()
    }

    /// The part that stays with the rank: its own part is moved; or its shard combined, piece by piece as words tell that the others'
    /// parts are there.
    ///
    /// # Safety
    /// As for [`super::super::CudaCommunicator::all_reduce`].
    unsafe fn keep(
        &self,
        combine: Combine,
        checked: &CollectiveCall,
        buffers: LargeBuffers,
        number: u64,
        work: &mut Work<'_>,
    ) -> Result<(), Error> {
        let &CollectiveCall { kind, dtype, op, count, root, rank, nranks, .. } = checked;
        let size = dtype.size_bytes() as u64;
        if let Some(OwnPart { send_offset, recv_offset, count }) = own_part(kind, rank, root, count) {
            let (from, to) = (buffers.send + send_offset * size, buffers.recv + recv_offset * size);
            if from == to {
                return Ok(());
            }
            // SAFETY: the caller vouches for stream and buffers.
            return unsafe { work.stream()?.copy(to, from, (count * size) as usize) }.map_err(cuda_error);
        }
        if !kind.reduces() {
            return Ok(());
        }
        let shards = Shards::new(combine.layout, kind, nranks, count * size);
        for piece in 0..shards.pieces() {
            let mut launch = Launch::combine(dtype, op, &shards, rank, piece, &buffers);
            launch.grid = combine.blocks;
            launch.args.done_word = self.word(rank, LargeWord::Reduced);
            launch.args.done_value = stage(number, piece);
            let function = self.member.function(launch.function)?;
            for peer in shards.awaited(rank) {
                work.push(WordOperation::Wait(self.word(peer, LargeWord::Pushed), stage(number, piece)));
            }
            // SAFETY: the caller vouches for stream and buffers; symmetric buffer and control page live as long as `self`.
            unsafe { work.launch(function, &launch)? };
        }
        Ok(())
    }
}
