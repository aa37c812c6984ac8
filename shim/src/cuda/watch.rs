//! Releases waiting GPU streams when the service dies: a thread watches the session's socket. The
//! program may do no more than wait for its stream.
//!
//! A client that has joined with a GPU has a thread, which waits for the other end of the session's socket to close and is of no use
//! before. Then it lets through what waits, again and again as long as there is any. The driver ends the service's own streams a little
//! later than the kernel closes its sockets, and they may write the same words until then. A service that has ended the session only is
//! still there, and may be copying between other ranks' buffers. Their awaited words, too, are let through by it, or by the thread once the
//! service has ended as well. That the communicator has ended its calls find out as always
//! ([`Requests::check_alive`](crate::requests::Requests::check_alive)).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use mccs_ipc::handshake::has_ended;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

use crate::Error;
use crate::client::locked;
use crate::requests::LIVENESS_EVERY;

/// Gone objects when the session has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    /// The session, and perhaps nothing else.
    Session,
    /// The service, or so it must seem: the kernel is too old to tell.
    Service,
}

/// Words that streams and kernels wait for, and that nobody else writes once the service has gone.
pub(crate) trait Awaited: Send + Sync {
    /// Lets everybody through, of this communicator, which is of no use any more: whom nothing else that is still there lets through. Takes
    /// no lock that somebody holds who waits for a stream.
    fn let_through(&self, gone: Gone);
}

/// Words that a client has to let through.
#[derive(Default)]
pub(crate) struct Watch {
    list: Arc<Mutex<List>>,
    /// The service's, where the kernel has descriptors of them.
    process: Option<Arc<OwnedFd>>,
    /// The session's, as the thread has it, and the process that has the thread.
    socket: Mutex<Option<(Arc<OwnedFd>, u32)>>,
}

#[derive(Default)]
struct List {
    awaited: Vec<Weak<dyn Awaited>>,
    has_thread: bool,
}

impl Watch {
    pub(crate) fn new(process: Option<OwnedFd>) -> Self {
        Watch { list: Arc::default(), process: process.map(Arc::new), socket: Mutex::default() }
    }

    /// Has something let through once the other end of the session's socket has closed.
    pub(crate) fn add(&self, socket: BorrowedFd<'_>, awaited: Weak<dyn Awaited>) -> Result<(), Error> {
        let failed = |error: std::io::Error| Error::refused_by_system("cannot watch the service", error);
        let mut list = locked(&self.list);
        list.awaited.push(awaited);
        if list.has_thread {
            list.awaited.retain(|known| known.strong_count() > 0);
            return Ok(());
        }
        let socket = Arc::new(socket.try_clone_to_owned().map_err(failed)?);
        let (own, known, process) = (Arc::clone(&socket), Arc::clone(&self.list), self.process.clone());
        let thread = std::thread::Builder::new().name("mccs-watch".into());
        thread.spawn(move || watch(&own, process.as_deref(), &known)).map_err(failed)?;
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

/// The thread's work.
fn watch(socket: &OwnedFd, process: Option<&OwnedFd>, list: &Mutex<List>) {
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
        let is_there = process.is_some_and(|process| !has_ended(process.as_fd()));
        let gone = if is_there { Gone::Session } else { Gone::Service };
        there.iter().for_each(|awaited| awaited.let_through(gone));
        drop(there);
        std::thread::sleep(LIVENESS_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicU32, Ordering};

    use mccs_ipc::handshake::process;

    use super::*;

    /// How often it was let through, and how often the service had gone by then.
    #[derive(Default)]
    struct Counted(AtomicU32, AtomicU32);

    impl Awaited for Counted {
        fn let_through(&self, gone: Gone) {
            self.1.fetch_add(u32::from(gone == Gone::Service), Ordering::Relaxed);
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn wait_for(counter: &AtomicU32, times: u32) {
        while counter.load(Ordering::Relaxed) < times {
            std::thread::yield_now();
        }
    }

    impl Counted {
        fn wait_for(&self, times: u32) {
            wait_for(&self.0, times);
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
    fn a_service_that_has_ended_the_session_only_is_not_taken_for_one_that_has_gone() {
        let mut service = Command::new("cat").stdin(Stdio::piped()).spawn().expect("a process");
        let process = process(service.id());
        assert!(process.is_some(), "Linux 5.3");
        let (socket, other) = UnixStream::pair().expect("a pair");
        let watch = Watch::new(process);
        let awaited = added(&watch, &socket);
        drop(other);
        awaited.wait_for(3);
        assert_eq!(awaited.1.load(Ordering::Relaxed), 0, "the service is there");
        drop(service.stdin.take());
        wait_for(&awaited.1, 2);
        service.wait().expect("its end");
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
