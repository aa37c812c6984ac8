"""Runs the commands of guides for users and operators, each page in one shell, and compares what pages show with what is printed.
`console/tests/check` runs it, which has Python and the programs."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(os.environ["MCCS_PROGRAMS"])
PAGES = ["from-nccl", "operator"]
# Never decides about speed: what hangs ends the test.
HANGS_AFTER_S = 300


def blocks(page):
    """Kind and text of each block of code."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / f"docs/guides/{page}.md").read_text(), re.MULTILINE | re.DOTALL)


def shape(line):
    """A line whatever numbers and spaces are in it."""
    return re.sub(r"\s+", " ", re.sub(r"[0-9.]+", "#", line)).strip()


def ran(commands, folder):
    """Output of each block: all of them in one shell that ends at the first failure."""
    script = "set -e\n" + "".join(f"echo BLOCK {number}\n{text}" for number, text in enumerate(commands))
    # The library stands among the parts that the programs are made of.
    library = folder / "libnccl.so.2"
    library.symlink_to(next(path for path in (PROGRAMS / "deps/libnccl.so", PROGRAMS / "libnccl.so") if path.exists()))
    environment = {**os.environ, "MCCS_NCCL": str(library), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    shell = subprocess.Popen(["bash", "-c", script], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                             stdout=open(folder / "out", "w"), stderr=subprocess.STDOUT, start_new_session=True)
    try:
        status, leaves = shell.wait(timeout=HANGS_AFTER_S), False
    finally:
        try:
            os.killpg(shell.pid, signal.SIGKILL)
            leaves = True
        except ProcessLookupError:
            pass
    text = (folder / "out").read_text()
    assert status == 0, text
    assert not leaves, f"a process that the page has started goes on:\n{text}"
    return [part.split("\n", 1)[1] for part in text.split("BLOCK ")[1:]]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_guide_run_and_print_what_it_shows(page, tmp_path):
    all_blocks = blocks(page)
    commands = [text for kind, text in all_blocks if kind == "sh"]
    assert len(commands) > 2
    printed = iter(ran(commands, tmp_path))
    last, compared = "", 0
    for kind, text in all_blocks:
        if kind == "sh":
            last = next(printed)
        elif kind == "text":
            first = text.splitlines()[0]
            assert shape(first) in map(shape, last.splitlines()), f"{first!r} is not in:\n{last}"
            compared += 1
    assert compared > 1
