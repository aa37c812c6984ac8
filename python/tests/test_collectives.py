"""Every collective on NumPy's arrays: exact results on random integers."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import mccs

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


@pytest.mark.parametrize("count", [10, 100_000, 262_144, 2_000_000])
def test_ranks_with_different_shapes_are_told(ranks, count: int) -> None:
    ranks(contradiction, 2, count)


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


def join_interrupted(rank: int, nranks: int, unique_id: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        mccs.init(unique_id, rank, nranks)


def test_a_signal_ends_a_join(socket, monkeypatch) -> None:
    from conftest import run

    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    run(lambda rank, _: join_interrupted(rank, 2, mccs.unique_id()), 1)
