#!/usr/bin/env python3
"""What it costs a job, on the hosts of an emulated fabric, that the operator changes its strategy all the time: first many
changes with every element of every result checked, then gaps between completions, with and without changes in turn.

usage: changes.py FABRIC.toml NAME [--ranks-per-host 2] [--checked 100000] [--measured 1000] [--bytes 65536,8388608]
                  [--paths 20000-20099,20100-20199]

Needs root. Build first: cargo build --release --workspace. Writes eval/results/NAME.json (data and provenance) and NAME.md."""

import argparse
import secrets

import bench
import cluster
from bench import BINARIES, records
from cluster import Fabric


def run(fabric, placed, arguments):
    with cluster.services(fabric) as (_, folder):
        root = placed[0]
        command = [BINARIES / "mccs-changes", *map(str, arguments)]
        id = secrets.token_hex(16)
        return records(cluster.run_ranks(fabric, placed, command, lambda rank, host: {
            "MCCS_SOCKET": f"{folder}/{host}/mccs.sock", "MCCS_CONTROL_SOCKET": f"{folder}/{host}/mccs-control.sock",
            "MCCS_RANK": str(rank), "MCCS_NRANKS": str(len(placed)), "MCCS_UNIQUE_ID": id, "MCCS_ROOT_ADDRESS": root},
            timeout=3600))[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fabric")
    parser.add_argument("name")
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--checked", type=int, default=100000, help="changes with checked data")
    parser.add_argument("--measured", type=int, default=1000, help="changes of each size whose gaps are measured")
    parser.add_argument("--bytes", default="65536,8388608")
    parser.add_argument("--paths", default="", help="source ports of ways through the network, comma-separated")
    options = parser.parse_args()
    ways = [argument for ports in options.paths.split(",") if ports for argument in ("--path", ports)]
    with Fabric(options.fabric) as fabric:
        placed = cluster.dealt(fabric, options.ranks_per_host, "block")
        measured = []
        for size in options.bytes.split(","):
            measured.append(run(fabric, placed, ["--bytes", f"{size}B", "--changes", options.measured, *ways]))
            print(measured[-1], flush=True)
        checked = []
        if options.checked:
            checked.append(run(fabric, placed, ["--bytes", "4KiB", "--changes", options.checked, "--window", 2, "--check",
                                                *ways]))
            print(checked[-1], flush=True)
    us = lambda record, name: f"{record[name]:.0f}"
    # How much longer the longest gap is around a change, in calls.
    longer = lambda one, quantile: (one[f"gap_{quantile}_us"] - one[f"quiet_gap_{quantile}_us"]) / one["call_p50_us"]
    rows = [[one["bytes"], one["changes"], one["calls"], us(one, "call_p50_us"),
             *(f"{us(one, f'quiet_gap_{q}_us')}, {us(one, f'gap_{q}_us')}: {longer(one, q):+.2f}" for q in ("p50", "p99")),
             f"{us(one, 'agreed_p50_us')}, {us(one, 'agreed_p99_us')}"] for one in measured]
    heads = ["bytes", "changes", "calls", "a call, us", "longest gap without a change, with one, us: differ by so many calls, p50",
             "p99", "hosts agreed after, p50, p99 us"]
    text = (f"Fabric {fabric.name}: {len(fabric.hosts)} hosts x {options.ranks_per_host} ranks, all-reduce. Gaps are times between "
            "completions at rank 0; the longest one is of all calls from asking for a change until eight calls under it have ended, "
            "and of as many calls without a change after that, in turn.\n\n" + bench.table(heads, rows))
    for one in checked:
        text += (f"\nWith new data for each call and every element checked on every rank: {one['changes']} changes of rings, "
                 f"algorithm{' and ways' if ways else ''} during {one['calls']} calls of {one['bytes']} bytes in "
                 f"{one['seconds']:.0f} s; none lost, repeated, reordered or wrong.\n")
    bench.write_results(options.name, bench.provenance() | {"measured": measured, "checked": checked}, text)
    print(text)


if __name__ == "__main__":
    main()
