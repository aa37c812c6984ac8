#!/usr/bin/env python3
"""PyTorch on CPUs over mccs and over Gloo: collectives, steps of data-parallel training, and what a
call from Python costs.

usage: python_torch.py NAME [--nranks N,N] [--rounds N]

Needs the wheel, PyTorch and NumPy in the Python that runs it. Both sides are process groups of the same processes, which take turns within a
run. Writes eval/results/NAME.json and NAME.md."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import bench

SIDES = ["mccs", "gloo"]
SIZES = [8, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 16 << 20, 64 << 20]
OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
# A side's turn in a round.
TURN_S = 0.08


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--nranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="collectives,training,calls")
    parser.add_argument("--most-bytes", type=int, default=SIZES[-1])
    options = parser.parse_args()
    rows = []
    with bench.service(settings='[cuda]\nuse = "off"') as (_, folder):
        for nranks in map(int, options.nranks.split(",")):
            for part in options.parts.split(","):
                if part != "calls" or nranks == 2:
                    rows += run(part, nranks, options, folder / "mccs.sock")
    data = {**bench.provenance(), "rounds": options.rounds, "rows": rows}
    bench.write_results(options.name, data, report(data))
    print(report(data))


def run(part, nranks, options, socket):
    """Rows of one part, from rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MCCS_SOCKET": str(socket), "WORLD_SIZE": str(nranks), "OMP_NUM_THREADS": "1",
                       "STORE": str(pathlib.Path(folder) / "store")}
        command = [sys.executable, __file__, "--rank-of", part, str(options.rounds), str(options.most_bytes)]
        ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
                 for rank in range(nranks)]
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"{part} of {nranks} ranks failed")
    return bench.records(outputs[0])


def rank_main(part, rounds, most_bytes):
    import torch
    import torch.distributed as dist

    import mccs.torch  # noqa: F401

    rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=nranks)
    groups = {side: dist.new_group(backend=side) for side in SIDES}
    torch.manual_seed(1)
    work = {"collectives": collectives, "training": training, "calls": calls}[part]
    for row in work(dist, torch, groups, rounds, most_bytes):
        if rank == 0:
            print(json.dumps({"part": part, "nranks": nranks, **row}), flush=True)
    dist.barrier(group=groups["gloo"])
    os._exit(0)


def call_of(dist, torch, operation, size, group):
    n, rank = dist.get_world_size(), dist.get_rank()
    count = max(1, size // 4)
    # Bytes of the longer buffer: each rank's part of it is at least one element.
    part = max(1, count // n)
    if operation == "all_reduce":
        data = torch.full((count,), rank / 4)
        return lambda: dist.all_reduce(data, dist.ReduceOp.MAX, group=group)
    if operation == "broadcast":
        data = torch.full((count,), float(rank))
        return lambda: dist.broadcast(data, 0, group=group)
    whole, own = torch.ones(part * n), torch.ones(part)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, own, group=group)
    return lambda: dist.reduce_scatter_tensor(own, whole, dist.ReduceOp.MAX, group=group)


def timed(dist, torch, call, group, budget_s):
    """Median and number of calls of a turn; all ranks make as many."""
    start = time.perf_counter()
    call()
    once = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(once, dist.ReduceOp.MAX, group=group)
    calls = max(3, min(1000, int(budget_s / max(once.item(), 1e-6))))
    return bench.median_us(call, calls)


def in_turns(dist, torch, calls, groups, rounds, budget_s):
    """Each side's medians, round by round: the slowest rank's."""
    medians = {side: [] for side in calls}
    for number in range(rounds + 1):
        for side in bench.in_turn(calls, number):
            dist.barrier(group=groups["gloo"])
            own = torch.tensor([timed(dist, torch, calls[side], groups["gloo"], budget_s)])
            dist.all_reduce(own, dist.ReduceOp.MAX, group=groups["gloo"])
            # The first round warms up.
            if number > 0:
                medians[side].append(own.item())
    return medians


def collectives(dist, torch, groups, rounds, most_bytes):
    for operation in OPERATIONS:
        for size in SIZES:
            if size <= most_bytes:
                sides = {side: call_of(dist, torch, operation, size, groups[side]) for side in SIDES}
                yield {"what": operation, "bytes": size,
                       **bench.with_gloo(in_turns(dist, torch, sides, groups, rounds, TURN_S), 2)}


def resnet(torch):
    """As ResNet-18: residual blocks of four widths."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, inside, outside, stride):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
                                      nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside))
            self.skip = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1, stride, bias=False)

        def forward(self, x):
            return torch.relu(self.body(x) + self.skip(x))

    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    model = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), *(Block(*width) for width in widths), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(512, 10))
    return model, torch.randn(2, 3, 16, 16), torch.randint(10, (2,))


def gpt(torch):
    """A small transformer over tokens."""
    nn = torch.nn
    vocabulary, width, length = 4000, 384, 64
    layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(vocabulary, width), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
                          nn.Linear(width, vocabulary), nn.Flatten(0, 1))
    return model, torch.randint(vocabulary, (1, length)), torch.randint(vocabulary, (length,))


def training(dist, torch, groups, rounds, _):
    for name, build in [("ResNet-18-like", resnet), ("GPT-like", gpt)]:
        steps, parameters = {}, 0
        for side in SIDES:
            model, batch, labels = build(torch)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=groups[side])
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)

            def step(wrapped=wrapped, optimizer=optimizer, batch=batch, labels=labels):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(wrapped(batch), labels).backward()
                optimizer.step()

            steps[side] = step
        medians = in_turns(dist, torch, steps, groups, rounds, 0.5)
        yield {"what": name, "bytes": 4 * parameters, **bench.with_gloo(medians, 2)}


def calls(dist, torch, groups, rounds, _):
    """Time of a call of one rank: all of it is this process'."""
    import numpy

    import mccs

    if dist.get_rank() == 0:
        comm = mccs.init(mccs.unique_id(), 0, 1)
        array, times = numpy.ones(2, numpy.float32), []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(20_000):
                comm.all_reduce(array)
            times.append((time.perf_counter() - start) / 20_000 * 1e6)
        yield {"what": "NumPy, one rank, all_reduce of 8 B", "us": {"mccs": round(statistics.median(times), 3)},
               "least": round(min(times), 3), "most": round(max(times), 3)}
    dist.barrier(group=groups["gloo"])


def report(data):
    """The page."""
    named = {8: "8 B", 1 << 10: "1 KiB", 16 << 10: "16 KiB", 128 << 10: "128 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB", 64 << 20: "64 MiB"}
    text = "# PyTorch on CPUs: mccs and Gloo\n\nTimes are medians of rounds' medians, in us. A ratio above 1 says that mccs is ahead.\n"
    for part in dict.fromkeys(row["part"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["part"] == part]
        text += f"\n## {part.capitalize()}\n\n"
        if part == "calls":
            text += bench.table(["what", "us", "least", "most"],
                                [[row["what"], row["us"]["mccs"], row["least"], row["most"]] for row in rows])
            continue
        text += bench.table(["what", "bytes", "ranks", "mccs us", "Gloo us", "ratio", "least", "most"],
                            [[row["what"], named.get(row["bytes"], row["bytes"]), row["nranks"], row["us"]["mccs"], row["us"]["gloo"],
                              row["ratio"], row["least"], row["most"]] for row in rows])
    return text


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        rank_main(sys.argv[2], *map(int, sys.argv[3:5]))
    else:
        main()
