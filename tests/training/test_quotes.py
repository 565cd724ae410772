import dataclasses
from pathlib import Path

import pytest

from memory_runtime.corpus import AnnotatedWindow, Forbidden, Gold, read_windows
from memory_runtime.literals import find_literals
from memory_runtime.schema import Candidate, Kind, Layer, Turn, Window
from training.quotes import pieces, quoted

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


def test_what_no_turn_says_stays_as_written_and_twins_are_one():
    talk = window("en", [("user", "Two of each, please."), ("user", "I live in Bonn.")],
                  ("The user orders a pair of chairs and tables.", ("t1",)),
                  ("The user lives in Bonn.", ("t2",)), ("Bonn is where I live.", ("t2",)))
    assert texts(quoted(talk)) == ["The user orders a pair of chairs and tables.",
                                   "User: I live in Bonn."]


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


def test_numbers_and_empty_texts_come_through_whole():
    assert "1,450.50" in " ".join(pieces("It is 1,450.50."))
    assert pieces("") == [] and pieces("。。") == ["。。"]


@pytest.mark.parametrize("name", ["windows_train_en.jsonl", "windows_train_zh.jsonl"])
def test_no_quotation_of_the_corpus_says_what_its_turn_does_not(name):
    num_quoted = num = 0
    for annotated in read_windows(AUTHORED / name):
        said = {turn.id: turn.text for turn in annotated.window.turns}
        written = {gold.candidate.text for gold in annotated.gold}
        num += len(written)
        for after in quoted(annotated).gold:
            if after.candidate.text in written:
                continue
            num_quoted += 1
            piece = after.candidate.text.split("：" if annotated.language == "zh" else ": ", 1)[1]
            assert piece in said[after.candidate.evidence[0]]
            assert all(item.raw in piece for item in find_literals(piece))
    assert num_quoted > 0.8 * num
