"""A small run that says whether a change has made the runtime slower, heavier or worse.

    python -m benchmarks.gate [--limits benchmarks/gate.yaml] [--from RESULT] [--json OUT]

Needs no model and no data from outside. Times are ratios to a plain baseline measured in the same
run, so that the machine does not matter. Exit status 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arms import Bm25Arm, CachedEmbedder, RrfArm, fuse
from benchmarks.detective import Parts, run_scenario
from benchmarks.detective import figures as detective_figures
from benchmarks.limits import faults_of, read_limits
from benchmarks.plain_bm25 import PlainBm25
from benchmarks.product_arm import ProductArm
from benchmarks.recall import figures, run_arm
from benchmarks.result import Metrics, Result, make_meta, print_table
from benchmarks.scenarios import Scenario, read_scenarios, recall_questions
from benchmarks.stand_ins import BigramEmbedder, VerbatimEncoder, verbatim_candidate
from memory_runtime import Memory, Scope, Turn
from memory_runtime.errors import BartlettError, ConfigError

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "benchmarks" / "gate.yaml"
STORIES = ROOT / "data" / "authored" / "stories"

HEAVY = ("torch", "transformers", "tokenizers", "bentoml", "fastapi", "scipy")
NUM_MEMORIES = 1000
NUM_QUERIES = 50
TRIES = 5
SCOPE = Scope(user="gate")


# --- the import ---

_IMPORT = """
import sys, time
before, start = set(sys.modules), time.perf_counter()
import {name}
print(time.perf_counter() - start)
print(" ".join(sorted(set(sys.modules) - before)))
"""


def _import_of(name: str, tries: int) -> tuple[float, list[str]]:
    """Seconds of an import in a fresh process (best of some) and the modules it loads."""
    seconds, modules = [], []
    for _ in range(tries):
        out = subprocess.run([sys.executable, "-c", _IMPORT.format(name=name)], cwd=ROOT, text=True,
                             capture_output=True, check=True).stdout.splitlines()
        seconds.append(float(out[0]))
        modules = out[1].split()
    return min(seconds), modules


def import_figures(*, tries: int = TRIES) -> Metrics:
    """What `import memory_runtime` costs beside the numpy that it stands on."""
    plain, base = _import_of("numpy", tries)
    ours, modules = _import_of("memory_runtime", tries)
    heavy = {name.partition(".")[0] for name in modules} & set(HEAVY)
    return {"import_over_numpy": ours / plain,
            "import_modules": float(len(set(modules) - set(base))),
            "import_heavy": float(len(heavy))}


# --- the store ---


def _texts(num: int) -> list[str]:
    """Distinct statements in both languages."""
    rng = random.Random(1)
    things = ("locker", "invoice", "meeting", "garden", "ticket", "bicycle", "recipe", "lease")
    zh_things = ("柜子", "发票", "会议", "花园", "车票", "自行车", "菜谱", "租约")
    rows = []
    for n in range(num):
        place, amount = rng.randrange(8), rng.randrange(100, 1000)
        rows.append(f"My {things[place]} number {n} costs {amount} euros." if n % 2 == 0
                    else f"我的{zh_things[place]}编号{n}，价格是{amount}元。")
    return rows


def _ms(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)


def _plain_add(path: Path, texts: Sequence[str]) -> None:
    """What any store has to do: a row and a vector a memory, a commit every ten."""
    embedder = BigramEmbedder()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute("CREATE TABLE memories (id TEXT PRIMARY KEY, text TEXT, vector BLOB)")
        for start in range(0, len(texts), 10):
            part = texts[start : start + 10]
            vectors = embedder.embed(part, kind="passage").astype(np.float16)
            db.executemany("INSERT INTO memories VALUES (?, ?, ?)", [
                (f"m{start + n}", text, vector.tobytes())
                for n, (text, vector) in enumerate(zip(part, vectors, strict=True))])
            db.commit()
    db.close()


def _add(memory: Memory, texts: Sequence[str]) -> None:
    """The same through journal, encoder and admission, ten turns a session."""
    for start in range(0, len(texts), 10):
        turns = [Turn(f"t{n}", "user", text, observed_at="2026-03-01T10:00:00+00:00")
                 for n, text in enumerate(texts[start : start + 10], start=start)]
        memory.add(turns, scope=Scope(user="gate", session=f"s{start}"))
        memory.flush(SCOPE)


def add_figures() -> Metrics:
    """Milliseconds for a thousand memories through the whole way in, and beside a plain insert."""
    texts = _texts(NUM_MEMORIES)
    with tempfile.TemporaryDirectory() as name:
        plain = min(_ms(lambda n=n: _plain_add(Path(name) / f"plain-{n}.sqlite", texts))
                    for n in range(2))
        with Memory(Path(name) / "memory.sqlite", encoder=VerbatimEncoder(),
                    embedder=BigramEmbedder()) as memory:
            ours = _ms(lambda: _add(memory, texts))
            stored = len(memory.get_all(SCOPE))
    return {"add_ms_per_1k": ours, "add_over_plain": ours / plain,
            "add_stored_share": stored / len(texts)}


def search_figures() -> Metrics:
    """Milliseconds of a search over a thousand memories, and beside BM25 and cosine by hand."""
    texts, embedder = _texts(NUM_MEMORIES), BigramEmbedder()
    queries = [text[3:24] for text in texts[:: NUM_MEMORIES // NUM_QUERIES]]
    index, matrix = PlainBm25(texts), embedder.embed(texts, kind="passage")

    def by_hand(query: str) -> None:
        near = np.argsort(-(matrix @ embedder.embed([query], kind="query")[0]))
        fuse([[str(n) for n in index.ranking(query)], [str(n) for n in near]])

    with tempfile.TemporaryDirectory() as name, Memory(
            Path(name) / "memory.sqlite", embedder=embedder) as memory:
        memory.insert([verbatim_candidate(Turn(f"t{n}", "user", text))
                       for n, text in enumerate(texts)], scope=SCOPE)
        memory.search(queries[0], SCOPE)
        ours = float(np.median([_ms(lambda q=q: memory.search(q, SCOPE)) for q in queries]))
    plain = float(np.median([_ms(lambda q=q: by_hand(q)) for q in queries]))
    return {"search_ms_at_1k": ours, "search_over_plain": ours / plain}


# --- the quality ---


def recall_figures(scenarios: Sequence[Scenario]) -> Metrics:
    """Recall over the turns of the authored stories, beside plain BM25 and the plain fusion."""
    questions = recall_questions(scenarios)
    embedder = CachedEmbedder(BigramEmbedder())
    ours = ProductArm(embedder, None)
    try:
        found = figures(run_arm("ours", ours, questions, label="recall ours"))
    finally:
        ours.close()
    bm25 = figures(run_arm("bm25", Bm25Arm(), questions, label="recall bm25"))
    rrf = figures(run_arm("rrf", RrfArm(embedder), questions, label="recall rrf"))
    row: Metrics = {}
    for name in ("recall@5", "recall@20", "mrr"):
        own, plain, fused = found[name], bm25[name], rrf[name]
        assert own is not None and plain is not None and fused is not None
        row |= {f"stories_{name}": own, f"stories_{name}_over_bm25": own - plain,
                f"stories_{name}_over_rrf": own - fused}
    return row


def answer_figures(scenarios: Sequence[Scenario]) -> Metrics:
    """The detective on stand-ins: a digit that changes on the way would show here."""
    parts = Parts(VerbatimEncoder(), BigramEmbedder())
    items = [item for scenario in scenarios for item in run_scenario(scenario, parts)[0]]
    found = detective_figures(items)
    return {f"stories_{name}": found[name] for name in ("correct", "altered")}


# --- the run ---


def measure() -> Result:
    """The whole small run."""
    started = time.perf_counter()
    scenarios = read_scenarios(STORIES)
    metrics = {**import_figures(), **add_figures(), **search_figures(),
               **recall_figures(scenarios), **answer_figures(scenarios)}
    meta = make_meta("benchmarks.gate", started=started, options={},
                     data=sorted(STORIES.glob("*.json")))
    return Result(metrics, {}, [], meta)


def _metrics_of(path: Path) -> Metrics:
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result: {error!r}; give the JSON of an earlier run"
                          ) from error
    return dict(metrics)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=Path, default=LIMITS)
    parser.add_argument("--from", dest="result", type=Path,
                        help="hold an earlier result against the limits, measure nothing")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where the result goes")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 when a limit is missed, 2 when an input is wrong."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    options = build_parser().parse_args(arguments)
    try:
        limits = read_limits(options.limits)
        if options.result is not None:
            metrics = _metrics_of(options.result)
        else:
            result = measure()
            metrics = result.metrics
            if options.json is not None:
                result.write(options.json)
    except BartlettError as error:
        print(f"gate: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print_table("benchmark gate", {
        name: {"value": value, **{"min": next((x.low for x in limits if x.name == name), None),
                                  "max": next((x.high for x in limits if x.name == name), None)}}
        for name, value in metrics.items()})
    faults = faults_of(limits, metrics)
    for fault in faults:
        print(f"MISSED  {fault}")  # noqa: T201
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
