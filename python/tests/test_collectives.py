"""Every collective on NumPy's arrays: exact results on random integers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mccs
from conftest import WATCHDOG_S, run
from mccs.operator import Operator

#: Elements of a part: none, one, one piece, and several with a rest.
COUNTS = [0, 1, 1000, 700_001]


def data(seed: int, rank: int, count: int, dtype: str = "float32") -> np.ndarray:
    """Integers that sums and products of few ranks have exactly, in any type."""
    return np.random.default_rng([seed, rank]).integers(0, 4, count).astype(dtype)


def everything(comm: mccs.Communicator, seed: int, count: int, is_shared: bool) -> dict:
    rank, n = comm.rank, comm.nranks
    every = [data(seed, peer, n * count) for peer in range(n)]
    part = lambda array, index: array[index * count : (index + 1) * count]  # noqa: E731
    new = (lambda length: mccs.empty(length)) if is_shared else (lambda length: np.empty(length, np.float32))

    def mine(length: int) -> np.ndarray:
        array = new(length)
        array[:] = every[rank][:length]
        return array

    def same(got: np.ndarray, wanted: np.ndarray) -> None:
        np.testing.assert_array_equal(got, wanted)

    array = mine(count)
    assert comm.all_reduce(array) is None
    same(array, sum(part(other, 0) for other in every))

    got = new(count)
    for op, wanted in [("min", np.minimum.reduce), ("max", np.maximum.reduce), ("prod", np.multiply.reduce)]:
        comm.all_reduce(mine(count), got, op)
        same(got, wanted([part(other, 0) for other in every]))

    got = new(count)
    comm.reduce_scatter(mine(n * count), got)
    same(got, sum(part(other, rank) for other in every))

    got = new(n * count)
    comm.all_gather(mine(count), got)
    same(got, np.concatenate([part(other, 0) for other in every]))

    comm.all_to_all(mine(n * count), got)
    same(got, np.concatenate([part(other, rank) for other in every]))

    for root in range(n):
        array = mine(count)
        comm.broadcast(array, root)
        same(array, part(every[root], 0))

        array = mine(count)
        comm.reduce(array, root=root)
        same(array, sum(part(other, 0) for other in every) if rank == root else part(every[rank], 0))

        got = new(n * count)
        comm.gather(mine(count), got, root)
        if rank == root:
            same(got, np.concatenate([part(other, 0) for other in every]))

        got = new(count)
        comm.scatter(mine(n * count), got, root)
        same(got, part(every[root], rank))

    comm.barrier()
    got, under_way = [new(count) for _ in range(n)], []
    for peer in range(n):
        if peer != rank:
            under_way.append(comm.send(mine(count), peer, blocking=False))
            under_way.append(comm.recv(got[peer], peer, blocking=False))
    mccs.wait_all(under_way)
    for peer in range(n):
        if peer != rank:
            same(got[peer], part(every[peer], 0))
    return comm.counters()


@pytest.mark.parametrize("is_shared", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_every_collective(ranks, nranks: int, count: int, is_shared: bool) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    for counters in ranks(everything, nranks, seed, count, is_shared):
        if count:
            assert (counters["copied"] == 0) == is_shared, counters
            assert (counters["copied_bytes"] == 0) == is_shared, counters


def types(comm: mccs.Communicator, seed: int) -> None:
    for dtype in ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]:
        array = data(seed, comm.rank, 100, dtype)
        comm.all_reduce(array)
        np.testing.assert_array_equal(array, sum(data(seed, rank, 100, dtype) for rank in range(comm.nranks)))
    moved = np.full(100, "?", dtype="U7")
    if comm.rank == 0:
        moved[:] = "a text"
    moved = moved.view(np.int16)
    comm.broadcast(moved)
    assert (moved.view("U7") == "a text").all()
    array = np.arange(6, dtype=np.float64)
    comm.all_reduce(array, factor=0.5)
    np.testing.assert_array_equal(array, np.arange(6) * 0.5 * comm.nranks)
    with_mean = np.full(3, comm.rank, np.float32)
    comm.all_reduce(with_mean, op="avg")
    assert (with_mean == (comm.nranks - 1) / 2).all()
    plain = bytearray([comm.rank + 1] * 5)
    comm.all_reduce(memoryview(plain))
    assert list(plain) == [3] * 5


def test_types_and_operators(ranks) -> None:
    ranks(types, 2, 7)


def one_late(comm: mccs.Communicator, seed: int) -> None:
    """Some ranks have the service's memory, others their own: they make the same pieces."""
    count = 3_000_000
    array = mccs.empty(count) if comm.rank == 0 else np.empty(count, np.float32)
    array[:] = data(seed, comm.rank, count)
    comm.all_reduce(array)
    np.testing.assert_array_equal(array, sum(data(seed, rank, count) for rank in range(comm.nranks)))


