"""A process group whose collectives an mccs communicator carries out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import mccs
from mccs._mccs import Operation
from mccs.errors import InvalidArgument
from mccs.torch.placed import Placed, call_of
from mccs.torch.work import Work

#: Types whose elements collectives combine, by the service's names.
_COMBINED = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
}

_OPERATORS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PREMUL_SUM: "sum",
}

# : Operators of booleans, which travel as bytes of 0 and 1.
_BOOLEAN = {"sum": "max", "prod": "min", "min": "min", "max": "max"}

#: Operators that no collective has: ranks gather, and combine by themselves.
_BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}

#: How often rank 0 of a monitored barrier looks for the others.
_LOOK_S = 0.01


#: Bytes of a message's tag, which come first, where it is not 0.
_TAG_BYTES = 8


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


class ProcessGroup(Placed):
    """See the module. Tensors of a call stay its own until its work has been waited for."""

    # Its kind.

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    def name(self) -> str:
        return "mccs"

    getBackendName = _get_backend_name = name

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    def get_group_store(self) -> dist.Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    # Arguments.

    def _check(self, call: str, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise self._error(call, f"{type(tensor).__name__} is no tensor")
            gpu = self._enqueuing()
            place = torch.device("cpu") if gpu is None else gpu.device
            if tensor.device != place:
                raise self._error(call, f"a tensor is on {tensor.device}, and this call's are on {place}")
            if tensor.layout != torch.strided:
                raise self._error(call, f"a tensor has the layout {tensor.layout}, and not {torch.strided}")
            if not tensor.is_contiguous():
                raise self._error(
                    call, f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous"
                )

    def _one(self, call: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(tensors) != 1:
            raise self._error(call, f"takes one tensor, and got {len(tensors)}")
        self._check(call, *tensors)
        return tensors[0]

    def _same(self, call: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.dtype != like.dtype or tensor.numel() != like.numel():
                raise self._error(
                    call,
                    f"a tensor of {tensor.numel()} {tensor.dtype} is with one of {like.numel()} {like.dtype}: "
                    "all have one type and size",
                )

    def _operator(self, call: str, op: Any, dtype: torch.dtype) -> tuple[str, str, float | None, int]:
        """The operator's name, the elements' type, a factor, and elements for each of the tensor's."""
        kind = getattr(op, "op", op)
        name = _OPERATORS.get(kind)
        if name is None:
            raise self._error(call, f"the operator {kind} is not supported")
        factor = None
        if kind == ReduceOp.PREMUL_SUM:
            factor = getattr(op, "factor", None)
            if factor is None:
                raise self._error(call, "this version of PyTorch does not tell the factor of PREMUL_SUM")
            factor = float(factor)
        if dtype == torch.bool:
            if name not in _BOOLEAN:
                raise self._error(call, f"the operator {kind} of booleans is not supported")
            return _BOOLEAN[name], "uint8", None, 1
        if dtype.is_complex and name in ("sum", "avg"):
            return name, {8: "float", 16: "double"}.get(dtype.itemsize, ""), factor, 2
        combined = _COMBINED.get(dtype)
        if combined is None:
            raise self._error(call, f"elements of type {dtype} cannot be combined")
        return name, combined, factor, 1

    def _work(
        self,
        operations: Sequence[Operation],
        result: Any,
        opts: Any = None,
        after: Callable[[], None] | None = None,
    ) -> Any:
        timeout = getattr(opts, "timeout", None)
        if timeout is None or timeout <= timedelta(0):
            timeout = self._timeout
        if (gpu := self._enqueuing()) is not None and gpu.call is not None:
            gpu.call.after.extend([] if after is None else [after])
            # A batch has one work, at its end.
            return None if gpu.call.is_coalescing else gpu.end(result, timeout)
        return Work(operations, result, timeout, self._comm.abort, after)

    def _combine(
        self,
        call: str,
        send: Sequence[torch.Tensor],
        recv: Sequence[torch.Tensor],
        count: int,
        op: Any,
        root: int = 0,
    ) -> Operation:
        name, dtype, factor, times = self._operator(call, op, send[0].dtype)
        return self._start(call, dtype, count * times, send, recv, op=name, factor=factor, root=root)

    def _move(
        self,
        call: str,
        send: Sequence[torch.Tensor],
        recv: Sequence[torch.Tensor],
        part: torch.Tensor | int,
        root: int = 0,
    ) -> Operation:
        """Parts as bytes: these can have any type."""
        count = part if isinstance(part, int) else part.numel() * part.element_size()
        return self._start(call, "uint8", count, send, recv, root=root)

    def _parts(self, call: str, whole: torch.Tensor, part: torch.Tensor) -> list[torch.Tensor]:
        if whole.dtype != part.dtype or whole.numel() != part.numel() * self._size:
            raise self._error(
                call,
                f"{whole.numel()} {whole.dtype} are not {self._size} times {part.numel()} {part.dtype}",
            )
        return list(whole.view(-1).chunk(self._size)) if part.numel() else [whole] * self._size

    # Collectives.

    @call_of("all_reduce")
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        if len(tensors) == 1 and tensors[0].layout == torch.sparse_coo and getattr(op, "op", op) == ReduceOp.SUM:
            return self._allreduce_sparse(tensors[0], tensors, opts)
        tensor = self._one("all_reduce", tensors)
        if (bitwise := _BITWISE.get(getattr(op, "op", op))) is not None:
            return self._allreduce_bitwise(tensor, tensors, bitwise, opts)
        return self._work([self._combine("all_reduce", tensors, tensors, tensor.numel(), op)], tensors, opts)

    def _allreduce_bitwise(self, tensor: torch.Tensor, result: Any, op: Callable, opts: Any) -> Work:
        every = [torch.empty_like(tensor) for _ in range(self._size)]

        def combine() -> None:
            tensor.copy_(every[0])
            for other in every[1:]:
                op(tensor, other, out=tensor)

        return self._work([self._move("all_gather", [tensor], every, tensor)], result, opts, combine)

    def _allreduce_sparse(self, tensor: torch.Tensor, result: Any, opts: Any) -> Work:
        """All ranks' elements, gathered and summed. Ranks have as many as they like, and tell each other first."""
        own = tensor.coalesce()
        count = torch.tensor([own._nnz()], device=tensor.device)
        counts = count.new_empty(self._size)
        self._work([self._move("all_gather", [count], list(counts.chunk(self._size)), count)], None, opts).wait()
        # As long on all ranks.
        parts = [own.indices().t(), own.values()]
        sent = [part.new_zeros((int(counts.max()), *part.shape[1:])) for part in parts]
        for padded, part in zip(sent, parts):
            padded[: own._nnz()] = part
        every = [[torch.empty_like(padded) for _ in range(self._size)] for padded in sent]

        def combine() -> None:
            indices, values = (torch.cat([one[:n] for one, n in zip(of, counts.tolist())]) for of in every)
            tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, tensor.size()).coalesce())

        operations = [self._move("all_gather", [padded], of, padded) for padded, of in zip(sent, every)]
        return self._work(operations, result, opts, combine)

    @call_of("all_reduce")
    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        self._check("all_reduce", *tensors)
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        operations = [self._combine("all_reduce", [each], [each], each.numel(), op) for each in tensors]
        return self._work(operations, tensors, opts)

    @call_of("broadcast")
    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        tensor = self._one("broadcast", tensors)
        root = 0 if opts is None else opts.rootRank
        send = tensors if root == self._rank else []
        return self._work([self._move("broadcast", send, tensors, tensor, root)], tensors, opts)

    @call_of("reduce")
    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        tensor = self._one("reduce", tensors)
        recv = tensors if opts.rootRank == self._rank else []
        operation = self._combine("reduce", tensors, recv, tensor.numel(), opts.reduceOp, opts.rootRank)
        return self._work([operation], tensors, opts)

    @call_of("all_gather")
    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        tensor = self._one("all_gather", inputs)
        if len(outputs) != 1 or len(outputs[0]) != self._size:
            raise self._error("all_gather", f"needs a list of {self._size} tensors to receive in")
        self._check("all_gather", *outputs[0])
        self._same("all_gather", outputs[0], tensor)
        return self._work([self._move("all_gather", inputs, outputs[0], tensor)], outputs[0], opts)

    @call_of("all_gather")
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        return self._work([self._gather_single(output, tensor)], [output], opts)

    def _gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        self._check("all_gather", output, tensor)
        return self._move("all_gather", [tensor], self._parts("all_gather", output, tensor), tensor)

    @call_of("all_gather")
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._work([self._gather_single(output, tensor) for output, tensor in pairs], outputs, opts)

    @call_of("all_gather")
    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """``outputs[r][i]`` is rank r's ``inputs[i]``."""
        if len(outputs) != self._size:
            raise self._error("all_gather", f"needs {self._size} lists of tensors to receive in")
        operations = []
        for index, tensor in enumerate(inputs):
            parts = [of_rank[index] for of_rank in outputs]
            self._check("all_gather", tensor, *parts)
            self._same("all_gather", parts, tensor)
            operations.append(self._move("all_gather", [tensor], parts, tensor))
        return self._work(operations, outputs, opts)

    @call_of("reduce_scatter")
    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Work:
        output = self._one("reduce_scatter", outputs)
        if len(inputs) != 1 or len(inputs[0]) != self._size:
            raise self._error("reduce_scatter", f"needs a list of {self._size} tensors to send")
        self._check("reduce_scatter", *inputs[0])
        self._same("reduce_scatter", inputs[0], output)
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        operation = self._combine("reduce_scatter", inputs[0], outputs, output.numel(), op)
        return self._work([operation], outputs, opts)

    def _scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Operation:
        self._check("reduce_scatter", output, tensor)
        parts = self._parts("reduce_scatter", tensor, output)
        op = ReduceOp.SUM if opts is None else opts.reduceOp
        return self._combine("reduce_scatter", parts, [output], output.numel(), op)

    @call_of("reduce_scatter")
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        return self._work([self._scatter_single(output, tensor, opts)], [output], opts)

    @call_of("reduce_scatter")
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        operations = [self._scatter_single(output, tensor, opts) for output, tensor in pairs]
        return self._work(operations, outputs, opts)

    @call_of("gather")
    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        tensor = self._one("gather", inputs)
        recv: list[torch.Tensor] = []
        if opts.rootRank == self._rank:
            if len(outputs) != 1 or len(outputs[0]) != self._size:
                raise self._error("gather", f"the root needs a list of {self._size} tensors to receive in")
            recv = outputs[0]
            self._check("gather", *recv)
            self._same("gather", recv, tensor)
        return self._work([self._move("gather", inputs, recv, tensor, opts.rootRank)], recv, opts)

    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Work:
        is_root = opts.rootRank == self._rank
        return self.gather([self._parts("gather", output, tensor)] if is_root else [], [tensor], opts)

    gather_into_tensor = gather_single

    @call_of("scatter")
    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        output = self._one("scatter", outputs)
        send: list[torch.Tensor] = []
        if opts.rootRank == self._rank:
            if len(inputs) != 1 or len(inputs[0]) != self._size:
                raise self._error("scatter", f"the root needs a list of {self._size} tensors to send")
            send = inputs[0]
            self._check("scatter", *send)
            self._same("scatter", send, output)
        return self._work([self._move("scatter", send, outputs, output, opts.rootRank)], outputs, opts)

    @call_of("all_to_all")
    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Sizes may differ by pair, so that these are messages."""
        if len(outputs) != self._size or len(inputs) != self._size:
            raise self._error("all_to_all", f"needs {self._size} tensors to send, and as many to receive in")
        self._check("all_to_all", *outputs, *inputs)
        own, mine = outputs[self._rank], inputs[self._rank]
        self._same("all_to_all", [own], mine)
        self._copy(own, mine)
        operations = []
        with self._together():
            for peer in range(self._size):
                if peer != self._rank:
                    operations.append(self._move("send", [inputs[peer]], [], inputs[peer], peer))
                    operations.append(self._move("recv", [], [outputs[peer]], outputs[peer], peer))
        return self._work(operations, outputs, opts)

    @call_of("all_to_all")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        self._check("all_to_all", output, tensor)
        if output_sizes or input_sizes:
            split = lambda whole, sizes: list(whole.split(sizes or [len(whole) // self._size] * self._size))  # noqa: E731
            try:
                return self.alltoall(split(output, output_sizes), split(tensor, input_sizes), opts)
            except RuntimeError as error:
                if isinstance(error, mccs.Error):
                    raise
                raise self._error("all_to_all", str(error)) from None
        self._same("all_to_all", [output], tensor)
        if tensor.numel() % self._size:
            raise self._error("all_to_all", f"{tensor.numel()} elements are no {self._size} equal parts")
        part = tensor.numel() // self._size * tensor.element_size()
        of = lambda whole: list(whole.view(-1).chunk(self._size)) if part else [whole] * self._size  # noqa: E731
        return self._work([self._move("all_to_all", of(tensor), of(output), part)], [output], opts)

    def barrier(self, opts: Any = None) -> Any:
        """Once the group has a GPU, also behind what PyTorch's current stream has so far; ``wait`` blocks then, too."""
        named = getattr(opts, "device_ids", None)
        if named:
            self._gpu_of("barrier", torch.device("cuda", named[0]))
        if self._gpu is not None and self._enqueuing() is None:
            with self._gpu.begun("barrier", True):
                self._move("barrier", [], [], 0)
                return self._gpu.end([], self._timeout, is_blocking=True)
        return self._work([self._move("barrier", [], [], 0)], [], opts)

    # Messages. Those of two ranks are matched in the order of calls. Tags that differ are an error, but on GPUs, where
    # only the host could tell.

    @call_of("send")
    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        tensor = self._one("send", tensors)
        if tag == 0 or self._enqueuing() is not None:
            return self._work([self._move("send", tensors, [], tensor, peer)], tensors)
        tagged = torch.cat([torch.tensor([tag]).view(torch.uint8), _bytes_of(tensor)])
        return self._work([self._move_tagged("send", [tagged], [], tagged, peer)], tensors)

    @call_of("recv")
    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Work:
        tensor = self._one("recv", tensors)
        if tag == 0 or self._enqueuing() is not None:
            return self._work([self._move("recv", [], tensors, tensor, peer)], tensors)
        tagged = torch.empty(_TAG_BYTES + tensor.nbytes, dtype=torch.uint8)

        def unpack() -> None:
            if (sent := int(tagged[:_TAG_BYTES].view(torch.int64))) != tag:
                raise self._error(
                    "recv",
                    f"rank {peer} sent a message of tag {sent} next, and this receive is for tag {tag}: receives from a "
                    "rank are in the order of its sends",
                    mccs.InvalidUsage,
                )
            _bytes_of(tensor).copy_(tagged[_TAG_BYTES:])

        return self._work([self._move_tagged("recv", [], [tagged], tagged, peer)], tensors, None, unpack)

    def _move_tagged(
        self, call: str, send: list[torch.Tensor], recv: list[torch.Tensor], tagged: torch.Tensor, peer: int
    ) -> Operation:
        """A type that messages without a tag do not have: the service tells ranks where the one meets the other."""
        addresses = [[tensor.data_ptr() for tensor in of] for of in (send, recv)]
        return self._comm.start(call, "int8", tagged.numel(), *addresses, root=peer, owner=tagged)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        raise self._error("recv", "a receive names its source; from any source is not supported")

    # Names that PyTorch 2.11 calls these by.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # By the store, which also says who is missing.

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """As :func:`torch.distributed.monitored_barrier`: rank 0 names the ranks that have not come."""
        self._barriers += 1
        key = f"mccs-barrier-{self._barriers}"
        timeout = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout.total_seconds()
        if self._rank != 0:
            self._store.set(f"{key}-{self._rank}", "")
            self._store.wait([key], timeout)
            if message := self._store.get(key).decode():
                # In PyTorch's words, which its users look for.
                raise self._error(
                    "monitored_barrier",
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                    f"send/recv from rank 0: {message}",
                )
            return
        missing = set(range(1, self._size))
        while missing:
            missing = {rank for rank in missing if not self._store.check([f"{key}-{rank}"])}
            if missing and time.monotonic() >= deadline:
                break
            if missing:
                time.sleep(_LOOK_S)
        if not missing:
            self._store.set(key, "")
            return
        names = sorted(missing) if wait_all_ranks else [min(missing)]
        ranks = f"Rank{'s' * (len(names) > 1)} {', '.join(map(str, names))}"
        message = f"{ranks} failed to pass monitoredBarrier in {timeout / timedelta(milliseconds=1):g} ms"
        self._store.set(key, message)
        error = mccs.Timeout(
            f"rank 0 of {self._size}, monitored_barrier: Rank 0 timed out in monitoredBarrier: {message}"
        )
        error.rank, error.call = 0, "monitored_barrier"
        raise error
