"""Exceptions. All are :class:`Error`; each says what it has ended."""

from __future__ import annotations

from typing import Literal


class Error(RuntimeError):
    """A call failed."""

    #: The rank whose call it was; ``None`` where it was no communicator's.
    rank: int | None = None
    #: The call.
    call: str | None = None
    # : The scope of a failure: the call's result alone, the communicator on all ranks, or the session.
    ends: Literal["call", "communicator", "session"] = "call"


class InvalidArgument(Error, ValueError):
    """The caller: an argument is wrong. Nothing was enqueued."""


class InvalidUsage(Error):
    """Ranks contradict each other, or a quota of the tenant is used up."""


class Timeout(Error, TimeoutError):
    """Somebody did not come in time."""


class Remote(Error):
    """Another rank, its host or the service failed or left."""


class System(Error):
    """This host: no service, no memory, or what the operator has to mend."""


class Internal(Error):
    """A bug in mccs."""
