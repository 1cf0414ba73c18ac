"""KV memory of models with several kinds of layers: pages of one size, which all groups share.

Layers of one kind form groups of equally many layers, so that a page of any group has the same
size; what one group frees another can use. A page holds the keys and values of a block's tokens in
the layers of one group, or the states of recurrent layers at the block's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from commutator import Memory, Span
from commutator_engine_kit.kv import BlockArena, KvGroup, KvKind, bytes_at
from commutator_reference.arena import zeros

_ALIGNMENT_BYTES = 64


@frozen
class LayerKv:
    """What one layer keeps."""

    kind: KvKind
    window: int
    """As ``KvGroup.window``."""
    numbers: tuple[int, ...]
    """Shape of what it keeps: of each token, heads and numbers in a head; or of a state."""

    @property
    def count(self) -> int:
        """Numbers of each token, or of a state."""
        count = 1
        for size in self.numbers:
            count *= size
        return count


@frozen
class PagePlan:
    """Which group a layer belongs to, and where in the group's pages its bytes are."""

    block_size: int
    groups: tuple[KvGroup, ...]
    page_bytes: int
    places: tuple[tuple[int, int], ...]
    """Of each layer: its group, and the offset of its bytes in a page."""
    layers: tuple[LayerKv, ...]
    """What was planned for."""


def plan_pages(layers: Sequence[LayerKv], block_size: int, number_bytes: int) -> PagePlan:
    """The pages for ``layers``, whose numbers take ``number_bytes`` bytes; states are float32.

    The block size is the least multiple of ``block_size`` with which the attention of a block's
    tokens takes as much room as a recurrent layer's state.
    """
    token_bytes = max(
        (each.count * number_bytes for each in layers if each.kind is not KvKind.RECURRENT),
        default=0,
    )
    state_bytes = max(
        (4 * each.count for each in layers if each.kind is KvKind.RECURRENT), default=0
    )
    if token_bytes:
        least = -(-state_bytes // token_bytes)
        block_size = max(block_size, -(-least // block_size) * block_size)
    slot_bytes = max(block_size * token_bytes, state_bytes)
    slot_bytes = -(-slot_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    kinds: dict[LayerKv, list[int]] = {}
    for number, each in enumerate(layers):
        kinds.setdefault(each, []).append(number)
    counts = [len(numbers) for numbers in kinds.values()]
    # Nearly as many of each kind: padding the shorter wastes less than splitting the longer.
    together = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups: list[KvGroup] = []
    places: dict[int, tuple[int, int]] = {}
    for each, numbers in kinds.items():
        for first in range(0, len(numbers), together):
            members = numbers[first : first + together]
            for slot, number in enumerate(members):
                places[number] = len(groups), slot * slot_bytes
            groups.append(
                KvGroup(
                    kind=each.kind,
                    block_size=block_size,
                    window=each.window,
                    layers=tuple(map(str, members)),
                    block_bytes=together * slot_bytes,
                    layout=f"reference-2: {each.numbers} in {slot_bytes} of {together}",
                )
            )
    return PagePlan(
        block_size,
        tuple(groups),
        together * slot_bytes,
        tuple(places[number] for number in range(len(layers))),
        tuple(layers),
    )


class PageArena:
    """The pages' memory. ``tensor`` [pages, bytes of a page], uint8."""

    def __init__(
        self, plan: PagePlan, num_blocks: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.plan = plan
        self.num_blocks = num_blocks
        self.block_size = plan.block_size
        self.dtype = dtype
        self.tensor = zeros((num_blocks, plan.page_bytes), device, torch.uint8)

    def layer(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of the layer's part of all pages: [pages, *shape]."""
        _, offset = self.plan.places[number]
        count = 1
        for size in shape:
            count *= size
        part = self.tensor[:, offset : offset + count * dtype.itemsize]
        view: Tensor = part.view(dtype).unflatten(1, shape)
        return view

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The model's kinds of KV."""
        return self.plan.groups

    @property
    def layout(self) -> str:
        """What all blocks have in common, for ``CacheIdentity``; each group adds its own."""
        kinds = ", ".join(f"{group.kind} {group.identity}" for group in self.groups)
        return f"reference-2: {self.block_size} tokens; {kinds}"

    @property
    def handover_layout(self) -> str:
        """What another worker's pages must have in common with these, beside the block size."""
        kinds = Counter((each.kind, each.window, each.numbers) for each in self.plan.layers)
        return ", ".join(
            f"{count} {kind}{f' of {window} tokens' if window else ''} {numbers}"
            for (kind, window, numbers), count in kinds.items()
        )

    @property
    def token_bytes(self) -> int:
        """What one more token of a long prompt adds: of the groups that keep the whole prefix."""
        kept = sum(group.keeps_prefix for group in self.groups)
        return kept * self.plan.page_bytes // self.block_size

    @property
    def block_arena(self) -> BlockArena:
        """The same memory, described for storage tiers."""
        return BlockArena(
            memory=Memory.DRAM if self.tensor.device.type == "cpu" else Memory.VRAM,
            address=self.tensor.data_ptr(),
            block_bytes=self.plan.page_bytes,
            count=self.num_blocks,
            device=self.tensor.device.index or 0,
        )

    def settle(self) -> None:
        """As ``KVArena.settle``."""
        if self.tensor.device.type != "cpu":
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def host_bytes(self, span: Span) -> memoryview:
        """As ``KVArena.host_bytes``."""
        if self.tensor.device.type == "cpu":
            return bytes_at(span)
        first = span.address - self.tensor.data_ptr()
        copied = self.tensor.view(-1)[first : first + span.size_bytes].to("cpu", copy=True)
        return copied.numpy().data
