"""Takes the memory of the pool: from a GPU by torch, or from the host."""

from __future__ import annotations

import ctypes
import mmap
from importlib import import_module
from typing import Any

from commutator.errors import TierError
from commutator.kv import BlockArena
from commutator.transfer import Memory

__all__ = ["allocate"]

_CPU = "cpu"


def allocate(device: str, block_bytes: int, count: int) -> tuple[BlockArena, Any]:
    """Room for ``count`` blocks on ``device``, and the object that keeps it allocated.

    Raises TierError when there is no such device, or not so much memory.
    """
    size_bytes = block_bytes * count
    if device == _CPU:
        try:
            memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise TierError(
                f"hbm: {size_bytes} bytes of host memory cannot be had ({error}); lower capacity"
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
    except (RuntimeError, AssertionError) as error:  # torch's ways to say: no such GPU, no room
        reason = str(error).partition("\n")[0]
        raise TierError(f"hbm: {size_bytes} bytes on {device} cannot be had: {reason}") from error
    arena = BlockArena(
        memory=Memory.VRAM,
        address=tensor.data_ptr(),
        block_bytes=block_bytes,
        count=count,
        device=tensor.device.index or 0,
    )
    return arena, tensor
