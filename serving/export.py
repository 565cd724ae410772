"""Writes the merged reranker in the layout that sentence-transformers and TEI load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from memory_runtime.errors import ArtifactError
from serving.artifact import Artifact
from serving.engine.scorer import max_tokens, merged_reranker

_IDENTITY = "torch.nn.modules.linear.Identity"


def export_reranker(artifact: Artifact, base: Path, out: Path) -> Path:
    """Merge a reranker artifact into its base and save the whole model, float32.

    `CrossEncoder(out).predict` gives raw logits (its activation is set to the identity);
    calibration.json is copied beside, and its map turns them into probabilities.

    Raises:
        ArtifactError: The artifact is no reranker, or `out` is not empty.
    """
    if artifact.kind != "reranker":
        raise ArtifactError(
            f"{artifact.path} is of kind {artifact.kind}; only rerankers are exported merged")
    if out.exists() and any(out.iterdir()):
        raise ArtifactError(f"{out} is not empty; give a new directory")
    model, tokenizer = merged_reranker(base, artifact)
    model.config.sentence_transformers = {"activation_fn": _IDENTITY}
    model.save_pretrained(out)
    tokenizer.model_max_length = max_tokens(model.config)
    tokenizer.save_pretrained(out)
    shutil.copyfile(artifact.path / "calibration.json", out / "calibration.json")
    source = {"artifact": artifact.name, "digest": artifact.digest,
              "base": artifact.manifest["base"]}
    (out / "source.json").write_text(json.dumps(source, indent=1), encoding="utf-8")
    return out
