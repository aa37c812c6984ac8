//! Many communicators of the same ranks, as frameworks make them: within the default quotas, with little memory each, and with right data when memory is made at
//! first use. Needs two GPUs.

use anyhow::{Context as _, bail, ensure};
use mccs::cuda::CudaCommunicator;
use mccs::{Client, CollectiveKind};
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_cuda::{Context, OwnedStream, gpus};
use mccs_eval::workload::Call;
use mccs_tests::TestService;

use super::ranks::{Buffers, Place, Player, Role, TOGETHER, call, enqueue, everybody, everybody_plays};
use super::{LARGE, wait_until};

pub const ROLES: &[(&str, Role)] = &[
    ("makes_many_groups", makes_many_groups),
    ("tells_what_groups_take", tells_what_groups_take),
    ("uses_all_at_once", uses_all_at_once),
];

/// 32 process groups and 64 split communicators beside the first.
const GROUPS: u8 = 97;

/// A service as it is without a configuration, but that it must have GPUs.
const DEFAULT: &str = "[cuda]\nuse = \"required\"\n";

/// Runs `body` on a thread for each rank of this process, which has one client, as a program has.
fn each_rank(place: &Place, body: impl Fn(u32, &Context, &Client) -> anyhow::Result<()> + Sync) -> anyhow::Result<()> {
    mccs_cuda::driver()?;
    let client = Client::connect(&place.socket)?;
    let all = gpus()?;
    std::thread::scope(|scope| {
        for rank in place.ranks.clone() {
            let (client, all, body) = (&client, &all, &body);
            scope.spawn(move || {
                let done = Context::primary(&all[rank as usize % place.gpus]).map_err(anyhow::Error::from);
                let done = done.and_then(|context| {
                    // Current until the thread ends.
                    std::mem::forget(context.enter()?);
                    body(rank, &context, client)
                });
                if let Err(error) = done {
                    // Others wait for it.
                    eprintln!("rank {rank}: {error:#}");
                    std::process::exit(1);
                }
            });
        }
    });
    Ok(())
}

fn join(place: &Place, group: u8, rank: u32, client: &Client) -> anyhow::Result<CudaCommunicator> {
    Ok(client
        .communicator(place.another_id(group), rank, place.nranks)
        .root_address_or_empty(&place.root)
        .join_cuda()?)
}

fn all_reduce(number: u64, nranks: u32, count: u64) -> Call {
    Call { kind: CollectiveKind::AllReduce, ..call(number, nranks, count) }
}

/// Makes a call and checks it.
fn run(comm: &CudaCommunicator, call: &Call, at: &Buffers, stream: &OwnedStream) -> anyhow::Result<()> {
    at.fill(call, comm.rank())?;
    enqueue(comm, call, at, stream.raw())?;
    // SAFETY: the stream lives.
    unsafe { stream.raw().synchronize()? };
    at.check(call, comm.rank())
}

