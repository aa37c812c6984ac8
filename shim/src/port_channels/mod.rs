//! Port channels: ranks put into each other's memory and signal, from any number of threads, and
//! the service carries it.
//!
//! ```text
//! rank 0:  put(...)  put(...)  signal() ------> rank 1:  wait()   then all puts before the signal are there
//!          flush(): rank 0 may write its own memory again
//! ```
//!
//! A rank registers memory, and gives its peers the [`RemoteMemory`] that stands for it, for example by [`Bootstrap::all_gather`](crate::Bootstrap::all_gather).
//! A [`PortChannel`] leads to a peer under a tag: both ranks make theirs, with each other's rank and the same tag. Channels of one peer and tag
//! share their signals, and what they do is in the order of the calls. Those of different tags or peers are independent.
//!
//! ```no_run
//! # fn main() -> Result<(), mccs::Error> {
//! # let client = mccs::Client::connect("/run/mccs/mccs.sock")?;
//! # let id = mccs::unique_id()?;
//! # let (comm, mut bootstrap) = (client.communicator(id, 0, 2).join()?, client.communicator(id, 0, 2).join_bootstrap()?);
//! let (channels, region) = (comm.port_channels()?, client.allocate(1 << 20)?);
//! let own = channels.register(region.at(0), 1 << 20)?;
//! let handles = bootstrap.all_gather(&own.remote().to_bytes())?;
//! let peer = 1 - comm.rank();
//! let theirs = mccs::RemoteMemory::from_bytes(&handles[peer as usize])?;
//! let channel = channels.channel(peer, 7, &own, &theirs)?;
//! channel.put_with_signal(0, 512 << 10, 4096)?; // The peer's second half gets the first bytes of this rank's.
//! channel.wait()?; // The peer's bytes are here.
//! channel.flush()?; // This rank's may be written again.
//! # Ok(())
//! # }
//! ```

mod channel;
mod kernels;
mod memory;

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use mccs_cuda::DeviceAddress;
use mccs_ipc::command::BufferRef;
use mccs_ipc::port_channels::{
    ENDED, KernelWords, PortChannelAnswer, PortChannelRequest, PortChannelSegment, PutMemories, Trigger,
    TriggerProducer,
};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::types::Handle;

use self::channel::Lengths;
pub use self::channel::PortChannel;
pub use self::kernels::DevicePortChannel;
pub(crate) use self::kernels::GpuMembership;
use self::kernels::KernelSide;
pub use self::memory::{RegisteredMemory, RemoteMemory};
use crate::client::{locked, unexpected};
use crate::cuda::{Awaited, Gone};
use crate::requests::LIVENESS_EVERY;
use crate::{Client, Communicator, Error, Span};

/// Slots of a FIFO, unless a rank asks for more or less.
pub(crate) const FIFO_SLOTS: u32 = 512;

/// A rank's port channels in a communicator. Cheap to clone; used from any thread. See the module's documentation.
#[derive(Clone)]
pub struct PortChannels(Arc<Shared>);

/// A rank of a communicator, as far as port channels go.
pub(crate) trait Membership: Send + Sync {
    /// The communicator, as the service names it.
    fn handle(&self) -> Handle;

    fn rank(&self) -> u32;

    /// Whether the rank has left, or is about to.
    fn has_left(&self) -> bool;
}

/// Common state of a rank's channels in a communicator.
struct Shared {
    client: Client,
    comm: Arc<dyn Membership>,
    /// The same, and what its kernels use, for a rank on a GPU. Before the segment, which its GPU has registered.
    gpu: Option<(Arc<dyn GpuMembership>, KernelSide)>,
    segment: PortChannelSegment,
    triggers: TriggerProducer,
    connections: Mutex<HashMap<ConnectionName, Arc<Connection>>>,
}

/// A connection to a peer under a tag.
struct Connection {
    peer: u32,
    tag: u32,
    number: u32,
    /// Signals that threads have taken.
    taken: AtomicU64,
    /// When this process first found that no signal comes any more.
    ended_since: OnceLock<Instant>,
}

impl std::fmt::Debug for PortChannels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortChannels").field("rank", &self.0.comm.rank()).finish_non_exhaustive()
    }
}

impl Communicator {
    /// This rank's port channels, which the first call opens.
    ///
    /// # Errors
    /// [`Error::Refused`] over the tenant's quota of memory, and where the communicator has failed.
    pub fn port_channels(&self) -> Result<PortChannels, Error> {
        self.port_channels_with(FIFO_SLOTS)
    }

    /// As [`Communicator::port_channels`], with room for at least `fifo_slots` calls that the service has not taken yet, at most 4096: more of them
    /// wait. If the port channels are open already, they stay as they are.
    ///
    /// # Errors
    /// As [`Communicator::port_channels`].
    pub fn port_channels_with(&self, fifo_slots: u32) -> Result<PortChannels, Error> {
        let mut opened = self.opened_port_channels();
        match &*opened {
            Some(channels) => Ok(channels.clone()),
            None => {
                let comm: Arc<dyn Membership> = Arc::<crate::communicator::CommShared>::clone(self.shared());
                Ok(opened.insert(PortChannels::open(self.client(), comm, None, fifo_slots)?).clone())
            }
        }
    }
}

