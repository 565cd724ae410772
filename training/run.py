"""What every training run has in common: seed, run directory, resume, metrics, artifact files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from memory_runtime.errors import ConfigError
from memory_runtime.schema import SCHEMA_VERSION
from memory_runtime.weights import file_sha256
from training.config import config_hash

WEIGHTS = "adapter_model.safetensors"
"""Name that PEFT gives to the weights of an adapter."""

PACKAGES = ("torch", "transformers", "peft", "tokenizers", "numpy")


def log(message: str) -> None:
    """One line for the person who watches."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def quiet_libraries() -> None:
    """Keep the bars and the notes of libraries out of a run's log."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def write_json(path: Path, data: object) -> None:
    """Write a file so that a kill leaves either the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        json.dump(data, file, ensure_ascii=False, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def has_fast_bfloat16() -> bool:
    """Whether this machine multiplies bfloat16 in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def pick_dtype(name: str) -> torch.dtype:
    """`auto`, `float32` or `bfloat16` as a dtype; auto avoids emulated bfloat16."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def data_hash(paths: Iterable[str | Path]) -> str:
    """Digest over the content of data files, in order."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(file_sha256(Path(path)).encode())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Run:
    """An open run directory with its frozen settings."""

    directory: Path
    frozen: dict[str, Any]

    def last_checkpoint(self) -> str | None:
        """Newest whole checkpoint; half-written ones are removed.

        The trainer's state file is written last, so a checkpoint without a readable one was cut
        short.
        """
        found: list[tuple[int, Path]] = []
        for path in self.directory.glob("checkpoint-*"):
            try:
                read_json(path / "trainer_state.json")
                found.append((int(path.name.rpartition("-")[2]), path))
            except (OSError, ValueError):
                log(f"removing {path}: it was cut short")
                shutil.rmtree(path)
        return str(max(found)[1]) if found else None

    def trim_metrics(self, step: int) -> None:
        """Forget logged steps after the one that a run resumes from."""
        path = self.directory / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text().splitlines(keepends=True)
                    if line.endswith("\n") and json.loads(line).get("step", 0) <= step]
            path.write_text("".join(kept))


def open_run(
    config: Any,  # noqa: ANN401
    data_files: list[str],
    freeze: Callable[[], dict[str, Any]],
    **contracts: str | None,
) -> Run:
    """Start a run or come back to it.

    Args:
        config: The configuration dataclass, with `run_dir`.
        data_files: Files that the run learns from; another content is another run.
        freeze: Called once, before step 1, for what is measured and then fixed (step counts).
        contracts: Digests of whatever else a run depends on, like the prompt.

    Raises:
        ConfigError: The directory holds a run of another configuration, data or prompt.
    """
    directory = Path(config.run_dir)
    missing = [path for path in data_files if not Path(path).exists()]
    if missing:
        raise ConfigError(f"data files are missing: {missing}; run `make data` first")
    hashes = {"config_sha256": config_hash(config), "data_sha256": data_hash(data_files),
              **contracts}
    path = directory / "resolved.json"
    if path.exists():
        resolved = read_json(path)
        changed = [name for name, value in hashes.items() if resolved.get(name) != value]
        if changed:
            raise ConfigError(
                f"{directory} holds a run with another {' and '.join(changed)}; "
                "choose another run_dir or delete it"
            )
        return Run(directory, resolved)
    resolved = {**hashes, "config": dataclasses.asdict(config), "frozen": freeze(),
                "created": datetime.now(UTC).isoformat(timespec="seconds")}
    write_json(path, resolved)
    return Run(directory, resolved)


def write_manifest(
    directory: Path, *, kind: str, base: dict[str, str], run: Run, seed: int, steps: int,
    extra: dict[str, Any] | None = None,
) -> None:
    """Seal an artifact directory: digests of all its files and where they come from."""
    names = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    skipped = {"manifest.json", "eval.json"}
    write_json(directory / "manifest.json", {
        "schema_version": SCHEMA_VERSION, "kind": kind, "base": base,
        **(extra or {}),
        "data_sha256": run.frozen["data_sha256"], "config_sha256": run.frozen["config_sha256"],
        "files": {name: file_sha256(directory / name) for name in names if name not in skipped},
        "versions": {name: version(name) for name in PACKAGES},
        "seed": seed, "steps": steps,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    })


def reseal(directory: Path) -> None:
    """Write the digests of an artifact anew after one of its files was replaced on purpose."""
    manifest = read_json(directory / "manifest.json")
    manifest["files"] = {name: file_sha256(directory / name) for name in manifest["files"]}
    write_json(directory / "manifest.json", manifest)


def publish(part: Path, target: Path) -> None:
    """Put a finished directory in the place of an old one."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        os.replace(target, old)
    os.replace(part, target)
    shutil.rmtree(old, ignore_errors=True)
