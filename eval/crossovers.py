#!/usr/bin/env python3
"""Crossover sizes by collective: from where on copy engines are faster than the ranks' kernels,
with and without MPS. With MPS, tenants are clients of its server, or the service is one as well.

usage: crossovers.py NAME --nranks N [--operations LIST] [--rounds N] [--begin SIZE] [--factor N] [--out FOLDER] [--commit COMMIT]

Needs so many GPUs, two at least, and nvidia-cuda-mps-control. Writes NAME.json (data and provenance) and NAME.md. Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

import bench
from cuda import machine_of
from cuda_service import BINARIES, cell, services

COLLECTIVES = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,gather,scatter"
WAYS = {"kernels": "0", "engines": "16B"}
# Clients of the MPS server: the service, the tenants.
CLIENTS = {"no MPS": (False, False), "tenants under MPS": (False, True), "all under MPS": (True, True)}
MPS = "CUDA_MPS_PIPE_DIRECTORY"


@contextlib.contextmanager
def mps_server(folder):
    """One of our own, which only those find who are told its folder; gives what they are to be told."""
    control = shutil.which("nvidia-cuda-mps-control", path=os.environ["PATH"] + ":/usr/local/nvidia/bin")
    if control is None:
        sys.exit("crossovers.py: there is no nvidia-cuda-mps-control here")
    told = {MPS: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    subprocess.run([control, "-d"], env={**os.environ, **told}, check=True)
    try:
        yield told
        if "NEW CLIENT" not in pathlib.Path(folder, "control.log").read_text():
            sys.exit("crossovers.py: nobody used the MPS server")
    finally:
        subprocess.run([control], input="quit\n", text=True, env={**os.environ, **told}, timeout=60, check=False)


def measure(options, told, is_service_client, are_tenants_clients):
    """By way, operation and size: the times of all rounds, in us."""
    texts = {way: f'[limits]\noperation_timeout = "60s"\n[cuda]\nuse = "required"\nlarge_from = "{from_}"\n' for way, from_ in WAYS.items()}
    found = {}
    os.environ.update(told if is_service_client else {})
    try:
        with tempfile.TemporaryDirectory() as folder, services(texts, folder) as sockets:
            for _ in range(options.rounds):
                for way, socket in zip(WAYS, sockets):
                    file = pathlib.Path(folder) / "found.json"
                    command = [BINARIES / "mccs-cuda-perf", "--socket", socket, "--nranks", options.nranks, "--operation", options.operations,
                               "--begin", options.begin, "--end", "512MiB", "--factor", options.factor, "--rounds", "1", "--json", file]
                    bench.run([*map(str, command)], told if are_tenants_clients else None, timeout=300)
                    for line in json.loads(file.read_text())["lines"]:
                        found.setdefault((line["operation"], line["bytes"]), {}).setdefault(way, []).extend(line["stream_us"])
    finally:
        for name in told:
            os.environ.pop(name, None)
    return [{"operation": operation, "bytes": bytes, **ways} for (operation, bytes), ways in found.items()]


def begins(lines):
    """From which size on engines are faster at every size; none where they are not at the longest."""
    first = None
    for line in sorted(lines, key=lambda line: -line["bytes"]):
        if statistics.median(line["engines"]) > statistics.median(line["kernels"]):
            break
        first = line["bytes"]
    return first


def table(found):
    """Ratios by collective and size, of engines to kernels; then where engines begin."""
    clients, rows, first = list(found), {}, {}
    for client, lines in found.items():
        for line in lines:
            own = [statistics.median(line[way]) for way in WAYS]
            rows.setdefault((line["operation"], line["bytes"]), []).extend([*(cell(line[way]) for way in WAYS), f"{own[0] / own[1]:.2f}"])
        for operation in dict.fromkeys(line["operation"] for line in lines):
            at = begins([line for line in lines if line["operation"] == operation])
            first.setdefault(operation, []).append("never" if at is None else f"{at >> 20} MiB")
    head = ["operation", "bytes", *(f"{client}: {what}" for client in clients for what in ("kernels", "engines", "kernels / engines"))]
    return (bench.table(["engines are faster from", *clients], [[operation, *sizes] for operation, sizes in first.items()]) + "\n\n" +
            bench.table(head, [[*at, *cells] for at, cells in rows.items()]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nranks", type=int, required=True)
    parser.add_argument("--operations", default=COLLECTIVES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--begin", default="4MiB")
    parser.add_argument("--factor", type=int, default=2)
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, mps_server(folder) as told:
        found = {client: measure(options, told, *who) for client, who in CLIENTS.items()}
    facts = bench.facts(options, machine_of(options.nranks))
    text = (f"{facts['machine']}; commit {facts['commit']}. A service whose collectives all go by kernels in the ranks' streams, and one where all go by its "
            f"copy engines, in turn. Times in us, of calls back to back as the callers' streams see them: median (least to greatest) of {options.rounds} "
            f"rounds, the slowest rank's.\n\n{table(found)}\n")
    bench.write_out(options, {"found": found, **facts}, text)


if __name__ == "__main__":
    main()
