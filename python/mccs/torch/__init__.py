"""PyTorch's distributed package over mccs: ``import mccs.torch``, then ``init_process_group("mccs")``.

Tensors are in the host's memory or on a GPU, each kind with a communicator of its own. On a GPU
calls are enqueued on streams, as NCCL's. In the host's memory those of :func:`empty` are the
service's memory, too, and are not copied; all others are copied through it in pieces.
``group.counters()`` tells how many were.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

import mccs
from mccs.torch.process_group import ProcessGroup
from mccs.torch.work import Work

__all__ = ["ProcessGroup", "Work", "empty"]


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor in memory that the service maps too: collectives on it copy nothing."""
    kind = dtype or torch.get_default_dtype()
    size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    count = math.prod(size)
    if count == 0:
        return torch.empty(size, dtype=kind)
    memory = mccs.empty(count * kind.itemsize, "uint8")
    return torch.from_numpy(memory).view(kind).view(size)


def _create(options: dist.distributed_c10d._DistributedBackendOptions, _: object) -> ProcessGroup:
    outer = getattr(options, "process_group", None)
    return ProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        None if outer is None else outer.bound_device_id,
    )


dist.Backend.register_backend("mccs", _create, extended_api=True, devices=["cpu", "cuda"])
