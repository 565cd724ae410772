"""Runs prompts through the model once: the shared prefix for all, the rest row by row."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.engine.attention import KeyValues, Past
from serving.engine.loading import LoadedLM
from serving.engine.packing import common_prefix, plan_batches

MIN_PREFIX = 16
"""A shorter common beginning is not worth a pass of its own."""

KEPT_PREFIXES = 2

MAX_PASS_TOKENS = 4096
"""Most tokens of one pass over prompts, padding included."""

MAX_PADDING = 1.1
"""Most padded tokens per real one in such a pass."""


@dataclass(slots=True)
class PromptState:
    """Prompts after prefill.

    Attributes:
        rows: Keys and values of the rows, left-padded to one length.
        pads: Padding of each row, [B] int64.
        num_prompt: Length of the padded rows.
        prefix: Keys and values of what all rows share.
        last_hidden: Hidden state of each prompt's last token, [B, D].
    """

    rows: KeyValues
    pads: Tensor
    num_prompt: int
    prefix: KeyValues | None
    last_hidden: Tensor

    @property
    def num_prefix(self) -> int:
        """Length of the shared prefix."""
        return self.prefix.length if self.prefix is not None else 0

    def prompt_rows(self) -> KeyValues:
        """The prompts' part of the rows, without what was generated after them."""
        return KeyValues(self.num_prompt, self.num_prompt, self.rows.keys, self.rows.values)

    def visible_past(self, length: int) -> Tensor:
        """Which of the first `length` places of each row are no padding, bool [B, length]."""
        places = torch.arange(length, device=self.pads.device)
        return places >= self.pads[:, None]


class Prefiller:
    """Prefills batches of prompts and keeps the last few shared prefixes."""

    def __init__(self, lm: LoadedLM) -> None:
        self._lm = lm
        self._prefixes: OrderedDict[tuple[int, ...], KeyValues] = OrderedDict()

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Sequence[int]], *, room: int = 0,
        probe: Sequence[int] | None = None,
    ) -> PromptState:
        """Compute keys and values of prompts.

        Args:
            prompts: Token ids of each row.
            room: Places to keep free for tokens generated later.
            probe: A prompt of the same form with other content. What it has in common with the
                rows is their prefix, the same one for every batch, so that it can be kept.
        """
        shared = self._num_shared(prompts, probe)
        prefix = self._prefix(tuple(prompts[0][:shared])) if shared >= MIN_PREFIX else None
        start = prefix.length if prefix is not None else 0
        suffixes = [list(prompt[start:]) for prompt in prompts]
        lengths = [len(suffix) for suffix in suffixes]
        longest = max(lengths)
        rows = KeyValues(longest + room)
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        # Decoding wants all rows at once, but a pass over prompts of unlike length is mostly
        # padding, and a processor is busy with a few hundred tokens.
        for group in plan_batches(lengths, max_tokens=MAX_PASS_TOKENS, max_padding=MAX_PADDING):
            part, hidden = self._pass([suffixes[n] for n in group], prefix)
            at = torch.tensor(group, device=self._lm.device)
            rows.place(part, at, num_rows=len(prompts), end=longest)
            for n, state in zip(group, hidden, strict=True):
                last[n] = state
        pads = torch.tensor([longest - n for n in lengths], device=self._lm.device)
        return PromptState(rows, pads, longest, prefix, torch.stack(last))

    def _pass(self, rows: list[list[int]], prefix: KeyValues | None) -> tuple[KeyValues, Tensor]:
        """One forward pass: keys and values of the left-padded rows, last hidden states [n, D]."""
        ids, pads = self._pad(rows)
        length = ids.shape[1]
        start = prefix.length if prefix is not None else 0
        places = torch.arange(length, device=self._lm.device)
        causal = places[:, None] >= places[None]
        # A padding token sees itself: a row that sees nothing would be NaN, also where unread.
        seen = (places >= pads[:, None])[:, None] | torch.eye(
            length, dtype=torch.bool, device=self._lm.device)
        kept = KeyValues(length)
        positions = (start + places - pads[:, None]).clamp_min(0)
        hidden = run_model(self._lm, ids, positions, Past(kept, causal & seen, prefix))
        return kept, hidden[:, -1]

    @staticmethod
    def _num_shared(prompts: Sequence[Sequence[int]], probe: Sequence[int] | None) -> int:
        if probe is None and len(prompts) < 2:
            return 0
        rows = [*prompts, probe] if probe is not None else list(prompts)
        # Each row keeps a token of its own, whose hidden state starts its completion.
        return min(common_prefix(rows), min(len(prompt) for prompt in prompts) - 1)

    def _prefix(self, ids: tuple[int, ...]) -> KeyValues:
        if ids not in self._prefixes:
            kept = KeyValues(len(ids))
            places = torch.arange(len(ids), device=self._lm.device)
            causal = (places[:, None] >= places[None])[None]
            run_model(self._lm, torch.tensor([ids], device=self._lm.device), places[None],
                      Past(kept, causal))
            self._prefixes[ids] = kept
            while len(self._prefixes) > KEPT_PREFIXES:
                self._prefixes.popitem(last=False)
        self._prefixes.move_to_end(ids)
        return self._prefixes[ids]

    def _pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Left-pad to one length: ids [B, T] and padding [B]."""
        longest = max(len(row) for row in rows)
        pads = [longest - len(row) for row in rows]
        # Any id will do, nothing sees it.
        padded = [[0] * pad + row for pad, row in zip(pads, rows, strict=True)]
        device = self._lm.device
        return torch.tensor(padded, device=device), torch.tensor(pads, device=device)


def run_model(lm: LoadedLM, ids: Tensor, positions: Tensor, past: Past) -> Tensor:
    """One forward pass without the output projection.

    Args:
        lm: The model.
        ids: Token ids, [B, T].
        positions: Their positions, [B, T].
        past: What the tokens see; its rows grow by T.

    Returns:
        Hidden states, [B, T, D].
    """
    hidden = lm.model.base_model(
        input_ids=ids, position_ids=positions, use_cache=False, past=past
    ).last_hidden_state
    if not past.frozen:
        past.rows.length += ids.shape[1]
    return hidden
