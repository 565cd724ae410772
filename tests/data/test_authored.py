"""The authored windows as a corpus; what each of them must hold is in test_sources.py."""

import hashlib
import json
from pathlib import Path

import pytest

AUTHORED = Path(__file__).parents[2] / "data" / "authored"
FILES = sorted(AUTHORED.glob("windows_*.jsonl"))


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def test_no_dialogue_stands_twice():
    talks = [tuple(t["text"] for t in row["turns"]) for path in FILES for row in rows(path)]
    assert len(talks) == len(set(talks))


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
