"""Greedy generation for a batch of prompts; a row leaves the batch as soon as it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from serving.engine.attention import KeyValues, Past
from serving.engine.constrained import TokenMatcher
from serving.engine.loading import LoadedLM
from serving.engine.prefill import PromptState, run_model


@dataclass(frozen=True, slots=True)
class FirstChoice:
    """The first token decides whether a window holds anything; calibration moves that threshold.

    Attributes:
        empty, some: Token ids of the two answers.
        bias: Log-odds taken off `empty`; what a wrongly silent model needs.
    """

    empty: int
    some: int
    bias: float

    def weigh(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Note the odds as the model gives them and return the moved logits, [B, V]."""
        odds = (logits[:, self.empty] - logits[:, self.some]).tolist()
        for row, value in zip(rows, odds, strict=True):
            row.empty_log_odds = float(value)
        moved = logits.clone()
        moved[:, self.empty] -= self.bias
        return moved


@dataclass(slots=True)
class Row:
    """One completion in the making.

    Attributes:
        matcher: Its grammar, or None for free text.
        max_tokens: When to stop it.
        ids: Tokens so far, the stop token excluded.
        is_finished: It ended by itself: by a stop token or the end of its grammar.
        empty_log_odds: How much likelier `nothing` was than `something` as the first token.
    """

    matcher: TokenMatcher | None
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    empty_log_odds: float | None = None

    def take(self, logits: Tensor, guess: int, stop_ids: Sequence[int]) -> int | None:
        """Take the next token, or None when the row is at its end."""
        token = guess if self.matcher is None else self.matcher.choose(logits, guess)
        if token in stop_ids:
            self.is_finished = True
            return None
        self.ids.append(token)
        if self.matcher is not None and self.matcher.is_done:
            self.is_finished = True
        return None if self.is_finished or len(self.ids) >= self.max_tokens else token


@torch.inference_mode()
def decode(
    lm: LoadedLM, state: PromptState, rows: Sequence[Row], *, choice: FirstChoice | None = None
) -> None:
    """Complete every row in place, greedily.

    Rows do not influence each other: alone or in a batch the text is the same, except that float
    products of another batch size round differently, so two tokens within about 1e-5 of each
    other (1e-2 in bfloat16) may change places.

    Args:
        lm: The model.
        state: The prefilled prompts with room for the longest completion; not to be used for
            decoding again, but its prompts stay valid for scoring.
        rows: One per prompt.
        choice: Weighs the first token of every row.

    Raises:
        FloatingPointError: The model's output is not a number.
    """
    active = list(range(len(rows)))
    past: KeyValues = state.rows
    pads = state.pads
    hidden = state.last_hidden
    while True:
        logits = lm.head(hidden)
        if choice is not None:
            logits, choice = choice.weigh(logits, rows), None
        best, guesses = logits.max(dim=-1)
        if not bool(torch.isfinite(best).all()):
            raise FloatingPointError("the model's logits are not finite; check weights and dtype")
        picked = [rows[row].take(logits[n], guess, lm.stop_ids)
                  for n, (row, guess) in enumerate(zip(active, guesses.tolist(), strict=True))]
        going = [n for n, token in enumerate(picked) if token is not None]
        if not going:
            return
        if len(going) < len(active):
            kept = torch.tensor(going, device=lm.device)
            past, pads = past.select(kept), pads.index_select(0, kept)
            active = [active[n] for n in going]
        tokens = torch.tensor([[picked[n]] for n in going], device=lm.device)
        places = torch.arange(past.length + 1, device=lm.device)
        positions = (state.num_prefix + past.length - pads)[:, None]
        visible = (places >= pads[:, None])[:, None]
        hidden = run_model(lm, tokens, positions, Past(past, visible, state.prefix))[:, -1]
