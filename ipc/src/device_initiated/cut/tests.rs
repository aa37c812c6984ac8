use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;

use super::super::ControlPage;
use super::*;

fn words(epoch: u64) -> [u64; STRATEGY_WORDS] {
    std::array::from_fn(|index| epoch * 1000 + index as u64)
}

/// A page as the service and as a rank have it, with a first strategy for so many ranks.
fn pages(nranks: u32) -> (ControlPage, ControlPage, Publisher) {
    let (fd, service) = ControlPage::create().expect("a page");
    let rank = ControlPage::map(fd.as_fd()).expect("the same page");
    assert_eq!((rank.published(), rank.published_strategy(1)), (0, None));
    let mut publisher = Publisher::new(nranks);
    assert_eq!(publisher.publish(&service, &words(0)), Ok(Cut { epoch: 0, from: 1 }));
    (service, rank, publisher)
}

fn epochs<const N: usize>(page: &ControlPage, operations: [u64; N]) -> [u64; N] {
    operations.map(|operation| page.published_strategy(operation).expect("a strategy").epoch)
}

#[test]
fn a_strategy_holds_from_above_all_that_was_announced() {
    let (service, rank, mut publisher) = pages(2);
    let first = PublishedStrategy { epoch: 0, from: 1, until: u64::MAX, words: words(0) };
    assert_eq!((rank.published(), rank.published_strategy(1)), (1, Some(first)));
    assert!(rank.announce(0, 4) && rank.announce(1, 9));
    assert_eq!(publisher.publish(&service, &words(1)), Ok(Cut { epoch: 1, from: 10 }));
    let second = PublishedStrategy { epoch: 1, from: 10, until: u64::MAX, words: words(1) };
    assert_eq!(
        [9, 10].map(|n| rank.published_strategy(n)),
        [Some(PublishedStrategy { until: 10, ..first }), Some(second)]
    );
    assert!(rank.announce(1, 10));
    assert_eq!(publisher.publish(&service, &words(2)), Ok(Cut { epoch: 2, from: 11 }));
    assert_eq!((epochs(&rank, [4, 9, 10, 11, u64::MAX]), rank.published()), ([0, 0, 1, 2, 2], 3));
}

#[test]
fn one_that_nothing_was_called_under_is_replaced() {
    let (service, rank, mut publisher) = pages(2);
    rank.announce(0, 3);
    for epoch in 1..100 {
        assert_eq!(publisher.publish(&service, &words(epoch)), Ok(Cut { epoch, from: 4 }));
        assert_eq!(epochs(&rank, [1, 3, 4]), [0, 0, epoch]);
    }
    assert_eq!(rank.published(), 100);
}

#[test]
fn a_change_is_refused_while_a_rank_needs_all_there_are() {
    let (service, rank, mut publisher) = pages(3);
    (0..3).for_each(|one| assert!(rank.announce(one, 1)));
    let mut ahead = 1;
    for epoch in 1..NUMBERED as u64 {
        assert_eq!(publisher.publish(&service, &words(epoch)), Ok(Cut { epoch, from: ahead + 1 }));
        ahead += 1;
        assert!(rank.announce(0, ahead) && rank.announce(2, ahead));
    }
    let refused = publisher.publish(&service, &words(99));
    assert_eq!(refused, Err(CutError::Behind { rank: 1, called: 1, most: ahead }));
    assert!(refused.expect_err("refused").to_string().starts_with("rank 1 has called 1 collectives, and another 8"));
    assert_eq!(epochs(&rank, [1, 2, ahead, ahead + 1]), [0, 1, ahead - 1, ahead - 1]);
    // It runs its second under the second strategy: now the first is over.
    assert!(rank.announce(1, 2));
    assert_eq!(publisher.publish(&service, &words(99)), Ok(Cut { epoch: ahead, from: ahead + 1 }));
    assert_eq!(epochs(&rank, [2, 3, ahead, ahead + 1]), [1, 2, ahead - 1, ahead]);
}

fn captured(page: &ControlPage) -> u64 {
    page.captured_strategy().expect("a strategy").epoch
}

