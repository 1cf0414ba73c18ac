"""Conversations of ten turns, and how much of what could be found in a cache was found there."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import openai
from attrs import frozen
from openai.types.chat import ChatCompletionMessageParam as Message

__all__ = ["Found", "ten_turns"]

_SYSTEM = "You are a patient guide who answers in a few plain words. " * 12
_TURNS = 10
_WAIT_S = 300.0


@frozen
class Found:
    """Prompt tokens: those that the server counts as cached, and the most that could be."""

    cached: int
    possible: int

    @property
    def part(self) -> float:
        """Between 0 and 1."""
        return self.cached / self.possible


@frozen
class _Turn:
    text: str
    total_tokens: int
    cached_tokens: int
    known_blocks: int
    """Of the prompt, as routing believed of the worker that it chose."""


def ten_turns(
    client: openai.OpenAI, model: str, block_size: int, topics: Iterable[str] = ("cats", "ships")
) -> Found:
    """One conversation for each topic; what is possible are the whole blocks of the turn before."""
    cached = possible = 0
    for topic in topics:
        history: list[Message] = [{"role": "system", "content": f"Today: {topic}. {_SYSTEM}"}]
        left = 0
        for number in range(_TURNS):
            history.append({"role": "user", "content": f"Tell me fact number {number}."})
            turn = _ask(client, model, history) if left else _first(client, model, history)
            history.append({"role": "assistant", "content": turn.text})
            possible += left
            cached += turn.cached_tokens if left else 0
            left = (turn.total_tokens - 1) // block_size * block_size
    return Found(cached, possible)


def _first(client: openai.OpenAI, model: str, history: list[Message]) -> _Turn:
    """Asked until routing knows where it lies: events come a moment after the answer."""
    until_s = time.monotonic() + _WAIT_S
    while time.monotonic() < until_s:
        turn = _ask(client, model, history)
        if turn.known_blocks:
            return turn
    raise AssertionError(f"no KV event of the first turn came within {_WAIT_S:g} s")


def _ask(client: openai.OpenAI, model: str, history: list[Message]) -> _Turn:
    response = client.chat.completions.with_raw_response.create(
        model=model,
        messages=history,
        temperature=0,
        max_tokens=12,
        extra_headers={"X-Commutator-Explain": "1"},
    )
    answer = response.parse()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return _Turn(
        text=answer.choices[0].message.content or "",
        total_tokens=answer.usage.total_tokens,
        cached_tokens=answer.usage.prompt_tokens_details.cached_tokens or 0,
        known_blocks=json.loads(response.headers["X-Commutator-Decision"])["overlap_blocks"],
    )
