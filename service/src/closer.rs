//! Descriptors that tenants have sent, and their sockets, are closed here.
//!
//! `close` waits for whatever a descriptor stands for: a socket that lingers, a file of a file system that the tenant runs
//! itself, gigabytes of memory of which nobody else has a reference. The tenant decides how long that takes, so no engine does
//! it. Each tenant has a thread of its own, which starts with the first descriptor: who sends what cannot be closed keeps up
//! nobody but itself.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// How long a descriptor may take to close before the others count that wait behind it.
const SLOW_AFTER: Duration = Duration::from_secs(5);
/// Descriptors that may wait behind a slow one: their number is what the service risks for each tenant.
const WAITING_MAX: usize = 64;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Closer {
    queue: OnceLock<Option<mpsc::Sender<OwnedFd>>>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Descriptors that are not closed yet, the one under way included.
    waiting: AtomicUsize,
    /// Since when the one under way is being closed.
    began: Mutex<Option<Instant>>,
}

impl Closer {
    /// Closes a descriptor, some time, on another thread.
    pub fn close_later(&self, fd: impl Into<OwnedFd>) {
        let queue = self.queue.get_or_init(|| start(Arc::clone(&self.state)).ok());
        self.state.waiting.fetch_add(1, Ordering::Relaxed);
        // Where the kernel refuses a thread there is nobody but the caller.
        match queue.as_ref().map(|queue| queue.send(fd.into())) {
            Some(Ok(())) => {}
            Some(Err(_)) | None => self.state.closed(),
        }
    }

    /// Whether so many wait for one that takes long that no more may be taken from this tenant.
    #[must_use]
    pub fn is_stuck(&self, now: Instant) -> bool {
        let began = || *self.state.began.lock().unwrap_or_else(PoisonError::into_inner);
        self.state.waiting.load(Ordering::Relaxed) > WAITING_MAX
            && began().is_some_and(|began| now.saturating_duration_since(began) > SLOW_AFTER)
    }
}

impl State {
    fn set_began(&self, began: Option<Instant>) {
        *self.began.lock().unwrap_or_else(PoisonError::into_inner) = began;
    }

    fn closed(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

fn start(state: Arc<State>) -> std::io::Result<mpsc::Sender<OwnedFd>> {
    let (sender, receiver) = mpsc::channel::<OwnedFd>();
    std::thread::Builder::new().name("mccs-closer".into()).spawn(move || {
        for fd in receiver {
            state.set_began(Some(Instant::now()));
            drop(fd);
            state.set_began(None);
            state.closed();
        }
    })?;
    Ok(sender)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use nix::sys::socket::{setsockopt, sockopt};

    use super::*;

    /// A reader that reads nothing, and a socket with data for it, whose `close` waits for that.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut writer = TcpStream::connect(listener.local_addr().expect("its address")).expect("connected");
        let (reader, _) = listener.accept().expect("accepted");
        writer.set_nonblocking(true).expect("set");
        while writer.write(&[0; 1 << 16]).is_ok() {}
        setsockopt(&writer, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 600 }).expect("set");
        (reader, writer)
    }

    #[test]
    fn what_is_handed_over_is_closed() {
        let closer = Closer::default();
        let (mut end, other_end) = UnixStream::pair().expect("pair");
        closer.close_later(other_end);
        assert_eq!(end.read(&mut [0]).expect("the end"), 0);
    }

    #[test]
    fn who_sends_what_lingers_is_stuck_once_enough_waits_behind_it_and_no_longer() {
        let closer = Closer::default();
        let (reader, lingers) = lingering();
        closer.close_later(lingers);
        let later = || Instant::now() + 2 * SLOW_AFTER;
        while closer.state.began.lock().unwrap().is_none() {
            std::thread::yield_now();
        }
        assert!(!closer.is_stuck(later()), "nothing waits behind it");
        let pairs: Vec<_> = (0..WAITING_MAX).map(|_| UnixStream::pair().expect("pair")).collect();
        let (mut ends, others): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        others.into_iter().for_each(|other| closer.close_later(other));
        assert!(!closer.is_stuck(Instant::now() - SLOW_AFTER), "it has just begun");
        assert!(closer.is_stuck(later()));
        // A reader that goes resets the connection, and nothing is left to wait for.
        drop(reader);
        ends.iter_mut().for_each(|end| assert_eq!(end.read(&mut [0]).expect("the end"), 0));
        assert!(!closer.is_stuck(later()));
    }
}
