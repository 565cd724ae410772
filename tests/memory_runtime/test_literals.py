import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_runtime.literals import find_literals, follows, same_value
from memory_runtime.numerals import en_value, zh_value

DIGITS = "零一二三四五六七八九"


def to_zh(n: int) -> str:
    """An integer as it is written in Chinese, apart from the code under test."""
    if n == 0:
        return "零"

    def section(value: int) -> str:
        text, zero = "", False
        for power, unit in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
            digit = value // power % 10
            if digit:
                text += ("零" if zero and text else "") + DIGITS[digit] + unit
                zero = False
            else:
                zero = True
        return text

    parts, rest = [], n
    for power, unit in ((10**8, "亿"), (10**4, "万"), (1, "")):
        value, rest = divmod(rest, power)
        if value:
            gap = parts and value < 1000
            parts.append(("零" if gap else "") + section(value) + unit)
    return "".join(parts)


def to_en(n: int) -> str:
    ones = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
            "fifteen sixteen seventeen eighteen nineteen").split()
    tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()
    if n < 20:
        return ones[n]
    if n < 100:
        return tens[n // 10 - 2] + ("-" + ones[n % 10] if n % 10 else "")
    for power, name in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"),
                        (100, "hundred")):
        if n >= power:
            rest = f" and {to_en(n % power)}" if 0 < n % power < 100 else (
                f" {to_en(n % power)}" if n % power else "")
            return f"{to_en(n // power)} {name}{rest}"
    raise AssertionError


def only(text: str, observed_at: str | None = None):
    found = find_literals(text, observed_at)
    assert len(found) == 1, found
    return found[0]


@given(st.integers(0, 10**9))
@settings(max_examples=300, deadline=None)
def test_any_integer_has_one_value_in_every_notation(n):
    assert zh_value(to_zh(n)) == n
    assert en_value(to_en(n)) == n
    notations = [f"花了{n}元", f"花了{n:,}元", f"花了{to_zh(n)}元"]
    literals = [only(text) for text in notations]
    assert {literal.value["amount"] for literal in literals} == {str(n)}
    assert all(same_value(literals[0], other) for other in literals)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
@settings(max_examples=200, deadline=None)
def test_other_integers_never_have_the_same_value(a, b):
    left, right = only(f"共{a}元"), only(f"共{to_zh(b)}元")
    assert same_value(left, right) == (a == b)
    assert follows(left, right) == (a == b)


@given(st.text(max_size=80))
@settings(max_examples=200, deadline=None)
def test_spans_cover_what_was_found_and_do_not_overlap(text):
    last = 0
    for literal in find_literals(text, "2026-03-01T09:00:00+08:00"):
        start, end = literal.span
        assert last <= start < end <= len(text)
        assert text[start:end] == literal.raw
        last = end


@given(st.text(st.characters(categories=["Nd", "No", "Nl"]) | st.sampled_from("三万点-,.元:/ "),
               max_size=12))
@settings(max_examples=300, deadline=None)
def test_digits_of_no_script_break_the_search(text):
    for literal in find_literals(text, "2026-03-01T09:00:00+08:00"):
        assert literal.raw in text


