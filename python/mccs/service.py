"""Finds this host's service, or starts one for this user.

A service that is started here is shared by all processes of the user that find none of the host's.
Each of them holds a shared lock on its file of users. The service waits for an exclusive one, and
ends when it gets it: with its last user, however that ended.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from mccs.errors import System

#: How the service says that its sockets accept connections.
_READY = b"mccs-service ready"

#: Locked files of services that this process uses, by socket. They are never closed.
_used: dict[str, int] = {}


def find() -> Path | None:
    """The socket of ``MCCS_SOCKET``, or else of the host's service where one listens by default."""
    named = os.environ.get("MCCS_SOCKET")
    if named:
        return Path(named)
    for folder in (_user_folder("mccs"), "/run/mccs"):
        socket = Path(folder) / "mccs.sock"
        if _listens(socket):
            return socket
    return None


def start() -> Path:
    """The socket of the service that this user's processes share; starts it where there is none.

    Raises :class:`mccs.System` where that fails.
    """
    try:
        base = _own_folder()
        with _locked(base / "lock"):
            current = base / "current"
            if (socket := _join(current)) is None:
                socket = _launch(base, current)
        return socket
    except OSError as error:
        raise System(
            f"cannot start a service for this user: {error}. MCCS_SOCKET names the socket of a service that runs, "
            "MCCS_SERVICE a service's program, and XDG_RUNTIME_DIR a folder of this user's"
        ) from error


def _user_folder(name: str) -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / name if runtime else Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"


def _own_folder() -> Path:
    base = _user_folder("mccs-python")
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise System(f"{base} is to be a folder that this user alone can open")
    return base


def _listens(socket: Path) -> bool:
    import socket as sockets

    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(os.fspath(socket))
        except OSError:
            return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _use(users: Path) -> int | None:
    """Becomes a user of a service, unless it is about to end."""
    descriptor = os.open(users, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _join(current: Path) -> Path | None:
    """Becomes a user of the service that runs, if one does."""
    try:
        folder = Path(current.read_text())
        descriptor = _use(folder / "users")
    except OSError:
        return None
    socket = folder / "mccs.sock"
    if descriptor is None:
        return None
    if not _listens(socket):
        os.close(descriptor)
        return None
    _used[os.fspath(socket)] = descriptor
    return socket


def program(name: str) -> str:
    """The package's program of this name, or that of ``PATH``. ``MCCS_SERVICE`` names another service.

    Raises :class:`mccs.System` where there is none.
    """
    bundled = Path(__file__).parent / "bin" / name
    found = os.fspath(bundled) if bundled.exists() else shutil.which(name)
    if name == "mccs-service":
        found = os.environ.get("MCCS_SERVICE") or found
    if found is None:
        raise System(
            f"there is no program {name}: this installation has none, and neither has PATH. MCCS_SOCKET names the socket of a "
            "service that runs, and MCCS_SERVICE a service's program"
        )
    return found


def _launch(base: Path, current: Path) -> Path:
    service = program("mccs-service")
    for old in base.glob("s-*"):
        _remove(old)
    folder = Path(tempfile.mkdtemp(prefix="s-", dir=base))
    users, log = folder / "users", folder / "log"
    users.touch()
    descriptor = _use(users)
    assert descriptor is not None, "nobody else knows the file"
    config = folder / "service.toml"
    config.write_text(f'[service]\nruntime_dir = "{folder}"\n')
    with open(log, "wb") as errors:
        child = subprocess.Popen(
            [service, "--config", config, "--users", users],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            # Ctrl-C in a terminal is for the program, and other ranks may still need the service.
            start_new_session=True,
        )
    assert child.stdout is not None
    line = child.stdout.readline().strip()
    child.stdout.close()
    if line != _READY:
        os.close(descriptor)
        child.wait()
        raise System(f"{service} did not start: {log.read_text(errors='replace').strip()}")
    # Nobody waits for it: it outlives this process where others use it.
    child.returncode = 0
    socket = folder / "mccs.sock"
    _used[os.fspath(socket)] = descriptor
    new = base / "current.new"
    new.write_text(os.fspath(folder))
    new.replace(current)
    print(
        f"mccs: no mccs-service runs on this host; started one for this user (process {child.pid}, log {log}). "
        "It ends with the last process that uses it.",
        file=sys.stderr,
    )
    return socket


def _remove(folder: Path) -> None:
    """Removes what a service left that has ended."""
    try:
        descriptor = os.open(folder / "users", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
