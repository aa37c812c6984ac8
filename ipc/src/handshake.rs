//! The session's socket: listening, connecting, and messages with file descriptors.
//!
//! A Unix `SOCK_SEQPACKET` socket keeps message boundaries, so that half a message cannot be seen, and tells the peer's
//! credentials by `SO_PEERCRED`, which the peer cannot forge.

use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::sockopt::PeerCredentials as PeerCredentialsOption;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind,
    getsockopt, listen, recvmsg, sendmsg, socket,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::protocol::{Hello, MAGIC, MESSAGE_BYTES_MAX, MESSAGE_FDS_MAX, VERSION};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 256;

/// Why no connection could be made.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// Another service is there.
    #[error("another service listens on {0}: stop it, or give this one another runtime_dir")]
    InUse(PathBuf),
    /// Something is there that is not ours to remove.
    #[error("{0} exists and is no socket: remove it, or choose another path")]
    NotSocket(PathBuf),
    /// Nobody listens.
    #[error("no mccs-service listens on {path}: is it running, and is this the tenant's socket? ({errno})")]
    NobodyThere { path: PathBuf, errno: Errno },
    /// Both sides were built from different versions.
    #[error(
        "the other side speaks version {theirs} of the session protocol, this side {ours}: install the same version of mccs on both"
    )]
    Version { theirs: u32, ours: u32 },
    /// Not our protocol at all.
    #[error("the other side of {0} is no mccs-service")]
    NotMccs(PathBuf),
    /// The kernel refused.
    #[error("cannot {what} {path}: {errno}")]
    Os { what: &'static str, path: PathBuf, errno: Errno },
    /// The connection broke.
    #[error(transparent)]
    Socket(#[from] SocketError),
}

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
    /// The kernel refused.
    #[error("the socket failed: {0}")]
    Os(Errno),
}

/// Who is at the other end, as the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process.
    pub pid: i32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// A listening socket; non-blocking. Its path is removed on drop.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    inode: u64,
    /// Held while this service lives, so that two that start at once cannot both find the path free.
    _lock: Flock<fs::File>,
}

impl Listener {
    /// Listens on `path`. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// Where another service is alive, the path is something else, or the kernel refuses.
    pub fn bind(path: &Path) -> Result<Self, HandshakeError> {
        let os = |what| move |errno| HandshakeError::Os { what, path: path.to_owned(), errno };
        let io = |what| move |error: std::io::Error| os(what)(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw));
        let lock_path = path.with_added_extension("lock");
        let lock_file = fs::File::options().create(true).truncate(false).write(true).open(lock_path);
        let lock_file = lock_file.map_err(io("make the lock of"))?;
        let lock = Flock::lock(lock_file, FlockArg::LockExclusiveNonblock)
            .map_err(|_| HandshakeError::InUse(path.to_owned()))?;
        if let Ok(metadata) = fs::symlink_metadata(path) {
            if !metadata.file_type().is_socket() {
                return Err(HandshakeError::NotSocket(path.to_owned()));
            }
            if raw_connect(path).is_ok() {
                return Err(HandshakeError::InUse(path.to_owned()));
            }
            fs::remove_file(path).map_err(io("remove the stale socket"))?;
        }
        let fd = new_socket(SockFlag::SOCK_NONBLOCK).map_err(os("make a socket for"))?;
        let address = UnixAddr::new(path).map_err(os("use the path"))?;
        bind(fd.as_raw_fd(), &address).map_err(os("bind"))?;
        let backlog = Backlog::new(BACKLOG).map_err(os("listen on"))?;
        listen(&fd, backlog).map_err(os("listen on"))?;
        let inode = fs::symlink_metadata(path).map_err(io("look at"))?.ino();
        Ok(Listener { fd, path: path.to_owned(), inode, _lock: lock })
    }

    /// The next connection, if one waits. Non-blocking, like the socket it returns.
    ///
    /// # Errors
    /// The kernel's refusal, such as too many open files.
    pub fn accept(&self) -> Result<Option<(Socket, PeerCredentials)>, SocketError> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = match accept4(self.fd.as_raw_fd(), flags) {
            // SAFETY: the kernel has just given us this descriptor.
            Ok(fd) => unsafe { OwnedFd::from_raw_fd(fd) },
            Err(Errno::EAGAIN | Errno::ECONNABORTED | Errno::EINTR) => return Ok(None),
            Err(errno) => return Err(SocketError::Os(errno)),
        };
        let credentials = getsockopt(&fd, PeerCredentialsOption).map_err(SocketError::Os)?;
        let peer = PeerCredentials { pid: credentials.pid(), uid: credentials.uid(), gid: credentials.gid() };
        Ok(Some((Socket { fd }, peer)))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Somebody may have put another file there; it is not ours then.
        if fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn new_socket(flags: SockFlag) -> Result<OwnedFd, Errno> {
    socket(AddressFamily::Unix, SockType::SeqPacket, flags | SockFlag::SOCK_CLOEXEC, None)
}

