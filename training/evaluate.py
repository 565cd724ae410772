"""Puts the benchmark reports of a run into one table, writes eval.json and applies the gate.

`python -m training.evaluate configs/gate.yaml --reports DIR --encoder DIR --reranker DIR`. Exit
status 1 when a threshold is missed. Reads files only; runs no model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from memory_runtime.corpus import AnnotatedWindow, read_windows
from memory_runtime.errors import BartlettError, ConfigError
from training.config import bounded, load_config
from training.run import read_json, write_json

EXTRACTION = ("precision", "recall_must", "f1", "literal_exactness", "layer_accuracy",
              "false_stores_per_empty", "empty_violated", "forbidden_hits", "score_mae",
              "tokens_per_window", "seconds_per_window", "invalid")
RECALL = ("recall@1", "recall@5", "recall@20", "mrr", "ms_p50")


@dataclass(frozen=True)
class EncoderGate:
    """Thresholds of the encoder."""

    min_stores_per_full_window: float = bounded(0.2, 0.0, 100.0)
    "Under this the encoder says nothing."
    max_stores_per_turn: float = bounded(0.6, 0.0, 100.0)
    "Above this it stores a candidate per turn."
    min_f1: float = bounded(0.2, 0.0, 1.0)
    "Lowest F1 on the held-out windows."
    min_f1_over_prompt: float = bounded(0.0, -1.0, 1.0)
    "F1 above the prompted base."
    max_invalid_per_window: float = bounded(0.2, 0.0, 100.0)
    "Lines that are no candidate."


@dataclass(frozen=True)
class RerankerGate:
    """Thresholds of the reranker."""

    min_mrr_over_rrf: float = bounded(0.0, -1.0, 1.0)
    "MRR above reciprocal rank fusion, per set."


@dataclass(frozen=True)
class Gate:
    """All thresholds."""

    encoder: EncoderGate = field(default_factory=EncoderGate)
    reranker: RerankerGate = field(default_factory=RerankerGate)


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    name: str
    value: float
    limit: float
    is_ceiling: bool = False

    @property
    def passed(self) -> bool:
        """Whether the value keeps the limit; a missing figure never does."""
        return self.value <= self.limit if self.is_ceiling else self.value >= self.limit


def report_windows(report: dict[str, Any]) -> list[AnnotatedWindow]:
    """The windows that an extraction report was made on."""
    options = report["meta"]["options"]
    return [w for path in options["windows"] for w in list(read_windows(path))[: options["limit"]]]


def stores(report: dict[str, Any], windows: Sequence[AnnotatedWindow]) -> tuple[float, float]:
    """Stored candidates per window that has gold, and per turn of all windows."""
    predicted = [item for item in report["items"] if item["verdict"] in ("matched", "extra")]
    full = {w.window.id for w in windows if w.gold}
    in_full = sum(item["id"].rpartition("/")[0] in full for item in predicted)
    turns = sum(len(w.window.turns) for w in windows)
    return in_full / max(1, len(full)), len(predicted) / turns


def encoder_checks(
    gate: EncoderGate, tuned: dict[str, Any], prompt: dict[str, Any] | None
) -> list[Check]:
    """Both poles, F1, F1 over the prompted base, validity."""
    windows = report_windows(tuned)
    per_full, per_turn = stores(tuned, windows)
    figures = tuned["metrics"]
    f1 = figures["f1"] or 0.0
    checks = [
        Check("stores per window with gold", per_full, gate.min_stores_per_full_window),
        Check("stores per turn", per_turn, gate.max_stores_per_turn, is_ceiling=True),
        Check("encoder f1", f1, gate.min_f1),
        Check("invalid lines per window", figures["invalid"] / len(windows),
              gate.max_invalid_per_window, is_ceiling=True),
    ]
    if prompt is not None:
        checks.append(Check("encoder f1 over prompted base", f1 - (prompt["metrics"]["f1"] or 0.0),
                            gate.min_f1_over_prompt))
    return checks


def reranker_checks(gate: RerankerGate, recall: dict[str, Any]) -> list[Check]:
    """MRR over fusion, for each set of the report."""
    by = recall["by"]
    sets = sorted({name.split("/")[0] for name in by})
    return [Check(f"{name} mrr over rrf", by[f"{name}/ours"]["mrr"] - by[f"{name}/rrf"]["mrr"],
                  gate.min_mrr_over_rrf)
            for name in sets if f"{name}/ours" in by and f"{name}/rrf" in by]


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def print_report(reports: dict[str, dict[str, Any]], checks: Sequence[Check]) -> None:
    """Tables for the person who waited."""
    console = Console()
    arms = [name for name in ("extraction_prompt", "extraction_tuned") if name in reports]
    if arms:
        table = Table("figure", *(a.removeprefix("extraction_") for a in arms),
                      title="extraction, held-out windows")
        for name in EXTRACTION:
            table.add_row(name, *(_cell(reports[a]["metrics"].get(name)) for a in arms))
        console.print(table)
    if "recall" in reports:
        table = Table("set/arm", *RECALL, title="recall")
        for name, figures in reports["recall"]["by"].items():
            if name.count("/") == 1:
                table.add_row(name, *(_cell(figures.get(column)) for column in RECALL))
        console.print(table)
    table = Table("gate", "value", "limit", "verdict", title="gate")
    for check in checks:
        table.add_row(check.name, _cell(check.value),
                      f"{'≤' if check.is_ceiling else '≥'} {check.limit:g}",
                      "pass" if check.passed else "MISSED")
    console.print(table)


def evaluate(gate: Gate, reports_dir: Path, encoder: Path, reranker: Path) -> bool:
    """Judge, print, and write eval.json into both artifacts; True when the gate is passed.

    Raises:
        ConfigError: There is no report at all.
    """
    names = ("extraction_prompt", "extraction_tuned", "recall")
    paths = {name: reports_dir / f"{name}.json" for name in names}
    reports = {name: read_json(path) for name, path in paths.items() if path.exists()}
    if "extraction_tuned" not in reports:
        raise ConfigError(f"{reports_dir} holds no extraction_tuned.json; run `make train`")
    checks = encoder_checks(gate.encoder, reports["extraction_tuned"],
                            reports.get("extraction_prompt"))
    if "recall" in reports:
        checks += reranker_checks(gate.reranker, reports["recall"])
    print_report(reports, checks)
    for name in names:
        if name not in reports:
            Console().print(f"{name}: skipped, its data is not here")
    verdict = [{"name": c.name, "value": c.value, "limit": c.limit, "passed": c.passed}
               for c in checks]
    for directory, keys in ((encoder, names[:2]), (reranker, names[2:])):
        figures = {k: {"metrics": reports[k]["metrics"], "by": reports[k]["by"],
                       "meta": reports[k]["meta"]} for k in keys if k in reports}
        if directory.exists():
            write_json(directory / "eval.json", {"reports": figures, "gate": verdict})
    return all(check.passed for check in checks)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gate", help="YAML of thresholds")
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, required=True)
    parser.add_argument("--reranker", type=Path, required=True)
    args = parser.parse_args()
    try:
        passed = evaluate(load_config(Gate, args.gate), args.reports, args.encoder, args.reranker)
    except BartlettError as error:
        raise SystemExit(f"error: {error}") from error
    if not passed:
        raise SystemExit("error: the gate was missed; see the table")


if __name__ == "__main__":
    main()
