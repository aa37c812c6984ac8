//! Descriptors and messages that are sent instead of the right ones.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use mccs_ipc::handshake::{Socket, connect};
use mccs_ipc::protocol::{Request, RequestEnvelope, Response};
use mccs_ipc::shm::Mapping;
use mccs_ipc::types::Handle;
use mccs_tests::TestService;

use crate::raw::{Raw, receive};
use crate::victim::attack;

/// Descriptors whose `close` waits, for as long as the other end, which comes with them, neither reads nor goes: sent by a
/// tenant that keeps none of its own, they are closed by the service.
fn lingering(count: usize) -> (Vec<TcpStream>, Vec<OwnedFd>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let pair = |_| {
        let mut writer = TcpStream::connect(listener.local_addr().expect("its address")).expect("connected");
        let (reader, _) = listener.accept().expect("accepted");
        writer.set_nonblocking(true).expect("set");
        while writer.write(&[0; 1 << 16]).is_ok() {}
        let for_ever = nix::libc::linger { l_onoff: 1, l_linger: 1 << 20 };
        nix::sys::socket::setsockopt(&writer, nix::sys::socket::sockopt::Linger, &for_ever).expect("set");
        (reader, OwnedFd::from(writer))
    };
    (0..count).map(pair).unzip()
}

/// A session that has sent such descriptors as `say` does. The last to close one is who waits: it has to be the service, so this
/// is tried again where that was faster than the sender. The descriptors close when the readers go.
fn gave_away(service: &TestService, count: usize, say: impl Fn(&Socket, &[OwnedFd]) + Sync) -> (Raw, Vec<TcpStream>) {
    loop {
        let ((readers, fds), raw, say) = (lingering(count), Raw::connect(service), &say);
        let socket = &raw.socket;
        let readers = std::thread::scope(|scope| {
            let giver = scope.spawn(move || {
                say(socket, &fds);
                drop(fds);
            });
            let until = Instant::now() + Duration::from_secs(2);
            while !giver.is_finished() && Instant::now() < until {
                std::thread::yield_now();
            }
            // Else they go, which lets the sender go on.
            giver.is_finished().then_some(readers)
        });
        if let Some(readers) = readers {
            return (raw, readers);
        }
    }
}

#[test]
fn descriptors_that_cannot_be_closed_keep_up_nobody_else() {
    // In a request; in one that takes none; in a message that has too many of them.
    for (request, count) in [
        (Request::RegisterMemory { bytes: 4096 }, 1),
        (Request::FreeMemory { region: Handle::NONE }, 4),
        (Request::CreateStream, 20),
    ] {
        attack(|service| {
            let say = |socket: &Socket, fds: &[OwnedFd]| {
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                socket.send(&RequestEnvelope { id: 1 << 20, request: request.clone() }, &fds).expect("sent");
            };
            let (raw, _readers) = gave_away(service, count, say);
            let (envelope, _) = receive(&raw.socket).expect("an answer");
            assert!(matches!(envelope.response, Response::Error { .. }), "{envelope:?}");
            // Whoever comes next is served by the engine's thread.
            Raw::connect(service);
        });
    }
    // In messages that nobody reads any more: behind one that ends the session.
    attack(|service| {
        let say = |socket: &Socket, fds: &[OwnedFd]| {
            socket.send(&vec![0xffu8; 64], &[]).expect("sent");
            // If the session has ended already nothing is sent.
            let _ = socket.send(&RequestEnvelope { id: 1, request: Request::CreateStream }, &[fds[0].as_fd()]);
        };
        let (raw, _readers) = gave_away(service, 1, say);
        assert!(raw.fenced().contains("malformed"));
        Raw::connect(service);
    });
}

#[test]
fn garbage_on_the_socket_ends_the_session() {
    attack(|service| {
        let raw = Raw::connect(service);
        raw.socket.send(&vec![0xffu8; 64], &[]).expect("sent");
        assert!(raw.fenced().contains("malformed"));
        // Half a handshake, and none.
        drop(connect(&service.socket(0)));
        let mut raw = Raw::connect(service);
        let pipe = nix::unistd::pipe().expect("a pipe");
        let refused = |response| matches!(response, Response::Error { .. });
        assert!(refused(raw.ask(Request::RegisterMemory { bytes: 4096 }, &[pipe.0])));
        assert!(refused(raw.ask(Request::RegisterMemory { bytes: 4096 }, &[])));
        let (short, _) = Mapping::create("short", 100).expect("a memfd");
        assert!(refused(raw.ask(Request::RegisterMemory { bytes: 4096 }, &[short])));
        assert!(refused(raw.ask(Request::AllocMemory { bytes: 0 }, &[])));
        assert!(refused(raw.ask(Request::AllocMemory { bytes: u64::MAX }, &[])));
        assert!(refused(raw.ask(Request::FreeMemory { region: Handle { index: 9, generation: 1 } }, &[])));
        assert!(refused(raw.ask(Request::DestroyComm { comm: Handle::NONE }, &[])));
        assert!(refused(raw.ask(Request::DestroyStream { stream: Handle::NONE }, &[])));
    });
}

/// Sessions that ask for memory and read no answer: descriptors on their way count for the service's user, and a tenant has its
/// share of them. Also when the sessions have ended.
#[test]
fn answers_that_nobody_reads_keep_no_descriptors_from_others() {
    attack(|service| {
        let limit = mccs_tenants::process_limits::sent_descriptors_of_tenant();
        let mut sessions = Vec::new();
        let tenant = loop {
            let raw = Raw::connect(service);
            let all = service.service().registry.sessions();
            let tenant = all.iter().find(|one| one.tenant.name == "hostile").expect("its session").tenant.clone();
            for id in 0..200 {
                let request = RequestEnvelope { id, request: Request::AllocMemory { bytes: 4096 } };
                if raw.socket.send(&request, &[]).is_err() {
                    break;
                }
            }
            sessions.push(raw.socket);
            let used = || tenant.used(mccs_tenants::Resource::SentDescriptors);
            if used() >= limit / 2 || sessions.len() > 40 {
                break tenant;
            }
        };
        let used = || tenant.used(mccs_tenants::Resource::SentDescriptors);
        assert!(used() > 0 && used() <= limit, "{} of {limit}", used());
        // Another tenant connects, and is welcomed with descriptors.
        drop(service.connect(1));
        drop(sessions);
        while used() > 0 {
            std::thread::yield_now();
        }
    });
}

/// A tenant that keeps its end of a session that has ended, with what was sent there unread, keeps its share of descriptors on
/// their way.
#[test]
fn unread_descriptors_count_until_they_are_taken_also_when_their_session_has_ended() {
    attack(|service| {
        let registry = &service.service().registry;
        let tenant = registry.tenants().into_iter().find(|tenant| tenant.name == "hostile").expect("the tenant");
        let used = || tenant.used(mccs_tenants::Resource::SentDescriptors);
        let ends = || {
            while registry.sessions().iter().any(|one| one.tenant.name == "hostile") {
                std::thread::yield_now();
            }
        };
        let unread = connect(&service.socket(0)).expect("connected");
        unread.send(&vec![0xffu8; 64], &[]).expect("sent");
        ends();
        let sent = used();
        assert!(sent > 0, "a welcome brings descriptors");
        // Its socket is closed behind the first one, if that were closed.
        drop(Raw::connect(service));
        ends();
        while used() > sent {
            std::thread::yield_now();
        }
        assert_eq!(used(), sent);
        drop(unread);
        while used() > 0 {
            std::thread::yield_now();
        }
    });
}
