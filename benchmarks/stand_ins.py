"""Plain stand-ins for the models, so that the runtime can be measured without any.

The encoder takes every user turn as it stands, the embedder hashes bigrams: both are the ones that
the cases prescribe. A result made with them says nothing about a trained model, and says so.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memory_runtime.literals import find_literals
from memory_runtime.models import Extraction
from memory_runtime.schema import (
    MAX_TEXT_CHARS,
    Candidate,
    Layer,
    Scores,
    Turn,
    Window,
    clean_text,
    detect_language,
)
from memory_runtime.windows import estimate_tokens

SEVEN = 7 / 9
NUM_DIMS = 512

_RELATION_EN = re.compile(
    r"^(?:my|our)\s+(mother|mom|mum|father|dad|sister|brother|wife|husband|partner|son|daughter|"
    r"friend|flatmate|roommate|neighbou?r|boss|manager|colleague|aunt|uncle|cousin|grandmother|"
    r"grandfather)\b", re.I)
_RELATION_ZH = re.compile(
    r"^我?的?(妈妈?|母亲|爸爸?|父亲|姐姐?|妹妹?|哥哥?|弟弟?|老婆|妻子|老公|丈夫|儿子|女儿|朋友|室友|"
    r"同事|老板|邻居|奶奶|爷爷|外婆|外公)")
_DENIED = re.compile(r"\b(?:not|never|no)\b|n['’]t\b|[不没未]", re.I)


def subject_of(text: str) -> str:
    """The user, unless the sentence opens with another person."""
    for pattern in (_RELATION_EN, _RELATION_ZH):
        match = pattern.match(text)
        if match:
            return match.group(1)
    opening = next((item for item in find_literals(text) if item.span[0] == 0), None)
    return opening.raw if opening is not None and opening.type == "name" else "user"


def verbatim_candidate(turn: Turn) -> Candidate:
    """A turn as a memory of its own, all scores seven of nine."""
    text = clean_text(turn.text)[0].strip()[:MAX_TEXT_CHARS]
    return Candidate(
        text, (turn.id,), subject=subject_of(text), layer=Layer.CORE,
        polarity="negated" if _DENIED.search(text) else "affirmed", keep=SEVEN,
        scores=Scores(SEVEN, SEVEN, SEVEN, SEVEN, SEVEN), language=detect_language(text))


@dataclass(slots=True)
class Faults:
    """Which calls of a stand-in fail: call numbers from 1, counted since they were set."""

    calls: set[int] = field(default_factory=set)
    seen: int = 0

    def count(self, part: str) -> None:
        """Count a call.

        Raises:
            RuntimeError: This one is to fail.
        """
        self.seen += 1
        if self.seen in self.calls:
            raise RuntimeError(f"the stand-in {part} was told to fail on call {self.seen}")


@dataclass(slots=True)
class VerbatimEncoder:
    """One candidate per user turn that says anything."""

    faults: Faults = field(default_factory=Faults)

    def extract(self, windows: Sequence[Window]) -> list[Extraction]:
        self.faults.count("encoder")
        return [
            Extraction(
                [verbatim_candidate(turn) for turn in window.turns
                 if turn.role == "user" and clean_text(turn.text)[0].strip()],
                prompt_tokens=sum(estimate_tokens(turn.text) for turn in window.turns))
            for window in windows
        ]


def _bigrams(text: str) -> list[str]:
    folded = re.sub(r"\W+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()
    return [folded[n : n + 2] for n in range(max(1, len(folded) - 1))]


@dataclass(slots=True)
class BigramEmbedder:
    """Hashed character bigrams as unit vectors; the same in every process."""

    faults: Faults = field(default_factory=Faults)

    def embed(
        self, texts: Sequence[str], *, kind: Literal["query", "passage"]
    ) -> NDArray[np.float32]:
        self.faults.count("embedder")
        rows = np.zeros((len(texts), NUM_DIMS), dtype=np.float32)
        for n, text in enumerate(texts):
            for bigram in _bigrams(text):
                rows[n, zlib.crc32(bigram.encode("utf-8", "replace")) % NUM_DIMS] += 1
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.maximum(norms, 1e-9)
