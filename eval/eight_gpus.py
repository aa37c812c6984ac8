#!/usr/bin/env python3
"""Everything that eight GPUs of one host are to show, within twenty minutes: right results, and
collectives, sends, crossovers, steps of training and two services of four GPUs each beside NCCL.

usage: eight_gpus.py --nccl VERSION=FILE [--nccl VERSION=FILE]... --out FOLDER [--parts LIST] [--limit SECONDS] [--nics FILE]
                     [--gpus N] [--tiny] [--commit COMMIT]

Parts come by worth, each for its own seconds at most: what takes longer is ended, and what finds no time left is named. A part that
fails keeps no other from running. Machines that end a command sooner take --parts in turns. Writes what each part writes, then
eight-gpus.json and eight-gpus.md, with the share of places where mccs is at least as fast as the faster NCCL. Fails if a part does;
what is slow fails nothing. --nics is libibverbs.so.1 of the emulated NICs (tests/nics/versioned).

Needs so many GPUs. Binaries: target/release, or the folder MCCS_BIN, with all that tests/gpu.sh names. --tiny tests this script, on
emulated GPUs as well (tests/gpu-emulated.sh): lengths are short, and parts that take real GPUs are left out."""

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time

import bench
from cuda import machine_of
from cuda_service import BINARIES

EVAL = pathlib.Path(__file__).parent
TINY = {"end": "4KiB", "factor": 64, "rounds": 1}
FULL = {"end": "512MiB", "factor": 4, "rounds": 3}
# By name: what each of `cuda.py` measures, and its seconds with one NCCL.
MEASURED = {"cuda": ("sizes", 90), "cuda-rooted": ("rooted", 60), "cuda-points": ("points", 60)}


class Part:
    """A command with its seconds; or why it is not run."""

    def __init__(self, name, seconds, command, environment=None, absent=None):
        self.name, self.seconds, self.command = name, seconds, [*map(str, command)]
        self.environment, self.absent = environment or {}, absent


def places_file(name, gpus, version):
    return f"{name}-{gpus}-nccl-{version}"


def checks(options):
    """Every collective's elements: by tests/gpu.sh, or few of them."""
    if options.tiny:
        return Part("values", 300, [BINARIES / "mccs-cuda-perf", "--check", "--nranks", options.gpus, "--operation", "all", "--begin", "1B",
                                    "--end", "2KiB", "--factor", "400", "--dtypes", "float", "--redops", "sum"])
    return gpu_sh(options, "values", 220)


def gpu_sh(options, part, seconds):
    """A part of tests/gpu.sh, for as many ranks as there are GPUs."""
    return Part(part, seconds, [bench.ROOT / "tests" / "gpu.sh", part], {"MCCS_RANKS": str(options.gpus), "OUT": str(options.out / part)},
                "it takes real GPUs" if options.tiny else None)


def parts_of(options):
    lengths, ways = TINY if options.tiny else FULL, options.nccl
    common = ["--nranks", options.gpus, "--out", options.out, *(["--commit", options.commit] if options.commit else [])]
    names = [argument for version, path in ways.items() for argument in ("--nccl", f"{version}={path}")]
    yield checks(options)
    for name, (what, seconds) in MEASURED.items():
        for version, path in ways.items():
            file = places_file(name, options.gpus, version)
            yield Part(file, seconds, [EVAL / "cuda.py", file, what, *common, "--nccl", path, "--rounds", lengths["rounds"],
                                       "--factor", lengths["factor"], "--end", lengths["end"]])
    yield Part("cuda-training", 120, [EVAL / "cuda_training.py", f"cuda-training-{options.gpus}", *common, *names,
                                      *(["--tiny", "--workload", "ddp", "--compute-ms", 1, "--rounds", 1] if options.tiny else ["--rounds", 2])])
    nccl = [argument for path in ways.values() for argument in ("--nccl", path)]
    yield Part("nics", 100, [EVAL / "nics.py", f"nics-{options.gpus}", "gpudirect", "--nics", options.nics, "--gpus", options.gpus, *nccl,
                             "--out", options.out, "--factor", 16, "--rounds", 2, *common[4:]],
               absent="it takes real GPUs; tests/gpu-emulated.sh has it" if options.tiny else None if options.nics else "--nics names no library")
    control = shutil.which("nvidia-cuda-mps-control", path=os.environ["PATH"] + ":/usr/local/nvidia/bin")
    yield Part("crossovers", 90, [EVAL / "crossovers.py", f"cuda-crossovers-{options.gpus}", *common, "--rounds", 2, "--begin", "16MiB",
                                  "--factor", 4, "--operations", "all_reduce,all_gather,reduce_scatter"],
               absent=None if control else "there is no nvidia-cuda-mps-control here")
    yield Part("chunks", 100, [EVAL / "chunks.py", f"cuda-chunks-{options.gpus}", *common, "--nccl", "none", "--rounds", 2, "--limit", 80],
               absent="it takes real GPUs" if options.tiny else None)
    yield gpu_sh(options, "tests", 240)
    yield Part("training", 150, [EVAL / "training.py", f"training-{options.gpus}", *common, *names, "--rounds", 1, "--limit", 120],
               absent="it takes real GPUs" if options.tiny else None if importlib.util.find_spec("torch") else "there is no PyTorch here")
    for part in ("programs", "services"):
        yield gpu_sh(options, part, 200)


