"""The extraction command: a finished rollout or a tiny model in, one JSON object out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.extraction import FEW_SHOT, WEAKEST_BASELINE, compare, load_windows, main
from memory_runtime.corpus import read_windows
from memory_runtime.errors import SchemaError
from tests.tiny import encoder_base, pair_base

ROOT = Path(__file__).parents[2]

FIGURES = {"precision", "recall_must", "f1", "literal_exactness", "layer_accuracy",
           "kind_accuracy", "false_stores_per_empty", "empty_violated", "forbidden_hits",
           "score_mae", "reuse_spearman", "tokens_per_window", "seconds_per_window", "invalid"}


@pytest.fixture(scope="module")
def e5(tmp_path_factory):
    return pair_base(tmp_path_factory.mktemp("bases") / "e5")


def gold_row(text, **fields):
    return {"text": text, "layer": "core", "kind": "fact", "subject": "user", "evidence": ["t1"],
            "literals": [], "event_time": None, "polarity": "affirmed", "explicit": False,
            "scores": {"reuse": 5, "goal": 5, "emphasis": 0, "emotion": 0, "commitment": 0},
            "must": True, **fields}


def window_row(name, lang, *golds, **fields):
    return {"id": name, "lang": lang, "source": "made", "session_time": None, "forbidden": [],
            "turns": [{"id": "t1", "speaker": "user", "text": "hello"}], "gold": list(golds),
            **fields}


def candidate_row(gold, **fields):
    scores = {name: value / 9 for name, value in gold["scores"].items()}
    return {"text": gold["text"], "subject": "user", "attribute": "", "layer": gold["layer"],
            "kind": gold["kind"], "polarity": gold["polarity"], "evidence": gold["evidence"],
            "keep": 0.9, "scores": scores, **fields}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
                    encoding="utf-8")
    return path


TEA = gold_row("The user drinks green tea.")
ZH = gold_row("用户喜欢绿茶。")


@pytest.fixture
def windows(tmp_path):
    return write_lines(tmp_path / "windows.jsonl", [
        window_row("w1", "en", TEA), window_row("w2", "zh", ZH), window_row("w3", "en")])


def rollout_row(name, candidates, **fields):
    return {"id": name, "candidates": candidates, "dropped": [], "prompt_tokens": 10,
            "completion_tokens": 5, "invalid": 0, "truncated": False, "seconds": 0.5, **fields}


@pytest.fixture
def rollout(tmp_path):
    return write_lines(tmp_path / "rollout.jsonl", [
        rollout_row("w1", [candidate_row(TEA)]), rollout_row("w2", [], dropped=[candidate_row(ZH)]),
        rollout_row("w3", [], invalid=1)])


def test_finished_rollout_becomes_a_result(windows, rollout, e5, tmp_path):
    out = tmp_path / "out.json"
    assert main(["--windows", str(windows), "--rollout", str(rollout), "--e5", str(e5),
                 "--json", str(out)]) == 0
    made = json.loads(out.read_text(encoding="utf-8"))
    assert set(made) >= {"metrics", "by", "items", "meta", "curve"}
    assert FIGURES <= set(made["metrics"])
    assert {"zh", "en", "made"} <= set(made["by"])
    assert (made["metrics"]["precision"], made["metrics"]["recall_must"]) == (1.0, 0.5)
    assert made["by"]["zh"]["f1"] == 0.0
    assert made["metrics"]["invalid"] == 1
    assert made["metrics"]["tokens_per_window"] == 15
    assert sorted(item["verdict"] for item in made["items"]) == ["matched", "missed"]
    assert made["curve"][0]["recall_must"] == 1.0
    assert "matcher" in made["meta"]["artifacts"]
    assert made["meta"]["intervals"]["f1"] is not None


def test_rollout_that_lacks_windows_is_refused(windows, e5, tmp_path, capsys):
    part = write_lines(tmp_path / "part.jsonl", [rollout_row("w1", [])])
    out = tmp_path / "out.json"
    assert main(["--windows", str(windows), "--rollout", str(part), "--e5", str(e5),
                 "--json", str(out)]) == 2
    assert "lacks 2 of 3" in capsys.readouterr().err
    assert not out.exists()


def test_tuned_without_an_artifact_is_refused(windows, tmp_path, capsys):
    assert main(["--windows", str(windows), "--json", str(tmp_path / "o.json")]) == 2
    assert "--artifact" in capsys.readouterr().err


def test_same_window_id_in_two_files_is_refused(windows, tmp_path):
    again = write_lines(tmp_path / "again.jsonl", [window_row("w1", "en")])
    with pytest.raises(SchemaError, match="w1"):
        load_windows([windows, again], None)


@pytest.mark.parametrize("encoder", ["base", "prompt"])
def test_untuned_model_runs_through_the_served_path(encoder, windows, e5, tmp_path):
    base, out = encoder_base(tmp_path / "lm"), tmp_path / "out.json"
    assert main(["--windows", str(windows), "--encoder", encoder, "--base", str(base),
                 "--few-shot", str(ROOT / FEW_SHOT), "--max-new-tokens", "6", "--limit", "2",
                 "--e5", str(e5), "--json", str(out)]) == 0
    made = json.loads(out.read_text(encoding="utf-8"))
    assert made["metrics"]["windows"] == 2
    assert made["metrics"]["completion_tokens_per_window"] > 0
    assert "base" in made["meta"]["artifacts"]


def test_no_ratio_is_claimed_against_a_weak_baseline(tmp_path):
    for f1, claimed in ((WEAKEST_BASELINE - 0.01, False), (WEAKEST_BASELINE + 0.05, True)):
        path = tmp_path / "base.json"
        path.write_text(json.dumps({"metrics": {"f1": f1}}), encoding="utf-8")
        assert ("times" in compare(0.4, path)) is claimed


def test_few_shot_examples_are_training_windows_in_both_languages():
    examples = list(read_windows(ROOT / FEW_SHOT))
    train = {w.window.id for lang in ("zh", "en")
             for w in read_windows(ROOT / f"data/authored/windows_train_{lang}.jsonl")}
    assert sorted(e.language for e in examples) == ["en", "en", "zh", "zh"]
    assert {e.window.id for e in examples} <= train
    assert any(not e.gold for e in examples)
