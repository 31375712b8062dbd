"""`paceline.torch.Pool` behind Starlette and uvicorn, which LitServe is built on, too."""

from __future__ import annotations

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.torch import Pool
from race import http_server
from race.pool_rivals import MAX_BATCH


def run() -> None:
    workers = range(len(http_server.cores()))
    batcher = Pool([f"host:{index}" for index in workers]).serve(http_server.module(), max_batch=MAX_BATCH)
    for index in workers:  # pinned since they were started
        http_server.ready(index)

    async def answer(request: Request) -> Response:
        x = http_server.vector(await request.body())
        return Response(http_server.body_of(await batcher.ask(x)), media_type=http_server.BYTES)

    app = Starlette(routes=[Route(http_server.PATH, answer, methods=["POST"])])
    uvicorn.run(app, host=http_server.HOST, port=http_server.port(), log_level="warning", timeout_keep_alive=300)
