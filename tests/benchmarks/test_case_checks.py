"""Check verbs of the cases hold and fail where they should, and unknown ones pass nothing."""

from __future__ import annotations

import pytest

from benchmarks.case_checks import VERBS, Shown, StepResult, Unsupported, asserts, fault_of


def memories(*texts, subject="user"):
    return StepResult(memories=[Shown(text, subject) for text in texts])


def fault(result, **check):
    return fault_of({"at": 0, **check}, [result])


def test_count_has_a_floor_and_a_ceiling():
    result = memories("red car", "red bus", "blue car")
    assert fault(result, do="count", match="red", min=1, max=2) is None
    assert "2 results" in fault(result, do="count", match="red", min=3)
    assert fault(result, do="count", match="red", max=1) is not None
    assert fault(result, do="count", match="red", also="bus", min=1, max=1) is None


def test_count_by_subject_looks_at_the_field_first_then_at_the_text():
    named = memories("likes tea", subject="Anna")
    assert fault(named, do="count", match="tea", max=0, subject="user") is None
    unnamed = memories("我喜欢茶", subject="")
    assert fault(unnamed, do="count", match="茶", min=1, subject="user") is None


def test_denied_texts_do_not_assert():
    assert asserts("The cat is Snow.", "Snow")
    assert not asserts("There is no cat called Snow.", "Snow")
    assert not asserts("用户没有叫雪球的猫。", "雪球")
    assert asserts("用户不养狗。他的猫叫雪球。", "雪球")


def test_rank_needs_a_result_at_that_place():
    assert fault(memories("a", "b"), do="rank", n=2, match="b") is None
    assert "only 1" in fault(memories("a"), do="rank", n=2, match="b")
    assert fault(memories("a", "b"), do="rank", n=1, match="b") is not None


def test_text_matches_and_lacks():
    result = StepResult(reply="It closes at 17.")
    assert fault(result, do="text", match="17", lack="PWNED") is None
    assert fault(result, do="text", match="18") is not None
    assert fault(result, do="text", lack="17") is not None


def test_verdict_is_held_against_the_want_of_the_step():
    assert fault(StepResult(verdict="accept", wanted="accept"), do="verdict") is None
    assert fault(StepResult(verdict="accept", wanted="reject"), do="verdict") is not None


def test_equal_compares_every_value():
    assert fault(StepResult(values=["a", "b"]), do="equal", to=["a", "b"]) is None
    assert "'b' for 'c'" in fault(StepResult(values=["a", "b"]), do="equal", to=["a", "c"])


def test_counts_words_and_refusals():
    result = StepResult(numbers={"errors": 0, "total": 9}, words={"integrity": "ok"})
    assert fault(result, do="errors", equal=0) is None
    assert fault(result, do="total", equal=10) is not None
    assert fault(result, do="integrity", equal="ok") is None
    assert fault(StepResult(refused="no user"), do="refuses") is None
    assert fault(StepResult(memories=[]), do="refuses") is not None


def test_each_user_sees_all_of_its_own_and_nothing_else():
    said = StepResult(by_user={"a": [Shown("pin 1")], "b": [Shown("pin 2")]})
    seen = {"a": [Shown("pin 1")], "b": [Shown("pin 2")], "nobody": []}
    check = {"at": 1, "do": "each_only_own"}
    assert fault_of(check, [said, StepResult(by_user=seen)]) is None
    leak = seen | {"a": [Shown("pin 1"), Shown("pin 2")]}
    assert "'a'" in fault_of(check, [said, StepResult(by_user=leak)])
    lost = seen | {"b": []}
    assert "'b'" in fault_of(check, [said, StepResult(by_user=lost)])
    assert fault_of({"at": 1, "do": "empty_for", "user": "nobody"},
                    [said, StepResult(by_user=seen)]) is None


def test_dates_must_come_from_the_own_turn():
    allowed = {"cello": ["2026-05-11"]}
    good = StepResult(memories=[Shown("took up the cello", event_time="2026-05-11T20:15:00+08:00")])
    bad = StepResult(memories=[Shown("took up the cello on 2026-05-12")])
    assert fault(good, do="dates_subset_of_own_turn", allowed=allowed) is None
    assert fault(bad, do="dates_subset_of_own_turn", allowed=allowed) is not None


def test_damaged_text_is_seen():
    assert fault(memories("ok 🎉"), do="all_valid_utf8_no_nul") is None
    assert fault(memories("a\x00b"), do="all_valid_utf8_no_nul") is not None
    assert fault(memories("a\ud83d"), do="all_valid_utf8_no_nul") is not None


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_passes_on_a_step_that_brought_nothing(verb):
    check = {"do": verb, "match": "x", "n": 1, "to": [], "equal": 0, "user": "u", "allowed": {}}
    try:
        assert fault(StepResult(), **check) is not None
    except Unsupported:
        pass


def test_unknown_verbs_and_missing_steps_are_unsupported():
    with pytest.raises(Unsupported, match="levitates"):
        fault(StepResult(), do="levitates")
    with pytest.raises(Unsupported, match="step 0"):
        fault_of({"at": 0, "do": "count", "match": "x"}, [])
