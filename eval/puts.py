#!/usr/bin/env python3
"""Port channels between two ranks in host memory: on one host beside plain copies, across two hosts
beside a bare TCP ping-pong. Sides in turn, several rounds, one run.

usage: puts.py FABRIC.toml NAME [--rounds N] [--iterations N] [--sizes LIST] [--total BYTES] [--beside N] [--before FOLDER]

Needs root. Build first: cargo build --release --workspace. `--before` names a folder with the services of another commit, which are
measured beside; ranks are of this one. `--beside` connections of other communicators are open meanwhile, and carry nothing. Writes eval/results/NAME.json (data and provenance) and NAME.md."""

import argparse
import json
import os
import pathlib
import secrets
import statistics

import bench
import cluster
import latency
from bench import BINARIES
from cluster import Fabric, spread


def puts(fabric, options, placed, binaries):
    """Results of mccs-puts for ranks at these hosts, by test and size or threads."""
    root = placed[0] if len(set(placed)) > 1 else ""
    with cluster.services(fabric, binaries=binaries) as (_, folder):
        unique_id = secrets.token_hex(16)
        command = [BINARIES / "mccs-puts", "--iterations", str(options.iterations), "--total", str(options.total),
                   "--sizes", options.sizes, "--beside", str(options.beside)]
        printed = cluster.run_ranks(fabric, placed, command, lambda rank, host: {
            "MCCS_SOCKET": f"{folder}/{host}/mccs.sock", "MCCS_RANK": str(rank), "MCCS_NRANKS": "2",
            "MCCS_UNIQUE_ID": unique_id, "MCCS_ROOT_ADDRESS": root})
    return {f"{one['test']} {one.get('bytes', one.get('threads'))}": one for one in bench.records(printed)}


# For each test: the heading, the figure, and its unit.
FIGURES = {"ping_pong": ("put and signal, each way and back", "p50_us", "us"), "signals": ("signals", "million_per_s", "million/s"),
           "puts": ("puts", "gb_per_s", "GB/s"), "copies": ("copies by the rank", "gb_per_s", "GB/s"),
           "both_ways": ("put with signal, both ways at once", "us", "us")}


def sized(count):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B"


def rows(found):
    """A row for each test, a column for each side."""
    first = next(iter(found.values()))[0]
    for key, one in first.items():
        heading, figure, unit = FIGURES[one["test"]]
        what = sized(one["bytes"]) if "bytes" in one else f"{one['threads']} threads"
        yield [f"{heading}, {what}", unit, *(spread([round_[key][figure] for round_ in rounds]) for rounds in found.values())]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fabric")
    parser.add_argument("name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--total", type=int, default=64 << 20)
    parser.add_argument("--sizes", default="8,1024,65536,1048576,16777216", help="bytes of puts")
    parser.add_argument("--beside", type=int, default=0)
    parser.add_argument("--before", type=pathlib.Path)
    options = parser.parse_args()
    options.bytes = 8
    trips = []
    with Fabric(options.fabric) as fabric:
        first, second = fabric.hosts[:2]
        builds = {"": BINARIES} | ({", before": options.before.resolve()} if options.before else {})
        sides = {f"{name}{build}": (placed, binaries) for name, placed in (("one host", [first] * 2), ("two hosts", [first, second]))
                 for build, binaries in builds.items()}
        found = {side: [] for side in sides}
        for number in range(options.rounds):
            for side in bench.in_turn(sides, number):
                found[side].append(puts(fabric, options, *sides[side]))
                print(side, json.dumps(found[side][-1]["ping_pong 8"]), flush=True)
            trips.append(latency.ping_pong(fabric, options))
    text = (
        f"Fabric {fabric.name}, {os.cpu_count()} cores for all ranks and services; median (least to greatest) of {options.rounds} rounds, sides in turn. A figure of puts is of many at a "
        f"time, one place after the other, until the peer has the signal behind them.\n\n"
        + bench.table(["", "unit", *found], rows(found))
        + f"\nAcross the two hosts a bare TCP ping-pong of 8 B takes {spread([trip['p50_us'] for trip in trips])} us.\n")
    ratio = lambda over, under, key, figure: statistics.median(
        above[key][figure] / below[key][figure] for above, below in zip(found[over], found[under]))
    if options.before:
        compared = [[key, *(f"{ratio(side, f'{side}, before', key, FIGURES[key.split()[0]][1]):.2f}" for side in ("one host", "two hosts"))]
                    for key in found["one host"][0]]
        text += "\nNow, as a part of before (median of the rounds' ratios):\n\n" + bench.table(["", "one host", "two hosts"], compared)
    data = bench.provenance() | {"iterations": options.iterations, "total_bytes": options.total, "beside": options.beside, "rounds": found, "ping_pong": trips}
    bench.write_results(options.name, data, text)
    print(text)


if __name__ == "__main__":
    main()
