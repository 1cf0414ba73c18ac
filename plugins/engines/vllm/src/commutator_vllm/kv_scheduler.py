"""The KV connector in vLLM's scheduler: what to ask, load and store. Knows no tier and no bytes.

A request that is new asks its workers what the tiers have, and waits for the answer; vLLM then
gives it blocks, which are loaded while others compute. What a step computes is kept as it goes.
Blocks that are being stored are held in vLLM's pool: neither an abort nor a preemption reuses them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field

from commutator.kv import KvEvent
from commutator_vllm.kv_words import Ask, Chain, Load, Orders, Report, Store
from commutator_vllm.prefill_clock import PrefillClock

__all__ = ["BlockHold", "TierScheduler"]

_HELD_SHARE = 0.5
"""Blocks of the pool that may be held for stores at a time; others are offered later."""
_MOST_PLANS = 64
"""Requests that may wait with a plan, whose blocks the tiers keep for them."""
_PATIENCE_S = 0.5
"""A running request without room waits so long for stores, before another one is preempted."""


class BlockHold(Protocol):
    """vLLM's pool of blocks, as far as it is needed here."""

    def hold(self, blocks: Sequence[int]) -> None:
        """Nobody gets these blocks until ``let_go``."""

    def let_go(self, blocks: Sequence[int]) -> None: ...


@define(eq=False)
class _Request:
    vllm: Any
    told: int = 0
    """Blocks of its chain that the workers know."""
    offered: int = 0
    number: int | None = None
    """Of its question that is being asked, answered, or loaded."""
    first: int = 0
    answers: list[Sequence[str]] = field(factory=list)
    """From each worker the media of the blocks that it planned."""
    media: Sequence[str] = ()
    """Of the blocks that are loaded."""
    computing: bool = False
    """vLLM has it in its steps: what counts as computed is there, whoever has loaded it."""
    over: bool = False
    """It was asked and served; a preemption begins anew."""

    @property
    def planned(self) -> int:
        """Blocks that every worker has; all have answered."""
        return min(len(media) for media in self.answers)


@define
class _Next:
    """What the next orders will say."""

    reset: bool = False
    chains: list[Chain] = field(factory=list)
    drops: list[int] = field(factory=list)
    asks: list[Ask] = field(factory=list)
    loads: list[Load] = field(factory=list)
    stores: list[Store] = field(factory=list)
    forget: list[str] = field(factory=list)

    @property
    def urgent(self) -> bool:
        """Whether something waits for it although no request does."""
        return bool(self.reset or self.drops or self.stores or self.forget)


@define
class _Held:
    blocks: Sequence[int]
    missing: int
    """Workers that have not reported."""
    since_s: float


