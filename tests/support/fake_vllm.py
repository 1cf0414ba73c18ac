"""vLLM's scheduler and workers as far as the KV connector's two sides see them, in one thread.

Each worker has memory of its own and a real dram tier. A request that ends, or is computed further,
must find the right bytes in all its full blocks: those that were loaded, too. Blocks behind a
window leave a request's table, and states are kept where a step ends at the end of a block.
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

from commutator_engine_kit.kv import KvGroup, KvKind
from commutator_vllm.kv_scheduler import TierScheduler
from commutator_vllm.kv_worker import TierWorkerSide

__all__ = ["BLOCK_TOKENS", "WHOLE", "FakeRequest", "FakeVllm"]

BLOCK_TOKENS = IDENTITY.block_size
WHOLE = (KvGroup(kind=KvKind.FULL, block_size=BLOCK_TOKENS),)
_NULL = -1
_STEP_TOKENS = 3 * BLOCK_TOKENS
"""Most tokens of one request that a step computes."""
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
    shared_prefix_boundary: int = 0
    blocks: list[list[int]] = field(factory=list)
    """Of each group, from the prompt's first; _NULL where there is none any more."""
    status: str = "waiting"
    hits: int = 0
    mm_features: list[str] = field(factory=list)
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class FakeVllm:
    """A step computes one running request's missing tokens, or adds a token to each."""

    null_block = _NULL

    def __init__(
        self,
        *tiers: dict[str, Any],
        blocks: int = 12,
        workers: int = 1,
        groups: Sequence[KvGroup] = WHOLE,
    ) -> None:
        self.groups = tuple(groups)
        self._workers: list[tuple[ForeignEngine, TierWorkerSide]] = []
        for rank in range(workers):
            news = threading.Event()
            engine = ForeignEngine(
                *tiers,
                blocks=blocks,
                identity=evolve(IDENTITY, parallel_rank=str(rank)),
                groups=groups,
                wake=news.set,
                own_thread=False,
            ).__enter__()
            side = TierWorkerSide(engine.connector, news, lambda: lambda: True)
            self._workers.append((engine, side))
        self.scheduler = TierScheduler(groups=groups, num_blocks=blocks, workers=workers, lag=0)
        self.scheduler.pool = self
        self._blocks = blocks
        self.users: Counter[int] = Counter()
        self.requests: list[FakeRequest] = []
        self._preempted: list[str] = []
        self._over: Counter[str] = Counter()
        self._failed: set[str] = set()
        self.failed_loads = 0
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
        request.blocks = [[] for _ in self.groups]
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
            self._leave_windows(request)
            if not self._get_blocks(request, self._end(request)):
                self.preempt(request)
        if not self._preempted:
            for request in [some for some in self.requests if some.status == "waiting"]:
                self._admit(request)
        self.scheduler.preempted(self._preempted)
        self._preempted = []
        ends = {request.request_id: self._end(request) for request in self.running()}
        scheduled = {
            request.request_id: ends[request.request_id] - request.num_computed_tokens
            for request in self.running()
        }
        states = {
            request.request_id: self._states(request, ends[request.request_id])
            for request in self.running()
        }
        tables = {request.request_id: request.blocks for request in self.requests}
        orders = self.scheduler.orders(scheduled, tables.__getitem__, 0.0, states)
        for engine, side in self._workers:
            self._compute(engine)
            side.begin(orders)
            side.end(orders)
            over, failed = side.take_loaded(orders)
            self._over.update(over)
            self._failed |= failed
            self.scheduler.reported(side.report())
        for request in self.running():
            request.num_computed_tokens = ends[request.request_id]
            self._check(request)
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(7)
        self._loads_over()

    def run(self, request: FakeRequest) -> FakeRequest:
        """Step until the prompt has been computed."""
        self._until(lambda: request.num_computed_tokens >= request.num_prompt_tokens)
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
        end = external or self._end(request)
        if external:
            for group, table in zip(self.groups, request.blocks, strict=True):
                table.extend([_NULL] * group.first_needed(external))
        if not self._get_blocks(request, end):
            if external:
                request.blocks = [[] for _ in self.groups]
            return
        self.scheduler.allocated(request, request.blocks, external)
        request.hits += external
        request.num_computed_tokens += external
        request.status = "loading" if external else "running"

    def _end(self, request: FakeRequest) -> int:
        """Up to which token this step computes; where states are kept, to the end of a block."""
        computed = request.num_computed_tokens
        end = min(request.num_tokens, computed + _STEP_TOKENS)
        for group in self.groups:
            if group.kind is KvKind.RECURRENT:
                aligned = end // group.block_size * group.block_size
                if aligned > computed:
                    return aligned
        return end

    def _states(self, request: FakeRequest, end: int) -> list[tuple[int, int, int]]:
        return [
            (number, request.blocks[number][end // group.block_size - 1], end)
            for number, group in enumerate(self.groups)
            if group.kind is KvKind.RECURRENT and end % group.block_size == 0
        ]

    def _leave_windows(self, request: FakeRequest) -> None:
        for group, table in zip(self.groups, request.blocks, strict=True):
            aligned = request.num_computed_tokens // group.block_size * group.block_size
            for index in range(min(len(table), group.first_needed(aligned))):
                if table[index] != _NULL:
                    self.released([table[index]])
                    table[index] = _NULL

    def _get_blocks(self, request: FakeRequest, end: int) -> bool:
        """Allocate blocks for the tokens before ``end``; False when there are too few."""
        wanted = []
        for number, (group, table) in enumerate(zip(self.groups, request.blocks, strict=True)):
            last = -(-end // group.block_size)
            if group.kind is KvKind.RECURRENT:
                table.extend([_NULL] * (last - 1 - len(table)))
            wanted += [number] * max(0, last - len(table))
        free = [block for block in range(self._blocks) if not self.users[block]]
        if len(wanted) > len(free):
            return False
        for number, block in zip(wanted, free, strict=False):
            request.blocks[number].append(block)
        self.hold(free[: len(wanted)])
        return True

    def _compute(self, engine: ForeignEngine) -> None:
        for request in self.running():
            end = self._end(request)
            for number, (group, table) in enumerate(zip(self.groups, request.blocks, strict=True)):
                keys = self._keys(engine, request, number)
                for index in range(request.num_computed_tokens // group.block_size, len(table)):
                    if table[index] == _NULL:
                        continue
                    if (index + 1) * group.block_size <= end:
                        engine.compute(table[index], keys[index])
                    else:
                        engine.scribble(table[index])

    def _check(self, request: FakeRequest) -> None:
        """All that the next token reads, and all else that the tables say is computed."""
        computed = request.num_computed_tokens
        for engine in self.engines:
            for number, (group, table) in enumerate(zip(self.groups, request.blocks, strict=True)):
                keys = self._keys(engine, request, number)
                full = computed // group.block_size
                recurrent = group.kind is KvKind.RECURRENT
                if recurrent and computed % group.block_size:
                    continue  # its state is within a block
                for index in range(full - 1 if recurrent and full else 0, full):
                    needed = index >= group.first_needed(full * group.block_size)
                    present = table[index] != _NULL
                    assert present or not needed, f"{request.request_id}: KV is missing"
                    if present:
                        right = engine.holds(table[index], keys[index])
                        assert right, f"{request.request_id}: wrong KV of group {number}"

    def _keys(self, engine: ForeignEngine, request: FakeRequest, group: int) -> list[bytes]:
        return engine.connector.lookups.keys(
            request.all_token_ids, cache_salt=request.cache_salt, group=group
        )

    def _loads_over(self) -> None:
        over = [name for name, reports in self._over.items() if reports == len(self._workers)]
        failed = self._failed & set(over)
        self._failed -= failed
        self.scheduler.loaded(over, failed)
        for name in over:
            del self._over[name]
            (request,) = [some for some in self.requests if some.request_id == name]
            if request.status == "finished":
                self._free(request)
                self.requests.remove(request)
            else:
                assert request.status == "loading"
                request.status = "waiting"
                if name in failed:
                    self.failed_loads += 1
                    request.num_computed_tokens = 0
                    self._free(request)
                else:
                    self._check(request)

    def _free(self, request: FakeRequest) -> None:
        self.released([block for table in request.blocks for block in table if block != _NULL])
        request.blocks = [[] for _ in self.groups]
