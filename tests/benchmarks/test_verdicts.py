"""A reply counts once: altered, correct, refused or other."""

from __future__ import annotations

import pytest

from benchmarks.verdicts import is_refusal, num_quotes, verdict_of

BUDGET = {"kind": "number", "accept": ["3万|30000"], "wrong": ["5万|50000"]}
NEVER = {"kind": "never_said", "accept": ["(?i)never mentioned"], "wrong": ["(?i)name is [A-Z]"]}
MEMORIES = ["用户的预算上限是3万元。", "用户计划五月去里斯本旅行。", "用户的妹妹住在成都高新区。"]


@pytest.mark.parametrize(("reply", "verdict"), [
    ("预算是3万元。", "correct"),
    ("预算是5万元。", "altered"),
    ("原来3万，现在5万。", "altered"),
    ("我不确定。", "refused"),
    ("There is no record of that.", "refused"),
    ("", "refused"),
    ("今天天气很好。", "other"),
])
def test_fact_question(reply, verdict):
    assert verdict_of(BUDGET, reply) == verdict


@pytest.mark.parametrize(("reply", "verdict"), [
    ("You never mentioned it.", "refused"),
    ("I don't know that.", "refused"),
    ("Her name is Ann.", "altered"),
    ("She lives in Oslo.", "other"),
])
def test_question_about_something_never_said(reply, verdict):
    assert verdict_of(NEVER, reply) == verdict


def test_a_dump_is_no_answer_even_with_the_right_value_in_it():
    assert num_quotes("".join(MEMORIES), MEMORIES) == 3
    assert verdict_of(BUDGET, "".join(MEMORIES), MEMORIES) == "other"
    assert verdict_of(BUDGET, MEMORIES[0] + MEMORIES[1], MEMORIES) == "correct"
    assert verdict_of(BUDGET, "3万" + "还有很多别的话要说" * 20) == "other"


def test_a_wrong_value_is_altered_however_long_the_reply():
    assert verdict_of(BUDGET, "5万" + "还有很多别的话要说" * 20) == "altered"


@pytest.mark.parametrize("reply", ["我不记得了", "没有提到过", "记录里没有", "I do not have that",
                                   "Nothing recorded about that.", "Not sure."])
def test_refusals_are_known_in_both_languages(reply):
    assert is_refusal(reply)


@pytest.mark.parametrize("reply", ["The user is not allergic to nuts.", "用户不吃香菜。",
                                   "The user never eats fish."])
def test_a_negated_fact_is_no_refusal(reply):
    assert not is_refusal(reply)
