"""The KV connector in a TensorRT-LLM worker: copies between the engine's blocks and host memory.

Copies are ordered on the engine's stream, before or after the forward pass. So tiers never access
the engine's memory, and a request may end, or lose its blocks, at any time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from commutator_engine_kit.connector_worker import FencedCalls, RequestChains
from commutator_engine_kit.kv import KvConnector
from commutator_trtllm.kv_memory import EngineMemory
from commutator_trtllm.kv_scheduler import ConnectorMetadata, Load
from commutator_trtllm.kv_staging import Claims, HostBlocks

_FOR_CLAIMS = 0.5
"""Share of the host memory that is reserved for claims; stores do not use it."""


class TierWorkerSide:
    """The worker's side. Called on the engine's thread: ``begin``, ``end`` and ``poll``."""

    def __init__(
        self, connector: KvConnector, device: EngineMemory, host: HostBlocks, claims: Claims
    ) -> None:
        self._connector = connector
        self._device = device
        self._host = host
        self._claims = claims
        self._chains = RequestChains(connector)
        self._waiting: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        """Positions and numbers of full device blocks that wait for room in host memory."""
        self._fenced = FencedCalls()

    def begin(self, orders: ConnectorMetadata, stream: Any) -> None:
        """Before the forward pass. A failed load raises, because its tokens count as computed."""
        for request_id in orders.forget:
            self._chains.forget(request_id)
            self._waiting.pop(request_id, None)
        for number in orders.drops:
            self._claims.drop(number)
        for load in orders.loads:
            self._load(load, stream)

    def end(self, orders: ConnectorMetadata, stream: Any) -> None:
        """After the forward pass was launched."""
        for chain in orders.chains:
            self._chains.grow(chain)
        for store in orders.stores:
            positions = range(store.first, store.first + len(store.device_blocks))
            self._waiting[store.request_id] += zip(positions, store.device_blocks, strict=True)
        for request_id, waiting in self._waiting.items():
            if waiting:
                self._store(request_id, waiting, stream)

    def poll(self) -> None:
        """Make the calls whose fences the device has passed."""
        self._fenced.poll()

    def _load(self, load: Load, stream: Any) -> None:
        staged = self._claims.take(load.number)
        fence = self._device.from_host(
            [staged[place] for place in load.places], load.device_blocks, stream
        )
        self._fenced.add(fence, partial(self._host.give, staged))

    def _store(self, request_id: int, waiting: deque[tuple[int, int]], stream: Any) -> None:
        """Copy and offload waiting blocks that have room; others wait until the request ends."""
        leave = int(self._host.count * _FOR_CLAIMS)
        blocks = self._host.take(len(waiting), leave=leave)
        if not blocks:
            return
        chosen = [waiting.popleft() for _ in blocks]
        fence = self._device.to_host([block for _, block in chosen], blocks, stream)
        descriptors = self._chains.descriptors(request_id, chosen[0][0], len(chosen))

        def store() -> None:
            stored = self._connector.stores.offload(descriptors, blocks)
            stored.add_done_callback(partial(self._returned, blocks))

        self._fenced.add(fence, store)

    def _returned(self, blocks: Sequence[int], done: Future[None]) -> None:
        if done.exception() is None:  # otherwise a tier may still read there
            self._host.give(blocks)
