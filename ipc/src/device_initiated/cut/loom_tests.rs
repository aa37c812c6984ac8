//! Every interleaving, and every order of memory, of two ranks and a service that changes what they run under.

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use super::*;

/// Runs all interleavings with at most three preemptions; without a bound these tests take minutes to hours.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
}

fn page() -> Arc<StrategyTable> {
    let zero = || AtomicU64::new(0);
    Arc::new(StrategyTable {
        head: Head { abort: zero(), held: zero(), published: zero(), captured: zero() },
        slots: std::array::from_fn(|_| Slot { epoch: zero(), from: zero(), words: [zero(), zero()] }),
        ranks: std::array::from_fn(|_| Progress { launched: zero(), announced: zero(), graphs: zero() }),
    })
}

fn words(epoch: u64) -> [u64; STRATEGY_WORDS] {
    [epoch * 10, epoch * 10 + 1]
}

/// The strategy under which a rank runs an operation, whole.
fn epoch_of(page: &StrategyTable, operation: u64) -> u64 {
    let in_force = page.published_strategy(operation).expect("a strategy");
    assert_eq!(in_force.words, words(in_force.epoch));
    in_force.epoch
}

/// Tells that the only change there is has been made: the model does not let two threads look for it for ever.
#[derive(Default)]
struct Bell(Mutex<bool>, Condvar);

impl Bell {
    fn ring(&self) {
        *self.0.lock().expect("bell") = true;
        self.1.notify_all();
    }

    fn wait(&self) {
        let mut rung = self.0.lock().expect("bell");
        while !*rung {
            rung = self.1.wait(rung).expect("bell");
        }
    }
}

/// Looks once, as ranks do, before it leaves that to the bell.
fn wait_until_open(page: &StrategyTable, bell: Option<&Bell>) {
    while page.is_held() {
        match bell {
            Some(bell) => bell.wait(),
            None => thread::yield_now(),
        }
    }
}

fn run(page: &StrategyTable, rank: u32, operations: u64, bell: Option<&Bell>) -> Vec<u64> {
    let run = |operation| {
        if !page.announce(rank, operation) {
            wait_until_open(page, bell);
        }
        epoch_of(page, operation)
    };
    (1..=operations).map(run).collect()
}

#[test]
fn loom_ranks_run_an_operation_under_the_same_strategy() {
    check(|| {
        let (page, bell) = (page(), Arc::new(Bell::default()));
        let mut publisher = Publisher::new(2);
        publisher.publish_on(&page, &words(0)).expect("the first");
        let ranks = [(0, 1), (1, 2)].map(|(rank, operations)| {
            let (page, bell) = (Arc::clone(&page), Arc::clone(&bell));
            thread::spawn(move || run(&page, rank, operations, Some(&bell)))
        });
        let cut = publisher.publish_on(&page, &words(1)).expect("there is room");
        bell.ring();
        let ran = ranks.map(|rank| rank.join().expect("a rank"));
        for epochs in ran {
            for (number, epoch) in (1..).zip(epochs) {
                assert_eq!(epoch, u64::from(number >= cut.from), "{number} of a cut at {}", cut.from);
            }
        }
    });
}

/// Two slots only: the third strategy takes the place of one that no rank needs, or none. The rank here is behind the other, which
/// the service's thread plays.
#[test]
fn loom_a_strategy_stays_while_a_rank_may_need_it() {
    check(|| {
        let page = page();
        let mut publisher = Publisher::new(2);
        publisher.publish_on(&page, &words(0)).expect("the first");
        let rank = {
            let page = Arc::clone(&page);
            thread::spawn(move || run(&page, 0, 2, None))
        };
        let mut cuts = Vec::new();
        for operation in 1..=2 {
            assert!(page.announce(1, operation));
            cuts.extend(publisher.publish_on(&page, &words(cuts.len() as u64 + 1)));
        }
        let ran = rank.join().expect("a rank");
        for (number, epoch) in (1..).zip(ran) {
            let expected = cuts.iter().rfind(|cut| cut.from <= number).map_or(0, |cut| cut.epoch);
            assert_eq!(epoch, expected, "{number} of {cuts:?}");
        }
    });
}

