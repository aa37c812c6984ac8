#!/usr/bin/env python3
"""Latency of a small all-reduce across two hosts, beside a bare TCP ping-pong and the same within
a host. Sides in turn, several rounds, one run.

usage: latency.py FABRIC.toml NAME [--bytes 8] [--rounds N] [--iterations N] [--settings 'tcp.connections = 1']...

Needs root. Build first: cargo build --release --workspace. Writes eval/results/NAME.json (data and provenance) and NAME.md;
fails if the call takes more than 1.3 times the two together."""

import argparse
import json
import pathlib
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys

import bench
import cluster
from bench import BINARIES, records
from cluster import Fabric, spread

RATIO_ALLOWED = 1.3
PORT = 7500
SYSTEM_CALLS = ["epoll_wait", "recvfrom", "recvmsg", "sendmsg", "preadv2", "futex", "sched_yield", "read", "write"]
PING_PONG, ONE_HOST, ACROSS = "TCP ping-pong, round trip", "all_reduce, one host", "all_reduce, two hosts"


def ping_pong(fabric, options):
    asker, server = fabric.hosts[0], fabric.hosts[1]
    address = f"{fabric.addresses[server]}:{PORT}"
    program = [BINARIES / "mccs-ping-pong", "--bytes", str(options.bytes), "--iterations", str(options.iterations)]
    serving = subprocess.Popen(fabric.command(server, [*program, "serve", address]), stdout=subprocess.PIPE, text=True)
    try:
        if serving.stdout.readline() != "ready\n":
            raise RuntimeError("the ping-pong's server did not start")
        record = records(bench.run(fabric.command(asker, [*program, "ask", address])))[0]
        serving.wait(timeout=60)
        return record
    finally:
        if serving.poll() is None:
            serving.kill()
        serving.wait()


def all_reduce(fabric, options, placed):
    """Services of both hosts run in either case."""
    with cluster.services(fabric, options.settings) as (_, folder):
        found = cluster.perf(fabric, folder, placed, secrets.token_hex(16), [
            "--operation", "all_reduce", "--begin", f"{options.bytes}B", "--end", f"{options.bytes}B", "--iterations",
            options.iterations, "--warmup", options.iterations // 10])
    return found[0]


def account(fabric, options):
    """The first host's service during a call across two hosts: rounds and sleeps of its runtimes, switches of its
    threads, and system calls where perf can count them. A run of its own: counting takes time."""
    with cluster.services(fabric, options.settings) as (started, folder):
        host = fabric.hosts[0]
        pid, control = started[host].pid, f"{folder}/{host}/mccs-control.sock"
        run = lambda iterations: cluster.perf(fabric, folder, fabric.hosts[:2], secrets.token_hex(16), [
            "--operation", "all_reduce", "--begin", f"{options.bytes}B", "--end", f"{options.bytes}B", "--iterations", iterations,
            "--warmup", 0])

        def counts():
            shown = json.loads(bench.run([BINARIES / "mccsctl", "--socket", control, "--json", "engines"]))
            found = {f"{kind} of {runtime['name']}": runtime[kind]
                     for runtime in shown["engines"]["runtimes"] for kind in ("rounds", "parks")}
            for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                status, name = (task / "status").read_text(), (task / "comm").read_text().strip()
                for kind in ("voluntary", "nonvoluntary"):
                    found[f"{kind} switches of {name}"] = int(re.search(rf"^{kind}_ctxt_switches:\s+(\d+)", status, re.M).group(1))
            return found

        # The first operations make flows.
        run(10)
        before, calls = counts(), 2 * options.iterations
        run(options.iterations)
        found = {name: (count - before.get(name, 0)) / calls for name, count in counts().items()}
        if shutil.which("perf"):
            events = ",".join(f"syscalls:sys_enter_{call}" for call in SYSTEM_CALLS)
            perf = subprocess.Popen(["perf", "stat", "-x;", "-e", events, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
            run(options.iterations)
            perf.send_signal(signal.SIGINT)
            for line in perf.communicate(timeout=60)[1].splitlines():
                count, _, name, *_ = [*line.split(";"), "", ""]
                if count.isdigit():
                    found[name.replace("syscalls:sys_enter_", "system call ")] = int(count) / calls
    return {name: count for name, count in found.items() if count >= 0.005}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fabric")
    parser.add_argument("name")
    parser.add_argument("--bytes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=5000)
    parser.add_argument("--settings", action="append", default=[], help="a line of every service.toml, with a dotted key")
    options = parser.parse_args()
    found = {PING_PONG: [], ONE_HOST: [], ACROSS: []}
    with Fabric(options.fabric) as fabric:
        first, second = fabric.hosts[:2]
        sides = {PING_PONG: lambda: ping_pong(fabric, options),
                 ONE_HOST: lambda: all_reduce(fabric, options, [first, first]),
                 ACROSS: lambda: all_reduce(fabric, options, [first, second])}
        for number in range(options.rounds):
            for side in bench.in_turn(sides, number):
                found[side].append(sides[side]())
                print(side, f"p50 {found[side][-1]['p50_us']:.2f} us, p99 {found[side][-1]['p99_us']:.2f} us", flush=True)
        counted = account(fabric, options)
    ratios = {name: [across[name] / (trip[name] + one[name]) for trip, one, across in zip(*found.values())]
              for name in ("p50_us", "p99_us")}
    ratio = statistics.median(ratios["p50_us"])
    good = ratio <= RATIO_ALLOWED
    rows = [[side, *(spread([record[name] for record in rounds]) for name in ("p50_us", "p99_us", "min_us"))]
            for side, rounds in found.items()]
    rows.append(["two hosts / (round trip + one host)", *map(spread, ratios.values()), "-"])
    text = (
        f"Fabric {fabric.name}; {options.bytes} bytes; median (least to greatest) of {options.rounds} rounds of {options.iterations} "
        f"calls, sides in turn; a call's time is the slowest rank's. The ping-pong polls a non-blocking socket with TCP_NODELAY, "
        f"and gives the core away between two looks.\n\n"
        + bench.table(["", "p50 us", "p99 us", "least us"], rows)
        + f"\nRatio of p50s: {ratio:.3f}; {'within' if good else 'MORE than'} the {RATIO_ALLOWED} that are allowed.\n\n"
        + "For a call across two hosts, the service of the first:\n\n"
        + bench.table(["", "for a call"], [[name, f"{count:.2f}"] for name, count in counted.items()]))
    data = bench.provenance() | {"bytes": options.bytes, "settings": options.settings, "allowed_ratio": RATIO_ALLOWED,
                                 "ratios": ratios, "rounds": found, "service_for_a_call": counted}
    bench.write_results(options.name, data, text)
    print(text)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