fn raw_connect(path: &Path) -> Result<OwnedFd, Errno> {
    let fd = new_socket(SockFlag::empty())?;
    nix::sys::socket::connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd)
}

/// A connected session socket.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
}

/// Connects to a service and exchanges [`Hello`]s. The socket is blocking.
///
/// # Errors
/// Where nobody listens, or the other side is of another version or kind.
pub fn connect(path: &Path) -> Result<Socket, HandshakeError> {
    let fd = raw_connect(path).map_err(|errno| HandshakeError::NobodyThere { path: path.to_owned(), errno })?;
    let socket = Socket { fd };
    match socket.send_hello(0) {
        // A service that refuses this process has said why, and hung up already: read on.
        Ok(()) | Err(SocketError::Closed) => {}
        Err(error) => return Err(error.into()),
    }
    let not_mccs = || HandshakeError::NotMccs(path.to_owned());
    let hello = socket.recv_hello()?.ok_or_else(not_mccs)?;
    if hello.magic != MAGIC {
        return Err(not_mccs());
    }
    if hello.version != VERSION {
        return Err(HandshakeError::Version { theirs: hello.version, ours: VERSION });
    }
    Ok(socket)
}

impl Socket {
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
        let mut buffer = [0; MESSAGE_BYTES_MAX];
        let Some((length, _)) = self.recv_bytes(&mut buffer)? else { return Ok(None) };
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

    fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &rights[..0] } else { &rights[..] };
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        match sendmsg::<()>(self.fd.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None) {
            Ok(_) => Ok(()),
            Err(Errno::EAGAIN) => Err(SocketError::WouldBlock),
            Err(Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN) => Err(SocketError::Closed),
            Err(errno) => Err(SocketError::Os(errno)),
        }
    }

    /// Takes a message and the descriptors that came with it. `None` where a non-blocking socket has none.
    ///
    /// # Errors
    /// [`SocketError`]; a malformed message's descriptors are closed.
    pub fn recv<M: DeserializeOwned>(&self) -> Result<Option<(M, Vec<OwnedFd>)>, SocketError> {
        let mut buffer = [0; MESSAGE_BYTES_MAX];
        let Some((length, fds)) = self.recv_bytes(&mut buffer)? else { return Ok(None) };
        decode(&buffer[..length]).map(|message| Some((message, fds)))
    }

    fn recv_bytes(&self, buffer: &mut [u8]) -> Result<Option<(usize, Vec<OwnedFd>)>, SocketError> {
        match self.recv_once(buffer) {
            // A peer that hung up without having read everything is reported once, before what it sent can be read.
            Err(SocketError::Closed) => self.recv_once(buffer),
            received => received,
        }
    }

    fn recv_once(&self, buffer: &mut [u8]) -> Result<Option<(usize, Vec<OwnedFd>)>, SocketError> {
        let mut control = cmsg_space!([RawFd; MESSAGE_FDS_MAX]);
        let mut slices = [IoSliceMut::new(buffer)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let received = match recvmsg::<()>(self.fd.as_raw_fd(), &mut slices, Some(&mut control), flags) {
            Ok(received) => received,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            Err(Errno::ECONNRESET) => return Err(SocketError::Closed),
            Err(errno) => return Err(SocketError::Os(errno)),
        };
        let mut fds = Vec::new();
        for message in received.cmsgs().map_err(|_| SocketError::Malformed("too many descriptors".into()))? {
            if let ControlMessageOwned::ScmRights(raw) = message {
                // SAFETY: the kernel has just given us these descriptors.
                fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        if received.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
            return Err(SocketError::Malformed(format!(
                "over {MESSAGE_BYTES_MAX} bytes or {MESSAGE_FDS_MAX} descriptors"
            )));
        }
        // A sequential-packet socket reads zero bytes at the end; nobody sends empty messages.
        if received.bytes == 0 { Err(SocketError::Closed) } else { Ok(Some((received.bytes, fds))) }
    }

    /// Waits until a message can be taken or the other side has gone. Returns whether either is so.
    #[must_use]
    pub fn wait_readable(&self, timeout: Duration) -> bool {
        let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
        poll(&mut [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)], timeout).is_ok_and(|ready| ready > 0)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Request, RequestEnvelope};

    fn socket_path(test: &str) -> (PathBuf, impl Drop) {
        struct Remove(PathBuf);
        impl Drop for Remove {
            fn drop(&mut self) {
                let _ = fs::remove_dir_all(&self.0);
            }
        }
        let dir = std::env::temp_dir().join(format!("mccs-ipc-{}-{test}", std::process::id()));
        fs::create_dir_all(&dir).expect("directory");
        (dir.join("s.sock"), Remove(dir))
    }

    fn accept(listener: &Listener) -> (Socket, PeerCredentials) {
        loop {
            if let Some(accepted) = listener.accept().expect("accept") {
                return accepted;
            }
            let _ = poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
        }
    }

    #[test]
    fn messages_and_descriptors_pass_and_a_closed_end_is_seen() {
        let (path, _dir) = socket_path("pass");
        let listener = Listener::bind(&path).expect("bind");
        let client = std::thread::spawn(move || {
            let socket = connect(&path).expect("connect");
            let (fd, _mapping) = crate::shm::Mapping::create("x", 4096).expect("memfd");
            let request = RequestEnvelope { id: 9, request: Request::RegisterMemory { bytes: 4096 } };
            socket.send(&request, &[fd.as_fd()]).expect("send");
            assert!(!socket.is_closed());
            socket
        });
        let (socket, peer) = accept(&listener);
        assert_eq!(peer.pid, std::process::id() as i32);
        assert!(socket.wait_readable(Duration::from_secs(600)));
        assert_eq!(socket.recv_hello().expect("recv").expect("hello").magic, MAGIC);
        socket.send_hello(0).expect("hello");
        assert!(socket.wait_readable(Duration::from_secs(600)));
        let (envelope, fds) = socket.recv::<RequestEnvelope>().expect("recv").expect("message");
        assert_eq!((envelope.id, fds.len()), (9, 1));
        crate::shm::Mapping::map(fds[0].as_fd(), 4096).expect("map");
        drop(client.join().expect("client"));
        assert!(socket.is_closed());
        assert!(matches!(socket.recv::<RequestEnvelope>(), Err(SocketError::Closed)));
    }

    #[test]
    fn a_living_service_keeps_its_path_and_a_dead_ones_is_taken_over() {
        let (path, _dir) = socket_path("path");
        let listener = Listener::bind(&path).expect("bind");
        assert!(matches!(Listener::bind(&path), Err(HandshakeError::InUse(_))));
        drop(listener);
        assert!(!path.exists());
        // A service that was killed leaves its socket behind.
        let dead = new_socket(SockFlag::empty()).expect("socket");
        bind(dead.as_raw_fd(), &UnixAddr::new(&path).expect("address")).expect("bind");
        drop(dead);
        assert!(matches!(connect(&path), Err(HandshakeError::NobodyThere { .. })));
        drop(Listener::bind(&path).expect("taken over"));
        fs::write(&path, "precious").expect("write");
        assert!(matches!(Listener::bind(&path), Err(HandshakeError::NotSocket(_))));
        assert_eq!(fs::read_to_string(&path).expect("still there"), "precious");
    }

    #[test]
    fn garbage_is_malformed() {
        assert!(matches!(decode::<RequestEnvelope>(&[]), Err(SocketError::Malformed(_))));
        assert!(matches!(decode::<RequestEnvelope>(&[1, 200, 3]), Err(SocketError::Malformed(_))));
        let mut buffer = [0; 64];
        let length = postcard::to_slice(&RequestEnvelope { id: 1, request: Request::CreateStream }, &mut buffer)
            .expect("encodes")
            .len();
        assert!(decode::<RequestEnvelope>(&buffer[..length]).is_ok());
        assert!(matches!(decode::<RequestEnvelope>(&buffer[..=length]), Err(SocketError::Malformed(_))));
    }
}
