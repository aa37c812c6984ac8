//! A tenant that does not use the shim, but writes what it likes. Each case ends that call or that session with a clear
//! reason; another tenant's collectives go on, checked.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mccs_eval::workload::Call;
use mccs_ipc::board::{Board, BoardCall};
use mccs_ipc::command::{BufferRef, Command, FLAG_GROUP_CONTINUES, FLAG_POSTED, FLAG_ROUND, FLAG_SCALAR_AT, Opcode};
use mccs_ipc::gate::Gate;
use mccs_ipc::handshake::{Socket, SocketError, connect};
use mccs_ipc::protocol::{Request, RequestEnvelope, Response, ResponseEnvelope, SegmentLayout};
use mccs_ipc::queue::{Producer, Push};
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::{Doorbell, StreamWord};
use mccs_ipc::types::{CollectiveKind, DataType, Handle, RedOp, UniqueId};
use mccs_service::memory::mappings_of_tenants;
use mccs_service::tenants::Resource;
use mccs_tests::{TestService, run_checked};

const SETTINGS: &str = "[[tenant]]\nname = \"hostile\"\nsocket = \"h\"\nmax_operations_in_flight = 64\n\
                        max_memory = \"64GiB\"\nmax_regions = 65536\n\
                        [[tenant]]\nname = \"honest\"\nsocket = \"g\"\n";

/// A session without the shim.
struct Raw {
    socket: Socket,
    doorbell: Doorbell,
    segment: Arc<Mapping>,
    layout: SegmentLayout,
    commands: Producer<Command>,
    next_id: u64,
    stream: Handle,
    comm: Handle,
    board: Option<Board>,
    region: Handle,
}

impl Raw {
    fn connect(service: &TestService) -> Self {
        let id = UniqueId(std::process::id().to_le_bytes().repeat(4).try_into().expect("16 bytes"));
        Self::join(service, id, 0, 1)
    }

    fn join(service: &TestService, id: UniqueId, rank: u32, nranks: u32) -> Self {
        let socket = connect(&service.socket(0)).expect("connected");
        let (envelope, mut fds) = receive(&socket).expect("a welcome");
        let Response::Welcome { layout, .. } = envelope.response else { panic!("{envelope:?}") };
        let doorbell = Doorbell::from_fd(fds.remove(1));
        let segment = Arc::new(Mapping::map(fds[0].as_fd(), layout.segment_bytes).expect("a segment"));
        let commands = Producer::new(Arc::clone(&segment), layout.commands_offset, layout.commands_capacity);
        let mut raw = Raw {
            socket,
            doorbell,
            segment,
            layout,
            commands: commands.expect("a ring"),
            next_id: 0,
            stream: Handle::NONE,
            comm: Handle::NONE,
            board: None,
            region: Handle::NONE,
        };
        let Response::Stream { stream, .. } = raw.ask(Request::CreateStream, &[]) else { panic!("no stream") };
        let root_address = String::new();
        let join = Request::InitRank { id, rank, nranks, gpu: None, root_address, by_engines: false };
        let (Response::Comm { comm, board, .. }, fds) = raw.ask_with_fds(join, &[]) else { panic!("no communicator") };
        raw.board = board.map(|layout| Board::map(fds[0].as_fd(), layout).expect("a board"));
        let Response::Region { region, .. } = raw.ask(Request::AllocMemory { bytes: 4096 }, &[]) else {
            panic!("no memory")
        };
        (raw.stream, raw.comm, raw.region) = (stream, comm, region);
        raw
    }

    fn ask(&mut self, request: Request, fds: &[OwnedFd]) -> Response {
        self.ask_with_fds(request, fds).0
    }

    fn ask_with_fds(&mut self, request: Request, fds: &[OwnedFd]) -> (Response, Vec<OwnedFd>) {
        self.next_id += 1;
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.socket.send(&RequestEnvelope { id: self.next_id, request }, &fds).expect("sent");
        let (envelope, fds) = receive(&self.socket).expect("an answer");
        (envelope.response, fds)
    }

