//! Emulated GPUs and their primary contexts, and switches for faults (unreachable, lossy, lost).
//! There are no other contexts: a context's pointer is its GPU's.

use std::cell::RefCell;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::code::{
    Code, Done, ECC_UNCORRECTABLE, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, PEER_ACCESS_ALREADY_ENABLED,
    PEER_ACCESS_UNSUPPORTED,
};
use crate::stream::Stream;

/// How many GPUs there are.
const GPUS_VARIABLE: &str = "MCCS_EMULATED_GPUS";
/// Bytes that each of them has. Memory that nobody has written takes none of the host's.
pub(crate) const MEMORY_BYTES: u64 = 16 << 30;
/// Pairs of GPUs between which the driver has no peer access, as `0-1,0-2`.
const UNREACHED_VARIABLE: &str = "MCCS_EMULATED_UNREACHED";
/// Pairs for which it claims to have it, and what one writes to the other is lost, as with some IOMMUs.
const LOSSY_VARIABLE: &str = "MCCS_EMULATED_LOSSY";
/// 0: streams neither write words nor wait for them.
const WORDS_VARIABLE: &str = "MCCS_EMULATED_WORDS";

/// 0: memory has no dma-bufs.
const DMA_BUF_VARIABLE: &str = "MCCS_EMULATED_DMA_BUF";
/// A folder: a file there that is called after a GPU's number has every process that knows the folder lose that GPU.
const LOST_VARIABLE: &str = "MCCS_EMULATED_LOST";

/// A GPU, and its context.
pub(crate) struct Device {
    pub(crate) number: usize,
    retained: AtomicUsize,
    /// Code that every call returns; 0: all is well.
    lost: AtomicU32,
    /// GPUs whose memory its context has been let reach.
    peers: Mutex<HashSet<usize>>,
    default_stream: OnceLock<Arc<Stream>>,
}

thread_local! {
    static CURRENT: RefCell<Vec<&'static Device>> = const { RefCell::new(Vec::new()) };
}

/// All GPUs.
pub(crate) fn all() -> &'static [Device] {
    static ALL: OnceLock<Vec<Device>> = OnceLock::new();
    ALL.get_or_init(|| {
        let count = std::env::var(GPUS_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(2);
        (0..count).map(Device::new).collect()
    })
}

/// Whether there are stream memory operations.
pub(crate) fn has_words() -> bool {
    static HAS_WORDS: OnceLock<bool> = OnceLock::new();
    *HAS_WORDS.get_or_init(|| std::env::var(WORDS_VARIABLE).map_or(true, |text| text != "0"))
}

/// Whether memory has descriptors for other devices.
pub(crate) fn has_dma_buffers() -> bool {
    static HAS_DMA_BUFFERS: OnceLock<bool> = OnceLock::new();
    *HAS_DMA_BUFFERS.get_or_init(|| std::env::var(DMA_BUF_VARIABLE).map_or(true, |text| text != "0"))
}

/// The pairs that a variable names, both ways.
fn pairs(variable: &str) -> HashSet<(usize, usize)> {
    let text = std::env::var(variable).unwrap_or_default();
    let pair =
        |text: &str| text.split_once('-').and_then(|(one, other)| Some((one.parse().ok()?, other.parse().ok()?)));
    text.split(',').filter_map(pair).flat_map(|(one, other)| [(one, other), (other, one)]).collect()
}

/// Whether the driver has peer access between two GPUs, as it says.
pub(crate) fn claims_access(one: usize, other: usize) -> bool {
    static UNREACHED: OnceLock<HashSet<(usize, usize)>> = OnceLock::new();
    one != other && !UNREACHED.get_or_init(|| pairs(UNREACHED_VARIABLE)).contains(&(one, other))
}

/// Whether what a GPU writes to another's memory is lost.
pub(crate) fn loses(from: usize, to: usize) -> bool {
    static LOSSY: OnceLock<HashSet<(usize, usize)>> = OnceLock::new();
    LOSSY.get_or_init(|| pairs(LOSSY_VARIABLE)).contains(&(from, to))
}

/// The GPU with an ordinal.
pub(crate) fn by_ordinal(ordinal: i32) -> Done<&'static Device> {
    usize::try_from(ordinal).ok().and_then(|number| all().get(number)).ok_or(INVALID_DEVICE)
}

/// The GPU of a context.
pub(crate) fn by_context(context: usize) -> Done<&'static Device> {
    all().iter().find(|device| device.context() == context).ok_or(INVALID_CONTEXT)
}

/// That of the calling thread's current context, which works.
pub(crate) fn current() -> Done<&'static Device> {
    let device = current_if_any().ok_or(INVALID_CONTEXT)?;
    device.check()?;
    Ok(device)
}

/// That of the calling thread's current context, whether it works or not.
pub(crate) fn current_if_any() -> Option<&'static Device> {
    CURRENT.with_borrow(|stack| stack.last().copied())
}

