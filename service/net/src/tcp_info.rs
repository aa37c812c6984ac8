//! `TCP_INFO`: whether a TCP peer answers, unacknowledged bytes, retransmissions and round-trip
//! time.
//!
//! A path that has died silently, and a host, look alike from here, and unlike a peer that is late: its kernel answers.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use mccs_model::path::WireStats;

/// A peer's kernel's answers, and debts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpInfo {
    /// It should have answered, and was asked again: something was sent a second time, or a second probe of its window.
    pub is_owed: bool,
    /// Something was sent that it has not acknowledged.
    pub is_under_way: bool,
    /// The round trip, as measured.
    pub round_trip: Duration,
    /// How long ago the last answer of any kind was.
    pub last_answer: Duration,
}

/// Answers of a connection's peer; `None` if the kernel says nothing.
#[must_use]
pub fn tcp_info(socket: impl AsFd) -> Option<TcpInfo> {
    let info = of_kernel(socket)?;
    // A single probe may be on its way.
    let is_owed = info.tcpi_retransmits > 0 || info.tcpi_probes > 1;
    Some(TcpInfo {
        is_owed,
        is_under_way: info.tcpi_unacked > 0,
        round_trip: Duration::from_micros(info.tcpi_rtt.into()),
        last_answer: Duration::from_millis(info.tcpi_last_ack_recv.into()),
    })
}

/// Statistics of a connection's packets since it began; `None` if the kernel says nothing.
#[must_use]
pub fn wire_stats(socket: impl AsFd) -> Option<WireStats> {
    let info = of_kernel(socket)?;
    Some(WireStats {
        segments: info.tcpi_data_segs_out.into(),
        retransmits: info.tcpi_total_retrans.into(),
        round_trip: Duration::from_micros(info.tcpi_rtt.into()),
    })
}

fn of_kernel(socket: impl AsFd) -> Option<libc::tcp_info> {
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
    Some(info)
}

/// Bytes that were written and that the peer's kernel has not acknowledged.
#[must_use]
pub fn unacknowledged(socket: impl AsFd) -> Option<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one integer.
    let asked = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if asked == 0 { u64::try_from(bytes).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn packets_of_a_connection_are_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut stream = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let (mut other, _) = listener.accept().expect("the other end");
        let before = wire_stats(&stream).expect("the kernel says");
        for _ in 0..10 {
            stream.write_all(&[1; 1000]).expect("sent");
            other.read_exact(&mut [0; 1000]).expect("received");
        }
        let after = wire_stats(&stream).expect("the kernel says");
        assert!((1..=20).contains(&(after.segments - before.segments)), "{before:?} {after:?}");
        assert!(after.round_trip > Duration::ZERO && after.retransmits == 0, "{after:?}");
        assert!(tcp_info(&stream).is_some_and(|info| !info.is_owed));
    }
}