/// The strategy under which a rank captures its first collective of a graph, whole.
fn capture(page: &StrategyTable, rank: u32, bell: &Bell) -> u64 {
    if !page.begin_graph(rank) {
        wait_until_open(page, Some(bell));
    }
    captured_epoch(page)
}

fn captured_epoch(page: &StrategyTable) -> u64 {
    let in_force = page.captured_strategy().expect("a strategy");
    assert_eq!(in_force.words, words(in_force.epoch));
    in_force.epoch
}

/// Nothing was called yet: the second change would take the place of the first.
#[test]
fn loom_graphs_of_all_ranks_keep_the_same_strategy() {
    check(|| {
        let (page, bell) = (page(), Arc::new(Bell::default()));
        let mut publisher = Publisher::new(2);
        publisher.publish_on(&page, &words(0)).expect("the first");
        let ranks = [0, 1].map(|rank| {
            let (page, bell) = (Arc::clone(&page), Arc::clone(&bell));
            thread::spawn(move || capture(&page, rank, &bell))
        });
        publisher.publish_on(&page, &words(1)).expect("there is room");
        bell.ring();
        let captured = ranks.map(|rank| rank.join().expect("a rank"));
        assert_eq!(captured[0], captured[1]);
        publisher.publish_on(&page, &words(2)).expect("there is room");
        publisher.renew_captured_on(&page);
        assert_eq!((captured_epoch(&page), epoch_of(&page, 1)), (captured[0], 2));
    });
}

/// A rank's graph goes and it captures another, the other rank its first, and the service looks whether all have gone.
#[test]
fn loom_what_is_captured_moves_on_between_graphs_alone() {
    check(|| {
        let (page, bell) = (page(), Arc::new(Bell::default()));
        let mut publisher = Publisher::new(2);
        publisher.publish_on(&page, &words(0)).expect("the first");
        assert!(page.begin_graph(0));
        publisher.publish_on(&page, &words(1)).expect("there is room");
        assert_eq!(captured_epoch(&page), 0);
        let ranks = [0, 1].map(|rank| {
            let (page, bell) = (Arc::clone(&page), Arc::clone(&bell));
            thread::spawn(move || {
                if rank == 0 {
                    page.end_graph(rank);
                }
                capture(&page, rank, &bell)
            })
        });
        publisher.renew_captured_on(&page);
        bell.ring();
        let captured = ranks.map(|rank| rank.join().expect("a rank"));
        assert_eq!(captured[0], captured[1]);
        assert_eq!((captured_epoch(&page), epoch_of(&page, 1)), (captured[0], 1));
    });
}

/// Both capture, run what they have captured, which waits for both, and destroy it: whenever the service publishes, they captured under
/// the same strategy, whole also where its slot would be the next to be used again. Later captures then run under the last.
#[test]
fn loom_a_graph_that_has_run_and_gone_had_the_strategy_of_the_others() {
    check(|| {
        let (page, bell, has_captured) =
            (page(), Arc::new(Bell::default()), [(); 2].map(|()| Arc::new(Bell::default())));
        let mut publisher = Publisher::new(2);
        publisher.publish_on(&page, &words(0)).expect("the first");
        // So that the next has a slot of its own.
        assert!(page.announce(0, 1));
        let ranks = [0, 1].map(|rank| {
            let (page, bell, has_captured) = (Arc::clone(&page), Arc::clone(&bell), has_captured.clone());
            thread::spawn(move || {
                let epoch = capture(&page, rank, &bell);
                has_captured[rank as usize].ring();
                has_captured[1 - rank as usize].wait();
                page.end_graph(rank);
                epoch
            })
        });
        publisher.publish_on(&page, &words(1)).expect("there is room");
        publisher.renew_captured_on(&page);
        bell.ring();
        let ran = ranks.map(|rank| rank.join().expect("a rank"));
        assert_eq!(ran[0], ran[1]);
        publisher.renew_captured_on(&page);
        assert_eq!(captured_epoch(&page), 1);
    });
}
