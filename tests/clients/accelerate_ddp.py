#!/usr/bin/env python3
"""Hugging Face's Accelerate on mccs: data-parallel training, a process a GPU, beside the same training on one GPU.

usage: accelerate_ddp.py NRANKS, with LD_PRELOAD naming our libnccl.so.2 and MCCS_SOCKET the service"""

import sys

import torch
import torch.multiprocessing as processes

import training


def worker(rank, nranks, port):
    training.environment(rank, nranks, port)
    from accelerate import Accelerator

    accelerator = Accelerator()
    device = accelerator.device
    network = training.model()
    network, optimizer = accelerator.prepare(network, training.optimizer_of(network))
    for step in range(training.STEPS):
        data = tuple(part.to(device) for part in training.batch(step, rank))
        optimizer.zero_grad()
        accelerator.backward(training.loss_of(network, data))
        optimizer.step()
    # Every collective of its own that users call.
    number = torch.tensor([rank + 1.0], device=device)
    total = nranks * (nranks + 1) / 2
    assert accelerator.reduce(number, "sum").item() == total
    assert accelerator.gather(number).tolist() == [float(other + 1) for other in range(nranks)]
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=device))
    assert padded.tolist() == [1.0] * (rank + 1) + [0.0] * (nranks - rank - 1)
    training.check("Accelerate", accelerator.unwrap_model(network), nranks, rank, device)
    # It destroys the process group.
    accelerator.end_training()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    processes.spawn(worker, (ranks, training.free_port()), nprocs=ranks)
    print(f"Accelerate: {training.STEPS} steps on {ranks} GPUs give the weights of one GPU; reduce, gather and pad are right")
