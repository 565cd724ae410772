from dataclasses import replace

import numpy as np
import pytest

from memory_runtime.admit import Arrival, decide, is_swap
from memory_runtime.ground import ground
from memory_runtime.index import ScopeIndex
from memory_runtime.schema import Candidate, Kind, Scope, Scores, State, Turn, Window
from memory_runtime.sqlite import SqliteStore
from tests.memory_runtime.stand_ins import SEVEN, HashEmbedder, settings

CONFIG = settings()
KEY = Scope("u1").key


class Scene:
    """A store into which candidates are admitted one after another."""

    def __init__(self):
        self.store, self.embedder = SqliteStore(":memory:"), HashEmbedder()
        self.count = 0

    def admit(self, text, *, at="2026-03-01T09:00:00+08:00", said=None, score=SEVEN, **fields):
        self.count += 1
        turn = Turn(f"t{self.count}", "user", said or text, "user", at)
        candidate = Candidate(text, (turn.id,), scores=Scores(score, score, score), **fields)
        grounded = ground(candidate, Window("w", (turn,), at)).candidate
        vector = np.asarray(self.embedder.embed([text], kind="passage"))[0]
        index = ScopeIndex(CONFIG.store.embedder)
        index.sync(self.store, KEY)
        decision = decide(Arrival(grounded, vector, at, turn.text), index, CONFIG,
                          now=f"2026-04-01T00:00:{self.count:02d}+00:00")
        self.store.put(KEY, decision.rows, decision.events)
        return decision

    def texts(self, state=State.ACTIVE):
        return [r.memory.candidate.text for r in self.store.memories(KEY, states=[state])]


@pytest.fixture
def scene():
    return Scene()


def test_a_new_fact_is_inserted(scene):
    assert scene.admit("用户的代号是青禾。").action == "insert"


def test_a_repeat_merges_and_adds_its_evidence(scene):
    first = scene.admit("我的会员卡号是ＶＩＰ８８２０３６。")
    again = scene.admit("我的会员卡号是VIP882036。", at="2026-03-04T09:00:00+08:00")
    assert again.action == "merge" and again.memory_id == first.memory_id
    (row,) = scene.store.memories(KEY)
    assert row.memory.candidate.evidence == ("t1", "t2")
    assert [e.event for e in scene.store.history(KEY, first.memory_id)] == ["added", "merged"]


@pytest.mark.parametrize(("a", "b"), [
    ("Locker code 1-1 is 4821.", "Locker code 1-2 is 4822."),
    ("用户的医生是陈默。", "用户的医生是陈墨。"), ("会议在3月5日。", "会议在3月6日。"),
    ("My shoe size is 43.", "My glove size is 43."), ("用户喜欢猫。", "用户不喜欢猫。"),
    ("I like green tea.", "I like black tea."),
    ("The user paid 5 dollars for bread", "The user paid 5 euros for bread"),
])
def test_near_duplicates_that_differ_in_one_thing_are_never_merged(scene, a, b):
    scene.admit(a)
    assert scene.admit(b).action in ("insert", "short_term")
    assert len(scene.store.memories(KEY)) == 2


def test_the_same_attribute_with_a_newer_value_supersedes(scene):
    old = scene.admit("用户的项目预算上限是3万元。", attribute="预算")
    new = scene.admit("用户的项目预算上限是5万元。", attribute="预算",
                      at="2026-03-09T09:00:00+08:00")
    assert new.action == "supersede"
    assert scene.texts() == ["用户的项目预算上限是5万元。"]
    (row,) = scene.store.memories(KEY, ids=[old.memory_id])
    assert row.memory.state is State.SUPERSEDED
    assert row.memory.superseded_by == new.memory_id
    assert row.memory.valid_to == "2026-03-09T09:00:00+08:00"
    assert [e.event for e in scene.store.history(KEY, new.memory_id)] == ["added", "supersedes"]


