"""How well an encoder selects memories: predicted against gold windows, no LLM judge.

    python -m benchmarks.extraction --windows FILE.jsonl [--encoder tuned|prompt|base]
        [--artifact DIR] [--rollout FILE] --json OUT

`tuned` is the served path of an artifact, threshold included; `prompt` is the untuned base with
worked examples and JSON under grammar; `base` is the untuned base with our wire prompt.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.extraction_metrics import (
    Outcome,
    by_group,
    figures,
    intervals,
    items_of,
    keep_curve,
    match_outcome,
)
from benchmarks.models import E5_NAME, load_base_embedder, model_digest
from benchmarks.result import (
    Result,
    figure_of,
    json_option,
    make_meta,
    print_table,
    progress_bar,
    require_file,
)
from data.match import Similarity
from memory_runtime.corpus import AnnotatedWindow, read_windows
from memory_runtime.errors import BartlettError, ConfigError, SchemaError
from memory_runtime.models import Extraction
from memory_runtime.schema import Candidate
from serving import rollout
from serving.artifact import open_artifact

FEW_SHOT = Path("configs/few_shot.jsonl")
WEAKEST_BASELINE = 0.15
"""No ratio is claimed against a baseline with a smaller F1: it would flatter anything."""

TABLE = ("precision", "recall_must", "f1", "literal_exactness", "layer_accuracy",
         "kind_accuracy", "false_stores_per_empty", "empty_violated", "forbidden_hits",
         "score_mae", "score_mae_median", "reuse_spearman", "tokens_per_window",
         "seconds_per_window", "invalid")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a rollout holds of one window."""

    extraction: Extraction
    seconds: float | None


def read_rollout(path: Path) -> dict[str, Prediction]:
    """Predictions by window id.

    Raises:
        SchemaError: A line is no result of `python -m serving.rollout`.
    """
    found: dict[str, Prediction] = {}
    with require_file(path, "--rollout").open(encoding="utf-8") as lines:
        for n, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                extraction = Extraction(
                    candidates=[Candidate.from_json(c) for c in row["candidates"]],
                    dropped=[Candidate.from_json(c) for c in row.get("dropped", ())],
                    prompt_tokens=int(row.get("prompt_tokens", 0)),
                    completion_tokens=int(row.get("completion_tokens", 0)),
                    invalid=int(row.get("invalid", 0)), truncated=bool(row.get("truncated")),
                )
                found[str(row["id"])] = Prediction(extraction, row.get("seconds"))
            except (ValueError, KeyError, TypeError, BartlettError) as error:
                raise SchemaError(f"{path}:{n} is no line of a rollout: {error!r}; make the file "
                                  "with python -m serving.rollout") from error
    return found


def load_windows(paths: Sequence[Path], limit: int | None) -> list[AnnotatedWindow]:
    """Windows of all files, at most `limit` a file; ids must differ over all of them.

    Raises:
        ConfigError, SchemaError: A file is missing or wrong.
    """
    windows: list[AnnotatedWindow] = []
    for path in paths:
        windows += list(read_windows(require_file(path, "--windows")))[:limit]
    ids = [item.window.id for item in windows]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise SchemaError(f"window ids come twice: {twice[:5]}; every window needs its own")
    if not windows:
        raise ConfigError(f"no windows in {[path.name for path in paths]}; give files with some")
    return windows


def _window_lines(paths: Sequence[Path], limit: int | None) -> list[str]:
    lines: list[str] = []
    for path in paths:
        with path.open(encoding="utf-8") as stream:
            lines += [line.strip() for line in stream if line.strip()][:limit]
    return lines


def run_rollout(options: argparse.Namespace, directory: Path) -> Path:
    """Extract all windows with the model that was asked for; returns the finished rollout."""
    windows, out = directory / "windows.jsonl", directory / "rollout.jsonl"
    lines = _window_lines(options.windows, options.limit)
    windows.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    arguments = [str(options.artifact or "-"), str(windows), str(out), "--mode", options.encoder,
                 "--batch", str(options.batch), "--max-new-tokens", str(options.max_new_tokens)]
    if options.base:
        arguments += ["--base", str(options.base)]
    if options.encoder == "prompt":
        arguments += ["--few-shot", str(require_file(options.few_shot, "--few-shot"))]
    rollout.run(rollout.build_parser().parse_args(arguments))
    return out


def predictions(options: argparse.Namespace) -> dict[str, Prediction]:
    """Read the given rollout, or make one.

    Raises:
        ConfigError: The options do not go together.
    """
    if options.rollout is not None:
        return read_rollout(options.rollout)
    if options.encoder == "tuned" and options.artifact is None:
        raise ConfigError("--encoder tuned needs --artifact DIR (or --rollout FILE); got neither")
    with tempfile.TemporaryDirectory() as name:
        return read_rollout(run_rollout(options, Path(name)))


