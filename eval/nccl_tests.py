#!/usr/bin/env python3
"""nccl-tests' programs on mccs and on NCCL, by turns: with a process a GPU, and with a thread a GPU.

usage: nccl_tests.py NAME --nranks N --nccl FILE [--threads FOLDER] [--processes FOLDER] [--collectives LIST] [--rounds N]

Each program runs on mccs, on NCCL, and on NCCL with symmetric windows (`-R 2`); another side begins each round. A time is the median
of all rounds, out of place. mccs' elements are checked in its first round; wrong ones fail the run.

Needs N GPUs and nccl-tests, built without MPI for --threads, with it (and mpirun) for --processes. Writes NAME.json (data and
provenance) and NAME.md after each collective. Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import bench
from cuda import machine_of, version_of
from cuda_service import BINARIES, services

COLLECTIVES = "all_reduce,reduce,reduce_scatter,all_gather,alltoall,broadcast,sendrecv"
# Bytes, factor of the next one.
FROM, TO, FACTOR = "8", "512M", "4"
MCCS, PLAIN, WINDOWS = "mccs", "NCCL", "NCCL, windows"
SIDES = (MCCS, PLAIN, WINDOWS)


def times_of(output):
    """Out of place, by bytes: microseconds, and how many elements were wrong (None where they were not checked)."""
    found = {}
    for line in output.splitlines():
        fields = line.split()
        if len(fields) >= 9 and fields[0].isdigit() and fields[1].isdigit():
            # From the end, since programs without an operation or a root leave fields out: in
            # place, then out of place.
            time_us, wrong = float(fields[-8]), fields[-5]
            if int(fields[0]):
                found[int(fields[0])] = time_us, None if wrong == "N/A" else int(wrong)
    return found


class Runner:
    """Runs one program on one side."""
    def __init__(self, options, socket):
        self.options = options
        self.environments = {MCCS: {"LD_PRELOAD": str(BINARIES / "libnccl.so.2"), "MCCS_SOCKET": socket},
                             PLAIN: {"LD_PRELOAD": options.nccl, "NCCL_NVLS_ENABLE": "0"}}
        self.environments[WINDOWS] = self.environments[PLAIN]

    def run(self, ranks, collective, side, check):
        options = self.options
        program = pathlib.Path(options.threads if ranks == "threads" else options.processes) / f"{collective}_perf"
        launch = [] if ranks == "threads" else ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", options.nranks]
        arguments = ["-t", options.nranks if ranks == "threads" else 1, "-g", 1, "-b", options.begin, "-e", options.end, "-f", FACTOR,
                     "-n", options.calls, "-w", 5, "-c", int(check), *(["-R", 2] if side == WINDOWS else [])]
        output = bench.run([*map(str, [*launch, program, *arguments])], self.environments[side], options.timeout)
        times = times_of(output)
        if not times:
            raise bench.failure([program, side], output)
        wrong = {size: count for size, (_, count) in times.items() if count}
        if wrong:
            raise RuntimeError(f"{side}, {ranks}, {collective}: wrong elements, by bytes: {wrong}")
        return {size: time_us for size, (time_us, _) in times.items()}


def rows_of(places):
    """A row a place: medians by side, and the better NCCL's time by mccs'."""
    rows = []
    for place in places:
        medians = {side: statistics.median(times) for side, times in place["times_us"].items()}
        ratio = min(medians[side] for side in medians if side != MCCS) / medians[MCCS]
        rows.append((place["ranks"], place["operation"], place["bytes"], *(medians.get(side) for side in SIDES), ratio))
    return rows


def text_of(about, places):
    rows = rows_of(places)
    ahead = sum(row[-1] >= 1 for row in rows)
    least = min(rows, key=lambda row: row[-1])
    cells = [[*row[:3], *("-" if time is None else f"{time:.1f}" for time in row[3:6]), f"{row[6]:.2f}"] for row in rows]
    return (f"nccl-tests beside NCCL {about['nccl']} on {about['machine']}; commit {about['commit']}. Medians of {about['rounds']} rounds of\n"
            f"{about['calls']} calls, out of place, in us. NCCL runs plain and with symmetric windows (`-R 2`).\n\n"
            f"mccs is ahead at {ahead} of {len(rows)} places. The least ratio is {least[6]:.2f}: {least[1]} of {least[2]} bytes, {least[0]}.\n\n"
            + bench.table(["ranks are", "operation", "bytes", *SIDES, "better NCCL / mccs"], cells))


def measure(options, runner, about):
    """Returns what failed; the other sides and places go on."""
    places, failed, out = [], [], pathlib.Path(options.out)
    for collective in options.collectives.split(","):
        for ranks in [kind for kind in ("processes", "threads") if getattr(options, kind)]:
            times = {}
            for number in range(options.rounds):
                for side in bench.in_turn(SIDES, number):
                    try:
                        found = runner.run(ranks, collective, side, check=side == MCCS and number == 0)
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        failed.append(f"{collective}, {ranks}, {side}: {error}")
                        print(failed[-1], flush=True)
                        continue
                    for size, time_us in found.items():
                        times.setdefault(size, {}).setdefault(side, []).append(time_us)
            both = [(size, of) for size, of in sorted(times.items()) if MCCS in of and len(of) > 1]
            places += [{"ranks": ranks, "operation": collective, "bytes": size, "times_us": of} for size, of in both]
            for row in rows_of(places[len(places) - len(both):]):
                print(f"{row[0]} {row[1]} {row[2]}: {row[6]:.2f}", flush=True)
        (out / f"{options.name}.json").write_text(bench.without_folders(json.dumps({**about, "places": places})) + "\n")
        if places:
            (out / f"{options.name}.md").write_text(text_of(about, places))
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nranks", type=int, required=True)
    parser.add_argument("--nccl", required=True, help="NCCL's library")
    parser.add_argument("--threads", metavar="FOLDER", help="nccl-tests' programs, built without MPI")
    parser.add_argument("--processes", metavar="FOLDER", help="nccl-tests' programs, built with MPI")
    parser.add_argument("--collectives", default=COLLECTIVES, help=f"comma-separated; default: {COLLECTIVES}")
    parser.add_argument("--begin", default=FROM, help=f"least bytes; default: {FROM}")
    parser.add_argument("--end", default=TO, help=f"most bytes; default: {TO}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--timeout", type=int, default=120, help="seconds of one program")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    if not (options.threads or options.processes):
        parser.error("name a folder of nccl-tests' programs: --threads, --processes, or both")
    about = bench.facts(options, machine_of(options.nranks), nccl=version_of(options.nccl), calls=options.calls)
    with tempfile.TemporaryDirectory() as folder, services({"service": '[cuda]\nuse = "required"\n'}, folder) as sockets:
        failed = measure(options, Runner(options, sockets[0]), about)
    if failed:
        sys.exit("nccl_tests.py: failed:\n" + "\n".join(failed))
    print((pathlib.Path(options.out) / f"{options.name}.md").read_text())


if __name__ == "__main__":
    main()
