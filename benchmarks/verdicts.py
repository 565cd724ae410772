"""What a reply to a detective question is worth: altered, correct, refused or other.

Decided by the patterns of the scenario alone; no model judges.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from memory_runtime.windows import estimate_tokens

MAX_REPLY_TOKENS = 60
MAX_QUOTES = 2
MIN_QUOTE_CHARS = 8
"""A shorter memory inside a reply may be there by chance."""

VERDICTS = ("correct", "altered", "refused", "other")

_REFUSAL = re.compile(
    r"\b(?:i|we)\s+(?:do\s?n['’o]?t|do not|cannot|can['’]?t|could(?:n['’]t| not)|have no|"
    r"have\s?n['’]t|have not|did(?:n['’]t| not))\b"
    r"|\bnot (?:sure|certain|recorded|known|mentioned|said|told)\b"
    r"|\b(?:no|without any?) (?:record|memory|memories|mention|information|note)"
    r"|\bnothing (?:is |was |has been )?(?:recorded|stored|known|said|noted|about|on)\b"
    r"|\bnever (?:mentioned|said|told|came up)|\bunknown\b"
    r"|不(?:太|大)?(?:记得|清楚|确定|知道)|记不(?:太)?[得清起]|想不起|无法(?:确定|确认|回答)"
    r"|(?:没有?|未|从未|并未|不曾)[^，。,.]{0,8}(?:提|说|讲|告诉|记录|记载|找到|查到|信息|记忆|聊)"
    r"|(?:记录|资料|信息|对话|记忆)(?:里|中)?(?:没有|查不到)|暂无",
    re.IGNORECASE,
)


def is_refusal(reply: str) -> bool:
    """Whether a reply says that it does not know; an empty one says so too."""
    return not reply.strip() or bool(_REFUSAL.search(unicodedata.normalize("NFKC", reply)))


def _folded(text: str) -> str:
    return re.sub(r"[\s\W]+", "", unicodedata.normalize("NFKC", text).casefold())


def num_quotes(reply: str, memories: Sequence[str]) -> int:
    """How many different memories stand in a reply word for word."""
    folded = _folded(reply)
    texts = {_folded(memory) for memory in memories}
    return sum(len(text) >= MIN_QUOTE_CHARS and text in folded for text in texts)


def is_dump(reply: str, memories: Sequence[str]) -> bool:
    """Whether a reply hands the reader a pile to search in place of an answer."""
    return (estimate_tokens(reply) > MAX_REPLY_TOKENS
            or num_quotes(reply, memories) > MAX_QUOTES)


def verdict_of(question: dict[str, Any], reply: str, memories: Sequence[str] = ()) -> str:
    """One of `VERDICTS`.

    A wrong value counts as altered however long the reply is; only then is a dump no answer.
    For a question about something never said, refusing is right (its `accept` patterns are ways
    to refuse) and nothing is correct.

    Args:
        question: With `accept` and `wrong` patterns and a `kind`.
        reply: What the product said.
        memories: Texts of the memories it had in hand.
    """
    if any(re.search(pattern, reply) for pattern in question.get("wrong", ())):
        return "altered"
    if is_dump(reply, memories):
        return "other"
    is_accepted = any(re.search(pattern, reply) for pattern in question.get("accept", ()))
    if question["kind"] == "never_said":
        return "refused" if is_accepted or is_refusal(reply) else "other"
    if is_accepted:
        return "correct"
    return "refused" if is_refusal(reply) else "other"
