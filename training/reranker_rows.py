"""Question groups as training steps: which documents, in which batches, with which labels."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from memory_runtime.errors import SchemaError

CHUNK_PAIRS = 16
"""Pairs of like length that share one padded forward pass."""

NEAREST = 8
"""The first negatives of a group are the nearest; half of those drawn come from among these."""


@dataclass(frozen=True, slots=True)
class Group:
    """A query with the documents that answer it (maybe none) and those that do not."""

    id: str
    language: str
    source: str
    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]


def read_groups(path: str | Path) -> list[Group]:
    """Groups of a pairs file.

    Raises:
        SchemaError: A line is no group; names file and line.
    """
    groups = []
    with open(path, encoding="utf-8") as lines:
        for n, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                group = Group(row["id"], row["lang"], row["source"], row["query"],
                              tuple(row["positives"]), tuple(row["negatives"]))
            except (ValueError, KeyError, TypeError) as error:
                raise SchemaError(
                    f"{path}:{n} is no question group ({error!r}); it must be an object with id, "
                    "lang, source, query, positives and negatives; run `make data` again"
                ) from error
            groups.append(group)
    return groups


@dataclass(frozen=True, slots=True)
class Drawn:
    """The documents of one group that a step sees."""

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...]


def draw(group: Group, num_negatives: int, rng: random.Random) -> Drawn:
    """One or two positives and some negatives, half of them from the nearest."""
    positives = rng.sample(group.positives, min(len(group.positives), rng.choice((1, 2))))
    near, far = list(group.negatives[:NEAREST]), list(group.negatives[NEAREST:])
    wanted = min(num_negatives, len(near) + len(far))
    from_near = min(len(near), max((wanted + 1) // 2, wanted - len(far)))
    negatives = rng.sample(near, from_near) + rng.sample(far, wanted - from_near)
    return Drawn(group.query, tuple(positives), tuple(negatives))


def plan_steps(
    groups: list[Group], *, num_negatives: int, queries_per_step: int, epochs: int, seed: int
) -> list[list[Drawn]]:
    """All steps of all epochs; another order and other documents in each epoch."""
    steps = []
    for epoch in range(epochs):
        rng = random.Random(f"{seed}/{epoch}")
        order = rng.sample(groups, len(groups))
        drawn = [draw(group, num_negatives, rng) for group in order]
        steps += [drawn[n : n + queries_per_step]
                  for n in range(0, len(drawn), queries_per_step)]
    return steps


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[str, str]], max_tokens: int
) -> list[list[int]]:
    """Token ids of `<s> query </s> </s> document </s>`, the longer side cut first."""
    encoded = tokenizer([q for q, _ in pairs], [d for _, d in pairs], truncation="longest_first",
                        max_length=max_tokens, return_attention_mask=False)
    return encoded["input_ids"]


def pad(rows: list[list[int]], pad_id: int) -> dict[str, Tensor]:
    """Rows to one batch, [B, T]."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [pad_id] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row))
                                        for row in rows]),
    }


def chunks(rows: list[list[int]], pad_id: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
    """Batches of rows of like length, each with the positions of its rows."""
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
    for start in range(0, len(order), CHUNK_PAIRS):
        chosen = order[start : start + CHUNK_PAIRS]
        yield chosen, pad([rows[n] for n in chosen], pad_id)


def collate_step(
    step: list[Drawn], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> dict[str, Any]:
    """Tensors of one step.

    Returns:
        `batches`: padded batches of pairs; `order`: place of each of their rows in the step, [P];
        `relevant`: 1.0 where the document answers, [P]; `query`: number of the query, [P].
    """
    pairs, relevant, query = [], [], []
    for number, drawn in enumerate(step):
        for documents, label in ((drawn.positives, 1.0), (drawn.negatives, 0.0)):
            pairs += [(drawn.query, text) for text in documents]
            relevant += [label] * len(documents)
            query += [number] * len(documents)
    made = list(chunks(encode_pairs(tokenizer, pairs, max_tokens), tokenizer.pad_token_id))
    return {
        "batches": [batch for _, batch in made],
        "order": torch.tensor([n for chosen, _ in made for n in chosen]),
        "relevant": torch.tensor(relevant), "query": torch.tensor(query),
    }


class StepDataset(Dataset):
    """Steps in training order, made into tensors when they are asked for."""

    def __init__(
        self, steps: list[list[Drawn]], tokenizer: PreTrainedTokenizerBase, max_tokens: int
    ) -> None:
        self._steps = steps
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return collate_step(self._steps[index], self._tokenizer, self._max_tokens)
