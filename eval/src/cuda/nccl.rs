//! NCCL as it is shipped, opened at run time: the other side of comparisons.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use libloading::{Library, Symbol};
use mccs::{CollectiveKind, DataType, RedOp};

use super::p2p::P2pMessage;
use crate::workload::Call;

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NcclId(pub [u8; 128]);

impl NcclId {
    /// As text, for arguments of programs.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// From such a text.
    ///
    /// # Errors
    /// It is none.
    pub fn from_hex(text: &str) -> anyhow::Result<Self> {
        let mut id = NcclId([0; 128]);
        ensure!(text.len() == 2 * id.0.len() && text.is_ascii(), "the communicator's id is not whole");
        for (index, byte) in id.0.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16)?;
        }
        Ok(id)
    }
}

type Comm = *mut c_void;
type Stream = *mut c_void;

/// The library, and this rank's communicator.
pub struct Nccl {
    library: &'static Library,
    comm: Comm,
    rank: u32,
    nranks: u32,
}

/// A function of the library.
macro_rules! call {
    ($library:expr, $name:tt ($($arg:expr => $type:ty),*)) => {{
        // SAFETY: the signature is that of nccl.h.
        let function: Symbol<'_, unsafe extern "C" fn($($type),*) -> c_int> = unsafe { $library.get($name)? };
        // SAFETY: arguments are as the function's documentation asks: objects of this library, and live buffers.
        check($library, $name, unsafe { function($($arg),*) })?;
    }};
}

fn check(library: &Library, name: &[u8], status: c_int) -> anyhow::Result<()> {
    const IN_PROGRESS: c_int = 7;
    if status == 0 || status == IN_PROGRESS {
        return Ok(());
    }
    let name = String::from_utf8_lossy(name);
    // SAFETY: the signature is that of nccl.h, and the function returns static text.
    let text = unsafe {
        let text: Symbol<'_, unsafe extern "C" fn(c_int) -> *const c_char> = library.get(b"ncclGetErrorString")?;
        CStr::from_ptr(text(status)).to_string_lossy().into_owned()
    };
    bail!("{name}: {text} ({status})")
}

/// Opens the library, for good: it has threads of its own.
fn open(path: &Path) -> anyhow::Result<&'static Library> {
    // SAFETY: the operator names a library that is NCCL.
    let library = unsafe { Library::new(path) }.with_context(|| format!("cannot open {}", path.display()))?;
    Ok(Box::leak(Box::new(library)))
}

impl Nccl {
    /// A new communicator's name, made by one rank.
    ///
    /// # Errors
    /// NCCL's.
    pub fn unique_id(path: &Path) -> anyhow::Result<NcclId> {
        let (library, mut id) = (open(path)?, NcclId([0; 128]));
        call!(library, b"ncclGetUniqueId"(&raw mut id => *mut NcclId));
        Ok(id)
    }

    /// Joins as a rank, on the GPU of the current context.
    ///
    /// # Errors
    /// NCCL's.
    pub fn join(path: &Path, id: NcclId, rank: u32, nranks: u32) -> anyhow::Result<Self> {
        let (library, mut comm) = (open(path)?, std::ptr::null_mut());
        call!(library, b"ncclCommInitRank"(
            &raw mut comm => *mut Comm, nranks as c_int => c_int, id => NcclId, rank as c_int => c_int
        ));
        Ok(Nccl { library, comm, rank, nranks })
    }

