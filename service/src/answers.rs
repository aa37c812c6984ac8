//! What the kernel knows of whoever is at the other end of a TCP connection: whether it answers.
//!
//! A path that has died silently, and a host, look alike from here, and unlike a peer that is late: its kernel answers.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// What a peer's kernel has answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answers {
    /// It should have answered, and was asked again: something was sent a second time, or a second probe of its window.
    pub(crate) is_owed: bool,
    /// Something was sent that it has not acknowledged.
    pub(crate) is_under_way: bool,
    /// The round trip, as measured.
    pub(crate) round_trip: Duration,
    /// How long ago the last answer of any kind was.
    pub(crate) last: Duration,
}

/// What a connection's peer has answered; `None` if the kernel says nothing.
pub(crate) fn answers(socket: impl AsFd) -> Option<Answers> {
    let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` has `length` bytes, and all zeroes are a value of it; the kernel writes at most so many.
    let info = unsafe {
        let fd = socket.as_fd().as_raw_fd();
        let got = libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut length);
        if got != 0 {
            return None;
        }
        info.assume_init()
    };
    // A single probe may be on its way.
    let is_owed = info.tcpi_retransmits > 0 || info.tcpi_probes > 1;
    Some(Answers {
        is_owed,
        is_under_way: info.tcpi_unacked > 0,
        round_trip: Duration::from_micros(info.tcpi_rtt.into()),
        last: Duration::from_millis(info.tcpi_last_ack_recv.into()),
    })
}

/// Bytes that were written and that the peer's kernel has not acknowledged.
pub(crate) fn unacknowledged(socket: impl AsFd) -> Option<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one integer.
    let asked = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if asked == 0 { u64::try_from(bytes).ok() } else { None }
}
