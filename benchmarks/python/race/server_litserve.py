"""LitServe, a process for each core."""

# No annotations from __future__: LitServe hands those of its methods on to FastAPI.

import os
from typing import Annotated

import litserve  # type: ignore[import-not-found, unused-ignore]
import torch
from fastapi import Body, Response  # type: ignore[import-not-found, unused-ignore]

from race import http_server
from race.pool_rivals import MAX_BATCH


class Api(litserve.LitAPI):  # type: ignore[misc, unused-ignore]
    def setup(self, device: str) -> None:
        self._answer = http_server.begin(int(os.environ["LITSERVE_WORKER_ID"]))

    def decode_request(self, request: Annotated[bytes, Body(media_type=http_server.BYTES)]) -> torch.Tensor:
        return http_server.vector(request)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self._answer(x)

    def encode_response(self, output: torch.Tensor) -> Response:
        return Response(http_server.body_of(output), media_type=http_server.BYTES)


def run() -> None:
    api = Api(max_batch_size=MAX_BATCH, batch_timeout=http_server.DELAY_SECONDS, api_path=http_server.PATH)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=len(http_server.cores()), timeout=False)
    server.run(
        host=http_server.HOST,
        port=http_server.port(),
        log_level="warning",
        generate_client_file=False,
        timeout_keep_alive=300,
    )
