#!/usr/bin/env python3
"""Compares mccs with its peers, and with what the host's memory can do: all sides in one run, in turn, several rounds.

usage: compare.py PEERS_FOLDER NAME [--rounds N] [--nranks 2,4] [--operations ...] [--begin BYTES --end BYTES --factor F]

PEERS_FOLDER is what install.sh made. Build mccs first (cargo build --release --workspace). Writes eval/results/NAME.json
(data and provenance) and NAME.md (a table), anew after every operation."""

import argparse
import os
import pathlib
import secrets
import statistics
import subprocess
import sys
import tempfile

BASELINES = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(BASELINES.parent))

import bench  # noqa: E402
from bench import records, run  # noqa: E402

# Bounds that need no service: the least time for the same accesses to memory of the same kind, and
# to memory in huge pages.
FLOOR, HUGE_FLOOR = "floor", "floor, huge pages"


def ranks(command, nranks, environment):
    """Starts a process a rank; returns what rank 0 printed."""
    processes = [
        subprocess.Popen(command, env={**os.environ, **environment(rank)}, text=True,
                         stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=subprocess.PIPE)
        for rank in range(nranks)
    ]
    outputs = [process.communicate(timeout=600) for process in processes]
    for process, (_, errors) in zip(processes, outputs):
        if process.returncode != 0:
            raise bench.failure(command, errors)
    return outputs[0][0]


def sizes(arguments):
    """Arguments of mccs' own programs."""
    op, begin, end, factor, iterations, warmup = arguments
    return ["--begin", f"{begin}B", "--end", f"{end}B", "--factor", str(factor), "--iterations", str(iterations)]


def is_in_place(op):
    """A broadcast of MPI's and Gloo's is in place by nature: one buffer a rank. So it is here."""
    return op == "broadcast" or op.endswith("_in_place")


def mccs(arguments, nranks):
    op, *_, warmup = arguments
    with bench.service('max_memory = "16GiB"') as (_, folder):
        unique_id = secrets.token_hex(16)
        command = [bench.BINARIES / "mccs-perf", "--json", "--operation", op.removesuffix("_in_place"), *sizes(arguments),
                   "--warmup", str(warmup)]
        output = ranks(command, nranks, lambda rank: {
            "MCCS_SOCKET": f"{folder}/mccs.sock", "MCCS_RANK": str(rank), "MCCS_NRANKS": str(nranks),
            "MCCS_UNIQUE_ID": unique_id})
    return [r for r in records(output) if r["in_place"] == is_in_place(op)]


def floor(memory):
    def side(arguments, nranks):
        op = arguments[0].removesuffix("_in_place") + ("_in_place" if is_in_place(arguments[0]) else "")
        return records(run([bench.BINARIES / "mccs-floor", "--memory", memory, "--operation", op, "--nranks", str(nranks),
                            *sizes(arguments)]))

    return side


def sides(peers):
    mpi = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ring = ["--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "5",
            "--mca", "coll_tuned_allreduce_algorithm_segmentsize", "1048576"]

    def openmpi(extra):
        return lambda arguments, nranks: records(run(
            ["/usr/bin/mpirun", "--oversubscribe", *extra, "-n", str(nranks), peers / "bench_openmpi", *map(str, arguments)], mpi))

    def impi(arguments, nranks):
        environment = {"I_MPI_FABRICS": "shm", "I_MPI_ROOT": str(peers), "PATH": f"{peers}/bin:{os.environ['PATH']}"}
        return records(run([peers / "bin" / "mpiexec.hydra", "-n", str(nranks), peers / "bench_impi", *map(str, arguments)], environment))

    def gloo(arguments, nranks):
        with tempfile.TemporaryDirectory() as folder:
            return records(ranks(["/usr/bin/python3", BASELINES / "gloo_bench.py", *map(str, arguments)], nranks, lambda rank: {
                "RANK": str(rank), "WORLD_SIZE": str(nranks), "GLOO_STORE": f"{folder}/store", "GLOO_SOCKET_IFNAME": "lo"}))

    return {"mccs": mccs, "openmpi": openmpi([]), "openmpi ring": openmpi(ring), "intel mpi": impi, "gloo": gloo,
            FLOOR: floor("memfd"), HUGE_FLOOR: floor("huge")}


