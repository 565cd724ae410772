"""Which items go into one forward pass: a budget of padded tokens, items sorted by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def plan_batches(
    lengths: Sequence[int], *, max_tokens: int, max_rows: int | None = None,
    max_padding: float | None = None,
) -> Iterator[list[int]]:
    """Group items so that longest × rows stays within a budget; similar lengths go together.

    Args:
        lengths: Tokens of each item.
        max_tokens: Most tokens of a batch, padding included; an item above it goes alone.
        max_rows: Most items of a batch.
        max_padding: Most padded tokens per real one.

    Yields:
        Indices into `lengths`, ascending by length; every index once.
    """
    batch: list[int] = []
    used = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        padded, used = lengths[index] * (len(batch) + 1), used + lengths[index]
        is_full = max_rows is not None and len(batch) >= max_rows
        is_loose = max_padding is not None and padded > max_padding * used
        if batch and (is_full or is_loose or padded > max_tokens):
            yield batch
            batch, used = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """How many leading tokens all rows share."""
    if not rows:
        return 0
    low, high = min(rows), max(rows)
    for n, (left, right) in enumerate(zip(low, high, strict=False)):
        if left != right:
            return n
    return min(len(low), len(high))
