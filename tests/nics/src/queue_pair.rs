//! A reliable connection: requests go in packets, each with a number, to the peer's ring. The peer takes them in order, and says how far
//! it is. What is not acknowledged in time is sent again from there on.
//!
//! Memory of GPUs is copied later than the host's: a packet is put into the ring, or taken out of it, when its copies are done, and
//! those before it. A completion says that the copies have ended.
//!
//! A read's answer, and an atomic operation's, comes in packets of its own, which name the request and have no place in the
//! peer's order.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use crate::abi::{
    ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, QPS_ERR, QPS_RTR, QPS_RTS, Sge, WC_LOC_LEN_ERR,
    WC_LOC_PROT_ERR, WC_RECV, WC_RECV_RDMA_WITH_IMM, WC_REM_ACCESS_ERR, WC_REM_INV_REQ_ERR, WC_RETRY_EXC_ERR,
    WC_RNR_RETRY_EXC_ERR, WC_SUCCESS, WC_WITH_IMM, WC_WR_FLUSH_ERR, WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD,
    WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_SEND_WITH_IMM, Wc,
};
use crate::completions::CompletionQueue;
use crate::files::{Head, Port, PortWords, Ring};
use crate::gpu::{Copies, Gpu, Pending, Way};
use crate::memory::{Denied, Place, Regions, Slot};

/// Of slots: the answer to a read or an atomic operation.
const ANSWER: u32 = 1 << 16;
/// The port's queue of what is paid for, but not gone, at most.
const AHEAD_NS: u64 = 200_000;
const NEVER: u64 = u64::MAX;
/// As many as a queue pair may have unanswered.
const KEPT_RESULTS: usize = 1 << 14;

/// A work request of the send queue.
#[derive(Debug)]
pub(crate) struct Request {
    pub wr_id: u64,
    pub opcode: u32,
    pub parts: Vec<Sge>,
    /// Data of an inline request.
    pub inline: Option<Vec<u8>>,
    pub bytes: u32,
    pub is_signaled: bool,
    pub imm: u32,
    pub remote: u64,
    pub rkey: u32,
    pub operands: [u64; 2],
    first_psn: u64,
    packets: u64,
    answered: u32,
}

impl Request {
    /// Of `bytes` in all parts.
    pub(crate) fn new(wr_id: u64, opcode: u32, parts: Vec<Sge>, bytes: u32) -> Self {
        Request {
            wr_id,
            opcode,
            parts,
            inline: None,
            bytes,
            is_signaled: false,
            imm: 0,
            remote: 0,
            rkey: 0,
            operands: [0; 2],
            first_psn: 0,
            packets: 0,
            answered: 0,
        }
    }

    fn has_answer(&self) -> bool {
        matches!(self.opcode, WR_RDMA_READ | WR_ATOMIC_CMP_AND_SWP | WR_ATOMIC_FETCH_AND_ADD)
    }

    /// How completions name it.
    fn wc_opcode(&self) -> u32 {
        match self.opcode {
            WR_SEND | WR_SEND_WITH_IMM => 0,
            WR_RDMA_READ => 2,
            WR_ATOMIC_CMP_AND_SWP => 3,
            WR_ATOMIC_FETCH_AND_ADD => 4,
            _ => 1,
        }
    }
}

/// A work request of the receive queue.
#[derive(Debug)]
pub(crate) struct Receive {
    pub wr_id: u64,
    pub parts: Vec<Sge>,
}

/// What an answer carries.
#[derive(Debug, Clone, Copy)]
enum Source {
    /// Memory that a key names, which is asked for each packet: the region may be gone by then.
    Memory { rkey: u32, remote: u64 },
    /// The word that an atomic operation has found.
    Word(u64),
}

/// An answer that is still to go.
#[derive(Debug)]
struct Answer {
    psn: u64,
    from: Source,
    total: u32,
    sent: u32,
}

/// A packet whose data are on their way into the peer's slot.
#[derive(Debug)]
struct Filling {
    pending: Pending,
    head: Head,
}

/// A packet whose data are on their way out of the own slot, and what follows.
#[derive(Debug, Default)]
struct Arriving {
    pending: Pending,
    /// The peer's packets that have arrived then.
    arrived: u64,
    completion: Option<Wc>,
}

