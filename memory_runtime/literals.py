"""Literals that must survive: numbers, money, percent, durations, times, dates, identifiers, names.

Finds them in English and Chinese with character spans, normalises them (5,000 = 五千 = 5k,
三万五 = 35000, 下午三点半 = 3:30 pm) and compares them with their units and currencies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from memory_runtime.dates import find_dates
from memory_runtime.days import interval, local_day
from memory_runtime.names import find_identifiers, find_names, normal_identifier, normal_name
from memory_runtime.numerals import find_numbers, fold
from memory_runtime.quantities import (
    HALF,
    MONTHS,
    SECONDS,
    base_unit,
    find_fractions,
    joined_ranges,
    read_quantity,
)
from memory_runtime.times import find_times

TYPES = ("number", "money", "percent", "date", "time", "duration", "name", "identifier")


@dataclass(frozen=True, slots=True)
class Literal:
    """One literal of a text.

    Attributes:
        type: One of `TYPES`.
        raw: The characters as written.
        value: Normal form, for example {"amount": "30000", "currency": "CNY"}.
        span: Start and end in the text.
    """

    type: str
    raw: str
    value: dict[str, Any]
    span: tuple[int, int]


# --- the scan ---


class _Claims:
    """Spans that are taken; earlier scanners win."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.taken = bytearray(len(text))
        self.found: list[Literal] = []

    def add(self, type_: str, start: int, end: int, value: dict[str, Any]) -> None:
        if start < end and not any(self.taken[start:end]):
            self.taken[start:end] = b"\x01" * (end - start)
            self.found.append(Literal(type_, self.text[start:end], value, (start, end)))


def _add_quantities(claims: _Claims, folded: str) -> None:
    # U+0000 breaks words and ranges at what was taken, unlike a space.
    text = "".join("\x00" if used else c for c, used in zip(folded, claims.taken, strict=True))
    for reading in find_fractions(text):
        claims.add("number", *reading)
    for number in joined_ranges(find_numbers(text), text):
        result = read_quantity(number, text)
        if result is not None:
            claims.add(*result)
    for match in HALF.finditer(text):
        unit = next(name for name in ("hour", "month", "year", "day") if match[name])
        claims.add("duration", *match.span(), {"amount": "0.5", "unit": unit})


@lru_cache(maxsize=8192)
def _scan(text: str, observed_at: str | None) -> tuple[Literal, ...]:
    folded = fold(text)
    claims = _Claims(text)
    for item in find_dates(folded, local_day(observed_at)):
        claims.add(item.type, item.start, item.end, item.value)
    for start, end in find_identifiers(folded):
        claims.add("identifier", start, end, {"id": normal_identifier(folded[start:end])})
    for item in find_times(folded):
        claims.add(item.type, item.start, item.end, item.value)
    _add_quantities(claims, folded)
    for start, end in find_names(text):
        claims.add("name", start, end, {"name": normal_name(text[start:end])})
    return tuple(sorted(claims.found, key=lambda literal: literal.span))


def find_literals(text: str, observed_at: str | None = None) -> list[Literal]:
    """Every literal of a text, in order, without overlaps.

    Args:
        text: Any text; spans count its characters.
        observed_at: ISO time at which it was said; relative dates are resolved against it.
    """
    return list(_scan(text, observed_at))


# --- normal forms and comparison ---


@dataclass(frozen=True, slots=True)
class _Measured:
    """An amount as written, and the factor to the base unit of its dimension."""

    dimension: str
    low: Decimal
    high: Decimal
    factor: Decimal

    @property
    def base(self) -> tuple[Decimal, Decimal]:
        return self.low * self.factor, self.high * self.factor


def _measured(literal: Literal) -> _Measured | None:
    """The amount of a number, money, percent or duration, else None."""
    value = literal.value
    key = next((k for k in ("amount", "number", "percent", "low") if k in value), None)
    if key is None or literal.type not in ("number", "money", "percent", "duration"):
        return None
    factor, dimension = Decimal(1), ""
    if literal.type == "money":
        dimension = value["currency"]
    elif literal.type == "percent":
        dimension = "%"
    elif literal.type == "duration":
        unit = value["unit"]
        dimension = "second" if unit in SECONDS else "month"
        factor = Decimal(SECONDS.get(unit) or MONTHS[unit])
    elif "unit" in value:
        dimension, factor = base_unit(value["unit"])
    return _Measured(dimension, Decimal(value[key]), Decimal(value.get("high", value[key])), factor)


_LOOSE_UNITS = frozenset({("celsius", "degree"), ("degree", "celsius"), ("fahrenheit", "degree"),
                          ("degree", "fahrenheit"), ("GBP", "lb"), ("lb", "GBP")})


