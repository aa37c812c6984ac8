#!/usr/bin/env python3
"""The rdma transport beside perftest's ib_write_bw and libibverbs' ibv_rc_pingpong, from one soft-RoCE device to another
on the test machine (tests/rdma-vm); and a small all-reduce of two hosts over it, beside the same within a host. Sides in turn,
several rounds, one run. Both tools write or send from one side's memory straight into the other's; the transport also waits for the
receiver's room for each message of more than 112 bytes, which is a packet back.

usage: rdma.py NAME [--rounds N] [--netem SPECIFICATION]

Needs root. Build first: cargo build --release -p mccs-eval. Writes eval/results/NAME.json (data and provenance) and NAME.md;
fails if bandwidth is below 0.9 of ib_write_bw's from 1 MiB.

The machine has one CPU. ib_write_bw polls, having no other way, and so takes it from the packets: to be ahead of it is no merit,
to stay behind it a fault. Round trips are those of programs that sleep until something comes: ibv_rc_pingpong waits for
events; ib_write_lat polls, and would measure time slices. They are shown and not judged: a system call takes 10 to 20 us on that
machine, a look at the clock is one, and the transport serves many flows and a deadline where the tool serves one queue pair. Nor are
all-reduces judged, whose four processes share the CPU."""

import argparse
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import time

import bench
import cluster
from bench import BINARIES, ROOT

MESSAGES = [64 << 10, 1 << 20, 8 << 20]
PINGS = [8, 4096]
BYTES = 128 << 20
ROUND_TRIPS = 1000
DEVICES = ["rxe0", "rxe1"]
SERVER = "10.77.0.2"
BANDWIDTH_LEAST, BANDWIDTH_LEAST_FROM = 0.9, 1 << 20
# ib_write_bw prints zeros where it could not find the clock's rate, which other load on the host makes likely.
TRIES = 10
CALLS = 300
TOOL, OURS, CALL = "tool", "transport", "all-reduce"
BANDWIDTH, ROUND_TRIP = "bandwidth, GB/s", "round trip, us"
ONE_HOST, ACROSS = "one host, us", "two hosts, us"


