import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_runtime.literals import find_literals
from memory_runtime.prompt import parse, quote_grammar, quotes_sha256, wire_line
from memory_runtime.quotes import (
    MAX_QUOTATIONS,
    language_of,
    pieces,
    quotations,
    quote_of,
    without_speaker,
)
from memory_runtime.schema import MAX_TEXT_CHARS, Candidate, Turn, Window, clean_text
from memory_runtime.windows import MAX_TURN_TOKENS, clip_to_tokens

DIALOGUE = st.text(st.one_of(st.sampled_from("。！？!?；;，,.… \n1234\"\\User:用户："),
                             st.characters(blacklist_categories=("Cs", "Cc"))), max_size=80)


def test_pieces_are_runs_of_clauses_and_never_cut_a_number():
    made = pieces("My rent is 1,450.50 euros, and I hate it. Bye!")
    assert made[:3] == ["My rent is 1,450.50 euros", "My rent is 1,450.50 euros, and I hate it.",
                        "My rent is 1,450.50 euros, and I hate it. Bye!"]
    assert "Bye!" in made and len(made) == 6
    assert pieces("") == [] and pieces("。。") == ["。。"]
    assert len(pieces("a, b, c, d, e, f")) == 6 * 4 - 6


def test_of_a_turn_too_long_to_be_shown_only_what_is_shown_whole_is_quoted():
    text = ", ".join(f"item {n} costs {n * 1000 + 450}" for n in range(400))
    shown = clip_to_tokens(text, MAX_TURN_TOKENS)
    made = pieces(text)
    assert 0 < len(made) <= MAX_QUOTATIONS
    assert all(piece in text and piece in shown for piece in made)
    # A clause at the cut would end in half a number.
    whole = set(text.split(", "))
    assert all(set(piece.split(", ")) <= whole for piece in made)
    assert made[0] == "item 0 costs 450" and made[-1].endswith("item 399 costs 399450")


def test_what_no_store_takes_is_not_quoted():
    turn = Turn("t", "user", "fine, bad \ud800 half, zero \x00 too, good")
    assert all(clean_text(text)[1] == 0 for text in quotations(turn, "en"))
    assert "User: good" in quotations(turn, "en")


@pytest.mark.parametrize(("speaker", "language", "expected"), [
    ("user", "zh", "用户：好"), ("assistant", "zh", "助手：好"), ("李雷", "zh", "李雷：好"),
    ("user", "en", "User: 好"), ("assistant", "en", "Assistant: 好"), ("Ana", "en", "Ana: 好"),
])
def test_a_quotation_names_its_speaker(speaker, language, expected):
    made = quote_of(Turn("t", speaker, "好"), "好", language)
    assert made == expected
    assert without_speaker(made) == "好"


def test_the_dialogue_decides_in_which_language_speakers_are_named():
    chinese = Window("w", (Turn("a", "user", "我在用 Kubernetes，记一下"), Turn("b", "user", "ok")))
    assert language_of(chinese) == "zh"
    english = Window("w", (Turn("a", "user", "I live in 北京 with my two sisters"),))
    assert language_of(english) == "en"


@given(DIALOGUE)
def test_every_quotation_stands_in_its_turn_and_fits_a_memory(text):
    turn = Turn("t", "user", text)
    for quotation in quotations(turn, "en"):
        assert without_speaker(quotation) in text
        assert len(quotation) <= MAX_TEXT_CHARS


@given(st.lists(DIALOGUE, min_size=1, max_size=4))
def test_every_quotation_survives_the_wire(texts):
    window = Window("w", tuple(Turn(f"t{n}", "user", text) for n, text in enumerate(texts)))
    for turn in window.turns:
        for quotation in quotations(turn, language_of(window))[:5]:
            line = str(wire_line(Candidate(quotation, (turn.id,)), window))
            parsed = parse(line, window)
            assert parsed.invalid == 0
            assert [c.evidence for c in parsed.candidates] == [(turn.id,)]
            assert parsed.candidates[0].text == quotation.strip()


def test_a_literal_of_a_quotation_is_one_of_its_turn():
    turn = Turn("t", "user", "Ring 010-8823 4417 at 9:30, bring ¥4.8万, ask for Dr. Ho; not 4.7万.")
    for quotation in quotations(turn, "en"):
        assert all(item.raw in turn.text for item in find_literals(without_speaker(quotation)))


def test_the_grammar_names_every_turn_that_says_something_and_escapes_as_json():
    window = Window("w", (Turn("t1", "user", 'She said "no" \\ left.'), Turn("t2", "user", "")))
    grammar = quote_grammar(window)
    assert "q1:" in grammar and "q2" not in grammar
    escaped = json.dumps('User: She said "no" \\ left.')[1:-1]
    assert json.dumps(escaped) in grammar
    assert quote_grammar(Window("w", (Turn("t1", "user", " "),))) == 'start: "[]"'


def test_the_digest_of_quotations_is_pinned():
    """Artifacts are refused when this changes; change it only together with the released one."""
    assert quotes_sha256() == "201bb661a5827a937444d46f87bb5a3c7e651e121bdeb0a6aad5137464f52555"
