//! What the kernel knows of a TCP connection: whether the other end answers, and what became of the packets.
//!
//! A path that has died silently, and a host, look alike from here, and unlike a peer that is late: its kernel answers.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use crate::transports::WireStats;

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
    let info = tcp_info(socket)?;
    // A single probe may be on its way.
    let is_owed = info.tcpi_retransmits > 0 || info.tcpi_probes > 1;
    Some(Answers {
        is_owed,
        is_under_way: info.tcpi_unacked > 0,
        round_trip: Duration::from_micros(info.tcpi_rtt.into()),
        last: Duration::from_millis(info.tcpi_last_ack_recv.into()),
    })
}

/// What became of a connection's packets since it began; `None` if the kernel says nothing.
pub(crate) fn wire_stats(socket: impl AsFd) -> Option<WireStats> {
    let info = tcp_info(socket)?;
    Some(WireStats {
        segments: info.tcpi_data_segs_out.into(),
        retransmits: info.tcpi_total_retrans.into(),
        round_trip: Duration::from_micros(info.tcpi_rtt.into()),
    })
}

fn tcp_info(socket: impl AsFd) -> Option<libc::tcp_info> {
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
pub(crate) fn unacknowledged(socket: impl AsFd) -> Option<u64> {
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
        assert!(answers(&stream).is_some_and(|answers| !answers.is_owed));
    }
}
