#!/usr/bin/env python3
"""Round trips between two busy processes: mccs' command ring, iceoryx2, and a bare cache line, in turn, several rounds.

usage: ring.py NAME [--rounds N] [--round-trips N] [--commands N] [--cores A,B]

Build both first: cargo build --release -p mccs-eval, and the same in eval/baselines/iceoryx2. Writes
eval/results/NAME.json (data and provenance) and NAME.md (a table)."""

import argparse
import pathlib
import statistics
import sys

BASELINES = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(BASELINES.parent))

import bench  # noqa: E402

PEER = BASELINES / "iceoryx2"


def sides(options):
    common = ["--round-trips", str(options.round_trips), "--cores", options.cores]
    ours = [bench.BINARIES / "mccs-ring-bench", "--json", "--commands", str(options.commands), *common, "--sides"]
    theirs = [PEER / "target" / "release" / "iceoryx2-bench", *common, "--patterns"]
    return {
        "bare cache line": [*ours, "line"],
        "mccs, two rings": [*ours, "ring"],
        "iceoryx2, publish-subscribe": [*theirs, "publish-subscribe"],
        "iceoryx2, request-response": [*theirs, "request-response"],
    }


def iceoryx2_version():
    packages = (PEER / "Cargo.lock").read_text().split("[[package]]")
    package = next(package for package in packages if 'name = "iceoryx2"\n' in package)
    return package.split('version = "')[1].split('"')[0]


def summary(found):
    """Medians over rounds; the spread is that of the rounds' medians."""
    p50 = [record["p50_ns"] for record in found]
    rates = [record["commands_per_s"] for record in found if record.get("commands_per_s")]
    median = {key: statistics.median(record[key] for record in found) for key in ("p50_ns", "p99_ns", "batched_ns")}
    return median | {"p50_spread_ns": [min(p50), max(p50)], "commands_per_s": statistics.median(rates) if rates else None}


def text(options, summaries):
    ours, floor = (summaries[side]["p50_ns"] for side in ("mccs, two rings", "bare cache line"))
    rows = [[side, f"{of['p50_ns']:.0f} ({of['p50_spread_ns'][0]}-{of['p50_spread_ns'][1]})", f"{of['p99_ns']:.0f}",
             f"{of['batched_ns']:.0f}", f"{of['p50_ns'] / floor:.2f}", f"{of['p50_ns'] / ours:.2f}"]
            for side, of in summaries.items()]
    rate = summaries["mccs, two rings"]["commands_per_s"] / 1e6
    return (
        f"A round trip: 128 bytes to another process and back, both processes polling on cores of their own (the bare cache\n"
        f"line: 8 bytes, what the processor itself needs). In nanoseconds; median of {options.rounds} rounds of "
        f"{options.round_trips} round trips.\nReading the clock is part of every single time; without it: a hundred trips timed together.\n\n"
        + bench.table(["between two processes", "median (spread over rounds)", "p99", "median, without the clock",
                       "times the bare cache line", "times mccs"], rows)
        + f"\nOne way, without waiting for answers, mccs' ring carries {rate:.1f} million commands a second.\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-trips", type=int, default=200_000)
    parser.add_argument("--commands", type=int, default=10_000_000)
    parser.add_argument("--cores", default="0,1")
    options = parser.parse_args()
    contenders = sides(options)
    found = {side: [] for side in contenders}
    for number in range(options.rounds):
        for side in bench.in_turn(contenders, number):
            found[side] += bench.records(bench.run(contenders[side]))
    summaries = {side: summary(records) for side, records in found.items()}
    data = {"provenance": bench.provenance({"iceoryx2": iceoryx2_version()}), "rounds": found, "medians": summaries}
    bench.write_results(options.name, data, text(options, summaries))
    print(text(options, summaries))


main()
