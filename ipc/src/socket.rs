//! Unix sockets of sessions: messages with file descriptors (`SCM_RIGHTS`), and whether the peer
//! process has ended (pidfd).
//!
//! A Unix `SOCK_SEQPACKET` socket keeps message boundaries, so that half a message cannot be seen. A message lies in a
//! buffer of [`MESSAGE_BYTES_MAX`] on the stack and brings at most [`MESSAGE_FDS_MAX`] descriptors, so that no peer
//! decides how much is allocated. Descriptors of a message that is refused are closed; who must not wait for that, as the
//! peer decides how long it takes, keeps them ([`Socket::recv_keeping`]).

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::protocol::{Hello, MAGIC, MESSAGE_BYTES_MAX, MESSAGE_FDS_MAX, VERSION};

/// Why a message could not be passed.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The other side has gone.
    #[error("the other side has closed the connection")]
    Closed,
    /// The other side does not read what it asked for.
    #[error("the other side does not read its messages")]
    WouldBlock,
    /// Too long, too many descriptors, or not in our encoding.
    #[error("a message is malformed: {0}")]
    Malformed(String),
    /// As many descriptors are on their way, from processes of this user, as the kernel allows.
    #[error("too many descriptors have been sent and not taken by those that they were sent to")]
    TooManyDescriptors,
    /// The kernel refused.
    #[error("the socket failed: {0}")]
    Os(Errno),
}

impl SocketError {
    /// The kernel's error, if it is one.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Os(errno) => Some(*errno),
            _ => None,
        }
    }
}

/// A connected session socket.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
}

impl Socket {
    /// Wraps a connected `SOCK_SEQPACKET` socket of this host, on which no hello has been said.
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> Self {
        Socket { fd }
    }

