"""Groups: calls that are issued together, or not at all."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import mccs
from conftest import run, running
from test_collectives import data

#: Elements: one slot's part of a message, and several slots'.
COUNTS = [1, 1000, 700_001]


def exchanged(comm: mccs.Communicator, seed: int, count: int) -> None:
    """Every rank sends to every rank before it receives: without a group each would wait for the other."""
    rank, n = comm.rank, comm.nranks
    own = data(seed, rank, count)
    got = [np.empty(count, np.float32) for _ in range(n)]
    total = own.copy()
    with mccs.group():
        for peer in range(n):
            if peer != rank:
                assert comm.send(own, peer) is None
        for peer in range(n):
            if peer != rank:
                comm.recv(got[peer], peer)
        assert comm.all_reduce(total) is None
    for peer in range(n):
        if peer != rank:
            np.testing.assert_array_equal(got[peer], data(seed, peer, count))
    np.testing.assert_array_equal(total, sum(data(seed, peer, count) for peer in range(n)))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_calls_of_a_group_do_not_wait_for_each_other(ranks, nranks: int, count: int) -> None:
    ranks(exchanged, nranks, int.from_bytes(os.urandom(4), "little"), count)


def at_its_end(comm: mccs.Communicator) -> None:
    array = np.full(10, comm.rank + 1, np.float32)
    with mccs.group():
        going_on = comm.all_reduce(array, blocking=False)
        told = threading.Event()
        going_on.when_done(told.set)
        assert isinstance(going_on, mccs.Operation) and not going_on.done() and going_on.exception() is None
        with pytest.raises(mccs.InvalidUsage, match=f"^rank {comm.rank} of 2, all_reduce: .*group"):
            going_on.wait()
        # Its content at the end is combined.
        array[:] = 10 * (comm.rank + 1)
        assert not told.is_set()
    going_on.wait()
    assert (array == 30).all()
    assert told.wait(60) and going_on.done()


def test_a_group_issues_at_its_end(ranks) -> None:
    ranks(at_its_end, 2)


def many(comm: mccs.Communicator, other_id: str, seed: int) -> None:
    """Calls of two communicators, short and long, more than there are slots, in groups inside groups."""
    other = mccs.init(other_id, comm.rank, comm.nranks)
    counts = [3, 600_000, 5, 7, 11, 13, 500_000, 17]
    arrays = [data(seed + at, comm.rank, count) for at, count in enumerate(counts)]
    with mccs.group():
        for at, array in enumerate(arrays[:4]):
            (comm if at % 2 else other).all_reduce(array)
        with mccs.group():
            under_way = [(comm if at % 2 else other).all_reduce(array, blocking=False) for at, array in enumerate(arrays[4:])]
            with mccs.group():
                pass
        assert not any(operation.done() for operation in under_way)
    mccs.wait_all(under_way)
    for at, (count, array) in enumerate(zip(counts, arrays)):
        np.testing.assert_array_equal(array, sum(data(seed + at, rank, count) for rank in range(comm.nranks)))


def test_groups_nest_and_have_calls_of_several_communicators(ranks) -> None:
    ranks(many, 3, mccs.unique_id(), int.from_bytes(os.urandom(4), "little"))


def left_by_an_exception(comm: mccs.Communicator) -> None:
    array = np.full(4, comm.rank + 1, np.float32)
    before = comm.all_reduce(before_array := array.copy(), blocking=False)
    issued = comm.counters()
    told = threading.Event()
    with pytest.raises(KeyError), mccs.group():
        comm.all_reduce(array)
        dropped = comm.send(array, 1 - comm.rank, blocking=False)
        dropped.when_done(told.set)
        raise KeyError
    # Nothing was issued; what ran goes on, and so does the communicator.
    assert comm.counters() == issued
    assert told.is_set() and dropped.done()
    for end in (dropped.wait, lambda: mccs.wait_all([dropped])):
        with pytest.raises(mccs.InvalidUsage, match=f"^rank {comm.rank} of 2, send: .*not issued.*exception") as raised:
            end()
        assert raised.value.ends == "call"
    before.wait()
    assert (before_array == 3).all() and (array == comm.rank + 1).all()
    # A wrong argument is an exception inside.
    with pytest.raises(mccs.InvalidArgument, match=f"^rank {comm.rank} of 2, all_reduce: "), mccs.group():
        comm.all_reduce(array)
        comm.all_reduce(array, np.zeros(5, np.float32))
    # One that the program takes drops the wrong call alone.
    with mccs.group():
        comm.all_reduce(array)
        with pytest.raises(mccs.InvalidArgument):
            comm.send(array, 7)
    assert (array == 3).all()


def test_an_exception_inside_issues_nothing(ranks) -> None:
    ranks(left_by_an_exception, 2)


def broken_inside(comm: mccs.Communicator) -> None:
    array = np.ones(4, np.float32)
    with pytest.raises(mccs.InvalidUsage, match="^group: nothing was issued: .*inside"):
        with mccs.group():
            first = comm.all_reduce(array, blocking=False)
            with pytest.raises(KeyError), mccs.group():
                second = comm.all_reduce(array, blocking=False)
                raise KeyError
            third = comm.barrier(blocking=False)
    for operation in (first, second, third):
        with pytest.raises(mccs.InvalidUsage, match="not issued"):
            operation.wait()
    comm.barrier()
    assert (array == 1).all()


def test_a_group_whose_inner_group_fails_issues_nothing(ranks) -> None:
    ranks(broken_inside, 2)


def refused(comm: mccs.Communicator, other_id: str) -> None:
    other = mccs.init(other_id, comm.rank, 2)
    array = np.ones(4, np.float32)
    other.barrier()
    # A communicator that was closed inside: nothing of the others' is issued.
    with pytest.raises(mccs.InvalidArgument, match=f"^rank {comm.rank} of 2, barrier: .*closed"):
        with mccs.group():
            kept = comm.all_reduce(array, blocking=False)
            other.barrier()
            other.close()
    with pytest.raises(mccs.InvalidUsage, match=f"^rank {comm.rank} of 2, all_reduce: .*not issued"):
        kept.wait()
    group = mccs.group()
    with group:
        pass
    with pytest.raises(mccs.InvalidUsage, match="^group: .*entered before"), group:
        pass
    outer, inner = mccs.group(), mccs.group()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(mccs.InvalidUsage, match="^group: .*innermost"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    comm.all_reduce(array)
    assert (array == 2).all()


def test_groups_that_are_no_good_are_refused_and_issue_nothing(ranks) -> None:
    ranks(refused, 2, mccs.unique_id())


def too_many(rank: int, nranks: int, unique_id: str) -> None:
    """Messages beyond those that may be in flight would wait for each other."""
    comm = mccs.init(unique_id, rank, nranks)
    array = np.ones(4, np.float32)
    with pytest.raises(mccs.InvalidArgument, match=f"^rank {rank} of 2, send: .*max_operations_in_flight"):
        with mccs.group():
            for _ in range(20):
                comm.send(array, 1 - rank)
            kept = comm.barrier(blocking=False)
    with pytest.raises(mccs.InvalidUsage, match="not issued"):
        kept.wait()
    comm.all_reduce(array)
    assert (array == 2).all()


def test_a_group_of_too_many_messages_issues_nothing(folder: Path, monkeypatch) -> None:
    (folder / "few").mkdir()
    with running(folder / "few", '[[tenant]]\nname = "tests"\nmax_operations_in_flight = 16') as socket:
        monkeypatch.setenv("MCCS_SOCKET", str(socket))
        run(too_many, 2, mccs.unique_id())


def other_threads(comm: mccs.Communicator, other_id: str) -> None:
    """A group is its thread's: calls of others go out at once, and others may wait for its calls."""
    other = mccs.init(other_id, comm.rank, 2)
    array, of_group = np.ones(4, np.float32), np.ones(900_000, np.float32)
    with mccs.group():
        kept = comm.all_reduce(of_group, blocking=False)
        waiter = threading.Thread(target=kept.wait)
        waiter.start()
        thread = threading.Thread(target=other.all_reduce, args=(array,))
        thread.start()
        thread.join()
        assert (array == 2).all() and waiter.is_alive()
    waiter.join()
    assert (of_group == 2).all()


