#!/usr/bin/env python3
"""PyTorch's process group "mccs" on GPUs: every collective, order of streams, messages, groups, faults, and steps of DDP and FSDP2
against the same training in one process. One process a rank; ranks take turns on GPUs where there are more of them. Every result is
compared with what it must be.

usage: python_torch.py NRANKS [SOCKET ...], with MCCS_SOCKET the service; or with the sockets of several services, which get as many
ranks each. The package mccs is installed, or in PYTHONPATH, with GPU kernels"""

import faulthandler
import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.fsdp import fully_shard

import mccs
import mccs.torch

# Processes that still run then say where they stand.
WATCHDOG_S = 280
SIZES = (0, 1, 1000, 262_147)
TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def check(what, actual, expected):
    actual, expected = actual.cpu(), expected.cpu()
    if actual.shape != expected.shape or not torch.equal(actual, expected):
        raise SystemExit(f"rank {dist.get_rank()}, {what}: {actual} is not {expected}")


class Ranks:
    """Data of every rank: each can make every other's."""

    def __init__(self, seed, device):
        self.rank, self.n, self.seed, self.device = dist.get_rank(), dist.get_world_size(), seed, device

    def of(self, rank, *shape, dtype=torch.float32, salt=0):
        generator = torch.Generator().manual_seed((self.seed + 7919 * rank + 104_729 * salt) % 2**63)
        return torch.randint(0, 4, shape, generator=generator).to(dtype)

    def on_gpu(self, tensor):
        return tensor.to(self.device)

    def empty(self, *shape, dtype=torch.float32):
        """Full of something else than any result."""
        return torch.full(shape, 77, dtype=dtype, device=self.device)


def reductions(ranks, every, dtype, what):
    first = torch.stack([other[0] for other in every])
    operators = [
        (dist.ReduceOp.SUM, first.sum(0)), (dist.ReduceOp.MAX, first.amax(0)), (dist.ReduceOp.MIN, first.amin(0)),
        (dist.ReduceOp.PRODUCT, first.prod(0)),
    ]
    if not dtype.is_floating_point:
        bitwise = first[0].clone()
        for other in first[1:]:
            bitwise |= other
        operators.append((dist.ReduceOp.BOR, bitwise))
    for op, wanted in operators:
        tensor = ranks.on_gpu(every[ranks.rank][0])
        dist.all_reduce(tensor, op)
        check(f"{what}, all_reduce {op}", tensor, wanted.to(dtype))


def collectives(ranks):
    for dtype in TYPES:
        for count in SIZES:
            what, n = f"{dtype} x {count}", ranks.n
            every = [ranks.of(peer, n, count, dtype=dtype) for peer in range(n)]
            own = ranks.on_gpu(every[ranks.rank])
            reductions(ranks, every, dtype, what)
            for is_async in (False, True):
                end = lambda work: work.wait() if is_async else None  # noqa: B023,E731
                new = lambda *shape: ranks.empty(*shape, dtype=dtype)  # noqa: B023,E731
                end(dist.all_gather_into_tensor(got := new(n * count), own[0], async_op=is_async))
                check(f"{what}, all_gather_into_tensor", got, torch.cat([other[0] for other in every]))
                parts = [new(count) for _ in range(n)]
                end(dist.all_gather(parts, own[0], async_op=is_async))
                check(f"{what}, all_gather", torch.stack(parts), torch.stack([other[0] for other in every]))
                total = sum(other[ranks.rank] for other in every).to(dtype)
                end(dist.reduce_scatter_tensor(got := new(count), own, async_op=is_async))
                check(f"{what}, reduce_scatter_tensor", got, total)
                end(dist.reduce_scatter(got := new(count), [row.clone() for row in own], async_op=is_async))
                check(f"{what}, reduce_scatter", got, total)
                exchanged = torch.stack([other[ranks.rank] for other in every])
                end(dist.all_to_all_single(got := new(n, count), own, async_op=is_async))
                check(f"{what}, all_to_all_single", got, exchanged)
                parts = [new(count) for _ in range(n)]
                end(dist.all_to_all(parts, [row.clone() for row in own], async_op=is_async))
                check(f"{what}, all_to_all", torch.stack(parts), exchanged)
            rooted(ranks, every, own, count % n, what)


def rooted(ranks, every, own, root, what):
    is_root, dtype, count = ranks.rank == root, own.dtype, own.shape[1]
    dist.broadcast(tensor := own[0].clone(), root)
    check(f"{what}, broadcast", tensor, every[root][0])
    dist.reduce(tensor := own[0].clone(), root)
    if is_root:
        check(f"{what}, reduce", tensor, sum(other[0] for other in every).to(dtype))
    parts = [ranks.empty(count, dtype=dtype) for _ in range(ranks.n)] if is_root else None
    dist.gather(own[0], parts, root)
    if is_root:
        check(f"{what}, gather", torch.stack(parts), torch.stack([other[0] for other in every]))
    dist.scatter(got := ranks.empty(count, dtype=dtype), [row.clone() for row in own] if is_root else None, root)
    check(f"{what}, scatter", got, every[root][ranks.rank])


