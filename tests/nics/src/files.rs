//! Shared files of emulated NICs: a list of devices, a page for each, a page with a ring for each
//! queue pair.
//!
//! All words are atomic, and a process believes nothing that it reads: a ring's slot is copied, then checked.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::gpu::{Gpu, IpcHandle, Pinned};
use crate::twins::{OwnTwin, Twin};

/// Slots of queue pairs, the same for all of a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingShape {
    /// Data of a slot, in bytes: packets of a device that has a very large MTU, so that copies are long. Copy engines want more.
    pub slot_bytes: u32,
    /// Slots of a queue pair.
    pub slots: u32,
    /// Queue pairs of processes that have GPUs have slots in memory of a GPU, too.
    pub on_gpus: bool,
}

/// Mark behind the numbers of a shape with slots on GPUs.
const ON_GPUS: &str = "gpus";

impl Default for RingShape {
    fn default() -> Self {
        RingShape { slot_bytes: 64 << 10, slots: 16, on_gpus: false }
    }
}

impl RingShape {
    const PAGE_BYTES: usize = 4096;

    fn is_valid(self) -> bool {
        let RingShape { slot_bytes, slots, .. } = self;
        (4096..=16 << 20).contains(&slot_bytes) && slot_bytes.is_multiple_of(4096) && (2..=4096).contains(&slots)
    }

    fn data_at(self) -> usize {
        HEADS_AT + (self.slots as usize * size_of::<Head>()).next_multiple_of(RingShape::PAGE_BYTES)
    }

    fn data_bytes(self) -> usize {
        self.slots as usize * self.slot_bytes as usize
    }

    fn bytes(self) -> usize {
        self.data_at() + self.data_bytes()
    }

    /// The shape of a folder.
    pub(crate) fn read(folder: &Path) -> io::Result<RingShape> {
        let text = match std::fs::read_to_string(folder.join("ring")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(RingShape::default()),
            text => text?,
        };
        let mut words = text.split_whitespace();
        let mut number = || words.next()?.parse().ok();
        let numbers = number().zip(number());
        let on_gpus = words.next() == Some(ON_GPUS);
        let found = numbers.map(|(slot_bytes, slots)| RingShape { slot_bytes, slots, on_gpus });
        let none = || io::Error::new(io::ErrorKind::InvalidData, format!("no shape of rings: {text}"));
        found.filter(|shape| shape.is_valid()).ok_or_else(none)
    }

    /// Has the folder's queue pairs be so, those that are made from now on: no process may have any.
    ///
    /// # Errors
    /// Slots are not of whole pages up to 16 MiB, there are not 2 to 4096, or the file cannot be written.
    pub fn write(self, folder: &Path) -> io::Result<()> {
        if !self.is_valid() {
            let problem = format!("{self:?}: slots have whole pages of 4096 bytes, 16 MiB at most, and are 2 to 4096");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        let on_gpus = if self.on_gpus { ON_GPUS } else { "" };
        std::fs::write(folder.join("ring"), format!("{} {} {on_gpus}\n", self.slot_bytes, self.slots))
    }
}

/// One device, as the folder's list has it: a line `host name address Mbit/s latency_ns`, with `infiniband` behind it where it is no
/// Ethernet device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Processes of which host see it.
    pub host: String,
    /// Its name.
    pub name: String,
    /// Its address, and so its GID: no two devices have the same.
    pub address: Ipv4Addr,
    /// Its port's rate.
    pub mbit_per_s: u64,
    /// Time from one device to another.
    pub latency_ns: u64,
    /// Its link is InfiniBand's. It has no LID: peers reach it by its GID.
    pub is_infiniband: bool,
}

/// Mark behind the numbers of an InfiniBand device's line.
const INFINIBAND: &str = "infiniband";

impl Listed {
    /// The address as a GID.
    pub(crate) fn gid(&self) -> [u8; 16] {
        self.address.to_ipv6_mapped().octets()
    }

    fn parse(line: &str) -> Option<Listed> {
        let mut words = line.split_whitespace();
        let mut word = || words.next();
        Some(Listed {
            host: word()?.into(),
            name: word()?.into(),
            address: word()?.parse().ok()?,
            mbit_per_s: word()?.parse().ok().filter(|rate| *rate > 0)?,
            latency_ns: word()?.parse().ok()?,
            is_infiniband: match word() {
                None => false,
                Some(kind) => Some(true).filter(|_| kind == INFINIBAND)?,
            },
        })
    }
}

fn list_of(folder: &Path) -> PathBuf {
    folder.join("devices")
}

/// Whether a folder has a list.
pub(crate) fn is_listed(folder: &Path) -> bool {
    list_of(folder).exists()
}

/// Reads the list of a folder.
///
/// # Errors
/// It is not there, or a line is none.
pub fn read_list(folder: &Path) -> io::Result<Vec<Listed>> {
    let text = std::fs::read_to_string(list_of(folder))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    let none = |line: &str| io::Error::new(io::ErrorKind::InvalidData, format!("no device: {line}"));
    lines.map(|line| Listed::parse(line).ok_or_else(|| none(line))).collect()
}

