"""A service that is started for a user lives as long as its last user."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mccs
from conftest import run
from mccs import service


def use(rank: int, nranks: int, unique_id: str, folder: str) -> str:
    comm = mccs.init(unique_id, rank, nranks)
    array = np.full(10, rank + 1, np.int64)
    comm.all_reduce(array)
    assert (array == sum(range(nranks + 1))).all()
    comm.barrier()
    return Path(folder, "mccs-python", "current").read_text()


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
    assert capfd.readouterr().err.count("started one for this user") == 1
    # It stops listening once nobody is left.
    while service._listens(Path(first[0], "mccs.sock")):
        time.sleep(0.01)
    second = run(use, 2, mccs.unique_id(), runtime)
    assert second[0] != first[0]


def test_without_a_program_the_error_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MCCS_SERVICE", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(OSError):
        service.start()
    monkeypatch.delenv("MCCS_SERVICE")
    monkeypatch.setenv("PATH", str(tmp_path))
    if not (Path(service.__file__).parent / "bin").exists():
        with pytest.raises(mccs.System, match="MCCS_SOCKET"):
            service.program("mccs-service")


def test_a_folder_that_others_can_open_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "mccs-python").mkdir()
    os.chmod(tmp_path / "mccs-python", 0o755)
    with pytest.raises(mccs.System, match="this user alone"):
        service.start()