    /// An all-reduce that would be right.
    fn command(&self) -> Command {
        let buffer = |offset_bytes| BufferRef { region: self.region, offset_bytes };
        Command {
            opcode: Opcode::Collective as u32,
            comm: self.comm,
            stream: self.stream,
            ticket: 1,
            kind: CollectiveKind::AllReduce.to_wire(),
            dtype: DataType::F32.to_wire(),
            count: 4,
            send: buffer(0),
            recv: buffer(2048),
            ..bytemuck::Zeroable::zeroed()
        }
    }

    fn push(&mut self, command: &Command) -> bool {
        match self.commands.try_push(command).expect("a sound ring") {
            Push::Full => false,
            Push::Pushed { consumer_sleeps } => {
                if consumer_sleeps {
                    self.doorbell.ring();
                }
                true
            }
        }
    }

    /// The reason for which the service ends this session.
    fn fenced(self) -> String {
        let (envelope, _) = receive(&self.socket).expect("a reason");
        let Response::Error { message, .. } = envelope.response else { panic!("{envelope:?}") };
        assert!(receive(&self.socket).is_none(), "the service hangs up");
        message
    }

    fn word(&self) -> &StreamWord {
        StreamWord::at(&self.segment, self.layout.words_offset, self.stream.index).expect("a word")
    }

    /// The message with which the call with ticket 1 fails.
    fn failed(self) -> String {
        assert!(self.word().wait(1, Duration::ZERO, Duration::from_secs(600)));
        let (offset, capacity) = (self.layout.completions_offset, self.layout.completions_capacity);
        let mut completions = mccs_ipc::queue::Consumer::<mccs_ipc::command::Completion>::new(
            Arc::clone(&self.segment),
            offset,
            capacity,
        )
        .expect("a ring");
        completions.try_pop().expect("a sound ring").expect("a failure").message()
    }
}

fn receive(socket: &Socket) -> Option<(ResponseEnvelope, Vec<OwnedFd>)> {
    assert!(socket.wait_readable(Duration::from_secs(600)));
    socket.recv().ok().flatten()
}

/// Runs `attack` while an honest tenant works; afterwards the service must be as before.
fn attack(attack: impl FnOnce(&TestService)) {
    let service = TestService::start(SETTINGS);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let honest = scope.spawn(|| {
            service.ranks(1, 2, |rank| {
                let mut rounds = 0;
                loop {
                    let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::F32, RedOp::Sum);
                    let call = Call { kind, dtype, redop, root: 0, count: 1000, nranks: 2, seed: rounds };
                    assert_eq!(run_checked(&rank, &call, rounds % 2 == 0), 0);
                    rounds += 1;
                    // Both ranks must stop after the same round: rank 0 decides, by a one-element all-reduce.
                    let vote = rank.client.allocate(4).expect("memory");
                    // SAFETY: nothing is in flight.
                    let bytes = unsafe { vote.as_mut_slice() };
                    let own = u32::from(rank.comm.rank() == 0 && stop.load(Ordering::Relaxed));
                    bytes.copy_from_slice(&own.to_le_bytes());
                    let place = vote.at(0);
                    rank.comm.all_reduce(place, place, 1, DataType::U32, RedOp::Sum, &rank.stream).expect("enqueued");
                    rank.stream.synchronize().expect("completed");
                    if bytes[0] == 1 {
                        break;
                    }
                }
            });
        });
        attack(&service);
        stop.store(true, Ordering::Relaxed);
        honest.join().expect("the honest tenant");
    });
    // A new session of the attacked tenant works: its quotas are free again.
    Raw::connect(&service);
}

/// One wrong command; returns the call's failure.
fn call_fails(change: impl FnOnce(&mut Command)) -> String {
    let mut message = String::new();
    attack(|service| {
        let mut raw = Raw::connect(service);
        let mut command = raw.command();
        change(&mut command);
        raw.push(&command);
        message = raw.failed();
    });
    message
}

/// One nonsensical command; returns why the session ended.
fn session_ends(change: impl FnOnce(&mut Command)) -> String {
    let mut message = String::new();
    attack(|service| {
        let mut raw = Raw::connect(service);
        let mut command = raw.command();
        change(&mut command);
        raw.push(&command);
        message = raw.fenced();
    });
    message
}

