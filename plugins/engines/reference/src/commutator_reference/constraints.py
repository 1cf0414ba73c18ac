"""What an answer has to follow, as masks of the tokens that may come next.

A grammar is compiled when its request comes, off the event loop, and refused there if any of it
cannot be enforced or compiling it takes too long.
From then on a ``Matcher`` follows the answer token by token.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray
from torch import Tensor

from commutator.contract.request import Constraint, ConstraintKind
from commutator.errors import RequestError
from commutator_engine_kit.constraints import enforced, lark_of_tags, of_lark
from commutator_reference.grammar_trial import LIMITS, GrammarTrial
from commutator_reference.json_place import JsonPlace, JsonTokens
from commutator_reference.vocabulary import Vocabulary, vocabulary_of

KINDS: tuple[ConstraintKind, ...] = (
    *("json_object", "json_schema", "regex", "choice", "grammar", "structural_tag", "lark"),
)
"""What this engine enforces."""

_SHOWN = 300
"""Characters of a grammar's error."""
_KEPT = 16
"""Compiled grammars; each may have some MiB."""
_PATIENCE_S = 1.0
_TOKEN_S = 0.005
"""CPU time that an answer's masks may take, in all and for each token more. All other answers of
the batch wait for them, and those of an ambiguous grammar take longer with every token: half a
second after some hundred."""


_LAST_PARTS = 4
"""JSON is led to an end, and closed, in the last quarter of the tokens that an answer may have."""


