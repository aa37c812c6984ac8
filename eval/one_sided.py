#!/usr/bin/env python3
"""Puts with signals between two GPUs of one host by NCCL's one-sided calls, beside NCCL.

usage: one_sided.py NAME --nccl FILE [--rounds N] [--processes N] [--sizes B,B] [--total BYTES] [--out FOLDER] [--commit COMMIT]

Sides alternate, with new processes each time; every byte is checked. Needs two GPUs, and writes NAME.json (data and provenance) and
NAME.md. Binaries: target/release, or the folder MCCS_BIN, with libnccl.so.2, mccs-service and mccs-one-sided."""

import argparse
import json
import statistics
import tempfile

import bench
from cuda import machine_of, version_of
from cuda_puts import sized
from cuda_service import BINARIES, services

MCCS, NCCL = "mccs", "NCCL"
PATTERNS = {"to_and_fro": "to and fro", "both_ways": "both ways at once"}


def measure(options, socket):
    """All rounds' times in us, by pattern, bytes, side and whose: the stream's or the caller's."""
    environment = {"MCCS_SOCKET": socket, "NCCL_NVLS_ENABLE": "0"}
    sides = {MCCS: BINARIES / "libnccl.so.2", NCCL: options.nccl}
    times = {}
    for number in range(options.processes):
        for side in bench.in_turn(sides, number):
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                command = [BINARIES / "mccs-one-sided", "--library", sides[side], "--rounds", options.rounds, "--sizes", options.sizes,
                           "--total", options.total, "--seconds", options.timeout, "--json", file.name]
                bench.run([*map(str, command)], environment, timeout=options.timeout + 10)
                for line in json.load(open(file.name))["lines"]:
                    for whose in ("us", "call_us"):
                        times.setdefault((line["pattern"], line["bytes"], side, whose), []).extend(line[whose])
    return times


def row(times, pattern, size):
    def cell(side, whose="us"):
        found = times[pattern, size, side, whose]
        low, middle, high = statistics.quantiles(found, n=4)
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    own, theirs = (statistics.median(times[pattern, size, side, "us"]) for side in (MCCS, NCCL))
    rate = f"{size / own / 1e3:.3g}" if pattern == "both_ways" else ""
    return [PATTERNS[pattern], sized(size), cell(MCCS), cell(NCCL), f"{theirs / own:.3g}", rate, cell(MCCS, "call_us"), cell(NCCL, "call_us")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nccl", required=True, help="NCCL's library")
    parser.add_argument("--rounds", type=int, default=11, help="rounds of a process")
    parser.add_argument("--processes", type=int, default=2, help="times that each side starts processes")
    parser.add_argument("--sizes", default="8,1024,65536,1048576,16777216,134217728")
    parser.add_argument("--total", type=int, default=1 << 30, help="bytes of a measurement, about")
    parser.add_argument("--timeout", type=int, default=60, help="seconds of one side's processes")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    facts = bench.facts(options, machine_of(2), nccl=version_of(options.nccl), processes=options.processes)
    with tempfile.TemporaryDirectory() as folder, services({"service": '[cuda]\nuse = "required"\n'}, folder) as sockets:
        times = measure(options, sockets[0])
    keys = list(dict.fromkeys((pattern, size) for pattern, size, _, _ in times))
    heads = ["what", "bytes", "mccs, us", "NCCL, us", "NCCL's time by ours", "GB/s each way", "mccs, caller, us", "NCCL, caller, us"]
    text = (f"{facts['machine']}; NCCL {facts['nccl']}; commit {facts['commit']}. A round trip, or a put each way, by the GPU's clock; what a put and\n"
            f"a wait take their caller. Median (quartiles) of {options.rounds * options.processes} rounds; sides alternate; every byte is checked.\n\n"
            + bench.table(heads, [row(times, *key) for key in keys]))
    lines = [dict(zip(("pattern", "bytes", "side", "whose", "us"), (*key, found))) for key, found in times.items()]
    bench.write_out(options, {**facts, "lines": lines}, text)


if __name__ == "__main__":
    main()
