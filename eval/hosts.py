#!/usr/bin/env python3
"""Compares mccs with Gloo across the hosts of an emulated fabric: both in the same namespaces, in turn, several rounds.

usage: hosts.py FABRIC.toml NAME [--ranks-per-host N] [--operations ...] [--bytes N] [--rounds N] [--algorithm A] [--sides ...]

Needs root, and Debian's python3-torch for Gloo. Build mccs first (cargo build --release --workspace). Writes
eval/results/NAME.json (data and provenance) and NAME.md (a table)."""

import argparse
import contextlib
import json
import os
import pathlib
import re
import resource
import secrets
import statistics
import subprocess
import tempfile
import time

import bench
from bench import BINARIES, ROOT, records, run

FABRIC = BINARIES / "mccs-fabric"


class Fabric:
    """A fabric that is up."""

    def __init__(self, spec):
        self.spec = spec
        self.name = re.search(r'^name = "(.*)"', pathlib.Path(spec).read_text(), re.M).group(1)

    def __enter__(self):
        run([FABRIC, "down", self.name])
        run([FABRIC, "up", self.spec])
        view = next(one for one in json.loads(run([FABRIC, "list", "--json"])) if one["name"] == self.name)
        self.hosts = [host["name"] for host in view["spec"]["host"]]
        return self

    def __exit__(self, *_):
        run([FABRIC, "down", self.name])

    def command(self, host, command):
        return [FABRIC, "exec", self.name, host, "--", *command]

    def address(self, host):
        return re.search(r"inet ([\d.]+)", run(self.command(host, ["ip", "-4", "address", "show", "eth0"]))).group(1)

    def counters(self):
        """Bytes that each host's interface has sent, as the kernel counts them."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return {host: int(run(self.command(host, ["cat", path]))) for host in self.hosts}

    def link_gbps(self):
        """What iperf3 moves from the first host to the last, GB/s of payload."""
        server = subprocess.Popen(self.command(self.hosts[-1], ["iperf3", "-s", "-1"]), stdout=subprocess.DEVNULL)
        for _ in range(50):
            client = subprocess.run(self.command(self.hosts[0], ["iperf3", "-c", self.address(self.hosts[-1]), "-t", "4", "-J"]),
                                    capture_output=True, text=True)
            if client.returncode == 0:
                break
            time.sleep(0.1)
        server.wait(timeout=60)
        return json.loads(client.stdout)["end"]["sum_received"]["bits_per_second"] / 8e9


@contextlib.contextmanager
def services(fabric, settings):
    """A service on each host; gives their processes and folders of sockets."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run([BINARIES / "mccsctl", "keys", "--hosts", ",".join(fabric.hosts), "--dir", folder])
        hosts = "".join(f'[[host]]\nname = "{h}"\naddress = "{fabric.address(h)}:7400"\n' for h in fabric.hosts)
        started = {}
        for host in fabric.hosts:
            config = pathlib.Path(folder) / f"{host}.toml"
            config.write_text(f'''{settings}
[service]
name = "{host}"
runtime_dir = "{folder}/{host}"
[exchange]
listen = "{fabric.address(host)}:7400"
certificate = "{folder}/{host}.crt"
key = "{folder}/{host}.key"
authority = "{folder}/authority.crt"
{hosts}
[[tenant]]
name = "eval"
max_memory = "16GiB"
''')
            process = subprocess.Popen(fabric.command(host, [BINARIES / "mccs-service", "--config", config]), text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            stack.callback(process.wait, timeout=60)
            stack.callback(process.terminate)
            if process.stdout.readline() != "mccs-service ready\n":
                raise RuntimeError(f"the service of {host} did not start")
            started[host] = process
        yield started, folder


def cpu_seconds(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ranks(fabric, per_host, command, environment):
    """Starts a process a rank, host by host; returns what rank 0 printed, and the seconds of CPU that all used."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    processes = []
    for rank in range(per_host * len(fabric.hosts)):
        host = fabric.hosts[rank // per_host]
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(fabric.command(host, command), env={**os.environ, **environment(rank, host)},
                                          text=True, stdout=out, stderr=subprocess.PIPE))
    outputs = [process.communicate(timeout=600) for process in processes]
    for process, (_, errors) in zip(processes, outputs):
        if process.returncode != 0:
            raise bench.failure(command, errors)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return outputs[0][0], after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def mccs(fabric, options, settings):
    def side(op, size, iterations, warmup):
        nranks, id = options.ranks_per_host * len(fabric.hosts), secrets.token_hex(16)
        with services(fabric, settings) as (started, folder):
            used = -sum(map(cpu_seconds, started.values()))
            sent = fabric.counters()
            command = [BINARIES / "mccs-perf", "--json", "--operation", op, "--begin", f"{size}B", "--end", f"{size}B",
                       "--iterations", str(iterations), "--warmup", str(warmup)]
            output, ranks_used = ranks(fabric, options.ranks_per_host, command, lambda rank, host: {
                "MCCS_SOCKET": f"{folder}/{host}/mccs.sock", "MCCS_RANK": str(rank), "MCCS_NRANKS": str(nranks),
                "MCCS_UNIQUE_ID": id, "MCCS_ROOT_ADDRESS": fabric.hosts[0]})
            used += sum(map(cpu_seconds, started.values())) + ranks_used
            sent = {host: count - sent[host] for host, count in fabric.counters().items()}
        found = records(output)
        # In and out of place are both run.
        calls = len(found) * (iterations + warmup)
        return {**found[0], "cpu_s_per_call": used / calls, "sent_bytes_per_call": {h: n / calls for h, n in sent.items()}}

    return side


def gloo(fabric, options):
    def side(op, size, iterations, warmup):
        nranks = options.ranks_per_host * len(fabric.hosts)
        with tempfile.TemporaryDirectory() as folder:
            script = ROOT / "eval" / "baselines" / "gloo_bench.py"
            arguments = [op, size, size, 2, iterations, warmup]
            sent = fabric.counters()
            output, _ = ranks(fabric, options.ranks_per_host, ["/usr/bin/python3", script, *map(str, arguments)],
                              lambda rank, host: {"RANK": str(rank), "WORLD_SIZE": str(nranks), "GLOO_STORE": f"{folder}/store",
                                                  "GLOO_SOCKET_IFNAME": "eth0"})
            sent = {host: count - sent[host] for host, count in fabric.counters().items()}
        found = records(output)[0]
        # One call more than those that are counted checks the result.
        return found | {"sent_bytes_per_call": {h: n / (iterations + warmup + 1) for h, n in sent.items()}}

    return side


def algbw(record):
    return record["bytes"] / record["p50_us"] / 1e3


def busbw(record):
    others = (record["nranks"] - 1) / record["nranks"]
    return algbw(record) * others * {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1 / others}[record["op"]]


def spread(values):
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fabric")
    parser.add_argument("name")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--operations", default="all_reduce,all_gather")
    parser.add_argument("--bytes", default=str(64 << 20))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--algorithms", default="auto", help="of mccs; several are sides of their own")
    parser.add_argument("--settings", default="", help="further lines of every service.toml")
    parser.add_argument("--sides", default="mccs,gloo")
    options = parser.parse_args()
    times = {}
    with Fabric(options.fabric) as fabric:
        settings = lambda algorithm: f'[strategy]\nalgorithm = "{algorithm}"\n{options.settings}\n'
        sides = {}
        if "mccs" in options.sides.split(","):
            algorithms = options.algorithms.split(",")
            names = ["mccs"] if len(algorithms) == 1 else [f"mccs {a}" for a in algorithms]
            sides |= {name: mccs(fabric, options, settings(a)) for name, a in zip(names, algorithms)}
        if "gloo" in options.sides.split(","):
            sides["gloo"] = gloo(fabric, options)
        link_gbps = [fabric.link_gbps()]
        for number in range(options.rounds):
            for op in options.operations.split(","):
                for size in map(int, options.bytes.split(",")):
                    for name in bench.in_turn(sides, number):
                        record = sides[name](op, size, options.iterations, options.warmup)
                        times.setdefault((op, size), {}).setdefault(name, []).append(record | {"op": op})
                        print(op, size, name, f"{algbw(record | {'op': op}):.3f} GB/s", flush=True)
        link_gbps.append(fabric.link_gbps())
    rows, data = [], []
    for (op, size), by_side in times.items():
        for name, found in by_side.items():
            ratio = "-"
            if "gloo" in by_side and name != "gloo":
                ratios = [algbw(a) / algbw(b) for a, b in zip(found, by_side["gloo"])]
                ratio = f"{spread(ratios)}x"
            cpu = [r["cpu_s_per_call"] / (size / 1e9) for r in found if "cpu_s_per_call" in r]
            sent = statistics.median(max(r["sent_bytes_per_call"].values()) for r in found) / size
            rows.append([op, size, name, spread([algbw(r) for r in found]), spread([busbw(r) for r in found]), ratio,
                         f"{sent:.2f}", spread(cpu) if cpu else "-"])
            data.append({"op": op, "bytes": size, "side": name, "records": found})
    heads = ["operation", "bytes", "side", "algbw GB/s", "busbw GB/s", "algbw against Gloo", "bytes sent by the busiest host, x data",
             "CPU s per GB"]
    hosts = f"{len(fabric.hosts)} hosts x {options.ranks_per_host} ranks"
    text = (f"{fabric.name}: {hosts}; median (least to greatest) of {options.rounds} rounds, sides in turn. One TCP flow (iperf3) "
            f"moves {link_gbps[0]:.3f} GB/s before and {link_gbps[1]:.3f} GB/s after.\n\n" + bench.table(heads, rows))
    versions = {"gloo": "torch " + run(["/usr/bin/python3", "-c", "import torch; print(torch.__version__)"]).strip()}
    bench.write_results(options.name, bench.provenance(versions) | {"iperf3_gbps": link_gbps, "measurements": data}, text)
    print(text)


main()
