#!/usr/bin/env python3
"""One job over time on the emulated fabric, in the manner of MCCS's figure 7: after a while something that is not the service's
begins to fill one of the two paths between the racks; after another, the operator sends the job's flows over the other path,
or does not. Rounds with and without, in turn.

usage: detour.py [--rounds 5] [--phase 5] [--bytes 4MiB]

Needs root. Build first: cargo build --release --workspace. Writes eval/results/fabric-detour.json (data and provenance) and .md;
plot.py draws it."""

import argparse
import contextlib
import json
import secrets
import statistics
import subprocess
import threading
import time

import bench
import cluster
from bench import BINARIES, records, run
from cluster import Fabric

SPEC = bench.ROOT / "eval" / "fabric" / "testbed.toml"
# Source ports of the two paths, as in SPEC.
USED, OTHER = "20000-20099", "20100-20199"
# What fills the path of USED.
FLOW_PORT = 20050
# Collectives that begin before and end after a moment belong to neither side of it; so long a time does not count either.
EDGE_S = 0.5


def flow(fabric, seconds, stack):
    """Fills the path of USED from the first rack to the second."""
    sender, receiver = fabric.hosts[1], fabric.hosts[2]
    server = subprocess.Popen(fabric.command(receiver, ["iperf3", "-s", "-1", "--forceflush"]), stdout=subprocess.PIPE, text=True)
    stack.callback(server.wait)
    stack.callback(server.kill)
    if not any("listening" in line for line in server.stdout):
        raise RuntimeError(f"iperf3 does not listen on {receiver}")
    client = subprocess.Popen(fabric.command(sender, [
        "iperf3", "-c", fabric.addresses[receiver], "--cport", str(FLOW_PORT), "-t", str(seconds), "-C", "cubic"]),
        stdout=subprocess.DEVNULL)
    stack.callback(client.wait)
    stack.callback(client.kill)


def measure(fabric, options, is_changed):
    """Ends of all collectives, and moments, in seconds from the first collective; bytes of the busiest link of each."""
    settings = ['strategy.algorithm = "ring"', "strategy.channels = 1", f'strategy.path = [{{ source_ports = "{USED}" }}]',
                'tcp.congestion_control = "cubic"']
    with contextlib.ExitStack() as stack:
        _, folder = stack.enter_context(cluster.services(fabric, settings))
        moments, id = {}, secrets.token_hex(16)

        def operate():
            time.sleep(options.settle + options.phase)
            moments["flow"] = time.time()
            flow(fabric, 2 * options.phase + 5, stack)
            time.sleep(options.phase)
            moments["change"] = time.time()
            if is_changed:
                control = f"{folder}/{fabric.hosts[0]}/mccs-control.sock"
                [comm] = json.loads(run([BINARIES / "mccsctl", "--socket", control, "--json", "communicators"]))["communicators"]
                run([BINARIES / "mccsctl", "--socket", control, "reconfigure", str(comm["communicator"]), "--path", OTHER])
                moments["agreed"] = time.time()

        operator = threading.Thread(target=operate)
        operator.start()
        command = [BINARIES / "mccs-traffic", "--bytes", options.bytes, "--iterations", str(options.iterations), "--each",
                   "--settle", f"{options.settle}s"]
        record = records(cluster.run_ranks(fabric, fabric.hosts, command, lambda rank, host: {
            "MCCS_SOCKET": f"{folder}/{host}/mccs.sock", "MCCS_RANK": str(rank), "MCCS_NRANKS": str(len(fabric.hosts)),
            "MCCS_UNIQUE_ID": id, "MCCS_ROOT_ADDRESS": fabric.hosts[0]}))[0]
        operator.join()
    moments = {name: at - record["began_unix_s"] for name, at in moments.items()}
    took = [end - begin for begin, end in zip([0, *record["ended_s"]], record["ended_s"])]
    busbw = record["busbw_gbps"] * 8 * sum(took) / len(took)
    return {"moments_s": moments, "ended_s": record["ended_s"], "busbw_gbit_s": [busbw / each for each in took]}


def phases(record):
    """Median bus bandwidth before the flow, beside it, and after the change or where it would have been; Gbit/s."""
    moments = record["moments_s"]
    spans = [(0, moments["flow"]), (moments["flow"], moments["change"]), (moments["change"], record["ended_s"][-1])]
    inside = lambda begin, end: [each for at, each in zip(record["ended_s"], record["busbw_gbit_s"])
                                 if begin + EDGE_S <= at <= end - (EDGE_S if end != record["ended_s"][-1] else 0)]
    return [statistics.median(inside(*span)) for span in spans]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--phase", type=float, default=5, help="seconds before the flow, and from it to the change")
    parser.add_argument("--bytes", default="4MiB")
    parser.add_argument("--iterations", type=int, default=130)
    options = parser.parse_args()
    options.settle = 1
    rounds = {"left alone": [], "sent the other way": []}
    with Fabric(SPEC) as fabric:
        # What is missing is found out before anything is measured.
        versions = fabric.versions()
        for number in range(options.rounds):
            for name in bench.in_turn(rounds, number):
                rounds[name].append(measure(fabric, options, name != "left alone"))
                print(name, ", ".join(f"{each:.3f}" for each in phases(rounds[name][-1])), flush=True)
    rows = []
    for name, records_ in rounds.items():
        by_phase = list(zip(*map(phases, records_)))
        rows.append([name, *(cluster.spread(each) for each in by_phase),
                     cluster.spread([after / before for before, _, after in zip(*by_phase)])])
    agreed = [1e3 * (one["moments_s"]["agreed"] - one["moments_s"]["change"]) for one in rounds["sent the other way"]]
    heads = ["the job's flows", "before, Gbit/s", "beside another flow", "after the change", "after, of before"]
    text = ("What does the operator's hand do for a job whose path somebody else fills?\n\n"
            f"{len(fabric.hosts)} hosts of the emulated fabric {fabric.name}, a rank each, all-reduce of {options.bytes} over one channel; a "
            f"TCP flow that is not the service's begins after {options.phase:g} s on the job's path from the first rack to the second, "
            f"and after as long again the job is sent over the other path, or is not. Bus bandwidth: median of the collectives of a "
            f"phase; median (least to greatest) of {options.rounds} rounds, in turn. `mccsctl reconfigure` took "
            f"{cluster.spread(agreed)} ms.\n\n" + bench.table(heads, rows))
    bench.write_results("fabric-detour", bench.provenance(versions) | {"rounds": rounds}, text)
    print(text)


if __name__ == "__main__":
    main()
