//! Session set-up on the Unix socket: listen, connect, peer credentials (`SO_PEERCRED`), and the
//! first messages with versions.
//!
//! `SO_PEERCRED` tells who connects, which the peer cannot forge. A service owns its path: it holds a lock beside it
//! while it lives, replaces a dead service's socket, and never removes what it did not make.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::sockopt::{AcceptConn, PeerCredentials as PeerCredentialsOption, SendTimeout};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, getsockname, getsockopt, listen, setsockopt,
    socket,
};
use nix::sys::time::TimeVal;

use crate::protocol::{MAGIC, VERSION};
pub use crate::socket::{Socket, SocketError, decode, has_ended, process};

/// Connections that may wait to be accepted.
pub const BACKLOG: i32 = 256;

/// How long a service may take to accept a connection and say hello: it does both between two polls.
const HELLO_WITHIN: Duration = Duration::from_secs(10);

/// Reason for a client whose connection has ended without one.
pub const HUNG_UP: &str =
    "it has ended, or has hung up without a reason; its log says why (journalctl -u mccs-service)";

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
    #[error("no mccs-service listens on {path}: is it running, and is this its socket? ({errno})")]
    NobodyThere { path: PathBuf, errno: Errno },
    /// Somebody may listen, whom this user may not reach.
    #[error("user {uid} may not use {path}: only those may whom the operator lets ({errno})")]
    NotAllowed { path: PathBuf, uid: u32, errno: Errno },
    /// Somebody else's file stands in the way.
    #[error(
        "{path} belongs to user {uid}, who could keep a service from starting: remove it, or choose another runtime_dir"
    )]
    ForeignLock { path: PathBuf, uid: u32 },
    /// Somebody listens, and does nothing else.
    #[error("the mccs-service on {0} has not answered for {secs} s: it is stopped or overloaded", secs = HELLO_WITHIN.as_secs())]
    Silent(PathBuf),
    /// Somebody listened, and has ended before they have said who they are.
    #[error("the mccs-service on {0} has not answered: {HUNG_UP}. Try again")]
    HungUp(PathBuf),
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

impl HandshakeError {
    /// The kernel's error, if it is one.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::NobodyThere { errno, .. } | Self::NotAllowed { errno, .. } | Self::Os { errno, .. } => Some(*errno),
            Self::Socket(error) => error.errno(),
            _ => None,
        }
    }
}

/// The peer's credentials, as the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process.
    pub pid: i32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl PeerCredentials {
    /// The peer that has connected.
    ///
    /// # Errors
    /// The kernel's refusal: it is no connected Unix socket.
    pub fn of(socket: &impl AsFd) -> Result<Self, SocketError> {
        let credentials = getsockopt(socket, PeerCredentialsOption).map_err(SocketError::Os)?;
        Ok(PeerCredentials { pid: credentials.pid(), uid: credentials.uid(), gid: credentials.gid() })
    }
}

/// A listening socket; non-blocking. Its path is removed on drop.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
    inode: u64,
    /// Held while this service lives, so that two that start at once cannot both find the path free.
    lock: Lock,
}

/// The lock beside a socket.
#[derive(Debug)]
enum Lock {
    Own(Flock<fs::File>),
    /// The lock of the service before this one: it is held as long as any copy of the descriptor.
    Received(OwnedFd),
}

