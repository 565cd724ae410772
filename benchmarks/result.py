"""What every benchmark writes: one JSON object, a table on the terminal, intervals, provenance."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from memory_runtime.errors import ConfigError

Metrics = dict[str, float | None]
"""Figures by name; None where there was nothing to count."""

_PACKAGES = ("bartlett", "numpy", "torch", "transformers", "llguidance", "scipy")


@dataclass(slots=True)
class Result:
    """What one run found, in the shape of the formats document.

    Attributes:
        metrics: Figures over everything.
        by: Figures of each group.
        items: One row an item: id, what was expected, what came out, verdict.
        meta: Where, when and with what it was made.
        extra: Further top-level entries, for example the precision-recall curve.
    """

    metrics: Metrics = field(default_factory=dict)
    by: dict[str, Metrics] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON object; figures that are not finite become null."""
        return _finite({
            "metrics": self.metrics, "by": self.by, "items": self.items, "meta": self.meta,
            **self.extra,
        })

    def write(self, path: Path) -> None:
        """Write the object whole: a run that dies leaves no half file under the name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        text = json.dumps(self.to_json(), ensure_ascii=False, indent=1, allow_nan=False)
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)


def _finite(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return round(number, 6) if math.isfinite(number) else None
    return int(value) if isinstance(value, np.integer) else value


# --- provenance ---


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _commit() -> str | None:
    """The checkout's commit, with `+` when files differ from it; None outside a checkout."""
    root = Path(__file__).parents[1]
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True,
                              text=True, check=True).stdout.strip()
        state = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True,
                               text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if state else head


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware() -> dict[str, Any]:
    """CPU, cores, memory, and the GPU where torch is loaded and sees one."""
    found: dict[str, Any] = {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)),
                             "system": platform.system(), "python": platform.python_version()}
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    found["memory_gb"] = round(pages * size / 2**30, 1)
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name(0)
    return found


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def make_meta(
    command: str, *, options: dict[str, Any], started: float, data: Sequence[Path] = (),
    artifacts: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Provenance of a run.

    Args:
        command: Module of the benchmark.
        options: Resolved options; paths inside the working directory are made relative to it.
        started: `time.perf_counter()` when the run began.
        data: Files that were read.
        artifacts: Digest of each model by role.
    """
    shown = {key: _short(value) for key, value in options.items()}
    return {
        "command": command, "options": shown, "commit": _commit(), "hardware": hardware(),
        "versions": _versions(), "artifacts": artifacts or {},
        "data": {f"{path.parent.name}/{path.name}".lstrip("/"): file_sha256(path)
                 for path in data},
        "seconds": round(time.perf_counter() - started, 2),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _short(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Path):
        inside = value.is_absolute() and value.is_relative_to(Path.cwd())
        return str(value.relative_to(Path.cwd()) if inside else value)
    if isinstance(value, (list, tuple)):
        return [_short(item) for item in value]
    return value


# --- intervals ---


def wilson(hits: int, total: int, *, z: float = 1.96) -> tuple[float, float] | None:
    """Wilson interval of a share; None when nothing was counted."""
    if total <= 0:
        return None
    share = hits / total
    middle = share + z * z / (2 * total)
    reach = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def bootstrap(
    counts: NDArray[np.float64],
    figure: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *, rounds: int = 2000, seed: int = 1,
) -> tuple[float, float] | None:
    """95% interval of a figure of summed counts, over resampled rows.

    Args:
        counts: One row of counts per unit that was drawn (window, question), [N, K].
        figure: Summed counts of each round [rounds, K] to a value each [rounds].
        rounds: Resamples.
        seed: Makes the interval repeatable.
    """
    if len(counts) < 2:
        return None
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), size=rounds)
    values = figure(weights @ counts)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


# --- terminal ---


def progress_bar() -> Progress:
    """A bar that shows how far, how long and how long still."""
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                    TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
                    console=Console(stderr=True))


def print_table(
    title: str, rows: dict[str, Metrics], *, columns: Sequence[str] | None = None
) -> None:
    """Print one line a group and one column a figure."""
    names = list(columns or dict.fromkeys(name for row in rows.values() for name in row))
    table = Table(title=title)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for label, row in rows.items():
        table.add_row(label, *(_cell(row.get(name)) for name in names))
    # A table in a log file is not folded to 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=40 + 14 * len(names))
    console.print(table)


def _cell(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 or float(value).is_integer() and abs(value) > 1 \
        else f"{value:.3f}"


def figure_of(path: Path, name: str) -> float:
    """One figure of a finished result.

    Raises:
        ConfigError: The file is no result or lacks the figure.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))["metrics"][name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} has no figure {name!r}: {error!r}; give the JSON that a "
                          "benchmark wrote") from error
    if not isinstance(value, (int, float)):
        raise ConfigError(f"{path}: {name} is {value!r}, not a number")
    return float(value)


def require_file(path: Path, what: str) -> Path:
    """The path itself.

    Raises:
        ConfigError: It is no file.
    """
    if not path.is_file():
        raise ConfigError(f"{what}: {path} is no file; give the path of one")
    return path


def json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json OUT`."""
    parser.add_argument("--json", type=Path, required=True, metavar="OUT",
                        help="where the result goes")
