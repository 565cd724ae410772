"""Attention over a shared prefix, the rows' own past and the new tokens, without copying keys.

The rows of a batch share the system prompt (and the worked examples). Its keys and values are
computed once and never expanded per row; nor are grouped key heads repeated while decoding.
transformers hands every layer's query, key and value to `attend`, so nothing depends on its caches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "bartlett_prefix"


@dataclass(slots=True)
class KeyValues:
    """Keys and values per layer, [B, Hkv, capacity, D], of which the first `length` are written."""

    capacity: int
    length: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put new tokens behind the written ones; returns all of them, as views."""
        if layer == len(self.keys):
            self._allocate(key, key.shape[0])
        end = self.length + key.shape[2]
        self.keys[layer][:, :, self.length : end] = key
        self.values[layer][:, :, self.length : end] = value
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def _allocate(self, like: Tensor, num_rows: int) -> None:
        # Zeros, since places that nobody sees still meet a weight of 0 in a product.
        shape = (num_rows, like.shape[1], self.capacity, like.shape[3])
        self.keys.append(like.new_zeros(shape))
        self.values.append(like.new_zeros(shape))

    def place(self, part: KeyValues, rows: Tensor, *, num_rows: int, end: int) -> None:
        """Copy some rows, [n], of `num_rows` in from another buffer, so that they stop at `end`."""
        for layer, key in enumerate(part.keys):
            if layer == len(self.keys):
                self._allocate(key, num_rows)
            keys, values = part.read(layer)
            self.keys[layer][rows, :, end - part.length : end] = keys
            self.values[layer][rows, :, end - part.length : end] = values
        self.length = end

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """What is written, as views."""
        return self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]

    def select(self, rows: Tensor) -> KeyValues:
        """A copy of some rows, [n]."""
        return KeyValues(
            self.capacity, self.length,
            [key.index_select(0, rows) for key in self.keys],
            [value.index_select(0, rows) for value in self.values],
        )


@dataclass(slots=True)
class Past:
    """What one forward pass attends to.

    Attributes:
        rows: Past of each row. New tokens are written there, unless `frozen`.
        visible: Which of (past of the row, new tokens) a new token sees, bool, [B, T, S + T].
        prefix: Tokens that all rows share and see, batch 1.
        frozen: Leave `rows` as it is: the new tokens are looked at once and forgotten.
    """

    rows: KeyValues
    visible: Tensor
    prefix: KeyValues | None = None
    frozen: bool = False

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows with the new tokens behind them."""
        if not self.frozen:
            return self.rows.write(layer, key, value)
        keys, values = self.rows.read(layer)
        return torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)


def register_attention() -> str:
    """Make `attend` known to transformers; returns the name to load a model with."""
    AttentionInterface.register(ATTENTION_NAME, attend)
    return ATTENTION_NAME


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    *, scaling: float, past: Past, **_: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attention of one layer, in the form that transformers calls.

    Args:
        module: The attention layer; its number picks keys and values.
        query: Queries of the new tokens, [B, H, T, D].
        key: Their keys, [B, Hkv, T, D].
        value: Their values, [B, Hkv, T, D].
        attention_mask: Not used; `past.visible` says it all.
        scaling: Factor of the scores.
        past: Handed through by the model's forward.

    Returns:
        [B, T, H, D], and no weights.
    """
    layer = module.layer_idx
    keys, values = past.extend(layer, key, value)
    shared = past.prefix.read(layer) if past.prefix is not None else None
    if query.shape[2] == 1:
        out = _attend_one(query, keys, values, past.visible, shared, scaling)
    else:
        out = _attend_many(query, keys, values, past.visible, shared, scaling)
    return out.transpose(1, 2).contiguous(), None


def _attend_one(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor,
    shared: tuple[Tensor, Tensor] | None, scaling: float,
) -> Tensor:
    """One new token per row: the query heads of a key head are the rows of one product."""
    batch, heads, _, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    scores = (grouped @ keys.transpose(2, 3)).float() * scaling  # [B, Hkv, G, S]
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    if shared is None:
        return (scores.softmax(-1).to(values.dtype) @ values).reshape(batch, heads, 1, dim)
    prefix_keys, prefix_values = shared[0][0], shared[1][0]  # [Hkv, P, D]
    flat = grouped.transpose(0, 1).reshape(kv_heads, -1, dim)  # [Hkv, B * G, D]
    head = (flat @ prefix_keys.transpose(1, 2)).float() * scaling
    head = head.reshape(kv_heads, batch, -1, prefix_keys.shape[1]).transpose(0, 1)
    weights = torch.cat([head, scores], dim=-1).softmax(-1).to(values.dtype)
    of_prefix, of_rows = weights.split([head.shape[-1], scores.shape[-1]], dim=-1)
    flat_weights = of_prefix.transpose(0, 1).reshape(kv_heads, -1, head.shape[-1])
    out = (flat_weights @ prefix_values).reshape(kv_heads, batch, -1, dim).transpose(0, 1)
    return (out + of_rows @ values).reshape(batch, heads, 1, dim)


def _attend_many(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor,
    shared: tuple[Tensor, Tensor] | None, scaling: float,
) -> Tensor:
    """Prefill and scoring: torch's fused attention over prefix and rows side by side."""
    batch, heads = query.shape[:2]
    if shared is not None:
        keys = torch.cat([shared[0].expand(batch, -1, -1, -1), keys], dim=2)
        values = torch.cat([shared[1].expand(batch, -1, -1, -1), values], dim=2)
        visible = F.pad(visible, (shared[0].shape[2], 0), value=True)
    repeats = heads // keys.shape[1]
    return F.scaled_dot_product_attention(
        query, keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1),
        attn_mask=visible[:, None], scale=scaling,
    )
