#!/usr/bin/env python3
"""Cost to jobs on GPUs of two hosts of dying ports and of changing strategies, on emulated GPUs
and NICs. Every call's data are checked.

usage: gpu_events.py NAME --side TITLE=BINARY... --driver LIBRARY [--rounds 3] [--deaths 5] [--changes 150]

BINARY is the test `gpu` of a build (cargo test --release --workspace --test gpu --no-run), LIBRARY libmccs_emulated_driver.so. Sides
alternate. Writes eval/results/NAME.json (data and provenance) and NAME.md."""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import tempfile

import bench

DEATHS = "nics::a_port_that_dies_under_gpus_calls_is_left_and_used_again_when_it_is_back"
CHANGES = "nics::strategies_of_rails_change_while_gpus_calls_go_on"
JOBS = {"goes_on_until_told": "mixed, to 600 KB a rank", "adds_up_until_told": "all-reduces of 64 KiB"}


def measured(binary, driver, test, variables):
    """Runs a test of the binary, and returns its measurements: it passes, or this fails."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "MCCS_EMULATED_GPUS": "2", "RUST_BACKTRACE": "0", **variables}
    command = [binary, "--ignored", "--exact", test, "--test-threads", "1", "--nocapture"]
    done = subprocess.run(command, env=environment, cwd=bench.ROOT / "tests", capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"gpu_events.py: {test} of {binary} has failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return [json.loads(found) for found in re.findall(r"\{.*\}", done.stdout)]


def cell(values, digits=1, scale=1000):
    """The median, with the smallest and the largest."""
    values = [value / scale for value in values]
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def text_of(sides, deaths, changes):
    of = lambda records, side: [record for record in records if record["side"] == side]
    text = ("Two hosts of two emulated GPUs and two emulated NICs of 20 Gbit/s on one machine. Times of a run, by medians of all runs "
            "(smallest to largest), in ms.\n")
    rows = []
    for job, title in JOBS.items() if deaths else []:
        for side in sides:
            found = [record for record in of(deaths, side) if record["calls"] == job]
            column = lambda name, found=found: cell([record[name] for record in found])
            rows.append([title, side, sum(record["deaths"] for record in found), column("call_p50_us"), column("left_p50_us"), column("left_max_us"),
                         column("back_p50_us"), column("back_max_us")])
    if rows:
        text += "\n## A port dies and comes back\n\n"
        heads = ["calls", "build", "deaths", "a call, p50", "longest of the two calls that it meets, p50", "the same, max", "used again after, p50",
                 "the same, max"]
        text += bench.table(heads, rows)
    rows = []
    for side in sides:
        found = of(changes, side)
        column = lambda name, found=found: cell([record[name] for record in found])
        rows.append([side, sum(record["changes"] for record in found), sum(record["calls"] for record in found), column("call_p50_us"),
                     column("gap_p99_us"), column("quiet_gap_p99_us"), cell([record["longer_p50_calls"] for record in found], 2, 1),
                     cell([record["longer_p99_calls"] for record in found], 2, 1)])
    text += ("\n## Strategies of rails change\n\nAll-reduces of 64 KiB, every element checked. A change is looked at from its command on until "
             "four calls have gone under it; as many calls without a change follow.\n\n")
    text += bench.table(["build", "changes", "calls", "a call, p50", "longest with a change, p99", "without, p99", "longer, in calls, p50", "p99"], rows)
    return text + "\nNo call failed, and no element was wrong.\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--side", action="append", required=True, help="TITLE=BINARY")
    parser.add_argument("--driver", required=True, type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deaths", type=int, default=5, help="of each of two ports in a run; 0: none")
    parser.add_argument("--changes", type=int, default=150, help="in a run")
    options = parser.parse_args()
    sides = dict(side.split("=", 1) for side in options.side)
    deaths, changes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("libcuda.so", "libcuda.so.1"):
            (pathlib.Path(folder) / name).symlink_to(options.driver.resolve())
        for turn in range(options.rounds):
            for side in bench.in_turn(list(sides), turn):
                if options.deaths:
                    found = measured(sides[side], folder, DEATHS, {"MCCS_TEST_DEATHS": str(options.deaths)})
                    deaths += [{"side": side, **record} for record in found]
                found = measured(sides[side], folder, CHANGES, {"MCCS_TEST_CHANGES": str(options.changes)})
                changes += [{"side": side, **record} for record in found]
                print(side, deaths[-2:], changes[-1], flush=True)
    text = text_of(list(sides), deaths, changes)
    bench.write_results(options.name, bench.provenance() | {"sides": list(sides), "deaths": deaths, "changes": changes}, text)
    print(text)


if __name__ == "__main__":
    main()