#[test]
fn graphs_keep_their_strategy_while_there_are_any_and_other_calls_take_the_last() {
    let (service, rank, mut publisher) = pages(3);
    assert!(rank.begin_graph(2) && rank.begin_graph(2));
    for epoch in 1..3 {
        // Nothing was called yet, and of those that graphs do not keep each takes the place of the one before.
        assert_eq!(publisher.publish(&service, &words(epoch)), Ok(Cut { epoch, from: 1 }));
        publisher.renew_captured(&service);
        assert_eq!((epochs(&rank, [1, u64::MAX]), captured(&rank)), ([epoch; 2], 0));
        assert_eq!(rank.captured_strategy().expect("a strategy").words, words(0));
        rank.end_graph(2);
    }
    publisher.renew_captured(&service);
    assert_eq!(captured(&rank), 2);
    assert!(!rank.is_held());
    // A publication moves it as well, and a rank that captures while another's graphs live has what those have.
    assert_eq!(publisher.publish(&service, &words(3)), Ok(Cut { epoch: 3, from: 1 }));
    assert_eq!(captured(&rank), 3);
    assert!(rank.begin_graph(0));
    assert_eq!(publisher.publish(&service, &words(4)), Ok(Cut { epoch: 4, from: 1 }));
    assert!(rank.begin_graph(1));
    rank.end_graph(0);
    publisher.renew_captured(&service);
    assert_eq!((epochs(&rank, [1]), captured(&rank)), ([4], 3));
}

#[test]
fn what_graphs_keep_takes_none_of_the_places_that_numbers_have() {
    let (service, rank, mut publisher) = pages(2);
    assert!(rank.begin_graph(1));
    for epoch in 1..=3 * NUMBERED as u64 {
        assert_eq!(publisher.publish(&service, &words(epoch)), Ok(Cut { epoch, from: epoch }));
        (0..2).for_each(|one| assert!(rank.announce(one, epoch)));
    }
    let ahead = 3 * NUMBERED as u64;
    for epoch in ahead + 1..ahead + NUMBERED as u64 {
        assert_eq!(publisher.publish(&service, &words(epoch)).map(|cut| cut.epoch), Ok(epoch));
        assert!(rank.announce(0, epoch));
    }
    assert!(matches!(publisher.publish(&service, &words(99)), Err(CutError::Behind { rank: 1, .. })));
    assert_eq!(rank.captured_strategy().expect("a strategy").words, words(0));
    rank.end_graph(1);
    // The last stays refused, and is what graphs take now all the same.
    assert!(publisher.publish(&service, &words(99)).is_err());
    assert_eq!(captured(&rank), ahead + NUMBERED as u64 - 1);
}

#[test]
fn nobody_begins_while_a_strategy_is_published_or_after_an_abort() {
    let (service, rank, mut publisher) = pages(1);
    service.strategies().hold();
    assert!(!rank.announce(0, 1) && rank.is_held() && !rank.is_aborted());
    service.strategies().let_go();
    assert!(rank.announce(0, 1));
    rank.abort();
    publisher.publish(&service, &words(1)).expect("published");
    assert!(!rank.announce(0, 2) && service.is_aborted() && service.is_held(), "for good");
}

#[test]
fn what_a_tenant_writes_harms_nobody_else() {
    let (service, rank, mut publisher) = pages(2);
    rank.announce(0, u64::MAX);
    assert_eq!(publisher.publish(&service, &words(1)), Ok(Cut { epoch: 1, from: u64::MAX }));
    rank.announce(0, 0);
    assert_eq!(publisher.publish(&service, &words(2)), Ok(Cut { epoch: 2, from: u64::MAX }));
    service.strategies().slots.iter().for_each(|slot| slot.from.store(7, Ordering::Relaxed));
    assert_eq!(publisher.publish(&service, &words(3)), Ok(Cut { epoch: 3, from: u64::MAX }));
}

/// xorshift: rounds that differ, and are the same from run to run.
struct Pace(u64);

