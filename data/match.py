"""Predicted against gold memories: the one definition of a match, for training and benchmarks.

No model judges. Two statements match when they rest on the same turn, are about the same subject
with the same polarity, hold no contradicting literals and say nearly the same. The embedder is
handed in and must be the pinned *base* e5: a tuned one would grade its own homework.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from memory_runtime.corpus import Forbidden, Gold
from memory_runtime.literals import Literal, find_literals, same_value
from memory_runtime.models import Embedder
from memory_runtime.schema import Candidate, Window, detect_language

THRESHOLD = 0.50
"""Least similarity of a match."""

UNRELATED_COSINE = {"en": 0.79, "zh": 0.87}
"""Mean cosine of unrelated statements under the base e5; without it nearly everything matches."""

EMBED_BATCH = 32

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_CJK_RUN = re.compile(f"[{_CJK}]+")
# A number keeps its point and its commas; a comma inside it is taken out below.
_WORD = re.compile(rf"\d+(?:[.,:]\d+)*|[^\W\d_{_CJK}]+(?:['’][^\W\d_{_CJK}]+)*")


# --- similarity ---


@lru_cache(maxsize=65536)
def text_units(text: str) -> dict[str, int]:
    """Latin words and numbers, and bigrams of each run of Chinese characters, with counts.

    A run of one character counts as itself.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    units: Counter[str] = Counter(word.replace(",", "") for word in _WORD.findall(folded))
    for run in _CJK_RUN.findall(folded):
        units.update([run] if len(run) == 1 else [run[n : n + 2] for n in range(len(run) - 1)])
    return dict(units)


def lexical_f1(left: str, right: str) -> float:
    """F1 of the shared words (Latin) and character bigrams (Chinese) of two texts, in [0, 1]."""
    a, b = text_units(left), text_units(right)
    shared = sum(min(count, b.get(unit, 0)) for unit, count in a.items())
    total = sum(a.values()) + sum(b.values())
    return 2 * shared / total if total else 0.0


