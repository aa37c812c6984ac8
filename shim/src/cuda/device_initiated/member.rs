//! A rank's view of a communicator whose kernels meet in GPU memory: control page, all ranks'
//! symmetric buffers, failures.
//!
//! Collectives and sends share it; what has an order lies with them. It lives until the last group that names it is gone, which
//! may be after the communicator has left.

use std::any::Any;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use mccs_cuda::{
    Allocation, Context, DeviceAddress, DriverError, Function, HostRegistration, ImportedMemory, IpcHandle, Kernels,
    MappedMemory, OwnedStream, is_sticky, while_capturing,
};
use mccs_ipc::command::BufferRef;
use mccs_ipc::device_initiated::{
    CONTROL_PAGE_BYTES, CommPart, ControlPage, DEVICE_INITIATED_RANKS_MAX, DeviceInitiatedShare, SymmetricBufferHandle,
    SymmetricBufferPart,
};
use mccs_ipc::large::SlotKind;
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_kernels::cuda::{Launch, SymmetricBufferLayout, contradiction};

use super::LOOK_AGAIN_AFTER;
use super::launcher::Launcher;
use super::symmetric_buffer::SymmetricBuffer;
use crate::client::{locked, unexpected};
use crate::cuda::cuda_error;
use crate::cuda::graphs::LivingGraphs;
use crate::cuda::resources::{import, kernels};
use crate::cuda::watch::{Awaited, Gone};
use crate::port_channels::{GpuMembership, Membership};
use crate::{Client, Error};

/// For how long a communicator that was stopped waits for the reason, once.
const REASON_WITHIN: Duration = Duration::from_millis(500);

pub(in crate::cuda) struct Member {
    pub(super) client: Client,
    pub(super) handle: Handle,
    pub(super) rank: u32,
    pub(super) nranks: u32,
    pub(in crate::cuda) context: Context,
    pub(super) kernels: Arc<Kernels>,
    pub(super) layout: SymmetricBufferLayout,
    /// First bytes of the ranks' symmetric buffers, as this context sees them.
    pub(super) buffers: [DeviceAddress; DEVICE_INITIATED_RANKS_MAX as usize],
    /// Theirs, by rank, as far as parts are mapped.
    mapped: Mutex<Vec<SymmetricBuffer>>,
    /// Which parts are mapped of all symmetric buffers, a bit each.
    parts: AtomicU32,
    /// Whether the service opens what this process names by the driver's handles.
    pub(super) shares_handles: bool,
    /// Before the control page, whose memory it names.
    registration: HostRegistration,
    /// Graphs keep it, too.
    pub(in crate::cuda) page: Arc<ControlPage>,
    /// The caller's names of the ranks, if these are a part of a communicator's.
    names: OnceLock<Vec<u32>>,
    /// This rank's, with collectives or with sends and receives.
    pub(super) graphs: Arc<LivingGraphs>,
    /// Whether the service knows of the contradiction on the control page.
    is_told: AtomicBool,
    /// Whether the rank has left: from then on the control page may be another communicator's. Locked while something is written that others go by, and never
    /// while something is waited for.
    has_left: Mutex<bool>,
    /// Failure at that time.
    left_with: OnceLock<Error>,
    /// When it was first found stopped without a reason.
    aborted_since: OnceLock<Instant>,
}

/// GPU memory of the service, in this context.
pub(super) enum Opened {
    ByHandle(Arc<ImportedMemory>),
    ByDescriptor(MappedMemory),
}

impl Opened {
    /// Opens what the service names; the next descriptor is its, if it has one.
    fn open<'a>(
        context: &Context,
        handle: &SymmetricBufferHandle,
        fds: &mut impl Iterator<Item = &'a OwnedFd>,
    ) -> Result<Self, Error> {
        let malformed = |what: &str| Error::ServiceGone(format!("it sent memory of a communicator without {what}"));
        match handle {
            SymmetricBufferHandle::Ipc(handle) => {
                let bytes = handle.as_slice().try_into().map_err(|_| malformed("whole handles"))?;
                Ok(Opened::ByHandle(import(context, IpcHandle(bytes))?))
            }
            SymmetricBufferHandle::Descriptor(bytes) => {
                let fd = fds.next().ok_or_else(|| malformed("descriptors"))?;
                Opened::by_descriptor(context, fd, *bytes).map_err(cuda_error)
            }
            SymmetricBufferHandle::Host(_) => Err(malformed("memory of GPUs")),
        }
    }

    fn by_descriptor(context: &Context, fd: &OwnedFd, bytes: u64) -> Result<Self, DriverError> {
        let (allocation, bytes) = (Allocation::import(fd.as_fd())?, bytes as usize);
        let mut memory = MappedMemory::reserve(context, bytes)?;
        memory.map(&allocation, bytes)?;
        memory.open()?;
        Ok(Opened::ByDescriptor(memory))
    }

    pub(super) fn address(&self) -> DeviceAddress {
        match self {
            Opened::ByHandle(memory) => memory.address(),
            Opened::ByDescriptor(memory) => memory.address(),
        }
    }
}

