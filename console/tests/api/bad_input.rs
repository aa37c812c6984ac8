//! Hostile browsers, pages of other sites, slow peers, and requests that are none.

use std::io::{IoSlice, Read as _, Write as _};
use std::net::{SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use mccs_control::{Chunk, ControlAnswer, ControlRequest, call, call_for_memory};
use mccs_ipc::records::RecordReader;
use mccs_ipc::shm::{Mapping, ShmError};
use mccs_tenants::close_promptly;
use mccs_tests::TestService;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, SockaddrIn, UnixAddr, bind, connect, sendmsg,
    setsockopt, socket, sockopt,
};

use super::fixture::{Console, answer};

#[test]
fn pages_of_other_sites_and_bent_names_get_nothing() {
    let service = TestService::start("");
    let console = Console::start(&service.control_socket());
    let own = format!("http://{}", console.address);
    let look = |headers: &[(&str, &str)]| console.ask("GET", "/api/v1/overview", headers, "");
    assert_eq!(look(&[("Origin", &own), ("Sec-Fetch-Site", "same-origin")]).status, 200);
    assert_eq!(look(&[("Host", "console.test"), ("Origin", "https://console.test")]).status, 200);
    assert_eq!(look(&[("Host", "evil.test")]).code(), "wrong_name");
    assert_eq!(look(&[("Host", "evil.test"), ("Origin", "http://evil.test")]).code(), "wrong_name");
    for other in ["http://evil.test", "null", "http://127.0.0.1:1"] {
        let refused = look(&[("Origin", other)]);
        assert_eq!((refused.status, refused.code().as_str()), (403, "other_site"), "{other}");
        // Nothing lets the page read even that.
        assert!(!refused.headers.keys().any(|name| name.starts_with("access-control")), "{refused:?}");
    }
    for path in ["/api/v1/trace", "/api/v1/policy/diff"] {
        let posted = console.ask("POST", path, &[("Origin", "http://evil.test")], "x");
        assert_eq!(posted.code(), "other_site", "{path}");
        let preflight = console.ask("OPTIONS", path, &[("Origin", "http://evil.test")], "");
        assert_eq!(preflight.code(), "other_site", "{path}");
    }
    let page = console.get("/");
    let policy = &page.headers["content-security-policy"];
    for part in ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for"] {
        assert!(policy.contains(part), "{policy}");
    }
    assert!(!policy.contains("unsafe") && page.headers["x-content-type-options"] == "nosniff", "{page:?}");
}

#[test]
fn paths_lead_nowhere_else() {
    let service = TestService::start("");
    let console = Console::start(&service.control_socket());
    for path in [
        "/../Cargo.toml",
        "/..%2fCargo.toml",
        "/%2e%2e/Cargo.toml",
        "//etc/passwd",
        "/page/../app.js",
        "/.git/config",
        "/app.js/",
    ] {
        let refused = console.get(path);
        assert!([400, 404].contains(&refused.status), "{path}: {refused:?}");
    }
    for (method, path) in [("POST", "/"), ("PUT", "/api/v1/overview"), ("DELETE", "/app.js"), ("GET", "/api/v1/trace")]
    {
        let refused = console.ask(method, path, &[], "");
        assert_eq!(refused.status, 405, "{method} {path}: {refused:?}");
        assert!(refused.headers.contains_key("allow"));
    }
    let body = console.ask("GET", "/api/v1/overview", &[], "body");
    assert_eq!((body.status, body.code().as_str()), (400, "no_body"));
}

