//! A session that is written by hand.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use mccs_ipc::command::{BufferRef, Command, Opcode};
use mccs_ipc::handshake::{Socket, connect};
use mccs_ipc::protocol::{JoinOptions, Request, RequestEnvelope, Response, ResponseEnvelope, Role, SegmentLayout};
use mccs_ipc::queue::{Producer, Push};
use mccs_ipc::shm::Mapping;
use mccs_ipc::shm_exchange::ShmExchange;
use mccs_ipc::sync::{Doorbell, StreamWord};
use mccs_ipc::types::{CollectiveKind, DataType, Handle, UniqueId};
use mccs_tests::TestService;

/// A session without the shim.
pub struct Raw {
    pub socket: Socket,
    pub doorbell: Doorbell,
    pub segment: Arc<Mapping>,
    pub layout: SegmentLayout,
    pub commands: Producer<Command>,
    next_id: u64,
    pub stream: Handle,
    pub comm: Handle,
    pub shm_exchange: Option<ShmExchange>,
    pub region: Handle,
}

impl Raw {
    pub fn connect(service: &TestService) -> Self {
        let id = UniqueId(std::process::id().to_le_bytes().repeat(4).try_into().expect("16 bytes"));
        Self::join(service, id, 0, 1)
    }

    pub fn join(service: &TestService, id: UniqueId, rank: u32, nranks: u32) -> Self {
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
            shm_exchange: None,
            region: Handle::NONE,
        };
        let Response::Stream { stream, .. } = raw.ask(Request::CreateStream, &[]) else { panic!("no stream") };
        let root_address = String::new();
        let join = Request::InitRank {
            id,
            rank,
            nranks,
            gpu: None,
            root_address,
            role: Role::Whole,
            options: JoinOptions::default(),
        };
        let (Response::Comm { comm, shm_exchange, .. }, fds) = raw.ask_with_fds(join, &[]) else {
            panic!("no communicator")
        };
        raw.shm_exchange =
            shm_exchange.map(|layout| ShmExchange::map(fds[0].as_fd(), layout).expect("a shared-memory exchange"));
        let Response::Region { region, .. } = raw.ask(Request::AllocMemory { bytes: 4096 }, &[]) else {
            panic!("no memory")
        };
        (raw.stream, raw.comm, raw.region) = (stream, comm, region);
        raw
    }

    pub fn ask(&mut self, request: Request, fds: &[OwnedFd]) -> Response {
        self.ask_with_fds(request, fds).0
    }

    pub fn ask_with_fds(&mut self, request: Request, fds: &[OwnedFd]) -> (Response, Vec<OwnedFd>) {
        self.next_id += 1;
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.socket.send(&RequestEnvelope { id: self.next_id, request }, &fds).expect("sent");
        let (envelope, fds) = receive(&self.socket).expect("an answer");
        (envelope.response, fds)
    }

    /// An all-reduce that would be right.
    pub fn command(&self) -> Command {
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

    pub fn push(&mut self, command: &Command) -> bool {
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
    pub fn fenced(self) -> String {
        let (envelope, _) = receive(&self.socket).expect("a reason");
        let Response::Error { message, .. } = envelope.response else { panic!("{envelope:?}") };
        assert!(receive(&self.socket).is_none(), "the service hangs up");
        message
    }

    pub fn word(&self) -> &StreamWord {
        StreamWord::at(&self.segment, self.layout.words_offset, self.stream.index).expect("a word")
    }

    /// So many failures of communicators, and which they are of.
    pub fn reports(self, count: usize) -> Vec<(Handle, String)> {
        let (offset, capacity) = (self.layout.completions_offset, self.layout.completions_capacity);
        let ring = mccs_ipc::queue::Consumer::<mccs_ipc::command::Completion>::new(
            Arc::clone(&self.segment),
            offset,
            capacity,
        );
        let (mut completions, mut reports) = (ring.expect("a ring"), Vec::new());
        while reports.len() < count {
            match completions.try_pop().expect("a sound ring") {
                Some(completion) => reports.push((completion.comm, completion.message())),
                None => std::thread::yield_now(),
            }
        }
        reports
    }

    /// The message with which the call with ticket 1 fails.
    pub fn failed(self) -> String {
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

pub fn receive(socket: &Socket) -> Option<(ResponseEnvelope, Vec<OwnedFd>)> {
    assert!(socket.wait_readable(Duration::from_secs(600)));
    socket.recv().ok().flatten()
}
