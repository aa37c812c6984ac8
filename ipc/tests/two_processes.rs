//! A session's parts between two processes: the socket passes the segment and the doorbell, commands go through the ring
//! while both sides sleep and wake, and a stream's word brings the answer.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::Zeroable;
use mccs_ipc::command::Command;
use mccs_ipc::handshake::{Listener, Socket, connect};
use mccs_ipc::queue::{Consumer, Producer, Push, ring_bytes};
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::{Doorbell, StreamWord};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

/// Names the socket to the process that plays the tenant.
const SOCKET_VARIABLE: &str = "MCCS_IPC_TEST_SOCKET";
const CAPACITY: u32 = 16;
const COMMANDS: u64 = 20_000;
const FOREVER: Duration = Duration::from_secs(600);

fn segment_bytes() -> u64 {
    ring_bytes::<Command>(CAPACITY) + size_of::<StreamWord>() as u64
}

fn word(mapping: &Mapping) -> &StreamWord {
    StreamWord::at(mapping, ring_bytes::<Command>(CAPACITY), 0).expect("word")
}

struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn commands_cross_processes_and_the_word_comes_back() {
    let directory = Directory(std::env::temp_dir().join(format!("mccs-ipc-{}-processes", std::process::id())));
    std::fs::create_dir_all(&directory.0).expect("directory");
    let path = directory.0.join("s.sock");
    let listener = Listener::bind(&path).expect("bind");
    let mut tenant = Process::new(std::env::current_exe().expect("exe"))
        .args(["--exact", "the_tenants_side", "--nocapture"])
        .env(SOCKET_VARIABLE, &path)
        .spawn()
        .expect("spawn");
    let socket = loop {
        if let Some((socket, peer)) = listener.accept().expect("accept") {
            assert_eq!(peer.pid, tenant.id() as i32);
            break socket;
        }
        let _ = poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
    };
    serve(&socket);
    assert!(tenant.wait().expect("wait").success());
    assert!(socket.is_closed());
}

fn serve(socket: &Socket) {
    assert!(socket.wait_readable(FOREVER));
    socket.recv_hello().expect("recv").expect("hello");
    socket.send_hello(0).expect("hello");
    let (fd, mapping) = Mapping::create("test", segment_bytes()).expect("segment");
    let mapping = Arc::new(mapping);
    let doorbell = Doorbell::new().expect("doorbell");
    socket.send(&(), &[fd.as_fd(), doorbell.as_fd()]).expect_err("an empty message would look like the end");
    socket.send(&segment_bytes(), &[fd.as_fd(), doorbell.as_fd()]).expect("send");
    let epoll = Epoll::new(EpollCreateFlags::empty()).expect("epoll");
    let when_rung = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
    for (fd, flags) in [(doorbell.as_fd(), when_rung), (socket.as_fd(), EpollFlags::EPOLLIN)] {
        epoll.add(fd, EpollEvent::new(flags, 0)).expect("watches");
    }
    let mut commands = Consumer::<Command>::new(Arc::clone(&mapping), 0, CAPACITY).expect("ring");
    let mut expected = 1;
    while expected <= COMMANDS {
        if let Some(command) = commands.try_pop().expect("sound") {
            assert_eq!((command.ticket, command.count), (expected, !expected));
            word(&mapping).publish(expected);
            expected += 1;
        } else if commands.arm().expect("sound") {
            epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::NONE).expect("waits");
            commands.disarm();
            assert!(!socket.is_closed() || commands.waiting().expect("sound") > 0, "the tenant has failed");
        }
    }
}

/// Not a test on its own: the other process of the test above, which starts it with the variable set.
#[test]
fn the_tenants_side() {
    let Ok(path) = std::env::var(SOCKET_VARIABLE) else {
        return;
    };
    let socket = connect(Path::new(&path)).expect("connect");
    let (bytes, mut fds) = socket.recv::<u64>().expect("recv").expect("message");
    let (doorbell, segment) = (fds.pop().expect("doorbell"), fds.pop().expect("segment"));
    let doorbell = Doorbell::from_fd(doorbell);
    let mapping = Arc::new(Mapping::map(segment.as_fd(), bytes).expect("map"));
    let mut commands = Producer::<Command>::new(Arc::clone(&mapping), 0, CAPACITY).expect("ring");
    for ticket in 1..=COMMANDS {
        let command = Command { ticket, count: !ticket, ..Command::zeroed() };
        loop {
            match commands.try_push(&command).expect("sound") {
                Push::Full => drop(commands.wait_for_space(FOREVER).expect("sound")),
                Push::Pushed { consumer_sleeps } => {
                    if consumer_sleeps {
                        doorbell.ring();
                    }
                    break;
                }
            }
        }
        // Now and then both sides come to rest.
        if ticket % 64 == 0 {
            assert!(word(&mapping).wait(ticket, Duration::ZERO, FOREVER));
        }
    }
    assert!(word(&mapping).wait(COMMANDS, Duration::from_micros(10), FOREVER));
}