class Grammars:
    """Compiles constraints for one model's tokens. Any thread may call it.

    The tables of the vocabulary, which take a second, are made for the first constraint.
    """

    def __init__(
        self,
        tokenizer: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Collection[int],
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """``tokenizer`` returns the JSON of Hugging Face's `tokenizers`.

        ``cpu_clock``: seconds of CPU time that the calling thread has taken.
        """
        self._cpu_clock = cpu_clock
        self._ends = sorted(eos_token_ids)
        self._vocabulary = cache(lambda: vocabulary_of(tokenizer()))
        self._vocab_size = vocab_size
        end = self._ends[0] if self._ends else 0  # without one nothing is compiled
        self._trial = GrammarTrial(lambda: self._vocabulary().tokenizer, vocab_size, end)
        self._lock = threading.Lock()
        # It guards the following.
        self._tokens: LLTokenizer | None = None
        self._texts: JsonTokens | None = None
        """Made with ``_tokens``."""
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        """By the grammar's digest; copied for each answer."""

    def matcher(self, constraint: Constraint, answer: Sequence[int] = ()) -> Matcher:
        """Follows an answer that begins with the tokens ``answer``.

        Raises RequestError where a part of ``constraint`` cannot be enforced, naming it, or where
        ``answer`` breaks it. May take some seconds.
        """
        if not self._ends:
            raise RequestError(
                "response_format: this model has no token that ends an answer, so none can be made "
                "to follow anything",
                "response_format",
            )
        try:
            grammar = _grammar(constraint, self._vocabulary, self._ends)
        except Exception as error:  # GBNF's reader raises whatever it likes
            problem = f"response_format: {constraint.kind}: {error}"[:_SHOWN]
            raise RequestError(problem, "response_format", "invalid_value") from error
        compiled = self._copy(grammar, constraint.kind)
        is_json = constraint.kind in {"json_object", "json_schema"}
        place = JsonPlace(self._texts) if is_json and self._texts is not None else None
        matcher = Matcher(compiled, constraint.after, self._ends, self._cpu_clock, place)
        for token_id in answer:
            matcher.advance(token_id)
        return matcher

    def close(self) -> None:
        """Release what compiling needed."""
        self._trial.close()

    def _copy(self, grammar: str, kind: str) -> LLMatcher:
        digest = blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            if (known := self._compiled.get(digest)) is not None:
                self._compiled.move_to_end(digest)
                return known.deep_copy()
        if (problem := self._trial.problem(grammar)) is not None:
            problem = f"response_format: {kind}: {problem}"[:_SHOWN]
            raise RequestError(problem, "response_format", "invalid_value")
        with self._lock:
            if self._tokens is None:
                tokens = self._tokens = LLTokenizer(
                    self._vocabulary().tokenizer, n_vocab=self._vocab_size, eos_token=self._ends[0]
                )
                texts = (tokens.decode_bytes([token_id]) for token_id in range(self._vocab_size))
                self._texts = JsonTokens(list(texts))
        compiled = LLMatcher(self._tokens, grammar, log_level=0, limits=LIMITS)
        with self._lock:
            self._compiled[digest] = compiled
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()


class Matcher:
    """One answer's place in its grammar. One thread at a time."""

    def __init__(
        self,
        matcher: LLMatcher,
        after: tuple[int, ...],
        ends: Sequence[int],
        cpu_clock: Callable[[], float],
        place: JsonPlace | None = None,
    ) -> None:
        self._matcher = matcher
        self._place = place
        self.hurried = False
        """Whether the answer was closed, and not by itself, as few tokens were left."""
        self._cpu_clock = cpu_clock
        self._cpu_left_s = _PATIENCE_S
        self._after = after
        self._ends = list(ends)
        self._tail: tuple[int, ...] = ()
        self._begun = not after

    @property
    def complete(self) -> bool:
        """Whether the answer can only end here."""
        return self._begun and bool(self._matcher.is_stopped())

    def allow(self, logits: Tensor, raw: Tensor, left: int = 0, most: int = 0) -> Tensor:
        """``logits`` [vocabulary] with minus infinity for what may not come next.

        ``left``: the tokens that the answer may still have, of ``most``; 0: any number. JSON is led
        to an end in its last quarter: where it repeats itself (the sooner, the more is open), and
        where the model finds an end likely, the fewer tokens are left the less so. With few left it
        is closed, as it would be cut: then it is ``hurried``.
        ``raw`` are the model's own: they decide where ``logits`` exclude all that may come.
        """
        if not self._begun or self.complete or self._matcher.is_error():
            return logits  # `advance` tells of an error
        begun_s = self._cpu_clock()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._cpu_left_s -= self._cpu_clock() - begun_s
        allowed = np.unpackbits(bits, bitorder="little")[: len(logits)].astype(bool)
        if allowed[self._ends[0]]:
            allowed[self._ends] = True
        if self._place is not None:
            allowed = self._place.bounded(allowed)
            allowed = self._led(self._place, allowed, logits, left, most)
        masked = _masked(logits, allowed)
        if logits is raw or masked.isfinite().any():
            return masked
        return _masked(raw, allowed)

    def _led(
        self,
        place: JsonPlace,
        allowed: NDArray[np.bool_],
        logits: Tensor,
        left: int,
        most: int,
    ) -> NDArray[np.bool_]:
        """Of what is ``allowed`` that which leads to an end, where it is time for that."""
        last_part, closing_tokens = most // _LAST_PARTS, place.closing_tokens
        begins = last_part
        if place.repeats:
            begins = min(most // 2, max(last_part, 2 * closing_tokens))
        if not 0 < left <= begins:
            return allowed
        nearest = place.closing(allowed, self._ends)
        among = _masked(logits, allowed)
        if left <= min(last_part, closing_tokens):
            likeliest = int(among.argmax())
            self.hurried |= not nearest[likeliest] and not place.is_space(likeliest)
            return nearest
        if place.repeats:
            return nearest
        ending = place.ending(allowed, self._ends)
        likely = float(among.softmax(-1)[_mask(ending, logits)].sum())
        return ending if likely >= place.likely_enough(left, last_part) else allowed

    def advance(self, token_id: int) -> None:
        """The answer's next token.

        Raises RequestError where the grammar does not allow it, is too large to go on, or takes too
        long.
        """
        self._cpu_left_s += _TOKEN_S
        if self._cpu_left_s < 0:
            raise RequestError(
                "response_format: to find what may follow takes more than "
                f"{1000 * _TOKEN_S:g} ms a token, for which other answers wait; rewrite what is "
                "ambiguous: a repetition as left recursion, alternatives without common texts",
                "response_format",
            )
        if not self._begun:
            self._tail = (*self._tail, token_id)[-len(self._after) :]
            self._begun = self._tail == self._after
        elif token_id in self._ends or self.complete:
            return  # nothing comes after it
        elif not self._matcher.consume_token(token_id):
            raise RequestError(
                "response_format: the answer does not follow it, or it is too large to go on: "
                f"{self._matcher.get_error()}"[:_SHOWN],
                "response_format",
            )
        elif self._place is not None:
            self._place.read(token_id)


def _masked(logits: Tensor, allowed: NDArray[np.bool_]) -> Tensor:
    """A copy with minus infinity for what is not ``allowed``."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # PyTorch would share these few microseconds with threads that may have to wait for a core.
        return torch.from_numpy(np.where(allowed, logits.numpy(), np.float32(-np.inf)))
    return logits.masked_fill(~_mask(allowed, logits), -torch.inf)


def _mask(allowed: NDArray[np.bool_], logits: Tensor) -> Tensor:
    return torch.from_numpy(allowed).to(logits.device)


def _grammar(
    constraint: Constraint, vocabulary: Callable[[], Vocabulary], ends: Collection[int]
) -> str:
    """In llguidance's notation. Raises ValueError."""
    value = constraint.value
    space = r"\n{0,3}" if constraint.after else ""  # models write it after thoughts
    if constraint.kind == "choice":
        return _of_regex(space, "|".join(re.escape(one) for one in value))
    assert isinstance(value, str)
    match constraint.kind:
        case "json_object":
            return _json({"type": "object"}, constraint, space)
        case "json_schema":
            return _json(json.loads(value), constraint, space)
        case "regex":
            return _of_regex(space, value)
        case "grammar":
            return _of_lark(any_to_lark(value))
        case "lark":
            return _of_lark(value)
        case "structural_tag":
            specials = {text: one for text, one in vocabulary().specials.items() if one not in ends}
            return _of_lark(lark_of_tags(json.loads(value), specials, enforced))
    raise ValueError(f"unknown kind {constraint.kind}")


def _of_lark(grammar: str) -> str:
    return str(LLMatcher.grammar_from_lark(of_lark(grammar)))


def _of_regex(space: str, expression: str) -> str:
    made = json.loads(LLMatcher.grammar_from_regex(f"{space}(?:{expression})"))
    return _of_lark(made["grammars"][0]["lark_grammar"])


def _json(schema: Any, constraint: Constraint, space: str) -> str:
    """``space``: what may stand before it, as a regular expression."""
    found, given = enforced(schema, constraint.whitespace)
    value = json.dumps({**found, "x-guidance": given})
    return _of_lark(f"start: {f'/{space}/ ' if space else ''}%json {value}")