#[test]
fn what_is_no_request_ends_its_connection() {
    let service = TestService::start("");
    let console = Console::start(&service.control_socket());
    let long = format!("GET / HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(64 << 10));
    let many = format!("GET / HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "X: y\r\n".repeat(1000));
    // Two lengths, of which a proxy may take the other.
    let smuggled = "POST /api/v1/policy/diff HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\nHost: evil.test\r\n\r\n";
    let lengths =
        "POST /api/v1/policy/diff HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde";
    let spaced = "GET / HTTP/1.1\r\nHost : localhost\r\n\r\n";
    let folded = "GET / HTTP/1.1\r\nHost: local\r\n host\r\n\r\n";
    let random: Vec<u8> = (0..4096).map(|_| rand::random()).collect();
    for bytes in [
        b"\x16\x03\x01\x02\x00\x01".as_slice(),
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        long.as_bytes(),
        many.as_bytes(),
        smuggled.as_bytes(),
        lengths.as_bytes(),
        spaced.as_bytes(),
        folded.as_bytes(),
        &random,
    ] {
        let text = String::from_utf8_lossy(&console.raw(bytes)).into_owned();
        let served = text.matches("HTTP/1.1 200").count();
        assert_eq!(served, 0, "{:?}: {text}", String::from_utf8_lossy(&bytes[..bytes.len().min(200)]));
    }
    assert_eq!(console.get("/").status, 200, "it goes on");
}

/// A connection from this address.
fn connect_from(own: std::net::Ipv4Addr, to: SocketAddr) -> TcpStream {
    let SocketAddr::V4(to) = to else { panic!("{to} is no address of IPv4") };
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
    bind(fd.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(own, 0))).expect("bound");
    connect(fd.as_raw_fd(), &SockaddrIn::from(to)).expect("connected");
    TcpStream::from(fd)
}

#[test]
fn slow_peers_are_left_and_keep_nobody_out() {
    let service = TestService::start("");
    let console = Console::start(&service.control_socket());
    let began = Instant::now();
    // More than there is room for: each says something, and then nothing, or a byte at a time.
    let mut slow: Vec<_> = (0..120).map(|_| console.connect()).collect();
    slow.iter_mut().for_each(|socket| drop(socket.write_all(b"GET / HT")));
    let drip = slow.swap_remove(0);
    let dripping = std::thread::spawn(move || {
        let mut drip = drip;
        while drip.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    // They are there still, and another address finds room.
    let other = connect_from([127, 0, 0, 2].into(), console.address);
    let mut text = Vec::new();
    (&other).write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").expect("sent");
    (&other).read_to_end(&mut text).expect("an answer");
    assert_eq!(answer(&text).status, 200);
    // That each of them is closed is the test: with an error, where something lies there unread.
    slow.into_iter().for_each(|mut socket| drop(socket.read_to_end(&mut Vec::new())));
    dripping.join().expect("it is left as well");
    assert!(began.elapsed() >= Duration::from_secs(4), "a head has its time");
    let mut asked =
        std::iter::repeat_with(|| console.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"));
    let page = asked.find(|text| !text.is_empty()).expect("room");
    assert_eq!(answer(&page).status, 200);
}

#[test]
fn bodies_have_a_length_and_a_time() {
    let service = TestService::start("");
    let console = Console::start(&service.control_socket());
    let long = console.ask("POST", "/api/v1/policy/diff", &[], &"#".repeat(200 << 10));
    assert_eq!((long.status, long.code().as_str()), (413, "too_long"));
    // Announced, and never sent.
    let silent =
        console.raw(b"POST /api/v1/policy/diff HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n[pol");
    assert_eq!((answer(&silent).status, answer(&silent).code().as_str()), (408, "slow"));
    let broken =
        console.raw(b"POST /api/v1/policy/diff HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n\xff\xfe");
    assert_eq!(answer(&broken).code(), "bad_body");
    let none = console.ask("POST", "/api/v1/policy/diff", &[], "[policy]\nname = \"ffa\"\n");
    assert_eq!((none.status, none.code().as_str()), (409, "refused"), "there is no controller");
}

/// A socket that lingers for twelve days, and the end that does not read.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    // Room of its own size, which does not grow: otherwise all that was written might find room there in the end.
    setsockopt(&listener, sockopt::RcvBuf, &4096).expect("set");
    let mut writer = TcpStream::connect(listener.local_addr().expect("its address")).expect("connected");
    setsockopt(&writer, sockopt::SndBuf, &(1 << 17)).expect("set");
    let (reader, _) = listener.accept().expect("accepted");
    writer.set_nonblocking(true).expect("set");
    while writer.write(&[0; 1 << 16]).is_ok() {}
    setsockopt(&writer, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 1 << 20 }).expect("set");
    (writer, reader)
}

/// Connects as this user, and is still root to files.
fn connect_as(uid: u32, path: &Path) -> OwnedFd {
    let connecting = move || {
        // SAFETY: these change the calling thread alone (the C library's `setresuid` would change all), and touch no memory.
        let refused = unsafe {
            let refused = libc::syscall(libc::SYS_setresuid, -1, uid, -1);
            libc::setfsuid(0);
            refused
        };
        assert_eq!(refused, 0, "another user: {}", std::io::Error::last_os_error());
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).expect("a socket");
        connect(fd.as_raw_fd(), &UnixAddr::new(path).expect("an address")).expect("connected");
        fd
    };
    std::thread::scope(|scope| scope.spawn(connecting).join().expect("the other user"))
}

/// Twelve days otherwise: that the service answers afterwards is the test.
#[test]
fn what_lingers_at_the_observers_socket_stops_nobody() {
    let own = nix::unistd::geteuid().as_raw();
    let service = TestService::start("[observers]\nusers = [12345]\n");
    let control = service.control_socket();
    let path = control.with_file_name("mccs-observers.sock");
    // Without root there are no others.
    let users = if own == 0 { vec![0, 12_345, 54_321] } else { vec![own] };
    let mut readers = Vec::new();
    for uid in users {
        let connection = connect_as(uid, &path);
        let (writer, reader) = lingering();
        let raw = [writer.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&raw)];
        // One that was refused and closed already takes nothing.
        let sent = sendmsg::<()>(connection.as_raw_fd(), &[IoSlice::new(b"x")], &rights, MsgFlags::MSG_NOSIGNAL, None);
        assert!(sent.is_ok() || uid == 54_321, "{sent:?}");
        close_promptly(writer.into());
        readers.push(reader);
    }
    // As a part of a request.
    let socket = mccs_ipc::handshake::connect(&path).expect("greeted");
    let (writer, reader) = lingering();
    socket.send(&Chunk { more: true, bytes: vec![b' '] }, &[writer.as_fd()]).expect("sent");
    close_promptly(writer.into());
    while !socket.is_closed() {
        std::thread::yield_now();
    }
    for path in [&path, &control] {
        assert!(matches!(call(path, &ControlRequest::Sessions), Ok(ControlAnswer::Sessions(_))));
    }
    drop((readers, reader));
}