def test_ranks_may_differ_in_where_their_memory_is(ranks) -> None:
    ranks(one_late, 3, 11)


def under_way(comm: mccs.Communicator, seed: int) -> None:
    """Arrays that the caller forgets stay until the call has ended; calls keep their order."""
    kept, operations = [], []
    for step in range(40):
        count = [10, 600_000][step % 7 == 3]
        array = data(seed + step, comm.rank, count)
        if step % 2:
            kept.append((step, count, array))
        operations.append(comm.all_reduce(array, blocking=False))
        del array
    mccs.wait_all(operations)
    for step, count, array in kept:
        np.testing.assert_array_equal(array, sum(data(seed + step, rank, count) for rank in range(comm.nranks)))


def test_calls_under_way_keep_their_order_and_their_arrays(ranks) -> None:
    ranks(under_way, 2, 13)


def forgotten(comm: mccs.Communicator) -> None:
    for _ in range(20):
        comm.all_reduce(np.ones(10), blocking=False)
        comm.barrier()
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    assert "mccs-python" not in names, "calls wait behind those that nobody waits for"
    plain = bytearray(8)
    with memoryview(plain) as view:
        operation = comm.all_reduce(view, blocking=False)
    if comm.rank == 0:
        with pytest.raises(BufferError):
            plain.extend(b"more")
    comm.barrier()
    operation.wait()


def test_calls_that_nobody_waits_for_hold_up_nobody_and_keep_their_memory(ranks) -> None:
    ranks(forgotten, 2)


def callbacks(comm: mccs.Communicator) -> None:
    told = [threading.Event() for _ in range(4)]
    arrays = [np.full(count, comm.rank + 1, np.int32) for count in (1, 900_000, 3, 4)]
    for array, event in zip(arrays, told):
        comm.all_reduce(array, blocking=False).when_done(event.set)
    for array, event in zip(arrays, told):
        event.wait()
        assert (array == 3).all()
    operation = comm.barrier(blocking=False)
    operation.wait()
    assert operation.done() and operation.exception() is None
    late = threading.Event()
    operation.when_done(late.set)
    assert late.is_set()


def test_whoever_asks_is_told_of_the_end(ranks) -> None:
    ranks(callbacks, 2)


def refusals(comm: mccs.Communicator) -> None:
    rank = comm.rank
    good = np.zeros(4, np.float32)
    read_only = np.zeros(4, np.float32)
    read_only.flags.writeable = False
    wrong = [
        ("all_reduce", lambda: comm.all_reduce(np.zeros((4, 4), np.float32)[:, ::2])),
        ("all_reduce", lambda: comm.all_reduce(read_only)),
        ("all_reduce", lambda: comm.all_reduce(good, np.zeros(5, np.float32))),
        ("all_reduce", lambda: comm.all_reduce(good, np.zeros(4, np.int32))),
        ("all_reduce", lambda: comm.all_reduce(np.zeros(4, np.complex64))),
        ("all_reduce", lambda: comm.all_reduce(np.zeros(4, np.dtype(">f4")))),
        ("all_reduce", lambda: comm.all_reduce(3.5)),
        ("all_reduce", lambda: comm.all_reduce(np.ones(4, bool))),
        ("all_reduce", lambda: comm.all_reduce(good, op="xor")),
        ("all_reduce", lambda: comm.all_reduce(good, op="max", factor=0.5)),
        ("reduce", lambda: comm.reduce(good, op="nonsense", factor=1)),
        ("all_gather", lambda: comm.all_gather(good, np.zeros(9, np.float32))),
        ("reduce_scatter", lambda: comm.reduce_scatter(np.zeros(5, np.float32), good)),
        ("gather", lambda: comm.gather(good, None, root=rank)),
        ("broadcast", lambda: comm.broadcast(good, 2)),
        ("send", lambda: comm.send(good, 7)),
        ("send", lambda: comm.send(good, -1)),
        ("recv", lambda: comm.recv(good, 1.5)),
        ("recv", lambda: comm.recv(good, 1 << 40)),
        ("broadcast", lambda: comm.broadcast(good, -1)),
        ("broadcast", lambda: comm.broadcast(good, None)),
        ("reduce", lambda: comm.reduce(good, root=-1)),
        ("gather", lambda: comm.gather(good, None, 1.5)),
        ("scatter", lambda: comm.scatter(good, good, "0")),
        ("all_reduce", lambda: comm.all_reduce(good, op=3)),
        ("all_reduce", lambda: comm.all_reduce(good, factor="half")),
        ("all_gather", lambda: comm.start("all_gather", "f8e4m3", 1, [0], [0, 0], owner=None)),
        ("broadcast", lambda: comm.start("broadcast", "uint8", 1, [0], [0], root=-1, owner=None)),
    ]
    for call, function in wrong:
        with pytest.raises(mccs.InvalidArgument, match=f"^rank {rank} of 2, {call}: ") as raised:
            function()
        assert (raised.value.rank, raised.value.call, raised.value.ends) == (rank, call, "call")
        assert isinstance(raised.value, ValueError)
    # Nothing of it was enqueued.
    comm.all_reduce(good)


