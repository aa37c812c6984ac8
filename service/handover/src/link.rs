//! The connection between a service and its next program: messages with any number of descriptors, each within a time.
//!
//! ```text
//! previous                                next
//!          <--------- Ready | Refused           its configuration is good
//! Begin, listening sockets --------->
//!          <--------- Started | Refused         it has all that needs no state
//! Take, state, descriptors --------->
//!          <--------- Taken | Refused           it can go on from there
//! Commit                   --------->           from here on it is the service
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mccs_ipc::handshake::{Socket, SocketError, decode};
use mccs_ipc::protocol::MESSAGE_FDS_MAX;
use mccs_ipc::shm::{Mapping, ShmError};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Longest state: a hundred thousand pending commands, and as many communicators.
const STATE_BYTES_MAX: u64 = 256 << 20;
/// Most descriptors of one message.
const DESCRIPTORS_MAX: u32 = 1 << 20;
/// Longest reason that is told: it fits a message.
const REASON_CHARS_MAX: usize = 800;

/// Why the other program is not understood.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// It has ended, or does not speak this protocol.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// It says nothing, or takes nothing.
    #[error("it has done nothing for {0:?}")]
    Late(Duration),
    /// The kernel refuses.
    #[error("the kernel refuses: {0}")]
    Os(#[from] nix::errno::Errno),
    /// Memory cannot be shared.
    #[error(transparent)]
    Memory(#[from] ShmError),
    /// More than can be.
    #[error("it sends {0}, which is more than can be")]
    TooMuch(String),
}

/// From the next program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToPrevious {
    /// Its configuration is good. The first message; its encoding never changes.
    Ready {
        /// [`STATE_VERSION`](crate::STATE_VERSION).
        state_version: u32,
        /// Version of the protocol by which libraries speak to it.
        session_version: u32,
        /// Version of the program.
        version: String,
    },
    /// It cannot go on, and ends.
    Refused {
        /// Why.
        reason: String,
    },
    /// It stands still, and waits for the state.
    Started,
    /// It has all it needs to go on.
    Taken {
        /// Sessions that go on.
        sessions: u64,
        /// Sessions that end.
        ended: u64,
        /// Communicators that go on.
        communicators: u64,
    },
}

impl ToPrevious {
    /// A refusal.
    #[must_use]
    pub fn refusal(reason: &str) -> Self {
        ToPrevious::Refused { reason: reason.chars().take(REASON_CHARS_MAX).collect() }
    }
}

/// From the running service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToNext {
    /// It listens. The first descriptor is of the memory of its [paths](Link::read_paths); then come two for each, the socket and the lock beside
    /// it, and metrics' socket and that for other hosts, where there are such.
    Begin {
        /// Length of the paths.
        bytes: u64,
        /// Whether metrics' socket comes, too.
        has_metrics: bool,
        /// Whether that for other hosts does.
        has_exchange: bool,
    },
    /// The state: the first descriptor is of its memory.
    Take {
        /// Its length.
        bytes: u64,
        /// Whether sessions end that the configuration has no room for.
        ends_sessions: bool,
    },
    /// The sender does nothing from here on.
    Commit,
}

/// A message, and how many descriptors follow.
#[derive(Serialize, Deserialize)]
struct Parcel<M> {
    message: M,
    descriptors: u32,
}

/// A message with its descriptors.
pub type Received<M> = (M, Vec<OwnedFd>);

/// See the module's documentation.
#[derive(Debug)]
pub struct Link {
    socket: Socket,
}

