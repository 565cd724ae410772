"""Rollout files, the configuration, local models, the console script and the export."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from memory_runtime.corpus import read_windows
from memory_runtime.errors import ArtifactError, ConfigError, SchemaError
from memory_runtime.schema import Candidate
from serving import cli, rollout, service
from serving.config import load_config
from serving.local import local_models
from tests import tiny

CONFIGS = Path(__file__).parents[2] / "configs"


def row_of(window, **changes):
    turns = [{"id": t.id, "speaker": t.speaker, "text": t.text} for t in window.turns]
    return {"id": window.id, "lang": "zh", "source": "x", "turns": turns,
            "session_time": window.session_time, "goal": None, "known": ["k"],
            "gold": [], "forbidden": []} | changes


GOLD = {"text": "用户的预算是3万元。", "layer": "core", "kind": "constraint", "subject": "user",
        "evidence": ["t0"], "literals": ["3万元"], "event_time": None, "polarity": "affirmed",
        "explicit": True, "scores": {"reuse": 9, "goal": 5, "emphasis": 3, "emotion": 0,
                                     "commitment": 0}, "must": False, "attribute": "预算"}


@pytest.fixture
def window_file(tmp_path):
    path = tmp_path / "windows.jsonl"
    rows = [row_of(window) for window in tiny.windows()]
    rows[1]["gold"] = [GOLD]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    return path


@pytest.fixture
def serving_yaml(tmp_path, encoder_base, encoder_artifact, pair_base, pair_artifact):
    path = tmp_path / "serving.yaml"
    path.write_text(f"""
