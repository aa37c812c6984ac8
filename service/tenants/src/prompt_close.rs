//! `close` that waits for no peer: a lingering socket is given up after a millisecond.
//!
//! The last `close` of a socket with `SO_LINGER` waits until its peer has taken all data, which a tenant can make for ever. It waits
//! in the thread that closes, also where the socket lies unread in another one. The kernel ends that wait when the thread has a signal,
//! so a timer sends it one (`docs/decisions/111-nobody-else-waits-for-a-hostile-connection.md`).

use std::os::fd::OwnedFd;
use std::sync::Once;
use std::time::Duration;

use nix::libc::c_int;
use nix::sys::signal::{SaFlags, SigAction, SigEvent, SigHandler, SigSet, SigevNotify, Signal, sigaction};
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::ClockId;
use nix::unistd::gettid;

/// Ignored where nothing handles it, so that one that comes late harms nothing.
const SIGNAL: Signal = Signal::SIGURG;
/// How long a peer has: what it takes at once arrives in less.
const LINGERS_FOR: Duration = Duration::from_millis(1);

extern "C" fn nothing(_signal: c_int) {}

/// Sends this thread signals from then on, until it is dropped; `None` where the kernel refuses.
fn interrupted() -> Option<Timer> {
    static HANDLED: Once = Once::new();
    HANDLED.call_once(|| {
        // A signal that is ignored ends no wait. An interrupted call besides goes on.
        let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::SA_RESTART, SigSet::empty());
        // SAFETY: the handler does nothing.
        let _ = unsafe { sigaction(SIGNAL, &action) };
    });
    SigSet::from(SIGNAL).thread_unblock().ok()?;
    let this_thread = SigevNotify::SigevThreadId { signal: SIGNAL, thread_id: gettid().as_raw(), si_value: 0 };
    let mut timer = Timer::new(ClockId::CLOCK_MONOTONIC, SigEvent::new(this_thread)).ok()?;
    // Again and again: the first may come before the wait has begun.
    timer.set(Expiration::Interval(LINGERS_FOR.into()), TimerSetTimeFlags::empty()).ok()?;
    Some(timer)
}

/// Closes a descriptor. A socket that lingers, or sockets that lie unread in it, take a millisecond together; data that their peers have
/// not taken by then are left to the kernel. Other work of `close` takes as long as it takes: freed memory, flushed files.
pub fn close_promptly(fd: OwnedFd) {
    let timer = interrupted();
    drop(fd);
    drop(timer);
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{IoSlice, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixDatagram;

    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg, setsockopt, sockopt};

    use super::*;

    /// A reader that reads nothing, and a socket with data for it, whose `close` waits for that.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        // Room of its own size, which does not grow: otherwise all that was written might find room there in the end.
        setsockopt(&listener, sockopt::RcvBuf, &4096).expect("set");
        let mut writer = TcpStream::connect(listener.local_addr().expect("its address")).expect("connected");
        setsockopt(&writer, sockopt::SndBuf, &(1 << 17)).expect("set");
        let (reader, _) = listener.accept().expect("accepted");
        writer.set_nonblocking(true).expect("set");
        while writer.write(&[0; 1 << 16]).is_ok() {}
        setsockopt(&writer, sockopt::Linger, &nix::libc::linger { l_onoff: 1, l_linger: 1 << 20 }).expect("set");
        (reader, writer)
    }

    /// Twelve days otherwise: that this returns is the test.
    #[test]
    fn what_lingers_is_closed_also_where_it_lies_unread() {
        let (_reader, writer) = lingering();
        close_promptly(writer.into());
        let (near, far) = UnixDatagram::pair().expect("a pair");
        let (_readers, writers): (Vec<_>, Vec<_>) = (0..8).map(|_| lingering()).unzip();
        let raw: Vec<_> = writers.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        sendmsg::<()>(near.as_raw_fd(), &[IoSlice::new(b"x")], &rights, MsgFlags::empty(), None).expect("sent");
        drop(writers);
        close_promptly(far.into());
    }
}