def versions(peers):
    def text(*command):
        return run(list(command)).strip()

    return {
        "openmpi": text("/usr/bin/mpirun", "--version").splitlines()[0],
        "intel mpi": text(str(peers / "bin" / "pip"), "show", "impi-rt").splitlines()[1],
        "gloo": "torch " + text("/usr/bin/python3", "-c", "import torch; print(torch.__version__)"),
    }


def summary(nranks, op, size, by_side):
    """Medians over rounds. Ratios are of p50, and absent where a side of theirs is."""
    p50 = {side: statistics.median(r["p50_us"] for r in found) for side, found in by_side.items()}
    spread = {side: [min(r["p50_us"] for r in found), max(r["p50_us"] for r in found)] for side, found in by_side.items()}
    p99 = {side: statistics.median(r["p99_us"] for r in found) for side, found in by_side.items()}
    row = {"nranks": nranks, "op": op, "bytes": size, "p50_us": p50, "p50_spread_us": spread, "p99_us": p99}
    peers = [(time, side) for side, time in p50.items() if side not in ("mccs", FLOOR, HUGE_FLOOR)]
    if peers and "mccs" in p50:
        row |= {"best_peer": min(peers)[1], "times_faster_than_best_peer": min(peers)[0] / p50["mccs"]}
    if FLOOR in p50 and "mccs" in p50:
        row |= {"times_the_floor": p50["mccs"] / p50[FLOOR], "floor_ways": sorted({r["variant"] for r in by_side[FLOOR]})}
    return row


def table(contenders, rows):
    def against_best(row):
        return f"{row['times_faster_than_best_peer']:.2f}x ({row['best_peer']})" if "best_peer" in row else "-"

    def against_floor(row):
        return f"{row['times_the_floor']:.2f}" if "times_the_floor" in row else "-"

    def time(us):
        return "-" if us is None else f"{us:.{2 if us < 10 else 1}f}"

    heads = ["ranks", "operation", "bytes", *contenders, "mccs against the best", "mccs against the floor"]
    return bench.table(heads, [
        [row["nranks"], row["op"], row["bytes"],
         *(time(row["p50_us"].get(side)) for side in contenders),
         against_best(row), against_floor(row)] for row in rows])


def report(options, contenders, times, failures):
    """Writes what has been measured so far."""
    rows = [summary(*key, by_side) for key, by_side in times.items()]
    data = {"provenance": bench.provenance(options.versions), "rounds": options.rounds, "rows": rows, "failures": failures}
    bench.write_results(options.name, data, (
        f"Time of a whole call in microseconds, slowest rank, float; median of {options.rounds} rounds (spread in the JSON file).\n"
        "Floor: the least time in which all cores can read the inputs once and write the outputs once, without a service,\n"
        "queues or other processes; of memory as the service has it, and of memory in huge pages.\n"
        "Last columns: how many times faster mccs is than the best peer, and how many times the floor it takes.\n\n"
        + table(contenders, rows)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("peers", type=pathlib.Path)
    parser.add_argument("name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nranks", default="2,4")
    parser.add_argument("--operations", default="all_reduce,all_reduce_in_place,all_gather,reduce_scatter,broadcast")
    parser.add_argument("--begin", type=int, default=1 << 20)
    parser.add_argument("--end", type=int, default=256 << 20)
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    options = parser.parse_args()
    peers = options.peers.resolve()
    options.versions, contenders = versions(peers), sides(peers)
    times, failures = {}, []
    for nranks in map(int, options.nranks.split(",")):
        for op in options.operations.split(","):
            for number in range(options.rounds):
                for side in bench.in_turn(contenders, number):
                    if side == "openmpi ring" and not op.startswith("all_reduce") or side == "gloo" and op == "reduce_scatter":
                        continue
                    try:
                        arguments = (op, options.begin, options.end, options.factor, options.iterations, options.warmup)
                        for record in contenders[side](arguments, nranks):
                            times.setdefault((nranks, op, record["bytes"]), {}).setdefault(side, []).append(record)
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        failures.append(bench.without_folders(f"{side}, {op}, {nranks} ranks: {error}"))
                        print(failures[-1], file=sys.stderr)
            report(options, contenders, times, failures)


main()
