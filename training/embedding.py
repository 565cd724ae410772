"""The untuned e5 embedder as training sees it: for fused ranks and for matching with gold.

Serving has an embedder of its own; the two agree by the rule of e5 alone: prefix, mean, norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

BATCH = 32
MAX_TOKENS = 512


class BaseEmbedder:
    """Texts to unit vectors under a base directory; float32, no adapter."""

    def __init__(self, base_dir: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(base_dir, local_files_only=True)
        self._model = AutoModel.from_pretrained(
            base_dir, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True)
        self._model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    @torch.inference_mode()
    def embed(
        self, texts: Sequence[str], *, kind: Literal["query", "passage"]
    ) -> NDArray[np.float32]:
        """Unit vectors, [N, D] float32; texts of like length share a batch."""
        rows = np.zeros((len(texts), self._model.config.hidden_size), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda n: len(texts[n]))
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            batch = self._tokenizer(
                [f"{kind}: {texts[n]}" for n in chosen], truncation=True, max_length=MAX_TOKENS,
                padding=True, return_tensors="pt").to(self._model.device)
            hidden = self._model(**batch).last_hidden_state.float()  # [B, T, D]
            mask = batch["attention_mask"].unsqueeze(-1).float()
            mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            rows[chosen] = torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()
        return rows
