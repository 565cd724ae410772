"""The served models as Encoder, Reranker, Embedder and Generator. Standard library only.

Shapes are those of the service: /v1/extract, /v1/rerank, /v1/embeddings, /v1/chat/completions.
A server that is busy (429) or not ready (503) is asked again after a pause; everything else that
goes wrong is raised at once as ServiceError, with what the server said.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memory_runtime.errors import BartlettError, SchemaError
from memory_runtime.models import Extraction
from memory_runtime.schema import Candidate, Turn, Window, clean_text

_RETRIED = (429, 503)

IN_FLIGHT = 16
"""Windows that are sent at the same time."""


class ServiceError(BartlettError):
    """A served model could not be reached or refused; `status` is None without an answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def _said(error: urllib.error.HTTPError) -> str:
    """The message of an error in OpenAI's envelope, or the start of whatever came."""
    body = error.read().decode("utf-8", "replace")
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300] or error.reason


class Service:
    """One HTTP service.

    Args:
        url: Like http://127.0.0.1:3000.
        timeout_s: For one request.
        retries: How often a busy server is asked again.
        pause_s: First pause; doubles each time. A Retry-After header is followed up to 30 s.
        api_key: Sent as a bearer token.
        sleep: Waits; tests pass their own.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 180.0, retries: int = 4, pause_s: float = 0.5,
        api_key: str | None = None, sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {url!r}")
        self.url = url.rstrip("/")
        self._timeout_s, self._retries, self._pause_s = timeout_s, retries, pause_s
        self._sleep = sleep
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send JSON and return the JSON that comes back.

        Raises:
            ServiceError: No connection, an error status after all retries, or no JSON object.
        """
        data = json.dumps(body, ensure_ascii=False).encode("utf-8")
        for attempt in range(self._retries + 1):
            request = urllib.request.Request(
                self.url + route, data=data, headers=self._headers, method="POST")
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                    return _json_object(reply.read(), self.url + route)
            except urllib.error.HTTPError as error:
                if error.code not in _RETRIED or attempt == self._retries:
                    raise ServiceError(f"{self.url}{route} answered {error.code}: {_said(error)}",
                                       status=error.code) from error
                self._sleep(self._pause(attempt, error.headers.get("Retry-After")))
            except (OSError, http.client.HTTPException) as error:
                raise ServiceError(
                    f"cannot reach {self.url}{route}: {error}; is the service running there?"
                ) from error
        raise AssertionError("the loop returns or raises")

    def _pause(self, attempt: int, retry_after: str | None) -> float:
        if retry_after is not None and retry_after.strip().isdecimal():
            return min(30.0, float(retry_after))
        return min(30.0, self._pause_s * 2**attempt)


