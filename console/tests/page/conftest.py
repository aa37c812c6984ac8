"""A crowd that is no service, a console of it, and a browser."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from browser import Browser

PROGRAMS = Path(os.environ["MCCS_PROGRAMS"])


class Programs:
    """Programs that say when they are ready; they end with the value."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.started = []

    def path(self, name):
        return f"{self.folder.name}/{name}"

    def start(self, command, **options):
        program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
        self.started.append(program)
        line = program.stdout.readline()
        assert "ready" in line, f"{command} says {line!r}"
        return program, line

    def crowd(self, communicators=1000, hosts=100):
        return self.start([PROGRAMS / "examples/crowd", self.path("crowd.sock"), str(communicators), str(hosts)])[0]

    def console(self):
        config = self.path("console.toml")
        socket = self.path("crowd.sock")
        Path(config).write_text(f'[console]\nlisten = "127.0.0.1:0"\nsocket = "{socket}"\n')
        program, line = self.start([PROGRAMS / "mccs-console", "--config", config])
        return program, line.split()[-1].rstrip("/")

    def stop(self, program):
        program.kill()
        program.wait()
        self.started.remove(program)

    def close(self):
        for program in list(self.started):
            self.stop(program)
        self.folder.cleanup()


@pytest.fixture
def programs():
    programs = Programs()
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def console():
    programs = Programs()
    programs.crowd()
    yield programs.console()[1]
    programs.close()


@pytest.fixture(scope="session")
def chromium():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium):
    """A page that knows nothing of the test before."""
    chromium.go("about:blank")
    chromium.size(1280, 800)
    chromium.prefer()
    chromium.events.clear()
    return chromium
