//! Thread that closes tenants' descriptors and sockets, which may block.
//!
//! `close` waits for whatever a descriptor stands for: a file of a file system that the tenant runs itself, gigabytes of memory
//! of which nobody else has a reference. The tenant decides how long that takes, so no engine does it. Each tenant has a thread of
//! its own, which starts with the first descriptor: who sends what cannot be closed keeps up nobody but itself. Sockets that
//! linger are not waited for ([`close_promptly`]).
//!
//! Connections are closed in the caller's thread where as many descriptors wait as may. Closing one waits for nothing but what
//! lingers in it: files that lie there unread are let go, and not flushed.
//!
//! A socket with answers that bring descriptors stays open until the tenant has taken them, or has gone: as long as they are on
//! their way they count for the service's user, and are charged to the tenant.

use std::os::fd::OwnedFd;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use mccs_ipc::handshake::Socket;

use crate::prompt_close::close_promptly;

/// Descriptors of which more wait only behind what takes long to close.
const WAITING_MANY: usize = 64;
/// For so long at most.
const SLOW_AFTER: Duration = Duration::from_secs(5);
/// Descriptors that may wait at all: what the service risks for each tenant.
const WAITING_MAX: usize = 1024;

/// How soon sockets are looked at whose answers have not been taken: most tenants take them at once, or go. Each look that changes nothing
/// doubles it,
const TAKEN_LOOK: Duration = Duration::from_millis(1);
/// and so long is the longest.
const TAKEN_LOOK_MAX: Duration = Duration::from_millis(100);

/// A descriptor to be closed.
enum Closing<H> {
    Now(OwnedFd),
    /// Once the tenant has taken what was sent.
    WhenTaken(Socket, Vec<H>),
}

/// See the module's documentation. `H` is what is held until a tenant has taken what it was sent.
#[derive(Debug)]
pub struct FdCloser<H> {
    queue: OnceLock<Option<mpsc::Sender<Closing<H>>>>,
    backlog: Arc<Mutex<Backlog>>,
    /// How its thread closes a descriptor.
    close: fn(OwnedFd),
}

#[derive(Debug, Default)]
struct Backlog {
    /// Descriptors that are not closed yet, the one under way included.
    waiting: usize,
    /// Since when they are many.
    many_since: Option<Instant>,
}

impl<H> Default for FdCloser<H> {
    fn default() -> Self {
        FdCloser { queue: OnceLock::new(), backlog: Arc::default(), close: close_promptly }
    }
}

impl<H: Send + 'static> FdCloser<H> {
    /// One whose thread closes descriptors so.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn closing(close: fn(OwnedFd)) -> Self {
        FdCloser { close, ..Self::default() }
    }

    fn queue(&self) -> Option<&mpsc::Sender<Closing<H>>> {
        self.queue.get_or_init(|| start(Arc::clone(&self.backlog), self.close).ok()).as_ref()
    }

    /// Closes a descriptor, some time, on another thread.
    pub fn close_later(&self, fd: impl Into<OwnedFd>) {
        let queue = self.queue();
        let mut backlog = lock(&self.backlog);
        backlog.waiting += 1;
        if backlog.waiting > WAITING_MANY {
            backlog.many_since.get_or_insert_with(Instant::now);
        }
        drop(backlog);
        // If the kernel refuses a thread there is nobody but the caller.
        match queue.map(|queue| queue.send(Closing::Now(fd.into()))) {
            Some(Ok(())) => {}
            Some(Err(_)) | None => lock(&self.backlog).closed(),
        }
    }

    /// Closes a connection: on another thread, or here where as many descriptors wait as may. Takes a millisecond at most.
    pub fn close_connection(&self, socket: Socket) {
        if self.is_full() { close_promptly(socket.into()) } else { self.close_later(socket) }
    }

    /// Ends a connection, and closes its socket when the tenant has taken the descriptors that it was sent. `sent` is charged
    /// until then.
    pub fn close_when_taken(&self, socket: Socket, sent: Vec<H>) {
        if sent.is_empty() || socket.is_taken() {
            return self.close_connection(socket);
        }
        socket.shut_down();
        // Without a thread it is closed here, and the charges return too early.
        let _ = self.queue().map(|queue| queue.send(Closing::WhenTaken(socket, sent)));
    }

    /// Whether many have waited for so long that no more may be taken from this tenant.
    #[must_use]
    pub fn is_stuck(&self, now: Instant) -> bool {
        let many_since = lock(&self.backlog).many_since;
        many_since.is_some_and(|since| now.saturating_duration_since(since) > SLOW_AFTER)
    }

    /// Whether as many wait as the service can bear: no more of them are received.
    #[must_use]
    pub fn is_full(&self) -> bool {
        lock(&self.backlog).waiting >= WAITING_MAX
    }
}

