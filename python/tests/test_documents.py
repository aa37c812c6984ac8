"""Code of pages runs as it stands there."""

from __future__ import annotations

import os
import re
import runpy
import socket as sockets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mccs
from conftest import WATCHDOG_S, run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "PYTHON.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def execute(rank: int, nranks: int, unique_id: str, port: int) -> None:
    names: dict[str, Any] = {"unique_id": unique_id, "rank": rank, "nranks": nranks}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": rank, "WORLD_SIZE": nranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            patch.setenv(name, str(value))
        for block in blocks():
            # Tests of their own run them.
            if "mccs.operator" in block or "mccs.jax" in block:
                continue
            if "torch" not in block or "torch" in sys.modules:
                exec(compile(block, "docs/PYTHON.md", "exec"), names)
    assert (names["array"] == sum(range(nranks)) * nranks**2).all()


def test_code_of_the_page_runs(socket, monkeypatch) -> None:
    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert len(blocks()) >= 3
    run(execute, 2, mccs.unique_id(), port)


def test_the_page_and_the_stubs_name_every_call() -> None:
    stubs = (Path(mccs.__file__).parent / "_mccs.pyi").read_text()
    for kind in (mccs.Communicator, mccs.Operation, mccs.Session, mccs.Memory):
        for name in vars(kind):
            if not name.startswith("_"):
                assert f"def {name}(" in stubs, f"{kind.__name__}.{name}"
                assert getattr(kind, name).__doc__, f"{kind.__name__}.{name} says nothing of itself"
    for name in vars(mccs.Communicator):
        if name in ("device", "stream"):
            assert f"`{name}`" in PAGE, name
        elif not name.startswith("_") and name not in ("rank", "nranks", "start", "close"):
            assert f"{name}(" in PAGE, name


@pytest.mark.parametrize("name", ["average.py"])
def test_examples_run(socket, monkeypatch, capfd, name: str) -> None:
    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    monkeypatch.setenv("MCCS_UNIQUE_ID", mccs.unique_id())

    def example(rank: int, nranks: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MCCS_RANK", str(rank))
            patch.setenv("MCCS_NRANKS", str(nranks))
            runpy.run_path(str(ROOT / "python" / "examples" / name), run_name="__main__")
            sys.stdout.flush()

    run(example, 2)
    assert "ranks agree" in capfd.readouterr().out


def test_the_example_beside_mpi_runs(socket, monkeypatch) -> None:
    if not os.environ.get("MCCS_TESTS_NEED_ALL"):
        pytest.importorskip("mpi4py")
    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    launcher = Path(sys.executable).with_name("mpiexec")
    command = [launcher, "-n", "3", sys.executable, ROOT / "python" / "examples" / "beside_mpi.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S)
    assert ended.returncode == 0, ended.stderr
    assert "3 ranks agree: 9" in ended.stdout, ended.stdout
