#!/usr/bin/env python3
"""PyTorch, unchanged, on mccs: its NCCL back end loads our libnccl.so.2. One process a GPU; results are compared with what
they must be, and training in parallel with the same training on one GPU.

usage: pytorch.py NRANKS [SOCKET ...], with LD_PRELOAD naming the library and MCCS_SOCKET the service; or with the sockets of
several services, which get as many ranks each. MCCS_STAGED=1 where the service is to carry everything out itself"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


def check(what, actual, expected):
    if not torch.equal(actual, expected):
        raise SystemExit(f"{what}: {(actual != expected).sum().item()} wrong elements of {actual.numel()}")


def collectives(rank, nranks, device):
    generator = torch.Generator().manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (1, 1000, 100_003, 3_000_000):
            # Small integers: sums are exact in every type, and every rank can make every other's data.
            data = torch.randint(-3, 4, (nranks, count), generator=generator).to(dtype)
            own, total = data[rank].to(device), data.to(torch.float64).sum(0).to(dtype)
            summed = own.clone()
            dist.all_reduce(summed)
            check(f"all_reduce {dtype} {count}", summed.cpu(), total)
            gathered = torch.empty(nranks * count, dtype=dtype, device=device)
            dist.all_gather_into_tensor(gathered, own)
            check(f"all_gather {dtype} {count}", gathered.cpu(), data.flatten())
            scattered = torch.empty(count, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(scattered, own.repeat(nranks))
            check(f"reduce_scatter {dtype} {count}", scattered.cpu(), total)
            told = own.clone()
            dist.broadcast(told, src=nranks - 1)
            check(f"broadcast {dtype} {count}", told.cpu(), data[nranks - 1])
    dist.barrier()
    # A communicator for some of the ranks.
    pairs = [dist.new_group([first, first + 1]) for first in range(0, nranks - 1, 2)]
    if rank // 2 < len(pairs):
        number = torch.tensor([float(rank)], device=device)
        dist.all_reduce(number, group=pairs[rank // 2])
        check("all_reduce of a pair", number.cpu(), torch.tensor([float(rank // 2 * 4 + 1)]))


def graph(rank, nranks, device):
    """A captured call, replayed on other data."""
    data = torch.zeros(10_000, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        dist.all_reduce(data)
    for turn in range(10):
        data.fill_(rank + turn)
        captured.replay()
        torch.cuda.synchronize()
        check(f"replay {turn}", data.cpu(), torch.full((10_000,), float(sum(range(nranks)) + nranks * turn)))


def training(rank, nranks, device):
    """Steps of data-parallel training, against the same on all of the data."""
    def model():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)

    torch.manual_seed(2)
    data, target = torch.randn(20, nranks, 32, 64), torch.randn(20, nranks, 32, 8)
    alone, together = model(), torch.nn.parallel.DistributedDataParallel(model(), device_ids=[device.index])
    for network, part in ((alone, slice(None)), (together, slice(rank, rank + 1))):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        for x, y in zip(data, target):
            optimizer.zero_grad()
            error = network(x[part].to(device).flatten(0, 1)) - y[part].to(device).flatten(0, 1)
            error.square().mean().backward()
            optimizer.step()
    for one, other in zip(alone.parameters(), together.parameters()):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def run(rank, nranks, sockets):
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(nranks))
    if sockets:
        os.environ["MCCS_SOCKET"] = sockets[rank * len(sockets) // nranks]
    staged = len(sockets) > 1 or os.environ.get("MCCS_STAGED") == "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", device_id=device)
    collectives(rank, nranks, device)
    # Both libraries may be loaded; the service's page is mapped only where ours was called.
    with open("/proc/self/maps") as maps:
        if not any(("mccs-region" if staged else "mccs-direct") in line for line in maps):
            raise SystemExit("PyTorch has used another NCCL: is LD_PRELOAD set?")
    training(rank, nranks, device)
    if not staged:
        graph(rank, nranks, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    nranks = int(sys.argv[1])
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    sockets = sys.argv[2:]
    processes.spawn(run, args=(nranks, sockets), nprocs=nranks)
    print(f"PyTorch {torch.__version__}, {nranks} ranks, {max(len(sockets), 1)} services: all results are right")
