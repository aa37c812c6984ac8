#!/usr/bin/env python3
"""RDMA transport and jobs over it beside perftest's ib_write_bw and ibv_rc_pingpong, on soft-RoCE.
The devices are those of the test machine (tests/rdma-vm). Bandwidth: of the transport alone, of
broadcasts call by call, and of 16 of them enqueued at a time. Latency: round trips of the
transport alone, and a small all-reduce, beside the same within a host. Sides in turn, several
rounds, one run. Both tools write or send from one side's memory straight into the other's; the
transport also waits for the receiver's room for each message of more than 4 KiB, which is a
packet back.

usage: rdma.py NAME [--rounds N] [--netem SPECIFICATION]

Needs root. Build first: cargo build --release --workspace --bins. Writes eval/results/NAME.json (data and provenance) and NAME.md;
fails if bandwidth is below 0.9 of ib_write_bw's from 1 MiB, or if the all-reduce takes longer than 1.5 of the tool's round trips of as
many bytes and the all-reduce within a host.

The machine has one CPU. ib_write_bw polls, having no other way, and so takes it from the packets: to be ahead of it is no merit,
to stay behind it a fault. Round trips are those of programs that sleep until something comes: ibv_rc_pingpong waits for
events; ib_write_lat polls, and would measure time slices. They are shown and not judged by themselves: a system call takes 10 to 20 us on
that machine, a look at the clock is one, and the transport serves many flows and a deadline where the tool serves one queue pair.

Meanwhile a program of the lowest priority keeps each of the host's cores awake: where these are virtual, one that sleeps may take longer to
come back than a message takes, and how often the machine sleeps is neither side's doing."""

import argparse
import contextlib
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import time
from functools import partial

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
ROUND_TRIPS_MOST = 1.5
# ib_write_bw counts for so long, and runs for a margin before and after that.
SAMPLE_S, MARGIN_S = 3, 1
CALLS = 300
TOOL, OURS, BROADCAST, BROADCASTS, ONE_HOST, ACROSS = "tool", "transport", "broadcast", "broadcasts", "one host", "two hosts"
# Broadcasts under way, where they are many: the tool keeps 128 writes.
TOGETHER = 16
BANDWIDTH, ROUND_TRIP, ALL_REDUCE = "bandwidth, GB/s", "round trip, us", "all-reduce, us"


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
    """By how many messages it moved in a time, not by the bandwidth it prints: that is zero where it could not find the clock's rate,
    which other load on the host makes likely."""
    command = ["ib_write_bw", "-F", "-x", "1", "-s", str(message), "-D", str(SAMPLE_S + 2 * MARGIN_S), "-f", str(MARGIN_S)]
    messages = int(re.search(rf"^\s*{message}\s+(\d+)\s", tool(command, "-d"), re.M).group(1))
    return messages * message / SAMPLE_S / 1e9


def tool_round_trip(message):
    said = tool(["ibv_rc_pingpong", "-g", "1", "-e", "-s", str(message), "-n", str(ROUND_TRIPS)], "-d")
    return float(re.search(r"= (\S+) usec/iter", said).group(1))


def transport(message, options, name):
    said = bench.run([BINARIES / "mccs-transport-bench", "--rdma", ",".join(DEVICES), "--cores", "0,0", "--sleep", "--json",
                      "--rounds", "1", *map(str, options)])
    return next(record["transport"] for record in bench.records(said) if (record["what"], record["message_bytes"]) == (name, message))


def transport_bandwidth(message):
    return transport(message, ["--bytes", BYTES, "--messages", message, "--round-trips", 1, "--pings", PINGS[0]], "bandwidth")


def transport_round_trip(message):
    # At least one message must be measured for bandwidth.
    least = MESSAGES[0]
    return transport(message, ["--bytes", least, "--messages", least, "--round-trips", ROUND_TRIPS, "--pings", message],
                     "round trip p50 (one socket)")


class Hosts:
    """The machine's two hosts, as `cluster` knows hosts."""
    hosts = ["h0", "h1"]
    addresses = {"h0": "10.77.0.1", "h1": SERVER}

    def command(self, host, command):
        return ["ip", "netns", "exec", f"host{self.hosts.index(host)}", *command]