impl Listener {
    /// Listens on `path`. A socket that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// Another service is alive, the path is something else, or the kernel refuses.
    pub fn bind(path: &Path) -> Result<Self, HandshakeError> {
        let os = |what| move |errno| HandshakeError::Os { what, path: path.to_owned(), errno };
        let io = |what| move |error: std::io::Error| os(what)(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw));
        let lock = lock(path)?;
        if let Ok(metadata) = fs::symlink_metadata(path) {
            if !metadata.file_type().is_socket() {
                return Err(HandshakeError::NotSocket(path.to_owned()));
            }
            if is_listened_on(path)? {
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
        Ok(Listener { fd, path: path.to_owned(), inode, lock: Lock::Own(lock) })
    }

    /// Goes on with what another service has listened on `path` with: the descriptors of [`Listener::descriptors`].
    ///
    /// # Errors
    /// The descriptor is no socket that listens there.
    pub fn receive(path: &Path, [fd, lock]: [OwnedFd; 2]) -> Result<Self, HandshakeError> {
        let os = |what| move |errno| HandshakeError::Os { what, path: path.to_owned(), errno };
        let address: UnixAddr = getsockname(fd.as_raw_fd()).map_err(os("look at the socket of"))?;
        if address.path() != Some(path) || !getsockopt(&fd, AcceptConn).map_err(os("look at the socket of"))? {
            return Err(os("listen with a descriptor that was received for")(Errno::EINVAL));
        }
        let inode = fs::symlink_metadata(path).map_or(0, |metadata| metadata.ino());
        Ok(Listener { fd, path: path.to_owned(), inode, lock: Lock::Received(lock) })
    }

    /// Descriptors with which another service can go on: the socket, and the lock beside it.
    #[must_use]
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        let lock = match &self.lock {
            Lock::Own(lock) => lock.as_fd(),
            Lock::Received(lock) => lock.as_fd(),
        };
        [self.fd.as_fd(), lock]
    }

    /// Whether the path still leads here: nobody can connect otherwise.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.ino() == self.inode)
    }

    /// The path that it listens on.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
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
        let peer = PeerCredentials::of(&fd)?;
        Ok(Some((Socket::from_fd(fd), peer)))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Somebody may have put another file there; it is not ours then. Nor is one that was received while the service that listened before is
        // in charge.
        let is_lent = matches!(self.lock, Lock::Received(_)) && crate::loan::is_on();
        if !is_lent && self.is_in_place() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether somebody listens on a socket that exists.
fn is_listened_on(path: &Path) -> Result<bool, HandshakeError> {
    match raw_connect(path, SockFlag::SOCK_NONBLOCK) {
        Err(Errno::ECONNREFUSED | Errno::ENOENT) => Ok(false),
        // With as many connections waiting as may, or on a socket of another type.
        Ok(_) | Err(Errno::EAGAIN | Errno::EPROTOTYPE) => Ok(true),
        Err(errno) => Err(HandshakeError::Os { what: "find out who listens on", path: path.to_owned(), errno }),
    }
}

/// Locks the file beside a socket, which nobody else may open: whoever has it open may hold its lock for ever.
fn lock(path: &Path) -> Result<Flock<fs::File>, HandshakeError> {
    let os = |what| move |errno| HandshakeError::Os { what, path: path.to_owned(), errno };
    let io = |what| move |error: std::io::Error| os(what)(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw));
    let lock_path = path.with_added_extension("lock");
    loop {
        let mut options = fs::File::options();
        options.create(true).truncate(false).write(true).mode(0o600).custom_flags(nix::libc::O_NOFOLLOW);
        let file = options.open(&lock_path).map_err(io("make the lock of"))?;
        let metadata = file.metadata().map_err(io("look at the lock of"))?;
        if metadata.uid() != nix::unistd::geteuid().as_raw() {
            return Err(HandshakeError::ForeignLock { path: lock_path, uid: metadata.uid() });
        }
        let was_open_to_others = metadata.mode() & 0o077 != 0;
        let locked = Flock::lock(file, FlockArg::LockExclusiveNonblock);
        let is_taken = match &locked {
            Ok(_) => false,
            Err((_, Errno::EWOULDBLOCK)) => true,
            Err((_, errno)) => return Err(os("lock")(*errno)),
        };
        // A file that others can open may be held by anybody; a service listens.
        if is_taken && (!was_open_to_others || is_listened_on(path)?) {
            return Err(HandshakeError::InUse(path.to_owned()));
        }
        let is_in_place = fs::symlink_metadata(&lock_path).is_ok_and(|now| now.ino() == metadata.ino());
        match locked {
            Ok(locked) if is_in_place && !was_open_to_others => return Ok(locked),
            // Another service that started has replaced it, or this one does.
            _ if is_in_place => fs::remove_file(&lock_path).map_err(io("replace the lock of"))?,
            _ => {}
        }
    }
}

