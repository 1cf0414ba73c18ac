"""The KV connector in a TensorRT-LLM worker: copies between the engine's blocks and host memory.

Copies are ordered on the engine's stream, before or after what it computes. So no tier ever touches
the engine's memory, and a request may end, or lose its blocks, at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from attrs import define, field

from commutator.engine import EmbeddedTiers
from commutator.kv import BlockKey
from commutator_trtllm.kv_claims import Claims, HostBlocks
from commutator_trtllm.kv_words import Chain, Load, Orders

__all__ = ["EngineBlocks", "Fence", "TierWorkerSide"]

_FOR_CLAIMS = 0.5
"""Share of the host memory that stores leave alone."""

Fence = Callable[[], bool]
"""Whether the device has done what was begun before the fence was made."""


class EngineBlocks(Protocol):
    """The engine's memory. Copies are begun on its stream; the fence tells that they are over."""

    def to_host(self, device_blocks: Sequence[int], blocks: Sequence[int], stream: Any) -> Fence:
        """Copy the engine's blocks."""

    def from_host(self, blocks: Sequence[int], device_blocks: Sequence[int], stream: Any) -> Fence:
        """Copy into the engine's blocks."""


@define(eq=False)
class _Chained:
    """A request's blocks as far as the scheduler has told of them."""

    prompt_blocks: int
    cache_salt: str | None
    keys: list[BlockKey] = field(factory=list)
    token_ids: list[int] = field(factory=list)
    waiting: deque[tuple[int, int]] = field(factory=deque)
    """Positions and device blocks that are full, for which there was no room."""


class TierWorkerSide:
    """Called on the engine's thread: ``begin`` and ``end`` of each step, and ``poll``."""

    def __init__(
        self, tiers: EmbeddedTiers, device: EngineBlocks, host: HostBlocks, claims: Claims
    ) -> None:
        self._tiers = tiers
        self._device = device
        self._host = host
        self._claims = claims
        self._chains: dict[int, _Chained] = {}
        self._behind: deque[tuple[Fence, Callable[[], None]]] = deque()
        """What is to be done once the device is past a fence."""

    def begin(self, orders: Orders, stream: Any) -> None:
        """Before the forward pass. A load that cannot be carried out raises: nothing may go on."""
        for request_id in orders.forget:
            self._chains.pop(request_id, None)
        for number in orders.drops:
            self._claims.drop(number)
        for load in orders.loads:
            self._load(load, stream)

    def end(self, orders: Orders, stream: Any) -> None:
        """After the forward pass was begun."""
        for chain in orders.chains:
            self._grow(chain)
        for keep in orders.keeps:
            positions = range(keep.first, keep.first + len(keep.device_blocks))
            self._chains[keep.request_id].waiting += zip(positions, keep.device_blocks, strict=True)
        for known in self._chains.values():
            if known.waiting:
                self._keep(known, stream)

    def poll(self) -> None:
        """Go on with what the device has done meanwhile."""
        while self._behind and self._behind[0][0]():
            self._behind.popleft()[1]()
        self._tiers.take_events()  # nobody here tells routers

    def _load(self, load: Load, stream: Any) -> None:
        staged = self._claims.take(load.number)
        fence = self._device.from_host(
            [staged[place] for place in load.places], load.device_blocks, stream
        )
        self._do_behind(fence, partial(self._host.give, staged))

    def _grow(self, chain: Chain) -> None:
        known = self._chains.setdefault(
            chain.request_id, _Chained(chain.prompt_blocks, chain.cache_salt)
        )
        known.token_ids += chain.token_ids
        known.keys = self._tiers.keys(
            known.token_ids, cache_salt=known.cache_salt, known=known.keys
        )

    def _keep(self, chain: _Chained, stream: Any) -> None:
        """Copy what there is room for; the rest stays where it is while the request does."""
        leave = int(self._host.count * _FOR_CLAIMS)
        blocks = self._host.take(len(chain.waiting), leave=leave)
        if not blocks:
            return
        chosen = [chain.waiting.popleft() for _ in blocks]
        fence = self._device.to_host([block for _, block in chosen], blocks, stream)
        first = chosen[0][0]
        offers = self._tiers.offers(
            chain.keys[: first + len(chosen)],
            chain.token_ids,
            first=first,
            prompt_blocks=chain.prompt_blocks,
            cache_salt=chain.cache_salt,
        )

        def store() -> None:
            self._tiers.store(offers, blocks).add_done_callback(partial(self._returned, blocks))

        self._do_behind(fence, store)

    def _returned(self, blocks: Sequence[int], done: Future[None]) -> None:
        if done.exception() is None:  # otherwise a tier may still read there
            self._host.give(blocks)

    def _do_behind(self, fence: Fence, call: Callable[[], None]) -> None:
        if not self._behind and fence():
            call()
        else:
            self._behind.append((fence, call))
