//! Memory channels: threads of a GPU copy into a peer's memory, signal and wait, without the service.
//! `mccs/device.cuh` is the kernels' side.
//!
//! A rank gives memory, and has words beside it that its peers' kernels count signals in. It tells the others where both
//! are ([`MemoryChannelsPart`]), and maps theirs, as for a [`Window`]. Kernels that wait look at the word by which the
//! service aborts a communicator, so that they are let go when a rank dies.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use mccs_cuda::{DeviceAddress, DeviceMemory};
use mccs_ipc::device_initiated::ControlPage;

use super::communicator::CudaCommunicator;
use super::cuda_error;
use super::device_initiated::Member;
use super::window::{Window, WindowPart};
use crate::Error;

/// Most tags of a rank's memory channels: each takes two lines of its GPU's memory for each peer.
pub const MEMORY_CHANNEL_TAGS_MAX: u32 = 1024;

/// Bytes between words that different GPUs or threads raise.
const LINE_BYTES: u64 = 128;
/// Words of a peer and tag: a line for the count of signals that have come, and one for those sent, told and taken.
const WORDS_BYTES: u64 = 2 * LINE_BYTES;

/// A rank's memory and words, for the other ranks: a plain value, which they tell each other.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct MemoryChannelsPart {
    memory: WindowPart,
    words: WindowPart,
    tags: u64,
}

impl MemoryChannelsPart {
    /// Length of one in bytes.
    pub const BYTES: usize = size_of::<MemoryChannelsPart>();

    /// In bytes, for peers.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        bytemuck::cast(*self)
    }

    /// From a peer's bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        bytemuck::cast(*bytes)
    }
}

/// This rank's memory and words, before it knows the others'.
#[derive(Debug)]
pub struct OwnMemoryChannels {
    words: DeviceMemory,
    part: MemoryChannelsPart,
}

impl OwnMemoryChannels {
    /// The part for the other ranks.
    #[must_use]
    pub fn part(&self) -> &MemoryChannelsPart {
        &self.part
    }
}

/// A rank's memory channels. It stays until kernels of all ranks that use them have ended, and so does the memory that ranks gave.
pub struct MemoryChannels {
    rank: u32,
    tags: u32,
    memory: Window,
    words: Window,
    /// The word by which the service aborts the communicator, as the GPU sees it.
    abort: DeviceAddress,
    own: DeviceMemory,
    /// The page where that word lies stays registered.
    _member: Arc<Member>,
}

/// A memory channel as kernels use it: `mccs::MemoryChannel` of `mccs/device.cuh`, to be passed to a kernel by value. It is of use while the
/// [`MemoryChannels`] live that it was asked of.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct DeviceMemoryChannel {
    own: DeviceAddress,
    peer: DeviceAddress,
    own_bytes: u64,
    peer_bytes: u64,
    arrived: DeviceAddress,
    arrived_at_peer: DeviceAddress,
    counts: DeviceAddress,
    abort: DeviceAddress,
}

/// Offset of a rank's words for a peer and tag among its own.
fn words_offset(tags: u32, peer: u32, tag: u32) -> u64 {
    (u64::from(peer) * u64::from(tags) + u64::from(tag)) * WORDS_BYTES
}

impl CudaCommunicator {
    /// Prepares memory channels: `bytes` of this rank's GPU's memory, from `cudaMalloc` or of this process, which peers' kernels read and write, and
    /// words for `tags` channels to each peer. Ranks may give different lengths, and the same number of tags.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for ranks that do not reach each other ([`CudaCommunicator::has_windows`]), for an address that is no GPU's memory,
    /// for no tags or more than [`MEMORY_CHANNEL_TAGS_MAX`]. [`Error::Cuda`] where the driver has no memory for words.
    pub fn prepare_memory_channels(
        &self,
        address: DeviceAddress,
        bytes: u64,
        tags: u32,
    ) -> Result<OwnMemoryChannels, Error> {
        if !(1..=MEMORY_CHANNEL_TAGS_MAX).contains(&tags) {
            let most = MEMORY_CHANNEL_TAGS_MAX;
            return Err(Error::argument(format!("memory channels of {tags} tags: give 1 to {most}")));
        }
        let context = self.peers()?.context();
        let words_bytes = words_offset(tags, self.nranks(), 0);
        let words = {
            let _entered = context.enter().map_err(cuda_error)?;
            DeviceMemory::zeroed(context, words_bytes as usize).map_err(cuda_error)?
        };
        let memory = self.window_part(address, bytes)?;
        let part = MemoryChannelsPart {
            memory,
            words: self.window_part(words.address(), words_bytes)?,
            tags: u64::from(tags),
        };
        Ok(OwnMemoryChannels { words, part })
    }

    /// Opens what ranks have told each other, in their order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another number of parts than ranks, and where a rank has another number of tags. Memory that this rank does not
    /// reach is an error where a channel is asked for.
    pub fn open_memory_channels(
        &self,
        own: OwnMemoryChannels,
        parts: &[MemoryChannelsPart],
    ) -> Result<MemoryChannels, Error> {
        let comm = self.peers()?;
        let tags = own.part.tags;
        if let Some((rank, part)) = (0..).zip(parts).find(|(_, part): &(u32, _)| part.tags != tags) {
            let theirs = part.tags;
            return Err(Error::argument(format!(
                "rank {rank} has memory channels of {theirs} tags, this one of {tags}"
            )));
        }
        let of = |which: fn(&MemoryChannelsPart) -> WindowPart| -> Vec<_> { parts.iter().map(which).collect() };
        Ok(MemoryChannels {
            rank: self.rank(),
            tags: tags as u32,
            memory: self.open_window(&of(|part| part.memory))?,
            words: self.open_window(&of(|part| part.words))?,
            abort: comm.member().on_page(ControlPage::ABORT_OFFSET),
            own: own.words,
            _member: Arc::clone(comm.member()),
        })
    }
}

impl MemoryChannels {
    /// The channel to a rank under a tag, which may be this rank itself. The peer asks for its own with this rank and the same tag. Channels of one
    /// peer and tag are one: they share signals.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank or tag that there is not, and for a peer whose memory is not reached, with the reason.
    pub fn channel(&self, peer: u32, tag: u32) -> Result<DeviceMemoryChannel, Error> {
        let MemoryChannels { rank, tags, memory, words, abort, own, .. } = self;
        if tag >= *tags {
            return Err(Error::argument(format!("tag {tag} of memory channels of {tags} tags")));
        }
        let (own_bytes, peer_bytes) = (memory.len_bytes(*rank)?, memory.len_bytes(peer)?);
        let here = own.address() + words_offset(*tags, peer, tag);
        Ok(DeviceMemoryChannel {
            own: memory.address(*rank, 0, own_bytes)?,
            peer: memory.address(peer, 0, peer_bytes)?,
            own_bytes,
            peer_bytes,
            arrived: here,
            arrived_at_peer: words.address(peer, words_offset(*tags, *rank, tag), WORDS_BYTES)?,
            counts: here + LINE_BYTES,
            abort: *abort,
        })
    }
}
