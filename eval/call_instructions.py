#!/usr/bin/env python3
"""Instructions of the library in a call of 8 bytes, counted by callgrind on emulated GPUs: what the
caller's processor does besides the driver. With and without a profiler plugin that counts all
events.

usage: call_instructions.py NAME [--nranks N] [--calls N] [--rounds N] [--most N] [--out FOLDER] [--commit COMMIT]

Counts do not depend on the machine's speed or load, only on the compiler. The C library's instructions count as the library's where it
asks for them; the plugin's own do not. What other threads of the rank do while a call lasts counts, too.

Needs valgrind and no GPU. Writes NAME.json and NAME.md. Binaries: target/release, or the folder MCCS_BIN, with mccs-service,
mccs-cuda-calls, libnccl.so.2, libmccs_emulated_driver.so and examples/libcounting_profiler.so."""

import argparse
import os
import pathlib
import re
import shutil
import sys
import tempfile

import bench
from cuda_service import BINARIES, services

CALL = "ncclAllReduce"
LIBRARY, DRIVER, PLUGIN = "libnccl.so", "libcuda.so", "libcounting_profiler.so"
# The program that calls.
CALLER = "mccs-cuda-calls"


def costs(path):
    """Reads callgrind's file of a process: calls made, and instructions of the library and of the C library on its behalf. The format has
    names once and numbers later, and two kinds of costs: a function's own, and those of a call in the line behind."""
    names, now, instructions, calls, called = {}, {}, 0, 0, None
    for line in path.read_text().splitlines():
        if found := re.match(r"(c?ob|c?fn)=\((\d+)\)(?: (.*))?", line):
            key, number, name = found.groups()
            names.setdefault((key[-2:], number), name)
            now[key] = names[key[-2:], number]
        elif line.startswith("calls="):
            called = int(line[6:].split()[0])
        elif re.match(r"[\d+*-]", line) and len(fields := line.split()) > 1:
            here, there = now.get("ob", ""), now.get("cob", now.get("ob", ""))
            if LIBRARY in here and (called is None or not any(other in there for other in (LIBRARY, DRIVER, PLUGIN))):
                instructions += int(fields[1])
            if called is not None:
                calls += called if CALLER in here and now["cfn"] == CALL else 0
                called = None
                now.pop("cob", None)
    return calls, instructions


def measure(options, socket, driver, with_plugin, folder):
    """Instructions of a call of rank 0's."""
    plugin = BINARIES / "examples" / PLUGIN
    program = [BINARIES / CALLER, "--library", BINARIES / "libnccl.so.2", "--nranks", options.nranks, "--rounds", options.rounds,
               "--calls", options.calls, "--seconds", 300, "--bytes", 8, *(["--plugin", plugin] if with_plugin else [])]
    command = ["valgrind", "--tool=callgrind", "--trace-children=yes", f"--toggle-collect={CALL}", f"--callgrind-out-file={folder}/%p", *program]
    environment = {"MCCS_SOCKET": socket, "LD_LIBRARY_PATH": str(driver), "MCCS_EMULATED_GPUS": str(options.nranks),
                   "NCCL_PROFILER_PLUGIN": str(plugin) if with_plugin else "none"}
    bench.run([*map(str, command)], environment, timeout=330)
    rank = next(path for path in folder.iterdir() if re.search(r"^cmd:.* --rank 0 ", path.read_text(), re.M))
    calls, instructions = costs(rank)
    return instructions / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=200, help="calls of a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--most", type=int, help="fails where a call without a plugin takes more instructions")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    if not shutil.which("valgrind"):
        sys.exit("call_instructions.py: there is no valgrind here")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name in ("driver", "absent", "plugin"):
            (folder / name).mkdir()
        for name in ("libcuda.so", "libcuda.so.1"):
            shutil.copy(BINARIES / "libmccs_emulated_driver.so", folder / "driver" / name)
        environment = {"LD_LIBRARY_PATH": str(folder / "driver"), "MCCS_EMULATED_GPUS": str(options.nranks)}
        with services({"service": '[cuda]\nuse = "required"\n'}, folder, {"service": environment}) as sockets:
            absent, both = (measure(options, sockets[0], folder / "driver", name == "plugin", folder / name) for name in ("absent", "plugin"))
    # With the plugin every other round is silent, where a call costs one branch more than without it.
    found = {"absent": absent, "listening": 2 * both - absent}
    facts = bench.facts(options, f"emulated GPUs, {options.nranks} ranks", nranks=options.nranks)
    rows = [["none", f"{found['absent']:.0f}"], ["counts all events", f"{found['listening']:.0f}"]]
    text = (f"Instructions of the library in an all-reduce of 8 bytes, by callgrind on {facts['machine']}; commit {facts['commit']}. Averages of "
            f"{options.calls * (options.rounds + 1)} calls back to back.\n\n" + bench.table(["plugin", "instructions"], rows))
    bench.write_out(options, {**facts, **found}, text)
    if options.most and absent > options.most:
        sys.exit(f"call_instructions.py: a call takes {absent:.0f} instructions, which may be {options.most} at most")


if __name__ == "__main__":
    main()