fn makes_many_groups(place: &Place) -> anyhow::Result<()> {
    each_rank(place, |rank, context, client| {
        let stream = OwnedStream::new(context)?;
        let calls = [2, 70_000].map(|count| all_reduce(count, place.nranks, count));
        let at = [Buffers::of(context, &calls[0])?, Buffers::of(context, &calls[1])?];
        let comms = (0..GROUPS).map(|group| join(place, group, rank, client)).collect::<Result<Vec<_>, _>>()?;
        for (comm, group) in comms.iter().zip(0..) {
            let call = Call { seed: group, ..calls[0] };
            run(comm, &call, &at[0], &stream)?;
        }
        // Calls that take more memory take some.
        comms.iter().take(8).try_for_each(|comm| run(comm, &calls[1], &at[1], &stream))
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn many_process_groups_work_under_a_default_service() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    let service = TestService::start(DEFAULT);
    let all = everybody(&service, 0);
    Player::start("makes_many_groups", &all).ends_well();
    wait_until(|| service.service().registry.comms().is_empty());
    a_process_a_rank_plays("makes_many_groups", &service);
}

/// Has each rank of the first tenant play a role in a process of its own.
fn a_process_a_rank_plays(role: &str, service: &TestService) {
    let folder = tempfile::tempdir().expect("a folder");
    let all = everybody(service, 0);
    let one = |rank| Place { ranks: rank..rank + 1, ..all.clone() };
    let together = (TOGETHER, folder.path().to_owned());
    let start = |rank| Player::start_with(role, &one(rank), std::slice::from_ref(&together));
    let players: Vec<_> = (0..all.nranks).map(start).collect();
    players.into_iter().for_each(|player| drop(player.ends_well()));
}

/// GPU memory that the service gives to the tenant's communicators, on all GPUs.
fn gpu_memory_bytes(place: &Place) -> anyhow::Result<u64> {
    let control = place.socket.with_file_name("mccs-control.sock");
    let ControlAnswer::Overview(overview) = ask(&control, &ControlRequest::Overview)? else { bail!("another answer") };
    let quotas = overview.tenants.iter().flat_map(|tenant| &tenant.quotas);
    Ok(quotas.filter(|quota| quota.resource == "gpu_memory_bytes").map(|quota| quota.used).sum())
}

const MIB: u64 = 1 << 20;

fn tells_what_groups_take(place: &Place) -> anyhow::Result<()> {
    let (together, ranks) = (place.together(), u64::from(place.nranks));
    each_rank(place, |rank, context, client| {
        let stream = OwnedStream::new(context)?;
        // Ll, lines, and copy engines with shared slots.
        let calls = [2, MIB / 4, 4 * MIB].map(|count| all_reduce(count, place.nranks, count));
        let at = calls.iter().map(|call| Buffers::of(context, call)).collect::<Result<Vec<_>, _>>()?;
        let (mut comms, mut before) = (Vec::new(), gpu_memory_bytes(place)?);
        for group in 0..4 {
            comms.push(join(place, group, rank, client)?);
            let comm = comms.last().context("a communicator")?;
            for (call, at) in calls.iter().zip(&at) {
                run(comm, call, at, &stream)?;
                together.wait();
                let now = gpu_memory_bytes(place)?;
                together.wait();
                let took = (now - before) / ranks / MIB;
                before = now;
                let most = match (group, call.count) {
                    (_, 2) => 2,
                    (_, count) if count < MIB => 30,
                    // Two slots of 8 MiB and a header.
                    (0, _) => 18,
                    _ => 0,
                };
                ensure!(took <= most, "group {group}, {} elements: {took} MiB of each GPU", call.count);
            }
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn further_communicators_of_the_same_ranks_take_little() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    let config = LARGE.replace("large_from = \"1KiB\"\nslot = \"256KiB\"", "large_from = \"8MiB\"\nslot = \"8MiB\"");
    let service = TestService::start(&config);
    a_process_a_rank_plays("tells_what_groups_take", &service);
    // All of it is given back, shared slots too.
    let tenants = service.service().registry.tenants();
    wait_until(|| tenants.iter().all(|tenant| tenant.used(mccs_tenants::Resource::GpuMemoryBytes) == 0));
}

/// Calls of every length, each on another stream than the one before, on communicators whose order differs between ranks: what each needs first is made while
/// others run.
fn uses_all_at_once(place: &Place) -> anyhow::Result<()> {
    const COMMS: u8 = 3;
    let together = place.together();
    each_rank(place, |rank, context, client| {
        let comms = (0..COMMS).map(|group| join(place, group, rank, client)).collect::<Result<Vec<_>, _>>()?;
        let streams = (0..2 * COMMS).map(|_| OwnedStream::new(context)).collect::<Result<Vec<_>, _>>()?;
        let counts = [3, 9_000, 120_000, 800_000, 5];
        let mut at = Vec::new();
        for (number, group) in
            (0..2 * counts.len()).flat_map(|number| (0..comms.len()).map(move |group| (number, group)))
        {
            let seed = (number * comms.len() + group) as u64;
            let call = Call { seed, ..all_reduce(0, place.nranks, counts[number % counts.len()]) };
            let buffers = Buffers::of(context, &call)?;
            buffers.fill(&call, rank)?;
            at.push((call, buffers));
        }
        // Allocations may wait for kernels: all are made before any is called.
        together.wait();
        for number in 0..2 * counts.len() {
            for turn in 0..comms.len() {
                let group = (turn + rank as usize) % comms.len();
                let (call, buffers) = &at[number * comms.len() + group];
                enqueue(&comms[group], call, buffers, streams[2 * group + number % 2].raw())?;
            }
        }
        for stream in &streams {
            // SAFETY: the stream lives.
            unsafe { stream.raw().synchronize()? };
        }
        at.iter().try_for_each(|(call, buffers)| buffers.check(call, rank))
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn memory_that_is_made_at_first_use_has_right_data() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    let in_chunks = DEFAULT.replace("[cuda]\n", "[cuda]\nll128 = false\nlarge_from = \"0\"\n");
    let by_engines = DEFAULT.replace("[cuda]\n", "[cuda]\nlarge_from = \"64KiB\"\nslot = \"512KiB\"\n");
    let by_descriptors = super::without_handles(&by_engines);
    everybody_plays("uses_all_at_once", &[DEFAULT, &in_chunks, &by_engines, &by_descriptors]);
    for config in [DEFAULT, &in_chunks, &by_engines, &by_descriptors] {
        a_process_a_rank_plays("uses_all_at_once", &TestService::start(config));
    }
}
