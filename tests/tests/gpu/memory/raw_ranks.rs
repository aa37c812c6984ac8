//! Memory that ranks name by themselves, without the library: that of others, that of no GPU, more than there is.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use bytemuck::Zeroable;
use mccs_cuda::{Allocation, Context, Shared, gpus};
use mccs_ipc::command::{BufferRef, Command, Completion, Opcode};
use mccs_ipc::device_initiated::{CommPart, ControlPage, SymmetricBufferPart};
use mccs_ipc::handshake::{Socket, connect};
use mccs_ipc::large::LargeWord;
use mccs_ipc::protocol::{self, JoinOptions, Request, RequestEnvelope, Response, ResponseEnvelope};
use mccs_ipc::queue::{Consumer, Producer, Push};
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::Doorbell;
use mccs_ipc::types::{CollectiveKind, DataType, Handle, RedOp, UniqueId};
use mccs_tenants::Resource;
use mccs_tests::TestService;
use mccs_tests::quotas::all_comes_back;

use super::super::mps::UNTIL;
use super::super::ranks::{Player, everybody};
use super::super::{LARGE, wait_until, without_handles};

/// A rank that does not use the shim, and no GPU either.
struct Raw {
    socket: Socket,
    commands: Producer<Command>,
    completions: Consumer<Completion>,
    doorbell: Doorbell,
    gpu: [u8; 16],
    stream: Handle,
    comm: Handle,
    page: Option<ControlPage>,
}

fn receive(socket: &Socket) -> (Response, Vec<OwnedFd>) {
    assert!(socket.wait_readable(Duration::from_secs(300)));
    let (envelope, fds): (ResponseEnvelope, _) = socket.recv().expect("an answer").expect("not the end");
    (envelope.response, fds)
}

impl Raw {
    /// Asks to join; the answer is still to come.
    fn join(service: &TestService, id: UniqueId, rank: u32) -> Self {
        let socket = connect(&service.socket(0)).expect("connected");
        let (Response::Welcome { layout, .. }, mut fds) = receive(&socket) else { panic!("no welcome") };
        let doorbell = Doorbell::from_fd(fds.remove(1));
        let segment = Arc::new(Mapping::map(fds[0].as_fd(), layout.segment_bytes).expect("a segment"));
        let commands = Producer::new(Arc::clone(&segment), layout.commands_offset, layout.commands_capacity);
        let completions = Consumer::new(segment, layout.completions_offset, layout.completions_capacity);
        let (commands, completions) = (commands.expect("a ring"), completions.expect("a ring"));
        let gpu = gpus().expect("GPUs")[rank as usize].id.0;
        let (stream, comm, page) = (Handle::NONE, Handle::NONE, None);
        let mut raw = Raw { socket, commands, completions, doorbell, gpu, stream, comm, page };
        let Response::Stream { stream, .. } = raw.ask(Request::CreateStream, &[]) else { panic!("no stream") };
        raw.stream = stream;
        let root_address = String::new();
        let join = Request::InitRank {
            id,
            rank,
            nranks: 2,
            gpu: Some(gpu),
            root_address,
            role: protocol::Role::Whole,
            options: JoinOptions::default(),
        };
        raw.send(join, &[]);
        raw
    }

    fn is_joined(&mut self) {
        let (Response::Comm { comm, .. }, fds) = receive(&self.socket) else { panic!("no communicator") };
        self.comm = comm;
        self.page = Some(ControlPage::map(fds[0].as_fd()).expect("a page"));
    }

