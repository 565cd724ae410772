"""The one writer of results: shape, intervals, provenance without machine paths."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.limits import Limit, faults_of, read_limits
from benchmarks.result import Result, bootstrap, figure_of, make_meta, wilson
from memory_runtime.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_result_has_the_four_parts_and_no_invalid_json(tmp_path):
    out = tmp_path / "deep" / "out.json"
    Result({"f1": np.float64(0.5), "none": None, "nan": math.nan}, {"en": {"f1": 1.0}},
           [{"id": "a", "verdict": "matched"}], {"seconds": 1.0}).write(out)
    made = json.loads(out.read_text(encoding="utf-8"))
    assert set(made) == {"metrics", "by", "items", "meta"}
    assert made["metrics"] == {"f1": 0.5, "none": None, "nan": None}
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]


def test_meta_names_commit_hardware_and_data(tmp_path):
    data = tmp_path / "set" / "windows.jsonl"
    data.parent.mkdir()
    data.write_text("x", encoding="utf-8")
    meta = make_meta("benchmarks.x", options={"windows": [Path("a/b.jsonl")], "limit": None},
                     started=0.0, data=[data], artifacts={"encoder": "abc"})
    assert {"commit", "hardware", "versions", "artifacts", "data", "seconds"} <= set(meta)
    assert meta["options"] == {"windows": ["a/b.jsonl"], "limit": None}
    assert list(meta["data"]) == ["set/windows.jsonl"]
    assert len(meta["data"]["set/windows.jsonl"]) == 64
    assert meta["hardware"]["cores"] >= 1
    assert str(tmp_path) not in json.dumps(meta)


def test_paths_inside_the_working_directory_become_relative(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    meta = make_meta("x", options={"a": tmp_path / "in" / "b"}, started=0.0)
    assert meta["options"]["a"] == str(Path("in") / "b")


def test_wilson_stays_inside_zero_and_one():
    assert wilson(0, 0) is None
    low, high = wilson(0, 10)
    assert low == 0.0 and 0.2 < high < 0.35
    low, high = wilson(10, 10)
    assert 0.65 < low < 0.8 and high == 1.0


def test_bootstrap_is_repeatable_and_holds_the_mean():
    counts = np.array([[n % 2, 1] for n in range(40)], dtype=float)

    def share(sums):
        return sums[:, 0] / sums[:, 1]

    low, high = bootstrap(counts, share)
    assert low < 0.5 < high
    assert (low, high) == bootstrap(counts, share)
    assert bootstrap(counts[:1], share) is None


def test_figure_of_refuses_what_is_no_result(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"metrics": {"f1": 0.25, "none": null}}', encoding="utf-8")
    assert figure_of(path, "f1") == 0.25
    for name in ("none", "other"):
        with pytest.raises(ConfigError, match=name):
            figure_of(path, name)


def test_a_limit_without_a_figure_is_missed():
    limits = [Limit("a", 0.5, None), Limit("b", None, 1.0), Limit("c", 0.0, None)]
    assert faults_of(limits, {"a": 0.6, "b": 0.9, "c": 1.0}) == []
    faults = faults_of(limits, {"a": 0.4, "b": 1.1})
    assert len(faults) == 3
    assert "c was not measured" in faults


def test_limits_file_is_read_and_faults_are_listed_together(tmp_path):
    assert read_limits(ROOT / "benchmarks" / "gate.yaml")
    path = tmp_path / "limits.yaml"
    path.write_text("a: {min: x}\nb: {why: no bound}\nc: {max: 1, mox: 2}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_limits(path)
    assert all(f"{name}:" in str(error.value) for name in "abc")
