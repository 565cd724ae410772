"""Whether the product falls into the traps that other memory systems fell into.

    python -m benchmarks.cases --cases cases.jsonl [--needs runtime] [--artifact DIR] --json OUT

Cases that need no model run on stand-ins; those that need one run with `--artifact`. What the
runner or the product cannot do is void, with the reason; nothing passes that did not run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.case_checks import StepResult, Unsupported, fault_of
from benchmarks.case_product import Product
from benchmarks.case_steps import Run
from benchmarks.models import load_tuned_models
from benchmarks.result import (
    Metrics,
    Result,
    json_option,
    make_meta,
    print_table,
    progress_bar,
    require_file,
)
from memory_runtime.errors import BartlettError, ConfigError, SchemaError

Case = dict[str, Any]
MakeProduct = Callable[[Path], Product]

_ZONES = re.compile(r"TZ = ([\w/]+(?:, [\w/]+)*)")
_MADE_BY_STAND_INS = ("runtime",)
_NO_RUNNER = {"server": "needs a server: run tests/serving", "train": "needs training: run "
              "tests/training", "gpu": "needs a CUDA device"}

_log = logging.getLogger(__name__)


def read_cases(path: Path) -> list[Case]:
    """All cases of a file.

    Raises:
        ConfigError, SchemaError: There is no file, or a line is no case.
    """
    cases = []
    with require_file(path, "--cases").open(encoding="utf-8") as lines:
        for n, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                case = json.loads(line)
                _ = case["id"], case["needs"], case["area"], case["input"]["steps"], case["checks"]
            except (ValueError, KeyError, TypeError) as error:
                raise SchemaError(f"{path}:{n} is no case: {error!r}") from error
            cases.append(case)
    return cases


def zones_of(case: Case) -> list[str | None]:
    """Time zones under which a case is run, where a note names them; else that of the machine."""
    for step in case["input"]["steps"]:
        match = _ZONES.search(step.get("text", "")) if step["op"] == "note" else None
        if match:
            return list(match.group(1).split(", "))
    return [None]


@contextmanager
def time_zone(name: str | None) -> Iterator[None]:
    """The process in another time zone."""
    if name is None:
        yield
        return
    before = os.environ.get("TZ")
    os.environ["TZ"] = name
    time.tzset()
    try:
        yield
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()


def _run_once(case: Case, make: MakeProduct) -> list[StepResult]:
    with tempfile.TemporaryDirectory() as name:
        return Run(make(Path(name) / "memory.sqlite"), case["input"]["steps"]).all()


def judge(case: Case, make: MakeProduct) -> tuple[str, str]:
    """Verdict and why: pass only when every check held in every time zone."""
    try:
        faults: list[str] = []
        for zone in zones_of(case):
            with time_zone(zone):
                results = _run_once(case, make)
            for check in case["checks"]:
                fault = fault_of(check, results)
                if fault is not None:
                    faults.append(f"[{zone}] {fault}" if zone else fault)
    except Unsupported as error:
        return "void", str(error)
    # A crash of the product is what a case is there to find.
    except Exception as error:
        _log.exception("case %s", case["id"])
        return "fail", f"crashed: {error!r}"
    return ("fail", "; ".join(faults)) if faults else ("pass", "")


def _void_reason(case: Case, needs: Sequence[str], has_model: bool) -> str | None:
    if case["needs"] in _NO_RUNNER:
        return _NO_RUNNER[case["needs"]]
    if case["needs"] not in needs:
        return f"not asked for (--needs {','.join(needs)})"
    if case["needs"] not in _MADE_BY_STAND_INS and not has_model:
        return f"needs a {case['needs']}: give --artifact"
    return None


def _shares(items: Sequence[dict[str, Any]]) -> Metrics:
    return {name: float(sum(item["verdict"] == verdict for item in items))
            for name, verdict in (("passed", "pass"), ("failed", "fail"), ("void", "void"))}


def _by(items: Sequence[dict[str, Any]]) -> dict[str, Metrics]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        for name in (f"area {item['area']}", f"needs {item['needs']}"):
            groups.setdefault(name, []).append(item)
    return {name: _shares(groups[name]) for name in sorted(groups)}


def run(options: argparse.Namespace) -> Result:
    """The whole benchmark.

    Raises:
        BartlettError: An input is missing or wrong.
    """
    started = time.perf_counter()
    if options.backend != "sqlite":
        raise ConfigError(f"--backend {options.backend}: the product has only sqlite so far")
    cases = [case for case in read_cases(options.cases)
             if not options.only or case["id"] in options.only.split(",")]
    needs = [name.strip() for name in options.needs.split(",") if name.strip()]
    digests: dict[str, str] = {}
    makers: dict[str, MakeProduct] = {"runtime": Product}
    if options.artifact is not None:
        models = load_tuned_models(options.artifact, base=options.base, e5=options.e5)
        digests = models.digests
        makers["model"] = lambda path: Product(path, models.encoder, models.embedder)
    items = []
    with progress_bar() as bar:
        task = bar.add_task("cases", total=len(cases))
        for case in cases:
            reason = _void_reason(case, needs, options.artifact is not None)
            verdict, why = ("void", reason) if reason else judge(case, makers[case["needs"]])
            items.append({"id": case["id"], "verdict": verdict, "why": why,
                          "needs": case["needs"], "area": case["area"],
                          "core": bool(case.get("core")), "expected": case.get("expected", "")})
            bar.advance(task)
    meta = make_meta("benchmarks.cases", started=started, data=[options.cases], artifacts=digests,
                     options={"cases": options.cases.name, "backend": options.backend,
                              "needs": needs, "only": options.only, "artifact": options.artifact})
    return Result(_shares(items), _by(items), items, meta)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cases", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--backend", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument("--needs", default="runtime,model", help="comma-separated")
    parser.add_argument("--only", help="ids, comma-separated")
    parser.add_argument("--artifact", type=Path, help="encoder, for the cases that need a model")
    parser.add_argument("--base", type=Path, help="base of the encoder")
    parser.add_argument("--e5", type=Path, help="directory of the e5")
    json_option(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 0 when the run finished, whatever the score."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    options = build_parser().parse_args(arguments)
    try:
        result = run(options)
        result.write(options.json)
    except BartlettError as error:
        print(f"cases: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print_table("cases", {"all": result.metrics, **result.by})
    for item in result.items:
        if item["verdict"] != "pass":
            print(f"{item['verdict']}  {item['id']}  {item['why']}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