fn new_socket(flags: SockFlag) -> Result<OwnedFd, Errno> {
    socket(AddressFamily::Unix, SockType::SeqPacket, flags | SockFlag::SOCK_CLOEXEC, None)
}

fn raw_connect(path: &Path, flags: SockFlag) -> Result<OwnedFd, Errno> {
    let fd = new_socket(flags)?;
    // How long a blocking `connect` waits for room in the listener's queue.
    setsockopt(&fd, SendTimeout, &TimeVal::new(HELLO_WITHIN.as_secs() as _, 0))?;
    nix::sys::socket::connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd)
}

/// Why nobody could be connected to.
fn unconnected(path: &Path, errno: Errno) -> HandshakeError {
    match errno {
        Errno::EAGAIN => HandshakeError::Silent(path.to_owned()),
        Errno::EACCES | Errno::EPERM => {
            let uid = nix::unistd::geteuid().as_raw();
            HandshakeError::NotAllowed { path: path.to_owned(), uid, errno }
        }
        errno => HandshakeError::NobodyThere { path: path.to_owned(), errno },
    }
}

/// Whether somebody listens, without a word to them: the service makes no session of that.
///
/// # Errors
/// [`HandshakeError::NobodyThere`], or why this user cannot know.
pub fn find(path: &Path) -> Result<(), HandshakeError> {
    raw_connect(path, SockFlag::empty()).map(drop).map_err(|errno| unconnected(path, errno))
}

