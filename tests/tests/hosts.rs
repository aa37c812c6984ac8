//! Communicators whose ranks are on several hosts: real services, sockets and certificates, on loopback addresses.

use mccs_eval::workload::Call;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_tests::hosts::TestHosts;
use mccs_tests::run_checked;

fn call(kind: CollectiveKind, dtype: DataType, redop: RedOp, count: u64, nranks: u32, seed: u64) -> Call {
    let redop = if kind.reduces() { redop } else { RedOp::Sum };
    let root = if kind.has_root() { seed as u32 % nranks } else { 0 };
    let count = if kind == CollectiveKind::Barrier { 0 } else { count };
    Call { kind, dtype, redop, root, count, nranks, seed }
}

#[test]
fn every_collective_runs_across_hosts() {
    let hosts = TestHosts::start(3, "");
    let placement = [0, 0, 1, 2, 1];
    let wrong: u64 = hosts
        .ranks(&placement, |rank| {
            let mut wrong = 0;
            for (seed, kind) in CollectiveKind::ALL.iter().enumerate() {
                for (count, redop) in
                    [(0, RedOp::Sum), (1, RedOp::Max), (1000, RedOp::PreMulSum), (150_001, RedOp::Sum)]
                {
                    for in_place in [false, true] {
                        let call = call(*kind, DataType::I32, redop, count, placement.len() as u32, seed as u64);
                        wrong += run_checked(&rank, &call, in_place);
                    }
                }
            }
            wrong
        })
        .into_iter()
        .sum();
    assert_eq!(wrong, 0);
}
