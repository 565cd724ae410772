import dataclasses
from pathlib import Path

import pytest

from memory_runtime.corpus import AnnotatedWindow, Forbidden, Gold, read_windows
from memory_runtime.literals import find_literals
from memory_runtime.quotes import quotations, without_speaker
from memory_runtime.schema import Candidate, Kind, Layer, Turn, Window
from training.quotes import quoted

AUTHORED = Path(__file__).parents[2] / "data" / "authored"


def window(language, turns, *gold):
    made = tuple(Turn(f"t{n}", speaker, text, speaker if speaker == "assistant" else "user")
                 for n, (speaker, text) in enumerate(turns, start=1))
    return AnnotatedWindow(Window("w", made), language, "test", gold=tuple(
        Gold(Candidate(text, evidence, "user", "", Layer.CORE, Kind.FACT))
        for text, evidence in gold))


def texts(annotated):
    return [gold.candidate.text for gold in annotated.gold]


def test_a_memory_is_quoted_from_the_turn_that_says_it():
    talk = window("en", [("user", "Morning. My rent is 1,450.50 euros, and I hate it. Bye!"),
                         ("assistant", "I will call the landlord on Monday.")],
                  ("The user's rent is 1,450.50 euros.", ("t1",)),
                  ("The assistant will call the landlord on Monday.", ("t1", "t2")))
    made = quoted(talk)
    assert texts(made) == ["User: My rent is 1,450.50 euros",
                           "Assistant: I will call the landlord on Monday."]
    assert made.gold[1].candidate.evidence == ("t2",)


def test_chinese_is_quoted_alike_and_a_name_stays_a_name():
    talk = window("zh", [("李雷", "早啊，我妈对花生过敏，别放。"), ("user", "好的")],
                  ("李雷的妈妈对花生过敏。", ("t1",)))
    assert texts(quoted(talk)) == ["李雷：我妈对花生过敏"]


def test_what_no_turn_says_is_left_out_and_twins_are_one():
    talk = window("en", [("user", "Two each, please."), ("user", "I live in Bonn.")],
                  ("The user orders a pair of chairs and tables.", ("t1",)),
                  ("The user lives in Bonn.", ("t2",)), ("Bonn is where I live.", ("t2",)))
    assert texts(quoted(talk)) == ["User: I live in Bonn."]


def test_the_only_memory_of_a_window_is_never_left_out():
    talk = window("en", [("user", "Two each, please."), ("user", "Right.")],
                  ("Somebody orders chairs and tables.", ("t1",)))
    assert len(quoted(talk).gold) == 1


def test_of_two_pieces_the_one_with_the_literals_is_quoted():
    talk = window("en", [("user", "The rent for my flat, it is 900.")],
                  ("The rent for the flat is 900.", ("t1",)))
    gold = dataclasses.replace(talk.gold[0], literals=("900",))
    made = quoted(dataclasses.replace(talk, gold=(gold,))).gold
    assert "900" in made[0].candidate.text and made[0].literals == ("900",)


def test_what_is_refused_is_quoted_too_and_never_what_is_kept():
    talk = window("en", [("user", "Make it five seats. No wait, three seats."),
                         ("assistant", "Three it is. Cats sleep sixteen hours a day.")],
                  ("The user wants three seats.", ("t1",)))
    talk = dataclasses.replace(talk, forbidden=(
        Forbidden("The user wants to make it five seats.", "withdrawn"),
        Forbidden("The user wants three seats now.", "the same")))
    refused = [item.text for item in quoted(talk).forbidden]
    assert texts(quoted(talk)) == ["User: three seats."]
    assert "User: Make it five seats." in refused
    assert any("Cats sleep" in text for text in refused)
    assert all("three seats" not in text for text in refused)


@pytest.mark.parametrize("name", ["windows_train_en.jsonl", "windows_train_zh.jsonl"])
def test_no_quotation_of_the_corpus_says_what_its_turn_does_not(name):
    num_after = num_before = 0
    for annotated in read_windows(AUTHORED / name):
        after = quoted(annotated)
        turns = {turn.id: turn for turn in annotated.window.turns}
        num_before += len(annotated.gold)
        num_after += len(after.gold)
        assert bool(after.gold) == bool(annotated.gold)
        for candidate in (gold.candidate for gold in after.gold):
            said = turns[candidate.evidence[0]]
            assert candidate.text in quotations(said, annotated.language)
            assert all(item.raw in said.text
                       for item in find_literals(without_speaker(candidate.text)))
    assert num_after > 0.9 * num_before
