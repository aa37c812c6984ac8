#!/usr/bin/env python3
"""Overhead of timing (`[cuda] timing`), metrics and traces on GPU collectives, by size. Times are
those of the callers' streams, against a service that takes no times. Sides in turn, in another
order each round; the ratio of a round is that of its medians.

usage: cuda_timing.py NAME --nranks N [--rounds N] [--sizes 8,4096,...] [--out FOLDER] [--commit COMMIT]

Needs so many GPUs, and writes NAME.json (data and provenance) and NAME.md. Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import contextlib
import json
import pathlib
import statistics
import tempfile
import threading
import urllib.request

import bench
from cuda import machine_of
from cuda_service import BINARIES, cell, services

METRICS = "127.0.0.1:9478"
OFF, ON, SEEN = "off", "on", "on, scraped and traced"
OPERATIONS = ["all_reduce", "all_gather"]


def service(more, timing):
    return f'{more}[cuda]\nuse = "required"\ntiming = {timing}\n'


@contextlib.contextmanager
def looked_at(control, out):
    """One trace after the other as long as the work takes, and a scrape after each second."""
    over = threading.Event()
    def look():
        while not over.is_set():
            bench.run([BINARIES / "mccsctl", "trace", "--seconds", "1", "--out", out], {"MCCS_CONTROL_SOCKET": str(control)})
            urllib.request.urlopen(f"http://{METRICS}/metrics", timeout=10).read()
    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def perf(socket, nranks, size, file):
    bench.run([*map(str, [BINARIES / "mccs-cuda-perf", "--socket", socket, "--nranks", nranks, "--operation", ",".join(OPERATIONS), "--begin",
                          f"{size}B", "--end", f"{size}B", "--rounds", 1, "--json", file])], timeout=120)
    return {line["operation"]: statistics.median(line["stream_us"]) for line in json.loads(file.read_text())["lines"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nranks", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="8,4096,65536,1048576,16777216,134217728")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    lines, slices = [], 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        texts = {"untimed": service("", "false"), "timed": service(f'[metrics]\nlisten = "{METRICS}"\n', "true")}
        with services(texts, folder) as (untimed, timed):
            control = folder / "timed" / "mccs-control.sock"
            for size in map(int, options.sizes.split(",")):
                for number in range(options.rounds):
                    for side in bench.in_turn([OFF, ON, SEEN], number):
                        look = looked_at(control, folder / "trace.json") if side == SEEN else contextlib.nullcontext()
                        with look:
                            took = perf(untimed if side == OFF else timed, options.nranks, size, folder / "found.json")
                        lines += [{"bytes": size, "round": number, "side": side, "operation": of, "stream_us": us} for of, us in took.items()]
                        if side == SEEN:
                            events = json.loads((folder / "trace.json").read_text())["traceEvents"]
                            slices = max(slices, sum("clock_error_us" in event.get("args", {}) for event in events))
    def of(operation, size, side):
        return [line["stream_us"] for line in lines if (line["operation"], line["bytes"], line["side"]) == (operation, size, side)]
    def row(operation, size):
        off = of(operation, size, OFF)
        cells = [operation, size, cell(off)]
        for side in (ON, SEEN):
            ratios = [one / other for one, other in zip(of(operation, size, side), off)]
            cells += [cell(of(operation, size, side)), f"{statistics.median(ratios):.4f} ({min(ratios):.3f} to {max(ratios):.3f})"]
        return cells
    sizes = sorted({line["bytes"] for line in lines})
    head = ["operation", "bytes", "off, us", "on, us", "on / off", "scraped and traced, us", "that / off"]
    table = bench.table(head, [row(operation, size) for operation in OPERATIONS for size in sizes])
    facts = bench.facts(options, machine_of(options.nranks), slices=slices)
    text = (f"{facts['machine']}, one process each; commit {facts['commit']}; {options.rounds} rounds. float sum, out of place; microseconds of calls back to "
            f"back, median (least to most). The longest trace of a second has {slices} of ranks' collectives.\n\n{table}")
    print(text)
    out = pathlib.Path(options.out)
    (out / f"{options.name}.json").write_text(json.dumps({"provenance": facts, "lines": lines}, indent=1) + "\n")
    (out / f"{options.name}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
