"""A whole routing decision: hash the prompt, match it against every worker, ask the policy.

Workers hold prefixes of different lengths and have different loads, as in a busy deployment, so
that neither the index nor the policy finds everything equal.
"""

from __future__ import annotations

import random
import timeit
from collections.abc import Mapping, Sequence

from attrs import define

from bench.result import Figure
from commutator.kv.hashing import sequence_hashes
from commutator.routing.contract import RoutingPolicy
from commutator.routing.load import InFlightLoad
from commutator.routing.overlap import Overlap, WorkerRank
from commutator.routing.pool import ModelPool
from commutator.routing.prefix_index import PrefixIndex
from commutator.routing.view import LiveWorker
from commutator.routing.virtual_worker import virtual_live_worker
from commutator.types import GenerateRequest, RequestSummary, SamplingParams
from commutator_kv import KvRouter, KvRouterConfig

BLOCK_SIZE = 16
PROMPT_TOKENS = (16, 1_000, 9_000)
WORKERS = (2, 8, 64)
AIM_US = 500
_CALLS, _ROUNDS = 5, 200


@define
class _Index:
    """The prefix index as a pool asks it."""

    index: PrefixIndex

    def hashes(self, request: GenerateRequest) -> Sequence[int]:
        return sequence_hashes(request.token_ids, BLOCK_SIZE)

    def match(self, hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]:
        return self.index.match(hashes)

    @property
    def exact(self) -> frozenset[str]:
        return frozenset()


class Decision:
    """A pool of ``workers`` and one prompt to route again and again."""

    def __init__(self, prompt_tokens: int, workers: int, policy: RoutingPolicy) -> None:
        chance = random.Random(prompt_tokens + workers)
        token_ids = [chance.randrange(150_000) for _ in range(prompt_tokens)]
        hashes = sequence_hashes(token_ids, BLOCK_SIZE)
        index, load = PrefixIndex(BLOCK_SIZE), InFlightLoad()
        self._workers: list[LiveWorker] = []
        for number in range(workers):
            worker_id = f"worker-{number:03}"
            self._workers.append(virtual_live_worker(worker_id))
            index.store(worker_id, hashes[: chance.randrange(len(hashes) + 1)])
            for _ in range(chance.randrange(8)):
                load.dispatch(worker_id, chance.randrange(1, 4_000), BLOCK_SIZE)
        self._pool = ModelPool(policy, _Index(index), load, chance, BLOCK_SIZE)
        self._request = GenerateRequest("request", token_ids, SamplingParams())
        self._summary = RequestSummary("request", "model", prompt_tokens, 16)
        self._hashes = self._pool.hashes(self._request)

    def hash_and_route(self) -> None:
        self._pool.route(self._summary, self._pool.hashes(self._request), self._workers)

    def route(self) -> None:
        self._pool.route(self._summary, self._hashes, self._workers)


def measure_us(prompt_tokens: int, workers: int) -> tuple[float, float]:
    """Least time of a decision, and of one whose prompt the front door has hashed before."""
    decision = Decision(prompt_tokens, workers, KvRouter(KvRouterConfig(kind="kv")))
    whole, routed = (
        min(timeit.repeat(call, number=_CALLS, repeat=_ROUNDS)) / _CALLS * 1e6
        for call in (decision.hash_and_route, decision.route)
    )
    return whole, routed


def run() -> list[Figure]:
    return [
        Figure(
            scenario="decision",
            what=f"{tokens:,} tokens over {workers} workers{how}",
            ours=taken_us,
            other=None,
            unit="us",
            aim=f"<{AIM_US}" if (tokens, workers) == (PROMPT_TOKENS[-1], WORKERS[-1]) else "",
            higher_is_better=False,
        )
        for tokens in PROMPT_TOKENS
        for workers in WORKERS
        for how, taken_us in zip(("", ", hashes known"), measure_us(tokens, workers), strict=True)
    ]