#[test]
fn wrong_numbers_fail_the_call() {
    assert!(call_fails(|c| c.opcode = 99).contains("unknown opcode 99"));
    assert!(call_fails(|c| c.dtype = 12).contains("unknown data type 12"));
    assert!(call_fails(|c| c.redop = u32::MAX).contains("unknown reduction"));
    assert!(call_fails(|c| c.kind = 9).contains("unknown collective 9"));
    assert!(call_fails(|c| c.root = 1).contains("1 of 1 ranks"));
}

#[test]
fn memory_that_is_not_the_tenants_fails_the_call() {
    assert!(call_fails(|c| c.send.region.index = 7).contains("does not exist"));
    assert!(call_fails(|c| c.recv.region.generation += 1).contains("does not exist"));
    assert!(call_fails(|c| c.count = 1025).contains("leaves its region of 4096 bytes"));
    assert!(call_fails(|c| c.send.offset_bytes = 4093).contains("leaves its region"));
    assert!(call_fails(|c| c.send.offset_bytes = u64::MAX - 3).contains("leaves its region"));
    assert!(call_fails(|c| c.count = u64::MAX / 2).contains("larger than memory"));
    assert!(call_fails(|c| c.recv.offset_bytes = 4).contains("overlap"));
    for offset in [4093, u64::MAX - 3] {
        let scaled = |c: &mut Command| {
            (c.redop, c.flags, c.scalar_bits) = (RedOp::PreMulSum.to_wire(), FLAG_SCALAR_AT, offset);
        };
        assert!(call_fails(scaled).contains(&format!("the scalar at offset {offset} leaves its region of 4096 bytes")));
    }
}

#[test]
fn memory_of_gpus_that_is_none_is_refused() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let refused = |raw: &mut Raw, request, fds: &[OwnedFd]| match raw.ask(request, fds) {
            Response::Error { message, .. } => message,
            other => panic!("{other:?}"),
        };
        let register = Request::RegisterGpuMemory { gpu: [7; 16], ipc_handle: vec![0; 64], bytes: 4096 };
        let said = refused(&mut raw, register, &[]);
        assert!(said.contains("no GPUs") || said.contains("does not have the GPU"), "{said}");
        let name = |bytes: &[u64]| Request::NameGpuSegments { begins: false, bytes: bytes.to_vec() };
        let null = || OwnedFd::from(std::fs::File::open("/dev/null").expect("a device"));
        let memfd = || Mapping::create("x", 4096).expect("memory").0;
        assert!(refused(&mut raw, name(&[4096]), &[]).contains("a descriptor each"));
        assert!(refused(&mut raw, name(&[]), &[null()]).contains("a descriptor each"));
        assert!(refused(&mut raw, name(&[4096]), &[memfd()]).contains("something else"));
        assert!(refused(&mut raw, name(&[4096, 4095]), &[null(), null()]).contains("not whole pages"));
        // More than a region has, and none of them kept.
        let quota = mccs_service::memory::descriptors_of_tenant();
        for _ in 0..2 {
            let taken = (0..).take_while(|_| raw.ask(name(&[4096]), &[null()]) == Response::Done).count() as u64;
            assert_eq!(taken, quota);
        }
        // What was named before is dropped: together they would be too many.
        for _ in 0..2 * quota {
            let first = Request::NameGpuSegments { begins: true, bytes: vec![4096] };
            assert_eq!(raw.ask(first, &[null()]), Response::Done);
        }
        let said = refused(&mut raw, Request::RegisterGpuSegments { gpu: [7; 16] }, &[]);
        assert!(said.contains("no GPUs") || said.contains("does not have the GPU"), "{said}");
        assert!(matches!(raw.ask(Request::CreateStream, &[]), Response::Stream { .. }), "the session goes on");
    });
}

