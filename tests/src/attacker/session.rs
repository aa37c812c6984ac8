//! An attacker's session: what it was given, and what it does to all of it.

use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mccs_ipc::command::{Command, Completion};
use mccs_ipc::handshake::{Socket, connect};
use mccs_ipc::port_channels::{Kinds, PortChannelSegment, Trigger, TriggerProducer};
use mccs_ipc::protocol::{Request, RequestEnvelope, Response, ResponseEnvelope, SegmentLayout};
use mccs_ipc::queue::{Consumer, Producer};
use mccs_ipc::shm::Mapping;
use mccs_ipc::shm_exchange::ShmExchangeLayout;
use mccs_ipc::sync::{Doorbell, StreamWord};
use mccs_ipc::types::{ErrorClass, Handle};
use nix::sys::socket::{Shutdown, shutdown};

use super::{Decide, Kind, Outcome, RequestKind, Tally};

/// Handles and descriptors that a session keeps of what it was given.
const KEPT_MAX: usize = 64;

/// A service that is busy answers later: attackers do not wait for that.
const ANSWERS_WITHIN: Duration = Duration::from_millis(20);

/// A stream of a session's.
pub(super) struct Stream {
    pub(super) handle: Handle,
    pub(super) next_ticket: u64,
    /// Calls that were seen to have ended.
    ended: u64,
}

/// A communicator that a session has joined.
pub(super) struct Comm {
    pub(super) handle: Handle,
    pub(super) shm_exchange: Option<ShmExchangeLayout>,
    /// Rounds of it that commands have told of.
    pub(super) rounds: u64,
}

/// A session, with what it was given.
pub(super) struct Session {
    /// Among those of its attacker's.
    pub(super) number: u32,
    pub(super) kind: Kind,
    socket: Socket,
    pub(super) doorbell: Doorbell,
    segment: Arc<Mapping>,
    layout: SegmentLayout,
    pub(super) commands: Producer<Command>,
    completions: Consumer<Completion>,
    /// Requests that were not answered, by their ids less one; `None` where they were.
    asked: Vec<Option<RequestKind>>,
    /// How many of them are to be answered soon.
    awaited: usize,
    pub(super) streams: Vec<Stream>,
    pub(super) comms: Vec<Comm>,
    pub(super) regions: Vec<(Handle, u64)>,
    memory: Vec<Mapping>,
    /// FIFOs of port channels, with what it has opened of them.
    fifos: Vec<TriggerProducer>,
    kept: Vec<OwnedFd>,
}

impl Session {
    /// None where the service refuses, which it may.
    pub(super) fn connect(socket: &Path, number: u32, kind: Kind) -> Option<Self> {
        let socket = connect(socket).ok()?;
        let (envelope, mut fds) = receive(&socket)?;
        let Response::Welcome { layout, .. } = envelope.response else { return None };
        if fds.len() < 2 {
            return None;
        }
        let doorbell = Doorbell::from_fd(fds.remove(1));
        let segment = Arc::new(Mapping::map(fds[0].as_fd(), layout.segment_bytes).ok()?);
        let commands = Producer::new(Arc::clone(&segment), layout.commands_offset, layout.commands_capacity).ok()?;
        let completions =
            Consumer::new(Arc::clone(&segment), layout.completions_offset, layout.completions_capacity).ok()?;
        Some(Session {
            number,
            kind,
            socket,
            doorbell,
            segment,
            layout,
            commands,
            completions,
            asked: Vec::new(),
            awaited: 0,
            streams: Vec::new(),
            comms: Vec::new(),
            regions: Vec::new(),
            memory: Vec::new(),
            fifos: Vec::new(),
            kept: fds,
        })
    }

    pub(super) fn send(&mut self, request: Request, fds: &[OwnedFd]) {
        let kind = RequestKind::of(&request);
        self.asked.push(Some(kind));
        self.awaited += usize::from(kind.is_prompt());
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        // A full socket and a closed one are what this is about.
        let _ = self.socket.send(&RequestEnvelope { id: self.asked.len() as u64, request }, &fds);
    }

    /// Handles that it needs before it can make a call, unless it is to make one all the same.
    pub(super) fn missing(&self, decide: &mut Decide<'_>) -> Option<RequestKind> {
        let missing = [
            (self.streams.is_empty(), RequestKind::CreateStream),
            (self.regions.is_empty(), RequestKind::AllocMemory),
            (self.comms.is_empty(), RequestKind::InitRank),
        ];
        let missing = missing.into_iter().find_map(|(is_missing, kind)| is_missing.then_some(kind));
        missing.filter(|_| !self.kind.errs(decide))
    }

