"""Which items go into one forward pass: a budget of padded tokens, items sorted by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def plan_batches(
    lengths: Sequence[int], *, max_tokens: int, max_rows: int | None = None
) -> Iterator[list[int]]:
    """Group items so that longest × rows stays within a budget; similar lengths go together.

    Args:
        lengths: Tokens of each item.
        max_tokens: Most tokens of a batch, padding included; an item above it goes alone.
        max_rows: Most items of a batch.

    Yields:
        Indices into `lengths`, ascending by length; every index once.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        full = max_rows is not None and len(batch) >= max_rows
        if batch and (full or lengths[index] * (len(batch) + 1) > max_tokens):
            yield batch
            batch = []
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
