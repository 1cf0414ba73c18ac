"""The KV connector in a vLLM worker: carries out the scheduler's orders with our tiers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from attrs import define

from commutator.engine import EmbeddedTiers, TierPlan
from commutator.kv import BlockKey
from commutator_vllm.kv_words import Answer, Ask, Chain, Load, Orders, Report, Store

__all__ = ["TierWorkerSide"]

_IDLE_STEP_S = 0.005
"""vLLM's empty steps follow each other at once: each waits so long for news."""

Fence = Callable[[], bool]
"""Whether the device has done what was begun before the fence was made."""


@define
class _Chained:
    """A request's blocks as far as the scheduler has told of them."""

    keys: list[BlockKey]
    token_ids: list[int]
    prompt_blocks: int
    lora: tuple[str, str] | None
    cache_salt: str | None

    @property
    def lora_identity(self) -> str | None:
        """Adapters of one name may differ."""
        return None if self.lora is None else "\0".join(self.lora)


@define(eq=False)
class _Loading:
    request_id: str
    plan: TierPlan
    device_blocks: tuple[int, ...]
    dropped: bool = False
    future: Future[list[bool]] | None = None
    """None until the device is past the fence."""


class TierWorkerSide:
    """Called on the worker's thread, in vLLM's order: ``begin``, ``end``, then the questions."""

    def __init__(
        self,
        tiers: EmbeddedTiers,
        news: threading.Event,
        make_fence: Callable[[], Fence],
        *,
        tells_routers: bool = True,
    ) -> None:
        """``news`` is set when something in ``tiers`` is done."""
        self._tells_routers = tells_routers
        self._tiers = tiers
        self._news = news
        self._make_fence = make_fence
        self._chains: dict[str, _Chained] = {}
        self._asked: dict[int, Future[TierPlan]] = {}
        self._plans: dict[int, TierPlan] = {}
        self._loading: dict[int, _Loading] = {}
        self._storing: dict[int, Future[None]] = {}
        self._behind: deque[tuple[Fence, Callable[[], None]]] = deque()
        """What is to be done once the device is past a fence."""
        self._failed: set[int] = set()

    def begin(self, orders: Orders) -> None:
        """All orders but the stores."""
        if orders.reset:
            self._tiers.reset()
        for chain in orders.chains:
            self._grow(chain)
        for number in orders.drops:
            self._drop(number)
        for ask in orders.asks:
            self._asked[ask.number] = self._plan(ask)
        if orders.loads:
            fence = self._make_fence()
            for load in orders.loads:
                self._load(load, fence)

    def end(self, orders: Orders) -> None:
        """After the step's forward pass was begun."""
        if orders.stores:
            fence = self._make_fence()
            for store in orders.stores:
                self._store(store, fence)
        for request_id in orders.forget:
            self._chains.pop(request_id, None)

    def take_loaded(self, orders: Orders) -> set[str]:
        """Requests whose load is over, however it ended; each is told once."""
        if not orders.computes and (self._asked or self._loading or self._storing or self._behind):
            self._news.wait(_IDLE_STEP_S)
        self._news.clear()
        while self._behind and self._behind[0][0]():
            self._behind.popleft()[1]()
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
        """Device blocks of those loads that do not hold what they should."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> Report:
        """What the scheduler must know."""
        answers = []
        for number, future in list(self._asked.items()):
            if future.done():
                plan = future.result()
                self._plans[number] = plan
                answers.append(Answer(number, plan.media))
                del self._asked[number]
        stored = [number for number, future in self._storing.items() if future.done()]
        for number in stored:
            del self._storing[number]
        events = self._tiers.take_events()
        told = tuple(events) if self._tells_routers else ()
        return Report(tuple(answers), tuple(stored), told)

    def close(self) -> None:
        """The worker ends."""
        self._tiers.close()

    def _grow(self, chain: Chain) -> None:
        known = self._chains.setdefault(
            chain.request_id,
            _Chained([], [], chain.prompt_blocks, chain.lora, chain.cache_salt),
        )
        known.token_ids += chain.token_ids
        known.keys = self._tiers.keys(
            known.token_ids,
            lora_name=known.lora_identity,
            cache_salt=known.cache_salt,
            known=known.keys,
        )

    def _plan(self, ask: Ask) -> Future[TierPlan]:
        keys = self._chains[ask.request_id].keys[: ask.blocks]
        return self._tiers.plan(keys, first=ask.first, tokens_per_s=ask.tokens_per_s)

    def _drop(self, number: int) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None and not asked.cancel():
            self._tiers.drop(asked.result())
        if (plan := self._plans.pop(number, None)) is not None:
            self._tiers.drop(plan)
        if (load := self._loading.get(number)) is not None:
            load.dropped = True
            if load.future is not None:
                self._tiers.drop(load.plan)

    def _load(self, load: Load, fence: Fence) -> None:
        loading = _Loading(load.request_id, self._plans.pop(load.number), load.device_blocks)
        self._loading[load.number] = loading

        def start() -> None:
            loading.future = self._tiers.load(loading.plan, load.device_blocks, skip=load.skip)
            if loading.dropped:
                self._tiers.drop(loading.plan)

        self._do_behind(fence, start)

    def _store(self, store: Store, fence: Fence) -> None:
        chain = self._chains[store.request_id]
        end = store.first + len(store.device_blocks)
        offers = self._tiers.offers(
            chain.keys[:end],
            chain.token_ids,
            first=store.first,
            prompt_blocks=chain.prompt_blocks,
            lora_name=None if chain.lora is None else chain.lora[0],
            cache_salt=chain.cache_salt,
        )
        self._storing[store.number] = done = Future[None]()

        def start() -> None:
            kept = self._tiers.store(offers, store.device_blocks)
            kept.add_done_callback(lambda _: done.set_result(None))

        self._do_behind(fence, start)

    def _do_behind(self, fence: Fence, call: Callable[[], None]) -> None:
        if not self._behind and fence():
            call()
        else:
            self._behind.append((fence, call))
