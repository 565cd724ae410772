"""Identifiers and names by their form: ZX-6035, phone numbers, quotes, capitals, 王老师.

This is no entity recogniser: a name that shows no form (a Chinese place, a nickname in lower case)
is not found.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

_EMAIL = re.compile(r"[A-Za-z0-9_.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+")
_URL = re.compile(r"https?://[^\s，。；、）)\"'<>]+|www\.[^\s，。；、）)\"'<>]+")
_PHONE = re.compile(
    r"(?<![\w.,-])(?:\+\d{1,3}[\s-]?(?:\(?\d{1,4}\)?[\s-]?){2,5}\d|1[3-9]\d[\s-]?\d{4}[\s-]?\d{4}"
    r"|0\d{2,3}-\d{7,8}|\(?\d{3}\)?[\s-]\d{3}-\d{4}|400-\d{3,4}-\d{3,4})(?![\w-]|[.,]\d)", re.ASCII)
_CODE = re.compile(r"(?<![A-Za-z0-9])[A-Za-z0-9]+(?:[-_./#][A-Za-z0-9]+)*", re.ASCII)
_QUANTITY_CODE = re.compile(
    r"[$€£¥]?\d[\d,.]*(?:-\d[\d.]*)?[-/]?"
    r"(?:k|m|bn|b|kg|g|mg|km|cm|mm|ml|l|lb|lbs|ft|in|mi|gb|tb|mb|kw|w|v|hz|ghz|mhz|h|hr|hrs|min|"
    r"mins|s|sec|secs|am|pm|th|st|nd|rd|x|usd|eur|cny|rmb|gbp|dollars?|days?|hours?|weeks?|"
    r"months?|years?|minutes?|year-old|years-old|day-old|percent|million|billion|yo)s?",
    re.IGNORECASE)
_DASHED = re.compile(r"(?<![\w.-])\d+(?:[-/#]\d+)+(?![\w-]|\.\d)", re.ASCII)
_LONG_OR_VERSION = re.compile(
    r"(?<![\w.,])(?:0\d{2,}|\d{16,}|\d+(?:\.\d+){2,})(?![\w]|[.,]\d)", re.ASCII)
_RANGE_UNIT = re.compile(
    r"\s?(?:[年月天周个日元块%岁人次米公斤小分]|days?|weeks?|months?|hours?|years?|people|minutes?|"
    r"dollars?|times|km|kg|am|pm)")


def find_identifiers(text: str) -> Iterator[tuple[int, int]]:
    """Spans of e-mails, links, phone numbers and codes of letters and digits; may overlap."""
    for pattern in (_EMAIL, _URL, _PHONE):
        yield from (match.span() for match in pattern.finditer(text))
    for match in _CODE.finditer(text):
        word = match.group()
        mixed = re.search("[A-Za-z]", word) and re.search(r"\d", word)
        if mixed and not _QUANTITY_CODE.fullmatch(word):
            yield match.span()
    for match in _DASHED.finditer(text):
        low, _, high = match.group().partition("-")
        is_range = high.isdigit() and low.isdigit() and int(high) > int(low) and (
            _RANGE_UNIT.match(text, match.end()) or text[match.start() - 1 : match.start()] in
            tuple("$¥€£"))
        if not is_range:
            yield match.span()
    for match in _LONG_OR_VERSION.finditer(text):
        yield match.span()


_QUOTED = re.compile(
    r"「([^」]{1,30})」|『([^』]{1,30})』|《([^》]{1,40})》|“([^”]{1,30})”"
    r"|\"([^\"\n]{1,30})\"|‘([^’]{1,30})’")
_CAPITAL = r"[A-ZÀ-ÖØ-Þ][a-zA-ZÀ-ÖØ-öø-ÿ]*(?:['’-][A-ZÀ-Þ][a-zà-ÿ]+)*"
_CAPITALS = re.compile(
    rf"(?<![A-Za-z0-9_'’])(?:{_CAPITAL}\.?)(?:\s(?:(?:of|de|van|von|da|di|du|la|le|the|and)\s)?(?:{_CAPITAL}))*")
_NOT_NAMES = frozenset(
    "i a an the my your his her its our their this that these those it he she we they you who what "
    "when where why how which if and or but so because since while although as at by for from in "
    "into of on to with without about after before during over under between yes no not ok okay "
    "oh hey hi hello thanks thank please sorry well also just maybe perhaps actually honestly "
    "really then there here now today tomorrow yesterday tonight every each all some any both "
    "most many much more another other one two three four five six seven eight nine ten do does "
    "did is are was were am be been have has had can could will would shall should may might must "
    "let lets get got go going make take give remember note don didn doesn won isn aren wasn "
    "user users assistant usd cny rmb eur gbp am pm tv lol id pin pdf faq diy asap fyi btw omg "
    "monday tuesday wednesday thursday friday saturday sunday january february march april june "
    "july august september october november december mon tue wed thu fri sat sun jan feb mar apr "
    "jun jul aug sep sept oct nov dec first second third last next never always still only even "
    "sure great good nice wow glad right yeah yep nope nothing something everything someone "
    "everyone people mom dad mum bought booked moved watered posted looking sounds sometimes "
    "recently finally currently later once until unless despite besides however though apart "
    "mr mrs ms dr prof sir".split())
_TITLE = frozenset("mr mrs ms dr prof sir aunt uncle".split())
_SURNAME = ("王李张刘陈杨赵黄周吴徐孙胡朱高林何郭马罗梁宋郑谢韩唐冯于董萧程曹袁邓许傅沈曾彭"
            "吕苏卢蒋蔡贾丁魏薛叶阎余潘杜戴夏钟汪田任姜范方石姚谭廖邹熊金陆郝孔白崔康毛邱"
            "秦江史顾侯邵孟龙万段雷钱汤尹黎易常武乔贺赖龚文欧")
_ZH_NAMED = re.compile(
    r"(?:名叫|(?:名字|小名|昵称|代号|全名)[是叫]|[我他她它]叫|叫做|本名|姓名[:：]?)"
    r"(?P<name>[\u4e00-\u9fff·]{2,4})(?=[，。,.!！?？;；、\s]|的|是|在|$)")
_ZH_TITLED = re.compile(
    rf"(?P<name>[小老阿][{_SURNAME}](?![\u4e00-\u9fff]?[板师])|[{_SURNAME}][\u4e00-\u9fff]{{0,2}}?"
    r"(?:老师|医生|经理|总监|教授|先生|女士|阿姨|叔叔|主任|律师|师傅|大夫|护士|同学|主管))")


def _is_sentence_start(text: str, at: int) -> bool:
    before = text[:at].rstrip(" \"'“‘(*-")
    return not before or before[-1] in ".!?。！？:：\n;；…"


_SUBJECT_CUE = re.compile(
    r"['’]s\b|\s(?:is|was|has|had|will|would|can|cannot|said|told|and [A-Z]|left|bought|got|went|"
    r"always|never)\b|,\s(?:the|an?|who|whose|my|his|her|our)\b|(?<!s)\s[a-z]{3,}(?:s|ed)\b")


def _capitalised(text: str) -> Iterator[tuple[int, int]]:
    """Runs of capitalised words; the first word of a sentence needs a cue that it is a name."""
    for match in _CAPITALS.finditer(text):
        words = list(re.finditer(r"\S+", match.group()))
        while words and words[0].group().strip(".'’").lower().split("'")[0] in _NOT_NAMES - _TITLE:
            words = words[1:]
        while words and (words[-1].group().strip(".").lower() in _NOT_NAMES
                         or words[-1].group()[0].islower()):
            words = words[:-1]
        while words and words[0].group()[0].islower():
            words = words[1:]
        if not words:
            continue
        start, end = match.start() + words[0].start(), match.start() + words[-1].end()
        name = text[start:end].rstrip(".")
        end = start + len(name)
        if len(name) < 2 or name.lower() in _TITLE:
            continue
        alone = len(words) == 1 and _is_sentence_start(text, start)
        if alone and (name.endswith("ing") or not _SUBJECT_CUE.match(text, end)):
            continue
        yield start, end


def find_names(text: str) -> Iterator[tuple[int, int]]:
    """Spans of quoted, capitalised, introduced and titled names; may overlap."""
    for match in _QUOTED.finditer(text):
        yield next(match.span(n) for n in range(1, 7) if match[n])
    yield from _capitalised(text)
    for pattern in (_ZH_NAMED, _ZH_TITLED):
        for match in pattern.finditer(text):
            if not re.search("[什怎哪谁啥]", match["name"]):
                yield match.span("name")


def normal_identifier(text: str) -> str:
    """Upper case without separators: zx 6035 and ZX-6035 are one; e-mails and URLs keep theirs."""
    text = unicodedata.normalize("NFKC", text).strip()
    if "@" in text or "://" in text or text.lower().startswith("www."):
        return text.lower().rstrip("/")
    # A dash between digits is kept: 12-304 is not 123-04.
    text = re.sub(r"(?<=[A-Za-z])[\s_-]+(?=\d)|(?<=\d)[\s_-]+(?=[A-Za-z])", "", text)
    digits = re.sub(r"[\s()+-]", "", text)
    if digits.isdigit() and len(digits) >= 10:
        return digits[2:] if len(digits) == 13 and digits.startswith("86") else digits
    return text.upper()


def normal_name(text: str) -> str:
    """Width- and case-folded, spaces collapsed, without a possessive."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return re.sub(r"['’]s$", "", " ".join(text.split()))