impl Link {
    /// A link, and what the other program makes its own end of.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn pair() -> Result<(Self, OwnedFd), LinkError> {
        let (own, other) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        Ok((Link::over(own), other))
    }

    /// The end that [`Link::pair`] has made for the other program.
    #[must_use]
    pub fn over(fd: OwnedFd) -> Self {
        Link { socket: Socket::from_fd(fd) }
    }

    /// Sends a message with descriptors.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn send<M: Serialize>(
        &self,
        message: &M,
        descriptors: &[BorrowedFd<'_>],
        within: Duration,
    ) -> Result<(), LinkError> {
        let until = Instant::now() + within;
        let count = u32::try_from(descriptors.len()).unwrap_or(u32::MAX);
        self.send_one(&Parcel { message, descriptors: count }, &[], until, within)?;
        descriptors.chunks(MESSAGE_FDS_MAX).try_for_each(|some| self.send_one(&(), some, until, within))
    }

    fn send_one<M: Serialize>(
        &self,
        message: &M,
        descriptors: &[BorrowedFd<'_>],
        until: Instant,
        within: Duration,
    ) -> Result<(), LinkError> {
        // The unit has no bytes, and no bytes are the end.
        let message = (0u8, message);
        loop {
            match self.socket.send(&message, descriptors) {
                Ok(()) => return Ok(()),
                Err(SocketError::WouldBlock | SocketError::TooManyDescriptors) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() || !self.socket.wait_writable(left) {
                        return Err(LinkError::Late(within));
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Takes the next message. Waits for as long as the other program lives where no time is given.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn receive<M: DeserializeOwned>(&self, within: Option<Duration>) -> Result<Received<M>, LinkError> {
        let mut fds = Vec::new();
        let Parcel { message, descriptors } = self.receive_one::<Parcel<M>>(&mut fds, within)?;
        if descriptors > DESCRIPTORS_MAX || !fds.is_empty() {
            return Err(LinkError::TooMuch(format!("{descriptors} descriptors")));
        }
        while fds.len() < descriptors as usize {
            let before = fds.len();
            self.receive_one::<()>(&mut fds, within)?;
            if fds.len() == before {
                return Err(LinkError::TooMuch("descriptors that are none".into()));
            }
        }
        Ok((message, fds))
    }

    fn receive_one<M: DeserializeOwned>(
        &self,
        fds: &mut Vec<OwnedFd>,
        within: Option<Duration>,
    ) -> Result<M, LinkError> {
        loop {
            if let Some(within) = within
                && !self.socket.wait_readable(within)
            {
                return Err(LinkError::Late(within));
            }
            if let Some((0u8, message)) = self.socket.recv_keeping(fds)? {
                return Ok(message);
            }
        }
    }

    /// Says where the service listens: also whether metrics' socket is among these, and that for other hosts.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn send_begin(
        &self,
        paths: &[&Path],
        sockets: &[BorrowedFd<'_>],
        [has_metrics, has_exchange]: [bool; 2],
        within: Duration,
    ) -> Result<(), LinkError> {
        let content = postcard::to_stdvec(paths).map_err(|error| SocketError::Malformed(error.to_string()))?;
        self.send_content(|bytes| ToNext::Begin { bytes, has_metrics, has_exchange }, &content, sockets, within)
    }

    /// Sends a state, in memory of its own.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn send_state(
        &self,
        state: &[u8],
        descriptors: &[OwnedFd],
        ends_sessions: bool,
        within: Duration,
    ) -> Result<(), LinkError> {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        self.send_content(|bytes| ToNext::Take { bytes, ends_sessions }, state, &borrowed, within)
    }

    /// Sends what no message has room for: a descriptor of its memory comes first.
    fn send_content(
        &self,
        message: impl FnOnce(u64) -> ToNext,
        content: &[u8],
        descriptors: &[BorrowedFd<'_>],
        within: Duration,
    ) -> Result<(), LinkError> {
        let bytes = content.len() as u64;
        if bytes > STATE_BYTES_MAX {
            return Err(LinkError::TooMuch(format!("a state of {bytes} bytes")));
        }
        let (fd, mapping) = Mapping::create("mccs-state", bytes.max(1))?;
        // SAFETY: the mapping has so many bytes, and nobody else knows it.
        unsafe { mapping.as_ptr().copy_from_nonoverlapping(content.as_ptr(), content.len()) };
        let all: Vec<_> = std::iter::once(fd.as_fd()).chain(descriptors.iter().copied()).collect();
        self.send(&message(bytes), &all, within)
    }

    /// The paths of [`ToNext::Begin`], whose memory has come.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn read_paths(memory: &OwnedFd, bytes: u64) -> Result<Vec<PathBuf>, LinkError> {
        Ok(decode(&Self::read_state(memory, bytes)?)?)
    }

    /// The bytes of a state whose memory has come.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn read_state(memory: &OwnedFd, bytes: u64) -> Result<Vec<u8>, LinkError> {
        if bytes > STATE_BYTES_MAX {
            return Err(LinkError::TooMuch(format!("a state of {bytes} bytes")));
        }
        let mapping = Mapping::map(memory.as_fd(), bytes.max(1))?;
        let mut state = vec![0; bytes as usize];
        // SAFETY: the mapping has so many bytes. Whoever changes them meanwhile changes what is read, which is checked.
        unsafe { state.as_mut_ptr().copy_from_nonoverlapping(mapping.as_ptr(), state.len()) };
        Ok(state)
    }
}
