"""The `hbm` tier: a pool of slots in a device's memory, beside the engine's KV memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from attrs import Attribute, frozen

from commutator import Memory, Region, Size, Slot, SlotGeometry, Span, TierConfig, setting
from commutator.errors import TierError
from commutator_engine_kit.kv import BlockArena, OpenedSlots, SlotTier


def _known_device(_config: HbmConfig, attribute: Attribute[Any], value: str) -> None:
    kind, _, number = value.partition(":")
    if value != "cpu" and not (kind == "cuda" and (number.isdecimal() or value == "cuda")):
        raise ValueError(f'{attribute.name}: expected "cpu" or "cuda:NUMBER", got "{value}"')


def _given(_: HbmConfig, attribute: Attribute[Any], value: int | None) -> None:
    if value is None:
        raise ValueError(
            f"{attribute.name}: required: the size of a pool beside the engine's KV memory, which "
            "is above all tiers and needs no entry here. Set it, or remove the tier"
        )


@frozen(kw_only=True)
class HbmConfig(TierConfig):
    """Options of the `hbm` tier."""

    memory = Memory.DRAM

    capacity: Size | None = setting(
        "Required: memory for blocks, allocated at once, beside the engine's own.",
        None,
        validator=_given,
    )
    device: str = setting(
        "The device with the memory: cpu, cuda:0 and so on.", "cpu", validator=_known_device
    )


class HbmTier(SlotTier):
    """One arena, registered as one region. Blocks are lost when the process ends."""

    # Not "GPU", the engine's own memory, which may still have a block that is removed here.
    medium = "CPU_TIER1"
    memory = Memory.DRAM
    backend = "UCX"

    def __init__(self, config: HbmConfig) -> None:
        self._config = config
        self._arena: BlockArena | None = None
        self._memory: Any = None

    @property
    def arena(self) -> BlockArena:
        """The memory of the slots. Raises TierError while the tier is not open."""
        if self._arena is None:
            raise TierError("hbm: the tier is not open; call open() first")
        return self._arena

    def open_slots(self, geometry: SlotGeometry) -> OpenedSlots:
        count = geometry.slots_in(self._config.capacity or 0)
        self._arena, self._memory = _allocate(self._config.device, geometry.slot_bytes, count)
        self.memory = self._arena.memory
        return OpenedSlots(count)

    def close_slots(self) -> None:
        self._arena = self._memory = None

    def regions(self) -> Sequence[Region]:
        return [self.arena.region]

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        span = self.arena.span(slot)
        return Span(span.address, size_bytes, span.device), None


def _allocate(device: str, block_bytes: int, count: int) -> tuple[BlockArena, Any]:
    """Allocate ``count`` blocks on ``device``. Returns them, and the object that owns the memory.

    Raises TierError when there is no such device, or too little memory.
    """
    size_bytes = block_bytes * count
    if device == "cpu":
        try:
            memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise TierError(
                f"hbm: cannot allocate {size_bytes} bytes of host memory ({error}); lower capacity"
            ) from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        arena = BlockArena(
            memory=Memory.DRAM, address=address, block_bytes=block_bytes, count=count
        )
        return arena, memory
    try:
        torch = import_module("torch")
        tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except ImportError as error:
        raise TierError(f"hbm: device {device} needs torch: pip install torch") from error
    except (RuntimeError, AssertionError) as error:  # no such GPU, or too little memory
        reason = str(error).partition("\n")[0]
        raise TierError(f"hbm: cannot allocate {size_bytes} bytes on {device}: {reason}") from error
    arena = BlockArena(
        memory=Memory.VRAM,
        address=tensor.data_ptr(),
        block_bytes=block_bytes,
        count=count,
        device=tensor.device.index or 0,
    )
    return arena, tensor
