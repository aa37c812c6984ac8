//! `mscclppConnect`, connection set-up, and what device connections call.
//!
//! ```text
//! mscclppConnect: declared --mscclppConnectionSetup: each rank's memories are told to all--> port channels
//! ```

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use mccs::bindings::Table;
use mccs::{Error, ErrorClass, PortChannel, RegisteredMemory, RemoteMemory};

use super::communicators::Comm;
use super::host_memory::place;
use super::{Status, guard, invalid_argument, invalid_usage, locked, put};

/// Connections of all communicators of the process, by the numbers that device connections have.
static CONNECTIONS: Table<PortChannel> = Table::new();

/// `mscclppDevConn`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct DevConn {
    remote_rank: c_int,
    tag: c_int,
    local_buffer: *mut c_void,
    remote_buffer: *mut c_void,
    connection: u64,
}

// SAFETY: plain data; nothing here follows its pointers, which are for the program.
unsafe impl Send for DevConn {}

/// A peer, and the tag of its first connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnectedPeer {
    pub(crate) peer: u32,
    pub(crate) tag: u32,
}

/// A connection as its program has declared it.
struct Declared {
    conn: DevConn,
    peer: u32,
    memory: Arc<RegisteredMemory>,
}

/// A communicator's connections.
#[derive(Default)]
pub(crate) struct Connections {
    declared: Vec<Declared>,
    /// Once they are set up, in the order in which they were declared. Programs have pointers to them.
    connected: Option<Box<[DevConn]>>,
}

/// A connection's end as its rank tells it: the peer, the tag, and the memory.
const TOLD_BYTES: usize = 8 + RemoteMemory::BYTES;

impl Connections {
    /// Ends them: what the program still has of them names nothing any more.
    pub(crate) fn close(&mut self) {
        for conn in self.connected.take().iter().flatten() {
            drop(CONNECTIONS.close(conn.connection));
        }
    }

    fn connected(&mut self) -> Result<&mut [DevConn], Error> {
        self.connected.as_deref_mut().ok_or_else(|| invalid_usage("mscclppConnectionSetup comes first"))
    }

    /// Each connected peer.
    pub(crate) fn peers(&mut self) -> Result<Vec<ConnectedPeer>, Error> {
        self.connected()?;
        let mut peers: Vec<ConnectedPeer> = Vec::new();
        for Declared { conn, peer, .. } in &self.declared {
            if !peers.iter().any(|known| known.peer == *peer) {
                peers.push(ConnectedPeer { peer: *peer, tag: conn.tag.cast_unsigned() });
            }
        }
        Ok(peers)
    }

    fn told(&self) -> Vec<u8> {
        let mut told = Vec::with_capacity(self.declared.len() * TOLD_BYTES);
        for Declared { conn, peer, memory } in &self.declared {
            told.extend_from_slice(&peer.to_le_bytes());
            told.extend_from_slice(&conn.tag.to_le_bytes());
            told.extend_from_slice(&memory.remote().to_bytes());
        }
        told
    }

    /// Makes the port channels, with what all ranks have told.
    fn connect(&mut self, comm: &Comm, told: &[Vec<u8>]) -> Result<(), Error> {
        let (channels, me) = (comm.comm.port_channels()?, comm.comm.rank());
        let mut made = Vec::with_capacity(self.declared.len());
        for Declared { conn, peer, memory } in &self.declared {
            let theirs = told.get(*peer as usize).into_iter().flat_map(|told| told.chunks_exact(TOLD_BYTES));
            let ends = [me.to_le_bytes(), conn.tag.to_le_bytes()].concat();
            let remote = theirs.filter_map(|end| end.strip_prefix(&ends[..])).next().ok_or_else(|| {
                let tag = conn.tag;
                invalid_usage(format!("rank {peer} has not called mscclppConnect for rank {me} with tag {tag}"))
            })?;
            made.push(channels.channel(*peer, conn.tag.cast_unsigned(), memory, &RemoteMemory::from_bytes(remote)?)?);
        }
        let mut connected = Vec::with_capacity(made.len());
        for (Declared { conn, .. }, channel) in self.declared.iter().zip(made) {
            connected.extend(CONNECTIONS.insert(channel).map(|held| DevConn { connection: held.handle(), ..*conn }));
        }
        let is_full = connected.len() < self.declared.len();
        self.connected = Some(connected.into_boxed_slice());
        if is_full {
            self.close();
            return Err(invalid_usage("the process has 65536 connections, the most it can have"));
        }
        Ok(())
    }
}

/// See `mscclpp.h`.
///
/// # Safety
/// The buffer must be the program's memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppConnect(
    comm: *mut Comm,
    remote_rank: c_int,
    tag: c_int,
    local_buffer: *mut c_void,
    bytes: u64,
    transport: c_int,
    nic: *const c_char,
) -> Status {
    guard("mscclppConnect", || {
        let comm = Comm::of(comm)?;
        let peer = comm.rank_of(remote_rank)?;
        match (transport, nic.is_null()) {
            (0, true) | (2, _) => {}
            (0, false) => return Err(invalid_argument("ibDev is for mscclppTransportIB")),
            (1, _) => return Err(invalid_usage("mscclppTransportSHM is no transport of v0.1: mscclppTransportP2P")),
            (other, _) => return Err(invalid_argument(format!("{other} is no transport"))),
        }
        let mut connections = locked(&comm.connections);
        if connections.connected.is_some() {
            return Err(invalid_usage("connections are declared before mscclppConnectionSetup"));
        }
        if connections.declared.iter().any(|known| known.peer == peer && known.conn.tag == tag) {
            return Err(invalid_usage(format!("there is a connection to rank {peer} with tag {tag}")));
        }
        let same = |known: &&Declared| known.conn.local_buffer == local_buffer && known.memory.len_bytes() == bytes;
        let memory = match connections.declared.iter().find(same) {
            Some(known) => Arc::clone(&known.memory),
            None => {
                let region = locked(&comm.regions).find(comm.comm.client(), local_buffer, bytes)?;
                Arc::new(comm.comm.port_channels()?.register(place(&region, local_buffer), bytes)?)
            }
        };
        let remote_buffer = std::ptr::null_mut();
        let conn = DevConn { remote_rank, tag, local_buffer, remote_buffer, connection: 0 };
        connections.declared.push(Declared { conn, peer, memory });
        Ok(())
    })
}

