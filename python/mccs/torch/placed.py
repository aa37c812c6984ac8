"""The devices of a process group: a communicator for the host's memory, and one for the rank's GPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as C10dBackend

import mccs
from mccs._mccs import Group, Operation
from mccs.errors import InvalidArgument
from mccs.torch.gpu import Gpu, GpuWork, Streams


def _first_tensor(arguments: Any) -> torch.Tensor | None:
    """The first tensor of lists of lists."""
    if isinstance(arguments, torch.Tensor):
        return arguments
    found = map(_first_tensor, arguments if isinstance(arguments, (list, tuple)) else ())
    return next((tensor for tensor in found if tensor is not None), None)


def call_of(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method that is a call: on tensors of a GPU it is enqueued on a stream."""

    def of(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(group: Placed, *arguments: Any, **named: Any) -> Any:
            with group._placed(name, [*arguments, *named.values()]):
                return method(group, *arguments, **named)

        return call

    return of


class _OnGpus:
    """A group, as whoever asks for its backend of GPUs sees it."""

    supports_coalescing = True

    def __init__(self, group: Placed) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class _Names(C10dBackend):
    """PyTorch asks a group's backend for devices and names. The group has its calls itself."""

    def getBackendName(self) -> str:
        return "mccs"

    name = getBackendName


def _names(rank: int, size: int) -> _Names | None:
    """None on PyTorch 2.11: Python can make no backend there, and PyTorch asks groups without one themselves."""
    try:
        return _Names(rank, size)
    except TypeError:
        return None


class Placed(dist.ProcessGroup):
    """See the module. The communicator of the GPU is made at the first call there, or when the group is that names a GPU."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str = "",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._timeout, self._barriers = timeout, 0
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._set_default_backend(kind)
        self._names = _names(rank, size)
        if self._names is not None:
            self._register_backend(torch.device("cpu"), kind, self._names)
            self._register_backend(torch.device("cuda"), kind, self._names)
        self._group_name = f"torch {name}".strip()
        self._comm = self._join("mccs", None)
        self._gpu: Gpu | None = None
        self._joining = threading.Lock()
        self._coalescing: tuple[ExitStack, Group] | None = None
        if device is not None and device.type == "cuda":
            self.bound_device_id = device
            self._gpu_of("init_process_group", device)

    def _join(self, key: str, device: int | None) -> mccs.Communicator:
        """A communicator of all ranks, whose id rank 0 gives to the store."""
        if self._rank == 0:
            address = mccs.session().root_address or ""
            self._store.set(key, f"{mccs.unique_id()} {address}")
        unique_id, _, address = self._store.get(key).decode().partition(" ")
        return mccs.Communicator(
            mccs.session(),
            unique_id,
            self._rank,
            self._size,
            root_address=address or None,
            name=self._group_name,
            timeout=self._timeout.total_seconds(),
            device=device,
        )

    # PyTorch 2.11 asks a group's backend for its name, and there is none.

    @property
    def group_name(self) -> str:
        return self._named

    def _set_group_name(self, name: str) -> None:
        self._named = name
        super()._set_group_name(name)

    # GPUs.

    def _gpu_of(self, call: str, device: torch.device) -> Gpu:
        """The rank's GPU. The first call on it has all ranks join, as every collective does."""
        index = torch.cuda.current_device() if device.index is None else device.index
        with self._joining:
            if self._gpu is None:
                streams = Streams(torch.device("cuda", index))
                self._gpu = Gpu(self._join("mccs-cuda", index), streams, f"rank {self._rank} of {self._size}")
        if self._gpu.device.index != index:
            raise self._error(
                call, f"a tensor is on cuda:{index}, and this group's GPU on this rank is {self._gpu.device}"
            )
        return self._gpu

    def _is_gpu(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def _enqueuing(self) -> Gpu | None:
        """The GPU, where this thread enqueues a call on it."""
        return self._gpu if self._gpu is not None and self._gpu.call is not None else None

    @contextmanager
    def _placed(self, name: str, arguments: Sequence[Any]) -> Iterator[None]:
        tensor = _first_tensor(arguments)
        if tensor is None or not self._is_gpu(tensor.device) or self._enqueuing() is not None:
            yield
            return
        gpu = self._gpu_of(name, tensor.device)
        # Messages have no options: they go on while the program does.
        is_async = all(getattr(argument, "asyncOp", True) for argument in arguments)
        message = (name, arguments[1]) if name in ("send", "recv") else None
        with gpu.begun(name, is_async, message=message):
            yield

    def _together(self) -> AbstractContextManager[Any]:
        """Messages that do not wait for each other."""
        return mccs.group() if self._enqueuing() is not None else nullcontext()

    def _start_coalescing(self, device: torch.device) -> None:
        if not self._is_gpu(torch.device(device)):
            return
        with ExitStack() as stack:
            stack.enter_context(self._gpu_of("batch", torch.device(device)).begun("batch", True, True))
            group = mccs.group()
            group.__enter__()
            self._coalescing = stack.pop_all(), group

    def _end_coalescing(self, device: torch.device) -> GpuWork | None:
        if self._coalescing is None or self._gpu is None:
            return None
        (stack, group), self._coalescing = self._coalescing, None
        with stack:
            group.__exit__(None, None, None)
            return self._gpu.end([], self._timeout)

    # Its devices.

    def get_backend(self, device: torch.device) -> Any:
        if self._is_gpu(torch.device(device)):
            return _OnGpus(self)
        if torch.device(device).type != "cpu":
            raise self._error("get_backend", f"this group has tensors of the host's memory and of CUDA, not of {device}")
        return self

    _get_backend = get_backend

    def counters(self) -> dict[str, int]:
        """How operations went: ``in_place``, ``copied`` and ``copied_bytes``."""
        counters = self._comm.counters()
        of_gpu = {} if self._gpu is None else self._gpu.comm.counters()
        return {name: count + of_gpu.get(name, 0) for name, count in counters.items()}

    def abort(self) -> None:
        """Ends the group on all ranks: calls under way fail."""
        self._comm.abort()
        if self._gpu is not None:
            self._gpu.abort()

    def shutdown(self) -> None:
        """Waits for calls under way on the GPU."""
        if self._gpu is not None:
            self._gpu.close()
        self._comm.close()

    def _error(self, call: str, message: str, kind: type[mccs.Error] = InvalidArgument) -> mccs.Error:
        error = kind(f"rank {self._rank} of {self._size}, {call}: {message}")
        error.rank, error.call = self._rank, call
        return error

    def _copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        gpu = self._enqueuing()
        if gpu is None:
            into.copy_(tensor.view(into.shape))
        else:
            gpu.streams.copy(into, tensor)

    def _start(
        self,
        call: str,
        dtype: str,
        count: int,
        send: Sequence[torch.Tensor],
        recv: Sequence[torch.Tensor],
        **settings: Any,
    ) -> Operation:
        if (gpu := self._enqueuing()) is not None:
            return gpu.start(call, dtype, count, send, recv, **settings)
        addresses = [[tensor.data_ptr() for tensor in of] for of in (send, recv)]
        return self._comm.start(call, dtype, count, *addresses, owner=(send, recv), **settings)
