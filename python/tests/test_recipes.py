"""Recipes of docs/PYTHON_RECIPES.md, each as it stands there, and the notebooks' cells."""

from __future__ import annotations

import json
import os
import re
import socket as sockets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mccs
from conftest import WATCHDOG_S, hosts_running, run
from notebook import code_cells, outputs
from test_operator import TOPOLOGY

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "PYTHON_RECIPES.md").read_text()
NOTEBOOKS = sorted((ROOT / "python" / "notebooks").glob("*.ipynb"))

#: The snippet of each section; the first one joins.
SECTIONS = {
    part.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
    for part in PAGE.split("\n## ")
}
#: Sections with tests of their own.
OTHERS = {"GPUs", "PyTorch", "JAX", "Beside mpi4py", "Tables of pandas", "Policies", "Without a service"}
JOIN = next(iter(SECTIONS))


def snippet(section: str) -> str:
    [block] = SECTIONS[section]
    return block


def execute(section: str, names: dict[str, Any]) -> None:
    exec(compile(snippet(section), f"{section} of PYTHON_RECIPES.md", "exec"), names)


def test_every_section_has_a_snippet_that_a_test_runs() -> None:
    assert len(SECTIONS) >= 12
    assert all(len(blocks) == 1 for blocks in SECTIONS.values()), SECTIONS.keys()
    assert OTHERS < SECTIONS.keys()
    listed = re.findall(r"\]\(#([\w-]+)\)", PAGE)
    assert sorted(listed) == sorted(re.sub(r"[^\w-]", "", name.lower().replace(" ", "-")) for name in SECTIONS if name != JOIN)


@pytest.mark.parametrize("nranks", [2, 3])
@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in OTHERS and name != JOIN])
def test_a_recipe_runs(socket: Path, monkeypatch, section: str, nranks: int) -> None:
    monkeypatch.setenv("MCCS_SOCKET", str(socket))

    def calls(rank: int, nranks: int, unique_id: str) -> None:
        names: dict[str, Any] = {"unique_id": unique_id, "rank": rank, "nranks": nranks}
        execute(JOIN, names)
        execute(section, names)
        names["comm"].barrier()

    run(calls, nranks, mccs.unique_id())


def test_the_recipe_of_pytorch_runs(socket: Path, monkeypatch) -> None:
    if not os.environ.get("MCCS_TESTS_NEED_ALL"):
        pytest.importorskip("torch")
    # Modules that ranks would import one by one: they are forked.
    import torch
    import torch._dynamo

    import mccs.torch  # noqa: F401

    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("WORLD_SIZE", "2")

    def process(rank: int, nranks: int) -> None:
        # As torchrun has it.
        os.environ["RANK"] = str(rank)
        torch.set_num_threads(1)
        execute("PyTorch", {})

    run(process, 2)


def test_the_recipe_beside_mpi4py_runs(socket: Path, monkeypatch) -> None:
    if not os.environ.get("MCCS_TESTS_NEED_ALL"):
        pytest.importorskip("mpi4py")
    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    program([str(Path(sys.executable).with_name("mpiexec")), "-n", "3", sys.executable], "Beside mpi4py")


def free_port() -> int:
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def program(launcher: list[str], section: str) -> str:
    """Runs a recipe as a program. Output of it on standard error."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(snippet(section))
        file.flush()
        ended = subprocess.run([*launcher, file.name], capture_output=True, text=True, timeout=WATCHDOG_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_the_recipe_of_jax_runs(socket: Path, monkeypatch) -> None:
    if not os.environ.get("MCCS_TESTS_NEED_ALL"):
        pytest.importorskip("jax")
    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    coordinator = f"127.0.0.1:{free_port()}"

    def process(rank: int, nranks: int) -> None:
        execute("JAX", {"coordinator": coordinator, "processes": nranks, "process": rank})

    run(process, 2)


@pytest.fixture
def controller(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The control socket of a service that is its own controller; a policy lies in the current folder."""
    topology, policy = tmp_path / "topology.toml", tmp_path / "in-force.toml"
    topology.write_text(TOPOLOGY)
    policy.write_text('[policy]\nname = "ecmp"\n')
    (tmp_path / "policy.toml").write_text('[policy]\nname = "ffa"\n')
    monkeypatch.chdir(tmp_path)
    settings = f'[controller]\nhost = "host-a"\ntopology = "{topology}"\npolicy = "{policy}"\n'
    with hosts_running(folder / f"recipes-{os.urandom(2).hex()}", ["host-a"], settings) as [socket]:
        monkeypatch.setenv("MCCS_SOCKET", str(socket))
        yield socket.with_name("mccs-control.sock")


@pytest.mark.parametrize("section", ["Tables of pandas", "Policies"])
def test_a_recipe_of_operators_runs(controller: Path, section: str) -> None:
    if not os.environ.get("MCCS_TESTS_NEED_ALL"):
        pytest.importorskip("pandas")

    def calls(rank: int, nranks: int, unique_id: str) -> None:
        comm = mccs.init(unique_id, rank, nranks)
        comm.barrier()
        if rank == 0:
            execute(section, {"control_socket": controller})
        comm.barrier()

    run(calls, 2, mccs.unique_id())


@pytest.fixture
def user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a service."""
    runtime = folder / f"user-{os.urandom(2).hex()}"
    runtime.mkdir(mode=0o700)
    for name in ("MCCS_SOCKET", "MCCS_RANK", "MCCS_NRANKS", "MCCS_UNIQUE_ID", "MCCS_CONTROL_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))


def test_the_recipe_without_a_service_runs(user: None) -> None:
    said = program([sys.executable], "Without a service")
    assert "mccs.sock" in said and "started one for this user" in said, said


def play(notebook: Path) -> None:
    """Words of the output stay the same; figures are of the run."""
    content = json.loads(notebook.read_text())
    kept = [cell["outputs"] for cell in code_cells(content)]
    assert any(kept)
    kinds = lambda of: [[output["output_type"] for output in cell] for cell in of]  # noqa: E731
    assert kinds(outputs(content)) == kinds(kept)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_has_output_where_it_is_kept(user: None, notebook: Path) -> None:
    if not os.environ.get("MCCS_TESTS_NEED_ALL"):
        pytest.importorskip("pandas")
    # In a process of its own: its service ends with it.
    run(lambda *_: play(notebook), 1)


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2
