"""mosec, a process for each core."""

from __future__ import annotations

import os

from race import http_server

# Read when mosec is imported. By default it refuses what finds 1,024 requests waiting, and drops what waits for three seconds.
os.environ |= {"MOSEC_ADDRESS": http_server.HOST, "MOSEC_CAPACITY": "100000", "MOSEC_TIMEOUT": "600000"}
os.environ |= {"MOSEC_PORT": str(http_server.port()), "MOSEC_LOG_LEVEL": "error"}

import mosec  # type: ignore[import-not-found, unused-ignore]
import torch

from race.pool_rivals import MAX_BATCH


class Worker(mosec.Worker):  # type: ignore[misc, unused-ignore]
    resp_mime_type = http_server.BYTES

    def __init__(self) -> None:
        super().__init__()
        self._answer = http_server.begin(int(os.environ["RACE_WORKER"]))

    def deserialize(self, data: bytes) -> torch.Tensor:
        return http_server.vector(data)

    def forward(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._answer(torch.stack(data)))

    def serialize(self, data: torch.Tensor) -> bytes:
        return http_server.body_of(data)


def run() -> None:
    count = len(http_server.cores())
    server = mosec.Server()
    server.append_worker(
        Worker,
        num=count,
        max_batch_size=MAX_BATCH,
        max_wait_time=round(1e3 * http_server.DELAY_SECONDS),
        env=[{"RACE_WORKER": str(number)} for number in range(count)],
        route=http_server.PATH,
    )
    server.run()
