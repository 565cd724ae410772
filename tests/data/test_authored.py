"""The authored windows as a corpus; what each of them must hold is in test_sources.py."""

import hashlib
import json
import re
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


@pytest.mark.parametrize("name", ["windows_test.sha256", "stories_test.sha256"])
def test_the_test_split_is_the_one_that_was_sealed(name):
    lines = (AUTHORED / name).read_text().splitlines()
    sealed = {file: digest for digest, file in (line.split() for line in lines)}
    assert sealed == {
        file: hashlib.sha256((AUTHORED / file).read_bytes()).hexdigest() for file in sealed}
    there = AUTHORED.glob("windows_test_*.jsonl" if "windows" in name else "stories_test/*.json")
    assert {path.relative_to(AUTHORED).as_posix() for path in there} == set(sealed)


STORIES = sorted(AUTHORED.glob("stories*/*.json"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_is_whole_and_its_patterns_judge_its_own_answers(path):
    story = json.loads(path.read_text())
    turns = {turn["id"] for session in story["sessions"] for turn in session["turns"]}
    facts = {fact["id"]: fact for fact in story["facts"]}
    assert len(facts) == 20 and len(story["questions"]) == 18
    assert all(fact["evidence"] and set(fact["evidence"]) <= turns for fact in facts.values())

    def hit(patterns, text):
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)

    for question in story["questions"]:
        assert set(question["facts"]) <= set(facts)
        assert bool(question["facts"]) != (question["kind"] == "never_said")
        if question["facts"]:
            assert hit(question["accept"], question["answer"])
            assert not hit(question["wrong"], question["answer"])
            for fact in (facts[name] for name in question["facts"]):
                assert "superseded_by" in fact or not hit(question["wrong"], fact["text"])
