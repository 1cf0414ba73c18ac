"""Slots are the blocks of the engine's own KV memory, under the engine's own numbers."""

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


@frozen(kw_only=True)
class HbmConfig(TierConfig):
    """Options of the `hbm` tier; with an engine, all of them are the engine's business."""

    capacity: Size | None = setting(
        "Memory that it takes when it stands alone; an engine hands over its own.", None
    )
    device: str = setting(
        "Where to take it: cpu, or cuda:0 and so on.", "cpu", validator=_known_device
    )


class HbmTier(SlotTier):
    """One arena, registered as one region. Nothing survives the process."""

    medium = "GPU"
    memory = Memory.DRAM
    backend = "UCX"

    def __init__(self, config: HbmConfig) -> None:
        self._config = config
        self._engine_arena: BlockArena | None = None
        self._arena: BlockArena | None = None
        self._memory: Any = None

    def use(self, arena: BlockArena) -> None:
        """Be the tier of an engine's memory, from the next ``open`` on; the engine owns it."""
        self._engine_arena = arena

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
        arena = self._engine_arena or self._own(geometry)
        if arena.block_bytes < geometry.slot_bytes:
            raise TierError(
                f"hbm: the engine's blocks of {arena.block_bytes} bytes cannot hold "
                f"{geometry.slot_bytes}; use this tier without compression and encryption"
            )
        self._arena, self.memory = arena, arena.memory
        return OpenedSlots(arena.count)

    def close_slots(self) -> None:
        self._arena = self._memory = None

    def regions(self) -> Sequence[Region]:
        return [self.arena.region]

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        span = self.arena.span(slot)
        return Span(span.address, size_bytes, span.device), None

    def _own(self, geometry: SlotGeometry) -> BlockArena:
        count = (self._config.capacity or 0) // geometry.slot_bytes
        if not count:
            raise TierError(
                "hbm: no engine handed over its memory; to use the tier alone, set capacity to at "
                f"least {geometry.slot_bytes} bytes"
            )
        arena, self._memory = allocate(self._config.device, geometry.slot_bytes, count)
        return arena
