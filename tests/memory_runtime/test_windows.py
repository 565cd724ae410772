import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_runtime.corpus import read_window
from memory_runtime.errors import SchemaError
from memory_runtime.schema import Scope, Turn, Window, detect_language
from memory_runtime.windows import WindowLimits, clip_to_tokens, cut_windows, estimate_tokens

TURNS = st.lists(st.tuples(st.text(max_size=400), st.sampled_from(["s1", "s2"])), max_size=40)


def make(rows):
    ordered = sorted(rows, key=lambda row: row[1])
    return [Turn(f"t{n}", "user", text, session=session)
            for n, (text, session) in enumerate(ordered)]


@given(TURNS)
@settings(max_examples=80, deadline=None)
def test_every_turn_is_in_exactly_one_window_and_sessions_never_mix(rows):
    turns = make(rows)
    windows = cut_windows(turns)
    assert [t for w in windows for t in w.turns] == turns
    assert all(len({t.session for t in w.turns}) == 1 for w in windows)
    assert all(len(w.turns) <= 14 for w in windows)


@given(TURNS)
@settings(max_examples=50, deadline=None)
def test_a_window_of_several_turns_stays_under_its_tokens(rows):
    limits = WindowLimits(max_tokens=120)
    for window in cut_windows(make(rows), limits=limits):
        tokens = sum(min(estimate_tokens(t.text), limits.max_turn_tokens) + 4 for t in window.turns)
        assert len(window.turns) == 1 or tokens <= 120


def test_context_is_the_two_turns_before_and_stays_in_the_session():
    turns = [Turn(f"t{n}", "user", f"word{n}", session="s") for n in range(30)]
    windows = cut_windows(turns)
    assert windows[0].context == ()
    start = len(windows[0].turns)
    assert windows[1].context == tuple(turns[start - 2 : start])


def test_a_gap_of_more_than_half_an_hour_cuts():
    times = ["2026-01-01T10:00:00+08:00", "2026-01-01T10:29:00+08:00", "2026-01-01T11:00:00+08:00"]
    turns = [Turn(f"t{n}", "user", "x", observed_at=at) for n, at in enumerate(times)]
    assert [len(w.turns) for w in cut_windows(turns)] == [2, 1]


def test_a_forced_cut_falls_where_the_topic_changes():
    cats = [f"my cat Whiskers ate the fish number {n} in the kitchen" for n in range(9)]
    cars = [f"the car engine needs motor oil service {n} at the garage" for n in range(9)]
    turns = [Turn(f"t{n}", "user", text) for n, text in enumerate(cats + cars)]
    assert len(cut_windows(turns)[0].turns) == 9


def test_a_short_run_is_not_cut_after_its_first_turn_for_want_of_neighbours():
    turns = [Turn(f"t{n}", "user", f"my cat Whiskers likes fish number {n}") for n in range(9)]
    windows = cut_windows(turns, limits=WindowLimits(max_turns=3))
    assert [len(w.turns) for w in windows] == [3, 3, 3]


@pytest.mark.parametrize("text", ["word " * 2000, "我喜欢在周末去爬山。" * 300])
def test_clipping_keeps_both_ends_and_the_bound(text):
    clipped = clip_to_tokens(text, 100)
    assert clipped[:20] == text[:20] and text.rstrip().endswith(clipped[-8:].strip())
    assert estimate_tokens(clipped) <= 110


def test_an_empty_scope_or_window_is_refused():
    for user in ("", "  ", "a\x00"):
        with pytest.raises(SchemaError, match="user"):
            Scope(user=user)
    with pytest.raises(SchemaError, match="no turns"):
        Window("w", ())
    with pytest.raises(SchemaError, match="differ"):
        Window("w", (Turn("t", "a", "x"), Turn("t", "b", "y")))


def test_language_is_read_off_the_letters():
    assert detect_language("我在用 Python 写代码") == "zh"
    assert detect_language("I live in 北京 and work at a bank near the river") == "en"


@pytest.mark.parametrize("changes, message", [
    ({"lang": "fr"}, "lang is 'fr'"),
    ({"gold": [{"text": "x", "evidence": ["t9"], "layer": "core", "kind": "fact"}]}, "t9"),
    ({"gold": [{"text": "x", "evidence": ["t1"], "layer": "top", "kind": "fact"}]}, "top"),
])
def test_a_faulty_annotated_window_is_named(changes, message):
    row = {"id": "w7", "lang": "en", "turns": [{"id": "t1", "speaker": "user", "text": "hi"}]}
    assert read_window(row).window.id == "w7"
    with pytest.raises(SchemaError, match=message) as caught:
        read_window({**row, **changes})
    assert "w7" in str(caught.value)
