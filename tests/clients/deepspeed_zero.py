#!/usr/bin/env python3
"""DeepSpeed on mccs: ZeRO of stages 1 to 3, beside the same training on one GPU.

usage: deepspeed_zero.py NRANKS, with LD_PRELOAD naming our libnccl.so.2 and MCCS_SOCKET the service"""

import sys

import torch
import torch.multiprocessing as processes

import training


def train(stage, rank, nranks, device):
    import deepspeed

    network = training.model().float().to(device)
    settings = {
        "train_micro_batch_size_per_gpu": training.SAMPLES_OF_RANK,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        # Clipped by default, which one GPU's training is not.
        "gradient_clipping": 0.0,
    }
    engine, *_ = deepspeed.initialize(model=network, optimizer=training.optimizer_of(network), config=settings)
    for step in range(training.STEPS):
        data = tuple(part.float().to(device) for part in training.batch(step, rank))
        engine.backward(training.loss_of(engine, data))
        engine.step()
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        rows = zip(parameters, training.model().parameters(), training.expected_weights(nranks, device, torch.float32), strict=True)
        for own, first, expected in rows:
            first = first.detach().float().to(device)
            # Error of the change, which is small beside the weights.
            error = ((own.detach() - expected).norm() / (expected - first).norm()).item()
            if not error < 1e-3:
                raise SystemExit(f"DeepSpeed, stage {stage}: rank {rank} of {nranks} is {error} away from the change of one GPU's weights")


def worker(rank, nranks, port):
    training.environment(rank, nranks, port)
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    import deepspeed

    deepspeed.init_distributed("nccl")
    for stage in (1, 2, 3):
        train(stage, rank, nranks, torch.device("cuda", rank))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    processes.spawn(worker, (ranks, training.free_port()), nprocs=ranks)
    print(f"DeepSpeed: ZeRO 1, 2 and 3 on {ranks} GPUs give the weights of one GPU")
