//! Graphs of one communicator at once: in several streams, beside calls, by several threads, in forks, and while communicators end. All ranks
//! launch in the same order.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use anyhow::ensure;
use mccs::cuda::CudaCommunicator;
use mccs_cuda::{CaptureMode, CapturedGraph, Context, Graph, OwnedStream, RawStream};
use mccs_eval::workload::Call;

use super::ranks::{Buffers, Place, Rank, Role, call, enqueue, everybody_plays};
use super::staged::strict;
use super::{LARGE, TENANTS};

pub const ROLES: &[(&str, Role)] = &[
    ("replays_in_parallel", replays_in_parallel),
    ("replays_beside_calls", replays_beside_calls),
    ("replays_several_communicators", replays_several_communicators),
    ("replays_by_threads", replays_by_threads),
    ("replays_clones", replays_clones),
    ("captures_in_turn", captures_in_turn),
    ("ends_with_graphs", ends_with_graphs),
];

const ROUNDS: u64 = 6;
const COUNTS: [u64; 4] = [1000, 70_001, 77, 20_000];

/// Calls, with buffers of their own.
struct Work {
    rank: u32,
    calls: Vec<Call>,
    at: Vec<Buffers>,
}

impl Work {
    fn new(context: &Context, comm: &CudaCommunicator, first: u64) -> anyhow::Result<Self> {
        let call = |(n, count): (usize, &u64)| call(first + n as u64, comm.nranks(), *count);
        let calls: Vec<_> = COUNTS.iter().enumerate().map(call).collect();
        let at = calls.iter().map(|call| Buffers::of(context, call)).collect::<Result<_, _>>()?;
        Ok(Work { rank: comm.rank(), calls, at })
    }

    fn seeded(&self, seed: u64) -> impl Iterator<Item = (Call, &Buffers)> {
        let call = move |call: &Call| Call { seed: seed * 1000 + call.seed % 1000, ..*call };
        self.calls.iter().map(call).zip(&self.at)
    }

    /// Nothing may be in flight.
    fn fill(&self, seed: u64) -> anyhow::Result<()> {
        self.seeded(seed).try_for_each(|(call, at)| at.fill(&call, self.rank))
    }

    fn check(&self, seed: u64) -> anyhow::Result<()> {
        self.seeded(seed).try_for_each(|(call, at)| at.check(&call, self.rank))
    }

    fn enqueue(&self, comm: &CudaCommunicator, stream: RawStream) -> anyhow::Result<()> {
        self.calls.iter().zip(&self.at).try_for_each(|(call, at)| enqueue(comm, call, at, stream))
    }

    fn capture(&self, comm: &CudaCommunicator, stream: &OwnedStream) -> anyhow::Result<Graph> {
        Graph::capture(stream, |stream| self.enqueue(comm, stream))
    }
}

/// Numbers of works differ by so much.
const APART: u64 = 10;

/// So many of them.
fn works<const N: usize>(context: &Context, comm: &CudaCommunicator) -> anyhow::Result<[Work; N]> {
    let all: Vec<_> = (0..N as u64).map(|n| Work::new(context, comm, 1 + n * APART)).collect::<anyhow::Result<_>>()?;
    all.try_into().map_err(|_| anyhow::anyhow!("as many as asked for"))
}

fn streams<const N: usize>(context: &Context) -> anyhow::Result<[OwnedStream; N]> {
    let all: Vec<_> = (0..N).map(|_| OwnedStream::new(context)).collect::<Result<_, _>>()?;
    all.try_into().map_err(|_| anyhow::anyhow!("as many as asked for"))
}

fn launch(graph: &mut Graph, stream: &OwnedStream) -> anyhow::Result<()> {
    // SAFETY: communicators, buffers and streams of these tests live until streams were synchronized, or say that they do not.
    unsafe { graph.launch(stream.raw())? };
    Ok(())
}

fn synchronize<'a>(streams: impl IntoIterator<Item = &'a OwnedStream>) -> anyhow::Result<()> {
    // SAFETY: the streams live.
    streams.into_iter().try_for_each(|stream| unsafe { stream.raw().synchronize() })?;
    Ok(())
}