#[derive(Debug)]
struct Peer {
    ring: Ring,
    port: Port,
}

/// How long a queue pair tries.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Timers {
    /// 0: without end.
    pub retry_ns: u64,
    pub retries: u32,
    /// 7: without end.
    pub rnr_retries: u32,
    /// What this side tells its peer to wait.
    pub rnr_ns: u64,
}

/// What its context lends a queue pair for a step.
pub(crate) struct Lent<'a> {
    pub regions: &'a Regions,
    pub copies: &'a mut Copies,
    pub port: &'a PortWords,
    pub now_ns: u64,
    /// A number that differs from step to step, for losses.
    pub chance: &'a mut u64,
    /// Completions, which the context hands on.
    pub completions: &'a mut Vec<(*const CompletionQueue, Wc)>,
}

#[derive(Debug)]
pub(crate) struct QueuePair {
    pub number: u32,
    pub handle: Handle,
    pub state: u32,
    pub access: u32,
    pub timers: Timers,
    pub signals_all: bool,
    pub send_room: usize,
    pub recv_room: usize,
    pub queues: [*const CompletionQueue; 2],
    pub sends: VecDeque<Request>,
    pub receives: VecDeque<Receive>,
    own: Ring,
    peer: Option<Peer>,
    end_psn: u64,
    next_psn: u64,
    acknowledged: u64,
    tries: u32,
    rnr_tries: u32,
    progress_ns: u64,
    not_before_ns: u64,
    expected: u64,
    answers: VecDeque<Answer>,
    filling: VecDeque<Filling>,
    arriving: VecDeque<Arriving>,
    /// What the last atomic operations of the peer have found, by number: an answer can be lost.
    found: VecDeque<(u64, u64)>,
}

// SAFETY: completion queues outlive their queue pairs, which verbs demand, and are behind locks.
unsafe impl Send for QueuePair {}

/// The structure by which programs know a queue pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle(pub *mut std::ffi::c_void);

/// Why a queue pair has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failed {
    /// Whether the peer's request was at fault.
    pub by_peer: bool,
}

impl QueuePair {
    pub(crate) fn new(
        number: u32,
        handle: Handle,
        own: Ring,
        queues: [*const CompletionQueue; 2],
        room: [usize; 2],
    ) -> Self {
        QueuePair {
            number,
            handle,
            state: 0,
            access: 0,
            timers: Timers::default(),
            signals_all: false,
            send_room: room[0],
            recv_room: room[1],
            queues,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            own,
            peer: None,
            end_psn: 0,
            next_psn: 0,
            acknowledged: 0,
            tries: 0,
            rnr_tries: 0,
            progress_ns: 0,
            not_before_ns: 0,
            expected: 0,
            answers: VecDeque::new(),
            filling: VecDeque::new(),
            arriving: VecDeque::new(),
            found: VecDeque::new(),
        }
    }

    /// Forgets its peer, its requests and how far both were.
    pub(crate) fn reset(&mut self) {
        self.settle();
        let words = self.own.words();
        for word in [&words.filled, &words.emptied, &words.arrived, &words.again, &words.not_ready, &words.refused] {
            word.store(0, Ordering::Release);
        }
        self.peer = None;
        self.sends.clear();
        self.receives.clear();
        self.answers.clear();
        self.found.clear();
        (self.end_psn, self.next_psn, self.acknowledged, self.expected) = (0, 0, 0, 0);
        (self.tries, self.rnr_tries, self.not_before_ns) = (0, 0, 0);
    }

    /// Ends what is under way: whose memory is copied may take it back.
    pub(crate) fn settle(&mut self) {
        self.wait_for_copies();
        self.filling.clear();
        self.arriving.clear();
    }

    /// Waits for the copies that are under way.
    pub(crate) fn wait_for_copies(&self) {
        self.filling.iter().for_each(|packet| packet.pending.wait());
        self.arriving.iter().for_each(|packet| packet.pending.wait());
    }

    /// Whether copies are under way.
    fn copies(&self) -> bool {
        !self.filling.is_empty() || !self.arriving.is_empty()
    }

