"""The serving configuration: YAML to frozen dataclasses, every fault reported at once."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from memory_runtime.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class EncoderSection:
    """The causal LM that emits candidates."""

    base: str
    """Directory of the base."""
    artifact: str | None = None
    """Directory of the artifact; needed for mode tuned."""
    mode: str = "tuned"
    """tuned, base or prompt."""
    few_shot: str | None = None
    """Windows with gold, the worked examples of mode prompt."""
    max_new_tokens: int = 350
    """Most tokens of one completion."""
    max_rows: int = 16
    """Most windows decoded together."""
    max_batch_tokens: int = 16384
    """Most places of one decoding batch."""
    max_prompt_tokens: int = 8192
    """Longest prompt."""


@dataclass(frozen=True, slots=True)
class RerankerSection:
    """The cross-encoder."""

    base: str
    """Directory of the base."""
    artifact: str
    """Directory of the artifact."""
    max_batch_tokens: int = 4096
    """Most tokens of one forward pass, padding included."""


@dataclass(frozen=True, slots=True)
class EmbedderSection:
    """The embedder."""

    base: str
    """Directory of the base."""
    max_batch_tokens: int = 8192
    """Most tokens of one forward pass, padding included."""


@dataclass(frozen=True, slots=True)
class QueueSection:
    """Waiting requests."""

    max_waiting: int = 64
    """Requests per model that may wait; more are answered with 429."""
    deadline_s: float = 110.0
    """A request that takes longer is answered with 504."""


@dataclass(frozen=True, slots=True)
class LimitSection:
    """Sizes above which a request is refused."""

    max_body_bytes: int = 4_000_000
    """Largest request body."""
    max_turns: int = 200
    """Most turns of a dialogue."""
    max_text_chars: int = 50_000
    """Longest turn, query, document or input."""
    max_documents: int = 512
    """Most documents to rank, or candidates to score."""
    max_inputs: int = 512
    """Most texts to embed."""


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """Everything the service needs. A section that is null is a model that is not served."""

    host: str = "127.0.0.1"
    """Address to listen on; one that others can reach needs api_key_file."""
    port: int = 3000
    """Port to listen on."""
    api_key_file: str | None = None
    """File whose first line is the key that clients must send."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: str = "auto"
    """auto, float32 or bfloat16."""
    encoder: EncoderSection | None = None
    """The encoder."""
    reranker: RerankerSection | None = None
    """The reranker."""
    embedder: EmbedderSection | None = None
    """The embedder."""
    queue: QueueSection = field(default_factory=QueueSection)
    """Waiting requests."""
    limits: LimitSection = field(default_factory=LimitSection)
    """Sizes of requests."""


def load_config(path: str | Path) -> ServingConfig:
    """Read a serving configuration.

    Raises:
        ConfigError: The file cannot be read, or keys are unknown, missing or out of range; the
            message lists all of them.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    faults: list[str] = []
    config = _build(ServingConfig, data if data is not None else {}, "", faults)
    if config is not None:
        faults += _range_faults(config)
    if faults or config is None:
        raise ConfigError(f"{path}: " + "; ".join(faults))
    return config


def _build(section: type, data: object, where: str, faults: list[str]) -> Any:  # noqa: ANN401
    """One section from plain values; None after a fault."""
    if not isinstance(data, dict):
        faults.append(f"{where or 'the file'} must be a mapping, got {data!r}")
        return None
    before = len(faults)
    known = {f.name: f for f in fields(section)}
    dotted = f"{where}." if where else ""
    faults += [f"{dotted}{name} is unknown, allowed are {sorted(known)}"
               for name in data if name not in known]
    hints = typing.get_type_hints(section)
    values = {}
    for name, spec in known.items():
        if name in data:
            values[name] = _value(hints[name], data[name], dotted + name, faults)
        elif spec.default is MISSING and spec.default_factory is MISSING:
            faults.append(f"{dotted}{name} is missing")
    return section(**values) if len(faults) == before else None


def _value(hint: Any, value: object, where: str, faults: list[str]) -> Any:  # noqa: ANN401
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    wanted = next(option for option in options if option is not type(None))
    if is_dataclass(wanted):
        return _build(typing.cast("type", wanted), value, where, faults)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        faults.append(f"{where} must be of type {wanted.__name__}, got {value!r}")
    return value


def _range_faults(config: ServingConfig) -> list[str]:
    faults = []
    if not 0 <= config.port <= 65535:
        faults.append(f"port is {config.port}, allowed is 0..65535")
    if config.dtype not in ("auto", "float32", "bfloat16"):
        faults.append(f"dtype is {config.dtype!r}, allowed are auto, float32, bfloat16")
    if config.host not in LOOPBACK and config.api_key_file is None:
        faults.append(f"host {config.host} can be reached by others; set api_key_file")
    encoder = config.encoder
    if encoder is not None:
        if encoder.mode not in ("tuned", "base", "prompt"):
            faults.append(f"encoder.mode is {encoder.mode!r}, allowed are tuned, base, prompt")
        if encoder.mode == "tuned" and encoder.artifact is None:
            faults.append("encoder.artifact is missing; mode tuned needs one")
    if config.encoder is config.reranker is config.embedder is None:
        faults.append("nothing to serve: set at least one of encoder, reranker, embedder")
    for name in ("encoder", "reranker", "embedder", "queue", "limits"):
        section = {"encoder": config.encoder, "reranker": config.reranker,
                   "embedder": config.embedder, "queue": config.queue,
                   "limits": config.limits}[name]
        for spec in fields(section) if section is not None else ():
            value = object.__getattribute__(section, spec.name)
            if type(value) in (int, float) and value <= 0:
                faults.append(f"{name}.{spec.name} is {value}, must be positive")
    return faults
