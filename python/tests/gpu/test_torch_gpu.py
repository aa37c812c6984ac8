"""PyTorch's process group on the emulated driver: tensors over a GPU's memory, the driver's streams instead of PyTorch's."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if not os.environ.get("MCCS_TESTS_NEED_ALL"):
    pytest.importorskip("torch")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import mccs  # noqa: E402
from conftest import WATCHDOG_S, run  # noqa: E402
from driver import Driver, Held, Memory  # noqa: E402
from mccs.torch import ProcessGroup  # noqa: E402
from mccs.torch.gpu import Gpu, GpuWork, Streams  # noqa: E402
from mccs.torch.placed import _OnGpus  # noqa: E402

NOT_READY = 600


class Event:
    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver, self._event = driver, ctypes.c_void_p()
        driver.call("cuEventCreate", ctypes.byref(self._event), 2)
        driver.call("cuEventRecord", self._event, ctypes.c_void_p(stream))

    def query(self) -> bool:
        code = self._driver._library.cuEventQuery(self._event)
        assert code in (0, NOT_READY)
        return code == 0

    def synchronize(self) -> None:
        # The emulated driver has no wait for events.
        self.behind(stream := self._driver.stream())
        self._driver.synchronize(stream)

    def behind(self, stream: int) -> None:
        self._driver.call("cuStreamWaitEvent", ctypes.c_void_p(stream), self._event, 0)


class DriversStreams(Streams):
    """The driver's. Its memory lies in the process, too, so that tensors of the host's kind can be over it."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(torch.device("cpu"))
        self.driver = driver
        self._current = [driver.stream()]

    def new(self) -> int:
        return self.driver.stream()

    def current(self) -> int:
        return self._current[-1]

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def order(self, stream: int, behind: int) -> None:
        self.driver.wait(stream, behind)

    def mark(self, stream: int) -> Event:
        return Event(self.driver, stream)

    def have_current_wait(self, event: Event) -> None:
        event.behind(self.current())

    def tensor(self, content: torch.Tensor) -> torch.Tensor:
        """On the GPU, as long as the tensor lives."""
        memory = Memory(self.driver, content.contiguous().view(torch.uint8).numpy() if content.numel() else np.empty(0, np.uint8))
        if not content.numel():
            return content.clone()
        held = (ctypes.c_ubyte * memory.bytes).from_address(memory.address)
        held.memory = memory
        return torch.from_numpy(np.ctypeslib.as_array(held)).view(content.dtype).view(content.shape)

    def room(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.tensor(torch.zeros(sum(part.numel() for part in parts), dtype=parts[0].dtype)).chunk(len(parts))

    def joined(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        joined = self.room(parts)
        for into, part in zip(joined, parts):
            self.copy(into, part)
        return joined

    def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        addresses = ctypes.c_uint64(into.data_ptr()), ctypes.c_uint64(tensor.data_ptr())
        if into.nbytes:
            self.driver.call("cuMemcpyAsync", *addresses, ctypes.c_size_t(into.nbytes), ctypes.c_void_p(self.current()))

    def future(self) -> torch.futures.Future:
        return torch.futures.Future()

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        self.driver.synchronize(self.current())
        return tensor.clone()


class OnEmulated(ProcessGroup):
    """All its tensors are the emulated GPU's."""

    def enter(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.streams = DriversStreams(Driver(self._rank))
        self._gpu = Gpu(self._join("mccs-cuda", self._rank), self.streams, f"rank {self._rank} of {self._size}")

    def _is_gpu(self, device: torch.device) -> bool:
        return True

    def _gpu_of(self, call: str, device: torch.device) -> Gpu:
        assert self._gpu is not None
        return self._gpu

    def _get_backend(self, device: torch.device) -> Any:
        return _OnGpus(self)


def created(options: Any, _: object) -> OnEmulated:
    return OnEmulated(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)


dist.Backend.register_backend("emulated", created, extended_api=True, devices=["cpu"])


Group = Callable[..., list[Any]]


@pytest.fixture
def group(gpu_service: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Group:
    """Runs ranks, a GPU each, in a default process group."""
    monkeypatch.setenv("MCCS_SOCKET", str(gpu_service))

    def start(function: Callable[..., Any], nranks: int, *arguments: Any, timeout: float = WATCHDOG_S) -> list[Any]:
        store = tmp_path / f"store-{os.urandom(4).hex()}"

        def member(rank: int, nranks: int) -> Any:
            torch.set_num_threads(1)
            dist.init_process_group("emulated", store=dist.FileStore(str(store), nranks), rank=rank, world_size=nranks)
            world: Any = dist.group.WORLD
            world.enter(timedelta(seconds=timeout))
            outcome = function(world.streams, *arguments)
            dist.destroy_process_group()
            return outcome

        return run(member, nranks)

    return start


def data(seed: int, rank: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(torch.float32)


def collectives(streams: DriversStreams, seed: int, count: int, is_async: bool) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    every = [data(seed, peer, n, count) for peer in range(n)]
    rows = lambda: [streams.tensor(row) for row in every[rank]]  # noqa: E731
    new = lambda *shape: streams.tensor(torch.full(shape, 77.0))  # noqa: E731

    def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
        got = streams.get(got)
        assert torch.equal(got, wanted), f"{got} is not {wanted}"

    def end(work: dist.Work | None) -> None:
        assert (work is not None) == is_async
        if work is not None:
            assert isinstance(work, GpuWork)
            work.wait()

    end(dist.all_reduce(tensor := rows()[0], async_op=is_async))
    same(tensor, sum(other[0] for other in every))
    parts = [new(count) for _ in range(n)]
    end(dist.all_gather(parts, rows()[0], async_op=is_async))
    for part, other in zip(parts, every):
        same(part, other[0])
    end(dist.all_gather_into_tensor(got := new(n * count), rows()[0], async_op=is_async))
    same(got, torch.cat([other[0] for other in every]))
    end(dist.reduce_scatter(got := new(count), rows(), async_op=is_async))
    same(got, sum(other[rank] for other in every))
    end(dist.reduce_scatter_tensor(got := new(count), streams.tensor(every[rank]), async_op=is_async))
    same(got, sum(other[rank] for other in every))
    end(dist.all_to_all_single(got := new(n, count), streams.tensor(every[rank]), async_op=is_async))
    same(got, torch.stack([other[rank] for other in every]))
    parts = [new(count) for _ in range(n)]
    end(dist.all_to_all(parts, rows(), async_op=is_async))
    for part, other in zip(parts, every):
        same(part, other[rank])
    for root in range(n):
        end(dist.broadcast(tensor := rows()[0], root, async_op=is_async))
        same(tensor, every[root][0])
        parts = [new(count) for _ in range(n)]
        end(dist.gather(rows()[0], parts if rank == root else None, root, async_op=is_async))
        if rank == root:
            for part, other in zip(parts, every):
                same(part, other[0])
        end(dist.scatter(got := new(count), rows() if rank == root else None, root, async_op=is_async))
        same(got, every[root][rank])
    dist.barrier()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("count", [1, 1000, 300_001])
def test_collectives_and_lists_are_right(group: Group, count: int, is_async: bool) -> None:
    group(collectives, 2, int.from_bytes(os.urandom(3)), count, is_async)


def messages(streams: DriversStreams, seed: int) -> None:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    for count in (1, 4097, 400_001):
        sent, got = streams.tensor(data(seed, rank, count)), streams.tensor(torch.zeros(count))
        batch = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]
        [work] = dist.batch_isend_irecv(batch)
        work.wait()
        assert torch.equal(streams.get(got), data(seed, other, count))
        if rank == 0:
            dist.send(sent, 1)
        else:
            dist.recv(got, 0)
            assert torch.equal(streams.get(got), data(seed, 0, count))


def test_batches_of_messages_do_not_wait_for_each_other(group: Group) -> None:
    group(messages, 2, int.from_bytes(os.urandom(3)))


def order(streams: DriversStreams, seed: int) -> None:
    rank, n, count = dist.get_rank(), dist.get_world_size(), 5000
    for is_list in (False, True):
        made, later = streams.tensor(data(seed, rank, count)), streams.tensor(torch.zeros(count))
        sent = streams.tensor(torch.zeros(count))
        parts = [streams.tensor(torch.zeros(count)) for _ in range(n)]
        with Held(streams.driver) as held, streams.on(held.stream):
            streams.copy(sent, made)
            work: Any = dist.all_gather(parts, sent, async_op=True) if is_list else dist.all_reduce(sent, async_op=True)
            assert not work.is_completed()
            work.wait()
            streams.copy(later, parts[1 - rank] if is_list else sent)
            # The host did not wait, and nothing has happened so far.
            assert not work.is_completed() and not later.any()
            held.let_go()
            wanted = data(seed, 1 - rank, count) if is_list else sum(data(seed, peer, count) for peer in range(n))
            assert torch.equal(streams.get(later), wanted)
        assert work.is_completed() and work.is_success()
        future = work.get_future()
        assert future.done()


def test_a_wait_orders_the_stream_and_not_the_host(group: Group) -> None:
    group(order, 2, int.from_bytes(os.urandom(3)))


def dropped(streams: DriversStreams, seed: int) -> None:
    rank, n, count = dist.get_rank(), dist.get_world_size(), 200_000
    wanted = [data(seed, peer, count) for peer in range(n)]
    parts = [streams.tensor(torch.zeros(count)) for _ in range(n)]
    with Held(streams.driver) as held, streams.on(held.stream):
        work = dist.all_gather(parts, streams.tensor(wanted[rank]), async_op=True)
        # Would lie where the tensor was that the call alone has.
        others = [streams.tensor(torch.full((count,), 13.0)) for _ in range(4)]
        held.let_go()
        work.wait()
        for part, of_rank in zip(parts, wanted):
            assert torch.equal(streams.get(part), of_rank)
        del others


def test_tensors_stay_until_their_call_has_ended(group: Group) -> None:
    group(dropped, 2, int.from_bytes(os.urandom(3)))


def waited_too_long(streams: DriversStreams) -> None:
    rank = dist.get_rank()
    if rank == 0:
        work: Any = dist.all_reduce(streams.tensor(torch.ones(10)), async_op=True)
        work.wait()
        deadline = time.monotonic() + WATCHDOG_S
        while not work.is_completed() or work.exception() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert isinstance(work.exception(), mccs.Timeout), work.exception()
        said = str(work.exception())
        assert said.startswith("rank 0 of 2, all_reduce: ") and "1 s" in said, said
        with pytest.raises(mccs.Error):
            dist.all_reduce(streams.tensor(torch.ones(10)))
    dist.monitored_barrier(timeout=timedelta(seconds=WATCHDOG_S))


def test_a_call_that_takes_too_long_aborts_the_group(group: Group) -> None:
    group(waited_too_long, 2, timeout=1.0)
