//! Set-up thread of GPU communicators: driver calls that may take milliseconds. None of them waits
//! for what streams wait for: everybody's set-up does, and the watch on what does not come.

mod buffers;
mod error;
mod ll128_pairs;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use mccs_cuda::{Context, DriverError, OwnedStream};
use mccs_ipc::device_initiated::{
    CommPart, ControlPage, DeviceInitiatedShare, Execution, SymmetricBufferName, SymmetricBufferPart,
};
use mccs_ipc::large::{LargeLayout, SlotKind};
use mccs_ipc::types::Handle;
use mccs_kernels::cuda::{MESSAGES_MAX, SymmetricBufferCounts, SymmetricBufferLayout};
use mccs_runtime::{Share, TurnReceiver, TurnSender, turn_channel};
use mccs_telemetry::recorder::Recorder;
use mccs_tenants::session::Opens;
use mccs_tenants::{Charge, Resource};

pub(crate) use self::buffers::BuffersInUse;
use self::buffers::{Held, Kit, Memory};
use self::error::PrepareError;
use self::ll128_pairs::Ll128Pairs;
use crate::cuda::copy_engine::hw_queue_admission::Holder;
use crate::cuda::copy_engine::{CopyEngines, Flight, copy_submit};
use crate::cuda::gpu_health::GpuHealth;
use crate::cuda::group::{Counted, DeviceInitiatedGroup, Ended, NUMBERS_MAX, OpenMemory, OpenPart, OpenedPart};
use crate::cuda::memory::deferred_free::DeferredFrees;
use crate::cuda::memory::imports::{ImportError, Imports};
use crate::cuda::memory::resource_pool::{ResourcePool, Shape};
use crate::cuda::memory::slots::{NoSlots, SlotPool, SlotUser};
use crate::cuda::memory::symmetric_buffer::RankBuffer;
use crate::cuda::memory::twin::TwinWork;
use crate::cuda::strategy::{Abilities, Strategies};
use crate::cuda::timing::trace::{self, TracedGpus};
use crate::cuda::{CudaOptions, Gpus, NoCuda};
use crate::{DeviceEvent, DeviceEvents, Prepared, Shared};
use mccs_model::GpuStrategy;

/// Heads of ranks' symmetric buffers, by rank, for other processes.
#[derive(Default)]
struct NamedBuffers {
    buffers: Vec<SymmetricBufferName>,
    fds: Vec<OwnedFd>,
}

/// To the thread.
pub(crate) enum Order {
    /// Make what the ranks of a communicator share. Answered by [`DeviceEvent::Prepared`].
    Prepare { gpus: Vec<usize>, charges: Vec<Arc<Charge>>, opens: Opens, meets_on_host: bool, key: Handle },
    /// Read what symmetric buffers have counted.
    /// Then calls what is to be called, if anything.
    Read { buffers: BuffersInUse, ended: Arc<Ended>, then: Option<Box<dyn FnOnce() + Send>> },
    /// Open what an operation uses, and hand it out.
    Import(Flight),
    /// Open a rank's memory on a communicator's GPUs, and answer.
    OpenMemory { gpus: Box<[usize]>, memory: OpenMemory },
    /// Make memory of a communicator that a rank uses first, unless it is there, and tell the rank how to open it.
    Open { buffers: BuffersInUse, part: OpenPart },
    /// Make memory that NICs reach, and answer.
    MakeTwin(TwinWork),
}

/// To the thread, which ends when nobody has this any more.
pub(crate) type Orders = TurnSender<Order>;

/// Asks drivers which GPUs store whole lines to which: not, where they do not say.
fn ll128_pairs(gpus: &Gpus) -> Ll128Pairs {
    Ll128Pairs::new(gpus.gpus.len(), |from, to| {
        let (from, to) = (&gpus.gpus[from].0, &gpus.gpus[to].0);
        from.stores_ll128_to(to).unwrap_or_else(|error| {
            let (from, to) = (from.id, to.id);
            tracing::warn!(%error, %from, %to, "what the links between these GPUs do is not known: no lines");
            false
        })
    })
}

