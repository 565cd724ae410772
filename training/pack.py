"""Windows to token rows, rows to packs: exactly what the encoder trainer feeds to the model.

A row is one prompt with several branches. The first branch is the emitted completion; each of
the others is one candidate to be scored. A token sees the prompt of its own row and what came
before it in its own branch, so the prompt is computed once for all of them. The same mask keeps
the rows of a pack apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memory_runtime.errors import ConfigError, SchemaError
from memory_runtime.prompt import (
    EMPTY,
    NUM_DIGITS,
    Tokenizer,
    WireLine,
    prompt_ids,
    score_line,
    wire_line,
)
from memory_runtime.schema import SCORE_NAMES, Candidate, Window

NO_SCORE = -1.0

SHARED_ROW = -1
"""Row number of the prompt prefix that all rows of a pack share."""


@dataclass(frozen=True, slots=True)
class Target:
    """One predicted token: where its logits are, what it is, how much it counts."""

    source: int
    token: int
    score: float = NO_SCORE
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids of one window with its branches.

    Attributes:
        input_ids: Prompt, then the branches, [T].
        branch: 0 for the prompt, n for branch n, [T].
        position_ids: Positions; every branch continues after the prompt, [T].
        targets: What is predicted.
        num_prompt: Tokens of the prompt.
    """

    id: str
    input_ids: list[int]
    branch: list[int]
    position_ids: list[int]
    targets: list[Target]
    num_prompt: int

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class Labelled:
    """A candidate with what is known of its scores; unknown ones are None and carry no loss."""

    candidate: Candidate
    keep: float
    known_scores: bool = True

    def values(self) -> list[float]:
        """keep and the five scores; NO_SCORE where unknown."""
        if not self.known_scores:
            return [self.keep] + [NO_SCORE] * (NUM_DIGITS - 1)
        scores = self.candidate.scores
        by_name = {
            "reuse": scores.reuse, "goal": scores.goal, "emphasis": scores.emphasis,
            "emotion": scores.emotion, "commitment": scores.commitment,
        }
        return [self.keep] + [by_name[name] for name in SCORE_NAMES]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The few token ids that rows are built from, checked once."""

    digit_ids: tuple[int, ...]
    newline: tuple[int, ...]
    empty: tuple[int, ...]
    stop: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, stop: int) -> Vocabulary:
        """Look the ids up.

        Raises:
            SchemaError: A digit is not one token of its own in this vocabulary.
        """
        digits = [_ids(tokenizer, str(n)) for n in range(10)]
        if any(len(ids) != 1 for ids in digits):
            raise SchemaError(
                f"each digit must be one token, got {digits}; "
                "this base cannot carry scores as digits, choose another"
            )
        return cls(tuple(ids[0] for ids in digits), tuple(_ids(tokenizer, "\n")),
                   tuple(_ids(tokenizer, EMPTY)), stop)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


class _RowBuilder:
    """Appends tokens and targets; keeps positions and branches in step."""

    def __init__(self, prompt: list[int]) -> None:
        self.input_ids = list(prompt)
        self.branch = [0] * len(prompt)
        self.position_ids = list(range(len(prompt)))
        self.targets: list[Target] = []
        self._num_prompt = len(prompt)
        self._current = 0
        self._last = len(prompt) - 1
        self._position = len(prompt)

    def start_branch(self) -> None:
        self._current += 1
        self._last = self._num_prompt - 1
        self._position = self._num_prompt

    def add(self, token: int, *, weight: float, score: float = NO_SCORE) -> None:
        if weight > 0:
            self.targets.append(Target(self._last, token, score, weight))
        self._last = len(self.input_ids)
        self.input_ids.append(token)
        self.branch.append(self._current)
        self.position_ids.append(self._position)
        self._position += 1


@dataclass(frozen=True, slots=True)
class RowWeights:
    """How much each kind of token counts."""

    score: float = 3.0
    decision: float = 1.0


def _add_line(
    row: _RowBuilder, tokenizer: Tokenizer, line: WireLine, values: list[float],
    vocabulary: Vocabulary, weights: RowWeights, *, text_weight: float, first_weight: float,
) -> None:
    # Sources without scores name no subject, attribute or kind either; nothing is learnt of them.
    known = None if values[-1] != NO_SCORE else len(_ids(tokenizer, line.head[: line.text_end]))
    for n, token in enumerate(_ids(tokenizer, line.head)):
        is_known = known is None or n < known
        row.add(token, weight=first_weight if n == 0 else text_weight * is_known)
    for digit, value in zip(line.digits, values, strict=True):
        weight = weights.score if value != NO_SCORE else 0.0
        row.add(vocabulary.digit_ids[int(digit)], weight=weight, score=value)
    for token in _ids(tokenizer, line.tail):
        row.add(token, weight=text_weight)


def build_row(
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    window: Window,
    gold: Sequence[Labelled],
    scored: Sequence[Labelled] = (),
    *,
    weights: RowWeights | None = None,
) -> Row:
    """One training row.

    Args:
        tokenizer: Of the base model.
        vocabulary: Its checked ids.
        window: The dialogue.
        gold: What should be emitted, in order.
        scored: Candidates that are only scored, each in a branch of its own.
        weights: Weights of score and decision tokens.
    """
    weights = weights or RowWeights()
    prompt = prompt_ids(tokenizer, window)
    row = _RowBuilder(prompt)
    row.start_branch()
    if not gold:
        for n, token in enumerate(vocabulary.empty):
            row.add(token, weight=weights.decision if n == 0 else 1.0)
    for n, item in enumerate(gold):
        if n:
            for token in vocabulary.newline:
                row.add(token, weight=weights.decision)
        _add_line(row, tokenizer, wire_line(item.candidate, window), item.values(), vocabulary,
                  weights, text_weight=1.0, first_weight=1.0 if n else weights.decision)
    row.add(vocabulary.stop, weight=weights.decision)
    for item in scored:
        row.start_branch()
        _add_line(row, tokenizer, score_line(item.candidate, window), item.values(), vocabulary,
                  weights, text_weight=0.0, first_weight=0.0)
    return Row(window.id, row.input_ids, row.branch, row.position_ids, row.targets, len(prompt))


def pack_rows(
    rows: Sequence[Row], budget: int, *, seed: int, prefix: int = 0
) -> list[list[Row]]:
    """Best-fit-decreasing packing of whole rows, in an order shuffled by the seed.

    Args:
        rows: What to pack.
        budget: Tokens of a pack.
        seed: For the order.
        prefix: Leading tokens that all rows share and that a pack holds only once.

    Raises:
        ConfigError: A row is longer than the budget.
    """
    too_long = [row.id for row in rows if len(row) > budget]
    if too_long:
        raise ConfigError(
            f"{len(too_long)} rows are longer than pack_tokens={budget} (first: {too_long[:3]}); "
            "raise optim.pack_tokens or lower data.max_row_tokens"
        )
    generator = random.Random(seed)
    shuffled = list(rows)
    generator.shuffle(shuffled)
    packs: list[list[Row]] = []
    free: list[int] = []
    for row in sorted(shuffled, key=len, reverse=True):
        size = len(row) - prefix
        fitting = [n for n, space in enumerate(free) if space >= size]
        if fitting:
            best = min(fitting, key=free.__getitem__)
            packs[best].append(row)
            free[best] -= size
        else:
            packs.append([row])
            free.append(budget - prefix - size)
    generator.shuffle(packs)
    return packs


def branch_mask(rows: Tensor, branch: Tensor) -> Tensor:
    """Who sees whom in a pack.

    Args:
        rows: Row number of each token, SHARED_ROW for the common prefix, [T].
        branch: Branch number of each token, 0 for a prompt, [T].

    Returns:
        True where query i may look at key j, [1, 1, T, T].
    """
    same_row = (rows[:, None] == rows[None, :]) | (rows[None, :] == SHARED_ROW)
    visible = (branch[None, :] == 0) | (branch[None, :] == branch[:, None])
    causal = torch.ones(len(rows), len(rows), dtype=torch.bool, device=rows.device).tril()
    return (same_row & visible & causal)[None, None]


def shared_prefix(rows: Sequence[Row]) -> int:
    """Number of leading prompt tokens that all rows have in common (the system prompt).

    The last prompt token stays out of it, since each row's first target is read there.
    """
    limit = min(row.num_prompt for row in rows) - 1
    first = rows[0].input_ids
    for n in range(limit):
        if any(row.input_ids[n] != first[n] for row in rows):
            return n
    return limit


def collate(pack: Sequence[Row], *, prefix: int = 0) -> dict[str, Tensor]:
    """Tensors of one pack: input_ids, position_ids, rows, branch [1, T]; targets [K].

    Args:
        pack: Rows.
        prefix: Leading tokens that the rows share; they are computed once, as row -1.
    """
    shift = [prefix]
    for row in pack:
        shift.append(shift[-1] + len(row) - prefix)
    targets = [(start - prefix + t.source, t.token, t.score, t.weight)
               for start, row in zip(shift, pack, strict=False) for t in row.targets]
    source, token, score, weight = zip(*targets, strict=True)

    def flat(shared: list[int], values: Iterator[list[int]]) -> Tensor:
        return torch.tensor([shared + [v for part in values for v in part[prefix:]]])

    head = pack[0]
    return {
        "input_ids": flat(head.input_ids[:prefix], (row.input_ids for row in pack)),
        "position_ids": flat(head.position_ids[:prefix], (row.position_ids for row in pack)),
        "rows": flat([SHARED_ROW] * prefix, ([n] * len(row) for n, row in enumerate(pack))),
        "branch": flat([0] * prefix, (row.branch for row in pack)),
        "source": torch.tensor(source),
        "targets": torch.tensor(token),
        "scores": torch.tensor(score, dtype=torch.float32),
        "weights": torch.tensor(weight, dtype=torch.float32),
    }
