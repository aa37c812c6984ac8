"""Times one collective with Gloo (through torch.distributed) as mccs-perf does; see mpi_bench.c for arguments.

Started once a rank, with RANK, WORLD_SIZE and GLOO_STORE (a file) in the environment."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist


def main():
    op, begin, end, factor, iterations, warmup = sys.argv[1], *map(int, sys.argv[2:7])
    rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + os.environ["GLOO_STORE"], rank=rank, world_size=nranks)
    size = begin
    while size <= end:
        count = size // 4 // (nranks if op == "all_gather" else 1)
        data = ((torch.arange(count) + rank) % 5).float()
        parts = [torch.zeros(count) for _ in range(nranks)] if op == "all_gather" else None

        def call():
            if op in ("all_reduce", "all_reduce_in_place"):
                dist.all_reduce(data)
            elif op == "all_gather":
                dist.all_gather(parts, data)
            else:
                dist.broadcast(data, 0)

        call()
        right = sum(((torch.arange(count) + r) % 5).float() for r in range(nranks))
        if op == "all_gather":
            right = (torch.arange(count) % 5).float()
            assert torch.equal(parts[0], right), "wrong result"
        elif op == "broadcast":
            assert torch.equal(data, (torch.arange(count) % 5).float()), "wrong result"
        else:
            assert torch.equal(data, right), "wrong result"
        # No zeros: there are processors on which it costs less to write zeros over zeros.
        data.copy_(((torch.arange(count) + rank) % 5).float())
        times = []
        cpu_before = sum(os.times()[:2])
        for i in range(warmup + iterations):
            start = time.perf_counter()
            call()
            if i >= warmup:
                times.append((time.perf_counter() - start) * 1e6)
        used = torch.tensor([sum(os.times()[:2]) - cpu_before])
        dist.all_reduce(used)
        times.sort()
        own = torch.tensor([times[(iterations + 1) // 2 - 1], times[(iterations * 99 + 99) // 100 - 1], times[0]])
        dist.all_reduce(own, dist.ReduceOp.MAX)
        if rank == 0:
            p50, p99, least = own.tolist()
            record = {"op": op, "bytes": size, "nranks": nranks, "iters": iterations}
            record |= {"cpu_s_per_call": used.item() / (warmup + iterations)}
            print(json.dumps(record | {"p50_us": p50, "p99_us": p99, "min_us": least}), flush=True)
        size *= factor


main()