def test_what_was_said_earlier_does_not_replace_what_arrived_earlier(scene):
    scene.admit("用户的预算是5万元。", attribute="预算", at="2026-03-09T09:00:00+08:00")
    late = scene.admit("用户的预算是3万元。", attribute="预算", at="2026-03-01T09:00:00+08:00")
    assert late.action == "outdated"
    assert scene.texts() == ["用户的预算是5万元。"]
    assert scene.texts(State.SUPERSEDED) == ["用户的预算是3万元。"]


def test_without_an_attribute_a_change_needs_a_cue(scene):
    scene.admit("The standup meeting starts at 9:30 am on the third floor")
    assert scene.admit("The standup meeting starts at 10:30 am on the third floor").action != (
        "supersede")
    changed = scene.admit("The standup meeting starts at 11:30 am on the third floor",
                          at="2026-03-05T09:00:00+08:00",
                          said="Update: the standup meeting now starts at 11:30 am on the third "
                               "floor")
    assert changed.action == "supersede"


def test_a_flipped_preference_with_the_same_attribute_supersedes(scene):
    scene.admit("用户喜欢科幻电影。", attribute="科幻电影", kind=Kind.PREFERENCE)
    flipped = scene.admit("用户不再喜欢科幻电影。", attribute="科幻电影", kind=Kind.PREFERENCE,
                          polarity="negated", at="2026-03-09T09:00:00+08:00")
    assert flipped.action == "supersede"


def test_two_events_of_one_attribute_stand_side_by_side(scene):
    scene.admit("The user paid 40 dollars for a taxi.", attribute="taxi", kind=Kind.EVENT)
    assert scene.admit("The user paid 52 dollars for a taxi.", attribute="taxi",
                       kind=Kind.EVENT).action == "insert"


def test_another_persons_fact_does_not_touch_the_users(scene):
    scene.admit("用户的鞋码是43。", attribute="鞋码")
    assert scene.admit("妈妈的鞋码是37。", attribute="鞋码", subject="妈妈",
                       at="2026-03-09T09:00:00+08:00").action == "insert"


def test_importance_decides_between_long_term_short_term_and_nothing(scene):
    assert scene.admit("The user waters the plants.", score=0.9).action == "insert"
    assert scene.admit("A bus was late once.", score=0.2).action == "short_term"
    weights = replace(CONFIG.importance, novelty=0.0)
    config = replace(CONFIG, importance=weights)
    candidate = Candidate("Nothing much.", ("t9",), scores=Scores())
    index = ScopeIndex(config.store.embedder)
    index.sync(scene.store, KEY)
    arrival = Arrival(candidate, None, "2026-03-01T09:00:00+08:00")
    assert decide(arrival, index, config).action == "drop"


def test_an_explicit_directive_skips_the_threshold(scene):
    decision = scene.admit("I take the late bus, remember that.", score=0.0)
    assert decision.action == "insert"
    assert decision.rows[0].memory.state is State.ACTIVE


def test_a_repeat_lifts_a_short_term_memory(scene):
    low = scene.admit("A bus was late once.", score=0.3)
    assert low.action == "short_term"
    high = scene.admit("A bus was late once.", score=0.9, at="2026-03-02T09:00:00+08:00")
    assert high.action == "merge" and scene.texts() == ["A bus was late once."]


def test_novelty_falls_with_what_the_scope_holds(scene):
    first = scene.admit("The user keeps bees in the garden.").rows[0].memory
    second = scene.admit("The user keeps bees and hens in the big garden.").rows[0].memory
    assert first.novelty == 1.0 and second.novelty < 0.5


def test_a_swap_is_told_from_a_paraphrase():
    assert is_swap("我的医生是陈默", "我的医生是陈墨")
    assert is_swap("I like green tea", "I like black tea")
    assert not is_swap("The user keeps bees in the garden", "In the garden the user keeps bees")
    assert not is_swap("I like the tea", "I like my tea")
