"""The model in virtual time, for `commutator replay`; needs the extra `replay`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commutator.contract.block import CacheLevel
from commutator.contract.planner import EnginePerformance
from commutator_replay.virtual import (
    BlocksGone,
    BlocksHeld,
    BlocksPulled,
    BlocksReady,
    PrefillDone,
    RequestDone,
    TokensMade,
    VirtualEngine,
    VirtualEvent,
    VirtualRequest,
)
from commutator_sim.config import SimConfig
from commutator_sim.events import (
    DEVICE,
    Event,
    Finished,
    FirstToken,
    Offloaded,
    Pulled,
    Ready,
    Removed,
    Steps,
    Stored,
)
from commutator_sim.model import FOREVER, SimModel
from commutator_sim.request import SimRequest

_TIERS = {
    DEVICE: CacheLevel.DEVICE,
    "host": CacheLevel.HOST,
    "disk": CacheLevel.DISK,
    "object": CacheLevel.EXTERNAL,
}


class SimVirtualEngine(VirtualEngine):
    """One modelled worker; a trace's block hashes are the model's block keys."""

    def __init__(self, config: SimConfig) -> None:
        self._model = SimModel(config)

    @property
    def block_size(self) -> int:
        return self._model.parameters.block_size

    def submit(self, key: int, request: VirtualRequest) -> None:
        # The last token is always computed by the decode worker, so its block is not handed over.
        wanted = (request.prompt_tokens - 1) // self.block_size
        asked = SimRequest(
            wanted * self.block_size if request.exports and wanted else request.prompt_tokens,
            request.output_tokens,
            request.block_hashes,
            exports=request.exports,
            pulls=wanted if request.pulls else None,
        )
        self._model.submit(key, asked)

    def advance(self, until_ns: int | None) -> Sequence[VirtualEvent]:
        happened = self._model.advance(FOREVER if until_ns is None else until_ns)
        return [virtual for event in happened for virtual in _virtual_events(event)]

    @property
    def token_bytes(self) -> int:
        return self._model.parameters.kv_bytes_per_token

    @property
    def performance(self) -> EnginePerformance:
        return self._model.parameters.performance()

    def next_event_ns(self) -> int | None:
        return self._model.next_event_ns()

    def offer(self, key: int, blocks: int) -> None:
        self._model.offer(key, blocks)

    def release(self, key: int) -> None:
        self._model.release(key)


def virtual_engine(config: SimConfig) -> VirtualEngine:
    """A worker of this configuration, in virtual time."""
    return SimVirtualEngine(config)


def _virtual_events(event: Event) -> Iterator[VirtualEvent]:
    match event:
        case Steps() if event.decoding:
            yield TokensMade(event.step_ns, event.count * event.decoding)
        case FirstToken():
            yield PrefillDone(event.time_ns, event.key, event.cached_tokens)
        case Finished():
            yield RequestDone(event.time_ns, event.key)
        case Stored():
            yield BlocksHeld(CacheLevel.DEVICE, event.blocks)
        case Offloaded():
            yield BlocksHeld(_TIERS[event.tier], event.blocks)
        case Removed():
            yield BlocksGone(_TIERS[event.tier], event.blocks)
        case Ready():
            yield BlocksReady(event.key, event.blocks)
        case Pulled():
            yield BlocksPulled(event.key, event.blocks)
