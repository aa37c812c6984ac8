"""Operations that are awaited in asyncio."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import mccs

#: Elements of one piece, and of several.
COUNTS = [10, 900_000]


def awaited(comm: mccs.Communicator, count: int) -> None:
    array = np.full(count, comm.rank + 1, np.float32)
    other, got = 1 - comm.rank, np.empty(count, np.float32)

    async def main() -> None:
        assert await comm.all_reduce(array, blocking=False) is None
        assert (array == 3).all()
        # All that is under way at once, messages too; each may be awaited again.
        many = [comm.all_reduce(array[at * 2 : at * 2 + 2], op="max", blocking=False) for at in range(5)]
        many += [comm.send(array, other, blocking=False), comm.recv(got, other, blocking=False)]
        await asyncio.gather(*(one(operation) for operation in many))
        for operation in many:
            assert operation.done()
            await operation
        assert (got == 3).all()

    async def one(operation: mccs.Operation) -> None:
        await operation

    asyncio.run(main())


@pytest.mark.parametrize("count", COUNTS)
def test_operations_are_awaited(ranks, count: int) -> None:
    ranks(awaited, 2, count)


def event_loop(comm: mccs.Communicator, count: int) -> None:
    """Rank 0 makes its call only when rank 1 says that its event loop has gone on meanwhile."""
    array, word = np.ones(count, np.float32), np.zeros(1, np.uint8)

    async def main() -> None:
        waiting = asyncio.create_task(one(comm.all_reduce(array, blocking=False)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        await comm.send(word, 0, blocking=False)
        await waiting

    async def one(operation: mccs.Operation) -> None:
        await operation

    if comm.rank == 0:
        comm.recv(word, 1)
        comm.all_reduce(array)
    else:
        asyncio.run(main())
    assert (array == 2).all()


@pytest.mark.parametrize("count", COUNTS)
def test_the_event_loop_goes_on_meanwhile(ranks, count: int) -> None:
    ranks(event_loop, 2, count)


def cancelled(comm: mccs.Communicator, count: int) -> None:
    array, word = np.ones(count, np.float32), np.zeros(1, np.uint8)
    if comm.rank == 1:
        comm.recv(word, 0)
        comm.all_reduce(array)
        comm.barrier()
        return

    async def one(operation: mccs.Operation) -> None:
        await operation

    async def main() -> None:
        operation = comm.all_reduce(array, blocking=False)
        task = asyncio.create_task(one(operation))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(one(operation), 0.05)
        assert not operation.done()
        # It goes on: the arrays are the operation's until it ends.
        await comm.send(word, 1, blocking=False)
        await operation
        assert (array == 2).all()

    asyncio.run(main())
    comm.barrier()


@pytest.mark.parametrize("count", COUNTS)
def test_a_task_that_is_cancelled_leaves_the_operation_alone(ranks, count: int) -> None:
    ranks(cancelled, 2, count)


def two_loops(comm: mccs.Communicator) -> None:
    """One operation is awaited in event loops of two threads, and one more loop has closed before its end."""
    array, word = np.ones(10, np.float32), np.zeros(1, np.uint8)
    if comm.rank == 1:
        comm.recv(word, 0)
        comm.all_reduce(array)
        return
    operation = comm.all_reduce(array, blocking=False)

    async def one(started: threading.Barrier | None) -> None:
        if started:
            started.wait()
        await operation

    async def given_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(one(None), 0.01)

    asyncio.run(given_up())
    started, seen = threading.Barrier(3), []

    def thread() -> None:
        asyncio.run(one(started))
        seen.append(array.copy())

    threads = [threading.Thread(target=thread) for _ in range(2)]
    for each in threads:
        each.start()
    started.wait()
    comm.send(word, 1)
    for each in threads:
        each.join()
    assert len(seen) == 2 and all((copy == 2).all() for copy in seen)


def test_two_event_loops_await_one_operation(ranks) -> None:
    ranks(two_loops, 2)


def fails(comm: mccs.Communicator, count: int) -> None:
    array = np.ones(count, np.float32)

    async def main() -> None:
        operation = comm.all_reduce(array, blocking=False)
        if comm.rank == 0:
            asyncio.get_running_loop().call_later(0.05, comm.abort)
        for _ in range(2):
            with pytest.raises(mccs.Error, match=f"^rank {comm.rank} of 2, all_reduce: ") as raised:
                await operation
            assert (raised.value.rank, raised.value.call) == (comm.rank, "all_reduce")
            assert raised.value.ends == "communicator"

    if comm.rank == 0:
        asyncio.run(main())
    else:
        with pytest.raises(mccs.Error):
            comm.recv(np.zeros(1, np.uint8), 0)


@pytest.mark.parametrize("count", COUNTS)
def test_an_operation_that_fails_raises_where_it_is_awaited(ranks, count: int) -> None:
    ranks(fails, 2, count)


def grouped(comm: mccs.Communicator) -> None:
    array = np.ones(3, np.float32)

    async def main() -> None:
        with mccs.group():
            kept = comm.all_reduce(array, blocking=False)
            with pytest.raises(mccs.InvalidUsage, match=f"^rank {comm.rank} of 2, all_reduce: .*group"):
                await kept
        await kept

    asyncio.run(main())
    assert (array == 2).all()


def test_what_a_group_keeps_is_not_awaited_inside(ranks) -> None:
    ranks(grouped, 2)
