//! Arriving packets of an emulated queue pair: requests, answers, and when their copies are done.

use std::sync::atomic::Ordering;

use super::{ANSWER, Answer, Arriving, Failed, KEPT_RESULTS, Lent, NEVER, QueuePair, Source};
use crate::abi::{
    ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, WC_LOC_LEN_ERR, WC_LOC_PROT_ERR, WC_RECV,
    WC_RECV_RDMA_WITH_IMM, WC_REM_ACCESS_ERR, WC_REM_INV_REQ_ERR, WC_WITH_IMM, WR_ATOMIC_CMP_AND_SWP,
    WR_ATOMIC_FETCH_AND_ADD, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_SEND_WITH_IMM, Wc,
};
use crate::files::Head;
use crate::gpu::Way;
use crate::memory::{Denied, Place, Slot};

impl QueuePair {
    /// Takes packets out of the own ring.
    pub(super) fn take(&mut self, lent: &mut Lent<'_>) -> Result<u64, Failed> {
        loop {
            self.finish_arrivals(lent);
            let words = self.own.words();
            let index = words.emptied.load(Ordering::Relaxed) + self.arriving.len() as u64;
            if index >= words.filled.load(Ordering::Acquire) {
                return Ok(NEVER);
            }
            // SAFETY: a filled slot is this side's until it is emptied. Its content may be anything: it is copied, then checked.
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
    pub(super) fn refuse(&mut self, psn: u64, status: u32, lent: &mut Lent<'_>) -> Failed {
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
        let twin = self.own.own_twin().filter(|_| head.is_on_gpu != 0);
        let mut slot = Slot::new(&self.own, index, lent.copies, self.number).on(twin);
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
        lent.port.in_gpu_bytes.fetch_add(slot.gpu_bytes, Ordering::Relaxed);
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
}
