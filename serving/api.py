"""The HTTP routes as a FastAPI application; everything slow happens in the engine pool."""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memory_runtime.errors import ArtifactError, SchemaError
from memory_runtime.ground import ground
from memory_runtime.models import Extraction
from memory_runtime.schema import Candidate, Window, clean_text
from memory_runtime.windows import estimate_tokens
from serving.batcher import Overloaded
from serving.config import ServingConfig
from serving.engine_pool import EnginePool
from serving.requests import (
    ApiError,
    EmbeddingsBody,
    ExtractBody,
    RerankBody,
    ScoreBody,
    candidates_of,
    cut,
    documents_of,
    inputs_of,
    window_of,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)
OPEN_PATHS = ("/livez", "/readyz")
_KINDS = {"query": "query", "search_query": "query"}


def create_app(config: ServingConfig) -> FastAPI:
    """The application; models load when it starts and are let go when it stops."""
    pool = EnginePool(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pool.start()
        yield
        await pool.stop()

    app = FastAPI(title="Bartlett", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.pool = pool
    _add_health(app, pool)
    _add_encoder_routes(app, pool, config)
    _add_rerank_routes(app, pool, config)
    _add_embedding_routes(app, pool, config)
    _add_error_handlers(app)
    app.add_middleware(_Gate, config=config, key=_api_key(config))
    return app


def _api_key(config: ServingConfig) -> str | None:
    if config.api_key_file is None:
        return None
    lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].strip():
        raise ArtifactError(f"api_key_file {config.api_key_file} holds no key on its first line")
    return lines[0].strip()


# --- errors ---


def error_response(
    message: str, *, status: int, param: str | None = None, code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An error in OpenAI's envelope."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, kind)
    body = {"message": clean_text(message)[0], "type": kind, "param": param, "code": code}
    return JSONResponse({"error": body}, status_code=status, headers=headers)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return error_response(str(error), status=error.status, param=error.param, code=error.code)

    @app.exception_handler(SchemaError)
    async def no_schema(_: Request, error: SchemaError) -> JSONResponse:
        return error_response(str(error), status=400, code="invalid_value")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        faults = [(".".join(map(str, fault["loc"][1:])) or "body", fault) for fault in
                  error.errors()]
        message = "; ".join(f"{where}: {fault['msg']}, got {repr(fault.get('input'))[:120]}"
                            for where, fault in faults[:5])
        return error_response(message, status=400, param=clean_text(faults[0][0])[0],
                              code="invalid_value")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(message, status=error.status_code, headers=dict(error.headers or {}))

    @app.exception_handler(Overloaded)
    async def busy(_: Request, error: Overloaded) -> JSONResponse:
        return error_response(str(error), status=429, code="overloaded",
                              headers={"Retry-After": str(error.retry_after_s)})

    @app.exception_handler(TimeoutError)
    async def late(_: Request, __: TimeoutError) -> JSONResponse:
        return error_response("the models did not answer in time; send less, or retry later",
                              status=504, code="deadline")

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response("internal error; see the server's log", status=500, code="internal")


class _Gate:
    """Checks the key, and stops reading bodies that are too large."""

    def __init__(self, app: ASGIApp, *, config: ServingConfig, key: str | None) -> None:
        self._app = app
        self._key = key
        self._most = config.limits.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            await error_response("the bearer key is missing or wrong", status=401,
                                 code="invalid_api_key")(scope, receive, send)
            return
        body = await self._read(headers, receive)
        if isinstance(body, JSONResponse):
            await body(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        if self._key is None:
            return True
        return hmac.compare_digest(
            headers.get(b"authorization", b""), b"Bearer " + self._key.encode())

    async def _read(
        self, headers: dict[bytes, bytes], receive: Receive
    ) -> bytes | JSONResponse:
        """The whole body, or the refusal of it."""
        stated = headers.get(b"content-length", b"")
        parts, size, more = [], int(stated) if stated.isdigit() else 0, True
        if size <= self._most:
            size = 0
            while more and size <= self._most:
                message = await receive()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                more = message["type"] == "http.request" and message.get("more_body", False)
        if size > self._most:
            return error_response(f"the body has at least {size} bytes, allowed are {self._most}",
                                  status=413, code="too_large")
        return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive channel that gives the body once, then what the client does next."""
    sent = False

    async def channel() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return channel


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of the work; when the client hangs up, the work is cancelled.

    Raises:
        ApiError: 499, for the log; nobody reads it.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError("the client closed the connection", status=499, code="closed")
    finally:
        watcher.cancel()
        task.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- routes ---


def _add_health(app: FastAPI, pool: EnginePool) -> None:
    started = int(time.time())

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        if not pool.is_ready:
            return error_response("the models are loading or stopping", status=503)
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        rows = [{"id": name, "object": "model", "created": started, "owned_by": "bartlett"} | about
                for name, about in model_facts(pool).items()]
        return {"object": "list", "data": rows}


def model_facts(pool: EnginePool) -> dict[str, dict[str, Any]]:
    """Names of the served models and what is known of each."""
    facts: dict[str, dict[str, Any]] = {}
    if pool.extractor is not None:
        artifact = pool.extractor.artifact
        facts["encoder"] = {"mode": pool.extractor.mode, **_artifact_facts(artifact)}
    if pool.scorer is not None:
        facts["reranker"] = _artifact_facts(pool.scorer.artifact)
    if pool.embedder is not None:
        facts["embedder"] = {"parent": None, "dimensions": pool.embedder.num_dims}
    return facts


def _artifact_facts(artifact: Any) -> dict[str, Any]:  # noqa: ANN401
    if artifact is None:
        return {"parent": None, "artifact": None}
    return {"parent": artifact.manifest["base"]["name"],
            "artifact": {"name": artifact.name, "digest": artifact.digest}}


def _require(pool: EnginePool, name: str, asked: str | None) -> None:
    """Refuse a model that is not served."""
    served = model_facts(pool)
    if name not in served:
        raise ApiError(f"no {name} is served here; name one in the serving configuration",
                       status=404, code="model_not_found")
    if asked is not None and asked != name:
        raise ApiError(f"model is {asked!r}, this route serves {name!r}", status=404,
                       param="model", code="model_not_found")


def _add_encoder_routes(app: FastAPI, pool: EnginePool, config: ServingConfig) -> None:
    @app.post("/v1/extract")
    async def extract(body: ExtractBody, request: Request) -> JSONResponse:
        _require(pool, "encoder", body.model)
        windows = cut(window_of(body, config.limits))
        extractions = await unless_gone(request, pool.extract(windows))
        return JSONResponse(_extraction_json(pool, windows, extractions))

    @app.post("/v1/score")
    async def score(body: ScoreBody, request: Request) -> JSONResponse:
        _require(pool, "encoder", body.model)
        window = window_of(body, config.limits)
        candidates = candidates_of(body, config.limits)
        scored = await unless_gone(request, pool.score(window, candidates)) if candidates else []
        return JSONResponse({"model": "encoder", "candidates": [c.to_json() for c in scored]})


def _extraction_json(
    pool: EnginePool, windows: list[Window], extractions: list[Extraction]
) -> dict[str, Any]:
    kept: list[Candidate] = []
    dropped: list[Candidate] = []
    for window, extraction in zip(windows, extractions, strict=True):
        dropped += extraction.dropped
        for candidate in extraction.candidates:
            grounded = ground(candidate, window).candidate
            # A literal that the evidence does not hold was made up by the model.
            (dropped if grounded is None else kept).append(grounded or candidate)
    used = sum(e.prompt_tokens for e in extractions)
    made = sum(e.completion_tokens for e in extractions)
    return {
        "model": "encoder",
        "candidates": [candidate.to_json() for candidate in kept],
        "dropped": [candidate.to_json() for candidate in dropped],
        "invalid": sum(e.invalid for e in extractions),
        "truncated": any(e.truncated for e in extractions),
        "usage": {"prompt_tokens": used, "completion_tokens": made, "total_tokens": used + made},
        "artifact": model_facts(pool)["encoder"]["artifact"],
    }


def _add_rerank_routes(app: FastAPI, pool: EnginePool, config: ServingConfig) -> None:
    async def ranked(
        body: RerankBody, request: Request
    ) -> tuple[list[str], list[tuple[int, float]]]:
        _require(pool, "reranker", body.model)
        documents = documents_of(body, config.limits)
        work = pool.rank(body.query, documents, raw=body.raw_scores)
        scores = await unless_gone(request, work) if documents else _close(work)
        order = sorted(range(len(documents)), key=lambda n: (-scores[n], n))
        return documents, [(n, scores[n]) for n in order[: body.top_n or None]]

    @app.post("/v1/rerank")
    async def rerank(body: RerankBody, request: Request) -> JSONResponse:
        documents, order = await ranked(body, request)
        shown = documents if body.return_documents in (None, True) else None
        return JSONResponse(_rerank_json(order, shown) | {
            "usage": _usage([text for d in documents for text in (body.query, d)])})

    @app.post("/v2/rerank")
    async def rerank_v2(body: RerankBody, request: Request) -> JSONResponse:
        documents, order = await ranked(body, request)
        return JSONResponse(_rerank_json(order, documents if body.return_documents else None))

    @app.post("/rerank")
    async def rerank_bare(body: RerankBody, request: Request) -> JSONResponse:
        _, order = await ranked(body, request)
        return JSONResponse([{"index": n, "score": score} for n, score in order])


def _close(work: Any) -> list[float]:  # noqa: ANN401
    """Nothing to rank: drop the coroutine that was not started."""
    work.close()
    return []


def _rerank_json(order: list[tuple[int, float]], documents: list[str] | None) -> dict[str, Any]:
    results: list[dict[str, Any]] = [
        {"index": n, "relevance_score": score} for n, score in order]
    if documents is not None:
        for result in results:
            result["document"] = {"text": clean_text(documents[result["index"]])[0]}
    return {"id": f"rerank-{uuid.uuid4().hex}", "object": "rerank", "model": "reranker",
            "results": results, "meta": {"api_version": {"version": "2"}}}


def _add_embedding_routes(app: FastAPI, pool: EnginePool, config: ServingConfig) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingsBody, request: Request) -> JSONResponse:
        _require(pool, "embedder", body.model)
        texts = inputs_of(body, config.limits)
        size = model_facts(pool)["embedder"]["dimensions"]
        if body.dimensions not in (None, size):
            raise ApiError(f"dimensions is {body.dimensions}, allowed is {size}",
                           param="dimensions", code="unsupported")
        if not texts:
            raise ApiError("input is empty; give at least one text", param="input")
        kind = "query" if body.input_type in _KINDS else "passage"
        vectors = await unless_gone(request, pool.embed(texts, kind=kind))
        write: Callable[[Any], Any] = _base64 if body.encoding_format == "base64" else _floats
        rows = [{"object": "embedding", "index": n, "embedding": write(vector)}
                for n, vector in enumerate(vectors)]
        return JSONResponse({"object": "list", "model": "embedder", "data": rows,
                             "usage": _usage(texts)})


def _usage(texts: list[str]) -> dict[str, int]:
    """About how many tokens; the models count in another thread."""
    tokens = sum(map(estimate_tokens, texts))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _base64(vector: Any) -> str:  # noqa: ANN401
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _floats(vector: Any) -> list[float]:  # noqa: ANN401
    return [float(value) for value in vector]