@pytest.mark.parametrize(("text", "type_", "value"), [
    ("共٣٠٠元", "money", {"amount": "300", "currency": "CNY"}),
    ("The rent is $१,२००.", "money", {"amount": "1200", "currency": "USD"}),
    ("预算上限是3万元。", "money", {"amount": "30000", "currency": "CNY"}),
    ("It cost $1,200.", "money", {"amount": "1200", "currency": "USD"}),
    ("worth USD 730 million", "money", {"amount": "730000000", "currency": "USD"}),
    ("价值7.3亿美元", "money", {"amount": "730000000", "currency": "USD"}),
    ("三块五一斤", "money", {"amount": "3.5", "currency": "CNY"}),
    ("三万五", "number", {"number": "35000"}),
    ("成交价15万6。", "number", {"number": "156000"}),
    ("总额五万亿。", "number", {"number": "5000000000000"}),
    ("买了三四个苹果", "number", {"low": "3", "high": "4"}),
    ("paid 5k", "number", {"number": "5000"}),
    ("two hundred and fifty people", "number", {"number": "250"}),
    ("百分之四十", "percent", {"percent": "40"}),
    ("低开百分之二点零五。", "percent", {"percent": "2.05"}),
    ("40 percent", "percent", {"percent": "40"}),
    ("八成", "percent", {"percent": "80"}),
    ("一个半小时", "duration", {"amount": "1.5", "unit": "hour"}),
    ("for 6 hours", "duration", {"amount": "6", "unit": "hour"}),
    ("两三天", "duration", {"low": "2", "high": "3", "unit": "day"}),
    ("下午三点半", "time", {"time": "15:30"}),
    ("at 3:30 pm", "time", {"time": "15:30"}),
    ("凌晨两点半发车", "time", {"time": "02:30"}),
    ("晚上12点", "time", {"time": "00:00"}),
    ("order ZX-6035", "identifier", {"id": "ZX6035"}),
    ("卡号ＶＩＰ８８２０３６", "identifier", {"id": "VIP882036"}),
    ("电话13800138000", "identifier", {"id": "13800138000"}),
    ("门牌号是 12-304", "identifier", {"id": "12-304"}),
    ("写信到 a.b@example.com", "identifier", {"id": "a.b@example.com"}),
    ("我叫陈默，你好", "name", {"name": "陈默"}),
    ("in New York", "name", {"name": "new york"}),
    ("抬头是“青屿海洋”", "name", {"name": "青屿海洋"}),
    ("跟王老师说", "name", {"name": "王老师"}),
])
def test_a_literal_is_found_with_type_and_value(text, type_, value):
    literal = only(text)
    assert (literal.type, literal.value) == (type_, value)


@pytest.mark.parametrize("text", [
    "有一点累", "十分开心", "万一下雨就算了", "千万别去", "一个朋友", "统一安排", "目前年薪不错",
    "The user likes tea.", "I like it when you help", "两点建议", "一起去吧",
])
def test_everyday_words_are_no_literals(text):
    assert find_literals(text) == []


@pytest.mark.parametrize(("a", "b"), [
    ("5,000", "五千"), ("5000", "5k"), ("4.8万", "四万八"), ("48000", "四万八"),
    ("$1,200", "1200 dollars"), ("40%", "百分之四十"), ("下午三点半", "15:30"),
    ("三点半", "15:30"), ("奖金四万八", "48000元"), ("5公里", "5000米"),
    ("90 minutes", "一个半小时"),
    ("10斤", "5公斤"), ("ZX-6035", "zx6035"), ("6,214,000 units", "621.4万台"),
    ("2026年3月5日", "March 5th, 2026"), ("Dr Okafor is here", "I saw Okafor is here"),
])
def test_notations_of_one_value_agree(a, b):
    assert same_value(find_literals(a)[0], find_literals(b)[0])


@pytest.mark.parametrize(("a", "b"), [
    ("6 hours", "6 days"), ("64%", "0.64%"), ("USD 730", "EUR 730"), ("34个", "三四个"),
    ("5 kg", "5 km"), ("15:30", "下午三点"), ("ZX-6035", "ZX-6053"), ("12-304", "123-04"),
    ("2026年3月5日", "2026年3月6日"), ("40008元", "四万八"), ("3.3.5", "3.3.4"),
])
def test_other_values_do_not_agree(a, b):
    assert not same_value(find_literals(a)[0], find_literals(b)[0])


def test_a_draft_may_be_less_exact_but_not_more():
    day, year = only("在2019年3月5日"), only("在2019年")
    assert follows(year, day) and not follows(day, year)
    afternoon, open_time = only("下午三点半"), only("三点半")
    assert follows(open_time, afternoon) and not follows(afternoon, open_time)
    weight, bare = only("64公斤"), only("64")
    assert follows(bare, weight) and not follows(weight, bare)
    assert follows(only("48000元"), only("四万八")) and not follows(only("$48000"), only("四万八"))
