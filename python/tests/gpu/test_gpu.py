"""GPUs' arrays, on the emulated driver (`check` says how): exact results on random integers, order of streams, faults."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mccs
from conftest import WATCHDOG_S, run, running
from driver import ByDlpack, ByInterface, ByVersionedDlpack, Driver, Held, Memory

#: Elements of a part: none, one, few, and several MB.
COUNTS = [0, 1, 1000, 700_001]
KINDS = [ByInterface, ByDlpack, ByVersionedDlpack]


Ranks = Callable[..., list[Any]]


@pytest.fixture
def ranks(gpu_service: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Runs ranks, a GPU each: as a communicator ``comm`` and a ``driver``."""
    monkeypatch.setenv("MCCS_SOCKET", str(gpu_service))

    def start(function: Callable[..., Any], nranks: int, *arguments: Any) -> list[Any]:
        unique_id = mccs.unique_id()

        def joined(rank: int, nranks: int, *arguments: Any) -> Any:
            comm = mccs.init(unique_id, rank, nranks, device=rank)
            result = function(comm, Driver(rank), *arguments)
            # The process ends at once: to others that might look like a failure of their last call.
            comm.close()
            return result

        return run(joined, nranks, *arguments)

    return start


def data(seed: int, rank: int, count: int, dtype: str = "float32") -> np.ndarray:
    """Integers that sums and products of few ranks have exactly, in any type."""
    return np.random.default_rng([seed, rank]).integers(0, 4, count).astype(dtype)


