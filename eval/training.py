#!/usr/bin/env python3
"""Training steps in PyTorch, on NCCL and on mccs: a GPT of 0.9 billion parameters, by DDP, FSDP2
and MoE. It is in bf16; MoE has experts that ranks share out.

usage: training.py NAME --nranks N [--nccl SIDE=FILE]... [--service SIDE=SETTINGS]... [--rounds N] [--workloads LIST] [--out FOLDER]

Sides take turns in each round, each in processes of its own: NCCL as PyTorch brings it, NCCL at a path (`--nccl "2.32.3=/lib/libnccl.so.2"`),
mccs by its default, and mccs with settings of the section [cuda] (`--service '8 MiB=large_from = "8MiB"'`).

Needs so many GPUs and PyTorch. Writes NAME.json (data and provenance) and NAME.md. Fails where losses of sides differ. Binaries: target/release,
or the folder MCCS_BIN. `--device cpu --tiny` runs the same steps without GPUs, over gloo."""

import argparse
import contextlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import bench
from cuda import machine_of
from cuda_service import BINARIES, services

WORKLOADS = "ddp:4,ddp:8,fsdp2:4,fsdp2:8,moe:4"
TINY = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, "sequence": 16, "warmup": 1, "first_warmup": 1, "steps": 3}
MODEL = bench.ROOT / "eval" / "training_model.py"
BUNDLED, DEFAULT = "NCCL of PyTorch", "mccs"
# Relative: losses are of random tokens, and sums of gradients differ by rounding.
LOSS_TOLERANCE = 0.01


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def ends_of(ranks, timeout_s):
    """Exit codes. Once a rank has failed, or too much time has passed, the others have some seconds to fail too."""
    give_up = time.monotonic() + timeout_s
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < give_up:
        if any(rank.poll() for rank in ranks):
            give_up = min(give_up, time.monotonic() + 5)
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
    return [rank.wait() for rank in ranks]


class Side:
    """Arguments of the ranks' processes."""
    def __init__(self, name, is_mccs, environment):
        self.name, self.is_mccs, self.environment = name, is_mccs, environment

    def run(self, options, model, folder):
        """One round: all workloads, one after the other."""
        out = pathlib.Path(folder) / "found.json"
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(options.nranks),
                  "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", **self.environment}
        command = [sys.executable, str(MODEL), json.dumps({**model, "out": str(out)})]
        logs = [pathlib.Path(folder) / f"rank{rank}.log" for rank in range(options.nranks)]
        with contextlib.ExitStack() as files:
            ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=files.enter_context(log.open("w")), stderr=subprocess.STDOUT)
                     for rank, log in enumerate(logs)]
            codes = ends_of(ranks, options.timeout)
        if any(codes):
            raise bench.failure([self.name, *options.workloads.split(",")], *(f"rank {rank} ended with {code}:\n{logs[rank].read_text()[-4000:]}"
                                                                            for rank, code in enumerate(codes) if code))
        found = json.loads(out.read_text())
        if self.is_mccs != (found["library"] == "mccs"):
            raise RuntimeError(f"{self.name}: the ranks' library is {found['library']}")
        return found


def preloaded(library):
    return {"LD_PRELOAD": str(library)}


@contextlib.contextmanager
def sides_of(options, folder):
    """All sides, with the services of those that have one."""
    if options.device == "cpu":
        yield [Side("gloo", False, {})]
        return
    settings = {DEFAULT: "", **dict(text.split("=", 1) for text in options.service)}
    texts = {f"service{number}": f'[cuda]\nuse = "required"\n{lines}\n' for number, lines in enumerate(settings.values())}
    library = BINARIES / "libnccl.so.2"
    if not library.exists():
        sys.exit(f"training.py: there is no {library.name} in {BINARIES}: see docs/NCCL.md")
    with services(texts, folder) as sockets:
        others = [text.split("=", 1) for text in options.nccl]
        nccl = [Side(BUNDLED, False, {}), *(Side(f"NCCL {name}", False, preloaded(file)) for name, file in others)]
        mccs = [Side(name if name == DEFAULT else f"mccs, {name}", True, {**preloaded(library), "MCCS_SOCKET": at})
                for name, at in zip(settings, sockets)]
        # The two that matter most first.
        yield [mccs[0], nccl[0], *mccs[1:], *nccl[1:]]