    /// Sends this side's hello.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn send_hello(&self, status: u32) -> Result<(), SocketError> {
        self.send_bytes(bytemuck::bytes_of(&Hello { magic: MAGIC, version: VERSION, status }), &[])
    }

    /// Takes the other side's hello; `None` where none has come yet. The caller checks what it says.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn recv_hello(&self) -> Result<Option<Hello>, SocketError> {
        self.recv_hello_keeping(&mut Vec::new())
    }

    /// As [`Socket::recv_hello`]; whatever descriptors came, wanted or not, are appended to `fds`.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn recv_hello_keeping(&self, fds: &mut Vec<OwnedFd>) -> Result<Option<Hello>, SocketError> {
        let mut buffer = [0; MESSAGE_BYTES_MAX];
        let Some(length) = self.recv_bytes(&mut buffer, fds)? else {
            return Ok(None);
        };
        let hello = bytemuck::try_pod_read_unaligned(&buffer[..length]);
        hello.map(Some).map_err(|_| SocketError::Malformed("it is no hello".into()))
    }

    /// Sends a message with descriptors. Never blocks: a peer that does not read is [`SocketError::WouldBlock`].
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn send<M: Serialize>(&self, message: &M, fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        let mut buffer = [0; MESSAGE_BYTES_MAX];
        let bytes = postcard::to_slice(message, &mut buffer)
            .map_err(|error| SocketError::Malformed(format!("it does not fit {MESSAGE_BYTES_MAX} bytes: {error}")))?;
        self.send_bytes(bytes, fds)
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        if bytes.is_empty() {
            return Err(SocketError::Malformed("an empty message reads as the end of the connection".into()));
        }
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &rights[..0] } else { &rights[..] };
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        loop {
            match sendmsg::<()>(self.fd.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Err(SocketError::WouldBlock),
                Err(Errno::ETOOMANYREFS) => return Err(SocketError::TooManyDescriptors),
                Err(Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN) => {
                    return Err(SocketError::Closed);
                }
                Err(errno) => return Err(SocketError::Os(errno)),
            }
        }
    }

    /// Takes a message and the descriptors that came with it. `None` where a non-blocking socket has none.
    ///
    /// # Errors
    /// [`SocketError`]; a malformed message's descriptors are closed.
    pub fn recv<M: DeserializeOwned>(&self) -> Result<Option<(M, Vec<OwnedFd>)>, SocketError> {
        let mut fds = Vec::new();
        Ok(self.recv_keeping(&mut fds)?.map(|message| (message, fds)))
    }

    /// As [`Socket::recv`]; whatever descriptors came are appended to `fds`, those of a message that is refused included:
    /// to close what a peer has made may take as long as the peer likes.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn recv_keeping<M: DeserializeOwned>(&self, fds: &mut Vec<OwnedFd>) -> Result<Option<M>, SocketError> {
        let mut buffer = [0; MESSAGE_BYTES_MAX];
        let Some(length) = self.recv_bytes(&mut buffer, fds)? else {
            return Ok(None);
        };
        decode(&buffer[..length]).map(Some)
    }

    fn recv_bytes(&self, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<Option<usize>, SocketError> {
        let mut was_reset = false;
        let received = loop {
            match receive(self.fd.as_fd(), buffer) {
                Ok(received) => break received,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(None),
                // A peer that closes before it has read all we sent resets the connection, and the kernel says so once,
                // ahead of the peer's last messages. They may say why it closed.
                Err(Errno::ECONNRESET) if !was_reset => was_reset = true,
                Err(Errno::ECONNRESET) => return Err(SocketError::Closed),
                Err(errno) => return Err(SocketError::Os(errno)),
            }
        };
        let fds_came = received.fds.len();
        fds.extend(received.fds);
        if received.truncated || fds_came > MESSAGE_FDS_MAX {
            let what = format!("it has more than {MESSAGE_BYTES_MAX} bytes or {MESSAGE_FDS_MAX} descriptors");
            return Err(SocketError::Malformed(what));
        }
        // A sequential-packet socket reads zero bytes at the end; nobody sends empty messages.
        if received.length == 0 { Err(SocketError::Closed) } else { Ok(Some(received.length)) }
    }

    /// Makes [`Socket::recv`] return `None` where it would wait, or wait.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set_nonblocking(&self, nonblocking: bool) -> Result<(), SocketError> {
        let flags = fcntl(&self.fd, FcntlArg::F_GETFL).map_err(SocketError::Os)?;
        let mut flags = OFlag::from_bits_retain(flags);
        flags.set(OFlag::O_NONBLOCK, nonblocking);
        fcntl(&self.fd, FcntlArg::F_SETFL(flags)).map(drop).map_err(SocketError::Os)
    }

    /// Waits until a message can be taken or the other side has gone. Returns whether either is so.
    #[must_use]
    pub fn wait_readable(&self, timeout: Duration) -> bool {
        self.wait_for(PollFlags::POLLIN, timeout)
    }

    /// Waits until a message can be sent or the other side has gone. Returns whether either is so.
    #[must_use]
    pub fn wait_writable(&self, timeout: Duration) -> bool {
        self.wait_for(PollFlags::POLLOUT, timeout)
    }

    fn wait_for(&self, what: PollFlags, timeout: Duration) -> bool {
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.fd.as_fd(), what)], left) {
                Err(Errno::EINTR) => {}
                ready => return ready.is_ok_and(|ready| ready > 0),
            }
        }
    }

    /// Whether the other side has gone. Messages it sent before may still be waiting.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let mut fds = [PollFd::new(self.fd.as_fd(), PollFlags::empty())];
        let gone = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
            && fds[0].revents().is_some_and(|events| events.intersects(gone))
    }
}

impl Socket {
    /// Whether the other side has taken all that was sent to it, or has gone.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        let mut unread: libc::c_int = 0;
        // SAFETY: the kernel writes an int, for which there is room.
        let asked = unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
        // A socket that goes leaves nothing unread. A socket that is shut down seems closed, whether or not the other side
        // has gone.
        asked != 0 || unread == 0
    }

    /// Says nothing more, and hears nothing more. Messages that were sent can still be read.
    pub fn shut_down(&self) {
        let _ = nix::sys::socket::shutdown(self.fd.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }
}

/// `SO_PEERPIDFD` of Linux 6.5, which the C library's headers may be too old for.
const PEER_PIDFD: libc::c_int = 77;

