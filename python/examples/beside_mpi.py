#!/usr/bin/env python3
"""A program of mpi4py's that stays one, but for the collective that takes its time: `mpiexec -n 2 beside_mpi.py`.

Ranks fit a logistic regression to rows that each has alone. The sum of their gradients was `MPI.COMM_WORLD.Allreduce`.
"""

import mccs
import numpy
from mpi4py import MPI

ROWS, FEATURES, STEPS = 2_000, 500, 30


def communicator(mpi: MPI.Comm) -> mccs.Communicator:
    """The same ranks as MPI's. Rank 0 says where the others find it, if they are on other hosts."""
    own = (mccs.unique_id(), mccs.session().root_address) if mpi.rank == 0 else None
    unique_id, root_address = mpi.bcast(own)
    return mccs.init(unique_id, mpi.rank, mpi.size, root_address=root_address)


def main() -> None:
    mpi = MPI.COMM_WORLD
    comm = communicator(mpi)
    random = numpy.random.default_rng(mpi.rank)
    rows = random.standard_normal((ROWS, FEATURES))
    labels = (rows @ numpy.arange(-FEATURES // 2, FEATURES // 2) > 0).astype(float)

    weights, gradient = numpy.zeros(FEATURES), numpy.empty(FEATURES)
    for _ in range(STEPS):
        guesses = 1 / (1 + numpy.exp(-rows @ weights))
        numpy.matmul(rows.T, guesses - labels, out=gradient)
        # mpi.Allreduce(MPI.IN_PLACE, gradient, op=MPI.SUM)
        comm.all_reduce(gradient, op="sum")
        weights -= gradient / (ROWS * mpi.size)

    # Rare operations stay MPI's.
    right = mpi.allreduce(int((((rows @ weights) > 0) == labels).sum()))
    every = mpi.gather(weights.tobytes())
    if every is not None:
        assert len(set(every)) == 1, "ranks have different weights"
        print(f"{mpi.size} ranks agree: {right / (ROWS * mpi.size):.1%} of the rows are on their side")


if __name__ == "__main__":
    main()