def measured(options):
    """By workload and side: what was found in each round."""
    # A rank that waits says where, before this script gives up on it.
    model = {"workloads": options.workloads.split(","), "device": options.device, "watchdog_s": max(options.timeout - 10, 5),
             **(TINY if options.tiny else {})}
    found, about = {}, {}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, sides_of(options, folder) as sides:
        for number in range(options.rounds):
            # The first round in the order of importance, for who has time for one round alone.
            for side in bench.in_turn(sides, number):
                if found and time.monotonic() - begin > options.limit:
                    print(f"round {number}, {side.name}: not run, {options.limit} s are over", flush=True)
                    continue
                result = side.run(options, model, folder)
                about.setdefault("torch", result["torch"])
                about.setdefault("libraries", {})[side.name] = result["library"]
                for line in result["workloads"]:
                    of = found.setdefault(line["workload"], {}).setdefault(side.name, {"rounds_ms": [], "losses": [], "peak_mib": []})
                    of["rounds_ms"].append(line["step_ms"])
                    of["losses"].append(line["loss"])
                    of["peak_mib"].append(line["peak_mib"])
                    about.setdefault("parameters", {})[line["workload"]] = line["parameters"]
                medians = (f"{line['workload']} {statistics.median(line['step_ms']):.1f} ms" for line in result["workloads"])
                print(f"round {number}, {side.name}: {', '.join(medians)}", flush=True)
        names = [side.name for side in sides if all(side.name in of for of in found.values())]
    return names, found, about


def median_ms(of):
    return statistics.median(sum(of["rounds_ms"], []))


def cell(of):
    medians = [statistics.median(times) for times in of["rounds_ms"]]
    return f"{median_ms(of):.1f} ({min(medians):.1f} to {max(medians):.1f})"


def table(names, found):
    """A row a workload: step times, and how much faster each side of ours is than the fastest NCCL."""
    theirs = [name for name in names if name.startswith("NCCL")]
    own = [name for name in names if name.startswith("mccs")]
    rows = []
    for workload, of in found.items():
        best = min((median_ms(of[name]) for name in theirs), default=None)
        ratios = [f"{best / median_ms(of[name]):.3f}" for name in own] if best else []
        rows.append([workload, *(cell(of[name]) for name in names), *ratios])
    return bench.table(["workload:batch", *(f"{name}, ms" for name in names), *(f"best NCCL / {name}" for name in own if theirs)], rows)


def differing_losses(found):
    wrong = []
    for workload, of in found.items():
        losses = {name: loss for name, side in of.items() for loss in side["losses"]}
        if max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE * max(map(abs, losses.values())):
            wrong.append(f"{workload}: {losses}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nranks", type=int, required=True)
    parser.add_argument("--nccl", action="append", default=[], metavar="SIDE=FILE", help="another NCCL; may be repeated")
    parser.add_argument("--service", action="append", default=[], metavar="SIDE=SETTINGS",
                        help="lines for [cuda] of another service; may be repeated")
    parser.add_argument("--workloads", default=WORKLOADS, help=f"NAME:BATCH, comma-separated; default: {WORKLOADS}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=int, default=3600, help="seconds after which no side is run any more")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of some thousand parameters: tests the script")
    parser.add_argument("--timeout", type=int, default=180, help="seconds of one side in one round")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    names, found, about = measured(options)
    machine = machine_of(options.nranks) if options.device == "cuda" else f"{options.nranks} processes without GPUs"
    facts = bench.facts(options, machine, **about)
    text = (f"{machine}; commit {facts['commit']}; PyTorch {facts['torch']}. Step times in ms: median of all steps of {options.rounds} rounds (least to "
            f"greatest median of a round), the slowest rank's. Ratios above 1: mccs is faster.\n\n{table(names, found)}\n")
    bench.write_out(options, {**facts, "found": found}, text)
    wrong = differing_losses(found)
    if wrong:
        sys.exit("training.py: losses differ: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
