"""Answers as TensorRT-LLM's endpoints give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field

from commutator.contract.request import FinishReason, TokenDelta

__all__ = ["Answer", "error"]

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def error(message: str, status: int = 400) -> dict[str, Any]:
    """The body of an answer with that status."""
    return {
        "object": "error",
        "message": message,
        "type": "BadRequestError",
        "param": None,
        "code": status,
    }


@define
class Answer:
    """One answer, token by token."""

    body: Mapping[str, Any]
    """Of the request."""
    prompt_tokens: int
    chat: bool
    decode: Callable[[Sequence[int]], str]
    token_ids: list[int] = field(factory=list)
    cached_tokens: int = 0
    _told: str = ""

    def chunk(self, delta: TokenDelta, reason: str | None = None) -> dict[str, Any]:
        """The next server-sent event."""
        before = len(self._told)
        text = self._text(delta)
        choice = self._choice(delta, reason)
        if self.chat:
            choice["delta"] = {"role": "assistant", "content": text[before:]}
        else:
            choice["text"] = "" if self._only_tokens else text[before:]
        self._told = text
        return {"object": "chunk", "choices": [choice], "usage": None}

    def last_chunk(self) -> dict[str, Any]:
        """The server-sent event with the usage."""
        return {"object": "chunk", "choices": [], "usage": self._usage()}

    def whole(
        self, deltas: Sequence[TokenDelta], reason: str | None, words: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The body of an answer that is not a stream."""
        merged = TokenDelta(
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            finish_reason=deltas[-1].finish_reason,
            stop_reason=deltas[-1].stop_reason,
            cached_tokens=next(
                (d.cached_tokens for d in deltas if d.cached_tokens is not None), None
            ),
        )
        text, choice = self._text(merged), self._choice(merged, reason)
        choice["disaggregated_params"] = words
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = "" if self._only_tokens else text
        return {"object": "text_completion", "choices": [choice], "usage": self._usage()}

    @property
    def _only_tokens(self) -> bool:
        return not self.chat and self.body.get("detokenize") is False

    def _text(self, delta: TokenDelta) -> str:
        self.token_ids += delta.token_ids
        self.cached_tokens = delta.cached_tokens or self.cached_tokens
        return "" if self._only_tokens else self.decode(self.token_ids)

    def _choice(self, delta: TokenDelta, reason: str | None) -> dict[str, Any]:
        if reason is None and delta.finish_reason is not None:
            reason = _REASONS.get(delta.finish_reason, "cancelled")
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": reason,
            "stop_reason": delta.stop_reason,
            "logprobs": None,
        }
        if self._only_tokens:
            choice["token_ids"] = list(delta.token_ids)
        if self.body.get("logprobs"):
            choice["logprobs"] = {
                "tokens": [self.decode([entry.token_id]) for entry in delta.logprobs],
                "token_logprobs": [entry.logprob for entry in delta.logprobs],
                "top_logprobs": [],
            }
        return choice

    def _usage(self) -> dict[str, Any]:
        made = len(self.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
