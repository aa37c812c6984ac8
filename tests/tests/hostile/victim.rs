//! The other tenant, whose collectives go on.

use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mccs_eval::workload::Call;
use mccs_ipc::command::Command;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_tests::{Rank, TestService, ranks_at, run_checked};

use crate::raw::Raw;

pub const SETTINGS: &str = "[[tenant]]\nname = \"hostile\"\nsocket = \"h\"\nmax_operations_in_flight = 64\n\
                        max_memory = \"64GiB\"\nmax_regions = 65536\n\
                        [[tenant]]\nname = \"honest\"\nsocket = \"g\"\n";

/// A call that takes longer than this waits for something that it should not.
const LONG: Duration = Duration::from_secs(1);

/// The honest tenant's results: calls, each of whose elements was right, and the longest of them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Served {
    pub calls: u64,
    pub longest: Duration,
    pub over_a_second: u64,
}

/// When the honest tenant calls.
pub struct Calls {
    due: Mutex<Due>,
    changed: Condvar,
}

struct Due {
    /// `None`: one call behind the other.
    asked: Option<u64>,
    is_over: bool,
}

impl Calls {
    /// One call behind the other.
    pub fn always() -> Self {
        Calls { due: Mutex::new(Due { asked: None, is_over: false }), changed: Condvar::new() }
    }

    /// A call for each time that it is asked for; one for all times that pass while it calls.
    pub fn when_asked() -> Self {
        Calls { due: Mutex::new(Due { asked: Some(1), is_over: false }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Due> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for a call.
    pub fn one_more(&self) {
        if let Some(asked) = &mut self.lock().asked {
            *asked += 1;
        }
        self.changed.notify_all();
    }

    fn end(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Returns when the next call is due, with whether it is the last.
    fn next(&self) -> bool {
        let waits = |due: &mut Due| !due.is_over && due.asked == Some(0);
        let mut due = self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner);
        due.asked = due.asked.map(|_| 0);
        due.is_over
    }
}

/// One checked collective after the other, until rank 0 is to stop.
fn work(rank: &Rank, calls: &Calls) -> Served {
    let mut served = Served::default();
    for round in 0.. {
        let is_last = rank.comm.rank() == 0 && calls.next();
        let kind = CollectiveKind::ALL[round as usize % CollectiveKind::ALL.len()];
        let count = [1, 1000, 20_000][round as usize / CollectiveKind::ALL.len() % 3];
        let (dtype, redop, root) = (DataType::F32, RedOp::Sum, (round % 2) as u32);
        let call = Call { kind, dtype, redop, root, count, nranks: 2, seed: round };
        let began = Instant::now();
        assert_eq!(run_checked(rank, &call, round % 2 == 0), 0, "{kind}");
        let took = began.elapsed();
        served.calls += 1;
        served.longest = served.longest.max(took);
        served.over_a_second += u64::from(took > LONG);
        // Both ranks must stop after the same round: rank 0 decides, by a one-element all-reduce.
        let vote = rank.client.allocate(4).expect("memory");
        // SAFETY: nothing is in flight.
        let bytes = unsafe { vote.as_mut_slice() };
        bytes.copy_from_slice(&u32::from(is_last).to_le_bytes());
        let place = vote.at(0);
        rank.comm.all_reduce(place, place, 1, DataType::U32, RedOp::Sum, &rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        if bytes[0] == 1 {
            break;
        }
    }
    served
}

/// Runs `attack` while an honest tenant, with this socket, works.
pub fn beside(socket: &Path, attack: impl FnOnce()) {
    beside_calls(socket, &Calls::always(), attack);
}

/// The same, with calls when they are due. Returns what the honest tenant had.
pub fn beside_calls(socket: &Path, calls: &Calls, attack: impl FnOnce()) -> Served {
    std::thread::scope(|scope| {
        let honest = scope.spawn(|| ranks_at(socket, 2, |rank| work(&rank, calls)));
        // Also when the attack fails: the honest tenant would go on for ever.
        let attacked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(attack));
        calls.end();
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