def run(part, seconds):
    """Runs a part, and returns its outcome: a word or two. Its processes are a group, which ends with it."""
    process = subprocess.Popen(part.command, env={**os.environ, **part.environment}, start_new_session=True)
    try:
        status = process.wait(timeout=seconds)
        return "done" if status == 0 else f"**FAILED** ({status})"
    except subprocess.TimeoutExpired:
        # Services end by themselves when they are told to.
        for sign in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, sign)
            try:
                process.wait(timeout=5)
                break
            except subprocess.TimeoutExpired:
                continue
        return f"**ended** after its {seconds:.0f} s"


def ratios(options):
    """The faster NCCL's time by ours at each place: a measurement, an operation or pattern, and a size."""
    found = {}
    for name in MEASURED:
        for version in options.nccl:
            file = options.out / f"{places_file(name, options.gpus, version)}.json"
            if not file.exists():
                continue
            times = {}
            for line in json.loads(file.read_text())["lines"]:
                place = (name, line.get("operation") or line["pattern"], line["bytes"])
                times.setdefault(place, {})[line["side"]] = statistics.median(line["stream_us"])
            for place, sides in times.items():
                found.setdefault(place, []).append(sides["nccl"] / sides["mccs"])
    return {place: min(each) for place, each in found.items()}


def text_of(about, rows, by_place):
    versions = " and ".join(about["nccl"])
    text = (f"{about['machine']}, beside NCCL {versions} without NVLink multicast; commit {about['commit']}.\n\n"
            + bench.table(["part", "result", "s"], rows))
    if not by_place:
        return text
    measured = {}
    for (name, operation, _), ratio in by_place.items():
        measured.setdefault((name, operation), []).append(ratio)
    ahead = lambda found: sum(ratio >= 1 for ratio in found)
    cells = lambda found: [len(found), ahead(found), f"{min(found):.2f}", f"{statistics.median(found):.2f}", f"{max(found):.2f}"]
    everything = list(by_place.values())
    return (text + f"\nThe faster NCCL's time by ours, in the stream. The goal is 1.0 at 95 of 100 places: here at "
            f"{100 * ahead(everything) / len(everything):.0f} of 100.\n\n"
            + bench.table(["measurement", "operation", "places", "1.0 or more", "least", "median", "greatest"],
                          [[*key, *cells(found)] for key, found in measured.items()] + [["all", "", *cells(everything)]]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nccl", action="append", required=True, metavar="VERSION=FILE", help="NCCL's library; may be repeated")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--parts", help="those to run, comma-separated; default: all")
    parser.add_argument("--limit", type=int, default=1180, help="seconds after which no part is run any more")
    parser.add_argument("--nics", help="libibverbs.so.1 of the emulated NICs")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="tests the script")
    bench.commit_option(parser)
    options = parser.parse_args()
    options.nccl = dict(way.split("=", 1) for way in options.nccl)
    options.out = options.out.resolve()
    options.rounds = (TINY if options.tiny else FULL)["rounds"]
    options.out.mkdir(parents=True, exist_ok=True)
    parts = list(parts_of(options))
    wanted = options.parts.split(",") if options.parts else [part.name for part in parts]
    if unknown := set(wanted) - {part.name for part in parts}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in parts)}")
    about = bench.facts(options, machine_of(options.gpus), nccl=list(options.nccl))
    begin, rows = time.monotonic(), []
    for part in parts:
        if part.name not in wanted:
            continue
        began, left = time.monotonic(), options.limit - (time.monotonic() - begin)
        print(f"== {part.name} (at {began - begin:.0f} s)", flush=True)
        if part.absent:
            result = f"not run: {part.absent}"
        elif left < 1:
            result = f"not run: {options.limit} s were over"
        else:
            if "OUT" in part.environment:
                pathlib.Path(part.environment["OUT"]).mkdir(exist_ok=True)
            result = run(part, left if options.tiny else min(part.seconds, left))
        print(f"== {part.name}: {result}", flush=True)
        rows.append([part.name, result, f"{time.monotonic() - began:.0f}"])
    by_place = ratios(options)
    lines = [{"measurement": name, "operation": operation, "bytes": bytes, "ratio": ratio} for (name, operation, bytes), ratio in by_place.items()]
    parts = [dict(zip(("part", "result", "s"), row)) for row in rows]
    (options.out / "eight-gpus.json").write_text(bench.without_folders(json.dumps({**about, "parts": parts, "lines": lines})) + "\n")
    text = text_of(about, rows, by_place)
    (options.out / "eight-gpus.md").write_text(text)
    print(text)
    sys.exit(any("**" in result for _, result, _ in rows))


if __name__ == "__main__":
    main()
