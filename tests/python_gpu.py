#!/usr/bin/env python3
"""The Python package on GPUs: arrays of CuPy and PyTorch, each as far as it is installed; one process a GPU. Every result is
compared with what it must be.

usage: python_gpu.py NRANKS [SOCKET ...], with MCCS_SOCKET the service; or with the sockets of several services, which get as many
ranks each. The package mccs is installed, or in PYTHONPATH, with GPU kernels"""

import faulthandler
import multiprocessing
import os
import re
import sys
from pathlib import Path

import numpy as np

import mccs

# Processes that still run then say where they stand.
WATCHDOG_S = 240
SIZES = (0, 1, 1000, 262_147, 3_000_000)
TYPES = ("float32", "float16", "int64", "uint8")


def rows(seed, nranks, count, dtype):
    return np.random.default_rng([seed, count]).integers(0, 5, (nranks, count)).astype(dtype)


class WithCupy:
    name = "CuPy"

    def __init__(self, device):
        import cupy

        self.library, self.device = cupy, cupy.cuda.Device(device)
        self.device.use()

    def new(self, content):
        return self.library.asarray(content)

    def get(self, array):
        return array.get()

    def stream(self):
        return self.library.cuda.Stream(non_blocking=True)

    def on(self, stream):
        return stream

    def busy(self):
        """Work of several milliseconds, and its result."""
        return self.library.ones((4096, 4096), "float32") @ self.library.ones((4096, 4096), "float32")


class WithTorch:
    name = "PyTorch"

    def __init__(self, device):
        import torch

        self.library, self.device = torch, device
        torch.cuda.set_device(device)

    def new(self, content):
        return self.library.from_numpy(np.ascontiguousarray(content)).to(f"cuda:{self.device}")

    def get(self, array):
        return array.cpu().numpy()

    def stream(self):
        return self.library.cuda.Stream()

    def on(self, stream):
        return self.library.cuda.stream(stream)

    def busy(self):
        return self.library.ones((4096, 4096), device=self.device) @ self.library.ones((4096, 4096), device=self.device)


class ByInterface:
    """An array of a library's, by its `__cuda_array_interface__` alone."""

    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


def check(what, actual, expected):
    wrong = int((actual != expected).sum())
    if wrong or actual.shape != expected.shape:
        raise SystemExit(f"{what}: {wrong} wrong elements of {expected.size}")


def collectives(comm, gpu, seed, stream):
    """Every call, blocking and not, on a stream of the caller's or the communicator's own."""
    rank, n = comm.rank, comm.nranks
    for dtype in TYPES:
        for count in SIZES:
            what = f"{gpu.name}, {dtype} x {count}, {'a given' if stream else 'the own'} stream"
            every = rows(seed, n, n * count, dtype)
            own, whole = gpu.new(every[rank][:count]), gpu.new(every[rank])
            new = lambda length: gpu.new(np.full(length, 77, dtype))  # noqa: B023,E731
            reduced, gathered, exchanged, part = new(count), new(n * count), new(n * count), new(count)
            told, at_root, passed = gpu.new(every[rank][:count]), new(n * count), new(count)
            calls = [
                comm.all_reduce(own, reduced, blocking=False, stream=stream),
                comm.all_gather(own, gathered, blocking=False, stream=stream),
                comm.all_to_all(whole, exchanged, blocking=False, stream=stream),
                comm.reduce_scatter(whole, part, "max", blocking=False, stream=stream),
                comm.broadcast(told, n - 1, blocking=False, stream=stream),
                comm.gather(own, at_root, blocking=False, stream=stream),
            ]
            mccs.wait_all(calls, timeout=WATCHDOG_S)
            with mccs.group():
                comm.send(own, (rank + 1) % n, stream=stream)
                comm.recv(passed, (rank - 1) % n, stream=stream)
            first = every[:, :count]
            check(f"{what}, all_reduce", gpu.get(reduced), first.sum(0, dtype=dtype))
            check(f"{what}, all_gather", gpu.get(gathered), first.reshape(-1))
            check(f"{what}, all_to_all", gpu.get(exchanged), every[:, rank * count : (rank + 1) * count].reshape(-1))
            check(f"{what}, reduce_scatter", gpu.get(part), every[:, rank * count : (rank + 1) * count].max(0, initial=0))
            check(f"{what}, broadcast", gpu.get(told), first[n - 1])
            check(f"{what}, send and recv", gpu.get(passed), first[(rank - 1) % n])
            if rank == 0:
                check(f"{what}, gather", gpu.get(at_root), first.reshape(-1))
            comm.all_reduce(ByInterface(own), op="min", stream=stream)
            check(f"{what}, by __cuda_array_interface__", gpu.get(own), first.min(0))


