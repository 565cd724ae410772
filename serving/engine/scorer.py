"""The reranker: a cross-encoder over (query, document) pairs, calibrated to probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from memory_runtime.errors import ArtifactError
from memory_runtime.weights import usable_positions
from serving.artifact import Artifact, apply_map
from serving.engine.loading import merge_adapter, pick_device, pick_dtype, quietly
from serving.engine.packing import plan_batches

MAX_PAIR_TOKENS = 512


@dataclass(slots=True)
class PairScorer:
    """Satisfies memory_runtime.models.Reranker. Not thread-safe: one call at a time."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    artifact: Artifact
    max_batch_tokens: int = 4096

    def score(self, query: str, documents: Sequence[str]) -> list[float]:
        """Calibrated probability that each document helps with the query, in order."""
        logits = self.logits([(query, document) for document in documents])
        mapping = self.artifact.calibration["relevance"]
        return [float(value) for value in apply_map(mapping, logits, logits=True)]

    @torch.inference_mode()
    def logits(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        """Raw logits, [N] float32, in order.

        Raises:
            FloatingPointError: The model's output is not a number.
        """
        if not pairs:
            return np.zeros(0, dtype=np.float32)
        ids = self.encode(pairs)
        out = np.zeros(len(ids), dtype=np.float32)
        for batch in plan_batches([len(row) for row in ids], max_tokens=self.max_batch_tokens):
            padded = self.tokenizer.pad(
                {"input_ids": [ids[n] for n in batch]}, return_tensors="pt"
            ).to(self.model.device)
            logits = self.model(
                input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).logits
            out[batch] = logits[:, 0].float().cpu().numpy()
        if not np.isfinite(out).all():
            raise FloatingPointError("the reranker's logits are not finite; check weights, dtype")
        return out

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Token ids `<s> query </s> </s> document </s>`; the longer side is cut at 512 tokens."""
        encoded = self.tokenizer(
            [query for query, _ in pairs], [document for _, document in pairs],
            truncation="longest_first", max_length=max_tokens(self.model.config),
            return_token_type_ids=False, return_attention_mask=False)
        return encoded["input_ids"]


def max_tokens(config: PretrainedConfig) -> int:
    """Longest pair that is scored under a base."""
    return min(MAX_PAIR_TOKENS, usable_positions(
        config.model_type, num_positions=config.max_position_embeddings,
        pad_id=config.pad_token_id))


def load_scorer(
    base: str | Path, artifact: Artifact, *, dtype: str = "auto", device: str = "auto",
    max_batch_tokens: int = 4096,
) -> PairScorer:
    """Load a base under a classification head and merge a reranker artifact into it.

    Raises:
        ArtifactError: The artifact is no reranker, or there is no base.
    """
    if artifact.kind != "reranker":
        raise ArtifactError(f"{artifact.path} is of kind {artifact.kind}, a reranker is needed")
    model, tokenizer = merged_reranker(Path(base), artifact, dtype=dtype, device=device)
    return PairScorer(model, tokenizer, artifact, max_batch_tokens)


def merged_reranker(
    base: Path, artifact: Artifact, *, dtype: str = "float32", device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The merged classifier and its tokenizer.

    Raises:
        ArtifactError: There is no base.
    """
    if not (base / "config.json").is_file():
        raise ArtifactError(f"no base at {base}: config.json is missing; run `make setup`")
    where = pick_device(device)
    with quietly():
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=1, dtype=pick_dtype(dtype, where), attn_implementation="sdpa",
            local_files_only=True)
    merge_adapter(model, artifact)
    tokenizer = AutoTokenizer.from_pretrained(artifact.tokenizer_path, local_files_only=True)
    return model.to(where).eval().requires_grad_(False), tokenizer
