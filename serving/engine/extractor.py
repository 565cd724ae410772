"""The encoder as served: emit → score → threshold; and the two untuned ways to compare it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from memory_runtime.errors import SchemaError
from memory_runtime.models import Extraction
from memory_runtime.prompt import (
    Parsed,
    chat_ids,
    few_shot_messages,
    messages,
    parse,
    parse_prompt_answer,
    prompt_json_schema,
    quote_grammar,
    score_line,
    wire_grammar,
)
from memory_runtime.schema import SCORE_NAMES, Candidate, Scores, Turn, Window
from serving.artifact import Artifact, apply_map
from serving.engine.constrained import Grammars, TokenMatcher
from serving.engine.decode import FirstChoice, Row, decode
from serving.engine.loading import LoadedLM
from serving.engine.packing import plan_batches
from serving.engine.prefill import Prefiller, PromptState
from serving.engine.score import branch_of, score_branches

Mode = Literal["tuned", "base", "prompt"]
MODES: tuple[Mode, ...] = ("tuned", "base", "prompt")
Example = tuple[Window, list[Candidate]]

_PROBE = Window("probe", (Turn("t1", "user", "?"),))


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the engine's work."""

    max_new_tokens: int = 350
    """Most tokens of one completion; stops a model that repeats itself."""
    max_rows: int = 16
    """Most windows decoded together."""
    max_batch_tokens: int = 16384
    """Most places of a batch: rows × (prompt without its shared part + max_new_tokens)."""
    max_score_tokens: int = 4096
    """Most tokens of one scoring pass."""
    max_prompt_tokens: int = 8192
    """Longest prompt; a longer one is refused."""


def without_repeats(parsed: Parsed) -> Parsed:
    """A small model may write the same memory again and again; the first is enough.

    Repeats are the same text about the same subject with the same polarity.
    """
    seen: dict[tuple[str, str, str], int] = {}
    for n, candidate in enumerate(parsed.candidates):
        seen.setdefault((candidate.text, candidate.subject, candidate.polarity), n)
    return replace(parsed, candidates=[parsed.candidates[n] for n in seen.values()],
                   lines=[parsed.lines[n] for n in seen.values()])


