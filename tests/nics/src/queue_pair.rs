//! Emulated reliable connection: numbered packets, acknowledgements, retransmission, RNR and retry
//! errors. The peer takes packets out of its ring in order. A packet that is not acknowledged in
//! time is sent again from there on.
//!
//! Memory of GPUs is copied later than the host's: a packet is put into the ring, or taken out of it, when its copies are done, and
//! those before it. A completion says that the copies have ended.
//!
//! A read's answer, and an atomic operation's, comes in packets of its own, which name the request and have no place in the
//! peer's order.

mod arrivals;
mod departures;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::abi::{
    QPS_ERR, QPS_RTR, QPS_RTS, Sge, WC_RECV, WC_RETRY_EXC_ERR, WC_WR_FLUSH_ERR, WR_ATOMIC_CMP_AND_SWP,
    WR_ATOMIC_FETCH_AND_ADD, WR_RDMA_READ, WR_SEND, WR_SEND_WITH_IMM, Wc,
};
use crate::bell::Bell;
use crate::completions::CompletionQueue;
use crate::fabric::Route;
use crate::files::{Head, Port, PortWords, Ring};
use crate::gpu::{Copies, Gpu, IpcHandle, Pending};
use crate::memory::Regions;
use crate::twins::Twin;

/// Mark of slots: the answer to a read or an atomic operation.
const ANSWER: u32 = 1 << 16;
/// The port's queue of what is paid for, but not gone, at most.
const AHEAD_NS: u64 = 200_000;
/// So many packets as the one that comes may be in it in any case.
const AHEAD_PACKETS: u64 = 2;
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
    /// A request of `bytes` in all parts.
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

/// Content of an answer.
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
pub(crate) struct Peer {
    pub ring: Ring,
    pub port: Port,
    pub bell: Bell,
    /// Links on the way to it.
    pub route: Option<Route>,
    /// Twin of its slots, once it is mapped.
    pub twin: Option<Twin>,
}

/// How long a queue pair tries.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Timers {
    /// 0: without end.
    pub retry_ns: u64,
    pub retries: u32,
    /// 7: without end.
    pub rnr_retries: u32,
    /// Time that this side tells its peer to wait.
    pub rnr_ns: u64,
}

/// Parts that its context lends a queue pair for a step.
pub(crate) struct Lent<'a> {
    pub regions: &'a Regions,
    pub copies: &'a Mutex<Copies>,
    pub port: &'a PortWords,
    pub now_ns: u64,
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
    own: Arc<Ring>,
    peer: Option<Peer>,
    /// A number that differs from packet to packet, for losses: from run to run the same ones.
    chance: u64,
    /// Packets that have gone or come.
    moved: u64,
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
    /// Results of the peer's last atomic operations, by number: an answer can be lost.
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
    pub(crate) fn new(number: u32, own: Arc<Ring>, queues: [*const CompletionQueue; 2], room: [usize; 2]) -> Self {
        QueuePair {
            number,
            handle: Handle(std::ptr::null_mut()),
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
            chance: u64::from(number),
            moved: 0,
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

    pub(crate) fn connect(&mut self, peer: Peer) {
        self.peer = Some(peer);
    }

    /// Ends it: nothing of it goes on, whoever still knows it.
    pub(crate) fn end(&mut self) {
        self.settle();
        self.state = QPS_ERR;
        self.sends.clear();
        self.receives.clear();
        self.answers.clear();
    }

    pub(crate) fn moved(&self) -> u64 {
        self.moved
    }

    /// Has copy engines reach both rings. Their twins are mapped by the devices' threads.
    pub(crate) fn pin(&self, gpu: Gpu) {
        self.own.pin(gpu);
        if let Some(peer) = &self.peer {
            peer.ring.pin(gpu);
        }
        if self.own.shape().on_gpus {
            self.own.offer_twin(gpu);
            self.own.words().maps.store(1, Ordering::Release);
            if let Some(peer) = &self.peer {
                peer.ring.words().maps.store(1, Ordering::Release);
                peer.bell.ring();
            }
        }
    }

    /// The twin of the peer's slots, which is not mapped.
    pub(crate) fn unmapped_twin(&self) -> Option<IpcHandle> {
        self.peer.as_ref().filter(|peer| peer.twin.is_none())?.ring.offered_twin()
    }

    /// Has what is sent go by the twin, unless the peer is another by now.
    pub(crate) fn send_by(&mut self, handle: IpcHandle, twin: Twin) {
        if self.unmapped_twin() == Some(handle)
            && let Some(peer) = &mut self.peer
        {
            peer.twin = Some(twin);
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
        let (own, theirs) = (Arc::clone(&self.own), peer.ring.words());
        let packets =
            || theirs.filled.load(Ordering::Relaxed).wrapping_add(own.words().emptied.load(Ordering::Relaxed));
        let before = packets();
        let stepped = self.take_and_send(peer, lent);
        let moved = packets().wrapping_sub(before);
        if moved != 0 || stepped.is_err() {
            self.moved = self.moved.wrapping_add(moved);
            theirs.rung.fetch_add(1, Ordering::SeqCst);
            peer.bell.ring_for(&theirs.places);
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
}
