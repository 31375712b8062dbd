"""Serve a model over HTTP on all host devices of this machine, and load it while another program takes half of a core away.

    python serve.py                          about 25 seconds on two cores; draws serve.png
    python serve.py --slow host:1            a busy loop takes half of host:1 away in the middle third
    python serve.py --swap                   another version of the model takes over after a third of the time
    python serve.py --listen 8000            only the server, until SIGTERM or Ctrl-C

    curl -d "Down the Rabbit-Hole" -H "X-Deadline-Seconds: 0.5" http://127.0.0.1:8000/embed

The model is the encoder of batch_inference.py. The server is Starlette on uvicorn, in a process of its own. `Pool.serve` answers the requests in batches.

- A request that finds the queue full is answered at once with 503, and Retry-After says when what waits will be done.
- A request with a deadline that cannot be met, or was not met, is answered with 504.
- A client that closes its connection cancels its request, if that still waits.
- POST /publish lets the next version of the model take over, while requests come. A real service would load a file, and let only its operator do so.
  X-Model-Version says which version has answered.
- After SIGTERM the server goes on for a moment, says so on /health, answers everything that has come, and ends. So it does if SIGTERM comes while the model loads.

The load is an open loop (http_load.py): its rate is a part of what the server was measured to answer. Some clients have a deadline, some give up.
In the end many requests come at once, more than the queue holds, and SIGTERM right after them. No request may be lost, and every answer must be that
of the model itself, of the version that has answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import paceline
from batch_inference import LENGTH, Encoder, passages
from http_load import WAIT_SECONDS, Client, open_loop, quantile
from paceline import Expired, Rejected
from paceline.torch import Pool
from pipeline import busy_loop

DEADLINE, VERSION = "X-Deadline-Seconds", "X-Model-Version"
DRAIN_SECONDS = 1.0  # in which it goes on after SIGTERM, so that a load balancer that asks /health sends no more
GRACE = 30  # seconds in which it then answers. A client that sends half a request would hold it for ever
HAS_DEADLINE, DEADLINE_SECONDS = 0.05, 0.03  # the part of the clients, and their deadline
GIVES_UP, PATIENCE_SECONDS = 0.03, 0.01
WINDOWS = 30  # of the picture


def network(version: int = 1) -> Encoder:
    torch.manual_seed(version - 1)
    return Encoder(width=128, layers=4).eval()


def tokens(text: bytes) -> torch.Tensor:
    """The bytes of a text, with zeros up to LENGTH."""
    return torch.frombuffer(bytearray(text.ljust(LENGTH, b"\0")), dtype=torch.uint8).long()


class Service:
    """Answers ``POST /embed`` with the embedding of the text in the body."""

    def __init__(self, devices: Sequence[str], max_batch: int) -> None:
        self.pool = Pool(devices)
        self.draining, self.explanation = False, ""
        self._embed = self.pool.serve(network(), max_batch=max_batch)
        self._number, self._publishing = 1, asyncio.Lock()  # of the last version, also of one that was refused
        routes = [
            Route("/embed", self._answer, methods=["POST"]),
            Route("/publish", self._publish, methods=["POST"]),
            Route("/health", self._health),
            Route("/devices", self._devices),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    def run(self, host: str, port: int, early: Sequence[int], stop_after: float = math.inf) -> None:
        """Serve until SIGTERM or Ctrl-C, or for so many seconds. `early`: what `early_signals` has returned."""
        config = uvicorn.Config(self.app, log_level="warning", timeout_keep_alive=60, timeout_graceful_shutdown=GRACE)
        self._server, self._stop_after, self._early = uvicorn.Server(config), stop_after, early
        # asyncio turns Nagle's algorithm off only for sockets that name TCP. With it an answer may wait 40 ms for an acknowledgement.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(2048)
            print(f"listening on {host} port {listener.getsockname()[1]}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it once it has ended
                self._server.run(sockets=[listener])

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._drain)
        if self._stop_after < math.inf:
            loop.call_later(self._stop_after, self._drain)
        # If uvicorn has had the signal, it would leave those who are connected without an answer.
        if self._early or self._server.should_exit:
            self._server.should_exit = False
            self._drain()
        yield
        self.explanation = self.pool.explain()
        await asyncio.to_thread(self.pool.close)  # uvicorn has waited for every answer

    def _drain(self) -> None:
        self.draining = True
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, setattr, self._server, "should_exit", True)

    async def _answer(self, request: Request) -> Response:
        text = b""
        async for part in request.stream():
            text += part
            if len(text) > LENGTH:
                return self._problem(413, f"The text is longer than {LENGTH} bytes.")
        try:
            deadline = float(request.headers[DEADLINE]) if DEADLINE in request.headers else None
        except ValueError:
            deadline = math.nan
        if deadline is not None and not 0 < deadline < math.inf:
            return self._problem(400, f"{DEADLINE} must be a positive number of seconds.")
        asked = asyncio.wrap_future(future := self._embed(tokens(text), deadline=deadline, wait=False))
        gone = asyncio.ensure_future(disconnected(request))
        try:
            # The pool tells of a request that waits for too long. One that runs may end after its deadline.
            await asyncio.wait({asked, gone}, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            asked.cancel()  # if it has no answer yet, this takes the request out of the queue
        if asked.cancelled():
            return Response(status_code=499) if gone.done() else self._problem(504, "The deadline is over.")
        try:
            headers = {**self._headers(), VERSION: str(future.version)}
            return JSONResponse({"embedding": asked.result().tolist()}, headers=headers)
        except (Expired, Rejected) as error:
            if isinstance(error, Expired) or "deadline" in str(error):  # and not that the queue is full
                return self._problem(504, str(error))
            seconds = math.ceil(self.pool.report()["backlog_seconds"])
            return self._problem(503, str(error), {"Retry-After": str(max(seconds, 1))})

    async def _publish(self, _: Request) -> Response:
        async with self._publishing:  # one after the other, so that each has its own number
            self._number += 1
            try:
                await asyncio.to_thread(lambda: self._embed.publish(network(self._number)))
            except Rejected as error:
                return self._problem(500, str(error))
            return JSONResponse({"version": self._number})

    async def _health(self, _: Request) -> Response:
        return self._problem(503, "The server ends.") if self.draining else JSONResponse({"status": "ok"})

    async def _devices(self, _: Request) -> Response:
        return JSONResponse(self.pool.report()["devices"])

    def _problem(self, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
        return JSONResponse({"error": message}, status, {**self._headers(), **(headers or {})})

    def _headers(self) -> dict[str, str]:
        return {"Connection": "close"} if self.draining else {}


async def disconnected(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Sent(NamedTuple):
    due: float  # by time.perf_counter
    seconds: float  # until it ended
    outcome: str


class Load:
    """The clients. They send passages of a text, and compare the answers with what the model itself says."""

    def __init__(self, port: int, draws: random.Random) -> None:
        rows = passages(200)
        self._texts = [bytes(row.tolist()) for row in rows]
        with torch.no_grad():
            self._expected = {str(version): network(version)(rows) for version in (1, 2)}
        self.client, self.draws = Client("127.0.0.1", port), draws
        self.sent: list[Sent] = []
        self.difference = 0.0
        self.retry_after: set[str] = set()
        self.versions: Counter[str] = Counter()  # that have answered

    async def mixed(self, due: float) -> None:
        """Send a request. Some have a deadline, and some clients give up."""
        draw = self.draws.random()
        deadline = DEADLINE_SECONDS if draw < HAS_DEADLINE else None
        patience = PATIENCE_SECONDS if HAS_DEADLINE <= draw < HAS_DEADLINE + GIVES_UP else WAIT_SECONDS
        await self.one(due, deadline, patience)

    async def one(self, due: float, deadline: float | None = None, patience: float = WAIT_SECONDS) -> None:
        """Send a request, and write down how it ended."""
        index = self.draws.randrange(len(self._texts))
        headers = {} if deadline is None else {DEADLINE: str(deadline)}
        try:
            sending = self.client.request("POST", "/embed", self._texts[index], headers)
            reply = await asyncio.wait_for(sending, patience)
        except asyncio.TimeoutError:
            outcome = "given up" if patience < WAIT_SECONDS else "lost"
        except (OSError, EOFError) as error:
            print(f"lost: {error!r}", file=sys.stderr)
            outcome = "lost"
        else:
            outcome = {200: "answered", 503: "refused", 504: "too late"}.get(reply.status, f"failed ({reply.status})")
            if outcome == "refused":
                self.retry_after.add(reply.headers.get("retry-after", "missing"))
            if outcome == "answered":
                answer, version = torch.tensor(json.loads(reply.body)["embedding"]), reply.headers[VERSION.lower()]
                self.versions[version] += 1
                self.difference = max(self.difference, float((answer - self._expected[version][index]).abs().max()))
        self.sent.append(Sent(due, time.perf_counter() - due, outcome))

    async def closed_loop(self, clients: int, seconds: float) -> float:
        """Answers a second to so many clients, each of which sends its next request when it has an answer. The first third of the time does not count."""
        begin = time.perf_counter()

        async def client() -> None:
            while time.perf_counter() < begin + seconds:
                await self.one(time.perf_counter())

        await asyncio.gather(*(client() for _ in range(clients)))
        ends = [one.due + one.seconds for one in self.sent if one.outcome == "answered"]
        return sum(begin + seconds / 3 <= end < begin + seconds for end in ends) / (2 / 3 * seconds)

    async def jobs(self) -> dict[str, int]:
        """How many requests each device has answered."""
        devices = json.loads((await self.client.request("GET", "/devices")).body)
        return {name: one["jobs"] for name, one in devices.items()}


class Run(NamedTuple):
    load: Load
    begin: float
    devices: list[tuple[float, dict[str, int]]]  # at some moments: what each has answered by then
    swap: tuple[float, float] | None = None  # from when to when the next version was loaded and warmed


async def drive(port: int, server: subprocess.Popen[str], args: argparse.Namespace) -> Run:
    """Load the server, and tell it to end."""
    load = Load(port, random.Random(args.seed))
    third = args.seconds / 3
    capacity = await load.closed_loop(min(2 * args.batch * len(args.devices), 400), max(third / 2, 1.5))
    rate = max(args.load * capacity, 1.0)
    print(f"{capacity:.0f} requests/s to clients that wait; now {rate:.0f} a second", flush=True)
    begin, devices = time.perf_counter(), []

    async def neighbour() -> None:
        await asyncio.sleep(third)
        with busy_loop(args.slow) if args.slow else contextlib.nullcontext():
            await asyncio.sleep(third)

    async def swap() -> tuple[float, float]:
        await asyncio.sleep(third)
        called = time.perf_counter()
        if (reply := await load.client.request("POST", "/publish")).status != 200:
            raise SystemExit(f"serve: the swap was answered with {reply.status}: {reply.body!r}")
        return called, time.perf_counter()

    async def watch() -> None:
        while True:
            devices.append((time.perf_counter(), await load.jobs()))
            await asyncio.sleep(args.seconds / WINDOWS)

    watching, beside = asyncio.ensure_future(watch()), asyncio.ensure_future(neighbour())
    swaps = [asyncio.ensure_future(swap())] if args.swap else []
    await open_loop(load.mixed, rate, args.seconds, load.draws)
    watching.cancel()
    await beside
    swapped = await asyncio.gather(*swaps)
    await load.client.open(args.burst)
    last = [asyncio.ensure_future(load.one(time.perf_counter())) for _ in range(args.burst)]
    await asyncio.sleep(0)  # each sends its request
    server.send_signal(signal.SIGTERM)
    await asyncio.gather(*last)
    load.client.close()
    return Run(load, begin, devices, *swapped)


def main() -> int:
    args = arguments()
    if args.listen is not None:
        return serve(args)
    most = 4 * args.seconds + 2 * WAIT_SECONDS  # it ends by itself if this process is gone
    command = [sys.executable, __file__, "--listen", "0", "--stop-after", str(most), "--batch", str(args.batch)]
    server = subprocess.Popen([*command, "--devices", ",".join(args.devices)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        head = server.stdout.readline().split()
        if not head:
            raise SystemExit("serve: the server did not start")
        run = asyncio.run(drive(int(head[-1]), server, args))
        said, _ = server.communicate(timeout=WAIT_SECONDS)
    finally:
        server.kill()
        server.wait()
    return show(run, server.returncode, said, args)


def early_signals() -> Sequence[int]:
    """Gets each SIGTERM that comes before a service listens to it, which would end the process with status -15."""
    early: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
    return early


def serve(args: argparse.Namespace) -> int:
    early = early_signals()
    service = Service(args.devices, args.batch)
    service.run("127.0.0.1", args.listen, early, args.stop_after)
    print(service.explanation, end="")
    print(json.dumps(service.pool.report()["outcomes"]))
    return 0


def waits(run: Run, begin: float, end: float) -> str:
    """p50 and p99 of the requests that were due then."""
    times = [one.seconds for one in run.load.sent if begin <= one.due < end and one.outcome == "answered"]
    return f"p50 {1e3 * quantile(times, 0.5):6.1f} ms, p99 {1e3 * quantile(times, 0.99):6.1f} ms"


def show(run: Run, status: int, said: str, args: argparse.Namespace) -> int:
    load, third = run.load, args.seconds / 3
    for first, end in ((0.0, third), (third, 2 * third), (2 * third, 3 * third)):
        mark = f"  <- busy loop on {args.slow}" if args.slow and first == third else ""
        print(f"{first:5.1f} to {end:5.1f} s: {waits(run, run.begin + first, run.begin + end)}{mark}")
    if run.swap is not None:
        print(f"swap, in {run.swap[1] - run.swap[0]:.1f} s: {waits(run, *run.swap)}; by version: {dict(load.versions)}")
    outcomes = Counter(one.outcome for one in load.sent)
    print(f"{said}{len(load.sent)} requests: {', '.join(f'{count} {what}' for what, count in outcomes.most_common())}")
    print(f"lost: {outcomes['lost']}; largest difference from the model itself: {load.difference:.1e}")
    print(f"the server ended with status {status}; Retry-After: {', '.join(sorted(load.retry_after)) or 'none'}")
    draw(run, args)
    counted = json.loads(said.splitlines()[-1]) if said else Counter()
    # The pool may have run a request to its end that the server or the client gave up.
    least, most = outcomes["answered"], outcomes["answered"] + outcomes["given up"] + outcomes["too late"]
    right = status == 0 and load.difference < 1e-4 and least <= counted["completed"] <= most
    right = right and (run.swap is None or len(load.versions) == 2)
    return 0 if right and set(outcomes) <= {"answered", "refused", "too late", "given up"} else 1


def draw(run: Run, args: argparse.Namespace) -> None:
    """p50 and p99 over time, and what each device has answered."""
    import matplotlib.pyplot as plt

    figure, (times, rates) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    width = args.seconds / WINDOWS
    windows: list[list[float]] = [[] for _ in range(WINDOWS)]
    for one in run.load.sent:
        number = int((one.due - run.begin) // width)
        if one.outcome == "answered" and 0 <= number < WINDOWS:
            windows[number].append(1e3 * one.seconds)
    middles = [(number + 0.5) * width for number in range(WINDOWS)]
    for part, label in ((0.5, "p50"), (0.99, "p99")):
        times.plot(middles, [quantile(window, part) for window in windows], marker=".", label=label)
    slow = f", a busy loop on {args.slow} in the shaded third" if args.slow else ""
    times.set(yscale="log", ylabel="ms to the answer", title=f"POST /embed at {args.load:g} of its rate{slow}")
    for name in args.devices:
        pairs = list(zip(run.devices, run.devices[1:], strict=False))
        speeds = [(now[name] - before[name]) / (end - begin) for (begin, before), (end, now) in pairs]
        rates.plot([end - run.begin for _, (end, _) in pairs], speeds, marker=".", label=name)
    rates.set(ylim=(0, None), xlabel="seconds", ylabel="answers/s of each device")
    for axes in (times, rates):
        if args.slow:
            axes.axvspan(args.seconds / 3, 2 * args.seconds / 3, color="tab:red", alpha=0.12, lw=0)
        if run.swap is not None:
            axes.axvspan(*(one - run.begin for one in run.swap), color="tab:green", alpha=0.2, lw=0, label="a swap")
        axes.legend()
    figure.savefig(args.plot, dpi=150)
    print(f"drawn: {args.plot}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", help="names with commas between them (default: all host devices)")
    parser.add_argument("--slow", metavar="DEVICE", help="hold a busy loop on this device's core in the middle third")
    parser.add_argument("--swap", action="store_true", help="publish another version of the model after a third")
    parser.add_argument("--seconds", type=float, default=15.0, help="of load (default: 15)")
    parser.add_argument("--load", type=float, default=0.6, help="of the rate to clients that wait (default: 0.6)")
    parser.add_argument("--burst", type=int, default=400, help="requests that come at once in the end (default: 400)")
    parser.add_argument("--batch", type=int, default=16, help="requests of a batch at most (default: 16)")
    parser.add_argument("--plot", type=Path, metavar="FILE", default=Path("serve.png"), help="(default: serve.png)")
    parser.add_argument("--listen", type=int, metavar="PORT", help="only serve; 0: any free port")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="with --listen: end after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    hosts = [one.name for one in paceline.devices() if one.kind == "host"]
    args.devices = args.devices.split(",") if args.devices else hosts
    if not (args.seconds > 0 and args.load > 0 and args.burst >= 0 and args.batch >= 1):
        parser.error("--seconds, --load and --batch must be positive, and --burst not negative")
    if args.slow and (args.slow not in args.devices or not paceline.find_device(args.slow).cores):
        parser.error(f"--slow {args.slow}: not a device with cores of its own; there are {', '.join(args.devices)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
