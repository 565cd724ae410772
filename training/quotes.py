"""Gold in the words of the dialogue: the piece of a turn that says it, with its speaker in front.

A small base learns where a fact stands long before it learns to retell it without mixing up
amounts and names. A quotation cannot alter a number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from data.match import lexical_f1
from memory_runtime.corpus import AnnotatedWindow, Forbidden, Gold
from memory_runtime.schema import Turn, Window

MAX_CLAUSES = 4
LEAST_OVERLAP = 0.3
"""Under this no piece says what the gold says (a fact spread over turns); it stays as written."""
TOO_NEAR = 0.5
"""From this overlap on a refused quotation would contradict a kept one."""

# Not where a digit follows: 3.85 and 1,450 are one number.
_CLAUSE_END = re.compile(r"[。！？!?；;，,.…]+(?!\d)\s*")
_SPEAKERS = {"zh": {"user": "用户", "assistant": "助手"},
             "en": {"user": "User", "assistant": "Assistant"}}


def pieces(text: str) -> list[str]:
    """Contiguous runs of one to `MAX_CLAUSES` clauses, verbatim."""
    ends = [match.end() for match in _CLAUSE_END.finditer(text)]
    bounds = [0, *ends, *([] if ends and ends[-1] == len(text) else [len(text)])]
    found = [text[start:end].strip(" ，,\n")
             for n, start in enumerate(bounds) for end in bounds[n + 1 : n + 1 + MAX_CLAUSES]]
    return [piece for piece in found if piece]


def quote_of(turn: Turn, piece: str, language: str) -> str:
    """A piece with its speaker in front, as a person would note it down."""
    known = _SPEAKERS[language].get(turn.speaker, turn.speaker)
    return f"{known}：{piece}" if language == "zh" else f"{known}: {piece}"


def _without_speaker(text: str) -> str:
    return re.split(r"： ?|: ", text, maxsplit=1)[-1]


def _nearest(text: str, turns: Sequence[Turn]) -> tuple[float, Turn | None, str]:
    """The piece that says most of a text: its overlap, its turn, the piece."""
    found = [(lexical_f1(piece, text), turn, piece)
             for turn in turns for piece in pieces(turn.text)]
    return max(found, key=lambda item: item[0], default=(0.0, None, ""))


def _quoted_gold(gold: Gold, window: Window, language: str) -> Gold:
    cited = [turn for turn in window.turns if turn.id in gold.candidate.evidence]
    score, turn, piece = _nearest(gold.candidate.text, cited)
    if turn is None or score < LEAST_OVERLAP:
        return gold
    candidate = replace(gold.candidate, text=quote_of(turn, piece, language), evidence=(turn.id,))
    return replace(gold, candidate=candidate,
                   literals=tuple(item for item in gold.literals if item in piece))


def _refused(annotated: AnnotatedWindow, gold: Sequence[Gold]) -> tuple[Forbidden, ...]:
    """Quotations not to keep: what forbidden texts come from, and turns that no gold cites.

    A refused text in another style than the kept ones would be told by its style.
    """
    language = annotated.language
    kept = [_without_speaker(item.candidate.text) for item in gold]
    cited = {turn for item in annotated.gold for turn in item.candidate.evidence}
    found = []
    for item in annotated.forbidden:
        score, turn, piece = _nearest(item.text, annotated.window.turns)
        if turn is not None and score >= LEAST_OVERLAP:
            found.append(Forbidden(quote_of(turn, piece, language), item.why))
    for turn in annotated.window.turns:
        whole = max(pieces(turn.text), key=len, default="")
        if turn.id not in cited and whole:
            found.append(Forbidden(quote_of(turn, whole, language), "no gold rests on this turn"))
    return tuple(item for item in found if not any(
        lexical_f1(_without_speaker(item.text), text) >= TOO_NEAR for text in kept))


def quoted(annotated: AnnotatedWindow) -> AnnotatedWindow:
    """The window with every gold memory quoted, where a piece of its evidence says it.

    Two memories that come down to the same piece are one. What is refused is quoted too.
    """
    by_text: dict[str, Gold] = {}
    for gold in annotated.gold:
        made = _quoted_gold(gold, annotated.window, annotated.language)
        by_text.setdefault(made.candidate.text, made)
    kept = tuple(by_text.values())
    return replace(annotated, gold=kept, forbidden=_refused(annotated, kept))
