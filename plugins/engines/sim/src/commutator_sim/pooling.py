"""Requests that generate nothing: made-up vectors, and the time that computing them would take.

A token has the same vector everywhere, and an input the sum of its tokens': texts that share words
are similar.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import shake_128

from commutator import FinishReason, GenerateRequest, Operation, Pooling, TokenDelta
from commutator.errors import EngineOverloadedError, RequestError
from commutator_engine_kit import Emit
from commutator_sim.config import SimConfig

_TOKENS = 1 << 16
_MIDDLE = 127.5


class PoolingQueue:
    """Computes one request after another, in the order in which they came."""

    def __init__(self, config: SimConfig, max_tokens: int) -> None:
        """``max_tokens`` is the longest input."""
        self._config = config
        self._max_tokens = max_tokens
        self._timers: dict[int, asyncio.Handle] = {}
        self._free_s = 0.0
        """When the last of the requests will be computed, by the event loop's clock."""

    def __len__(self) -> int:
        """Requests that wait or are computed."""
        return len(self._timers)

    def submit(self, key: int, request: GenerateRequest, emit: Callable[[], Emit | None]) -> None:
        """Raises RequestError for wrong inputs, EngineOverloadedError when too many wait."""
        pooling, config = request.pooling, self._config
        assert pooling is not None
        if (longest := max(pooling.lengths, default=0)) > self._max_tokens:
            raise RequestError(
                f"input: {longest} tokens are more than the {self._max_tokens} of this worker"
            )
        if (cut := pooling.dimensions) is not None and cut > config.embedding_dimensions:
            raise RequestError(
                f"dimensions: vectors have {config.embedding_dimensions} numbers, got {cut}"
            )
        if len(self._timers) >= config.max_running_requests + config.max_queued_requests:
            raise EngineOverloadedError(f"the worker has {len(self._timers)} requests already")
        vectors = vectors_of(pooling, request.token_ids, config)
        loop = asyncio.get_running_loop()

        def done() -> None:
            del self._timers[key]
            if (to := emit()) is not None:
                to([(key, TokenDelta(finish_reason=FinishReason.STOP, vectors=vectors))])

        if not config.time_factor:
            self._timers[key] = loop.call_soon(done)
            return
        tokens = len(request.token_ids)
        took_s = tokens / config.prefill_tokens_per_s / config.time_factor
        self._free_s = max(self._free_s, loop.time()) + took_s
        self._timers[key] = loop.call_at(self._free_s, done)

    def abort(self, key: int) -> None:
        """Forget a request. Its time has been planned, and passes."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()


def vectors_of(pooling: Pooling, token_ids: Sequence[int], config: SimConfig) -> bytes:
    """What a worker answers, as ``TokenDelta.vectors``."""
    return b"".join(struct.pack(f"<{len(row)}f", *row) for row in _rows(pooling, token_ids, config))


def _rows(
    pooling: Pooling, token_ids: Sequence[int], config: SimConfig
) -> Iterator[Sequence[float]]:
    size = config.embedding_dimensions
    at = 0
    for number, length in enumerate(pooling.lengths):
        ids = token_ids[at : at + length]
        at += length
        match pooling.operation:
            case Operation.EMBED:
                yield _unit(_sum(ids, size)[: pooling.dimensions], pooling)
            case Operation.TOKEN_EMBED:
                for token in ids:
                    yield _unit(_sum([token], size)[: pooling.dimensions], pooling)
            case Operation.SCORE:
                first = pooling.firsts[number] if pooling.firsts else length
                found = _cosine(_sum(ids[:first], size), _sum(ids[first:], size))
                yield [(1 + found) / 2 if pooling.activation else found]
            case Operation.CLASSIFY:
                logits = _sum(ids, max(size, len(config.labels)))[: len(config.labels)]
                yield _softmax(logits) if pooling.activation else logits


@lru_cache(maxsize=_TOKENS)
def _token(token_id: int, size: int) -> bytes:
    return shake_128(token_id.to_bytes(8, "little")).digest(size)


def _sum(ids: Sequence[int], size: int) -> list[float]:
    rows = [_token(token_id, size) for token_id in ids]
    return [sum(column) / _MIDDLE - len(rows) for column in zip(*rows, strict=True)]


def _unit(vector: Sequence[float], pooling: Pooling) -> Sequence[float]:
    length = math.hypot(*vector)
    return [value / length for value in vector] if pooling.activation and length else vector


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=False)) / lengths if lengths else 0.0


def _softmax(logits: Sequence[float]) -> list[float]:
    most = max(logits)
    weights = [math.exp(logit - most) for logit in logits]
    return [weight / sum(weights) for weight in weights]
