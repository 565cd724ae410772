"""Extracts a file of windows to a file of results, the way the service would.

    python -m serving.rollout ARTIFACT WINDOWS OUT.jsonl [--base DIR] [--mode tuned|base|prompt]

Training rounds and benchmarks read OUT. A run that was stopped goes on where it stood.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memory_runtime.corpus import read_examples, read_windows
from memory_runtime.errors import ArtifactError, BartlettError, SchemaError
from memory_runtime.models import Extraction
from memory_runtime.schema import Window
from serving.artifact import Artifact, open_artifact

if TYPE_CHECKING:
    from serving.engine.extractor import Extractor

BASES = Path("artifacts/bases")
NEVER_EMPTY = 1e4
"""Bias under which every window is emitted from, so that calibration sees what it would cost."""
DEFAULT_BASE = BASES / "Qwen2.5-Coder-0.5B-Instruct"


def result_row(
    window: Window, extraction: Extraction, *, seconds: float, by: str
) -> dict[str, Any]:
    """One line of OUT; `by` names the mode and the weights."""
    return {
        "id": window.id,
        "candidates": [candidate.to_json() for candidate in extraction.candidates],
        "dropped": [candidate.to_json() for candidate in extraction.dropped],
        "completion": extraction.raw,
        "prompt_tokens": extraction.prompt_tokens,
        "completion_tokens": extraction.completion_tokens,
        "invalid": extraction.invalid,
        "truncated": extraction.truncated,
        "empty_log_odds": extraction.empty_log_odds,
        "seconds": round(seconds, 4),
        "by": by,
    }


def done_ids(path: Path, *, by: str) -> set[str]:
    """Ids with a whole line in OUT; a line cut off by an interruption is removed.

    Raises:
        SchemaError: A line that is no result stands in the middle, or another model wrote one.
    """
    if not path.exists():
        return set()
    # A kill may cut a character in two; it stands in the last line, which is dropped below.
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    whole, rest = lines[:-1], lines[-1]
    try:
        written = {row["id"]: row["by"] for row in map(json.loads, whole)}
    except (ValueError, KeyError, TypeError) as error:
        raise SchemaError(f"{path} is no rollout ({error!r}); give another OUT") from error
    others = sorted(set(written.values()) - {by})
    if others:
        raise SchemaError(f"{path} was written by {others}, now it would be {by!r}; "
                          "remove it or give another OUT")
    if rest:
        path.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
    return set(written)


def in_chunks(windows: Sequence[Window], size: int) -> Iterator[list[Window]]:
    """Pieces small enough to show progress and lose little, big enough to fill batches."""
    # Windows of like length are decoded together, so like lengths go into one piece.
    ordered = sorted(windows, key=lambda w: sum(len(turn.text) for turn in w.turns))
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def uncalibrated(artifact: Artifact) -> Artifact:
    """The artifact as its weights speak: identity maps, nothing dropped, no window left empty."""
    identity = {"kind": "identity"}
    scores = dict.fromkeys(artifact.calibration["scores"], identity)
    return replace(artifact, calibration={
        **artifact.calibration, "keep": identity, "scores": scores, "keep_floor": 0.0,
        "empty_bias": NEVER_EMPTY})


def base_of(artifact: Path | None, base: Path | None) -> Path:
    """The base directory: as given, else the one that the artifact names."""
    if base is not None:
        return base
    if artifact is None:
        return DEFAULT_BASE
    name = Path(open_artifact(artifact).manifest["base"]["name"]).name
    return BASES / name


def author(extractor: Extractor) -> str:
    """What wrote a result: the mode, and the adapter's digest (not the calibration's)."""
    if extractor.artifact is None:
        return extractor.mode
    weights = extractor.artifact.manifest["files"][extractor.artifact.weights_path.name]
    return f"{extractor.mode}:{weights[:12]}"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m serving.rollout", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", help="encoder artifact; - for the modes that need none")
    parser.add_argument("windows", type=Path, help="JSONL, one window a line")
    parser.add_argument("out", type=Path, help="JSONL, one result a line; appended to")
    parser.add_argument("--base", type=Path, help="base directory (default: the artifact's)")
    parser.add_argument("--mode", choices=("tuned", "base", "prompt"), default="tuned")
    parser.add_argument("--few-shot", type=Path, help="windows with gold, for --mode prompt")
    parser.add_argument("--max-new-tokens", type=int, default=350)
    parser.add_argument("--batch", type=int, default=16, help="windows decoded together")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--uncalibrated", action="store_true",
                        help="tuned mode without score maps and keep floor, to fit them on")
    parser.add_argument("--unconstrained", action="store_true", help="decode without the grammar")
    parser.add_argument("--limit", type=int, help="only the first N windows")
    return parser


def run(options: argparse.Namespace) -> int:
    """Do the work; returns the number of windows extracted now.

    Raises:
        BartlettError: An input is missing or wrong.
    """
    # Heavy imports wait until the command line is known to be right.
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    windows = [item.window for item in read_windows(options.windows)][: options.limit]
    extractor = _extractor(options)
    by = author(extractor)
    done = done_ids(options.out, by=by)
    todo = [window for window in windows if window.id not in done]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with options.out.open("a", encoding="utf-8") as out, Progress(*columns) as progress:
        task = progress.add_task(f"rollout ({options.mode})", total=len(windows),
                                 completed=len(windows) - len(todo))
        for chunk in in_chunks(todo, options.batch):
            start = time.perf_counter()
            results = extractor.extract(chunk)
            seconds = (time.perf_counter() - start) / len(chunk)
            for window, extraction in zip(chunk, results, strict=True):
                row = result_row(window, extraction, seconds=seconds, by=by)
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
            out.flush()
            progress.advance(task, len(chunk))
    return len(todo)


def _extractor(options: argparse.Namespace) -> Extractor:
    from serving.engine.extractor import Extractor, Limits
    from serving.engine.loading import load_causal_lm
    path = None if options.artifact == "-" else Path(options.artifact)
    if options.mode == "tuned" and path is None:
        raise ArtifactError("mode tuned needs an artifact, got -; make one with `make train`")
    base = base_of(path, options.base)
    artifact = open_artifact(path, base=base) if options.mode == "tuned" and path else None
    if artifact is not None and options.uncalibrated:
        artifact = uncalibrated(artifact)
    lm = load_causal_lm(base, artifact=artifact, dtype=options.dtype, device=options.device)
    few_shot = read_examples(options.few_shot) if options.few_shot else []
    limits = Limits(max_new_tokens=options.max_new_tokens, max_rows=options.batch)
    return Extractor(lm, options.mode, artifact, few_shot, limits,
                     constrained=not options.unconstrained)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    options = build_parser().parse_args(arguments)
    try:
        run(options)
    except BartlettError as error:
        print(f"rollout: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