impl Membership for Member {
    fn handle(&self) -> Handle {
        self.handle
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn has_left(&self) -> bool {
        Member::has_left(self)
    }
}

impl GpuMembership for Member {
    fn context(&self) -> &Context {
        &self.context
    }

    fn place(&self, address: DeviceAddress, bytes: u64) -> Result<(BufferRef, Box<dyn Any + Send + Sync>), Error> {
        let _entered = self.context.enter().map_err(cuda_error)?;
        // Also while a thread of the program's captures: nothing of this belongs into a graph.
        let found = while_capturing(|| locked(&self.client.0.gpu_regions).place(self, address, bytes));
        let found = found.map_err(cuda_error).flatten()?;
        Ok((found.buffer, Box::new(found)))
    }
}

/// A part's among those that are mapped.
fn bit(part: SymmetricBufferPart) -> u32 {
    1 << part as u32
}

impl Awaited for Member {
    fn let_through(&self, gone: Gone) {
        self.unless_left(|page| {
            page.abort();
            // Words are all ranks'. A service that lives releases them itself, once nothing touches anybody's buffers any more.
            if gone == Gone::Service {
                page.release_all();
            }
        });
    }
}

impl Member {
    pub(super) fn new(
        client: Client,
        handle: Handle,
        rank: u32,
        nranks: u32,
        context: Context,
        share: &DeviceInitiatedShare,
        fds: &[OwnedFd],
    ) -> Result<Self, Error> {
        let malformed = |what: &str| Error::ServiceGone(format!("it sent a communicator without {what}"));
        if share.buffers.len() != nranks as usize || nranks > DEVICE_INITIATED_RANKS_MAX {
            return Err(malformed("all symmetric buffers"));
        }
        let layout: SymmetricBufferLayout = bytemuck::cast(share.layout);
        if !layout.is_valid() || layout.nranks != nranks.max(2) {
            return Err(malformed("a layout of its symmetric buffers"));
        }
        let mut fds = fds.iter();
        let page = fds.next().ok_or_else(|| malformed("its page"))?;
        let page = ControlPage::map(page.as_fd())
            .map_err(|error| Error::below("cannot map a control page", &error, error.errno()))?;
        // SAFETY: the control page is mapped longer than it is registered: fields are dropped in order.
        let registration = unsafe { HostRegistration::register(&context, page.as_ptr(), CONTROL_PAGE_BYTES as usize) };
        let registration = registration.map_err(cuda_error)?;
        let (mut buffers, mut mapped) = ([0; DEVICE_INITIATED_RANKS_MAX as usize], Vec::new());
        let handles = share.buffers.iter().map(|buffer| &buffer.handle);
        for (address, handle) in buffers.iter_mut().zip(handles) {
            let buffer = SymmetricBuffer::open(&context, &layout, handle, fds.next())?;
            *address = buffer.address();
            mapped.push(buffer);
        }
        let kernels = kernels(&context)?;
        let (page, is_told) = (Arc::new(page), AtomicBool::new(false));
        let graphs = LivingGraphs::new(Some((Arc::clone(&page), rank)));
        Ok(Member {
            client,
            handle,
            rank,
            nranks,
            context,
            kernels,
            layout,
            buffers,
            mapped: Mutex::new(mapped),
            parts: AtomicU32::new(bit(SymmetricBufferPart::Head)),
            shares_handles: share.opens_handles,
            registration,
            page,
            names: OnceLock::new(),
            graphs,
            is_told,
            has_left: Mutex::new(false),
            left_with: OnceLock::new(),
            aborted_since: OnceLock::new(),
        })
    }

