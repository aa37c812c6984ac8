//! Sends and receives between GPUs: groups, graphs, streams, and what ranks are told when two ends do not fit.

use std::collections::{BTreeMap, VecDeque};

use anyhow::{Context as _, ensure};
use mccs::cuda::CudaCommunicator;
use mccs::{DataType, Error, Group};
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_cuda::{Context, DeviceMemory, Graph, OwnedStream, RawStream, copy_from_host, copy_to_host};
use mccs_eval::workload::{Call, POISON};
use mccs_tests::TestService;
use rand::Rng;

use super::ranks::{Buffers, Place, Player, Rank, Role, call, capture, enqueue, everybody, everybody_plays};
use super::staged::strict;
use super::{TENANTS, aborts_later, hears_of_the_abort, told};

pub const ROLES: &[(&str, Role)] = &[
    ("exchanges", exchanges),
    ("exchanges_in_graphs", exchanges_in_graphs),
    ("exchanges_in_parallel_graphs", exchanges_in_parallel_graphs),
    ("pipelines", pipelines),
    ("contradicts", contradicts),
    ("receives_nothing", receives_nothing),
    ("aborts_a_receive", aborts_a_receive),
    ("errs", errs),
];

/// A message, the same on all ranks.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    pub from: u32,
    pub to: u32,
    pub bytes: u64,
}

/// All messages of a turn: none to many for a pair, of lengths on both sides of every limit.
fn messages(turn: u64, nranks: u32) -> Vec<Message> {
    const LENGTHS: [u64; 12] = [0, 1, 7, 8, 100, 2048, 4099, 65_536, 131_073, 262_145, 1_000_003, 3 << 20];
    let pairs = (0..nranks).flat_map(|from| (0..nranks).map(move |to| (from, to)));
    pairs
        .flat_map(|(from, to)| {
            let number = turn + u64::from(from) * 5 + u64::from(to) * 3;
            (0..number % 4).map(move |index| {
                let bytes = LENGTHS[((number * 7 + index * 5) % LENGTHS.len() as u64) as usize];
                Message { from, to, bytes }
            })
        })
        .collect()
}

/// Content of the `number`th message of a turn.
fn content(number: usize, seed: u64, bytes: u64) -> impl Iterator<Item = u8> {
    let start = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.wrapping_mul(0xd134_2543_de82_ef95);
    (0..bytes).map(move |at| (start.wrapping_add(at.wrapping_mul(0x2545_f491_4f6c_dd1d)) >> 56) as u8)
}

/// A rank's buffers for a turn: its messages one behind the other, a byte between, so that most are not aligned.
pub struct Exchange {
    rank: u32,
    messages: Vec<Message>,
    send: DeviceMemory,
    recv: DeviceMemory,
}

impl Exchange {
    pub fn new(context: &Context, rank: u32, messages: Vec<Message>) -> anyhow::Result<Self> {
        let room = |is_mine: &dyn Fn(&Message) -> bool| {
            messages.iter().filter(|m| is_mine(m)).map(|m| m.bytes as usize + 1).sum::<usize>() + 64
        };
        let send = DeviceMemory::zeroed(context, room(&|m| m.from == rank))?;
        let recv = DeviceMemory::zeroed(context, room(&|m| m.to == rank))?;
        Ok(Exchange { rank, messages, send, recv })
    }

