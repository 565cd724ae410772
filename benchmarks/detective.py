"""Memory detective: a story over several sessions, then questions; what comes back, word by word.

    python -m benchmarks.detective --scenarios DIR [--answer extractive|local|remote]
        [--encoder tuned|stub] [--artifact DIR] --json OUT

Each reply counts once: altered, correct, refused or other, by the patterns of the scenario. The
stub encoder keeps every user turn as it stands; its figures say nothing about a trained encoder.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.models import load_base_embedder, load_tuned_models, model_digest
from benchmarks.result import (
    Metrics,
    Result,
    json_option,
    make_meta,
    print_table,
    progress_bar,
    wilson,
)
from benchmarks.scenarios import Scenario, read_scenarios
from benchmarks.stand_ins import BigramEmbedder, VerbatimEncoder
from benchmarks.verdicts import verdict_of
from memory_runtime import Memory, MemoryConfig, RemoteGenerator, Scope, Service
from memory_runtime.errors import BartlettError, ConfigError
from memory_runtime.models import Embedder, Encoder, Generator, Reranker
from memory_runtime.windows import estimate_tokens
from serving.artifact import open_artifact
from serving.engine.scorer import load_scorer
from serving.local import LocalEncoder, LocalReranker

COLUMNS = ("correct", "altered", "refused", "other", "correct_core", "never_said_refused",
           "never_said_fabricated", "context_reduction")
NEVER = "never_said"

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the product is run with.

    Attributes:
        encoder, embedder: Models, or stand-ins.
        reranker, generator: Models, or None.
        config: Shipped defaults, over them what the artifacts ship.
        digests: Which models these are.
    """

    encoder: Encoder
    embedder: Embedder
    reranker: Reranker | None = None
    generator: Generator | None = None
    config: MemoryConfig = field(default_factory=MemoryConfig)
    digests: dict[str, str] = field(default_factory=dict)


# --- one scenario ---


def tell(memory: Memory, scenario: Scenario) -> None:
    """Hand the story over, session by session, as an application would."""
    for session in scenario.sessions:
        scope = Scope(user=scenario.id, session=session[0].session)
        memory.add(session, scope=scope)
        memory.flush(scope)


def ask(memory: Memory, scenario: Scenario) -> list[Item]:
    """Ask every question; one item each."""
    scope = Scope(user=scenario.id)
    story = sum(estimate_tokens(turn.text) for turn in scenario.turns)
    items = []
    for question in scenario.questions:
        answer = memory.answer(question["question"], scope, asked_at=question["asked_at"])
        given = [m.candidate.text for m in answer.recalled.memories]
        layers = {scenario.facts[name]["layer"] for name in question["facts"]}
        items.append({
            "id": f"{scenario.id}/{question['id']}", "kind": question["kind"],
            "lang": scenario.language, "domain": scenario.domain, "layers": sorted(layers),
            "expected": question.get("answer", ""), "reply": answer.text,
            "status": answer.status, "memories": given,
            "context_tokens": sum(map(estimate_tokens, given)), "story_tokens": story,
            "verdict": verdict_of(question, answer.text, given),
        })
    return items


def run_scenario(scenario: Scenario, parts: Parts) -> tuple[list[Item], int]:
    """Tell and ask in a store of its own.

    Returns:
        One item a question, and how many memories the story left.
    """
    with tempfile.TemporaryDirectory() as name, Memory(
        Path(name) / "memory.sqlite", encoder=parts.encoder, embedder=parts.embedder,
        reranker=parts.reranker, generator=parts.generator, config=parts.config,
    ) as memory:
        tell(memory, scenario)
        return ask(memory, scenario), len(memory.get_all(Scope(user=scenario.id)))


# --- figures ---


def _share(items: Sequence[Item], verdict: str) -> float | None:
    return sum(item["verdict"] == verdict for item in items) / len(items) if items else None


def figures(items: Sequence[Item]) -> Metrics:
    """Shares over questions about facts, and over those about things never said.

    Whatever is no refusal of a never-said question counts as fabricated.
    """
    facts = [item for item in items if item["kind"] != NEVER]
    never = [item for item in items if item["kind"] == NEVER]
    refused = _share(never, "refused")
    context = sum(item["context_tokens"] for item in items)
    story = sum(item["story_tokens"] for item in items)
    return {
        **{name: _share(facts, name) for name in ("correct", "altered", "refused", "other")},
        "correct_core": _share([item for item in facts if "core" in item["layers"]], "correct"),
        "never_said_refused": refused,
        "never_said_fabricated": None if refused is None else 1 - refused,
        "context_reduction": 1 - context / story if story else None,
        "questions": float(len(items)),
    }