def _json_object(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ServiceError(f"{where} sent no JSON: {data[:200]!r}") from error
    if not isinstance(value, dict):
        raise ServiceError(f"{where} sent a {type(value).__name__}, expected an object")
    return value


def _turn_json(turn: Turn) -> dict[str, Any]:
    return {key: value for key, value in asdict(turn).items() if value is not None}


class RemoteEncoder:
    """The served encoder, one request a window.

    Args:
        service: The service or its URL.
        model: Adapter or experiment; the server's default when None.
    """

    def __init__(self, service: Service | str, *, model: str | None = None) -> None:
        self._service = Service(service) if isinstance(service, str) else service
        self._model = model

    def extract(self, windows: Sequence[Window]) -> list[Extraction]:
        """One extraction per window, in order.

        Raises:
            ServiceError: The service failed, or sent something that is no candidate.
        """
        if not windows:
            return []
        # Sent together, windows share the batches of the server.
        with ThreadPoolExecutor(max_workers=min(IN_FLIGHT, len(windows))) as pool:
            return list(pool.map(self._one, windows))

    def _one(self, window: Window) -> Extraction:
        body: dict[str, Any] = {
            "turns": [_turn_json(turn) for turn in window.turns],
            "session_time": window.session_time, "goal": window.goal,
            "known": list(window.known),
            "context": [_turn_json(turn) for turn in window.context]}
        if self._model is not None:
            body["model"] = self._model
        reply = self._service.post("/v1/extract", body)
        usage = reply.get("usage") or {}
        try:
            return Extraction(
                candidates=[Candidate.from_json(item) for item in reply["candidates"]],
                dropped=[Candidate.from_json(item) for item in reply.get("dropped", ())],
                prompt_tokens=int(usage.get("prompt_tokens", 0)),
                completion_tokens=int(usage.get("completion_tokens", 0)),
                invalid=int(reply.get("invalid", 0)), truncated=bool(reply.get("truncated", False)))
        except (KeyError, TypeError, SchemaError) as error:
            raise ServiceError(f"{self._service.url}/v1/extract sent no candidates: {error}"
                               ) from error


class RemoteReranker:
    """The served reranker.

    Args:
        service: The service or its URL.
        model: Adapter; the server's default when None.
    """

    def __init__(self, service: Service | str, *, model: str | None = None) -> None:
        self._service = Service(service) if isinstance(service, str) else service
        self._model = model

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Calibrated probabilities, in order.

        Raises:
            ServiceError: The service failed or left a document out.
        """
        if not documents:
            return []
        body: dict[str, Any] = {
            "query": clean_text(query)[0], "documents": [clean_text(d)[0] for d in documents],
            "return_documents": False}
        if self._model is not None:
            body["model"] = self._model
        reply = self._service.post("/v1/rerank", body)
        try:
            scores = {int(r["index"]): float(r["relevance_score"]) for r in reply["results"]}
            return [scores[n] for n in range(len(documents))]
        except (KeyError, TypeError, ValueError) as error:
            raise ServiceError(f"{self._service.url}/v1/rerank did not score every document: "
                               f"{error!r}") from error


class RemoteEmbedder:
    """The served embedder.

    Args:
        service: The service or its URL.
        model: Name of the embedder; the server's default when None.
        batch: Texts in one request.
    """

    def __init__(
        self, service: Service | str, *, model: str | None = None, batch: int = 64
    ) -> None:
        self._service = Service(service) if isinstance(service, str) else service
        self._model, self._batch = model, batch

    def embed(
        self, texts: Sequence[str], *, kind: Literal["query", "passage"]
    ) -> NDArray[np.float32]:
        """Unit vectors, [N, D] float32.

        Raises:
            ServiceError: The service failed or left a text out.
        """
        rows: list[NDArray[np.float32]] = []
        for start in range(0, len(texts), self._batch):
            rows += self._some(texts[start : start + self._batch], kind)
        return np.stack(rows) if rows else np.zeros((0, 0), dtype=np.float32)

    def _some(self, texts: Sequence[str], kind: str) -> list[NDArray[np.float32]]:
        body: dict[str, Any] = {"input": [clean_text(text)[0] for text in texts],
                                "input_type": kind, "encoding_format": "base64"}
        if self._model is not None:
            body["model"] = self._model
        reply = self._service.post("/v1/embeddings", body)
        try:
            held = {int(row["index"]): _vector(row["embedding"]) for row in reply["data"]}
            return [held[n] for n in range(len(texts))]
        except (KeyError, TypeError, ValueError) as error:
            raise ServiceError(f"{self._service.url}/v1/embeddings did not embed every text: "
                               f"{error!r}") from error


def _vector(value: object) -> NDArray[np.float32]:
    """A vector in base64 or as numbers; servers of other makers know only the latter."""
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value), dtype="<f4").astype(np.float32)
    return np.asarray(value, dtype=np.float32)


class RemoteGenerator:
    """A chat model behind any OpenAI-compatible endpoint, for retelling memories.

    Args:
        service: The service or its URL.
        model: Name of the model.
    """

    def __init__(self, service: Service | str, *, model: str) -> None:
        self._service = Service(service) if isinstance(service, str) else service
        self._model = model

    def generate(self, messages: Sequence[dict[str, str]], *, max_tokens: int = 200) -> str:
        """The assistant's reply.

        Raises:
            ServiceError: The service failed or sent no reply.
        """
        reply = self._service.post("/v1/chat/completions", {
            "model": self._model, "messages": list(messages), "max_tokens": max_tokens,
            "temperature": 0})
        try:
            return str(reply["choices"][0]["message"]["content"])
        except (KeyError, TypeError, IndexError) as error:
            raise ServiceError(f"{self._service.url}/v1/chat/completions sent no reply: {error!r}"
                               ) from error
