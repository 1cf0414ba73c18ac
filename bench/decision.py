"""A whole routing decision: hash the prompt, match it against every worker, ask the policy.

Workers hold prefixes of different lengths and have different loads, as in a busy deployment, so
that neither the index nor the policy finds everything equal. Beside it stands the same decision by
a look at each worker; both choose the same worker, which is checked for many requests.
"""

from __future__ import annotations

import random
import timeit
from array import array
from collections.abc import Callable

from bench.result import Figure
from commutator.contract.request import GenerateRequest, RequestSummary, SamplingParams
from commutator.contract.routing import RouterConfig
from commutator.routing.load import InFlightLoad, Ticket
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.router import ModelRouter
from commutator_kv_router import KvRouter, KvRouterConfig
from commutator_replay.fleet import virtual_live_worker

BLOCK_SIZE = 16
PROMPT_TOKENS = (16, 1_000, 9_000)
WORKERS = (2, 8, 64, 1_024, 4_096)
KNOWN_PART = 0.95
AIMS_US = {64: 150, 1_024: 300, 4_096: 600}
CHANGES = 12
"""Changes of load for each request of about 128 tokens: it begins, gets its first token, grows by
some blocks, and ends."""
_MEASURED_S = 0.5


class Decision:
    """Workers, and one prompt to route again and again."""

    def __init__(self, prompt_tokens: int, workers: int) -> None:
        self._chance = chance = random.Random(prompt_tokens + workers)
        token_ids = [chance.randrange(150_000) for _ in range(prompt_tokens)]
        hashes = sequence_hashes(token_ids, BLOCK_SIZE)
        indexer = KvIndexer(RouterConfig(kind="kv", block_size=BLOCK_SIZE))
        self._load = load = InFlightLoad()
        self._tickets: list[Ticket] = []
        self._workers = tuple(virtual_live_worker(f"worker-{n:04}") for n in range(workers))
        for worker in self._workers:
            worker_id = worker.record.worker_id
            indexer.index.store(worker_id, hashes[: chance.randrange(len(hashes) + 1)])
            for _ in range(chance.randrange(8)):
                tokens = chance.randrange(1, 4_000)
                self._tickets.append(load.dispatch(worker_id, tokens, BLOCK_SIZE))
        self._router, self._scan = (
            ModelRouter(
                KvRouter(KvRouterConfig(kind="kv")),
                indexer,
                load,
                random.Random(1),
                BLOCK_SIZE,
                strict=True,
                **scanned,
            )
            for scanned in ({}, {"scanned": workers})
        )
        self._request = GenerateRequest(
            request_id="request", token_ids=array("I", token_ids), sampling=SamplingParams()
        )
        self._summary = RequestSummary(
            request_id="request", model="model", prompt_tokens=prompt_tokens, max_tokens=16
        )
        self._hashes = self._router.hashes(self._request)
        self._beginning = array("Q", self._hashes[: int(len(self._hashes) * KNOWN_PART)])

    def hash_and_route(self) -> None:
        self._router.route(self._summary, self._router.hashes(self._request), self._workers)

    def hash_the_end_and_route(self) -> None:
        """As after a beginning that the front door's prompt cache knows, with its hashes."""
        hashes = sequence_hashes(self._request.token_ids, BLOCK_SIZE, known=self._beginning)
        self._router.route(self._summary, hashes, self._workers)

    def route(self) -> str:
        return self._router.route(self._summary, self._hashes, self._workers).decision.worker_id

    def scan(self) -> str:
        return self._scan.route(self._summary, self._hashes, self._workers).decision.worker_id

    def change(self) -> None:
        """What happens to the loads between two requests of a busy front door."""
        chance, tickets = self._chance, self._tickets
        for _ in range(CHANGES // 4):
            worker = chance.choice(self._workers).record.worker_id
            tickets.append(self._load.dispatch(worker, chance.randrange(1, 4_000), BLOCK_SIZE))
            self._load.progress(chance.choice(tickets), BLOCK_SIZE)
            self._load.progress(chance.choice(tickets), BLOCK_SIZE)
            self._load.release(tickets.pop(chance.randrange(len(tickets))))

    def check(self, requests: int = 50) -> None:
        """Both ways choose the same workers while loads change. Raises RuntimeError if not."""
        for _ in range(requests):
            self.change()
            found, expected = self.route(), self.scan()
            if found != expected:
                raise RuntimeError(f"{found} was chosen, and by a look at each worker {expected}")


def best_us(call: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """The least time of a call in microseconds; ``before`` runs before each and does not count."""
    timer = timeit.Timer(call, before or "pass")
    rounds, taken_s = timer.autorange()
    if before is not None or taken_s > _MEASURED_S:
        return min(timer.repeat(number=1, repeat=200)) * 1e6
    rounds = max(1, rounds // 40)
    return min(timer.repeat(number=rounds, repeat=100)) / rounds * 1e6


def figures(prompt_tokens: int, workers: int) -> list[Figure]:
    decision = Decision(prompt_tokens, workers)
    decision.check()
    aim = AIMS_US.get(workers) if prompt_tokens == PROMPT_TOKENS[-1] else None
    scanned_us = best_us(decision.scan)
    ways = {
        "": best_us(decision.hash_and_route),
        f", hashes of the first {KNOWN_PART:.0%} known": best_us(decision.hash_the_end_and_route),
        ", hashes known": best_us(decision.route),
        f", hashes known, after {CHANGES} changes of load": best_us(
            decision.route, decision.change
        ),
    }
    return [
        Figure(
            scenario="decision",
            what=f"{prompt_tokens:,} tokens over {workers:,} workers{how}",
            ours=taken_us,
            other=scanned_us if how == ", hashes known" else None,
            unit="us",
            other_name="a look at each worker",
            aim=f"<{aim}" if aim is not None and not how else "",
            higher_is_better=False,
        )
        for how, taken_us in ways.items()
    ]


def run() -> list[Figure]:
    return [
        figure
        for tokens in PROMPT_TOKENS
        for workers in WORKERS
        for figure in figures(tokens, workers)
    ]
