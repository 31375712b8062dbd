"""Send HTTP requests at random moments, whether or not earlier ones have been answered, and print how long the answers take.

    python serve.py --listen 8000 &
    python http_load.py http://127.0.0.1:8000/embed --body "Down the Rabbit-Hole" --rate 50 --seconds 10

The moments are drawn beforehand, so a server that falls behind gets no rest (an open loop). Times count from the moment when a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

WAIT_SECONDS = 60.0  # for an answer; a request that waits longer is lost
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


class Client:
    """Sends requests to one server over HTTP/1.1. It keeps connections for later requests. A request that is cancelled closes its own."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[Connection] = []

    async def open(self, count: int) -> None:
        """Have that many idle connections, so that as many requests can be sent at once."""
        missing = range(count - len(self._idle))
        self._idle += await asyncio.gather(*(asyncio.open_connection(self._host, self._port) for _ in missing))

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send a request and wait for its answer.

        Raises
        ------
        OSError, EOFError
            If there is no server, or if it closes the connection before it has answered.
        """
        reader, writer = await self._connection()
        try:
            lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}:{self._port}", f"Content-Length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
            found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
            if "content-length" not in found:
                raise OSError(f"{method} {path}: the answer has no Content-Length, which this client needs: {first}")
            reply = Reply(int(first.split()[1]), found, await reader.readexactly(int(found["content-length"])))
        except BaseException:
            writer.close()
            raise
        if found.get("connection", "").lower() == "close":
            writer.close()
        else:
            self._idle.append((reader, writer))
        return reply

    async def _connection(self) -> Connection:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()  # the server has closed it
        return await asyncio.open_connection(self._host, self._port)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop()[1].close()


async def open_loop(send: Callable[[float], Awaitable[None]], rate: float, seconds: float, draws: random.Random) -> int:
    """Call ``send(due)`` at random moments, `rate` times a second in the mean, and wait for all. Returns how many there were."""
    tasks = []
    due = time.perf_counter()
    end = due + seconds
    while (due := due + draws.expovariate(rate)) < end:
        await asyncio.sleep(due - time.perf_counter())
        tasks.append(asyncio.ensure_future(send(due)))
    await asyncio.gather(*tasks)
    return len(tasks)


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that is not below `part` of all. NaN without values."""
    found = sorted(values)
    return found[min(int(part * len(found)), len(found) - 1)] if found else float("nan")


async def load(args: argparse.Namespace) -> int:
    url = urlsplit(args.url)
    client = Client(url.hostname or "127.0.0.1", url.port or 80)
    outcomes: Counter[str] = Counter()
    seconds = []

    async def send(due: float) -> None:
        try:
            reply = await asyncio.wait_for(client.request("POST", url.path or "/", args.body.encode()), WAIT_SECONDS)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            outcomes[type(error).__name__] += 1
            return
        outcomes[str(reply.status)] += 1
        if reply.status == 200:
            seconds.append(time.perf_counter() - due)

    sent = await open_loop(send, args.rate, args.seconds, random.Random(args.seed))
    client.close()
    print(f"{sent} requests: {', '.join(f'{count} with {what}' for what, count in sorted(outcomes.items()))}")
    print(f"answers (200): {1e3 * quantile(seconds, 0.5):.1f} ms p50, {1e3 * quantile(seconds, 0.99):.1f} ms p99")
    return 0 if set(outcomes) <= {"200"} else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="such as http://127.0.0.1:8000/embed")
    parser.add_argument("--body", default="", help="the text to send")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second (default: 50)")
    parser.add_argument("--seconds", type=float, default=10.0, help="(default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not (args.rate > 0 and args.seconds > 0):
        parser.error("--rate and --seconds must be positive")
    return asyncio.run(load(args))


if __name__ == "__main__":
    sys.exit(main())