#[test]
fn forged_handles_and_tickets_end_the_session() {
    assert!(session_ends(|c| c.stream.index = 5).contains("stream"));
    assert!(session_ends(|c| c.stream.generation = 0).contains("stream"));
    assert!(session_ends(|c| c.comm.index = 5).contains("communicator"));
    assert!(session_ends(|c| c.ticket = 2).contains("ticket 2"));
}

#[test]
fn a_ring_index_that_lies_ends_the_session() {
    attack(|service| {
        let raw = Raw::connect(service);
        // The number of the first slot, behind the ring's header of four pairs of lines.
        let number = raw.segment.at::<u64>(raw.layout.commands_offset + 4 * 128, 1).expect("the first slot");
        // SAFETY: inside the mapping; the service reads it atomically.
        unsafe { number.write_volatile(u64::MAX / 2) };
        raw.doorbell.ring();
        assert!(raw.fenced().contains("contradicts"));
    });
    // An index that lies is looked at only to count what waits, and harms its own session's order at most.
    attack(|service| {
        let mut raw = Raw::connect(service);
        let produced = raw.segment.at::<u64>(raw.layout.commands_offset, 1).expect("the ring's header");
        // SAFETY: as above.
        unsafe { produced.write_volatile(u64::MAX / 2) };
        let Response::Done = raw.ask(Request::DestroyStream { stream: raw.stream }, &[]) else { panic!("not done") };
    });
}

#[test]
fn a_group_that_never_ends_ends_the_session() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let mut command = raw.command();
        (command.opcode, command.flags) = (Opcode::Send as u32, FLAG_GROUP_CONTINUES);
        for ticket in 1..=65 {
            command.ticket = ticket;
            raw.push(&command);
        }
        assert!(raw.fenced().contains("a group has over 64 operations"));
    });
}

/// Fills the ring for a while, reads nothing, and leaves without a word.
#[test]
fn a_flood_slows_down_only_itself() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let (mut command, mut ticket) = (raw.command(), 1);
        while ticket < 200_000 {
            command.ticket = ticket;
            if raw.push(&command) {
                ticket += 1;
            } else {
                std::thread::yield_now();
            }
        }
    });
}

/// Closes the socket, but not the segment, and goes on writing commands that never end.
#[test]
fn a_session_whose_socket_is_closed_takes_no_more_than_the_ring_held() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let gated = Request::CreateGatedStream { region: raw.region, offset_bytes: 0 };
        let Response::Stream { stream, .. } = raw.ask(gated, &[]) else { panic!("no stream") };
        let mut command = Command { opcode: Opcode::Nop as u32, stream, ..raw.command() };
        let limit = 64;
        for ticket in 1..=limit {
            command.ticket = ticket;
            assert!(raw.push(&command));
        }
        let sessions = || service.service().registry.sessions();
        // From here on none is taken in turn.
        while !sessions().iter().any(|session| session.in_flight() == limit) {
            std::thread::yield_now();
        }
        let Raw { socket, mut commands, layout, .. } = raw;
        let (mut ticket, most) = (limit, 2 * u64::from(layout.commands_capacity));
        let mut fill = |commands: &mut Producer<Command>| {
            command.ticket = ticket + 1;
            while let Push::Pushed { .. } = commands.try_push(&command).expect("a sound ring") {
                ticket += 1;
                command.ticket = ticket + 1;
                assert!(ticket - limit <= most, "commands that came after the end are taken");
            }
        };
        fill(&mut commands);
        drop(socket);
        while sessions().iter().any(|session| session.tenant.name == "hostile") {
            (0..1000).for_each(|_| fill(&mut commands));
        }
    });
}

