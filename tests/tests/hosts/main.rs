//! Communicators whose ranks are on several hosts: real services, sockets and certificates, on loopback addresses.

mod changes;
mod contradictions;
mod devices;
mod policy;
mod port_channels;
mod stuck;
mod traffic;
mod transports;
mod trouble;
mod unauthenticated_peers;

use mccs_eval::workload::Call;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};

/// A call with what its kind has: a root, a reduction, elements.
fn call(kind: CollectiveKind, dtype: DataType, redop: RedOp, count: u64, nranks: u32, seed: u64) -> Call {
    let redop = if kind.reduces() { redop } else { RedOp::Sum };
    let root = if kind.has_root() { seed as u32 % nranks } else { 0 };
    let count = if kind == CollectiveKind::Barrier { 0 } else { count };
    Call { kind, dtype, redop, root, count, nranks, seed }
}
