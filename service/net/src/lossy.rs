//! Packet loss at a socket, for tests: a filter (BPF) drops what arrives. The kernel does not
//! acknowledge what is dropped.

use std::os::fd::{AsFd, AsRawFd};

fn instruction(code: u16, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

const DROP: libc::sock_filter = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0 };
const PASS: libc::sock_filter = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: u32::MAX };

/// Packets that arrive at a socket are lost: one in `one_in`.
///
/// # Panics
/// The kernel refuses the filter.
pub fn lose(socket: &impl AsFd, one_in: u32) {
    // Load a random number; divide; drop if nothing is left.
    const RANDOM: u32 = 0xffff_f000 + 56;
    filter(
        socket,
        &[instruction(0x20, RANDOM, 0, 0), instruction(0x94, one_in, 0, 0), instruction(0x15, 0, 0, 1), DROP, PASS],
    );
}

/// Packets from these ports that arrive at a listening socket are lost, and those of connections that it accepts from here on.
///
/// # Panics
/// The kernel refuses the filter.
pub fn lose_from(listener: &impl AsFd, first: u16, last: u16) {
    let (first, last) = (first.into(), last.into());
    // Load the source port; pass if it is below the first, or above the last.
    let code = [instruction(0x28, 0, 0, 0), instruction(0x35, first, 0, 2), instruction(0x25, last, 1, 0), DROP, PASS];
    filter(listener, &code);
}

fn filter(socket: &impl AsFd, filter: &[libc::sock_filter]) {
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the program and its code outlive the call, and have the lengths that are said.
    let set = unsafe {
        let bytes = size_of::<libc::sock_fprog>() as libc::socklen_t;
        let program = (&raw const program).cast();
        libc::setsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, program, bytes)
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}