/// Connects to a service and exchanges [`Hello`](crate::protocol::Hello)s. The socket is blocking. A service that
/// refuses the session says hello too; its reason is the message that follows.
///
/// # Errors
/// Nobody listens or answers, or the other side is of another version or kind.
pub fn connect(path: &Path) -> Result<Socket, HandshakeError> {
    let fd = raw_connect(path, SockFlag::empty()).map_err(|errno| unconnected(path, errno))?;
    let socket = Socket::from_fd(fd);
    match socket.send_hello(0) {
        // One that has refused and gone already has left its reason for us to read.
        Ok(()) | Err(SocketError::Closed) => {}
        Err(error) => return Err(error.into()),
    }
    if !socket.wait_readable(HELLO_WITHIN) {
        return Err(HandshakeError::Silent(path.to_owned()));
    }
    let not_mccs = || HandshakeError::NotMccs(path.to_owned());
    let hello = match socket.recv_hello() {
        Ok(Some(hello)) if hello.magic == MAGIC => hello,
        Ok(_) | Err(SocketError::Malformed(_)) => return Err(not_mccs()),
        Err(SocketError::Closed) => return Err(HandshakeError::HungUp(path.to_owned())),
        Err(error) => return Err(error.into()),
    };
    if hello.version != VERSION {
        return Err(HandshakeError::Version { theirs: hello.version, ours: VERSION });
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;
    use crate::protocol::{Hello, Request, RequestEnvelope};

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
        assert!(matches!(find(&path), Err(HandshakeError::NobodyThere { .. })));
        drop(Listener::bind(&path).expect("taken over"));
        // A living service of another kind keeps its path too.
        let stream = std::os::unix::net::UnixListener::bind(&path).expect("bind");
        assert!(matches!(Listener::bind(&path), Err(HandshakeError::InUse(_))));
        drop(stream);
        fs::remove_file(&path).expect("remove");
        fs::write(&path, "precious").expect("write");
        assert!(matches!(Listener::bind(&path), Err(HandshakeError::NotSocket(_))));
        assert_eq!(fs::read_to_string(&path).expect("still there"), "precious");
    }

    #[test]
    fn a_lock_that_others_could_open_is_replaced_also_while_they_hold_it() {
        use std::os::unix::fs::PermissionsExt;
        let (path, _dir) = socket_path("lock");
        let lock_path = path.with_added_extension("lock");
        fs::write(&lock_path, "").expect("a lock file");
        fs::set_permissions(&lock_path, fs::Permissions::from_mode(0o644)).expect("set");
        let others = fs::File::open(&lock_path).expect("open to all");
        let held = Flock::lock(others, FlockArg::LockExclusiveNonblock).expect("held by another");
        let listener = Listener::bind(&path).expect("nobody listens");
        assert_eq!(fs::metadata(&lock_path).expect("there").mode() & 0o777, 0o600);
        assert!(listener.is_in_place());
        assert!(matches!(Listener::bind(&path), Err(HandshakeError::InUse(_))), "the new one is locked");
        drop((listener, held));
        drop(Listener::bind(&path).expect("free again"));
        // A link leads to somebody else's file.
        fs::remove_file(&lock_path).expect("remove");
        std::os::unix::fs::symlink("/dev/null", &lock_path).expect("a link");
        assert!(Listener::bind(&path).is_err());
    }

    #[test]
    fn a_socket_that_has_been_removed_is_noticed() {
        let (path, _dir) = socket_path("gone");
        let listener = Listener::bind(&path).expect("bind");
        fs::remove_file(&path).expect("remove");
        assert!(!listener.is_in_place());
    }

    #[test]
    fn a_listener_leaves_alone_what_others_put_in_its_place() {
        let (path, _dir) = socket_path("place");
        let listener = Listener::bind(&path).expect("bind");
        fs::rename(&path, path.with_extension("old")).expect("rename");
        fs::write(&path, "precious").expect("write");
        drop(listener);
        assert_eq!(fs::read_to_string(&path).expect("still there"), "precious");
    }

    /// The message to a tenant of a service that answers its connection with `answer` and closes at once.
    fn told(test: &str, answer: impl FnOnce(&Socket) + Send + 'static) -> Result<Socket, HandshakeError> {
        let (path, _dir) = socket_path(test);
        let listener = Listener::bind(&path).expect("bind");
        let service = std::thread::spawn(move || answer(&accept(&listener).0));
        let told = connect(&path);
        service.join().expect("service");
        told
    }

    #[test]
    fn another_version_is_named_and_another_program_recognised() {
        let hello = |magic, version| Hello { magic, version, status: 0 };
        let newer = hello(MAGIC, VERSION + 1);
        let error = told("version", move |socket| socket.send_bytes(bytemuck::bytes_of(&newer), &[]).expect("send"));
        let error = error.expect_err("refused").to_string();
        assert!(error.contains(&format!("version {}", VERSION + 1)), "{error}");
        assert!(error.contains(&format!("this side {VERSION}")), "{error}");
        let other = hello(*b"whatever", VERSION);
        let error = told("magic", move |socket| socket.send_bytes(bytemuck::bytes_of(&other), &[]).expect("send"));
        assert!(matches!(error, Err(HandshakeError::NotMccs(_))));
        let error = told("noise", |socket| socket.send_bytes(b"220 ready", &[]).expect("send"));
        assert!(matches!(error, Err(HandshakeError::NotMccs(_))));
        let error = told("gone", |_| {});
        let error = error.expect_err("it has gone").to_string();
        assert!(error.contains("gone/s.sock") && error.contains("its log says why"), "{error}");
    }

    #[test]
    fn a_refused_tenant_hears_why() {
        let reason = RequestEnvelope { id: 0, request: Request::CreateStream };
        let told = told("refusal", {
            let reason = reason.clone();
            move |socket| socket.send_hello(5).and_then(|()| socket.send(&reason, &[])).expect("send")
        });
        let (heard, _) = told.expect("hello").recv::<RequestEnvelope>().expect("recv").expect("message");
        assert_eq!(heard, reason);
    }
}
