#!/usr/bin/env python3
"""Compares mccs with Gloo, or algorithms of mccs with each other, across the hosts of an emulated
fabric. All sides are in the same namespaces, in turn, several rounds. Beside bandwidths: CPU
time, and the bytes that the kernel has counted on each host's link, beside those that the
schedule sends.

usage: hosts.py FABRIC.toml NAME [--ranks-per-host N] [--placement block|round_robin] [--operations ...] [--bytes ...]
                [--rounds N] [--sides mccs,gloo] [--algorithms auto,ring,...] [--settings 'tcp.connections = 2']...

Needs root, iperf3, and Debian's python3-torch for Gloo. Build mccs first (cargo build --release --workspace). Writes
eval/results/NAME.json (data and provenance) and NAME.md (a table)."""

import argparse
import json
import secrets
import statistics
import tempfile

import bench
import cluster
from bench import BINARIES, ROOT, records, run
from cluster import Fabric, spread


def per_call(counts, calls):
    return {host: {name: count / calls for name, count in of_host.items()} for host, of_host in counts.items()}


def mccs(fabric, options, placed, algorithm):
    settings = [f'strategy.algorithm = "{algorithm}"', f"strategy.channels = {options.channels}", *options.settings]

    def side(op, size, iterations, warmup):
        with cluster.services(fabric, settings) as (started, folder):
            # A run without data first: links between hosts are up then, and what the set-up costs
            # is not counted.
            run_perf = lambda *arguments: cluster.perf(fabric, folder, placed, secrets.token_hex(16), [
                "--operation", op, *arguments])
            run_perf("--begin", "1KiB", "--end", "1KiB", "--iterations", 1)
            used, counted = -cluster.cpu_seconds(started.values()), fabric.counters()
            found = run_perf("--begin", f"{size}B", "--end", f"{size}B", "--iterations", iterations, "--warmup", warmup)
            used += cluster.cpu_seconds(started.values())
            counted = cluster.difference(counted, fabric.counters())
        # In and out of place are both run where there is such a form.
        calls = len(found) * (iterations + warmup)
        cpu = used / calls + statistics.mean(record["ranks_cpu_s_per_call"] for record in found)
        return {**found[0], "cpu_s_per_call": cpu, "counted_per_call": per_call(counted, calls)}

    return side


def gloo(fabric, placed):
    def side(op, size, iterations, warmup):
        with tempfile.TemporaryDirectory() as folder:
            script = ROOT / "eval" / "baselines" / "gloo_bench.py"
            arguments = [op, size, size, 2, iterations, warmup]
            counted = fabric.counters()
            output = cluster.run_ranks(fabric, placed, ["/usr/bin/python3", script, *map(str, arguments)], lambda rank, host: {
                "RANK": str(rank), "WORLD_SIZE": str(len(placed)), "GLOO_STORE": f"{folder}/store",
                "GLOO_SOCKET_IFNAME": "eth0"})
            counted = cluster.difference(counted, fabric.counters())
        # One call more than those that are counted checks the result.
        return records(output)[0] | {"counted_per_call": per_call(counted, iterations + warmup + 1)}

    return side


def expected(fabric, options, placed, algorithm, op, size):
    """Bytes that the schedule has hosts send and receive."""
    found = json.loads(run([BINARIES / "mccs-between", "--operation", op, "--bytes", str(size), "--algorithm", algorithm,
                            "--channels", str(options.channels), "--hosts", cluster.of_hosts(fabric, placed)]))
    between = found["bytes_between"]
    return {"algorithm": found["algorithm"], "bytes_between": between, "hosts": {
        host: {"tx_bytes": sum(between[number]), "rx_bytes": sum(row[number] for row in between)}
        for number, host in enumerate(fabric.hosts)}}


def algbw(record):
    return record["bytes"] / record["p50_us"] / 1e3


def busbw(op, record):
    others = (record["nranks"] - 1) / record["nranks"]
    return algbw(record) * {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others, "broadcast": 1}[op]


def counted(found, host, name):
    return statistics.median(record["counted_per_call"][host][name] for record in found)


def links_table(fabric, measurements):
    rows = []
    for one in (one for one in measurements if "expected" in one):
        for host in fabric.hosts:
            for name, word in [("tx_bytes", "sends"), ("rx_bytes", "receives")]:
                says, counts = one["expected"]["hosts"][host][name], counted(one["records"], host, name)
                rows.append([one["op"], one["bytes"], f"{one['side']} ({one['expected']['algorithm']})", f"{host} {word}", says,
                             round(counts), f"{100 * (counts / says - 1):+.2f}%" if says else "-"])
    heads = ["operation", "bytes", "side", "link", "bytes by the schedule", "bytes counted", "difference"]
    return bench.table(heads, rows)


