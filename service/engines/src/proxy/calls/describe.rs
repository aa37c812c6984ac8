//! Calls in words, for errors and diagnoses: operation, count, type, root.

use mccs_ipc::shm_exchange::CollectiveSignature;
use mccs_model::Action;

use crate::proxy::calls::operation::Operation;

/// The call as a shared-memory exchange knows it.
#[must_use]
pub fn signature(operation: &Operation) -> Option<CollectiveSignature> {
    let Action::Collective { kind, redop, root, .. } = operation.action else { return None };
    Some(CollectiveSignature::new(kind, operation.dtype, redop, root, operation.count))
}

pub(crate) fn describe_call(call: &CollectiveSignature) -> String {
    describe_call_as(call, |rank| rank)
}

/// The same, where ranks are called something else.
pub(crate) fn describe_call_as(call: &CollectiveSignature, name_of: impl Fn(u32) -> u32) -> String {
    let CollectiveSignature { kind, dtype, redop, root, count } = call;
    let redop = if kind.reduces() { format!(", {redop}") } else { String::new() };
    let root = if kind.has_root() { format!(", root {}", name_of(*root)) } else { String::new() };
    format!("{kind}({count} x {dtype}{redop}{root})")
}

/// A call in words, as in an error message.
pub(crate) fn describe(operation: &Operation) -> String {
    describe_as(operation, |rank| rank)
}

/// The same, where ranks are called something else.
pub(crate) fn describe_as(operation: &Operation, name_of: impl Fn(u32) -> u32) -> String {
    let (count, dtype) = (operation.count, operation.dtype);
    match &operation.action {
        Action::Collective { .. } => {
            signature(operation).map_or_else(String::new, |call| describe_call_as(&call, name_of))
        }
        Action::Send { peer } => format!("send({count} x {dtype}, to {})", name_of(*peer)),
        Action::Recv { peer } => format!("recv({count} x {dtype}, from {})", name_of(*peer)),
        Action::Nop => "nop".into(),
        Action::Invalid { .. } => "an invalid operation".into(),
    }
}
