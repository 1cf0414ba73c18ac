"""The KV connector in vLLM's scheduler process: decides what to look up, load and store.

For a new request it asks the workers up to which boundary the tiers can serve all groups of layers,
and waits for their answers. vLLM then allocates blocks, which are loaded while other requests
compute. Blocks that a step computes are stored after that step. Blocks that are being stored are
held in vLLM's pool, so that they are not reused after an abort or a preemption. The workers have
the tiers and move the bytes.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, Protocol

from attrs import define, field

from commutator.contract.block import KvEvent
from commutator_engine_kit.connector_worker import Chain
from commutator_engine_kit.kv import KvGroup, KvKind, alignment, announced_group, beside
from commutator_vllm.connector_metadata import (
    ConnectorMetadata,
    Load,
    LookupRequest,
    LookupResult,
    Store,
    WorkerReport,
)

Blocks = Sequence[Sequence[int]]
"""The device blocks of a request in each group, from the first of its prompt."""
States = Mapping[str, Sequence[tuple[int, int, int]]]
"""Of each request, the states that this step computes: group, device block, number of tokens."""

_HELD_SHARE = 0.5
"""Share of the pool that may be held for stores at a time; other blocks are offered later."""
_MOST_PLANS = 64
"""Requests that may have a lookup in progress or a plan, whose blocks the tiers pin."""
_PATIENCE_S = 0.5
"""How long a request that needs blocks waits for stores to end, before one is preempted."""
_FEWEST_TOKENS = 64
"""Prefill of smaller steps is not measured: their overhead dominates."""
_MOST_LOADS = 3
"""Loads that are tried for a request. One that fails has removed the bad blocks from the tiers, so
the next ends at an earlier boundary."""
_OLD_WEIGHT = 0.8
"""Weight of the old average prefill speed when a new measurement is added."""


class BlockHold(Protocol):
    """Keeps blocks of vLLM's pool from being reused."""

    null_block: int
    """Stands in block tables where a request no longer has a block."""

    def hold(self, blocks: Sequence[int]) -> None:
        """These blocks are not reused until ``released``."""

    def released(self, blocks: Sequence[int]) -> None: ...


@define(eq=False)
class _Request:
    vllm: Any
    offered: list[int]
    """Blocks of each group that were offered to the tiers."""
    sent_tokens: int = 0
    """Tokens of its chain that were sent to the workers."""
    number: int | None = None
    """The number of its lookup, until the load that follows has ended; None without a lookup."""
    first: int = 0
    """The tokens that the device had at that lookup."""
    shared: int = 0
    """As of the workers' last answers."""
    answers: list[LookupResult] = field(factory=list)
    """One from each worker."""
    media: Sequence[str] = ()
    """The media of the blocks that are being loaded."""
    failed_loads: int = 0
    computing: bool = False
    """It has been scheduled: the tokens that vLLM counts as computed are in its blocks."""
    over: bool = False
    """Its lookup is finished. A preemption or a failed load resets this."""


@define
class _Held:
    blocks: Sequence[int]
    missing: int
    """Workers that have not reported the store."""
    since_s: float


class PrefillClock:
    """The speed of prefill as a moving average.

    When steps overlap, the time between two starts is the duration of the step ``lag`` earlier.
    """

    def __init__(self, lag: int = 0) -> None:
        self._steps: deque[int] = deque([0] * lag, maxlen=lag + 1)
        self._last_s: float | None = None
        self._last: frozenset[str] = frozenset()
        self.tokens_per_s: float | None = None
        """None before the first measurement."""

    def step(self, prefill_tokens: int, request_ids: Iterable[str], now_s: float) -> None:
        """A step starts; ``prefill_tokens`` of its tokens are prompt tokens.

        A step that shares no request with the previous one is not measured: the engine may have
        been idle between the two.
        """
        requests = frozenset(request_ids)
        if self._last_s is not None and self._steps and requests & self._last:
            tokens, seconds = self._steps[0], now_s - self._last_s
            if tokens >= _FEWEST_TOKENS and seconds > 0:
                speed, old = tokens / seconds, self.tokens_per_s
                weight = _OLD_WEIGHT
                self.tokens_per_s = speed if old is None else weight * old + (1 - weight) * speed
        self._steps.append(prefill_tokens)
        self._last_s, self._last = now_s, requests


