"""Whether what a question needs is found, and how far up, over public sets read by path.

    python -m benchmarks.recall --data DIR --sets locomo,memsim [--arms bm25,dense,rrf,ours]
        [--artifact RERANKER_DIR] --json OUT

`ours` is the product's own search with its shipped defaults over a store that holds the pool.
Results name ids only: no text of a set is written.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arms import (
    DEPTH,
    Arm,
    Bm25Arm,
    CachedEmbedder,
    DenseArm,
    RerankedArm,
    RrfArm,
    untuned_scorer,
)
from benchmarks.models import E5_NAME, load_base_embedder, model_digest
from benchmarks.pools import Document, Question, read_questions, set_files, set_names
from benchmarks.product_arm import ProductArm
from benchmarks.result import Metrics, Result, json_option, make_meta, print_table, progress_bar
from memory_runtime import MemoryConfig
from memory_runtime.errors import BartlettError, ConfigError
from memory_runtime.models import Reranker
from memory_runtime.windows import estimate_tokens
from serving.artifact import open_artifact
from serving.engine.scorer import load_scorer
from serving.rollout import base_of

ARMS = ("bm25", "dense", "rrf", "rrf+base", "ours")
CUTS = (1, 5, 20)
NUM_SHOWN = 5
"""Results whose tokens are counted: what would go into a prompt."""

_log = logging.getLogger(__name__)


# --- figures ---


@dataclass(frozen=True, slots=True)
class Finding:
    """One question under one arm.

    Attributes:
        question: What was asked.
        arm: Which arm.
        ranks: Place of each piece of evidence from 1; None where it was not returned.
        tokens: Of the first five results.
        ms: Time of the search, what embedding the query alone costs included.
    """

    question: Question
    arm: str
    ranks: tuple[int | None, ...]
    tokens: int
    ms: float


def ranks_of(evidence: Sequence[str], ranking: Sequence[str]) -> tuple[int | None, ...]:
    """Place of each piece of evidence in a ranking, from 1."""
    place = {name: n for n, name in reversed(list(enumerate(ranking, start=1)))}
    return tuple(place.get(name) for name in evidence)


def figures(findings: Sequence[Finding]) -> Metrics:
    """Mean share of the evidence in the first 1, 5 and 20, mean reciprocal rank of the first hit,
    tokens and times.
    """
    row: Metrics = {}
    for cut in CUTS:
        row[f"recall@{cut}"] = float(np.mean([
            sum(rank is not None and rank <= cut for rank in f.ranks) / len(f.ranks)
            for f in findings]))
    best = [min((rank for rank in f.ranks if rank is not None), default=None) for f in findings]
    row["mrr"] = float(np.mean([1 / rank if rank else 0.0 for rank in best]))
    row["tokens"] = float(np.mean([f.tokens for f in findings]))
    times = [f.ms for f in findings]
    row["ms_p50"], row["ms_p95"] = (float(v) for v in np.percentile(times, [50, 95]))
    row["questions"] = float(len(findings))
    return row


def by_group(name: str, findings: Sequence[Finding]) -> dict[str, Metrics]:
    """Figures of a set per arm, and per arm and category."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(f"{name}/{finding.arm}", []).append(finding)
        groups.setdefault(f"{name}/{finding.arm}/{finding.question.category}", []).append(finding)
    return {key: figures(groups[key]) for key in sorted(groups, key=lambda k: (k.count("/"), k))}


def item(name: str, finding: Finding) -> dict[str, Any]:
    """One row of the result: where each piece of evidence came."""
    found = any(rank is not None and rank <= NUM_SHOWN for rank in finding.ranks)
    return {
        "id": f"{name}/{finding.question.id}", "arm": finding.arm,
        "category": finding.question.category, "expected": list(finding.question.evidence),
        "ranks": list(finding.ranks), "verdict": "hit" if found else "miss",
    }


# --- running ---


def run_arm(
    name: str, arm: Arm, questions: Sequence[Question], *, label: str, extra_ms: float = 0.0
) -> list[Finding]:
    """Ask every question; a pool is indexed again only when it is another one.

    Args:
        name: Of the arm.
        arm: Ranks.
        questions: In an order that keeps those with one pool together.
        label: For the progress bar.
        extra_ms: Added to every search: the query's embedding, which was made before.
    """
    findings: list[Finding] = []
    pool: tuple[Document, ...] | None = None
    with progress_bar() as bar:
        task = bar.add_task(label, total=len(questions))
        for question in questions:
            if question.pool is not pool:
                pool = question.pool
                arm.prepare(pool)
                texts = {document.id: document.text for document in pool}
            start = time.perf_counter()
            ranking = arm.rank(question)
            ms = 1000 * (time.perf_counter() - start) + extra_ms
            shown = sum(estimate_tokens(texts[doc]) for doc in ranking[:NUM_SHOWN] if doc)
            findings.append(Finding(
                question, name, ranks_of(question.evidence, ranking[:DEPTH]), shown, ms))
            bar.advance(task)
    return findings


def refuse_trained(name: str, questions: Sequence[Question], manifest: dict[str, Any]) -> None:
    """Stop when the artifact has learnt from what it would be measured on.

    Raises:
        ConfigError: A record of the set is in the artifact's manifest.
    """
    learnt = set(manifest.get("records", ()))
    shared = sorted({question.record for question in questions} & learnt)
    if shared:
        raise ConfigError(
            f"set {name} is refused: the artifact was trained on {len(shared)} of its records "
            f"({shared[:3]}); measure on sets that it has not seen")


