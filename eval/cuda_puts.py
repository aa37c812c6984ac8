#!/usr/bin/env python3
"""Port and memory channels from within kernels: triggers, ping-pong, puts, beside copies by the rank itself and what
MSCCL++ reports of itself.

usage: cuda_puts.py NAME [--nranks N] [--rounds N] [--iterations N] [--total BYTES] [--sizes B,B] [--image FILE] [--out FOLDER] [--commit COMMIT]

Needs a GPU for each rank, and writes NAME.json (data and provenance) and NAME.md. Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import json
import pathlib
import statistics
import tempfile

import bench
from cuda import machine_of
from cuda_service import BINARIES

# As its documents give them, of an H200: by what is measured, and bytes.
MSCCLPP = {("a trigger, 1 threads", 0): "1.97 us", ("signals to and fro", 0): "19.0 us (port channel)",
           ("packets to and fro, memory channel", 8): "8.1 us",
           ("puts with signals, both ways at once", 1 << 10): "20.5 us", ("puts with signals, both ways at once", 1 << 20): "41.9 GB/s",
           ("puts with signals, both ways at once", 128 << 20): "367 GB/s"}


def sized(count):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} B" if count else ""


def row(line):
    us, count = line["us"], line["bytes"]
    middle = statistics.median(us)
    rate = f"{count / middle / 1e3:.3g} GB/s" if count else f"{1 / middle:.3g} million/s"
    return [line["what"], sized(count), f"{middle:.2f} ({min(us):.2f} to {max(us):.2f})", rate, MSCCLPP.get((line["what"], count), "")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--total", type=int, default=1 << 30)
    parser.add_argument("--sizes", default="8,1024,65536,1048576,16777216,134217728")
    parser.add_argument("--image")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    with bench.service('max_memory = "4GiB"', '[cuda]\nuse = "required"', BINARIES) as (_, folder), tempfile.TemporaryDirectory() as results:
        file = pathlib.Path(results) / "found.json"
        command = [BINARIES / "mccs-cuda-puts", "--socket", folder / "mccs.sock", "--json", file, "--sizes", options.sizes]
        for option in ("nranks", "rounds", "iterations", "total"):
            command += [f"--{option}", getattr(options, option)]
        if options.image:
            command += ["--image", options.image]
        bench.run([*map(str, command)], timeout=500)
        found = json.loads(file.read_text())
    facts = bench.facts(options, machine_of(options.nranks))
    heads = ["what", "bytes", "us: median (least to greatest)", "rate", "MSCCL++'s own figure"]
    text = (f"{facts['machine']}; {options.nranks} ranks; commit {facts['commit']}; {options.rounds} rounds, all in turn. Times of kernels are by the GPU's clock. "
            f"A rank alone plays both ends, in one context.\n\n{bench.table(heads, [row(line) for line in found['lines']])}\n")
    bench.write_out(options, {**found, **facts}, text)


if __name__ == "__main__":
    main()