    /// Numbers of this rank's messages of one direction, and where they begin.
    fn placed(&self, is_send: bool) -> impl Iterator<Item = (usize, Message, u64)> + '_ {
        let mut at = 0;
        let own = self
            .messages
            .iter()
            .enumerate()
            .filter(move |(_, message)| (if is_send { message.from } else { message.to }) == self.rank);
        own.map(move |(number, message)| {
            let place = at;
            at += message.bytes + 1;
            (number, *message, place)
        })
    }

    fn image(&self, is_send: bool, seed: u64) -> Vec<u8> {
        let memory = if is_send { &self.send } else { &self.recv };
        let mut image = vec![POISON; memory.len_bytes()];
        for (number, message, at) in self.placed(is_send) {
            let place = &mut image[at as usize..][..message.bytes as usize];
            place.iter_mut().zip(content(number, seed, message.bytes)).for_each(|(byte, value)| *byte = value);
        }
        image
    }

    /// Nothing may be in flight.
    pub fn fill(&self, seed: u64) -> anyhow::Result<()> {
        // SAFETY: both have that room.
        unsafe {
            copy_from_host(self.send.address(), &self.image(true, seed))?;
            Ok(copy_from_host(self.recv.address(), &vec![POISON; self.recv.len_bytes()])?)
        }
    }

    /// Enqueues a group: some ranks receive first.
    fn enqueue(&self, comm: &CudaCommunicator, streams: &[RawStream]) -> anyhow::Result<()> {
        let group = Group::begin();
        for is_send in if self.rank.is_multiple_of(2) { [true, false] } else { [false, true] } {
            for (number, message, at) in self.placed(is_send) {
                self.call(comm, message, at, is_send, streams[number % streams.len()])?;
            }
        }
        Ok(group.end()?)
    }

    /// The same in an order of chance: messages of a pair keep theirs.
    pub fn enqueue_in_any_order(
        &self,
        comm: &CudaCommunicator,
        stream: RawStream,
        chance: &mut impl Rng,
    ) -> anyhow::Result<()> {
        let mut left: BTreeMap<(u32, bool), VecDeque<(Message, u64)>> = BTreeMap::new();
        for is_send in [true, false] {
            for (_, message, at) in self.placed(is_send) {
                let peer = if is_send { message.to } else { message.from };
                left.entry((peer, is_send)).or_default().push_back((message, at));
            }
        }
        let group = Group::begin();
        while !left.is_empty() {
            let key = *left.keys().nth(chance.random_range(0..left.len())).expect("one is left");
            let of_key = left.get_mut(&key).expect("it is there");
            if let Some((message, at)) = of_key.pop_front() {
                self.call(comm, message, at, key.1, stream)?;
            } else {
                left.remove(&key);
            }
        }
        Ok(group.end()?)
    }

    fn call(
        &self,
        comm: &CudaCommunicator,
        Message { from, to, bytes }: Message,
        at: u64,
        is_send: bool,
        stream: RawStream,
    ) -> anyhow::Result<()> {
        let stream = stream.as_ptr();
        // SAFETY: buffers have room, and live to the end of the test.
        unsafe {
            if is_send {
                comm.send(self.send.address() + at, bytes, DataType::U8, to, stream)?;
            } else {
                comm.recv(self.recv.address() + at, bytes, DataType::U8, from, stream)?;
            }
        }
        Ok(())
    }

    pub fn check(&self, seed: u64) -> anyhow::Result<()> {
        let (wanted, mut output) = (self.image(false, seed), vec![0; self.recv.len_bytes()]);
        // SAFETY: it has that many bytes.
        unsafe { copy_to_host(&mut output, self.recv.address())? };
        let wrong = wanted.iter().zip(&output).position(|(wanted, got)| wanted != got);
        let of = wrong.and_then(|wrong| self.placed(false).filter(|(_, _, at)| *at <= wrong as u64).last());
        ensure!(wrong.is_none(), "rank {}: byte {wrong:?} is wrong, behind the begin of {of:?}", self.rank);
        Ok(())
    }
}

/// Groups of a rank.
const TURNS: u64 = 12;

/// The collective behind a group.
fn collective(turn: u64, nranks: u32) -> Call {
    call(turn, nranks, 1 + turn * 5000)
}

