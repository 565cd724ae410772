"""Does a draft say only what the evidence says? Numbers, dates, names, codes, units, negation.

A check of literals, not of meaning: `kept 64%` against `lost 64%` passes, since every literal
agrees and neither sentence is negated. Such drafts are out of scope and need an entailment model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memory_runtime.lexical import content_terms
from memory_runtime.literals import Literal, find_literals, follows
from memory_runtime.numerals import fold
from memory_runtime.schema import Memory

_NO_NEGATION = re.compile(
    # 不过 is `however` at the start of a clause only: 不过敏 is a negation.
    r"(?:^|(?<=[，。；！？,.;!?\s]))不过(?!敏)|"
    "不错|不仅|不但|不管|不论|不如|不妨|不好意思|不得不|不同|差不多|对不起|没关系|没错|没事|"
    "没问题|无论|无线|未来|未婚|特别|别人|别的|级别|区别|告别|个别|性别|分别|类别|别墅|非常|"
    "[是要有能会好行对]不[是要有能会好行对]|有没有|"
    r"\bnot only\b|\bno problem\b|\bno doubt\b|\bcan['’]?t wait\b|\bno\. ?\d", re.IGNORECASE)
_NEGATION = re.compile(
    r"不|没|未|无|别|勿|莫|禁止|\bnot\b|n['’]t\b|\bnever\b|\bno\b|\bcannot\b|\bwithout\b|\bneither\b|"
    r"\bnor\b|\bnone\b|\bnobody\b|\bnothing\b", re.IGNORECASE)
_SENTENCE = re.compile(r"[^。！？!?；;\n]+?(?:[。！？!?；;\n]+|\.(?=\s|$)|$)")
_NEGATION_TERMS = re.compile("[不没未无别]")


def negations(text: str) -> int:
    """How many negation words a text holds; 不错, 差不多, not only and the like do not count."""
    return len(_NEGATION.findall(_NO_NEGATION.sub(" ", text)))


def sentences(text: str) -> list[str]:
    """Sentences of a text in both languages."""
    return [m.group().strip() for m in _SENTENCE.finditer(text) if m.group().strip()]


@dataclass(frozen=True, slots=True)
class Conflict:
    """Something in the draft that does not follow from the evidence."""

    type: str
    raw: str


@dataclass(frozen=True, slots=True)
class Check:
    """The verdict on a draft.

    Attributes:
        accepted: Whether every literal follows and nothing is negated the other way round.
        conflicts: What does not.
    """

    accepted: bool
    conflicts: tuple[Conflict, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """A text that a draft may rest on, and the time from which its relative dates count."""

    text: str
    observed_at: str | None = None

    @classmethod
    def of(cls, memory: Memory) -> Evidence:
        """The evidence that a memory is."""
        return cls(memory.candidate.text, memory.observed_at)


def _name_stands(literal: Literal, texts: Sequence[str]) -> bool:
    """A name may be any stretch of the evidence's own words, whatever its form there."""
    wanted = re.sub(r"\s+", " ", fold(literal.raw)).casefold()
    pattern = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9])")
    return any(pattern.search(re.sub(r"\s+", " ", fold(text)).casefold()) for text in texts)


def _negation_flips(draft: str, texts: Sequence[str]) -> list[Conflict]:
    """Sentences that say nearly the same as a sentence of the evidence, but negated otherwise."""
    held = [sentence for text in texts for sentence in sentences(text)]
    conflicts = []
    for sentence in sentences(draft):
        terms = {t for t in content_terms(sentence) if not _NEGATION_TERMS.search(t)}
        best, best_share = "", 0.0
        for candidate in held:
            other = {t for t in content_terms(candidate) if not _NEGATION_TERMS.search(t)}
            share = len(terms & other) / len(terms) if len(terms) > 1 else 0.0
            if share > best_share or (share == best_share and (
                    negations(candidate) % 2 == negations(sentence) % 2)):
                best, best_share = candidate, share
        if best_share >= 0.7 and negations(best) % 2 != negations(sentence) % 2:
            conflicts.append(Conflict("negation", sentence))
    return conflicts


def check_text(draft: str, evidence: Sequence[Evidence | str]) -> Check:
    """Compare a draft with the texts it rests on.

    Args:
        draft: What is to be said.
        evidence: Texts, with their times where relative dates matter.

    Returns:
        Accepted, or every literal of the draft that does not follow.
    """
    sources = [Evidence(e) if isinstance(e, str) else e for e in evidence]
    texts = [source.text for source in sources]
    held = [literal for source in sources
            for literal in find_literals(source.text, source.observed_at)]
    # Without a time of its own, 昨天 in the draft means what 昨天 meant in the evidence.
    times = {source.observed_at for source in sources}
    drafted = find_literals(draft, times.pop() if len(times) == 1 else None)
    conflicts = [
        Conflict(literal.type, literal.raw) for literal in drafted
        if not any(follows(literal, other) for other in held)
        and not (literal.type == "name" and _name_stands(literal, texts))]
    conflicts += _negation_flips(draft, texts)
    return Check(not conflicts, tuple(conflicts))


def verify(draft: str, memories: Sequence[Memory]) -> Check:
    """Compare a draft with the memories it was made from."""
    return check_text(draft, [Evidence.of(memory) for memory in memories])