impl Socket {
    /// The process that has connected, as a descriptor that is readable once it has ended, whoever else has its end of the socket; `None`
    /// where the kernel is too old to say.
    #[must_use]
    pub fn peer_process(&self) -> Option<OwnedFd> {
        let (mut fd, mut length) = (-1, size_of::<libc::c_int>() as libc::socklen_t);
        // SAFETY: the kernel writes a descriptor's number, for which there is room, and how long it is.
        let result = unsafe {
            libc::getsockopt(self.fd.as_raw_fd(), libc::SOL_SOCKET, PEER_PIDFD, (&raw mut fd).cast(), &raw mut length)
        };
        // SAFETY: the kernel has just given us this descriptor.
        (result == 0 && fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// A process, as a descriptor that is readable once it has ended, also for whom it is sent to; `None` where the kernel is too old (Linux 5.3
/// has it). While it runs, or is a child that was not waited for, it is the one that `pid` means.
#[must_use]
pub fn process(pid: u32) -> Option<OwnedFd> {
    // SAFETY: two numbers, and no memory.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::c_long::from(pid), 0) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the kernel has just given us this descriptor.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether the process that a descriptor is of has ended.
#[must_use]
pub fn has_ended(process: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> Self {
        socket.fd
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Reads a message out of bytes that a hostile peer may have written.
///
/// # Errors
/// [`SocketError::Malformed`].
pub fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Result<M, SocketError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(SocketError::Malformed(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(SocketError::Malformed(error.to_string())),
    }
}

struct Received {
    length: usize,
    fds: Vec<OwnedFd>,
    truncated: bool,
}

/// Most descriptors that Linux passes with a message. There is room for all: what found none the kernel would close at once.
const KERNEL_FDS_MAX: usize = 253;

/// Room for one control message with [`KERNEL_FDS_MAX`] descriptors, aligned as its header has to be.
#[repr(C)]
union ControlBuffer {
    _header: libc::cmsghdr,
    bytes: [u8; CONTROL_BYTES],
}

// SAFETY: CMSG_SPACE computes; it touches no memory.
const CONTROL_BYTES: usize = unsafe { libc::CMSG_SPACE((KERNEL_FDS_MAX * size_of::<RawFd>()) as u32) } as usize;

/// `recvmsg`. The wrapper of the `nix` crate drops the descriptors of a message that had too many without closing them:
/// a tenant could fill the service's table with them.
fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Received, Errno> {
    let mut control = MaybeUninit::<ControlBuffer>::zeroed();
    let mut slice = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all-zero is a message header without address, buffers or control data.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut slice;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = CONTROL_BYTES as _;
    // SAFETY: the header names one buffer and one control buffer with their lengths; all outlive the call.
    let length = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut header, libc::MSG_CMSG_CLOEXEC) };
    let length = usize::try_from(length).map_err(|_| Errno::last())?;
    let mut fds = Vec::new();
    // SAFETY: the kernel has filled in the header and the control buffer that it names.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(&header) };
    while !message.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return whole, aligned headers inside the control buffer, or null.
        let (level, kind, bytes) = unsafe { ((*message).cmsg_level, (*message).cmsg_type, (*message).cmsg_len) };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: CMSG_LEN computes; it touches no memory.
            let header_bytes = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = bytes.saturating_sub(header_bytes) / size_of::<RawFd>();
            for i in 0..count {
                // SAFETY: the kernel wrote `count` descriptors behind the header, fresh ones that nobody else owns.
                fds.push(unsafe {
                    OwnedFd::from_raw_fd(libc::CMSG_DATA(message).cast::<RawFd>().add(i).read_unaligned())
                });
            }
        }
        // SAFETY: as for CMSG_FIRSTHDR.
        message = unsafe { libc::CMSG_NXTHDR(&header, message) };
    }
    let truncated = header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    Ok(Received { length, fds, truncated })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    use super::*;
    use crate::protocol::{Request, RequestEnvelope};

    const FOREVER: Duration = Duration::from_secs(600);

    fn pair() -> (Socket, Socket) {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).expect("socketpair");
        (Socket::from_fd(ours), Socket::from_fd(theirs))
    }

    fn request(id: u64) -> RequestEnvelope {
        RequestEnvelope { id, request: Request::CreateStream }
    }

    #[test]
    fn messages_keep_their_boundaries_and_descriptors() {
        let (ours, theirs) = pair();
        let (fd, _mapping) = crate::shm::Mapping::create("x", 4096).expect("memfd");
        ours.send(&request(1), &[]).expect("send");
        ours.send(&request(2), &[fd.as_fd(); MESSAGE_FDS_MAX]).expect("send");
        assert!(theirs.wait_readable(FOREVER));
        let (first, fds) = theirs.recv::<RequestEnvelope>().expect("recv").expect("message");
        assert_eq!((first, fds.len()), (request(1), 0));
        let (second, fds) = theirs.recv::<RequestEnvelope>().expect("recv").expect("message");
        assert_eq!((second, fds.len()), (request(2), MESSAGE_FDS_MAX));
        for fd in &fds {
            crate::shm::Mapping::map(fd.as_fd(), 4096).expect("map");
            let flags = fcntl(fd, FcntlArg::F_GETFD).expect("flags");
            assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
        }
    }

    #[test]
    fn nothing_waits_forever_for_a_peer() {
        let (ours, theirs) = pair();
        theirs.set_nonblocking(true).expect("flag");
        assert!(theirs.recv::<RequestEnvelope>().expect("recv").is_none());
        assert!(!theirs.wait_readable(Duration::from_millis(1)));
        let sent = (0..1_000_000u64).find_map(|id| ours.send(&request(id), &[]).err());
        assert!(matches!(sent, Some(SocketError::WouldBlock)));
        assert!(!ours.is_closed());
        drop(theirs);
        assert!(ours.is_closed());
        assert!(matches!(ours.send(&request(0), &[]), Err(SocketError::Closed)));
    }

    /// Also where one's own end is shut down, which looks as if the other side had gone.
    #[test]
    fn what_was_sent_is_taken_when_it_is_read_or_nobody_can_read_it_any_more() {
        for reads in [true, false] {
            let (ours, theirs) = pair();
            assert!(ours.is_taken());
            ours.send(&request(1), &[]).expect("send");
            assert!(!ours.is_taken());
            ours.shut_down();
            assert!(!ours.is_taken());
            if reads {
                assert!(theirs.recv::<RequestEnvelope>().expect("recv").is_some());
            } else {
                drop(theirs);
            }
            assert!(ours.is_taken());
        }
    }

    /// Descriptors of a refused message must not stay open: the far end of each pipe sees its last writer go.
    #[test]
    fn descriptors_of_refused_messages_are_closed() {
        for (bytes, descriptors) in [(10, MESSAGE_FDS_MAX + 1), (MESSAGE_BYTES_MAX + 1, 1), (3, 1)] {
            let (ours, theirs) = pair();
            let (end, other_end) = UnixStream::pair().expect("pair");
            // 0xff.. is no encoding of a request.
            ours.send_bytes(&vec![0xff; bytes], &vec![other_end.as_fd(); descriptors]).expect("send");
            drop(other_end);
            assert!(
                matches!(theirs.recv::<RequestEnvelope>(), Err(SocketError::Malformed(_))),
                "{bytes} {descriptors}"
            );
            let end = Socket::from_fd(end.into());
            assert!(end.is_closed(), "{bytes} bytes, {descriptors} descriptors: one is still open");
        }
    }

    /// A service that refuses a tenant says why and closes, without having read what the tenant said.
    #[test]
    fn last_words_are_heard_after_a_reset() {
        let (ours, theirs) = pair();
        ours.send_hello(0).expect("send");
        theirs.send(&request(7), &[]).expect("send");
        drop(theirs);
        let (last, _) = ours.recv::<RequestEnvelope>().expect("recv").expect("message");
        assert_eq!(last, request(7));
        assert!(matches!(ours.recv::<RequestEnvelope>(), Err(SocketError::Closed)));
    }

    #[test]
    fn garbage_is_malformed() {
        assert!(matches!(decode::<RequestEnvelope>(&[]), Err(SocketError::Malformed(_))));
        assert!(matches!(decode::<RequestEnvelope>(&[1, 200, 3]), Err(SocketError::Malformed(_))));
        let mut buffer = [0; 64];
        let length = postcard::to_slice(&request(1), &mut buffer).expect("encodes").len();
        assert!(decode::<RequestEnvelope>(&buffer[..length]).is_ok());
        assert!(matches!(decode::<RequestEnvelope>(&buffer[..=length]), Err(SocketError::Malformed(_))));
        let (ours, theirs) = pair();
        ours.send(&request(1), &[]).expect("send");
        assert!(matches!(theirs.recv_hello(), Err(SocketError::Malformed(_))));
        let long = vec![0u8; MESSAGE_BYTES_MAX + 1];
        assert!(matches!(ours.send(&long, &[]), Err(SocketError::Malformed(_))));
    }
}
