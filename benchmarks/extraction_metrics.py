"""Arithmetic of the extraction benchmark: matched windows in, figures out. Runs no model."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.result import Metrics, bootstrap, wilson
from data.match import Similarity, WindowMatch, match_window
from memory_runtime.corpus import AnnotatedWindow, Gold
from memory_runtime.literals import find_literals, same_value
from memory_runtime.models import Extraction
from memory_runtime.schema import SCORE_NAMES, Candidate

CURVE_STEPS = 21
"""Thresholds of the precision-recall curve: 0, 0.05, … 1."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One window, what came out of it and how that matched.

    Attributes:
        annotated: The window with its gold.
        extraction: What the encoder made of it.
        match: Kept candidates against the gold.
        seconds: Time the window took; None when not measured.
    """

    annotated: AnnotatedWindow
    extraction: Extraction
    match: WindowMatch
    seconds: float | None = None


def match_outcome(
    annotated: AnnotatedWindow, extraction: Extraction, *, similarity: Similarity,
    seconds: float | None = None,
) -> Outcome:
    """Match the kept candidates of a window."""
    return Outcome(annotated, extraction, _match(annotated, extraction.candidates, similarity),
                   seconds)


def _match(
    annotated: AnnotatedWindow, candidates: Sequence[Candidate], similarity: Similarity
) -> WindowMatch:
    return match_window(candidates, annotated.gold, annotated.forbidden, similarity=similarity,
                        window=annotated.window, language=annotated.language)


# --- literals ---


def _folded(text: str) -> str:
    return re.sub(r"\s+", "", unicodedata.normalize("NFKC", text).casefold())


def literal_survives(literal: str, text: str) -> bool:
    """Whether an exact string of the gold is in a text after normalisation.

    Either the characters are there (width, case and spaces apart), or the literals that code
    finds in the string all have an equal value in the text (3万元 and 30000元).
    """
    if _folded(literal) in _folded(text):
        return True
    wanted, held = find_literals(literal), find_literals(text)
    return bool(wanted) and all(any(same_value(w, h) for h in held) for w in wanted)


def literals_survive(gold: Gold, candidate: Candidate) -> bool:
    """Whether every literal of a gold memory is in the candidate."""
    return all(literal_survives(literal, candidate.text) for literal in gold.literals)


# --- figures ---


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def harmonic(a: float | None, b: float | None) -> float | None:
    """Harmonic mean; 0 when both are 0, None when one was not counted."""
    if a is None or b is None:
        return None
    return 2 * a * b / (a + b) if a + b else 0.0


def _counts(outcome: Outcome) -> list[float]:
    """Predictions, those matched, must gold, must gold matched."""
    gold = outcome.annotated.gold
    found = sum(gold[pair.gold].must for pair in outcome.match.pairs)
    return [len(outcome.extraction.candidates), len(outcome.match.pairs),
            sum(item.must for item in gold), found]


def _f1_of(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        precision, recall = sums[:, 1] / sums[:, 0], sums[:, 3] / sums[:, 2]
        both = precision + recall
        return np.where(both > 0, 2 * precision * recall / both, 0.0)


def _selection(outcomes: Sequence[Outcome]) -> Metrics:
    predicted, right, must, found = np.sum([_counts(o) for o in outcomes], axis=0)
    precision, recall = _ratio(right, predicted), _ratio(found, must)
    # Nothing written although there was something to keep: no precision, but an F1 of 0.
    f1 = harmonic(precision, recall) if predicted else (0.0 if must else None)
    return {"precision": precision, "recall_must": recall, "f1": f1}


def _content(outcomes: Sequence[Outcome]) -> Metrics:
    matched = [(o.annotated.gold[p.gold], o.extraction.candidates[p.predicted])
               for o in outcomes for p in o.match.pairs]
    with_literals = [(g, c) for g, c in matched if g.literals]
    return {
        "literal_exactness": _ratio(sum(literals_survive(g, c) for g, c in with_literals),
                                    len(with_literals)),
        "layer_accuracy": _ratio(sum(g.candidate.layer == c.layer for g, c in matched),
                                 len(matched)),
        "kind_accuracy": _ratio(sum(g.candidate.kind == c.kind for g, c in matched),
                                len(matched)),
    }


def _refusal(outcomes: Sequence[Outcome]) -> Metrics:
    empty = [len(o.extraction.candidates) for o in outcomes if not o.annotated.gold]
    hit = sum(len({f for _, f in o.match.forbidden_hits}) for o in outcomes)
    return {
        "false_stores_per_empty": _ratio(sum(empty), len(empty)),
        "empty_violated": _ratio(sum(n > 0 for n in empty), len(empty)),
        "forbidden_hits": _ratio(hit, sum(len(o.annotated.forbidden) for o in outcomes)),
    }


def _score_rows(outcomes: Sequence[Outcome]) -> NDArray[np.float64]:
    """Gold and predicted scores of matched pairs whose gold has scores, [N, 2, 5]."""
    rows = [
        [[getattr(side.scores, name) for name in SCORE_NAMES]
         for side in (o.annotated.gold[p.gold].candidate, o.extraction.candidates[p.predicted])]
        for o in outcomes for p in o.match.pairs if o.annotated.gold[p.gold].has_scores
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 2, len(SCORE_NAMES))


def _scores(outcomes: Sequence[Outcome]) -> Metrics:
    rows = _score_rows(outcomes)
    if not len(rows):
        return {"score_mae": None, "score_mae_median": None, "reuse_spearman": None}
    gold, predicted = rows[:, 0], rows[:, 1]
    reuse = SCORE_NAMES.index("reuse")
    spearman = None
    if len(rows) > 2 and np.ptp(gold[:, reuse]) > 0 and np.ptp(predicted[:, reuse]) > 0:
        spearman = float(spearmanr(gold[:, reuse], predicted[:, reuse]).statistic)
    return {
        "score_mae": float(np.abs(gold - predicted).mean()),
        # The best that a constant can do on these very pairs.
        "score_mae_median": float(np.abs(gold - np.median(gold, axis=0)).mean()),
        "reuse_spearman": spearman,
    }


def _cost(outcomes: Sequence[Outcome]) -> Metrics:
    total = len(outcomes)
    extractions = [o.extraction for o in outcomes]
    seconds = [o.seconds for o in outcomes if o.seconds is not None]
    written = sum(e.completion_tokens for e in extractions)
    return {
        "tokens_per_window": _ratio(written + sum(e.prompt_tokens for e in extractions), total),
        "completion_tokens_per_window": _ratio(written, total),
        "seconds_per_window": _ratio(sum(seconds), len(seconds)),
        "invalid": float(sum(e.invalid for e in extractions)),
        "truncated": _ratio(sum(e.truncated for e in extractions), total),
        "windows": float(total),
    }


def figures(outcomes: Sequence[Outcome]) -> Metrics:
    """Every figure of the extraction benchmark over some windows.

    `invalid` is how many written lines are no candidate, `truncated` the share of windows cut
    off by the token limit; literal_exactness counts matched gold that has literals.
    """
    return {**_selection(outcomes), **_content(outcomes), **_refusal(outcomes),
            **_scores(outcomes), **_cost(outcomes)}


def by_group(outcomes: Sequence[Outcome]) -> dict[str, Metrics]:
    """Figures per language and per source."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        for name in {outcome.annotated.language, outcome.annotated.source}:
            groups.setdefault(name or "unnamed", []).append(outcome)
    return {name: figures(groups[name]) for name in sorted(groups, key=_zh_en_first)}


