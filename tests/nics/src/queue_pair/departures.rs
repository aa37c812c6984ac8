//! Departing packets of an emulated queue pair, at the port's rate: delay, loss, and sending again.

use std::sync::atomic::Ordering;

use super::{AHEAD_NS, AHEAD_PACKETS, ANSWER, Answer, Failed, Filling, Lent, NEVER, Peer, QueuePair, Request, Source};
use crate::abi::{
    ACCESS_REMOTE_READ, QPS_RTS, WC_LOC_PROT_ERR, WC_REM_ACCESS_ERR, WC_RETRY_EXC_ERR, WC_RNR_RETRY_EXC_ERR,
    WC_SUCCESS, Wc,
};
use crate::files::{Head, PortWords};
use crate::gpu::Way;
use crate::memory::Slot;
use crate::twins::{LONG_BYTES, Twin};

impl Peer {
    /// The twin of its slots, if a packet goes by it: a long one, of memory of that GPU.
    fn twin_for(&self, request: &Request, bytes: u32, lent: &Lent<'_>) -> Option<Twin> {
        let twin = self.twin.filter(|_| bytes >= LONG_BYTES && request.inline.is_none())?;
        let is_offered = self.ring.words().has_twin.load(Ordering::Acquire) != 0;
        (is_offered && lent.regions.are_on(twin.gpu, &request.parts)).then_some(twin)
    }
}

impl QueuePair {
    /// Completes what the peer has, and sees to what it has not.
    pub(super) fn acknowledge(&mut self, peer: &Peer, lent: &mut Lent<'_>) -> Result<(), Failed> {
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
        let (own, theirs) = (lent.port, peer.port.words());
        let takes = |of: &PortWords| u64::from(bytes) * 8 * 1000 / of.mbit_per_s.load(Ordering::Relaxed).max(1);
        let (now, relaxed) = (lent.now_ns, Ordering::Relaxed);
        // A slow port has packets queued, too: a thread that comes late to the next one does not leave it idle.
        let ahead = AHEAD_NS.max(AHEAD_PACKETS * takes(own));
        let out = own
            .out_free_ns
            .fetch_update(relaxed, relaxed, |free| (free <= now + ahead).then(|| free.max(now) + takes(own)));
        let out_free = out.map_err(|free| free - ahead)?.max(now) + takes(own);
        let at_port = peer.route.as_ref().map_or(out_free, |route| route.pass(bytes, out_free));
        let taken = |free: u64| at_port.max(free + takes(theirs));
        let before = theirs.in_free_ns.fetch_update(relaxed, relaxed, |free| Some(taken(free)));
        let in_free = before.map_or(at_port, taken);
        Ok((index, in_free + own.latency_ns.load(Ordering::Relaxed)))
    }

    fn is_lost(chance: &mut u64, peer: &Peer, lent: &Lent<'_>) -> bool {
        let is_down = |of: &PortWords| of.is_down.load(Ordering::Relaxed) != 0;
        if is_down(lent.port) || is_down(peer.port.words()) {
            return true;
        }
        let loss = lent.port.loss_ppm.load(Ordering::Relaxed);
        *chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        loss > 0 && (*chance >> 33) % 1_000_000 < loss.into()
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

    pub(super) fn send(&mut self, peer: &Peer, lent: &mut Lent<'_>) -> Result<u64, Failed> {
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
            if QueuePair::is_lost(&mut self.chance, peer, lent) {
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
        // Packets that were to be sent again may have been acknowledged meanwhile.
        let first_psn = at.and_then(|at| self.sends.get(at)).map_or(0, |request| request.first_psn);
        self.next_psn = self.next_psn.max(first_psn);
        while let Some(request) = at.and_then(|at| self.sends.get(at)) {
            let (slot_bytes, end_psn) = (peer.ring.shape().slot_bytes, request.first_psn + request.packets);
            let offset = ((self.next_psn - request.first_psn) * u64::from(slot_bytes)) as u32;
            let bytes =
                if request.has_answer() { 0 } else { (request.bytes - offset.min(request.bytes)).min(slot_bytes) };
            let (index, deliver_at_ns) = match self.slot(peer, bytes, lent) {
                Ok(slot) => slot,
                Err(later) => return Ok(later),
            };
            if !QueuePair::is_lost(&mut self.chance, peer, lent) {
                let twin = peer.twin_for(request, bytes, lent);
                let mut slot = Slot::new(&peer.ring, index, lent.copies, self.number).on(twin);
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
                lent.port.out_gpu_bytes.fetch_add(slot.gpu_bytes, Ordering::Relaxed);
                lent.port.twin_bytes.fetch_add(twin.map_or(0, |_| slot.gpu_bytes), Ordering::Relaxed);
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
                    is_on_gpu: twin.is_some().into(),
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
