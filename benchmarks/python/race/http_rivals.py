"""Rivals of `race_pool.py` that answer over HTTP on loopback, from processes of their own. All have the same client, which is in the rival's process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from race import example, http_server
from race.pool_rivals import network

# By the name of the server: what has to be installed.
SERVERS = {"paceline": ("starlette", "uvicorn"), "litserve": ("litserve",), "mosec": ("mosec",)}
MOST_OPEN = 900  # connections; a process may have 1,024 open files. Requests that come then wait in the client, and their time counts
_START_SECONDS = 120.0


class OverHttp:
    """A server, and a client that keeps its connections open. With `empty`, the model returns what it is given."""

    def __init__(self, cores: Sequence[int], server: str, *, empty: bool = False) -> None:
        missing = [name for name in SERVERS[server] if importlib.util.find_spec(name) is None]
        if missing:
            raise ImportError(f"no module {', '.join(missing)}")
        self._server, self._module = server, torch.nn.Identity() if empty else network()
        self._ready = tempfile.TemporaryDirectory()
        with socket.socket() as free:
            free.bind((http_server.HOST, 0))
            port = free.getsockname()[1]
        what = [server, json.dumps(list(cores)), str(port), "empty" if empty else "network", self._ready.name]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "race.http_server", *what], start_new_session=True, stdout=subprocess.DEVNULL
        )
        self._loop = asyncio.new_event_loop()
        self._client = example.load("http_load").Client(http_server.HOST, port)
        self._room = asyncio.Semaphore(MOST_OPEN)
        self._sending: set[Future[None]] = set()  # else nobody but a cycle knows a request that waits for its answer
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        try:
            self._start(len(cores))
        except BaseException:
            self.close()
            raise

    def _start(self, workers: int) -> None:
        end = time.monotonic() + _START_SECONDS
        x = torch.randn(1024)
        while True:
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{self._server}: its server did not start")
            with contextlib.suppress(OSError, EOFError):
                if len(list(Path(self._ready.name).iterdir())) == workers:
                    answer = asyncio.run_coroutine_threadsafe(self._ask(x), self._loop).result(_START_SECONDS)
                    with torch.inference_mode():
                        torch.testing.assert_close(answer, self._module(x[None])[0])
                    return
            time.sleep(0.1)

    async def _ask(self, x: torch.Tensor) -> torch.Tensor:
        async with self._room:
            headers = {"Content-Type": http_server.BYTES}
            reply = await self._client.request("POST", http_server.PATH, http_server.body_of(x), headers)
        if reply.status != 200:
            raise RuntimeError(f"{self._server} has answered {reply.status}: {reply.body[:200]!r}")
        return http_server.vector(reply.body)

    async def _send(self, x: torch.Tensor, told: Callable[[], None]) -> None:
        try:
            await self._ask(x)
        except BaseException as error:  # no answer, so it must not count as a fast one
            print(f"a request has failed: {error!r}", file=sys.stderr, flush=True)
            os.killpg(self._process.pid, signal.SIGKILL)
            os._exit(1)
        told()

    def submit(self, x: torch.Tensor, told: Callable[[], None]) -> None:
        sending = asyncio.run_coroutine_threadsafe(self._send(x, told), self._loop)
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._loop.call_soon_threadsafe(self._client.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._ready.cleanup()