/// Makes a context current on the calling thread.
pub(crate) fn push(context: usize) -> Done {
    let device = by_context(context)?;
    if device.retained.load(Ordering::Acquire) == 0 {
        return Err(INVALID_CONTEXT);
    }
    CURRENT.with_borrow_mut(|stack| stack.push(device));
    Ok(())
}

/// Makes current what was before.
pub(crate) fn pop() -> Done<usize> {
    CURRENT.with_borrow_mut(Vec::pop).map(Device::context).ok_or(INVALID_CONTEXT)
}

impl Device {
    fn new(number: usize) -> Self {
        Device {
            number,
            retained: AtomicUsize::new(0),
            lost: AtomicU32::new(0),
            peers: Mutex::default(),
            default_stream: OnceLock::new(),
        }
    }

    /// Its context, as programs name it.
    pub(crate) fn context(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Its clock, in nanoseconds: the same for all processes, and not that of another.
    pub(crate) fn clock_ns(&self) -> u64 {
        const BETWEEN: Duration = Duration::from_secs(3600);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (now + BETWEEN * self.number as u32).as_nanos() as u64
    }

    pub(crate) fn retain(&self) {
        self.retained.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn is_retained(&self) -> bool {
        self.retained.load(Ordering::Acquire) > 0
    }

    /// Gives the context back. With the last one the driver would destroy all that is in it; here it stays, and cannot be made current.
    pub(crate) fn release(&self) -> Done {
        let less = |count: usize| count.checked_sub(1);
        self.retained.fetch_update(Ordering::AcqRel, Ordering::Acquire, less).map(drop).map_err(|_| INVALID_CONTEXT)
    }

    /// Fails if the context does nothing any more.
    pub(crate) fn check(&self) -> Done {
        if self.has_broken() {
            self.lose(ECC_UNCORRECTABLE);
        }
        match self.lost.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(code),
        }
    }

    /// Whether the GPU itself has failed, for all processes of its host.
    fn has_broken(&self) -> bool {
        static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
        let folder = FOLDER.get_or_init(|| std::env::var_os(LOST_VARIABLE).map(PathBuf::from));
        folder.as_ref().is_some_and(|folder| folder.join(self.number.to_string()).exists())
    }

    /// From here on whatever is called returns this.
    pub(crate) fn lose(&self, code: Code) {
        let _ = self.lost.compare_exchange(0, code, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Lets its context reach a peer's memory.
    pub(crate) fn enable(&self, peer: &Device) -> Done {
        if peer.number == self.number {
            return Err(INVALID_DEVICE);
        }
        if !claims_access(self.number, peer.number) {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        let is_new = self.peers.lock().unwrap_or_else(PoisonError::into_inner).insert(peer.number);
        if is_new { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
    }

    /// Whether its context reaches memory that was allocated in another's.
    pub(crate) fn reaches(&self, other: usize) -> bool {
        self.number == other || self.peers.lock().unwrap_or_else(PoisonError::into_inner).contains(&other)
    }

    /// The default stream.
    pub(crate) fn default_stream(&'static self) -> &'static Arc<Stream> {
        self.default_stream.get_or_init(|| Stream::new(self))
    }

    /// No two have the same.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        let mut uuid = *b"emulated GPU \0\0\0";
        uuid[15] = self.number as u8;
        uuid
    }

    pub(crate) fn bus_id(&self) -> String {
        format!("0000:{:02x}:00.0", 0x17 + 0x10 * self.number)
    }

    /// `CU_DEVICE_ATTRIBUTE_*`, as far as anybody asks.
    pub(crate) fn attribute(attribute: u32) -> Done<i32> {
        const MULTIPROCESSORS: u32 = 16;
        const CAPABILITY_MAJOR: u32 = 75;
        const CAPABILITY_MINOR: u32 = 76;
        const GPU_DIRECT_RDMA_WITH_CUDA_VMM: u32 = 110;
        const GPU_DIRECT_RDMA: u32 = 116;
        const GPU_DIRECT_RDMA_WRITES_ORDERING: u32 = 118;
        const CAN_USE_64_BIT_STREAM_MEM_OPS: u32 = 122;
        const DMA_BUF: u32 = 124;
        match attribute {
            MULTIPROCESSORS => Ok(132),
            CAPABILITY_MAJOR => Ok(9),
            CAPABILITY_MINOR => Ok(0),
            GPU_DIRECT_RDMA | GPU_DIRECT_RDMA_WITH_CUDA_VMM => Ok(1),
            // Writes of a NIC have to be flushed.
            GPU_DIRECT_RDMA_WRITES_ORDERING => Ok(0),
            DMA_BUF => Ok(i32::from(has_dma_buffers())),
            CAN_USE_64_BIT_STREAM_MEM_OPS => Ok(i32::from(has_words())),
            _ => Err(INVALID_VALUE),
        }
    }
}