    pub(crate) fn connect(&mut self, ring: Ring, port: Port) {
        self.peer = Some(Peer { ring, port });
    }

    /// Has copy engines reach both rings.
    pub(crate) fn pin(&self, gpu: Gpu) {
        self.own.pin(gpu);
        if let Some(peer) = &self.peer {
            peer.ring.pin(gpu);
        }
    }

    pub(crate) fn enqueue(&mut self, mut request: Request, now_ns: u64) {
        request.first_psn = self.end_psn;
        request.packets = match request.has_answer() {
            true => 1,
            false => u64::from(request.bytes).div_ceil(self.own.shape().slot_bytes.into()).max(1),
        };
        if self.acknowledged == self.end_psn && self.sends.is_empty() {
            self.progress_ns = now_ns;
        }
        self.end_psn += request.packets;
        self.sends.push_back(request);
    }

    fn complete(&self, lent: &mut Lent<'_>, queue: usize, wc: Wc) {
        lent.completions.push((self.queues[queue], Wc { qp_num: self.number, ..wc }));
    }

    /// Ends all that is in its queues. The request with packet `blamed.0` ends with status `blamed.1`.
    pub(crate) fn fail(&mut self, blamed: Option<(u64, u32)>, lent: &mut Lent<'_>) {
        self.state = QPS_ERR;
        let arriving = self.arriving.iter_mut().filter_map(|packet| packet.completion.take());
        let unfinished: Vec<Wc> = arriving.collect();
        self.settle();
        for wc in unfinished {
            let wc = Wc { wr_id: wc.wr_id, status: WC_WR_FLUSH_ERR, opcode: WC_RECV, ..Wc::default() };
            self.complete(lent, 1, wc);
        }
        for request in std::mem::take(&mut self.sends) {
            let packets = request.first_psn..request.first_psn + request.packets;
            let status = blamed.filter(|(psn, _)| packets.contains(psn)).map_or(WC_WR_FLUSH_ERR, |(_, status)| status);
            let wc = Wc { wr_id: request.wr_id, status, opcode: request.wc_opcode(), ..Wc::default() };
            self.complete(lent, 0, wc);
        }
        for receive in std::mem::take(&mut self.receives) {
            let wc = Wc { wr_id: receive.wr_id, status: WC_WR_FLUSH_ERR, opcode: WC_RECV, ..Wc::default() };
            self.complete(lent, 1, wc);
        }
        self.answers.clear();
    }

    /// Takes what has come and sends what can go. Gives when it has to be called again, whatever comes.
    pub(crate) fn step(&mut self, lent: &mut Lent<'_>) -> Result<u64, Failed> {
        if self.state != QPS_RTR && self.state != QPS_RTS {
            return Ok(NEVER);
        }
        let Some(peer) = self.peer.take() else { return self.wait_for_nobody(lent) };
        let stepped = self.step_with(&peer, lent);
        self.peer = Some(peer);
        stepped
    }

    /// Without a peer nothing is answered: the first request fails when all its retries are over.
    fn wait_for_nobody(&mut self, lent: &mut Lent<'_>) -> Result<u64, Failed> {
        let Some(first) = self.sends.front().map(|request| request.first_psn).filter(|_| self.timers.retry_ns > 0)
        else {
            return Ok(NEVER);
        };
        let over = self.progress_ns + self.timers.retry_ns * (u64::from(self.timers.retries) + 1);
        if lent.now_ns < over {
            return Ok(over);
        }
        self.fail(Some((first, WC_RETRY_EXC_ERR)), lent);
        Err(Failed { by_peer: false })
    }

    fn step_with(&mut self, peer: &Peer, lent: &mut Lent<'_>) -> Result<u64, Failed> {
        let (filled, emptied) =
            (peer.ring.words().filled.load(Ordering::Acquire), self.own.words().emptied.load(Ordering::Relaxed));
        let stepped = self.take_and_send(peer, lent);
        let now = (peer.ring.words().filled.load(Ordering::Relaxed), self.own.words().emptied.load(Ordering::Relaxed));
        if now != (filled, emptied) || stepped.is_err() {
            peer.port.ring();
        }
        stepped
    }

