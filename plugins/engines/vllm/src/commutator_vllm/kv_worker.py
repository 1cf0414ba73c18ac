"""The KV connector in a vLLM worker process: carries out the scheduler's orders on the tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from attrs import define

from commutator_engine_kit.connector_worker import Fence, FencedCalls, RequestChains
from commutator_engine_kit.kv import GroupChain, KvConnector, OnboardTicket, announced_group
from commutator_vllm.connector_metadata import (
    ConnectorMetadata,
    Load,
    LookupRequest,
    LookupResult,
    Store,
    WorkerReport,
)

_IDLE_STEP_S = 0.005
"""vLLM runs empty steps without a pause: each waits up to this long for an operation to end."""


@define(eq=False)
class _Loading:
    plan: OnboardTicket
    order: Load
    dropped: bool = False
    future: Future[list[bool]] | None = None
    """None until the device has passed the fence."""


class TierWorkerSide:
    """The worker's side.

    Called on the worker's thread, in each step in the order of the methods: ``begin``, ``end``,
    ``take_loaded``, ``report``.
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
        self._counted = announced_group(connector.groups)
        self._lookups: dict[int, Future[OnboardTicket]] = {}
        self._plans: dict[int, OnboardTicket] = {}
        self._loading: dict[int, _Loading] = {}
        self._storing: dict[int, Future[None]] = {}
        self._fenced = FencedCalls()

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

    def take_loaded(self, orders: ConnectorMetadata) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those of them where it failed.

        A load fails as a whole: what one group lacks makes the blocks of the others useless.
        """
        busy = self._lookups or self._loading or self._storing or self._fenced
        if not orders.computes and busy:
            self._news.wait(_IDLE_STEP_S)
        self._news.clear()
        self._fenced.poll()
        over: set[str] = set()
        failed: set[str] = set()
        for number, load in list(self._loading.items()):
            if load.future is None or not load.future.done():
                continue
            request_id = load.order.request_id
            over.add(request_id)
            if not load.dropped and not all(load.future.result()):
                failed.add(request_id)
            del self._loading[number]
        return over, failed

    def report(self) -> WorkerReport:
        """Answered lookups, ended stores and KV events since the last call."""
        answers = []
        for number, future in list(self._lookups.items()):
            if future.done():
                plan = future.result()
                self._plans[number] = plan
                media = self._media(plan)
                answers.append(LookupResult(number, plan.boundary, media, plan.shared))
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
        chains = [
            GroupChain(
                group=group,
                keys=self._chains.keys(lookup.request_id, number),
                on_device=range(lookup.first // group.block_size),
            )
            for number, group in enumerate(self._connector.groups)
        ]
        return self._connector.lookups.plan_groups(
            chains, lookup.limit, tokens_per_s=lookup.tokens_per_s
        )

    def _media(self, plan: OnboardTicket) -> tuple[str, ...]:
        places = zip(plan.places, plan.media, strict=True)
        return tuple(medium for (group, _), medium in places if self._counted in {None, group})

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
        loading = _Loading(self._plans.pop(load.number), load)
        self._loading[load.number] = loading

        def start() -> None:
            loading.future = self._connector.loads.onboard_groups(
                loading.plan, load.device_blocks, first_tokens=load.first
            )
            if loading.dropped:
                self._connector.loads.cancel(loading.plan)

        self._fenced.add(fence, start)

    def _store(self, store: Store, fence: Fence) -> None:
        blocks = self._chains.descriptors(
            store.request_id, store.first, len(store.device_blocks), store.group
        )
        self._storing[store.number] = done = Future[None]()

        def start() -> None:
            offloaded = self._connector.stores.offload(blocks, store.device_blocks)
            offloaded.add_done_callback(lambda _: done.set_result(None))

        self._fenced.add(fence, start)
