"""Dates and times of day in both languages: find them, resolve relative ones, keep the precision.

Weeks start on Monday. `last Friday` is the latest Friday before today, `next Friday` that of the
following week, 上周五 that of the week before. Values are ISO 8601 and as exact as what was said:
`2026`, `2026-03`, `2026-W10`, `2026-03-05`, or an interval for a weekend. What was said without
a year or a fixed day keeps its own form in `said` (`--03-05`, `day-1`, `wd3`), so that it can be
compared when nobody knows the day it was said on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from memory_runtime.days import day_in, interval, local_day, monday_of, shift_month, week_iso
from memory_runtime.numerals import ZH_NUMERAL, en_value, fold, zh_value

Value = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """A date or a time in a text: character span and value."""

    start: int
    end: int
    type: str
    value: Value


def _value(said: str, iso: str | None) -> Value:
    return {"date": iso, "said": said} if iso else {"said": said}


def _shift(unit: str, amount: int, today: date | None) -> Value:
    """A value some days, weeks, months or years from today, as exact as the unit."""
    said = f"{unit}{amount:+d}"
    if today is None:
        return _value(said, None)
    try:
        if unit == "day":
            iso = (today + timedelta(days=amount)).isoformat()
        elif unit == "week":
            iso = week_iso(today + timedelta(weeks=amount))
        elif unit == "month":
            iso = "{:04d}-{:02d}".format(*shift_month(today, amount))
        else:
            iso = f"{today.year + amount:04d}"
        interval(iso)
    except (OverflowError, ValueError):
        return _value(said, None)
    return _value(said, iso)


def _weekday(weeks: int, weekday: int, today: date | None) -> Value:
    """A day of a week some weeks away; weekday 7 is its weekend."""
    said = f"week{weeks:+d}.{weekday}"
    if today is None:
        return _value(said, None)
    monday = monday_of(today, weeks)
    if weekday == 7:
        saturday = monday + timedelta(days=5)
        return _value(said, f"{saturday.isoformat()}/{(saturday + timedelta(days=1)).isoformat()}")
    return _value(said, (monday + timedelta(days=weekday)).isoformat())


def _month_day(month: int, day: int | None, today: date | None) -> Value | None:
    """A month, or a day of it, of the year that brings it nearest to today."""
    if day_in(2024, month, day or 1) is None:
        return None
    said = f"--{month:02d}" + (f"-{day:02d}" if day else "")
    if today is None:
        return _value(said, None)
    options = []
    for year in (today.year - 1, today.year, today.year + 1):
        iso = day_in(year, month, day) if day else f"{year:04d}-{month:02d}"
        if iso:
            first, last = interval(iso)
            # A day ahead is meant more often than one as far behind.
            gap = (first - today).days if first > today else 1.5 * max(0, (today - last).days)
            options.append((gap, iso))
    return _value(said, min(options)[1]) if options else _value(said, None)


def _day_of_month(day: int, today: date | None) -> Value | None:
    """The 11th, 11号: of this month, or of the next where it has passed by more than a week."""
    if not 1 <= day <= 31:
        return None
    said = f"---{day:02d}"
    if today is None:
        return _value(said, None)
    months = 1 if day < today.day - 7 else 0
    return _value(said, day_in(*shift_month(today, months), day))


def _lone_weekday(weekday: int, today: date | None, every: bool) -> Value:
    """A weekday without a week keeps both readings; `seen` bounds it to the days around."""
    value: Value = {"said": f"{'every ' if every else ''}wd{weekday}"}
    if today is not None and not every:
        value["seen"] = today.isoformat()
    return value


# --- Chinese ---

_N = rf"(?:\d{{1,4}}|[{ZH_NUMERAL}]{{1,4}})"
_WD = "一二三四五六日天"
_ZH_DAY = {"大前": -3, "前": -2, "昨": -1, "今": 0, "明": 1, "大后": 3, "后": 2}
_ZH_YEAR = {"大前": -3, "前": -2, "去": -1, "今": 0, "本": 0, "明": 1, "来": 1, "后": 2}
_ZH_STEP = {"上上": -2, "上": -1, "这": 0, "本": 0, "下": 1, "下下": 2}
_ZH_UNIT = {"天": "day", "日": "day", "周": "week", "星期": "week", "礼拜": "week",
            "月": "month", "年": "year"}


def zh_int(text: str) -> int:
    """A whole number in digits or Chinese numerals; -1 where it is none."""
    value = zh_value(text)
    return int(value) if value is not None else -1


def _zh_weekday(char: str) -> int:
    return 7 if char == "末" else min(_WD.index(char), 6)


def _year(text: str) -> int | None:
    """2019, 二零一九; two digits are a year only from 60 on or with a leading zero."""
    value = zh_int(text)
    if len(text) == 4 and 1000 <= value <= 2999:
        return value
    if len(text) == 2 and text not in ("一百",) and not set(text) & set("十百千"):
        if value >= 60:
            return 1900 + value
        if text[0] in "0零":
            return 2000 + value
    return None


def _zh_full(m: re.Match[str], today: date | None) -> Value | None:
    year = _year(m["y"])
    if year is None:
        return None
    if not m["m"]:
        # 60年前 is sixty years ago, 2019年前 is before 2019.
        is_ago = len(m["y"]) == 2 and m.string[m.end() : m.end() + 1] in tuple("前后以之")
        return None if is_ago else {"date": f"{year:04d}"}
    month = zh_int(m["m"])
    if not m["d"]:
        return {"date": f"{year:04d}-{month:02d}"} if 1 <= month <= 12 else None
    iso = day_in(year, month, zh_int(m["d"]))
    return {"date": iso} if iso else None


def _zh_rel_year(m: re.Match[str], today: date | None) -> Value | None:
    step = _ZH_YEAR[m["step"]]
    month = 12 if m["last"] else 1 if m["first"] else zh_int(m["m"]) if m["m"] else 0
    if not month:
        return _shift("year", step, today)
    day = zh_int(m["d"]) if m["d"] else None
    if day_in(2024, month, day or 1) is None:
        return None
    tail = f"-{month:02d}" + (f"-{day:02d}" if day else "")
    return _value(f"year{step:+d}{tail}", f"{today.year + step:04d}{tail}" if today else None)


def _zh_rel_month(m: re.Match[str], today: date | None) -> Value | None:
    step = _ZH_STEP[m["step"]]
    if not m["d"]:
        return _shift("month", step, today)
    day = zh_int(m["d"])
    if not 1 <= day <= 31:
        return None
    iso = day_in(*shift_month(today, step), day) if today else None
    return _value(f"month{step:+d}-{day:02d}", iso)


def _zh_ago(m: re.Match[str], today: date | None) -> Value | None:
    unit = _ZH_UNIT[m["u"]]
    sign = -1 if "前" in m["dir"] else 1
    if m["half"]:
        return _shift("month", sign * 6, today) if unit == "year" else None
    amount = zh_int(m["n"])
    return _shift(unit, sign * amount, today) if amount > 0 else None


def _zh_day(m: re.Match[str], today: date | None) -> Value:
    return _shift("day", _ZH_DAY[m["step"]], today)


def _zh_week(m: re.Match[str], today: date | None) -> Value:
    step = _ZH_STEP[m["step"]]
    if not m["wd"]:
        return _shift("week", step, today)
    return _weekday(step, _zh_weekday(m["wd"]), today)


def _zh_month_day(m: re.Match[str], today: date | None) -> Value | None:
    return _month_day(zh_int(m["m"]), zh_int(m["d"]) if m["d"] else None, today)


def _zh_lone_weekday(m: re.Match[str], today: date | None) -> Value:
    return _lone_weekday(_zh_weekday(m["wd"]) + 1, today, bool(m["every"]))


# --- English ---

_MONTHS = ("january february march april may june july august september october november "
           "december").split()
_MONTH = (r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|"
          r"Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)")
_WEEKDAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
_WEEKDAY = (r"(?:Mon(?:day)?|Tue(?:s(?:day)?)?|Wed(?:nesday)?|Thu(?:rs(?:day)?)?|Fri(?:day)?|"
            r"Sat(?:urday)?|Sun(?:day)?)")
_FULL_WEEKDAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_EN_N = (r"(?:\d{1,3}|an?|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
         r"fifteen|twenty|thirty)")


def _month(name: str) -> int:
    return [m[:3] for m in _MONTHS].index(name[:3].lower()) + 1


def _wd(name: str) -> int:
    return [w[:3] for w in _WEEKDAYS].index(name[:3].lower())


def _en_int(text: str) -> int:
    if text.isdigit():
        return int(text)
    if text.lower() in ("a", "an"):
        return 1
    value = en_value(text)
    return int(value) if value is not None else -1




def _en_day(m: re.Match[str], today: date | None) -> Value:
    words = " ".join(m.group().lower().split())
    offsets = {"yesterday": -1, "tomorrow": 1, "last night": -1}
    if "before yesterday" in words:
        return _shift("day", -2, today)
    if "after tomorrow" in words:
        return _shift("day", 2, today)
    return _shift("day", next((v for k, v in offsets.items() if words.startswith(k)), 0), today)


def _en_step(m: re.Match[str], today: date | None) -> Value | None:
    step = {"last": -1, "past": -1, "previous": -1, "this": 0, "next": 1, "coming": 1}[
        m["step"].lower()]
    unit = m["unit"].lower()
    if unit in ("week", "month", "year"):
        return _shift(unit, step, today)
    if unit == "weekend":
        return _weekday(step, 7, today)
    if re.fullmatch(_MONTH, unit, re.IGNORECASE):
        return _en_step_month(_month(unit), step, today)
    weekday = _wd(unit)
    if step >= 0:
        return _weekday(step, weekday, today)
    back = (today.weekday() - weekday - 1) % 7 + 1 if today else 0
    iso = (today - timedelta(days=back)).isoformat() if today else None
    return _value(f"last.{weekday}", iso)


def _en_step_month(month: int, step: int, today: date | None) -> Value:
    said = f"month{month:02d}{step:+d}"
    if today is None:
        return _value(said, None)
    year = today.year
    if step < 0 and month >= today.month:
        year -= 1
    elif step > 0 and month <= today.month:
        year += 1
    return _value(said, f"{year:04d}-{month:02d}")


def _en_ago(m: re.Match[str], today: date | None) -> Value | None:
    amount = _en_int(m["n"])
    return _shift(m["u"].lower(), -amount if m["ago"] else amount, today) if amount > 0 else None


def _en_full(m: re.Match[str], today: date | None) -> Value | None:
    month, day = _month(m["m"]), int(m["d"]) if m["d"] else None
    if m["y"]:
        year = int(m["y"])
        iso = day_in(year, month, day) if day else f"{year:04d}-{month:02d}"
        return {"date": iso} if iso else None
    return _month_day(month, day, today)


_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()


def _en_day_of_month(m: re.Match[str], today: date | None) -> Value | None:
    day = int(m["d"]) if m["d"] else _ORDINALS.index(m["word"].lower()) + 1
    return _day_of_month(day, today)


def _zh_day_of_month(m: re.Match[str], today: date | None) -> Value | None:
    return _day_of_month(zh_int(m["d"]), today)


def _en_lone_weekday(m: re.Match[str], today: date | None) -> Value:
    every = bool(m["every"]) or m.group().lower().endswith("s")
    return _lone_weekday(_wd(m["wd"]) + 1, today, every)


# --- digits only ---


def _iso(m: re.Match[str], today: date | None) -> Value | None:
    iso = day_in(int(m["y"]), int(m["m"]), int(m["d"]))
    return {"date": iso} if iso else None


def _iso_month(m: re.Match[str], today: date | None) -> Value | None:
    return {"date": f"{m['y']}-{m['m']}"}


def _slashed(m: re.Match[str], today: date | None) -> Value | None:
    """3/14/2026; month first unless that is impossible."""
    month, day = int(m["a"]), int(m["b"])
    if month > 12:
        month, day = day, month
    iso = day_in(int(m["y"]), month, day)
    return {"date": iso} if iso else None


def _lone_year(m: re.Match[str], today: date | None) -> Value:
    return {"date": m["y"]}


_Handler = Callable[[re.Match[str], date | None], Value | None]

_STEP = "上上|上|下下|下|这|本"
_Rule = tuple[re.Pattern[str], _Handler]


def _compiled(*rules: tuple[str, _Handler]) -> list[_Rule]:
    return [(re.compile(pattern, re.IGNORECASE), handler) for pattern, handler in rules]


_DIGIT_RULES = _compiled(
    (r"(?<![\d-])(?P<y>\d{4})(?P<s>[-/.])(?P<m>\d{1,2})(?P=s)(?P<d>\d{1,2})(?![\d-])", _iso),
    (r"(?<![\w-])(?P<y>(?:19|20)\d\d)-(?P<m>0[1-9]|1[0-2])(?![\d-])", _iso_month),
    (r"(?<![\w-])(?P<y>(?:19|20)\d\d)(?P<m>[01]\d)(?P<d>[0-3]\d)(?![\w-])", _iso),
    (r"(?<![\d/])(?P<a>\d{1,2})/(?P<b>\d{1,2})/(?P<y>\d{4})(?![\d/])", _slashed),
)
_ZH_RULES = _compiled(
    (rf"(?P<y>\d{{4}}|\d{{2}}|[{ZH_NUMERAL}]{{2,4}})\s?年"
     rf"(?:\s?(?P<m>{_N})\s?月份?(?:\s?(?P<d>{_N})\s?[日号])?)?(?!级)", _zh_full),
    (rf"(?P<step>大前|(?<![目以之从午])[前后]|去|今|本|明|来)年(?!龄|轻|级)的?"
     rf"(?:(?P<last>最后一?个月)|(?P<first>第一个月)|"
     rf"(?P<m>{_N})月份?(?:(?P<d>{_N})[日号])?)?", _zh_rel_year),
    (rf"(?P<step>{_STEP})个?月(?!球|亮|饼)的?(?:(?P<d>{_N})[日号])?", _zh_rel_month),
    (rf"(?P<step>{_STEP})一?个?(?:周|星期|礼拜)(?P<wd>[{_WD}末])?", _zh_week),
    (rf"(?P<m>{_N})\s?月份?\s?(?P<d>{_N})\s?[日号]", _zh_month_day),
    (rf"(?:(?P<half>半)|(?P<n>{_N}))\s?个?(?P<u>天|日|周|星期|礼拜|月|年)"
     r"(?P<dir>之前|以前|前|之后|以后|后)(?!天|端|面)", _zh_ago),
    (r"(?P<step>大前|大后|(?<![目以之从午])[前后]|昨|今|(?<![发说声])明)"
     r"(?:天(?!气|天)|日|晚(?!会|饭)|早(?!餐)|夜)",
     _zh_day),
    (rf"(?P<m>{_N})\s?月份?(?P<d>)", _zh_month_day),
    (rf"(?<![\d层楼栋路街幢室弄巷区座第-])(?P<d>\d{{1,2}}|[{ZH_NUMERAL}]{{1,3}})\s?号"
     "(?![线楼馆店房门桌机院球车位码场仓库])", _zh_day_of_month),
    (rf"(?P<every>每个?)?(?:周|星期|礼拜)(?P<wd>[{_WD}末])", _zh_lone_weekday),
)
_EN_RULES = _compiled(
    (r"\b(?:the\s+)?day\s+(?:before\s+yesterday|after\s+tomorrow)\b|"
     r"\b(?:yesterday|tomorrow|today|tonight|last\s+night|this\s+(?:morning|afternoon|evening))"
     r"\b", _en_day),
    (rf"\b(?P<step>last|past|previous|this|next|coming)\s+"
     rf"(?P<unit>weekend|week|month|year|{_FULL_WEEKDAY}|{_MONTH})\b", _en_step),
    (rf"\b(?:(?P<in>in)\s+)?(?P<n>{_EN_N})\s+(?P<u>day|week|month|year)s?"
     r"(?(in)(?!\s+ago)|\s+(?:(?P<ago>ago)|from\s+now))\b", _en_ago),
    (rf"\b(?P<m>{_MONTH})\.?\s+(?:the\s+)?(?P<d>[0-3]?\d)(?:st|nd|rd|th)?\b(?![:\d])"
     r"(?:,?\s+(?P<y>(?:19|20)\d\d)\b)?", _en_full),
    (rf"\b(?:the\s+)?(?P<d>[0-3]?\d)(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<m>{_MONTH})\b\.?"
     r"(?:,?\s+(?P<y>(?:19|20)\d\d)\b)?", _en_full),
    (rf"\b(?P<m>{_MONTH})\.?,?\s+(?P<d>)(?P<y>(?:19|20)\d\d)\b", _en_full),
    (r"\b(?:on|by|until|till|before|after|from|since|to)\s+the\s+"
     rf"(?:(?P<d>[0-3]?\d)(?:st|nd|rd|th)\b|(?P<word>{'|'.join(_ORDINALS)}))"
     r"(?=\s*(?:[.,;:!?)]|$)|\s+(?:and|or|at|in|for|if|but|is|was|works|with|because|so)\b)",
     _en_day_of_month),
    (rf"(?:(?P<every>every|each)\s+)?\b(?P<wd>{_FULL_WEEKDAY})s?\b", _en_lone_weekday),
)
_CASED_RULES: list[_Rule] = [
    (re.compile(r"(?i:\b(?:in|for|since|until|till|of|by|from|through|to|during|after|before|and)\s+)"
                r"(?P<m>March|May)(?P<d>)(?P<y>)\b|"
                r"\b(?P<m2>January|February|April|June|July|August|September|October|"
                r"November|December)\b"), lambda m, today: _month_day(
                    _month(m["m"] or m["m2"]), None, today)),
    (re.compile(r"(?i:\b(?:in|since|by|until|till|from|of|year|during|before|after|the|early|late|"
                r"summer|winter|spring|fall|autumn)\s+)(?P<y>(?:19|20)\d\d)\b(?!\s?[-,.:/%]?\d)"
                r"(?!\s*(?:%|people|units|steps|words|dollars|元|块|人|个))"), _lone_year),
]


def _cued_span(match: re.Match[str]) -> tuple[int, int]:
    """A year or a month needs the word before it as a cue; the span is the date alone."""
    for name in ("y", "m"):
        if name in match.re.groupindex and match[name]:
            return match.span(name)
    return match.span()


_CJK = re.compile("[\u4e00-\u9fff]")
_LATIN_WORD = re.compile("[A-Za-z]{3}")


def _applicable(text: str) -> Iterator[tuple[_Rule, bool]]:
    """Rules that can match at all; the flag marks those whose span is the date group alone."""
    if any(char.isdigit() for char in text):
        yield from ((rule, False) for rule in _DIGIT_RULES)
    if _CJK.search(text):
        yield from ((rule, False) for rule in _ZH_RULES)
    if _LATIN_WORD.search(text):
        yield from ((rule, False) for rule in _EN_RULES)
        yield from ((rule, True) for rule in _CASED_RULES)


def find_dates(text: str, today: date | None = None) -> list[Found]:
    """Dates of a folded text, in order; earlier rules win where two overlap."""
    found: list[Found] = []
    taken: set[int] = set()
    for (pattern, handler), cued in _applicable(text):
        for match in pattern.finditer(text):
            start, end = _cued_span(match) if cued else match.span()
            if not taken.isdisjoint(range(start, end)):
                continue
            value = handler(match, today)
            if value is not None:
                found.append(Found(start, end, "date", value))
                taken.update(range(start, end))
    return sorted(found, key=lambda item: item.start)


def resolve_date(text: str, observed_at: str | None) -> str | None:
    """The first date of a text in ISO form, or None: 后天 said on 2026-12-16 is 2026-12-18."""
    for item in find_dates(fold(text), local_day(observed_at)):
        if "date" in item.value:
            return str(item.value["date"])
    return None
