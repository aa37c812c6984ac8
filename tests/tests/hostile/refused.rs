//! Connections that are made without end, or that do not close.

use std::io::{IoSlice, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use mccs::Client;
use mccs_net::testing::raise_descriptor_limit;
use mccs_tenants::close_promptly;
use mccs_tests::TestService;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, sendmsg, setsockopt, socket,
    sockopt,
};

/// A connection that says nothing. Waits for room in the listener's queue.
fn silent(path: &Path) -> OwnedFd {
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    connect(fd.as_raw_fd(), &UnixAddr::new(path).expect("an address")).expect("connected");
    fd
}

/// Sends a socket that lingers for twelve days on a connection, and keeps none of it. Returns the end that does not read.
fn give_a_lingering_socket(to: &OwnedFd) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut writer = TcpStream::connect(listener.local_addr().expect("its address")).expect("connected");
    let (reader, _) = listener.accept().expect("accepted");
    writer.set_nonblocking(true).expect("set");
    while writer.write(&[0; 1 << 16]).is_ok() {}
    setsockopt(&writer, sockopt::Linger, &nix::libc::linger { l_onoff: 1, l_linger: 1 << 20 }).expect("set");
    let raw = [writer.as_raw_fd()];
    // A connection that was refused and closed already takes nothing: others do.
    let _ = sendmsg::<()>(
        to.as_raw_fd(),
        &[IoSlice::new(b"x")],
        &[ControlMessage::ScmRights(&raw)],
        MsgFlags::MSG_NOSIGNAL,
        None,
    );
    close_promptly(writer.into());
    reader
}

/// A client that is no tenant of a socket has it closed with what lingers in it, and more often than descriptors may wait. The next client
/// is answered.
#[test]
fn strangers_whose_connections_linger_stop_nobody() {
    raise_descriptor_limit();
    let other = nix::unistd::getuid().as_raw() + 1;
    let service = TestService::start(&format!("[[tenant]]\nname = \"others\"\nuids = [{other}]\n"));
    let path = service.socket(0);
    let readers: Vec<_> = (0..100).map(|_| give_a_lingering_socket(&silent(&path))).collect();
    for _ in 0..3000 {
        drop(silent(&path));
    }
    let told = Client::connect(&path).expect_err("a refusal").to_string();
    assert!(told.contains("is no tenant of this socket"), "{told}");
    drop(readers);
}

/// Quotas of tenants add up to more than the service's descriptors allow: all together keep to those, and hear of the key.
#[test]
fn sessions_of_all_tenants_have_a_bound_besides_each_ones_own() {
    let tenants = "[[tenant]]\nname = \"a\"\nsocket = \"a\"\n[[tenant]]\nname = \"b\"\nsocket = \"b\"\n";
    let service = TestService::start(&format!("[limits]\nmax_sessions = 3\n{tenants}"));
    let mut held = Vec::from([0, 0, 1].map(|tenant| service.connect(tenant)));
    for tenant in [0, 1] {
        let told = Client::connect(service.socket(tenant)).expect_err("the fourth").to_string();
        assert!(told.contains("limits.max_sessions") && told.contains("LimitNOFILE"), "{told}");
    }
    held.pop();
    while Client::connect(service.socket(0)).is_err() {
        std::thread::yield_now();
    }
}

/// More than may wait for their turn are told, so that nobody behind them in the socket's queue waits. Those that have gone wait no longer.
#[test]
fn a_tenant_that_connects_without_end_is_told_and_keeps_nobody_waiting() {
    raise_descriptor_limit();
    let service = TestService::start("[[tenant]]\nname = \"t\"\nmax_sessions = 4\n");
    let path = service.socket(0);
    // Turns go by meanwhile, and each lets one more in.
    let mut held = Vec::new();
    let told = loop {
        // The service has come to each that is before this one.
        held.extend((0..600).map(|_| silent(&path)));
        match Client::connect(&path) {
            Err(error) if error.to_string().contains("times a second") => break error.to_string(),
            other => drop(other),
        }
    };
    assert!(told.contains("try again"), "{told}");
    drop(held);
    let refused = Client::connect(&path).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(!refused.contains("times a second"), "{refused}");
    while Client::connect(&path).is_err() {
        std::thread::yield_now();
    }
}