    fn take_and_send(&mut self, peer: &Peer, lent: &mut Lent<'_>) -> Result<u64, Failed> {
        let next_arrival = self.take(lent)?;
        if self.state == QPS_RTS {
            self.acknowledge(peer, lent)?;
        }
        let next_send = self.send(peer, lent)?;
        let next = next_arrival.min(next_send);
        Ok(if self.copies() { lent.now_ns } else { next })
    }

    /// Whether something of it is under way.
    pub(crate) fn has_work(&self) -> bool {
        let words = self.own.words();
        !self.sends.is_empty() || words.filled.load(Ordering::Acquire) != words.emptied.load(Ordering::Relaxed)
    }

    /// Takes packets out of the own ring.
    fn take(&mut self, lent: &mut Lent<'_>) -> Result<u64, Failed> {
        loop {
            self.finish_arrivals(lent);
            let words = self.own.words();
            let index = words.emptied.load(Ordering::Relaxed) + self.arriving.len() as u64;
            if index >= words.filled.load(Ordering::Acquire) {
                return Ok(NEVER);
            }
            // SAFETY: a filled slot is this side's until it is emptied. What is in it may be anything: it is copied, then checked.
            let head = unsafe { self.own.head(index).read_volatile() };
            if head.deliver_at_ns > lent.now_ns {
                return Ok(head.deliver_at_ns);
            }
            if !self.arriving.is_empty() && QueuePair::follows(&head, lent) {
                return Ok(NEVER);
            }
            let mut packet = Arriving { arrived: self.expected, ..Arriving::default() };
            let mut taken = Ok(());
            if lent.port.is_down.load(Ordering::Relaxed) == 0 && head.bytes <= self.own.shape().slot_bytes {
                lent.port.in_bytes.fetch_add(head.bytes.into(), Ordering::Relaxed);
                taken = match head.opcode & ANSWER {
                    0 => self.take_request(&head, index, &mut packet, lent),
                    _ => self.take_answer(&head, index, lent),
                };
            }
            if taken.is_err() {
                packet.pending.wait();
                self.own.words().emptied.store(index + 1, Ordering::Release);
            }
            taken?;
            packet.arrived = self.expected;
            self.arriving.push_back(packet);
        }
    }

    /// Whether a packet has to wait for the copies of those before it: what reads must find them, and memory that programs look at gets
    /// its bytes in order. Copies to a GPU keep their order by themselves where it counts.
    fn follows(head: &Head, lent: &Lent<'_>) -> bool {
        match head.opcode {
            WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM => {
                let place = lent.regions.place(head.rkey, head.remote, head.bytes.into(), 0);
                head.bytes > 0 && place.is_ok_and(|place| !place.is_relaxed && place.gpu.is_none())
            }
            _ => head.opcode & ANSWER == 0,
        }
    }

    /// Empties slots whose copies are done, in order, and says what has arrived.
    fn finish_arrivals(&mut self, lent: &mut Lent<'_>) {
        while self.arriving.front().is_some_and(|packet| packet.pending.is_done()) {
            let packet = self.arriving.pop_front().expect("invariant: there is a first one");
            if let Some(wc) = packet.completion {
                self.complete(lent, 1, wc);
            }
            let words = self.own.words();
            words.arrived.store(packet.arrived, Ordering::Release);
            words.emptied.fetch_add(1, Ordering::Release);
        }
    }

    /// Tells the peer that its request fails, and ends.
    fn refuse(&mut self, psn: u64, status: u32, lent: &mut Lent<'_>) -> Failed {
        // Requests before it are done.
        self.wait_for_copies();
        self.finish_arrivals(lent);
        self.own.words().refused.store((psn + 1) << 8 | u64::from(status), Ordering::Release);
        self.fail(None, lent);
        Failed { by_peer: true }
    }

