#!/usr/bin/env python3
"""Noisy neighbours: a victim beside each flood of another tenant, against processes that only
compute.

Sides alternate, round by round, on the same cores. The goal is a mean of at most 1.5 times, and a p99 of at most twice, the victim's
beside the hogs.

usage: neighbours.py [--hosts 1,2] [--rounds 7] [--millis 1000] [--cores 0,1] [--flood large ...] [--out eval/results]
                     [--commit TEXT] [--machine TEXT] [--save target/neighbours]

Builds nothing. Needs mccs-neighbours, mccs-service and mccsctl, in target/release or in the folder that MCCS_BIN names, and nobody else on
the machine. Each side is a line of SAVE-HOSTS.jsonl at once: the same command goes on where another was cut off. Writes neighbours-1 and
neighbours-2 (.json: data and provenance, and .md); prints the tables. Fails if the goal is missed."""

import argparse
import json
import pathlib
import statistics
import subprocess

import bench
from bench import BINARIES

MEAN_ALLOWED, P99_ALLOWED = 1.5, 2.0
# Times that the program goes on behind a side in which no call has ended, which it saves as such.
STALLS_MAX = 20
STALLED = 3


def measure(options, hosts, save):
    """The lines of all rounds."""
    command = ["taskset", "-c", options.cores, BINARIES / "mccs-neighbours", "--rounds", str(options.rounds), "--millis", str(options.millis),
               "--hosts", str(hosts), "--save", save, *(word for flood in options.flood for word in ("--flood", flood))]
    for _ in range(STALLS_MAX):
        status = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        if status == 0:
            return [json.loads(line) for line in save.read_text().splitlines()]
        if status != STALLED:
            raise SystemExit(f"mccs-neighbours fails, status {status}")
    raise SystemExit(f"no call of the victim ends in {STALLS_MAX} sides; {save} has them")


def compared(lines):
    """By flood and bytes: the medians beside hogs and beside the flood, and the ratios of rounds, of mean and p99."""
    found = {}
    for flood, count in dict.fromkeys((line["flood"], line["bytes"]) for line in lines):
        sides = {beside: {line["round"]: line for line in lines if (line["flood"], line["bytes"], line["beside_hogs"]) == (flood, count, beside)}
                 for beside in (True, False)}
        rounds = sorted(sides[True].keys() & sides[False].keys())
        found[flood, count] = {}
        for of in ("mean_us", "p99_us"):
            # A call without an end counts as endless.
            hogs, beside = ([sides[which][number][of] or float("inf") for number in rounds] for which in (True, False))
            ratios = [one / other for one, other in zip(beside, hogs)]
            found[flood, count][of] = {"hogs": statistics.median(hogs), "flood": statistics.median(beside),
                                       "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return found


def is_met(one):
    return one["mean_us"]["ratio"] <= MEAN_ALLOWED and one["p99_us"]["ratio"] <= P99_ALLOWED


def report(options, hosts, found, provenance):
    rows = []
    for (flood, count), one in found.items():
        cells = [flood, count, hosts]
        for of in ("mean_us", "p99_us"):
            side = one[of]
            cells += [f"{side['hogs']:.1f}", f"{side['flood']:.1f}", f"{side['ratio']:.2f} ({side['least']:.2f} to {side['most']:.2f})"]
        rows.append([*cells, "met" if is_met(one) else "missed"])
    heads = ["flood", "bytes", "hosts", "hogs, mean", "flood, mean", "ratio", "hogs, p99", "flood, p99", "ratio", "goal"]
    return (f"A victim of two ranks beside each flood, and beside threads that compute, one for each core; commit {provenance['commit'][:7]}, "
            f"{provenance['machine']}.\nMedians of {options.rounds} rounds of {options.millis} ms, in us; ratios are flood by hogs (least to "
            f"greatest round). The goal is a ratio of\n{MEAN_ALLOWED} for means and {P99_ALLOWED:.0f} for p99.\n\n" + bench.table(heads, rows))


def provenance(options):
    own = {"commit": options.commit, "machine": options.machine}
    if None in own.values():
        here = bench.provenance()
        machine = here["machine"]
        own = {"commit": options.commit or here["commit"], "machine": options.machine or f"{machine['cpu']}, kernel {machine['kernel']}"}
    return own | {"cores": options.cores, "command": bench.command()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="1,2", help="of the victim's job; both services are on this machine")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--millis", type=int, default=1000)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--flood", nargs="*", default=[], help="default: all")
    parser.add_argument("--out", type=pathlib.Path, default=bench.RESULTS)
    parser.add_argument("--save", type=pathlib.Path, default=bench.ROOT / "target" / "neighbours")
    parser.add_argument("--commit", help="default: the one that is checked out")
    parser.add_argument("--machine", help="default: its processor and kernel")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.save.parent.mkdir(parents=True, exist_ok=True)
    own, missed = provenance(options), []
    for hosts in map(int, options.hosts.split(",")):
        lines = measure(options, hosts, options.save.with_name(f"{options.save.name}-{hosts}.jsonl"))
        found = compared(lines)
        text = report(options, hosts, found, own)
        name = f"neighbours-{hosts}"
        (options.out / f"{name}.json").write_text(json.dumps(own | {"lines": lines}) + "\n")
        (options.out / f"{name}.md").write_text(text)
        print(text, flush=True)
        missed += [f"{flood}, {count} B, {hosts} hosts" for (flood, count), one in found.items() if not is_met(one)]
    if missed:
        raise SystemExit(f"the goal is missed by: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