impl Pace {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Ranks at paces of their own, as far apart as streams let them, through thousands of changes.
#[test]
fn all_ranks_run_each_operation_under_the_same_strategy() {
    const RANKS: u32 = 3;
    const CHANGES: u64 = 20_000;
    /// Operations that a stream takes before its caller waits for others.
    const APART: u64 = 64;
    let (service, page, mut publisher) = pages(RANKS);
    let is_over = AtomicBool::new(false);
    let done: [AtomicU64; RANKS as usize] = Default::default();
    let rank = |rank: u32| {
        let (mut pace, mut ran) = (Pace(0x9e37_79b9 + u64::from(rank)), Vec::<u64>::new());
        while !is_over.load(Ordering::Relaxed) {
            let operation = ran.len() as u64 + 1;
            if done.iter().any(|done| done.load(Ordering::Relaxed) + APART < operation)
                || pace.next() % 16 < u64::from(rank)
            {
                std::thread::yield_now();
                continue;
            }
            if !page.announce(rank, operation) {
                while page.is_held() {
                    std::hint::spin_loop();
                }
            }
            let in_force = page.published_strategy(operation).expect("a strategy");
            assert_eq!(in_force.words, words(in_force.epoch), "whole");
            assert!((in_force.from..in_force.until).contains(&operation));
            ran.push(in_force.epoch);
            done[rank as usize].store(operation, Ordering::Relaxed);
        }
        ran
    };
    let (mut cuts, mut refused) = (vec![Cut { epoch: 0, from: 1 }], 0_u64);
    let ran = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS).map(|number| scope.spawn(move || rank(number))).collect();
        let mut pace = Pace(77);
        for epoch in 1..=CHANGES {
            let cut = loop {
                match publisher.publish(&service, &words(epoch)) {
                    Ok(cut) => break cut,
                    Err(CutError::Behind { .. }) => refused += 1,
                }
                std::thread::yield_now();
            };
            assert_eq!(cut.epoch, epoch);
            while cuts.last().is_some_and(|last| last.from == cut.from) {
                cuts.pop();
            }
            cuts.push(cut);
            (0..pace.next() % 200).for_each(|_| std::hint::spin_loop());
            // Every other change at least comes upon operations under the one before.
            while epoch.is_multiple_of(2) && done.iter().all(|done| done.load(Ordering::Relaxed) < cut.from) {
                std::thread::yield_now();
            }
        }
        is_over.store(true, Ordering::Relaxed);
        ranks.into_iter().map(|rank| rank.join().expect("a rank that does not panic")).collect::<Vec<_>>()
    });
    assert!(cuts.len() as u64 >= CHANGES / 2, "{} were in force", cuts.len());
    for (rank, ran) in ran.iter().enumerate() {
        let mut cuts = cuts.iter().peekable();
        let mut epoch = 0;
        for (operation, actual) in (1..).zip(ran) {
            while let Some(cut) = cuts.next_if(|cut| cut.from <= operation) {
                epoch = cut.epoch;
            }
            assert_eq!(
                *actual, epoch,
                "rank {rank}, operation {operation}; {refused} changes had to be asked for again"
            );
        }
    }
}

/// Ranks that capture, run what they have captured, which waits for all ranks, and keep some of it for a while; and call other operations
/// meanwhile.
#[test]
fn all_ranks_capture_each_graph_under_the_same_strategy() {
    const RANKS: u32 = 3;
    const GRAPHS: u64 = 20_000;
    /// Then what is captured moves on for certain.
    const ALL_GO_EVERY: u64 = 64;
    let (service, page, mut publisher) = pages(RANKS);
    let (runs, ended) = (std::sync::Barrier::new(RANKS as usize), AtomicU64::new(0));
    let begin = |may_begin: bool| {
        while !may_begin && page.is_held() {
            std::hint::spin_loop();
        }
    };
    let rank = |rank: u32| {
        let (mut pace, mut ran, mut kept) = (Pace(0x9e37_79b9 + u64::from(rank)), Vec::new(), 0);
        for number in 1..=GRAPHS {
            begin(page.announce(rank, number));
            let called = page.published_strategy(number).expect("a strategy");
            begin(page.begin_graph(rank));
            let in_force = page.captured_strategy().expect("a strategy");
            assert_eq!([called.words, in_force.words], [called.epoch, in_force.epoch].map(words), "whole");
            ran.push((called.epoch, in_force.epoch));
            runs.wait();
            kept += 1;
            let destroys_all = number.is_multiple_of(ALL_GO_EVERY);
            while kept > 0 && (destroys_all || pace.next().is_multiple_of(2)) {
                page.end_graph(rank);
                kept -= 1;
            }
            if destroys_all {
                runs.wait();
                while captured(&page) == in_force.epoch {
                    std::thread::yield_now();
                }
            }
        }
        (0..kept).for_each(|_| page.end_graph(rank));
        ended.fetch_add(1, Ordering::Release);
        ran
    };
    let mut epoch = 0;
    let ran = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS).map(|number| scope.spawn(move || rank(number))).collect();
        let mut pace = Pace(77);
        while ended.load(Ordering::Acquire) < u64::from(RANKS) {
            if pace.next().is_multiple_of(2) {
                publisher.renew_captured(&service);
            } else if publisher.publish(&service, &words(epoch + 1)).is_ok() {
                epoch += 1;
            }
            (0..pace.next() % 200).for_each(|_| std::hint::spin_loop());
        }
        ranks.into_iter().map(|rank| rank.join().expect("a rank that does not panic")).collect::<Vec<_>>()
    });
    assert_eq!(ran[0], ran[1]);
    assert_eq!(ran[0], ran[2]);
    let mut under: Vec<_> = ran[0].iter().map(|(_, captured)| *captured).collect();
    under.dedup();
    assert!(under.is_sorted() && under.len() as u64 > GRAPHS / ALL_GO_EVERY, "{under:?}");
    publisher.renew_captured(&service);
    assert_eq!(captured(&page), epoch);
}