/// Writes the list of a folder.
///
/// # Errors
/// The file cannot be written.
pub fn write_list(folder: &Path, devices: &[Listed]) -> io::Result<()> {
    let line = |d: &Listed| {
        let kind = if d.is_infiniband { INFINIBAND } else { "" };
        format!("{} {} {} {} {} {kind}\n", d.host, d.name, d.address, d.mbit_per_s, d.latency_ns)
    };
    std::fs::write(list_of(folder), devices.iter().map(line).collect::<String>())
}

/// A file that processes map.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: shared memory, whose words are atomic or owned by one side of a ring.
unsafe impl Send for Mapping {}
// SAFETY: the same.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn of(file: &File, bytes: usize) -> io::Result<Mapping> {
        // SAFETY: a new mapping of an open file, at an address that the kernel chooses.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        let base = NonNull::new(base.cast()).filter(|_| base != libc::MAP_FAILED);
        base.map(|base| Mapping { base, bytes }).ok_or_else(io::Error::last_os_error)
    }

    /// Opens a file; `makes` one where there is none. All zero at first.
    pub(crate) fn open(path: &Path, bytes: usize, makes: bool) -> io::Result<Mapping> {
        let file = OpenOptions::new().read(true).write(true).create(makes).truncate(false).open(path)?;
        if makes {
            file.set_len(bytes as u64)?;
        } else if file.metadata()?.len() < bytes as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Mapping::of(&file, bytes)
    }

    pub(crate) fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset + size_of::<T>() <= self.bytes, "within the mapping");
        self.base.as_ptr().wrapping_add(offset).cast()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, and nobody has a reference any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// A device's page: what all processes that use it share, and what faults are made by.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct PortWords {
    /// How often the device has been opened.
    pub opened: AtomicU32,
    pub is_down: AtomicU32,
    /// Packets in a million that are lost on their way out.
    pub loss_ppm: AtomicU32,
    pub mbit_per_s: AtomicU64,
    pub latency_ns: AtomicU64,
    /// Completions are told so much later.
    pub completion_delay_ns: AtomicU64,
    /// When the port's two directions are free.
    pub out_free_ns: AtomicU64,
    pub in_free_ns: AtomicU64,
    pub queue_pairs: AtomicU32,
    /// The number of a queue pair that is to fail; 0: none.
    pub failing_qp: AtomicU32,
    /// One more: the device is lost to those who have opened it.
    pub fatal: AtomicU32,
    /// Not 0: memory of GPUs is not taken by dma-buf, or not by address.
    pub refuses_dma_buf: AtomicU32,
    pub refuses_peer_memory: AtomicU32,
    pub out_bytes: AtomicU64,
    pub in_bytes: AtomicU64,
    /// The part of each that is read from memory of GPUs, or written there.
    pub out_gpu_bytes: AtomicU64,
    pub in_gpu_bytes: AtomicU64,
    /// The part of what was sent that has gone by slots on GPUs.
    pub twin_bytes: AtomicU64,
}

/// A device, as one process maps it.
#[derive(Debug)]
pub(crate) struct Port {
    mapping: Mapping,
}

impl Port {
    /// The file of a device's GID; made at first use.
    pub(crate) fn open(folder: &Path, device: &Listed) -> io::Result<Port> {
        let path = folder.join(format!("port-{}", hex(device.gid())));
        let port = Port { mapping: Mapping::open(&path, size_of::<PortWords>(), true)? };
        // Whoever is first says how fast it is; who else comes says the same.
        let none = Ordering::AcqRel;
        let _ = port.words().mbit_per_s.compare_exchange(0, device.mbit_per_s, none, Ordering::Acquire);
        let _ = port.words().latency_ns.compare_exchange(0, device.latency_ns, none, Ordering::Acquire);
        Ok(port)
    }

    /// The file of a peer's, which is there.
    pub(crate) fn open_peer(folder: &Path, gid: [u8; 16]) -> io::Result<Port> {
        let path = folder.join(format!("port-{}", hex(gid)));
        Ok(Port { mapping: Mapping::open(&path, size_of::<PortWords>(), false)? })
    }

    pub(crate) fn words(&self) -> &PortWords {
        // SAFETY: long enough, aligned to a page, and nothing but atomic words.
        unsafe { &*self.mapping.at::<PortWords>(0) }
    }
}

/// Head of a slot.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Head {
    pub psn: u64,
    pub remote: u64,
    pub deliver_at_ns: u64,
    /// Operands of atomic operations.
    pub operands: [u64; 2],
    pub opcode: u32,
    pub bytes: u32,
    pub rkey: u32,
    pub imm: u32,
    /// Offset of the data in their message.
    pub offset: u32,
    /// Bytes of the whole message.
    pub total: u32,
    /// Not 0: the data are in the slot's twin on a GPU.
    pub is_on_gpu: u64,
}