    /// Has a part of all symmetric buffers there, which a kernel is about to use: made at first use, for all ranks. Waits for the service then, and for no rank.
    pub(super) fn need(&self, part: SymmetricBufferPart) -> Result<(), Error> {
        if self.parts.load(Ordering::Acquire) & bit(part) != 0 {
            return Ok(());
        }
        // Whoever else needs it waits for this.
        let mut mapped = locked(&self.mapped);
        if self.parts.load(Ordering::Acquire) & bit(part) != 0 {
            return Ok(());
        }
        let range = self.layout.part(part);
        self.open(CommPart::SymmetricBuffer(part), |handles, fds| {
            if handles.len() != mapped.len() {
                return Err(Error::ServiceGone("it sent a part of some symmetric buffers".into()));
            }
            let mut each = mapped.iter_mut().zip(handles.iter().zip(fds));
            each.try_for_each(|(buffer, (handle, fd))| buffer.map_part(&self.context, range.clone(), handle, Some(fd)))
        })?;
        self.parts.fetch_or(bit(part), Ordering::Release);
        Ok(())
    }

    /// This rank's slots of copy engines, made at first use, as [`Member::need`] does.
    pub(super) fn open_slots(&self, kind: SlotKind) -> Result<Opened, Error> {
        self.open(CommPart::Slots(kind), |handles, fds| {
            let handle = handles.first().ok_or_else(|| Error::ServiceGone("it sent no slots".into()))?;
            Opened::open(&self.context, handle, &mut fds.iter())
        })
    }

    /// Asks for memory that is made at first use, and opens it. If there is no room the service ends the communicator: all ranks hear why.
    fn open<T>(
        &self,
        part: CommPart,
        open: impl FnOnce(&[SymmetricBufferHandle], &[OwnedFd]) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let request = Request::OpenPart { comm: self.handle, part };
        let (handles, fds) = match self.client.0.requests.call(request, &[])? {
            (Response::Part { handles }, fds) => (handles, fds),
            (other, _) => return Err(unexpected(&other)),
        };
        // Also while a thread of the program's captures: nothing of this belongs into a graph.
        let opened = while_capturing(|| open(&handles, &fds)).map_err(cuda_error).flatten();
        // The other ranks have it, and would wait for this one.
        opened.inspect_err(|error| self.give_up(error))
    }

    /// Ends the communicator on all ranks, and waits until they can know why: for what the driver returned, if it is that.
    pub(super) fn end(&self, cuda_error: Option<u32>) -> Result<(), Error> {
        let request = Request::AbortComm { comm: self.handle, cuda_error };
        // The service stops what runs once it has said the reason. If it does not answer, or is gone, nobody else does.
        let asked = self.client.0.requests.call_patiently(request, || self.stop());
        self.stop();
        asked.map(drop)
    }

    /// Ends this communicator's kernels, if the rank has not left.
    fn stop(&self) {
        self.unless_left(ControlPage::abort);
    }

    fn unless_left(&self, write: impl FnOnce(&ControlPage)) {
        let has_left = locked(&self.has_left);
        if !*has_left {
            write(&self.page);
        }
    }

    /// The rank is about to leave: its kernels have ended. A failure until then stays known.
    pub(super) fn leave(&self) {
        if let Some(error) = self.failure() {
            self.left_with.get_or_init(|| error);
        }
        *locked(&self.has_left) = true;
    }

    /// Says what the caller calls the ranks.
    pub(super) fn call_ranks(&self, names: Vec<u32>) {
        self.names.get_or_init(|| names);
    }

    /// Whether the rank has left, or is about to.
    pub(in crate::cuda) fn has_left(&self) -> bool {
        *locked(&self.has_left)
    }

    /// A kernel by name.
    pub(super) fn function(&self, name: &'static str) -> Result<Function, Error> {
        self.kernels.function(name).map_err(cuda_error)
    }

    /// Launcher of such kernels, by so many graphs.
    pub(super) fn launcher<T>(&self, graphs: usize, launch: &Launch<T>) -> Result<Launcher, Error> {
        // SAFETY: the function is the launch's, and was loaded into this context.
        unsafe { Launcher::new(&self.context, graphs, self.function(launch.function)?, launch) }
    }

    /// Address of an offset of the control page for kernels and streams.
    pub(in crate::cuda) fn on_page(&self, offset: u64) -> DeviceAddress {
        self.registration.address() + offset
    }

