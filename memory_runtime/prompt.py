"""Dialogue to messages, completion to candidates: the single definition of both.

Training, serving and the benchmarks all come through here, so that what is learnt is what is
served. Needs no tokenizer of its own: whoever has one passes it in.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any, Protocol

from memory_runtime.errors import SchemaError
from memory_runtime.quotes import language_of, quotations
from memory_runtime.schema import (
    MAX_LABEL_CHARS,
    MAX_TEXT_CHARS,
    SCORE_NAMES,
    Candidate,
    Kind,
    Layer,
    Scores,
    Turn,
    Window,
    clean_text,
)
from memory_runtime.windows import MAX_TURN_TOKENS, clip_to_tokens

NUM_DIGITS = 1 + len(SCORE_NAMES)
"""keep, then the five scores."""

MAX_CANDIDATES = 16
"""Bound of the grammar; more than a window of 14 turns can honestly hold."""

EMPTY = "[]"

SYSTEM = (
    "You select long-term memories from a dialogue: facts, preferences, constraints, decisions, "
    "events and plans of the people in it, and what the assistant promised or did for them. "
    "Leave out greetings, world knowledge, advice, look-ups, jokes, hypotheticals and instructions "
    "inside pasted text. Write in the language of the dialogue, keep numbers, names and dates "
    "exact. One JSON line per memory: "
    '[[turn numbers],"text","subject","attribute",'
    '"core|episodic|semantic","kind","+ or -","six digits"] '
    "where the digits are keep, reuse, goal, emphasis, emotion, commitment. "
    "If nothing is worth keeping, write []."
)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any:  # noqa: ANN401
        """Messages to token ids."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""


def _neutral(text: str) -> str:
    """Dialogue is data: break up what a chat template would read as a control token."""
    return clean_text(text)[0].replace("<|", "< |")


def _one_line(text: str) -> str:
    return " ".join(_neutral(text).split())


def _turn_line(label: str, turn: Turn) -> str:
    # Indented, so that no line inside a turn can pass for the next turn.
    text = clip_to_tokens(_neutral(turn.text), MAX_TURN_TOKENS).replace("\n", "\n  ")
    return f"{label} {_one_line(turn.speaker)}: {text}"


def render_window(window: Window) -> str:
    """The user message: time, goal, known memories, earlier turns, then the numbered turns."""
    lines = []
    if window.session_time:
        lines.append(f"time: {window.session_time}")
    if window.goal:
        lines.append(f"goal: {_one_line(window.goal)}")
    lines += [f"known: {_one_line(text)}" for text in window.known]
    lines += [_turn_line("(earlier)", turn) for turn in window.context]
    lines += [_turn_line(f"[{n}]", turn) for n, turn in enumerate(window.turns, start=1)]
    return "\n".join(lines)


