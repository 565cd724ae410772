"""What training and serving must both know of a base on disk: its identity, head and length.

Training writes the identity into an artifact, serving compares it. No model code is loaded.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from memory_runtime.errors import ArtifactError

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"

HEAD_OF_TYPE = {
    "bert": ("classifier", "pooler"), "roberta": ("classifier",), "xlm-roberta": ("classifier",),
}
"""Modules of a reranker's head (its adapter's modules_to_save), by the base's model_type."""


def usable_positions(model_type: str, *, num_positions: int, pad_id: int) -> int:
    """Longest input in tokens; RoBERTa counts positions from behind the padding id."""
    return num_positions - pad_id - 1 if "roberta" in model_type else num_positions


def weight_files(base: Path) -> list[Path]:
    """The safetensors files of a base: one, or the shards that its index names.

    Raises:
        ArtifactError: There are none, or a shard is missing.
    """
    single, index = base / "model.safetensors", base / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ArtifactError(f"no base at {base}: model.safetensors is missing; run `make setup`")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{index} is damaged ({error!r}); fetch the base again") from error
    missing = [name for name in names if not (base / name).is_file()]
    if missing or not names:
        raise ArtifactError(f"{base} lacks {len(missing)} of {len(names)} shards: {missing[:3]}; "
                            "fetch the base again")
    return [base / name for name in names]


def file_sha256(path: Path) -> str:
    """Digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest(files: list[Path]) -> str:
    """Digest of the one file, or of the names and digests of the shards."""
    if len(files) == 1:
        return file_sha256(files[0])
    lines = [f"{path.name} {file_sha256(path)}\n" for path in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def base_sha256(base: Path) -> str:
    """Digest of a base's weights; kept beside them, keyed by size and time of change.

    Raises:
        ArtifactError: The directory holds no whole model.
    """
    files = weight_files(base)
    key = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    note = base / "weights.sha256.json"
    try:
        kept = json.loads(note.read_text(encoding="utf-8"))
        if isinstance(kept, dict) and kept.get("files") == key:
            return str(kept["sha256"])
    except (OSError, ValueError, KeyError):
        _log.debug("no usable %s, hashing the base", note)
    digest = _digest(files)
    try:
        note.write_text(json.dumps({"files": key, "sha256": digest}), encoding="utf-8")
    except OSError as error:
        _log.warning("cannot write %s (%s); the next start hashes the base again", note, error)
    return digest
