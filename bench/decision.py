"""A whole routing decision: hash the prompt, match it against every worker, ask the policy.

Workers hold prefixes of different lengths and have different loads, as in a busy deployment, so
that neither the index nor the policy finds everything equal.
"""

from __future__ import annotations

import random
import timeit

from bench.result import Figure
from commutator.contract.request import GenerateRequest, RequestSummary, SamplingParams
from commutator.contract.routing import RouterConfig, RoutingPolicy
from commutator.routing.load import InFlightLoad
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.router import ModelRouter
from commutator.routing.workers import LiveWorker
from commutator_kv_router.policy import KvRouter, KvRouterConfig
from commutator_replay.fleet import virtual_live_worker

BLOCK_SIZE = 16
PROMPT_TOKENS = (16, 1_000, 9_000)
WORKERS = (2, 8, 64)
AIM_US = 500
_CALLS, _ROUNDS = 5, 200


class Decision:
    """A pool of ``workers`` and one prompt to route again and again."""

    def __init__(self, prompt_tokens: int, workers: int, policy: RoutingPolicy) -> None:
        chance = random.Random(prompt_tokens + workers)
        token_ids = [chance.randrange(150_000) for _ in range(prompt_tokens)]
        hashes = sequence_hashes(token_ids, BLOCK_SIZE)
        indexer = KvIndexer(RouterConfig(kind="kv", block_size=BLOCK_SIZE))
        load = InFlightLoad()
        self._workers: list[LiveWorker] = []
        for number in range(workers):
            worker_id = f"worker-{number:03}"
            self._workers.append(virtual_live_worker(worker_id))
            indexer.index.store(worker_id, hashes[: chance.randrange(len(hashes) + 1)])
            for _ in range(chance.randrange(8)):
                load.dispatch(worker_id, chance.randrange(1, 4_000), BLOCK_SIZE)
        self._pool = ModelRouter(policy, indexer, load, chance, BLOCK_SIZE)
        self._request = GenerateRequest(
            request_id="request", token_ids=token_ids, sampling=SamplingParams()
        )
        self._summary = RequestSummary(
            request_id="request", model="model", prompt_tokens=prompt_tokens, max_tokens=16
        )
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