def by_group(items: Sequence[Item]) -> dict[str, Metrics]:
    """Figures per language, domain and kind."""
    groups: dict[str, list[Item]] = {}
    for key in ("lang", "domain", "kind"):
        for item in items:
            groups.setdefault(item[key] or "unnamed", []).append(item)
    order = {"zh": 0, "en": 1}
    return {name: figures(groups[name])
            for name in sorted(groups, key=lambda n: (order.get(n, 2), n))}


def intervals(items: Sequence[Item]) -> dict[str, Any]:
    """95% intervals of the shares; 15 questions a story give wide ones."""
    facts = [item for item in items if item["kind"] != NEVER]
    never = [item for item in items if item["kind"] == NEVER]
    found = {name: wilson(sum(i["verdict"] == name for i in facts), len(facts))
             for name in ("correct", "altered", "refused")}
    found["never_said_refused"] = wilson(
        sum(i["verdict"] == "refused" for i in never), len(never))
    return found


# --- the run ---


def _generator(options: argparse.Namespace, encoder: Encoder) -> Generator | None:
    if options.answer == "extractive":
        return None
    if options.answer == "remote":
        if not options.url or not options.model:
            raise ConfigError("--answer remote needs --url and --model of a running service; got "
                              f"{options.url!r} and {options.model!r}")
        return RemoteGenerator(Service(options.url), model=options.model)
    if not isinstance(encoder, LocalEncoder):
        raise ConfigError("--answer local retells with the served base: give --encoder tuned "
                          "and --artifact")
    return encoder


def load_parts(options: argparse.Namespace) -> Parts:
    """Models or stand-ins, as the options say.

    Raises:
        BartlettError: They do not go together, or a model is missing.
    """
    config = MemoryConfig()
    if options.encoder == "stub":
        encoder: Encoder = VerbatimEncoder()
        embedder: Embedder = BigramEmbedder()
        digests: dict[str, str] = {}
        if options.embedder == "e5":
            embedder, path = load_base_embedder(options.e5)
            digests["embedder"] = model_digest(path)
    else:
        if options.artifact is None:
            raise ConfigError("--encoder tuned needs --artifact DIR; got none")
        models = load_tuned_models(options.artifact, base=options.base, e5=options.e5)
        encoder, embedder, digests = models.encoder, models.embedder, models.digests
        config = config.with_calibration(encoder=models.calibration)
    reranker = None
    if options.reranker is not None:
        _, path = load_base_embedder(options.e5)
        artifact = open_artifact(options.reranker, base=path)
        reranker = LocalReranker(load_scorer(path, artifact))
        config = config.with_calibration(reranker=artifact.calibration)
        digests = digests | {"reranker": artifact.digest}
    return Parts(encoder, embedder, reranker, _generator(options, encoder), config, digests)


def run(options: argparse.Namespace) -> Result:
    """The whole benchmark.

    Raises:
        BartlettError: An input is missing or wrong.
    """
    started = time.perf_counter()
    scenarios = read_scenarios(options.scenarios)[: options.limit]
    parts = load_parts(options)
    items: list[Item] = []
    stored: dict[str, int] = {}
    with progress_bar() as bar:
        task = bar.add_task("stories", total=len(scenarios))
        for scenario in scenarios:
            made, stored[scenario.id] = run_scenario(scenario, parts)
            items += made
            bar.advance(task)
    files = sorted(options.scenarios.glob("*.json"))[: options.limit]
    meta = make_meta("benchmarks.detective", started=started, data=files, artifacts=parts.digests,
                     options={"scenarios": options.scenarios.name, "answer": options.answer,
                              "encoder": options.encoder, "embedder": options.embedder,
                              "artifact": options.artifact, "reranker": options.reranker,
                              "limit": options.limit})
    meta["intervals"], meta["memories"] = intervals(items), stored
    return Result(figures(items), by_group(items), items, meta)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.detective", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", type=Path, required=True, help="folder of *.json")
    parser.add_argument("--answer", choices=("extractive", "local", "remote"),
                        default="extractive")
    parser.add_argument("--url", help="service that retells, for --answer remote")
    parser.add_argument("--model", help="its name there")
    parser.add_argument("--encoder", choices=("tuned", "stub"), default="tuned")
    parser.add_argument("--artifact", type=Path, help="encoder artifact, for tuned")
    parser.add_argument("--base", type=Path, help="base of the encoder")
    parser.add_argument("--reranker", type=Path, help="reranker artifact")
    parser.add_argument("--embedder", choices=("e5", "bigrams"), default="e5",
                        help="with the stub encoder; a tuned one always goes with e5")
    parser.add_argument("--e5", type=Path, help="directory of the e5")
    parser.add_argument("--limit", type=int, help="only the first N stories")
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
        print(f"detective: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print_table(f"detective ({options.encoder}, {options.answer})",
                {"all": result.metrics, **result.by}, columns=COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
