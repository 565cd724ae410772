"""The gate holds a result against its limits and fails on a miss."""

from __future__ import annotations

import json

from benchmarks.gate import LIMITS, import_figures, main, recall_figures
from benchmarks.limits import read_limits
from benchmarks.scenarios import read_scenarios
from tests.benchmarks.test_detective import STORY


def result(tmp_path, **metrics):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"metrics": metrics}), encoding="utf-8")
    return str(path)


def within():
    return {limit.name: limit.high if limit.low is None else limit.low
            for limit in read_limits(LIMITS)}


def test_result_within_all_limits_passes(tmp_path):
    assert main(["--from", result(tmp_path, **within())]) == 0


def test_each_limit_alone_can_fail_the_gate(tmp_path, capsys):
    for limit in read_limits(LIMITS):
        worse = limit.high + 1 if limit.high is not None else limit.low - 1
        assert main(["--from", result(tmp_path, **{**within(), limit.name: worse})]) == 1
        assert f"MISSED  {limit.name}" in capsys.readouterr().out


def test_a_figure_that_is_missing_fails_the_gate(tmp_path):
    metrics = within()
    metrics.popitem()
    assert main(["--from", result(tmp_path, **metrics)]) == 1


def test_what_is_no_result_is_an_error(tmp_path):
    assert main(["--from", str(tmp_path / "none.json")]) == 2


def test_importing_the_runtime_loads_nothing_heavy():
    assert import_figures(tries=1)["import_heavy"] == 0


def test_recall_figures_stand_beside_both_plain_arms(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps(STORY), encoding="utf-8")
    made = recall_figures(read_scenarios(tmp_path))
    assert made["stories_recall@5"] == 1.0
    assert made["stories_recall@5_over_bm25"] == 0.0
