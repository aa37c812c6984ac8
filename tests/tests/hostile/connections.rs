//! Connections of tenants that share a socket.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use mccs::Client;
use mccs_control::{ControlAnswer, ControlRequest};
use mccs_ipc::handshake::Socket;
use mccs_ipc::protocol::Response;
use mccs_tests::TestService;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use crate::raw::receive;

/// Connects and says nothing.
fn connect_silently(path: &Path) -> Socket {
    let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    connect(fd.as_raw_fd(), &UnixAddr::new(path).expect("an address")).expect("connected");
    Socket::from_fd(fd)
}

/// Connects and says hello. The service's answer is left in the socket.
fn connect_soon(path: &Path) -> Socket {
    let socket = connect_silently(path);
    socket.send_hello(0).expect("sent");
    socket
}

/// Runs `body` on a thread that is another user to whom it connects to, and still root to files.
fn as_user<T: Send>(uid: u32, body: impl FnOnce() -> T + Send) -> T {
    let change = move || {
        let (same, root) = (-1, 0);
        // SAFETY: these change the calling thread alone (the C library's `setresuid` would change all), and touch no memory.
        let refused = unsafe {
            let refused = libc::syscall(libc::SYS_setresuid, same, uid, same);
            libc::setfsuid(root);
            refused
        };
        assert_eq!(refused, 0, "another user: {}", std::io::Error::last_os_error());
        body()
    };
    std::thread::scope(|scope| scope.spawn(change).join().expect("the other user"))
}

/// Sixty-four connections are as many of a tenant as wait inside the service.
#[test]
#[ignore = "needs root"]
fn users_of_a_socket_pass_the_connections_of_another_tenant_that_wait_there() {
    const MANY: usize = 64;
    const ONE: u32 = 12_345;
    let service = TestService::start(&format!(
        "[[tenant]]\nname = \"many\"\nuids = [0]\n[[tenant]]\nname = \"one\"\nuids = [{ONE}]\n"
    ));
    let path = service.socket(0);
    assert_eq!(path, service.socket(1));
    // At first they are taken as they come, and nobody waits.
    loop {
        let many: Vec<_> = (0..MANY).map(|_| connect_soon(&path)).collect();
        let tenant = as_user(ONE, || Client::connect(&path).map(|client| client.tenant().to_owned()));
        let waiting = many.iter().filter(|socket| !socket.wait_readable(Duration::ZERO)).count();
        assert_eq!(tenant.expect("a session"), "one");
        for socket in many {
            assert!(socket.wait_readable(Duration::from_secs(600)));
            socket.recv_hello().expect("received").expect("a hello");
            let (answer, _) = receive(&socket).expect("a welcome");
            assert!(matches!(&answer.response, Response::Welcome { tenant, .. } if tenant == "many"), "{answer:?}");
        }
        if waiting > MANY / 2 {
            break;
        }
    }
}

/// More than are taken at once, so that some wait inside, and some outside.
#[test]
fn whoever_connects_while_a_service_stops_hears_so() {
    const MANY: usize = 300;
    let mut service = TestService::start("[[tenant]]\nname = \"many\"\nsocket = \"m\"\n");
    let path = service.socket(0);
    let sockets: Vec<_> = (0..MANY).map(|_| connect_silently(&path)).collect();
    service.stop();
    for (number, socket) in sockets.iter().enumerate() {
        let hello = socket.recv_hello().unwrap_or_else(|error| panic!("{number}: {error}")).expect("a hello");
        assert_ne!(hello.status, 0, "{number}");
        let (answer, _) = receive(socket).expect("a reason");
        let Response::Error { message, .. } = &answer.response else { panic!("{number}: {answer:?}") };
        assert!(message.contains("the service is stopping; connect again"), "{number}: {message}");
    }
}

#[test]
#[ignore = "needs root"]
fn who_may_not_ask_is_told_who_may() {
    let service = TestService::start("");
    let asked = as_user(12_345, || mccs_control::call(&service.control_socket(), &ControlRequest::Sessions));
    let Ok(ControlAnswer::Refused(reason)) = asked else { panic!("{asked:?}") };
    assert!(reason.contains("user 12345 may not ask here: root and the service's own user may"), "{reason}");
}
