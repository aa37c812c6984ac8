"""A small training whose result is known, which clients compare with the same training on one GPU.
Clients train it in parallel."""

import os

import torch

STEPS = 6
SAMPLES_OF_RANK = 32
FEATURES, HIDDEN, RATE = 64, 4096, 0.05


def model():
    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1)
    ).double()


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(SAMPLES_OF_RANK, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).sin()


def loss_of(network, data):
    inputs, targets = data
    return torch.nn.functional.mse_loss(network(inputs), targets)


def optimizer_of(network):
    return torch.optim.SGD(network.parameters(), lr=RATE)


def expected_weights(nranks, device, dtype=torch.float64):
    """Weights after training on all ranks' data by one GPU."""
    network = model().to(device, dtype)
    optimizer = optimizer_of(network)
    for step in range(STEPS):
        parts = [batch(step, rank) for rank in range(nranks)]
        whole = tuple(torch.cat(part).to(device, dtype) for part in zip(*parts))
        optimizer.zero_grad()
        loss_of(network, whole).backward()
        optimizer.step()
    return [weight.detach() for weight in network.parameters()]


def check(client, network, nranks, rank, device):
    """Fails unless the network has the weights that one GPU comes to."""
    for own, expected in zip(network.parameters(), expected_weights(nranks, device), strict=True):
        error = (own.detach() - expected).abs().max().item()
        # float64: the order of a sum's terms is all that differs.
        if not error < 1e-9:
            raise SystemExit(f"{client}: rank {rank} of {nranks} is {error} away from the weights of one GPU")


def environment(rank, nranks, port):
    """Variables that launchers set for a process of PyTorch's."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nranks), LOCAL_WORLD_SIZE=str(nranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
