"""The KV connector in TensorRT-LLM's scheduler: what to stage, load and keep. Pure.

TensorRT-LLM asks once for each request what can be loaded, and cannot be told later that a load
failed. So the blocks are brought into host memory and verified first, and only those are claimed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, field

from commutator_trtllm.kv_words import Chain, Keep, Load, Orders, Stage

__all__ = ["TierScheduler"]


@define
class _Claim:
    """Staged blocks that TensorRT-LLM counts on."""

    number: int
    first: int
    wanted: range
    """Positions in the chain of those that it has not cancelled."""


@define(eq=False)
class _Request:
    """All that is known of a request. Lists grow as TensorRT-LLM tells of more."""

    prompt_tokens: int
    cache_salt: str | None
    claim: _Claim | None = None
    matched_tokens: int = 0
    """What the claim was when it was made."""
    token_ids: list[int] = field(factory=list)
    blocks: list[int] = field(factory=list)
    told: int = 0
    """Blocks whose tokens the workers know."""
    kept: int = 0
    """The first block that may not be in the tiers, and that they were not told to keep."""


@define
class _Next:
    """What the next orders will say."""

    forget: list[int] = field(factory=list)
    drops: list[int] = field(factory=list)
    loads: list[Load] = field(factory=list)
    chains: list[Chain] = field(factory=list)
    keeps: list[Keep] = field(factory=list)


class TierScheduler:
    """Called on the scheduler's thread only."""

    def __init__(self, *, block_size: int, wait_s: float) -> None:
        """``wait_s``: how long a new request may wait for its blocks, and all others with it."""
        self._block_size = block_size
        self._wait_s = wait_s
        self._numbers = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._next = _Next()

    def arrived(
        self, request_id: int, token_ids: Sequence[int], computed: int, cache_salt: str | None
    ) -> Stage | None:
        """A new request, of which ``computed`` tokens are on the device; what to stage for it."""
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
        """All workers have so many blocks: how many tokens may be claimed."""
        if not blocks:
            self._next.drops.append(stage.number)  # one of them may have some
            return 0
        request = self._requests[request_id]
        request.claim = _Claim(stage.number, stage.first, range(stage.first, stage.first + blocks))
        request.matched_tokens = blocks * self._block_size
        request.kept = stage.first + blocks
        return request.matched_tokens

    def cancelled(self, request_id: int, start: int, end: int) -> None:
        """Tokens ``start`` to ``end`` of a claim will not be used.

        That is its beginning, which the device has by now, or its end, for which there is no room.
        A block of which any token may be used is loaded.
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
        """A request is over, or loses its blocks and will be asked for again."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.claim is not None:
            self._next.drops.append(request.claim.number)
        if request.told:
            self._next.forget.append(request_id)

    def orders(self, new: Iterable[Any], cached: Iterable[Any]) -> Orders:
        """What this step's workers are to do, from what is scheduled: TensorRT-LLM's RequestData.

        Requests that it never asked for, such as those that only warm it up, are left alone.
        """
        for data in new:
            if (request := self._requests.get(data.request_id)) is not None:
                self._begin(data, request)
                self._load(request)
        for data in cached:
            if (request := self._requests.get(data.request_id)) is not None:
                self._grow(data, request, data.computed_position + data.num_scheduled_tokens)
        told, self._next = self._next, _Next()
        return Orders(
            forget=tuple(told.forget),
            drops=tuple(told.drops),
            loads=tuple(told.loads),
            chains=tuple(told.chains),
            keeps=tuple(told.keeps),
        )

    def _begin(self, data: Any, request: _Request) -> None:
        if request.told:  # it is told from its beginning once more
            self._next.forget.append(data.request_id)
        request.token_ids, request.blocks, request.told = [], [], 0
        # With its second cache manager less than was claimed may be used, and is computed instead.
        loaded = 0 if data.new_block_ids_by_layer_group else request.matched_tokens
        request.kept = max(request.kept, data.computed_position // self._block_size)
        done = data.computed_position + loaded + data.num_scheduled_tokens
        self._grow(data, request, done)

    def _load(self, request: _Request) -> None:
        claim, request.claim = request.claim, None
        request.matched_tokens = 0
        if claim is None:
            return
        # What has no page yet is computed: pages come with the chunks of a prompt.
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
        chosen = tuple(itertools.takewhile(lambda at: at >= 0, request.blocks[request.kept : full]))
        if not chosen:
            return
        end = request.kept + len(chosen)
        self._tell(data.request_id, request, end)
        self._next.keeps.append(Keep(data.request_id, request.kept, chosen))
        request.kept = end

    def _tell(self, request_id: int, request: _Request, blocks: int) -> None:
        """Let the workers know the chain that far."""
        size = self._block_size
        more = tuple(request.token_ids[request.told * size : blocks * size])
        prompt_blocks = request.prompt_tokens // size
        self._next.chains.append(Chain(request_id, more, prompt_blocks, request.cache_salt))
        request.told = blocks
