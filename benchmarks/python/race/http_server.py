"""One server of `race.http_rivals` (``python -m race.http_server NAME CORES PORT MODEL READY``), and what all of them share.

A server answers a POST of float32 numbers with those of the network. MODEL is "network", or "empty": then the answer is the request, and all that is
measured is what the server costs. Each worker is pinned to a core, and makes a file of its number in the folder READY.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from race.pool_rivals import network, pin

# LitServe and mosec collect requests for this long. It is mosec's default. LitServe's is 0, with which its workers ask their queue without a pause.
DELAY_SECONDS = 0.010
HOST, PATH, BYTES = "127.0.0.1", "/answer", "application/octet-stream"
_VARIABLE = "RACE_SERVER"  # the arguments, for the processes that a server starts


def cores() -> list[int]:
    return list(json.loads(os.environ[_VARIABLE])["cores"])


def port() -> int:
    return int(json.loads(os.environ[_VARIABLE])["port"])


def module() -> nn.Module:
    return nn.Identity().eval() if json.loads(os.environ[_VARIABLE])["model"] == "empty" else network()


def ready(worker: int) -> None:
    """Called for each worker when it can take requests."""
    (Path(json.loads(os.environ[_VARIABLE])["ready"]) / str(worker)).touch()


def begin(worker: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Called on a worker process, before its first request. Returns what answers a batch."""
    pin(cores()[worker])
    answer = torch.inference_mode()(module())
    ready(worker)
    return answer


def vector(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.float32)


def body_of(answer: torch.Tensor) -> bytes:
    return answer.numpy().tobytes()


def end_with(parent: int) -> None:
    """End this process and all that it has started when `parent` is gone, which may be killed."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    name, of_cores, on_port, model, folder = sys.argv[1:]
    what = {"cores": json.loads(of_cores), "port": int(on_port), "model": model, "ready": folder}
    os.environ[_VARIABLE] = json.dumps(what)
    sys.argv[1:] = []  # mosec reads it
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    os.sched_setaffinity(0, what["cores"])
    torch.set_num_threads(1)
    importlib.import_module(f"race.server_{name}").run()


if __name__ == "__main__":
    main()