class TierScheduler:
    """The scheduler's side. Called on the scheduler's thread only; never blocks."""

    def __init__(
        self, *, groups: Sequence[KvGroup], num_blocks: int, workers: int, lag: int
    ) -> None:
        """``lag``: how many steps overlap; see PrefillClock."""
        self._groups = tuple(groups)
        self._step = alignment(groups)
        self._counted = announced_group(groups)
        """The group by whose blocks the sources of a hit are counted."""
        self._most_held = max(1, int(num_blocks * _HELD_SHARE))
        self._workers = workers
        self._numbers = itertools.count(1)
        self._requests: dict[str, _Request] = {}
        self._looking_up: dict[int, _Request] = {}
        self._held: dict[int, _Held] = {}
        self._clock = PrefillClock(lag)
        self._next = ConnectorMetadata()
        self._has_report = False
        self._events: list[KvEvent] = kinds_of(groups)
        self.pool: BlockHold | None = None

    def arrived(self, request: Any) -> None:
        """A new request. Requests whose KV depends on more than tokens do not use the tiers."""
        more = (
            getattr(request, "mm_features", None),
            getattr(request, "prompt_embeds", None),
            getattr(request, "resumable", False),
        )
        if not any(some is not None and some is not False and some != [] for some in more):
            self._requests[request.request_id] = _Request(request, [0] * len(self._groups))

    def match(self, request: Any, computed_tokens: int) -> int | None:
        """How many tokens after the computed ones can be loaded; None: call again next step.

        Where the prompt parts from others without a state there, vLLM is told to keep one, as it
        does where it has these others itself.
        """
        state = self._requests.get(request.request_id)
        tokens = self._match(request, state, computed_tokens)
        if tokens is not None and state is not None and state.shared > computed_tokens + tokens:
            known = getattr(request, "shared_prefix_boundary", 0)
            request.shared_prefix_boundary = max(known, state.shared)
        return tokens

    def _match(self, request: Any, state: _Request | None, computed_tokens: int) -> int | None:
        first = computed_tokens // self._step * self._step
        limit = (request.num_tokens - 1) // self._step * self._step
        if state is None or state.over or limit <= first or _comes_from_another(request):
            return 0
        if state.number is None:
            if len(self._looking_up) < _MOST_PLANS:
                self._look_up(state, first, limit)
            return None
        if len(state.answers) < self._workers:
            return None
        boundaries = {answer.boundary for answer in state.answers}
        boundary = min(boundaries)
        state.shared = min(answer.shared for answer in state.answers)
        if boundary > state.first and first < state.first:
            self._drop(state)  # vLLM has evicted blocks that it had at the lookup
            return None
        if boundary <= max(first, state.first):
            self._drop(state)
            state.over = True
            return 0
        if len(boundaries) > 1:  # the last one of each worker need not be one of all
            asked = state.first
            self._drop(state)
            self._look_up(state, asked, boundary)
            return None
        return boundary - computed_tokens

    def allocated(self, request: Any, blocks: Blocks, external_tokens: int) -> None:
        """The request got ``blocks``; those of ``external_tokens`` tokens are to be loaded."""
        state = self._requests.get(request.request_id)
        if state is None or state.number is None or state.over:
            return  # vLLM calls this again after the load
        state.over = True
        if not external_tokens:
            self._drop(state)
            return
        answer = state.answers[0]
        first = answer.boundary - external_tokens
        chosen = tuple(
            tuple(table[max(group.first_needed(answer.boundary), first // group.block_size) : end])
            for group, table in zip(self._groups, blocks, strict=True)
            for end in (answer.boundary // group.block_size,)
        )
        del self._looking_up[state.number]
        state.media = answer.media
        if self._counted is not None:
            skipped = (first - state.first) // self._groups[self._counted].block_size
            state.media = answer.media[skipped:]
        self._next.loads.append(Load(state.number, request.request_id, chosen, first))

    def sources_of(self, request: Any, external_tokens: int) -> dict[str, int]:
        """How many of the tokens that are being loaded for a request come from each medium."""
        state = self._requests.get(request.request_id)
        media = () if state is None else state.media
        if not media:
            return {}
        if self._counted is None:
            return {media[-1]: external_tokens}
        size = self._groups[self._counted].block_size
        return {medium: blocks * size for medium, blocks in Counter(media).items()}

    def finished(self, request: Any, blocks: Blocks, now_s: float) -> None:
        """The request ended or was aborted. Its last full blocks are stored, too."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if state.computing:  # otherwise vLLM counts tokens as computed that are not loaded yet
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            self._store(state, computed, blocks, now_s)
        self._drop(state)
        del self._requests[request.request_id]
        self._next.forget.append(request.request_id)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """These requests lost their blocks; vLLM will call ``match`` for them again."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                self._drop(state)
                state.over = state.computing = False
                state.offered = [0] * len(self._groups)

    def orders(
        self,
        scheduled: Mapping[str, int],
        blocks_of: Callable[[str], Blocks],
        now_s: float,
        states: States = MappingProxyType({}),
    ) -> ConnectorMetadata:
        """The workers' orders for this step; ``scheduled`` maps requests to numbers of tokens."""
        prefill_tokens = 0
        for request_id, tokens in scheduled.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            state.computing = True
            computed = state.vllm.num_computed_tokens
            if computed < state.vllm.num_prompt_tokens:
                prefill_tokens += tokens
            self._store(state, computed + tokens, blocks_of(request_id), now_s)
        for request_id, computed_states in states.items():
            if (state := self._requests.get(request_id)) is not None:
                self._store_states(state, computed_states, now_s)
        self._clock.step(prefill_tokens, scheduled.keys(), now_s)
        orders, self._next = self._next, ConnectorMetadata()
        orders.computes = bool(scheduled)
        return orders

    def loaded(self, request_ids: Iterable[str], failed: Container[str] = ()) -> None:
        """The loads of these requests have ended on all workers.

        vLLM computes nothing of what a failed load brought, and calls ``match`` again.
        """
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                state.number = None
                if request_id in failed:
                    state.failed_loads += 1
                    state.over = state.failed_loads >= _MOST_LOADS

    def reported(self, report: WorkerReport) -> None:
        """The workers' report at the end of a step."""
        self._has_report = True
        for answer in report.answers:
            state = self._looking_up.get(answer.number)
            if state is not None:
                state.answers.append(answer)
        for number in report.stored:
            held = self._held[number]
            held.missing -= 1
            if not held.missing:
                del self._held[number]
                assert self.pool is not None
                self.pool.released(held.blocks)
        self._events += report.events

    def take_events(self) -> list[KvEvent]:
        """New KV events of the tiers, for the routers."""
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """All blocks in the tiers are to be evicted."""
        self._next.reset = True

    @property
    def busy(self) -> bool:
        """Whether vLLM must run steps even when no request needs any."""
        return bool(self._held) or self._next.is_urgent or not self._has_report

    def frees_blocks_soon(self, now_s: float) -> bool:
        """Whether to wait for blocks rather than preempt a request."""
        return any(now_s - held.since_s < _PATIENCE_S for held in self._held.values())

    def _extend_chain(self, state: _Request, tokens: int) -> None:
        """Send the workers the request's chain up to its first ``tokens`` tokens."""
        if tokens <= state.sent_tokens:
            return
        request, lora = state.vllm, state.vllm.lora_request
        self._next.chains.append(
            Chain(
                request_id=request.request_id,
                token_ids=tuple(request.all_token_ids[state.sent_tokens : tokens]),
                prompt_blocks=request.num_prompt_tokens // self._groups[0].block_size,
                lora=None if lora is None else (lora.lora_name, lora.lora_path),
                cache_salt=request.cache_salt,
            )
        )
        state.sent_tokens = tokens

    def _look_up(self, state: _Request, first: int, limit: int) -> None:
        self._extend_chain(state, limit)
        state.number = next(self._numbers)
        state.first = first
        state.answers = []
        self._looking_up[state.number] = state
        speed = self._clock.tokens_per_s
        self._next.lookups.append(
            LookupRequest(state.number, state.vllm.request_id, first, limit, speed)
        )

    def _drop(self, state: _Request) -> None:
        """Cancel the request's lookup; the workers cancel its plan or its load."""
        if state.number is None:
            return
        self._looking_up.pop(state.number, None)
        self._next.drops.append(state.number)
        state.number = None

    def _store(self, state: _Request, computed: int, blocks: Blocks, now_s: float) -> None:
        """Order the store of full blocks that are computed and hold no speculated token.

        Blocks that have left a window are gone from the table; states come by ``_store_states``.
        """
        if self.pool is None:
            return
        tokens = min(computed, state.vllm.num_tokens)
        for number, (group, table) in enumerate(zip(self._groups, blocks, strict=False)):
            if group.kind is KvKind.RECURRENT:
                continue
            first = state.offered[number]
            end = min(tokens // group.block_size, len(table), first + self._room())
            if end <= first:
                continue
            present = [n for n in range(first, end) if table[n] != self.pool.null_block]
            for _, run in groupby(enumerate(present), lambda pair: pair[1] - pair[0]):
                numbers = [block for _, block in run]
                chosen = tuple(table[n] for n in numbers)
                self._order_store(state, number, numbers[0], chosen, now_s)
            state.offered[number] = end

    def _store_states(
        self, state: _Request, computed: Sequence[tuple[int, int, int]], now_s: float
    ) -> None:
        """Order the store of states of recurrent groups, each at the end of a block."""
        for number, block, tokens in computed:
            size = self._groups[number].block_size
            if tokens % size or tokens > state.vllm.num_tokens or self._room() < 1:
                continue  # a state within a block serves only this server
            self._order_store(state, number, tokens // size - 1, (block,), now_s)

    def _order_store(
        self, state: _Request, group: int, first: int, blocks: tuple[int, ...], now_s: float
    ) -> None:
        if self.pool is None:
            return
        end = (first + len(blocks)) * self._groups[group].block_size
        self._extend_chain(state, end)
        number = next(self._numbers)
        self.pool.hold(blocks)
        self._held[number] = _Held(blocks, self._workers, now_s)
        request_id = state.vllm.request_id
        self._next.stores.append(Store(number, request_id, group, first, blocks))

    def _room(self) -> int:
        """Blocks that may be held in addition."""
        return max(0, self._most_held - sum(len(held.blocks) for held in self._held.values()))


def kinds_of(groups: Sequence[KvGroup]) -> list[KvEvent]:
    """Events that say of which kind each group is, as vLLM's own do not.

    Those with blocks of another size than the group that routers follow name others; nobody is
    told of them.
    """
    followed = announced_group(groups)
    if len(groups) == 1 or followed is None:
        return []
    size = groups[followed].block_size
    return [beside(group, n) for n, group in enumerate(groups) if group.block_size == size]


def _comes_from_another(request: Any) -> bool:
    """Whether the NixlConnector in the same server gets the prompt from a prefill server.

    It clears this mark when it starts, so that after a failed transfer the tiers are used.
    """
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
