"""Times of day in both languages: 下午三点半 = 15:30 = 3:30 pm.

A time that names no half of the day carries `half_open`: 三点半 may be 3:30 or 15:30.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from memory_runtime.dates import Found, Value, zh_int
from memory_runtime.numerals import ZH_NUMERAL

_DAYPART = ("凌晨|清晨|清早|早上|早晨|上午|中午|正午|下午|午后|傍晚|晚上|晚间|夜里|夜间|半夜|"
            "深夜|午夜|今晚|昨晚|明晚|今早|明早|晚|早")
_ZH_TIME = re.compile(
    rf"(?P<part>{_DAYPART})?(?<!百分之)\s?(?P<h>\d{{1,2}}|[{ZH_NUMERAL}]{{1,3}})\s?点"
    rf"(?:(?P<half>半)|(?P<quarter>[一三])刻|(?P<full>整|钟)|"
    rf"(?P<m>\d{{1,2}}|[零〇]?[一二三四五六七八九十]{{1,3}})(?P<min>分)?(?![\d.]))?(?P<end>钟)?")
_CLOCK = re.compile(
    rf"(?:(?P<part>{_DAYPART})\s?)?(?<![\d:.])(?P<h>[01]?\d|2[0-4]):(?P<m>[0-5]\d)(?::[0-5]\d)?"
    r"(?![\d:])(?:\s?(?P<ap>[ap]\.?m\b\.?))?", re.IGNORECASE)
_EN_TIME = re.compile(r"(?<![\d:.$])(?P<h>1[0-2]|0?[1-9])\s?(?P<ap>[ap]\.?m\b\.?|o'?clock)",
                      re.IGNORECASE)
_NAMED_TIME = re.compile(r"\b(?:(?P<noon>noon|midday)|midnight)\b", re.IGNORECASE)


def _clock(hour: int, minute: int, half_of_day: str) -> Value | None:
    """hh:mm; without any half of the day, 1 to 12 o'clock has two readings."""
    if hour > 24 or minute > 59 or (hour > 12 and half_of_day == "am"):
        return None
    if half_of_day == "pm" and hour < 12:
        hour += 12
    elif half_of_day == "am" and hour == 12:
        hour = 0
    value: Value = {"time": f"{hour % 24:02d}:{minute:02d}"}
    if not half_of_day and 1 <= hour <= 12:
        value["half_open"] = True
    return value


def _half_of_day(part: str, hour: int) -> str:
    if not part:
        return ""
    if part in ("凌晨", "清晨", "清早", "早上", "早晨", "上午", "早", "今早", "明早"):
        return "am"
    if part in ("中午", "正午"):
        return "am" if hour in (10, 11) else "pm"
    if part in ("下午", "午后", "傍晚"):
        return "pm"
    # 晚上12点 is midnight, and 夜里两点 is two in the morning.
    return "am" if hour == 12 or hour < 5 else "pm"


def _zh_clock(m: re.Match[str]) -> Value | None:
    hour = zh_int(m["h"])
    minute = 30 if m["half"] else 0
    if m["quarter"]:
        minute = 15 if m["quarter"] == "一" else 45
    elif m["m"]:
        minute = zh_int(m["m"])
        # 三点五 is 3.5 or loosely 3:05; 三点零五, 三点十五 and 3点05 are times.
        if len(m["m"]) == 1 and not m["min"]:
            return None
    marked = any(m[name] for name in ("part", "half", "quarter", "full", "min", "m", "end"))
    if not marked and (m["h"] in ("一", "1") or not 0 <= hour <= 24 or not _reads_as_time(m)):
        return None
    return _clock(hour, minute, _half_of_day(m["part"] or "", hour)) if hour >= 0 else None


def _reads_as_time(m: re.Match[str]) -> bool:
    """两点 may be two points: take it for a time only before a verb or after a cue."""
    before = m.string[max(0, m.start() - 2) : m.start()]
    after = m.string[m.end() : m.end() + 1]
    cue = before.endswith(tuple("在到于约天周日号过至一二三四五六"))
    verb = after in tuple("开出起上下到吃见来去睡集发结回左前后之以有要飞关打")
    return cue or verb or zh_int(m["h"]) > 12


def _en_half(ap: str | None) -> str:
    return "" if not ap or ap[0].lower() == "o" else "am" if ap[0].lower() == "a" else "pm"


def _times(text: str) -> Iterator[tuple[int, int, Value | None]]:
    for m in _CLOCK.finditer(text):
        half = _en_half(m["ap"]) or _half_of_day(m["part"] or "", int(m["h"]))
        value = _clock(int(m["h"]), int(m["m"]), half if int(m["h"]) <= 12 else "")
        if value and not half and m["h"].startswith("0"):
            value.pop("half_open", None)
        yield m.start(), m.end(), value
    for m in _EN_TIME.finditer(text):
        yield m.start(), m.end(), _clock(int(m["h"]), 0, _en_half(m["ap"]))
    for m in _ZH_TIME.finditer(text):
        # 今晚8点 holds a date and a time: 今晚 only says which half of the day it is.
        start = m.start("h") if (m["part"] or "")[:1] in tuple("今昨明") else m.start()
        yield start, m.end(), _zh_clock(m)
    for m in _NAMED_TIME.finditer(text):
        yield m.start(), m.end(), {"time": "12:00" if m["noon"] else "00:00"}


def find_times(text: str) -> list[Found]:
    """Times of day of a folded text, in order, without overlaps."""
    found: list[Found] = []
    taken: set[int] = set()
    for start, end, value in _times(text):
        span = set(range(start, end))
        if value is not None and not taken & span:
            found.append(Found(start, end, "time", value))
            taken |= span
    return sorted(found, key=lambda item: item.start)
