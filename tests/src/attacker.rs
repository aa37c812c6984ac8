//! A tenant that does anything: a sequence of right and wrong requests, commands, writes to shared memory, closed descriptors and
//! ends, as its decisions say. The same decisions give the same sequence.

use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytemuck::Zeroable as _;
use mccs_ipc::command::{
    BufferRef, Command, FLAG_GROUP_CONTINUES, FLAG_POSTED, FLAG_ROUND, FLAG_SCALAR_AT, FLAG_TWIN, Opcode,
};
use mccs_ipc::handshake::{Socket, connect};
use mccs_ipc::protocol::{JoinOptions, Request, RequestEnvelope, Response, ResponseEnvelope, Role, SegmentLayout};
use mccs_ipc::queue::{Producer, Push};
use mccs_ipc::shm::{Mapping, make_whole};
use mccs_ipc::sync::Doorbell;
use mccs_ipc::types::{CollectiveKind, DataType, Handle, RedOp, UniqueId};
use nix::sys::socket::{Shutdown, shutdown};

/// Sessions at a time: enough for communicators of several ranks.
const SESSIONS_MAX: usize = 6;
/// Handles and descriptors that a session keeps of what it was given.
const KEPT_MAX: usize = 64;
/// Ids of communicators to choose from, so that ranks meet now and then.
const IDS: u64 = 8;

/// Decides: a number below the one that is named, which is at least 1.
pub type Decide<'a> = dyn FnMut(u64) -> u64 + 'a;

/// A session, with what it was given.
struct Session {
    socket: Socket,
    doorbell: Doorbell,
    segment: Arc<Mapping>,
    layout: SegmentLayout,
    commands: Producer<Command>,
    next_id: u64,
    tickets: Vec<(Handle, u64)>,
    comms: Vec<Handle>,
    regions: Vec<(Handle, u64)>,
    memory: Vec<Mapping>,
    kept: Vec<OwnedFd>,
}

impl Session {
    /// None where the service refuses, which it may.
    fn connect(socket: &Path) -> Option<Self> {
        let socket = connect(socket).ok()?;
        let (envelope, mut fds) = receive(&socket)?;
        let Response::Welcome { layout, .. } = envelope.response else { return None };
        if fds.len() < 2 {
            return None;
        }
        let doorbell = Doorbell::from_fd(fds.remove(1));
        let segment = Arc::new(Mapping::map(fds[0].as_fd(), layout.segment_bytes).ok()?);
        let commands = Producer::new(Arc::clone(&segment), layout.commands_offset, layout.commands_capacity).ok()?;
        Some(Session {
            socket,
            doorbell,
            segment,
            layout,
            commands,
            next_id: 0,
            tickets: Vec::new(),
            comms: Vec::new(),
            regions: Vec::new(),
            memory: Vec::new(),
            kept: fds,
        })
    }

    fn send(&mut self, request: Request, fds: &[OwnedFd]) {
        self.next_id += 1;
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        // A full socket and a closed one are what this is about.
        let _ = self.socket.send(&RequestEnvelope { id: self.next_id, request }, &fds);
    }

    /// Takes what has been answered so far, and writes to all of some memory.
    fn take_answers(&mut self, decide: &mut Decide<'_>) {
        while self.socket.wait_readable(Duration::ZERO) {
            let Ok(Some((envelope, fds))) = self.socket.recv::<ResponseEnvelope>() else { return };
            match envelope.response {
                Response::Stream { stream, .. } => self.tickets.push((stream, 1)),
                Response::Comm { comm, .. } => self.comms.push(comm),
                Response::Region { region, bytes } => {
                    self.regions.push((region, bytes));
                    let memory = fds.first().and_then(|fd| Mapping::map(fd.as_fd(), bytes).ok());
                    if let Some(memory) = memory.as_ref().filter(|_| decide(4) == 0) {
                        // SAFETY: inside the mapping, which others read as bytes or not at all.
                        unsafe { memory.as_ptr().write_bytes(0x5a, memory.len_bytes()) };
                    }
                    self.memory.extend(memory);
                }
                _ => {}
            }
            self.kept.extend(fds);
            let many = self.kept.len().saturating_sub(KEPT_MAX);
            self.kept.drain(..many);
            let many = self.memory.len().saturating_sub(KEPT_MAX);
            self.memory.drain(..many);
        }
    }

    fn handle<T: Copy>(known: &[T], of: impl Fn(T) -> Handle, decide: &mut Decide<'_>) -> Handle {
        if known.is_empty() || decide(8) == 0 {
            return Handle { index: decide(4) as u32, generation: decide(3) as u32 };
        }
        of(known[decide(known.len() as u64) as usize])
    }

