"""What a numeral counts: money, percent, a duration, kilograms or plain things.

Units of a kind share a base unit, so that 5 km = 5000 m and 一个半小时 = 90 minutes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from memory_runtime.numerals import (
    ZH_NUMERAL,
    Number,
    find_numbers,
    join_range,
    plain,
    zh_value,
)

Reading = tuple[int, int, dict[str, Any]]
"""Start, end and value of what a reader made of a number."""

_CURRENCY_SIGN = {"US$": "USD", "HK$": "HKD", "NT$": "TWD", "A$": "AUD", "C$": "CAD", "S$": "SGD",
                  "$": "USD", "¥": "CNY", "€": "EUR", "£": "GBP", "₩": "KRW", "₹": "INR"}
_CURRENCY_CODE = "USD CNY RMB EUR GBP JPY HKD KRW AUD CAD SGD TWD INR CHF".split()
_CURRENCY_WORD = {
    "美元": "USD", "美金": "USD", "刀": "USD", "欧元": "EUR", "英镑": "GBP", "日元": "JPY",
    "日币": "JPY", "港币": "HKD", "港元": "HKD", "韩元": "KRW", "台币": "TWD", "新台币": "TWD",
    "人民币": "CNY", "元钱": "CNY", "元": "CNY", "块钱": "CNY", "块": "CNY", "dollars": "USD",
    "dollar": "USD", "bucks": "USD", "euros": "EUR", "euro": "EUR", "yuan": "CNY", "yen": "JPY",
    "pounds sterling": "GBP", "quid": "GBP"}
_MONEY_BEFORE = re.compile(
    rf"(?:{'|'.join(re.escape(s) for s in _CURRENCY_SIGN)}|\b(?:{'|'.join(_CURRENCY_CODE)})"
    r"|人民币)\s?$")
_MONEY_AFTER = re.compile(
    rf"\s?(?:(?:US|us)\s)?(?P<unit>{'|'.join(sorted(_CURRENCY_WORD, key=len, reverse=True))}"
    rf"|(?:{'|'.join(_CURRENCY_CODE)})\b|€|£)(?![a-z])", re.IGNORECASE)
_JIAO = re.compile(r"[零〇一二三四五六七八九\d](?:毛|角)?(?![\d十百千万个])")
_PIECES = re.compile("块[蛋石头肉布地表手屏面包巧砖骨饼糖豆电积]")
_PERCENT_BEFORE = re.compile("百分之$")
_PERCENT_AFTER = re.compile(r"\s?(?:%|percent\b|per\s?cent\b|个?百分点)", re.IGNORECASE)
_TENTHS_AFTER = re.compile("成(?![为功立就员本长绩熟果分都语交])")

SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
MONTHS = {"month": 1, "quarter": 3, "year": 12, "decade": 120}
_DURATION_AFTER = re.compile(
    r"(?P<half>个?半)?[\s-]?(?:"
    r"(?P<second>秒钟?|seconds?\b|secs?\b)|(?P<minute>分钟|minutes?\b|mins?\b)"
    r"|(?P<hour>个?(?:小时|钟头)|hours?\b|hrs?\b|h\b)|(?P<day>天(?!气|的?空)|days?\b)"
    r"|(?P<week>个?(?:星期|礼拜)(?![一二三四五六日天])|周(?![年末一二三四五六日天岁])|weeks?\b|wks?\b)"
    r"|(?P<month>个月|months?\b)|(?P<quarter>个?季度|quarters?\b)"
    r"|(?P<year>年(?![级代前后])|years?\b(?![\s-]old)|yrs?\b)|(?P<decade>decades?\b))"
    r"(?P<tail>半(?![天年月小]))?", re.IGNORECASE)
HALF = re.compile(
    r"(?:半个?|\bhalf\s+an?\s+)(?:(?P<hour>小时|钟头|hour\b)|(?P<month>月|month\b)|(?P<year>年|year\b)"
    r"|(?P<day>天|day\b))", re.IGNORECASE)

# Unit word -> (dimension, factor to the dimension's base unit).
_UNITS: dict[str, tuple[str, str]] = {}
for _dimension, _words in {
    "g": "kg 1000|公斤 1000|千克 1000|斤 500|mg 0.001|毫克 0.001|g 1|克 1|grams 1|吨 1000000",
    "lb": "lbs 1|lb 1|pounds 1|pound 1|磅 1",
    "m": "km 1000|公里 1000|千米 1000|kilometers 1000|kilometres 1000|里地 500|cm 0.01|厘米 0.01|"
         "公分 0.01|mm 0.001|毫米 0.001|meters 1|metres 1|meter 1|米 1|m 1",
    "mi": "miles 1|mile 1|英里 1", "ft": "feet 1|foot 1|ft 1|英尺 1",
    "in": "inches 1|inch 1|英寸 1|寸 1",
    "l": "ml 0.001|毫升 0.001|升 1|liters 1|litres 1|l 1",
    "m2": "平方米 1|平米 1|㎡ 1|平方 1|平 1|sqm 1", "b": "TB 1000000|GB 1000|G 1000|MB 1",
    "celsius": "℃ 1|°C 1|摄氏度 1", "fahrenheit": "°F 1", "degree": "度 1|degrees 1|° 1",
    "kcal": "千卡 1|大卡 1|kcal 1|卡路里 0.001|calories 1", "w": "kW 1000|千瓦 1000|W 1|瓦 1",
    "v": "V 1|伏 1", "hz": "GHz 1000|MHz 1|Hz 0.000001",
    "year_old": "周岁 1|岁半 1|岁 1|years old 1|year old 1|years-old 1|year-old 1|yo 1",
}.items():
    for _entry in _words.split("|"):
        _word, _, _factor = _entry.rpartition(" ")
        _UNITS[_word] = (_dimension, _factor)
_UNIT_AFTER = re.compile(
    rf"[\s-]?(?P<unit>{'|'.join(sorted(map(re.escape, _UNITS), key=len, reverse=True))})(?![a-z])")
_MEASURE = ("块个只条次位名张本台间层楼栋瓶杯份人口期轮套辆件部家座把盒包袋双对颗棵头匹门节课场"
            "届级号室房折倍遍顿碗片粒箱罐桌步页行句题分项种类排列队组班站集章卷回趟支枝根道"
            "筐串堆批圈架艘幅款")
_ARTICLE_MEASURE = tuple(
    "个些下点种样直起定般共边旦切会路番向致流位名条件张只把本份句次场家道股阵片部台间块段身")
FRACTION = re.compile(
    rf"(?P<of>[{ZH_NUMERAL}]{{1,3}}|\d+)分之(?P<part>[{ZH_NUMERAL}]{{1,3}}|\d+)"
    r"|(?<![\w/.])(?P<top>[1-9]\d?)/(?P<bottom>[1-9]\d?)(?![\w/.])")
_IDIOM = re.compile(
    "三明治|三星|三亚|四川|五金|七夕|八卦|九寨|百度|一些|第三方|四季|五花|六神|七喜|两口|九零后")


def base_unit(word: str) -> tuple[str, Decimal]:
    """Dimension of a physical unit and its factor to the base unit of the dimension."""
    dimension, factor = _UNITS[word]
    return dimension, Decimal(factor)


# --- numbers and what they count ---


def _amounts(number: Number, key: str, extra: Decimal = Decimal(0)) -> dict[str, Any]:
    if number.low == number.high:
        return {key: plain(number.low + extra)}
    return {"low": plain(number.low), "high": plain(number.high)}


def _money(number: Number, text: str) -> Reading | None:
    """3万元, $1,200, USD 730 million, 三块五: amount and currency."""
    before = _MONEY_BEFORE.search(text, max(0, number.start - 5), number.start)
    after = _MONEY_AFTER.match(text, number.end)
    if after and after["unit"] == "块" and _PIECES.match(text, after.start("unit")):
        after = None
    if before is None and after is None:
        return None
    start = before.start() if before else number.start
    end, extra = after.end() if after else number.end, Decimal(0)
    name = after["unit"] if after else before.group().strip() if before else ""
    code = (_CURRENCY_SIGN.get(name) or _CURRENCY_WORD.get(name)
            or _CURRENCY_WORD.get(name.lower()) or name.upper().replace("RMB", "CNY"))
    if after and after["unit"] == "块":
        jiao = _JIAO.match(text, end)
        digit = find_numbers(jiao.group()[0]) if jiao else []
        if jiao and digit:
            extra, end = digit[0].low / 10, jiao.end()
    return start, end, {**_amounts(number, "amount", extra), "currency": code}


def _percent(number: Number, text: str) -> Reading | None:
    before = _PERCENT_BEFORE.search(text, max(0, number.start - 3), number.start)
    after = _PERCENT_AFTER.match(text, number.end)
    if before:
        return before.start(), number.end, _amounts(number, "percent")
    if after:
        return number.start, after.end(), _amounts(number, "percent")
    tenths = _TENTHS_AFTER.match(text, number.end)
    if tenths and number.high <= 10:
        scaled = Number(0, 0, number.low * 10, number.high * 10, number.style)
        return number.start, tenths.end(), _amounts(scaled, "percent")
    return None


def _duration(number: Number, text: str) -> Reading | None:
    match = _DURATION_AFTER.match(text, number.end)
    if match is None:
        return None
    unit = next(name for name in (*SECONDS, *MONTHS) if match[name])
    extra = Decimal("0.5") if match["half"] or match["tail"] else Decimal(0)
    return number.start, match.end(), {**_amounts(number, "amount", extra), "unit": unit}


def _counted(number: Number, text: str) -> Reading | None:
    """A plain number, with its physical unit where it has one."""
    match = _UNIT_AFTER.match(text, number.end)
    if match is not None:
        half = Decimal("0.5") if match["unit"] == "岁半" else Decimal(0)
        unit = "岁" if match["unit"] == "岁半" else match["unit"]
        return number.start, match.end(), {**_amounts(number, "number", half), "unit": unit}
    if number.bare and not _is_counted_word(number, text):
        return None
    return number.start, number.end, _amounts(number, "number")


def _is_counted_word(number: Number, text: str) -> bool:
    """A lone Chinese digit is a number before a measure word or after 第; 一个 is an article."""
    after = text[number.end : number.end + 1]
    word = text[number.start : number.end]
    if number.style != "zh":
        return False
    if text[max(0, number.start - 1) : number.start] == "第":
        return True
    if word == "一" and after in _ARTICLE_MEASURE or word[0] in "百千万亿":
        return False
    return bool(after) and after in _MEASURE and not (word == "十" and after == "分")


def read_quantity(number: Number, text: str) -> tuple[str, int, int, dict[str, Any]] | None:
    """The literal that a number belongs to: percent, money, duration or plain number."""
    if _IDIOM.match(text, number.start):
        return None
    readers: tuple[tuple[str, Callable[..., Reading | None]], ...] = (
        ("percent", _percent), ("money", _money), ("duration", _duration), ("number", _counted))
    for type_, read in readers:
        result = read(number, text)
        if result is None:
            continue
        if type_ == "duration" and number.bare and number.low == 1 and re.search(
                "[有某哪每同这那另第]$", text[max(0, number.start - 1) : number.start]):
            return None
        return (type_, *result)
    return None


def joined_ranges(numbers: list[Number], text: str) -> Iterator[Number]:
    """3-5天 is one number with bounds where a unit follows; 12-304 was an identifier before."""
    at = 0
    while at < len(numbers):
        if at + 1 < len(numbers):
            both = join_range(numbers[at], numbers[at + 1], text)
            if both is not None:
                yield both
                at += 2
                continue
        yield numbers[at]
        at += 1


def find_fractions(text: str) -> Iterator[Reading]:
    """三分之一 and 1/3; 百分之 is percent and read elsewhere."""
    for match in FRACTION.finditer(text):
        whole = zh_value(match["of"] or match["bottom"])
        part = zh_value(match["part"] or match["top"])
        if whole is not None and part is not None and match["of"] != "百":
            yield match.start(), match.end(), {"fraction": f"{plain(part)}/{plain(whole)}"}
