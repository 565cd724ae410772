"""The pinned base models that benchmarks measure with, and names for exactly which they were."""

from __future__ import annotations

from pathlib import Path

from data.bases import resolve
from memory_runtime.models import Embedder
from serving.artifact import base_sha256
from serving.engine.embedder import load_embedder

E5_NAME = "multilingual-e5-small"


def model_digest(directory: Path) -> str:
    """Short digest of the weights of a base directory."""
    return base_sha256(directory)[:12]


def base_e5(directory: Path | None = None) -> Path:
    """The directory of the pinned e5, fetched where it is missing.

    Args:
        directory: A copy kept elsewhere.
    """
    return directory if directory is not None else resolve(E5_NAME)


def load_base_embedder(directory: Path | None = None) -> tuple[Embedder, Path]:
    """The untuned e5 and its directory; what measures must never have been trained by us."""
    path = base_e5(directory)
    return load_embedder(path), path
