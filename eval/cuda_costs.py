#!/usr/bin/env python3
"""Costs of the CUDA driver's stream calls: launches, graphs of one kernel, words, events. Nothing
of this project's has a part in it.

usage: cuda_costs.py NAME [--rounds N] [--blocks N] [--out FOLDER] [--commit COMMIT]

Needs a GPU, and writes NAME.json (data and provenance) and NAME.md. Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import json
import pathlib
import statistics
import tempfile

import bench
from cuda import machine_of
from cuda_service import BINARIES


def cell(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "found.json"
        bench.run([*map(str, [BINARIES / "mccs-cuda-costs", "--rounds", options.rounds, "--blocks", options.blocks, "--json", file])], timeout=300)
        found = json.loads(file.read_text())
    facts = bench.facts(options, machine_of(1))
    rows = [[line["what"], *(cell(line[which]) for which in ("call_us", "stream_us", "seen_us"))] for line in found["lines"]]
    text = (f"{facts['machine']}; kernels of {options.blocks} blocks that have nothing to do, 368 bytes of arguments; commit {facts['commit']}. Times in us: median (least to "
            f"greatest) of {options.rounds} rounds, all in turn. \"Caller\": a call, of 200 back to back; \"stream\": what each takes the stream, all enqueued before; "
            f"\"seen done\": from one call alone until the caller sees the stream idle.\n\n{bench.table(['what', 'caller', 'stream', 'seen done'], rows)}\n")
    out = pathlib.Path(options.out)
    (out / f"{options.name}.json").write_text(json.dumps({**found, **facts}) + "\n")
    (out / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
