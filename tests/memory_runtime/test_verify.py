import pytest

from memory_runtime.verify import Evidence, check_text, negations

PACK = "In the 2019 winter test the pack kept 64% of its charge after 6 hours."
PLANT = "The plant shipped 6,214,000 units worth USD 730 million."


@pytest.mark.parametrize(("evidence", "draft"), [
    (PACK, "The pack kept 64% after 6 hours in the 2019 winter test."),
    (PLANT, "It shipped 6214000 units."), (PLANT, "It shipped 6.214 million units."),
    (PLANT, "It shipped ６，２１４，０００ units."), (PLANT, "出货621.4万台，价值7.3亿美元。"),
    (PLANT, "It was worth $730M."), (PLANT, "It was worth USD 730,000,000."),
    ("奖金是四万八。", "奖金是48000元。"), ("定金三千七。", "定金3700元。"),
    ("一百五一张。", "150一张。"), ("成交价15万6。", "成交价156000。"),
    ("总额五万亿。", "总额5000000000000。"),
    ("人口二百八十万零六千四百一十二。", "人口2806412。"), ("支票柒仟元整。", "支票7000元。"),
    ("班车凌晨两点半发车。", "班车02:30发车。"), ("低开百分之二点零五。", "低开2.05%。"),
    ("存了两千块。", "存了2000块。"),
    ("The user's dentist is Dr Okafor.", "Your dentist is Okafor."),
    ("用户对青霉素过敏。", "你对青霉素过敏。"),
])
def test_a_draft_that_keeps_every_literal_is_accepted(evidence, draft):
    check = check_text(draft, [evidence])
    assert check.accepted, check.conflicts


@pytest.mark.parametrize(("evidence", "draft", "flagged"), [
    (PACK, "The pack kept 66% after 6 hours in the 2019 winter test.", "66%"),
    (PACK, "The pack kept 64% after 6 hours in the 2020 winter test.", "2020"),
    (PACK, "The pack kept 64% after 6 days in the 2019 winter test.", "6 days"),
    (PACK, "The pack kept 0.64% after 6 hours in the 2019 winter test.", "0.64%"),
    (PLANT, "It shipped 6,241,000 units.", "6,241,000"),
    (PLANT, "It was worth USD 73,000,000.", "USD 73,000,000"),
    (PLANT, "It was worth EUR 730 million.", "EUR 730 million"),
    ("The plant shipped 6,214,000 units.", "It was worth $730M.", "$730M"),
    ("The plant shipped 6,214,000 units.", "价值七亿三千万美元。", "七亿三千万美元"),
    ("奖金是四万八。", "奖金是40008元。", "40008元"), ("定金三千七。", "定金3007元。", "3007元"),
    ("一百五一张。", "105一张。", "105"), ("总额五万亿。", "总额50000000000000000。",
                                          "50000000000000000"),
    ("买了三四个苹果。", "买了34个苹果。", "34"),
    ("The user's dentist is Dr Okafor.", "Your dentist is Dr Adeyemi.", "Dr Adeyemi"),
    ("订单号是ZX-6035。", "订单号是ZX-6053。", "ZX-6053"),
    ("会议在2026年3月5日。", "会议在2026年3月6日。", "2026年3月6日"),
])
def test_an_altered_literal_is_named(evidence, draft, flagged):
    check = check_text(draft, [evidence])
    assert not check.accepted
    assert flagged in [conflict.raw for conflict in check.conflicts]


@pytest.mark.parametrize(("evidence", "draft"), [
    ("用户对青霉素不过敏。", "用户对青霉素过敏。"), ("用户吃花生。", "用户不吃花生。"),
    ("The user does not eat peanuts.", "The user does eat peanuts."),
    ("The user has never been to Oslo.", "The user has been to Oslo."),
])
def test_a_flipped_negation_is_a_conflict(evidence, draft):
    assert [c.type for c in check_text(draft, [evidence]).conflicts] == ["negation"]


def test_words_with_bu_that_negate_nothing_do_not_count():
    assert negations("味道不错，差不多十点，非常好，特别喜欢") == 0
    assert negations("我不吃辣") == 1 and negations("I don't, and never will") == 2


def test_a_change_of_meaning_with_all_literals_intact_is_out_of_scope():
    assert check_text("The pack lost 64% after 6 hours in the 2019 winter test.", [PACK]).accepted


def test_a_relative_date_counts_from_the_time_of_its_evidence():
    evidence = [Evidence("昨天签了合同。", "2026-03-02T09:00:00+08:00")]
    assert check_text("合同是2026年3月1日签的。", evidence).accepted
    assert not check_text("合同是2026年3月2日签的。", evidence).accepted


def test_a_literal_may_come_from_any_memory_but_from_nowhere_else():
    texts = ["预算是3万元。", "会议在下午三点。"]
    assert check_text("预算3万元，会议15:00。", texts).accepted
    assert not check_text("预算3万元，会议16:00。", texts).accepted