/// The thread's state.
pub(crate) struct Setup {
    gpus: Arc<Gpus>,
    /// A GPU's, for what is read there.
    streams: Vec<OwnedStream>,
    /// To hand to symmetric buffers.
    own: Weak<Orders>,
    orders: TurnReceiver<Order>,
    frees: DeferredFrees,
    device_events: Arc<DeviceEvents>,
    gpu_health: Arc<GpuHealth>,
    options: CudaOptions,
    ll128_pairs: Ll128Pairs,
    /// Threads that issue copies, by GPU.
    issuers: Vec<TurnSender<copy_submit::Order>>,
    imports: Imports,
    spares: Arc<ResourcePool<Kit>>,
    slots: SlotPool,
    traced: TracedGpus,
    recorder: Recorder,
}

impl Setup {
    /// Starts the thread. It ends when nobody can give it orders any more: with the device and the last symmetric buffers.
    pub(crate) fn start(
        gpus: Arc<Gpus>,
        options: CudaOptions,
        device_events: Arc<DeviceEvents>,
        gpu_health: Arc<GpuHealth>,
        frees: DeferredFrees,
        recorder: Recorder,
    ) -> Result<Arc<Orders>, NoCuda> {
        let (sender, orders) = turn_channel();
        let sender = Arc::new(sender);
        let own = Arc::downgrade(&sender);
        let streams = gpus.gpus.iter().map(|(_, context)| OwnedStream::new(context)).collect::<Result<_, _>>()?;
        let issuers = (0..gpus.gpus.len())
            .map(|gpu| copy_submit::start(gpu, &gpus, &gpu_health, options.is_timed))
            .collect::<Result<_, _>>()?;
        let (imports, spares) = (Imports::new(frees.clone()), ResourcePool::new(frees.clone()));
        let slots = SlotPool::new(frees.clone());
        let traced = TracedGpus::default();
        let ll128_pairs = ll128_pairs(&gpus);
        let setup = Setup {
            gpus,
            streams,
            own,
            orders,
            frees,
            device_events,
            gpu_health,
            options,
            ll128_pairs,
            issuers,
            imports,
            spares,
            slots,
            traced,
            recorder,
        };
        std::thread::Builder::new().name("mccs-cuda-setup".into()).spawn(move || setup.run())?;
        Ok(sender)
    }

