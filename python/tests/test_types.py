"""Types: the package, its examples and its stubs, as a strict type checker sees them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if not os.environ.get("MCCS_TESTS_NEED_ALL"):
    pytest.importorskip("mypy")

PYTHON = Path(__file__).parents[1]

#: Calls of a user's; those that are wrong say so.
CALLS = '''
import asyncio
from typing import assert_type

import mccs
import numpy

comm = mccs.init()
array = numpy.zeros(4, numpy.float32)
assert_type(comm.all_reduce(array, blocking=False), mccs.Operation)
comm.all_reduce(array, factor=0.5)
comm.all_reduce(bytearray(8), op="max")
comm.all_reduce(array, op="xor")  # wrong: call-overload
comm.all_reduce(array, op="max", factor=0.5)  # wrong: call-overload
comm.broadcast(array, root="0")  # wrong: call-overload
comm.all_reduce([1.0, 2.0])  # wrong: call-overload
comm.all_reduce(array).wait()  # wrong: attr-defined
with mccs.group():
    going_on = comm.send(array, 1, blocking=False)
assert_type(comm.counters(), dict[str, int])


class OnGpu:
    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {}


class Stream:
    ptr = 7


on_gpu = mccs.init(device=0)
assert_type(on_gpu.device, int | None)
on_gpu.all_reduce(OnGpu())
assert_type(on_gpu.send(OnGpu(), 1, blocking=False, stream=Stream()), mccs.Operation)
on_gpu.barrier(stream=on_gpu.stream)
on_gpu.barrier(stream="0")  # wrong: call-overload
mccs.init(device="0")  # wrong: arg-type


async def waits() -> None:
    await comm.barrier(blocking=False)
    await comm.barrier()  # wrong: misc


class Own(mccs.Communicator):  # wrong: misc
    pass
'''


def checked(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Output of a module of mypy's in a folder."""
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_package_and_its_examples_are_strictly_typed(tmp_path: Path) -> None:
    said = checked(PYTHON, "mypy", "--cache-dir", tmp_path)
    assert said.returncode == 0, said.stdout + said.stderr


def test_the_stubs_are_what_the_module_has(tmp_path: Path) -> None:
    said = checked(tmp_path, "mypy.stubtest", "--concise", "mccs._mccs", "mccs.errors")
    assert said.returncode == 0, said.stdout + said.stderr


def test_a_users_calls_are_checked(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    said = checked(tmp_path, "mypy", "--strict", "--config-file", "", "calls.py")
    errors = re.findall(r"^calls\.py:(\d+): error: .*\[([a-z-]+)\]$", said.stdout, re.MULTILINE)
    wrong = [line.partition("# wrong: ")[2] for line in CALLS.splitlines()]
    assert errors == [(str(at), code) for at, code in enumerate(wrong, 1) if code], said.stdout + said.stderr
