#!/usr/bin/env python3
"""Training steps without a framework on GPUs of one host: matrix products beside collectives of
DDP, FSDP2 and experts (MoE).

usage: cuda_training.py NAME --nranks N [--nccl SIDE=FILE]... [--service SIDE=SETTINGS]... [--rounds N] [--workload LIST]
                        [--compute-ms MS] [--priority N] [--tiny] [--out FOLDER] [--commit COMMIT]

Sides take turns: mccs by its default, mccs with settings of the section [cuda] (`--service '8 MiB=large_from = "8MiB"'`), and NCCLs
(`--nccl "2.32.3=/lib/libnccl.so.2"`; default: that of the Python package). Every side's results are checked.

Needs so many GPUs, and writes NAME.json (data and provenance) and NAME.md. Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import json
import os
import pathlib
import statistics
import tempfile

import bench
from cuda import installed_nccl
from cuda_service import BINARIES, services

DEFAULT, ALONE = "mccs", "without collectives"
TINY = ["--layers", "2", "--width", "128", "--tokens", "128", "--bucket", "100KiB", "--first-bucket", "8KiB", "--steps", "2", "--warmup", "1"]


def median_ms(line):
    return statistics.median(sum(line["rounds_ms"], []))


def cell(line):
    medians = [statistics.median(times) for times in line["rounds_ms"]]
    return f"{median_ms(line):.2f} ({min(medians):.2f} to {max(medians):.2f})"


def table(found):
    """A row a side of each workload: its step, what of that collectives cost, and how much faster than the fastest NCCL it is."""
    theirs, rows = set(found["nccl_sides"]), []
    for workload in dict.fromkeys(line["workload"] for line in found["lines"]):
        lines = {line["side"]: line for line in found["lines"] if line["workload"] == workload}
        best = min((median_ms(line) for side, line in lines.items() if side in theirs), default=None)
        for side, line in lines.items():
            is_own = best is not None and side not in theirs and side != ALONE
            rows.append([workload, side, cell(line), f"{median_ms(line) - median_ms(lines[ALONE]):+.2f}",
                         f"{best / median_ms(line):.3f}" if is_own else ""])
    return bench.table(["workload", "side", "step, ms", "more than without collectives, ms", "best NCCL / mccs"], rows)


def measured(options, nccl):
    settings = {DEFAULT: "", **dict(text.split("=", 1) for text in options.service)}
    texts = {f"service{number}": f'[cuda]\nuse = "required"\n{lines}\n' for number, lines in enumerate(settings.values())}
    with tempfile.TemporaryDirectory() as folder, services(texts, folder) as sockets:
        file = pathlib.Path(folder) / "found.json"
        names = [name if name == DEFAULT else f"mccs, {name}" for name in settings]
        sides = [argument for name, socket in zip(names, sockets) for argument in ("--side", f"{name}={socket}")]
        sides += [argument for name, path in nccl.items() for argument in ("--nccl", f"NCCL {name}={path}")]
        command = [BINARIES / "mccs-cuda-training", "--nranks", options.nranks, *sides, "--workload", options.workload, "--rounds", options.rounds,
                   f"--priority={options.priority}", "--compute-ms", options.compute_ms, "--json", file, *(TINY if options.tiny else [])]
        print(bench.run([*map(str, command)], timeout=options.timeout), flush=True)
        return {**json.loads(file.read_text()), "nccl_sides": [f"NCCL {name}" for name in nccl]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nranks", type=int, required=True)
    parser.add_argument("--nccl", action="append", metavar="SIDE=FILE", help='may be repeated; "none": no NCCL')
    parser.add_argument("--service", action="append", default=[], metavar="SIDE=SETTINGS",
                        help="lines for [cuda] of another service; may be repeated")
    parser.add_argument("--workload", default="all", help="ddp, fsdp, moe, comma-separated; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compute-ms", type=float, default=50, help="what the products of a step take alone")
    parser.add_argument("--priority", type=int, default=0, help="of the streams of collectives")
    parser.add_argument("--tiny", action="store_true", help="a model of some thousand parameters: tests the script")
    parser.add_argument("--timeout", type=int, default=300, help="seconds")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    named = {"PyTorch's": installed_nccl()} if options.nccl is None else dict(text.split("=", 1) for text in options.nccl if text != "none")
    found = measured(options, named)
    facts = bench.facts(options, f"{found['nranks']} ranks on {found['gpu']}", **found)
    text = (f"{facts['machine']}; commit {facts['commit']}; NCCL {', '.join(found['nccl']) or 'none'}. Step times in ms: median of all "
            f"steps of {options.rounds} rounds (least to greatest median of a round), the slowest rank's. {found['shape']['tokens']} tokens a rank.\n\n"
            f"{table(found)}\n")
    bench.write_out(options, facts, text)


if __name__ == "__main__":
    main()