/// Words of a queue pair. Its owner's peer fills slots; its owner empties them and says how far it is.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct QpWords {
    pub filled: AtomicU64,
    pub emptied: AtomicU64,
    /// Packets of the peer that have arrived in order.
    pub arrived: AtomicU64,
    /// One more than the packet from which on the peer is to send again; 0: none.
    pub again: AtomicU64,
    /// One more than the packet for which there was no receive; 0: none.
    pub not_ready: AtomicU64,
    /// A completion's status with which the peer's request fails; 0: none.
    pub refused: AtomicU64,
    /// One more whenever the peer has left something here.
    pub rung: AtomicU64,
    /// The owner's bell, and there its completion queues.
    pub bell: AtomicU32,
    pub places: [AtomicU32; 2],
    /// Not 0: the owner's slots have a twin on a GPU, by this handle.
    pub has_twin: AtomicU32,
    pub twin: [AtomicU64; 8],
    /// Not 0: the peer's slots may have one that the owner has not mapped.
    pub maps: AtomicU32,
}

const HEADS_AT: usize = RingShape::PAGE_BYTES;

/// A queue pair's page, as its owner or its peer maps it.
#[derive(Debug)]
pub(crate) struct Ring {
    /// Ends before the memory does.
    pinned: OnceLock<Pinned>,
    twin: OnceLock<Option<OwnTwin>>,
    mapping: Mapping,
    shape: RingShape,
    /// The owner's, who removes it.
    path: Option<PathBuf>,
}

impl Ring {
    fn new(folder: &Path, gid: [u8; 16], number: u32, makes: bool) -> io::Result<Ring> {
        let shape = RingShape::read(folder)?;
        let path = folder.join(format!("qp-{}-{number}", hex(gid)));
        if makes {
            let _ = std::fs::remove_file(&path);
        }
        let mapping = Mapping::open(&path, shape.bytes(), makes)?;
        Ok(Ring { pinned: OnceLock::new(), twin: OnceLock::new(), mapping, shape, path: makes.then_some(path) })
    }

    pub(crate) fn create(folder: &Path, gid: [u8; 16], number: u32) -> io::Result<Ring> {
        Ring::new(folder, gid, number, true)
    }

    pub(crate) fn open(folder: &Path, gid: [u8; 16], number: u32) -> io::Result<Ring> {
        Ring::new(folder, gid, number, false)
    }

    pub(crate) fn words(&self) -> &QpWords {
        // SAFETY: long enough, aligned to a page, and nothing but atomic words.
        unsafe { &*self.mapping.at::<QpWords>(0) }
    }

    pub(crate) fn shape(&self) -> RingShape {
        self.shape
    }

    fn place(&self, index: u64) -> usize {
        (index % u64::from(self.shape.slots)) as usize
    }

    /// Head of slot `index`, for whoever has the slot.
    pub(crate) fn head(&self, index: u64) -> *mut Head {
        self.mapping.at(HEADS_AT + self.place(index) * size_of::<Head>())
    }

    /// Address of its data: `slot_bytes`.
    pub(crate) fn data(&self, index: u64) -> *mut u8 {
        self.mapping.at(self.shape.data_at() + self.place(index) * self.shape.slot_bytes as usize)
    }

    /// Has copy engines reach its slots, from the first copy of a GPU's on. Without it they still do, and slowly.
    pub(crate) fn pin(&self, gpu: Gpu) {
        self.pinned.get_or_init(|| Pinned::new(gpu, self.mapping.base.as_ptr(), self.mapping.bytes));
    }
}

impl Ring {
    /// Has the owner's slots have a twin on a GPU, where rings have such.
    pub(crate) fn offer_twin(&self, gpu: Gpu) {
        if !self.shape.on_gpus || self.path.is_none() {
            return;
        }
        self.twin.get_or_init(|| {
            let own = OwnTwin::new(gpu, self.shape.data_bytes())?;
            let words = self.words();
            words.twin.iter().zip(own.handle.0).for_each(|(word, part)| word.store(part, Ordering::Relaxed));
            words.has_twin.store(1, Ordering::Release);
            Some(own)
        });
    }

    /// By which handle the owner's peer maps its twin.
    pub(crate) fn offered_twin(&self) -> Option<IpcHandle> {
        let words = self.words();
        let handle = || IpcHandle(std::array::from_fn(|at| words.twin[at].load(Ordering::Relaxed)));
        (words.has_twin.load(Ordering::Acquire) != 0).then(handle)
    }

    /// The owner's own.
    pub(crate) fn own_twin(&self) -> Option<Twin> {
        Some(self.twin.get()?.as_ref()?.twin)
    }

    /// Place of the data of slot `index` in a twin.
    pub(crate) fn in_twin(&self, twin: Twin, index: u64) -> Twin {
        Twin { address: twin.address + self.place(index) as u64 * u64::from(self.shape.slot_bytes), ..twin }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            self.words().has_twin.store(0, Ordering::Release);
            let _ = std::fs::remove_file(path);
        }
    }
}

pub(crate) fn hex(gid: [u8; 16]) -> String {
    gid.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Time that all processes of a host agree on.
pub(crate) fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: room for the time.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
