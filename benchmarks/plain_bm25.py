"""A plain BM25, kept apart from the product's search so that the floor does not move with it."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_CJK = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]+")
_LATIN = re.compile(r"[a-z0-9]+")
_STOP = frozenset(
    "a about am an and are as at be been being but by can could did do does done don for from had "
    "has have he her him his how i if in into is it its just me my no not now of on or our s she "
    "should so such t than that the their them then there these they this to too up us very was "
    "we were what when where which who whom why will with would you your".split()
)


def tokens(text: str) -> list[str]:
    """Latin words without stop words, and character bigrams of each Chinese run."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    found = [word for word in _LATIN.findall(folded) if word not in _STOP]
    for run in _CJK.findall(folded):
        found += [run] if len(run) == 1 else [run[n : n + 2] for n in range(len(run) - 1)]
    return found


class PlainBm25:
    """BM25 with k1 = 1.5 and b = 0.75 over a fixed list of documents."""

    def __init__(self, documents: Sequence[str], *, k1: float = 1.5, b: float = 0.75) -> None:
        self._k1 = k1
        self._num = len(documents)
        self._postings: dict[str, list[tuple[int, int]]] = {}
        lengths = np.zeros(len(documents))
        for n, document in enumerate(documents):
            counts = Counter(tokens(document))
            lengths[n] = counts.total()
            for word, count in counts.items():
                self._postings.setdefault(word, []).append((n, count))
        mean = lengths.mean() if len(documents) else 1.0
        self._norm = k1 * (1 - b + b * lengths / (mean or 1.0))

    def scores(self, query: str) -> NDArray[np.float64]:
        """Score of every document, [N]; 0 where no word is shared."""
        scores = np.zeros(self._num)
        for word in tokens(query):
            postings = self._postings.get(word, [])
            rarity = math.log(1 + (self._num - len(postings) + 0.5) / (len(postings) + 0.5))
            for n, count in postings:
                scores[n] += rarity * count * (self._k1 + 1) / (count + self._norm[n])
        return scores

    def ranking(self, query: str) -> list[int]:
        """Documents that share a word with the query, best first; ties in their order."""
        scores = self.scores(query)
        return [int(n) for n in np.argsort(-scores, kind="stable") if scores[n] > 0]