    /// The first byte of this rank's symmetric buffer.
    pub(in crate::cuda) fn buffer(&self) -> DeviceAddress {
        self.buffers[self.rank as usize]
    }

    /// The error that ended the communicator, if one did: on any rank.
    pub(super) fn failure(&self) -> Option<Error> {
        if let Some(error) = self.left_with.get() {
            return Some(error.clone());
        }
        // Before the reasons, which the service says before it aborts: no caller takes what a kernel has left that was stopped for a result.
        let is_aborted = self.page.is_aborted() && !self.has_left();
        // Ranks hear one after the other that their service has gone, and the first to hear stops all.
        let asked = Instant::now();
        loop {
            let reason = self.reason();
            if reason.is_some() || !is_aborted {
                return reason;
            }
            if self.aborted_since.get_or_init(|| asked).elapsed() >= REASON_WITHIN {
                return Some(aborted());
            }
            std::thread::sleep(LOOK_AGAIN_AFTER);
        }
    }

    /// Why the communicator has failed, as far as this rank has heard.
    fn reason(&self) -> Option<Error> {
        let gone = self.client.0.requests.check_alive().err();
        self.contradiction().or_else(|| self.client.0.comm_failure(self.handle)).or(gone)
    }

    /// Why the communicator has failed, if this is because two ends of a message did not mean the same.
    fn contradiction(&self) -> Option<Error> {
        let fault = (self.page.is_aborted() && !self.has_left()).then(|| self.page.fault()).flatten()?;
        if !self.is_told.swap(true, Ordering::Relaxed) {
            // It finds the same on the control page, and tells all ranks.
            self.client.0.requests.send_and_forget(Request::AbortComm { comm: self.handle, cuda_error: None });
        }
        let named = |rank: u32| self.names.get().and_then(|names| names.get(rank as usize)).map_or(rank, |name| *name);
        let message = contradiction(named(fault.sender), fault.came, named(fault.receiver), fault.expected);
        let origin = self.client.0.origin(self.handle, 0);
        Some(Error::Failed { class: ErrorClass::InvalidUsage, message, origin })
    }

    /// Ends the communicator on all ranks, which hear what the driver said to this one. The service ends what runs there when it has been told.
    pub(super) fn give_up(&self, error: &Error) {
        let cuda_error = error.cuda_code();
        self.client.0.requests.send_and_forget(Request::AbortComm { comm: self.handle, cuda_error });
    }

    /// Does so if a call's error stays: nothing of this rank runs any more, and the others would wait for it. After any other the caller may
    /// call again.
    pub(super) fn end_if_lost(&self, error: &Error) {
        if error.cuda_code().is_some_and(is_sticky) {
            self.give_up(error);
        }
    }

    /// Fails if the communicator has.
    pub(super) fn check_whole(&self) -> Result<(), Error> {
        if !self.page.is_aborted() {
            return Ok(());
        }
        Err(self.failure().unwrap_or_else(aborted))
    }

    /// Waits for this rank's kernels that count in a word of its symmetric buffer, for launches of its graphs, and for what else there is.
    pub(super) fn wait_for_kernels(
        &self,
        counter: DeviceAddress,
        launched: u64,
        have_graphs_ended: &dyn Fn() -> Result<bool, Error>,
        has_rest_ended: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        if launched == 0 && have_graphs_ended()? && has_rest_ended() {
            return Ok(());
        }
        // Without a stream, for which there may be no memory, this rank's are waited for with all others.
        if let Ok(stream) = OwnedStream::new(&self.context) {
            let have_ended = || {
                // SAFETY: the symmetric buffer is mapped in this context as long as `self` lives.
                let word = unsafe { stream.read_word(counter) }.map_err(cuda_error)?;
                Ok::<_, Error>(SymmetricBufferLayout::ended(word) >= launched && have_graphs_ended()?)
            };
            // Kernels that were stopped count, too; others' are not to be waited for, which may be stopped only afterwards.
            while !(have_ended()? && (has_rest_ended() || self.page.is_aborted())) {
                std::thread::sleep(LOOK_AGAIN_AFTER);
            }
            if has_rest_ended() {
                return Ok(());
            }
        }
        self.context.synchronize().map_err(cuda_error)
    }
}

/// The error of a communicator of which no more is known.
fn aborted() -> Error {
    Error::Failed { class: ErrorClass::Remote, message: "the communicator was aborted".into(), origin: None }
}
