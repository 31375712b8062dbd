"""`paceline top`: what programs leave behind, and the terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from paceline._cli import main
from top_support import Thing, folder, shown

__all__ = ["folder"]  # the fixture of all tests here

# What a process leaves.

PROGRAM = """
    import os, signal, sys
    from paceline._observe import Observed, ask, folder

    def look():
        return {"figure": 3}

    observed = Observed(look)
    (path,) = folder().iterdir()
"""


def ended(program: str, folder: Path, status: int = 0) -> str:
    """Run a program. Returns what it has printed."""
    text = textwrap.dedent(PROGRAM) + textwrap.dedent(program)
    made = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == status, made.stderr
    return made.stdout


def test_the_end_of_a_program_leaves_no_file(folder: Path) -> None:
    ended("assert ask(path)['observed'] == [{'figure': 3}]", folder)
    assert list(folder.iterdir()) == []
    ended("os.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(60)", folder, -signal.SIGINT)
    assert list(folder.iterdir()) == []
    ended("sys.exit(3)", folder, 3)
    assert list(folder.iterdir()) == []


def test_a_forked_process_leaves_the_parents_file_alone(folder: Path) -> None:
    ended(
        """
        child = os.fork()
        if child == 0:
            observed.close()
            from paceline import _observe
            assert _observe._server._listener is None
            other = Observed(look)  # a file of its own
            assert len(list(folder().iterdir())) == 2
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert list(folder().iterdir()) == [path]
        assert ask(path)["pid"] == os.getpid()
        """,
        folder,
    )
    assert list(folder.iterdir()) == []


def test_the_file_of_a_killed_process_is_removed(folder: Path) -> None:
    ended("os.kill(os.getpid(), signal.SIGKILL)", folder, -signal.SIGKILL)
    assert len(list(folder.iterdir())) == 1
    assert main(["top"]) == 1
    assert list(folder.iterdir()) == []
    ended("os.kill(os.getpid(), signal.SIGKILL)", folder, -signal.SIGKILL)
    with shown(Thing()):  # there is one file: the next program has removed the other one, too
        pass


def test_on_a_terminal_it_looks_until_ctrl_c(folder: Path) -> None:
    figures = {"kind": "Pool", "name": "on host:0", "waiting": 7, "running": 1, "backlog_seconds": 1.0}
    thing = Thing(**figures, outcomes={}, devices={}, host_bytes=2**20)
    with shown(thing):
        terminal, side = pty.openpty()
        command = [sys.executable, "-m", "paceline", "top", "--every", "0.05"]
        process = subprocess.Popen(command, stdout=side, stderr=side, env={**os.environ, "TERM": "xterm"})
        os.close(side)
        text = ""
        while "9 wait" not in text:
            text += os.read(terminal, 1 << 12).decode()
            if "7 wait" in text:
                thing.figures["waiting"] = 9
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while os.read(terminal, 1 << 12):
                pass
        assert process.wait(60) == 0
        os.close(terminal)
