//! Mismatch of ranks' calls on a host: another collective, count, type, reduction, root or order,
//! and the error that names both sides.

use mccs_ipc::shm_exchange::CollectiveSignature;
use mccs_ipc::types::ErrorClass;

use crate::proxy::calls::describe::{describe, signature};
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::members::{Member, Members};
use crate::proxy::calls::operation::Operation;

/// A rank, and what it has called.
pub(crate) struct Called<'a> {
    pub(crate) by: &'a Member,
    pub(crate) operation: &'a Operation,
}

impl<'a> Called<'a> {
    fn next_of(by: &'a Member) -> Option<Self> {
        Some(Called { by, operation: by.next()? })
    }
}

/// Whether the next collectives of all ranks are the same.
///
/// # Errors
/// The first that is not, and what rank 0 or the first of this host called.
pub(crate) fn check_alike(members: &Members) -> Result<(), Failure> {
    let Some(first) = members.first().and_then(Called::next_of) else { return Ok(()) };
    for other in members.iter().skip(1).filter_map(Called::next_of) {
        let difference = if first.operation.rounds == other.operation.rounds {
            difference(first.operation, other.operation)
        } else {
            Some("place in the order of calls")
        };
        if let Some(difference) = difference {
            return Err(disagreement(&first, &other, difference));
        }
    }
    Ok(())
}

/// A failure that names both sides.
pub(crate) fn disagreement(own: &Called<'_>, other: &Called<'_>, difference: &str) -> Failure {
    let (place, other_place) = (own.by.place(own.operation), other.by.place(other.operation));
    let message = format!(
        "ranks disagree on operation {place}: rank {} called {}, rank {} called {}{} (different {difference})",
        own.operation.rank,
        describe(own.operation),
        other.operation.rank,
        describe(other.operation),
        if place == other_place { String::new() } else { format!(" as its operation {other_place}") }
    );
    Failure::new(ErrorClass::InvalidUsage, message)
}

/// Difference of two ranks' calls, if there is one. Scalars of a pre-multiplied sum may differ.
fn difference(a: &Operation, b: &Operation) -> Option<&'static str> {
    match (signature(a), signature(b)) {
        (Some(a), Some(b)) => call_difference(&a, &b),
        _ => Some("kind of operation"),
    }
}

/// Difference of two collectives, if there is one.
pub(crate) fn call_difference(a: &CollectiveSignature, b: &CollectiveSignature) -> Option<&'static str> {
    if a.kind != b.kind {
        Some("collective")
    } else if a.count != b.count {
        Some("count")
    } else if a.dtype != b.dtype {
        Some("data type")
    } else if a.redop != b.redop {
        Some("reduction")
    } else if a.root != b.root {
        Some("root")
    } else {
        None
    }
}
