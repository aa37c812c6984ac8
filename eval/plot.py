#!/usr/bin/env python3
"""Draws what mccs-sim and scenario.py have written: `plot.py eval/results/sim-qos.json ...` makes an SVG beside each file.

Needs matplotlib. Bars are means over runs, lines from the least to the most, and crosses what was simulated of a run on the
emulated network.
"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "mccs"
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.pyplot as plt


def spread(values):
    return {"mean": statistics.mean(values), "min": min(values), "max": max(values)}


def measured(data, jobs):
    """What scenario.py has found, as the simulator tells its figures."""
    def of(rounds):
        return {job: {"busbw_gb_s": spread([one[job]["busbw_gbps"] for one in rounds]),
                      "completion_s": spread([one[job]["seconds"] for one in rounds])} for job in jobs}

    return [{"name": name, "jobs": of(rounds)} for name, rounds in data["rounds"].items()]


def panels(variants, jobs):
    """What is drawn: a title, and a figure of each variant."""
    if not jobs:
        yield "all jobs, bus bandwidth, GB/s", [variant["aggregate_gb_s"] for variant in variants]
        yield "speed-up of collectives", [variant["speedup"] for variant in variants]
        return
    for job in jobs:
        yield f"{job}: bus bandwidth, GB/s", [variant["jobs"][job]["busbw_gb_s"] for variant in variants]
    for job in jobs:
        yield f"{job}: completion, s", [variant["jobs"][job]["completion_s"] for variant in variants]


def draw(path):
    data = json.loads(path.read_text())
    jobs = [job["name"] for job in data["scenario"]["job"]]
    variants = measured(data, jobs) if "rounds" in data else data["variants"]
    drawn = list(panels(variants, jobs))
    foretold = list(panels([data["simulated"][variant["name"]] for variant in variants], jobs)) if "rounds" in data else []
    columns = max(len(jobs), 1) if jobs else 2
    rows = -(-len(drawn) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.0 * rows), squeeze=False)
    names = [variant["name"] for variant in variants]
    for axis, (_, figures) in zip(axes.flat, foretold):
        axis.plot(range(len(names)), [each["mean"] for each in figures], "x", color="black", zorder=3)
    for axis, (title, figures) in zip(axes.flat, drawn):
        means = [each["mean"] for each in figures]
        # A mean of equal figures may be rounded to less than they are.
        below = [max(each["mean"] - each["min"], 0) for each in figures]
        above = [max(each["max"] - each["mean"], 0) for each in figures]
        axis.bar(range(len(names)), means, yerr=[below, above], capsize=3, color="0.6")
        axis.set_title(title, fontsize=9)
        axis.set_xticks(range(len(names)), names, rotation=25, ha="right", fontsize=7)
    figure.suptitle(data["scenario"]["question"], fontsize=9, wrap=True)
    figure.tight_layout()
    # The same data, the same file.
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        draw(Path(name))
