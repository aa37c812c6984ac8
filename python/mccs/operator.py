"""An operator's views and commands: the answers of ``mccsctl`` as Python has objects and pandas tables.

The keys of all answers are in docs/JSON.md. Whoever may use the service's control socket may do this.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mccs.errors import Error
from mccs.service import program

if TYPE_CHECKING:
    import pandas

__all__ = ["Operator", "Refused", "table"]


class Refused(Error):
    """A command was not carried out. The text says why, and what to do."""


class Operator:
    """Asks one service, by its control socket.

    Without a socket it asks the one that ``mccsctl`` asks: of ``MCCS_CONTROL_SOCKET``, of the host,
    or of this user. May be used from any thread. Every call raises :class:`Refused` where the
    service does not do it, or cannot be reached.
    """

    def __init__(self, socket: str | os.PathLike[str] | None = None) -> None:
        self._socket = None if socket is None else os.fspath(socket)

    def ask(self, *words: object) -> Any:
        """The answer of any command of ``mccsctl``, such as ``ask("why-stuck", 3)``; None if it has none."""
        command = [program("mccsctl"), "--json", *map(str, words)]
        if self._socket is not None:
            command += ["--socket", self._socket]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        try:
            answer = json.loads(done.stdout) if done.stdout.strip() else None
        except ValueError:
            raise Refused(f"mccsctl {words[0]}: {done.stdout}{done.stderr}".strip()) from None
        # Commands that find something wrong say so by their status, and have an answer.
        if done.returncode != 0 and answer is None:
            raise Refused(done.stderr.strip())
        return answer

    def _rows(self, command: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.ask(command)[command]
        return rows

    def _policy(self, command: str, key: str, *words: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask("policy", command, *words)["controller"][key]
        return answer

    # Views: a row for each object.

    def hosts(self) -> list[dict[str, Any]]:
        """Hosts of the cluster, and whether their services can be reached."""
        return self._rows("hosts")

    def gpus(self) -> list[dict[str, Any]]:
        """GPUs of this service."""
        return self._rows("gpus")

    def sessions(self) -> list[dict[str, Any]]:
        """Connected processes."""
        return self._rows("sessions")

    def communicators(self) -> list[dict[str, Any]]:
        """Communicators of this host and their counters."""
        return self._rows("communicators")

    def joining(self) -> list[dict[str, Any]]:
        """Communicators that wait for ranks, and for which."""
        return self._rows("joining")

    def failed(self) -> list[dict[str, Any]]:
        """Communicators that failed within the last hour, and why."""
        return self._rows("failed")

    def flows(self) -> list[dict[str, Any]]:
        """Flows to and from other hosts."""
        return self._rows("flows")

    def engines(self) -> dict[str, list[dict[str, Any]]]:
        """Threads by ``runtimes``, and what they poll by ``engines``."""
        engines: dict[str, list[dict[str, Any]]] = self.ask("engines")["engines"]
        return engines

    def why_stuck(self, communicator: int) -> dict[str, Any]:
        """The ranks that a communicator waits for."""
        answer: dict[str, Any] = self.ask("why-stuck", communicator)
        return answer

    # Changes: one for each argument.

    def reconfigure(
        self,
        communicator: int,
        *,
        algorithm: str | None = None,
        channels: int | None = None,
        rings: Iterable[Sequence[int]] = (),
        transport: str | None = None,
        paths: Iterable[str] = (),
    ) -> None:
        """Changes a communicator's strategy while its job runs, and pins it.

        Returns when all its hosts have agreed. ``rings`` has the order of ranks of each channel.
        ``paths`` are written as ``mccsctl reconfigure --help`` says.
        """
        words: list[object] = ["reconfigure", communicator]
        for name, value in (("algorithm", algorithm), ("channels", channels), ("transport", transport)):
            words += [] if value is None else [f"--{name}", value]
        for ring in rings:
            words += ["--ring", ",".join(map(str, ring))]
        for path in paths:
            words += ["--path", path]
        self.ask(*words)

    def unpin(self, communicator: int) -> None:
        """Lets the controller decide for a communicator again."""
        self.ask("reconfigure", communicator, "--unpin")

    # Policies of the cluster, on the controller's host.

    def check_policy(
        self,
        file: str | os.PathLike[str],
        *,
        topology: str | os.PathLike[str] | None = None,
        service: str | os.PathLike[str] | None = None,
    ) -> None:
        """Whether a policy file is sound. Asks no service. ``topology`` and ``service`` are files to check it against."""
        words: list[object] = ["policy", "check", os.fspath(file)]
        for name, other in (("topology", topology), ("service", service)):
            words += [] if other is None else [f"--{name}", os.fspath(other)]
        self.ask(*words)

    def diff_policy(self, file: str | os.PathLike[str]) -> dict[str, Any]:
        """Changes that a policy file would make to every communicator."""
        return self._policy("diff", "diff", os.fspath(file))

    def apply_policy(self, file: str | os.PathLike[str]) -> dict[str, Any]:
        """Puts a policy in force, on all hosts or on none. Says what has changed."""
        return self._policy("apply", "applied", os.fspath(file))

    def roll_back_policy(self) -> dict[str, Any]:
        """Puts the previous policy in force again. Says what has changed."""
        return self._policy("rollback", "applied")

    def policy(self) -> dict[str, Any]:
        """The policy in force, and the file that differs."""
        return self._policy("show", "show")


def table(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Rows as a table of pandas, which must be installed. Columns of nested objects are named ``outer.inner``."""
    import pandas

    return pandas.json_normalize(rows)
