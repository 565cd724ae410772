"""Gold as quotations: each memory becomes the piece of its evidence that says most of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from data.match import lexical_f1
from memory_runtime.corpus import AnnotatedWindow, Forbidden, Gold
from memory_runtime.quotes import language_of, quotations, without_speaker
from memory_runtime.schema import Turn

LITERAL_BONUS = 0.3
"""What a piece gains that holds all literals of the gold; words alone would pick a shorter one."""
LEAST_OVERLAP = 0.15
"""Under this no piece says what the gold says (a fact spread over turns); it is left out."""
LEAST_FORBIDDEN = 0.3
"""The same for a refused text, of which nothing says where it comes from."""
TOO_NEAR = 0.5
"""From this overlap on a refused quotation would contradict a kept one."""


def _nearest(
    text: str, turns: Sequence[Turn], language: str, literals: Sequence[str] = ()
) -> tuple[float, Turn | None, str]:
    """The quotation that says most of a text: its worth, its turn, the quotation."""
    def worth(quotation: str) -> float:
        piece = without_speaker(quotation)
        held = sum(item in piece for item in literals) / max(1, len(literals))
        return lexical_f1(piece, text) + LITERAL_BONUS * held

    found = [(worth(quotation), turn, quotation)
             for turn in turns for quotation in quotations(turn, language)]
    return max(found, key=lambda item: item[0], default=(0.0, None, ""))


def _quoted_gold(gold: Gold, turns: Sequence[Turn], language: str) -> tuple[float, Gold]:
    """The memory as a quotation, and how much of it the quotation says."""
    cited = [turn for turn in turns if turn.id in gold.candidate.evidence]
    worth, turn, quotation = _nearest(gold.candidate.text, cited, language, gold.literals)
    if turn is None:
        return 0.0, gold
    candidate = replace(gold.candidate, text=quotation, evidence=(turn.id,))
    literals = tuple(item for item in gold.literals if item in quotation)
    return worth, replace(gold, candidate=candidate, literals=literals)


def _refused(
    annotated: AnnotatedWindow, gold: Sequence[Gold], language: str
) -> tuple[Forbidden, ...]:
    """Quotations not to keep: what forbidden texts come from, and turns that no gold cites.

    A refused text in another style than the kept ones would be told by its style.
    """
    kept = [without_speaker(item.candidate.text) for item in gold]
    cited = {turn for item in annotated.gold for turn in item.candidate.evidence}
    found = []
    for item in annotated.forbidden:
        worth, turn, quotation = _nearest(item.text, annotated.window.turns, language)
        if turn is not None and worth >= LEAST_FORBIDDEN:
            found.append(Forbidden(quotation, item.why))
    for turn in annotated.window.turns:
        whole = max(quotations(turn, language), key=len, default="")
        if turn.id not in cited and whole:
            found.append(Forbidden(whole, "no gold rests on this turn"))
    return tuple(item for item in found if not any(
        lexical_f1(without_speaker(item.text), text) >= TOO_NEAR for text in kept))


def quoted(annotated: AnnotatedWindow) -> AnnotatedWindow:
    """The window with every gold memory quoted. What is refused is quoted too.

    A memory of which no piece of its evidence says anything is left out, unless it is the only
    one: a window that holds something must not teach silence. Two memories that come down to the
    same piece are one.
    """
    turns, language = annotated.window.turns, language_of(annotated.window)
    made = [_quoted_gold(gold, turns, language) for gold in annotated.gold]
    least = min(LEAST_OVERLAP, max((worth for worth, _ in made), default=0.0))
    by_text: dict[str, Gold] = {}
    for worth, gold in made:
        if worth >= least:
            by_text.setdefault(gold.candidate.text, gold)
    kept = tuple(by_text.values())
    return replace(annotated, gold=kept, forbidden=_refused(annotated, kept, language))
