"""The KV cache's memory: one tensor, cut into blocks."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from commutator import Memory, Span
from commutator.errors import ConfigError
from commutator_engine_kit.kv import BlockArena, KvGroup, bytes_at, whole
from commutator_reference.llama import LlamaConfig


class KVArena:
    """``tensor`` [blocks, layers, 2 (key, value), KV heads, block size, head size].

    Block-major, so that one block is one contiguous range of bytes; and within a block each head's
    tokens are contiguous, so that reading a sequence copies whole runs of them.
    """

    def __init__(
        self,
        config: LlamaConfig,
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_size = config.head_size
        sides = (num_blocks, config.num_layers, 2)
        shape = (*sides, config.num_kv_heads, block_size, config.head_size)
        self.tensor = zeros(shape, device, dtype)
        self._runs = self.tensor.view(-1, block_size * config.head_size)
        self._layers = [self.tensor[:, layer].flatten(1, 2) for layer in range(config.num_layers)]
        self._bytes = self.tensor.view(-1).view(torch.uint8)
        self.settle()

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """One: all layers read every token."""
        return whole(self.block_size, self.tensor[0].nbytes)

    @property
    def layout(self) -> str:
        """Order and sizes of a block's dimensions, for ``CacheIdentity``."""
        return (
            f"reference-1: {self.num_layers} layers, key and value, "
            f"{self.num_kv_heads} heads, {self.block_size} tokens, {self.head_size}"
        )

    @property
    def block_arena(self) -> BlockArena:
        """The same memory, described for storage tiers."""
        return BlockArena(
            memory=Memory.DRAM if self.tensor.device.type == "cpu" else Memory.VRAM,
            address=self.tensor.data_ptr(),
            block_bytes=self.tensor[0].nbytes,
            count=self.num_blocks,
            device=self.tensor.device.index or 0,
        )

    def settle(self) -> None:
        """Wait until all that was written is in memory: a GPU computes after a call has returned.

        Before others read blocks: NIXL knows nothing of PyTorch's streams.
        """
        if self.tensor.device.type != "cpu":
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def host_bytes(self, span: Span) -> memoryview:
        """The bytes of a span of this memory: in place on a CPU, a copy of a GPU's."""
        if self.tensor.device.type == "cpu":
            return bytes_at(span)
        return self.copied_bytes(span)

    def copied_bytes(self, span: Span) -> memoryview:
        """The same, copied by PyTorch from whatever device it is on."""
        first = span.address - self.tensor.data_ptr()
        copied = self._bytes[first : first + span.size_bytes].to("cpu", copy=True)
        return copied.numpy().data

    @property
    def runs(self) -> int:
        """Contiguous pieces of a block; each contains a part of all its tokens, in order."""
        return self.num_layers * 2 * self.num_kv_heads

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, keys_values: Tensor) -> None:
        """Store ``keys_values`` [tokens, 2 * KV heads, head size] at (block, offset) each."""
        self._layers[layer][blocks, :, offsets] = keys_values

    def run_index(self, block_tables: Tensor) -> Tensor:
        """Positions of the sequences of ``block_tables`` [sequences, blocks], by layer.

        [layers, 2 * sequences * KV heads * blocks]; made once a step, on the tables' device.
        """
        heads = self.num_kv_heads
        device = block_tables.device
        sides = torch.arange(self.num_layers * 2, device=device).view(self.num_layers, 2, 1, 1, 1)
        head = torch.arange(heads, device=device).view(1, 1, 1, heads, 1)
        starts = block_tables[None, None, :, None, :] * (self.num_layers * 2 * heads)
        return (starts + sides * heads + head).flatten(1)

    def read(self, run_index: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Copies of keys and values, each [sequences, KV heads, blocks * block size, head size].

        ``run_index`` is one layer's row of what the method of that name returned.
        """
        runs = self._runs.index_select(0, run_index)
        shape = (2, num_sequences, self.num_kv_heads, -1, self.head_size)
        keys, values = runs.view(shape).unbind(0)
        return keys, values


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros, because what attention masks out must still be finite."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # Memory straight from the system: page-aligned, and each page is supplied when first used.
    size_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size_bytes)
    except (OSError, OverflowError) as error:
        problem = f"kv_cache_bytes: the system refuses {size_bytes} bytes of memory ({error})"
        raise ConfigError([f"{problem}; lower it"], "reference engine") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)
