"""A process group's part on its rank's GPU: calls on streams, by a communicator of the GPU's."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import mccs
from mccs._mccs import Communicator, Operation
from mccs.errors import Timeout

#: How often the watch looks for calls that have ended, and for those whose time is over.
_LOOK_S = 0.05


class Streams:
    """PyTorch's streams of a GPU, their events, and the copies that go there. Tests have others, of a driver's alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new(self) -> Any:
        return torch.cuda.Stream(self.device)

    def current(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """PyTorch's calls go to this stream, and its GPU, until the end of ``with``."""
        return torch.cuda.stream(stream)

    def order(self, stream: Any, behind: Any) -> None:
        stream.wait_stream(behind)

    def mark(self, stream: Any) -> Any:
        """An event behind what the stream has so far."""
        return stream.record_event()

    def have_current_wait(self, event: Any) -> None:
        self.current().wait_event(event)

    # On the stream that PyTorch's calls go to.

    def joined(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The parts one behind the other."""
        return torch.cat([part.reshape(-1) for part in parts]).chunk(len(parts))

    def room(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Tensors for such parts, one behind the other."""
        return parts[0].new_empty(sum(part.numel() for part in parts)).chunk(len(parts))

    def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        into.copy_(tensor.view(into.shape))

    def future(self) -> torch.futures.Future:
        return torch.futures.Future(devices=[self.device])


class Call:
    """A call while it is enqueued: its stream, its operations, and functions that enqueue what comes behind these."""

    def __init__(self, name: str, stream: Any, is_coalescing: bool = False) -> None:
        self.name, self.stream, self.is_coalescing = name, stream, is_coalescing
        self.operations: list[Operation] = []
        self.after: list[Callable[[], None]] = []


def _are_adjacent(parts: Sequence[torch.Tensor]) -> bool:
    return all(one.data_ptr() + one.nbytes == next.data_ptr() for one, next in zip(parts, parts[1:]))


class Gpu:
    """See the module. Threads may make calls at once; each has its own ``Call``."""

    def __init__(self, comm: Communicator, streams: Streams, describe: str) -> None:
        self.comm, self.streams, self.device = comm, streams, streams.device
        self._describe = describe
        #: Streams of the group's own calls: messages of each direction and peer have theirs, all others one.
        self._sides: dict[Any, Any] = {}
        self._local = threading.local()
        self._watch = _Watch(comm, describe)

    def _side(self, message: tuple[str, int] | None) -> Any:
        # A receive must not wait for a send before it, whose peer may be about to send as well.
        if message not in self._sides:
            # Another thread may have made it meanwhile: messages of a peer stay on one.
            self._sides.setdefault(message, self.streams.new())
        return self._sides[message]

    @property
    def call(self) -> Call | None:
        """The call that this thread enqueues now."""
        return getattr(self._local, "call", None)

    @contextmanager
    def begun(
        self, name: str, is_async: bool, is_coalescing: bool = False, message: tuple[str, int] | None = None
    ) -> Iterator[Call]:
        """A call, behind what PyTorch's current stream has so far: on a stream of the group's, or on the current one."""
        current = self.streams.current()
        stream = self._side(message) if is_async else current
        if is_async:
            self.streams.order(stream, current)
        call = self._local.call = Call(name, stream, is_coalescing)
        try:
            with self.streams.on(stream):
                yield call
        finally:
            self._local.call = None

    def start(
        self,
        call: str,
        dtype: str,
        count: int,
        send: Sequence[torch.Tensor],
        recv: Sequence[torch.Tensor],
        **settings: Any,
    ) -> Operation:
        """Enqueues an operation of the thread's call. Parts that do not lie one behind the other are copied, on its stream."""
        under = self.call
        assert under is not None
        sent, received = send, recv
        if not _are_adjacent(send):
            sent = self.streams.joined(send)
        if not _are_adjacent(recv):
            received = self.streams.room(recv)
            under.after.extend(functools.partial(self.streams.copy, *pair) for pair in zip(recv, received))
        operation = self.comm.start(
            call,
            dtype,
            count,
            [part.data_ptr() for part in sent],
            [part.data_ptr() for part in received],
            owner=(send, recv, sent, received),
            stream=under.stream,
            **settings,
        )
        under.operations.append(operation)
        return operation

    def end(self, result: Any, timeout: timedelta, is_blocking: bool = False) -> GpuWork:
        """Enqueues what comes behind the call's operations."""
        call = self.call
        assert call is not None
        after, operations = call.after, call.operations
        call.after, call.operations = [], []
        for function in after:
            function()
        # Later work reads and writes memory that the operations keep only until their own ends.
        kept = [after, result]
        event = self.streams.mark(call.stream)
        work = GpuWork(self, call, operations, event, result, timeout, is_blocking)
        self._watch.add(call.name, operations, timeout, event, kept)
        return work

    def failure(self) -> BaseException | None:
        return self._watch.failure

    def abort(self) -> None:
        self.comm.abort()

    def close(self) -> None:
        """Waits for calls under way, as long as each may take."""
        self._watch.end()
        self.comm.close()


class _Under:
    """A call under way, as the watch sees it."""

    def __init__(self, name: str, operations: Sequence[Operation], seconds: float, event: Any, kept: Any) -> None:
        self.name, self.operations, self.seconds, self.event, self.kept = name, operations, seconds, event, kept
        self.looks = 0

    def has_ended(self) -> bool:
        # All are asked: an operation lets go of its tensors when somebody finds that it has ended.
        done = [operation.done() for operation in self.operations]
        return all(done) and bool(self.event.query())


class _Watch:
    """A thread that finds calls that have ended, whose tensors go then, and aborts the group where one takes too long."""

    def __init__(self, comm: Communicator, describe: str) -> None:
        self._comm, self._describe = comm, describe
        self._changed = threading.Condition()
        self._under_way: list[_Under] = []
        self._ends = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._look, name="mccs GPU calls", daemon=True)
        self._thread.start()

    def add(self, name: str, operations: Sequence[Operation], timeout: timedelta, event: Any, kept: Any) -> None:
        with self._changed:
            self._under_way.append(_Under(name, operations, timeout.total_seconds(), event, kept))
            if len(self._under_way) == 1:
                self._changed.notify()

    def _look(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way or self._ends)
                under_way = list(self._under_way)
            if not under_way:
                return
            ended = [call for call in under_way if self._has_ended(call)]
            with self._changed:
                self._under_way = [call for call in self._under_way if call not in ended]
                # A look's own time does not count: a process that was stopped gets its whole time again.
                if self._under_way and not self._ends:
                    self._changed.wait(_LOOK_S)
                elif self._under_way:
                    self._changed.wait(_LOOK_S / 10)
            del under_way, ended

    def _has_ended(self, call: _Under) -> bool:
        try:
            if call.has_ended():
                failed = (error for operation in call.operations if (error := operation.exception()))
                self.failure = self.failure or next(failed, None)
                return True
        except Exception as error:  # noqa: BLE001
            # The communicator is closed, or the GPU has failed.
            self.failure = self.failure or error
            return True
        call.looks += 1
        if call.looks * _LOOK_S < call.seconds:
            return False
        self.failure = self.failure or Timeout(
            f"{self._describe}, {call.name}: it has not ended after {call.seconds:g} s; the group was aborted"
        )
        try:
            self._comm.abort()
        except mccs.Error:
            # It has ended already.
            pass
        return True

    def end(self) -> None:
        """Returns once no call is under way."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()


class GpuWork(dist.Work):
    """A call on a GPU's streams. ``wait`` orders PyTorch's current stream behind it, and does not block the host."""

    def __init__(
        self,
        gpu: Gpu,
        call: Call,
        operations: Sequence[Operation],
        event: Any,
        result: Any,
        timeout: timedelta,
        is_blocking: bool,
    ) -> None:
        super().__init__()
        self._gpu, self._stream, self._operations, self._event = gpu, call.stream, operations, event
        self._result, self._timeout, self._is_blocking = result, timeout, is_blocking

    def _raise(self) -> None:
        if (error := self.exception()) is not None:
            raise error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """With a time-out, and behind a barrier, it blocks until the call has ended; then the group is aborted."""
        if timeout > timedelta(0) or self._is_blocking:
            seconds = (timeout if timeout > timedelta(0) else self._timeout).total_seconds()
            try:
                mccs.wait_all(self._operations, seconds)
            except Timeout:
                self._gpu.abort()
                raise
            # Behind the operations: parts that are copied to where they belong.
            self._event.synchronize()
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self._raise()
        if self._gpu.streams.current() != self._stream:
            self._gpu.streams.have_current_wait(self._event)

    def block_current_stream(self) -> None:
        self.synchronize()

    def is_completed(self) -> bool:
        done = [operation.done() for operation in self._operations]
        return all(done) and bool(self._event.query())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The reason why it failed, or why the group did. ``None`` while it goes on."""
        failed = (error for operation in self._operations if (error := operation.exception()))
        # That of the group is the first: others follow from it.
        return self._gpu.failure() or next(failed, None)

    def result(self) -> Any:
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future:
        """A future that has ended already: its values are those tensors, and whoever waits is ordered behind the call."""
        future = self._gpu.streams.future()
        with self._gpu.streams.on(self._stream):
            if (error := self.exception()) is None:
                future.set_result(self._result)
            else:
                future.set_exception(error)
        return future
