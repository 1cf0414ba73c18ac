"""Made-up traces whose prompts share prefixes, in the blocks of `commutator replay`. Pure.

Nothing in them was chosen by a policy's figures: sizes and shares are drawn, popularity is Zipf's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from commutator_replay.trace import TRACE_BLOCK_TOKENS, TraceRequest

__all__ = ["documents", "tenants"]

_LONGEST = 100_000


class _Blocks:
    """Block ids that no prompt has had."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def cover(self, ids: Sequence[int], tokens: int) -> list[int]:
        """``ids`` and fresh ones, as many as ``tokens`` tokens need."""
        needed = -(-tokens // TRACE_BLOCK_TOKENS)
        return [*ids, *self.fresh(max(0, needed - len(ids)))]


def tenants(requests: int, per_s: float, seed: int) -> list[TraceRequest]:
    """Conversations and single prompts of 40 tenants, in order of arrival.

    A tenant's conversations begin with its system prompt of 1 to 8 blocks, and have 4 turns on
    average, 40 s apart. A fifth of the arrivals is one long prompt that nobody asks again.
    """
    chance, blocks = random.Random(seed), _Blocks()
    popular = [1 / (place + 1) ** 1.1 for place in range(40)]
    systems = [blocks.fresh(chance.randint(1, 8)) for _ in popular]
    made: list[TraceRequest] = []
    now_s, single, turns = 0.0, 0.2, 4.0
    arrivals_per_s = per_s / (single + (1 - single) * turns)
    while now_s < requests / per_s:
        now_s += chance.expovariate(arrivals_per_s)
        if chance.random() < single:
            tokens = min(_LONGEST, 64 + int(chance.lognormvariate(7.5, 1.2)))
            made.append(_request(chance, now_s, tokens, blocks.cover((), tokens)))
            continue
        ids = chance.choices(systems, popular)[0]
        tokens, time_s = len(ids) * TRACE_BLOCK_TOKENS, now_s
        while True:
            tokens = min(_LONGEST, tokens + 16 + int(chance.lognormvariate(6.8, 1.0)))
            ids = blocks.cover(ids, tokens)
            asked = _request(chance, time_s, tokens, ids)
            made.append(asked)
            ids = ids[: tokens // TRACE_BLOCK_TOKENS]
            tokens += asked.output_length
            time_s += chance.expovariate(1 / 40)
            if chance.random() < 1 / turns:
                break
    ordered = sorted(made, key=lambda one: one.timestamp)
    return [one for one in ordered if one.timestamp < requests / per_s * 1000]


def documents(requests: int, per_s: float, seed: int) -> list[TraceRequest]:
    """Short questions about 100 documents of 4 to 40 blocks each, the popular ones most often."""
    chance, blocks = random.Random(seed), _Blocks()
    popular = [1 / (place + 1) for place in range(100)]
    texts = [blocks.fresh(chance.randint(4, 40)) for _ in popular]
    made, now_s = list[TraceRequest](), 0.0
    for _ in range(requests):
        now_s += chance.expovariate(per_s)
        ids = chance.choices(texts, popular)[0]
        tokens = len(ids) * TRACE_BLOCK_TOKENS + 16 + int(chance.expovariate(1 / 300))
        made.append(_request(chance, now_s, tokens, blocks.cover(ids, tokens)))
    return made


def _request(chance: random.Random, time_s: float, tokens: int, ids: Sequence[int]) -> TraceRequest:
    answer = 1 + int(chance.expovariate(1 / 250))
    return TraceRequest(time_s * 1000, tokens, answer, tuple(ids))
