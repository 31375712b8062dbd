"""The socket file of a process, by which `paceline top` looks at its trainers and pools.

There is one for each process, while something is shown. Files are in a folder that only their user may enter, and both sides ask the kernel who the other one is.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline import Unavailable, __version__
from paceline._words import require_one_of

REQUEST = b"report\n"
SECONDS = 2.0  # for each of a request and its answer
_BACKLOG = 8
_PAUSE = 0.1
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid, as SO_PEERCRED has them

Look = Callable[[], dict[str, Any]]


def folder() -> Path:
    """Where the files are. Not in XDG_RUNTIME_DIR, which goes when its user logs out, while a program runs on."""
    return Path(os.environ.get("PACELINE_SOCKETS") or f"/tmp/paceline-{os.geteuid()}")


def check_observe(call: str, observe: Any) -> None:
    """Refuse another value of the option `observe`."""
    require_one_of(call, "observe", observe, "socket", None)


def is_own(path: Path) -> bool:
    """Whether it is a folder of this user, which no other one may enter."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def peer(connection: socket.socket) -> int:
    """The user on the other side of a connection, as the kernel says."""
    return int(_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])


def remove_dead(path: Path) -> bool:
    """Remove a file that nobody listens to, as a killed process leaves it. Returns whether it did."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return True
        except OSError:  # such as: many others are asking
            pass
    return False


def resident_bytes() -> int:
    """The memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Observed:
    """One trainer or pool that is shown, until `close`, or until nobody has `look` any more."""

    def __init__(self, look: Look) -> None:
        self._look = weakref.ref(look, lambda _: self.close())
        _server.add(self)

    def report(self) -> dict[str, Any]:
        """What it shows now."""
        look = self._look()
        if look is None:
            return {}
        try:
            return look()
        except Exception as error:  # the others are shown all the same
            return {"error": f"{type(error).__name__}: {error}"}

    def close(self) -> None:
        """Show it no more. The last one of a process takes the file with it. A second call does nothing."""
        _server.remove(self)


class _Server:
    """A thread that waits for somebody to look, and the file."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may come in while it is held
        self._shown: list[Observed] = []
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._connection: socket.socket | None = None  # with who looks now
        self._path = Path()

    def add(self, observed: Observed) -> None:
        with self._lock:
            self._shown.append(observed)  # first: who ends the last one then leaves the file
            if self._listener is None:
                try:
                    self._open()
                except BaseException:
                    self._shown.remove(observed)
                    raise

    def remove(self, observed: Observed) -> None:
        with self._lock:
            last = self._shown == [observed]
            if observed in self._shown:
                self._shown.remove(observed)
        if last:  # without the lock, which the thread may be waiting for
            self.end()

    def _open(self) -> None:
        where = folder()
        try:
            with contextlib.suppress(FileExistsError):
                where.mkdir(0o700)
            if not is_own(where):
                raise Unavailable(
                    f"observe: {where} is no folder of yours alone (mode 0700), so others could look. Remove it, or name another folder in PACELINE_SOCKETS."
                )
            for path in where.glob("*.sock"):
                remove_dead(path)
            name = f"{os.getpid()}-{secrets.token_hex(4)}"  # processes of several containers may share a folder and a number
            made = where / f"{name}.new"
            self._path = where / f"{name}.sock"
            self._listener = listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(str(made))
                made.chmod(0o600)
                listener.listen(_BACKLOG)
                made.rename(self._path)  # nobody finds a file that does not answer yet
                thread = threading.Thread(target=self._run, args=(listener,), name="paceline observe", daemon=True)
                self._thread = thread
                thread.start()
            except BaseException:
                self._listener = self._thread = None
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # an interrupt may come when the thread waits already
                listener.close()
                for path in (made, self._path):
                    path.unlink(missing_ok=True)
                raise
        except Unavailable:
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            raise Unavailable(f"observe: no socket can be made in {where}: {error}") from error

    def _run(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._listener is not listener:  # it was shut down
                    return
                time.sleep(_PAUSE)  # such as: the process has too many files open
                continue
            with connection, contextlib.suppress(Exception):  # the thread has to go on
                self._connection = connection
                connection.settimeout(SECONDS)
                if peer(connection) == os.geteuid() and connection.recv(len(REQUEST) + 1) == REQUEST:
                    connection.sendall(json.dumps(self._report(), default=str).encode())

    def _report(self) -> dict[str, Any]:
        with self._lock:
            shown = list(self._shown)
        program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
        reports = [report for report in (one.report() for one in shown) if report]
        return {"paceline": __version__, "pid": os.getpid(), "program": program, "observed": reports}

    def end(self, *, whatever: bool = False) -> None:
        """Remove the file, and end the thread, if nothing is shown; at the end of the process `whatever` is."""
        with self._lock:
            if self._shown and not whatever:
                return  # it has come meanwhile
            listener, thread, self._listener, self._thread = self._listener, self._thread, None, None
            path, connection = self._path, self._connection  # the next one's are others
            self._shown.clear()
        if listener is not None:
            path.unlink(missing_ok=True)
            for one in (listener, connection):  # wakes accept() and a send to who does not read
                with contextlib.suppress(OSError, AttributeError):
                    one.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
            if thread is not None and thread is not threading.current_thread():
                thread.join(SECONDS)
            listener.close()

    def forget(self) -> None:
        """In a forked process: the file and the thread are the parent's."""
        for one in (self._listener, self._connection):
            if one is not None:
                one.close()  # or who looks would wait for the end of this process, too
        self.__init__()  # type: ignore[misc]


_server = _Server()
atexit.register(_server.end, whatever=True)  # before the interpreter ends threads
os.register_at_fork(after_in_child=_server.forget)


def ask(path: Path) -> dict[str, Any] | None:
    """What the process behind a socket file shows. None if it does not answer, or is another user's."""
    text = bytearray()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2 * SECONDS)
        try:
            connection.connect(str(path))
            if peer(connection) != os.geteuid():
                return None
            connection.sendall(REQUEST)
            while part := connection.recv(1 << 16):
                text += part
            found = json.loads(text)
        except (OSError, ValueError):
            return None
    return found if isinstance(found, dict) else None


def reports(pid: int | None = None) -> list[dict[str, Any]]:
    """What all processes of this user show, or one of them. Files of dead processes are removed.

    Raises
    ------
    Unavailable
        If the folder is another user's, or open to others.
    """
    where = folder()
    if not where.exists():
        return []
    if not is_own(where):
        raise Unavailable(
            f"top: {where} is no folder of yours alone (mode 0700). Remove it, or name another folder in PACELINE_SOCKETS."
        )
    paths = [path for path in sorted(where.glob("*.sock")) if not remove_dead(path)]
    found = [ask(path) for path in paths if pid is None or path.name.partition("-")[0] == str(pid)]
    return [one for one in found if one is not None]
