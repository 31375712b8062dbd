"""Runs programs in fresh processes that need not import torch again: a server has imported it, and forks one process for each program.

The server never computes anything, so each process begins with no thread and no state of an earlier program. It ends as an interpreter does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any


def serve() -> str:
    """Answer requests until the input ends. Returns in each forked process, with the program that it is to run."""
    import paceline.torch  # noqa: F401

    answers = os.dup(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    for line in sys.stdin:
        request = json.loads(line)
        for name in request["imports"]:
            importlib.import_module(name)
        gc.freeze()  # else the end of each process would look through all of torch several times, for a second
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside other threads
            process = os.fork()
        if process == 0:
            os.close(answers)
            return _begin(request)
        os.write(answers, f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    sys.exit(0)


def _begin(request: dict[str, Any]) -> str:
    """Become what ``python -c`` would be at the beginning of the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate((os.devnull, request["stdout"], request["stderr"])):
        opened = os.open(name, os.O_RDWR)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    program: str = request["program"]
    return program


class Server:
    """A server that starts with the first program, and ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run_file(
        self, path: Path, *arguments: str, timeout: float = 240, imports: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Do what `subprocess.run` does with ``python path arguments``."""
        program = f"""
import runpy, sys
sys.argv = {[str(path), *arguments]!r}
sys.path[0] = {str(path.parent)!r}
runpy.run_path({str(path)!r}, run_name="__main__")
"""
        return self.run(program, timeout, imports)

    def run(self, program: str, timeout: float, imports: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Do what `subprocess.run` does with ``python -c program``. The server keeps what it imports for this and later programs."""
        with tempfile.TemporaryDirectory() as folder:
            said = {name: Path(folder) / name for name in ("stdout", "stderr")}
            for path in said.values():
                path.touch()
            request = {name: str(path) for name, path in said.items()} | {
                "program": program,
                "imports": imports,
                "folder": str(Path.cwd()),
                "environment": dict(os.environ),
            }
            status = self._status(request, timeout)
            texts = [path.read_text(encoding="utf-8", errors="replace") for path in said.values()]
        if status is None:
            raise subprocess.TimeoutExpired([sys.executable, "-c", program], timeout, *texts)
        return subprocess.CompletedProcess([sys.executable, "-c", program], status, *texts)

    def _status(self, request: dict[str, Any], timeout: float) -> int | None:
        """The exit status of the program, or None if it was ended after the timeout."""
        server = self._started()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        process = int(server.stdout.readline())
        if not _readable(server.stdout, timeout):
            os.kill(process, signal.SIGKILL)
            server.stdout.readline()
            return None
        return int(server.stdout.readline())

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            # Nothing of the server is in the program's main module.
            command = f"exec(__import__('runpy').run_path({str(Path(__file__))!r})['serve']())"
            self._process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            atexit.register(_end, self._process)
        return self._process


def _readable(stream: IO[str], timeout: float) -> bool:
    return bool(select.select([stream], [], [], timeout)[0])


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()  # it might not notice the end of its input, which processes that the tests fork hold open, too
    process.communicate()


SERVER = Server()