impl Backlog {
    fn closed(&mut self) {
        self.waiting -= 1;
        if self.waiting <= WAITING_MANY {
            self.many_since = None;
        }
    }
}

fn lock(backlog: &Mutex<Backlog>) -> MutexGuard<'_, Backlog> {
    backlog.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start<H: Send + 'static>(
    backlog: Arc<Mutex<Backlog>>,
    close: fn(OwnedFd),
) -> std::io::Result<mpsc::Sender<Closing<H>>> {
    let (sender, receiver) = mpsc::channel::<Closing<H>>();
    std::thread::Builder::new().name("mccs-closer".into()).spawn(move || {
        let mut untaken: Vec<(Socket, Vec<H>)> = Vec::new();
        let mut look = TAKEN_LOOK;
        loop {
            let next = if untaken.is_empty() {
                receiver.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                receiver.recv_timeout(look)
            };
            match next {
                Ok(Closing::Now(fd)) => {
                    close(fd);
                    lock(&backlog).closed();
                }
                Ok(Closing::WhenTaken(socket, sent)) => {
                    untaken.push((socket, sent));
                    look = TAKEN_LOOK;
                }
                Err(RecvTimeoutError::Timeout) => look = (2 * look).min(TAKEN_LOOK_MAX),
                Err(RecvTimeoutError::Disconnected) => break,
            }
            for (socket, _sent) in untaken.extract_if(.., |(socket, _)| socket.is_taken()) {
                close(socket.into());
            }
        }
    })?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use nix::sys::socket::recv;

    use super::*;
    use mccs_ipc::handshake::Listener;
    use mccs_net::testing::raise_descriptor_limit;

    use crate::testing::{connect, held_back, shut_gate};

    #[test]
    fn what_is_handed_over_is_closed() {
        let closer = FdCloser::<()>::default();
        let (mut end, other_end) = UnixStream::pair().expect("pair");
        closer.close_later(other_end);
        assert_eq!(end.read(&mut [0]).expect("the end"), 0);
    }

    #[test]
    fn who_sends_what_does_not_close_is_stuck_once_enough_waits_behind_it_and_no_longer() {
        // As other tests of this process do, at the same time: never to less than one of them has raised it to.
        raise_descriptor_limit();
        let (closer, gate) = (held_back::<()>(), shut_gate());
        let one = || nix::unistd::pipe().expect("a pipe").0;
        closer.close_later(one());
        let later = || Instant::now() + 2 * SLOW_AFTER;
        assert!(!closer.is_stuck(later()), "nothing waits behind it");
        let pairs: Vec<_> = (0..WAITING_MANY).map(|_| UnixStream::pair().expect("pair")).collect();
        let (mut ends, others): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        others.into_iter().for_each(|other| closer.close_later(other));
        assert!(!closer.is_stuck(Instant::now() - SLOW_AFTER), "it has just begun");
        assert!(closer.is_stuck(later()) && !closer.is_full());
        // A pipe's other end is not needed: each is one descriptor more, and there may be only so many, however soon they come.
        (0..WAITING_MAX).for_each(|_| closer.close_later(one()));
        assert!(closer.is_full() && !closer.is_stuck(Instant::now() - SLOW_AFTER));
        // A connection waits for none of them.
        let directory = tempfile::tempdir().expect("a directory");
        let listener = Listener::bind(&directory.path().join("s")).expect("bound");
        let peer = connect(listener.path());
        let (accepted, _) = listener.accept().expect("accepted").expect("it is there");
        closer.close_connection(accepted);
        assert_eq!(recv(peer.as_raw_fd(), &mut [0], nix::sys::socket::MsgFlags::empty()), Ok(0));
        drop(gate);
        ends.iter_mut().for_each(|end| assert_eq!(end.read(&mut [0]).expect("the end"), 0));
        while lock(&closer.backlog).waiting > 0 {
            std::thread::yield_now();
        }
        assert!(!closer.is_stuck(later()));
    }
}
