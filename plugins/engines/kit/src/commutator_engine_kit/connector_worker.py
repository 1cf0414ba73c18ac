"""What KV connectors share that have a scheduler's side and workers' sides in other processes.

The scheduler's side sends the tokens of its requests' full blocks as they grow; a worker's side
keeps the chains, and reads or writes the engine's memory only after the device has passed a fence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from commutator.contract.block import BlockDescriptor, BlockKey
from commutator_engine_kit.kv.connector import KvConnector
from commutator_engine_kit.model_identity import AdapterDigests

__all__ = ["Chain", "Fence", "FencedCalls", "RequestChains", "cuda_fence", "no_fence"]

RequestId = str | int

Fence = Callable[[], bool]
"""Returns whether the device has finished all work that was started before the fence was made."""


def no_fence() -> Fence:
    """A fence that is always passed: on a CPU a step is computed when it returns."""
    return lambda: True


def cuda_fence() -> Fence:
    """A fence after all work launched on this thread's CUDA stream."""
    import torch

    event = torch.cuda.Event()
    event.record()
    done: Fence = event.query
    return done


@frozen(kw_only=True)
class Chain:
    """More tokens of a request, after those sent before. Holds plain values only."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    prompt_blocks: int
    """How many of the first group's blocks belong to the prompt."""
    lora: tuple[str, str] | None = None
    """Name and path."""
    cache_salt: str | None = None


@define(eq=False)
class _Request:
    """The chain of one request, so far."""

    begin: Chain
    keys: list[list[BlockKey]]
    """Of each group of the connector."""
    token_ids: list[int] = field(factory=list)


class RequestChains:
    """The full blocks of every request, as far as the scheduler has sent them."""

    def __init__(self, connector: KvConnector) -> None:
        self._connector = connector
        self._requests: dict[RequestId, _Request] = {}
        self._adapters = AdapterDigests()

    def grow(self, chain: Chain) -> None:
        if (request := self._requests.get(chain.request_id)) is None:
            nothing: list[list[BlockKey]] = [[] for _ in self._connector.groups]
            request = self._requests[chain.request_id] = _Request(chain, nothing)
        request.token_ids += chain.token_ids
        lora = request.begin.lora
        adapter = None if lora is None else self._adapters.of(*lora)
        request.keys = [
            self._connector.lookups.keys(
                request.token_ids,
                adapter=adapter,
                cache_salt=request.begin.cache_salt,
                known=known,
                group=group,
            )
            for group, known in enumerate(request.keys)
        ]

    def forget(self, request_id: RequestId) -> None:
        """The request has ended, or its chain will be sent again."""
        self._requests.pop(request_id, None)

    def keys(self, request_id: RequestId, group: int = 0) -> Sequence[BlockKey]:
        return self._requests[request_id].keys[group]

    def descriptors(
        self, request_id: RequestId, first: int, count: int, group: int = 0
    ) -> list[BlockDescriptor]:
        """``count`` blocks of a request from ``first`` on, for ``Stores.offload``."""
        request = self._requests[request_id]
        begin = request.begin
        return self._connector.stores.descriptors(
            request.keys[group][: first + count],
            request.token_ids,
            first=first,
            prompt_blocks=begin.prompt_blocks,
            adapter=None if begin.lora is None else begin.lora[0],
            cache_salt=begin.cache_salt,
            group=group,
        )


class FencedCalls:
    """Calls to make once the device has passed a fence, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Fence, Callable[[], None]]] = deque()

    def add(self, fence: Fence, call: Callable[[], None]) -> None:
        """Make the call now if nothing has to be waited for."""
        self._waiting.append((fence, call))
        self.poll()

    def poll(self) -> None:
        """Make the calls whose fences the device has passed."""
        while self._waiting and self._waiting[0][0]():
            self._waiting.popleft()[1]()

    def __len__(self) -> int:
        return len(self._waiting)