class TierScheduler:
    """Called on the scheduler's thread only; never waits."""

    def __init__(self, *, block_size: int, num_blocks: int, workers: int, lag: int) -> None:
        """``lag``: steps between a step's plan and the time that it takes; see PrefillClock."""
        self._block_size = block_size
        self._most_held = max(1, int(num_blocks * _HELD_SHARE))
        self._workers = workers
        self._numbers = itertools.count(1)
        self._requests: dict[str, _Request] = {}
        self._asked: dict[int, _Request] = {}
        self._held: dict[int, _Held] = {}
        self._clock = PrefillClock(lag)
        self._next = _Next()
        self._heard = False
        self._events: list[KvEvent] = []
        self.pool: BlockHold | None = None

    def arrived(self, request: Any) -> None:
        """A new request. What vLLM knows by more than tokens is left to vLLM alone."""
        more = (
            getattr(request, "mm_features", None),
            getattr(request, "prompt_embeds", None),
            getattr(request, "resumable", False),
        )
        if not any(some is not None and some is not False and some != [] for some in more):
            self._requests[request.request_id] = _Request(request)

    def match(self, request: Any, computed_tokens: int) -> int | None:
        """How many tokens after the computed ones can be loaded; None: ask again next step."""
        state = self._requests.get(request.request_id)
        first = computed_tokens // self._block_size
        wanted = (request.num_tokens - 1) // self._block_size
        if state is None or state.over or wanted <= first or _comes_from_another(request):
            return 0
        if state.number is None:
            if len(self._asked) < _MOST_PLANS:
                self._ask(state, first, wanted)
            return None
        if len(state.answers) < self._workers:
            return None
        planned = state.planned
        end = state.first + planned
        if planned and first < state.first:
            self._drop(state)  # vLLM has evicted what it had
            return None
        if not planned or end <= first:
            self._drop(state)
            state.over = True
            return 0
        return (end - first) * self._block_size

    def allocated(self, request: Any, blocks: Sequence[int], external_tokens: int) -> None:
        """The request got its blocks; those of ``external_tokens`` are to be loaded."""
        state = self._requests.get(request.request_id)
        if state is None or state.number is None or state.over:
            return  # such as the second time, when it has been loaded
        state.over = True
        if not external_tokens:
            self._drop(state)
            return
        count = external_tokens // self._block_size
        first = state.first + state.planned - count
        chosen = tuple(blocks[first : first + count])
        skip = first - state.first
        del self._asked[state.number]
        state.media = state.answers[0][skip : skip + count]
        self._next.loads.append(Load(state.number, request.request_id, chosen, skip))

    def media_of(self, request: Any) -> Sequence[str]:
        """Where each block lies that is being loaded for a request."""
        state = self._requests.get(request.request_id)
        return () if state is None else state.media

    def finished(self, request: Any, blocks: Sequence[int], now_s: float) -> None:
        """The request is over, perhaps aborted; its last blocks are kept, too."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if state.computing:  # otherwise vLLM counts as computed what is not there yet
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            self._keep(state, computed, blocks, now_s)
        self._drop(state)
        del self._requests[request.request_id]
        self._next.forget.append(request.request_id)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """These lost their blocks, and will be asked for again."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                self._drop(state)
                state.over = state.computing = False
                state.offered = 0

    def orders(
        self,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str], Sequence[int]],
        now_s: float,
    ) -> Orders:
        """What this step's workers are to do; ``scheduled`` has the tokens of each request."""
        prefill_tokens = 0
        for request_id, tokens in scheduled.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            state.computing = True
            computed = state.vllm.num_computed_tokens
            if computed < state.vllm.num_prompt_tokens:
                prefill_tokens += tokens
            self._keep(state, computed + tokens, blocks_of(request_id), now_s)
        self._clock.step(prefill_tokens, scheduled.keys(), now_s)
        told, self._next = self._next, _Next()
        return Orders(
            reset=told.reset,
            chains=tuple(told.chains),
            drops=tuple(told.drops),
            asks=tuple(told.asks),
            loads=tuple(told.loads),
            stores=tuple(told.stores),
            forget=tuple(told.forget),
            computes=bool(scheduled),
        )

    def loaded(self, request_ids: Iterable[str]) -> None:
        """These loads are over on all workers."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                state.number = None

    def reported(self, report: Report) -> None:
        """What the workers said at the end of a step."""
        self._heard = True
        for answer in report.answers:
            state = self._asked.get(answer.number)
            if state is not None:
                state.answers.append(answer.media)
        for number in report.stored:
            held = self._held[number]
            held.missing -= 1
            if not held.missing:
                del self._held[number]
                assert self.pool is not None
                self.pool.let_go(held.blocks)
        self._events += report.events

    def take_events(self) -> list[KvEvent]:
        """What routers are to be told."""
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Everything in the tiers is to be forgotten."""
        self._next.reset = True

    @property
    def busy(self) -> bool:
        """Whether vLLM must go on with its steps although no request needs any."""
        return bool(self._held) or self._next.urgent or not self._heard

    def frees_blocks_soon(self, now_s: float) -> bool:
        """Whether it is better to wait for blocks than to preempt."""
        return any(now_s - held.since_s < _PATIENCE_S for held in self._held.values())

    def _tell(self, state: _Request, blocks: int) -> None:
        """Let the workers know the chain that far."""
        if blocks <= state.told:
            return
        request, size = state.vllm, self._block_size
        lora = request.lora_request
        self._next.chains.append(
            Chain(
                request.request_id,
                tuple(request.all_token_ids[state.told * size : blocks * size]),
                request.num_prompt_tokens // size,
                None if lora is None else (lora.lora_name, lora.lora_path),
                request.cache_salt,
            )
        )
        state.told = blocks

    def _ask(self, state: _Request, first: int, wanted: int) -> None:
        self._tell(state, wanted)
        state.number = next(self._numbers)
        state.first = first
        state.answers = []
        self._asked[state.number] = state
        speed = self._clock.tokens_per_s
        self._next.asks.append(Ask(state.number, state.vllm.request_id, first, wanted, speed))

    def _drop(self, state: _Request) -> None:
        """Forget its question; the workers let go of what was planned, and stop what is loaded."""
        if state.number is None:
            return
        self._asked.pop(state.number, None)
        self._next.drops.append(state.number)
        state.number = None

    def _keep(self, state: _Request, computed: int, blocks: Sequence[int], now_s: float) -> None:
        """Offer full blocks that were computed of tokens that are certain."""
        request = state.vllm
        full = min(computed, request.num_tokens) // self._block_size
        room = self._most_held - sum(len(held.blocks) for held in self._held.values())
        count = min(full, len(blocks)) - state.offered
        count = min(count, room)
        if count <= 0 or self.pool is None:
            return
        first, end = state.offered, state.offered + count
        chosen = tuple(blocks[first:end])
        self._tell(state, end)
        number = next(self._numbers)
        self.pool.hold(chosen)
        self._held[number] = _Held(chosen, self._workers, now_s)
        self._next.stores.append(Store(number, request.request_id, first, chosen))
        state.offered = end


def _comes_from_another(request: Any) -> bool:
    """Whether the connector that is beside this one brings the prompt from a prefill server.

    It takes its mark away when it begins, so that after a failure the tiers are asked.
    """
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
