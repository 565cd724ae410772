"""YAML to frozen dataclasses, with `section.key=value` overrides; every fault is reported at once.

Only plain values, no class paths. The resolved configuration and its hash go into the run
directory, and a run resumes only under the same hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from memory_runtime.errors import ConfigError

T = TypeVar("T")


def bounded(default: Any, low: float, high: float) -> Any:  # noqa: ANN401
    """A number field with its allowed range."""
    return field(default=default, metadata={"range": (low, high)})


def one_of(default: str, *choices: str) -> Any:  # noqa: ANN401
    """A string field with its allowed values."""
    return field(default=default, metadata={"choices": choices})


@dataclass(frozen=True)
class EncoderData:
    """Where the windows come from."""

    train: str = "data/built/windows_train.jsonl"
    "Windows to learn from (formats.md)."
    calibration: str = "data/built/windows_calibration.jsonl"
    "Windows held back for calibration; never learnt from, never reported on."
    max_row_tokens: int = bounded(1600, 64, 32768)
    "Longest prompt plus completion; longer windows are left out and counted."
    max_windows: int = bounded(100000, 1, 10**9)
    "Upper bound on the number of windows, taken evenly over sources."
    score_branches: int = bounded(4, 0, 32)
    "Candidates scored per window beside the emitted ones: gold, forbidden, foreign."
    quotes: bool = False
    "Learn gold as quotations of its turns instead of retold (training/quotes.py)."


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters on every linear projection of the decoder."""

    r: int = bounded(32, 1, 64)
    "Rank."
    lora_alpha: int = bounded(32, 1, 256)
    "The update is scaled by lora_alpha / r."
    lora_dropout: float = bounded(0.0, 0.0, 0.5)
    "Dropout on the adapter input."
    first_layer: int = bounded(0, 0, 200)
    "Layers below this one stay as they are, which saves their backward pass."


@dataclass(frozen=True)
class Loss:
    """Weights of the parts of the loss."""

    score_weight: float = bounded(3.0, 0.0, 50.0)
    "Weight of a score digit beside a text token."
    squared_error: float = bounded(0.3, 0.0, 50.0)
    "Weight of the squared error of the expected score."
    decision_weight: float = bounded(1.0, 0.0, 50.0)
    "Weight of the tokens that decide between nothing, one more line, and stop."


@dataclass(frozen=True)
class Optim:
    """Optimiser and schedule."""

    lr: float = bounded(2e-4, 0.0, 1.0)
    "Peak learning rate."
    warmup: float = bounded(0.03, 0.0, 0.5)
    "Share of the steps with rising learning rate."
    schedule: str = one_of("cosine", "cosine", "linear", "constant_with_warmup")
    "Shape after warm-up."
    epochs: int = bounded(2, 1, 100)
    "Passes over the data, at most; a time budget may end sooner."
    pack_tokens: int = bounded(4096, 64, 262144)
    "Tokens of one packed forward pass."
    accumulation: int = bounded(1, 1, 512)
    "Packed passes per optimiser step."
    max_grad_norm: float = bounded(1.0, 0.0, 100.0)
    "Gradient clipping."
    activation_checkpointing: bool = False
    "Trade time for memory."


@dataclass(frozen=True)
class Budget:
    """Time, turned into a number of steps before the first one."""

    train_minutes: float = bounded(0.0, 0.0, 10**5)
    "0 = no limit. Else a short speed probe fixes the number of steps; time never stops a run."
    probe_passes: int = bounded(3, 1, 50)
    "Passes of the speed probe."
    save_steps: int = bounded(50, 1, 10**6)
    "Optimiser steps between checkpoints."


@dataclass(frozen=True)
class EncoderConfig:
    """All of one encoder run."""

    base: str
    "Carrier name, hub id or path of the base model."
    run_dir: str
    "Checkpoints, metrics and the resolved configuration."
    artifact_dir: str
    "Where the finished artifact goes."
    init: str = ""
    "Directory of an adapter to go on from, for example a released one; empty = from the base."
    dtype: str = one_of("auto", "auto", "float32", "bfloat16")
    "auto = bfloat16 where the hardware multiplies it, else float32."
    seed: int = bounded(7, 0, 2**31)
    "Seed of adapters, order and dropout."
    data: EncoderData = field(default_factory=EncoderData)
    lora: Lora = field(default_factory=Lora)
    loss: Loss = field(default_factory=Loss)
    optim: Optim = field(default_factory=Optim)
    budget: Budget = field(default_factory=Budget)


@dataclass(frozen=True)
class RerankerData:
    """Where the question-memory pairs come from."""

    train: str = "data/built/pairs_train.jsonl"
    "Groups of one query, its positives and its negatives."
    calibration: str = "data/built/pairs_calibration.jsonl"
    "Groups held back for calibration."
    negatives: int = bounded(7, 1, 63)
    "Negatives per query."
    max_pair_tokens: int = bounded(192, 16, 512)
    "Longer pairs are cut, the longer side first."
    embedder: str = "multilingual-e5-small"
    "Untuned e5, one half of the fused rank that the reranker is blended with."
    calibration_groups: int = bounded(120, 10, 10**6)
    "Groups that calibrate, at most; half of them in either language."