def _zh_en_first(name: str) -> tuple[int, str]:
    return (("zh", "en").index(name) if name in ("zh", "en") else 2), name


def intervals(outcomes: Sequence[Outcome]) -> dict[str, tuple[float, float] | None]:
    """95% intervals: F1 over resampled windows, shares of windows by Wilson."""
    counts = np.array([_counts(o) for o in outcomes], dtype=np.float64).reshape(-1, 4)
    empty = [len(o.extraction.candidates) for o in outcomes if not o.annotated.gold]

    def share(part: int, whole: int) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        def figure(sums: NDArray[np.float64]) -> NDArray[np.float64]:
            with np.errstate(divide="ignore", invalid="ignore"):
                return sums[:, part] / sums[:, whole]
        return figure

    return {
        "f1": bootstrap(counts, _f1_of),
        "precision": bootstrap(counts, share(1, 0)),
        "recall_must": bootstrap(counts, share(3, 2)),
        "empty_violated": wilson(sum(n > 0 for n in empty), len(empty)),
    }


# --- the curve over keep ---


def _at_floor(outcome: Outcome, floor: float, similarity: Similarity) -> Outcome:
    extraction = outcome.extraction
    kept = [c for c in [*extraction.candidates, *extraction.dropped] if c.keep >= floor]
    match = _match(outcome.annotated, kept, similarity)
    return Outcome(outcome.annotated, Extraction(kept), match)


def keep_curve(outcomes: Sequence[Outcome], *, similarity: Similarity) -> list[Metrics]:
    """Precision and recall_must if another floor of `keep` were chosen, one row a floor.

    Counts everything that was emitted, dropped candidates included.
    """
    rows: list[Metrics] = []
    for floor in np.linspace(0, 1, CURVE_STEPS):
        moved = [_at_floor(o, float(floor), similarity) for o in outcomes]
        refused = _refusal(moved)
        rows.append({"keep": round(float(floor), 4), **_selection(moved),
                     "empty_violated": refused["empty_violated"],
                     "false_stores_per_empty": refused["false_stores_per_empty"]})
    return rows


# --- items ---


def _item(outcome: Outcome, name: str, verdict: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    row = {"id": f"{outcome.annotated.window.id}/{name}", "verdict": verdict,
           "lang": outcome.annotated.language, "source": outcome.annotated.source,
           "expected": None, "got": None}
    return row | fields


def _shown(candidate: Candidate) -> dict[str, Any]:
    row = candidate.to_json()
    return {name: row[name] for name in ("text", "subject", "layer", "kind", "polarity",
                                         "evidence", "keep", "scores")}


def items_of(outcome: Outcome) -> list[dict[str, Any]]:
    """A row per match, per missed gold and per extra prediction of a window."""
    gold, kept = outcome.annotated.gold, outcome.extraction.candidates
    wrong: dict[int, list[str]] = {}
    for p, f in outcome.match.forbidden_hits:
        wrong.setdefault(p, []).append(outcome.annotated.forbidden[f].text)
    rows = [
        _item(outcome, f"p{pair.predicted}", "matched",
              expected=_shown(gold[pair.gold].candidate), got=_shown(kept[pair.predicted]),
              must=gold[pair.gold].must, similarity=pair.similarity,
              literals_survive=literals_survive(gold[pair.gold], kept[pair.predicted]),
              forbidden=wrong.get(pair.predicted, []))
        for pair in outcome.match.pairs
    ]
    rows += [_item(outcome, f"g{g}", "missed", expected=_shown(gold[g].candidate),
                   must=gold[g].must) for g in outcome.match.missed]
    rows += [_item(outcome, f"p{p}", "extra", got=_shown(kept[p]), forbidden=wrong.get(p, []))
             for p in outcome.match.extra]
    return rows
