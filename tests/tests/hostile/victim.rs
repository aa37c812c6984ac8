//! The other tenant, whose collectives go on.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mccs_eval::workload::Call;
use mccs_ipc::command::Command;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_tests::{Rank, TestService, ranks_at, run_checked};

use crate::raw::Raw;

pub const SETTINGS: &str = "[[tenant]]\nname = \"hostile\"\nsocket = \"h\"\nmax_operations_in_flight = 64\n\
                        max_memory = \"64GiB\"\nmax_regions = 65536\n\
                        [[tenant]]\nname = \"honest\"\nsocket = \"g\"\n";

/// What the honest tenant has had: calls, each of whose elements was right, and the longest of them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Served {
    pub calls: u64,
    pub longest: Duration,
}

/// One checked all-reduce after the other, until rank 0 is to stop.
pub fn work(rank: &Rank, stop: &AtomicBool) -> Served {
    let mut served = Served::default();
    for round in 0.. {
        let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::F32, RedOp::Sum);
        let call = Call { kind, dtype, redop, root: 0, count: 1000, nranks: 2, seed: round };
        let began = Instant::now();
        assert_eq!(run_checked(rank, &call, round % 2 == 0), 0);
        served = Served { calls: served.calls + 1, longest: served.longest.max(began.elapsed()) };
        // Both ranks must stop after the same round: rank 0 decides, by a one-element all-reduce.
        let vote = rank.client.allocate(4).expect("memory");
        // SAFETY: nothing is in flight.
        let bytes = unsafe { vote.as_mut_slice() };
        let own = u32::from(rank.comm.rank() == 0 && stop.load(Ordering::Relaxed));
        bytes.copy_from_slice(&own.to_le_bytes());
        let place = vote.at(0);
        rank.comm.all_reduce(place, place, 1, DataType::U32, RedOp::Sum, &rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        if bytes[0] == 1 {
            break;
        }
    }
    served
}

/// Runs `attack` while an honest tenant, with this socket, works. Returns what that had.
pub fn beside(socket: &Path, attack: impl FnOnce()) -> Served {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let honest = scope.spawn(|| ranks_at(socket, 2, |rank| work(&rank, &stop)));
        // Also when the attack fails: the honest tenant would go on for ever.
        let attacked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(attack));
        stop.store(true, Ordering::Relaxed);
        let served = honest.join().expect("the honest tenant");
        attacked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        served[0]
    })
}

/// The same in a service of this process; afterwards that must be as before.
pub fn attack(attack: impl FnOnce(&TestService)) {
    let service = TestService::start(SETTINGS);
    beside(&service.socket(1), || attack(&service));
    // A new session of the attacked tenant works: its quotas are free again.
    Raw::connect(&service);
}

/// One wrong command; returns the call's failure.
pub fn call_fails(change: impl FnOnce(&mut Command)) -> String {
    let mut message = String::new();
    attack(|service| {
        let mut raw = Raw::connect(service);
        let mut command = raw.command();
        change(&mut command);
        raw.push(&command);
        message = raw.failed();
    });
    message
}

/// One nonsensical command; returns why the session ended.
pub fn session_ends(change: impl FnOnce(&mut Command)) -> String {
    let mut message = String::new();
    attack(|service| {
        let mut raw = Raw::connect(service);
        let mut command = raw.command();
        change(&mut command);
        raw.push(&command);
        message = raw.fenced();
    });
    message
}

/// So many checked all-reduces of 64 KiB by two honest ranks; how far `count` rose during each.
pub fn honest_calls(service: &TestService, calls: u64, count: impl Fn() -> u64 + Sync) -> Vec<u64> {
    let mut waited = service.ranks(1, 2, |rank| {
        let one = |seed| {
            let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::F32, RedOp::Sum);
            let call = Call { kind, dtype, redop, root: 0, count: 16 << 10, nranks: 2, seed };
            let before = count();
            assert_eq!(run_checked(&rank, &call, false), 0);
            count() - before
        };
        (0..calls).map(one).collect::<Vec<_>>()
    });
    waited.swap_remove(0)
}