class Similarity:
    """Mean of the lexical F1 and the cosine above that of unrelated statements.

    Args:
        embedder: The pinned base e5, never a tuned one. Each text is embedded once.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._vectors: dict[str, NDArray[np.float32]] = {}

    def prepare(self, texts: Iterable[str]) -> None:
        """Embed what is not yet cached, in batches of texts of like length."""
        new = sorted({text for text in texts if text not in self._vectors}, key=len)
        for start in range(0, len(new), EMBED_BATCH):
            batch = new[start : start + EMBED_BATCH]
            vectors = self._embedder.embed(batch, kind="passage")
            self._vectors.update(zip(batch, vectors, strict=True))

    def matrix(
        self, rows: Sequence[str], columns: Sequence[str], language: str
    ) -> NDArray[np.float64]:
        """Similarities in [0, 1], [len(rows), len(columns)].

        Args:
            rows: Texts.
            columns: Texts.
            language: `zh` or `en`; says which cosine counts as unrelated.
        """
        if not rows or not columns:
            return np.zeros((len(rows), len(columns)))
        self.prepare([*rows, *columns])
        left = np.stack([self._vectors[text] for text in rows]).astype(np.float64)
        right = np.stack([self._vectors[text] for text in columns]).astype(np.float64)
        floor = UNRELATED_COSINE[language]
        cosine = np.clip((left @ right.T - floor) / (1 - floor), 0.0, 1.0)
        lexical = np.array([[lexical_f1(a, b) for b in columns] for a in rows])
        return (lexical + cosine) / 2


# --- what bars a match whatever the similarity ---

_USER_WORDS = frozenset({
    "", "user", "the user", "i", "me", "my", "myself", "we", "speaker", "用户", "我", "本人",
    "我们", "使用者", "客户本人", "用户本人",
})
_OF_USER = re.compile(r"^(?:the user['’]s|user['’]s|my|用户的?|我的?)\s*(?=\S)")


def _is_assistant(name: str) -> bool:
    return name in ("assistant", "the assistant", "agent", "ai", "bot", "助手", "助理", "客服")


def normal_subject(subject: str, window: Window | None = None) -> str:
    """The subject in one spelling: `user`, `assistant`, or a folded name.

    The name of the only human speaker of the window is the user; where two people talk, names
    stay names, since nobody could say which of them is meant.
    """
    name = unicodedata.normalize("NFKC", subject).casefold().strip().strip("。.,，")
    if name in _USER_WORDS:
        return "user"
    if _is_assistant(name):
        return "assistant"
    if window is not None:
        people = {t.speaker.casefold().strip() for t in window.turns if t.role == "user"}
        if people == {name}:
            return "user"
    return re.sub(r"^(?:the|a)\s+", "", _OF_USER.sub("", name))


def subjects_agree(left: str, right: str, window: Window | None = None) -> bool:
    """Whether two subjects name the same person or thing.

    A first name agrees with the full name (`Anna`, `Anna Berg`), a name with the name under its
    role (`小满`, `用户的女儿小满`).
    """
    a, b = normal_subject(left, window), normal_subject(right, window)
    if a == b:
        return True
    if "user" in (a, b) or "assistant" in (a, b):
        return False
    short, long = sorted((a, b), key=len)
    if _CJK_RUN.search(short):
        return len(short) >= 2 and long.endswith(short)
    return set(short.split()) <= set(long.split())


@lru_cache(maxsize=65536)
def _literals(text: str, said_at: str | None) -> tuple[Literal, ...]:
    return tuple(find_literals(text, said_at))


def literals_conflict(left: str, right: str, said_at: str | None = None) -> bool:
    """Whether both texts hold literals of one type of which none agrees.

    Two prices, two dates or two serial numbers without a common one tell of different things,
    however alike the words are.

    Args:
        left: A text.
        right: Another.
        said_at: ISO time of the dialogue, against which `next Monday` is a date like any other.
    """
    a, b = _literals(left, said_at), _literals(right, said_at)
    for kind in {item.type for item in a} & {item.type for item in b}:
        ours = [item for item in a if item.type == kind]
        theirs = [item for item in b if item.type == kind]
        if not any(same_value(x, y) for x in ours for y in theirs):
            return True
    return False


def may_match(predicted: Candidate, gold: Candidate, window: Window | None = None) -> bool:
    """Whether a prediction may stand for a gold memory, text similarity apart.

    Gold without evidence (a set without turn ids) counts as resting on the whole window.
    """
    shares_turn = not gold.evidence or bool(set(predicted.evidence) & set(gold.evidence))
    return (
        shares_turn
        and predicted.polarity == gold.polarity
        and subjects_agree(predicted.subject, gold.subject, window)
        and not literals_conflict(predicted.text, gold.text, window and window.session_time)
    )


# --- one window ---


@dataclass(frozen=True, slots=True)
class Pair:
    """A prediction that stands for a gold memory; both by position."""

    predicted: int
    gold: int
    similarity: float


@dataclass(frozen=True, slots=True)
class WindowMatch:
    """What became of the predictions and the gold of a window, by position.

    Attributes:
        pairs: Matches, in the order of the predictions.
        missed: Gold without a prediction, optional gold included.
        extra: Predictions without gold.
        forbidden_hits: (prediction, forbidden) where the wrong memory was written.
    """

    pairs: list[Pair]
    missed: list[int]
    extra: list[int]
    forbidden_hits: list[tuple[int, int]]


def _forbidden_hits(
    texts: list[str], forbidden: Sequence[Forbidden], to_gold: NDArray[np.float64], *,
    similarity: Similarity, language: str, threshold: float, said_at: str | None,
) -> list[tuple[int, int]]:
    wrong = [item.text for item in forbidden]
    near = similarity.matrix(texts, wrong, language)
    nearest_gold = to_gold.max(axis=1, initial=0.0)
    return [
        (p, f) for p in range(len(texts)) for f in range(len(wrong))
        if near[p, f] >= threshold and near[p, f] > nearest_gold[p]
        and not literals_conflict(texts[p], wrong[f], said_at)
    ]


def match_window(
    predicted: Sequence[Candidate],
    gold: Sequence[Gold],
    forbidden: Sequence[Forbidden] = (),
    *,
    similarity: Similarity,
    window: Window | None = None,
    language: str | None = None,
    threshold: float = THRESHOLD,
) -> WindowMatch:
    """Assign predictions to gold one to one, so that the sum of similarities is largest.

    Args:
        predicted: What the encoder kept.
        gold: What an annotator would keep.
        forbidden: Wrong memories; a prediction hits one when it is nearer to it than to all gold.
        similarity: Holds the pinned base embedder.
        window: Tells whose name is the user's and when `tomorrow` is; without it names stay
            names and relative dates agree with no date.
        language: `zh` or `en`; by default that of the gold (or predicted) texts.
        threshold: Least similarity of a match.
    """
    texts = [candidate.text for candidate in predicted]
    true = [item.candidate.text for item in gold]
    language = language or detect_language(" ".join(true or texts))
    near = similarity.matrix(texts, true, language)
    allowed = np.array([
        [near[p, g] >= threshold and may_match(left, right.candidate, window)
         for g, right in enumerate(gold)] for p, left in enumerate(predicted)
    ], dtype=bool).reshape(near.shape)
    rows, columns = linear_sum_assignment(np.where(allowed, near, 0.0), maximize=True)
    pairs = [Pair(int(p), int(g), float(near[p, g]))
             for p, g in zip(rows, columns, strict=True) if allowed[p, g]]
    hits = _forbidden_hits(texts, forbidden, near, similarity=similarity, language=language,
                           threshold=threshold, said_at=window and window.session_time)
    found = {pair.gold for pair in pairs}
    used = {pair.predicted for pair in pairs}
    return WindowMatch(
        pairs, [g for g in range(len(gold)) if g not in found],
        [p for p in range(len(texts)) if p not in used], hits,
    )