/// Rings of records lie in memory that the service writes: whoever reads a trace cannot change what others read.
#[test]
fn observers_write_into_no_ring_of_records() {
    let service = TestService::start("[observers]\nusers = [12345]\n");
    let path = service.control_socket().with_file_name("mccs-observers.sock");
    let begun = call(&path, &ControlRequest::Trace { duration_ms: 60_000 }).expect("an answer");
    let ControlAnswer::Tracing(begun) = begun else { panic!("{begun:?}") };
    assert!(!begun.rings.is_empty());
    for ring in begun.rings {
        let (_, memory) = call_for_memory(&path, &ControlRequest::TraceRing { ring: ring.ring }).expect("an answer");
        let Some(memory) = memory else { continue };
        let reader = RecordReader::map(memory.as_fd()).expect("it is read");
        let next = reader.next();
        assert!(matches!(Mapping::map(memory.as_fd(), 4096), Err(ShmError::ReadOnly)));
        let zeros = vec![0; 64 << 10];
        assert_eq!(nix::sys::uio::pwrite(&memory, &zeros, 0), Err(nix::errno::Errno::EPERM));
        mccs_ipc::shm::give_back(&memory);
        assert!(reader.next() >= next && RecordReader::map(memory.as_fd()).is_ok(), "{}: it is whole", ring.engine);
    }
}