def same(got: Memory, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(got.get(), wanted)


def everything(comm: mccs.Communicator, driver: Driver, seed: int, count: int, kind: type[Memory]) -> None:
    rank, n = comm.rank, comm.nranks
    every = [data(seed, peer, n * count) for peer in range(n)]
    part = lambda array, index: array[index * count : (index + 1) * count]  # noqa: E731
    mine = lambda length: driver.array(every[rank][:length], kind)  # noqa: E731
    new = lambda length: driver.array(np.full(length, -1, np.float32), kind)  # noqa: E731
    total = sum(part(other, 0) for other in every)

    array = mine(count)
    assert comm.all_reduce(array) is None
    same(array, total)
    comm.all_reduce(array := mine(count), factor=2.0)
    same(array, 2 * total)

    got = new(count)
    for op, wanted in [("min", np.minimum.reduce), ("max", np.maximum.reduce), ("prod", np.multiply.reduce)]:
        comm.all_reduce(mine(count), got, op)
        same(got, wanted([part(other, 0) for other in every]))

    comm.reduce_scatter(mine(n * count), got := new(count))
    same(got, sum(part(other, rank) for other in every))
    comm.all_gather(mine(count), got := new(n * count))
    same(got, np.concatenate([part(other, 0) for other in every]))
    comm.all_to_all(mine(n * count), got)
    same(got, np.concatenate([part(other, rank) for other in every]))

    for root in range(n):
        comm.broadcast(array := mine(count), root)
        same(array, part(every[root], 0))
        comm.reduce(array := mine(count), root=root)
        same(array, total if rank == root else part(every[rank], 0))
        comm.gather(mine(count), got := new(n * count), root)
        if rank == root:
            same(got, np.concatenate([part(other, 0) for other in every]))
        comm.scatter(mine(n * count), got := new(count), root)
        same(got, part(every[root], rank))

    comm.barrier()
    left, right = (rank - 1) % n, (rank + 1) % n
    got = new(count)
    with mccs.group():
        comm.send(mine(count), right)
        comm.recv(got, left)
    same(got, part(every[left], 0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
def test_every_call_is_right(ranks: Ranks, count: int, kind: type[Memory]) -> None:
    ranks(everything, 2, int.from_bytes(os.urandom(4)), count, kind)


def types(comm: mccs.Communicator, driver: Driver, seed: int) -> None:
    for dtype in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"):
        for kind in KINDS:
            array = driver.array(data(seed, comm.rank, 999, dtype), kind)
            comm.all_reduce(array)
            same(array, sum(data(seed, peer, 999, dtype) for peer in range(2)))
    for dtype in ("int16", "uint16", "bool", "complex64", ">f4"):
        content = data(seed, 0, 99, dtype)
        array = driver.array(content if comm.rank == 0 else np.zeros_like(content))
        comm.broadcast(array)
        same(array, content)
        with pytest.raises(mccs.InvalidArgument, match=f"^rank {comm.rank} of 2, all_reduce: .*cannot be combined"):
            comm.all_reduce(array)


def test_arrays_have_any_type(ranks: Ranks) -> None:
    ranks(types, 2, int.from_bytes(os.urandom(4)))


def no_elements(comm: mccs.Communicator, driver: Driver) -> None:
    """Whatever strides such arrays have; and nobody waits for anybody."""
    for kind in KINDS:
        array = driver.array(np.ones((4, 0), np.float32), kind)
        if isinstance(array, ByDlpack):
            array.strides = (1, 1)
        comm.all_reduce(array)
        comm.all_gather(array, driver.array(np.ones((0, 7), np.float32), kind))
    comm.all_reduce(With(driver, np.ones((4, 0), np.float32), strides=(4, 4)))
    with mccs.group():
        comm.send(array, 1 - comm.rank)
        comm.recv(driver.array(np.ones(0, np.float32)), 1 - comm.rank)


def test_arrays_may_have_no_elements(ranks: Ranks) -> None:
    ranks(no_elements, 2)


def ordered(comm: mccs.Communicator, driver: Driver, kind: type[Memory], is_given: bool) -> None:
    """A call combines what another stream is still to write."""
    value = int(np.random.default_rng(comm.rank).integers(1, 100))
    with Held(driver) as held:
        array = driver.array(np.zeros(1000, np.uint8), kind, producer=held.stream)
        driver.fill(array, value, held.stream)
        stream = driver.stream() if is_given else None
        operation = comm.all_reduce(array, blocking=False, stream=stream)
        if isinstance(array, ByDlpack):
            assert set(array.told) == {stream or comm.stream}
        assert not operation.done()
        with pytest.raises(mccs.Timeout, match=f"^rank {comm.rank} of 2, all_reduce: "):
            operation.wait(0.05)
        with pytest.raises(mccs.Timeout):
            mccs.wait_all([operation], 0.05)
        held.let_go()
        if stream is None:
            mccs.wait_all([operation])
        else:
            # The stream has the result for all that comes behind the call.
            driver.synchronize(stream)
            assert operation.done()
            operation.wait()
        same(array, np.full(1000, sum(np.random.default_rng(rank).integers(1, 100) for rank in range(2)), np.uint8))


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_come_behind_what_makes_their_arrays(ranks: Ranks, kind: type[Memory], is_given: bool) -> None:
    ranks(ordered, 2, kind, is_given)


def independent(comm: mccs.Communicator, driver: Driver) -> None:
    """A call of another communicator, on a stream that is held, holds up none of this one's."""
    other = mccs.init(rank=0, nranks=1, device=comm.rank)
    one, many = driver.array(np.ones(10, np.float32)), driver.array(np.ones(10, np.float32))
    with Held(driver) as held:
        behind = other.all_reduce(one, blocking=False, stream=held.stream)
        comm.all_reduce(many, stream=driver.stream())
        same(many, np.full(10, 2, np.float32))
        assert not behind.done()
        held.let_go()
        behind.wait()
        same(one, np.ones(10, np.float32))


def test_streams_do_not_wait_for_each_other(ranks: Ranks) -> None:
    ranks(independent, 2)


class ByProtocol:
    def __init__(self, stream: int) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream


class Torchs:
    def __init__(self, stream: int) -> None:
        self.cuda_stream = stream


class Cupys:
    def __init__(self, stream: int) -> None:
        self.ptr = stream


def streams(comm: mccs.Communicator, driver: Driver) -> None:
    own = driver.stream()
    # The default stream, and the thread's own.
    for stream in (own, ByProtocol(own), Torchs(own), Cupys(own), 0, 1, 2, Cupys(0)):
        for kind in KINDS:
            array = driver.array(np.full(100, comm.rank, np.float32), kind)
            comm.all_reduce(array, stream=stream)
            same(array, np.ones(100, np.float32))
            if isinstance(array, ByDlpack):
                # DLPack has no 0.
                assert 0 not in array.told


def test_streams_are_numbers_or_other_libraries(ranks: Ranks) -> None:
    ranks(streams, 2)


def goes_on(comm: mccs.Communicator, driver: Driver) -> None:
    told = threading.Event()
    with Held(driver) as held:
        array = driver.array(np.ones(10, np.float32), producer=held.stream)
        operation = comm.all_reduce(array, blocking=False)
        assert isinstance(operation, mccs.Operation)
        operation.when_done(told.set)

        async def both() -> None:
            waits = asyncio.ensure_future(until(operation))
            await asyncio.sleep(0)
            assert not waits.done() and not told.is_set() and operation.exception() is None
            held.let_go()
            await waits

        asyncio.run(both())
        assert told.wait(WATCHDOG_S)
        same(array, np.full(10, 2, np.float32))


async def until(operation: mccs.Operation) -> None:
    await operation


def test_calls_that_go_on_tell_of_their_end(ranks: Ranks) -> None:
    ranks(goes_on, 2)


def interrupted(comm: mccs.Communicator, driver: Driver) -> None:
    array = driver.array(np.ones(10, np.float32))
    message = driver.array(np.zeros(1, np.uint8))
    if comm.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        operation = comm.all_reduce(array, blocking=False)
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            operation.wait()
        assert not operation.done()
        comm.send(message, 1, stream=driver.stream())
        operation.wait()
    else:
        comm.recv(message, 0)
        comm.all_reduce(array)
    same(array, np.full(10, 2, np.float32))


def test_a_signal_ends_a_wait_and_not_the_call(ranks: Ranks) -> None:
    ranks(interrupted, 2)


class Weak(Cupys):
    """A stream that something may refer to."""


def kept(comm: mccs.Communicator, driver: Driver, kind: type[Memory]) -> None:
    with Held(driver) as held:
        array = driver.array(np.ones(1000, np.float32), kind, producer=held.stream)
        other, stream = driver.array(np.zeros(1000, np.float32), kind), Weak(driver.stream())
        lives = [weakref.ref(array), weakref.ref(other), weakref.ref(stream)]
        operation = comm.all_reduce(array, other, blocking=False, stream=stream)
        del array, other, stream
        assert all(live() is not None for live in lives)
        held.let_go()
        operation.wait()
        # Memory goes where Python runs.
        comm.barrier()
        assert all(live() is None for live in lives)
        # Nobody waits for this one: a later call finds that it has ended.
        array = driver.array(np.ones(1000, np.float32), kind)
        comm.all_reduce(array, blocking=False)
        lives = [weakref.ref(array)]
        del array
        comm.barrier()
        comm.barrier()
        assert all(live() is None for live in lives)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_are_kept_until_the_stream_has_passed(ranks: Ranks, kind: type[Memory]) -> None:
    ranks(kept, 2, kind)


def grouped(comm: mccs.Communicator, driver: Driver, host_id: str) -> None:
    on_host = mccs.init(host_id, comm.rank, 2)
    array, other = driver.array(np.ones(100, np.float32)), driver.array(np.ones(100, np.int64))
    passed, got = driver.array(np.full(9, comm.rank, np.uint8)), driver.array(np.full(9, 9, np.uint8))
    of_host, received = np.ones(10), np.empty(10)
    with mccs.group():
        assert comm.all_reduce(array) is None
        on_host.send(of_host, 1 - comm.rank)
        comm.recv(got, 1 - comm.rank, stream=(stream := driver.stream()))
        on_host.recv(received, 1 - comm.rank)
        comm.send(passed, 1 - comm.rank, stream=stream)
        going_on = comm.all_reduce(other, blocking=False)
        on_host.all_reduce(of_host)
        with pytest.raises(mccs.InvalidUsage, match=f"^rank {comm.rank} of 2, all_reduce: .*behind the group"):
            going_on.wait()
        assert not going_on.done()
    going_on.wait()
    for of_gpu, value in ((array, 2), (other, 2), (got, 1 - comm.rank)):
        same(of_gpu, np.full(of_gpu.shape, value, of_gpu.dtype))
    assert (received == 1).all() and (of_host == 2).all()

    # Nothing is issued of a group that an exception ends, or whose call is refused.
    with pytest.raises(ZeroDivisionError), mccs.group():
        lost = comm.all_reduce(array, blocking=False)
        raise ZeroDivisionError
    with pytest.raises(mccs.InvalidUsage, match="was not issued"):
        lost.wait()
    gone = mccs.init(device=comm.rank, rank=0, nranks=1)
    with pytest.raises(mccs.InvalidArgument, match="^rank 0 of 1, all_reduce: .*closed"), mccs.group():
        lost = comm.all_reduce(array, blocking=False)
        gone.all_reduce(other)
        gone.close()
    with pytest.raises(mccs.InvalidUsage, match="was not issued"):
        lost.wait()
    same(array, np.full(100, 2, np.float32))
    comm.barrier()


def test_groups_have_calls_of_gpus_and_of_the_host(ranks: Ranks) -> None:
    ranks(grouped, 2, mccs.unique_id())


class With(ByInterface):
    def __init__(self, driver: Driver, content: np.ndarray, **changed: Any) -> None:
        super().__init__(driver, content)
        self.changed = changed


def refused(comm: mccs.Communicator, driver: Driver) -> None:
    ones = np.ones((4, 4), np.float32)
    good = driver.array(ones)
    elsewhere = Driver(1 - driver.device).array(ones)
    elsewhere_by_dlpack = Driver(1 - driver.device).array(ones, ByDlpack)
    driver = Driver(driver.device)
    transposed = driver.array(ones, ByDlpack)
    transposed.strides = (1, 4)
    on_opencl = driver.array(ones, ByDlpack)
    on_opencl.device_type = 4
    for array, message in [
        (ones, "in the host's memory.*without a device"),
        (bytearray(8), "bytearray is no array of a GPU's"),
        ([1.0], "list is no array of a GPU's"),
        (on_opencl, "in the host's memory"),
        (elsewhere, f"on GPU {1 - comm.rank}, and this rank on GPU {comm.rank}"),
        (elsewhere_by_dlpack, f"on GPU {1 - comm.rank}, and this rank on GPU {comm.rank}"),
        (With(driver, ones, strides=(4, 16)), "C-contiguous"),
        (transposed, "C-contiguous"),
        (driver.array(ones, is_read_only=True), "writable"),
        (driver.array(ones, ByVersionedDlpack, is_read_only=True), "writable"),
        (With(driver, ones, mask=good), "mask"),
        (With(driver, ones, data=(4096, False)), "no memory that the driver knows"),
        (With(driver, ones, typestr="f"), "the type \"f\""),
        (With(driver, ones, stream=0), "names the stream 0"),
        (With(driver, ones, shape=(1 << 40, 1 << 40)), "larger than memory"),
        (With(driver, ones, shape=None), "has no shape"),
        (With(driver, ones, strides=(16,)), "no stride for each dimension"),
        (With(driver, ones, strides="ab"), "has the strides ab"),
    ]:
        with pytest.raises(mccs.InvalidArgument, match=f"(?s)^rank {comm.rank} of 2, all_reduce: .*{message}") as raised:
            comm.all_reduce(array)
        assert (raised.value.rank, raised.value.call, raised.value.ends) == (comm.rank, "all_reduce", "call")
    # An array that is only sent may be read-only.
    comm.all_reduce(driver.array(ones, is_read_only=True), good)
    same(good, 2 * ones)
    with pytest.raises(mccs.InvalidArgument, match=f"^rank {comm.rank} of 2, all_reduce: .*is no stream"):
        comm.all_reduce(good, stream="0")  # type: ignore[call-overload]
    with pytest.raises(mccs.InvalidArgument, match=f"^rank {comm.rank} of 2, all_gather: .*bytes"):
        comm.all_gather(good, driver.array(ones))
    with pytest.raises(mccs.InvalidArgument, match=f"^rank {comm.rank} of 2, send: .*no rank 2"):
        comm.send(good, 2)
    own = driver.stream()
    driver.capture(own)
    with pytest.raises(mccs.InvalidArgument, match=f"^rank {comm.rank} of 2, all_reduce: .*captured"):
        comm.all_reduce(good, stream=own)
    driver.end_capture(own)
    on_host = mccs.init(nranks=1)
    assert on_host.device is None and on_host.stream is None and comm.device == comm.rank
    for array in (good, driver.array(ones, ByDlpack)):
        with pytest.raises(mccs.InvalidArgument, match="^rank 0 of 1, all_reduce: .*GPU"):
            on_host.all_reduce(array)
    with pytest.raises(mccs.InvalidArgument, match="^rank 0 of 1, all_reduce: stream: .*device=0"):
        on_host.all_reduce(np.ones(3), stream=own)
    comm.barrier()


def test_wrong_arguments_are_refused_by_rank_and_call(ranks: Ranks) -> None:
    ranks(refused, 2)


def addresses(comm: mccs.Communicator, driver: Driver) -> None:
    array = driver.array(np.ones(100, np.float32))
    operation = comm.start("all_reduce", "float", 100, [array.address], [array.address], owner=array)
    operation.wait()
    same(array, np.full(100, 2, np.float32))
    with pytest.raises(mccs.InvalidArgument, match=f"^rank {comm.rank} of 2, all_gather: .*one behind the other"):
        comm.start("all_gather", "float", 10, [array.address + 80], [array.address + 40, array.address], owner=array)
    assert comm.counters() == {"in_place": 1, "in_place_bytes": 800, "copied": 0, "copied_bytes": 0}


def test_calls_take_addresses_and_are_counted(ranks: Ranks) -> None:
    ranks(addresses, 2)


def forked(comm: mccs.Communicator, driver: Driver) -> None:
    array = driver.array(np.ones(10, np.float32))
    operation = comm.all_reduce(array, blocking=False)
    operation.wait()

    def child(*_: object) -> None:
        call = f"rank {comm.rank} of 2, all_reduce: .*forked"
        for use in (lambda: comm.all_reduce(array), operation.wait):
            with pytest.raises(mccs.InvalidUsage, match=call):
                use()
        with pytest.raises(mccs.InvalidUsage, match=f"rank {comm.rank} of 2, close: .*forked"):
            comm.close()
        # The host's memory is as good as ever, and the driver is not.
        with pytest.raises(mccs.InvalidUsage, match="^rank 0 of 1, join: .*forked.*spawn"):
            mccs.init(device=comm.rank, rank=0, nranks=1)
        alone = np.ones(3)
        mccs.init(rank=0, nranks=1).all_reduce(alone)

    run(child, 1)
    comm.all_reduce(array)
    same(array, np.full(10, 4, np.float32))


def test_forked_children_use_none_of_their_parents_gpus(ranks: Ranks) -> None:
    ranks(forked, 2)


def aborted(comm: mccs.Communicator, driver: Driver, is_grouped: bool) -> None:
    array = driver.array(np.ones(10, np.float32))
    if comm.rank == 1:
        comm.abort()
        return
    with pytest.raises(mccs.Remote, match="^rank 0 of 2, all_reduce: .*abort") as raised:
        if is_grouped:
            with mccs.group():
                comm.all_reduce(array)
        else:
            comm.all_reduce(array)
    assert raised.value.ends == "communicator"
    with pytest.raises(mccs.Remote, match="^rank 0 of 2, barrier: "):
        comm.barrier()
    comm.close()
    with pytest.raises(mccs.InvalidArgument, match="^rank 0 of 2, barrier: .*closed"):
        comm.barrier()


@pytest.mark.parametrize("is_grouped", [False, True])
def test_an_abort_ends_the_others_calls(ranks: Ranks, is_grouped: bool) -> None:
    ranks(aborted, 2, is_grouped)


def left(comm: mccs.Communicator, driver: Driver) -> None:
    """Calls under way end after the close, which waits for none."""
    array, message = driver.array(np.ones(10, np.float32)), np.zeros(1)
    on_host = mccs.init(f"{1:032x}", comm.rank, 2)
    if comm.rank == 0:
        with comm:
            operation = comm.all_reduce(array, blocking=False)
        assert not operation.done()
        on_host.send(message, 1)
        operation.wait()
    else:
        on_host.recv(message, 0)
        comm.all_reduce(array)
    same(array, np.full(10, 2, np.float32))
    with pytest.raises(ZeroDivisionError), mccs.init(f"{2:032x}", comm.rank, 2, device=comm.rank) as other:
        if comm.rank == 0:
            raise ZeroDivisionError
        with pytest.raises(mccs.Remote):
            other.barrier()
        raise ZeroDivisionError


def test_a_communicator_is_left_without_waiting(ranks: Ranks) -> None:
    ranks(left, 2)


def program(text: str, **environ: str) -> str:
    """Runs a program; gives its standard output."""
    ended = subprocess.run([sys.executable, "-c", text], env=os.environ | environ, capture_output=True, text=True, timeout=WATCHDOG_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


JOIN = """
import mccs
try:
    mccs.init(device={device})
except mccs.Error as error:
    print(type(error).__name__, error.rank, error.call, error)
"""


def test_a_gpu_that_is_not_there_is_an_exception_of_the_join(gpu_service: Path, folder: Path) -> None:
    said = program(JOIN.format(device=7), MCCS_SOCKET=str(gpu_service))
    assert said.startswith("InvalidArgument 0 join rank 0 of 1, join: ") and "device = 7" in said and "among 2" in said, said
    said = program(JOIN.format(device=-1), MCCS_SOCKET=str(gpu_service))
    assert said.startswith("InvalidArgument 0 join rank 0 of 1, join: ") and "device = -1" in said, said
    # No driver, and a service that has none.
    said = program(JOIN.format(device=0), MCCS_SOCKET=str(gpu_service), LD_LIBRARY_PATH="")
    assert said.startswith("System 0 join rank 0 of 1, join: ") and "driver" in said, said
    without = folder / "without"
    without.mkdir()
    with running(without) as socket:
        said = program(JOIN.format(device=0), MCCS_SOCKET=str(socket))
    assert "0 join rank 0 of 1, join: " in said and "GPU" in said, said


def cupys(driver: Driver) -> ModuleType:
    """As much of CuPy as the recipe calls."""
    current: list[int] = []

    class Stream:
        def __init__(self, non_blocking: bool) -> None:
            self.ptr = driver.stream()

        def __enter__(self) -> Stream:
            current.append(self.ptr)
            return self

        def __exit__(self, *_: object) -> None:
            current.pop()

        def synchronize(self) -> None:
            driver.synchronize(self.ptr)

    class Array(ByVersionedDlpack):
        def copy(self) -> Array:
            copied: Array = driver.array(np.zeros(self.shape, self.dtype), Array)
            driver.copy(copied, self, current[-1])
            return copied

    cupy = ModuleType("cupy")
    values = {
        "cuda": SimpleNamespace(Stream=Stream, Device=nullcontext),
        "float32": np.float32,
        "full": lambda count, value, dtype: driver.array(np.full(count, value, dtype), Array, producer=current[-1]),
    }
    vars(cupy).update(values)
    return cupy


def test_the_recipe_runs(gpu_service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in of CuPy's; tests/python_gpu.py runs it on CuPy."""
    monkeypatch.setenv("MCCS_SOCKET", str(gpu_service))
    page = (Path(__file__).parents[3] / "docs" / "PYTHON_RECIPES.md").read_text()
    [snippet] = re.findall(r"^## GPUs\n.*?^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)

    def recipe(rank: int, nranks: int, unique_id: str) -> None:
        sys.modules["cupy"] = cupys(Driver(rank))
        names: dict[str, Any] = {"unique_id": unique_id, "rank": rank, "nranks": nranks}
        exec(compile(snippet, "PYTHON_RECIPES.md", "exec"), names)
        names["comm"].close()

    run(recipe, 2, mccs.unique_id())


ENDS = """
import sys
sys.path.insert(0, {folder!r})
import mccs, numpy
from driver import Driver
rank = int(sys.argv[1])
comm = mccs.init({unique_id!r}, rank, 2, device=rank)
array = Driver(rank).array(numpy.ones(10, numpy.float32))
comm.all_reduce(array)
if rank == 0:
    going_on = comm.all_reduce(array, blocking=False)
else:
    sys.stdin.read()
    try:
        comm.all_reduce(array)
    except mccs.Remote as error:
        print(error.rank, error.call, error.ends)
"""


def test_a_process_may_end_with_a_call_under_way(gpu_service: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank hears of it."""
    monkeypatch.setenv("MCCS_SOCKET", str(gpu_service))
    text = ENDS.format(folder=str(Path(__file__).parent), unique_id=mccs.unique_id())
    command = [sys.executable, "-c", text]
    with subprocess.Popen([*command, "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        subprocess.run([*command, "0"], check=True, timeout=WATCHDOG_S)
        said, _ = other.communicate(timeout=WATCHDOG_S)
    assert said == "1 all_reduce communicator\n", said