    /// Its version, as `2.28.9`.
    ///
    /// # Errors
    /// NCCL's.
    pub fn version(&self) -> anyhow::Result<String> {
        let mut version = 0;
        call!(self.library, b"ncclGetVersion"(&raw mut version => *mut c_int));
        Ok(format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100))
    }

    /// Enqueues a collective. Kinds that NCCL has no call for are groups of sends and receives, as nccl-tests makes them.
    ///
    /// # Errors
    /// NCCL's; also for pre-multiplied sums, which are not compared.
    pub fn enqueue(&self, call: &Call, send: u64, recv: u64, stream: Stream) -> anyhow::Result<()> {
        type Buffer = *mut c_void;
        let (library, comm) = (self.library, self.comm);
        let (source, target) = (send as Buffer, recv as Buffer);
        let (count, dtype) = (call.count as usize, call.dtype.to_wire() as c_int);
        let (op, root) = (call.redop.to_wire() as c_int, call.root as c_int);
        match call.kind {
            CollectiveKind::AllReduce => call!(library, b"ncclAllReduce"(
                source => Buffer, target => Buffer, count => usize, dtype => c_int, op => c_int, comm => Comm, stream => Stream
            )),
            CollectiveKind::ReduceScatter => call!(library, b"ncclReduceScatter"(
                source => Buffer, target => Buffer, count => usize, dtype => c_int, op => c_int, comm => Comm, stream => Stream
            )),
            CollectiveKind::AllGather => call!(library, b"ncclAllGather"(
                source => Buffer, target => Buffer, count => usize, dtype => c_int, comm => Comm, stream => Stream
            )),
            CollectiveKind::Broadcast => call!(library, b"ncclBroadcast"(
                source => Buffer, target => Buffer, count => usize, dtype => c_int, root => c_int, comm => Comm,
                stream => Stream
            )),
            CollectiveKind::Reduce => call!(library, b"ncclReduce"(
                source => Buffer, target => Buffer, count => usize, dtype => c_int, op => c_int, root => c_int, comm => Comm,
                stream => Stream
            )),
            CollectiveKind::AllToAll | CollectiveKind::Gather | CollectiveKind::Scatter => {
                let block = call.count * call.dtype.size_bytes() as u64;
                let sends_to_all = call.kind != CollectiveKind::Gather
                    && (call.kind == CollectiveKind::AllToAll || self.rank == call.root);
                let takes_from_all = call.kind != CollectiveKind::Scatter
                    && (call.kind == CollectiveKind::AllToAll || self.rank == call.root);
                call!(library, b"ncclGroupStart"());
                for peer in 0..self.nranks {
                    let offset = u64::from(peer) * block;
                    if sends_to_all || (call.kind == CollectiveKind::Gather && peer == call.root) {
                        let from = if sends_to_all { send + offset } else { send };
                        call!(library, b"ncclSend"(
                            from as Buffer => Buffer, count => usize, dtype => c_int, peer as c_int => c_int, comm => Comm,
                            stream => Stream
                        ));
                    }
                    if takes_from_all || (call.kind == CollectiveKind::Scatter && peer == call.root) {
                        let to = if takes_from_all { recv + offset } else { recv };
                        call!(library, b"ncclRecv"(
                            to as Buffer => Buffer, count => usize, dtype => c_int, peer as c_int => c_int, comm => Comm,
                            stream => Stream
                        ));
                    }
                }
                call!(library, b"ncclGroupEnd"());
            }
            CollectiveKind::Barrier => bail!("NCCL has no barrier"),
        }
        Ok(())
    }
}

/// `ncclAllReduce` of a communicator, looked up once: for who measures what a call takes.
pub struct AllReduces<'a> {
    nccl: &'a Nccl,
    function: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int,
}

impl AllReduces<'_> {
    /// Enqueues a sum of floats.
    ///
    /// # Safety
    /// Buffers of so many floats must live until the stream has come to its end, and the stream, too.
    ///
    /// # Errors
    /// NCCL's.
    pub unsafe fn enqueue(&self, send: u64, recv: u64, count: usize, stream: Stream) -> anyhow::Result<()> {
        let (dtype, op) = (DataType::F32.to_wire() as c_int, RedOp::Sum.to_wire() as c_int);
        // SAFETY: the signature is that of nccl.h, the communicator lives; the rest is the caller's contract.
        let status = unsafe {
            (self.function)(send as *mut c_void, recv as *mut c_void, count, dtype, op, self.nccl.comm, stream)
        };
        check(self.nccl.library, b"ncclAllReduce", status)
    }
}

