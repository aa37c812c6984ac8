#!/usr/bin/env python3
"""CuPy on mccs: its own binding of NCCL, a thread a GPU, checked against NumPy.

usage: cupy_collectives.py NRANKS, with LD_PRELOAD naming our libnccl.so.2 and MCCS_SOCKET the service"""

import sys
import threading

import cupy
import numpy as np
from cupy.cuda import nccl

SIZES = (1, 1000, 262_147, 3_000_000)
TYPES = {np.float32: nccl.NCCL_FLOAT32, np.float64: nccl.NCCL_FLOAT64, np.int64: nccl.NCCL_INT64}


def rows(nranks, size, dtype):
    return np.random.default_rng(size).integers(-5, 6, (nranks, size)).astype(dtype)


def check(what, actual, expected):
    wrong = int((actual.get() != expected).sum())
    if wrong:
        raise ValueError(f"{what}: {wrong} wrong elements of {expected.size}")


def of_rank(communicator, rank, nranks, size, dtype):
    """Every call of the binding once."""
    all_rows, kind, stream = rows(nranks, size, dtype), TYPES[dtype], cupy.cuda.Stream(non_blocking=True)
    with stream:
        own = cupy.asarray(all_rows[rank])
        whole = cupy.asarray(np.tile(all_rows[rank], nranks))
        summed = cupy.full(size, 77, dtype)
        communicator.allReduce(own.data.ptr, summed.data.ptr, size, kind, nccl.NCCL_SUM, stream.ptr)
        gathered = cupy.full(nranks * size, 77, dtype)
        communicator.allGather(own.data.ptr, gathered.data.ptr, size, kind, stream.ptr)
        scattered = cupy.full(size, 77, dtype)
        communicator.reduceScatter(whole.data.ptr, scattered.data.ptr, size, kind, nccl.NCCL_MAX, stream.ptr)
        told = cupy.asarray(all_rows[rank])
        communicator.broadcast(told.data.ptr, told.data.ptr, size, kind, nranks - 1, stream.ptr)
        at_root = cupy.full(size, 77, dtype)
        communicator.reduce(own.data.ptr, at_root.data.ptr, size, kind, nccl.NCCL_SUM, 0, stream.ptr)
        passed = cupy.full(size, 77, dtype)
        nccl.groupStart()
        communicator.send(own.data.ptr, size, kind, (rank + 1) % nranks, stream.ptr)
        communicator.recv(passed.data.ptr, size, kind, (rank - 1) % nranks, stream.ptr)
        nccl.groupEnd()
    stream.synchronize()
    check("all-reduce", summed, all_rows.sum(0))
    check("all-gather", gathered, all_rows.reshape(-1))
    check("reduce-scatter", scattered, all_rows.max(0))
    check("broadcast", told, all_rows[nranks - 1])
    check("send and receive", passed, all_rows[(rank - 1) % nranks])
    if rank == 0:
        check("reduce", at_root, all_rows.sum(0))


def worker(rank, nranks, name, failures):
    try:
        with cupy.cuda.Device(rank):
            communicator = nccl.NcclCommunicator(nranks, name, rank)
            for dtype in TYPES:
                for size in SIZES:
                    of_rank(communicator, rank, nranks, size, dtype)
            communicator.destroy()
    except Exception as error:  # noqa: BLE001: told by the main thread
        failures.append(f"rank {rank}: {error}")


def main(nranks):
    failures, name = [], nccl.get_unique_id()
    threads = [threading.Thread(target=worker, args=(rank, nranks, name, failures), daemon=True) for rank in range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit("CuPy: " + "; ".join(failures))
    print(f"CuPy: every call of {nranks} threads is right, with {len(TYPES)} types and {len(SIZES)} sizes")


if __name__ == "__main__":
    main(int(sys.argv[1]))
