//! Checker of data in the simulated cluster: memory of operations in flight, with margins.

use std::sync::Arc;
use std::time::Instant;

use mccs_device::{Buffers, Operand};
use mccs_engines::proxy::{Operation, RoundState};
use mccs_eval::workload::{Call, POISON};
use mccs_ipc::types::{CollectiveKind, Handle, RedOp};
use mccs_model::{Action, Scalar};
use mccs_tenants::session::Session;

use super::script::Transfer;

/// Bytes around every buffer that nobody may write.
const MARGIN_BYTES: usize = 64;
/// Bytes that fill memory whose operations have ended: nobody may read or write it any more.
const ENDED: u64 = u64::from_ne_bytes([0x5a; 8]);

/// Caller of an operation.
pub(super) struct Caller<'a> {
    pub(super) session: &'a Arc<Session>,
    pub(super) comm: Handle,
    pub(super) tenant_comm: Handle,
    pub(super) rank: u32,
    pub(super) stream: u32,
    pub(super) now: Instant,
}

/// Part of a flight's memory.
#[derive(Clone, Copy)]
struct Span {
    at: usize,
    bytes: usize,
}

/// One call, or several that hand data on, in memory of their own. Kept until the rank is dropped, as what has failed may
/// still be moving.
pub(super) struct Flight {
    memory: Vec<u64>,
    rank: u32,
    call: Call,
    /// In the order of the calls.
    actions: Vec<(Action, Span, Span)>,
    /// Spans of the result; of all calls.
    outputs: Vec<Span>,
    spans: Vec<Span>,
    /// Whether nobody may write to `spans` but to `outputs`.
    keeps_input: bool,
    /// Last ticket.
    pub(super) ticket: u64,
    pub(super) stream: u32,
}

impl Flight {
    fn new(call: Call, rank: u32, bytes: usize) -> Self {
        let words = (bytes + 2 * MARGIN_BYTES).div_ceil(8);
        Flight {
            memory: vec![u64::from_ne_bytes([POISON; 8]); words],
            rank,
            call,
            actions: Vec::new(),
            outputs: Vec::new(),
            spans: Vec::new(),
            keeps_input: true,
            ticket: 0,
            stream: 0,
        }
    }

    /// A rank's part of a collective.
    pub(super) fn collective(call: Call, rank: u32, in_place: bool) -> Self {
        let size = call.dtype.size_bytes();
        let (send_bytes, recv_bytes) = (call.send_count(rank) * size, call.recv_count(rank) * size);
        let elements = if in_place { call.in_place_elements(rank) } else { None };
        let after_send = send_bytes.next_multiple_of(64) + MARGIN_BYTES;
        let (send_at, recv_at, bytes) = match elements {
            Some((send, recv)) => (send as usize * size, recv as usize * size, send_bytes.max(recv_bytes)),
            None => (0, after_send, after_send + recv_bytes),
        };
        // Some ranks have their scalar in memory, as GPUs do.
        let scalar = Span { at: MARGIN_BYTES + bytes.next_multiple_of(64) + MARGIN_BYTES, bytes: size };
        let has_scalar_at =
            call.redop == RedOp::PreMulSum && send_bytes > 0 && (call.seed + u64::from(rank)).is_multiple_of(2);
        let mut flight = Flight::new(call, rank, if has_scalar_at { scalar.at + scalar.bytes } else { bytes });
        let send = Span { at: MARGIN_BYTES + send_at, bytes: send_bytes };
        let recv = Span { at: MARGIN_BYTES + recv_at, bytes: recv_bytes };
        let mut action = collective_action(&call, rank);
        flight.spans = vec![send, recv];
        if has_scalar_at && let Action::Collective { scalar: by, .. } = &mut action {
            *by = Scalar::At(scalar.at as isize - send.at as isize);
            flight.spans.push(scalar);
            flight.bytes_mut()[scalar.at..scalar.at + size].copy_from_slice(&call.scalar(rank).to_le_bytes()[..size]);
        }
        flight.actions.push((action, send, recv));
        flight.keeps_input = elements.is_none();
        flight.outputs = vec![recv];
        flight.bytes_mut()[send.at..send.at + send.bytes].copy_from_slice(&call.input(rank));
        flight
    }

    /// A broadcast, and another by `root` of what that one brought.
    pub(super) fn relay(first: Call, root: u32, rank: u32) -> Self {
        let bytes = first.count as usize * first.dtype.size_bytes();
        let stride = bytes.next_multiple_of(64) + MARGIN_BYTES;
        let mut flight = Flight::new(first, rank, 3 * stride);
        let span = |place: usize| Span { at: MARGIN_BYTES + place * stride, bytes };
        let only = |span: Span, root: u32| if root == rank { span } else { Span { bytes: 0, ..span } };
        let (input, middle, output) = (only(span(0), first.root), span(1), span(2));
        flight.actions.push((collective_action(&first, rank), input, middle));
        flight.actions.push((collective_action(&Call { root, ..first }, rank), only(middle, root), output));
        flight.spans = vec![input, middle, output];
        flight.outputs = vec![middle, output];
        flight.bytes_mut()[input.at..input.at + input.bytes].copy_from_slice(&first.input(rank));
        flight
    }

