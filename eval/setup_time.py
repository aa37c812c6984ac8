#!/usr/bin/env python3
"""Time to make communicators of many ranks on the hosts of an emulated fabric, and what goes over
the network.

usage: setup_time.py FABRIC.toml NAME [--ranks-per-host 16] [--rounds N] [--iterations N] [--no-simulation]

Needs root. Build first: cargo build --release --workspace, and for the simulation of 4,096 ranks, whose figures are taken over,
cargo test --no-run -p mccs-tests --test exchange_sim. Writes eval/results/NAME.json (data and provenance) and NAME.md."""

import argparse
import os
import re
import secrets
import statistics
import subprocess

import bench
import cluster
from bench import BINARIES, records, run
from cluster import Fabric, spread

SIMULATION = ["cargo", "test", "-q", "-p", "mccs-tests", "--test", "exchange_sim", "set_up_of_4096", "--", "--nocapture"]


def connections(fabric):
    """Established TCP connections that each host has begun or accepted: links of services, and flows of data."""
    def of(host):
        lines = run(fabric.command(host, ["ss", "-Htn", "state", "established"])).splitlines()
        links = [line for line in lines if re.search(r":7400\b", line)]
        return {"links": len(links), "flows": len(lines) - len(links)}

    return {host: of(host) for host in fabric.hosts}


def measure(fabric, options):
    """One run on fresh services; returns a record for each communicator, and what the links carried."""
    per_host, nranks = options.ranks_per_host, options.ranks_per_host * len(fabric.hosts)
    with cluster.services(fabric) as (_, folder):
        id, before = secrets.token_hex(16), fabric.counters()
        processes = []
        for number, host in enumerate(fabric.hosts):
            command = [BINARIES / "mccs-setup", "--first", str(number * per_host), "--ranks", str(per_host), "--nranks", str(nranks),
                       "--unique-id", id, "--iterations", str(options.iterations)]
            environment = {**os.environ, "MCCS_SOCKET": f"{folder}/{host}/mccs.sock", "MCCS_ROOT_ADDRESS": fabric.hosts[0]}
            processes.append(subprocess.Popen(fabric.command(host, command), env=environment, text=True,
                                              stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        # While they run: the meeting's communicator, and at most one more.
        first_line = processes[0].stdout.readline()
        connected = connections(fabric)
        outputs = [process.communicate(timeout=300) for process in processes]
        for process, (_, errors) in zip(processes, outputs):
            if process.returncode != 0:
                raise bench.failure([process.args[5]], errors)
        carried = cluster.difference(before, fabric.counters())
    return {"communicators": records(first_line + outputs[0][0]), "connections": connected, "carried": carried}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fabric")
    parser.add_argument("name")
    parser.add_argument("--ranks-per-host", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="of fresh services")
    parser.add_argument("--iterations", type=int, default=10, help="communicators a round")
    parser.add_argument("--no-simulation", action="store_true")
    options = parser.parse_args()
    with Fabric(options.fabric) as fabric:
        rounds = []
        for _ in range(options.rounds):
            rounds.append(measure(fabric, options))
            joined = [record["joined_ms"] for record in rounds[-1]["communicators"]]
            print(f"median {statistics.median(joined):.2f} ms", flush=True)
    simulation = "not run"
    if not options.no_simulation:
        simulation = re.search(r"4096 ranks.*", run(SIMULATION, timeout=900)).group(0)
    every = [record for one in rounds for record in one["communicators"]]
    calls = options.iterations + 1
    busiest = lambda name: [max(host[name] for host in one["carried"].values()) / calls for one in rounds]
    links = [max(host["links"] for host in one["connections"].values()) for one in rounds]
    flows = [max(host["flows"] for host in one["connections"].values()) for one in rounds]
    nranks = options.ranks_per_host * len(fabric.hosts)
    rows = [
        ["made: until the slowest rank has joined, ms", spread([record["joined_ms"] for record in every])],
        ["made and used once, flows between hosts included, ms", spread([record["used_ms"] for record in every])],
        ["connections between services, of the host with most", spread(links)],
        ["connections for data, of the host with most, with up to two communicators", spread(flows)],
        ["packets that the busiest host sends for a communicator, made, used and left", spread(busiest("tx_packets"))],
        ["bytes of these", spread(busiest("tx_bytes"))],
    ]
    text = (f"Fabric {fabric.name}: communicators of {nranks} ranks on {len(fabric.hosts)} hosts, {options.iterations} in each of "
            f"{options.rounds} rounds of fresh services; median (least to greatest).\n\n" + bench.table(["", ""], rows)
            + f"\nIn simulation: {simulation}.\n")
    bench.write_results(options.name, bench.provenance() | {"nranks": nranks, "rounds": rounds, "simulation": simulation}, text)
    print(text)


if __name__ == "__main__":
    main()
