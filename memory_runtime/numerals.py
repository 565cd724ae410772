"""Numerals of both languages to exact decimals: 5,000, 五千, 三万五, 15万6, two hundred and fifty.

Works on folded text (see `fold`), which has the same length as the original, so that character
spans hold for both. Knows nothing of units, currencies or dates.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

ZH_DIGITS = "零〇一二三四五六七八九两壹贰叁肆伍陆柒捌玖"
ZH_UNITS = "十百千万亿拾佰仟"
ZH_NUMERAL = ZH_DIGITS + ZH_UNITS

_DIGIT_VALUE = {c: "00123456789"[i] for i, c in enumerate("零〇一二三四五六七八九")} | {
    "两": "2", **{c: str(i) for i, c in enumerate("壹贰叁肆伍陆柒捌玖", start=1)}}
_UNIT_VALUE = {"十": 10, "拾": 10, "百": 100, "佰": 100, "千": 1000, "仟": 1000,
               "万": 10**4, "亿": 10**8}

_TRADITIONAL = dict(zip(
    "萬億兩點個後週時號塊錢鐘禮歲層幾貳參陸從內間張條隻雙",
    "万亿两点个后周时号块钱钟礼岁层几贰叁陆从内间张条只双", strict=True))
_FOLD = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if code != 0xFF0C} | {
    0x3000: " ", 0x00A0: " ", 0xFFE5: "¥", **{ord(k): v for k, v in _TRADITIONAL.items()}}
_WIDE_COMMA = re.compile(r"(?<=[\uff10-\uff19])\uff0c(?=[\uff10-\uff19]{3})")
# \d matches the digits of every script (٣, ३), so each of them has to have its value.
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")


def fold(text: str) -> str:
    """Full-width forms and digits of any script to ASCII, length kept.

    So are a few traditional characters to simplified.

    A full-width comma is a thousands separator only between full-width digits; elsewhere it
    ends a clause (价格是5，300是定金 holds two numbers).
    """
    folded = _WIDE_COMMA.sub(",", text).translate(_FOLD)
    return _OTHER_DIGIT.sub(lambda match: str(unicodedata.decimal(match.group())), folded)


@dataclass(frozen=True, slots=True)
class Number:
    """A numeral in a text. `low` and `high` differ for 三四 (three or four) and 3-5.

    Attributes:
        start, end: Character span.
        low, high: The value or the bounds.
        style: `arabic`, `zh` or `en`.
        bare: A lone Chinese digit, or two; only a number where a unit or measure word follows.
    """

    start: int
    end: int
    low: Decimal
    high: Decimal
    style: str
    bare: bool = False


def plain(value: Decimal) -> str:
    """A decimal without exponent and trailing zeros."""
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


# --- Chinese and mixed numerals ---

_ARABIC = r"\d{1,3}(?:,\d{3})+(?!,?\d)(?:\.\d+)?|\d+(?:\.\d+)?"
_RUN = re.compile(
    rf"(?<![\d.])(?:{_ARABIC}|[{ZH_NUMERAL}])(?:(?:{_ARABIC})|\s?[十百千万亿](?!一)|[{ZH_NUMERAL}])*"
    rf"(?:点[零〇一二三四五六七八九]+)?"
)
_TOKEN = re.compile(rf"{_ARABIC}|[{ZH_NUMERAL}]")


def _digits_value(tokens: list[str]) -> Decimal | None:
    """A run without units: one number, or Chinese digits read one by one (二零二六)."""
    if len(tokens) == 1 and tokens[0][0].isascii():
        return Decimal(tokens[0].replace(",", ""))
    if any(token[0].isascii() for token in tokens):
        return None
    return Decimal("".join(_DIGIT_VALUE[token] for token in tokens))


def _right_value(tokens: list[str], unit: int) -> Decimal | None:
    """What follows a unit: nothing, a spoken tail (三万五), 零 and a rest, or a smaller number."""
    if not tokens:
        return Decimal(0)
    if tokens[0] in "零〇":
        return tokens_value(tokens[1:]) if len(tokens) > 1 else None
    if len(tokens) == 1 and unit >= 100 and len(tokens[0]) == 1:
        digit = _digits_value(tokens)
        return digit * (unit // 10) if digit is not None else None
    if len(tokens) > 1 and not any(token in _UNIT_VALUE for token in tokens):
        return None
    return tokens_value(tokens)


def tokens_value(tokens: list[str]) -> Decimal | None:
    """The value of a token list, or None where it is no well-formed numeral."""
    if not tokens:
        return None
    for name in ("亿", "万", "千", "仟", "百", "佰", "十", "拾"):
        if name not in tokens:
            continue
        at = len(tokens) - 1 - tokens[::-1].index(name)
        unit, left = _UNIT_VALUE[name], tokens[:at]
        while left and left[0] in "零〇":
            left = left[1:]
        if len(left) > 1 and not any(token in _UNIT_VALUE for token in left):
            return None
        times = tokens_value(left) if left else Decimal(1)
        rest = _right_value(tokens[at + 1 :], unit)
        if times is None or rest is None or rest >= unit:
            return None
        return times * unit + rest
    return _digits_value(tokens)


def zh_value(text: str) -> Decimal | None:
    """The value of a whole Chinese or mixed numeral such as 二百八十万零六千四百一十二 or 15万6."""
    whole, _, fraction = fold(text).replace(" ", "").partition("点")
    tokens = _TOKEN.findall(whole)
    if "".join(tokens) != whole:
        return None
    value = tokens_value(tokens)
    if value is None or not fraction:
        return value
    return value + Decimal("0." + "".join(_DIGIT_VALUE[c] for c in fraction))


_APPROXIMATE = re.compile(
    r"(?P<head>[二三四五六七八九]?十)?(?P<a>[一二两三四五六七八])(?P<b>[两二三四五六七八九])(?P<unit>[十百千万亿]*)$")


def _approximate(run: str) -> tuple[Decimal, Decimal] | None:
    """三四 (three or four), 二三十, 十七八: neighbouring digits are bounds, not a number."""
    match = _APPROXIMATE.match(run)
    if match is None or (match["head"] and match["unit"]):
        return None
    low, high = int(_DIGIT_VALUE[match["a"]]), int(_DIGIT_VALUE[match["b"]])
    if high - low != 1 and (low, high) != (3, 5):
        return None
    head = zh_value(match["head"]) if match["head"] else Decimal(0)
    factor = Decimal(1)
    for char in match["unit"]:
        factor *= _UNIT_VALUE[char]
    assert head is not None
    return head + low * factor, head + high * factor


def _zh_number(run: str, start: int) -> Number | None:
    """The longest prefix of a run that is a numeral (一百五一张 starts with 一百五)."""
    for end in range(len(run), 0, -1):
        part = run[:end].rstrip()
        bounds = _approximate(part)
        if bounds:
            return Number(start, start + len(part), *bounds, "zh")
        value = zh_value(part) if part[-1] != "点" else None
        if value is not None:
            style = "arabic" if part[0].isascii() else "zh"
            bare = style == "zh" and (len(part) < 3 and not set(part) & set("百千万亿十拾佰仟点")
                                      or part[0] in "百千万亿" or part in ("十", "拾"))
            return Number(start, start + len(part), value, value, style, bare)
    return None


# --- English numerals ---

_EN = {word: i for i, word in enumerate(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen".split())} | {
    word: 10 * i for i, word in enumerate(
        "twenty thirty forty fifty sixty seventy eighty ninety".split(), start=2)}
_EN_BIG = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_EN_RUN = re.compile(
    rf"\b(?:(?:an?\s+)?(?:hundred|thousand|million|billion)\b|(?:{'|'.join(_EN)})\b)"
    rf"(?:(?:\s+and\s+|[\s-]+)(?:{'|'.join([*_EN, *_EN_BIG])})\b)*", re.IGNORECASE)


def en_value(text: str) -> Decimal | None:
    """The value of an English numeral such as `two hundred and fifty` or `a thousand`."""
    words = [w for w in re.split(r"[\s-]+", text.lower()) if w not in ("and", "a", "an")]
    total, section, last = 0, 0, 10**12
    for word in words:
        if word in _EN:
            value = _EN[word]
            if last <= value or (last < 20) or (last < 100 and value >= 10):
                return None
            section, last = section + value, max(value, 1)
        elif word == "hundred":
            section, last = (section or 1) * 100, 100
        else:
            total, section, last = total + (section or 1) * _EN_BIG[word], 0, _EN_BIG[word]
    return Decimal(total + section) if words else None


def _en_numbers(text: str) -> Iterator[Number]:
    for match in _EN_RUN.finditer(text):
        words = list(re.finditer(r"[A-Za-z]+", match.group()))
        for n in range(len(words), 0, -1):
            if words[n - 1].group().lower() in ("and", "a", "an"):
                continue
            end = words[n - 1].end()
            value = en_value(match.group()[:end])
            if value is not None:
                yield Number(match.start(), match.start() + end, value, value, "en",
                             bare=match.group()[:end].lower() in ("one", "hundred", "thousand"))
                break


# --- all of them ---

_SCALE = re.compile(
    r"\s?(?P<short>[kKmM](?![A-Za-z0-9])|bn\b|[B](?![A-Za-z0-9]))"
    r"|\s+(?P<word>hundred|thousand|million|billion)\b", re.IGNORECASE)
_SCALE_VALUE = {"k": 10**3, "m": 10**6, "bn": 10**9, "b": 10**9, **_EN_BIG}


def _scaled(number: Number, text: str, money: bool) -> Number:
    """Take 5k, 1.2 million and $730M; a lone m is metres, so it counts after a currency only."""
    match = _SCALE.match(text, number.end)
    if number.style != "arabic" or match is None:
        return number
    name = (match["short"] or match["word"]).lower()
    if name in ("m", "b") and not (money and match["short"].isupper() or money and name == "m"):
        return number
    factor = _SCALE_VALUE[name]
    return Number(number.start, match.end(), number.low * factor, number.high * factor, "arabic")


_RANGE = re.compile(r"\s?(?:[-~–—]|到|至|to)\s?", re.IGNORECASE)


def find_numbers(text: str) -> list[Number]:
    """Every numeral of a folded text, in order, without overlaps. Ranges are not joined."""
    found: list[Number] = []
    at = 0
    while (match := _RUN.search(text, at)) is not None:
        number = _zh_number(match.group(), match.start())
        if number is None:
            at = match.start() + 1
            continue
        before = text[max(0, number.start - 4) : number.start].rstrip()
        number = _scaled(number, text, before.endswith(("$", "¥", "€", "£", "USD", "EUR")))
        found.append(number)
        at = number.end
    if text.isascii() or re.search(r"[a-z]", text):
        taken = {i for number in found for i in range(number.start, number.end)}
        found += [n for n in _en_numbers(text) if not taken & {n.start, n.end - 1}]
    return sorted(found, key=lambda number: number.start)


def join_range(left: Number, right: Number, text: str) -> Number | None:
    """3-5, 三到五: one number with bounds, when nothing but a dash or `to` lies between."""
    between = text[left.end : right.start]
    if not between or _RANGE.fullmatch(between) is None or left.low >= right.low:
        return None
    if left.low != left.high or right.low != right.high:
        return None
    return Number(left.start, right.end, left.low, right.low, right.style)
