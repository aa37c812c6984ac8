#!/usr/bin/env python3
"""Collectives, sends and receives on GPUs of one host, beside NCCL, by size, alone and beside
computing. Times are those of the callers' streams. Each rank computes on most of its GPU, or on
all of it. The time to join a communicator is measured, too.

usage: cuda.py NAME sizes|rooted|points|joins|beside|beside-all --nranks N [--rounds N] [--factor N] [--end SIZE] [--cuda LINES]
               [--nccl FILE] [--out FOLDER] [--commit COMMIT]

Needs so many GPUs, and writes NAME.json (data and provenance) and NAME.md. Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import ctypes
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import tempfile

import bench
from cuda_service import BINARIES, cell, services

COLLECTIVES = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast"
ROOTED = "reduce,gather,scatter"
SERVICE = '[limits]\noperation_timeout = "60s"\n[cuda]\nuse = "required"\n'


def installed_nccl():
    """NCCL of the Python package that PyTorch brings."""
    package = importlib.util.find_spec("nvidia.nccl")
    if package is None:
        sys.exit("cuda.py: there is no package nvidia.nccl; --nccl names the library")
    return str(pathlib.Path(list(package.submodule_search_locations)[0], "lib", "libnccl.so.2"))


def machine_of(nranks):
    name, driver = bench.run(["nvidia-smi", "--format=csv,noheader", "--query-gpu=name,driver_version"]).splitlines()[0].split(", ")
    return f"{name}, {nranks} of one host, driver {driver}, {os.cpu_count()} cores"


def version_of(library):
    number = ctypes.c_int()
    ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def beside_nccl(lines, key):
    """Lines by operation and size: ours and NCCL's."""
    pairs = {}
    for line in lines:
        pairs.setdefault((line[key], line["bytes"]), {})[line["side"]] = line
    return [(*at, of["mccs"], of["nccl"]) for at, of in pairs.items()]


def ratio(own, nccl):
    return f"{statistics.median(nccl) / statistics.median(own):.2f}"


def sizes(found):
    def row(operation, bytes, own, nccl):
        medians = [f"{statistics.median(side[which]):.1f}" for which in ("single_us", "call_us") for side in (own, nccl)]
        return [operation, bytes, cell(own["stream_us"]), cell(nccl["stream_us"]), ratio(own["stream_us"], nccl["stream_us"]), *medians,
                *(f"{side['busbw_gbps']:.1f}" for side in (own, nccl))]
    head = ["operation", "bytes", "mccs, stream", "NCCL, stream", "NCCL / mccs", "mccs, alone", "NCCL, alone", "mccs, call", "NCCL, call",
            "mccs GB/s", "NCCL GB/s"]
    return bench.table(head, [row(*pair) for pair in beside_nccl(found["lines"], "operation")])


def points(found):
    def row(pattern, bytes, own, nccl):
        return [pattern, bytes, cell(own["stream_us"]), cell(nccl["stream_us"]), ratio(own["stream_us"], nccl["stream_us"]),
                *(f"{side['busbw_gbps']:.1f}" for side in (own, nccl))]
    head = ["pattern", "bytes of a rank", "mccs", "NCCL", "NCCL / mccs", "mccs GB/s", "NCCL GB/s"]
    return bench.table(head, [row(*pair) for pair in beside_nccl(found["lines"], "pattern")])


def joins(found):
    rows = [[line["side"], f"{line['first_us']:.1f}", *(cell(line[which]) for which in ("join_us", "usable_us", "leave_us"))]
            for line in found["lines"]]
    return bench.table(["side", "first join", "join", "usable", "leave"], rows)


def beside(found):
    def row(line):
        of = lambda which: [once[which] for once in line["rounds"]]
        more = lambda with_it, without: f"{statistics.median(of(with_it)) / statistics.median(of(without)):.3f}"
        operation = line["operation"] + (", in place" if line["is_in_place"] else "")
        return [operation, line["side"], line["busy_sms"], line["calls"], cell(of("alone_us")), cell(of("beside_us")),
                more("beside_us", "alone_us"), cell(of("load_alone_us")), cell(of("load_beside_us")),
                more("load_beside_us", "load_alone_us"), cell(of("both_us")), cell(of("multiprocessor_us"))]
    head = ["operation", "side", "busy SMs", "calls", "collective alone", "beside the kernel", "ratio", "kernels alone",
            "beside collectives", "ratio", "both", "SM us of a collective"]
    return bench.table(head, [row(line) for line in found["lines"]])


