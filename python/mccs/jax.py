"""JAX on CPUs: collectives between processes go to the host's service.

>>> import mccs.jax                          # before JAX's first import
>>> import jax
>>> mccs.jax.initialize("localhost:1234", num_processes=2, process_id=0)

JAX's collectives on CPUs can call MPI, which they find through MPItrampoline: this package is the
library that it is told. Processes have one device each.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import mccs
from mccs import _mccs
from mccs.errors import InvalidUsage

__all__ = ["initialize"]

# : Variable that MPItrampoline, a part of JAX's library, reads when it is loaded.
_VARIABLE = "MPITRAMPOLINE_LIB"

#: How long ranks wait for rank 0's id.
_TIMEOUT_S = 300


def _load_jax() -> None:
    """Has JAX's library take MPI's functions from the extension. Other programs are to see nothing of it in the environment."""
    if "jaxlib" in sys.modules:
        raise InvalidUsage("mccs.jax is to be imported before jax: JAX's library looks for MPI's functions when it is loaded")
    former = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = _mccs.__file__
    try:
        import jax  # noqa: F401
    finally:
        if former is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = former


_load_jax()

import jax  # noqa: E402
from jax._src import distributed  # noqa: E402


def _devices() -> int:
    """Devices that this process is to have."""
    asked = jax.config.jax_num_cpu_devices
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return asked if asked >= 0 else int(flag[1]) if flag else 1


def initialize(*arguments: Any, **named: Any) -> None:
    """``jax.distributed.initialize`` with the same arguments; afterwards JAX's collectives on CPUs are mccs'.

    Waits for all processes. It is to be called before JAX's first computation. Processes have one
    CPU device each.
    """
    if (devices := _devices()) != 1:
        raise InvalidUsage(f"processes have one CPU device each, and not {devices}: start more processes")
    jax.config.update("jax_cpu_collectives_implementation", "mpi")
    jax.distributed.initialize(*arguments, **named)
    state = distributed.global_state
    session = mccs.session()
    if state.process_id == 0:
        state.client.key_value_set("mccs", f"{mccs.unique_id()} {session.root_address or ''}")
    unique_id, _, address = state.client.blocking_key_value_get("mccs", _TIMEOUT_S * 1000).partition(" ")
    communicator = mccs.Communicator(
        session, unique_id, state.process_id, state.num_processes, root_address=address or None, name="jax"
    )
    _mccs.mpi_serve(communicator)
