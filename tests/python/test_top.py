"""`paceline top`, the socket file by which it looks at trainers and pools, and what programs leave behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pty
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline import InvalidArgument, Unavailable, _observe
from paceline._cli import main
from paceline._cli_top import text_of
from paceline._observe import REQUEST, Observed, ask, reports
from paceline.torch import DataParallel, Pipeline, Pool
from pool_support import Held
from top_support import Thing, folder, shown
from torch_support import TWO, classifier, classify, noting

__all__ = ["folder"]  # the fixture of all tests here


def connected(path: Path, request: bytes = REQUEST) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30.0)
    connection.connect(str(path))
    connection.sendall(request)
    return connection


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "paceline observe"]


# Who may look.


def test_only_this_user_may_enter(folder: Path) -> None:
    with shown(Thing(figure=3)) as path:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_ISSOCK(path.stat().st_mode)
        (process,) = reports()
    assert (process["pid"], process["observed"]) == (os.getpid(), [{"figure": 3}])
    assert reports(os.getpid()) == []


def test_another_user_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with shown(Thing(figure=3)) as path:
        with connected(path) as connection:
            assert json.loads(connection.recv(1 << 16))["observed"] == [{"figure": 3}]
        monkeypatch.setattr(_observe, "peer", lambda _: os.geteuid() + 1)
        with contextlib.suppress(ConnectionError), connected(path) as connection:
            assert connection.recv(1 << 16) == b""


def test_who_looks_asks_whose_file_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with shown(Thing(figure=3)) as path:
        here = threading.current_thread()
        own = os.geteuid()
        monkeypatch.setattr(_observe, "peer", lambda _: own + (threading.current_thread() is here))
        assert ask(path) is None


@pytest.mark.parametrize("request_of", [b"report", b"report\n ", b"stop\n", b"{}" * 1000], ids=len)
def test_nothing_but_the_request_is_read(request_of: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_observe, "SECONDS", 5.0)
    with shown(Thing(figure=3)) as path:
        with contextlib.suppress(ConnectionError), connected(path, request_of) as connection:
            assert connection.recv(1 << 16) == b""
        assert ask(path) is not None


@pytest.mark.parametrize("what", ["open", "link", "file"])
def test_a_folder_that_others_may_enter_is_refused(what: str, folder: Path, tmp_path: Path) -> None:
    if what == "open":
        folder.mkdir(0o755)
    elif what == "link":
        (tmp_path / "elsewhere").mkdir(0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch(0o600)
    with pytest.raises(Unavailable, match="no folder of yours alone"):
        DataParallel(classifier()[0], TWO, observe="socket")
    with pytest.raises(Unavailable, match="no folder of yours alone"):
        reports()
    with pytest.raises(Unavailable, match="no folder of yours alone"):
        Pool(TWO, observe="socket")
    assert threads() == []


@pytest.mark.parametrize("kind", [DataParallel, Pipeline, Pool])
def test_another_way_to_be_observed_is_refused(kind: Any) -> None:
    arguments = [TWO] if kind is Pool else [classifier()[0], TWO]
    with pytest.raises(InvalidArgument, match="observe is 'http'; it must be 'socket' or None"):
        kind(*arguments, observe="http")


# What is shown.


def test_a_trainer_shows_its_last_steps(folder: Path) -> None:
    module, batch = classifier(12)
    with DataParallel(module, TWO, balance=[2, 1], prove=False, memory={"host:0": 2**30}, observe="socket") as trainer:
        (path,) = folder.iterdir()
        (found,) = ask(path)["observed"]  # type: ignore[index]
        assert (found["steps"], found["since_seconds"]) == (0, None)
        for _ in range(3):
            trainer.step(classify, batch)
        trainer.retire("host:1")
        (found,) = ask(path)["observed"]  # type: ignore[index]
    assert found["name"] == "Sequential on host:0, host:1"
    assert found["steps"] == 3
    first, second = (found["devices"][name] for name in TWO)
    assert (first["share"], second["share"]) == (8, 4)
    assert (first["retired"], second["retired"]) == (False, True)
    assert 2**29 < first["limit_bytes"] <= 2**30  # without the parameters
    assert second["limit_bytes"] is None
    for one in (first, second):
        assert 0 < one["busy"] <= 1
        assert one["items_per_second"] > 0
    assert found["host_bytes"] > 2**20


def test_a_pipeline_shows_its_items_once(folder: Path) -> None:
    module, batch = classifier(12)
    with Pipeline(module, TWO, blocks=list(module), cuts=[0, 1], prove=False, observe="socket") as trainer:
        for _ in range(4):
            trainer.step(classify, batch)
        (found,) = ask(next(folder.iterdir()))["observed"]  # type: ignore[index]
    assert found["kind"] == "Pipeline"
    assert [one["share"] for one in found["devices"].values()] == [12, 12]


def test_a_pool_shows_its_queue(folder: Path) -> None:
    with Pool(TWO, memory={"host:1": 1e9}, observe="socket") as pool:
        for _ in range(3):
            pool.submit(lambda _: None).result()
        with Held(pool, 2):
            jobs = [pool.submit(lambda _: None) for _ in range(5)]
            (found,) = ask(next(folder.iterdir()))["observed"]  # type: ignore[index]
            assert (found["kind"], found["waiting"], found["running"]) == ("Pool", 5, 2)
        for job in jobs:
            job.result()
        for _ in range(1200):  # of many runs the last ones count
            pool.submit(lambda _: None).result()
        (found,) = ask(next(folder.iterdir()))["observed"]  # type: ignore[index]
        assert found["devices"]["host:1"]["limit_bytes"] == 1e9
        assert sum(one["jobs"] for one in found["devices"].values()) >= 1208
        assert sum(one["jobs_per_second"] for one in found["devices"].values()) > 0
        assert all(0 <= one["busy"] <= 1 for one in found["devices"].values())
    assert list(folder.iterdir()) == []


def test_several_are_shown_until_the_last_one_is_closed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, batch = classifier(12)
    first = DataParallel(module, TWO, balance=[2, 1], prove=False, observe="socket")
    second = DataParallel(classifier()[0], ["host:0"], observe="socket")
    with Pool(TWO, observe="socket"):
        first.step(classify, batch)
        assert len(threads()) == 1
        assert main(["top"]) == 0
        text = capsys.readouterr().out
        assert "DataParallel Sequential on host:0, host:1: step 1, " in text
        assert "DataParallel Sequential on host:0: no step yet" in text
        assert "Pool on host:0, host:1: 0 wait" in text
        first.close()
        assert main(["top", str(os.getpid()), "--once", "--json"]) == 0
        (process,) = json.loads(capsys.readouterr().out)["processes"]
        assert [one["kind"] for one in process["observed"]] == ["DataParallel", "Pool"]
    second.close()
    second.close()
    assert list(folder.iterdir()) == []
    assert threads() == []
    assert main(["top"]) == 1
    assert "No program shows itself" in capsys.readouterr().out
    assert main(["top", "1"]) == 1
    assert "Process 1 does not show itself" in capsys.readouterr().out
    with DataParallel(module, TWO, observe="socket"):  # and once more
        assert len(reports()) == 1


def test_who_does_not_ask_has_no_file_and_no_thread(folder: Path) -> None:
    with DataParallel(classifier()[0], TWO), Pool(TWO):
        assert not folder.exists()
        assert threads() == []


def test_a_trainer_that_is_dropped_leaves_no_file(folder: Path) -> None:
    trainer = DataParallel(classifier()[0], TWO, observe="socket")
    assert len(list(folder.iterdir())) == 1
    del trainer
    gc.collect()
    assert list(folder.iterdir()) == []


def test_one_that_cannot_be_read_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> dict[str, Any]:
        raise ZeroDivisionError("no figures")

    other = Observed(broken)
    with shown(Thing(kind="Later", name="x", figures=3)):
        assert main(["top"]) == 0
    other.close()
    text = capsys.readouterr().out
    assert "ZeroDivisionError: no figures" in text
    assert "this version cannot read" in text
    assert "\x1b" not in text_of([{"pid": 1, "program": "\x1b[2J", "observed": []}])


def test_one_that_comes_while_the_last_one_closes_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[Observed] = []
    things, end = [Thing(figure=3), Thing(figure=4)], _observe._server.end
    first = Observed(things[0])

    def end_late(**how: bool) -> None:
        if not later:
            later.append(Observed(things[1]))
        end(**how)

    monkeypatch.setattr(_observe._server, "end", end_late)
    first.close()
    assert [one["observed"] for one in map(ask, folder.iterdir()) if one] == [[{"figure": 4}]]
    later[0].close()
    assert (list(folder.iterdir()), threads()) == ([], [])


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
def test_without_a_thread_there_is_no_file_and_the_next_one_is_shown(
    error: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise error

    thing = Thing(figure=3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises((Unavailable, KeyboardInterrupt)) as raised:
            Observed(thing)
    assert isinstance(error, KeyboardInterrupt) or "can't start new thread" in str(raised.value)
    assert list(folder.iterdir()) == []
    with shown(thing) as path:
        assert ask(path)["observed"] == [{"figure": 3}]  # type: ignore[index]


# A step waits for nobody who looks.


def test_a_look_neither_waits_for_a_step_nor_holds_one_up(folder: Path) -> None:
    module, batch = classifier(12)
    inside, go_on = threading.Event(), threading.Event()

    def held(*_: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    with DataParallel(module, TWO, balance=[2, 1], prove=False, observe="socket") as trainer:
        trainer.step(classify, batch)
        (path,) = folder.iterdir()
        stepping = threading.Thread(target=trainer.step, args=(noting(held), batch))
        stepping.start()
        assert inside.wait(60)
        (found,) = ask(path)["observed"]  # type: ignore[index]
        assert found["steps"] == 1
        go_on.set()
        stepping.join()
        with connected(path, b"") as silent:  # it asks for nothing, and a step goes on meanwhile
            trainer.step(classify, batch)
            assert trainer.report()["steps"] == 3
            del silent
        assert ask(path) is not None


def test_who_does_not_read_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_observe, "SECONDS", 60.0)
    reading = threading.Event()

    class Large(Thing):
        def __call__(self) -> dict[str, Any]:
            reading.set()
            return {"figures": "x" * (1 << 24)}

    with shown(Large()) as path:
        connection = connected(path)
        assert reading.wait(30)
    assert not path.exists()
    assert threads() == []
    connection.close()


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