@dataclass(frozen=True)
class RerankerOptim:
    """Optimiser and schedule of the reranker."""

    lr: float = bounded(5e-4, 0.0, 1.0)
    "Peak learning rate of the adapters and the head."
    warmup: float = bounded(0.06, 0.0, 0.5)
    "Share of the steps with rising learning rate."
    epochs: int = bounded(2, 1, 100)
    "Passes over the data, at most."
    queries_per_step: int = bounded(8, 1, 4096)
    "Queries, each with its documents, in one optimiser step."
    max_grad_norm: float = bounded(1.0, 0.0, 100.0)
    "Gradient clipping."
    listwise_weight: float = bounded(0.5, 0.0, 10.0)
    "Weight of the softmax over a query's documents beside the pointwise loss."
    positive_weight: float = bounded(0.0, 0.0, 1000.0)
    "Pointwise weight of an answer beside a negative; 0 = the number of negatives."


@dataclass(frozen=True)
class RerankerConfig:
    """All of one reranker run."""

    base: str
    "Carrier name, hub id or path of the base model."
    run_dir: str
    "Checkpoints, metrics and the resolved configuration."
    artifact_dir: str
    "Where the finished artifact goes."
    dtype: str = one_of("auto", "auto", "float32", "bfloat16")
    "auto = bfloat16 where the hardware multiplies it, else float32."
    seed: int = bounded(7, 0, 2**31)
    "Seed of adapters, order and dropout."
    data: RerankerData = field(default_factory=RerankerData)
    lora: Lora = field(default_factory=Lora)
    optim: RerankerOptim = field(default_factory=RerankerOptim)
    budget: Budget = field(default_factory=Budget)


def _as_number(value: object, kind: object) -> object:
    """Whole numbers as float where one is wanted; so is `5e-4`, which YAML 1.1 reads as text."""
    if kind is float and type(value) in (int, str):
        try:
            return float(value)  # type: ignore[arg-type]
        except ValueError:
            return value
    return value


def _check_value(path: str, value: object, kind: object, meta: dict[str, Any]) -> list[str]:
    if not isinstance(kind, type) or type(value) is not kind:
        return [f"{path}: expected {getattr(kind, '__name__', kind)}, got {value!r}"]
    if "range" in meta:
        low, high = meta["range"]
        if not low <= value <= high:  # type: ignore[operator]
            return [f"{path}: {value!r} is out of range, allowed {low} to {high}"]
    if "choices" in meta and value not in meta["choices"]:
        return [f"{path}: {value!r} is not one of {list(meta['choices'])}"]
    return []


def _build(cls: type[T], data: object, path: str, faults: list[str]) -> T | None:
    """Make a dataclass of a mapping; appends to `faults` instead of raising."""
    if not isinstance(data, dict):
        faults.append(f"{path or 'config'}: expected a mapping, got {data!r}")
        return None
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    dot = f"{path}." if path else ""
    faults += [f"{dot}{key}: unknown key; allowed {sorted(known)}" for key in data.keys() - known]
    values: dict[str, Any] = {}
    for name, spec in known.items():
        if name not in data:
            if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
                faults.append(f"{dot}{name}: missing")
            continue
        if dataclasses.is_dataclass(hints[name]):
            values[name] = _build(hints[name], data[name], f"{dot}{name}", faults)  # type: ignore[arg-type]
            continue
        values[name] = _as_number(data[name], hints[name])
        faults += _check_value(f"{dot}{name}", values[name], hints[name], dict(spec.metadata))
    return None if faults else cls(**values)


def _override(tree: dict[str, Any], text: str, faults: list[str]) -> None:
    key, separator, value = text.partition("=")
    if not separator:
        faults.append(f"override {text!r}: write it as section.key=value")
        return
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            faults.append(f"override {text!r}: {parent} is not a section")
            return
    node[leaf] = yaml.safe_load(value)


def load_config(cls: type[T], path: str | Path, overrides: list[str] | None = None) -> T:
    """Read a configuration.

    Args:
        cls: The dataclass to fill.
        path: YAML file.
        overrides: `section.key=value`, values in YAML.

    Raises:
        ConfigError: Lists every unknown, missing, mistyped and out-of-range key.
    """
    faults: list[str] = []
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    for text in overrides or []:
        _override(tree, text, faults)
    config = _build(cls, tree, "", faults)
    if faults or config is None:
        raise ConfigError(f"{path} has {len(faults)} fault(s):\n  " + "\n  ".join(faults))
    return config


def config_hash(config: object) -> str:
    """Digest of a resolved configuration."""
    text = json.dumps(dataclasses.asdict(config), sort_keys=True)  # type: ignore[call-overload]
    return hashlib.sha256(text.encode()).hexdigest()