def uneven(ranks):
    """Parts of different lengths, some of them empty."""
    length = lambda sender, receiver: (sender + 2 * receiver) % 3 * 5001  # noqa: E731
    piece = lambda sender, to: ranks.of(sender, length(sender, to), salt=1 + to)  # noqa: E731
    sizes = [length(peer, ranks.rank) for peer in range(ranks.n)], [length(ranks.rank, peer) for peer in range(ranks.n)]
    sent = ranks.on_gpu(torch.cat([piece(ranks.rank, to) for to in range(ranks.n)]))
    dist.all_to_all_single(got := ranks.empty(sum(sizes[0])), sent, *sizes)
    check("all_to_all_single, uneven", got, torch.cat([piece(peer, ranks.rank) for peer in range(ranks.n)]))


def many_at_once(ranks):
    tensors = [ranks.on_gpu(ranks.of(ranks.rank, count, salt=count)) for count in (1, 333, 70_001)]
    with dist.distributed_c10d._coalescing_manager(device=ranks.device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        count = len(tensor)
        check("all_reduce, coalesced", tensor, sum(ranks.of(peer, count, salt=count) for peer in range(ranks.n)))
    gathered = [ranks.empty(ranks.n * count) for count in (5, 4000)]
    with dist.distributed_c10d._coalescing_manager(device=ranks.device, async_ops=True) as manager:
        for into in gathered:
            count = len(into) // ranks.n
            dist.all_gather_into_tensor(into, ranks.on_gpu(ranks.of(ranks.rank, count, salt=count)))
    manager.wait()
    for into in gathered:
        count = len(into) // ranks.n
        check("all_gather, coalesced", into, torch.cat([ranks.of(peer, count, salt=count) for peer in range(ranks.n)]))


def messages(ranks):
    if ranks.n == 1:
        # PyTorch sends nothing to oneself.
        return
    after, before = (ranks.rank + 1) % ranks.n, (ranks.rank - 1) % ranks.n
    for count in (1, 4097, 300_001):
        got = ranks.empty(count)
        sent = ranks.on_gpu(ranks.of(ranks.rank, count, salt=2))
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, got, before)]):
            work.wait()
        check(f"batch_isend_irecv of {count}", got, ranks.of(before, count, salt=2))
        got.fill_(77)
        for work in (dist.isend(sent, after), dist.irecv(got, before)):
            work.wait()
        check(f"isend and irecv of {count}", got, ranks.of(before, count, salt=2))
        # From rank to rank.
        passed = ranks.on_gpu(ranks.of(0, count, salt=3)) if ranks.rank == 0 else ranks.empty(count)
        if ranks.rank > 0:
            dist.recv(passed, before)
        if ranks.rank + 1 < ranks.n:
            dist.send(passed, after)
        check(f"send and recv of {count}", passed, ranks.of(0, count, salt=3))


def busy(device):
    return torch.ones((4096, 4096), device=device) @ torch.ones((4096, 4096), device=device)


def order(ranks):
    """A call comes behind what makes its tensors, and before what comes behind its work's wait; the host does not wait."""
    for turn in range(6):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tensor = busy(ranks.device)[0] * (ranks.rank + turn)
            work = dist.all_reduce(tensor, async_op=turn % 2 == 0)
            if work is not None:
                other = busy(ranks.device)[0]
                work.wait()
            else:
                other = busy(ranks.device)[0]
            doubled = tensor * 2 + other - 4096
        stream.synchronize()
        total = sum(peer + turn for peer in range(ranks.n))
        check("order of streams", doubled, torch.full((4096,), 2 * 4096.0 * total))
    tensor = busy(ranks.device)[0]
    work = dist.all_reduce(tensor, async_op=True)
    [value] = work.get_future().wait()
    check("a future's value", value * 1, torch.full((4096,), 4096.0 * ranks.n))
    work.wait(timedelta(seconds=WATCHDOG_S))
    if not (work.is_completed() and work.is_success() and work.exception() is None):
        raise SystemExit("a call that has ended does not say so")


def dropped(ranks):
    """Tensors that the program forgets stay until the call has ended: their memory is given to nobody else."""
    for _ in range(20):
        sent = torch.ones(1 << 20, device=ranks.device) * busy(ranks.device)[0, 0]
        parts = [torch.empty_like(sent) for _ in range(ranks.n)]
        work = dist.all_gather(parts, sent, async_op=True)
        del sent
        torch.full((1 << 20,), 13.0, device=ranks.device)
        work.wait()
        check("tensors that are forgotten", torch.stack(parts), torch.full((ranks.n, 1 << 20), 4096.0))


def monitored_barrier():
    try:
        dist.monitored_barrier()
    except ValueError:
        # Older versions of PyTorch have it for Gloo alone; the group has it all the same.
        dist.distributed_c10d._get_default_group().monitored_barrier()


