//! The operator changes what ranks run by, while they run: nothing comes out wrong, nobody waits for ever, and graphs keep what they
//! were captured with until they are destroyed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use mccs_config::change::StrategyChange;
use mccs_config::service::LargeFrom;
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_cuda::{OwnedStream, RawStream};
use mccs_eval::workload::Call;
use mccs_model::GpuStrategy;
use mccs_tests::TestService;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::ranks::{Buffers, Place, Player, Rank, Role, call, capture, enqueue, everybody};
use super::stalls::while_nothing_is_freed;
use super::{LARGE, TENANTS};

pub const ROLES: &[(&str, Role)] = &[
    ("runs_in_rounds", runs_in_rounds),
    ("captures_and_replays", captures_and_replays),
    ("destroys_a_graph_late", destroys_a_graph_late),
];

/// Changes of a run.
const CHANGES: u64 = 400;
/// Elements of calls, from one packet to several pieces of a slot.
const COUNTS: [u64; 5] = [1, 700, 9001, 60_000, 400_003];

/// A service with slots so small that what goes by copy engines goes in pieces.
fn service() -> TestService {
    TestService::start(&TENANTS.replacen("[cuda]\n", "[cuda]\nslot = \"256KiB\"\n", 1))
}

/// A sign of a test to its processes: by a file beside their socket.
pub fn sign(place: &Place, what: &str) -> PathBuf {
    place.socket.with_extension(what)
}

/// Rounds of all ranks of a player, until the test gives a sign.
pub struct Rounds {
    until: PathBuf,
}

impl Rounds {
    pub fn until(place: &Place, what: &str) -> Rounds {
        Rounds { until: sign(place, what) }
    }

    /// Whether there is another round: the same for all ranks.
    pub fn go_on(&self, rank: &Rank) -> bool {
        let mut seen = self.until.clone().into_os_string();
        seen.push(".seen");
        let seen = Path::new(&seen);
        if rank.comm.rank() == 0 && self.until.exists() {
            std::fs::write(seen, "").expect("a sign");
        }
        rank.together.wait();
        let is_over = seen.exists();
        // The next round's look comes when all have seen this one's.
        rank.together.wait();
        !is_over
    }
}

/// Calls of every kind and of several sizes.
fn mixture(nranks: u32) -> Vec<Call> {
    (0..30).map(|n| call(n, nranks, COUNTS[(n + n / 6) as usize % COUNTS.len()])).collect()
}

/// Round after round of calls on two streams, without waiting; then all are checked.
fn runs_in_rounds(place: &Place) -> anyhow::Result<()> {
    let rounds = Rounds::until(place, "ends");
    place.each_rank(|rank| {
        let (own, other) = (rank.comm.rank(), OwnedStream::new(&rank.context)?);
        let calls = mixture(place.nranks);
        let at = calls.iter().map(|call| Buffers::of(&rank.context, call)).collect::<Result<Vec<_>, _>>()?;
        let mut seed = 0;
        while rounds.go_on(&rank) {
            let calls: Vec<_> = calls.iter().map(|call| Call { seed: call.seed + seed, ..*call }).collect();
            calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, own))?;
            if own == 0 && seed == 0 {
                println!("runs");
            }
            for (index, (call, at)) in calls.iter().zip(&at).enumerate() {
                enqueue(&rank.comm, call, at, if index % 3 == 0 { other.raw() } else { rank.stream.raw() })?;
            }
            // SAFETY: both live.
            unsafe {
                rank.stream.raw().synchronize()?;
                other.raw().synchronize()?;
            }
            if let Some(error) = rank.comm.async_error() {
                return Err(error.into());
            }
            calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, own))?;
            seed += 1000;
        }
        ensure!(seed > 0, "no round at all");
        Ok(())
    })
}

