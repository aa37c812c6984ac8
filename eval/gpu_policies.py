#!/usr/bin/env python3
"""Ring order and flow assignment for a job of GPUs, on emulated NICs behind an oversubscribed
spine-leaf network.

usage: gpu_policies.py NAME --nics LIBRARY --uuids GPU,... [--mbit N] [--bytes 4MiB] [--operations all_gather,all_reduce] [--rounds 3]

One machine is MCCS's testbed in small: four hosts with two GPUs and two NICs each, two leaves, two spines, links between them as fast as
a NIC. Each host has a service. Variants take turns, each in services and NICs of its own; the switches' hash differs from round to
round. Rank order is the ring's: bad rings go from leaf to leaf at each step.

LIBRARY is libibverbs.so.1 as tests/nics/versioned links it. GPUs may be emulated: the driver's folder is in LD_LIBRARY_PATH. Writes
NAME.json (data and provenance) and NAME.md. Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import json
import os
import pathlib
import shlex
import shutil
import statistics
import sys
import tempfile

import bench
from cuda_service import BINARIES, services

# By leaf. Ranks of a host follow each other, and rings go through hosts in this order.
LEAVES = (("h0", "h1"), ("h2", "h3"))
GOOD, BAD = ("h0", "h1", "h2", "h3"), ("h0", "h2", "h1", "h3")
# Rank order, rings of the policy, and how GPUs reduce. Rank order is the order of a ring of reductions, too.
VARIANTS = {"bad ring": (BAD, None, "all_to_all"), "bad ring, flows assigned": (BAD, "kept", "all_to_all"),
            "good ring": (GOOD, None, "all_to_all"), "good ring, flows assigned": (GOOD, "local", "all_to_all"),
            "bad ring of reductions": (BAD, None, "ring"), "good ring of reductions, flows assigned": (GOOD, "local", "ring")}
SPINES, FIRST_PORT, PORTS = 2, 50_000, 100
GPUS_EACH = 2


def make_nics(options, folder, seed):
    """A folder of NICs behind leaves and spines."""
    nics, tool = pathlib.Path(folder) / "nics", BINARIES / "mccs-nics"
    run = lambda *words: bench.run([*map(str, [tool, nics, *words])])
    # Short packets, so that flows share a link by turns.
    run("init", "--hosts", ",".join(GOOD), "--devices", GPUS_EACH, "--slot-bytes", 16 << 10, "--slots", options.slots, "--gbit-per-s", options.mbit / 1000)
    run("fabric", *[word for hosts in LEAVES for word in ("--leaf", ",".join(hosts))], "--spines", SPINES, "--mbit-per-s", options.mbit,
        "--first-port", FIRST_PORT, "--ports", PORTS, "--seed", seed)
    shutil.copy(options.nics, nics / "libibverbs.so.1")
    return nics


def topology(options):
    """topology.toml of the network."""
    text = f'[rates]\nhost_leaf = "{options.mbit}Mbit/s"\nleaf_spine = "{options.mbit}Mbit/s"\n'
    text += "".join(f'[[leaf]]\nname = "leaf{leaf}"\n' for leaf in range(len(LEAVES)))
    for spine in range(SPINES):
        first = FIRST_PORT + spine * PORTS
        text += f'[[spine]]\nname = "spine{spine}"\nsource_ports = "{first}-{first + PORTS - 1}"\n'
    for leaf, host in ((leaf, host) for leaf, hosts in enumerate(LEAVES) for host in hosts):
        text += f'[[host]]\nname = "{host}"\ndevices = {GPUS_EACH}\n'
        text += "".join(f'[[host.nic]]\nleaf = "leaf{leaf}"\ndevices = [{nic}]\nrdma = "mlx5_{nic}"\n' for nic in range(GPUS_EACH))
    return text


def service_texts(options, folder, nics, order, rings, reductions):
    """A service for each host, of which the first is the controller where there is a policy. Ranks are on the GPUs of their number."""
    folder, uuids = pathlib.Path(folder), options.uuids.split(",")
    gpus = {host: uuids[number * GPUS_EACH:(number + 1) * GPUS_EACH] for number, host in enumerate(order)}
    bench.run([*map(str, [BINARIES / "mccsctl", "keys", "--hosts", ",".join(GOOD), "--dir", folder / "keys"])])
    address = {host: f"127.0.0.{number + 2}:7460" for number, host in enumerate(GOOD)}
    known = "".join(f'[[host]]\nname = "{host}"\naddress = "{address[host]}"\n' for host in GOOD)
    controller = ""
    if rings:
        (folder / "topology.toml").write_text(topology(options))
        (folder / "policy.toml").write_text(f'[policy]\nname = "ffa"\nrings = "{rings}"\n')
        controller = f'[controller]\nhost = "{GOOD[0]}"\ntopology = "{folder}/topology.toml"\npolicy = "{folder}/policy.toml"\n'
    devices = json.dumps([f"mlx5_{nic}" for nic in range(GPUS_EACH)])
    rdma = f'[rdma]\nuse = "required"\nlibrary = "{nics}/libibverbs.so.1"\ndevices = {devices}\nqps = 1\n'
    return {host: f'[cuda]\nuse = "required"\ngpus = {json.dumps(gpus[host])}\n'
            f'{rdma}[strategy]\nalgorithm = "ring"\nreductions = "{reductions}"\n{controller}[exchange]\nlisten = "{address[host]}"\n'
            f'certificate = "{folder}/keys/{host}.crt"\nkey = "{folder}/keys/{host}.key"\nauthority = "{folder}/keys/authority.crt"\n{known}'
            for host in GOOD}


def measure(options, variant, seed):
    """One run of a variant: microseconds by operation, and bytes by link."""
    order, rings, reductions = VARIANTS[variant]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, tempfile.NamedTemporaryFile(suffix=".json") as file:
        nics = make_nics(options, folder, seed)
        os.environ["MCCS_NICS"] = str(nics)
        texts = service_texts(options, folder, nics, order, rings, reductions)
        with services(texts, folder, {host: {"MCCS_NICS_HOST": host} for host in GOOD}) as sockets:
            of_host = dict(zip(GOOD, sockets))
            command = [BINARIES / "mccs-cuda-perf", "--socket", ",".join(of_host[host] for host in order), "--nranks", GPUS_EACH * len(GOOD),
                       "--operation", options.operations, "--begin", options.bytes, "--end", options.bytes, "--rounds", options.repeats,
                       "--json", file.name]
            bench.run([*map(str, command)], timeout=options.timeout)
        lines = json.load(open(file.name))["lines"]
        links = [line.split() for line in bench.run([str(BINARIES / "mccs-nics"), str(nics), "links"]).splitlines()]
    return {"us": {line["operation"]: line["stream_us"] for line in lines}, "busbw_gbps": {line["operation"]: line["busbw_gbps"] for line in lines},
            "links": [[int(word) for word in link] for link in links], "seed": seed}


def text_of(about, found):
    text = (f"Four hosts of {GPUS_EACH} GPUs and {GPUS_EACH} emulated NICs of {about['mbit']} Mbit/s each, two leaves, two spines, links of "
            f"{about['mbit']} Mbit/s; {about['machine']}; commit {about['commit']}. Busbw in Mbit/s, median (least to greatest) of "
            f"{about['rounds']} rounds; {about['bytes']}.\n\n")
    rows = []
    for operation in about["operations"].split(","):
        rate = lambda run: 8000 * run["busbw_gbps"][operation]
        worst = statistics.median(map(rate, next(iter(found.values()))))
        for variant, runs in found.items():
            rates = sorted(map(rate, runs))
            middle = statistics.median(rates)
            rows.append([operation, variant, f"{middle:.1f} ({rates[0]:.1f} to {rates[-1]:.1f})", f"{middle / worst:.2f}"])
    text += bench.table(["operation", "variant", "busbw", "by the first"], rows)
    # Links are counted by run: with one operation these bytes are its own, however busy the machine is.
    least = min(busiest(run) for runs in found.values() for run in runs)
    rows = []
    for variant, runs in found.items():
        most, all_bytes = (sorted(map(of, runs)) for of in (busiest, lambda run: sum(map(sum, carried(run)))))
        by_least = " to ".join(f"{bytes_ / least:.2f}" for bytes_ in (most[0], most[-1]))
        rows.append([variant, f"{statistics.median(most) / 1e6:.1f}", by_least, f"{statistics.median(all_bytes) / 1e6:.1f}"])
    head = ["variant", "busiest link, MB", "by the least of all, least to greatest", "all links, MB"]
    return f"{text}\nBytes between leaves and spines, medians, all calls of a run:\n\n{bench.table(head, rows)}"


def carried(run):
    """Bytes of each leaf and spine, up and down."""
    return [link[2:] for link in run["links"]]


def busiest(run):
    return max(map(max, carried(run)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nics", required=True, help="libibverbs.so.1 of the emulated NICs, with versions")
    parser.add_argument("--uuids", required=True, help="eight GPUs, comma-separated")
    parser.add_argument("--mbit", type=int, default=400, help="rate of a NIC and of a link")
    parser.add_argument("--slots", type=int, default=24, help="packets of 16 KiB that a queue pair has under way: not so many that their time is its time-out")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only these")
    parser.add_argument("--bytes", default="8MiB", help="payload as nccl-tests counts it")
    parser.add_argument("--operations", default="all_gather,all_reduce")
    parser.add_argument("--rounds", type=int, default=3, help="of all variants, in turn")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of mccs-cuda-perf in each")
    parser.add_argument("--folder", default="/dev/shm", help="where the NICs' memory is")
    parser.add_argument("--timeout", type=int, default=550, help="seconds of a run")
    parser.add_argument("--machine", required=True, help="what it is")
    parser.add_argument("--out", default=str(bench.RESULTS))
    options = parser.parse_args()
    if len(options.uuids.split(",")) != GPUS_EACH * len(GOOD):
        parser.error(f"--uuids: {GPUS_EACH * len(GOOD)} GPUs")
    about = {"commit": bench.run(["git", "rev-parse", "--short", "HEAD"]).strip(), "machine": options.machine,
             "command": shlex.join(["eval/gpu_policies.py", *sys.argv[1:]]), "mbit": options.mbit, "bytes": options.bytes,
             "operations": options.operations, "rounds": options.rounds}
    found = {variant: [] for variant in options.variant or VARIANTS}
    for number in range(options.rounds):
        for variant in bench.in_turn(found, number):
            found[variant].append(measure(options, variant, number))
            print(variant, found[variant][-1], flush=True)
    bench.write_out(options, {**about, "runs": found}, text_of(about, found))


if __name__ == "__main__":
    main()
