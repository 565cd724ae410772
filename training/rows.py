"""Annotated windows to training rows: what is emitted, what is only scored, what is left out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memory_runtime.corpus import AnnotatedWindow, Gold
from memory_runtime.prompt import MAX_CANDIDATES, Tokenizer
from memory_runtime.schema import MAX_TEXT_CHARS, Candidate, Kind, Layer, Window
from memory_runtime.windows import text_overlap
from training.pack import Labelled, Row, RowWeights, Vocabulary, build_row


@dataclass(frozen=True, slots=True)
class RowReport:
    """What became of the windows."""

    used: int
    empty: int
    too_long: int
    by_source: dict[str, int]
    prompt_tokens: int
    target_tokens: int
    total_tokens: int


def _in_order(annotated: AnnotatedWindow) -> list[Gold]:
    """Gold in the order in which the dialogue brings it up."""
    position = {turn_id: n for n, turn_id in enumerate(annotated.window.turn_ids)}
    usable = [g for g in annotated.gold if len(g.candidate.text) <= MAX_TEXT_CHARS]
    return sorted(usable, key=lambda g: position[g.candidate.evidence[0]])[:MAX_CANDIDATES]


def nearest_turn(text: str, window: Window) -> str:
    """Id of the turn that shares most with a text; the turn a sloppy extractor would cite."""
    shared = [text_overlap(text, turn.text) for turn in window.turns]
    return window.turn_ids[shared.index(max(shared))]


def _labelled(gold: Gold) -> Labelled:
    return Labelled(gold.candidate, gold.candidate.keep, known_scores=gold.has_scores)


def _refused(
    annotated: AnnotatedWindow, foreign: Sequence[Candidate], generator: random.Random
) -> list[Labelled]:
    """Candidates with keep 0: the window's forbidden ones, and one of another dialogue.

    An annotator of a forbidden text names no evidence, layer or kind; they are drawn like those
    of real candidates, so that none of them gives the answer away.
    """
    shapes = [g.candidate for g in annotated.gold] or list(foreign)

    def dressed(text: str, like: Candidate | None) -> Candidate:
        evidence = (nearest_turn(text, annotated.window),)
        if like is None:
            return Candidate(text, evidence, "user", "", Layer.CORE, Kind.FACT, keep=0.0)
        return replace(like, text=text, evidence=evidence, keep=0.0)

    out = [dressed(f.text, generator.choice(shapes) if shapes else None)
           for f in annotated.forbidden]
    if foreign:
        other = generator.choice(list(foreign))
        out.append(dressed(other.text, other))
    return [Labelled(candidate, 0.0, known_scores=False) for candidate in out
            if len(candidate.text) <= MAX_TEXT_CHARS]


def scored_branches(
    annotated: AnnotatedWindow, foreign: Sequence[Candidate], limit: int, generator: random.Random
) -> list[Labelled]:
    """Candidates to score for a window: kept and refused ones in turn, at most `limit`.

    Windows without annotated scores and forbidden texts teach too little here for their tokens.
    """
    if not annotated.forbidden and not any(g.has_scores for g in annotated.gold):
        return []
    kept = [_labelled(g) for g in annotated.gold]
    refused = _refused(annotated, foreign, generator)
    generator.shuffle(kept)
    generator.shuffle(refused)
    mixed: list[Labelled] = []
    while len(mixed) < limit and (kept or refused):
        if refused:
            mixed.append(refused.pop())
        if kept and len(mixed) < limit:
            mixed.append(kept.pop())
    return mixed


def build_rows(
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    windows: Sequence[AnnotatedWindow],
    *,
    max_row_tokens: int,
    score_branches: int,
    weights: RowWeights,
    seed: int,
) -> tuple[list[Row], RowReport]:
    """Rows of all windows that fit; the rest is counted, never cut.

    Args:
        tokenizer: Of the base.
        vocabulary: Its checked ids.
        windows: What to learn from.
        max_row_tokens: Longest row.
        score_branches: Scored candidates per window.
        weights: Loss weights.
        seed: For the drawing of refused candidates.
    """
    generator = random.Random(seed)
    foreign: dict[str, list[Candidate]] = {}
    for annotated in windows:
        pool = foreign.setdefault(annotated.language, [])
        pool += [g.candidate for g in annotated.gold]
    rows, too_long, empty, by_source = [], 0, 0, {}
    for annotated in windows:
        own = {g.candidate.text for g in annotated.gold}
        others = [c for c in generator.sample(foreign[annotated.language],
                                              min(8, len(foreign[annotated.language])))
                  if c.text not in own]
        scored = scored_branches(annotated, others, score_branches, generator)
        row = build_row(tokenizer, vocabulary, annotated.window,
                        [_labelled(g) for g in _in_order(annotated)], scored, weights=weights)
        if len(row) > max_row_tokens:
            too_long += 1
            continue
        rows.append(row)
        empty += not annotated.gold
        by_source[annotated.source] = by_source.get(annotated.source, 0) + 1
    report = RowReport(
        len(rows), empty, too_long, by_source, sum(row.num_prompt for row in rows),
        sum(len(row.targets) for row in rows), sum(len(row) for row in rows))
    return rows, report
