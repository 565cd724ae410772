"""Builds question-memory groups for the reranker: one query, what answers it, what does not.

Reads our own stories and windows, and those public corpora that weights may be trained on, where
their folder is there. Public homes and licences of the corpora: see `data.sources`. Writes
`pairs_train.jsonl` and `pairs_calibration.jsonl`, one group a line:
`{"id","lang","source","query","positives":[...],"negatives":[...]}`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.pair_drafts import (
    Draft,
    Harvest,
    Record,
    parallel_drafts,
    realmem_drafts,
    story_drafts,
    turn_drafts,
    window_drafts,
)
from data.pair_slots import knowledge_facts, service_facts, slot_drafts, wish_drafts
from data.sources import TRAINING_PERSONAS, SourceInfo, source_info
from memory_runtime.corpus import read_windows
from memory_runtime.lexical import Bm25, normalise

_log = logging.getLogger(__name__)

HELD_OUT_STORIES = "-06"
"""Stories whose id ends like this are for reports and are never read."""


@dataclass(frozen=True)
class PairLimits:
    """How many groups of each source, so that both languages and all ways of asking balance."""

    per_source: dict[tuple[str, str], int] = field(default_factory=lambda: {
        ("stories", "zh"): 200, ("stories", "en"): 200,
        ("windows", "zh"): 170, ("windows", "en"): 170,
        ("statement_to_turn", "zh"): 130, ("statement_to_turn", "en"): 130,
        ("realmem", "en"): 200, ("realmem_turn", "en"): 140,
        ("kdconv", "zh"): 130, ("kdconv_slots", "zh"): 150,
        ("kdconv_slots_backwards", "zh"): 40,
        ("crosswoz", "zh"): 130, ("crosswoz_slots", "zh"): 150,
        ("crosswoz_slots_backwards", "zh"): 60, ("crosswoz_wishes", "zh"): 150,
        ("crosswoz_slots_other", "en"): 70,
        ("sgd", "en"): 160, ("sgd_slots", "en"): 120, ("sgd_slots_backwards", "en"): 60,
        ("sgd_wishes", "en"): 150, ("sgd_slots_other", "zh"): 70,
        ("parallel", "zh"): 60, ("parallel", "en"): 60,
    })
    "Cap by source and language of the query; a source that is not named gives nothing."
    negatives: int = 19
    "Negatives per group at most: with one positive, the twenty candidates of a recall."
    hard: int = 10
    "Of these, at most so many that the source knows to be near; BM25 finds the rest."
    calibration_share: float = 0.1
    "Share of the dialogues that is held back."


# --- mining ---


class Miner:
    """Finds texts near a question in a pool."""

    def __init__(self, texts: dict[str, int]) -> None:
        self._texts = list(texts)
        self._order = list(texts.values())
        self._index = Bm25(self._texts)

    def near(self, query: str, k: int, *, before: int | None = None) -> list[str]:
        """The k texts nearest to a query; then, where fewer share a word with it, any others."""
        allowed = None if before is None else {
            n for n, order in enumerate(self._order) if order < before}
        found = [self._texts[n] for n, _ in self._index.search(query, k, allowed=allowed)]
        if len(found) < k:
            known = set(found)
            rest = range(len(self._texts)) if allowed is None else sorted(allowed)
            found += [t for t in (self._texts[n] for n in rest) if t not in known][: k - len(found)]
        return found


def mine(draft: Draft, miner: Miner | None, limits: PairLimits) -> tuple[str, ...]:
    """Negatives of a question: known ones first, then those that BM25 finds."""
    taken = {normalise(text) for text in (*draft.positives, draft.query)}
    chosen: list[str] = []

    def take(texts: list[str] | tuple[str, ...], limit: int, banned: tuple[str, ...]) -> None:
        for text in texts:
            key = normalise(text)
            if len(chosen) >= limit:
                return
            if key and key not in taken and not any(word in text for word in banned):
                taken.add(key)
                chosen.append(text)

    take(draft.hard, limits.hard if miner else limits.negatives, ())
    if miner is not None:
        near = miner.near(draft.query, 3 * limits.negatives, before=draft.before)
        take(near, limits.negatives, draft.answers)
        take(draft.hard, limits.negatives, ())
    return tuple(chosen)


# --- selecting and splitting ---


def family(dialogue: str) -> str:
    """What a dialogue is split with: its corpus, and for our own texts the language too."""
    return re.split(r"/|-\d", dialogue)[0]


def split(dialogues: set[str], share: float, seed: int) -> set[str]:
    """The dialogues that are held back: of each family the same share, at least one."""
    families: dict[str, list[str]] = {}
    for dialogue in sorted(dialogues):
        families.setdefault(family(dialogue), []).append(dialogue)
    held: set[str] = set()
    for name, members in families.items():
        count = math.ceil(share * len(members)) if len(members) > 1 else 0
        held.update(random.Random(f"{seed}/{name}").sample(members, count))
    return held


def select(drafts: list[Draft], limits: PairLimits, seed: int) -> list[Draft]:
    """At most the cap of each source and language, taken evenly over its dialogues."""
    groups: dict[tuple[str, str], dict[str, list[Draft]]] = {}
    for draft in drafts:
        groups.setdefault((draft.source, draft.lang), {}).setdefault(
            draft.dialogue, []).append(draft)
    chosen: list[Draft] = []
    for key in sorted(groups):
        rng = random.Random(f"{seed}/{key}")
        dialogues = list(groups[key].values())
        rng.shuffle(dialogues)
        for dialogue in dialogues:
            rng.shuffle(dialogue)
        # One of each dialogue in turn, so that long ones do not crowd out the others.
        rounds = max(map(len, dialogues))
        ordered = [d[n] for n in range(rounds) for d in dialogues if n < len(d)]
        chosen += ordered[: limits.per_source.get(key, 0)]
    return sorted(chosen, key=lambda d: d.id)


def group_row(draft: Draft, negatives: tuple[str, ...]) -> dict[str, Any]:
    """One line of the pairs files."""
    return {"id": draft.id, "lang": draft.lang, "source": draft.source, "query": draft.query,
            "positives": list(dict.fromkeys(draft.positives)), "negatives": list(negatives)}


# --- sources ---


def _records(path: Path) -> Iterator[Record]:
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def authored_drafts(authored: Path, harvest: Harvest, rng: random.Random) -> list[SourceInfo]:
    """Our own stories and windows; those for reports are left alone."""
    stories = [p for p in sorted((authored / "stories").glob("as-*.json"))
               if not p.stem.endswith(HELD_OUT_STORIES)]
    windows = sorted(authored.glob("windows_train_*.jsonl"))
    infos = []
    for path in stories:
        story = json.loads(path.read_text(encoding="utf-8"))
        story_drafts(story, harvest)
        infos.append(source_info("pairs:stories", path, "Apache-2.0", [story["id"]]))
    for path in windows:
        ids = []
        for annotated in read_windows(path):
            window_drafts(annotated, harvest, rng)
            ids.append(annotated.window.id)
        infos.append(source_info("pairs:windows", path, "Apache-2.0", ids))
    return infos


def _realmem(records: list[Record], harvest: Harvest, rng: random.Random) -> None:
    for record in records:
        realmem_drafts(record, harvest)


def _kdconv(records: list[Record], harvest: Harvest, rng: random.Random) -> None:
    facts = [fact for record in records for fact in knowledge_facts(record)]
    for record in records:
        turn_drafts(record, harvest, source="kdconv", names={
            f.name for f in facts if f.record == record["id"]})
    slot_drafts(facts, harvest, rng, source="kdconv_slots")


def _service(source: str) -> Callable[[list[Record], Harvest, random.Random], None]:
    def read(records: list[Record], harvest: Harvest, rng: random.Random) -> None:
        facts = [fact for record in records for fact in service_facts(record)]
        for record in records:
            turn_drafts(record, harvest, source=source, names={
                f.name for f in facts if f.record == record["id"]})
            wish_drafts(record, harvest, rng, source=f"{source}_wishes")
        slot_drafts(facts, harvest, rng, source=f"{source}_slots")
    return read


CORPORA: tuple[tuple[str, str, str, Callable[[list[Record], Harvest, random.Random], None]], ...]
CORPORA = (
    ("realmem", "dev/realmem.jsonl", "Apache-2.0", _realmem),
    ("kdconv", "train_extra/kdconv.jsonl", "Apache-2.0", _kdconv),
    ("crosswoz", "train_extra/crosswoz.jsonl", "Apache-2.0", _service("crosswoz")),
    ("sgd", "dev/sgd.jsonl", "CC BY-SA 4.0", _service("sgd")),
)
"""Every public corpus that is read here, beside the parallel one; no other file is opened."""

PARALLEL = (("memorybank_zh", "dev/memorybank_zh.jsonl"),
            ("memorybank_en", "dev/memorybank_en.jsonl"))


def corpus_drafts(external: Path, harvest: Harvest, rng: random.Random) -> list[SourceInfo]:
    """The public corpora that are there; the absent ones are named in the log."""
    infos = []
    for name, relative, licence, reader in CORPORA:
        path = external / relative
        if not path.exists():
            _log.warning("%s: %s is not there, skipped", name, path)
            continue
        records = [r for r in _records(path)
                   if name != "realmem" or r["id"] in TRAINING_PERSONAS]
        reader(records, harvest, rng)
        infos.append(source_info(f"pairs:{name}", path, licence, [r["id"] for r in records]))
    paths = [external / relative for _, relative in PARALLEL]
    if not all(path.exists() for path in paths):
        _log.warning("memorybank: not there in both languages, skipped")
        return infos
    sides = [{r["group"]: r for r in _records(path)} for path in paths]
    for group in sorted(sides[0].keys() & sides[1].keys()):
        parallel_drafts(sides[0][group], sides[1][group], harvest)
    for (name, _), path, side in zip(PARALLEL, paths, sides, strict=True):
        infos.append(source_info(f"pairs:{name}", path, "MIT", [r["id"] for r in side.values()]))
    return infos


def build_pairs(
    external: Path | None, authored: Path, out: Path, seed: int, *,
    limits: PairLimits | None = None,
) -> list[SourceInfo]:
    """Write the groups that the reranker learns from and is calibrated on.

    Args:
        external: Folder of the public corpora; none, or one without them, leaves them out.
        authored: Folder of our own windows and stories.
        out: Folder of the two files.
        seed: Seed of the choice and of the split.
        limits: Caps; by default those of `PairLimits`.

    Returns:
        What was read, for the manifest; records are those that gave at least one group.
    """
    limits = limits or PairLimits()
    harvest, rng = Harvest(), random.Random(seed)
    infos = authored_drafts(authored, harvest, rng)
    if external is None:
        _log.warning("no folder of public corpora: only authored texts are used")
    else:
        infos += corpus_drafts(external, harvest, rng)
    chosen = select(harvest.drafts, limits, seed)
    held = split({draft.dialogue for draft in chosen}, limits.calibration_share, seed)
    miners: dict[str, Miner] = {}
    rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for draft in chosen:
        if draft.pool is not None and draft.pool not in miners:
            miners[draft.pool] = Miner(harvest.pools[draft.pool])
        negatives = mine(draft, miners.get(draft.pool or ""), limits)
        if negatives:
            rows[draft.dialogue in held].append(group_row(draft, negatives))
    for calibrates, name in ((False, "pairs_train.jsonl"), (True, "pairs_calibration.jsonl")):
        _write(out / name, rows[calibrates])
    _log.info("pairs: %d groups to learn from, %d to calibrate", len(rows[False]), len(rows[True]))
    used = {draft.record for draft in chosen}
    return [dataclasses.replace(i, records=[r for r in i.records if r in used]) for i in infos]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
                    encoding="utf-8")
    part.replace(path)