impl PortChannels {
    /// Opens those of a rank, whose memory is on a GPU if `gpu` is there.
    pub(crate) fn open(
        client: &Client,
        comm: Arc<dyn Membership>,
        gpu: Option<Arc<dyn GpuMembership>>,
        fifo_slots: u32,
    ) -> Result<Self, Error> {
        let request = PortChannelRequest::Open { fifo_slots };
        let (answer, fds) = client.0.requests.call(Request::PortChannel { comm: comm.handle(), request }, &[])?;
        let Response::PortChannels { layout } = answer else { return Err(unexpected(&answer)) };
        let no_segment = || Error::ServiceGone("port channels came without their segment".into());
        let segment = PortChannelSegment::map(std::os::fd::AsFd::as_fd(fds.first().ok_or_else(no_segment)?), layout)
            .map_err(|error| Error::below("cannot map the segment of port channels", &error, error.errno()))?;
        let triggers = segment.producer().ok_or_else(no_segment)?;
        let gpu = match gpu {
            Some(gpu) => Some((Arc::clone(&gpu), KernelSide::new(gpu.context(), &segment)?)),
            None => None,
        };
        let (client, connections, has_kernels) = (client.clone(), Mutex::default(), gpu.is_some());
        let shared = Arc::new(Shared { client, comm, gpu, segment, triggers, connections });
        if has_kernels {
            let awaited: std::sync::Weak<Shared> = Arc::downgrade(&shared);
            shared.client.0.watch.add(shared.client.0.requests.socket(), awaited)?;
        }
        Ok(PortChannels(shared))
    }

    /// As [`PortChannels::register`], for a rank on a GPU: memory of that GPU, or of another that it reaches. It is memory of `cudaMalloc`, or such
    /// that has descriptors, as of `ncclMemAlloc`.
    ///
    /// # Safety
    /// The memory stays allocated until the value is dropped, and everything that was put from it or into it has ended.
    ///
    /// # Errors
    /// As [`PortChannels::register`]; [`Error::Cuda`] for memory that other processes cannot open.
    pub unsafe fn register_gpu(&self, address: DeviceAddress, bytes: u64) -> Result<RegisteredMemory, Error> {
        let shared = &self.0;
        let Some((gpu, _)) = &shared.gpu else {
            return Err(Error::argument("memory of a GPU is for port channels of a communicator of GPUs"));
        };
        if bytes == 0 || address == 0 {
            return Err(Error::argument(format!("{bytes} bytes at address {address:#x} are no memory of a GPU")));
        }
        let (BufferRef { region, offset_bytes }, kept) = gpu.place(address, bytes)?;
        self.register_part(region, offset_bytes, bytes, Some(kept))
    }

    /// Tells the service that kernels are about to use these channels: it looks for their triggers without pause for a while. Without it the
    /// first one after a pause may wait: for a millisecond, and after ten seconds for ten.
    pub fn wake(&self) {
        if let Some((_, kernels)) = &self.0.gpu
            && kernels.triggers.expect()
        {
            self.0.client.0.doorbell.ring();
        }
    }

    /// Lets peers put into `bytes` bytes from a place of a region on, and this rank put from there. It ends when it is dropped, and with its
    /// region: a put that comes later fails the communicator.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a place that has not so many bytes, [`Error::Refused`] for a 4097th memory, or one of 512 GiB.
    pub fn register(&self, place: Span, bytes: u64) -> Result<RegisteredMemory, Error> {
        let shared = &self.0;
        let Span { buffer: BufferRef { region, offset_bytes }, client_number, available_bytes } = place;
        if client_number != shared.client.0.number || bytes == 0 || bytes > available_bytes {
            let message = format!(
                "{bytes} bytes are no part of a region of this session, which has {available_bytes} from there on"
            );
            return Err(Error::argument(message));
        }
        if shared.gpu.is_some() {
            return Err(Error::argument(
                "port channels of a communicator of GPUs put from memory of GPUs (register_gpu)",
            ));
        }
        self.register_part(region, offset_bytes, bytes, None)
    }

    fn register_part(
        &self,
        region: Handle,
        offset_bytes: u64,
        bytes: u64,
        kept: Option<Box<dyn std::any::Any + Send + Sync>>,
    ) -> Result<RegisteredMemory, Error> {
        let shared = &self.0;
        match shared.ask(PortChannelRequest::Register { region, offset_bytes, bytes })? {
            PortChannelAnswer::Memory(handle) => Ok(RegisteredMemory::new(Arc::clone(shared), handle, bytes, kept)),
            other => Err(unexpected(&Response::PortChannel { answer: other })),
        }
    }

