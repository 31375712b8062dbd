"""A headless Chromium that tests look at pages with, by its DevTools protocol over a pipe. Needs no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "there is no Chromium on PATH (on Debian: apt-get install chromium)"
_SECONDS = 60.0  # for an answer; on a machine where much else runs


class Browser:
    """One tab. `complaints` has what pages wrote to the console as warnings and errors, what failed to load, and exceptions."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._buffer = read, write, b""
        self._number, self._session = 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            said = self._message()
            if said.get("id") == self._number:
                assert "error" not in said, f"{method}: {said['error']}"
                return dict(said["result"])

    def open(self, path: Path, width: int = 1200, *, dark: bool = False) -> None:
        """Show a file in a window of this width."""
        self.complaints, self.requests = [], []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        self.until("document.readyState == 'complete' && location.href != 'about:blank'")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.value(expression):
            assert time.monotonic() < end, f"still not: {expression}"
            time.sleep(0.02)

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path: Path) -> None:
        """Write the whole page as PNG."""
        made = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(made["data"]))

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], _SECONDS)
            assert ready, f"Chromium says nothing for {_SECONDS:.0f} s"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        said: dict[str, Any] = json.loads(text)
        self._note(said.get("method", ""), said.get("params", {}))
        return said

    def _note(self, method: str, params: dict[str, Any]) -> None:
        says: dict[str, Callable[[], str]] = {
            "Runtime.exceptionThrown": lambda: str(params["exceptionDetails"]),
            "Log.entryAdded": lambda: str(params["entry"]),
            "Runtime.consoleAPICalled": lambda: f"{params['type']}: {params['args']}",
        }
        if method in says:
            self.complaints.append(says[method]())
        if method == "Network.requestWillBeSent":
            self.requests.append(str(params["request"]["url"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start one, with its files in `folder`."""
    assert PROGRAM is not None
    ours_read, its_write = os.pipe()
    its_read, ours_write = os.pipe()
    # Chromium reads from 3 and writes to 4. Numbers from 10 on do not meet these.
    given = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (its_read, its_write)]
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
    ]
    command = [PROGRAM, *options, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    program = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{given[0]} 4>&{given[1]}', "bash", *command],
        pass_fds=given,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)},
    )
    for fd in (its_read, its_write, *given):
        os.close(fd)
    try:
        yield Browser(ours_read, ours_write)
    finally:
        os.close(ours_write)  # which Chromium takes for the end
        try:
            program.wait(10)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
        os.close(ours_read)
