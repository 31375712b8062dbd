"""The service of serve.py as it runs in a pod of a cluster: on all addresses, with /metrics for Prometheus, and with a longer drain.

    python serve_pod.py --port 8000 --drain 10

After SIGTERM the service goes on for --drain seconds, in which /health says 503, so that load balancers send no more. Then it takes no more connections, answers
everything that has come, and ends with status 0. ../cluster/service.yaml runs it on Kubernetes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import prometheus_client
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import serve


class PodService(serve.Service):
    """Has ``GET /metrics``, with the figures of the pool and of the process, and no ``POST /publish``, which everybody could call."""

    def __init__(self, devices: Sequence[str], max_batch: int) -> None:
        super().__init__(devices, max_batch)
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self.pool.prometheus(service="embed"))
        prometheus_client.ProcessCollector(registry=self._registry)
        kept = [one for one in self.app.routes if isinstance(one, Route) and one.path != "/publish"]
        self.app.router.routes[:] = [*kept, Route("/metrics", self._metrics)]

    async def _metrics(self, _: Request) -> Response:
        text = prometheus_client.generate_latest(self._registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="0.0.0.0", help="the address (default: 0.0.0.0, all)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port (default: 8000)")
    parser.add_argument("--drain", type=float, default=10.0, help="seconds to go on after SIGTERM (default: 10)")
    parser.add_argument("--batch", type=int, default=16, help="requests of a batch at most (default: 16)")
    args = parser.parse_args()
    serve.DRAIN_SECONDS, early = args.drain, serve.early_signals()
    service = PodService("auto", args.batch)  # every GPU, or every host device
    service.run(args.host, args.port, early)
    print(json.dumps(service.pool.report()["outcomes"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