def tool(command, device_option):
    """Runs a tool's server in one of the two hosts and its client in the other; gives what the client says."""
    place = lambda host: ["ip", "netns", "exec", f"host{host}", *command, device_option, DEVICES[host]]
    serving = subprocess.Popen(place(1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # Neither tool says when it listens.
        time.sleep(1)
        said = bench.run([*place(0), SERVER], timeout=120)
        serving.wait(timeout=60)
        return said
    finally:
        if serving.poll() is None:
            serving.kill()
        serving.wait()


def tool_bandwidth(message):
    command = ["ib_write_bw", "-F", "-x", "1", "--report_gbits", "-s", str(message), "-n", str(max(5, BYTES // message))]
    for _ in range(TRIES):
        gigabits_per_s = float(re.search(rf"^\s*{message}\s+\d+\s+\S+\s+(\S+)", tool(command, "-d"), re.M).group(1))
        if 0 < gigabits_per_s < float("inf"):
            return gigabits_per_s / 8
    raise RuntimeError("ib_write_bw did not find the clock's rate")


def tool_round_trip(message):
    said = tool(["ibv_rc_pingpong", "-g", "1", "-e", "-s", str(message), "-n", str(ROUND_TRIPS)], "-d")
    return float(re.search(r"= (\S+) usec/iter", said).group(1))


def tools():
    return {(BANDWIDTH, message): tool_bandwidth(message) for message in MESSAGES} | {
        (ROUND_TRIP, message): tool_round_trip(message) for message in PINGS}


def transport():
    listed = lambda lengths: ",".join(map(str, lengths))
    said = bench.run([BINARIES / "mccs-transport-bench", "--rdma", listed(DEVICES), "--cores", "0,0", "--sleep", "--json",
                      "--rounds", "1", "--bytes", str(BYTES), "--round-trips", str(ROUND_TRIPS), "--messages", listed(MESSAGES),
                      "--pings", listed(PINGS)])
    names = {"bandwidth": BANDWIDTH, "round trip p50 (one socket)": ROUND_TRIP}
    return {(names[record["what"]], record["message_bytes"]): record["transport"]
            for record in bench.records(said) if record["what"] in names}


class Hosts:
    """The machine's two hosts, as `cluster` knows hosts."""
    hosts = ["h0", "h1"]
    addresses = {"h0": "10.77.0.1", "h1": SERVER}

    def command(self, host, command):
        return ["ip", "netns", "exec", f"host{self.hosts.index(host)}", *command]


def all_reduces():
    found = {}
    for what, placed in {ONE_HOST: ["h0", "h0"], ACROSS: ["h0", "h1"]}.items():
        with cluster.services(Hosts(), ['rdma.use = "required"']) as (_, folder):
            size = f"{PINGS[0]}B"
            record = cluster.perf(Hosts(), folder, placed, secrets.token_hex(16), [
                "--operation", "all_reduce", "--begin", size, "--end", size, "--iterations", CALLS, "--warmup", CALLS // 10])[0]
        found[what, PINGS[0]] = record["p50_us"]
    return found


def inside(rounds):
    """On the machine: prints a JSON line for every measurement."""
    sides = {TOOL: tools, OURS: transport, CALL: all_reduces}
    for number in range(rounds):
        for side in bench.in_turn(sides, number):
            for (what, message), value in sides[side]().items():
                print(json.dumps({"what": what, "message_bytes": message, "side": side, "value": value}), flush=True)


def spread(values):
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--netem", default="")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(options.rounds)
    machine = subprocess.Popen([ROOT / "tests/rdma-vm/run", "--netem", options.netem, "--timeout", "1200", "--", sys.executable,
                                os.path.abspath(__file__), "--inside", "--rounds", str(options.rounds)],
                               stdout=subprocess.PIPE, text=True)
    found = []
    for line in machine.stdout:
        print(line, end="", flush=True)
        found.append(json.loads(line))
    if machine.wait() != 0:
        sys.exit(machine.returncode)

    rows, missed = [], []
    for what, lengths in {BANDWIDTH: MESSAGES, ROUND_TRIP: PINGS}.items():
        for message in lengths:
            theirs, ours = ([record["value"] for record in found if (record["what"], record["message_bytes"], record["side"])
                                  == (what, message, side)] for side in (TOOL, OURS))
            ratios = [our / their for their, our in zip(theirs, ours)]
            rows.append([what, message, spread(theirs), spread(ours), spread(ratios)])
            ratio = statistics.median(ratios)
            if what == BANDWIDTH and message >= BANDWIDTH_LEAST_FROM and ratio < BANDWIDTH_LEAST:
                missed.append(f"{what} at {message} bytes: {ratio:.3f}")
    calls = {what: [record["value"] for record in found if record["what"] == what] for what in (ONE_HOST, ACROSS)}
    verdict = "Missed: " + "; ".join(missed) if missed else "Bandwidth is what is wanted."
    text = (f"Soft-RoCE on the test machine, {options.netem or 'no loss'}; median (least to greatest) of {options.rounds} rounds, sides "
            f"in turn. Bandwidth beside ib_write_bw, wanted: {BANDWIDTH_LEAST} of it from {BANDWIDTH_LEAST_FROM} bytes. Round trips "
            f"(ours: p50, the tool's: mean) beside ibv_rc_pingpong with events.\n\n"
            + bench.table(["", "bytes", "tool", "transport", "transport / tool"], rows) + f"\n{verdict}\n\nAn all-reduce of {PINGS[0]} bytes, "
            f"p50: {spread(calls[ACROSS])} us on two hosts, {spread(calls[ONE_HOST])} us on one; all processes on one CPU.\n")
    bench.write_results(options.name, bench.provenance() | {"netem": options.netem, "rounds": found, "missed": missed}, text)
    print(text)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