device: cpu
dtype: float32
encoder: {{base: {encoder_base}, artifact: {encoder_artifact}, max_new_tokens: 30}}
reranker: {{base: {pair_base}, artifact: {pair_artifact}}}
embedder: {{base: {pair_base}}}
""")
    return path


def test_windows_and_gold_are_read_as_they_are_written(window_file):
    read = list(read_windows(window_file))
    assert [item.window.id for item in read] == [f"w{n}" for n in range(8)]
    window, gold = read[1].window, [g.candidate for g in read[1].gold]
    assert window.known == ("k",) and window.turns[1].role == "assistant"
    assert gold[0].keep == pytest.approx(6 / 9) and gold[0].scores.reuse == 1.0
    assert gold[0].attribute == "预算" and gold[0].explicit


@pytest.mark.parametrize(("row", "message"), [
    ({"id": "a"}, ":2: no window"), ({"id": "a", "turns": []}, ":2: no window"),
    ([], "must be an object"), (row_of(tiny.windows()[0]), "came before"),
])
def test_lines_that_are_no_window_are_named(tmp_path, row, message):
    path = tmp_path / "w.jsonl"
    path.write_text(json.dumps(row_of(tiny.windows()[0])) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(SchemaError, match=message):
        list(read_windows(path))


def rolled(out):
    return {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}


def arguments(*rest):
    return [*map(str, rest), "--max-new-tokens", "40", "--batch", "3", "--dtype", "float32",
            "--device", "cpu"]


def test_rollout_of_every_mode_writes_one_line_a_window(
        window_file, tmp_path, encoder_base, encoder_artifact):
    for mode, artifact in (("tuned", encoder_artifact), ("base", "-"), ("prompt", "-")):
        out = tmp_path / mode / "out.jsonl"
        status = rollout.main(arguments(artifact, window_file, out, "--base", encoder_base,
                                        "--mode", mode, "--few-shot", window_file))
        assert status == 0
        rows = rolled(out)
        assert set(rows) == {f"w{n}" for n in range(8)}
        for row in rows.values():
            assert set(row) == {"id", "candidates", "dropped", "completion", "prompt_tokens",
                                "completion_tokens", "invalid", "truncated", "seconds", "by",
                                    "empty_log_odds"}
            assert row["completion_tokens"] <= 40 and row["prompt_tokens"] > 100
            for candidate in row["candidates"] + row["dropped"]:
                Candidate.from_json(candidate)


def test_resumed_rollout_equals_an_uninterrupted_one(
        window_file, tmp_path, encoder_base, encoder_artifact):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    options = (encoder_artifact, window_file)
    assert rollout.main(arguments(*options, whole, "--base", encoder_base)) == 0
    assert rollout.main(arguments(*options, parts, "--base", encoder_base, "--limit", 3)) == 0
    assert set(rolled(parts)) == {"w0", "w1", "w2"}
    # The process was killed in the middle of a line.
    cut = parts.read_text()[:-30]
    parts.write_text(cut)
    assert rollout.main(arguments(*options, parts, "--base", encoder_base)) == 0
    one, other = rolled(whole), rolled(parts)
    assert len(parts.read_text().splitlines()) == 8 and set(one) == set(other)
    for name, row in one.items():
        for key in ("completion", "invalid", "truncated", "prompt_tokens"):
            assert row[key] == other[name][key]


def test_rollout_faults_end_with_status_2_and_a_sentence(
        window_file, tmp_path, encoder_base, capsys):
    assert rollout.main(arguments("-", window_file, tmp_path / "o", "--base", encoder_base)) == 2
    assert "make train" in capsys.readouterr().err
    other = tmp_path / "other.txt"
    other.write_text("not a rollout\n")
    assert rollout.main(arguments("-", window_file, other, "--base", encoder_base,
                                  "--mode", "base")) == 2
    assert "is no rollout" in capsys.readouterr().err
    assert other.read_text() == "not a rollout\n"


def test_results_of_two_models_do_not_mix(
        window_file, tmp_path, encoder_base, encoder_artifact, capsys):
    out = tmp_path / "out.jsonl"
    assert rollout.main(arguments("-", window_file, out, "--base", encoder_base, "--mode", "base",
                                  "--limit", 2)) == 0
    assert rollout.main(arguments(encoder_artifact, window_file, out, "--base", encoder_base)) == 2
    assert "was written by ['base']" in capsys.readouterr().err


def test_shipped_configurations_parse_and_have_the_same_keys():
    import yaml

    cpu, gpu = (yaml.safe_load((CONFIGS / name).read_text())
                for name in ("serving_cpu.yaml", "serving.yaml"))
    assert {k: sorted(v) if isinstance(v, dict) else None for k, v in cpu.items()} == {
        k: sorted(v) if isinstance(v, dict) else None for k, v in gpu.items()}
    for name in ("serving_cpu.yaml", "serving.yaml"):
        assert load_config(CONFIGS / name).host == "127.0.0.1"


def test_every_fault_of_a_configuration_is_reported_at_once(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("""
prot: 1
port: many
encoder: {artifact: x, max_rows: 2.5}
embedder: []
""")
    with pytest.raises(ConfigError) as fault:
        load_config(path)
    for part in ("prot is unknown", "port must be of type int, got 'many'",
                 "encoder.base is missing", "encoder.max_rows must be of type int",
                 "embedder must be a mapping"):
        assert part in str(fault.value)
    path.write_text("{host: 0.0.0.0, port: 99999, dtype: int8, embedder: {base: x},"
                    " encoder: {base: x, mode: best}, queue: {max_waiting: 0}}")
    with pytest.raises(ConfigError) as fault:
        load_config(path)
    for part in ("set api_key_file", "port is 99999", "dtype is 'int8'", "encoder.mode is 'best'",
                 "queue.max_waiting is 0"):
        assert part in str(fault.value)
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.yaml")


def test_local_models_are_the_runtime_s_protocols(serving_yaml, tuned):
    encoder, reranker, embedder = local_models(serving_yaml)
    window = tiny.windows()[1]
    limits = dataclasses.replace(tuned.limits, max_new_tokens=30)
    expected = dataclasses.replace(tuned, limits=limits).extract([window])[0]
    assert encoder.extract([window])[0].raw == expected.raw
    assert encoder.score_candidates(window, tiny.candidates(window))[0].keep == pytest.approx(
        tuned.score_candidates(window, tiny.candidates(window))[0].keep, abs=1e-5)
    assert isinstance(encoder.generate([{"role": "user", "content": "x"}], max_tokens=5), str)
    scores = reranker.score("预算", ["a", "b"])
    assert len(scores) == 2 and all(0 <= s <= 1 for s in scores)
    vectors = embedder.embed(["a", "b"], kind="query")
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_sections_that_are_null_are_not_loaded(tmp_path, pair_base):
    path = tmp_path / "s.yaml"
    path.write_text(f"{{device: cpu, embedder: {{base: {pair_base}}}, encoder: null}}")
    encoder, reranker, embedder = local_models(path)
    assert encoder is None and reranker is None and embedder is not None


def test_verify_says_what_it_checked_and_fails_on_damage(
        encoder_artifact, encoder_base, tmp_path, capsys):
    assert cli.main(["artifact", "verify", str(encoder_artifact)]) == 0
    assert "base not checked" in capsys.readouterr().out
    assert cli.main(["artifact", "verify", str(encoder_artifact), "--base", str(encoder_base)]) == 0
    assert "fits" in capsys.readouterr().out
    assert cli.main(["artifact", "verify", str(tmp_path)]) == 2
    assert "manifest.json is missing" in capsys.readouterr().err


def test_exported_reranker_loads_in_cross_encoder_with_the_served_logits(
        pair_artifact, pair_base, tmp_path, capsys):
    from sentence_transformers import CrossEncoder

    from serving.artifact import open_artifact
    from serving.engine.scorer import load_scorer

    out = tmp_path / "exported"
    command = ["artifact", "export", str(pair_artifact), str(out), "--base", str(pair_base)]
    assert cli.main(command) == 0
    pairs = [("预算？", "用户的预算是3万元。"), ("budget", "Anna is allergic to peanuts")]
    served = load_scorer(pair_base, open_artifact(pair_artifact), dtype="float32").logits(pairs)
    loaded = CrossEncoder(str(out), device="cpu")
    np.testing.assert_allclose(loaded.predict(pairs), served, atol=1e-5)
    assert (out / "calibration.json").is_file()
    assert cli.main(command) == 2
    assert "is not empty" in capsys.readouterr().err


def test_encoders_are_not_exported(encoder_artifact, encoder_base, tmp_path, capsys):
    assert cli.main(["artifact", "export", str(encoder_artifact), str(tmp_path / "x"),
                     "--base", str(encoder_base)]) == 2
    assert "only rerankers" in capsys.readouterr().err


def test_serve_checks_before_it_starts_anything(serving_yaml, tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(service.os, "execve", lambda *call: started.append(call))
    service.start(serving_yaml, port=3999)
    program, command, environment = started.pop()
    assert command[1:5] == ["-m", "bentoml", "serve", "serving.service:service"]
    assert "127.0.0.1" in command and "3999" in command
    assert environment["BENTOML_DO_NOT_TRACK"] == "True"
    broken = tmp_path / "broken.yaml"
    broken.write_text(serving_yaml.read_text().replace("artifact: ", "artifact: /nowhere"))
    with pytest.raises(ArtifactError, match="make train"):
        service.start(broken)
    assert cli.main(["serve", "--config", str(broken)]) == 2
    assert not started and "make train" in capsys.readouterr().err