def in_order(comm, gpu):
    """A call comes behind what makes its array, and before what is enqueued on its stream later."""
    for round_number in range(20):
        for is_given in (True, False):
            stream = gpu.stream()
            with gpu.on(stream):
                product = gpu.busy()
                array = product[0] * (comm.rank + round_number)
                operation = comm.all_reduce(array, blocking=False, stream=stream if is_given else None)
                if not is_given:
                    operation.wait(WATCHDOG_S)
                doubled = array * 2
            stream.synchronize()
            operation.wait(WATCHDOG_S)
            wanted = 2 * 4096 * sum(rank + round_number for rank in range(comm.nranks))
            check(f"{gpu.name}, order of streams", gpu.get(doubled), np.full(4096, wanted, np.float32))


def dropped(comm, gpu):
    """Arrays that the program forgets stay until the call has ended: their memory is given to nobody else."""
    for _ in range(50):
        stream = gpu.stream()
        with gpu.on(stream):
            product = gpu.busy()
            out = gpu.new(np.zeros(1 << 20, np.float32))
            sent = gpu.new(np.ones(1 << 20, np.float32)) * product[0, 0]
            operation = comm.all_reduce(sent, out, blocking=False, stream=stream)
        del sent, product
        gpu.new(np.full(1 << 20, 13, np.float32))
        operation.wait(WATCHDOG_S)
        check(f"{gpu.name}, arrays that are forgotten", gpu.get(out), np.full(1 << 20, 4096 * comm.nranks, np.float32))


def refused(comm, gpu):
    good = gpu.new(np.ones((4, 4), np.float32))
    cases = [np.ones(4, np.float32), good.T]
    if comm.nranks > 1 and gpu.name == "PyTorch":
        cases.append(good.to(f"cuda:{(comm.device + 1) % gpu.library.cuda.device_count()}"))
    for array in cases:
        try:
            comm.all_reduce(array)
        except mccs.InvalidArgument as error:
            if (error.rank, error.call) != (comm.rank, "all_reduce"):
                raise SystemExit(f"{gpu.name}: of whom is this? {error}") from error
        else:
            raise SystemExit(f"{gpu.name}: an array that is wrong was not refused")


def recipe(rank, nranks, unique_id):
    page = (Path(__file__).parents[1] / "docs" / "PYTHON_RECIPES.md").read_text()
    [snippet] = re.findall(r"^## GPUs\n.*?^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(snippet, "PYTHON_RECIPES.md", "exec"), {"unique_id": unique_id, "rank": rank, "nranks": nranks})


def of_rank(rank, nranks, libraries, ids, root_address, socket, seed):
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    os.environ["MCCS_SOCKET"] = socket
    for library in libraries:
        gpu = library(rank)
        with mccs.init(ids[library.name], rank, nranks, root_address=root_address, device=rank) as comm:
            for stream in (None, gpu.stream()):
                collectives(comm, gpu, seed, stream)
            in_order(comm, gpu)
            dropped(comm, gpu)
            refused(comm, gpu)
    if WithCupy in libraries:
        os.environ["MCCS_ROOT_ADDRESS"] = root_address or ""
        recipe(rank, nranks, ids["recipe"])


def is_there(library):
    try:
        __import__({"CuPy": "cupy", "PyTorch": "torch"}[library.name])
    except ImportError as error:
        print(f"{library.name}: not run: {error}")
        return False
    return True


def main():
    nranks = int(sys.argv[1])
    sockets = sys.argv[2:] or [os.environ["MCCS_SOCKET"]]
    libraries = [library for library in (WithCupy, WithTorch) if is_there(library)]
    if not libraries:
        raise SystemExit("neither CuPy nor PyTorch is here")
    ids = {name: mccs.unique_id() for name in ("CuPy", "PyTorch", "recipe")}
    root_address = mccs.connect(sockets[0]).root_address if len(sockets) > 1 else None
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    # Not forked: CUDA does not go on in a child.
    processes = multiprocessing.get_context("spawn")
    ranks = []
    for rank in range(nranks):
        socket = sockets[rank * len(sockets) // nranks]
        ranks.append(processes.Process(target=of_rank, args=(rank, nranks, libraries, ids, root_address, socket, seed)))
        ranks[-1].start()
    for rank in ranks:
        rank.join(2 * WATCHDOG_S)
    failed = [number for number, rank in enumerate(ranks) if rank.exitcode != 0]
    for rank in ranks:
        rank.kill()
    if failed:
        raise SystemExit(f"ranks {failed} failed")
    print(f"{nranks} ranks, arrays of {' and '.join(library.name for library in libraries)}: every result is right")


if __name__ == "__main__":
    main()
