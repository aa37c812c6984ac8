"""PyTorch's distributed package over mccs: results, objects, groups, training, bad input."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest

if not os.environ.get("MCCS_TESTS_NEED_ALL"):
    pytest.importorskip("torch")

import torch  # noqa: E402

# Modules that ranks would import one by one: they are forked.
import torch._dynamo  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as checkpoint  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import mccs  # noqa: E402
import mccs.torch  # noqa: E402
from conftest import run  # noqa: E402


@pytest.fixture
def group(socket, monkeypatch, tmp_path):
    """Runs ranks in a default process group of their own."""
    monkeypatch.setenv("MCCS_SOCKET", str(socket))

    def start(function: Any, nranks: int, *arguments: Any, backend: str = "mccs") -> list[Any]:
        store = tmp_path / f"store-{os.urandom(4).hex()}"

        def member(rank: int, nranks: int) -> Any:
            torch.set_num_threads(1)
            dist.init_process_group(
                backend, store=dist.FileStore(str(store), nranks), rank=rank, world_size=nranks,
                timeout=timedelta(seconds=60),
            )
            outcome = function(*arguments)
            dist.destroy_process_group()
            return outcome

        return run(member, nranks)

    return start


def mine(seed: int, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(got, wanted), f"{got} is not {wanted}"


def collectives(seed: int, count: int, dtype: torch.dtype) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    every = [mine(seed, peer, n, count, dtype=dtype) for peer in range(n)]
    own = every[rank]
    for op, combine in [
        (dist.ReduceOp.SUM, lambda all: all.sum(0)),
        (dist.ReduceOp.MAX, lambda all: all.amax(0)),
        (dist.ReduceOp.MIN, lambda all: all.amin(0)),
        (dist.ReduceOp.PRODUCT, lambda all: all.prod(0)),
    ]:
        tensor = own[0].clone()
        dist.all_reduce(tensor, op)
        same(tensor, combine(torch.stack([other[0] for other in every])).to(dtype))
    whole = torch.empty(n * count, dtype=dtype)
    dist.all_gather_into_tensor(whole, own[0])
    same(whole, torch.cat([other[0] for other in every]))
    parts = [torch.empty(count, dtype=dtype) for _ in range(n)]
    dist.all_gather(parts, own[0])
    for part, other in zip(parts, every):
        same(part, other[0])
    part = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(part, own)
    same(part, sum(other[rank] for other in every))
    part = torch.empty(count, dtype=dtype)
    dist.reduce_scatter(part, [row.clone() for row in own])
    same(part, sum(other[rank] for other in every))
    got = torch.empty(n, count, dtype=dtype)
    dist.all_to_all_single(got, own)
    same(got, torch.stack([other[rank] for other in every]))
    got = [torch.empty(count, dtype=dtype) for _ in range(n)]
    dist.all_to_all(got, [row.clone() for row in own])
    same(torch.stack(got), torch.stack([other[rank] for other in every]))
    sizes = [[(a + 2 * b) % 3 * (count // 4) for b in range(n)] for a in range(n)]
    # Tensors of each rank for each peer, cut off the same tensor.
    pieces = [list(other.view(-1)[: sum(sizes[peer])].split(sizes[peer])) for peer, other in enumerate(every)]
    output_sizes = [sizes[peer][rank] for peer in range(n)]
    got = torch.empty(sum(output_sizes), dtype=dtype)
    dist.all_to_all_single(got, torch.cat(pieces[rank]), output_sizes, sizes[rank])
    same(got, torch.cat([pieces[peer][rank] for peer in range(n)]))
    for root in range(n):
        tensor = own[0].clone()
        dist.broadcast(tensor, root)
        same(tensor, every[root][0])
        tensor = own[0].clone()
        dist.reduce(tensor, root)
        if rank == root:
            same(tensor, sum(other[0] for other in every))
        parts = [torch.empty(count, dtype=dtype) for _ in range(n)] if rank == root else None
        dist.gather(own[0], parts, root)
        if rank == root:
            same(torch.stack(parts), torch.stack([other[0] for other in every]))
        part = torch.empty(count, dtype=dtype)
        dist.scatter(part, [row.clone() for row in own] if rank == root else None, root)
        same(part, every[root][rank])
    dist.barrier()
    dist.monitored_barrier()


@pytest.mark.parametrize("count", [0, 1, 300, 400_001])
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_every_collective(group, nranks: int, count: int) -> None:
    group(collectives, nranks, int.from_bytes(os.urandom(3), "little"), count, torch.float32)


@pytest.mark.parametrize("nranks", [2, 4])
def test_every_collective_across_hosts(two_hosts, nranks: int, tmp_path) -> None:
    """Half of the ranks on each of two hosts; rank 0's address goes through PyTorch's store."""

    def member(rank: int, nranks: int) -> None:
        torch.set_num_threads(1)
        os.environ["MCCS_SOCKET"] = str(two_hosts[rank * 2 // nranks])
        store = dist.FileStore(str(tmp_path / "store"), nranks)
        dist.init_process_group("mccs", store=store, rank=rank, world_size=nranks)
        for count in (1, 5000, 400_001):
            collectives(17, count, torch.float32)
        check_training(DistributedDataParallel)
        dist.destroy_process_group()

    run(member, nranks)


def test_types(group) -> None:
    def other_types() -> None:
        for dtype in [torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8]:
            collectives(5, 40, dtype)
        rank = dist.get_rank()
        flags = torch.tensor([True, rank == 0, False])
        dist.all_reduce(flags)
        same(flags, torch.tensor([True, True, False]))
        number = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
        dist.all_reduce(number)
        same(number, torch.tensor([1 + 2j, 3 - 1j]) * 3)
        short = torch.tensor([rank, 7], dtype=torch.int16)
        dist.broadcast(short, 1)
        same(short, torch.tensor([1, 7], dtype=torch.int16))
        bits = torch.tensor([0b0011, 0b0101][rank])
        for op, wanted in [(dist.ReduceOp.BAND, 0b0001), (dist.ReduceOp.BOR, 0b0111), (dist.ReduceOp.BXOR, 0b0110)]:
            tensor = bits.clone()
            dist.all_reduce(tensor, op)
            assert tensor.item() == wanted

    group(other_types, 2)


def test_objects_and_sub_groups(group) -> None:
    def talk() -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        got: list[Any] = [None] * n
        dist.all_gather_object(got, {"rank": rank, "text": "x" * rank * 1000})
        assert [each["rank"] for each in got] == list(range(n))
        objects = [rank, "of rank 1"] if rank == 1 else [None, None]
        dist.broadcast_object_list(objects, 1)
        assert objects == [1, "of rank 1"]
        odd = dist.new_group([1, 2])
        if rank in (1, 2):
            tensor = torch.tensor([rank])
            dist.all_reduce(tensor, group=odd)
            assert tensor.item() == 3
            assert dist.get_group_rank(odd, 2) == 1
        mesh = dist.init_device_mesh("cpu", (n,))
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=mesh.get_group())
        assert tensor.item() == sum(range(n))

    group(talk, 3)


def test_messages(group) -> None:
    def talk() -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        others = [peer for peer in range(n) if peer != rank]
        # More than there are slots, and all sends before any receive.
        sent = [[torch.full((size,), float(rank)) for size in (1, 1000, 500_000)] for _ in others]
        received = [[torch.empty(size) for size in (1, 1000, 500_000)] for _ in others]
        works = [dist.isend(tensor, peer) for peer, tensors in zip(others, sent) for tensor in tensors]
        works += [dist.irecv(tensor, peer) for peer, tensors in zip(others, received) for tensor in tensors]
        for work in works:
            work.wait()
        for peer, tensors in zip(others, received):
            assert all((tensor == peer).all() for tensor in tensors)
        incoming = torch.empty(5)
        operations = [
            dist.P2POp(dist.isend, torch.full((5,), float(rank)), (rank + 1) % n),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert (incoming == (rank - 1) % n).all()

    group(talk, 3)


def test_works_and_futures(group) -> None:
    def overlap() -> None:
        rank = dist.get_rank()
        tensors = [torch.full((size,), rank + 1.0) for size in (1, 700_000, 20, 5)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        futures = [work.get_future() for work in works]
        for future, tensor in zip(futures, tensors):
            assert future.wait()[0] is tensor
            assert (tensor == 3).all()
        assert all(work.is_completed() for work in works)
        chained = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda done: done.value()[0] * 2)
        same(chained.wait(), torch.full((3,), 4.0))
        with dist._coalescing_manager(async_ops=True) as together:
            for tensor in tensors:
                dist.all_reduce(tensor)
        together.wait()
        assert all((tensor == 6).all() for tensor in tensors)

    group(overlap, 2)


def test_tensors_in_the_services_memory_are_not_copied(group) -> None:
    def reduce() -> None:
        tensor = mccs.torch.empty(1_000_000)
        tensor.fill_(dist.get_rank())
        dist.all_reduce(tensor)
        assert (tensor == 1).all()
        counters = dist.group.WORLD.counters()
        before = {"in_place": 1, "in_place_bytes": 8_000_000}
        assert counters == before | {"copied": 0, "copied_bytes": 0}
        dist.all_reduce(torch.ones(1_000_000))
        counters = dist.group.WORLD.counters()
        assert counters == before | {"copied": 1, "copied_bytes": 8_000_000}

    group(reduce, 2)


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(40, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))


def train(wrap: Any, steps: int = 4) -> list[torch.Tensor]:
    """Parameters after a few steps, each rank on its part of the same batches."""
    rank, n = dist.get_rank(), dist.get_world_size()
    wrapped = wrap(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch, labels = torch.randn(8 * n, 40, generator=generator), torch.randint(10, (8 * n,), generator=generator)
        part = slice(8 * rank, 8 * rank + 8)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(wrapped(batch[part]), labels[part]).backward()
        optimizer.step()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in wrapped.parameters()]


def check_training(wrap: Any) -> None:
    trained = train(wrap)
    n = dist.get_world_size()
    alone, generator = model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(4):
        batch, labels = torch.randn(8 * n, 40, generator=generator), torch.randint(10, (8 * n,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(alone(batch), labels).backward()
        optimizer.step()
    for got, wanted in zip(trained, alone.parameters(), strict=True):
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("nranks", [2, 3])
def test_data_parallel_training_is_that_of_one_process(group, nranks: int) -> None:
    group(check_training, nranks, DistributedDataParallel)


def test_fully_sharded_training_is_that_of_one_process(group) -> None:
    def sharded() -> None:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))

        def wrap(module: torch.nn.Module) -> torch.nn.Module:
            for layer in module:
                if list(layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            return fully_shard(module, mesh=mesh)

        check_training(wrap)

    group(sharded, 2)


def test_distributed_tensors(group) -> None:
    def redistribute() -> None:
        n = dist.get_world_size()
        mesh = dist.init_device_mesh("cpu", (n,))
        whole = torch.arange(48.0).view(6, 8)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        same(sharded.full_tensor(), whole)
        same(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
        product = sharded.redistribute(mesh, [Shard(1)]) @ distribute_tensor(whole.T.contiguous(), mesh, [Shard(0)])
        assert product.placements == (Partial(),)
        same(product.redistribute(mesh, [Replicate()]).to_local(), whole @ whole.T)
        same(product.redistribute(mesh, [Shard(0)]).full_tensor(), whole @ whole.T)

    group(redistribute, 2)


def test_bad_input_is_an_exception(group) -> None:
    def wrong() -> None:
        rank, n = dist.get_rank(), dist.get_world_size()
        good = torch.ones(4)
        cases = [
            ("all_reduce", lambda: dist.all_reduce(torch.ones(4, 4).t()[:, :2])),
            ("all_reduce", lambda: dist.all_reduce(torch.ones(4, device="meta"))),
            ("broadcast", lambda: dist.broadcast(torch.ones(4).to_sparse(), 0)),
            ("all_reduce", lambda: dist.all_reduce(torch.ones(4).to_sparse(), dist.ReduceOp.MAX)),
            ("all_reduce", lambda: dist.all_reduce(torch.ones(4, dtype=torch.int16))),
            ("all_gather", lambda: dist.all_gather_into_tensor(torch.ones(5), good)),
            ("all_gather", lambda: dist.all_gather([torch.ones(3)] * n, good)),
            ("reduce_scatter", lambda: dist.reduce_scatter_tensor(good, torch.ones(9))),
            ("scatter", lambda: dist.scatter(good, [good], 0)),
            ("recv", lambda: dist.recv(good)),
        ]
        for call, function in cases:
            if call == "scatter" and rank != 0:
                continue
            with pytest.raises(mccs.InvalidArgument, match=f"^rank {rank} of {n}, {call}: "):
                function()
        dist.all_reduce(good)
        same(good, torch.full((4,), float(n)))

    group(wrong, 2)


def test_sparse_tensors_are_summed(group) -> None:
    def sparse() -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        # As many elements as the rank's number, one of which all others have.
        rows = [torch.tensor([[0, other] for other in range(count)]).reshape(-1, 2).t() for count in range(ranks)]
        torch.manual_seed(ranks)
        values = [torch.randint(-9, 9, (at.shape[1], 3)).double() for at in rows]
        every = [torch.sparse_coo_tensor(at, value, (2, 4, 3)) for at, value in zip(rows, values)]
        mine = every[rank].clone()
        dist.all_reduce(mine)
        assert torch.equal(mine.to_dense(), sum(one.to_dense() for one in every))
        with pytest.raises(mccs.InvalidArgument, match="sparse"):
            dist.all_reduce(every[rank].clone(), dist.ReduceOp.MAX)

    group(sparse, 3)


def test_ranks_with_different_shapes_are_told(group) -> None:
    def contradict() -> None:
        with pytest.raises(mccs.Error, match=f"^rank {dist.get_rank()} of 2, all_reduce: "):
            dist.all_reduce(torch.ones(10 + dist.get_rank()))

    group(contradict, 2)


def test_a_late_rank_is_named(group) -> None:
    def late() -> None:
        store = dist.group.WORLD.get_group_store()
        if dist.get_rank() == 0:
            with pytest.raises(mccs.Timeout, match="Ranks 1, 2 failed to pass monitoredBarrier"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=True)
            store.set("too late", "")
        elif dist.get_rank() == 1:
            store.wait(["too late"])
            with pytest.raises(mccs.Error, match="failed to pass monitoredBarrier"):
                dist.monitored_barrier()

    group(late, 3)


def test_tags_that_differ_are_told(group) -> None:
    def talk() -> None:
        rank, other = dist.get_rank(), 1 - dist.get_rank()
        sizes = (1, 500_000)
        for size in sizes:
            for dtype in (torch.float32, torch.complex64, torch.bool):
                sent, received = torch.full((size,), rank + 1).to(dtype), torch.zeros(size, dtype=dtype)
                works = [dist.isend(sent, other, tag=5 + rank), dist.irecv(received, other, tag=5 + other)]
                for work in works:
                    work.wait()
                same(received, torch.full((size,), other + 1).to(dtype))
        for size in sizes:
            if rank == 0:
                first, second = torch.full((size,), 1.0), torch.full((size,), 2.0)
                works = [dist.isend(first, 1, tag=1), dist.isend(second, 1, tag=2)]
                for work in works:
                    work.wait()
            else:
                first, second = torch.zeros(size), torch.zeros(size)
                works = [dist.irecv(second, 0, tag=2), dist.irecv(first, 0, tag=1)]
                for work, sent, wanted in zip(works, (1, 2), (2, 1)):
                    # Once told, and whenever it is asked.
                    for _ in range(2):
                        with pytest.raises(mccs.InvalidUsage, match=f"^rank 1 of 2, recv: .*tag {sent} .*tag {wanted}"):
                            work.wait()
                    assert work.is_completed() and isinstance(work.exception(), mccs.InvalidUsage)
                assert not first.any() and not second.any(), "what came for others is not handed out"
        dist.barrier()

    group(talk, 2)


@pytest.mark.parametrize("size", [12, 500_000])
def test_a_tag_on_one_side_is_told(group, size: int) -> None:
    def talk() -> None:
        # As long as the other with its tag.
        with pytest.raises(mccs.InvalidUsage):
            if dist.get_rank() == 0:
                dist.send(torch.zeros(size, dtype=torch.uint8), 1, tag=3)
            else:
                dist.recv(torch.zeros(size + 8, dtype=torch.uint8), 0)

    group(talk, 2)


def test_long_calls_that_differ_by_whole_slots_are_told(group) -> None:
    def contradict() -> None:
        rank = dist.get_rank()
        said = "rank 0 called all_reduce.524288 x float, sum., rank 1 called all_reduce.786432 x float, sum."
        with pytest.raises(mccs.InvalidUsage, match=f"^rank {rank} of 2, all_reduce: .*{said}"):
            dist.all_reduce(torch.ones((2 + rank) * 262_144))
        after = torch.ones(262_144)
        dist.all_reduce(after)
        same(after, torch.full((262_144,), 2.0))

    group(contradict, 2)


class Late:
    """An operation that takes that much of its time-out."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def wait(self, timeout: float | None = None) -> None:
        assert timeout is not None
        self.clock[0] += min(self.seconds, timeout)
        if timeout < self.seconds:
            raise mccs.Timeout("too late")


def test_a_work_of_several_operations_has_one_time_out(monkeypatch) -> None:
    clock, aborted = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    work = mccs.torch.Work([Late(clock, 3.0) for _ in range(5)], None, timedelta(seconds=10), lambda: aborted.append(1))
    with pytest.raises(mccs.Timeout):
        work.wait()
    assert clock[0] == 10.0 and aborted == [1]


def test_a_time_out_ends_the_group(group) -> None:
    def wait() -> None:
        if dist.get_rank() == 0:
            with pytest.raises(mccs.Timeout, match="^rank 0 of 2, all_reduce: "):
                dist.all_reduce(torch.ones(3), async_op=True).wait(timedelta(seconds=0.2))
        else:
            with pytest.raises(mccs.Error):
                dist.recv(torch.ones(3), 0)

    group(wait, 2)


def test_checkpoints(group, tmp_path) -> None:
    def save() -> None:
        state = {"model": model().state_dict(), "rank": dist.get_rank()}
        checkpoint.save({"model": state["model"]}, checkpoint_id=str(tmp_path / "saved"))
        loaded = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
        checkpoint.load(loaded, checkpoint_id=str(tmp_path / "saved"))
        for name, value in state["model"].items():
            same(loaded["model"][name], value)

    group(save, 2)
