#!/usr/bin/env python3
"""One rank of the PyTorch training benchmark: steps of a GPT by DDP, FSDP2, or DDP with experts
(MoE).

`training.py` starts it, a process a rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set:

usage: training_model.py OPTIONS, a JSON object with the fields of `Options`

Rank 0 writes the times of steps and the last loss of each workload to `out`."""

import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass
class Options:
    """Sizes of the model and of a run."""
    workloads: list  # NAME:BATCH, NAME one of WORKLOADS
    out: str
    device: str = "cuda"
    layers: int = 24
    width: int = 1792
    heads: int = 14
    vocabulary: int = 8192
    sequence: int = 1024
    # Memory is allocated in the first steps.
    warmup: int = 6
    # More before the first workload: the service learns how collectives come.
    first_warmup: int = 30
    steps: int = 12
    # A rank that takes longer says where it stands, and ends.
    watchdog_s: int = 150


class Attention(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.heads = options.heads
        self.project_in = nn.Linear(options.width, 3 * options.width, bias=False)
        self.project_out = nn.Linear(options.width, options.width, bias=False)

    def forward(self, x):
        batch, sequence, width = x.shape
        parts = self.project_in(x).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, sequence, width))


def perceptron(width):
    return nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))


class Exchange(torch.autograd.Function):
    """An all-to-all of equal parts; its gradient is one, too."""
    @staticmethod
    def forward(context, x):
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(context, gradient):
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient.contiguous())
        return received


class Experts(nn.Module):
    """An expert a rank. Each rank sends an equal part of its tokens to each, and takes them back."""
    def __init__(self, options):
        super().__init__()
        self.expert = perceptron(options.width)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        return Exchange.apply(self.expert(Exchange.apply(tokens))).view_as(x)


class Block(nn.Module):
    def __init__(self, options, mixes_experts):
        super().__init__()
        self.before_attention, self.before_rest = nn.LayerNorm(options.width), nn.LayerNorm(options.width)
        self.attention = Attention(options)
        self.rest = Experts(options) if mixes_experts else perceptron(options.width)

    def forward(self, x):
        x = x + self.attention(self.before_attention(x))
        return x + self.rest(self.before_rest(x))


class Gpt(nn.Module):
    """A decoder; with experts in every second block where `mixes_experts`."""
    def __init__(self, options, mixes_experts=False):
        super().__init__()
        self.embedding = nn.Embedding(options.vocabulary, options.width)
        self.position = nn.Embedding(options.sequence, options.width)
        self.blocks = nn.ModuleList(Block(options, mixes_experts and number % 2 == 1) for number in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens) + self.position.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def ddp(model, device):
    return nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def fsdp(model, device):
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def moe(model, device):
    # Each rank's experts are its own.
    own = [name for name, _ in model.named_parameters() if ".expert." in name]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    return ddp(model, device)


WORKLOADS = {"ddp": ddp, "fsdp2": fsdp, "moe": moe}


def peak_of(device):
    return torch.cuda.max_memory_allocated(device) >> 20 if device.type == "cuda" else 0


class Clock:
    """Times between the ends of steps, as the GPU sees them."""
    def __init__(self, device):
        self.is_cuda = device.type == "cuda"
        self.marks = []

    def mark(self):
        if self.is_cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def steps_ms(self):
        if not self.is_cuda:
            return [1e3 * (end - begin) for begin, end in zip(self.marks, self.marks[1:])]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in zip(self.marks, self.marks[1:])]


def slowest(numbers, device):
    """The greatest of all ranks' values, for each number."""
    tensor = torch.tensor(numbers, dtype=torch.float32, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.tolist()


def measure(options, workload, rank, nranks, device):
    name, batch = workload.split(":")
    warmup = options.first_warmup if workload == options.workloads[0] else options.warmup
    torch.manual_seed(1)
    with device:
        model = Gpt(options, mixes_experts=name == "moe").to(dtype=torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model = WORKLOADS[name](model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (warmup + options.steps, int(batch), options.sequence + 1)
    data = torch.randint(options.vocabulary, shape, generator=generator).to(device)
    clock = Clock(device)
    gc.collect()
    gc.disable()
    for number, tokens in enumerate(data):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number + 1 >= warmup:
            clock.mark()
    gc.enable()
    loss = loss.detach().float().clone()
    dist.all_reduce(loss)
    return {"workload": workload, "parameters": parameters, "step_ms": slowest(clock.steps_ms(), device),
            "loss": loss.item() / nranks, "peak_mib": peak_of(device)}


def library():
    """The library that does the work, as far as this process can tell."""
    with open("/proc/self/maps") as maps:
        lines = maps.read().splitlines()
    if any("mccs-device-initiated" in line or "mccs-region" in line for line in lines):
        return "mccs"
    if not torch.cuda.is_available():
        return "gloo"
    # PyTorch tells the version that it was compiled with. A preloaded library comes first.
    number, paths = ctypes.c_int(), sorted({line.split()[-1] for line in lines if "/libnccl" in line})
    loaded = next(library for library in map(ctypes.CDLL, [None, *paths]) if hasattr(library, "ncclGetVersion"))
    loaded.ncclGetVersion(ctypes.byref(number))
    return f"NCCL {number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def main():
    options = Options(**json.loads(sys.argv[1]))
    faulthandler.dump_traceback_later(options.watchdog_s, exit=True)
    rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    found = []
    for workload in options.workloads:
        found.append(measure(options, workload, rank, nranks, device))
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if rank == 0:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else "none"
        with open(options.out, "w") as out:
            json.dump({"library": library(), "torch": torch.__version__, "gpu": gpu, "workloads": found}, out)
    dist.barrier()
    dist.destroy_process_group()
    if options.device == "cpu":
        # The end of a process with gloo's threads aborts now and then (PyTorch 2.15).
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