/// A group whose calls are all there before the first may start, and of which each ends as it starts.
#[test]
fn a_long_row_of_calls_that_end_at_once_is_no_chain_of_calls() {
    const CALLS: u64 = 60_000;
    let service = TestService::start("[[tenant]]\nname = \"t\"\nmax_operations_in_flight = 65536\n");
    let mut raw = Raw::connect(&service);
    let (response, fds) = raw.ask_with_fds(Request::AllocMemory { bytes: 4096 }, &[]);
    let Response::Region { region, .. } = response else { panic!("no memory") };
    let memory = Mapping::map(fds[0].as_fd(), 4096).expect("memory");
    let gated = Request::CreateGatedStream { region, offset_bytes: 0 };
    let Response::Stream { stream, .. } = raw.ask(gated, &[]) else { panic!("no stream") };
    for ticket in 1..=CALLS {
        let flags = if ticket < CALLS { FLAG_GROUP_CONTINUES } else { 0 };
        let command = Command { stream, ticket, flags, ..raw.command() };
        while !raw.push(&command) {
            std::thread::yield_now();
        }
    }
    // SAFETY: the mapping lives to the end of this function.
    unsafe { Gate::at(memory.as_ptr()) }.expect("aligned").open(CALLS);
    let word = StreamWord::at(&raw.segment, raw.layout.words_offset, stream.index).expect("a word");
    assert!(word.wait(CALLS, Duration::ZERO, Duration::from_secs(600)));
}

/// Refusals of all that one session waits for, at one moment: none is lost.
#[test]
fn a_peer_that_goes_leaves_nobody_waiting_for_one_of_many_joins() {
    const COMMS: usize = 1500;
    let service = TestService::start("[[tenant]]\nname = \"t\"\nmax_communicators = 4000\n");
    let ids: Vec<_> = (0..COMMS).map(|_| mccs::unique_id().expect("an id")).collect();
    let raw = Raw::connect(&service);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let spec =
                |id: &UniqueId| mccs::RankSpec { id: *id, rank: 0, nranks: 3, device: 0, root_address: String::new() };
            service.connect(0).init_communicator_ranks(&ids.iter().map(spec).collect::<Vec<_>>()).map(drop)
        });
        for (number, id) in ids.iter().enumerate() {
            let root_address = String::new();
            let request = Request::InitRank { id: *id, rank: 1, nranks: 3, gpu: None, root_address, by_engines: false };
            let envelope = RequestEnvelope { id: 100 + number as u64, request };
            while let Err(error) = raw.socket.send(&envelope, &[]) {
                assert!(matches!(error, SocketError::WouldBlock), "{error}");
                std::thread::yield_now();
            }
        }
        let tenant = Arc::clone(&service.service().registry.sessions()[0].tenant);
        // Its own communicator, and all of both.
        while tenant.used(Resource::Ranks) < 1 + 2 * COMMS as u64 {
            std::thread::yield_now();
        }
        drop(raw);
        let error = waits.join().expect("the other rank").expect_err("its peer has gone").to_string();
        assert!(error.contains("rank 1"), "{error}");
    });
}

/// Who has asked to leave, and waits for a message to be taken that nobody takes, can still end that; and once it has left, nothing.
#[test]
fn a_rank_that_waits_to_leave_can_end_what_it_waits_for() {
    let service = TestService::start(SETTINGS);
    let id = mccs::unique_id().expect("an id");
    let [mut raw, _other] = std::thread::scope(|scope| {
        let service = &service;
        let ranks = [0, 1].map(|rank| scope.spawn(move || Raw::join(service, id, rank, 2)));
        ranks.map(|rank| rank.join().expect("a rank"))
    });
    let message = Command { opcode: Opcode::Send as u32, root: 1, recv: BufferRef::NONE, ..raw.command() };
    assert!(raw.push(&message));
    let comm = raw.comm;
    let request = Request::DestroyComm { comm };
    raw.socket.send(&RequestEnvelope { id: 1000, request: request.clone() }, &[]).expect("sent");
    // Those that end something are served in their order: the first has been.
    assert!(matches!(raw.ask(request, &[]), Response::Error { .. }));
    let abort = || Request::AbortComm { comm, cuda_error: None };
    raw.socket.send(&RequestEnvelope { id: 1001, request: abort() }, &[]).expect("sent");
    let mut answers = [0; 2].map(|_| {
        let (answer, _) = receive(&raw.socket).expect("an answer");
        assert!(matches!(answer.response, Response::Done), "{answer:?}");
        answer.id
    });
    answers.sort_unstable();
    assert_eq!(answers, [1000, 1001]);
    assert!(matches!(raw.ask(abort(), &[]), Response::Error { .. }));
    assert!(raw.failed().contains("rank 0 aborted"));
}

