"""Score mode: all candidates of a dialogue in one pass, each a branch behind the same prompt.

A branch sees the prompt and itself, at positions that continue after the prompt, so its score is
the one it would get alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from memory_runtime.prompt import NUM_DIGITS, WireLine
from serving.engine.attention import Past
from serving.engine.loading import LoadedLM
from serving.engine.packing import plan_batches
from serving.engine.prefill import MAX_PADDING, PromptState, run_model


@dataclass(frozen=True, slots=True)
class Branch:
    """A wire line as tokens, up to its last digit.

    Attributes:
        ids: Head and digits.
        first_digit: Index of the first digit in `ids`.
    """

    ids: tuple[int, ...]
    first_digit: int


def branch_of(tokenizer: PreTrainedTokenizerBase, line: WireLine) -> Branch:
    """Tokenise a line in the pieces that training uses; no digit depends on the tail."""
    head = tokenizer.encode(line.head, add_special_tokens=False)
    digits = [i for c in line.digits for i in tokenizer.encode(c, add_special_tokens=False)]
    return Branch((*head, *digits), len(head))


@torch.inference_mode()
def score_branches(
    lm: LoadedLM, state: PromptState, branches: Sequence[Sequence[Branch]], *, max_tokens: int
) -> list[NDArray[np.float64]]:
    """Expected values of every digit of every branch.

    Args:
        lm: The model.
        state: Prefilled prompts.
        branches: The branches of each prompt.
        max_tokens: Most tokens of one pass, padding included.

    Returns:
        Per prompt an array [num branches, 6], in [0, 1].
    """
    scores = [np.zeros((len(row), NUM_DIGITS)) for row in branches]
    lengths = [sum(len(branch.ids) for branch in row) for row in branches]
    used = [n for n, length in enumerate(lengths) if length]
    for batch in plan_batches([lengths[n] for n in used], max_tokens=max_tokens,
                              max_padding=MAX_PADDING):
        rows = [used[n] for n in batch]
        values = _score_rows(lm, state, rows, [branches[n] for n in rows])
        start = 0
        for n in rows:
            end = start + len(branches[n])
            scores[n] = values[start:end]
            start = end
    return scores


def _score_rows(
    lm: LoadedLM, state: PromptState, rows: list[int], branches: list[Sequence[Branch]]
) -> NDArray[np.float64]:
    """One pass over the branches of some rows; [total branches, 6], in order."""
    kept = torch.tensor(rows, device=lm.device)
    past = state.prompt_rows().select(kept)
    pads = state.pads.index_select(0, kept)
    ids, owner, offset = _lay_out(branches, lm.device)
    length = ids.shape[1]
    own = owner[:, :, None] == owner[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=lm.device).tril()
    places = torch.arange(past.length, device=lm.device)
    of_prompt = (places >= pads[:, None])[:, None].expand(-1, length, -1)
    visible = torch.cat([of_prompt, own & causal], dim=2)
    positions = (state.num_prefix + past.length - pads)[:, None] + offset
    hidden = run_model(lm, ids, positions, Past(past, visible, state.prefix, frozen=True))
    return _expectations(lm, hidden, branches)


def _lay_out(
    branches: list[Sequence[Branch]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Branches side by side, right-padded: ids, number of the branch (-1 is padding) and the
    place within it, [B, T] each.
    """
    longest = max(sum(len(branch.ids) for branch in row) for row in branches)
    ids, owner, offset = (torch.full((len(branches), longest), fill, dtype=torch.int64)
                          for fill in (0, -1, 0))
    for n, row in enumerate(branches):
        start = 0
        for number, branch in enumerate(row):
            end = start + len(branch.ids)
            ids[n, start:end] = torch.tensor(branch.ids)
            owner[n, start:end] = number
            offset[n, start:end] = torch.arange(len(branch.ids))
            start = end
    return ids.to(device), owner.to(device), offset.to(device)


def _expectations(
    lm: LoadedLM, hidden: Tensor, branches: list[Sequence[Branch]]
) -> NDArray[np.float64]:
    """Digit expectations from the hidden state before each digit."""
    where: list[tuple[int, int]] = []
    for n, row in enumerate(branches):
        start = 0
        for branch in row:
            before = start + branch.first_digit - 1
            where += [(n, before + digit) for digit in range(NUM_DIGITS)]
            start += len(branch.ids)
    at = torch.tensor(where, device=hidden.device)
    # Ten rows of the output projection instead of the whole vocabulary.
    weight = lm.head.weight.index_select(0, lm.digit_ids).float()
    logits = hidden[at[:, 0], at[:, 1]].float() @ weight.T
    levels = torch.arange(10, device=hidden.device) / 9
    values = (logits.softmax(-1) * levels).sum(-1)
    if not bool(torch.isfinite(values).all()):
        raise FloatingPointError("the model's scores are not finite; check weights and dtype")
    return values.clamp(0, 1).double().cpu().numpy().reshape(-1, NUM_DIGITS)
