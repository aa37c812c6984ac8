#!/usr/bin/env python3
"""Effect of the longest chunk (`[cuda] chunk`) on long reduces, and on long sends and receives,
beside NCCL.

usage: chunks.py NAME --nranks N [--chunks LIST] [--begin SIZE] [--end SIZE] [--rounds N] [--nccl FILE] [--limit SECONDS] [--out FOLDER]
                 [--commit COMMIT]

A service for each length, and one as it is by default; they go in turn, NCCL beside each. Needs so many GPUs. Writes NAME.json (data and
provenance) and NAME.md. Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import json
import os
import statistics
import tempfile
import time

import bench
from cuda import SERVICE, installed_nccl, machine_of, version_of
from cuda_service import BINARIES, cell, services

DEFAULT = "default"
# By name, what makes the program measure it.
PATTERNS = {"reduce": ["--operation", "reduce"], "ring": ["--p2p", "ring"]}


def measure(options, nccl, sockets):
    """By pattern and size, the times of all rounds by length and of NCCL, in us. A pattern is not begun behind the limit once all lengths
    have it."""
    found, begin = {}, time.monotonic()
    for number in range(options.rounds):
        for chunk, socket in zip(bench.in_turn(sockets, number), bench.in_turn(sockets.values(), number)):
            for pattern, arguments in PATTERNS.items():
                if number > 0 and time.monotonic() - begin > options.limit:
                    print(f"{chunk}, {pattern}: not run, {options.limit} s are over", flush=True)
                    continue
                with tempfile.NamedTemporaryFile(suffix=".json") as file:
                    command = [BINARIES / "mccs-cuda-perf", "--socket", socket, "--nranks", options.nranks, *arguments, "--begin", options.begin,
                               "--end", options.end, "--factor", options.factor, "--rounds", 1, "--json", file.name, *(["--nccl", nccl] if nccl else [])]
                    bench.run([*map(str, command)], timeout=300)
                    more = json.load(open(file.name))
                for line in more if isinstance(more, list) else more["lines"]:
                    side = chunk if line["side"] == "mccs" else "NCCL"
                    found.setdefault((pattern, line["bytes"]), {}).setdefault(side, []).extend(line["stream_us"])
    return found


def table(found, chunks):
    def row(at, times):
        best = statistics.median(times["NCCL"]) if "NCCL" in times else None
        ratios = [f"{best / statistics.median(times[chunk]):.3f}" if best else "-" for chunk in chunks]
        return [*at, *(cell(times[side]) for side in (*chunks, "NCCL") if side in times), *ratios]
    sides = [*chunks, *(["NCCL"] if any("NCCL" in times for times in found.values()) else [])]
    head = ["pattern", "bytes", *sides, *(f"NCCL / {chunk}" for chunk in chunks)]
    return bench.table(head, [row(*line) for line in found.items()])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nranks", type=int, required=True)
    parser.add_argument("--chunks", default="36KiB,48KiB,64KiB,96KiB")
    parser.add_argument("--begin", default="8MiB")
    parser.add_argument("--end", default="512MiB")
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=240, help="seconds after which no further round begins")
    parser.add_argument("--nccl", help="NCCL's library; default: that of the Python package; none: mccs alone")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    nccl = None if options.nccl == "none" else options.nccl or installed_nccl()
    # Multicast is left alone (cuda.py).
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    chunks = [DEFAULT, *options.chunks.split(",")]
    # Kernels alone: copy engines have no chunks.
    texts = {chunk: SERVICE + 'large_from = "0"\n' + (f'chunk = "{chunk}"\n' if chunk != DEFAULT else "") for chunk in chunks}
    with tempfile.TemporaryDirectory() as folder, services(texts, folder) as sockets:
        found = measure(options, nccl, dict(zip(chunks, sockets)))
    facts = bench.facts(options, machine_of(options.nranks), nccl=version_of(nccl) if nccl else "none")
    lines = [{"pattern": pattern, "bytes": bytes, "us": times} for (pattern, bytes), times in found.items()]
    text = (f"{facts['machine']}, one process each, beside NCCL {facts['nccl']} without NVLS; commit {facts['commit']}. Services whose longest "
            f"chunk differs, in turn. Times in us, of calls back to back as the callers' streams see them: median (least to greatest) of up to "
            f"{options.rounds} rounds, the slowest rank's. `ring`: each rank sends to the next.\n\n{table(found, chunks)}\n")
    bench.write_out(options, {"lines": lines, **facts}, text)


if __name__ == "__main__":
    main()
