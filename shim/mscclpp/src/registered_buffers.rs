//! `mscclppRegisterBuffer` and `mscclppRegisteredBufferWrite`: buffers that all connected peers write.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;

use super::connections::ConnectedPeer;
use mccs::{Error, PortChannel, RegisteredMemory, RemoteMemory};

use super::communicators::Comm;
use super::host_memory::place;
use super::{Status, guard, invalid_argument, invalid_usage, locked, put};

/// `mscclppRegisteredMemory`.
#[repr(C)]
pub struct CRegisteredMemory {
    memory: u64,
}

struct Buffer {
    /// Peers put into it as long as it is there.
    _own: RegisteredMemory,
    of_ranks: Vec<RemoteMemory>,
}

/// A communicator's buffers, by number less one.
#[derive(Default)]
pub(crate) struct RegisteredBuffers {
    /// Channels that writes have used: by the peer, the buffer, and the address of the source's region.
    channels: HashMap<ChannelKey, PortChannel>,
    buffers: Vec<Buffer>,
    /// Regions that writes are from, by address.
    sources: HashMap<usize, RegisteredMemory>,
}

/// A write as it is called.
struct Write {
    source: *mut c_void,
    bytes: u64,
    destination_offset: u64,
}

/// A channel to a peer that puts from memory that starts there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ChannelKey {
    peer: u32,
    /// The registered buffer that it puts into.
    buffer: u64,
    source: usize,
}

impl RegisteredBuffers {
    fn write(&mut self, comm: &Comm, buffer: u64, write: &Write) -> Result<(), Error> {
        let Write { source, bytes, destination_offset } = *write;
        let peers = locked(&comm.connections).peers()?;
        let known = buffer.checked_sub(1).and_then(|index| self.buffers.get(usize::try_from(index).ok()?));
        let Buffer { of_ranks, .. } =
            known.ok_or_else(|| invalid_argument("regMem is not from mscclppRegisterBuffer"))?;
        if bytes == 0 {
            return Ok(());
        }
        let region = locked(&comm.regions).find(comm.comm.client(), source, bytes)?;
        let (start, channels) = (region.as_ptr() as usize, comm.comm.port_channels()?);
        let from = match self.sources.entry(start) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(channels.register(region.at(0), region.len_bytes() as u64)?),
        };
        let mut writing = Vec::with_capacity(peers.len());
        for ConnectedPeer { peer, tag } in peers {
            let key = ChannelKey { peer, buffer, source: start };
            if let Entry::Vacant(new) = self.channels.entry(key) {
                let into = of_ranks.get(peer as usize).ok_or_else(|| invalid_argument("a peer without a buffer"))?;
                new.insert(channels.channel(peer, tag, from, into)?);
            }
            writing.push(key);
        }
        let each = || writing.iter().filter_map(|key| self.channels.get(key));
        each().try_for_each(|channel| channel.put((source as usize - start) as u64, destination_offset, bytes))?;
        each().try_for_each(PortChannel::flush)
    }
}

/// See `mscclpp.h`.
///
/// # Safety
/// The buffer must be the program's memory, and the other pointer null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppRegisterBuffer(
    comm: *mut Comm,
    local_memory: *mut c_void,
    size: usize,
    registered: *mut CRegisteredMemory,
) -> Status {
    guard("mscclppRegisterBuffer", || {
        let comm = Comm::of(comm)?;
        if registered.is_null() {
            return Err(invalid_argument("regMem is null"));
        }
        let region = locked(&comm.regions).find(comm.comm.client(), local_memory, size as u64)?;
        let own = comm.comm.port_channels()?.register(place(&region, local_memory), size as u64)?;
        let told = comm.all_gather(&own.remote().to_bytes())?;
        let of_ranks = told.iter().map(|memory| RemoteMemory::from_bytes(memory)).collect::<Result<_, _>>()?;
        let mut buffers = locked(&comm.buffers);
        buffers.buffers.push(Buffer { _own: own, of_ranks });
        // SAFETY: the caller's contract.
        unsafe { put(registered, CRegisteredMemory { memory: buffers.buffers.len() as u64 }, "regMem") }
    })
}

/// See `mscclpp.h`.
///
/// # Safety
/// The source must be the program's memory, and the other pointer null or lead to a registered memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppRegisteredBufferWrite(
    comm: *mut Comm,
    registered: *const CRegisteredMemory,
    source: *mut c_void,
    size: usize,
    source_offset: u32,
    destination_offset: u32,
    stream: i64,
) -> Status {
    guard("mscclppRegisteredBufferWrite", || {
        let comm = Comm::of(comm)?;
        // SAFETY: the caller's contract.
        let buffer = unsafe { registered.as_ref() }.ok_or_else(|| invalid_argument("regMem is null"))?.memory;
        if stream != 0 {
            return Err(invalid_usage("memory of the host has no streams of CUDA: stream is 0"));
        }
        let source = source.wrapping_byte_add(source_offset as usize);
        let write = Write { source, bytes: size as u64, destination_offset: destination_offset.into() };
        locked(&comm.buffers).write(&comm, buffer, &write)
    })
}
