#!/usr/bin/env python3
"""Call overhead beside NCCL's: a collective without elements, and 8 bytes, also with a profiler
plugin.

usage: cuda_calls.py NAME --nccl FILE [--nranks N] [--rounds N] [--processes N] [--limit SECONDS]

Sides alternate, with new processes each time. Within them the plugin alternates between hearing of everything and of nothing.
Needs N GPUs, and writes NAME.json (data and provenance) and NAME.md. Binaries: target/release, or the folder MCCS_BIN, with
libnccl.so.2, mccs-service, mccs-cuda-calls and examples/libcounting_profiler.so."""

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time

import bench
from cuda import machine_of, version_of
from cuda_service import BINARIES, services

MCCS, NCCL = "mccs", "NCCL"
PLUGIN = BINARIES / "examples" / "libcounting_profiler.so"


def lines_of(options, library, environment, plugin):
    """A run's lines: with the plugin, or without any."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [BINARIES / "mccs-cuda-calls", "--library", library, "--nranks", options.nranks, "--rounds", options.rounds,
                   "--seconds", options.timeout, "--json", file.name, *(["--plugin", PLUGIN] if plugin else [])]
        bench.run([*map(str, command)], {**environment, "NCCL_PROFILER_PLUGIN": str(PLUGIN) if plugin else "none"}, timeout=options.timeout + 10)
        return json.load(open(file.name))["lines"]


def measure(options, socket):
    """All rounds' times in us, by side, bytes, plugin and whose: the caller's or the stream's. And what the plugin adds, in percent:
    a median of pairs of one round, on mccs alone, since NCCL looks at a plugin's mask at other times."""
    sides = {MCCS: (BINARIES / "libnccl.so.2", {"MCCS_SOCKET": socket}), NCCL: (options.nccl, {"NCCL_NVLS_ENABLE": "0"})}
    times, added = {}, {MCCS: {}}
    begin = time.monotonic()
    for number in range(options.processes):
        for side in bench.in_turn(sides, number):
            for plugin in (False, True) if side == MCCS else (False,):
                if (side, 8, "listening" if plugin else "absent", "call_us") in times and time.monotonic() - begin > options.limit:
                    print(f"{side}: not run, {options.limit} s are over", flush=True)
                    continue
                lines = lines_of(options, *sides[side], plugin)
                for line in lines:
                    for whose in ("call_us", "stream_us"):
                        times.setdefault((side, line["bytes"], line["plugin"], whose), []).extend(line[whose])
                pairs = [[line for line in lines if line["bytes"] == 8 and line["plugin"] == state] for state in ("silent", "listening")]
                for whose in ("call_us", "stream_us") if plugin else ():
                    found = added[side].setdefault(whose, [])
                    found += [100 * (heard / silent - 1) for silent, heard in zip(*(of[0][whose] for of in pairs))]
    return times, added


def text_of(about, times, added):
    def cell(side, bytes, plugin, whose):
        found = times[side, bytes, plugin, whose]
        low, _, high = statistics.quantiles(found, n=4)
        return f"{statistics.median(found):.2f} ({low:.2f} to {high:.2f})"

    rows = [[side, bytes, plugin, cell(side, bytes, plugin, "call_us"), cell(side, bytes, plugin, "stream_us") if bytes else "-"]
            for side in (MCCS, NCCL) for bytes in (0, 8) for plugin in ("absent", "silent", "listening")
            if (side, bytes, plugin, "call_us") in times]
    more = [[side, *(f"{statistics.median(added[side][whose]):+.2f}" for whose in ("call_us", "stream_us"))] for side in added]
    return (f"Calls on {about['machine']}, beside NCCL {about['nccl']}; commit {about['commit']}. All-reduce of floats, {about['nranks']} processes,\n"
            f"400 calls back to back. Times in us: median (quartiles) of up to {about['rounds'] * about['processes']} rounds.\n\n"
            + bench.table(["side", "bytes", "plugin", "a call takes the caller", "and the stream"], rows)
            + "\n\nA plugin that counts all events adds so much to 8 bytes, in percent of the round before or after:\n\n"
            + bench.table(["side", "caller", "stream"], more) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nccl", required=True, help="NCCL's library")
    parser.add_argument("--nranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=51, help="rounds of a process")
    parser.add_argument("--processes", type=int, default=3, help="times that each side starts processes")
    parser.add_argument("--limit", type=int, default=40, help="seconds after which no side is run again")
    parser.add_argument("--timeout", type=int, default=30, help="seconds of one side's processes")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    about = bench.facts(options, machine_of(options.nranks), nccl=version_of(options.nccl), processes=options.processes,
                        nranks=options.nranks, cores=os.cpu_count())
    with tempfile.TemporaryDirectory() as folder, services({"service": '[cuda]\nuse = "required"\n'}, folder) as sockets:
        times, added = measure(options, sockets[0])
    text, out = text_of(about, times, added), pathlib.Path(options.out)
    lines = [dict(zip(("side", "bytes", "plugin", "whose", "us"), (*key, found))) for key, found in times.items()]
    (out / f"{options.name}.json").write_text(json.dumps({**about, "lines": lines, "added_percent": added}) + "\n")
    (out / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
