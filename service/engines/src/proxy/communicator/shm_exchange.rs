//! Shared-memory exchange on the service's side: joins in for ranks that left their part to it, and
//! finds mismatched calls. It goes as far as others have posted.

use mccs_device::Buffers;
use mccs_ipc::shm_exchange::{CollectiveSignature, SHM_EXCHANGE_RANKS_MAX, ShmExchange};
use mccs_ipc::types::{ErrorClass, RedOp};
use mccs_kernels::Source;

use crate::proxy::calls::describe::{describe_call, signature};
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::members::{Member, Members};
use crate::proxy::calls::mismatch::{Called, call_difference, disagreement};
use crate::proxy::calls::operation::{Operation, RoundState};

/// See the module's documentation. All ranks are on this host.
pub(crate) struct Rounds<'a> {
    members: &'a mut Members,
    exchange: &'a ShmExchange,
}

impl<'a> Rounds<'a> {
    pub(crate) fn new(members: &'a mut Members, exchange: &'a ShmExchange) -> Self {
        Rounds { members, exchange }
    }

    /// Plays the parts of ranks that have left theirs to the service, as far as others have posted. Operations that have
    /// ended go to `ended`.
    pub(crate) fn play(&mut self, ended: &mut Vec<Operation>) -> Result<(), Failure> {
        let mut asked = false;
        loop {
            let mut progress = false;
            for rank in 0..self.members.len() as u32 {
                while self.play_next(rank)? {
                    progress = true;
                    ended.extend(self.members.end_round(rank));
                }
            }
            if progress {
                continue;
            }
            if !self.has_waiting()? || asked {
                return Ok(());
            }
            // A post that came meanwhile is seen in the next turn; later ones are told.
            self.exchange.want_news();
            asked = true;
        }
    }

    /// Plays a rank's part of the round that is its next operation. Returns whether that has ended.
    fn play_next(&mut self, rank: u32) -> Result<bool, Failure> {
        let shm_exchange = self.exchange;
        let Some(operation) = self.members.get_mut(rank).and_then(Member::arrived_mut) else { return Ok(false) };
        let Some(call) = signature(operation) else { return Ok(false) };
        let round = operation.rounds;
        let Buffers::Host { send, recv } = &operation.buffers else { return Ok(false) };
        let (src, bytes, recv) = (send.ptr(), send.bytes() as usize, recv.ptr());
        match operation.round {
            RoundState::None => return Ok(false),
            RoundState::ToPost => {
                // SAFETY: the operand was validated and is kept mapped. The service needs no telling: it looks again.
                let _ = unsafe { shm_exchange.post(rank, round, &call, operation.scalar_bits(), src, bytes) };
                operation.round = RoundState::Posted;
            }
            RoundState::Posted => {}
        }
        let mut first_call = None;
        let mut sources = [Source { ptr: std::ptr::null(), scalar_bits: None }; SHM_EXCHANGE_RANKS_MAX as usize];
        for (peer, source) in (0..shm_exchange.layout().nranks).zip(&mut sources) {
            let count = call.kind.send_count(call.count, shm_exchange.layout().nranks, peer, call.root).unwrap_or(0);
            let Some(posted) = shm_exchange.contribution(peer, round, count as usize * call.dtype.size_bytes()) else {
                return Ok(false);
            };
            let first = *first_call.get_or_insert(posted.call);
            if posted.call != first {
                return Err(self.disagree(round, first, peer, posted.call));
            }
            let scalar_bits = (call.redop == RedOp::PreMulSum).then_some(posted.scalar_bits);
            *source = Source { ptr: posted.data, scalar_bits };
        }
        let sources = &sources[..shm_exchange.layout().nranks as usize];
        // SAFETY: contributions are as long as the shared-memory exchange was asked for; the operand was validated for this call and is
        // kept mapped.
        unsafe { mccs_kernels::finish_round(&call, rank, sources, recv) };
        shm_exchange.complete(rank, round, call.payload_bytes(shm_exchange.layout().nranks));
        Ok(true)
    }

    /// Rank 0 and another posted different calls.
    fn disagree(&self, round: u64, first: u64, peer: u32, theirs: u64) -> Failure {
        let place = self.members.first().map_or(0, Member::whole_started).saturating_add(round - 1);
        let message = match (CollectiveSignature::from_wire(first), CollectiveSignature::from_wire(theirs)) {
            (Some(first), Some(theirs)) => format!(
                "ranks disagree on operation {place}: rank 0 called {}, rank {peer} called {} (different {})",
                describe_call(&first),
                describe_call(&theirs),
                call_difference(&first, &theirs).unwrap_or("call")
            ),
            _ => format!("rank 0 or rank {peer} posted what is no call as operation {place}"),
        };
        Failure::new(ErrorClass::InvalidUsage, message)
    }

    /// Whether a rank's round waits for others. An error if one of those has called something else instead.
    fn has_waiting(&self) -> Result<bool, Failure> {
        let mut any = false;
        for (rank, member) in self.members.iter().enumerate() {
            let Some(operation) = member.arrived().filter(|operation| operation.round != RoundState::None) else {
                continue;
            };
            any = true;
            for (peer, other) in self.members.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                if !self.exchange.has_posted(peer as u32, operation.rounds)
                    && let Some(theirs) = other.arrived()
                {
                    let (own, other) = (Called { by: member, operation }, Called { by: other, operation: theirs });
                    return Err(disagreement(&own, &other, "operation"));
                }
            }
        }
        Ok(any)
    }
}