    /// A channel to a peer under a tag, whose puts are from one memory into another of that peer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for memories of other ranks; [`Error::Refused`] for those that are freed, a peer that is none, a
    /// 1025th connection or a 16385th channel.
    pub fn channel(
        &self,
        peer: u32,
        tag: u32,
        from: &RegisteredMemory,
        into: &RemoteMemory,
    ) -> Result<PortChannel, Error> {
        let shared = &self.0;
        if !Arc::ptr_eq(&from.shared, shared) {
            return Err(Error::argument("the memory to put from is of another communicator"));
        }
        if into.rank() != peer {
            let rank = into.rank();
            return Err(Error::argument(format!(
                "the memory to put into is of rank {rank}, and the channel leads to {peer}"
            )));
        }
        let lengths = Lengths { from: from.len_bytes(), into: into.len_bytes() };
        let memories = PutMemories { source: from.handle, destination: into.handle };
        self.open_channel(peer, tag, Some(memories), Some(lengths))
    }

    /// A channel to a peer under a tag that has signals alone, and no memory to put.
    ///
    /// # Errors
    /// [`Error::Refused`], as [`PortChannels::channel`].
    pub fn signal_channel(&self, peer: u32, tag: u32) -> Result<PortChannel, Error> {
        self.open_channel(peer, tag, None, None)
    }

    fn open_channel(
        &self,
        peer: u32,
        tag: u32,
        memories: Option<PutMemories>,
        lengths: Option<Lengths>,
    ) -> Result<PortChannel, Error> {
        let connection = self.0.connection(peer, tag)?;
        match self.0.ask(PortChannelRequest::OpenChannel { connection: connection.number, memories })? {
            PortChannelAnswer::Channel(number) => {
                Ok(PortChannel::new(Arc::clone(&self.0), connection, number, lengths))
            }
            other => Err(unexpected(&Response::PortChannel { answer: other })),
        }
    }
}

/// How both ends name a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ConnectionName {
    peer: u32,
    tag: u32,
}

impl Shared {
    fn ask(&self, request: PortChannelRequest) -> Result<PortChannelAnswer, Error> {
        let (answer, _) =
            self.client.0.requests.call(Request::PortChannel { comm: self.comm.handle(), request }, &[])?;
        match answer {
            Response::PortChannel { answer } => Ok(answer),
            other => Err(unexpected(&other)),
        }
    }

    /// Asks without waiting.
    fn tell(&self, request: PortChannelRequest) {
        if !self.comm.has_left() {
            self.client.0.requests.send_and_forget(Request::PortChannel { comm: self.comm.handle(), request });
        }
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<ConnectionName, Arc<Connection>>> {
        locked(&self.connections)
    }

    fn connection(&self, peer: u32, tag: u32) -> Result<Arc<Connection>, Error> {
        let (mut connections, name) = (self.connections(), ConnectionName { peer, tag });
        if let Some(known) = connections.get(&name) {
            return Ok(Arc::clone(known));
        }
        match self.ask(PortChannelRequest::Connect { peer, tag })? {
            PortChannelAnswer::Connection(number) => {
                let made =
                    Arc::new(Connection { peer, tag, number, taken: AtomicU64::new(0), ended_since: OnceLock::new() });
                connections.insert(name, Arc::clone(&made));
                Ok(made)
            }
            other => Err(unexpected(&Response::PortChannel { answer: other })),
        }
    }

    /// Hands a trigger to the service, and returns its position. Waits while the FIFO is full.
    fn push(&self, trigger: &Trigger) -> Result<u64, Error> {
        self.check_member()?;
        let position = self.triggers.claim();
        let mut spin = self.client.0.word_spin;
        while !self.triggers.wait_for_room(position, spin, LIVENESS_EVERY) {
            self.client.0.requests.check_alive()?;
            self.check_member()?;
            spin = std::time::Duration::ZERO;
        }
        if self.triggers.write(position, trigger) {
            self.client.0.doorbell.ring();
        }
        Ok(position)
    }

    fn check_member(&self) -> Result<(), Error> {
        let left = || Error::argument("the rank has left the communicator of its port channels");
        (!self.comm.has_left()).then_some(()).ok_or_else(left)
    }
}

impl Awaited for Shared {
    /// The service has gone, or has ended the session: threads find that out themselves, and kernels cannot.
    fn let_through(&self, _: Gone) {
        if self.comm.has_left() {
            return;
        }
        self.triggers.end();
        self.gpu.iter().for_each(|(_, kernels)| kernels.triggers.end());
        for number in 0..self.segment.layout().connections {
            let words = self.segment.words(number).into_iter().flat_map(|words| [words.arrived(), words.flushed()]);
            let of_kernels = self.segment.kernel_words(number).map(KernelWords::flushed);
            words.chain(of_kernels).for_each(|word| word.publish(ENDED | word.load()));
        }
    }
}