/// Groups of everything, with collectives between, from one stream and from several.
fn exchanges(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (rank, nranks, other) = (comm.rank(), place.nranks, OwnedStream::new(&context)?);
        let all: Vec<_> =
            (0..TURNS).map(|turn| Exchange::new(&context, rank, messages(turn, nranks))).collect::<Result<_, _>>()?;
        let calls: Vec<_> = (0..TURNS).map(|turn| collective(turn, nranks)).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, rank))?;
        all.iter().enumerate().try_for_each(|(turn, exchange)| exchange.fill(turn as u64))?;
        together.wait();
        for (turn, exchange) in all.iter().enumerate() {
            let streams = [[stream.raw(), other.raw()], [other.raw(), stream.raw()]][turn / 2 % 2];
            exchange.enqueue(&comm, if turn % 3 == 0 { &streams } else { &streams[..1] })?;
            enqueue(&comm, &calls[turn], &at[turn], streams[turn % 2])?;
        }
        // SAFETY: the streams live.
        unsafe { stream.raw().synchronize().and_then(|()| other.raw().synchronize())? };
        if let Some(error) = comm.async_error() {
            return Err(error.into());
        }
        all.iter().enumerate().try_for_each(|(turn, exchange)| exchange.check(turn as u64))?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, rank))
    })
}