@dataclass(slots=True)
class Extractor:
    """Windows to candidates with one loaded model. Not thread-safe: one call at a time.

    Attributes:
        lm: The model; for `tuned` with the artifact merged into it.
        mode: `tuned` (wire prompt, calibrated scores, threshold), `base` (wire prompt, as
            written) or `prompt` (worked examples, JSON).
        artifact: Where `tuned` takes its calibration from.
        few_shot: The worked examples of `prompt`.
        constrained: Decode under the grammar. False measures what the model does on its own.
    """

    lm: LoadedLM
    mode: Mode = "tuned"
    artifact: Artifact | None = None
    few_shot: Sequence[Example] = ()
    limits: Limits = field(default_factory=Limits)
    constrained: bool = True
    _grammars: Grammars = field(init=False, repr=False)
    _prefiller: Prefiller = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}, allowed are {list(MODES)}")
        if (self.mode == "tuned") != (self.artifact is not None):
            raise ValueError(f"mode {self.mode!r} and artifact {self.artifact} do not go together; "
                             "an artifact is needed for tuned and only there")
        self._grammars = Grammars(self.lm)
        self._prefiller = Prefiller(self.lm)

    def extract(self, windows: Sequence[Window]) -> list[Extraction]:
        """One extraction per window, in order.

        Raises:
            SchemaError: A prompt is longer than the limit.
        """
        prompts = [self._prompt(window) for window in windows]
        probe = self._probe()
        longest = self.limits.max_new_tokens
        found: list[Extraction | None] = [None] * len(windows)
        for batch in plan_batches(
            [len(prompt) - len(probe) + longest for prompt in prompts],
            max_tokens=self.limits.max_batch_tokens, max_rows=self.limits.max_rows,
        ):
            made = self._extract_batch(
                [windows[n] for n in batch], [prompts[n] for n in batch], probe)
            for n, extraction in zip(batch, made, strict=True):
                found[n] = extraction
        return [extraction for extraction in found if extraction is not None]

    def score_candidates(
        self, window: Window, candidates: Sequence[Candidate]
    ) -> list[Candidate]:
        """Candidates of any extractor with `keep` and scores from this model; nothing is dropped.

        Raises:
            SchemaError: Evidence names a turn that the window does not have.
        """
        if not candidates:
            return []
        return self.score_many([(window, candidates)])[0]

    def score_many(
        self, pairs: Sequence[tuple[Window, Sequence[Candidate]]]
    ) -> list[list[Candidate]]:
        """`score_candidates` for many windows, packed together."""
        values = self.expected_digits(pairs)
        return [self._rescored(candidates, array)
                for (_, candidates), array in zip(pairs, values, strict=True)]

    def expected_digits(
        self, pairs: Sequence[tuple[Window, Sequence[Candidate]]]
    ) -> list[NDArray[np.float64]]:
        """Expected values before calibration: per window [num candidates, 6], keep first."""
        prompts = [self._wire_prompt(window) for window, _ in pairs]
        lines = [[branch_of(self.lm.tokenizer, score_line(c, window)) for c in candidates]
                 for window, candidates in pairs]
        probe = self._wire_probe()
        values: list[NDArray[np.float64]] = [np.zeros((0, 6))] * len(pairs)
        for batch in plan_batches(
            [len(prompt) for prompt in prompts], max_tokens=self.limits.max_batch_tokens,
            max_rows=self.limits.max_rows,
        ):
            state = self._prefiller.prefill([prompts[n] for n in batch], probe=probe)
            made = score_branches(self.lm, state, [lines[n] for n in batch],
                                  max_tokens=self.limits.max_score_tokens)
            for n, array in zip(batch, made, strict=True):
                values[n] = array
        return values

    def generate(
        self, chat: Sequence[dict[str, str]], *, max_tokens: int = 200,
        schema: dict[str, Any] | None = None,
    ) -> str:
        """The assistant's reply to a chat, greedily, as free text or under a JSON Schema.

        Raises:
            SchemaError: The chat is longer than the limit.
            ValueError: The schema cannot be compiled.
        """
        ids = self._checked(chat_ids(self.lm.tokenizer, list(chat)), "the chat")
        matcher = self._grammars.json_schema(schema) if schema is not None else None
        state = self._prefiller.prefill([ids], room=max_tokens)
        row = Row(matcher, max_tokens)
        decode(self.lm, state, [row])
        return self._text(row.ids)

    # --- prompts ---

    def _wire_prompt(self, window: Window) -> list[int]:
        return self._checked(
            chat_ids(self.lm.tokenizer, messages(window)), f"window {window.id!r}")

    def _prompt(self, window: Window) -> list[int]:
        if self.mode != "prompt":
            return self._wire_prompt(window)
        chat = few_shot_messages(window, list(self.few_shot))
        return self._checked(chat_ids(self.lm.tokenizer, chat), f"window {window.id!r}")

    def _checked(self, ids: list[int], what: str) -> list[int]:
        most = min(self.limits.max_prompt_tokens,
                   self.lm.max_positions - self.limits.max_new_tokens)
        if len(ids) > most:
            raise SchemaError(
                f"{what} makes a prompt of {len(ids)} tokens, allowed are {most}; "
                "send fewer or shorter turns")
        return ids

    def _wire_probe(self) -> list[int]:
        return self._probe_of(messages(_PROBE))

    def _probe(self) -> list[int]:
        if self.mode != "prompt":
            return self._wire_probe()
        return self._probe_of(few_shot_messages(_PROBE, list(self.few_shot)))

    def _probe_of(self, chat: list[dict[str, str]]) -> list[int]:
        # A question mark is how no rendered window begins, so the prefix ends where windows start.
        return chat_ids(self.lm.tokenizer, [*chat[:-1], {"role": "user", "content": "?"}])

    # --- one batch ---

    def _extract_batch(
        self, windows: list[Window], prompts: list[list[int]], probe: list[int]
    ) -> list[Extraction]:
        limit = self.limits.max_new_tokens
        state = self._prefiller.prefill(prompts, room=limit, probe=probe)
        rows = [Row(self._matcher(window), limit) for window in windows]
        decode(self.lm, state, rows, choice=self._first_choice())
        texts = [self._text(row.ids) for row in rows]
        read = parse_prompt_answer if self.mode == "prompt" else parse
        parsed = [without_repeats(read(text, window))
                  for text, window in zip(texts, windows, strict=True)]
        kept = self._select(state, windows, parsed)
        return [
            Extraction(
                candidates=good, dropped=bad, prompt_tokens=len(prompt),
                completion_tokens=len(row.ids), invalid=result.invalid,
                truncated=not row.is_finished, raw=text, empty_log_odds=row.empty_log_odds)
            for (good, bad), prompt, row, result, text
            in zip(kept, prompts, rows, parsed, texts, strict=True)
        ]

    def _first_choice(self) -> FirstChoice | None:
        """The tokens that say `nothing` and `something`, where this vocabulary has them whole."""
        if self.mode == "prompt":
            return None
        tokens = [self.lm.tokenizer.encode(text, add_special_tokens=False) for text in ("[]", "[[")]
        if any(len(ids) != 1 for ids in tokens):
            return None
        bias = float(self.artifact.calibration.get("empty_bias", 0.0)) if self.artifact else 0.0
        return FirstChoice(empty=tokens[0][0], some=tokens[1][0], bias=bias)

    def _matcher(self, window: Window) -> TokenMatcher | None:
        if not self.constrained:
            return None
        if self.mode == "prompt":
            return self._grammars.json_schema(prompt_json_schema(len(window.turns)))
        quotes = self.artifact is not None and self.artifact.quotes
        return self._grammars.lark(
            quote_grammar(window) if quotes else wire_grammar(len(window.turns)))

    def _text(self, ids: list[int]) -> str:
        return self.lm.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _select(
        self, state: PromptState, windows: list[Window], parsed: list[Parsed]
    ) -> list[tuple[list[Candidate], list[Candidate]]]:
        """Kept and dropped candidates; untuned modes keep what they wrote."""
        if self.artifact is None:
            return [(result.candidates, []) for result in parsed]
        branches = [
            [branch_of(self.lm.tokenizer, score_line(c, window)) for c in result.candidates]
            for window, result in zip(windows, parsed, strict=True)
        ]
        values = score_branches(self.lm, state, branches, max_tokens=self.limits.max_score_tokens)
        floor = float(self.artifact.calibration["keep_floor"])
        selected = []
        for result, array in zip(parsed, values, strict=True):
            scored = self._rescored(result.candidates, array)
            selected.append(([c for c in scored if c.keep >= floor],
                             [c for c in scored if c.keep < floor]))
        return selected

    def _rescored(
        self, candidates: Sequence[Candidate], values: NDArray[np.float64]
    ) -> list[Candidate]:
        """Candidates with expected values, calibrated where there is a calibration."""
        columns = [values[:, n] for n in range(values.shape[1])]
        if self.artifact is not None:
            maps = [self.artifact.calibration["keep"],
                    *(self.artifact.calibration["scores"][name] for name in SCORE_NAMES)]
            columns = [apply_map(m, column) for m, column in zip(maps, columns, strict=True)]
        return [
            replace(candidate, keep=float(keep), scores=Scores(*map(float, scores)))
            for candidate, keep, *scores in zip(candidates, *columns, strict=True)
        ]

