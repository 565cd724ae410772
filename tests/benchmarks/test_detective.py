"""The detective on a story made by hand, over the real runtime and stand-ins for the models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.detective import Parts, figures, main, run_scenario
from benchmarks.scenarios import read_scenario, read_scenarios, recall_questions
from benchmarks.stand_ins import BigramEmbedder, Faults, VerbatimEncoder, subject_of
from memory_runtime.errors import ConfigError, SchemaError
from memory_runtime.schema import Turn, Window
from tests.tiny import encoder_artifact, encoder_base, pair_artifact, pair_base

ROOT = Path(__file__).parents[2]

STORY = {
    "id": "story", "lang": "en", "domain": "home", "user": "Ann",
    "sessions": [{"id": "s1", "time": "2026-03-01T10:00:00+00:00", "turns": [
        {"id": "t1", "speaker": "user", "text": "My locker code is 4471."},
        {"id": "t2", "speaker": "assistant", "text": "Noted."}]}],
    "facts": [{"id": "f1", "text": "The locker code is 4471.", "layer": "core",
               "evidence": ["t1"]}],
    "questions": [
        {"id": "q1", "asked_at": "2026-04-01T10:00:00+00:00", "question": "My locker code is?",
         "answer": "4471", "accept": ["4471"], "wrong": ["4417"], "facts": ["f1"],
         "kind": "number"},
        {"id": "q2", "asked_at": "2026-04-01T10:00:00+00:00",
         "question": "Which yacht belongs to grandmother?", "answer": "never said",
         "accept": ["never"], "wrong": ["(?i)yacht is"], "facts": [], "kind": "never_said"}],
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "scenarios"
    path.mkdir()
    (path / "story.json").write_text(json.dumps(STORY), encoding="utf-8")
    return path


def test_story_is_told_and_asked_through_the_runtime(folder):
    scenario = read_scenario(folder / "story.json")
    items, stored = run_scenario(scenario, Parts(VerbatimEncoder(), BigramEmbedder()))
    assert stored == 1
    assert [item["verdict"] for item in items] == ["correct", "refused"]
    assert "4471" in items[0]["reply"]
    assert items[0]["memories"] == ["My locker code is 4471."]
    assert items[0]["id"] == "story/q1"


def item(kind, verdict, layers=("core",), context=10, story=100):
    return {"kind": kind, "verdict": verdict, "layers": list(layers), "context_tokens": context,
            "story_tokens": story}


def test_shares_count_questions_about_facts_only():
    made = figures([item("number", "correct"), item("date", "altered", ("semantic",)),
                    item("never_said", "refused", ()), item("never_said", "other", ())])
    assert (made["correct"], made["altered"], made["refused"], made["other"]) == (0.5, 0.5, 0, 0)
    assert made["correct_core"] == 1.0
    assert (made["never_said_refused"], made["never_said_fabricated"]) == (0.5, 0.5)
    assert made["context_reduction"] == pytest.approx(0.9)


def test_nothing_asked_gives_no_figures():
    assert figures([])["correct"] is None
    assert figures([])["never_said_fabricated"] is None


def test_command_writes_one_item_a_question(folder, tmp_path):
    out = tmp_path / "out.json"
    assert main(["--scenarios", str(folder), "--encoder", "stub", "--embedder", "bigrams",
                 "--json", str(out)]) == 0
    made = json.loads(out.read_text(encoding="utf-8"))
    assert set(made) == {"metrics", "by", "items", "meta"}
    assert {"en", "home", "number", "never_said"} <= set(made["by"])
    assert made["metrics"]["correct"] == 1.0
    assert [row["id"] for row in made["items"]] == ["story/q1", "story/q2"]
    assert all({"reply", "memories", "verdict"} <= set(row) for row in made["items"])


def test_tuned_artifact_runs_through_the_whole_product(folder, tmp_path):
    base, e5 = encoder_base(tmp_path / "lm"), pair_base(tmp_path / "e5")
    encoder, reranker = encoder_artifact(tmp_path / "a", base), pair_artifact(tmp_path / "r", e5)
    out = tmp_path / "out.json"
    assert main(["--scenarios", str(folder), "--artifact", str(encoder), "--base", str(base),
                 "--reranker", str(reranker), "--e5", str(e5), "--answer", "local",
                 "--json", str(out)]) == 0
    made = json.loads(out.read_text(encoding="utf-8"))
    assert len(made["items"]) == 2
    assert set(made["meta"]["artifacts"]) == {"encoder", "embedder", "reranker"}


@pytest.mark.parametrize("extra", [[], ["--answer", "remote", "--encoder", "stub"],
                                   ["--answer", "local", "--encoder", "stub", "--embedder",
                                    "bigrams"]])
def test_options_that_do_not_go_together_are_refused(extra, folder, tmp_path):
    arguments = ["--scenarios", str(folder), "--json", str(tmp_path / "o.json"), *extra]
    if "remote" in extra:
        arguments += ["--embedder", "bigrams"]
    assert main(arguments) == 2


def test_broken_scenarios_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no scenarios"):
        read_scenarios(tmp_path)
    broken = STORY | {"questions": [STORY["questions"][0] | {"facts": ["f9"]}]}
    (tmp_path / "x.json").write_text(json.dumps(broken), encoding="utf-8")
    with pytest.raises(SchemaError, match="f9"):
        read_scenarios(tmp_path)


def test_authored_stories_make_a_recall_set():
    scenarios = read_scenarios(ROOT / "data" / "authored" / "stories")
    questions = recall_questions(scenarios)
    assert {q.language for q in questions} == {"zh", "en"}
    assert all(set(q.evidence) <= {d.id for d in q.pool} for q in questions)


def test_stand_ins_take_user_turns_as_they_stand():
    window = Window("w", (Turn("t1", "user", "我妈对青霉素过敏。"),
                          Turn("t2", "assistant", "好的", "assistant"),
                          Turn("t3", "user", "My budget isn't 300.")))
    (made,) = VerbatimEncoder().extract([window])
    assert [c.text for c in made.candidates] == ["我妈对青霉素过敏。", "My budget isn't 300."]
    assert [c.subject for c in made.candidates] == ["妈", "user"]
    assert [c.polarity for c in made.candidates] == ["affirmed", "negated"]
    assert {c.keep for c in made.candidates} == {7 / 9}


@pytest.mark.parametrize(("text", "subject"), [
    ("My sister lives in Oslo.", "sister"), ("My locker PIN is 100.", "user"),
    ("用户喜欢茶", "user"), ("我的老板姓王", "老板")])
def test_subject_is_the_user_unless_another_person_opens(text, subject):
    assert subject_of(text) == subject


def test_told_faults_happen_on_their_call_only():
    encoder = VerbatimEncoder(Faults({2}))
    assert encoder.extract([]) == []
    with pytest.raises(RuntimeError, match="call 2"):
        encoder.extract([])
    assert encoder.extract([]) == []


def test_bigram_vectors_are_unit_and_near_for_like_texts():
    a, b, c = BigramEmbedder().embed(["my locker code", "locker code", "去爬山"], kind="passage")
    assert a @ a == pytest.approx(1.0, abs=1e-5)
    assert a @ b > 0.7 > 0.3 > a @ c