#[test]
#[ignore = "needs a GPU"]
fn groups_of_sends_and_receives_bring_every_byte() {
    let service = TestService::start(TENANTS);
    let place = everybody(&service, 0);
    Player::start("exchanges", &place).ends_well();
    // The operator sees all of them.
    let messages: Vec<_> = (0..TURNS).flat_map(|turn| messages(turn, place.nranks)).collect();
    let collective_bytes = |turn| {
        let Call { kind, count, dtype, .. } = collective(turn, place.nranks);
        kind.payload_count(count, place.nranks) * dtype.size_bytes() as u64
    };
    let bytes =
        messages.iter().map(|message| message.bytes).sum::<u64>() + (0..TURNS).map(collective_bytes).sum::<u64>();
    let pairs = messages.len() as u64;
    loop {
        let Ok(ControlAnswer::Overview(overview)) = ask(&service.control_socket(), &ControlRequest::Overview) else {
            panic!("no overview")
        };
        let did = overview.tenants.iter().map(|tenant| (tenant.pairs, tenant.operations, tenant.bytes));
        let did = did.max_by_key(|(_, operations, _)| *operations).expect("a tenant");
        // When the communicator has left, and its GPUs have been asked for the last time.
        if overview.communicators.is_empty() && did.1 >= pairs + TURNS {
            assert_eq!(did, (pairs, pairs + TURNS, bytes));
            break;
        }
        std::thread::yield_now();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn two_tenants_at_once_exchange_their_own() {
    let service = TestService::start(TENANTS);
    let players = [0, 1].map(|tenant| Player::start("exchanges", &everybody(&service, tenant)));
    players.into_iter().for_each(|player| drop(player.ends_well()));
}

/// A graph of two groups and a collective, replayed on other data, with groups of their own between.
fn exchanges_in_graphs(place: &Place) -> anyhow::Result<()> {
    const REPLAYS: u64 = 30;
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (rank, nranks, other) = (comm.rank(), place.nranks, OwnedStream::new(&context)?);
        let exchange = |turn| Exchange::new(&context, rank, messages(turn, nranks));
        let (captured, single) = ([exchange(1)?, exchange(2)?], exchange(3)?);
        let collective = call(0, nranks, 10_000);
        let at = Buffers::of(&context, &collective)?;
        let run_single = |seed: u64, stream: RawStream| {
            single.fill(seed)?;
            single.enqueue(&comm, &[stream])?;
            // SAFETY: the stream lives.
            unsafe { stream.synchronize()? };
            single.check(seed)
        };
        together.wait();
        run_single(1000, stream.raw())?;
        let mut graph = capture(&stream, &together, |stream| {
            captured[0].enqueue(&comm, &[stream])?;
            enqueue(&comm, &collective, &at, stream)?;
            captured[1].enqueue(&comm, &[stream])
        })?;
        for replay in 0..REPLAYS {
            let collective = Call { seed: replay, ..collective };
            captured.iter().try_for_each(|exchange| exchange.fill(replay))?;
            at.fill(&collective, rank)?;
            // SAFETY: communicator, buffers and streams live.
            unsafe {
                graph.launch(stream.raw())?;
                stream.raw().synchronize()?;
            }
            captured.iter().try_for_each(|exchange| exchange.check(replay))?;
            at.check(&collective, rank)?;
            if replay % 5 == 3 {
                run_single(replay, other.raw())?;
                run_single(replay + 1, stream.raw())?;
            }
        }
        ensure!(comm.async_error().is_none());
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn captured_groups_are_replayed() {
    everybody_plays("exchanges_in_graphs", &[TENANTS]);
}

/// Graphs of groups, in streams that change, with a group of calls between.
fn exchanges_in_parallel_graphs(place: &Place) -> anyhow::Result<()> {
    const ROUNDS: u64 = 8;
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (rank, nranks) = (comm.rank(), place.nranks);
        let streams = [stream, OwnedStream::new(&context)?, OwnedStream::new(&context)?];
        let exchange = |turn| Exchange::new(&context, rank, messages(turn, nranks));
        let all = [exchange(1)?, exchange(2)?, exchange(3)?];
        let [first, second, single] = &all;
        together.wait();
        let capture = |of: &Exchange, stream| Graph::capture(stream, |stream| of.enqueue(&comm, &[stream]));
        let mut graphs = [capture(first, &streams[0])?, capture(second, &streams[1])?];
        for round in 0..ROUNDS {
            all.iter().try_for_each(|exchange| exchange.fill(round))?;
            together.wait();
            let stream = |n: u64| streams[((round + n) % 3) as usize].raw();
            // SAFETY: communicator, buffers and streams live.
            unsafe {
                graphs[0].launch(stream(0))?;
                graphs[1].launch(stream(1))?;
                single.enqueue(&comm, &[stream(2)])?;
                graphs[1].launch(stream(2))?;
                graphs[0].launch(stream(1))?;
                streams.iter().try_for_each(|stream| stream.raw().synchronize())?;
            }
            all.iter().try_for_each(|exchange| exchange.check(round))?;
        }
        ensure!(comm.async_error().is_none());
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_with_messages_run_in_parallel() {
    everybody_plays("exchanges_in_parallel_graphs", &[TENANTS, &strict("auto")]);
}

/// Messages from rank to rank, without groups: each receives, and sends on what it got.
fn pipelines(place: &Place) -> anyhow::Result<()> {
    const LENGTHS: [u64; 6] = [4, 4000, 40_000, 300_000, 2_000_004, 12];
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (rank, nranks) = (comm.rank(), place.nranks);
        let memory = LENGTHS.map(|bytes| DeviceMemory::zeroed(&context, bytes as usize));
        let memory: Vec<_> = memory.into_iter().collect::<Result<_, _>>()?;
        let wanted: Vec<Vec<u8>> =
            LENGTHS.iter().enumerate().map(|(n, bytes)| content(n, 3, *bytes).collect()).collect();
        if rank == 0 {
            for (memory, wanted) in memory.iter().zip(&wanted) {
                // SAFETY: it has that room.
                unsafe { copy_from_host(memory.address(), wanted)? };
            }
        }
        together.wait();
        for (memory, bytes) in memory.iter().zip(LENGTHS) {
            let (at, stream) = (memory.address(), stream.raw().as_ptr());
            // SAFETY: the buffer has that room, and lives to the end.
            unsafe {
                if rank > 0 {
                    comm.recv(at, bytes / 4, DataType::F32, rank - 1, stream)?;
                }
                if rank + 1 < nranks {
                    comm.send(at, bytes / 4, DataType::F32, rank + 1, stream)?;
                }
            }
        }
        // SAFETY: the stream lives.
        unsafe { stream.raw().synchronize()? };
        // The first rank ends before the second maps what the third waits for, and the driver holds up a
        // map behind a free.
        together.wait();
        for (memory, wanted) in memory.iter().zip(&wanted) {
            let mut output = vec![0; wanted.len()];
            // SAFETY: it has that many bytes.
            unsafe { copy_to_host(&mut output, memory.address())? };
            ensure!(output == *wanted, "rank {rank}: {} bytes are wrong", wanted.len());
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn messages_are_passed_on() {
    everybody_plays("pipelines", &[TENANTS]);
}

/// Rank 0 sends 100 elements where rank 1 receives 99, then the right number of another type, each on a new communicator.
fn contradicts(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let mine = rank.comm.rank();
        let (count, dtype) = if mine == 1 { (99_000, DataType::F32) } else { (100_000, DataType::F32) };
        let memory = DeviceMemory::zeroed(&rank.context, 1 << 20)?;
        rank.together.wait();
        let (at, stream) = (memory.address(), rank.stream.raw().as_ptr());
        // SAFETY: the buffer has room, and lives to the end.
        unsafe {
            match mine {
                0 => rank.comm.send(at, count, dtype, 1, stream)?,
                1 => rank.comm.recv(at, count, dtype, 0, stream)?,
                _ => {}
            }
            rank.stream.raw().synchronize()?;
        }
        let error = told(&rank);
        ensure!(matches!(error, Error::Failed { class: mccs::ErrorClass::InvalidUsage, .. }), "{error:?}");
        println!("rank {mine} was told: {error}");
        // Behind the 99th there is nothing, and nothing can be enqueued any more.
        // SAFETY: as above.
        let after = unsafe { rank.comm.send(at, 1, DataType::U8, (mine + 1) % place.nranks, stream) };
        ensure!(after.is_err());
        if mine == 1 {
            let mut behind = [1; 4];
            // SAFETY: inside the buffer; nothing is in flight.
            unsafe { copy_to_host(&mut behind, at + 4 * 99_000)? };
            ensure!(behind == [0; 4], "written behind the buffer");
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn ends_that_do_not_fit_are_named() {
    let service = TestService::start(TENANTS);
    let place = everybody(&service, 0);
    let said = Player::start("contradicts", &place).ends_well();
    let expected = "rank 0 sends 100000 elements of float to rank 1, which receives 99000 elements of float";
    assert_eq!(said.matches(expected).count(), place.nranks as usize, "{said}");
}

/// Rank 0 receives from rank 1, which never sends.
fn receives_nothing(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let memory = DeviceMemory::zeroed(&rank.context, 4096)?;
        rank.together.wait();
        if rank.comm.rank() == 0 {
            // SAFETY: the buffer has room, and lives to the end.
            unsafe {
                rank.comm.recv(memory.address(), 1024, DataType::F32, 1, rank.stream.raw().as_ptr())?;
                rank.stream.raw().synchronize()?;
            }
        }
        println!("rank {} was told: {}", rank.comm.rank(), told(&rank));
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn a_sender_that_does_not_come_is_named() {
    let service = TestService::start(&format!("{TENANTS}[limits]\noperation_timeout = \"1s\"\n"));
    let player = Player::start("receives_nothing", &everybody(&service, 0));
    let [first, second] = player.processes();
    let said = player.ends_well();
    let wanted = format!("rank 0 {first} waits for message 1 from rank 1 {second}");
    assert!(said.contains(&wanted) && said.contains("), which has sent 0"), "{said}");
}

fn aborts_a_receive(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        // Long enough for all lanes.
        let memory = DeviceMemory::zeroed(&rank.context, 8 << 20)?;
        rank.together.wait();
        match rank.comm.rank() {
            // SAFETY: the buffer has room, and lives to the end.
            0 => unsafe {
                let group = Group::begin();
                for peer in 1..place.nranks {
                    rank.comm.recv(memory.address(), 1 << 20, DataType::U8, peer, rank.stream.raw().as_ptr())?;
                    rank.comm.send(
                        memory.address() + (4 << 20),
                        4 << 20,
                        DataType::U8,
                        peer,
                        rank.stream.raw().as_ptr(),
                    )?;
                }
                group.end()?;
                rank.stream.raw().synchronize()?;
            },
            1 => aborts_later(&rank)?,
            _ => {}
        }
        hears_of_the_abort(&rank)
    })
}

#[test]
#[ignore = "needs a GPU"]
fn an_abort_ends_sends_and_receives_that_wait() {
    everybody_plays("aborts_a_receive", &[TENANTS]);
}

/// Calls that are refused at once, and leave the communicator as it was.
fn errs(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (rank, memory, raw) = (comm.rank(), DeviceMemory::zeroed(&context, 8192)?, stream.raw().as_ptr());
        let at = memory.address();
        // SAFETY: the buffer has room, and lives to the end.
        let send = |at, count, peer| unsafe { comm.send(at, count, DataType::F32, peer, raw) };
        // SAFETY: as above.
        let recv = |at, count, peer| unsafe { comm.recv(at, count, DataType::F32, peer, raw) };
        let refused = |result: Result<(), Error>, why: &str| {
            let error = result.err().with_context(|| format!("not refused: {why}"))?;
            ensure!(matches!(&error, Error::InvalidArgument(text) if text.contains(why)), "{error}, not {why}");
            Ok(())
        };
        refused(send(at, 1, place.nranks), "of a communicator of")?;
        refused(send(at + 2, 1, 0), "is no place for")?;
        refused(recv(0, 1, 0), "is no place for")?;
        refused(recv(at, u64::MAX, 0), "larger than memory")?;
        refused(send(at, 1, rank), "sends to and receives from oneself")?;
        refused(mccs::bindings::group_end(), "group_end without group_start")?;
        let group = Group::begin();
        send(at, 1, rank)?;
        recv(at + 4096, 2, rank)?;
        refused(group.end(), "number 1 differs")?;
        let other = OwnedStream::new(&context)?;
        let captured = Graph::capture(&stream, |_| {
            let group = Group::begin();
            // SAFETY: the buffer has room, and lives to the end.
            unsafe { comm.send(at, 1, DataType::F32, rank, other.raw().as_ptr())? };
            recv(at + 4096, 1, rank)?;
            refused(group.end(), "are captured into one graph, or none of them is")
        });
        ensure!(captured.is_ok(), "{:?}", captured.err());
        together.wait();
        // Nothing of it was sent: this is the first message. More than a kernel is told at a time, and in no order of both ends.
        let (next, last) = ((rank + 1) % place.nranks, (rank + place.nranks - 1) % place.nranks);
        // SAFETY: nothing is in flight.
        unsafe { copy_from_host(at, &content(rank as usize, 1, 2000).collect::<Vec<_>>())? };
        let group = Group::begin();
        (0..500).try_for_each(|index| send(at + 4 * index, 1, next))?;
        for index in 0..500 {
            recv(at + 4096 + 4 * index, 1, last)?;
            send(at, 0, rank)?;
            recv(at, 0, rank)?;
        }
        group.end()?;
        let mut output = vec![0; 2000];
        // SAFETY: stream and buffer live.
        unsafe {
            stream.raw().synchronize()?;
            copy_to_host(&mut output, at + 4096)?;
        }
        ensure!(output.iter().copied().eq(content(last as usize, 1, 2000)));
        let group = Group::begin();
        send(at, 1, next)?;
        comm.destroy()?;
        refused(group.end(), "destroyed inside a group")
    })
}

#[test]
#[ignore = "needs a GPU"]
fn what_cannot_be_sent_is_refused() {
    everybody_plays("errs", &[TENANTS]);
}
