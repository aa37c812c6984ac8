#!/usr/bin/env python3
"""A program of mpi4py's, with mccs in MPI's place: ranks average what each has computed.

Each former line stands above the one that takes its place. `mccs-launch`, or whoever starts the ranks, sets MCCS_RANK, MCCS_NRANKS and
MCCS_UNIQUE_ID.
"""

import numpy

# from mpi4py import MPI
import mccs


def main() -> None:
    # comm = MPI.COMM_WORLD
    comm = mccs.init()

    # rank, size = comm.Get_rank(), comm.Get_size()
    rank, size = comm.rank, comm.nranks

    field = numpy.random.default_rng(rank).random(100_000)
    mean = numpy.empty_like(field)

    # comm.Allreduce(field, mean, op=MPI.SUM)
    comm.all_reduce(field, mean, "sum")
    mean /= size

    every = numpy.empty((size, 2))
    own = numpy.array([mean.min(), mean.max()])

    # comm.Allgather(own, every)
    comm.all_gather(own, every)
    assert (every == own).all()

    # comm.Barrier()
    comm.barrier()
    if rank == 0:
        print(f"{size} ranks agree: values from {own[0]:.3f} to {own[1]:.3f}")


if __name__ == "__main__":
    main()
