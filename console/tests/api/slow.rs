//! Peers that are slow on purpose: they take answers a byte at a time, or nothing of them. Each is left in its time, and they never hold
//! more connections than there are for one address.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _};
use std::path::Path;
use std::time::{Duration, Instant};

use mccs_tests::{TestService, watchdog};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, connect, setsockopt, socket, sockopt};

use super::fixture::Console;

/// Connections that the console has for one address, as docs/CONSOLE.md says.
const OF_ONE_ADDRESS: usize = 96;

/// A connection that takes little at a time: what its peer has sent lies at the peer.
fn narrow(to: SocketAddr) -> TcpStream {
    let SocketAddr::V4(to) = to else { panic!("{to} is no address of IPv4") };
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    // Before it connects: the window that it offers follows from it.
    setsockopt(&fd, sockopt::RcvBuf, &2048).expect("set");
    connect(fd.as_raw_fd(), &SockaddrIn::from(to)).expect("connected");
    // SAFETY: the descriptor is this function's own, and goes to the stream alone.
    unsafe { TcpStream::from_raw_fd(fd.into_raw_fd()) }
}

/// Connections of the console's, by the kernel's table, for which it keeps bytes: not the one that listens (0A), and none that is over (06).
fn connections_to(console: &Console) -> usize {
    let port = format!(":{:04X}", console.address.port());
    let table = std::fs::read_to_string("/proc/net/tcp").expect("the kernel's table");
    let fields = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    // Local address, remote address, state.
    fields.filter(|fields| fields[1].ends_with(&port) && !["0A", "06"].contains(&fields[3])).count()
}

/// Descriptors of the console's process.
fn descriptors(console: &Console) -> usize {
    std::fs::read_dir(Path::new("/proc").join(console.pid().to_string()).join("fd")).expect("its own").count()
}

#[test]
fn who_takes_an_answer_byte_by_byte_is_left_and_holds_few_connections() {
    watchdog();
    let service = TestService::start("");
    let console = Console::start(&service.control_socket());
    assert_eq!(console.get("/").status, 200);
    let before = descriptors(&console);
    let began = Instant::now();
    // An answer is longer than what kernels keep of it: the same file, asked for again and again.
    let asked = "GET /style.css HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(400);
    let mut slow: Vec<_> = (0..150).map(|_| narrow(console.address)).collect();
    for socket in &mut slow {
        socket.set_nonblocking(true).expect("set");
        // The peer stops reading in its turn, or has closed.
        let _ = socket.write(asked.as_bytes());
    }
    let (mut most, mut held) = (0, 0);
    // As slowly as may be, and more is not taken. Bytes that a kernel has taken already are there for longer.
    while most == 0 || held > 0 {
        held = descriptors(&console).saturating_sub(before);
        most = most.max(held);
        // Every other one takes nothing.
        slow.iter_mut().step_by(2).for_each(|socket| drop(socket.read(&mut [0])));
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(most <= OF_ONE_ADDRESS, "{most} connections of one address");
    // That it ends at all is the test; that nobody was left at once says that slow ones have had their time.
    assert!(began.elapsed() > Duration::from_secs(5), "{:?}", began.elapsed());
    // The kernel keeps nothing of the answers either, though the peers are still there.
    while connections_to(&console) > 0 {
        std::thread::yield_now();
    }
    assert_eq!(console.get("/").status, 200, "it serves on");
}
