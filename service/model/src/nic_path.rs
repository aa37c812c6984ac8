//! How NICs get at GPU memory: GPUDirect (dma-buf, peer memory) or a bounce through pinned host
//! memory.

/// A way, the best one first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NicAccess {
    /// NICs read and write the GPU's memory, which the kernel knows by a dma-buf.
    DmaBuf,
    /// The same, by its address, which the peer-memory module knows.
    PeerMemory,
    /// Copy engines bring it to pinned memory of the host and back.
    Bounce,
}

impl NicAccess {
    /// As operators read it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            NicAccess::DmaBuf => "dma-buf",
            NicAccess::PeerMemory => "peer memory",
            NicAccess::Bounce => "bounce",
        }
    }
}

/// The way of a GPU, and why it is not a better one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicPath {
    /// The way.
    pub access: NicAccess,
    /// Why there is no better one; none where there is no better one.
    pub reason: Option<String>,
}

impl NicPath {
    /// Through the host, for a reason.
    #[must_use]
    pub fn bounce(reason: impl Into<String>) -> Self {
        NicPath { access: NicAccess::Bounce, reason: Some(reason.into()) }
    }
}

impl std::fmt::Display for NicPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.access.name())?;
        self.reason.as_ref().map_or(Ok(()), |reason| write!(f, " ({reason})"))
    }
}
