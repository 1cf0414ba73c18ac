"""The KV connector in TensorRT-LLM's scheduler: decides what to stage, load and store. Pure.

TensorRT-LLM asks once for each request how many tokens can be loaded, and a load cannot fail later.
So blocks are first staged in host memory and verified, and only staged blocks are claimed. The
orders for the workers are pickled between ranks, so they hold plain values only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, field, frozen

from commutator_engine_kit.connector_worker import Chain
from commutator_trtllm.kv_staging import Stage


@frozen
class Load:
    """Copy staged blocks into the engine's; staged blocks that are not listed are freed."""

    number: int
    places: tuple[int, ...]
    """Indices of the staged blocks to copy, counted from the first."""
    device_blocks: tuple[int, ...]


@frozen
class Store:
    """Store the next blocks of a request, which are full once this step has been computed."""

    request_id: int
    first: int
    device_blocks: tuple[int, ...]


@define(kw_only=True)
class ConnectorMetadata:
    """Orders from the scheduler to every worker, to be carried out in the order of the fields."""

    forget: list[int] = field(factory=list)
    """Requests that have ended or restarted: other requests may get their blocks in this step."""
    drops: list[int] = field(factory=list)
    """Claims whose staged blocks are no longer needed."""
    loads: list[Load] = field(factory=list)
    chains: list[Chain] = field(factory=list)
    stores: list[Store] = field(factory=list)


@define
class _Claim:
    """Staged blocks that were promised to TensorRT-LLM."""

    number: int
    first: int
    wanted: range
    """Positions in the chain of the blocks that it has not cancelled."""


@define(eq=False)
class _Request:
    """The state of one request. Its lists grow with each step."""

    prompt_tokens: int
    cache_salt: str | None
    claim: _Claim | None = None
    matched_tokens: int = 0
    """Tokens of the claim when it was made."""
    token_ids: list[int] = field(factory=list)
    blocks: list[int] = field(factory=list)
    sent_blocks: int = 0
    """Blocks of its chain that were sent to the workers."""
    stored: int = 0
    """The first block that was neither in the tiers nor ordered to be stored."""


class TierScheduler:
    """The scheduler's side. Called on the scheduler's thread only."""

    def __init__(self, *, block_size: int, wait_s: float) -> None:
        """``wait_s``: how long a new request may wait for its blocks, and all others with it."""
        self._block_size = block_size
        self._wait_s = wait_s
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._next = ConnectorMetadata()

    def arrived(
        self, request_id: int, token_ids: Sequence[int], computed: int, cache_salt: str | None
    ) -> Stage | None:
        """A new request with ``computed`` tokens on the device; returns what to stage for it."""
        self.ended(request_id)
        self._requests[request_id] = _Request(len(token_ids), cache_salt)
        first, part = divmod(computed, self._block_size)
        wanted = (len(token_ids) - 1) // self._block_size  # the last token is always computed
        if part or wanted <= first:
            return None
        return Stage(
            next(self._numbers),
            tuple(token_ids[: wanted * self._block_size]),
            cache_salt,
            first,
            self._wait_s,
        )

    def staged(self, request_id: int, stage: Stage, blocks: int) -> int:
        """All workers have staged ``blocks`` blocks; returns how many tokens are claimed."""
        if not blocks:
            self._next.drops.append(stage.number)  # some workers may have staged blocks
            return 0
        request = self._requests[request_id]
        request.claim = _Claim(stage.number, stage.first, range(stage.first, stage.first + blocks))
        request.matched_tokens = blocks * self._block_size
        request.stored = stage.first + blocks
        return request.matched_tokens

    def cancelled(self, request_id: int, start: int, end: int) -> None:
        """Tokens ``start`` to ``end`` of a claim will not be used.

        They are its beginning, which is on the device by now, or its end, which has no room. A
        block is loaded if any of its tokens may be used.
        """
        request = self._requests.get(request_id)
        if request is None or request.claim is None:
            return
        wanted = request.claim.wanted
        low, high = -(-start // self._block_size), end // self._block_size
        if low <= wanted.start < high:
            request.claim.wanted = range(min(high, wanted.stop), wanted.stop)
        elif wanted.start < low < wanted.stop <= high:
            request.claim.wanted = range(wanted.start, low)

    def ended(self, request_id: int) -> None:
        """A request has ended, or lost its blocks and will arrive again."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.claim is not None:
            self._next.drops.append(request.claim.number)
        if request.sent_blocks:
            self._next.forget.append(request_id)

    def orders(self, new: Iterable[Any], cached: Iterable[Any]) -> ConnectorMetadata:
        """The workers' orders for this step, from the RequestData of its scheduled requests.

        Requests that did not arrive before, such as warm-up requests, are ignored.
        """
        for data in new:
            if (request := self._requests.get(data.request_id)) is not None:
                self._begin(data, request)
                self._load(request)
        for data in cached:
            if (request := self._requests.get(data.request_id)) is not None:
                self._grow(data, request, data.computed_position + data.num_scheduled_tokens)
        orders, self._next = self._next, ConnectorMetadata()
        return orders

    def _begin(self, data: Any, request: _Request) -> None:
        if request.sent_blocks:  # its chain is sent from the beginning again
            self._next.forget.append(data.request_id)
        request.token_ids, request.blocks, request.sent_blocks = [], [], 0
        # The second cache manager may use less than was claimed, and computes the rest.
        loaded = 0 if data.new_block_ids_by_layer_group else request.matched_tokens
        request.stored = max(request.stored, data.computed_position // self._block_size)
        done = data.computed_position + loaded + data.num_scheduled_tokens
        self._grow(data, request, done)

    def _load(self, request: _Request) -> None:
        claim, request.claim = request.claim, None
        request.matched_tokens = 0
        if claim is None:
            return
        # Blocks without a page are computed: pages are allocated with the chunks of a prompt.
        chosen = [
            (position - claim.first, block)
            for position, block in enumerate(request.blocks)
            if position in claim.wanted and block >= 0
        ]
        places, blocks = zip(*chosen, strict=True) if chosen else ((), ())
        self._next.loads.append(Load(claim.number, places, blocks))

    def _grow(self, data: Any, request: _Request, done: int) -> None:
        """More tokens and pages; after this step the first ``done`` tokens have been computed."""
        request.token_ids += data.new_tokens
        request.blocks += data.new_block_ids
        full = min(min(done, len(request.token_ids)) // self._block_size, len(request.blocks))
        chosen = tuple(itertools.takewhile(lambda b: b >= 0, request.blocks[request.stored : full]))
        if not chosen:
            return
        end = request.stored + len(chosen)
        self._extend_chain(data.request_id, request, end)
        self._next.stores.append(Store(data.request_id, request.stored, chosen))
        request.stored = end

    def _extend_chain(self, request_id: int, request: _Request, blocks: int) -> None:
        """Send the workers the request's chain up to its first ``blocks`` blocks."""
        size = self._block_size
        more = tuple(request.token_ids[request.sent_blocks * size : blocks * size])
        prompt_blocks = request.prompt_tokens // size
        chain = Chain(
            request_id=request_id,
            token_ids=more,
            prompt_blocks=prompt_blocks,
            cache_salt=request.cache_salt,
        )
        self._next.chains.append(chain)
        request.sent_blocks = blocks
