#!/usr/bin/env python3
"""Megatron-core on mccs: tensor-parallel layers with sequence parallelism, beside the same layers on one GPU. It makes some dozens of
process groups, and needs CUDA_DEVICE_MAX_CONNECTIONS=1, as its users set it.

usage: megatron_parallel.py NRANKS, with LD_PRELOAD naming our libnccl.so.2 and MCCS_SOCKET the service"""

import os
import sys

import torch
import torch.multiprocessing as processes

import training

LENGTH, BATCH, HIDDEN, INNER = 512, 4, 1024, 4096


def whole(shape, seed, device):
    """A tensor that all ranks make alike: multiples of 1/64, so that short sums are exact."""
    return (torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(seed)) / 64).double().to(device)


def fill(parameter, values):
    with torch.no_grad():
        parameter.copy_(values)


def worker(rank, nranks, port):
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    training.environment(rank, nranks, port)
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=nranks)
    tensor_parallel.model_parallel_cuda_manual_seed(17)
    device = torch.device("cuda", rank)
    config = ModelParallelConfig(tensor_model_parallel_size=nranks, sequence_parallel=True, params_dtype=torch.float64)
    init = torch.nn.init.zeros_
    up = tensor_parallel.ColumnParallelLinear(HIDDEN, INNER, config=config, init_method=init, bias=False, gather_output=False)
    down = tensor_parallel.RowParallelLinear(INNER, HIDDEN, config=config, init_method=init, bias=False, input_is_parallel=True,
                                             skip_bias_add=False)
    up_weight, down_weight = whole((INNER, HIDDEN), 1, device), whole((HIDDEN, INNER), 2, device)
    fill(up.weight, up_weight.chunk(nranks, 0)[rank])
    fill(down.weight, down_weight.chunk(nranks, 1)[rank])
    inputs = whole((LENGTH, BATCH, HIDDEN), 3, device)

    own = inputs.chunk(nranks, 0)[rank].clone().requires_grad_()
    middle, _ = up(own)
    result, _ = down(torch.relu(middle))
    result.square().mean().mul(1 / nranks).backward()

    reference = inputs.clone().requires_grad_()
    up_weight.requires_grad_(), down_weight.requires_grad_()
    expected = torch.relu(reference @ up_weight.T) @ down_weight.T
    expected.square().mean().backward()
    pairs = {
        "result": (result, expected.chunk(nranks, 0)[rank]),
        "gradient of the input": (own.grad, reference.grad.chunk(nranks, 0)[rank]),
        "gradient of the first weight": (up.weight.grad, up_weight.grad.chunk(nranks, 0)[rank]),
        "gradient of the second weight": (down.weight.grad, down_weight.grad.chunk(nranks, 1)[rank]),
    }
    for what, (actual, wanted) in pairs.items():
        error = ((actual - wanted).norm() / wanted.norm()).item()
        if not error < 1e-10:
            raise SystemExit(f"Megatron-core: the {what} of rank {rank} of {nranks} is {error} away from one GPU's")
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    processes.spawn(worker, (ranks, training.free_port()), nprocs=ranks)
    print(f"Megatron-core: tensor and sequence parallelism over {ranks} GPUs give the result and gradients of one GPU")
