"""Any mixture of calls, waits and groups, each rank at its own pace, gives the same results."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mccs
from conftest import run

STEPS = 60
#: Elements. Some programs have rounds of the ranks' own alone; others also the service's calls, and calls of several pieces.
COUNTS = [[1, 10], [1, 10, 500, 3_000, 40_000, 300_000]]
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "messages", "messages", "barrier"]


def values(seed: int, step: int, rank: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, step, rank]).integers(0, 100, count).astype(np.int32)


class Call:
    """A step of the program: its arrays on this rank, and what they are to have at its end."""

    def __init__(self, seed: int, step: int, kind: str, count: int, comm: mccs.Communicator) -> None:
        self.kind, self.step, self.root, n, me = kind, step, step % comm.nranks, comm.nranks, comm.rank
        parts = n if kind in ("reduce_scatter", "all_to_all") else 1
        every = [values(seed, step, rank, parts * count) for rank in range(n)]
        self.send, self.recv = every[me].copy(), np.full(count, -1, np.int32)
        if kind == "all_reduce":
            self.expected = sum(every)
        elif kind == "all_gather":
            self.recv, self.expected = np.full(n * count, -1, np.int32), np.concatenate(every)
        elif kind == "reduce_scatter":
            self.expected = sum(every)[me * count:][:count]
        elif kind == "broadcast":
            self.recv, self.expected = self.send, every[self.root]
        elif kind == "all_to_all":
            self.recv, self.expected = np.full(n * count, -1, np.int32), np.concatenate([of[me * count:][:count] for of in every])
        elif kind == "messages":
            self.expected = every[(me - 1) % n]
        else:
            self.expected = self.recv.copy()
        self.before, self.after = (me - 1) % n, (me + 1) % n

    def make(self, comm: mccs.Communicator, is_blocking: bool, has_group: bool) -> list[mccs.Operation]:
        """Makes it, and returns what goes on."""
        if self.kind == "messages":
            if has_group:
                with mccs.group():
                    comm.send(self.send, self.after)
                    comm.recv(self.recv, self.before)
                return []
            return [comm.send(self.send, self.after, blocking=False), comm.recv(self.recv, self.before, blocking=False)]
        method = getattr(comm, self.kind)
        arguments = {"barrier": [], "broadcast": [self.send, self.root]}.get(self.kind, [self.send, self.recv])
        operation = method(*arguments, blocking=is_blocking)
        return [] if operation is None else [operation]

    def check(self) -> None:
        np.testing.assert_array_equal(self.recv, self.expected, f"step {self.step}, {self.kind} of {len(self.send)}")


def mixture(comm: mccs.Communicator, seed: int) -> None:
    program, pace = random.Random(seed), random.Random(seed * 100 + comm.rank)
    made, pending, counts = [], [], program.choice(COUNTS)
    for step in range(STEPS):
        call = Call(seed, step, program.choice(KINDS), program.choice(counts), comm)
        # A rank that waits for messages of a later call of another's keeps it from making that.
        has_group = program.random() < 0.3
        made.append(call)
        pending += call.make(comm, pace.random() < 0.2 and call.kind != "messages", has_group)
        looks = pace.randrange(6)
        if looks == 0 and pending:
            pending.pop(pace.randrange(len(pending))).wait()
        elif looks == 1:
            pending = [operation for operation in pending if not operation.done()]
        elif looks == 2:
            os.sched_yield()
        elif looks == 3:
            mccs.wait_all(pending)
            pending.clear()
    mccs.wait_all(pending)
    for call in made:
        call.check()


@pytest.fixture
def seed() -> int:
    """``MCCS_SEED`` repeats a test."""
    seed = int(os.environ.get("MCCS_SEED") or int.from_bytes(os.urandom(3), "little"))
    print(f"MCCS_SEED={seed}")
    return seed


@pytest.mark.parametrize("nranks", [2, 3])
def test_any_mixture_gives_the_same_results(ranks: Callable, nranks: int, seed: int) -> None:
    ranks(mixture, nranks, seed)


def of_two_hosts(rank: int, nranks: int, unique_id: str, sockets: list[Path], seed: int) -> None:
    root_address = mccs.Session(sockets[0]).root_address
    session = mccs.Session(sockets[rank % 2])
    with mccs.Communicator(session, unique_id, rank, nranks, root_address=root_address) as comm:
        mixture(comm, seed)


def test_any_mixture_gives_the_same_results_on_two_hosts(two_hosts: list[Path], seed: int) -> None:
    run(of_two_hosts, 3, mccs.unique_id(), two_hosts, seed)