/// Calls that are called, then captured, and replayed between others; called again when the graph is destroyed, and captured anew.
fn captures_and_replays(place: &Place) -> anyhow::Result<()> {
    let [before, replays, between, again] =
        ["captures", "destroys", "captures_again", "ends"].map(|what| Rounds::until(place, what));
    place.each_rank(|rank| {
        let own = rank.comm.rank();
        let calls: Vec<_> = mixture(place.nranks).into_iter().step_by(4).collect();
        let at = calls.iter().map(|call| Buffers::of(&rank.context, call)).collect::<Result<Vec<_>, _>>()?;
        let with = |seed: u64| calls.iter().map(move |call| Call { seed: call.seed + seed, ..*call });
        let round = |seed: u64, run: &mut dyn FnMut(RawStream) -> anyhow::Result<()>| {
            with(seed).zip(&at).try_for_each(|(call, at)| at.fill(&call, own))?;
            run(rank.stream.raw())?;
            // SAFETY: the stream lives.
            unsafe { rank.stream.raw().synchronize()? };
            if let Some(error) = rank.comm.async_error() {
                return Err(error.into());
            }
            with(seed).zip(&at).try_for_each(|(call, at)| at.check(&call, own))
        };
        let enqueue_all =
            |stream: RawStream| calls.iter().zip(&at).try_for_each(|(call, at)| enqueue(&rank.comm, call, at, stream));
        let mut seed = 0;
        if own == 0 {
            println!("runs");
        }
        while before.go_on(&rank) {
            round(seed, &mut &enqueue_all)?;
            seed += 1000;
        }
        for (replays, between) in [(&replays, Some(&between)), (&again, None)] {
            let mut graph = capture(&rank.stream, &rank.together, enqueue_all)?;
            while replays.go_on(&rank) {
                // SAFETY: communicator, buffers and stream live.
                round(seed, &mut |stream| unsafe { graph.launch(stream) }.map_err(Into::into))?;
                round(seed + 500, &mut &enqueue_all)?;
                seed += 1000;
            }
            drop(graph);
            while between.is_some_and(|between| between.go_on(&rank)) {
                round(seed, &mut &enqueue_all)?;
                seed += 1000;
            }
        }
        Ok(())
    })
}