/// See `mscclpp.h`.
#[unsafe(no_mangle)]
pub extern "C" fn mscclppConnectionSetup(comm: *mut Comm) -> Status {
    guard("mscclppConnectionSetup", || {
        let comm = Comm::of(comm)?;
        let mut connections = locked(&comm.connections);
        if connections.connected.is_some() {
            return Err(invalid_usage("mscclppConnectionSetup is called once"));
        }
        let told = comm.all_gather(&connections.told())?;
        let connected = connections.connect(&comm, &told);
        // Nobody returns before all are connected, or knows who is not.
        let why = connected.as_ref().err().map(Error::to_string).unwrap_or_default();
        let failed = comm.all_gather(why.as_bytes())?;
        connected?;
        match failed.iter().enumerate().find(|(_, why)| !why.is_empty()) {
            None => Ok(()),
            Some((rank, why)) => {
                connections.close();
                let message = format!("rank {rank} could not connect: {}", String::from_utf8_lossy(why));
                Err(Error::refused(ErrorClass::Remote, message))
            }
        }
    })
}

/// See `mscclpp.h`.
///
/// # Safety
/// Pointers must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppGetAllDeviceConnections(
    comm: *mut Comm,
    conns: *mut *mut DevConn,
    count: *mut c_int,
) -> Status {
    guard("mscclppGetAllDeviceConnections", || {
        let comm = Comm::of(comm)?;
        let mut connections = locked(&comm.connections);
        let connected = connections.connected()?;
        // SAFETY: the caller's contract.
        unsafe {
            put(count, connected.len() as c_int, "nConns")?;
            put(conns, connected.as_mut_ptr(), "devConns")
        }
    })
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppGetDeviceConnection(
    comm: *mut Comm,
    remote_rank: c_int,
    tag: c_int,
    conn: *mut *mut DevConn,
) -> Status {
    guard("mscclppGetDeviceConnection", || {
        let comm = Comm::of(comm)?;
        let mut connections = locked(&comm.connections);
        let known = connections.connected()?.iter_mut().find(|of| of.remote_rank == remote_rank && of.tag == tag);
        let none = || invalid_argument(format!("there is no connection to rank {remote_rank} with tag {tag}"));
        // SAFETY: the caller's contract.
        unsafe { put(conn, known.ok_or_else(none)?, "devConn") }
    })
}

/// See `mscclpp.h`: the service's proxy runs.
#[unsafe(no_mangle)]
pub extern "C" fn mscclppProxyLaunch(comm: *mut Comm) -> Status {
    guard("mscclppProxyLaunch", || locked(&Comm::of(comm)?.connections).connected().map(drop))
}

/// See `mscclpp.h`: the service's proxy runs on.
#[unsafe(no_mangle)]
pub extern "C" fn mscclppProxyStop(comm: *mut Comm) -> Status {
    guard("mscclppProxyStop", || Comm::of(comm).map(drop))
}

/// Calls a method of a connection's channel.
///
/// # Safety
/// The pointer must be null or lead to a connection.
unsafe fn call(function: &str, conn: *const DevConn, method: impl FnOnce(&PortChannel) -> Result<(), Error>) -> Status {
    guard(function, || {
        // SAFETY: the caller's contract.
        let conn = unsafe { conn.as_ref() }.ok_or_else(|| invalid_argument("conn is null"))?;
        let found = CONNECTIONS.find(conn.connection);
        method(&*found.ok_or_else(|| invalid_argument("the connection's communicator has been destroyed"))?)
    })
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or lead to a connection.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppDevConnPut(conn: *const DevConn, into: u64, from: u64, bytes: u64) -> Status {
    // SAFETY: the caller's contract.
    unsafe { call("put", conn, |channel| channel.put(from, into, bytes)) }
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or lead to a connection.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppDevConnSignal(conn: *const DevConn) -> Status {
    // SAFETY: the caller's contract.
    unsafe { call("signal", conn, PortChannel::signal) }
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or lead to a connection.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppDevConnPutWithSignal(conn: *const DevConn, into: u64, from: u64, bytes: u64) -> Status {
    // SAFETY: the caller's contract.
    unsafe { call("putWithSignal", conn, |channel| channel.put_with_signal(from, into, bytes)) }
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or lead to a connection.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppDevConnPutWithSignalAndFlush(
    conn: *const DevConn,
    into: u64,
    from: u64,
    bytes: u64,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe { call("putWithSignalAndFlush", conn, |channel| channel.put_with_signal_and_flush(from, into, bytes)) }
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or lead to a connection.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppDevConnFlush(conn: *const DevConn) -> Status {
    // SAFETY: the caller's contract.
    unsafe { call("flush", conn, PortChannel::flush) }
}

/// See `mscclpp.h`.
///
/// # Safety
/// The pointer must be null or lead to a connection.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mscclppDevConnWait(conn: *const DevConn) -> Status {
    // SAFETY: the caller's contract.
    unsafe { call("wait", conn, PortChannel::wait) }
}
