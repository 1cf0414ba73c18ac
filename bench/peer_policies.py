"""Routing policies of other projects, made again from their sources and documents. Pure.

Each sees what our policies see: requests in flight as the front door counts them, and what each
worker's cache holds as its KV events say. Their originals know less: SGLang's router guesses the
caches from what it has routed, llm-d's scheduler scrapes the queues. As read in 2026.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commutator import Candidate, Decision, RouteRequest, RoutingPolicy
from commutator_balance import LeastLoaded
from commutator_kv_router import DECODE_SHARE, KvRouter, KvRouterConfig

__all__ = ["ABLATIONS", "DYNAMO_WEIGHTS", "OURS", "POLICIES", "Ablated"]

OURS = "kv"
DYNAMO_WEIGHTS = (1, 4, 16, 64)
"""Of its overlap score; the first is the default."""
_NEVER = 1 << 40
_SGLANG_MATCH = 0.3
_SGLANG_APART = 64
_SGLANG_TIMES = 1.5
_LLMD_PREFIX, _LLMD_QUEUE, _LLMD_MEMORY = 3.0, 2.0, 2.0


class _Peer(RoutingPolicy):
    uses_overlap = True

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        ranks = self.rank(request, candidates)
        best = min(ranks)
        tied = [one for one, its in zip(candidates, ranks, strict=True) if its == best]
        chosen = rng.choice(tied)
        kind = type(self).__name__
        return Decision(worker_id=chosen.worker_id, policy=kind, reason="the lowest rank")

    def rank(
        self, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> Sequence[tuple[float, ...]]:
        """One for each candidate; the lowest is chosen, ties by lot."""
        raise NotImplementedError


class LongestPrefix(_Peer):
    """The longest cached prefix, whatever the load; of equal ones the shortest queue."""

    def rank(
        self, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> Sequence[tuple[float, ...]]:
        return [(-c.overlap.blocks, c.load.active_prefill_tokens) for c in candidates]


class SglangCacheAware(_Peer):
    """SGLang's router, `cache_aware`: the longest prefix if it is 30 % of the prompt.

    Else the fewest requests, as also when one worker has over 64 requests more than another, and
    over 1.5 times as many.
    """

    def rank(
        self, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> Sequence[tuple[float, ...]]:
        loads = [c.load.active_requests for c in candidates]
        held = [c.overlap.blocks for c in candidates]
        most, fewest = max(loads), min(loads)
        uneven = most - fewest > _SGLANG_APART and most > _SGLANG_TIMES * fewest
        if uneven or max(held) <= _SGLANG_MATCH * request.prompt_blocks:
            return [(load,) for load in loads]
        return [(-blocks,) for blocks in held]


class LlmdScorers(_Peer):
    """llm-d's default profile: prefix, queue and KV memory scored from 0 to 1, weights 3, 2, 2.

    Requests in flight stand for its queue, which is scaled between the shortest and the longest.
    """

    def rank(
        self, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> Sequence[tuple[float, ...]]:
        loads = [c.load.active_requests for c in candidates]
        most, fewest = max(loads), min(loads)
        found = []
        for one, load in zip(candidates, loads, strict=True):
            capacity = max(1, one.worker.info.kv_capacity_blocks)
            prefix = min(1.0, one.overlap.blocks / max(1.0, request.prompt_blocks))
            queue = (most - load) / (most - fewest) if most > fewest else 1.0
            free = max(0.0, 1 - one.load.active_decode_blocks / capacity)
            total = _LLMD_PREFIX * prefix + _LLMD_QUEUE * queue + _LLMD_MEMORY * free
            found.append((-total,))
        return found


class Ablated(_Peer):
    """The cost of `kv` with another factor for the blocks to be computed, or another last term.

    Lower tiers count as the device.
    """

    def __init__(
        self,
        factor: float = 1.0,
        mean: float = 0.0,
        own: float = 0.0,
        decode_share: float = DECODE_SHARE,
    ) -> None:
        """The factor, and what is added to it for each request of an average and of this worker."""
        self._factor, self._mean, self._own = factor, mean, own
        self._decode_share = decode_share

    def rank(
        self, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> Sequence[tuple[float, ...]]:
        mean = sum(c.load.active_requests for c in candidates) / len(candidates)
        found = []
        for one in candidates:
            load = one.load
            new = max(0.0, request.prompt_blocks - one.overlap.blocks)
            factor = self._factor + self._mean * mean + self._own * load.active_requests
            queue = load.active_prefill_tokens / request.block_size
            found.append((queue + new * factor + load.active_decode_blocks * self._decode_share,))
        return found


def _unguarded(**options: Any) -> Callable[[], RoutingPolicy]:
    """A formula of `kv` without its hot-prefix guard, which the originals lack."""
    config = KvRouterConfig(kind="kv", imbalance_requests=_NEVER, **options)
    return lambda: KvRouter(config)


def _dynamo(weight: float) -> Callable[[], RoutingPolicy]:
    return _unguarded(formula="cost", overlap_score_weight=weight)


POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    OURS: lambda: KvRouter(KvRouterConfig(kind="kv")),
    **{f"Dynamo, weight {weight}": _dynamo(weight) for weight in DYNAMO_WEIGHTS},
    "SGLang": SglangCacheAware,
    "llm-d": LlmdScorers,
    "LMetric": _unguarded(formula="product"),
    "longest prefix": LongestPrefix,
    "least loaded": LeastLoaded,
}
"""Makes a fresh policy, by name."""

ABLATIONS: Mapping[str, Callable[[], RoutingPolicy]] = {
    OURS: POLICIES[OURS],
    "the request's own wait only": Ablated,
    "the worker's own requests": lambda: Ablated(own=1),
    "5 requests, whatever the load": lambda: Ablated(5),
    "no term for decoding": lambda: Ablated(mean=1, decode_share=0),
    "four times the term for decoding": lambda: Ablated(mean=1, decode_share=4 * DECODE_SHARE),
}
"""`kv`, and with one part of its cost changed each."""
