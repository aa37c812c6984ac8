//! One tenant alone, or one session: nothing that it does keeps the host from being upgraded, or harms others.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64};

use mccs_ipc::handshake::{Socket, SocketError, connect};
use mccs_ipc::protocol::{Request, RequestEnvelope, Response, ResponseEnvelope};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::fixture::{COUNT_MAX, Host, Load, Rank, seed};

const BYTES: u64 = 1 << 16;

/// Memory of a program's own, as it may be registered.
fn own_memory() -> OwnedFd {
    let fd = memfd_create("own", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).expect("a memfd");
    fallocate(&fd, FallocateFlags::empty(), 0, BYTES as i64).expect("room");
    fcntl(&fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).expect("sealed");
    fd
}

#[test]
fn registered_memory_can_be_sealed_no_further() {
    let mut host = Host::start("");
    let client = host.connect();
    let fd = own_memory();
    let region = client.register_fd(fd.as_fd(), BYTES).expect("registered");
    let future_write = SealFlag::from_bits_retain(nix::libc::F_SEAL_FUTURE_WRITE);
    assert_eq!(fcntl(&fd, FcntlArg::F_ADD_SEALS(future_write)), Err(Errno::EPERM));
    assert_eq!(host.upgrade()["sessions"], 1);
    drop(region);
}

/// A session without the library, whose answers nobody reads.
struct Silent {
    socket: Socket,
    asked: u64,
}

impl Silent {
    fn connect(host: &Host) -> Self {
        let socket = connect(&host.at("run/mccs.sock")).expect("connected");
        let (welcome, _fds) = socket.recv::<ResponseEnvelope>().expect("not closed").expect("a welcome");
        assert!(matches!(welcome.response, Response::Welcome { .. }), "{welcome:?}");
        Silent { socket, asked: 0 }
    }

    /// Asks until the service reads no more, as it does once its answers find no room.
    fn ask(&mut self) {
        loop {
            let request = Request::AllocMemory { bytes: 0 };
            match self.socket.send(&RequestEnvelope { id: self.asked + 1, request }, &[]) {
                Ok(()) => self.asked += 1,
                Err(SocketError::WouldBlock) if self.socket.wait_writable(std::time::Duration::from_millis(300)) => {}
                Err(SocketError::WouldBlock) => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Every request is answered once, in order.
    fn read(&self) {
        for id in 1..=self.asked {
            let (answer, _) = self.socket.recv::<ResponseEnvelope>().expect("not closed").expect("an answer");
            assert_eq!(answer.id, id, "{answer:?}");
            assert!(matches!(answer.response, Response::Error { .. }), "{answer:?}");
        }
    }
}

#[test]
fn answers_that_a_process_does_not_read_wait_for_it_also_in_the_next_program() {
    let (mut host, seed) = (Host::start(""), seed());
    let ranks = Rank::join_all(&host, 2);
    let mut silent = Silent::connect(&host);
    silent.ask();
    let (stop, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        Load::start(scope, seed, &ranks, &calls, &stop);
        let load = Load { stop: &stop, calls: &calls };
        for _ in 0..3 {
            let told = host.upgrade();
            assert_eq!((&told["sessions"], &told["ended"]), (&3.into(), &0.into()));
            load.goes_on(4);
        }
    });
    silent.read();
}

/// Commands are kept back by the quota of the second program, which is upgraded in turn while requests wait for them.
#[test]
fn requests_wait_for_the_commands_before_them_over_any_number_of_upgrades() {
    let quota = |operations: u32| format!("[[tenant]]\nname = \"default\"\nmax_operations_in_flight = {operations}\n");
    let (mut host, seed) = (Host::start(&quota(8)), seed());
    let mut ranks = Rank::join_all(&host, 2);
    let (second, first) = (ranks.pop().expect("two"), ranks.pop().expect("two"));
    // In order, and behind as many calls as there may be in flight and some more.
    const CALLS: u64 = 12;
    let Rank { comm, stream, send, recv, client } = first;
    for _ in 0..CALLS {
        comm.all_reduce(send.at(0), recv.at(0), COUNT_MAX as u64, mccs::DataType::I32, mccs::RedOp::Sum, &stream)
            .expect("enqueued");
    }
    std::thread::scope(|scope| {
        let leaves = scope.spawn(move || comm.destroy());
        // By then it has asked; it leaves as well if it has not.
        std::thread::sleep(std::time::Duration::from_millis(100));
        for operations in [2, 2, 2, 8] {
            host.write_config(&quota(operations));
            assert_eq!(host.upgrade()["communicators"], 1);
        }
        (0..CALLS).for_each(|call| second.call(seed, call, COUNT_MAX));
        second.stream.synchronize().expect("completed");
        leaves.join().expect("a thread").expect("left");
    });
    stream.synchronize().expect("completed");
    drop((send, recv, client));
}