def arm_names(text: str) -> list[str]:
    """Arms from a comma-separated list.

    Raises:
        ConfigError: A name is unknown.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    wrong = sorted(set(names) - set(ARMS))
    if wrong or not names:
        raise ConfigError(f"--arms names {wrong or 'nothing'}; allowed are {list(ARMS)}")
    return list(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Models:
    """What the arms need; None where no arm does.

    Attributes:
        embedder, e5: The base embedder and its directory.
        reranker: The tuned cross-encoder.
        config: The product's defaults, over them what the reranker's artifact ships.
        digests: Which models these are.
    """

    embedder: CachedEmbedder | None = None
    e5: Path | None = None
    reranker: Reranker | None = None
    config: MemoryConfig = field(default_factory=MemoryConfig)
    digests: dict[str, str] = field(default_factory=dict)


def load_models(
    names: Sequence[str], asked: dict[str, list[Question]], *, base: Path | None,
    artifact_dir: Path | None,
) -> Models:
    """Load what the arms need.

    Raises:
        ConfigError: The artifact has learnt from a set.
        ArtifactError: A base or the artifact is missing or damaged.
    """
    if not set(names) - {"bm25"}:
        return Models()
    plain, e5 = load_base_embedder(base)
    embedder, digests = CachedEmbedder(plain), {"embedder": model_digest(e5)}
    if artifact_dir is None or "ours" not in names:
        return Models(embedder, e5, digests=digests)
    ranker_base = base or base_of(artifact_dir, None)
    artifact = open_artifact(artifact_dir, base=ranker_base)
    for name, questions in asked.items():
        refuse_trained(name, questions, artifact.manifest)
    if "records" not in artifact.manifest:
        _log.warning("the manifest of %s lists no records: cannot check that the sets are new to "
                     "it", artifact.name)
    config = MemoryConfig().with_calibration(reranker=artifact.calibration)
    return Models(embedder, e5, load_scorer(ranker_base, artifact), config,
                  digests | {"reranker": artifact.digest})


def _make_arm(name: str, models: Models) -> Arm:
    if name == "bm25":
        return Bm25Arm()
    assert models.embedder is not None and models.e5 is not None
    if name == "dense":
        return DenseArm(models.embedder)
    if name == "rrf":
        return RrfArm(models.embedder)
    if name == "rrf+base":
        return RerankedArm(models.embedder, untuned_scorer(models.e5))
    return ProductArm(models.embedder, models.reranker, models.config)


def run(options: argparse.Namespace) -> Result:
    """The whole benchmark.

    Raises:
        BartlettError: An input is missing or wrong.
    """
    started = time.perf_counter()
    sets, names = set_names(options.sets), arm_names(options.arms)
    asked = {name: read_questions(options.data, name, limit=options.limit, seed=options.seed)
             for name in sets}
    models = load_models(names, asked, base=options.base, artifact_dir=options.artifact)
    result = Result()
    for name, questions in asked.items():
        _run_set(name, questions, names, models, result)
    files = [path for name in sets for path in set_files(options.data, name)]
    result.meta = make_meta("benchmarks.recall", started=started, data=files,
                            artifacts=models.digests, options=_options(options, sets, names))
    result.meta["notes"] = _notes(names, models)
    return result


def _run_set(
    name: str, questions: list[Question], arms: Sequence[str], models: Models, result: Result
) -> None:
    embedder = models.embedder
    if embedder is not None:
        queries = [question.text for question in questions]
        embedder.warm((d.text for q in questions for d in q.pool), kind="passage", label=name)
        embedder.warm(queries, kind="query", label=f"{name} questions")
        embedder.time_queries(queries)
    findings: list[Finding] = []
    for arm_name in arms:
        arm = _make_arm(arm_name, models)
        extra_ms = embedder.query_ms if embedder is not None and arm_name != "bm25" else 0.0
        findings += run_arm(arm_name, arm, questions, label=f"{name} {arm_name}",
                            extra_ms=extra_ms)
        if isinstance(arm, ProductArm):
            arm.close()
    result.by |= by_group(name, findings)
    result.items += [item(name, finding) for finding in findings]


def _options(
    options: argparse.Namespace, sets: Sequence[str], names: Sequence[str]
) -> dict[str, Any]:
    return {"data": options.data.name, "sets": list(sets), "arms": list(names),
            "artifact": options.artifact, "limit": options.limit, "seed": options.seed}


def _notes(names: Sequence[str], models: Models) -> list[str]:
    notes = []
    if "rrf+base" in names:
        notes.append("rrf+base: a base without a ranking head (e5) has a head from a seed, so its "
                     "order of the first twenty is arbitrary")
    if "ours" in names and models.reranker is None:
        notes.append("ours: without a reranker (no --artifact), so in fused order")
    return notes


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recall", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("external_data"),
                        help="folder of the sets")
    parser.add_argument("--sets", required=True, help="comma-separated, or all")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    parser.add_argument("--artifact", type=Path, help="reranker artifact, for ours")
    parser.add_argument("--base", type=Path, help=f"directory of the e5 (default: {E5_NAME})")
    parser.add_argument("--limit", type=int, help="at most N questions a set, drawn by the seed")
    parser.add_argument("--seed", type=int, default=1)
    json_option(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 0 when the run finished, whatever the score."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    options = build_parser().parse_args(arguments)
    try:
        result = run(options)
        print_table("recall", result.by)
        result.write(options.json)
    except BartlettError as error:
        print(f"recall: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
