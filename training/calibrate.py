"""Calibration: from what a model says to a probability, and the encoder's keep floor.

    python -m training.calibrate encoder ARTIFACT --rollout FILE.jsonl --windows FILE.jsonl

The rollout is what the served path wrote for windows that nothing was learnt from. Maps and files
are those of the formats document; the reranker's calibration is part of its training run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from data.bases import resolve
from data.match import Similarity, match_window
from memory_runtime.corpus import AnnotatedWindow, read_windows
from memory_runtime.errors import ArtifactError, BartlettError, SchemaError
from memory_runtime.models import Embedder
from memory_runtime.schema import Candidate
from training import run as runs
from training.embedding import BaseEmbedder

Floats = NDArray[np.float64]
Map = dict[str, Any]

IDENTITY: Map = {"kind": "identity"}
ISOTONIC_POSITIVES = 1000
"""A staircase needs many examples; under this a logistic curve is fitted."""


# --- maps ---


def logit(values: Floats) -> Floats:
    """Log-odds of expected values, clipped as the formats document says."""
    clipped = np.clip(values, 1e-4, 1 - 1e-4)
    return np.log(clipped / (1 - clipped))


def sigmoid(values: Floats) -> Floats:
    """Probabilities of log-odds, without overflow."""
    return 1.0 / (1.0 + np.exp(-np.clip(values, -700.0, 700.0)))


def apply_map(mapping: Map, values: Floats, *, logits: bool) -> Floats:
    """Probabilities of raw values under a map.

    Args:
        mapping: A MAP of calibration.json.
        values: Logits (the reranker's) or expected values in [0, 1] (the encoder's).
        logits: Which of the two.
    """
    if mapping["kind"] == "isotonic":
        return np.interp(values, mapping["x"], mapping["y"])
    if mapping["kind"] == "platt":
        z = values if logits else logit(values)
        return sigmoid(mapping["a"] * z + mapping["b"])
    return sigmoid(values) if logits else np.clip(values, 0.0, 1.0)


def fit_platt(z: Floats, labels: Floats) -> Map:
    """Logistic curve through (z, label), by Newton's method.

    Targets are smoothed as in Platt (1999), so that separable data give a finite slope.

    Raises:
        ValueError: Only one of the two labels occurs.
    """
    positives = float(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        raise ValueError(
            f"a logistic map needs both labels, got {positives:g} positives among {len(labels)}")
    targets = np.where(labels > 0, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    design = np.stack([z, np.ones_like(z)], axis=1)  # [N, 2]
    weights = np.array([0.0, np.log((positives + 1) / (negatives + 1))])

    def loss(w: Floats) -> float:
        margin = design @ w
        return float(np.sum(np.logaddexp(0, margin) - targets * margin))

    for _ in range(100):
        p = sigmoid(design @ weights)
        gradient = design.T @ (p - targets)
        hessian = (design * (p * (1 - p))[:, None]).T @ design + 1e-9 * np.eye(2)
        step = np.linalg.solve(hessian, gradient)
        scale = 1.0
        while loss(weights - scale * step) > loss(weights) and scale > 1e-6:
            scale /= 2
        weights = weights - scale * step
        if np.abs(scale * step).max() < 1e-9:
            break
    return {"kind": "platt", "a": float(weights[0]), "b": float(weights[1])}


def fit_isotonic(values: Floats, labels: Floats) -> Map:
    """Rising staircase through (value, label), as the corners of a line."""
    model = IsotonicRegression(y_min=0.0, y_max=1.0).fit(values, labels)
    return {"kind": "isotonic", "x": [float(x) for x in model.X_thresholds_],
            "y": [float(y) for y in model.y_thresholds_]}


def fit_logit_map(logits: Floats, labels: Floats) -> Map:
    """Logistic curve; a staircase where there are enough positives."""
    fit = fit_isotonic if labels.sum() > ISOTONIC_POSITIVES else fit_platt
    return fit(logits, labels)


def calibration_error(probabilities: Floats, labels: Floats, *, bins: int = 15) -> float:
    """Expected calibration error over bins of equal mass, in [0, 1]."""
    order = np.argsort(probabilities, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    return float(sum(len(part) * abs(probabilities[part].mean() - labels[part].mean())
                     for part in parts) / max(1, len(order)))


# --- the encoder: labels ---


@dataclass(frozen=True)
class Judged:
    """A window and what the encoder emitted for it, kept and dropped alike."""

    annotated: AnnotatedWindow
    candidates: tuple[Candidate, ...]
    empty_log_odds: float | None = None

    def silenced(self, bias: float) -> Judged:
        """What is left of the window when the first token is weighed with a bias."""
        silent = self.empty_log_odds is not None and self.empty_log_odds >= bias
        return Judged(self.annotated, (), self.empty_log_odds) if silent else self

    @property
    def keeps(self) -> Floats:
        """What the encoder says of each candidate."""
        return np.array([c.keep for c in self.candidates], dtype=np.float64)


def read_rollout(path: Path, windows: Sequence[AnnotatedWindow]) -> list[Judged]:
    """Join a rollout with the windows that it was made of.

    Raises:
        SchemaError: A line is no result, or a window has none.
    """
    found: dict[str, tuple[tuple[Candidate, ...], float | None]] = {}
    with open(path, encoding="utf-8") as lines:
        for n, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                items = [*row["candidates"], *row["dropped"]]
                found[row["id"]] = (tuple(Candidate.from_json(item) for item in items),
                                    row.get("empty_log_odds"))
            except (ValueError, KeyError, TypeError) as error:
                raise SchemaError(f"{path}:{n} is no rollout line: {error!r}") from error
    absent = [w.window.id for w in windows if w.window.id not in found]
    if absent:
        raise SchemaError(
            f"{path} lacks {len(absent)} of {len(windows)} windows, for example {absent[0]!r}; "
            "run serving.rollout over the same windows file")
    return [Judged(w, *found[w.window.id]) for w in windows]


@dataclass(frozen=True)
class Counts:
    """What a floor keeps and how much of it is right; precision counts optional gold as right."""

    floor: float
    kept: int
    right: int
    must_found: int
    must_total: int

    @property
    def precision(self) -> float:
        """Share of what is kept that matches gold."""
        return self.right / self.kept if self.kept else 0.0

    @property
    def recall(self) -> float:
        """Share of the gold that must be kept which is."""
        return self.must_found / self.must_total if self.must_total else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of the two."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def matched(judged: Judged, similarity: Similarity, *, floor: float = 0.0) -> tuple[
        list[int], list[int]]:
    """Positions of kept candidates that match gold, and of that gold."""
    kept = [n for n, keep in enumerate(judged.keeps) if keep >= floor]
    annotated = judged.annotated
    result = match_window(
        [judged.candidates[n] for n in kept], annotated.gold, similarity=similarity,
        window=annotated.window, language=annotated.language)
    return [kept[pair.predicted] for pair in result.pairs], [pair.gold for pair in result.pairs]


def count(windows: Sequence[Judged], similarity: Similarity, floor: float) -> Counts:
    """Matches over all windows when candidates under the floor are dropped."""
    kept = right = found = total = 0
    for judged in windows:
        predicted, gold = matched(judged, similarity, floor=floor)
        must = [item.must for item in judged.annotated.gold]
        kept += int((judged.keeps >= floor).sum())
        right += len(predicted)
        found += sum(must[g] for g in gold)
        total += sum(must)
    return Counts(floor, kept, right, found, total)


# --- the encoder: floor ---


def floors(keeps: Floats, *, most: int = 40) -> list[float]:
    """Floors worth trying: 0, and the middles between neighbouring values."""
    values = np.unique(keeps)
    middles = (values[1:] + values[:-1]) / 2
    if len(middles) > most:
        middles = middles[np.linspace(0, len(middles) - 1, most).round().astype(int)]
    return [0.0, *map(float, middles)]


BIAS_PRIOR = 2.0
"""Standard deviation of the bias before anything is seen; the model's own odds are centred."""


