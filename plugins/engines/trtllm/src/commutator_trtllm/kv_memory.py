"""A TensorRT-LLM worker's KV cache and its host memory, as blocks of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from commutator import Memory
from commutator.errors import ConfigError
from commutator_engine_kit.connector_worker import Fence, cuda_fence, no_fence
from commutator_engine_kit.kv import BlockArena

_WHERE = "TensorRT-LLM's KV cache"


def pool_region(pool: torch.Tensor) -> torch.Tensor:
    """The tensor of the first cache manager, as bytes: [blocks, bytes of a block].

    Raises ConfigError when a block is not contiguous.
    """
    if not pool.dim() or not pool.is_contiguous():
        problem = f"blocks are not contiguous: shape {tuple(pool.shape)}, strides {pool.stride()}"
        raise ConfigError([problem], _WHERE)
    return pool.view(pool.shape[0], -1).view(torch.uint8)


def layout_regions(layout: Any) -> list[torch.Tensor]:
    """The regions of the second cache manager, each [slots, bytes of a slot].

    Raises ConfigError when there is more than one kind of block, or a sliding window.
    """
    if len(layout.groups) != 1 or layout.groups[0].window_size is not None:
        windows = [group.window_size for group in layout.groups]
        problem = f"layers with attention windows are not supported: {windows}"
        raise ConfigError([problem], _WHERE)
    (group,) = layout.groups
    return [region.as_tensor() for region in (*group.regions, *group.replicated_regions)]


class EngineMemory:
    """Copies whole blocks. In host memory the regions of a block follow each other.

    Copies run on the engine's stream; the fence that they return tells when they end.
    """

    def __init__(self, regions: Sequence[torch.Tensor], host_bytes: int) -> None:
        """Raises ConfigError when ``host_bytes`` has no room for two blocks."""
        self._regions = list(regions)
        device = self._regions[0].device
        self._on_gpu = device.type == "cuda"
        self._make_fence = cuda_fence if self._on_gpu else no_fence
        self.blocks = min(region.shape[0] for region in self._regions)
        self.block_bytes = sum(region.shape[1] for region in self._regions)
        count = min(host_bytes // self.block_bytes, 2 * self.blocks)
        if count < 2:  # noqa: PLR2004 - one to load, one to store
            problem = (
                f"staging: {host_bytes} bytes have no room for two KV blocks of "
                f"{self.block_bytes} bytes; increase it"
            )
            raise ConfigError([problem], _WHERE)
        self._host = torch.empty(
            (count, self.block_bytes), dtype=torch.uint8, pin_memory=self._on_gpu
        )
        self.arena = BlockArena(
            memory=Memory.DRAM,
            address=self._host.data_ptr(),
            block_bytes=self.block_bytes,
            count=count,
        )

    @property
    def layout(self) -> str:
        """Describes the sizes of a block's pieces."""
        return f"regions of {[region.shape[1] for region in self._regions]} bytes"

    def to_host(self, device_blocks: Sequence[int], blocks: Sequence[int], stream: Any) -> Fence:
        with self._on(stream):
            for region, piece in self._pieces():
                for device_block, block in zip(device_blocks, blocks, strict=True):
                    self._host[block, piece].copy_(region[device_block], non_blocking=True)
            return self._make_fence()

    def from_host(self, blocks: Sequence[int], device_blocks: Sequence[int], stream: Any) -> Fence:
        with self._on(stream):
            for region, piece in self._pieces():
                for block, device_block in zip(blocks, device_blocks, strict=True):
                    region[device_block].copy_(self._host[block, piece], non_blocking=True)
            return self._make_fence()

    def _pieces(self) -> list[tuple[torch.Tensor, slice]]:
        pieces, start = [], 0
        for region in self._regions:
            pieces.append((region, slice(start, start + region.shape[1])))
            start += region.shape[1]
        return pieces

    def _on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if self._on_gpu else nullcontext()
