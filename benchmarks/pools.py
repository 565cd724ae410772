"""Questions of public sets with what may be searched and what should be found; nothing is copied.

One definition per set of the pool: turns of the conversation (LoCoMo, BEAM), the record's own
turns among noise (MemSim), gold memories (MADial, RealMem, HaluMem). A pool never holds what came
after the question was asked.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memory_runtime.errors import ConfigError, SchemaError

NUM_NOISE = 200
"""Foreign turns in every MemSim pool."""

EVALUATION_PERSONAS = ("realmem/Adeleke_Okonjo", "realmem/Lin_Wanyu")
"""RealMem users that nothing was trained on."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Document:
    """One thing that may be found.

    Attributes:
        id: Unique inside its pool.
        text: What is searched.
        time: ISO time of the turn or memory, where the set has one.
        speaker: Who said it; empty for memories.
    """

    id: str
    text: str
    time: str | None = None
    speaker: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its evidence and its pool.

    Attributes:
        id: Unique in its set.
        record: Id of the record it belongs to.
        text: The query.
        category: Group for the figures.
        language: `zh` or `en`.
        evidence: Ids of the pool that should be found, at least one.
        pool: What may be searched. Questions with the same pool share the very same tuple.
        time: When it was asked.
    """

    id: str
    record: str
    text: str
    category: str
    language: str
    evidence: tuple[str, ...]
    pool: tuple[Document, ...]
    time: str | None = None


def _turns(record: Record) -> list[Document]:
    found = []
    for session in record["sessions"]:
        for turn in session["turns"]:
            caption = turn.get("image_caption")
            text = f"{turn['text']} [{caption}]" if caption else turn["text"]
            found.append(Document(turn["id"], text, turn.get("time") or session.get("time"),
                                  turn["speaker"]))
    return found


def _question(
    record: Record, row: dict[str, Any], pool: Sequence[Document], evidence: Sequence[str]
) -> Question | None:
    held = {document.id for document in pool}
    kept = tuple(dict.fromkeys(name for name in evidence if name in held))
    if not kept:
        return None
    return Question(row["id"], record["id"], row["question"], row.get("category") or "all",
                    record["lang"], kept, tuple(pool) if not isinstance(pool, tuple) else pool,
                    row.get("time"))


def _by_turn(record: Record) -> Iterator[Question]:
    pool = tuple(_named(_turns(record)))
    for row in record["questions"]:
        question = _question(record, row, pool, row["evidence"])
        if question is not None:
            yield question


def _named(turns: Sequence[Document]) -> list[Document]:
    """Turns with the speaker in the text: questions about two people name the one they mean."""
    return [Document(t.id, f"{t.speaker}: {t.text}", t.time, t.speaker) for t in turns]


def noise_pool(question_id: str, own: Sequence[Document], noise: Sequence[Document]
               ) -> tuple[Document, ...]:
    """A trajectory hidden among noise; the question id alone decides which noise and what order.

    Noise gets times of the trajectory and the order is shuffled, or a search by time and a ranking
    with ties would favour the trajectory.
    """
    rng = random.Random(f"memsim:{question_id}")
    drawn = rng.sample(list(noise), min(NUM_NOISE, len(noise)))
    times = [document.time for document in own]
    pool = [*own, *(replace(document, time=rng.choice(times)) for document in drawn)]
    rng.shuffle(pool)
    return tuple(pool)


def _memsim(record: Record, noise: Sequence[Document]) -> Iterator[Question]:
    own = _turns(record)
    for row in record["questions"]:
        question = _question(record, row, noise_pool(row["id"], own, noise), row["evidence"])
        if question is not None:
            yield question


def _memory(row: dict[str, Any]) -> Document:
    return Document(row["id"], row["text"], row.get("time"))


def _madial(record: Record) -> Iterator[Question]:
    pool = tuple(_memory(row) for row in record["memories"])
    for row in record["questions"]:
        question = _question(record, row, pool, row["evidence"])
        if question is not None:
            yield question


def _realmem(record: Record) -> Iterator[Question]:
    """Only memories whose source turn came before the turn that asks."""
    if record["id"] not in EVALUATION_PERSONAS:
        return
    place = {turn.id: n for n, turn in enumerate(_turns(record))}
    learnt = [(max(place[turn] for turn in row["evidence"]), _memory(row))
              for row in record["memories"] if row["evidence"]]
    for row in record["questions"]:
        asked = row.get("asked_at")
        limit = place[asked] if asked is not None else len(place)
        pool = tuple(document for at, document in learnt if at < limit)
        question = _question(record, row, pool, row.get("evidence_memories") or ())
        if question is not None:
            yield question


def _halumem(record: Record) -> Iterator[Question]:
    """Only memories to be stored, of sessions up to the one that the question follows."""
    order = {session["id"]: n for n, session in enumerate(record["sessions"])}
    stored = [(order[row["session"]], _memory(row)) for row in record["memories"]
              if row.get("store", True)]
    for row in record["questions"]:
        after = row.get("after_session")
        limit = order[after] if after is not None else len(order)
        pool = tuple(document for at, document in stored if at <= limit)
        question = _question(record, row, pool, row.get("evidence_memories") or ())
        if question is not None:
            yield question


_READERS: dict[str, Callable[[Record], Iterator[Question]]] = {
    "locomo": _by_turn, "beam100k": _by_turn, "madial_zh": _madial, "madial_en": _madial,
    "realmem": _realmem, "halumem": _halumem,
}
SETS = (*_READERS, "memsim")
ALIASES = {"beam": ("beam100k",), "madial": ("madial_zh", "madial_en")}


def set_names(text: str) -> list[str]:
    """Names from a comma-separated list; `madial` and `beam` are short forms, `all` is all.

    Raises:
        ConfigError: A name is unknown.
    """
    names: list[str] = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        names += SETS if name == "all" else ALIASES.get(name, (name,))
    wrong = sorted(set(names) - set(SETS))
    if wrong or not names:
        raise ConfigError(f"--sets names {wrong or 'nothing'}; allowed are {list(SETS)}, "
                          f"{sorted(ALIASES)} and all")
    return list(dict.fromkeys(names))


def set_file(directory: Path, name: str) -> Path:
    """The file of a set, in the folder or in its `dev` folder.

    Raises:
        ConfigError: It is in neither.
    """
    for path in (directory / f"{name}.jsonl", directory / "dev" / f"{name}.jsonl"):
        if path.is_file():
            return path
    raise ConfigError(f"set {name}: no {name}.jsonl in {directory} or {directory / 'dev'}; "
                      "give the folder of the sets with --data")


def set_files(directory: Path, name: str) -> list[Path]:
    """All files that a set is made of."""
    files = [set_file(directory, name)]
    return [*files, set_file(directory, "noise_zh")] if name == "memsim" else files


def _rows(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8") as lines:
        for n, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise SchemaError(f"{path}:{n} is not JSON: {error}") from error


def record_ids(directory: Path, name: str) -> set[str]:
    """Ids of the records of a set whose questions would be asked."""
    return {question.record for question in read_questions(directory, name)}


def read_questions(
    directory: Path, name: str, *, limit: int | None = None, seed: int = 1
) -> list[Question]:
    """Questions of a set that have evidence in their pool.

    Args:
        directory: Folder of the sets.
        name: One of `SETS`.
        limit: At most so many, drawn over the whole set with the seed.
        seed: Of the draw.

    Raises:
        ConfigError, SchemaError: The set is missing or does not fit the format.
    """
    path = set_file(directory, name)
    questions: list[Question] = []
    try:
        if name == "memsim":
            noise = [Document(f"noise:{row['id']}", row["text"], None, "user")
                     for row in _rows(set_file(directory, "noise_zh"))]
            for record in _rows(path):
                questions += _memsim(record, noise)
        else:
            for record in _rows(path):
                questions += _READERS[name](record)
    except (KeyError, TypeError) as error:
        raise SchemaError(f"{path} does not fit the format of the sets: {error!r}") from error
    if limit is not None and limit < len(questions):
        drawn = random.Random(f"{seed}:{name}").sample(range(len(questions)), limit)
        questions = [questions[n] for n in sorted(drawn)]
    return questions
