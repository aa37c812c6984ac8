"""A service that is started for a user lives as long as its last user."""

from __future__ import annotations

import os
import re
import select
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mccs
from conftest import WATCHDOG_S, run
from mccs import service


def use(rank: int, nranks: int, unique_id: str, folder: str) -> str:
    comm = mccs.init(unique_id, rank, nranks)
    array = np.full(10, rank + 1, np.int64)
    comm.all_reduce(array)
    assert (array == sum(range(nranks + 1))).all()
    comm.barrier()
    return Path(folder, "mccs-python", "current").read_text()


def wait_for_end_of(process: int) -> None:
    """Whether a process that is nobody's child here lives."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    with os.fdopen(descriptor) as process_ends:
        assert select.select([process_ends], [], [], WATCHDOG_S)[0], "the service goes on without users"


@pytest.fixture
def runtime() -> Iterator[str]:
    """A folder with a short name: paths of sockets have 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="mccs-") as folder:
        yield folder


def test_ranks_share_a_service_that_ends_with_the_last(runtime, monkeypatch, capfd) -> None:
    monkeypatch.delenv("MCCS_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr(service, "find", lambda: None)
    first = run(use, 3, mccs.unique_id(), runtime)
    assert len(set(first)) == 1, "all have the same one"
    [process] = re.findall(r"started one for this user \(process (\d+),", capfd.readouterr().err)
    wait_for_end_of(int(process))
    assert not service._listens(Path(first[0], "mccs.sock"))
    second = run(use, 2, mccs.unique_id(), runtime)
    assert second[0] != first[0]


def test_without_a_program_the_error_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MCCS_SERVICE", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(mccs.System, match=f"{tmp_path}/none.*MCCS_SERVICE"):
        service.start()
    monkeypatch.delenv("MCCS_SERVICE")
    monkeypatch.setenv("PATH", str(tmp_path))
    # An installation without programs of its own.
    monkeypatch.setattr(service, "__file__", str(tmp_path / "service.py"))
    with pytest.raises(mccs.System, match="no program mccs-service: .*MCCS_SOCKET"):
        service.program("mccs-service")


def test_a_folder_that_cannot_be_made_is_an_error_of_the_package(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(mccs.System, match="cannot start a service for this user: .*XDG_RUNTIME_DIR"):
        service.start()


def test_a_socket_that_nobody_listens_on_is_an_error_of_the_package(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MCCS_SOCKET", str(tmp_path / "none.sock"))
    with pytest.raises(mccs.System, match="none.sock"):
        mccs.connect()


def test_a_folder_that_others_can_open_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "mccs-python").mkdir()
    os.chmod(tmp_path / "mccs-python", 0o755)
    with pytest.raises(mccs.System, match="this user alone"):
        service.start()
