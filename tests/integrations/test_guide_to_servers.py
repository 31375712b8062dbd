"""The programs for FastAPI, Ray Serve and LitServe in python/guide/servers.md run as they stand there, on host devices."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from http_load import Client, Reply
from paceline import Expired, Rejected, Unavailable
from pool_support import Held, soon
from servers_support import block, program, same, scores, until

X = [0.5] * 8


def listener() -> socket.socket:
    """A socket with a port that no other program gets while it is open. A server that sets SO_REUSEADDR, too, as uvicorn does, may listen there."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", 0))
    return made


# FastAPI


@contextlib.contextmanager
def served(app: Any) -> Iterator[int]:
    """The port of a server on another thread, which has ended after the block."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with listener() as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            assert soon(lambda: server.started or not thread.is_alive())
            assert server.started
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)
            gc.unfreeze()
    assert not thread.is_alive()


def with_fastapi(folder: Path, run: Callable[[Any, Client], Awaitable[None]]) -> Any:
    """Run a test against the program. Returns its pool, which is closed then."""
    app = program(folder, "FastAPI").app

    async def all_of_it(port: int) -> None:
        client = Client("127.0.0.1", port)
        await run(app.state, client)
        client.close()

    with served(app) as port:
        asyncio.run(all_of_it(port))
    return app.state.pool


async def post(client: Client, path: str = "/rank", **body: Any) -> Reply:
    return await client.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})


def test_fastapi_answers_what_the_model_says_and_refuses_other_shapes(programs: Path) -> None:
    async def run(_: Any, client: Client) -> None:
        replies = await asyncio.gather(*(post(client, x=[float(k)] * 8, deadline=20.0) for k in range(3)))
        for k, reply in enumerate(replies):
            assert reply.status == 200
            assert same(json.loads(reply.body)["scores"], scores([float(k)] * 8)[0])
        wrong: list[dict[str, Any]] = [{"x": X[1:]}, {"x": "a"}, {"x": X, "deadline": 0}, {"x": X, "deadline": "soon"}]
        assert [(await post(client, **one)).status for one in wrong] == [422] * 4

    pool = with_fastapi(programs, run)
    assert pool.report()["outcomes"]["completed"] == 3
    assert "closed" in repr(pool)


def test_fastapi_refuses_what_its_queue_cannot_hold_and_answers_the_rest(programs: Path) -> None:
    async def run(state: Any, client: Client) -> None:
        with Held(state.pool):
            waiting = [asyncio.ensure_future(post(client, x=X)) for _ in range(8)]
            await until(lambda: state.pool.waiting == 8)
            refused = await post(client, x=X)
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "full" in json.loads(refused.body)["error"]
        assert [(await one).status for one in waiting] == [200] * 8

    with_fastapi(programs, run)


def test_fastapi_says_504_when_a_deadline_is_over(programs: Path) -> None:
    async def run(state: Any, client: Client) -> None:
        with Held(state.pool):
            assert (await post(client, x=X, deadline=0.05)).status == 504
        await until(lambda: state.pool.waiting == 0)

    outcomes = with_fastapi(programs, run).report()["outcomes"]
    assert (outcomes["completed"], outcomes["expired"] + outcomes["cancelled"]) == (1, 1)  # the first held the device


async def dropped(*_: Any, **__: Any) -> None:
    raise Expired("a test")


async def broken(*_: Any, **__: Any) -> None:
    raise ValueError("an error of the model")


async def runs_on(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("ask", [dropped, runs_on])
def test_fastapi_says_504_for_what_the_pool_drops_and_for_what_runs_too_long(programs: Path, ask: Any) -> None:
    async def run(state: Any, client: Client) -> None:
        state.ranker.ask = ask
        assert (await asyncio.wait_for(post(client, x=X, deadline=0.05), 20)).status == 504

    with_fastapi(programs, run)


def test_fastapi_takes_the_request_of_a_client_that_goes_out_of_the_queue(programs: Path) -> None:
    async def run(state: Any, client: Client) -> None:
        with Held(state.pool):
            goes, stays = (asyncio.ensure_future(post(client, x=X)) for _ in range(2))
            await until(lambda: state.pool.waiting == 2)
            goes.cancel()  # closes its connection
            await until(lambda: state.pool.waiting == 1)
        assert (await stays).status == 200

    outcomes = with_fastapi(programs, run).report()["outcomes"]
    assert (outcomes["cancelled"], outcomes["completed"]) == (1, 2)


def test_fastapi_says_503_when_the_pool_is_closed(programs: Path) -> None:
    async def run(state: Any, client: Client) -> None:
        await asyncio.to_thread(state.pool.close)
        reply = await post(client, x=X)
        assert (reply.status, int(reply.headers["retry-after"]) >= 1) == (503, True)
        assert "closed" in json.loads(reply.body)["error"]

    with_fastapi(programs, run)


# Ray Serve, without a cluster: Ray runs the deployment in this process, by the code of its replicas.


class Body:
    """Of a request, what the deployment asks for."""

    def __init__(self, text: str | None = None, **body: Any) -> None:
        self._text = json.dumps(body) if text is None else text

    async def json(self) -> Any:
        return json.loads(self._text)


def test_ray_serve_runs_the_deployment_with_its_pool_and_swaps_the_version(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve

    ranker = program(programs, "Ray Serve").Ranker
    made = []

    class Watched(ranker.func_or_class):  # type: ignore[misc, name-defined]
        def __init__(self, devices: list[str]) -> None:
            super().__init__(devices)
            made.append(self)

    deployment = serve.deployment(Watched).options(
        max_ongoing_requests=ranker.max_ongoing_requests, user_config=ranker.user_config
    )
    assert ranker.ray_actor_options["num_gpus"] == 4
    handle = serve.run(deployment.bind(["host:0"]), _local_testing_mode=True)
    (replica,) = made
    assert soon(lambda: replica.ranker)  # only without a cluster Ray does not wait for `reconfigure`
    answers = [handle.remote(Body(x=[float(k)] * 8)) for k in range(3)]
    assert all(same(one.result()["scores"], scores([float(k)] * 8)[0]) for k, one in enumerate(answers))
    late = [Body(x=X, deadline=deadline) for deadline in ("soon", -1.0, float("nan"))]
    wrong = [Body(x=X[1:]), Body(x=[10**400] * 8), Body(), Body("{"), Body("[]"), *late]
    assert [handle.remote(body).result().status_code for body in wrong] == [400] * len(wrong)
    assert same(handle.remote(Body(x=X, deadline=None)).result()["scores"], scores(X)[0])
    with monkeypatch.context() as patch:
        patch.setattr(replica.ranker, "ask", broken)
        with pytest.raises(Exception, match="an error of the model"):  # which Ray answers with 500
            handle.remote(Body(x=X)).result()
    with Held(replica.pool):
        waiting = [handle.remote(Body(x=X)) for _ in range(8)]
        assert soon(lambda: replica.pool.waiting == 8)
        refused = handle.remote(Body(x=X)).result()
        assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)
    assert all(same(one.result()["scores"], scores(X)[0]) for one in waiting)
    with Held(replica.pool):
        assert handle.remote(Body(x=X, deadline=0.02)).result().status_code in (503, 504)
    handle.reconfigure.remote({"version": 2}).result()
    assert same(handle.remote(Body(x=X)).result()["scores"], scores(X, version=2)[0])
    handle.check_health.remote().result()
    replica.pool.retire("host:0")
    with pytest.raises(RuntimeError, match="no device is left"):
        handle.check_health.remote().result()
    replica.pool.restore("host:0")
    replica.__del__()
    assert handle.remote(Body(x=X)).result().status_code == 503
    replica.__del__()  # once by Ray, and once by Python


def test_the_guide_uses_the_options_and_methods_that_ray_serve_has(programs: Path) -> None:
    from ray import serve
    from ray.serve._private import constants

    text = block("Ray Serve")
    options = re.findall(
        r"^    (\w+)=", text[text.index("@serve.deployment(") : text.index("class Ranker")], re.MULTILINE
    )
    assert len(options) == 5
    assert set(options) | {"max_queued_requests"} <= set(inspect.signature(serve.deployment).parameters)
    assert f"def {constants.RECONFIGURE_METHOD}(self" in text
    assert f"def {constants.HEALTH_CHECK_METHOD}(self" in text


# LitServe


@pytest.mark.parametrize(("error", "status"), [(Expired, 504), (Rejected, 503), (Unavailable, 503)])
def test_litserve_says_what_the_pool_says(programs: Path, error: Any, status: int) -> None:
    from fastapi import HTTPException

    async def ask(*_: Any) -> None:
        raise error("a test")

    api = program(programs, "LitServe").Api(max_batch_size=1, enable_async=True)
    api.ranker = SimpleNamespace(ask=ask)
    with pytest.raises(HTTPException, match="a test") as found:
        asyncio.run(api.predict(None))
    assert found.value.status_code == status


@pytest.fixture
def reserved() -> Iterator[int]:
    with listener() as bound:
        yield bound.getsockname()[1]


def test_a_reserved_port_is_not_given_to_others_and_may_be_listened_at(reserved: int) -> None:
    others = [listener() for _ in range(200)]
    assert reserved not in [one.getsockname()[1] for one in others]
    for one in others:
        one.close()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", reserved))
        server.listen()
        with socket.create_connection(("127.0.0.1", reserved), 10):
            server.accept()[0].close()


def test_litserve_answers_many_requests_at_once_by_one_worker(programs: Path, reserved: int) -> None:
    port = reserved
    text = block("LitServe")
    assert text.count("port=8000") == 1
    (programs / "server.py").write_text(
        text.replace("port=8000", f'host="127.0.0.1", port={port}, log_level="warning"')
    )

    async def run() -> list[Reply]:
        client = Client("127.0.0.1", port)
        for _ in range(2000):
            with contextlib.suppress(OSError, EOFError):
                if (await client.request("GET", "/health")).status == 200:
                    break
            assert server.poll() is None, "it has ended"
            await asyncio.sleep(0.05)
        bodies = [{"x": [float(k)] * 8} for k in range(64)] + [{"x": X[1:]}, {"x": [10**400] * 8}, {"y": X}]
        replies = await asyncio.gather(*(post(client, "/predict", **body) for body in bodies))
        client.close()
        return replies

    server = subprocess.Popen([sys.executable, "server.py"], cwd=programs, start_new_session=True)
    try:
        *answers, short, large, other = asyncio.run(run())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    assert [reply.status for reply in (short, large, other)] == [400] * 3
    assert [reply.status for reply in answers] == [200] * 64
    for k, reply in enumerate(answers):
        assert same(json.loads(reply.body)["scores"], scores([float(k)] * 8)[0])
