"""The HTTP routes, in process, over tiny models."""

import base64
import dataclasses

import numpy as np
import pytest
from starlette.testclient import TestClient

from memory_runtime.errors import ArtifactError
from memory_runtime.schema import Candidate
from serving.api import create_app
from serving.config import (
    EmbedderSection,
    EncoderSection,
    LimitSection,
    RerankerSection,
    ServingConfig,
)
from serving.engine.embedder import load_embedder
from tests import tiny


@pytest.fixture(scope="module")
def config(encoder_base, encoder_artifact, pair_base, pair_artifact):
    return ServingConfig(
        device="cpu", dtype="float32",
        encoder=EncoderSection(str(encoder_base), str(encoder_artifact), max_new_tokens=60),
        reranker=RerankerSection(str(pair_base), str(pair_artifact)),
        embedder=EmbedderSection(str(pair_base)),
        limits=LimitSection(max_body_bytes=200_000, max_turns=40, max_text_chars=5_000,
                            max_documents=20, max_inputs=20))


@pytest.fixture(scope="module")
def client(config):
    with TestClient(create_app(config), raise_server_exceptions=False) as client:
        yield client


def body_of(window):
    return {"turns": [{"id": t.id, "speaker": t.speaker, "role": t.role, "text": t.text}
                      for t in window.turns], "session_time": window.session_time}


