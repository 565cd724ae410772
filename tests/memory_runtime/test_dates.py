from datetime import date, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_runtime.dates import resolve_date
from memory_runtime.days import interval
from memory_runtime.literals import find_literals, same_value

WEDNESDAY = "2026-12-16T10:00:00+08:00"


@pytest.mark.parametrize(("text", "iso"), [
    ("后天", "2026-12-18"), ("後天", "2026-12-18"), ("大前天", "2026-12-13"),
    ("大后天", "2026-12-19"), ("昨天", "2026-12-15"), ("从昨天开始", "2026-12-15"),
    ("三天前", "2026-12-13"), ("3天后", "2026-12-19"), ("下个月五号", "2027-01-05"),
    ("上周三", "2026-12-09"), ("下周一", "2026-12-21"), ("下下周一", "2026-12-28"),
    ("上上周日", "2026-12-06"), ("上周末", "2026-12-12/2026-12-13"), ("下周", "2026-W52"),
    ("去年", "2025"), ("去年最后一个月", "2025-12"), ("明年3月", "2027-03"), ("半年前", "2026-06"),
    ("二十年前", "2006"), ("20260819", "2026-08-19"), ("2026年3月5日", "2026-03-05"),
    ("二零二六年三月五日", "2026-03-05"), ("12月20号", "2026-12-20"), ("3月5号", "2027-03-05"),
    ("3月13日前寄出", "2027-03-13"), ("98年", "1998"),
    ("last Wednesday", "2026-12-09"), ("last Friday", "2026-12-11"), ("this Friday", "2026-12-18"),
    ("next Friday", "2026-12-25"), ("three days ago", "2026-12-13"), ("in two weeks", "2026-W53"),
    ("a week ago", "2026-W50"), ("two years ago", "2024"), ("yesterday", "2026-12-15"),
    ("the day after tomorrow", "2026-12-18"), ("March 5th, 2026", "2026-03-05"),
    ("5 March 2026", "2026-03-05"), ("March 5th", "2027-03-05"), ("last May", "2026-05"),
    ("next month", "2027-01"), ("3/14/2026", "2026-03-14"), ("by the 18th.", "2026-12-18"),
])
def test_a_date_resolves_from_the_day_it_was_said(text, iso):
    assert resolve_date(text, WEDNESDAY) == iso


@pytest.mark.parametrize("text", [
    "之前天天加班", "说明天气好", "目前年薪三十万", "以后天天见", "March on, soldiers", "I may go",
])
def test_words_that_only_look_like_dates_are_left_alone(text):
    assert resolve_date(text, WEDNESDAY) is None


def test_the_offset_of_the_speaker_decides_the_day():
    assert resolve_date("昨天", "2026-03-10T00:30:00+08:00") == "2026-03-09"
    assert resolve_date("昨天", "2026-03-09T16:30:00+00:00") == "2026-03-08"


def test_a_relative_date_stays_as_said_without_a_day_to_count_from():
    (literal,) = find_literals("后天见")
    assert literal.value == {"said": "day+2"}


def test_precision_is_kept():
    assert interval("2025-12") == (date(2025, 12, 1), date(2025, 12, 31))
    assert interval("2026-W10") == (date(2026, 3, 2), date(2026, 3, 8))
    assert interval("2024") == (date(2024, 1, 1), date(2024, 12, 31))


def test_the_same_words_on_other_days_are_other_dates():
    a = find_literals("昨天", "2026-03-01T09:00:00+08:00")[0]
    b = find_literals("昨天", "2026-03-02T09:00:00+08:00")[0]
    c = find_literals("2026-02-28", None)[0]
    assert not same_value(a, b) and same_value(a, c)


def test_a_day_without_a_year_agrees_with_the_next_year_too():
    said = find_literals("on May 16", "2026-10-12T06:48:00-07:00")[0]
    assert same_value(said, find_literals("May 16, 2027")[0])
    assert not same_value(said, find_literals("May 17, 2027")[0])


@given(st.dates(date(1990, 1, 1), date(2090, 12, 31)), st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_days_are_counted_alike_in_both_languages(day, count):
    at = f"{day.isoformat()}T12:00:00+08:00"
    wanted = (day - timedelta(days=count)).isoformat()
    assert resolve_date(f"{count}天前", at) == wanted
    assert resolve_date(f"{count} days ago", at) == wanted
    assert resolve_date(f"{day.year}年{day.month}月{day.day}日", None) == day.isoformat()