def fit_bias(windows: Sequence[Judged]) -> float:
    """The bias of the first token at which a window is as likely to hold something as not.

    The most likely shift of the model's log-odds under a normal prior around none. Chosen for F1
    on a few dozen windows it would follow single ones.
    """
    seen = [j for j in windows if j.empty_log_odds is not None]
    odds = np.array([j.empty_log_odds for j in seen], dtype=np.float64)
    sign = np.array([1.0 if j.annotated.gold else -1.0 for j in seen])
    shifts = np.linspace(-20, 20, 4001)
    loss = np.logaddexp(0, -sign * (shifts[:, None] - odds)).sum(1) + (shifts / BIAS_PRIOR) ** 2 / 2
    return round(float(shifts[loss.argmin()]), 2)


def pick_point(windows: Sequence[Judged], similarity: Similarity) -> tuple[float, Counts]:
    """The bias of the first token, and the keep floor with the best F1 under it.

    Where the bias silences everything that the encoder wrote, there is none.
    """
    num_turns = sum(len(j.annotated.window.turns) for j in windows)
    levels = floors(np.concatenate([j.keeps for j in windows]))
    bias = fit_bias(windows)
    left = [j.silenced(bias) for j in windows]
    if not any(j.candidates for j in left):
        bias, left = max((j.empty_log_odds or 0.0 for j in windows), default=0.0) + 1.0, [*windows]
    return bias, pick_floor([count(left, similarity, floor) for floor in levels], num_turns)