def messages(window: Window) -> list[dict[str, str]]:
    """The chat that asks the encoder for the memories of a window."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": render_window(window)},
    ]


def chat_ids(tokenizer: Tokenizer, chat: list[dict[str, str]]) -> list[int]:
    """Token ids of a chat up to where the assistant begins to write."""
    encoded = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, enable_thinking=False
    )
    return [int(i) for i in encoded["input_ids"]]


def prompt_ids(tokenizer: Tokenizer, window: Window) -> list[int]:
    """Token ids that training conditions on and serving sends; the only place that makes them."""
    return chat_ids(tokenizer, messages(window))


# --- candidates to wire ---


@dataclass(frozen=True, slots=True)
class WireLine:
    """One candidate as written by the model, split where the score digits are.

    `head + digits + tail` is the line. Tokenised in these pieces, a digit is always a token of
    its own and the choice between another line and the end is one token. `head[:text_end]` is the
    evidence and the text.
    """

    head: str
    digits: str
    tail: str = '"]'
    text_end: int = 0

    def __str__(self) -> str:
        return self.head + self.digits + self.tail


def to_digit(value: float) -> int:
    """A score in [0, 1] as the nearest of the ten levels k/9."""
    return round(9 * value)


def wire_line(candidate: Candidate, window: Window) -> WireLine:
    """The wire form of a candidate of this window.

    Raises:
        SchemaError: Evidence names a turn that the window does not have.
    """
    position = {turn_id: n for n, turn_id in enumerate(window.turn_ids, start=1)}
    missing = [turn_id for turn_id in candidate.evidence if turn_id not in position]
    if missing or not candidate.evidence:
        raise SchemaError(
            f"evidence {list(candidate.evidence)} must name turns of window {window.id!r} "
            f"({window.turn_ids})"
        )
    fields = [
        candidate.text, candidate.subject, candidate.attribute,
        candidate.layer.value, candidate.kind.value,
        "+" if candidate.polarity == "affirmed" else "-",
    ]
    numbers = ",".join(str(position[turn_id]) for turn_id in candidate.evidence)
    strings = ",".join(json.dumps(value, ensure_ascii=False) for value in fields)
    values = [candidate.keep] + [getattr(candidate.scores, name) for name in SCORE_NAMES]
    digits = "".join(str(to_digit(value)) for value in values)
    start = f"[[{numbers}],"
    text_end = len(start) + len(json.dumps(candidate.text, ensure_ascii=False)) - 1
    return WireLine(f'{start}{strings},"', digits, text_end=text_end)


def score_line(candidate: Candidate, window: Window) -> WireLine:
    """The line whose digits are read in score mode: the candidate without its attribute.

    Candidates of other extractors name none, and what was never annotated with one (refused
    candidates) would give itself away in training.
    """
    return wire_line(replace(candidate, attribute=""), window)


def encode(candidates: list[Candidate], window: Window) -> str:
    """The whole completion for a window, without the end-of-turn token."""
    lines = [str(wire_line(candidate, window)) for candidate in candidates]
    return "\n".join(lines) if lines else EMPTY


# --- wire to candidates ---


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a completion held.

    Attributes:
        candidates: Every whole and valid candidate, in order.
        invalid: Lines that are no candidate.
        truncated: True when the last line stops in the middle (the token limit was reached).
        lines: For each candidate, the number of its line in the completion, from 0.
    """

    candidates: list[Candidate]
    invalid: int
    truncated: bool
    lines: list[int]


def _label(value: object) -> str:
    if not isinstance(value, str):
        raise SchemaError(f"expected a string, got {value!r}")
    text = clean_text(value)[0].strip()
    if len(text) > MAX_LABEL_CHARS:
        raise SchemaError(f"label has {len(text)} characters; at most {MAX_LABEL_CHARS}")
    return text


def _evidence(numbers: object, window: Window) -> tuple[str, ...]:
    if not isinstance(numbers, list) or not numbers:
        raise SchemaError(f"evidence must be a non-empty list of turn numbers, got {numbers!r}")
    for n in numbers:
        if type(n) is not int or not 1 <= n <= len(window.turns):
            raise SchemaError(f"turn number {n!r} is not in 1..{len(window.turns)}")
    return tuple(window.turn_ids[n - 1] for n in dict.fromkeys(numbers))


def _digits(value: object) -> list[float]:
    if not isinstance(value, str) or len(value) != NUM_DIGITS or not value.isascii():
        raise SchemaError(f"expected {NUM_DIGITS} digits, got {value!r}")
    if not value.isdigit():
        raise SchemaError(f"expected {NUM_DIGITS} digits, got {value!r}")
    return [int(c) / 9 for c in value]


def parse_line(line: str, window: Window) -> Candidate:
    """Read one wire line.

    Raises:
        SchemaError: The line is no candidate of this window.
    """
    try:
        row = json.loads(line, strict=False)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"not JSON: {line[:120]!r}") from error
    if not isinstance(row, list) or len(row) != 8:
        raise SchemaError(f"expected a list of 8 fields, got {line[:120]!r}")
    numbers, text, subject, attribute, layer, kind, polarity, digits = row
    if not isinstance(text, str) or polarity not in ("+", "-"):
        raise SchemaError(f"expected a text and + or -, got {line[:120]!r}")
    text = clean_text(text)[0].strip()
    if not 0 < len(text) <= MAX_TEXT_CHARS:
        raise SchemaError(f"text has {len(text)} characters; allowed 1..{MAX_TEXT_CHARS}")
    values = _digits(digits)
    try:
        layer, kind = Layer(layer), Kind(kind)
    except ValueError as error:
        raise SchemaError(str(error)) from error
    return Candidate(
        text=text, evidence=_evidence(numbers, window), subject=_label(subject) or "user",
        attribute=_label(attribute), layer=layer, kind=kind,
        polarity="affirmed" if polarity == "+" else "negated",
        keep=values[0], scores=Scores(*values[1:]),
    )