    fn send(&self, request: Request, fds: &[OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.socket.send(&RequestEnvelope { id: 1, request }, &fds).expect("sent");
    }

    fn ask(&self, request: Request, fds: &[OwnedFd]) -> Response {
        self.send(request, fds);
        receive(&self.socket).0
    }

    /// Calls an all-gather of 1 KiB in a region, and says that the stream has come to it.
    fn call(&mut self, rank: u32, region: Handle) {
        let command = Command {
            opcode: Opcode::Collective as u32,
            comm: self.comm,
            stream: self.stream,
            ticket: 1,
            kind: CollectiveKind::AllGather.to_wire(),
            dtype: DataType::F32.to_wire(),
            redop: RedOp::Sum.to_wire(),
            count: 256,
            send: BufferRef { region, offset_bytes: 0 },
            recv: BufferRef { region, offset_bytes: 4096 },
            ..Command::zeroed()
        };
        if !matches!(self.commands.try_push(&command), Ok(Push::Pushed { .. })) {
            panic!("an empty ring has room");
        }
        self.doorbell.ring();
        self.page.as_ref().expect("a page").tell_large(rank, LargeWord::Ready, 1);
    }
}

/// Ranks that name memory as `register` does and call; why they fail.
fn attempt(service: &TestService, register: impl Fn(&Raw) -> Response) -> String {
    attempt_and(service, register, || ())
}

/// The same; and what is called once they have failed, and have left nothing yet.
fn attempt_and(service: &TestService, register: impl Fn(&Raw) -> Response, then: impl FnOnce()) -> String {
    let id = mccs::unique_id().expect("an id");
    let mut ranks = [0, 1].map(|rank| Raw::join(service, id, rank));
    ranks.iter_mut().for_each(Raw::is_joined);
    for (number, rank) in (0..).zip(&mut ranks) {
        match register(rank) {
            Response::Region { region, .. } => rank.call(number, region),
            Response::Error { message, .. } => return message,
            other => panic!("{other:?}"),
        }
    }
    loop {
        if let Some(completion) = ranks[0].completions.try_pop().expect("a sound ring") {
            then();
            return completion.message();
        }
        let arrived = ranks[0].page.as_ref().expect("a page").large_word(0, LargeWord::Arrived);
        assert_ne!(arrived, 1, "the memory was taken");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn by_handle(handle: [u8; 64]) -> impl Fn(&Raw) -> Response {
    move |rank| {
        let request = Request::RegisterGpuMemory { gpu: rank.gpu, ipc_handle: handle.to_vec(), bytes: 1 << 20 };
        rank.ask(request, &[])
    }
}

/// A segment that is said to be a descriptor.
fn by_descriptor(fd: impl Fn() -> OwnedFd) -> impl Fn(&Raw) -> Response {
    by_descriptors(vec![2 << 20], fd)
}

/// As many as there are lengths, in bytes.
fn by_descriptors(bytes: Vec<u64>, fd: impl Fn() -> OwnedFd) -> impl Fn(&Raw) -> Response {
    let fds = move |count| (0..count).map(|_| fd()).collect::<Vec<_>>();
    move |rank| match rank.ask(Request::NameGpuSegments { begins: true, bytes: bytes.clone() }, &fds(bytes.len())) {
        Response::Done => rank.ask(Request::RegisterGpuSegments { gpu: rank.gpu }, &[]),
        refused => refused,
    }
}

#[test]
#[ignore = "needs two GPUs"]
fn memory_that_is_not_ones_own_is_refused() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    let service = TestService::start(LARGE);
    let directory = tempfile::tempdir().expect("a directory");
    let until = directory.path().join("enough");
    let mut other = Player::start_with("shows_handles", &everybody(&service, 1), &[(UNTIL, until.clone())]);
    let said = other.line_with("handles ");
    let words: Vec<_> = said.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "handles").expect("handles");
    let handle = |hex: &str| -> [u8; 64] {
        std::array::from_fn(|index| u8::from_str_radix(&hex[2 * index..][..2], 16).expect("a byte"))
    };
    let (used, stale) = (handle(words[at + 1]), handle(words[at + 2]));

    let refused = attempt(&service, by_handle(used));
    assert!(refused.contains("another process"), "{refused}");
    let mut forged = used;
    forged.iter_mut().for_each(|byte| *byte = byte.wrapping_mul(31).wrapping_add(7));
    for handle in [stale, forged, [0; 64]] {
        let failed = attempt(&service, by_handle(handle));
        assert!(failed.contains("registered memory cannot be opened: cuIpcOpenMemHandle"), "{failed}");
    }
    let null = || std::fs::File::open("/dev/null").expect("a device").into();
    let failed = attempt(&service, by_descriptor(null));
    assert!(failed.contains("registered memory cannot be opened: cuMemImportFromShareableHandle"), "{failed}");
    let refused = attempt(&service, by_descriptor(|| Mapping::create("x", 2 << 20).expect("memory").0));
    assert!(refused.contains("a descriptor of something else"), "{refused}");
    let context = Context::primary(&gpus().expect("GPUs")[0]).expect("a context");
    let (of_host, _) = Allocation::of_host(&context, 2 << 20).expect("memory of the host");
    let failed = attempt(&service, by_descriptor(|| of_host.export().expect("a descriptor")));
    assert!(failed.contains("registered memory is not that of a GPU of this service's"), "{failed}");

    // One segment twice, of which each may have that many bytes, but not both.
    let gpus = gpus().expect("GPUs");
    let may_be_mapped = 2 * gpus.len() as u64 * gpus.iter().map(|gpu| gpu.memory_bytes).sum::<u64>();
    let half = (may_be_mapped / 2).next_multiple_of(2 << 20) + (2 << 20);
    let (of_gpu, _) = Allocation::new(&context, 2 << 20, Shared::ByDescriptor).expect("memory");
    let failed = attempt(&service, by_descriptors(vec![half; 2], || of_gpu.export().expect("a descriptor")));
    assert!(failed.contains("over its quota") && failed.contains("mapped bytes of GPU memory"), "{failed}");

    std::fs::write(&until, "").expect("written");
    other.ends_well();
}

/// Descriptors of parts count as long as their answers wait, and no answer waits for ever: also of who takes one now and then.
#[test]
#[ignore = "needs two GPUs"]
fn parts_that_are_hardly_taken_are_charged_and_end_their_session() {
    let service = TestService::start(&without_handles(LARGE));
    let id = mccs::unique_id().expect("an id");
    let mut ranks = [0, 1].map(|rank| Raw::join(&service, id, rank));
    ranks.iter_mut().for_each(Raw::is_joined);
    let registry = &service.service().registry;
    let tenant = registry.tenants().into_iter().find(|tenant| tenant.name == "a").expect("the tenant");
    let (slow, mut most) = (&ranks[0], 0);
    let part = CommPart::SymmetricBuffer(SymmetricBufferPart::P2p);
    while registry.sessions().len() == 2 {
        let request = || RequestEnvelope { id: 2, request: Request::OpenPart { comm: slow.comm, part } };
        while slow.socket.send(&request(), &[]).is_ok() {}
        most = most.max(tenant.used(Resource::Descriptors));
        if slow.socket.wait_readable(Duration::ZERO) {
            let _ = slow.socket.recv::<ResponseEnvelope>();
        }
        // A delay makes it slow.
        std::thread::sleep(Duration::from_millis(100));
    }
    // Each answer has one for each rank.
    assert!(most >= 2, "descriptors that wait are charged");
    drop(ranks);
    all_comes_back(&service, "a");
}

/// A segment that is said to be longer than it is can be imported, and not mapped: it counts as long as the driver has it.
#[test]
#[ignore = "needs two GPUs"]
fn what_is_imported_counts_also_where_it_cannot_be_mapped() {
    let service = TestService::start(LARGE);
    let tenants = service.service().registry.tenants();
    let tenant = tenants.into_iter().find(|tenant| tenant.name == "a").expect("the tenant");
    let context = Context::primary(&gpus().expect("GPUs")[0]).expect("a context");
    let (short, _) = Allocation::new(&context, 2 << 20, Shared::ByDescriptor).expect("memory");
    let register = by_descriptors(vec![2 << 20, 4 << 20], || short.export().expect("a descriptor"));
    let failed = attempt_and(&service, register, || {
        // Memory that could not be mapped is gone, and gives its share of addresses back.
        wait_until(|| tenant.used(Resource::MappedBytes) == 0);
        // Regions of one rank or of both: the first that fails ends the communicator.
        let used = tenant.used(Resource::Imports);
        assert!(used == 2 || used == 4, "{used} of segments that the driver has open");
    });
    assert!(failed.contains("registered memory cannot be opened: cuMem"), "{failed}");
    all_comes_back(&service, "a");
}