    fn take_request(
        &mut self,
        head: &Head,
        index: u64,
        packet: &mut Arriving,
        lent: &mut Lent<'_>,
    ) -> Result<(), Failed> {
        let answers = matches!(head.opcode, WR_RDMA_READ | WR_ATOMIC_CMP_AND_SWP | WR_ATOMIC_FETCH_AND_ADD);
        if head.psn > self.expected {
            self.own.words().again.store(self.expected + 1, Ordering::Release);
            return Ok(());
        }
        if head.psn < self.expected {
            // The answer was lost, unless it is still to go. A read is done again, an atomic operation is not.
            if answers && !self.answers.iter().any(|answer| answer.psn == head.psn) {
                match self.found.iter().find(|(psn, _)| *psn == head.psn) {
                    Some((psn, word)) => {
                        self.answers.push_back(Answer { psn: *psn, from: Source::Word(*word), total: 8, sent: 0 });
                    }
                    None if head.opcode == WR_RDMA_READ => self.take_question(head, lent)?,
                    None => {}
                }
            }
            return Ok(());
        }
        if answers {
            self.take_question(head, lent)?;
        } else if !self.take_data(head, index, packet, lent)? {
            return Ok(());
        }
        self.expected = self.expected.max(head.psn + 1);
        Ok(())
    }

