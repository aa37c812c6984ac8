//! What lets streams go on once the service has gone, where the program asks this library for nothing: it may do no more than wait for its
//! stream.
//!
//! A client that has joined with a GPU has a thread, which waits for the other end of the session's socket to close and is of no use before. Then it
//! lets through what waits, again and again as long as there is any: the driver ends the service's own streams a little later than the kernel
//! closes its sockets, and they may write the same words until then. That the communicator has ended its calls find out as always
//! ([`Requests::check_alive`](crate::requests::Requests::check_alive)).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

use crate::Error;
use crate::client::locked;
use crate::requests::LIVENESS_EVERY;

/// Words that streams and kernels wait for, and that nobody else writes once the service has gone.
pub(crate) trait Awaited: Send + Sync {
    /// Lets everybody through, of this communicator, which is of no use any more. Takes no lock: who holds one may wait for a stream.
    fn let_through(&self);
}

/// What a client has to let through.
#[derive(Default)]
pub(crate) struct Watch {
    list: Arc<Mutex<List>>,
    /// The session's, as the thread has it, and the process that has the thread.
    socket: Mutex<Option<(Arc<OwnedFd>, u32)>>,
}

#[derive(Default)]
struct List {
    awaited: Vec<Weak<dyn Awaited>>,
    has_thread: bool,
}

impl Watch {
    /// Has something let through once the other end of the session's socket has closed.
    pub(crate) fn add(&self, socket: BorrowedFd<'_>, awaited: Weak<dyn Awaited>) -> Result<(), Error> {
        let failed = |error: std::io::Error| Error::System(format!("cannot watch the service: {error}"));
        let mut list = locked(&self.list);
        list.awaited.push(awaited);
        if list.has_thread {
            list.awaited.retain(|known| known.strong_count() > 0);
            return Ok(());
        }
        let socket = Arc::new(socket.try_clone_to_owned().map_err(failed)?);
        let (own, known) = (Arc::clone(&socket), Arc::clone(&self.list));
        let thread = std::thread::Builder::new().name("mccs-watch".into());
        thread.spawn(move || watch(&own, &known)).map_err(failed)?;
        list.has_thread = true;
        drop(list);
        *locked(&self.socket) = Some((socket, std::process::id()));
        Ok(())
    }
}

impl Drop for Watch {
    /// Ends the session, and the thread.
    fn drop(&mut self) {
        // A process that was forked has the socket, but neither the thread nor the session.
        if let Some((socket, process)) = locked(&self.socket).take()
            && process == std::process::id()
        {
            locked(&self.list).awaited.clear();
            // The other end may have done so.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
    }
}

/// What the thread does.
fn watch(socket: &OwnedFd, list: &Mutex<List>) {
    // Its end is told whatever is asked for.
    let mut closed = [PollFd::new(socket.as_fd(), PollFlags::empty())];
    while poll(&mut closed, PollTimeout::NONE) == Err(Errno::EINTR) {}
    loop {
        let mut known = locked(list);
        let there: Vec<_> = known.awaited.iter().filter_map(Weak::upgrade).collect();
        if there.is_empty() {
            known.has_thread = false;
            return;
        }
        drop(known);
        there.iter().for_each(|awaited| awaited.let_through());
        drop(there);
        std::thread::sleep(LIVENESS_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[derive(Default)]
    struct Counted(AtomicU32);

    impl Awaited for Counted {
        fn let_through(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Counted {
        fn wait_for(&self, times: u32) {
            while self.0.load(Ordering::Relaxed) < times {
                std::thread::yield_now();
            }
        }
    }

    /// Adds something, which the caller holds.
    fn added(watch: &Watch, socket: &UnixStream) -> Arc<Counted> {
        let awaited = Arc::new(Counted::default());
        let known: Weak<Counted> = Arc::downgrade(&awaited);
        watch.add(socket.as_fd(), known).expect("a thread");
        awaited
    }

    fn wait_for_end(list: &Weak<Mutex<List>>) {
        while list.strong_count() > 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_waits_is_let_through_again_and_again_when_the_other_end_closes() {
        let (socket, other) = UnixStream::pair().expect("a pair");
        let watch = Watch::default();
        let [first, second] = [(); 2].map(|()| added(&watch, &socket));
        assert_eq!(first.0.load(Ordering::Relaxed), 0);
        drop(other);
        [&first, &second].iter().for_each(|awaited| awaited.wait_for(2));
        // Those that come late, too, with the thread there or a new one.
        added(&watch, &socket).wait_for(1);
        drop((first, second));
        while locked(&watch.list).has_thread {
            std::thread::yield_now();
        }
        added(&watch, &socket).wait_for(1);
        let list = Arc::downgrade(&watch.list);
        drop(watch);
        wait_for_end(&list);
    }

    #[test]
    fn the_thread_ends_with_the_client_which_closes_the_session() {
        let (socket, other) = UnixStream::pair().expect("a pair");
        let watch = Watch::default();
        let awaited = added(&watch, &socket);
        let list = Arc::downgrade(&watch.list);
        drop(watch);
        let mut closed = [PollFd::new(other.as_fd(), PollFlags::empty())];
        poll(&mut closed, PollTimeout::NONE).expect("its end");
        wait_for_end(&list);
        assert_eq!(awaited.0.load(Ordering::Relaxed), 0, "the service is there");
    }
}