LONG = ["--begin", "256MiB", "--end", "256MiB"]
# Runs, up to the size --end where they name none, the table of what they find, and what it shows.
WHAT = {
    "sizes": ([["--operation", COLLECTIVES, "--begin", "8B"]], sizes,
              'float sum, out of place. "Stream": the average of calls back to back; "alone": one call with its synchronize; "call": what the '
              "call itself takes its thread of that. Bandwidth is busbw in GB/s"),
    "rooted": ([["--operation", ROOTED, "--begin", "8B"]], sizes,
               'float sum, out of place, from or to rank 0; NCCL gathers and scatters by groups of sends and receives. "Stream": the average of '
               'calls back to back; "alone": one call with its synchronize; "call": what the call itself takes its thread of that. Bandwidth is '
               "busbw in GB/s"),
    "points": ([["--p2p", "ring,one_way,uneven", "--begin", "8B"]], points,
               "a group of sends and receives a call, back to back. Bandwidth is what the busiest rank sends to others, in GB/s. `ring`: to the "
               "next rank, from the one before. `one_way`: rank 0 to rank 1. `uneven`: every rank to every rank and itself, parts that differ up "
               "to threefold"),
    "joins": ([["--joins"]], joins,
              '"first join": of the process, whose context is there; "join": the others, one after the other; "usable": from the beginning of '
              'that until a first all-reduce of 4 bytes has ended; "leave": until the call returns'),
    "beside": ([["--operation", "all_gather,all_reduce", *LONG, "--busy-sms", "100"]], beside,
               "256 MiB, float sum, out of place, while a kernel of the same process computes on 100 of the GPU's multiprocessors (kernels of "
               '2 ms, one behind the other; no MPS). "Both": from the beginning to the end of the same kernels and the same number of calls on '
               'either side, which are those that take us as long as the kernels. "SM us": what the computation lost, multiprocessors times time'),
    # More than any GPU has: all.
    "beside-all": ([["--operation", "all_gather", *LONG, "--busy-sms", "1000", *place] for place in (["--in-place"], [])], beside,
                   "256 MiB, while a kernel of the same process computes on all of the GPU's multiprocessors (kernels of 2 ms, one behind the "
                   "other; no MPS). In place copy engines do everything, no multiprocessor is used, and a collective should take as long as alone, "
                   "within 3%. Out of place the rank's own part is copied within its GPU, which the driver does by a kernel: that has to wait until "
                   "one of the computation's ends. NCCL's kernels wait in either case"),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--nranks", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--factor", type=int, default=2, help="from one size to the next; default: 2")
    parser.add_argument("--end", default="512MiB", help="the longest that is measured by size")
    parser.add_argument("--cuda", default="", help="lines for the section [cuda] of the service's configuration, which is its default otherwise")
    parser.add_argument("--nccl", help="NCCL's library; default: that of the Python package")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    runs, table, words = WHAT[options.what]
    nccl = options.nccl or installed_nccl()
    # Multicast is left alone: a program that uses it and fails may leave GPUs that others share out
    # of service.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    with tempfile.TemporaryDirectory() as folder, services({"gpu-host": f"{SERVICE}{options.cuda}\n"}, folder) as sockets:
        file = pathlib.Path(folder) / "found.json"
        found = {"lines": []}
        for arguments in runs:
            if "--begin" in arguments and "--end" not in arguments:
                arguments = [*arguments, "--end", options.end]
            command = [BINARIES / "mccs-cuda-perf", "--socket", sockets[0], "--nranks", options.nranks, "--factor", options.factor, *arguments,
                       "--rounds", options.rounds, "--nccl", nccl, "--json", file]
            print(bench.run([*map(str, command)], timeout=500), flush=True)
            more = json.loads(file.read_text())
            more = {"lines": more} if isinstance(more, list) else more
            found = {**more, "lines": found["lines"] + more["lines"]}
    facts = bench.facts(options, machine_of(options.nranks), nccl=version_of(nccl))
    text = (f"{facts['machine']}, one process each, beside NCCL {facts['nccl']} without NVLS, sides in turn; commit "
            f"{facts['commit']}. Times in us: median (least to greatest) of {options.rounds} rounds, the slowest rank's: {words}.\n\n{table(found)}\n")
    bench.write_out(options, {**found, **facts}, text)


if __name__ == "__main__":
    main()
