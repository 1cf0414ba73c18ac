"""The KV connector in a vLLM worker process: carries out the scheduler's orders on the tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from attrs import define

from commutator_engine_kit.connector_worker import Fence, FencedCalls, RequestChains
from commutator_engine_kit.kv import KvConnector, OnboardTicket
from commutator_vllm.connector_metadata import (
    ConnectorMetadata,
    Load,
    LookupRequest,
    LookupResult,
    Store,
    WorkerReport,
)

__all__ = ["TierWorkerSide"]

_IDLE_STEP_S = 0.005
"""vLLM runs empty steps without a pause: each waits up to this long for an operation to end."""


@define(eq=False)
class _Loading:
    request_id: str
    plan: OnboardTicket
    device_blocks: tuple[int, ...]
    dropped: bool = False
    future: Future[list[bool]] | None = None
    """None until the device has passed the fence."""


class TierWorkerSide:
    """The worker's side.

    Called on the worker's thread, in each step in the order of the methods: ``begin``, ``end``,
    ``take_loaded``, ``take_failed_blocks``, ``report``.
    """

    def __init__(
        self,
        connector: KvConnector,
        news: threading.Event,
        make_fence: Callable[[], Fence],
        *,
        reports_events: bool = True,
    ) -> None:
        """The connector sets ``news`` when an operation has ended.

        ``reports_events``: whether reports include KV events; one rank of a server is enough.
        """
        self._reports_events = reports_events
        self._connector = connector
        self._news = news
        self._make_fence = make_fence
        self._chains = RequestChains(connector)
        self._lookups: dict[int, Future[OnboardTicket]] = {}
        self._plans: dict[int, OnboardTicket] = {}
        self._loading: dict[int, _Loading] = {}
        self._storing: dict[int, Future[None]] = {}
        self._fenced = FencedCalls()
        self._failed: set[int] = set()

    def begin(self, orders: ConnectorMetadata) -> None:
        """Carry out all orders except the stores."""
        if orders.reset:
            self._connector.stores.evict(reason="reset")
        for chain in orders.chains:
            self._chains.grow(chain)
        for number in orders.drops:
            self._drop(number)
        for lookup in orders.lookups:
            self._lookups[lookup.number] = self._plan(lookup)
        if orders.loads:
            fence = self._make_fence()
            for load in orders.loads:
                self._load(load, fence)

    def end(self, orders: ConnectorMetadata) -> None:
        """Carry out the stores, after the step's forward pass was launched."""
        if orders.stores:
            fence = self._make_fence()
            for store in orders.stores:
                self._store(store, fence)
        for request_id in orders.forget:
            self._chains.forget(request_id)

    def take_loaded(self, orders: ConnectorMetadata) -> set[str]:
        """Requests whose load has ended, well or not, since the last call."""
        busy = self._lookups or self._loading or self._storing or self._fenced
        if not orders.computes and busy:
            self._news.wait(_IDLE_STEP_S)
        self._news.clear()
        self._fenced.poll()
        over: set[str] = set()
        for number, load in list(self._loading.items()):
            if load.future is None or not load.future.done():
                continue
            good = load.future.result()
            over.add(load.request_id)
            if not load.dropped:
                pairs = zip(load.device_blocks, good, strict=True)
                self._failed.update(block for block, is_good in pairs if not is_good)
            del self._loading[number]
        return over

    def take_failed_blocks(self) -> set[int]:
        """Device blocks of ended loads that could not be filled, since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> WorkerReport:
        """Answered lookups, ended stores and KV events since the last call."""
        answers = []
        for number, future in list(self._lookups.items()):
            if future.done():
                plan = future.result()
                self._plans[number] = plan
                answers.append(LookupResult(number, plan.media))
                del self._lookups[number]
        stored = [number for number, future in self._storing.items() if future.done()]
        for number in stored:
            del self._storing[number]
        events = tuple(self._connector.poll().events)
        return WorkerReport(tuple(answers), tuple(stored), events if self._reports_events else ())

    def close(self) -> None:
        """Close the tiers."""
        self._connector.close()

    def _plan(self, lookup: LookupRequest) -> Future[OnboardTicket]:
        keys = self._chains.keys(lookup.request_id)[: lookup.blocks]
        return self._connector.lookups.plan(
            keys, first=lookup.first, tokens_per_s=lookup.tokens_per_s
        )

    def _drop(self, number: int) -> None:
        lookup = self._lookups.pop(number, None)
        if lookup is not None and not lookup.cancel():
            self._connector.loads.cancel(lookup.result())
        if (plan := self._plans.pop(number, None)) is not None:
            self._connector.loads.cancel(plan)
        if (load := self._loading.get(number)) is not None:
            load.dropped = True
            if load.future is not None:
                self._connector.loads.cancel(load.plan)

    def _load(self, load: Load, fence: Fence) -> None:
        loading = _Loading(load.request_id, self._plans.pop(load.number), load.device_blocks)
        self._loading[load.number] = loading

        def start() -> None:
            loading.future = self._connector.loads.onboard(
                loading.plan, load.device_blocks, skip=load.skip
            )
            if loading.dropped:
                self._connector.loads.cancel(loading.plan)

        self._fenced.add(fence, start)

    def _store(self, store: Store, fence: Fence) -> None:
        blocks = self._chains.descriptors(store.request_id, store.first, len(store.device_blocks))
        self._storing[store.number] = done = Future[None]()

        def start() -> None:
            offloaded = self._connector.stores.offload(blocks, store.device_blocks)
            offloaded.add_done_callback(lambda _: done.set_result(None))

        self._fenced.add(fence, start)
