#!/usr/bin/env python3
"""Writes the tables of README.md, results/README.md and results/experiments/*.md that follow from
committed data.

usage: headlines.py [--check]

A page marks a table with `<!-- headlines KIND ARGUMENTS -->` and `<!-- end -->`. This script replaces what stands between:

  rows KEY...    headline figures, ours beside a peer's; without keys, all of them
  data NAME...   machine, commit and command of eval/results/NAME.json; a name may end in `*`
  beside NAME... how often mccs is ahead of NCCL, by operation, and the ratios

With --check it changes nothing, and fails where a table is stale or a file of results is on no page."""

import argparse
import fnmatch
import json
import os
import re
import statistics
import sys

import bench

EXPERIMENTS = bench.RESULTS / "experiments"
BLOCK = re.compile(r"(<!-- headlines (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
NOT_MEASURED = "-"
# As data call them, and as they are written.
PEERS = {"openmpi": "Open MPI", "openmpi ring": "Open MPI, ring", "intel mpi": "Intel MPI", "gloo": "Gloo"}


def load(name):
    return json.loads((bench.RESULTS / f"{name}.json").read_text())


def digits(value):
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def size(count):
    for unit in ("B", "KiB", "MiB"):
        if count < 1024 or unit == "MiB":
            return f"{count} {unit}"
        count //= 1024


def by_place(lines, of="stream_us"):
    """Median microseconds of both sides, by operation and bytes."""
    places = {}
    for line in lines:
        place = line.get("operation") or line["pattern"], line["bytes"]
        places.setdefault(place, {})[line["side"]] = statistics.median(line[of])
    return {place: sides for place, sides in places.items() if len(sides) == 2}


# Headline rows: what, mccs, peer, ratio. Each takes its figures from one file of results.


def nccl_time(name, operation, count, cards, lines=None):
    data = load(name)
    sides = by_place(lines(data) if lines else data["lines"])[operation, count]
    return (f"{operation.replace('_', '-')}, {size(count)}, {cards}", f"{digits(sides['mccs'])} us",
            f"NCCL {data['nccl']}: {digits(sides['nccl'])} us", sides["nccl"] / sides["mccs"])


def nccl_bandwidth(name, operation, count, cards):
    data = load(name)
    found = {line["side"]: line["busbw_gbps"] for line in data["lines"] if (line["operation"], line["bytes"]) == (operation, count)}
    return (f"{operation.replace('_', '-')}, {size(count)}, {cards}", f"{digits(found['mccs'])} GB/s",
            f"NCCL {data['nccl']}: {digits(found['nccl'])} GB/s", found["mccs"] / found["nccl"])


def nccl_worst(name, cards):
    """The place at which NCCL is furthest ahead."""
    places = by_place(load(name)["lines"])
    operation, count = min(places, key=lambda place: places[place]["nccl"] / places[place]["mccs"])
    return nccl_time(name, operation, count, f"{cards} (worst place)")


def two_services(count):
    return nccl_time("cuda-service", "all_reduce", count, "a service a GPU, 2 H200s over TCP", lambda data: data["two_services"]["lines"])


def across_hosts(operation, count):
    places = by_place(load("nics-sockets")["runs"][0]["lines"])
    ours, theirs = (places[operation, count][side] for side in ("mccs", "nccl"))
    name = operation.replace("_", "-")
    return (f"{name}, {size(count)}, 2 hosts of 2 H200s, TCP", f"{digits(ours)} us",
            f"NCCL {load('nics-sockets')['runs'][0]['nccl']} over sockets: {digits(theirs)} us", theirs / ours)


def joins(name, cards):
    sides = {line["side"]: statistics.median(line["usable_us"]) / 1000 for line in load(name)["lines"]}
    return (f"a further communicator is usable, {cards}", f"{digits(sides['mccs'])} ms",
            f"NCCL {load(name)['nccl']}: {digits(sides['nccl'])} ms", sides["nccl"] / sides["mccs"])


def memory():
    each = load("cuda-memory-2")["mib_each"]
    peer = next(side for side in each if side != "mccs")
    ours, theirs = statistics.mean(each["mccs"]), statistics.mean(each[peer])
    return "GPU memory of a further communicator, 2 H200s", f"{digits(ours)} MiB", f"{peer}: {digits(theirs)} MiB", theirs / ours


def nccl_tests(name, machine):
    data, ratios = load(name), []
    places = data.get("places") or data["lines"]
    for place in places:
        medians = {side: statistics.median(times) for side, times in (place.get("times_us") or place["us"]).items()}
        ratios.append(min(medians[side] for side in medians if side != "mccs") / medians["mccs"])
    counts = [place["bytes"] for place in places]
    return (f"nccl-tests, {size(min(counts))} to {size(max(counts))}, {machine}",
            f"ahead at {sum(ratio >= 1 for ratio in ratios)} of {len(ratios)} places",
            "NCCL 2.32.3, the better of plain and `-R 2`", f"{digits(min(ratios))} to {digits(max(ratios))}")


def training(workload, what, gpus):
    data = load(f"training-default-{gpus}")
    times = {side: statistics.median(sum(found["rounds_ms"], [])) for side, found in data["found"][workload].items()}
    # The faster NCCL. Sides beside PyTorch's own are named by their version.
    peer = min((side for side in times if side.startswith("NCCL")), key=times.get)
    version = data["libraries"][peer] if peer == "NCCL of PyTorch" else peer
    return (f"{what}, PyTorch, {gpus} H200s", f"{digits(times['mccs'])} ms a step", f"{version}: {digits(times[peer])} ms",
            times[peer] / times["mccs"])


def host_memory(name, operation, count, ranks):
    row = next(row for row in load(name)["rows"] if (row["op"], row["bytes"], row["nranks"]) == (operation, count, ranks))
    ours, theirs = row["p50_us"]["mccs"], row["p50_us"][row["best_peer"]]
    return (f"{operation.replace('_', '-')}, {size(count)}, {ranks} ranks on 2 cores, host memory", f"{digits(ours)} us",
            f"{PEERS.get(row['best_peer'], row['best_peer'])}: {digits(theirs)} us", theirs / ours)


def ring():
    rounds = load("ring")["rounds"]
    ours, theirs = (statistics.median(one["p50_ns"] for one in rounds[side]) for side in ("mccs, two rings", "iceoryx2, request-response"))
    return "a command to the service and its answer", f"{digits(ours)} ns", f"iceoryx2: {digits(theirs)} ns", theirs / ours


def hosts(operation):
    measured = [of for of in load("hosts-rack")["measurements"] if of["op"] == operation]
    found = {of["side"]: [of["bytes"] / one["p50_us"] / 1000 for one in of["records"]] for of in measured}
    ratio = statistics.median(ours / theirs for ours, theirs in zip(found["mccs"], found["gloo"]))
    ours, theirs = (statistics.median(found[side]) for side in ("mccs", "gloo"))
    return f"{operation.replace('_', '-')}, 64 MiB, 4 hosts on 2 cores, TCP", f"{digits(ours)} GB/s", f"Gloo: {digits(theirs)} GB/s", ratio


def rdma():
    rounds = [one for one in load("rdma")["rounds"] if one["what"].startswith("bandwidth") and one["message_bytes"] == 1 << 20]
    values = {side: [one["value"] for one in rounds if one["side"] == side] for side in ("tool", "transport")}
    ratio = statistics.median(ours / theirs for ours, theirs in zip(values["transport"], values["tool"]))
    ours, theirs = (statistics.median(values[side]) for side in ("transport", "tool"))
    return "RDMA transport, 1 MiB messages, soft-RoCE", f"{digits(ours)} GB/s", f"ib_write_bw: {digits(theirs)} GB/s", ratio


def oversubscribed():
    rounds = load("fabric-single")["rounds"]
    bad, good = ([one["A"]["busbw_gbps"] * 8 for one in rounds[variant]] for variant in ("bad ring", "good ring, flows assigned"))
    ratio = statistics.median(after / before for before, after in zip(bad, good))
    return ("one job's all-reduce on an oversubscribed network", f"{digits(statistics.mean(good))} Gbit/s",
            f"bad ring, ECMP: {digits(statistics.mean(bad))} Gbit/s", ratio)


def recovery():
    stalls = [one["next_call_s"] for one in load("fabric-recovery")["rounds"]]
    return "a job stands still when a link dies silently", f"{digits(statistics.median(stalls))} s", NOT_MEASURED, NOT_MEASURED


def changes():
    done = load("changes-all")["checked"]
    if not all(one["checked"] for one in done):
        raise RuntimeError("changes-all: elements were not checked")
    return (f"strategy changes under load, every element checked: {sum(one['changes'] for one in done):,}", "0 wrong elements",
            NOT_MEASURED, NOT_MEASURED)


# Key: page of results/experiments, and the row's figures.
ROWS = {
    "small-gpus": ("gpu-collectives", lambda: nccl_time("cuda-h100-4", "all_reduce", 64 << 10, "4 H100s")),
    "large-gpus": ("gpu-collectives", lambda: nccl_bandwidth("cuda-h100-4", "all_reduce", 512 << 20, "4 H100s")),
    "worst-gpus": ("gpu-collectives", lambda: nccl_worst("cuda-h100-4", "4 H100s")),
    "worst-rooted": ("gpu-rooted", lambda: nccl_worst("cuda-h100-rooted-4", "4 H100s")),
    "nccl-tests": ("nccl-tests", lambda: nccl_tests("nccl-tests-2", "2 H200s")),
    "nccl-tests-4": ("nccl-tests", lambda: nccl_tests("nccl-tests-4", "4 H200s")),
    "joins": ("gpu-communicators", lambda: joins("cuda-joins-4", "4 H200s")),
    "memory": ("gpu-communicators", memory),
    "ddp": ("gpu-training", lambda: training("ddp:8", "DDP of batch 8", 4)),
    "fsdp2": ("gpu-training", lambda: training("fsdp2:8", "FSDP2 of batch 8", 4)),
    "fsdp2-4": ("gpu-training", lambda: training("fsdp2:4", "FSDP2 of batch 4 (worst place)", 4)),
    "moe": ("gpu-training", lambda: training("moe:4", "mixture of experts", 4)),
    "two-services": ("gpu-service", lambda: two_services(128 << 20)),
    "across-hosts": ("gpus-across-hosts", lambda: across_hosts("all_reduce", 16 << 20)),
    "across-hosts-small": ("gpus-across-hosts", lambda: across_hosts("all_gather", 16)),
    "small-host": ("host-memory", lambda: host_memory("small", "all_reduce", 8, 2)),
    "middle-host": ("host-memory", lambda: host_memory("middle", "all_reduce", 16 << 20, 4)),
    "ring": ("service-cost", ring),
    "gather-hosts": ("several-hosts", lambda: hosts("all_gather")),
    "reduce-hosts": ("several-hosts", lambda: hosts("all_reduce")),
    "rdma": ("rdma", rdma),
    "network": ("fabric-single", oversubscribed),
    "recovery": ("fabric-recovery", recovery),
    "changes": ("strategy-changes", changes),
}


def written(ratio):
    return ratio if isinstance(ratio, str) else f"{ratio:.2f}" if ratio < 10 else digits(ratio)


def rows(page, keys):
    lines = []
    for key in keys or ROWS:
        of, figures = ROWS[key]
        what, ours, peer, ratio = figures()
        link = os.path.relpath(EXPERIMENTS / f"{of}.md", page.parent)
        lines.append([what, ours, peer, written(ratio), f"[{of}]({link})"])
    return bench.table(["what", "mccs", "peer", "ratio", "page"], lines)


def provenance(name):
    data = load(name)
    about = data.get("provenance", data)
    machine = about.get("machine", NOT_MEASURED)
    if isinstance(machine, dict):
        machine = f"{machine['cpu']}, {machine['cores']} cores, virtual"
    commit = about.get("commit", NOT_MEASURED)[:7] + (" and changes" if about.get("uncommitted_changes") else "")
    return machine, commit, " ".join(map(str, about["command"])) if isinstance(about["command"], list) else about["command"]


def names_of(patterns):
    names = sorted(path.stem for path in bench.RESULTS.glob("*.json"))
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise RuntimeError(f"no results are called {pattern}")
        yield from found


def data_table(page, patterns):
    """Tables and commands, each command once."""
    lines, commands = [], {}
    for name in names_of(patterns):
        machine, commit, command = provenance(name)
        link = os.path.relpath(bench.RESULTS / f"{name}.md", page.parent)
        lines.append([f"[{name}]({link})", machine, commit])
        commands.setdefault(command, None)
    return bench.table(["table", "machine", "commit"], lines) + "\n```text\n" + "\n".join(commands) + "\n```\n"


def beside(_page, patterns):
    lines = []
    for name in names_of(patterns):
        ratios = {}
        for (operation, _), sides in by_place(load(name)["lines"]).items():
            ratios.setdefault(operation, []).append(sides["nccl"] / sides["mccs"])
        for operation, found in ratios.items():
            lines.append([name, operation, len(found), sum(round(ratio, 2) >= 1 for ratio in found), *(f"{of(found):.2f}" for of in (min, statistics.median, max))])
    return bench.table(["data", "operation", "sizes", "level or ahead", "least ratio", "median", "greatest"], lines)


KINDS = {"rows": rows, "data": data_table, "beside": beside}


def written_anew(page):
    def block(match):
        kind, *arguments = match[2].split()
        return match[1] + KINDS[kind](page, arguments) + match[3]

    return BLOCK.sub(block, page.read_text())


def unnamed():
    """Data that no page has."""
    blocks = [match[2].split() for page in EXPERIMENTS.glob("*.md") for match in BLOCK.finditer(page.read_text())]
    named = {name for kind, *patterns in blocks if kind == "data" for name in names_of(patterns)}
    return sorted({path.stem for path in bench.RESULTS.glob("*.json")} - named)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a table is stale")
    options = parser.parse_args()
    wrong = [f"no page of {EXPERIMENTS.relative_to(bench.ROOT)} has the data {name}" for name in unnamed()]
    for page in [bench.ROOT / "README.md", bench.RESULTS / "README.md", *sorted(EXPERIMENTS.glob("*.md"))]:
        text = written_anew(page)
        if text != page.read_text():
            if options.check:
                wrong.append(f"{page.relative_to(bench.ROOT)} is stale: run eval/headlines.py")
            else:
                page.write_text(text)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