    fn run(mut self) {
        loop {
            let read_after = (!self.traced.is_empty()).then_some(trace::READ_EVERY);
            match self.orders.recv(read_after) {
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) if !self.recorder.is_on() => self.traced.end(),
                Err(RecvTimeoutError::Timeout) => {
                    for (buffers, ended) in self.traced.comms() {
                        // The watch asks as well, and tells what is wrong.
                        let _ = self.read(&buffers, &ended);
                    }
                }
                Ok(Order::Read { buffers, ended, then }) => {
                    let read = self.read(&buffers, &ended);
                    let gpus = buffers.memory.shape.gpus.iter().copied();
                    read.as_ref().err().into_iter().for_each(|error| self.find_lost(error, gpus.clone()));
                    ended.tell(read.map_err(|error| error.to_string()));
                    then.into_iter().for_each(|then| then());
                }
                Ok(Order::Import(flight)) => {
                    let engines = Arc::clone(&flight.engines);
                    let wanted = flight.slots.filter(|kind| engines.slots(*kind).is_none());
                    let slots = wanted.map_or(Ok(()), |kind| self.make_slots(engines.buffers(), kind));
                    if let Err(ImportError::Driver(error)) = flight.import(slots, &self.gpus, &mut self.imports) {
                        self.find_lost(&error, engines.gpus().iter().copied());
                    }
                }
                Ok(Order::Open { buffers, part }) => self.open(&buffers, part),
                Ok(Order::OpenMemory { gpus, memory: OpenMemory { region, reply } }) => {
                    let opened = gpus.iter().try_for_each(|gpu| self.imports.open(&self.gpus, *gpu, &region));
                    if let Err(ImportError::Driver(error)) = &opened {
                        self.find_lost(error, gpus.iter().copied());
                    }
                    reply(opened.map_err(|error| error.refusal()));
                }
                Ok(Order::MakeTwin(work)) => {
                    let failed = work.run(&self.gpus);
                    failed.into_iter().for_each(|(gpu, error)| self.find_lost(&error, std::iter::once(gpu)));
                }
                Ok(Order::Prepare { gpus, charges, opens, meets_on_host, key }) => {
                    let prepared = self.prepare(&gpus, meets_on_host, charges, opens);
                    let error = prepared.as_ref().err().and_then(PrepareError::driver);
                    error.into_iter().for_each(|error| self.find_lost(error, gpus.iter().copied()));
                    let prepared = prepared.map(Box::new).map_err(|error| error.refusal());
                    self.device_events.tell(DeviceEvent::Prepared { key, prepared });
                }
            }
        }
    }

    /// Makes slots of a communicator, unless they are there.
    fn make_slots(&mut self, buffers: &BuffersInUse, kind: SlotKind) -> Result<(), NoSlots> {
        let memory = &buffers.memory;
        let (Some(layout), Some(tenant)) = (memory.large, &memory.tenant()) else { return Ok(()) };
        if memory.slots(kind).get().is_some() {
            return Ok(());
        }
        let (gpus, by_descriptors) = (&memory.shape.gpus[..], memory.shape.by_descriptors);
        let made = self.slots.take(kind, &SlotUser { tenant, gpus, by_descriptors, layout }, &self.gpus, &self.streams);
        if let Err(NoSlots::Driver { error, .. }) = &made {
            self.find_lost(error, gpus.iter().copied());
        }
        // Nobody else makes any.
        let _ = memory.slots(kind).set(made?);
        Ok(())
    }

    /// Makes a part of a communicator that a rank uses first, and answers; or ends the communicator, which can not go on alike on all ranks.
    fn open(&mut self, buffers: &BuffersInUse, part: OpenPart) {
        let OpenPart { comm, rank, part, reply } = part;
        let opened = match part {
            CommPart::SymmetricBuffer(part) => self.open_buffers(&buffers.memory, part),
            CommPart::Slots(kind) => self.open_slots(buffers, rank, kind),
        };
        let error = opened.as_ref().err().and_then(PrepareError::driver);
        error.into_iter().for_each(|error| self.find_lost(error, buffers.memory.shape.gpus.iter().copied()));
        let opened = opened.map_err(|error| error.refusal());
        if let Err(refusal) = &opened {
            self.device_events.tell(DeviceEvent::CommFailed { comm, message: refusal.message.clone() });
        }
        reply(opened);
    }

    /// Makes a part of all symmetric buffers, unless it is there, and names it.
    fn open_buffers(&self, memory: &Memory, part: SymmetricBufferPart) -> Result<OpenedPart, PrepareError> {
        if memory.shape.on_host {
            return Err(PrepareError::ShortAlone);
        }
        let mut held = memory.held();
        let Held { buffers, charges } = &mut *held;
        if buffers.iter().any(|(_, buffer)| !buffer.has(part)) {
            let (range, tenant) = (memory.layout.part(part), charges.first().map(|charge| Arc::clone(charge.tenant())));
            let bytes = (range.end - range.start) * buffers.len() as u64;
            let charge = tenant.map(|tenant| tenant.charge(Resource::GpuMemoryBytes, bytes)).transpose()?;
            charges.extend(charge.map(Arc::new));
        }
        let contexts = self.contexts(&memory.shape.gpus);
        let mut opened = OpenedPart { handles: Vec::new(), fds: Vec::new() };
        for (rank, (gpu, buffer)) in buffers.iter_mut().enumerate() {
            let made = if buffer.has(part) { Ok(()) } else { buffer.make(part, &contexts, &self.streams[*gpu]) };
            let named = made.and_then(|()| buffer.name(part));
            let failed = |error| PrepareError::Driver { rank, gpu: self.gpus.gpus[*gpu].0.id.to_string(), error };
            let (handle, fd) = named.map_err(failed)?;
            opened.handles.push(handle);
            opened.fds.push(fd);
        }
        memory
            .buffer_bytes
            .store(buffers.iter().map(|(_, buffer)| buffer.held_bytes()).max().unwrap_or(0), Ordering::Relaxed);
        Ok(opened)
    }

    /// Makes slots of copy engines, unless they are there, and names a rank's.
    fn open_slots(&mut self, buffers: &BuffersInUse, rank: usize, kind: SlotKind) -> Result<OpenedPart, PrepareError> {
        self.make_slots(buffers, kind)?;
        let block = buffers.slots(kind).and_then(|slots| slots.block(rank)).ok_or(PrepareError::NoEngines)?;
        let gpu = buffers.memory.shape.gpus.get(rank).copied().ok_or(PrepareError::NoEngines)?;
        let (own, context) = &self.gpus.gpus[gpu];
        let named = context.enter().and_then(|_entered| block.name());
        let failed = |error| PrepareError::Driver { rank, gpu: own.id.to_string(), error };
        let (handle, fd) = named.map_err(failed)?;
        Ok(OpenedPart { handles: vec![handle], fds: fd.into_iter().collect() })
    }

    /// Contexts of GPUs, each once: ranks may share one.
    fn contexts(&self, gpus: &[usize]) -> Vec<&Context> {
        let first_of_gpu = |(rank, number): &(usize, &usize)| !gpus[..*rank].contains(*number);
        gpus.iter().enumerate().filter(first_of_gpu).map(|(_, number)| &self.gpus.gpus[*number].1).collect()
    }

    /// A call for some GPUs has failed: if that stays, it stays for what is enqueued on theirs from here on.
    fn find_lost(&self, error: &DriverError, gpus: impl Iterator<Item = usize>) {
        for gpu in gpus.filter(|_| error.is_sticky()) {
            // SAFETY: the stream lives.
            let asked = self.gpus.gpus[gpu].1.enter().and_then(|_entered| unsafe { self.streams[gpu].raw().is_idle() });
            asked.err().into_iter().for_each(|error| self.gpu_health.note(gpu, &error));
        }
    }

    /// Reads how far ranks are, and when their last operations ran.
    fn read(&mut self, buffers: &BuffersInUse, ended: &Arc<Ended>) -> Result<Vec<Counted>, DriverError> {
        let held = buffers.memory.held();
        let (nranks, layout) = (held.buffers.len() as u32, buffers.memory.layout);
        let began_ns = self.recorder.now_ns();
        let mut ranks = Vec::new();
        for (gpu, buffer) in &held.buffers {
            let mut counts = SymmetricBufferCounts::default();
            buffer.read(&self.streams[*gpu], 0, counts.as_bytes_mut())?;
            ranks.push((*gpu, counts));
        }
        if self.recorder.is_on() {
            let until_ns = self.recorder.now_ns();
            let tell = |record| self.recorder.record(|_| record);
            self.traced.read(buffers, ended, &ranks, began_ns..until_ns, tell);
        }
        let counted = (0..nranks).zip(ranks.iter().zip(&held.buffers)).map(|(rank, ((gpu, counts), (_, buffer)))| {
            let read = |offset| {
                let mut word = [0; size_of::<u64>()];
                buffer.read(&self.streams[*gpu], offset, &mut word).map(|()| u64::from_ne_bytes(word))
            };
            let groups = counts.groups();
            let may_be_many = groups > NUMBERS_MAX / MESSAGES_MAX as u64 && buffer.has(SymmetricBufferPart::P2p);
            let sent_to =
                (0..nranks).filter(|peer| *peer != rank && may_be_many).map(|peer| layout.messages_sent_offset(peer));
            let messages = sent_to.map(read).collect::<Result<Vec<_>, _>>()?.into_iter().max().unwrap_or(0);
            let (operations, payload_bytes) = (counts.operations(), counts.payload_bytes());
            Ok(Counted { operations, groups, payload_bytes, sent: counts.sent(), messages })
        });
        let counted = counted.collect();
        let ranks: Vec<_> = ranks.into_iter().map(|(_, counts)| counts).collect();
        ended.note_times(&ranks, |rank, number| buffers.page.called_ns(rank, number), Instant::now());
        counted
    }

    /// Whether copy engines can work for ranks on these GPUs: words in streams, and no two on one GPU, where a copy would be a
    /// kernel.
    fn may_be_large(&self, gpus: &[usize]) -> bool {
        let has_words = |gpu: &usize| self.gpus.gpus[*gpu].0.has_stream_words;
        let are_apart = (1..gpus.len()).all(|at| !gpus[..at].contains(&gpus[at]));
        !self.options.large_from.is_never() && gpus.len() > 1 && are_apart && gpus.iter().all(has_words)
    }

    /// Parts of an ended communicator of the same shape, as new: nothing of what it did is there any more.
    fn spare(&self, shape: &Shape) -> Option<Kit> {
        let kit = self.spares.take(shape, |kit| !kit.has_graphs())?;
        if let Err(error) = kit.buffers.iter().try_for_each(|(gpu, buffer)| buffer.zero(&self.streams[*gpu])) {
            tracing::debug!(%error, "memory of a communicator that has ended is not used again");
            self.find_lost(&error, shape.gpus.iter().copied());
            self.frees.free(Share::SERVICE, kit);
            return None;
        }
        kit.engines.iter().for_each(|(_, parts)| parts.page().reset());
        Some(kit)
    }

    fn prepare(
        &self,
        gpus: &[usize],
        on_host: bool,
        charges: Vec<Arc<Charge>>,
        opens: Opens,
    ) -> Result<Prepared, PrepareError> {
        let by_descriptors = !(self.options.handles && opens.memory);
        let nranks = gpus.len() as u32;
        let multiprocessors = gpus.iter().map(|gpu| self.gpus.gpus[*gpu].0.multiprocessors).min().unwrap_or(0);
        let ll128 = !on_host && self.ll128_pairs.all_store(gpus);
        let has_few_packets = on_host || ll128 && self.options.ll128;
        let layout = self.layout_for(nranks, multiprocessors, has_few_packets);
        let large = (!on_host && self.may_be_large(gpus)).then(|| LargeLayout::new(self.options.slot_bytes));
        let buffer_bytes = layout.bytes();
        let owner = charges.first().map(|charge| Arc::clone(charge.tenant()));
        let tenant = owner.as_ref().map_or_else(String::new, |owner| owner.name.clone());
        let has_events = self.options.handles && opens.events;
        let execution = self.options.execution;
        let by_events = self.options.by_events && execution == Execution::Service && has_events;
        // Ranks open slots while others' kernels run. In a process of several ranks a kernel may wait for the rank that opens, so nothing there may wait for kernels:
        // imports of descriptors do not.
        let slots_by_descriptors = by_descriptors || !opens.apart;
        let shape =
            Shape { tenant, gpus: gpus.into(), buffer_bytes, by_descriptors: slots_by_descriptors, by_events, on_host };
        let Kit { engines, buffers: used } = self.spare(&shape).unwrap_or(Kit { engines: None, buffers: Vec::new() });
        // First, so that what there is goes to the thread that frees, whatever fails below: this one must not wait.
        let mut memory = Memory {
            held: Mutex::new(Held { buffers: used, charges }),
            buffer_bytes: AtomicU64::new(0),
            layout,
            shape,
            page: None,
            parts: Mutex::default(),
            slots: Default::default(),
            large,
            is_left: AtomicBool::new(false),
            spares: Arc::clone(&self.spares),
            frees: self.frees.clone(),
            share: owner.as_ref().map_or(Share::SERVICE, |owner| owner.share),
        };
        if let Some(owner) = &owner {
            memory.charge_heads(owner, nranks)?;
        }
        let (fd, page) = memory.control_page(engines)?;
        memory.page = large.map(|_| fd.try_clone()).transpose().map_err(PrepareError::Descriptors)?;
        let NamedBuffers { buffers, fds } = self.make_heads(&mut memory, gpus)?;
        let fds = std::iter::once(fd).chain(fds).collect();
        let copy_engines = large.is_some();
        let abilities =
            Abilities { nranks, multiprocessors, execution, copy_engines, ll128, opens_buffers: !by_descriptors };
        let strategies = self.begin_strategies(Arc::clone(&page), abilities);
        let orders = self.own.upgrade().ok_or(PrepareError::Stopping)?;
        let in_use = BuffersInUse { memory: Arc::new(memory), page: Arc::clone(&page), orders: Arc::clone(&orders) };
        let copies = |layout| self.copy_engines(gpus, &in_use, layout, by_events);
        let copies = large.map(copies).transpose().map_err(PrepareError::Streams)?;
        let events = copies.as_ref().map_or(Ok(Vec::new()), |copies| copies.events()).map_err(PrepareError::Streams)?;
        let share = DeviceInitiatedShare {
            layout: bytemuck::cast(layout),
            buffers,
            opens_handles: !by_descriptors,
            large,
            execution,
            is_timed: self.options.is_timed,
            events,
        };
        let group = DeviceInitiatedGroup::new(strategies, copies, Box::new(in_use));
        Ok(Prepared { memory: fds, shared: Shared::DeviceInitiated { share: Box::new(share), group } })
    }

    fn copy_engines(
        &self,
        gpus: &[usize],
        buffers: &BuffersInUse,
        layout: LargeLayout,
        by_events: bool,
    ) -> Result<Arc<CopyEngines>, DriverError> {
        let (issuers, device_events) = (&self.issuers, &self.device_events);
        CopyEngines::new(&self.gpus, gpus, buffers, layout, issuers, device_events, by_events).map(Arc::new)
    }

    /// The strategies of a new communicator, begun as the operator has configured.
    fn begin_strategies(&self, page: Arc<ControlPage>, abilities: Abilities) -> Strategies {
        let wanted = GpuStrategy {
            large_from: self.options.large_from,
            ll128: self.options.ll128,
            max_ctas: self.options.max_ctas,
        };
        Strategies::begin(page, abilities, wanted)
    }

    /// How symmetric buffers of so many ranks are laid out.
    fn layout_for(&self, nranks: u32, multiprocessors: u32, has_few_packets: bool) -> SymmetricBufferLayout {
        // A single rank has nobody to meet, and a symmetric buffer that nobody uses.
        let layout = SymmetricBufferLayout::initial(nranks.max(2)).for_multiprocessors(multiprocessors);
        let layout = self.options.chunk_bytes.map_or(layout, |bytes| layout.with_chunk(bytes));
        if has_few_packets { layout.with_few_packets() } else { layout }
    }

    /// Makes the heads of symmetric buffers that are not there yet, and names all of them.
    fn make_heads(&self, memory: &mut Memory, gpus: &[usize]) -> Result<NamedBuffers, PrepareError> {
        let contexts = self.contexts(gpus);
        let (layout, on_host) = (memory.layout, memory.shape.on_host);
        let held = memory.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut named = NamedBuffers::default();
        for (rank, number) in gpus.iter().enumerate() {
            let (gpu, context) = &self.gpus.gpus[*number];
            let failed = |error| PrepareError::Driver { rank, gpu: gpu.id.to_string(), error };
            if held.buffers.len() <= rank && on_host {
                held.buffers.push((*number, RankBuffer::on_host(layout)?));
            } else if held.buffers.len() <= rank {
                held.buffers.push((*number, RankBuffer::reserve(context, layout).map_err(failed)?));
                let (_, buffer) = &mut held.buffers[rank];
                buffer.make(SymmetricBufferPart::Head, &contexts, &self.streams[*number]).map_err(failed)?;
            }
            let (handle, fd) = held.buffers[rank].1.name(SymmetricBufferPart::Head).map_err(failed)?;
            named.fds.push(fd);
            named.buffers.push(SymmetricBufferName { handle, gpu: gpu.id.0 });
        }
        *memory.buffer_bytes.get_mut() = held.buffers.iter().map(|(_, buffer)| buffer.held_bytes()).max().unwrap_or(0);
        Ok(named)
    }
}