def perf(operation, placed, message, calls, together=1):
    """Results of mccs-perf for an operation, of one rank for each of the hosts in `placed`, so many of them enqueued at a time."""
    with cluster.services(Hosts(), ['rdma.use = "required"']) as (_, folder):
        size = f"{message}B"
        return cluster.perf(Hosts(), folder, placed, secrets.token_hex(16), [
            "--operation", operation, "--begin", size, "--end", size, "--iterations", calls, "--warmup", max(1, calls // 10),
            "--together", together])[0]


def broadcast(message, together=1):
    return perf("broadcast", ["h0", "h1"], message, max(5, BYTES // message // together), together)["algbw_gbps"]


def all_reduce(placed, message):
    return perf("all_reduce", placed, message, CALLS)["p50_us"]


SIDES = {
    BANDWIDTH: (MESSAGES, {TOOL: tool_bandwidth, OURS: transport_bandwidth, BROADCAST: broadcast,
                            BROADCASTS: partial(broadcast, together=TOGETHER)}),
    ROUND_TRIP: (PINGS, {TOOL: tool_round_trip, OURS: transport_round_trip}),
    ALL_REDUCE: (PINGS, {TOOL: tool_round_trip, ONE_HOST: partial(all_reduce, ["h0", "h0"]), ACROSS: partial(all_reduce, ["h0", "h1"])}),
}


@contextlib.contextmanager
def cores_awake():
    spinners = [subprocess.Popen(["nice", "-n", "19", "sh", "-c", "while :; do :; done"]) for _ in range(os.cpu_count())]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def inside(rounds):
    """On the machine: prints a JSON line for every measurement. Both sides are measured right after each other."""
    for number in range(rounds):
        for what, (lengths, sides) in SIDES.items():
            for message in lengths:
                for side in bench.in_turn(sides, number):
                    print(json.dumps({"what": what, "message_bytes": message, "side": side, "value": sides[side](message)}), flush=True)


def told(side, what, message, ratio):
    return f"{side}: {what.split(',')[0]} of {message} bytes, {ratio:.3f}"


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
    found = []
    with cores_awake():
        machine = subprocess.Popen([ROOT / "tests/rdma-vm/run", "--netem", options.netem, "--timeout", "1200", "--", sys.executable,
                                    os.path.abspath(__file__), "--inside", "--rounds", str(options.rounds)],
                                   stdout=subprocess.PIPE, text=True)
        for line in machine.stdout:
            print(line, end="", flush=True)
            found.append(json.loads(line))
        if machine.wait() != 0:
            sys.exit(machine.returncode)

    rows, calls, missed = [], [], []
    for what, (lengths, sides) in SIDES.items():
        for message in lengths:
            values = [[record["value"] for record in found if (record["what"], record["message_bytes"], record["side"])
                       == (what, message, side)] for side in sides]
            if what == ALL_REDUCE:
                ratios = [across / (one + ROUND_TRIPS_MOST * round_trip) for round_trip, one, across in zip(*values)]
                calls.append([message, *map(spread, values), spread(ratios)])
                ratio = statistics.median(ratios)
                missed += [told(ACROSS, what, message, ratio)] if ratio > 1 else []
                continue
            theirs, *others = zip(sides, values)
            for side, ours in others:
                ratios = [mine / tools for tools, mine in zip(theirs[1], ours)]
                rows.append([f"{side}: {what}", message, spread(theirs[1]), spread(ours), spread(ratios)])
                ratio = statistics.median(ratios)
                is_judged = what == BANDWIDTH and message >= BANDWIDTH_LEAST_FROM
                missed += [told(side, what, message, ratio)] if is_judged and ratio < BANDWIDTH_LEAST else []
    verdict = "Missed: " + "; ".join(missed) if missed else "Bandwidth and all-reduces are what is wanted."
    text = (f"Soft-RoCE on the test machine, {options.netem or 'no loss'}; median (least to greatest) of {options.rounds} rounds, sides "
            f"in turn. Bandwidth beside ib_write_bw, wanted: {BANDWIDTH_LEAST} of it from {BANDWIDTH_LEAST_FROM} bytes. Round trips "
            f"(ours: p50, the tool's: mean) beside ibv_rc_pingpong with events. The host's cores were kept awake.\n\n"
            + bench.table(["", "bytes", "tool's", "ours", "ours / tool's"], rows)
            + f"\nAll-reduces, us, p50; wanted: across no longer than within a host and {ROUND_TRIPS_MOST} of the tool's round trips. All "
              f"processes share one CPU.\n\n"
            + bench.table(["bytes", "tool's round trip", *list(SIDES[ALL_REDUCE][1])[1:], "of what is wanted"], calls) + f"\n{verdict}\n")
    bench.write_results(options.name, bench.provenance() | {"netem": options.netem, "rounds": found, "missed": missed}, text)
    print(text)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
