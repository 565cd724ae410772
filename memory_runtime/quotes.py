"""Memories in the words of the dialogue: a piece of one turn with its speaker in front.

A small base learns where a fact stands long before it learns to retell it without mixing up
amounts and names. A quotation cannot alter a number. What may be quoted is defined here once, for
the gold that is learnt from and for the grammar that is decoded under.
"""

from __future__ import annotations

import re

from memory_runtime.schema import MAX_TEXT_CHARS, Turn, Window, clean_text, detect_language
from memory_runtime.windows import MAX_TURN_TOKENS, clipped_span

MAX_CLAUSES = 4
"""Longest quotation."""

MAX_QUOTATIONS = 1500
"""Most of one turn; the grammar engine follows no more than 2,000 at once."""

# Not where a digit follows: 3.85 and 1,450 are one number.
_CLAUSE_END = re.compile(r"[。！？!?；;，,.…]+(?!\d)\s*")
_EDGES = " ，,\n"
_SPEAKERS = {"zh": {"user": "用户", "assistant": "助手"},
             "en": {"user": "User", "assistant": "Assistant"}}


def pieces(text: str) -> list[str]:
    """Contiguous runs of one to `MAX_CLAUSES` clauses, verbatim.

    Of a text that is too long to be shown whole, those that are shown whole.
    """
    ends = [match.end() for match in _CLAUSE_END.finditer(text)]
    bounds = [0, *ends, *([] if ends and ends[-1] == len(text) else [len(text)])]
    hidden = clipped_span(text, MAX_TURN_TOKENS) or (len(text), len(text))
    found = [text[start:end].strip(_EDGES)
             for n, start in enumerate(bounds) for end in bounds[n + 1 : n + 1 + MAX_CLAUSES]
             if end <= hidden[0] or start >= hidden[1]]
    return [piece for piece in found if piece]


def language_of(window: Window) -> str:
    """The language that names the speakers of a window: `zh` or `en`."""
    return detect_language(" ".join(turn.text for turn in window.turns))


def quote_of(turn: Turn, piece: str, language: str) -> str:
    """A piece with its speaker in front, as a person would note it down."""
    known = _SPEAKERS[language].get(turn.speaker, turn.speaker)
    return f"{known}：{piece}" if language == "zh" else f"{known}: {piece}"


def without_speaker(text: str) -> str:
    """What a quotation says, apart from who said it."""
    return re.split(r"： ?|: ", text, maxsplit=1)[-1]


def quotations(turn: Turn, language: str) -> list[str]:
    """All quotations of a turn that fit a memory, without repeats.

    None has what no store takes (NUL, lone surrogates).
    """
    made = dict.fromkeys(quote_of(turn, piece, language) for piece in pieces(turn.text))
    usable = [text for text in made if len(text) <= MAX_TEXT_CHARS and not clean_text(text)[1]]
    return usable[:MAX_QUOTATIONS]
