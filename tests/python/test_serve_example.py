"""The example of an HTTP service over a pool: back-pressure, deadlines, clients that go, and a whole run under load. Speeds are not tested."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from program_server import SERVER

torch = pytest.importorskip("torch")
for package in ("starlette", "uvicorn"):
    pytest.importorskip(package)
from pool_support import Held, soon  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
TEXT = b"Down the Rabbit-Hole"
Answer = tuple[int, dict[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("serve")
    sys.path.remove(str(EXAMPLES))


@pytest.fixture
def service(example: Any) -> Iterator[Any]:
    made = example.Service(["host:0"], max_batch=1)
    yield made
    made.pool.close()


class Request:
    """A request to the application, without a server."""

    def __init__(self, service: Any, body: bytes = TEXT, path: str = "/embed", **headers: str) -> None:
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._parts.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self._said: list[dict[str, Any]] = []
        fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": fields}
        self.task = asyncio.ensure_future(service.app(scope, self._parts.get, self._say))

    async def _say(self, message: Any) -> None:
        self._said.append(message)

    def go_away(self) -> None:
        self._parts.put_nowait({"type": "http.disconnect"})

    async def answer(self) -> Answer:
        await asyncio.wait_for(self.task, 20)
        start, *rest = self._said
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        body = b"".join(part["body"] for part in rest)
        return start["status"], headers, json.loads(body) if body else {}


async def until(condition: Any) -> None:
    assert await asyncio.to_thread(soon, condition)


def test_an_answer_is_what_the_model_says(example: Any, service: Any) -> None:
    async def run() -> Answer:
        return await Request(service).answer()

    status, _, said = asyncio.run(run())
    assert status == 200
    with torch.no_grad():
        expected = example.network()(example.tokens(TEXT)[None])[0]
    torch.testing.assert_close(torch.tensor(said["embedding"]), expected)


@pytest.mark.parametrize("fields", [{}, {"x_deadline_seconds": "20"}])
def test_a_full_queue_is_told_with_the_time_to_come_back(service: Any, fields: dict[str, Any]) -> None:
    async def run() -> tuple[Answer, list[Answer]]:
        with Held(service.pool):
            waiting = [Request(service) for _ in range(8)]
            await until(lambda: service.pool.waiting == 8)
            refused = await Request(service, **fields).answer()
        return refused, [await one.answer() for one in waiting]

    (status, headers, said), waiting = asyncio.run(run())
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    assert "full" in said["error"]
    assert [status for status, *_ in waiting] == [200] * 8


def test_a_deadline_that_is_missed_is_told(service: Any) -> None:
    async def run() -> Answer:
        with Held(service.pool):
            return await Request(service, x_deadline_seconds="0.05").answer()

    status, _, said = asyncio.run(run())
    assert status == 504
    assert "deadline" in said["error"]


@pytest.mark.parametrize("deadline", ["soon", "nan", "0", "-1", "inf", ""])
def test_a_deadline_that_is_none_is_refused(service: Any, deadline: str) -> None:
    async def run() -> Answer:
        return await Request(service, x_deadline_seconds=deadline).answer()

    status, _, said = asyncio.run(run())
    assert status == 400
    assert "X-Deadline-Seconds" in said["error"]
    assert service.pool.report()["outcomes"] == dict.fromkeys(service.pool.report()["outcomes"], 0)


def test_a_text_that_is_too_long_is_refused(example: Any, service: Any) -> None:
    async def run() -> list[int]:
        texts = b"a" * example.LENGTH, b"a" * (example.LENGTH + 1)
        return [(await Request(service, text).answer())[0] for text in texts]

    assert asyncio.run(run()) == [200, 413]


def test_a_client_that_goes_takes_its_request_out_of_the_queue(service: Any) -> None:
    async def run() -> int:
        with Held(service.pool):
            gone, stays = Request(service), Request(service)
            await until(lambda: service.pool.waiting == 2)
            gone.go_away()
            await until(lambda: service.pool.waiting == 1)
        await asyncio.wait_for(gone.task, 20)
        return (await stays.answer())[0]

    assert asyncio.run(run()) == 200
    outcomes = service.pool.report()["outcomes"]
    assert (outcomes["cancelled"], outcomes["completed"]) == (1, 2)  # one of these has held the device


def test_a_version_that_is_refused_is_told_and_its_number_is_not_given_again(
    example: Any, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = example.network

    def refused(version: int) -> Any:
        made = network(version)
        if version == 2:
            made.forward = None
        return made

    async def run() -> list[Answer]:
        said = [await Request(service).answer()]  # with which versions are warmed
        said += [await Request(service, path="/publish").answer() for _ in range(2)]
        return [*said, await Request(service).answer()]

    monkeypatch.setattr(example, "network", refused)
    first, bad, good, last = asyncio.run(run())
    assert first[1]["x-model-version"] == "1"
    assert (bad[0], "version 2 was not taken" in bad[2]["error"]) == (500, True)
    assert (good[0], good[2]) == (200, {"version": 3})
    assert last[1]["x-model-version"] == "3"
    with torch.no_grad():
        expected = network(3)(example.tokens(TEXT)[None])[0]
    torch.testing.assert_close(torch.tensor(last[2]["embedding"]), expected)


def test_a_swap_that_is_refused_fails_the_example(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def request(_: Any, __: str, path: str, *___: Any) -> Any:
        body = json.dumps({"embedding": [0.0], "host:0": {"jobs": 0}}).encode()
        return SimpleNamespace(status=500 if path == "/publish" else 503, body=body, headers={})

    monkeypatch.setattr(example.Client, "request", request)
    args = SimpleNamespace(seed=0, seconds=0.3, batch=1, devices=["host:0"], load=0.5, slow=None, swap=True, burst=0)
    monkeypatch.setattr(example.Load, "jobs", lambda _: asyncio.sleep(0, {"host:0": 0}))
    with pytest.raises(SystemExit, match="answered with 500"):
        asyncio.run(example.drive(1, None, args))


def test_a_server_that_ends_says_so_and_still_answers(service: Any) -> None:
    async def run() -> Answer:
        return await Request(service).answer()

    service.draining = True
    status, headers, _ = asyncio.run(run())
    assert (status, headers["connection"]) == (200, "close")


@pytest.mark.parametrize("swap", [None, (1.0, 2.0)])
@pytest.mark.parametrize(("completed", "status"), [(1, 1), (2, 0), (3, 0), (4, 0), (5, 1)])
def test_the_example_allows_the_pool_to_complete_what_was_given_up(
    example: Any, monkeypatch: pytest.MonkeyPatch, completed: int, status: int, swap: Any
) -> None:
    monkeypatch.setattr(example, "draw", lambda *_: None)
    outcomes = ["answered", "answered", "too late", "given up", "refused"]
    load = SimpleNamespace(sent=[example.Sent(0.0, 0.1, one) for one in outcomes], difference=0.0, retry_after={"1"})
    load.versions = Counter({"1": 1, "2": 1})
    args = SimpleNamespace(seconds=3.0, slow=None)
    assert example.show(example.Run(load, 0.0, [], swap), 0, json.dumps({"completed": completed}), args) == status


@pytest.mark.skipif(len(paceline.devices()) < 2, reason="needs two cores")
def test_the_example_loses_no_request_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "serve.png"
    arguments = ["--devices", "host:0,host:1", "--slow", "host:1", "--swap", "--seconds", "3", "--batch", "4"]
    done = SERVER.run_file(EXAMPLES / "serve.py", *arguments, "--plot", str(picture), timeout=240)
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    assert len(re.findall(r"^ +\d\.\d to +\d\.\d s: p50 .* ms, p99 .* ms", output, re.MULTILINE)) == 3
    assert output.count("<- busy loop on host:1") == 1
    assert "lost: 0;" in output
    assert re.search(r"^swap, in \S+ s: p50 .* ms, p99 .* ms; by version: .*'2': \d+", output, re.MULTILINE)
    assert "the server ended with status 0; Retry-After: " in output
    asked, ends = re.findall(r"^(\d+) requests: (.*)$", output, re.MULTILINE)[0]
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (answered|refused|too late|given up)", ends)}
    assert int(asked) == sum(counts.values())
    assert counts["answered"] > 0
    assert counts["refused"] > 0  # of the 400 at once, of which 64 may wait
    assert "Retry-After: none" not in output
    assert "missing" not in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_server_alone_answers_the_load_and_ends_on_a_signal() -> None:
    command = [
        sys.executable,
        str(EXAMPLES / "serve.py"),
        "--listen",
        "0",
        "--stop-after",
        "120",
        "--devices",
        "host:0",
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().split()[-1]
        options = ["--body", "Down the Rabbit-Hole", "--rate", "20", "--seconds", "1"]
        done = SERVER.run_file(EXAMPLES / "http_load.py", f"http://127.0.0.1:{port}/embed", *options)
        server.send_signal(signal.SIGTERM)
        said, _ = server.communicate(timeout=60)
    finally:
        server.kill()
        server.communicate()
    assert done.returncode == 0, done.stdout + done.stderr
    asked, answered = re.findall(r"^(\d+) requests: (\d+) with 200$", done.stdout, re.MULTILINE)[0]
    assert asked == answered != "0"
    assert server.returncode == 0
    assert json.loads(said.splitlines()[-1])["completed"] == int(answered)


def test_a_client_that_sends_only_a_part_of_its_request_does_not_hold_the_server() -> None:
    program = "import sys, serve; serve.GRACE = 1; sys.exit(serve.main())"
    command = [sys.executable, "-c", program, "--listen", "0", "--stop-after", "120", "--devices", "host:0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=EXAMPLES, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().split()[-1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(4096)  # it runs
            client.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\nDown")
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    finally:
        server.kill()
        server.communicate()
    assert server.returncode == 0


@pytest.mark.parametrize("where", ["serve.network", "serve.uvicorn.Server.run", "serve.uvicorn.Config.load"])
def test_a_signal_before_the_server_has_begun_ends_it_when_it_has_answered(where: str) -> None:
    program = f"""
import os, signal, sys, serve
def after(does, call):
    return lambda *arguments, **options: (does(), call(*arguments, **options))[1]
{where} = after(lambda: os.kill(os.getpid(), signal.SIGTERM), {where})
serve.uvicorn.Server.run = after(sys.stdin.readline, serve.uvicorn.Server.run)
sys.exit(serve.main())
"""
    command = [sys.executable, "-c", program, "--listen", "0", "--stop-after", "120", "--devices", "host:0"]
    pipe = subprocess.PIPE
    server: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=EXAMPLES, text=True)
    try:
        port = int(server.stdout.readline().split()[-1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n" + TEXT)
            server.stdin.write("\n")
            server.stdin.flush()
            answer = client.recv(4096)
        said, _ = server.communicate(timeout=60)
    finally:
        server.kill()
        server.communicate()
    assert answer.startswith(b"HTTP/1.1 200")
    assert server.returncode == 0
    assert json.loads(said.splitlines()[-1])["completed"] == 1
