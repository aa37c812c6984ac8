#!/usr/bin/env python3
"""A scenario by length on its emulated fabric, in the manner of MCCS's figure 6: as scenario.py runs it, with iterations that are
shorter or longer than the scenario's, and so many more or fewer. Variants and lengths take turns.

usage: sizes.py SCENARIO.toml [--longer 0.015625 --longer 0.125 --longer 1 --longer 4] [--rounds 3] [--settle 1s]
                [--congestion-control cubic] [--fabric FABRIC.toml]

Needs root. Build first: cargo build --release --workspace. Writes eval/results/fabric-SCENARIO-sizes.json (data and provenance) and .md;
plot.py draws it."""

import argparse
import statistics

import bench
import cluster
import scenario as scenarios
from cluster import Fabric

# Of the scenario's own length: from where latency counts as well to where it does not.
LONGER = [1 / 64, 1 / 8, 1, 4]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario")
    parser.add_argument("--longer", type=float, action="append", help="how much longer iterations are than the scenario's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--more", type=float, default=1, help="how many more iterations there are")
    parser.add_argument("--settle", default="1s")
    parser.add_argument("--congestion-control", default="cubic", help="of all flows, whatever this machine's own is")
    parser.add_argument("--fabric", help="another than the scenario's")
    options = parser.parse_args()
    of = lambda longer: scenarios.Scenario(options.scenario, longer, options.more, options.fabric)
    by_length = [of(longer) for longer in sorted(options.longer or LONGER)]
    first = by_length[0]
    variants = {variant["name"]: variant for variant in first.toml["variant"]}
    lengths = [{"bytes": {job["name"]: job["bytes"] for job in one.jobs}, "rounds": {name: [] for name in variants}}
               for one in by_length]
    with Fabric(first.fabric_path) as fabric:
        # What is missing is found out before anything is measured.
        versions = fabric.versions()
        for number in range(options.rounds):
            for name in bench.in_turn(variants, number):
                for one, found in zip(by_length, lengths):
                    found["rounds"][name].append(scenarios.measure(one, fabric, variants[name], options))
                    times = ", ".join(f"{job} {record['seconds']:.2f} s" for job, record in found["rounds"][name][-1].items())
                    print(f"{name}, {found['bytes']}: {times}", flush=True)
    heads, rows = ["variant"], []
    for job in first.jobs:
        heads += [f"{job['name']}: {one['bytes'][job['name']]} bytes" for one in lengths]
    for name in variants:
        row = [name]
        for job in first.jobs:
            for one in lengths:
                busbw = [8 * each[job["name"]]["busbw_gbps"] for each in one["rounds"][name]]
                row.append(f"{statistics.mean(busbw):.3f} ({min(busbw):.3f} to {max(busbw):.3f})")
        rows.append(row)
    text = (f"{first.toml['question']}\n\nBy length, on the emulated fabric {fabric.name}: the scenario's lengths are scaled by {first.scale:g}, congestion control "
            f"{options.congestion_control}. Bus bandwidth in Gbit/s: mean (least to greatest) of {options.rounds} rounds, variants in turn.\n\n"
            + bench.table(heads, rows))
    data = bench.provenance(versions) | {"scenario": scenarios.Scenario(options.scenario, 1, 1, options.fabric).toml,
                                         "scale": first.scale, "lengths": lengths}
    bench.write_results(f"fabric-{first.toml['name']}-sizes", data, text)
    print(text)


if __name__ == "__main__":
    main()