def times_table(measurements):
    """Sides of mccs against the first of them: time should be as the bytes of the busiest direction of a link."""
    def busiest(one):
        return max(max(host.values()) for host in one["expected"]["hosts"].values())

    rows, firsts = [], {}
    for one in (one for one in measurements if "expected" in one):
        first = firsts.setdefault((one["op"], one["bytes"]), one)
        if first is one:
            continue
        times = [a["p50_us"] / b["p50_us"] for a, b in zip(one["records"], first["records"])]
        rows.append([one["op"], one["bytes"], f"{one['side']} / {first['side']}", f"{busiest(one) / busiest(first):.3f}", spread(times)])
    return bench.table(["operation", "bytes", "sides", "bytes on the busiest link", "time"], rows) if rows else ""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fabric")
    parser.add_argument("name")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--placement", choices=["block", "round_robin"], default="block", help="ranks of a host: consecutive, or not")
    parser.add_argument("--operations", default="all_reduce,all_gather")
    parser.add_argument("--bytes", default=str(64 << 20))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--algorithms", default="auto", help="of mccs; several are sides of their own")
    parser.add_argument("--channels", type=int, default=2, help="of mccs")
    parser.add_argument("--settings", action="append", default=[], help="a line of every service.toml, with a dotted key")
    parser.add_argument("--sides", default="mccs,gloo")
    return parser.parse_args()


def of_ceiling(one, ring_gbps):
    """The bytes between hosts of each call, in its time, against what bare TCP flows round the hosts move together."""
    between = sum(map(sum, one["expected"]["bytes_between"]))
    return [between / record["p50_us"] / 1e3 / statistics.mean(ring_gbps) for record in one["records"]]


def row(one, by_side, link_gbps, ring_gbps):
    op, found = one["op"], one["records"]
    ratio = "-"
    if "gloo" in by_side and one["side"] != "gloo":
        ratio = f"{spread([algbw(a) / algbw(b) for a, b in zip(found, by_side['gloo'])])}x"
    bandwidths = [busbw(op, record) for record in found]
    cpu = [record["cpu_s_per_call"] / (one["bytes"] / 1e9) for record in found]
    return [op, one["bytes"], one["side"], spread([algbw(record) for record in found]), spread(bandwidths),
            spread([bandwidth / statistics.mean(link_gbps) for bandwidth in bandwidths]), ratio,
            spread(of_ceiling(one, ring_gbps)) if "expected" in one else "-", spread(cpu)]


def main():
    options = arguments()
    times = {}
    with Fabric(options.fabric) as fabric:
        placed = cluster.dealt(fabric, options.ranks_per_host, options.placement)
        sides, algorithms = {}, {}
        if "mccs" in options.sides.split(","):
            pinned = options.algorithms.split(",")
            algorithms = {"mccs" if len(pinned) == 1 else f"mccs {algorithm}": algorithm for algorithm in pinned}
            sides |= {name: mccs(fabric, options, placed, algorithm) for name, algorithm in algorithms.items()}
        if "gloo" in options.sides.split(","):
            sides["gloo"] = gloo(fabric, placed)
        link_gbps, ring_gbps = [fabric.link_gbps()], [fabric.ring_gbps()]
        for number in range(options.rounds):
            for op in options.operations.split(","):
                for size in map(int, options.bytes.split(",")):
                    for name in bench.in_turn(sides, number):
                        record = sides[name](op, size, options.iterations, options.warmup)
                        times.setdefault((op, size), {}).setdefault(name, []).append(record)
                        print(op, size, name, f"{algbw(record):.3f} GB/s", flush=True)
        link_gbps.append(fabric.link_gbps())
        ring_gbps.append(fabric.ring_gbps())
    measurements, rows = [], []
    for (op, size), by_side in times.items():
        for name in sides:
            one = {"op": op, "bytes": size, "side": name, "records": by_side[name]}
            if name in algorithms:
                one["expected"] = expected(fabric, options, placed, algorithms[name], op, size)
            measurements.append(one)
            rows.append(row(one, by_side, link_gbps, ring_gbps))
    heads = ["operation", "bytes", "side", "algbw GB/s", "busbw GB/s", "busbw / iperf3", "algbw against Gloo", "of all flows at once",
             "CPU s per GB"]
    settings = "".join(f", {line}" for line in options.settings)
    text = (
        f"Fabric {fabric.name}: {len(fabric.hosts)} hosts x {options.ranks_per_host} ranks ({options.placement}){settings}; median "
        f"(least to greatest) of {options.rounds} rounds, sides in turn. One TCP flow (iperf3) moves {link_gbps[0]:.4f} GB/s before "
        f"and {link_gbps[1]:.4f} GB/s after; flows from each host to the next, all at once, {ring_gbps[0]:.4f} and {ring_gbps[1]:.4f} "
        f"GB/s together. CPU: of all hosts' services and ranks, for a GB of data as algbw counts it.\n\n"
        + bench.table(heads, rows)
        + "\nThe kernel's counters of each host's link in a call (median of the rounds), beside the schedule's data. The rest is "
          "headers and acknowledgements.\n\n" + links_table(fabric, measurements) + "\n" + times_table(measurements))
    versions = fabric.versions()
    if "gloo" in sides:
        versions["gloo"] = "torch " + run(["/usr/bin/python3", "-c", "import torch; print(torch.__version__)"]).strip()
    data = {"iperf3_gbps": link_gbps, "iperf3_ring_gbps": ring_gbps, "measurements": measurements}
    bench.write_results(options.name, bench.provenance(versions) | data, text)
    print(text)


if __name__ == "__main__":
    main()