    fn request(&mut self, gpus: &[[u8; 16]], decide: &mut Decide<'_>) {
        let gpu = match gpus.len() as u64 {
            many if many > 0 && decide(8) > 0 => gpus[decide(many) as usize],
            _ => [decide(2) as u8; 16],
        };
        let region = Self::handle(&self.regions, |(region, _)| region, decide);
        let comm = Self::handle(&self.comms, |comm| comm, decide);
        let mut fds = Vec::new();
        let request = match decide(16) {
            12 => {
                let ipc_handle = (0..[64, 64, 64, 0, 65][decide(5) as usize]).map(|_| decide(256) as u8).collect();
                Request::RegisterGpuMemory { gpu, ipc_handle, bytes: u64::MAX >> decide(64) }
            }
            13 => Request::FreeGpuMemory { region },
            14 => {
                // Memory of the host's, where a GPU's is expected.
                fds.extend((0..decide(3)).filter_map(|_| Some(Mapping::create("attacker", 4096).ok()?.0)));
                Request::RegisterGpuSegments { gpu }
            }
            15 => {
                let (offset_bytes, bytes) = (4096 * decide(3), u64::MAX >> decide(64));
                let peer = (decide(2) > 0).then(|| decide(5) as u32);
                Request::MakeTwin { comm, region, offset_bytes, bytes, peer }
            }
            0 => Request::AllocMemory { bytes: [0, 4096, 1 << 16, 3 << 20, u64::MAX][decide(5) as usize] },
            1 => {
                let bytes = 4096 << decide(4);
                if let Ok((fd, _)) = Mapping::create("attacker", bytes) {
                    if decide(3) > 0 {
                        let _ = make_whole(&fd, bytes);
                    }
                    fds.push(fd);
                }
                Request::RegisterMemory { bytes: bytes << decide(2) }
            }
            2 => Request::FreeMemory { region },
            3 | 4 => Request::CreateStream,
            5 => Request::CreateOrderedStream { region, offset_bytes: 64 * decide(80), overlaps: decide(2) == 0 },
            6 => Request::DestroyStream { stream: Self::handle(&self.tickets, |(stream, _)| stream, decide) },
            7 | 8 => {
                let nranks = [1, 1, 2, 3, 4096, 0, u32::MAX][decide(7) as usize];
                let rank = decide(u64::from(nranks.clamp(1, 4)) + 1) as u32;
                let root_address = if decide(16) == 0 { "h".to_owned() } else { String::new() };
                let id = UniqueId([decide(IDS) as u8; 16]);
                let whole = Self::handle(&self.comms, |comm| comm, decide);
                let role = match decide(7) {
                    0 => Role::Graphs { whole },
                    1 => Role::CopyEngines { whole },
                    2 => Role::Team { whole },
                    3 => Role::Rail { whole, number: decide(3) as u32 },
                    4 => Role::GraphsOfRail { whole: UniqueId([decide(IDS) as u8; 16]), number: decide(3) as u32 },
                    _ => Role::Whole,
                };
                let options = JoinOptions::default();
                // Where there are GPUs most ranks are on one.
                let gpu = (decide(8) < if gpus.is_empty() { 1 } else { 6 }).then_some(gpu);
                Request::InitRank { id, rank, nranks, gpu, root_address, role, options }
            }
            9 => Request::DestroyComm { comm },
            10 => Request::AbortComm { comm, cuda_error: (decide(2) == 1).then_some(700) },
            _ => Request::NameGpuSegments { begins: decide(2) == 1, bytes: vec![4096; decide(3) as usize] },
        };
        self.send(request, &fds);
    }

    /// A command that may be right, with at most a few fields that are not.
    fn command(&mut self, decide: &mut Decide<'_>) {
        let mut command = Command { opcode: Opcode::Collective as u32, ..Command::zeroed() };
        if !self.tickets.is_empty() {
            let at = decide(self.tickets.len() as u64) as usize;
            (command.stream, command.ticket) = self.tickets[at];
            self.tickets[at].1 += 1;
        }
        command.comm = Self::handle(&self.comms, |comm| comm, decide);
        let (region, bytes) = match self.regions.len() as u64 {
            0 => (Handle::NONE, 4096),
            many => self.regions[decide(many) as usize],
        };
        command.count = decide(bytes / 8 + 1);
        command.kind = CollectiveKind::AllReduce.to_wire();
        (command.dtype, command.redop) = (DataType::F32.to_wire(), RedOp::Sum.to_wire());
        command.count /= 4;
        command.send = BufferRef { region, offset_bytes: 0 };
        command.recv = BufferRef { region, offset_bytes: bytes / 2 / 64 * 64 };
        for _ in 0..decide(3) {
            match decide(13) {
                0 => command.opcode = decide(8) as u32,
                1 => command.kind = decide(12) as u32,
                2 => command.dtype = decide(16) as u32,
                3 => command.redop = decide(8) as u32,
                4 => command.count = u64::MAX >> decide(64),
                5 => command.flags ^= FLAG_GROUP_CONTINUES,
                6 => command.flags ^= FLAG_ROUND,
                7 => command.flags ^= FLAG_POSTED | FLAG_ROUND,
                8 => (command.flags, command.scalar_bits) = (command.flags ^ FLAG_SCALAR_AT, u64::MAX >> decide(64)),
                9 => command.rounds = decide(4),
                10 => command.root = decide(5) as u32,
                11 => command.flags ^= FLAG_TWIN,
                _ => command.send.offset_bytes = u64::MAX >> decide(64),
            }
        }
        if let Ok(Push::Pushed { consumer_sleeps: true }) = self.commands.try_push(&command) {
            self.doorbell.ring();
        }
    }

