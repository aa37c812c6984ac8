"""Collectives between processes, by the host's mccs-service.

>>> import mccs, numpy
>>> comm = mccs.init(rank=0, nranks=1)
>>> array = numpy.ones(4, numpy.float32)
>>> comm.all_reduce(array)
>>> array
array([1., 1., 1., 1.], dtype=float32)

Arrays are NumPy's, and whatever else has the buffer protocol or ``__dlpack__`` in the host's
memory. With ``init(..., device=0)`` they are CuPy's, PyTorch's and others' on that GPU. A call returns when it has ended, or with ``blocking=False`` at once. Memory of
:func:`empty` is the service's too, and is not copied.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable
from operator import index as _index  # Not the module: `mccs.operator` takes its name.
from typing import TYPE_CHECKING, Any

from mccs import service
from mccs._mccs import Communicator, Group, Memory, Operation, Session, unique_id
from mccs.errors import Error, Internal, InvalidArgument, InvalidUsage, Remote, System, Timeout

if TYPE_CHECKING:
    import numpy
    from numpy.typing import DTypeLike

__all__ = [
    "Communicator",
    "Error",
    "Group",
    "Internal",
    "InvalidArgument",
    "InvalidUsage",
    "Memory",
    "Operation",
    "Remote",
    "Session",
    "System",
    "Timeout",
    "connect",
    "empty",
    "group",
    "init",
    "session",
    "unique_id",
    "wait_all",
]

_lock = threading.Lock()
_sessions: dict[int, Session] = {}


def connect(socket: str | os.PathLike[str] | None = None) -> Session:
    """A new session with the service of a socket: by default ``MCCS_SOCKET``'s, or this host's.

    If no service runs, one is started for this user. It says so on standard error, and ends with
    the last process that uses it.
    """
    if socket is None:
        socket = service.find() or service.start()
    return Session(os.fspath(socket))


def session() -> Session:
    """This process' session, made at the first call. A forked child gets one of its own."""
    with _lock:
        known = _sessions.get(os.getpid())
        if known is None or not known.is_alive:
            known = _sessions[os.getpid()] = connect()
        return known


def init(
    unique_id: str | None = None,
    rank: int | None = None,
    nranks: int | None = None,
    *,
    root_address: str | None = None,
    name: str | None = None,
    timeout: float | None = None,
    device: int | None = None,
) -> Communicator:
    """Joins a communicator, which waits for all of its ranks.

    With a ``device``, the driver's number of a GPU, it is one of arrays on GPUs: each rank names its own.

    Arguments that are left out come from the environment, as ``mccs-launch`` sets it: ``MCCS_RANK``,
    ``MCCS_NRANKS``, ``MCCS_UNIQUE_ID`` and ``MCCS_ROOT_ADDRESS``. One rank alone needs no id.
    """
    environ = os.environ
    rank = _number("MCCS_RANK", 0) if rank is None else rank
    nranks = _number("MCCS_NRANKS", 1) if nranks is None else nranks
    unique_id = unique_id or environ.get("MCCS_UNIQUE_ID")
    if unique_id is None:
        if nranks != 1:
            raise _wrong(
                "join",
                f"rank {rank} of {nranks}: a communicator of several ranks has an id: make one with "
                "mccs.unique_id(), and give it to all ranks, or set MCCS_UNIQUE_ID",
            )
        unique_id = globals()["unique_id"]()
    root_address = root_address or environ.get("MCCS_ROOT_ADDRESS") or None
    return Communicator(
        session(), unique_id, rank, nranks, root_address=root_address, name=name, timeout=timeout, device=device
    )


def _wrong(call: str, message: str) -> InvalidArgument:
    error = InvalidArgument(f"{call}: {message}")
    error.call = call
    return error


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip()
    try:
        return int(text) if text else default
    except ValueError:
        raise _wrong("join", f"{variable} is {text!r}, and has to be a number") from None


def group() -> Group:
    """Collects calls, and issues them together at the end of ``with``.

    Sends and receives inside do not wait for each other. Calls return at once: ``None``, or an
    :class:`Operation` with ``blocking=False``. Arrays are read and written from the end on. The end
    issues everything, waits for all calls that block, and raises the first one's exception. Where
    an exception leaves the ``with``, nothing is issued, and what runs already goes on.

    Groups nest; the outermost one issues. A group belongs to the thread, and to the asyncio task,
    that has entered it.
    """
    return Group()


def wait_all(operations: Iterable[Operation], timeout: float | None = None) -> None:
    """Waits until all have ended, for ``timeout`` seconds at most, and raises the first one's exception.

    Operations that have not ended then can be waited for again.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    for operation in operations:
        operation.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


def empty(shape: int | tuple[int, ...], dtype: DTypeLike = "float32", *, session: Session | None = None) -> numpy.ndarray:
    """A NumPy array in memory that the service maps too: collectives on it copy nothing."""
    import numpy

    try:
        kind = numpy.dtype(dtype)
        shape = (_index(shape),) if not isinstance(shape, Iterable) else tuple(map(_index, shape))
    except TypeError as error:
        raise _wrong("empty", str(error)) from None
    if any(length < 0 for length in shape) or kind.hasobject:
        raise _wrong("empty", f"there is no array of shape {shape} and type {kind} in memory of the service's")
    memory = (session or globals()["session"]()).allocate(math.prod(shape) * kind.itemsize)
    return numpy.asarray(memory).view(kind).reshape(shape)


def __getattr__(name: str) -> Any:
    if name in ("jax", "torch"):
        import importlib

        return importlib.import_module(f"mccs.{name}")
    raise AttributeError(f"module 'mccs' has no attribute {name!r}")
