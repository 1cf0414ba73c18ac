"""A pool of slots in a device's memory, beside the engine's own blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import Attribute, frozen

from commutator import TierConfig, setting
from commutator.errors import TierError
from commutator.kv import BlockArena, OpenedSlots, Slot, SlotGeometry, SlotTier
from commutator.schema import Size
from commutator.transfer import Memory, Region, Span
from commutator_hbm.memory import allocate

__all__ = ["HbmConfig", "HbmTier"]


def _known_device(config: HbmConfig, attribute: Attribute[Any], value: str) -> None:
    del config
    kind, _, number = value.partition(":")
    if value != "cpu" and not (kind == "cuda" and (number.isdecimal() or value == "cuda")):
        raise ValueError(f'{attribute.name}: expected "cpu" or "cuda:NUMBER", got "{value}"')


def _given(config: HbmConfig, attribute: Attribute[Any], value: int | None) -> None:
    del config
    if value is None:
        raise ValueError(
            f"{attribute.name}: required: this is a pool of its own. The engine's KV memory is the "
            "level above all tiers and needs no entry here: remove the tier, or say how large a "
            "pool to take beside it"
        )


@frozen(kw_only=True)
class HbmConfig(TierConfig):
    """Options of the `hbm` tier."""

    capacity: Size | None = setting(
        "Required: memory for blocks, taken at once, beside the engine's own.",
        None,
        validator=_given,
    )
    device: str = setting(
        "Where to take it: cpu, or cuda:0 and so on.", "cpu", validator=_known_device
    )


class HbmTier(SlotTier):
    """One arena, registered as one region. Nothing survives the process."""

    # Not "GPU", which is the engine's own memory: a block that leaves this may still be there.
    medium = "CPU_TIER1"
    memory = Memory.DRAM
    backend = "UCX"

    def __init__(self, config: HbmConfig) -> None:
        self._config = config
        self._arena: BlockArena | None = None
        self._memory: Any = None

    @property
    def backend_parameters(self) -> Mapping[str, str]:
        return {}

    @property
    def arena(self) -> BlockArena:
        """Where the slots lie. Raises TierError while the tier is not open."""
        if self._arena is None:
            raise TierError("hbm: the tier is not open; call open() first")
        return self._arena

    def open_slots(self, geometry: SlotGeometry) -> OpenedSlots:
        count = (self._config.capacity or 0) // geometry.slot_bytes
        if not count:
            raise TierError(f"hbm: capacity: set it to at least {geometry.slot_bytes} bytes")
        self._arena, self._memory = allocate(self._config.device, geometry.slot_bytes, count)
        self.memory = self._arena.memory
        return OpenedSlots(count)

    def close_slots(self) -> None:
        self._arena = self._memory = None

    def regions(self) -> Sequence[Region]:
        return [self.arena.region]

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        span = self.arena.span(slot)
        return Span(span.address, size_bytes, span.device), None
