"""One answer as it grows: token deltas in, pieces of text out, until something ends it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import define, frozen

from commutator.errors import EngineError
from commutator.frontend.responses import Finish
from commutator.text.model import TextModel
from commutator.text.stop_strings import StopMatcher
from commutator.types import FinishReason, TokenDelta, TokenLogprob

__all__ = ["Choice", "ChoiceRules", "Piece"]


@frozen
class ChoiceRules:
    """What ends an answer, and what of its tokens is shown."""

    stop: tuple[str, ...] = ()
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; the last one is not shown unless ``include_stop``."""
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings are looked for only after this many tokens."""


@define  # one is made for each delta, and a frozen class takes three times as long to fill
class Piece:
    """What one delta adds to the answer; the last piece has a finish reason."""

    text: str
    logprobs: tuple[tuple[int, TokenLogprob], ...] = ()
    """(offset in the answer's text, entry) for each token whose text is certain by now."""
    finish_reason: Finish | None = None


class Choice:
    """Assembles one answer. ``push`` until a piece has a finish reason, then no more."""

    def __init__(self, model: TextModel, rules: ChoiceRules) -> None:
        self._rules = rules
        self._detokenizer = model.detokenizer(skip_special_tokens=rules.skip_special_tokens)
        self._matcher = StopMatcher(rules.stop, include_stop=rules.include_stop)
        self._plain = not rules.stop
        self._decoded = 0
        """Characters decoded, including those that the matcher holds back."""
        self._sent = 0
        self._pending: deque[tuple[int, TokenLogprob]] = deque()
        self.generated_tokens = 0
        self.cached_tokens = 0

    def push(self, delta: TokenDelta) -> Piece:
        """Raises EngineError when the engine gave the request up."""
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if self._plain and delta.finish_reason is None and not delta.logprobs:
            return self._push_plain(delta.token_ids)
        if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise EngineError(delta.error or "the worker aborted the request")
        text = self._text(self._shown(delta), delta.logprobs)
        self.generated_tokens += len(delta.token_ids)
        finish: Finish | None = None
        if not self._stopped() and delta.finish_reason is not None:
            # The detokenizer is not flushed: half a character at the end is never shown.
            text += self._matcher.flush()
            finish = "stop" if delta.finish_reason is FinishReason.STOP else "length"
        if self._stopped():
            finish = "stop"
        self._sent += len(text)
        return Piece(text, self._certain(finish), finish)

    def _push_plain(self, ids: Sequence[int]) -> Piece:
        """What most deltas need: text, and no more."""
        text = self._decode(ids)
        self._sent += len(text)
        self.generated_tokens += len(ids)
        return Piece(text)

    def _shown(self, delta: TokenDelta) -> Sequence[int]:
        """The delta's tokens, less the one that ended the answer."""
        ids = delta.token_ids
        ended_by_token = delta.finish_reason is FinishReason.STOP and not isinstance(
            delta.stop_reason, str
        )
        if ended_by_token and ids and ids[-1] in self._rules.end_ids:
            return ids if self._rules.include_stop else ids[:-1]
        return ids

    def _text(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> str:
        free = max(0, self._rules.min_tokens - self.generated_tokens) if self._rules.stop else 0
        if not logprobs:
            text = self._decode(ids[:free]) if free else ""
            return text + self._matcher.push(self._decode(ids[free:]))
        text = ""
        for place, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=False)):
            self._pending.append((self._decoded, logprob))
            decoded = self._decode((token_id,))
            text += decoded if place < free else self._matcher.push(decoded)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._detokenizer.push(ids)
        self._decoded += len(text)
        return text

    def _certain(self, finish: Finish | None) -> tuple[tuple[int, TokenLogprob], ...]:
        """The entries whose text has been sent; at a natural end, all that are left."""
        pending = self._pending
        everything = finish is not None and not self._stopped()
        entries = []
        while pending and (everything or pending[0][0] < self._sent):
            entries.append(pending.popleft())
        return tuple(entries)

    def _stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.matched is not None
