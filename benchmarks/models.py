"""The pinned base models that benchmarks measure with, and names for exactly which they were."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data.bases import resolve
from memory_runtime.models import Embedder, Encoder
from memory_runtime.weights import base_sha256
from serving.artifact import open_artifact
from serving.engine.embedder import load_embedder
from serving.engine.extractor import Extractor
from serving.engine.loading import load_causal_lm
from serving.local import LocalEncoder
from serving.rollout import base_of

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


@dataclass(frozen=True, slots=True)
class TunedModels:
    """The served encoder of an artifact and the base e5, for the product as a whole.

    Attributes:
        encoder, embedder: As the CPU profile runs them.
        calibration: Of the encoder's artifact.
        digests: Which models these are.
    """

    encoder: Encoder
    embedder: Embedder
    calibration: dict[str, Any]
    digests: dict[str, str]


def load_tuned_models(
    artifact_dir: Path, *, base: Path | None = None, e5: Path | None = None
) -> TunedModels:
    """Load an encoder artifact the way it is served.

    Raises:
        ArtifactError: The artifact or a base is missing, damaged or does not fit.
    """
    base = base_of(artifact_dir, base)
    artifact = open_artifact(artifact_dir, base=base)
    extractor = Extractor(load_causal_lm(base, artifact=artifact), "tuned", artifact)
    embedder, e5 = load_base_embedder(e5)
    return TunedModels(LocalEncoder(extractor), LockedEmbedder(embedder), artifact.calibration,
                       {"encoder": artifact.digest, "embedder": model_digest(e5)})


class LockedEmbedder:
    """An embedder that several threads may call; they take turns."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._lock = threading.Lock()

    def embed(
        self, texts: Sequence[str], *, kind: Literal["query", "passage"]
    ) -> NDArray[np.float32]:
        """Unit vectors, [N, D] float32."""
        with self._lock:
            return self._embedder.embed(texts, kind=kind)