impl Nccl {
    /// The library's all-reduce.
    ///
    /// # Errors
    /// The library has none.
    pub fn all_reduces(&self) -> anyhow::Result<AllReduces<'_>> {
        // SAFETY: the signature is that of nccl.h. The library is never closed.
        Ok(AllReduces { nccl: self, function: unsafe { *self.library.get(b"ncclAllReduce")? } })
    }

    /// Enqueues sends and receives as a group.
    ///
    /// # Errors
    /// NCCL's.
    pub fn enqueue_p2p(&self, p2p: &[P2pMessage], stream: Stream) -> anyhow::Result<()> {
        let (library, comm, bytes) = (self.library, self.comm, DataType::U8.to_wire() as c_int);
        call!(library, b"ncclGroupStart"());
        for point in p2p {
            let name: &[u8] = if point.is_send { b"ncclSend" } else { b"ncclRecv" };
            call!(library, name(
                point.buffer as *mut c_void => *mut c_void, point.bytes as usize => usize, bytes => c_int,
                point.peer as c_int => c_int, comm => Comm, stream => Stream
            ));
        }
        call!(library, b"ncclGroupEnd"());
        Ok(())
    }
}

/// Memory of the library's that all ranks have registered as a window; see [`Nccl::window`].
pub struct NcclWindow<'a> {
    nccl: &'a Nccl,
    memory: *mut c_void,
    window: *mut c_void,
}

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
struct WaitSignal {
    times: c_int,
    peer: c_int,
    signal: c_int,
    context: c_int,
}

impl Nccl {
    /// Allocates memory and registers it, on all ranks.
    ///
    /// # Errors
    /// NCCL's; also where ranks have no windows.
    pub fn window(&self, bytes: usize) -> anyhow::Result<NcclWindow<'_>> {
        const SYMMETRIC: c_int = 1;
        let mut made = NcclWindow { nccl: self, memory: std::ptr::null_mut(), window: std::ptr::null_mut() };
        call!(self.library, b"ncclMemAlloc"(&raw mut made.memory => *mut *mut c_void, bytes => usize));
        call!(self.library, b"ncclCommWindowRegister"(
            self.comm => Comm, made.memory => *mut c_void, bytes => usize, &raw mut made.window => *mut *mut c_void, SYMMETRIC => c_int
        ));
        Ok(made)
    }

    /// Has a stream wait for one signal of a peer.
    ///
    /// # Errors
    /// NCCL's.
    pub fn wait_signal(&self, peer: u32, stream: Stream) -> anyhow::Result<()> {
        let mut wait = WaitSignal { times: 1, peer: peer as c_int, signal: 0, context: 0 };
        call!(self.library, b"ncclWaitSignal"(
            1 => c_int, &raw mut wait => *mut WaitSignal, self.comm => Comm, stream => Stream
        ));
        Ok(())
    }
}

impl NcclWindow<'_> {
    /// First byte of this rank's memory.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory as u64
    }

    /// Puts bytes of this rank's window into the peer's, and signals.
    ///
    /// # Errors
    /// NCCL's.
    pub fn put_signal(&self, from: u64, bytes: usize, peer: u32, to: usize, stream: Stream) -> anyhow::Result<()> {
        let (own, dtype) = ((self.address() + from) as *mut c_void, DataType::U8.to_wire() as c_int);
        call!(self.nccl.library, b"ncclPutSignal"(
            own => *mut c_void, bytes => usize, dtype => c_int, peer as c_int => c_int, self.window => *mut c_void, to => usize,
            0 => c_int, 0 => c_int, 0 => c_int, self.nccl.comm => Comm, stream => Stream
        ));
        Ok(())
    }
}

impl Drop for NcclWindow<'_> {
    fn drop(&mut self) {
        let end = || -> anyhow::Result<()> {
            let library = self.nccl.library;
            call!(library, b"ncclCommWindowDeregister"(self.nccl.comm => Comm, self.window => *mut c_void));
            call!(library, b"ncclMemFree"(self.memory => *mut c_void));
            Ok(())
        };
        // It goes with the process, at the latest.
        let _ = end();
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // SAFETY: the signature is that of nccl.h; the communicator is destroyed once.
        unsafe {
            if let Ok(destroy) = self.library.get::<unsafe extern "C" fn(Comm) -> c_int>(b"ncclCommDestroy") {
                destroy(self.comm);
            }
        }
    }
}
