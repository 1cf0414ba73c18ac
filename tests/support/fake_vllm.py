"""vLLM's scheduler and workers as far as the KV connector's two sides see them, in one thread.

Each worker has memory of its own and a real dram tier. A request that ends, or is computed further,
must find the right bytes in all its full blocks: those that were loaded, too.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

from attrs import define, evolve, field
from tests.support.foreign_engine import IDENTITY, ForeignEngine
from tests.support.kv_integrity import check_connector

from commutator_vllm.kv_scheduler import TierScheduler
from commutator_vllm.kv_worker import TierWorkerSide

__all__ = ["BLOCK_TOKENS", "FakeRequest", "FakeVllm"]

BLOCK_TOKENS = IDENTITY.block_size
_SETTLED_S = 60.0


@define(eq=False)
class FakeRequest:
    """Named as vLLM names its requests' attributes."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    cache_salt: str | None = None
    lora_request: Any = None
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    blocks: list[int] = field(factory=list)
    status: str = "waiting"
    hits: int = 0
    mm_features: list[str] = field(factory=list)
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class FakeVllm:
    """A step computes one running request's missing tokens, or adds a token to each."""

    def __init__(self, *tiers: dict[str, Any], blocks: int = 12, workers: int = 1) -> None:
        self._workers: list[tuple[ForeignEngine, TierWorkerSide]] = []
        for rank in range(workers):
            news = threading.Event()
            engine = ForeignEngine(
                *tiers,
                blocks=blocks,
                identity=evolve(IDENTITY, parallel_rank=str(rank)),
                wake=news.set,
                own_thread=False,
            ).__enter__()
            side = TierWorkerSide(engine.connector, news, lambda: lambda: True)
            self._workers.append((engine, side))
        self.scheduler = TierScheduler(
            block_size=BLOCK_TOKENS, num_blocks=blocks, workers=workers, lag=0
        )
        self.scheduler.pool = self
        self._blocks = blocks
        self.users: Counter[int] = Counter()
        self.requests: list[FakeRequest] = []
        self._preempted: list[str] = []
        self._over: Counter[str] = Counter()
        self._numbers = 0

    def hold(self, blocks: Sequence[int]) -> None:
        self.users.update(blocks)

    def released(self, blocks: Sequence[int]) -> None:
        self.users.subtract(blocks)
        assert min(self.users.values(), default=0) >= 0
        self.users = +self.users

    def arrive(self, tokens: Sequence[int], **facts: Any) -> FakeRequest:
        self._numbers += 1
        request = FakeRequest(f"r{self._numbers}", list(tokens), len(tokens), **facts)
        self.requests.append(request)
        self.scheduler.arrived(request)
        return request

    def finish(self, request: FakeRequest) -> None:
        """The request ends or is aborted; a running load keeps its blocks."""
        loading = request.status == "loading"
        self.scheduler.finished(request, request.blocks, 0.0)
        if request.status == "running":
            self._check(request)
        request.status = "finished"
        if not loading:
            self._free(request)
            self.requests.remove(request)

    def preempt(self, request: FakeRequest) -> None:
        self._free(request)
        request.num_computed_tokens = 0
        request.status = "waiting"
        self._preempted.append(request.request_id)

    def running(self) -> list[FakeRequest]:
        return [request for request in self.requests if request.status == "running"]

    def step(self) -> None:
        """Schedule, carry out the orders, and pass on the workers' reports."""
        for request in self.running():
            if not self._get_blocks(request):
                self.preempt(request)
        if not self._preempted:
            for request in [some for some in self.requests if some.status == "waiting"]:
                self._admit(request)
        self.scheduler.preempted(self._preempted)
        self._preempted = []
        scheduled = {
            request.request_id: request.num_tokens - request.num_computed_tokens
            for request in self.running()
        }
        tables = {request.request_id: request.blocks for request in self.requests}
        orders = self.scheduler.orders(scheduled, tables.__getitem__, 0.0)
        for engine, side in self._workers:
            self._compute(engine)
            side.begin(orders)
            side.end(orders)
            self._over.update(side.take_loaded(orders))
            self._failed(side.take_failed_blocks())
            self.scheduler.reported(side.report())
        for request in self.running():
            request.num_computed_tokens = request.num_tokens
            self._check(request)
            request.all_token_ids.append(7)
        self._loads_over()

    def run(self, request: FakeRequest) -> FakeRequest:
        """Step until the request has been computed."""
        self._until(lambda: request.status == "running")
        return request

    def settle(self) -> None:
        """End all requests; then no block may be held."""
        for request in list(self.requests):
            if request.status != "finished":
                self.finish(request)
        self._until(lambda: not self.requests and not self.scheduler.busy)
        assert not self.users
        for engine, _ in self._workers:
            check_connector(engine.connector)

    def close(self) -> None:
        for engine, _ in self._workers:
            engine.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engines(self) -> list[ForeignEngine]:
        return [engine for engine, _ in self._workers]

    def _until(self, true: Any) -> None:
        deadline_s = time.monotonic() + _SETTLED_S
        while not true():
            assert time.monotonic() < deadline_s, "it does not settle"
            self.step()

    def _admit(self, request: FakeRequest) -> None:
        external = 0
        if request.num_computed_tokens == 0:
            matched = self.scheduler.match(request, 0)
            if matched is None:
                return
            external = matched
        assert external < request.num_tokens
        if not self._get_blocks(request):
            return
        self.scheduler.allocated(request, request.blocks, external)
        request.hits += external
        request.num_computed_tokens += external
        request.status = "loading" if external else "running"

    def _get_blocks(self, request: FakeRequest) -> bool:
        """Allocate blocks for its tokens and the next one; False when there are too few."""
        wanted = max(0, -(-(request.num_tokens + 1) // BLOCK_TOKENS) - len(request.blocks))
        free = [block for block in range(self._blocks) if not self.users[block]]
        if wanted > len(free):
            return False
        request.blocks += free[:wanted]
        self.hold(free[:wanted])
        return True

    def _compute(self, engine: ForeignEngine) -> None:
        for request in self.running():
            keys = self._keys(engine, request)
            first = request.num_computed_tokens // BLOCK_TOKENS
            for index in range(first, len(request.blocks)):
                if index < len(keys):
                    engine.compute(request.blocks[index], keys[index])
                else:
                    engine.scribble(request.blocks[index])

    def _check(self, request: FakeRequest) -> None:
        for engine in self.engines:
            keys = self._keys(engine, request)
            full = request.num_computed_tokens // BLOCK_TOKENS
            for block, key in zip(request.blocks[:full], keys, strict=False):
                assert engine.holds(block, key), f"{request.request_id}: wrong KV"

    def _keys(self, engine: ForeignEngine, request: FakeRequest) -> list[bytes]:
        return engine.connector.lookups.keys(request.all_token_ids, cache_salt=request.cache_salt)

    def _failed(self, blocks: set[int]) -> None:
        for request in self.requests:
            bad = [i for i, block in enumerate(request.blocks) if block in blocks]
            if request.status == "loading" and bad:
                request.num_computed_tokens = min(
                    request.num_computed_tokens, bad[0] * BLOCK_TOKENS
                )

    def _loads_over(self) -> None:
        over = [name for name, reports in self._over.items() if reports == len(self._workers)]
        self.scheduler.loaded(over)
        for name in over:
            del self._over[name]
            (request,) = [some for some in self.requests if some.request_id == name]
            if request.status == "finished":
                self._free(request)
                self.requests.remove(request)
            else:
                assert request.status == "loading"
                self._check(request)
                request.status = "waiting"
                if request.num_computed_tokens == 0:
                    self._free(request)

    def _free(self, request: FakeRequest) -> None:
        self.released(request.blocks)
        request.blocks = []