def _same_amount(a: _Measured, b: _Measured, *, strict: bool) -> bool:
    """Strict: `a` may lack a unit that `b` has, but names none of its own, except the yuan."""
    if a.dimension and b.dimension:
        alike = a.dimension == b.dimension or (a.dimension, b.dimension) in _LOOSE_UNITS
        return alike and a.base == b.base
    if (a.low, a.high) != (b.low, b.high):
        return False
    return not strict or not a.dimension or a.dimension == "CNY"


def _same_but_year(loose: dict[str, Any], exact: dict[str, Any]) -> bool:
    """May 16 said in October may be of this year or the next: its own year is a guess."""
    said, iso = str(loose.get("said", "")), str(exact.get("date", ""))
    if not said.startswith("--") or "date" not in loose or not iso[:4].isdigit():
        return False
    near = abs(int(str(loose["date"])[:4]) - int(iso[:4])) <= 1
    # `--05` stands for 2026-05, `--05-16` and `---16` for a whole day.
    length = 7 if len(said) == 4 else 10
    return near and len(iso) == length and iso.endswith(said.lstrip("-"))


def _is_span_of(date_: Literal, duration: Literal) -> bool:
    """三周后 against 三周: an offset of the same length."""
    match = re.fullmatch(r"(day|week|month|year)[+-](\d+)", str(date_.value.get("said", "")))
    return match is not None and duration.value.get("unit") == match[1] and (
        duration.value.get("amount") == match[2])


def _date_matches(a: dict[str, Any], b: dict[str, Any], *, strict: bool) -> bool:
    """Strict: `a` may be less exact than `b` (2026 follows from 2026-03-05), not the reverse."""
    if _same_but_year(a, b) or _same_but_year(b, a):
        return True
    if "date" in a and "date" in b:
        a_first, a_last = interval(a["date"])
        b_first, b_last = interval(b["date"])
        if a_first <= b_first and b_last <= a_last:
            return True
        return not strict and b_first <= a_first and a_last <= b_last
    if "said" in a and str(a["said"]).removeprefix("every ") == str(
            b.get("said")).removeprefix("every "):
        return True
    for loose, exact in ((a, b), (b, a)):
        said, iso = str(loose.get("said", "")), str(exact.get("date", ""))
        if said.startswith("--") and "date" not in loose and iso[4:].startswith(said[1:]):
            return True
        if said.startswith("wd") and "date" in exact and not (strict and loose is b):
            first, last = interval(exact["date"])
            seen = loose.get("seen")
            near = seen is None or abs((first - interval(seen)[0]).days) <= 7
            if first == last and first.isoweekday() == int(said[2:]) and near:
                return True
    return False


def _time_matches(a: dict[str, Any], b: dict[str, Any], *, strict: bool) -> bool:
    """A time without a half of the day agrees with both readings."""
    if a["time"] == b["time"]:
        return not (strict and "half_open" in b and "half_open" not in a)
    if "half_open" in a or ("half_open" in b and not strict):
        hours = [int(v["time"][:2]) % 12 for v in (a, b)]
        return hours[0] == hours[1] and a["time"][3:] == b["time"][3:]
    return False


def _name_matches(a: str, b: str) -> bool:
    """Equal, or the words of one are all in the other (Okafor, Dr Okafor)."""
    a_words, b_words = set(re.findall(r"\w+", a)), set(re.findall(r"\w+", b))
    return a == b or bool(a_words and b_words and (a_words <= b_words or b_words <= a_words))


def _digits_agree(a: Literal, b: Literal) -> bool:
    """Across types: a bare number against an identifier or a year with the same digits."""
    texts = []
    for literal in (a, b):
        value = literal.value
        if "unit" in value or literal.type not in ("number", "identifier", "date"):
            return False
        texts.append(str(value.get("number") or value.get("id") or value.get("date") or ""))
    return texts[0] == texts[1] != ""


def _matches(a: Literal, b: Literal, *, strict: bool) -> bool:
    left, right = _measured(a), _measured(b)
    if left is not None and right is not None:
        return _same_amount(left, right, strict=strict)
    if {a.type, b.type} == {"date", "duration"}:
        return not strict and (_is_span_of(a, b) or _is_span_of(b, a))
    if a.type != b.type:
        return _digits_agree(a, b)
    if a.type == "date":
        return _date_matches(a.value, b.value, strict=strict)
    if a.type == "time":
        return _time_matches(a.value, b.value, strict=strict)
    if a.type == "name":
        return _name_matches(a.value["name"], b.value["name"])
    return bool(a.value == b.value)


def same_value(a: Literal, b: Literal) -> bool:
    """Whether two literals can be the same thing said in two ways; symmetric.

    A missing unit, currency, year or half of the day does not set them apart; another one does.
    """
    return _matches(a, b, strict=False) or _matches(b, a, strict=False)


def follows(draft: Literal, evidence: Literal) -> bool:
    """Whether a draft may say this, given the evidence: no more exact, no unit of its own.

    元 may be added to a bare amount, since spoken Chinese leaves it out.
    """
    return _matches(draft, evidence, strict=True)
