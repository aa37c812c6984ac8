//! Agreement of ranks before a call of several pieces: what it is, and whether the service maps all of the rank's memory. They
//! make the same pieces only if all call the same.
//!
//! It is an all-gather of a type that no caller's call has: a short call of another rank never passes as one. The service tells of such a
//! mismatch: [`in_words`] then says what was called instead.

use mccs::{
    Collective, CollectiveKind, Collectives, Communicator, DataType, Error, ErrorClass, ReduceOperator, Region, Stream,
};

use crate::operation::{Call, Kind};

/// Bytes of a rank's part: whether it says yes, and its call in words.
const PART_BYTES: usize = 128;
/// The type that no call of Python's has.
pub(crate) const DATA_TYPE: DataType = DataType::F8E4M3;

/// A call in the service's words.
fn describe(call: &Call) -> String {
    let Kind::Collective(kind) = call.kind else { return call.kind.name().into() };
    let op = match call.op {
        _ if !kind.reduces() => String::new(),
        ReduceOperator::Standard(op) => format!(", {op}"),
        _ => ", premulsum".into(),
    };
    let root = if kind.has_root() { format!(", root {}", call.root) } else { String::new() };
    format!("{kind}({} x {}{op}{root})", call.count, call.data_type)
}

/// Memory that an agreement takes.
pub(crate) fn bytes(nranks: u32) -> usize {
    PART_BYTES * (nranks as usize + 1)
}

/// A rank's part.
pub(crate) fn part(call: &Call, yes: bool) -> [u8; PART_BYTES] {
    let mut part = [0; PART_BYTES];
    let text = describe(call);
    let taken = text.len().min(PART_BYTES - 1);
    part[0] = u8::from(yes);
    part[1..=taken].copy_from_slice(&text.as_bytes()[..taken]);
    part
}

/// Begins it: this rank's part is the memory's first, and all ranks' parts come behind it.
pub(crate) fn start(comm: &Communicator, memory: &Region, stream: &Stream) -> Result<(), Error> {
    let of = |offset: usize, ranks: u32| {
        memory.at(offset as u64).elements_of(DATA_TYPE, PART_BYTES as u64 * u64::from(ranks))
    };
    comm.enqueue(&Collective::AllGather { send: of(0, 1), recv: of(PART_BYTES, comm.nranks()) }, stream)
}

/// Whether all ranks say yes, by what is in the memory.
///
/// # Errors
/// They have called different things. Nothing was moved.
pub(crate) fn outcome(memory: &[u8]) -> Result<bool, Error> {
    let mut parts = memory.chunks_exact(PART_BYTES).skip(1).zip(0..);
    let Some((first, _)) = parts.clone().next() else { return Ok(true) };
    match parts.find(|(part, _)| part[1..] != first[1..]) {
        None => Ok(memory.chunks_exact(PART_BYTES).skip(1).all(|part| part[0] != 0)),
        Some((other, rank)) => {
            let message = format!("ranks disagree: rank 0 called {}, rank {rank} called {}", text(first), text(other));
            Err(Error::refused(ErrorClass::InvalidUsage, message))
        }
    }
}

fn text(part: &[u8]) -> String {
    let end = part.iter().skip(1).position(|byte| *byte == 0).map_or(part.len(), |length| 1 + length);
    String::from_utf8_lossy(&part[1..end]).into_owned()
}

/// An error of the service's, which knows agreements alone, as callers know their calls. `long` is the call of this rank's that was agreed on, which has
/// more than `piece_bytes`.
pub(crate) fn in_words(mut error: Error, rank: u32, long: Option<&Call>, piece_bytes: usize) -> Error {
    if let Error::Failed { message, .. } | Error::Refused { message, .. } = &mut error {
        let form = format!("{}({PART_BYTES} x {DATA_TYPE})", CollectiveKind::AllGather);
        if message.contains(&form) {
            if let Some(call) = long {
                *message = message
                    .replace(&format!("rank {rank} called {form}"), &format!("rank {rank} called {}", describe(call)));
            }
            // The form differs in more than the call does.
            let differing = message.rfind(" (different ").filter(|_| message.ends_with(')'));
            message.truncate(differing.unwrap_or(message.len()));
            let mib = piece_bytes >> 20;
            *message = message.replace(&form, &format!("a collective of more than {mib} MiB"));
        }
    }
    error
}