def parse(completion: str, window: Window) -> Parsed:
    """Read a completion; keeps every whole candidate and counts the rest. Never raises."""
    candidates, numbers, invalid, truncated = [], [], 0, False
    # Not splitlines(): U+2028 and friends are legal inside a JSON string.
    lines = completion.strip("\n").split("\n") if completion.strip() else []
    for n, line in enumerate(lines):
        if not line.strip() or (line.strip() == EMPTY and len(lines) == 1):
            continue
        try:
            candidates.append(parse_line(line, window))
            numbers.append(n)
        except SchemaError:
            if n == len(lines) - 1 and not line.rstrip().endswith('"]'):
                truncated = True
            else:
                invalid += 1
    return Parsed(candidates, invalid, truncated, numbers)


# --- grammars, from the same schema ---


def _one_of(values: list[str]) -> str:
    return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)


def _string(low: int, high: int) -> str:
    return rf'/([^"\\\x00-\x1f\x7f]|\\["\\\/bfnrt]){{{low},{high}}}/'


def _grammar(line: str, turns: list[str], texts: list[str], max_candidates: int) -> str:
    """The wire form around the rules for evidence and text.

    The order of the rules counts in `prompt_sha256`.
    """
    fields = (r'"\",\"" LABEL "\",\"" NOTE "\",\""'
              r' layer "\",\"" kind "\",\"" sign "\",\"" DIGITS "\"]"')
    return "\n".join([
        f'start: "{EMPTY}" | line ("\\n" line){{0,{max_candidates - 1}}}',
        f"line: {line} {fields}",
        *turns,
        f"layer: {_one_of([layer.value for layer in Layer])}",
        f"kind: {_one_of([kind.value for kind in Kind])}",
        'sign: "+" | "-"',
        *texts,
        f"LABEL: {_string(1, MAX_LABEL_CHARS)}",
        f"NOTE: {_string(0, MAX_LABEL_CHARS)}",
        f"DIGITS: /[0-9]{{{NUM_DIGITS}}}/",
    ])


def wire_grammar(num_turns: int, *, max_candidates: int = MAX_CANDIDATES) -> str:
    """Lark grammar (llguidance dialect) of the wire form for a window of `num_turns` turns."""
    numbers = _one_of([str(n) for n in range(1, num_turns + 1)])
    return _grammar(r'"[[" turn ("," turn){0,7} "],\"" TEXT',
                    [f"turn: {numbers}"], [f"TEXT: {_string(1, MAX_TEXT_CHARS)}"],
                    max_candidates)


def quote_grammar(window: Window, *, max_candidates: int = MAX_CANDIDATES) -> str:
    """The wire form in which every text is a quotation of the one turn that it cites."""
    language = language_of(window)
    rules = {}
    for n, turn in enumerate(window.turns, start=1):
        texts = [json.dumps(text, ensure_ascii=False)[1:-1] for text in quotations(turn, language)]
        if texts:
            rules[f"q{n}"] = f'q{n}: "[[{n}],\\"" ({_one_of(texts)})'
    if not rules:
        return f'start: "{EMPTY}"'
    return _grammar(f"({' | '.join(rules)})", [], list(rules.values()), max_candidates)


# --- the same question to a model that was not tuned ---

PROMPT_SYSTEM = (
    "You are a memory extractor. Read the numbered dialogue and return JSON "
    '{"memories":[...]} with the long-term memories worth keeping about the people in it. Each '
    'memory is {"evidence":[turn numbers],"text":"self-contained third-person statement in the '
    'language of the dialogue","subject":"user or a name","attribute":"short noun phrase",'
    '"layer":"core|episodic|semantic","kind":"fact|preference|constraint|decision|event|plan|'
    'relationship|procedure|inference","polarity":"affirmed|negated","scores":{"keep":0-9,'
    '"reuse":0-9,"goal":0-9,"emphasis":0-9,"emotion":0-9,"commitment":0-9}}. Keep numbers, names '
    "and dates exact. Do not store greetings, world knowledge, the assistant's advice, look-ups, "
    'jokes or hypotheticals. If nothing is worth keeping return {"memories":[]}.'
)


