"""Grammars as token masks, by llguidance; the mask is computed only when the model leaves them."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from torch import Tensor

from serving.engine.loading import LoadedLM

KEPT_GRAMMARS = 64


class Grammars:
    """Compiled grammars of one tokenizer. Made once per model, since building it takes a second."""

    def __init__(self, lm: LoadedLM) -> None:
        self._tokenizer: LLTokenizer = from_tokenizer(
            lm.tokenizer, n_vocab=lm.num_rows, eos_token=list(lm.stop_ids))
        self._num_rows = lm.num_rows
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def lark(self, grammar: str) -> TokenMatcher:
        """A fresh matcher of a Lark grammar.

        Raises:
            ValueError: The grammar does not compile.
        """
        return self._fresh(LLMatcher.grammar_from_lark(grammar))

    def json_schema(self, schema: dict[str, Any]) -> TokenMatcher:
        """A fresh matcher of a JSON Schema, written without white space.

        Raises:
            ValueError: The schema cannot be compiled.
        """
        # Free white space lets a weak model pad its answer with newlines up to the limit.
        grammar = LLMatcher.grammar_from_json_schema(
            json.dumps(schema), overrides={"whitespace_flexible": False})
        return self._fresh(grammar)

    def _fresh(self, grammar: str) -> TokenMatcher:
        if grammar not in self._compiled:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(f"the grammar does not compile: {matcher.get_error()[:500]}")
            self._compiled[grammar] = matcher
            while len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return TokenMatcher(self._compiled[grammar].deep_copy(), self._num_rows)


class TokenMatcher:
    """Where one completion stands in its grammar."""

    def __init__(self, matcher: LLMatcher, num_rows: int) -> None:
        self._matcher = matcher
        self._num_rows = num_rows

    def choose(self, logits: Tensor, guess: int) -> int:
        """The most likely token that the grammar allows, which is then consumed.

        Args:
            logits: Of the next token, [V].
            guess: Their argmax. When the grammar allows it, it is the answer and no mask is made.

        Raises:
            RuntimeError: The grammar has come to an error state.
        """
        if self._matcher.try_consume_tokens([guess]) == 1:
            return guess
        allowed = self.allowed()
        token = int(logits.float().masked_fill(~allowed.to(logits.device), -torch.inf).argmax())
        if not allowed[token] or not self._matcher.consume_token(token):
            raise RuntimeError(f"the grammar is stuck: {self._matcher.get_error()[:500]}")
        return token

    def allowed(self) -> Tensor:
        """Which tokens may come next, bool [V] on the CPU."""
        bits = allocate_token_bitmask(1, self._num_rows)
        fill_next_token_bitmask(self._matcher, bits, 0)
        flags = np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._num_rows]
        return torch.from_numpy(flags.astype(bool))

    @property
    def is_done(self) -> bool:
        """Nothing but the end may follow."""
        return self._matcher.is_stopped()
