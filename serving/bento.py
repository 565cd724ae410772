"""The BentoML shell: one FastAPI application mounted, nothing else.

Not used, for measured reasons (docs/decisions.md): bentoml.depends, batchable APIs, sync endpoints.
"""

from __future__ import annotations

import math
from typing import Any

import bentoml

from serving.api import create_app
from serving.config import ServingConfig


def build_service(config: ServingConfig) -> Any:  # noqa: ANN401
    """A BentoML service over the application of a configuration."""
    app = create_app(config)

    class Bartlett:
        """Encoder, reranker and embedder."""

        def __is_ready__(self) -> bool:
            return app.state.pool.is_ready

    mounted = bentoml.asgi_app(app, path="/")(Bartlett)
    # A session of BentoML's own client is closed under running requests every `max_requests`
    # (bentoml issue 5540); drop this when a release fixes it.
    runner_connection: Any = {"max_requests": 10**9, "max_age": 1e9}
    decorate = bentoml.service(
        name="bartlett", workers=1,
        # Our queues answer with 504 and 429 first, in the envelope that clients understand.
        traffic={"timeout": math.ceil(config.queue.deadline_s) + 10,
                 "max_concurrency": 4 * config.queue.max_waiting + 64},
        endpoints={"livez": "/livez", "readyz": "/readyz"}, metrics={"enabled": True},
        runner_connection=runner_connection)
    return decorate(mounted)