    /// Takes what has been answered so far, and writes to all of some memory. If it `waits`, and there is something to wait for, then for one
    /// answer first. Returns whether the session goes on.
    pub(super) fn take_answers(&mut self, waits: bool, tally: &mut Tally, decide: &mut Decide<'_>) -> bool {
        for stream in &mut self.streams {
            let word = StreamWord::at(&self.segment, self.layout.words_offset, stream.handle.index);
            // A word that it has scribbled there is no end of a call.
            let ended = word.map_or(0, StreamWord::load).min(stream.next_ticket - 1);
            tally.count_many("calls ended", ended.saturating_sub(stream.ended));
            stream.ended = stream.ended.max(ended);
        }
        // A ring that it has scribbled to brings nothing.
        while let Ok(Some(completion)) = self.completions.try_pop() {
            tally.count_error("calls failed", ErrorClass::from_wire(completion.class), &completion.message());
        }
        let mut patience = if waits && self.awaited > 0 { ANSWERS_WITHIN } else { Duration::ZERO };
        while self.socket.wait_readable(std::mem::take(&mut patience)) {
            let Ok(Some((envelope, fds))) = self.socket.recv::<ResponseEnvelope>() else { return false };
            let asked = (envelope.id as usize).checked_sub(1).and_then(|at| self.asked.get_mut(at)?.take());
            self.awaited -= usize::from(asked.is_some_and(RequestKind::is_prompt));
            match (&envelope.response, asked) {
                (Response::Error { class, message }, Some(kind)) => {
                    tally.count_request(kind.name(), Outcome::Refused);
                    tally.count_error("requests refused", Some(*class), message);
                }
                (Response::Error { class, message }, None) => {
                    tally.count_error("sessions ended", Some(*class), message)
                }
                (_, Some(kind)) => tally.count_request(kind.name(), Outcome::Done),
                (_, None) => tally.count("answers that nobody asked for"),
            }
            self.take(envelope.response, &fds, decide);
            self.kept.extend(fds);
            let many = self.kept.len().saturating_sub(KEPT_MAX);
            self.kept.drain(..many);
            let many = self.memory.len().saturating_sub(KEPT_MAX);
            self.memory.drain(..many);
        }
        true
    }

    fn take(&mut self, response: Response, fds: &[OwnedFd], decide: &mut Decide<'_>) {
        match response {
            Response::Stream { stream: handle, .. } => {
                self.streams.push(Stream { handle, next_ticket: 1, ended: 0 });
            }
            Response::Comm { comm, shm_exchange, .. } => {
                self.comms.push(Comm { handle: comm, shm_exchange, rounds: 0 });
                let bytes = shm_exchange.map_or(0, ShmExchangeLayout::bytes);
                self.memory.extend(fds.first().and_then(|fd| Mapping::map(fd.as_fd(), bytes).ok()));
            }
            Response::PortChannels { layout } => {
                let Some(fd) = fds.first().map(AsFd::as_fd) else { return };
                let segment = PortChannelSegment::map(fd, layout).ok();
                self.fifos.extend(segment.and_then(|segment| segment.producer()));
                self.memory.extend(Mapping::map(fd, layout.bytes()).ok());
            }
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
    }

    /// A handle that is known, or by mistake another.
    pub(super) fn handle(&self, known: Option<Handle>, decide: &mut Decide<'_>) -> Handle {
        match known {
            Some(known) if !self.kind.errs(decide) => known,
            _ => Handle { index: decide(4) as u32, generation: decide(3) as u32 },
        }
    }

    pub(super) fn has_fifos(&self) -> bool {
        !self.fifos.is_empty()
    }

    /// Writes triggers, right and wrong, as far as there is room.
    pub(super) fn trigger(&mut self, decide: &mut Decide<'_>) {
        let Some(fifo) = self.fifos.last() else { return };
        for _ in 0..decide(20) {
            let most = if decide(4) == 0 { u64::MAX >> decide(40) } else { 5000 };
            let kinds = [Kinds::PUT, Kinds::SIGNAL, Kinds::FLUSH];
            let kinds = kinds[decide(3) as usize].and(kinds[decide(3) as usize]);
            let channel = if decide(16) == 0 { decide(1 << 14) } else { decide(2) } as u32;
            let (bytes, source_offset, destination_offset) = (decide(most), decide(most), decide(most));
            let position = fifo.claim();
            if !fifo.wait_for_room(position, Duration::ZERO, Duration::ZERO) {
                // A hole, behind which nothing is read any more.
                break;
            }
            if fifo.write(position, &Trigger { kinds, channel, bytes, source_offset, destination_offset }) {
                self.doorbell.ring();
            }
        }
    }

    /// Writes anything anywhere into what it shares with the service.
    pub(super) fn scribble(&mut self, decide: &mut Decide<'_>) {
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
    pub(super) fn close_something(&mut self, decide: &mut Decide<'_>) {
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

    pub(super) fn garbage(&mut self, decide: &mut Decide<'_>) {
        let bytes: Vec<u8> = (0..1 + decide(100)).map(|_| decide(256) as u8).collect();
        let _ = self.socket.send(&bytes, &[]);
    }
}

fn receive(socket: &Socket) -> Option<(ResponseEnvelope, Vec<OwnedFd>)> {
    // The service answers; a watchdog of the caller's ends what hangs.
    while !socket.wait_readable(Duration::from_secs(60)) {}
    socket.recv().ok().flatten()
}
