import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from memory_runtime import (
    Candidate,
    RemoteEmbedder,
    RemoteEncoder,
    RemoteGenerator,
    RemoteReranker,
    Service,
    ServiceError,
    Turn,
    Window,
)

CANDIDATE = Candidate("用户的预算是3万元。", ("t1",), attribute="预算", keep=0.9)


class Server:
    """A real HTTP server on a free port that gives prepared answers, in order, per route."""

    def __init__(self):
        self.answers: dict[str, list[tuple[int, object, dict]]] = {}
        self.asked: list[tuple[str, dict, dict]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked.append((self.path, json.loads(body), dict(self.headers)))
                status, reply, headers = outer.answers[self.path].pop(0)
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def on(self, route, *answers):
        self.answers[route] = [(*a, {})[:3] if len(a) == 2 else a for a in answers]


@pytest.fixture
def server():
    started = Server()
    yield started
    started.http.shutdown()
    started.http.server_close()


def waits(url, **options):
    """A service that notes its pauses instead of making them."""
    pauses = []
    return Service(url, sleep=pauses.append, pause_s=0.5, **options), pauses


def test_the_encoder_sends_the_window_and_reads_candidates(server):
    server.on("/v1/extract", (200, {
        "candidates": [CANDIDATE.to_json()], "dropped": [CANDIDATE.to_json()], "invalid": 1,
        "usage": {"prompt_tokens": 7, "completion_tokens": 3}}))
    window = Window("w", (Turn("t1", "user", "预算三万", "user", "2026-03-01T09:00:00+08:00"),),
                    session_time="2026-03-01", goal="g", known=("k",),
                    context=(Turn("t0", "a", "x", "assistant"),))
    (found,) = RemoteEncoder(server.url, model="encoder:v2").extract([window])
    assert found.candidates == [CANDIDATE] and found.dropped == [CANDIDATE]
    assert (found.prompt_tokens, found.completion_tokens, found.invalid) == (7, 3, 1)
    _, body, _ = server.asked[0]
    assert body["model"] == "encoder:v2" and body["known"] == ["k"]
    assert body["turns"][0]["text"] == "预算三万" and body["context"][0]["role"] == "assistant"


def test_the_reranker_puts_scores_back_in_order(server):
    server.on("/v1/rerank", (200, {"results": [
        {"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.2}]}))
    assert RemoteReranker(server.url).score("q", ["a", "b"]) == [0.2, 0.9]
    assert RemoteReranker(server.url).score("q", []) == []


def test_the_embedder_reads_base64_and_numbers_in_batches(server):
    import base64
    packed = base64.b64encode(np.array([1, 0], dtype="<f4").tobytes()).decode()
    server.on("/v1/embeddings",
              (200, {"data": [{"index": 1, "embedding": [0, 1]}, {"index": 0,
                                                                  "embedding": packed}]}),
              (200, {"data": [{"index": 0, "embedding": [0.5, 0.5]}]}))
    vectors = RemoteEmbedder(server.url, batch=2).embed(["a", "b", "c"], kind="query")
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, np.array([[1, 0], [0, 1], [0.5, 0.5]], np.float32))
    assert [asked[1]["input_type"] for asked in server.asked] == ["query", "query"]


def test_the_generator_reads_the_reply(server):
    server.on("/v1/chat/completions", (200, {"choices": [{"message": {"content": "好的"}}]}))
    assert RemoteGenerator(server.url, model="m").generate([{"role": "user", "content": "x"}]) == (
        "好的")


def test_a_busy_server_is_asked_again_after_growing_pauses(server):
    busy = {"error": {"message": "queue is full"}}
    server.on("/v1/rerank", (429, busy), (503, busy), (429, busy, {"Retry-After": "7"}),
              (200, {"results": [{"index": 0, "relevance_score": 0.5}]}))
    service, pauses = waits(server.url)
    assert RemoteReranker(service).score("q", ["a"]) == [0.5]
    assert pauses == [0.5, 1.0, 7.0]


def test_a_server_that_stays_busy_is_given_up_with_its_own_words(server):
    server.on("/v1/rerank", *[(429, {"error": {"message": "queue is full"}})] * 3)
    service, pauses = waits(server.url, retries=2)
    with pytest.raises(ServiceError, match="queue is full") as caught:
        RemoteReranker(service).score("q", ["a"])
    assert caught.value.status == 429 and len(pauses) == 2


def test_other_errors_are_raised_at_once(server):
    server.on("/v1/extract", (413, {"error": {"message": "too many turns"}}))
    service, pauses = waits(server.url)
    with pytest.raises(ServiceError, match="413: too many turns"):
        RemoteEncoder(service).extract([Window("w", (Turn("t1", "user", "x"),))])
    assert pauses == []


@pytest.mark.parametrize(("route", "call", "reply"), [
    ("/v1/rerank", lambda u: RemoteReranker(u).score("q", ["a", "b"]),
     {"results": [{"index": 0, "relevance_score": 1}]}),
    ("/v1/embeddings", lambda u: RemoteEmbedder(u).embed(["a"], kind="query"), {"data": []}),
    ("/v1/extract", lambda u: RemoteEncoder(u).extract([Window("w", (Turn("t1", "u", "x"),))]),
     {"candidates": [{"text": "x"}]}),
    ("/v1/rerank", lambda u: RemoteReranker(u).score("q", ["a"]), b"<html>"),
    ("/v1/rerank", lambda u: RemoteReranker(u).score("q", ["a"]), [1]),
    ("/v1/chat/completions", lambda u: RemoteGenerator(u, model="m").generate([]), {}),
])
def test_an_incomplete_reply_is_an_error_and_never_a_guess(server, route, call, reply):
    server.on(route, (200, reply))
    with pytest.raises(ServiceError):
        call(server.url)


def test_nobody_there_is_told_plainly():
    with pytest.raises(ServiceError, match="is the service running"):
        RemoteReranker("http://127.0.0.1:9", ).score("q", ["a"])
    with pytest.raises(ValueError, match="http"):
        Service("localhost:3000")


def test_a_key_is_sent_as_bearer(server):
    server.on("/v1/rerank", (200, {"results": [{"index": 0, "relevance_score": 1}]}))
    RemoteReranker(Service(server.url, api_key="secret")).score("q", ["a"])
    assert server.asked[0][2]["Authorization"] == "Bearer secret"
