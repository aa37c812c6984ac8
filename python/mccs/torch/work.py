"""Calls that go on, as PyTorch's ``Work``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import mccs
from mccs._mccs import Operation
from mccs.errors import Timeout


class Work(dist.Work):
    """One or several operations of the same call; ``wait`` ends them."""

    def __init__(
        self,
        operations: Sequence[Operation],
        result: Any,
        timeout: timedelta,
        abort: Callable[[], None],
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._operations = operations
        self._result = result
        self._timeout = timeout
        self._abort = abort
        # Function that makes the result of received data: called once, by whoever finds the operations ended.
        self._after = after
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def _finish(self) -> None:
        with self._lock:
            after, self._after = self._after, None
            if after is not None:
                try:
                    after()
                except BaseException as failure:  # noqa: BLE001
                    self._failure = failure
        if self._failure is not None:
            raise self._failure

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the end. After the time-out the group is aborted, on all ranks."""
        seconds = (timeout if timeout > timedelta(0) else self._timeout).total_seconds()
        try:
            mccs.wait_all(self._operations, seconds)
        except Timeout:
            self._abort()
            raise
        if self._after is not None or self._failure is not None:
            self._finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not all(operation.done() for operation in self._operations):
            return False
        if self.exception() is None:
            try:
                self._finish()
            except BaseException:  # noqa: BLE001
                # Told by `exception`, and by `wait`.
                pass
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        failed = (error for operation in self._operations if (error := operation.exception()))
        return next(failed, self._failure)

    def result(self) -> Any:
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future:
        """A future of the output tensors. It ends without anybody who waits."""
        future: torch.futures.Future = torch.futures.Future()
        left = len(self._operations)
        lock = threading.Lock()

        def ended() -> None:
            nonlocal left
            with lock:
                left -= 1
                if left > 0:
                    return
            error = self.exception()
            try:
                if error is None:
                    self._finish()
            except BaseException as raised:  # noqa: BLE001
                error = raised
            if error is None:
                future.set_result(self._result)
            else:
                future.set_exception(error)

        if not self._operations:
            left = 1
            ended()
        for operation in self._operations:
            operation.when_done(ended)
        return future
