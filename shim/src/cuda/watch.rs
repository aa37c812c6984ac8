//! What lets streams go on once the service has gone, where the program asks this library for nothing: it may do no more than wait for its
//! stream.
//!
//! A client that has joined with a GPU has a thread, which waits for the other end of the session's socket to close and is of no use before. Then it
//! lets through what waits, again and again as long as there is any: the driver ends the service's own streams a little later than the kernel
//! closes its sockets, and they may write the same words until then. That the communicator has ended its calls find out as always
//! ([`Requests::check_alive`](crate::requests::Requests::check_alive)).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use mccs_ipc::direct::DirectPage;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

use crate::Error;
use crate::client::locked;
use crate::requests::LIVENESS_EVERY;

/// Words that streams and kernels wait for, and that nobody else writes once the service has gone.
pub(crate) trait Awaited: Send + Sync {
    /// Lets everybody through, of this communicator, which is of no use any more. Takes no lock: who holds it may wait for a stream.
    fn let_through(&self);
}

impl Awaited for DirectPage {
    fn let_through(&self) {
        self.abort();
        self.release_all();
    }
}

/// What a client has to let through.
#[derive(Default)]
pub(crate) struct Watch {
    list: Arc<Mutex<List>>,
    watched: Mutex<Option<Watched>>,
}

#[derive(Default)]
struct List {
    awaited: Vec<Weak<dyn Awaited>>,
    has_thread: bool,
}

/// The session's socket. To shut it down ends the session, and wakes the thread.
struct Watched {
    socket: Arc<OwnedFd>,
    /// A process that was forked has the socket, but neither thread nor session.
    process: u32,
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
        *locked(&self.watched) = Some(Watched { socket, process: std::process::id() });
        Ok(())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // The other end may have done so.
            let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
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
        // What it was is given back before the client goes.
        assert_eq!(Arc::try_unwrap(awaited).ok().expect("nobody else's").0.into_inner(), 0);
        drop(watch);
        let mut closed = [PollFd::new(other.as_fd(), PollFlags::empty())];
        poll(&mut closed, PollTimeout::NONE).expect("its end");
        wait_for_end(&list);
    }
}
