"""Settings of the runtime: one frozen dataclass a section, defaults here, YAML on top.

`configs/memory.yaml` shows every key. What an artifact ships in calibration.json goes over the
defaults with `with_calibration`, and a YAML file over both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from memory_runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Weights of the scores in importance; from field experience, tunable by A/B test."""

    reuse: float = 0.4
    goal: float = 0.3
    novelty: float = 0.2
    emphasis: float = 0.1
    emotion: float = 0.05
    commitment: float = 0.05


@dataclass(frozen=True, slots=True)
class AdmitConfig:
    """What becomes a memory."""

    long_term: float = 0.45
    """Importance from which a candidate goes to long-term memory."""
    drop_below: float = 0.1
    """Importance under which a candidate is dropped at once."""
    merge_cosine: float = 0.97
    """Cosine from which differently worded texts with equal slots count as the same."""
    similar_text: float = 0.6
    """Term overlap from which two texts speak of the same thing."""
    unrelated_cosine: float = 0.8
    """Mean cosine of unrelated texts under the embedder (multilingual-e5-small: .79 en, .87 zh)."""


@dataclass(frozen=True, slots=True)
class IngestConfig:
    """How turns become candidates."""

    idle_s: float = 60.0
    """An open session is cut off after this long without a turn."""
    background: bool = True
    """Encode in a thread of its own; without, only flush() and full windows do."""
    attempts: int = 2
    """Tries of one flush when a model fails."""
    retry_s: float = 5.0
    """First pause of the background thread after a failure; doubles up to ten minutes."""


@dataclass(frozen=True, slots=True)
class RecallConfig:
    """What a search returns."""

    rrf_k: int = 60
    """Constant of reciprocal rank fusion."""
    pool: int = 20
    """How many fused results the reranker sees."""
    top_k: int = 5
    """How many memories at most."""
    token_budget: int = 400
    """Tokens of all returned memories together (estimated)."""
    blend_weight: float = 0.7
    """Share of the reranker's probability; the rest is the fused rank."""


@dataclass(frozen=True, slots=True)
class AnswerConfig:
    """How an answer is made."""

    max_tokens: int = 60
    """Longest answer (estimated)."""
    max_memories: int = 2
    """Memories quoted at most."""
    nothing_below: float = 0.3
    """Calibrated relevance of the best memory under which nothing is recorded."""
    nothing_below_overlap: float = 0.34
    """The same without a reranker: share of the question's words that the memory holds."""
    second_within: float = 0.8
    """A second memory is quoted when its relevance is at least this share of the best one's."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The SQLite file."""

    busy_timeout_ms: int = 15000
    """How long a write waits for another process."""
    embedder: str = "default"
    """Identity of the embedder; vectors of another one are not compared."""
    cached_scopes: int = 64
    """Scopes whose vectors and words are kept in memory."""


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Everything."""

    importance: ImportanceWeights = field(default_factory=ImportanceWeights)
    admit: AdmitConfig = field(default_factory=AdmitConfig)
    ingest: IngestConfig = field(default_factory=IngestConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    store: StoreConfig = field(default_factory=StoreConfig)

    def __post_init__(self) -> None:
        faults = _faults(self)
        if faults:
            raise ConfigError("; ".join(faults))

    def with_calibration(
        self, encoder: Mapping[str, Any] | None = None, reranker: Mapping[str, Any] | None = None
    ) -> MemoryConfig:
        """The operating point that the artifacts ship in calibration.json.

        Raises:
            ConfigError: A weight or threshold is no number in its range.
        """
        data: dict[str, Any] = {}
        if encoder is not None:
            data["importance"] = dict(encoder.get("importance", {}))
            data["admit"] = {key: value for key, value in encoder.get("thresholds", {}).items()}
        if reranker is not None:
            blend = reranker.get("blend", {})
            data["recall"] = {"blend_weight": blend["weight"]} if "weight" in blend else {}
            if "nothing_below" in reranker:
                data["answer"] = {"nothing_below": reranker["nothing_below"]}
        return from_mapping(data, base=self)


_UNIT_RANGE = {
    "long_term", "drop_below", "merge_cosine", "similar_text", "unrelated_cosine", "blend_weight",
    "nothing_below", "nothing_below_overlap", "second_within"}
_AT_LEAST_ONE = {"attempts", "rrf_k", "pool", "top_k", "token_budget", "max_tokens", "max_memories",
                 "cached_scopes"}


def _faults(config: MemoryConfig) -> list[str]:
    """Every value out of range, in words."""
    faults = []
    for section in fields(config):
        values = object.__getattribute__(config, section.name)
        for item in fields(values):
            value = object.__getattribute__(values, item.name)
            where = f"{section.name}.{item.name}"
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if item.name in _UNIT_RANGE and not 0 <= value <= 1:
                faults.append(f"{where} must lie in [0, 1], got {value}")
            elif item.name in _AT_LEAST_ONE and value < 1:
                faults.append(f"{where} must be at least 1, got {value}")
            elif value < 0:
                faults.append(f"{where} must not be negative, got {value}")
    return faults


def _fitting(value: object, like: object) -> object | None:
    """The value as the type of the default, or None where it does not fit."""
    if isinstance(like, bool) or isinstance(value, bool):
        return value if isinstance(like, bool) and isinstance(value, bool) else None
    if isinstance(like, float) and isinstance(value, int | float):
        return float(value)
    return value if type(value) is type(like) else None


def _section(name: str, base: Any, data: object, faults: list[str]) -> Any:  # noqa: ANN401
    if not isinstance(data, Mapping):
        faults.append(f"{name} must be a mapping, got {data!r}")
        return base
    known = {item.name: object.__getattribute__(base, item.name) for item in fields(base)}
    changes = {}
    for key, value in data.items():
        if key not in known:
            faults.append(f"unknown key {name}.{key}; allowed: {', '.join(known)}")
            continue
        fitting = _fitting(value, known[key])
        if fitting is None:
            faults.append(f"{name}.{key} must be a {type(known[key]).__name__}, got {value!r}")
        else:
            changes[key] = fitting
    return replace(base, **changes)


def from_mapping(data: Mapping[str, Any], *, base: MemoryConfig | None = None) -> MemoryConfig:
    """Settings from nested plain values, over the defaults or over `base`.

    Raises:
        ConfigError: Lists every unknown key, wrong type and value out of range at once.
    """
    base = base or MemoryConfig()
    faults: list[str] = []
    sections = {}
    names = [item.name for item in fields(base)]
    for key, value in data.items():
        if key not in names:
            faults.append(f"unknown section {key}; allowed: {', '.join(names)}")
            continue
        section = object.__getattribute__(base, key)
        assert is_dataclass(section)
        sections[key] = _section(key, section, value if value is not None else {}, faults)
    try:
        config = replace(base, **sections)
    except ConfigError as error:
        faults.append(str(error))
    if faults:
        raise ConfigError("; ".join(faults))
    return config


def load_config(path: str | Path, *, base: MemoryConfig | None = None) -> MemoryConfig:
    """Settings from a YAML file.

    Raises:
        ConfigError: The file cannot be read as YAML, or its values are wrong.
    """
    # Only readers of a config file need PyYAML; the library itself runs on numpy alone.
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(data).__name__}")
    return from_mapping(data, base=base)