/// Every request gets one answer.
#[test]
fn aborts_of_one_communicator_are_all_answered() {
    const ABORTS: u64 = 3000;
    attack(|service| {
        let raw = Raw::connect(service);
        let request = Request::AbortComm { comm: raw.comm, cuda_error: None };
        let mut answered = Vec::new();
        for id in 10_000..10_000 + ABORTS {
            while raw.socket.send(&RequestEnvelope { id, request: request.clone() }, &[]).is_err() {
                answered.push(receive(&raw.socket).expect("an answer").0.id);
            }
        }
        while answered.len() < ABORTS as usize {
            answered.push(receive(&raw.socket).expect("an answer").0.id);
        }
        answered.sort_unstable();
        assert!(answered.into_iter().eq(10_000..10_000 + ABORTS));
    });
}

/// Failures pile up unread: the ring of completions is full, the words still rise, the session lives.
#[test]
fn a_session_that_never_reads_its_failures_is_released_all_the_same() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let mut command = raw.command();
        command.dtype = 99;
        for ticket in 1..=500 {
            command.ticket = ticket;
            while !raw.push(&command) {
                std::thread::yield_now();
            }
        }
        assert!(raw.word().wait(500, Duration::ZERO, Duration::from_secs(600)));
        assert!(matches!(raw.ask(Request::CreateStream, &[]), Response::Stream { .. }));
    });
}

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
            // Where the session has ended already nothing is sent.
            let _ = socket.send(&RequestEnvelope { id: 1, request: Request::CreateStream }, &[fds[0].as_fd()]);
        };
        let (raw, _readers) = gave_away(service, 1, say);
        assert!(raw.fenced().contains("malformed"));
        Raw::connect(service);
    });
}