def pick_floor(points: Sequence[Counts], num_turns: int) -> Counts:
    """The floor with the best F1; among equals the one with the higher precision.

    A floor that keeps nothing at all, or a candidate per turn, is a pole and is never taken while
    there is another one.

    Raises:
        ArtifactError: Every floor keeps nothing.
    """
    storing = [p for p in points if p.kept]
    if not storing:
        raise ArtifactError(
            "the encoder emitted no candidate on any calibration window, so no floor can be "
            "chosen; train it longer or look at its rollout")
    sober = [p for p in storing if p.kept < num_turns] or storing
    return max(sober, key=lambda p: (p.f1, p.precision, -p.floor))


def calibrate_encoder(
    artifact: Path, rollout: Path, windows: Path, embedder: Embedder
) -> dict[str, Any]:
    """Fit the keep map and the floor, write them and seal the artifact anew.

    Score maps stay the identity: too few windows carry scores for more.

    Returns:
        Figures of the fit.

    Raises:
        ArtifactError: The artifact is none of an encoder.
        SchemaError: The rollout and the windows do not fit.
    """
    manifest = runs.read_json(artifact / "manifest.json")
    if manifest["kind"] != "encoder":
        raise ArtifactError(f"{artifact}: kind is {manifest['kind']!r}, must be 'encoder'")
    calibration = runs.read_json(artifact / "calibration.json")
    fitted_on = runs.data_hash([rollout, windows])
    judged = read_rollout(rollout, list(read_windows(windows)))
    similarity = Similarity(embedder)
    similarity.prepare(t for j in judged for t in (
        *(c.text for c in j.candidates), *(g.candidate.text for g in j.annotated.gold)))
    mapping, fit = _fit_keep(judged, similarity)
    mapped = [Judged(j.annotated, _with_keep(j, mapping), j.empty_log_odds) for j in judged]
    bias, best = pick_point(mapped, similarity)
    fit |= {"floor": best.floor, "empty_bias": bias, "precision": best.precision,
            "recall_must": best.recall, "f1": best.f1, "kept": best.kept, "windows": len(judged)}
    runs.write_json(artifact / "calibration.json", {
        **calibration, "keep": mapping, "keep_floor": best.floor, "empty_bias": bias,
        "fitted_on": fitted_on, "fit": fit})
    runs.reseal(artifact)
    return fit


def _fit_keep(windows: Sequence[Judged], similarity: Similarity) -> tuple[Map, dict[str, Any]]:
    labels = []
    for judged in windows:
        right = set(matched(judged, similarity)[0])
        labels += [float(n in right) for n in range(len(judged.candidates))]
    keeps, truth = np.concatenate([j.keeps for j in windows]), np.array(labels)
    fit: dict[str, Any] = {"candidates": len(truth), "matched": int(truth.sum())}
    if not 0 < truth.sum() < len(truth):
        runs.log(f"keep stays uncalibrated: {int(truth.sum())} of {len(truth)} candidates match "
                 "gold, and a curve needs both kinds")
        return dict(IDENTITY), fit
    mapping = fit_platt(logit(keeps), truth)
    if mapping["a"] <= 0:
        # A falling curve would turn the order of the candidates round.
        runs.log(f"keep stays uncalibrated: it does not rise with the truth (a={mapping['a']:.3f})")
        return dict(IDENTITY), fit
    fit["ece_before"] = calibration_error(keeps, truth)
    fit["ece_after"] = calibration_error(apply_map(mapping, keeps, logits=False), truth)
    return mapping, fit


def _with_keep(judged: Judged, mapping: Map) -> tuple[Candidate, ...]:
    values = apply_map(mapping, judged.keeps, logits=False)
    return tuple(Candidate.from_json({**c.to_json(), "keep": float(v)})
                 for c, v in zip(judged.candidates, values, strict=True))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.
                                     RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("encoder",))
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rollout", type=Path, required=True, help="written by serving.rollout")
    parser.add_argument("--windows", type=Path, required=True, help="the same windows, with gold")
    parser.add_argument("--embedder", default="multilingual-e5-small", help="untuned base e5")
    args = parser.parse_args()
    runs.quiet_libraries()
    try:
        fit = calibrate_encoder(args.artifact, args.rollout, args.windows,
                                BaseEmbedder(resolve(args.embedder)))
    except (BartlettError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    runs.log("score maps stay the identity: too few calibration windows carry scores")
    print(json.dumps(fit, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
