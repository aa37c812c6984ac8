#!/usr/bin/env python3
"""Hunts with services side by side, each with seeded attackers and a checked victim, and adds up
what they did.

usage: hunt.py NAME --binary FILE [--processes N] [--seconds N] [--logs target/hunt] [--afresh] [--commit TEXT]
               [--attacker FILE]

FILE is the test program `hostile`, built before: cargo test --release --workspace --test hostile --no-run. Each process has a service
in a folder of its own, and seeds that no run has had. On another machine than the one that built it, --attacker names the program
`attacker` of the same build. Writes eval/results/NAME.json (data and provenance of every run) and NAME.md (all runs
together). --afresh forgets the runs before. Fails if a process does; its log has the seed."""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import bench

# Seeds of a process: nobody gets through as many in a day.
SEEDS = 1_000_000_000
TEST = "whatever_tenants_do"


def add(into, tally):
    for what, count in tally.items():
        into[what] = into.get(what, 0) + count


def hunt(options, first):
    """Output of each process; `None` for one that failed."""
    options.logs.mkdir(parents=True, exist_ok=True)
    started = []
    for number in range(first, first + options.processes):
        log = options.logs / f"{number}.log"
        environment = {**os.environ, "MCCS_SECONDS": str(options.seconds), "MCCS_FIRST_SEED": str(number * SEEDS)}
        environment |= {"MCCS_ATTACKER": options.attacker} if options.attacker else {}
        started.append((log, subprocess.Popen([options.binary, TEST, "--nocapture"], env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)))
    said = []
    for log, process in started:
        process.wait()
        found = [line.removeprefix("hunt: ") for line in log.read_text().splitlines() if line.startswith("hunt: ")]
        if process.returncode != 0 or not found:
            print(f"a process failed; see {log}", file=sys.stderr)
        said.append(json.loads(found[0]) if process.returncode == 0 and found else None)
    return said


def report(runs):
    hunts = [said for run in runs for said in run["hunts"] if said]
    tally = {}
    for said in hunts:
        add(tally, said["tally"])
    of = lambda prefix: {what.removeprefix(prefix): count for what, count in sorted(tally.items()) if what.startswith(prefix)}
    total = lambda key: sum(said[key] for said in hunts)
    growth = lambda key: max(said[key][1] - said[key][0] for said in hunts)
    summary = [
        ["sequences", total("sequences")],
        ["steps", tally["steps"]],
        ["hunts, by processes with a service each", len(hunts)],
        ["hunts that failed: a crash, a wrong element, a leak, something that never ended", sum(len(run["hunts"]) for run in runs) - len(hunts)],
        ["victim's calls, every element checked", total("checked_calls")],
        ["longest of them, ms", max(said["longest_call_ms"] for said in hunts)],
        ["calls that took more than a second", total("calls_over_a_second")],
        ["longest sequence until nothing was left of it, ms", max(said["longest_sequence_ms"] for said in hunts)],
        ["most descriptors more than before", growth("descriptors")],
        ["most threads more than before", growth("threads")],
        ["most resident memory more than before, KiB", growth("resident_kib")],
        ["most that tenants held, KiB, of quotas", f"{max(said['held_kib'] for said in hunts)} of {hunts[0]['quotas_kib']}"],
    ]
    kinds = [[kind, count] for kind, count in of("sequences of ").items()]
    kinds += [[f"of these: process {how} in the middle", tally.get(f"sequences {how}", 0)] for how in ("stopped", "killed")]
    requests = sorted(what.removesuffix(" sent") for what in tally if what.endswith(" sent"))
    asked = [[request, *(tally.get(f"{request} {outcome}", 0) for outcome in ("sent", "done", "refused"))] for request in requests]
    errors = [[f"{what}, {kind}", count] for what in ("requests refused", "calls failed", "sessions ended")
              for kind, count in of(f"{what}, ").items()]
    return (f"Seeded hostile sequences beside a tenant whose every element is checked; {len(runs)} runs together.\n\n"
            + bench.table(["all runs", ""], summary)
            + "\nSequences by kind. What killed processes had done, and the kinds of their sequences, is not counted.\n\n"
            + bench.table(["kind", "sequences"], kinds)
            + "\nRequests. Those that are neither done nor refused were in a session that ended, or whose answers were not read.\n\n"
            + bench.table(["request", "sent", "done", "refused"], asked)
            + f"\nErrors by class; there were {len(of('message: '))} different messages.\n\n"
            + bench.table(["error", "times"], errors)
            + f"\nSessions made: {tally.get('sessions made', 0)}. Commands pushed: {tally.get('commands', 0)}.\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--binary", required=True, type=pathlib.Path)
    parser.add_argument("--processes", type=int, default=(os.cpu_count() + 1) // 2)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--logs", type=pathlib.Path, default=bench.ROOT / "target" / "hunt")
    parser.add_argument("--afresh", action="store_true")
    parser.add_argument("--attacker", help="the program, where it does not lie where it was built")
    bench.commit_option(parser)
    options = parser.parse_args()
    before = bench.RESULTS / f"{options.name}.json"
    runs = json.loads(before.read_text())["runs"] if before.exists() and not options.afresh else []
    first = sum(len(run["hunts"]) for run in runs)
    provenance = bench.provenance(commit=options.commit)
    hunts = hunt(options, first)
    runs.append({**provenance, "first_seed": first * SEEDS, "hunts": hunts})
    text = report(runs)
    bench.write_results(options.name, provenance | {"runs": runs}, text)
    print(text)
    sys.exit(0 if all(hunts) else 1)


if __name__ == "__main__":
    main()