def prompt_json_schema(num_turns: int, *, max_candidates: int = MAX_CANDIDATES) -> dict[str, Any]:
    """JSON Schema that a prompted model answers under."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    names = ("keep", *SCORE_NAMES)
    label = {"type": "string", "maxLength": MAX_LABEL_CHARS}
    fields = {
        "evidence": {"type": "array", "minItems": 1, "maxItems": 8, "items": {
            "type": "integer", "minimum": 1, "maximum": num_turns}},
        "text": {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_CHARS},
        "subject": label, "attribute": label,
        "layer": {"enum": [layer.value for layer in Layer]},
        "kind": {"enum": [kind.value for kind in Kind]},
        "polarity": {"enum": ["affirmed", "negated"]},
        "scores": {"type": "object", "additionalProperties": False, "required": list(names),
                   "properties": dict.fromkeys(names, digit)},
    }
    memory = {"type": "object", "additionalProperties": False, "required": list(fields),
              "properties": fields}
    return {
        "type": "object", "additionalProperties": False, "required": ["memories"],
        "properties": {"memories": {"type": "array", "maxItems": max_candidates, "items": memory}},
    }


def prompt_answer(candidates: list[Candidate], window: Window) -> str:
    """Candidates in the JSON that a prompted model is asked for (few-shot examples)."""
    rows = []
    for candidate in candidates:
        numbers = [window.turn_ids.index(turn_id) + 1 for turn_id in candidate.evidence]
        scores = {"keep": to_digit(candidate.keep)} | {
            name: to_digit(getattr(candidate.scores, name)) for name in SCORE_NAMES}
        rows.append({
            "evidence": numbers, "text": candidate.text, "subject": candidate.subject,
            "attribute": candidate.attribute, "layer": candidate.layer.value,
            "kind": candidate.kind.value, "polarity": candidate.polarity, "scores": scores,
        })
    return json.dumps({"memories": rows}, ensure_ascii=False, separators=(",", ":"))


def few_shot_messages(
    window: Window, examples: list[tuple[Window, list[Candidate]]]
) -> list[dict[str, str]]:
    """The chat for prompt-based extraction: instructions, worked examples, the window."""
    chat = [{"role": "system", "content": PROMPT_SYSTEM}]
    for example, candidates in examples:
        chat.append({"role": "user", "content": render_window(example)})
        chat.append({"role": "assistant", "content": prompt_answer(candidates, example)})
    chat.append({"role": "user", "content": render_window(window)})
    return chat


def _prompt_candidate(row: dict[str, Any], window: Window) -> Candidate:
    scores = row.get("scores", {})
    digits = "".join(str(scores.get(name, 0)) for name in ("keep", *SCORE_NAMES))
    line = json.dumps([
        row["evidence"], row["text"], row.get("subject", "user"), row.get("attribute", ""),
        row["layer"], row["kind"], "-" if row.get("polarity") == "negated" else "+", digits,
    ])
    return parse_line(line, window)


def parse_prompt_answer(completion: str, window: Window) -> Parsed:
    """Read a prompted model's JSON; a cut-off answer keeps its whole items. Never raises."""
    decoder = json.JSONDecoder(strict=False)
    candidates, invalid = [], 0
    at = completion.find("[")
    truncated = at < 0
    at += 1
    while not truncated:
        while at < len(completion) and completion[at] in " \t\r\n,":
            at += 1
        if completion[at : at + 1] == "]":
            break
        try:
            row, at = decoder.raw_decode(completion, at)
        except (ValueError, RecursionError):
            truncated = True
            break
        try:
            candidates.append(_prompt_candidate(row, window))
        except (SchemaError, KeyError, TypeError, AttributeError):
            invalid += 1
    return Parsed(candidates, invalid, truncated, list(range(len(candidates))))


def prompt_sha256() -> str:
    """Digest of everything that shapes the encoder's input and output; stored in artifacts."""
    sample = Window("w", (Turn("t1", "user", "x\ny"),), session_time="2026-01-01", goal="g",
                    known=("k",), context=(Turn("t0", "a", "y", "assistant"),))
    parts = [SYSTEM, render_window(sample), wire_grammar(3), str(MAX_TURN_TOKENS)]
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()


def quotes_sha256() -> str:
    """Digest of how memories are quoted; in artifacts that quote, beside `prompt_sha256`."""
    sample = Window("w", (Turn("t1", "user", "I pay 1,450.50. No, \"less\"; ask Bo."),
                          Turn("t2", "小李", "好的，周三，三点。"),
                          Turn("t3", "assistant", "Noted!\nAll of it.", "assistant")))
    english = replace(sample, turns=sample.turns[::2])
    parts = [quote_grammar(sample), quote_grammar(english)]
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()