/// Graphs one after the other, each in another stream than the one before, twice a round.
fn replays_in_parallel(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, together, .. }| {
        let (works, streams): ([Work; 3], [_; 3]) = (works(&context, &comm)?, streams(&context)?);
        let mut graphs = works.iter().map(|work| work.capture(&comm, &streams[0])).collect::<Result<Vec<_>, _>>()?;
        for round in 0..ROUNDS {
            works.iter().try_for_each(|work| work.fill(round))?;
            together.wait();
            for turn in 0..6 {
                let (graph, stream) = (turn * (1 + round as usize % 2) % 3, (turn + round as usize) % 3);
                launch(&mut graphs[graph], &streams[stream])?;
            }
            synchronize(&streams)?;
            works.iter().try_for_each(|work| work.check(round))?;
        }
        ensure!(comm.async_error().is_none());
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_run_in_parallel() {
    everybody_plays("replays_in_parallel", &[TENANTS, &strict("auto")]);
}

/// Calls before the first capture that have not ended, then graphs and calls in turn, in streams that change.
fn replays_beside_calls(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, together, .. }| {
        let (works, streams): ([Work; 4], [_; 3]) = (works(&context, &comm)?, streams(&context)?);
        let [first, captured, calls, more] = &works;
        works.iter().try_for_each(|work| work.fill(0))?;
        together.wait();
        first.enqueue(&comm, streams[2].raw())?;
        together.wait();
        let mut graph = captured.capture(&comm, &streams[0])?;
        together.wait();
        for round in 0..ROUNDS {
            let stream = |n: usize| &streams[(n + round as usize) % 3];
            launch(&mut graph, stream(0))?;
            calls.enqueue(&comm, stream(1).raw())?;
            launch(&mut graph, stream(2))?;
            more.enqueue(&comm, stream(2).raw())?;
            synchronize(&streams)?;
            first.check(0)?;
            [captured, calls, more].into_iter().try_for_each(|work| work.check(round))?;
            [captured, calls, more].into_iter().try_for_each(|work| work.fill(round + 1))?;
            together.wait();
        }
        ensure!(comm.async_error().is_none());
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_run_beside_calls() {
    everybody_plays("replays_beside_calls", &[TENANTS, LARGE, &strict("auto")]);
}

/// A graph of each of two communicators, and one of both: ranks launch the former in orders of their own.
fn replays_several_communicators(place: &Place) -> anyhow::Result<()> {
    let id = place.another_id(0);
    place.each_rank(|Rank { context, comm, together, .. }| {
        let second = place.join(comm.rank(), id, Arc::clone(&together))?.comm;
        let (works, streams): ([Work; 4], [_; 3]) = (works(&context, &comm)?, streams(&context)?);
        let mut graphs = [works[0].capture(&comm, &streams[0])?, works[1].capture(&second, &streams[0])?];
        let mut both = Graph::capture(&streams[0], |stream| {
            works[2].enqueue(&comm, stream)?;
            works[3].enqueue(&second, stream)
        })?;
        for round in 0..ROUNDS {
            works.iter().try_for_each(|work| work.fill(round))?;
            together.wait();
            let of = (comm.rank() as usize + round as usize) % 2;
            launch(&mut graphs[of], &streams[of])?;
            launch(&mut graphs[1 - of], &streams[1 - of])?;
            launch(&mut both, &streams[2])?;
            launch(&mut graphs[1 - of], &streams[of])?;
            launch(&mut graphs[of], &streams[1 - of])?;
            synchronize(&streams)?;
            works.iter().try_for_each(|work| work.check(round))?;
        }
        ensure!(comm.async_error().is_none() && second.async_error().is_none());
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_of_several_communicators_do_not_wait_for_each_other() {
    everybody_plays("replays_several_communicators", &[TENANTS]);
}

/// Has threads do something one after the other.
#[derive(Default)]
struct Turns {
    turn: Mutex<u64>,
    has_changed: Condvar,
}

impl Turns {
    /// Does it when this turn has come, and gives the next one away.
    fn take(&self, turn: u64, act: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
        let current = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut current =
            self.has_changed.wait_while(current, |current| *current != turn).unwrap_or_else(PoisonError::into_inner);
        let done = act();
        *current += 1;
        self.has_changed.notify_all();
        done
    }
}

/// Two threads of each rank take turns: one replays, the other replays and calls.
fn replays_by_threads(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, together, .. }| {
        let (works, streams): ([Work; 3], [_; 2]) = (works(&context, &comm)?, streams(&context)?);
        let graphs = [works[0].capture(&comm, &streams[0])?, works[1].capture(&comm, &streams[0])?];
        works.iter().try_for_each(|work| work.fill(7))?;
        together.wait();
        let (turns, comm, works_of_all) = (Turns::default(), &comm, &works);
        let replay = |thread: usize, mut graph: Graph| -> anyhow::Result<()> {
            let (_entered, stream) = (context.enter()?, &streams[thread]);
            for round in 0..2 * ROUNDS {
                turns.take(2 * round + thread as u64, || {
                    if thread == 1 && round % 3 == 1 {
                        works_of_all[2].enqueue(comm, stream.raw())?;
                    }
                    launch(&mut graph, stream)
                })?;
            }
            Ok(())
        };
        let ([first, second], replay) = (graphs, &replay);
        std::thread::scope(|scope| {
            let threads = [scope.spawn(move || replay(0, first)), scope.spawn(move || replay(1, second))];
            threads.into_iter().try_for_each(|thread| thread.join().expect("a thread that does not panic"))
        })?;
        synchronize(&streams)?;
        works.iter().try_for_each(|work| work.check(7))
    })
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_are_launched_by_several_threads() {
    everybody_plays("replays_by_threads", &[TENANTS, &strict("auto")]);
}

/// Two graphs made of one capture, in two streams.
fn replays_clones(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, together, .. }| {
        let ([work], streams): ([Work; 1], [_; 2]) = (works(&context, &comm)?, streams(&context)?);
        let captured =
            CapturedGraph::capture(CaptureMode::ThreadLocal, &streams[0], |stream| work.enqueue(&comm, stream))?;
        let mut clones = [captured.instantiate()?, captured.instantiate()?];
        drop(captured);
        for round in 0..ROUNDS {
            work.fill(round)?;
            together.wait();
            for turn in 0..4 {
                launch(&mut clones[turn % 2], &streams[(turn + round as usize) % 2])?;
            }
            synchronize(&streams)?;
            work.check(round)?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_of_one_capture_run_in_parallel() {
    everybody_plays("replays_clones", &[TENANTS]);
}

/// A capture while another one goes on, with calls of both in turn.
fn captures_in_turn(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, together, .. }| {
        let (works, streams): ([Work; 4], [_; 2]) = (works(&context, &comm)?, streams(&context)?);
        let (mode, mut inner) = (CaptureMode::ThreadLocal, None);
        let outer = CapturedGraph::capture(mode, &streams[0], |outer| {
            works[0].enqueue(&comm, outer)?;
            inner = Some(CapturedGraph::capture(mode, &streams[1], |inner| {
                works[1].enqueue(&comm, inner)?;
                works[2].enqueue(&comm, outer)?;
                works[3].enqueue(&comm, inner)
            })?);
            anyhow::Ok(())
        })?;
        // Behind both captures: the driver instantiates nothing for a thread that captures.
        let mut graphs = [outer.instantiate()?, inner.expect("captured above").instantiate()?];
        for round in 0..ROUNDS {
            works.iter().try_for_each(|work| work.fill(round))?;
            together.wait();
            for turn in 0..4 {
                launch(&mut graphs[turn % 2], &streams[(turn + turn / 2) % 2])?;
            }
            synchronize(&streams)?;
            works.iter().try_for_each(|work| work.check(round))?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_are_captured_in_turn() {
    everybody_plays("captures_in_turn", &[TENANTS, &strict("auto")]);
}

/// A communicator ends while its graphs run, and waits for them. Afterwards they are launched again, beside another communicator's calls, which
/// are none of theirs.
fn ends_with_graphs(place: &Place) -> anyhow::Result<()> {
    let id = place.another_id(0);
    place.each_rank(|Rank { context, comm, together, .. }| {
        let (works, streams): ([Work; 3], [_; 3]) = (works(&context, &comm)?, streams(&context)?);
        let [first, second, calls] = &works;
        let mut graphs = [first.capture(&comm, &streams[0])?, second.capture(&comm, &streams[0])?];
        works.iter().try_for_each(|work| work.fill(0))?;
        together.wait();
        for turn in 0..4 {
            launch(&mut graphs[turn % 2], &streams[turn % 2])?;
        }
        drop(comm);
        [first, second].into_iter().try_for_each(|work| work.check(0))?;
        together.wait();
        let next = place.join(first.rank, id, Arc::clone(&together))?.comm;
        for round in 0..ROUNDS {
            calls.fill(round)?;
            together.wait();
            launch(&mut graphs[0], &streams[0])?;
            calls.enqueue(&next, streams[2].raw())?;
            launch(&mut graphs[1], &streams[1])?;
            synchronize(&streams)?;
            calls.check(round)?;
        }
        drop(graphs);
        calls.fill(99)?;
        calls.enqueue(&next, streams[2].raw())?;
        synchronize(&streams)?;
        calls.check(99)
    })
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_outlive_their_communicator() {
    everybody_plays("ends_with_graphs", &[TENANTS, LARGE, &strict("auto")]);
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_fork_and_join() {
    everybody_plays("replays_many", &[TENANTS]);
}