/// Destroys a graph when its communicator has gone, and another one is there.
fn destroys_a_graph_late(place: &Place) -> anyhow::Result<()> {
    let ends = Rounds::until(place, "ends");
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (own, call, has_gone) = (comm.rank(), call(0, place.nranks, 1000), Arc::new(AtomicBool::new(false)));
        let at = Buffers::of(&context, &call)?;
        let graph = capture(&stream, &together, |stream| {
            enqueue(&comm, &call, &at, stream)?;
            let has_gone = Arc::clone(&has_gone);
            // SAFETY: the stream lives, and is captured.
            unsafe {
                let capture = stream.capture()?.context("it is captured")?;
                Ok(capture.when_gone(move || has_gone.store(true, Ordering::Release))?)
            }
        })?;
        comm.destroy()?;
        let next = place.join(own, place.another_id(0), together)?;
        drop(graph);
        while !has_gone.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        // The driver is calling the library, too.
        std::thread::sleep(Duration::from_millis(100));
        next.together.wait();
        if own == 0 {
            println!("has destroyed it");
        }
        while ends.go_on(&next) {
            at.fill(&call, own)?;
            enqueue(&next.comm, &call, &at, next.stream.raw())?;
            // SAFETY: the stream lives.
            unsafe { next.stream.raw().synchronize()? };
            at.check(&call, own)?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_that_goes_after_its_communicator_holds_up_no_other() {
    let service = TestService::start(LARGE);
    while_nothing_is_freed(&service, || {
        let place = everybody(&service, 1);
        let mut player = Player::start("destroys_a_graph_late", &place);
        player.hears("has destroyed it");
        let comms = service.service().registry.comms();
        let next = comms.iter().find(|comm| comm.tenant == "b").expect("the other one");
        let page = next.device_initiated.as_ref().expect("on GPUs").page();
        assert!((0..place.nranks).all(|rank| !page.has_graphs(rank)));
        std::fs::write(sign(&place, "ends"), "").expect("a sign");
        player.ends_well();
    });
}

/// As `mccsctl` asks it, of the only communicator there is.
fn reconfigure(service: &TestService, change: &StrategyChange) -> ControlAnswer {
    let communicator = service.service().registry.comms().first().map_or(u64::MAX, |comm| comm.number);
    let request = ControlRequest::Reconfigure { communicator, change: change.clone(), window: None };
    ask(&service.control_socket(), &request).expect("an answer")
}

/// The strategy of the communicator, and its number.
fn in_force(service: &TestService) -> (u64, GpuStrategy) {
    match ask(&service.control_socket(), &ControlRequest::Communicators).expect("an answer") {
        ControlAnswer::Communicators(comms) => (comms[0].epoch, comms[0].on_gpus.expect("on GPUs")),
        other => panic!("{other:?}"),
    }
}

/// Number of its graphs' strategy, if that is another.
fn keeps(service: &TestService) -> Option<u64> {
    match ask(&service.control_socket(), &ControlRequest::Communicators).expect("an answer") {
        ControlAnswer::Communicators(comms) => comms[0].graphs_keep,
        other => panic!("{other:?}"),
    }
}

/// Changes that a communicator can do which began with `able`.
struct Choices {
    able: GpuStrategy,
    rng: StdRng,
}

impl Choices {
    fn next(&mut self) -> StrategyChange {
        let from: Vec<LargeFrom> = match self.able.large_from {
            never if never.is_never() => vec![never],
            _ => {
                ["0", "1KiB", "40KiB", "1MiB", "measured", "0, all_gather=1KiB", "1MiB, all_reduce=40KiB, broadcast=0"]
                    .map(|text| text.parse().expect("well-formed"))
                    .into()
            }
        };
        let large_from = Some(from[self.rng.random_range(0..from.len())]);
        StrategyChange { large_from, ll128: Some(self.able.ll128 && self.rng.random()), ..StrategyChange::default() }
    }
}

/// Changes, again if a rank is too far behind, and returns why not if it is something else.
fn change(service: &TestService, change: &StrategyChange) -> Result<u64, String> {
    loop {
        match reconfigure(service, change) {
            ControlAnswer::Reconfigured { epoch, .. } => return Ok(epoch),
            ControlAnswer::Refused(reason) if reason.contains("try again") => std::thread::yield_now(),
            ControlAnswer::Refused(reason) => return Err(reason),
            other => panic!("{other:?}"),
        }
    }
}

/// Ranks on all GPUs that run, and changes that they can do.
fn running(ranks: &str) -> (TestService, Place, Player, Choices) {
    let service = service();
    let place = everybody(&service, 0);
    let mut player = Player::start(ranks, &place);
    player.hears("runs");
    let (first, able) = in_force(&service);
    assert_eq!(first, 0);
    (service, place, player, Choices { able, rng: StdRng::seed_from_u64(7) })
}

#[test]
#[ignore = "needs a GPU"]
fn strategies_change_while_ranks_run() {
    let (service, place, player, mut choices) = running("runs_in_rounds");
    for epoch in 1..=CHANGES {
        let wanted = choices.next();
        assert_eq!(change(&service, &wanted), Ok(epoch), "{wanted:?}");
        let is = GpuStrategy {
            large_from: wanted.large_from.expect("chosen"),
            ll128: wanted.ll128 == Some(true),
            max_ctas: wanted.max_ctas,
        };
        assert_eq!(in_force(&service), (epoch, is));
        for (refused, why) in [
            ("channels = 2", "large_from, ll128 and max_ctas"),
            ("algorithm = 'ring'", "large_from, ll128 and max_ctas"),
        ] {
            let refused = StrategyChange::parse(refused, "a change").expect("well-formed");
            assert!(change(&service, &refused).is_err_and(|reason| reason.contains(why)));
        }
    }
    std::fs::write(sign(&place, "ends"), "").expect("a sign");
    player.ends_well();
}

/// Whether all ranks of the only communicator there is have graphs, or any has one; and what those run under, or the next would.
fn graphs(service: &TestService, place: &Place) -> (bool, bool, u64) {
    let comm = service.service().registry.comms().pop().expect("a communicator");
    let page = comm.device_initiated.as_ref().expect("on GPUs").page();
    let has_graphs = || (0..place.nranks).map(|rank| page.has_graphs(rank));
    (has_graphs().all(|has| has), has_graphs().any(|has| has), page.captured_strategy().expect("a strategy").epoch)
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_keep_the_strategy_that_they_were_captured_under_until_they_are_destroyed() {
    let (service, place, player, mut choices) = running("captures_and_replays");
    let mut epoch = 0;
    let mut changes_while = |goes_on: &dyn Fn() -> bool| {
        while goes_on() {
            epoch += 1;
            assert_eq!(change(&service, &choices.next()), Ok(epoch));
        }
        epoch
    };
    let sign = |what| std::fs::write(sign(&place, what), "").expect("a sign");
    changes_while(&|| graphs(&service, &place).2 == 0);
    let mut last = 0;
    for (captures, destroys) in [("captures", "destroys"), ("captures_again", "ends")] {
        let before = graphs(&service, &place).2;
        assert!(before > last);
        sign(captures);
        // Changes come between the captures of two ranks, and all capture under one strategy.
        let all_have = changes_while(&|| !graphs(&service, &place).0);
        let kept = graphs(&service, &place).2;
        assert!((before..=all_have).contains(&kept), "{kept}");
        let so_far = in_force(&service).0;
        changes_while(&|| in_force(&service).0 < so_far + 20);
        assert_eq!(graphs(&service, &place), (true, true, kept));
        assert_eq!(keeps(&service), Some(kept));
        sign(destroys);
        if destroys == "destroys" {
            // Until all have been destroyed, and the driver has said so: the service finds that by itself.
            while graphs(&service, &place).2 == kept {
                std::thread::yield_now();
            }
            assert_eq!((graphs(&service, &place).2, keeps(&service)), (so_far + 20, None));
        }
        last = kept;
    }
    player.ends_well();
}
