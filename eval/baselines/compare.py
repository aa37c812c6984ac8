#!/usr/bin/env python3
"""Compares mccs with its peers: all sides in one run, in turn, several rounds.

usage: compare.py PEERS_FOLDER NAME [--rounds N] [--nranks 2,4] [--operations ...] [--begin BYTES --end BYTES --factor F]

PEERS_FOLDER is what install.sh made. Build mccs first (cargo build --release --workspace). Writes eval/results/NAME.json
(data and provenance) and NAME.md (a table)."""

import argparse
import json
import os
import pathlib
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASELINES = ROOT / "eval" / "baselines"


def run(command, environment=None, timeout=600):
    done = subprocess.run(command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, timeout=timeout)
    if done.returncode != 0:
        raise RuntimeError(f"{command} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def records(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def ranks(command, nranks, environment):
    """Starts a process a rank; returns what rank 0 printed."""
    processes = [
        subprocess.Popen(command, env={**os.environ, **environment(rank)}, text=True,
                         stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=subprocess.PIPE)
        for rank in range(nranks)
    ]
    output = processes[0].communicate(timeout=600)[0]
    for process in processes:
        if process.wait(timeout=600) != 0:
            raise RuntimeError(f"{command} failed:\n{process.stderr.read()}")
    return output


def mccs(arguments, nranks):
    op, *numbers = arguments
    begin, end, factor, iterations, warmup = numbers
    binaries = ROOT / "target" / "release"
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "service.toml"
        config.write_text(f'[service]\nruntime_dir = "{folder}"\n[[tenant]]\nname = "eval"\nmax_memory = "16GiB"\n')
        service = subprocess.Popen([binaries / "mccs-service", "--config", config], stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, text=True)
        try:
            assert service.stdout.readline() == "mccs-service ready\n"
            unique_id = secrets.token_hex(16)
            command = [binaries / "mccs-perf", "--json", "--operation", op.removesuffix("_in_place"), "--begin", f"{begin}B",
                       "--end", f"{end}B", "--factor", str(factor), "--iterations", str(iterations), "--warmup", str(warmup)]
            output = ranks(command, nranks, lambda rank: {
                "MCCS_SOCKET": f"{folder}/mccs.sock", "MCCS_RANK": str(rank), "MCCS_NRANKS": str(nranks),
                "MCCS_UNIQUE_ID": unique_id})
        finally:
            service.terminate()
            service.wait(timeout=60)
    return [r for r in records(output) if r["in_place"] == op.endswith("_in_place")]


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

    return {"mccs": mccs, "openmpi": openmpi([]), "openmpi ring": openmpi(ring), "intel mpi": impi, "gloo": gloo}


def provenance(peers, arguments):
    def text(*command):
        return run(list(command)).strip()

    cpu = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    return {
        "commit": text("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "machine": {"cpu": cpu, "cores": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()},
        "versions": {
            "openmpi": text("/usr/bin/mpirun", "--version").splitlines()[0],
            "intel mpi": text(str(peers / "bin" / "pip"), "show", "impi-rt").splitlines()[1],
            "gloo": "torch " + text("/usr/bin/python3", "-c", "import torch; print(torch.__version__)"),
        },
        "command": " ".join(["compare.py", "PEERS", *arguments[2:]]),
    }


def report(options, contenders, times, failures):
    """Writes what has been measured so far."""
    rows = []
    for (nranks, op, size), by_side in times.items():
        p50 = {side: statistics.median(r["p50_us"] for r in found) for side, found in by_side.items()}
        spread = {side: [min(r["p50_us"] for r in found), max(r["p50_us"] for r in found)] for side, found in by_side.items()}
        p99 = {side: statistics.median(r["p99_us"] for r in found) for side, found in by_side.items()}
        best = min((time, side) for side, time in p50.items() if side != "mccs")
        rows.append({"nranks": nranks, "op": op, "bytes": size, "p50_us": p50, "p50_spread_us": spread, "p99_us": p99,
                     "best_peer": best[1], "times_faster_than_best_peer": best[0] / p50["mccs"]})
    results = ROOT / "eval" / "results"
    data = {"provenance": provenance(options.peers, sys.argv), "rounds": options.rounds, "rows": rows, "failures": failures}
    (results / f"{options.name}.json").write_text(json.dumps(data, indent=1) + "\n")
    with open(results / f"{options.name}.md", "w") as table:
        table.write(f"Time of a whole call in microseconds, slowest rank, float; median of {options.rounds} rounds (spread in the JSON file).\n"
                    "Last column: how many times faster mccs is than the best peer.\n\n")
        names = list(contenders)
        table.write("| ranks | operation | bytes | " + " | ".join(names) + " | mccs against the best |\n")
        table.write("| --- " * (len(names) + 4) + "|\n")
        for row in rows:
            cells = [f"{row['p50_us'][side]:.1f}" if side in row["p50_us"] else "-" for side in names]
            table.write(f"| {row['nranks']} | {row['op']} | {row['bytes']} | " + " | ".join(cells)
                        + f" | {row['times_faster_than_best_peer']:.2f}x ({row['best_peer']}) |\n")


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
    contenders = sides(options.peers.resolve())
    times, failures = {}, []
    for nranks in map(int, options.nranks.split(",")):
        for op in options.operations.split(","):
            for number in range(options.rounds):
                # Another side begins each round, so that none always follows the same one.
                order = list(contenders)[number % len(contenders):] + list(contenders)[:number % len(contenders)]
                for side in order:
                    if side == "openmpi ring" and not op.startswith("all_reduce") or side == "gloo" and op == "reduce_scatter":
                        continue
                    try:
                        arguments = (op, options.begin, options.end, options.factor, options.iterations, options.warmup)
                        for record in contenders[side](arguments, nranks):
                            times.setdefault((nranks, op, record["bytes"]), {}).setdefault(side, []).append(record)
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        failures.append(f"{side}, {op}, {nranks} ranks: {error}")
                        print(failures[-1], file=sys.stderr)
            report(options, contenders, times, failures)


main()