/// A process has a limited number of mappings: a tenant with all of them would leave the service none for anybody.
#[test]
fn regions_without_end_leave_room_for_others() {
    attack(|service| {
        let mut raw = Raw::connect(service);
        let bytes = 2 << 20;
        let (memory, _) = mccs_ipc::shm::Mapping::create("memory", bytes).expect("a memfd");
        let message = loop {
            let fd = memory.try_clone().expect("a descriptor");
            match raw.ask(Request::RegisterMemory { bytes }, &[fd]) {
                Response::Region { .. } => {}
                Response::Error { message, .. } => break message,
                other => panic!("{other:?}"),
            }
        };
        assert!(message.contains("over its quota"), "{message}");
        let (maps, most) = (std::fs::read_to_string("/proc/self/maps").expect("the maps"), mappings_of_tenants());
        assert!((maps.lines().count() as u64) < most, "{most} at most");
        // Where the kernel allows more than its default, the tenant's memory may come to an end before.
        assert!(message.contains("mappings") || most > 60_000, "{message}");
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

/// A rank without the shim, whose peer, with it, makes one call of four floats; what the peer gets. `post` says what to
/// post and to send.
fn peer_of(hostile: impl FnOnce(&mut Raw, &BoardCall) + Send) -> Result<f32, mccs::Error> {
    let mut result = Ok(0.0);
    attack(|service| {
        let id = mccs::unique_id().expect("an id");
        std::thread::scope(|scope| {
            let raw = scope.spawn(move || {
                let mut raw = Raw::join(service, id, 1, 2);
                hostile(&mut raw, &BoardCall::new(CollectiveKind::AllReduce, DataType::F32, RedOp::Sum, 0, 4));
                raw
            });
            let client = service.connect(0);
            let comm = client.init_communicator_rank(id, 0, 2, 0, "").expect("a communicator");
            let stream = client.register_stream().expect("a stream");
            let memory = client.allocate(16).expect("memory");
            // SAFETY: nothing is in flight.
            unsafe { memory.as_mut_slice() }.copy_from_slice(&1f32.to_le_bytes().repeat(4));
            let place = memory.at(0);
            comm.all_reduce(place, place, 4, DataType::F32, RedOp::Sum, &stream).expect("enqueued");
            result = stream.synchronize().map(|()| {
                // SAFETY: all work has ended.
                f32::from_le_bytes(unsafe { memory.as_slice() }[..4].try_into().expect("four bytes"))
            });
            drop(raw.join().expect("the hostile rank"));
        });
    });
    result
}

/// A post, with bytes that the slot has room for. The service is told if it wants to know, as the shim would.
fn post(raw: &mut Raw, round: u64, call: &BoardCall) {
    let data = [2f32; 4];
    let board = raw.board.as_ref().expect("a board");
    // SAFETY: 16 bytes are readable.
    if unsafe { board.post(1, round, call, 0, data.as_ptr().cast(), 16) } {
        raw.push(&Command { opcode: Opcode::Posted as u32, ..raw.command() });
    }
}

#[test]
fn a_board_is_believed_only_as_far_as_its_communicator_goes() {
    // An honest post, for a start.
    assert_eq!(peer_of(|raw, call| post(raw, 1, call)).expect("completed"), 3.0);
    // Posted by command: the service plays the rank's part.
    let by_command = |raw: &mut Raw, flags, rounds| {
        let command = Command { flags, rounds, ..raw.command() };
        raw.push(&command);
    };
    peer_of(|raw, _| by_command(raw, FLAG_ROUND, 1)).expect("completed");
    // Another call than the peer's, on the board only, and both ways at once.
    let other = BoardCall::new(CollectiveKind::AllReduce, DataType::F32, RedOp::Max, 0, 4);
    let error = peer_of(|raw, _| post(raw, 1, &other)).expect_err("ranks disagree").to_string();
    assert!(error.contains("operation 0") && error.contains("max") && error.contains("reduction"), "{error}");
    // Rounds that nobody else is at, and one that was never begun.
    for (flags, rounds) in [(FLAG_ROUND, 9), (FLAG_ROUND | FLAG_POSTED, u64::MAX)] {
        let error = peer_of(|raw, _| by_command(raw, flags, rounds)).expect_err("ranks disagree").to_string();
        assert!(error.contains("ranks disagree"), "{error}");
    }
    // News that are none, as many as the ring takes; then the rank leaves.
    let error = peer_of(|raw, _| {
        let news = Command { opcode: Opcode::Posted as u32, ..raw.command() };
        for _ in 0..100 {
            raw.push(&news);
        }
        let Response::Done = raw.ask(Request::DestroyComm { comm: raw.comm }, &[]) else { panic!("not left") };
    });
    assert!(error.expect_err("the peer has left").to_string().contains("rank 1"));
}

#[test]
fn rounds_that_cannot_be_end_the_session() {
    let id = || mccs::unique_id().expect("an id");
    // A communicator of one has no board.
    assert!(session_ends(|c| c.flags = FLAG_ROUND).contains("round"));
    assert!(session_ends(|c| c.flags = FLAG_POSTED).contains("round"));
    let fenced = |push: fn(&mut Raw)| {
        let mut message = String::new();
        attack(|service| {
            let id = id();
            std::thread::scope(|scope| {
                let peer = scope.spawn(move || Raw::join(service, id, 0, 2));
                let mut raw = Raw::join(service, id, 1, 2);
                push(&mut raw);
                message = raw.fenced();
                drop(peer.join().expect("the peer"));
            });
        });
        message
    };
    let no_round = fenced(|raw| _ = raw.push(&Command { flags: 0, ..raw.command() }));
    assert!(no_round.contains("round"), "short enough for a round, and not called one");
    let none_before = fenced(|raw| _ = raw.push(&Command { flags: FLAG_ROUND, rounds: 0, ..raw.command() }));
    assert!(none_before.contains("0 rounds before it"));
    // After the last number there is there is no next.
    let message = fenced(|raw| {
        let command = Command { flags: FLAG_ROUND, rounds: u64::MAX, ..raw.command() };
        raw.push(&command);
        raw.push(&Command { ticket: 2, ..command });
    });
    assert!(message.contains(&u64::MAX.to_string()), "{message}");
}