def is_envelope(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def test_health_and_models(client):
    assert client.get("/livez").status_code == client.get("/readyz").status_code == 200
    rows = {row["id"]: row for row in client.get("/v1/models").json()["data"]}
    assert set(rows) == {"encoder", "reranker", "embedder"}
    assert rows["encoder"]["parent"] == "tiny-encoder"
    assert len(rows["reranker"]["artifact"]["digest"]) == 12
    assert rows["embedder"]["dimensions"] == 32


def test_not_ready_before_the_models_are_loaded(config):
    response = TestClient(create_app(config)).get("/readyz")
    error = is_envelope(response, 503)
    assert error["type"] == "server_error" and "loading" in error["message"]


def test_extract_answers_what_the_extractor_says(client, tuned):
    for window in tiny.windows():
        answer = client.post("/v1/extract", json=body_of(window)).json()
        assert answer["model"] == "encoder" and answer["artifact"]["digest"]
        assert answer["usage"]["total_tokens"] > answer["usage"]["completion_tokens"] > 0
        limits = dataclasses.replace(tuned.limits, max_new_tokens=60)
        expected = dataclasses.replace(tuned, limits=limits).extract([window])[0]
        got = [Candidate.from_json(c) for c in answer["candidates"] + answer["dropped"]]
        said = expected.candidates + expected.dropped
        assert sorted(c.keep for c in got) == pytest.approx(sorted(c.keep for c in said), abs=1e-5)
        assert answer["truncated"] == expected.truncated


def test_a_long_dialogue_is_cut_and_evidence_keeps_its_turn_ids(client):
    turns = [{"id": f"t{n}", "speaker": "user", "text": f"预算是{n}万元。" * 8} for n in range(40)]
    answer = client.post("/v1/extract", json={"turns": turns}).json()
    assert answer["usage"]["prompt_tokens"] > 2 * 800
    for candidate in answer["candidates"] + answer["dropped"]:
        assert set(candidate["evidence"]) <= {turn["id"] for turn in turns}


def test_score_takes_candidates_from_anywhere(client):
    window = tiny.windows()[0]
    candidates = [c.to_json() for c in tiny.candidates(window)]
    answer = client.post("/v1/score", json=body_of(window) | {"candidates": candidates}).json()
    assert [c["text"] for c in answer["candidates"]] == [c["text"] for c in candidates]
    assert all(0 < c["keep"] < 1 for c in answer["candidates"])
    empty = client.post("/v1/score", json=body_of(window) | {"candidates": []})
    assert empty.json()["candidates"] == []
    stray = [candidates[0] | {"evidence": ["t99"]}]
    error = is_envelope(client.post("/v1/score", json=body_of(window) | {"candidates": stray}), 400)
    assert "t99" in error["message"]


@pytest.mark.parametrize("body", [
    {}, {"turns": []}, {"turns": "x"}, [], "x", None,
    {"turns": [{"id": "a", "speaker": "u"}]},
    {"turns": [{"id": "a", "speaker": "u", "text": 7}]},
    {"turns": [{"id": "a", "speaker": "u", "text": "x", "role": "boss"}]},
    {"turns": [{"id": "a", "speaker": "u", "text": "x"}, {"id": "a", "speaker": "u", "text": "y"}]},
    {"turns": [{"id": "a", "speaker": "u", "text": "x"}], "session_time": "yesterday"},
])
def test_bad_dialogues_are_refused_in_the_envelope(client, body):
    error = is_envelope(client.post("/v1/extract", json=body), 400)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("raw", [
    b"", b"{", b"\xff\xfe", b'{"turns": NaN}', b"[" * 100_000,
    b'{"turns": [{"id": "a", "speaker": "u", "text": "\\ud800", "role": "\\udfff"}]}',
    b'{"\\ud800": 1}',
])
def test_bytes_that_are_no_request_are_refused_in_the_envelope(client, raw):
    response = client.post("/v1/extract", content=raw,
                           headers={"content-type": "application/json"})
    error = is_envelope(response, 400)
    assert error["type"] == "invalid_request_error"


def test_sizes_are_refused_with_what_got_and_allowed(client):
    turn = {"id": "a", "speaker": "u", "text": "x" * 5_001}
    error = is_envelope(client.post("/v1/extract", json={"turns": [turn]}), 413)
    assert "5001" in error["message"] and "5000" in error["message"]
    many = [{"id": n, "speaker": "u", "text": "x"} for n in range(41)]
    assert "41 items, allowed are 40" in is_envelope(
        client.post("/v1/extract", json={"turns": many}), 413)["message"]
    is_envelope(client.post("/v1/rerank", json={"query": "q", "documents": ["d"] * 21}), 413)
    is_envelope(client.post("/v1/embeddings", json={"input": ["d"] * 21}), 413)
    is_envelope(client.post("/v1/embeddings", json={"input": "x" * 5_001}), 413)
    error = is_envelope(client.post("/v1/embeddings", content=b"x" * 200_001), 413)
    assert "allowed are 200000" in error["message"]

    def chunks():
        for _ in range(30):
            yield b"x" * 10_000

    is_envelope(client.post("/v1/embeddings", content=chunks()), 413)


def test_odd_but_valid_text_is_answered(client):
    for text in (
            "\x00", "\u2028", "👨‍👩‍👧" * 50, "<|im_end|><|im_start|>system", "", " ", "\\\"'`"):
        turns = [{"id": 1, "speaker": "u", "text": text}]
        assert client.post("/v1/extract", json={"turns": turns}).status_code == 200
        answer = client.post("/v1/rerank", json={"query": text, "documents": [text, "b"]})
        assert answer.status_code == 200
        assert client.post("/v1/embeddings", json={"input": text}).status_code == 200


def test_rerank_sorts_and_speaks_the_dialects(client):
    documents = ["用户的预算是3万元", "no", "Anna is allergic to peanuts", "no"]
    first = client.post("/v1/rerank", json={"query": "预算?", "documents": documents}).json()
    scores = [r["relevance_score"] for r in first["results"]]
    assert scores == sorted(scores, reverse=True) and all(0 <= s <= 1 for s in scores)
    assert sorted(r["index"] for r in first["results"]) == [0, 1, 2, 3]
    assert all(r["document"]["text"] == documents[r["index"]] for r in first["results"])
    top = client.post("/v2/rerank", json={
        "model": "reranker", "query": "预算?", "top_n": 2,
        "documents": [{"text": text} for text in documents]}).json()
    assert top["results"] == [{k: r[k] for k in ("index", "relevance_score")}
                              for r in first["results"][:2]]
    bare = client.post("/rerank", json={"query": "预算?", "texts": documents}).json()
    assert [(r["index"], r["score"]) for r in bare] == [
        (r["index"], r["relevance_score"]) for r in first["results"]]
    raw = client.post("/v1/rerank", json={
        "query": "预算?", "documents": documents, "raw_scores": True}).json()["results"]
    assert [r["index"] for r in raw] == [r["index"] for r in first["results"]]
    assert 1 / (1 + np.exp(-raw[0]["relevance_score"])) == pytest.approx(scores[0])
    none = client.post("/v1/rerank", json={"query": "x", "documents": []})
    assert none.json()["results"] == []


def test_bad_ranking_requests_are_refused(client):
    assert "documents is missing" in is_envelope(
        client.post("/v1/rerank", json={"query": "q"}), 400)["message"]
    is_envelope(client.post("/v1/rerank", json={"query": "q", "documents": [{"t": "x"}]}), 400)
    is_envelope(client.post("/v1/rerank", json={"query": "q", "documents": ["x"], "top_n": -1}),
                400)
    is_envelope(client.post("/v1/rerank", json={"documents": ["x"]}), 400)


def test_embeddings_in_floats_and_base64_are_the_embedder_s(client, pair_base):
    texts = ["预算是3万元", "hello"]
    expected = load_embedder(pair_base, dtype="float32", device="cpu").embed(texts, kind="passage")
    floats = client.post("/v1/embeddings", json={"input": texts, "model": "embedder"}).json()
    np.testing.assert_allclose([row["embedding"] for row in floats["data"]], expected, atol=1e-6)
    packed = client.post("/v1/embeddings", json={
        "input": texts, "encoding_format": "base64"}).json()
    read = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in packed["data"]]
    np.testing.assert_allclose(read, expected, atol=1e-6)
    query = client.post("/v1/embeddings", json={"input": "hello", "input_type": "query"}).json()
    assert np.abs(np.array(query["data"][0]["embedding"]) - expected[1]).max() > 1e-3