def judge(
    windows: Sequence[AnnotatedWindow], found: dict[str, Prediction], *, similarity: Similarity
) -> list[Outcome]:
    """Match every window.

    Raises:
        ConfigError: The rollout lacks windows.
    """
    missing = [w.window.id for w in windows if w.window.id not in found]
    if missing:
        raise ConfigError(f"the rollout lacks {len(missing)} of {len(windows)} windows, first "
                          f"{missing[0]!r}; run it to its end, over the same files")
    texts = [c.text for w in windows for e in (found[w.window.id].extraction,)
             for c in [*e.candidates, *e.dropped]]
    texts += [g.candidate.text for w in windows for g in w.gold]
    texts += [f.text for w in windows for f in w.forbidden]
    similarity.prepare(texts)
    outcomes = []
    with progress_bar() as bar:
        task = bar.add_task("matching", total=len(windows))
        for window in windows:
            hit = found[window.window.id]
            outcomes.append(match_outcome(window, hit.extraction, similarity=similarity,
                                          seconds=hit.seconds))
            bar.advance(task)
    return outcomes


def compare(f1: float | None, baseline: Path) -> str:
    """A sentence on the ratio to a baseline, or why there is none."""
    other = figure_of(baseline, "f1")
    if other < WEAKEST_BASELINE:
        return (f"no ratio: the F1 of the baseline is {other:.3f}, and under "
                f"{WEAKEST_BASELINE} a ratio says nothing")
    if f1 is None:
        return "no ratio: this run has no F1"
    return f"F1 {f1:.3f} is {f1 / other:.2f} times the baseline's {other:.3f}"


def _digests(options: argparse.Namespace, e5: Path) -> dict[str, str]:
    digests = {"matcher": model_digest(e5)}
    if options.artifact is not None:
        digests["encoder"] = open_artifact(options.artifact).digest
    if options.rollout is None:
        digests["base"] = model_digest(rollout.base_of(options.artifact, options.base))
    return digests


def run(options: argparse.Namespace) -> Result:
    """The whole benchmark.

    Raises:
        BartlettError: An input is missing or wrong.
    """
    started = time.perf_counter()
    windows = load_windows(options.windows, options.limit)
    found = predictions(options)
    embedder, e5 = load_base_embedder(options.e5)
    similarity = Similarity(embedder)
    outcomes = judge(windows, found, similarity=similarity)
    files = [*options.windows, *([options.rollout] if options.rollout else [])]
    if options.encoder == "prompt" and options.rollout is None:
        files.append(options.few_shot)
    meta = make_meta("benchmarks.extraction", started=started, data=files,
                     options=_options(options), artifacts=_digests(options, e5))
    meta["intervals"] = intervals(outcomes)
    return Result(
        metrics=figures(outcomes), by=by_group(outcomes),
        items=[item for outcome in outcomes for item in items_of(outcome)], meta=meta,
        extra={"curve": keep_curve(outcomes, similarity=similarity)},
    )


def _options(options: argparse.Namespace) -> dict[str, Any]:
    return {"windows": options.windows, "encoder": options.encoder, "artifact": options.artifact,
            "rollout": options.rollout, "limit": options.limit, "batch": options.batch,
            "max_new_tokens": options.max_new_tokens}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.extraction", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=Path, required=True, nargs="+", action="extend",
                        help="annotated windows; may be given again")
    parser.add_argument("--encoder", choices=("tuned", "prompt", "base"), default="tuned")
    parser.add_argument("--artifact", type=Path, help="encoder artifact, for tuned")
    parser.add_argument("--base", type=Path, help="base of the encoder (default: the artifact's)")
    parser.add_argument("--rollout", type=Path, help="finished output of serving.rollout")
    parser.add_argument("--few-shot", type=Path, default=FEW_SHOT, help="examples for prompt")
    parser.add_argument("--e5", type=Path,
                        help=f"directory of the matcher's base (default: {E5_NAME})")
    parser.add_argument("--baseline", type=Path, help="an earlier OUT to compare the F1 with")
    parser.add_argument("--limit", type=int, help="only the first N windows of each file")
    parser.add_argument("--batch", type=int, default=16, help="windows decoded together")
    parser.add_argument("--max-new-tokens", type=int, default=350)
    json_option(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 0 when the run finished, whatever the score."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    options = build_parser().parse_args(arguments)
    try:
        result = run(options)
        print_table(f"extraction ({options.encoder})", {"all": result.metrics, **result.by},
                    columns=TABLE)
        if options.baseline is not None:
            print(compare(result.metrics["f1"], options.baseline))  # noqa: T201
        result.write(options.json)
    except BartlettError as error:
        print(f"extraction: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
