"""The authored windows: what a careful second annotator would check by hand."""

import hashlib
import json
from pathlib import Path

import pytest

from memory_runtime.corpus import read_windows

AUTHORED = Path(__file__).parents[2] / "data" / "authored"
FILES = sorted(AUTHORED.glob("windows_*.jsonl"))


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_window_is_whole(path):
    faults = []
    for row in rows(path):
        turns = {turn["id"]: turn["text"].casefold() for turn in row["turns"]}
        if not 4 <= len(turns) <= 14 or len(row["forbidden"]) < 2:
            faults.append(f"{row['id']}: {len(turns)} turns, {len(row['forbidden'])} forbidden")
        for gold in row["gold"]:
            said = " ".join(turns.get(name, "") for name in gold["evidence"])
            lost = [literal for literal in gold["literals"] if literal.casefold() not in said
                    or literal.casefold() not in gold["text"].casefold()]
            if lost or not set(gold["evidence"]) <= set(turns):
                faults.append(f"{row['id']}: {gold['text']}: {lost} {gold['evidence']}")
    assert not faults
    windows = list(read_windows(path))
    assert len(windows) == len(rows(path))
    assert all(gold.has_scores for window in windows for gold in window.gold)


def test_no_window_stands_twice():
    ids = [row["id"] for path in FILES for row in rows(path)]
    talks = [tuple(t["text"] for t in row["turns"]) for path in FILES for row in rows(path)]
    assert len(ids) == len(set(ids)) and len(talks) == len(set(talks))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_about_a_third_holds_nothing_and_length_does_not_tell(path):
    sizes = {True: [], False: []}
    for row in rows(path):
        sizes[bool(row["gold"])].append(sum(len(turn["text"]) for turn in row["turns"]))
    full, empty = (sum(part) / len(part) for part in (sizes[True], sizes[False]))
    assert 0.2 <= len(sizes[False]) / (len(sizes[False]) + len(sizes[True])) <= 0.4
    assert 0.8 <= empty / full <= 1.25


def test_the_test_split_is_the_one_that_was_sealed():
    for line in (AUTHORED / "windows_test.sha256").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((AUTHORED / name).read_bytes()).hexdigest() == digest
