import pytest

from memory_runtime.ground import ground, has_directive
from memory_runtime.schema import Candidate, Kind, Layer, Turn, Window

AT = "2026-03-04T10:00:00+08:00"


def window(*texts: str) -> Window:
    return Window("w", tuple(Turn(f"t{n}", "user", text, "user", AT)
                             for n, text in enumerate(texts, start=1)), AT)


def grounded(text: str, *said: str, **fields):
    evidence = tuple(f"t{n}" for n in range(1, len(said) + 1))
    return ground(Candidate(text, evidence, **fields), window(*said))


@pytest.mark.parametrize(("text", "said"), [
    ("用户的预算上限是3万元。", "预算最多三万块"),
    ("用户在2026年3月3日签了合同。", "昨天签了合同"),
    ("The user leaves on March 6, 2026.", "I leave the day after tomorrow"),
    ("用户今天（2026年3月4日）搬家了。", "搬完家了，累"),
    ("The user trains seven hours a week.", "how many hours? seven, tops"),
    ("The user's flatmate Tomas is scared of water.", "Tomas, my flatmate, is scared of water"),
    ("用户每周三下午3点上课。", "周三下午三点上课"),
])
def test_a_candidate_whose_literals_stand_in_its_evidence_is_kept(text, said):
    assert grounded(text, said).candidate is not None


@pytest.mark.parametrize(("text", "said", "missing"), [
    ("用户的预算上限是5万元。", "预算最多三万块", "5万元"),
    ("用户在2026年3月2日签了合同。", "昨天签了合同", "2026年3月2日"),
    ("The user leaves on March 8.", "I leave the day after tomorrow", "March 8"),
    ("订单号是ZX-6053。", "订单号 ZX-6035", "ZX-6053"),
    ("The user's dentist is Dr Okafor.", "I went to the dentist", "Dr Okafor"),
    ("用户每天吃6毫克。", "每天一片5毫克，烟戒了六年了", "6毫克"),
])
def test_a_made_up_literal_drops_the_candidate_and_is_named(text, said, missing):
    result = grounded(text, said)
    assert result.candidate is None and missing in result.missing


def test_a_number_of_another_turn_does_not_ground_a_candidate():
    both = window("预算三万", "人数是五十人")
    assert ground(Candidate("预算是50万。", ("t1",)), both).candidate is None


def test_a_name_may_come_from_an_earlier_turn():
    both = window("Tomas is my flatmate", "he is scared of water")
    assert ground(Candidate("The user's flatmate Tomas is scared.", ("t2",)), both).candidate


def test_an_identifier_is_put_back_into_the_notation_of_its_evidence():
    result = grounded("The order is zx 6035.", "order ZX-6035 please")
    assert result.candidate is None or "ZX-6035" in result.candidate.text
    result = grounded("The order is ZX6035.", "order ZX-6035 please")
    assert result.candidate is not None
    assert result.candidate.text == "The order is ZX-6035." and result.repaired == 1


def test_slots_point_into_the_turn_that_holds_them():
    said = "我想想，预算上限3万元"
    slot = grounded("用户的预算上限是三万元。", said).candidate.slots[0]
    assert (slot.type, slot.raw, slot.turn) == ("money", "3万元", "t1")
    assert said[slice(*slot.span)] == "3万元"
    assert slot.value == {"amount": "30000", "currency": "CNY"}


def test_event_time_comes_from_code_and_keeps_its_precision():
    assert grounded("用户去年去了日本。", "去年去了日本").candidate.event_time == "2025"
    event = grounded("用户搬家了。", "昨天搬家了", kind=Kind.EVENT).candidate
    assert event.event_time is None or event.event_time == "2026-03-03"


@pytest.mark.parametrize("text", [
    "记住，我对花生过敏", "这件事很重要", "以后不用再问我这个", "Remember this: no peanuts",
    "this is very important to me", "please don't forget my birthday",
    "whether this ships matters a lot to me",
])
def test_a_directive_forces_the_core_layer(text):
    assert has_directive(text)
    candidate = grounded(text, text, layer=Layer.EPISODIC).candidate
    assert candidate.explicit and candidate.layer is Layer.CORE


@pytest.mark.parametrize("text", [
    "这个不重要", "你记住了吗", "I don't remember", "it is not very important", "天气真好",
])
def test_ordinary_words_are_no_directive(text):
    assert not has_directive(text)