def mixed(ranks):
    """One group has both kinds of tensors; objects go by the host's."""
    on_host = ranks.of(ranks.rank, 999, salt=4)
    on_gpu = ranks.on_gpu(on_host)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (on_gpu, on_host)]
    for work in works:
        work.wait()
    wanted = sum(ranks.of(peer, 999, salt=4) for peer in range(ranks.n))
    check("all_reduce on the host", on_host, wanted)
    check("all_reduce on the GPU beside it", on_gpu, wanted)
    objects = [None] * ranks.n
    dist.all_gather_object(objects, {"rank": ranks.rank})
    if objects != [{"rank": peer} for peer in range(ranks.n)]:
        raise SystemExit(f"all_gather_object: {objects}")
    monitored_barrier()
    dist.barrier()
    dist.barrier(device_ids=[ranks.device.index])


def subgroups(ranks):
    groups = [dist.new_group(members) for members in ([0], list(range(ranks.n)))]
    for group, members in zip(groups, ([0], list(range(ranks.n)))):
        if ranks.rank in members:
            tensor = ranks.on_gpu(ranks.of(ranks.rank, 500, salt=5))
            dist.all_reduce(tensor, group=group)
            check("all_reduce of a sub-group", tensor, sum(ranks.of(peer, 500, salt=5) for peer in members))


def refused(ranks):
    good = ranks.on_gpu(torch.ones(4, 4))
    cases = [lambda: dist.all_reduce(good.t()[:3]), lambda: dist.all_gather([torch.ones(4, 4)] * ranks.n, good)]
    if torch.cuda.device_count() > 1:
        other = good.to(f"cuda:{(ranks.device.index + 1) % torch.cuda.device_count()}")
        cases.append(lambda: dist.all_reduce(other))
    for case in cases:
        try:
            case()
        except mccs.InvalidArgument as error:
            if error.rank != ranks.rank or error.call not in ("all_reduce", "all_gather"):
                raise SystemExit(f"of whom is this? {error}") from error
        else:
            raise SystemExit("a tensor that is wrong was not refused")


def model(seed, device):
    torch.manual_seed(seed % 2**31)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
    return torch.nn.Sequential(*layers).to(device)


def sharded(seed, device):
    network = model(seed, device)
    for layer in network:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    return fully_shard(network)


def training(ranks):
    """Steps of training in parallel, against the same on all of the data."""
    generator = torch.Generator().manual_seed(ranks.seed % 2**63)
    data = torch.randn(8, ranks.n, 32, 64, generator=generator), torch.randn(8, ranks.n, 32, 8, generator=generator)
    alone = model(ranks.seed, ranks.device)
    parallel = torch.nn.parallel.DistributedDataParallel(model(ranks.seed, ranks.device), device_ids=[ranks.device.index])
    split = sharded(ranks.seed, ranks.device)
    for network, part in ((alone, slice(None)), (parallel, slice(ranks.rank, ranks.rank + 1)), (split, slice(ranks.rank, ranks.rank + 1))):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        for x, y in zip(*data):
            optimizer.zero_grad()
            error = network(x[part].flatten(0, 1).to(ranks.device)) - y[part].flatten(0, 1).to(ranks.device)
            error.square().mean().backward()
            optimizer.step()
    for name, network in (("DDP", parallel), ("FSDP2", split)):
        for one, other in zip(alone.parameters(), network.parameters()):
            whole = other.full_tensor() if hasattr(other, "full_tensor") else other
            torch.testing.assert_close(whole, one, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023


PARTS = (collectives, uneven, many_at_once, messages, order, dropped, mixed, subgroups, refused, training)


def of_rank(rank, nranks, sockets, folder, seed):
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    os.environ["MCCS_SOCKET"] = sockets[rank * len(sockets) // nranks]
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    # A group that is told its GPU, and one whose first call tells it.
    for number, named in enumerate(({"device_id": device}, {})):
        store = dist.FileStore(f"{folder}/{number}", nranks)
        dist.init_process_group("mccs", store=store, rank=rank, world_size=nranks, timeout=timedelta(seconds=120), **named)
        ranks = Ranks(seed + number, device)
        for part in PARTS if number == 0 else (mixed, messages, training):
            part(ranks)
            if rank == 0:
                print(f"{part.__name__}: right", flush=True)
        copied = dist.group.WORLD.counters()
        if not copied["in_place"]:
            raise SystemExit(f"nothing went in place: {copied}")
        dist.destroy_process_group()


def main():
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    faulthandler.dump_traceback_later(2 * WATCHDOG_S, exit=True)
    nranks = int(sys.argv[1])
    sockets = sys.argv[2:] or [os.environ["MCCS_SOCKET"]]
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}, PyTorch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(of_rank, args=(nranks, sockets, folder, seed), nprocs=nranks)
    gpus = torch.cuda.device_count()
    print(f'PyTorch {torch.__version__}, "mccs", {nranks} ranks on {gpus} GPUs, {len(sockets)} services: every result is right')


if __name__ == "__main__":
    main()
