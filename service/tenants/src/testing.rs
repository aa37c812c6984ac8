//! Set-up for tests: sessions of which nobody hears, memory of a tenant, connections, closers that a test holds back.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mccs_ipc::command::Completion;
use mccs_ipc::handshake::PeerCredentials;
use mccs_ipc::queue::Producer;
use mccs_ipc::shm::Mapping;
use mccs_model::SessionId;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, socket};

use crate::regions::{Region, UnmapWorker};
use crate::session::{Session, StreamWords};
use crate::{FdCloser, HostMemory, Pages, Quota, Resource, Tenant};

/// A session with a word and a ring of its own, of which nobody hears.
///
/// # Panics
/// There is no memory.
#[must_use]
pub fn session(id: SessionId, tenant: &Arc<Tenant>) -> Arc<Session> {
    session_of(id, tenant, PeerCredentials { pid: 1, uid: 1, gid: 1 })
}

/// The same, of a process.
///
/// # Panics
/// There is no memory.
#[must_use]
pub fn session_of(id: SessionId, tenant: &Arc<Tenant>, peer: PeerCredentials) -> Arc<Session> {
    let words_offset = mccs_ipc::queue::ring_bytes::<Completion>(16).next_multiple_of(128);
    let (_, segment) = Mapping::create("a session", words_offset + 4096).expect("memory");
    let words = StreamWords { offset: words_offset, count: 1 };
    let segment = Arc::new(segment);
    let completions = Producer::new(Arc::clone(&segment), 0, 16).expect("a ring");
    let waker = mccs_runtime::Mailbox::<()>::new(1).waker().clone();
    Arc::new(Session::new(id, Arc::clone(tenant), peer, segment, words, completions, waker))
}

/// Memory of a tenant that may have no more, and the same memory as the tenant maps it.
///
/// # Panics
/// There is no memory.
#[must_use]
pub fn region(bytes: u64, unmap_worker: UnmapWorker) -> (Arc<Region>, Mapping) {
    let (fd, mapping) = Mapping::create("a region", bytes).expect("memory");
    let tenants = Mapping::map(fd.as_fd(), bytes).expect("mapped again");
    let tenant = Tenant::new("t".into(), Quota { memory_bytes: bytes, ..Quota::least() });
    let charges = [(Resource::MemoryBytes, bytes), (Resource::Mappings, 1)]
        .map(|(resource, amount)| tenant.charge(resource, amount).expect("within its quota"));
    let reservation = HostMemory::new(0).reserve(bytes, Pages::Service).expect("room");
    (Arc::new(Region::new(mapping, reservation, charges, unmap_worker)), tenants)
}

/// A connection that has said nothing yet.
///
/// # Panics
/// Nobody listens.
#[must_use]
pub fn connect(listener: &Path) -> OwnedFd {
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::empty(), None).expect("a socket");
    nix::sys::socket::connect(fd.as_raw_fd(), &UnixAddr::new(listener).expect("an address")).expect("connected");
    fd
}

/// See [`shut_gate`].
static GATE: Mutex<()> = Mutex::new(());

/// Holds back [those closers](held_back) until it is dropped, as a file system does that does not answer.
pub fn shut_gate() -> MutexGuard<'static, ()> {
    GATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A closer whose thread waits for the [gate](shut_gate) before each descriptor.
#[must_use]
pub fn held_back<H: Send + 'static>() -> FdCloser<H> {
    FdCloser::closing(|fd: OwnedFd| {
        drop(shut_gate());
        drop(fd);
    })
}

/// A closer that nobody may use.
#[must_use]
pub fn unused<H: Send + 'static>() -> FdCloser<H> {
    FdCloser::closing(|_| std::process::abort())
}
