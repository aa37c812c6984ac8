//! A connection's communicator, ring and port channel: what both sides have alike, from set-up to close.

use std::ptr;
use std::time::{Duration, Instant};

use mccs::{
    Client, Communicator, DataType, Error, ErrorClass, PortChannel, PortChannels, Region, RegisteredMemory,
    RemoteMemory,
};

use crate::handle::Handle;
use crate::ring::RING_BYTES;

/// Ranks of a connection's communicator.
const RECEIVER: u32 = 0;
const SENDER: u32 = 1;
/// The tag of its port channel.
const TAG: u32 = 0;
/// Behind the ring: where both sides tell each other their memory.
const GREETING_BYTES: u64 = 2 * RemoteMemory::BYTES as u64;
/// How long a request waits before operators see it wait, and how often it then looks whether the service still lives.
const LIVENESS_EVERY: Duration = Duration::from_millis(100);

/// Parts of a communicator.
pub(crate) struct Meeting {
    pub(crate) client: Client,
    pub(crate) handle: Handle,
    pub(crate) is_receiver: bool,
    /// As operators see it.
    pub(crate) name: String,
    pub(crate) traffic_class: Option<u8>,
}

/// See the module's documentation.
pub(crate) struct Link {
    channel: PortChannel,
    /// Bytes that were copied, or have come.
    ring: Region,
    _memory: RegisteredMemory,
    comm: Communicator,
    /// Until when nothing is to be looked at, while requests wait.
    look_at: Option<Instant>,
}

impl Link {
    /// Waits for the peer, for as long as `go_on` says.
    ///
    /// # Errors
    /// As [`mccs::CommunicatorBuilder::join_while`]; a quota; a peer with another ring.
    pub(crate) fn join(meeting: &Meeting, go_on: impl FnMut() -> bool) -> Result<Self, Error> {
        let Meeting { client, handle, is_receiver, name, traffic_class } = meeting;
        let rank = if *is_receiver { RECEIVER } else { SENDER };
        let builder = client.communicator(handle.id, rank, 2).root_address_or_empty(&handle.root_address).name(name);
        let builder = traffic_class.iter().fold(builder, |builder, class| builder.traffic_class(*class));
        let comm = builder.join_while(go_on)?;
        let ring = client.allocate(RING_BYTES + GREETING_BYTES)?;
        let channels = comm.port_channels()?;
        let memory = channels.register(ring.at(0), RING_BYTES)?;
        let theirs = greet(&comm, &ring, &memory.remote())?;
        let channel = open(&channels, rank, &memory, &theirs)?;
        Ok(Link { channel, ring, _memory: memory, comm, look_at: None })
    }

    /// Port channel to the peer.
    pub(crate) fn channel(&self) -> &PortChannel {
        &self.channel
    }

    /// Copies into the ring.
    ///
    /// # Safety
    /// `from` has so many bytes, and nothing that is on its way reads the place.
    pub(crate) unsafe fn copy_in(&self, offset: u64, from: *const u8, bytes: u64) {
        debug_assert!(offset + bytes <= RING_BYTES);
        // SAFETY: the region has the ring; the rest is the caller's contract.
        unsafe { ptr::copy_nonoverlapping(from, self.ring.as_ptr().add(offset as usize), bytes as usize) };
    }

    /// Copies out of the ring.
    ///
    /// # Safety
    /// `to` has room for so many bytes, and nothing writes the place meanwhile, unless the peer breaks the rules: then the copy is of any bytes.
    pub(crate) unsafe fn copy_out(&self, offset: u64, to: *mut u8, bytes: u64) {
        debug_assert!(offset + bytes <= RING_BYTES);
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(self.ring.as_ptr().add(offset as usize), to, bytes as usize) };
    }

    /// Bytes have moved.
    pub(crate) fn has_moved(&mut self) -> Result<(), Error> {
        self.look_at = None;
        self.channel.say_waiting(false)
    }

    /// Requests wait, and nothing has moved. Now and then looks whether anything still can, and lets operators see it.
    ///
    /// # Errors
    /// The end of the communicator, or of the service.
    pub(crate) fn waits(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        let next = now + LIVENESS_EVERY;
        if *self.look_at.get_or_insert(next) > now {
            return Ok(());
        }
        self.look_at = Some(next);
        self.channel.say_waiting(true)?;
        self.comm.async_error().map_or(Ok(()), Err)
    }

    /// Leaves the communicator, behind all that was put. `has_put` says whether that may still be on its way.
    pub(crate) fn close(self, has_put: bool) {
        let Link { channel, ring, _memory: memory, comm, .. } = self;
        // If either fails the communicator is over, which is all that is asked for.
        if has_put {
            let _ = channel.flush();
        }
        let _ = comm.destroy();
        drop((channel, memory, ring));
    }
}

/// Tells the peer this side's memory, and returns the peer's.
fn greet(comm: &Communicator, ring: &Region, own: &RemoteMemory) -> Result<RemoteMemory, Error> {
    let own_at = RING_BYTES + u64::from(comm.rank()) * RemoteMemory::BYTES as u64;
    let bytes = own.to_bytes();
    // SAFETY: inside the region, of which nobody uses this part yet.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), ring.as_ptr().add(own_at as usize), bytes.len()) };
    let stream = comm.client().create_stream()?;
    comm.all_gather(ring.at(own_at), ring.at(RING_BYTES), bytes.len() as u64, DataType::U8, &stream)?;
    stream.synchronize()?;
    let theirs_at = RING_BYTES + u64::from(1 - comm.rank()) * RemoteMemory::BYTES as u64;
    let mut theirs = [0; RemoteMemory::BYTES];
    // SAFETY: inside the region; the collective has ended.
    unsafe { ptr::copy_nonoverlapping(ring.as_ptr().add(theirs_at as usize), theirs.as_mut_ptr(), theirs.len()) };
    let theirs = RemoteMemory::from_bytes(&theirs)?;
    if theirs.len_bytes() == RING_BYTES {
        return Ok(theirs);
    }
    let message = format!("the peer's plugin is of another version: its ring has {} bytes", theirs.len_bytes());
    Err(Error::refused(ErrorClass::InvalidUsage, message))
}

/// The sender puts into the receiver's ring. The receiver says what it has copied, by signals alone.
fn open(
    channels: &PortChannels,
    rank: u32,
    own: &RegisteredMemory,
    theirs: &RemoteMemory,
) -> Result<PortChannel, Error> {
    match rank {
        SENDER => channels.channel(RECEIVER, TAG, own, theirs),
        _ => channels.signal_channel(SENDER, TAG),
    }
}
