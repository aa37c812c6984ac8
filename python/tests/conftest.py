"""A service of the tests' own, and ranks as forked processes."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket as sockets
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import mccs
from mccs import _mccs, service

#: A hang is a failure, and no test is about time.
WATCHDOG_S = 120


class Failed(Exception):
    """A rank's exception, by its text."""


def _child(function: Callable[..., Any], rank: int, nranks: int, arguments: tuple, out: int) -> None:
    try:
        outcome = (True, function(rank, nranks, *arguments))
        # As a process does that ends in order; this one ends without what pytest would do.
        _mccs._close_all()
    except BaseException:  # noqa: BLE001
        outcome = (False, traceback.format_exc())
    with os.fdopen(out, "wb") as pipe:
        pickle.dump(outcome, pipe)
    os._exit(0)


def _read(out: int, deadline: float) -> bytes | None:
    read = b""
    while True:
        if not select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        part = os.read(out, 1 << 16)
        if not part:
            return read
        read += part


def run(function: Callable[..., Any], nranks: int, *arguments: Any) -> list[Any]:
    """Results of ``function(rank, nranks, *arguments)`` on each rank. Each is a process."""
    children = []
    for rank in range(nranks):
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            _child(function, rank, nranks, arguments, into)
        os.close(into)
        children.append((child, out))
    deadline = time.monotonic() + WATCHDOG_S
    results, failures = [], []
    for rank, (_, out) in enumerate(children):
        read = _read(out, deadline)
        os.close(out)
        if read is None:
            failures.append(f"rank {rank} hangs")
        elif not read:
            failures.append(f"rank {rank} died")
        else:
            is_good, result = pickle.loads(read)
            (results if is_good else failures).append(result)
    for child, _ in children:
        if failures:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os.waitpid(child, 0)
    if failures:
        raise Failed("\n".join(failures))
    return results


@contextmanager
def running(folder: Path, settings: str = "", cuda: str = 'use = "off"') -> Iterator[Path]:
    """A service in a folder; gives its tenants' socket."""
    config = folder / "service.toml"
    config.write_text(f'[service]\nruntime_dir = "{folder}"\n{settings}\n[cuda]\n{cuda}\n')
    command = [service.program("mccs-service"), "--config", config]
    with open(folder / "log", "wb") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == b"mccs-service ready", (folder / "log").read_text()
    yield folder / "mccs.sock"
    child.terminate()
    assert child.wait() == 0


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A folder with a short name: paths of sockets have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="mccs-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def socket(folder: Path) -> Iterator[Path]:
    """Socket of a service that runs as long as the tests."""
    own = folder / "own"
    own.mkdir()
    with running(own) as socket:
        yield socket


@contextmanager
def hosts_running(folder: Path, names: list[str], settings: str = "") -> Iterator[list[Path]]:
    """Services that know each other, as of several hosts, in a new folder; gives their tenants' sockets."""
    folder.mkdir()
    keys = folder / "keys"
    subprocess.run([service.program("mccsctl"), "keys", "--hosts", ",".join(names), "--dir", keys], check=True)
    with ExitStack() as probes:
        bound = [probes.enter_context(sockets.create_server(("127.0.0.1", 0))) for _ in names]
        addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in bound]
    hosts = "".join(f'[[host]]\nname = "{name}"\naddress = "{at}"\n' for name, at in zip(names, addresses))
    with ExitStack() as services:
        started = []
        for name, address in zip(names, addresses):
            (folder / name).mkdir()
            exchange = "".join(f'{key} = "{keys / file}"\n' for key, file in [
                ("certificate", f"{name}.crt"), ("key", f"{name}.key"), ("authority", "authority.crt")])
            own = f'name = "{name}"\n[exchange]\nlisten = "{address}"\n{exchange}{hosts}{settings}'
            started.append(services.enter_context(running(folder / name, own)))
        yield started


@pytest.fixture(scope="session")
def gpu_service(folder: Path) -> Iterator[Path]:
    """Socket of a service that has the emulated GPUs."""
    assert os.environ.get("MCCS_EMULATED_GPUS") == "2", "python/tests/check runs this"
    own = folder / "gpus"
    own.mkdir()
    with running(own, cuda='use = "required"') as socket:
        yield socket


@pytest.fixture(scope="session")
def two_hosts(folder: Path) -> Iterator[list[Path]]:
    """Sockets of two services that know each other."""
    with hosts_running(folder / "two", ["host-a", "host-b"]) as started:
        yield started


@pytest.fixture
def ranks(socket: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs ranks on the tests' service, as a communicator ``comm`` each."""
    monkeypatch.setenv("MCCS_SOCKET", str(socket))

    def start(function: Callable[..., Any], nranks: int, *arguments: Any) -> list[Any]:
        unique_id = mccs.unique_id()

        def joined(rank: int, nranks: int, *arguments: Any) -> Any:
            return function(mccs.init(unique_id, rank, nranks), *arguments)

        return run(joined, nranks, *arguments)

    return start
