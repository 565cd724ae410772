"""The embedder: e5 with its prefixes, mean pooling, unit length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from memory_runtime.errors import ArtifactError
from serving.engine.loading import pick_device, pick_dtype, quietly
from serving.engine.packing import plan_batches

MAX_TEXT_TOKENS = 512
PREFIXES = {"query": "query: ", "passage": "passage: "}


@dataclass(slots=True)
class TextEmbedder:
    """Satisfies memory_runtime.models.Embedder. Not thread-safe: one call at a time."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_batch_tokens: int = 8192

    @property
    def num_dims(self) -> int:
        """Length of a vector."""
        return int(self.model.config.hidden_size)

    def embed(
        self, texts: Sequence[str], *, kind: Literal["query", "passage"]
    ) -> NDArray[np.float32]:
        """Unit vectors, [N, D] float32, in order.

        Raises:
            ValueError: `kind` is neither query nor passage.
        """
        if kind not in PREFIXES:
            raise ValueError(f"kind is {kind!r}, allowed are {list(PREFIXES)}")
        return self.embed_prefixed([PREFIXES[kind] + text for text in texts])

    @torch.inference_mode()
    def embed_prefixed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """As `embed`, for texts that carry their prefix already.

        Raises:
            FloatingPointError: The model's output is not a number.
        """
        out = np.zeros((len(texts), self.num_dims), dtype=np.float32)
        ids = self.encode(texts) if texts else []
        for batch in plan_batches([len(row) for row in ids], max_tokens=self.max_batch_tokens):
            padded = self.tokenizer.pad(
                {"input_ids": [ids[n] for n in batch]}, return_tensors="pt"
            ).to(self.model.device)
            mask = padded["attention_mask"]
            hidden = self.model(
                input_ids=padded["input_ids"], attention_mask=mask).last_hidden_state.float()
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            out[batch] = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        if not np.isfinite(out).all():
            raise FloatingPointError("the embedder's vectors are not finite; check weights, dtype")
        return out

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids, cut at 512."""
        limit = min(MAX_TEXT_TOKENS, int(self.model.config.max_position_embeddings))
        encoded = self.tokenizer(
            list(texts), truncation=True, max_length=limit, return_token_type_ids=False,
            return_attention_mask=False)
        return encoded["input_ids"]


def load_embedder(
    base: str | Path, *, dtype: str = "auto", device: str = "auto", max_batch_tokens: int = 8192
) -> TextEmbedder:
    """Load a base for embedding.

    Raises:
        ArtifactError: There is no base.
    """
    base, where = Path(base), pick_device(device)
    if not (base / "config.json").is_file():
        raise ArtifactError(f"no base at {base}: config.json is missing; run `make setup`")
    with quietly():
        model = AutoModel.from_pretrained(
            base, dtype=pick_dtype(dtype, where), attn_implementation="sdpa",
            local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    return TextEmbedder(
        model.to(where).eval().requires_grad_(False), tokenizer, max_batch_tokens)