def test_what_is_wrong_is_refused_and_changes_nothing(ranks) -> None:
    ranks(refusals, 2)


def contradiction(comm: mccs.Communicator, count: int) -> None:
    array = np.zeros(count + comm.rank, np.float32)
    with pytest.raises(mccs.Error, match=f"^rank {comm.rank} of 2, all_reduce: ") as raised:
        comm.all_reduce(array)
    assert raised.value.ends == "communicator"


@pytest.mark.parametrize("count", [10, 100_000, 262_144])
def test_ranks_with_different_shapes_are_told(ranks, count: int) -> None:
    ranks(contradiction, 2, count)


#: Elements of float32 that a slot has.
SLOT = 262_144


def long(dtype: str = "float32", slots: int = 2) -> np.ndarray:
    return np.ones(slots * (SLOT * 4 // np.dtype(dtype).itemsize), dtype)


#: Calls of several slots that contradict each other, and how errors describe them.
CONTRADICTIONS = {
    "count": [
        (lambda comm: comm.all_reduce(long(slots=2)), "all_reduce(524288 x float, sum)"),
        (lambda comm: comm.all_reduce(long(slots=3)), "all_reduce(786432 x float, sum)"),
    ],
    "a long count": [
        (lambda comm: comm.all_reduce(np.ones(2_000_000, np.float32)), "all_reduce(2000000 x float, sum)"),
        (lambda comm: comm.all_reduce(np.ones(2_000_001, np.float32)), "all_reduce(2000001 x float, sum)"),
    ],
    "operator": [
        (lambda comm: comm.all_reduce(long()), "all_reduce(524288 x float, sum)"),
        (lambda comm: comm.all_reduce(long(), op="max"), "all_reduce(524288 x float, max)"),
    ],
    "type": [
        (lambda comm: comm.all_reduce(long()), "all_reduce(524288 x float, sum)"),
        (lambda comm: comm.all_reduce(long("int32")), "all_reduce(524288 x int32, sum)"),
    ],
    "root": [
        (lambda comm: comm.broadcast(long(), 0), "broadcast(524288 x float, root 0)"),
        (lambda comm: comm.broadcast(long(), 1), "broadcast(524288 x float, root 1)"),
    ],
    "kind": [
        (lambda comm: comm.reduce(long()), "reduce(524288 x float, sum, root 0)"),
        (lambda comm: comm.broadcast(long()), "broadcast(524288 x float, root 0)"),
    ],
}


def long_contradiction(comm: mccs.Communicator, case: str) -> None:
    (first, described), (second, other) = CONTRADICTIONS[case]
    # The last rank differs.
    call = second if comm.rank == comm.nranks - 1 else first
    with pytest.raises(mccs.InvalidUsage, match=f"^rank {comm.rank} of {comm.nranks}, ") as raised:
        call(comm)
    said = f"rank 0 called {described}, rank {comm.nranks - 1} called {other}"
    assert said in str(raised.value)
    assert raised.value.ends == "call"
    # Its frames hold the communicator, which is to leave before the process ends.
    del raised
    # Nothing was moved, and calls go on.
    array = np.full(10, comm.rank + 1, np.int64)
    comm.all_reduce(array)
    assert (array == sum(range(comm.nranks + 1))).all()


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_long_calls_that_differ_are_told_before_anything_moves(ranks, case: str, nranks: int) -> None:
    ranks(long_contradiction, nranks, case)


#: Short calls that are made where another rank makes a long one, and how errors describe them.
SHORT = {
    "an agreement of old": (lambda comm: comm.all_reduce(np.ones(1, np.uint8), op="min"), "all_reduce(1 x uint8, min)"),
    "an all-gather": (
        lambda comm: comm.all_gather(np.ones(128, np.uint8), np.ones(256, np.uint8)), "all_gather(128 x uint8)"),
    "the same, shorter": (lambda comm: comm.all_reduce(np.ones(10, np.float32)), "all_reduce(10 x float, sum)"),
    "a barrier": (lambda comm: comm.barrier(), "barrier("),
}


def short_against_long(comm: mccs.Communicator, case: str, is_shared: bool) -> None:
    call, described = SHORT[case]
    array = mccs.empty(2 * SLOT) if is_shared else long()
    with pytest.raises(mccs.InvalidUsage, match=f"^rank {comm.rank} of 2, ") as raised:
        if comm.rank == 0:
            comm.all_reduce(array)
        else:
            call(comm)
    said = str(raised.value)
    assert f"rank 1 called {described}" in said
    theirs = "all_reduce(524288 x float, sum)" if comm.rank == 0 else "a collective of more than 1 MiB"
    assert f"rank 0 called {theirs}" in said
    assert "f8" not in said, said
    assert raised.value.ends == "communicator"


@pytest.mark.parametrize("is_shared", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("case", SHORT)
def test_a_short_call_is_no_part_of_a_long_one(ranks, case: str, is_shared: bool) -> None:
    ranks(short_against_long, 2, case, is_shared)


def in_place(comm: mccs.Communicator, seed: int, count: int, is_shared: bool) -> None:
    rank, n = comm.rank, comm.nranks
    every = [data(seed, peer, n * count) for peer in range(n)]
    part = lambda array, index: array[index * count : (index + 1) * count]  # noqa: E731

    def whole() -> np.ndarray:
        array = mccs.empty(n * count) if is_shared else np.empty(n * count, np.float32)
        array[:] = every[rank]
        return array

    array = whole()
    comm.all_gather(part(array, rank), array)
    np.testing.assert_array_equal(array, np.concatenate([part(other, peer) for peer, other in enumerate(every)]))
    array = whole()
    comm.reduce_scatter(array, part(array, rank))
    np.testing.assert_array_equal(part(array, rank), sum(part(other, rank) for other in every))
    array = whole()
    comm.all_to_all(array, array)
    np.testing.assert_array_equal(array, np.concatenate([part(other, rank) for other in every]))
    for root in range(n):
        array = whole()
        comm.gather(part(array, rank), array, root)
        if rank == root:
            np.testing.assert_array_equal(array, np.concatenate([part(each, peer) for peer, each in enumerate(every)]))
        array = whole()
        comm.scatter(array, part(array, rank), root)
        np.testing.assert_array_equal(part(array, rank), part(every[root], rank))


@pytest.mark.parametrize("is_shared", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("count", [1, 1000, 700_001])
def test_collectives_in_place(ranks, count: int, is_shared: bool) -> None:
    ranks(in_place, 3, 23, count, is_shared)


def overlapping(comm: mccs.Communicator, count: int, is_shared: bool) -> None:
    rank, n = comm.rank, comm.nranks
    array = mccs.empty(4 * count) if is_shared else np.empty(4 * count, np.float32)
    array[:] = rank + 1
    other = 1 - rank
    cases = [
        ("all_reduce", lambda: comm.all_reduce(array[1 : 1 + count], array[:count])),
        ("all_reduce", lambda: comm.all_reduce(array[:count], array[count - 1 : 2 * count - 1])),
        ("all_gather", lambda: comm.all_gather(array[other * count : (other + 1) * count], array[: n * count])),
        ("all_gather", lambda: comm.all_gather(array[n * count - 1 : n * count + count - 1], array[: n * count])),
        ("reduce_scatter", lambda: comm.reduce_scatter(array[: n * count], array[other * count : (other + 1) * count])),
        ("all_to_all", lambda: comm.all_to_all(array[: n * count], array[count : (n + 1) * count])),
        ("gather", lambda: comm.gather(array[1 : 1 + count], array[: n * count], rank)),
        ("scatter", lambda: comm.scatter(array[: n * count], array[1 : 1 + count], rank)),
    ]
    for call, function in cases:
        with pytest.raises(mccs.InvalidArgument, match=f"^rank {rank} of {n}, {call}: .*overlap"):
            function()
    assert (array == rank + 1).all()
    comm.all_reduce(array[:count], array[count : 2 * count])
    assert (array[count : 2 * count] == 3).all() and (array[:count] == rank + 1).all()


@pytest.mark.parametrize("is_shared", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("count", [2, 700_001])
def test_arrays_that_overlap_are_refused(ranks, count: int, is_shared: bool) -> None:
    ranks(overlapping, 2, count, is_shared)


def closed(comm: mccs.Communicator) -> None:
    comm.barrier()
    other = 1 - comm.rank
    comm.close()
    array = np.ones(4, np.float32)
    for call, function in [
        ("send", lambda: comm.send(array, other)),
        ("recv", lambda: comm.recv(array, other)),
        ("all_reduce", lambda: comm.all_reduce(array)),
        ("barrier", lambda: comm.barrier()),
    ]:
        with pytest.raises(mccs.InvalidArgument, match=f"^rank {comm.rank} of 2, {call}: .*closed"):
            function()
    comm.close()


def test_a_closed_communicator_takes_no_call(ranks) -> None:
    ranks(closed, 2)


#: Rank 1: it ends with a communicator that nothing drops, as libraries in C keep them.
ENDS_WITH_HANDLES = """
import ctypes, sys, mccs, numpy
comm = mccs.init(sys.argv[1], 1, 2)
array = numpy.full(10, 2, numpy.float32)
operation = comm.all_reduce(array, blocking=False)
operation.wait()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
"""


def outlasts_the_other(_rank: int, _nranks: int, unique_id: str, socket: Path) -> None:
    """Rank 0 looks at its call when rank 1's process has ended."""
    other = subprocess.Popen([sys.executable, "-c", ENDS_WITH_HANDLES, unique_id])
    comm, array = mccs.init(unique_id, 0, 2), np.ones(10, np.float32)
    operation = comm.all_reduce(array, blocking=False)
    assert other.wait(WATCHDOG_S) == 0
    operator, end = Operator(socket.with_name("mccs-control.sock")), time.monotonic() + WATCHDOG_S
    while any(session["pid"] == other.pid for session in operator.sessions()):
        assert time.monotonic() < end, "the service does not see that rank 1 has ended"
    operation.wait()
    assert (array == 3).all()
    # Not that it has gone, which fails what others have still to look at.
    with pytest.raises(mccs.Error, match="rank 1 has left"):
        comm.all_reduce(array)


def test_a_process_that_ends_leaves_its_communicators(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    run(outlasts_the_other, 1, mccs.unique_id(), socket)


def left_by_an_exception(comm: mccs.Communicator, other_id: str) -> None:
    array, other = np.zeros(4, np.float32), mccs.init(other_id, comm.rank, 2)
    if comm.rank == 0:
        with pytest.raises(KeyError), comm:
            raise KeyError
        # It is kept: the others are told nevertheless.
        with pytest.raises(mccs.Error):
            comm.barrier()
    else:
        with pytest.raises(mccs.Error, match="^rank 1 of 2, all_reduce: "):
            comm.all_reduce(array)
    other.barrier()


def test_a_with_that_ends_by_an_exception_ends_the_communicator(ranks) -> None:
    ranks(left_by_an_exception, 2, mccs.unique_id())


class Lent:
    """An array of some device's memory, as DLPack has it."""

    def __init__(self, array: np.ndarray, device: int) -> None:
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **arguments: object) -> object:
        return self.array.__dlpack__(**arguments)


class OnGpu:
    __cuda_array_interface__ = {"version": 3, "shape": (4,), "typestr": "<f4", "data": (0, False)}


def devices(comm: mccs.Communicator) -> None:
    # The host's, and the host's that is pinned for a GPU.
    for device in (1, 3):
        array = np.full(4, comm.rank + 1, np.float32)
        comm.all_reduce(Lent(array, device))
        assert (array == 3).all()
    # CUDA, OpenCL, Vulkan, Metal, ROCm, and one API.
    for device in (2, 4, 7, 8, 10, 14):
        with pytest.raises(mccs.InvalidArgument, match=f"^rank {comm.rank} of 2, all_reduce: .*device"):
            comm.all_reduce(Lent(np.zeros(4, np.float32), device))
    with pytest.raises(mccs.InvalidArgument, match=f"^rank {comm.rank} of 2, all_reduce: .*GPU"):
        comm.all_reduce(OnGpu())
    comm.barrier()


def test_arrays_of_foreign_devices_are_refused(ranks) -> None:
    ranks(devices, 2)


def interrupted(comm: mccs.Communicator, count: int) -> None:
    array = np.ones(count, np.float32)
    if comm.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        operation = comm.all_reduce(array, blocking=False)
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            operation.wait()
        assert not operation.done()
        comm.send(np.zeros(1, np.uint8), 1)
        operation.wait()
    else:
        comm.recv(np.zeros(1, np.uint8), 0)
        comm.all_reduce(array)
    assert (array == 2).all()
    comm.barrier()


@pytest.mark.parametrize("count", [10, 2_000_000])
def test_a_signal_ends_a_wait_and_not_the_call(ranks, count: int) -> None:
    ranks(interrupted, 2, count)


def timed_out(comm: mccs.Communicator) -> None:
    if comm.rank == 0:
        operation = comm.barrier(blocking=False)
        with pytest.raises(mccs.Timeout, match="^rank 0 of 2, barrier: ") as raised:
            operation.wait(0.1)
        assert raised.value.ends == "call"
        with pytest.raises(TimeoutError):
            mccs.wait_all([operation], 0.01)
        comm.abort()
        with pytest.raises(mccs.Error):
            operation.wait()
    else:
        with pytest.raises(mccs.Error):
            comm.recv(np.zeros(5), 0)


def test_a_time_out_and_an_abort_end_all_ranks(ranks) -> None:
    ranks(timed_out, 2)


def forked(comm: mccs.Communicator) -> None:
    shared = mccs.empty(10)
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            comm.barrier()
        except mccs.Error as error:
            os.write(into, str(error).encode())
        del comm, shared
        os._exit(0)
    os.close(into)
    os.waitpid(child, 0)
    assert b"forked" in os.read(out, 1000)
    comm.all_reduce(shared)


def test_a_forked_child_can_neither_use_nor_end_its_parents_session(ranks) -> None:
    ranks(forked, 2)


def dies(comm: mccs.Communicator) -> None:
    if comm.rank == 1:
        time.sleep(0.1)
        return
    with pytest.raises(mccs.Error, match="^rank 0 of 2, all_reduce: "):
        comm.all_reduce(np.zeros(3_000_000))


def test_a_rank_that_goes_is_told_to_the_others(ranks) -> None:
    ranks(dies, 2)


def test_arguments_of_no_rank_are_refused(socket, monkeypatch) -> None:
    def wrong(*_: object) -> None:
        cases = [
            ("join", "rank = -1", lambda: mccs.init(mccs.unique_id(), -1, 2)),
            ("join", "rank = 1.5", lambda: mccs.init(mccs.unique_id(), 1.5, 2)),
            ("join", "nranks = -2", lambda: mccs.init(mccs.unique_id(), 0, -2)),
            ("join", "timeout = soon", lambda: mccs.init(mccs.unique_id(), 0, 1, timeout="soon")),
            ("join", "mccs.unique_id", lambda: mccs.init(rank=0, nranks=2)),
            ("empty", "-1", lambda: mccs.empty(-1)),
            ("empty", "-3", lambda: mccs.empty((2, -3))),
            ("empty", "float", lambda: mccs.empty(1.5)),
            ("empty", "object", lambda: mccs.empty(4, object)),
            ("empty", "nonsense", lambda: mccs.empty(4, "nonsense")),
            ("allocate", "bytes = -1", lambda: mccs.session().allocate(-1)),
        ]
        for call, text, function in cases:
            with pytest.raises(mccs.InvalidArgument, match=f"^{call}: .*{text}") as raised:
                function()
            assert raised.value.call == call
        for variable, value in (("MCCS_RANK", "abc"), ("MCCS_NRANKS", "1.5")):
            os.environ[variable] = value
            with pytest.raises(mccs.InvalidArgument, match=f"^join: {variable} is '{value}'"):
                mccs.init(mccs.unique_id())
            del os.environ[variable]
        operation = mccs.init(rank=0, nranks=1).barrier(blocking=False)
        for timeout in (float("nan"), "soon"):
            with pytest.raises(mccs.InvalidArgument, match="^rank 0 of 1, barrier: timeout"):
                operation.wait(timeout)
        operation.wait()

    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    run(wrong, 1)


def join_interrupted(rank: int, nranks: int, unique_id: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        mccs.init(unique_id, rank, nranks)


def test_a_signal_ends_a_join(socket, monkeypatch) -> None:
    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    run(lambda rank, _: join_interrupted(rank, 2, mccs.unique_id()), 1)