    /// A rank's sides of a transfer: one, or both if it sends to itself, or none.
    pub(super) fn of_transfer(transfer: &Transfer, rank: u32) -> Vec<Self> {
        let Transfer { src, dst, call } = *transfer;
        let bytes = call.count as usize * call.dtype.size_bytes();
        let span = Span { at: MARGIN_BYTES, bytes };
        let nothing = Span { bytes: 0, ..span };
        let mut flights = Vec::new();
        if src == rank {
            let mut flight = Flight::new(call, rank, bytes);
            flight.actions.push((Action::Send { peer: dst }, span, nothing));
            flight.spans = vec![span];
            flight.bytes_mut()[span.at..span.at + bytes].copy_from_slice(&call.input(src));
            flights.push(flight);
        }
        if dst == rank {
            let mut flight = Flight::new(call, rank, bytes);
            flight.actions.push((Action::Recv { peer: src }, nothing, span));
            flight.spans = vec![span];
            flight.outputs = vec![span];
            flights.push(flight);
        }
        flights
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.memory)
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.memory)
    }

    /// Its operations, with tickets from the stream's last one on.
    pub(super) fn operations(&mut self, caller: &Caller<'_>, last_ticket: &mut u64) -> Vec<Operation> {
        let ptr = self.memory.as_mut_ptr().cast::<u8>();
        // SAFETY: a span is inside `memory`, which the flight keeps until its operations have ended.
        let operand = |span: Span| unsafe { Operand::from_raw(ptr.wrapping_add(span.at), span.bytes as u64) };
        let operation = |(action, send, recv): &(Action, Span, Span)| {
            *last_ticket += 1;
            Operation {
                session: Arc::clone(caller.session),
                stream: Handle { index: caller.stream, generation: 1 },
                ticket: *last_ticket,
                called_at: caller.now,
                comm: caller.comm,
                tenant_comm: caller.tenant_comm,
                rank: caller.rank,
                action: action.clone(),
                track: 0,
                dtype: self.call.dtype,
                count: self.call.count,
                buffers: Buffers::Host { send: operand(*send), recv: operand(*recv) },
                group_continues: false,
                overlaps: false,
                one_hop: false,
                rounds: 0,
                round: RoundState::None,
                user_tag: 0,
            }
        };
        let operations = self.actions.iter().map(operation).collect();
        (self.ticket, self.stream) = (*last_ticket, caller.stream);
        operations
    }

    /// Checks the result of what has ended well, and all memory around it.
    pub(super) fn check(&self) -> Result<(), String> {
        let (rank, call) = (self.rank, self.call);
        if self.outputs.iter().any(|output| output.bytes > 0) {
            let expected = call.expected(rank);
            for output in self.outputs.iter().filter(|output| output.bytes > 0) {
                if self.bytes()[output.at..output.at + output.bytes] != expected[..] {
                    return Err(format!("rank {rank} of {call:?} has a wrong result of {:?}", self.actions));
                }
            }
        }
        if self.keeps_input
            && let Some((_, send, _)) = self.actions.first()
            && self.bytes()[send.at..send.at + send.bytes] != call.input(rank)[..send.bytes]
        {
            return Err(format!("rank {rank} of {call:?}: its input was written"));
        }
        self.check_margins()
    }

    /// Checks that nothing was written outside its buffers, whether it has ended or not.
    pub(super) fn check_margins(&self) -> Result<(), String> {
        let inside = |at: usize| self.spans.iter().any(|span| (span.at..span.at + span.bytes).contains(&at));
        match self.bytes().iter().enumerate().find(|(at, byte)| **byte != POISON && !inside(*at)) {
            Some((at, _)) => {
                Err(format!("rank {} of {:?}: byte {at} outside its buffers was written", self.rank, self.call))
            }
            None => Ok(()),
        }
    }

    /// Its operations have ended: whoever reads from it from now on gets something wrong.
    pub(super) fn end(&mut self) {
        self.memory.fill(ENDED);
    }

    /// Checks that nobody has written since [`Flight::end`].
    pub(super) fn check_ended(&self) -> Result<(), String> {
        if self.memory.iter().all(|word| *word == ENDED) {
            return Ok(());
        }
        Err(format!("rank {} of {:?}: its memory was written after it had ended", self.rank, self.call))
    }
}

impl std::fmt::Debug for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}+{}", self.at, self.bytes)
    }
}

fn collective_action(call: &Call, rank: u32) -> Action {
    let Call { kind, redop, root, .. } = *call;
    // Bits of the scalar in the call's type, as the shim writes them.
    let scalar_bits = if redop == RedOp::PreMulSum { call.scalar(rank) as u64 } else { 0 };
    debug_assert!(kind != CollectiveKind::Barrier || call.count == 0, "a barrier has no elements");
    Action::Collective { kind, redop, scalar: Scalar::Bits(scalar_bits), root }
}
