"""Calls that go on, awaited in asyncio: the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mccs._mccs import Operation


def until_done(operation: Operation) -> Generator[Any, None, None]:
    """Runs an ``await operation``. A thread of the package's wakes the event loop at the operation's end.

    A task that is cancelled stops to wait. The operation goes on, and can be awaited again.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        # A task that was cancelled has cancelled it.
        if not ended.done():
            ended.set_result(None)

    def tell() -> None:
        try:
            loop.call_soon_threadsafe(end)
        except RuntimeError:
            # The loop is closed: nobody waits in it any more.
            pass

    operation.when_done(tell)
    yield from ended
    if (error := operation.exception()) is not None:
        raise error
