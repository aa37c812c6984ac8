//! Every collective, checked element by element, through the service and the shim.

use mccs_eval::workload::Call;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_tests::{TestService, run_checked};

/// Small collectives are not left to the ranks.
const IN_THE_SERVICE: &str = "[host_device]\nshm_exchange_limit = \"0\"\n";

/// All ranks run the same calls; returns the calls that were wrong somewhere.
fn check(settings: &str, nranks: u32, calls: &[(Call, bool)]) {
    let service = TestService::start(settings);
    let wrong = service.ranks(0, nranks, |rank| {
        let wrong = |(call, in_place): &&(Call, bool)| run_checked(&rank, call, *in_place) > 0;
        calls.iter().filter(wrong).copied().collect::<Vec<_>>()
    });
    assert!(wrong.iter().all(Vec::is_empty), "wrong results by rank: {wrong:?}");
}

fn calls(nranks: u32, counts: &[u64], dtypes: &[DataType], redops: &[RedOp]) -> Vec<(Call, bool)> {
    let mut calls = Vec::new();
    for &kind in CollectiveKind::ALL {
        for &count in counts {
            for &dtype in dtypes {
                for &redop in if kind.reduces() { redops } else { &redops[..1] } {
                    let seed = calls.len() as u64;
                    let root = (seed % u64::from(nranks)) as u32;
                    let call = Call { kind, dtype, redop, root, count, nranks, seed };
                    calls.extend([(call, false), (call, true)]);
                }
            }
        }
    }
    calls
}

#[test]
fn every_type_and_operator() {
    check("", 3, &calls(3, &[0, 1, 1000], DataType::ALL, RedOp::ALL));
}

/// The same without the ranks' own exchange.
#[test]
fn every_type_and_operator_in_the_service() {
    check(IN_THE_SERVICE, 3, &calls(3, &[0, 1, 1000], DataType::ALL, RedOp::ALL));
}

#[test]
fn every_number_of_ranks() {
    for nranks in [1, 2, 5, 8] {
        let calls = calls(nranks, &[7, 4099], &[DataType::F32, DataType::Bf16], &[RedOp::Sum, RedOp::PreMulSum]);
        check("", nranks, &calls);
        check(IN_THE_SERVICE, nranks, &calls);
    }
}

/// Pieces, several engines, and streaming stores, with counts that divide by nothing.
#[test]
fn large_operations_on_several_engines() {
    let settings = "[runtime]\ntransport_engines = 3\n[host_device]\ninline_bytes = \"4KiB\"\npiece_bytes = \"32KiB\"\n\
                    streaming_threshold = \"512KiB\"\n";
    check(settings, 4, &calls(4, &[100_003], &[DataType::F32, DataType::U8], &[RedOp::Sum, RedOp::Avg]));
}

#[test]
fn pinned_rings_and_trees() {
    for algorithm in ["ring", "tree"] {
        let settings = format!(
            "[strategy]\nalgorithm = {algorithm:?}\nchannels = 3\n[host_device]\ninline_bytes = \"4KiB\"\npiece_bytes = \"4KiB\"\n"
        );
        let redops = [RedOp::Sum, RedOp::Avg, RedOp::PreMulSum, RedOp::Max];
        check(&settings, 5, &calls(5, &[1, 20_011], &[DataType::F32, DataType::I64], &redops));
    }
}

#[test]
fn dedicated_placement() {
    let settings =
        "[runtime]\nplacement = \"dedicated\"\ntransport_engines = 2\n[host_device]\ninline_bytes = \"0B\"\n";
    check(settings, 2, &calls(2, &[1, 5000], &[DataType::F64], &[RedOp::Sum]));
}