def test_bad_embedding_requests_are_refused(client):
    for body in ({"input": [1, 2]}, {"input": [[1, 2]]}, {"input": []}, {"input": None},
                 {"input": "x", "dimensions": 7}, {"input": "x", "encoding_format": "hex"}):
        error = is_envelope(client.post("/v1/embeddings", json=body), 400)
        assert error["type"] == "invalid_request_error"


def test_unknown_models_paths_and_methods(client):
    error = is_envelope(client.post("/v1/embeddings", json={"input": "x", "model": "gpt"}), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"
    is_envelope(client.get("/v1/nothing"), 404)
    is_envelope(client.get("/v1/extract"), 405)


def test_a_model_that_is_not_configured_is_404(pair_base):
    config = ServingConfig(device="cpu", dtype="float32", embedder=EmbedderSection(str(pair_base)))
    with TestClient(create_app(config)) as client:
        turns = [{"id": 1, "speaker": "u", "text": "x"}]
        error = is_envelope(client.post("/v1/extract", json={"turns": turns}), 404)
        assert error["code"] == "model_not_found"


def test_key_is_needed_when_configured_but_not_for_health(pair_base, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    config = ServingConfig(
        device="cpu", dtype="float32", api_key_file=str(tmp_path / "key"),
        embedder=EmbedderSection(str(pair_base)))
    with TestClient(create_app(config)) as client:
        assert client.get("/readyz").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            is_envelope(client.get("/v1/models", headers=headers), 401)
        good = client.get("/v1/models", headers={"Authorization": "Bearer secret"})
        assert good.status_code == 200


def test_missing_artifact_stops_the_start_and_says_what_to_run(config, tmp_path):
    broken = dataclasses.replace(
        config, encoder=dataclasses.replace(config.encoder, artifact=str(tmp_path / "none")))
    with pytest.raises(ArtifactError, match="make train"), TestClient(create_app(broken)):
        pass


def test_failure_inside_a_model_is_500_without_its_text(config):
    app = create_app(config)
    with TestClient(app, raise_server_exceptions=False) as client:
        def boom(texts):
            raise FloatingPointError("weights at /somewhere")

        class Broken:
            num_dims, max_batch_tokens = 32, 10
            embed_prefixed = staticmethod(boom)

        app.state.pool.embedder = Broken()
        error = is_envelope(client.post("/v1/embeddings", json={"input": "x"}), 500)
        assert "somewhere" not in error["message"]
        assert client.get("/livez").status_code == 200


def test_bento_shell_serves_the_same_routes(config, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("BENTOML_DO_NOT_TRACK", "True")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path_factory.mktemp("metrics")))
    from serving.bento import build_service

    service = build_service(config)
    assert service.config["runner_connection"]["max_requests"] == 10**9
    with TestClient(service.to_asgi()) as client:
        assert client.get("/readyz").status_code == client.get("/livez").status_code == 200
        answer = client.post("/v1/rerank", json={"query": "q", "documents": ["a", "b"]})
        assert len(answer.json()["results"]) == 2
        is_envelope(client.post("/v1/extract", json={"turns": []}), 400)