def test_a_group_is_its_threads(ranks) -> None:
    ranks(other_threads, 2, mccs.unique_id())


def tasks(comm: mccs.Communicator, other_id: str) -> None:
    """A group is its task's: other tasks of the thread make calls, and groups, between."""
    other = mccs.init(other_id, comm.rank, 2)
    arrays = [np.full(4, comm.rank + 1, np.int32) for _ in range(3)]

    async def grouped(entered: asyncio.Event, go_on: asyncio.Event) -> None:
        with mccs.group():
            kept = comm.all_reduce(arrays[0], blocking=False)
            entered.set()
            await go_on.wait()
            assert not kept.done()
        await kept

    async def main() -> None:
        entered, go_on = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(grouped(entered, go_on))
        await entered.wait()
        await other.all_reduce(arrays[1], blocking=False)
        with mccs.group():
            mine = other.all_reduce(arrays[2], blocking=False)
        await mine
        go_on.set()
        await task

    asyncio.run(main())
    assert all((array == 3).all() for array in arrays)


def test_a_group_is_its_tasks(ranks) -> None:
    ranks(tasks, 2, mccs.unique_id())


def forked(comm: mccs.Communicator) -> None:
    array = np.ones(4, np.float32)
    out, into = os.pipe()
    with mccs.group():
        comm.all_reduce(array)
        child = os.fork()
        if child == 0:
            # As a child that forgets to leave would have it.
            try:
                comm.barrier()
            except mccs.InvalidUsage as error:
                os.write(into, str(error).encode())
            os._exit(0)
        os.close(into)
        os.waitpid(child, 0)
    assert b"forked" in os.read(out, 1000)
    assert (array == 2).all()


def test_a_child_that_is_forked_inside_a_group_issues_nothing(ranks) -> None:
    ranks(forked, 2)


def test_groups_need_no_communicator(socket) -> None:
    def empty(*_: object) -> None:
        with mccs.group(), mccs.group():
            pass

    run(empty, 1)