    /// A read or an atomic operation.
    fn take_question(&mut self, head: &Head, lent: &mut Lent<'_>) -> Result<(), Failed> {
        let is_read = head.opcode == WR_RDMA_READ;
        let (bytes, access) = if is_read { (head.total, ACCESS_REMOTE_READ) } else { (8, ACCESS_REMOTE_ATOMIC) };
        let place = lent.regions.place(head.rkey, head.remote, bytes.into(), access);
        let allowed = self.access & access == access;
        // Words of GPUs are not the processor's.
        let is_word = |place: Place| place.gpu.is_none() && place.address.is_multiple_of(8);
        let (Ok(Place { address, .. }), true) = (place, allowed && (is_read || place.is_ok_and(is_word))) else {
            return Err(self.refuse(head.psn, WC_REM_ACCESS_ERR, lent));
        };
        let from = if is_read {
            Source::Memory { rkey: head.rkey, remote: head.remote }
        } else {
            // SAFETY: eight aligned bytes of a registered region.
            let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(address as *mut u64) };
            let [compare_or_add, swap] = head.operands;
            let was = match head.opcode {
                WR_ATOMIC_FETCH_AND_ADD => word.fetch_add(compare_or_add, Ordering::SeqCst),
                _ => word
                    .compare_exchange(compare_or_add, swap, Ordering::SeqCst, Ordering::SeqCst)
                    .unwrap_or_else(|was| was),
            };
            self.found.push_back((head.psn, was));
            if self.found.len() > KEPT_RESULTS {
                self.found.pop_front();
            }
            Source::Word(was)
        };
        self.answers.push_back(Answer { psn: head.psn, from, total: bytes, sent: 0 });
        Ok(())
    }

    /// A part of a write or a send. `false`: nobody has posted a receive for it.
    fn take_data(
        &mut self,
        head: &Head,
        index: u64,
        packet: &mut Arriving,
        lent: &mut Lent<'_>,
    ) -> Result<bool, Failed> {
        let is_last = head.offset.saturating_add(head.bytes) >= head.total;
        let is_send = matches!(head.opcode, WR_SEND | WR_SEND_WITH_IMM);
        let has_imm = matches!(head.opcode, WR_SEND_WITH_IMM | WR_RDMA_WRITE_WITH_IMM);
        if !is_send && !matches!(head.opcode, WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM) {
            return Err(self.refuse(head.psn, WC_REM_INV_REQ_ERR, lent));
        }
        let takes_receive = is_send || (has_imm && is_last);
        if takes_receive && self.receives.is_empty() {
            self.own.words().not_ready.store(head.psn + 1, Ordering::Release);
            return Ok(false);
        }
        let mut slot = Slot::new(&self.own, index, lent.copies, self.number);
        // SAFETY: the slot has `bytes`, which were checked against its room; regions are kept by whoever registered them.
        let placed = unsafe {
            if is_send {
                let receive = self.receives.front().map_or(&[][..], |receive| &receive.parts);
                lent.regions.copy(receive, head.offset, &mut slot, head.bytes, Way::ToGpu)
            } else if head.bytes > 0 {
                let to = head.remote.saturating_add(head.offset.into());
                let may = self.access & ACCESS_REMOTE_WRITE != 0;
                let place = lent.regions.place(head.rkey, to, head.bytes.into(), ACCESS_REMOTE_WRITE);
                place.and_then(|place| match may {
                    true => slot.copy(place, 0, head.bytes as usize, Way::ToGpu),
                    false => Err(Denied),
                })
            } else {
                Ok(())
            }
        };
        packet.pending = slot.pending;
        if placed.is_err() {
            let status = if is_send { WC_REM_INV_REQ_ERR } else { WC_REM_ACCESS_ERR };
            if is_send && let Some(receive) = self.receives.pop_front() {
                let wc = Wc { wr_id: receive.wr_id, status: WC_LOC_LEN_ERR, opcode: WC_RECV, ..Wc::default() };
                self.complete(lent, 1, wc);
            }
            return Err(self.refuse(head.psn, status, lent));
        }
        if takes_receive
            && is_last
            && let Some(receive) = self.receives.pop_front()
        {
            let opcode = if is_send { WC_RECV } else { WC_RECV_RDMA_WITH_IMM };
            let (imm_data, wc_flags) = if has_imm { (head.imm, WC_WITH_IMM) } else { (0, 0) };
            packet.completion =
                Some(Wc { wr_id: receive.wr_id, opcode, byte_len: head.total, imm_data, wc_flags, ..Wc::default() });
        }
        Ok(true)
    }

    /// A part of an answer. Its copy is waited for: who reads into memory of a GPU reads little.
    fn take_answer(&mut self, head: &Head, index: u64, lent: &mut Lent<'_>) -> Result<(), Failed> {
        let Some(request) = self.sends.iter_mut().find(|request| request.first_psn == head.psn && request.has_answer())
        else {
            return Ok(());
        };
        // Parts come in order; one that was lost comes again with all.
        if head.offset != request.answered {
            return Ok(());
        }
        let mut slot = Slot::new(&self.own, index, lent.copies, self.number);
        // SAFETY: as in `take_data`.
        let placed = unsafe { lent.regions.copy(&request.parts, head.offset, &mut slot, head.bytes, Way::ToGpu) };
        slot.pending.wait();
        request.answered += head.bytes;
        self.progress_ns = lent.now_ns;
        match placed {
            Ok(()) => Ok(()),
            Err(Denied) => {
                self.fail(Some((head.psn, WC_LOC_PROT_ERR)), lent);
                Err(Failed { by_peer: false })
            }
        }
    }

    /// Completes what the peer has, and sees to what it has not.
    fn acknowledge(&mut self, peer: &Peer, lent: &mut Lent<'_>) -> Result<(), Failed> {
        let words = peer.ring.words();
        let arrived = words.arrived.load(Ordering::Acquire).min(self.end_psn);
        if arrived > self.acknowledged {
            (self.acknowledged, self.tries, self.rnr_tries, self.progress_ns) = (arrived, 0, 0, lent.now_ns);
            self.next_psn = self.next_psn.max(arrived);
        }
        while let Some(request) = self.sends.front() {
            let is_there = request.first_psn + request.packets <= self.acknowledged;
            if !is_there || (request.has_answer() && request.answered < request.bytes) {
                break;
            }
            let request = self.sends.pop_front().expect("invariant: there is a first one");
            self.tries = 0;
            if request.is_signaled {
                let wc = Wc {
                    wr_id: request.wr_id,
                    status: WC_SUCCESS,
                    opcode: request.wc_opcode(),
                    byte_len: request.bytes,
                    ..Wc::default()
                };
                self.complete(lent, 0, wc);
            }
        }
        let refused = words.refused.swap(0, Ordering::AcqRel);
        if refused != 0 {
            self.fail(Some(((refused >> 8) - 1, refused as u32 & 0xff)), lent);
            return Err(Failed { by_peer: false });
        }
        let not_ready = words.not_ready.swap(0, Ordering::AcqRel);
        if not_ready > self.acknowledged && not_ready <= self.end_psn {
            self.rnr_tries += 1;
            if self.timers.rnr_retries < 7 && self.rnr_tries > self.timers.rnr_retries {
                self.fail(Some((not_ready - 1, WC_RNR_RETRY_EXC_ERR)), lent);
                return Err(Failed { by_peer: false });
            }
            self.next_psn = not_ready - 1;
            self.not_before_ns = lent.now_ns + self.timers.rnr_ns;
            self.progress_ns = lent.now_ns;
        }
        let again = words.again.swap(0, Ordering::AcqRel);
        if again > self.acknowledged && again - 1 < self.next_psn {
            self.next_psn = again - 1;
        }
        if self.waits() && self.timers.retry_ns > 0 && lent.now_ns >= self.progress_ns + self.timers.retry_ns {
            self.tries += 1;
            if self.tries > self.timers.retries {
                let first = self.sends.front().map(|request| (request.first_psn, WC_RETRY_EXC_ERR));
                self.fail(first, lent);
                return Err(Failed { by_peer: false });
            }
            self.progress_ns = lent.now_ns;
            let first = self.sends.front_mut().expect("invariant: something is waited for");
            // An answer in parts begins anew.
            first.answered = 0;
            self.next_psn = first.first_psn.max(if first.has_answer() { 0 } else { self.acknowledged });
        }
        Ok(())
    }

    /// Whether the peer has something to say.
    fn waits(&self) -> bool {
        self.sends.front().is_some_and(|first| self.next_psn > first.first_psn)
    }

    /// Whether there is room and time for a packet of so many bytes, and when it arrives.
    fn slot(&self, peer: &Peer, bytes: u32, lent: &Lent<'_>) -> Result<(u64, u64), u64> {
        let words = peer.ring.words();
        let index = words.filled.load(Ordering::Relaxed) + self.filling.len() as u64;
        if index - words.emptied.load(Ordering::Acquire).min(index) >= peer.ring.shape().slots.into() {
            return Err(NEVER);
        }
        let free =
            |of: &PortWords, out: bool| if out { &of.out_free_ns } else { &of.in_free_ns }.load(Ordering::Relaxed);
        let (own, theirs) = (lent.port, peer.port.words());
        let begin = free(own, true).max(lent.now_ns);
        if begin > lent.now_ns + AHEAD_NS {
            return Err(begin - AHEAD_NS);
        }
        let takes = |of: &PortWords| u64::from(bytes) * 8 * 1000 / of.mbit_per_s.load(Ordering::Relaxed).max(1);
        // Several processes may pay at once: then each sees the other's time, or a little less of it.
        let out_free = begin + takes(own);
        own.out_free_ns.store(out_free, Ordering::Relaxed);
        let in_free = out_free.max(free(theirs, false) + takes(theirs));
        theirs.in_free_ns.store(in_free, Ordering::Relaxed);
        Ok((index, in_free + own.latency_ns.load(Ordering::Relaxed)))
    }

    fn is_lost(peer: &Peer, lent: &mut Lent<'_>) -> bool {
        let is_down = |of: &PortWords| of.is_down.load(Ordering::Relaxed) != 0;
        if is_down(lent.port) || is_down(peer.port.words()) {
            return true;
        }
        let loss = lent.port.loss_ppm.load(Ordering::Relaxed);
        *lent.chance = lent.chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        loss > 0 && (*lent.chance >> 33) % 1_000_000 < loss.into()
    }

    /// Puts packets into the peer's ring whose data are there, in order.
    fn put_filled(&mut self, peer: &Peer) {
        while self.filling.front().is_some_and(|packet| packet.pending.is_done()) {
            let Filling { head, .. } = self.filling.pop_front().expect("invariant: there is a first one");
            let index = peer.ring.words().filled.load(Ordering::Relaxed);
            // SAFETY: a slot that is not filled is the sender's.
            unsafe { peer.ring.head(index).write_volatile(head) };
            peer.ring.words().filled.store(index + 1, Ordering::Release);
        }
    }

    fn send(&mut self, peer: &Peer, lent: &mut Lent<'_>) -> Result<u64, Failed> {
        self.put_filled(peer);
        let after_answers = self.send_answers(peer, lent)?;
        if self.state != QPS_RTS {
            return Ok(after_answers);
        }
        let after_requests = self.send_requests(peer, lent)?;
        let retry =
            if self.waits() && self.timers.retry_ns > 0 { self.progress_ns + self.timers.retry_ns } else { NEVER };
        Ok(after_answers.min(after_requests).min(retry))
    }

    fn send_answers(&mut self, peer: &Peer, lent: &mut Lent<'_>) -> Result<u64, Failed> {
        while let Some(&Answer { psn, from, total, sent }) = self.answers.front() {
            let bytes = (total - sent).min(peer.ring.shape().slot_bytes);
            let (index, deliver_at_ns) = match self.slot(peer, bytes, lent) {
                Ok(slot) => slot,
                Err(later) => return Ok(later),
            };
            let mut slot = Slot::new(&peer.ring, index, lent.copies, self.number);
            match from {
                Source::Memory { rkey, remote } => {
                    let place = lent.regions.place(rkey, remote + u64::from(sent), bytes.into(), ACCESS_REMOTE_READ);
                    // SAFETY: of a region that is registered; the slot has room for `bytes`.
                    let copied = place.and_then(|place| unsafe { slot.copy(place, 0, bytes as usize, Way::FromGpu) });
                    if copied.is_err() {
                        return Err(self.refuse(psn, WC_REM_ACCESS_ERR, lent));
                    }
                }
                // SAFETY: a slot has more than eight bytes.
                Source::Word(word) => unsafe { slot.data.cast::<u64>().write(word) },
            }
            let pending = slot.pending;
            if QueuePair::is_lost(peer, lent) {
                pending.wait();
            } else {
                let head = Head { psn, deliver_at_ns, opcode: ANSWER, bytes, offset: sent, total, ..Head::default() };
                self.filling.push_back(Filling { pending, head });
                self.put_filled(peer);
            }
            lent.port.out_bytes.fetch_add(bytes.into(), Ordering::Relaxed);
            if let Some(answer) = self.answers.front_mut() {
                answer.sent += bytes;
            }
            if sent + bytes >= total {
                self.answers.pop_front();
            }
        }
        Ok(NEVER)
    }

    fn send_requests(&mut self, peer: &Peer, lent: &mut Lent<'_>) -> Result<u64, Failed> {
        if self.not_before_ns > lent.now_ns {
            return Ok(self.not_before_ns);
        }
        let mut at = self.sends.iter().position(|request| request.first_psn + request.packets > self.next_psn);
        while let Some(request) = at.and_then(|at| self.sends.get(at)) {
            let (slot_bytes, end_psn) = (peer.ring.shape().slot_bytes, request.first_psn + request.packets);
            let offset = ((self.next_psn - request.first_psn) * u64::from(slot_bytes)) as u32;
            let bytes =
                if request.has_answer() { 0 } else { (request.bytes - offset.min(request.bytes)).min(slot_bytes) };
            let (index, deliver_at_ns) = match self.slot(peer, bytes, lent) {
                Ok(slot) => slot,
                Err(later) => return Ok(later),
            };
            if !QueuePair::is_lost(peer, lent) {
                let mut slot = Slot::new(&peer.ring, index, lent.copies, self.number);
                // SAFETY: the slot has room for `bytes`; the regions are kept until the request ends.
                let copied = unsafe {
                    match &request.inline {
                        Some(inline) => {
                            let from = inline.as_ptr().add(offset as usize);
                            std::ptr::copy_nonoverlapping(from, slot.data, bytes as usize);
                            Ok(())
                        }
                        None => lent.regions.copy(&request.parts, offset, &mut slot, bytes, Way::FromGpu),
                    }
                };
                let pending = slot.pending;
                if copied.is_err() {
                    pending.wait();
                    self.fail(Some((self.next_psn, WC_LOC_PROT_ERR)), lent);
                    return Err(Failed { by_peer: false });
                }
                let head = Head {
                    psn: self.next_psn,
                    remote: request.remote,
                    deliver_at_ns,
                    operands: request.operands,
                    opcode: request.opcode,
                    bytes,
                    rkey: request.rkey,
                    imm: request.imm,
                    offset,
                    total: request.bytes,
                };
                self.filling.push_back(Filling { pending, head });
                self.put_filled(peer);
            }
            lent.port.out_bytes.fetch_add(bytes.into(), Ordering::Relaxed);
            self.next_psn += 1;
            if self.next_psn == end_psn {
                at = at.map(|at| at + 1);
            }
        }
        Ok(NEVER)
    }
}