    /// Writes anything anywhere into what it shares with the service.
    fn scribble(&mut self, decide: &mut Decide<'_>) {
        let shared = if self.memory.is_empty() || decide(4) > 0 {
            self.segment.as_ref()
        } else {
            &self.memory[decide(self.memory.len() as u64) as usize]
        };
        let words = (shared.len_bytes() / 8) as u64;
        if words == 0 {
            return;
        }
        // Indices are at the beginning of each ring: there it is worth most.
        let at = match decide(3) {
            0 => decide(words.min(64)),
            1 => (self.layout.completions_offset / 8 + decide(64)).min(words - 1),
            _ => decide(words),
        };
        let value = match decide(3) {
            0 => decide(8),
            1 => u64::MAX - decide(8),
            _ => decide(u64::MAX),
        };
        if let Some(word) = shared.at::<u64>(8 * at, 1) {
            // SAFETY: inside the mapping, which others read atomically or not at all.
            unsafe { word.write_volatile(value) };
        }
        self.doorbell.ring();
    }

    /// Closes something, or half of it, in the middle of whatever is under way.
    fn close_something(&mut self, decide: &mut Decide<'_>) {
        match decide(6) {
            0 => drop(shutdown(self.socket.as_fd().as_raw_fd(), Shutdown::Read)),
            1 => drop(shutdown(self.socket.as_fd().as_raw_fd(), Shutdown::Write)),
            2 => drop(shutdown(self.socket.as_fd().as_raw_fd(), Shutdown::Both)),
            // A bell that rings no more: its counter is full.
            3 => drop(nix::unistd::write(self.doorbell.as_fd(), &(u64::MAX - 1).to_ne_bytes())),
            4 if !self.memory.is_empty() => {
                let at = decide(self.memory.len() as u64) as usize;
                drop(self.memory.swap_remove(at));
            }
            _ if !self.kept.is_empty() => {
                let at = decide(self.kept.len() as u64) as usize;
                drop(self.kept.swap_remove(at));
            }
            _ => {}
        }
    }

    fn garbage(&mut self, decide: &mut Decide<'_>) {
        let bytes: Vec<u8> = (0..1 + decide(100)).map(|_| decide(256) as u8).collect();
        let _ = self.socket.send(&bytes, &[]);
    }
}

fn receive(socket: &Socket) -> Option<(ResponseEnvelope, Vec<OwnedFd>)> {
    // The service answers; a watchdog of the caller's ends what hangs.
    while !socket.wait_readable(Duration::from_secs(60)) {}
    socket.recv().ok().flatten()
}

/// An attacker. What it holds goes with it.
pub struct Attacker {
    socket: PathBuf,
    /// That it knows of.
    gpus: Vec<[u8; 16]>,
    sessions: Vec<Session>,
}

impl Attacker {
    /// Of the tenant with this socket.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Attacker { socket, gpus: Vec::new(), sessions: Vec::new() }
    }

    /// The same, which knows these GPUs of the host.
    #[must_use]
    pub fn with_gpus(self, gpus: Vec<[u8; 16]>) -> Self {
        Attacker { gpus, ..self }
    }

    /// Does something.
    pub fn step(&mut self, decide: &mut Decide<'_>) {
        let action = decide(32);
        if self.sessions.is_empty() || (action == 0 && self.sessions.len() < SESSIONS_MAX) {
            self.sessions.extend(Session::connect(&self.socket));
            return;
        }
        let at = decide(self.sessions.len() as u64) as usize;
        let session = &mut self.sessions[at];
        match action {
            1 => drop(self.sessions.swap_remove(at)),
            // Connects, and goes without a word, or half a one.
            2 => drop(connect(&self.socket)),
            3 => session.garbage(decide),
            4..=7 => session.scribble(decide),
            8..=16 => session.request(&self.gpus, decide),
            17..=20 => session.take_answers(decide),
            21 => session.close_something(decide),
            _ => session.command(decide),
        }
    }
}
