#!/usr/bin/env python3
"""Draws what mccs-sim, scenario.py and recovery.py have written: `plot.py eval/results/sim-qos.json ...` makes an SVG
beside each file; `plot.py --check eval/results` fails where a figure there was drawn from other data, or by another plot.py, than there are now.

Needs matplotlib, but for --check. Bars and points are means over runs, lines from the least to the most, and crosses what was simulated of a
run on the emulated network.
"""

import hashlib
import json
import statistics
import sys
from pathlib import Path


def pyplot():
    """What draws; checking does without it."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "mccs"
    matplotlib.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot

    return matplotlib.pyplot


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


def bars(data):
    """Variants beside each other: what the simulator says, or a run on the emulated network."""
    jobs = [job["name"] for job in data["scenario"]["job"]]
    variants = measured(data, jobs) if "rounds" in data else data["variants"]
    drawn = list(panels(variants, jobs))
    foretold = list(panels([data["simulated"][variant["name"]] for variant in variants], jobs)) if "rounds" in data else []
    columns = max(len(jobs), 1) if jobs else 2
    rows = -(-len(drawn) // columns)
    figure, axes = pyplot().subplots(rows, columns, figsize=(4.2 * columns, 3.0 * rows), squeeze=False)
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
    return figure


def by_length(data):
    """Bus bandwidth of each job over its length, a line a variant."""
    jobs = [job["name"] for job in data["scenario"]["job"]]
    figure, axes = pyplot().subplots(1, len(jobs), figsize=(5.5 * len(jobs), 3.6), squeeze=False)
    styles = [("0.6", ":", "o"), ("0.6", "-", "s"), ("0.0", ":", "o"), ("0.0", "-", "s"), ("0.0", "--", "^")]
    for axis, job in zip(axes.flat, jobs):
        lengths = [one["bytes"][job] for one in data["lengths"]]
        for number, variant in enumerate(data["lengths"][0]["rounds"]):
            color, line, marker = styles[number % len(styles)]
            of = [spread([8 * run[job]["busbw_gbps"] for run in one["rounds"][variant]]) for one in data["lengths"]]
            off = [[max(each["mean"] - each["min"], 0) for each in of], [max(each["max"] - each["mean"], 0) for each in of]]
            if "simulated" in data["lengths"][0]:
                foretold = [8 * one["simulated"][variant]["jobs"][job]["busbw_gb_s"]["mean"] for one in data["lengths"]]
                axis.plot(lengths, foretold, "x", color=color, zorder=3)
            axis.errorbar(lengths, [each["mean"] for each in of], yerr=off, color=color, linestyle=line, marker=marker,
                          markersize=4, capsize=3, label=variant)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length / 1e6:.3g} MB" for length in lengths], fontsize=7)
        axis.minorticks_off()
        axis.set(ylabel=f"{job}: bus bandwidth, Gbit/s", ylim=(0, None))
        axis.legend(fontsize=7)
    figure.suptitle(f"{data['scenario']['question']} By length, lengths scaled by {data['scale']:g}.", fontsize=8, wrap=True)
    return figure


def over_time(data):
    """Bus bandwidth of every collective; of each series the first round dark."""
    figure, axis = pyplot().subplots(figsize=(7, 3))
    for (name, rounds), style in zip(data["rounds"].items(), (":", "-")):
        for number, record in enumerate(rounds):
            dark = number == 0
            axis.plot(record["ended_s"], record["busbw_gbit_s"], style, color="black" if dark else "0.75",
                      zorder=2 if dark else 1, label=name if dark else None)
    # Before scenarios said what happens, there was one such figure.
    said = data.get("scenario", {}).get("moment") or [
        {"name": "flow", "what": "another flow begins"}, {"name": "change", "what": "sent over the other path, or not"}]
    marks = [(moment["name"], moment["what"]) for moment in said]
    # Where the most happened: its first round.
    moments = max((rounds[0]["moments_s"] for rounds in data["rounds"].values()), key=len)
    axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
    for name, what in marks:
        axis.axvline(moments[name], color="grey", linewidth=0.8)
        axis.annotate(what, (moments[name], axis.get_ylim()[1]), xytext=(3, -3), textcoords="offset points", fontsize=8,
                      ha="left", va="top")
    axis.set(xlabel="s", ylabel="bus bandwidth, Gbit/s")
    axis.legend(loc="lower left", fontsize=8)
    return figure


def recovery(data):
    """How long after a link's death each thing happened: a point a round, a line at the median."""
    names = {"next_call_s": "next call ended", "found_s": "link found dead", "strategy_s": "new strategy agreed on"}
    figure, axis = pyplot().subplots(figsize=(6, 3))
    for place, key in enumerate(names):
        values = [one[key] for one in data["rounds"]]
        # Beside each other, in the order of rounds.
        places = [place + 0.4 * (number / max(len(values) - 1, 1) - 0.5) for number in range(len(values))]
        axis.plot(places, values, ".", color="0.5")
        axis.plot([place - 0.3, place + 0.3], 2 * [statistics.median(values)], color="black")
    axis.axhline(1, color="grey", linestyle=":", linewidth=0.8)
    axis.text(0.01, 1, "goal", transform=axis.get_yaxis_transform(), va="bottom", fontsize=8)
    axis.set_xticks(range(len(names)), names.values(), fontsize=8)
    axis.set(ylabel="s after a link died silently", ylim=(0, 1.1))
    return figure


def kind_of(data):
    """What draws it."""
    if "lengths" in data:
        return by_length
    if "scenario" in data and "moment" not in data["scenario"]:
        return bars
    return over_time if isinstance(data["rounds"], dict) else recovery


def source(path):
    """What a figure is drawn from and by, as it says itself."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + path.read_bytes())
    return f"{path.name}, with plot.py sha256 {digest.hexdigest()}"


def draw(path):
    data = json.loads(path.read_text())
    figure = kind_of(data)(data)
    figure.tight_layout()
    # The same data, the same file.
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Source": source(path)})
    pyplot().close(figure)


def stale(figure):
    """Whether a figure is not what would be drawn now."""
    path = figure.with_suffix(".json")
    return not path.exists() or f">{source(path)}<" not in figure.read_text()


def check(folder):
    figures = sorted(folder.glob("*.svg"))
    if not figures:
        sys.exit(f"no figures in {folder}")
    if others := [figure.name for figure in figures if stale(figure)]:
        sys.exit(f"not of the data beside them, draw them anew: {' '.join(others)}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--check":
        for name in sys.argv[2:]:
            check(Path(name))
    else:
        for name in sys.argv[1:]:
            draw(Path(name))
