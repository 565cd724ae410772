"""Limits on figures, read from YAML and held against a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.result import Metrics
from memory_runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limit:
    """Bounds of one figure.

    Attributes:
        name: Of the figure.
        low, high: Allowed range; None leaves a side open.
        why: What a miss would mean.
    """

    name: str
    low: float | None
    high: float | None
    why: str = ""

    def fault(self, metrics: Metrics) -> str | None:
        """What is wrong; a figure that is missing is a fault, never a pass."""
        value = metrics.get(self.name)
        if value is None:
            return f"{self.name} was not measured"
        if self.low is not None and value < self.low:
            return f"{self.name} is {value:.4g}, at least {self.low:g} is wanted ({self.why})"
        if self.high is not None and value > self.high:
            return f"{self.name} is {value:.4g}, at most {self.high:g} is wanted ({self.why})"
        return None


def _bound(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ValueError(f"{key} is {value!r}, not a number")
    return None if value is None else float(value)


def read_limits(path: Path) -> list[Limit]:
    """Limits of a file: figure → {min, max, why}.

    Raises:
        ConfigError: Lists every fault of the file.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict) or not data:
        raise ConfigError(f"{path} must map names of figures to min, max and why")
    limits, faults = [], []
    for name, row in data.items():
        try:
            unknown = set(row) - {"min", "max", "why"}
            low, high = _bound(row, "min"), _bound(row, "max")
            if unknown or (low is None and high is None):
                raise ValueError(f"has keys {sorted(row)}; give min or max, and why")
            limits.append(Limit(str(name), low, high, str(row.get("why", ""))))
        except (TypeError, ValueError) as error:
            faults.append(f"{name}: {error}")
    if faults:
        raise ConfigError(f"{path}: {'; '.join(faults)}")
    return limits


def faults_of(limits: Sequence[Limit], metrics: Metrics) -> list[str]:
    """Everything that is missed."""
    return [fault for limit in limits if (fault := limit.fault(metrics)) is not None]
