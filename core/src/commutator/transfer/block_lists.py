"""Lists of blocks that NIXL prepared once, so that a transfer names blocks by their index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field, frozen

from commutator.transfer.nixl_library import nixl_errors
from commutator.transfer.spans import Memory, Span

__all__ = ["BlockList", "BlockLists"]

_LOCAL_SIDE = "NIXL_INIT_AGENT"


@frozen
class BlockList:
    """Block ``i`` of a registered region begins ``i * block_bytes`` after the region's address."""

    memory: Memory
    span: Span
    block_bytes: int
    backend: str
    owner: str
    """The agent whose region it is."""

    def indices(self, spans: Sequence[Span]) -> list[int] | None:
        """Which blocks these are; None unless every span is one whole block, or several."""
        base, size, device = self.span.address, self.block_bytes, self.span.device
        count = self.span.size_bytes // size
        found: list[int] = []
        for span in spans:
            first, within = divmod(span.address - base, size)
            blocks, rest = divmod(span.size_bytes, size)
            if within or rest or not blocks or span.device != device:
                return None
            if first < 0 or first + blocks > count:
                return None
            found.extend(range(first, first + blocks))
        return found


@define
class BlockLists:
    """The lists of one agent. NIXL wants each prepared for the side on which it is used."""

    _nixl: Any
    _lists: list[BlockList] = field(factory=list)
    _handles: dict[tuple[BlockList, str], Any] = field(factory=dict)

    def add(self, blocks: BlockList) -> None:
        """Prepare whole blocks of a region when they are first moved."""
        if blocks not in self._lists:
            self._lists.append(blocks)

    def select(
        self, spans: Sequence[Span], memory: Memory, backend: str, owner: str, *, local: bool
    ) -> tuple[Any, list[int]] | None:
        """NIXL's handle of a list that has all these blocks, and their indices; None if none has.

        Raises TransferError when the list's region is not registered.
        """
        for blocks in self._lists:
            if (blocks.memory, blocks.backend, blocks.owner) != (memory, backend, owner):
                continue
            indices = blocks.indices(spans)
            if indices is not None:
                handle = self._handle(blocks, _LOCAL_SIDE if local else owner)
                return handle, indices
        return None

    def remove_owner(self, owner: str) -> None:
        """Forget the lists of one agent's regions."""
        self._remove([blocks for blocks in self._lists if blocks.owner == owner])

    def remove_within(self, memory: Memory, span: Span, owner: str) -> None:
        """Forget the lists that lie in a region."""
        end = span.address + span.size_bytes
        self._remove(
            [
                blocks
                for blocks in self._lists
                if (blocks.memory, blocks.owner) == (memory, owner)
                and blocks.span.device == span.device
                and span.address <= blocks.span.address < end
            ]
        )

    def remove_all(self) -> None:
        self._remove(list(self._lists))

    def _remove(self, gone: Sequence[BlockList]) -> None:
        for key in [key for key in self._handles if key[0] in gone]:
            with nixl_errors("release a prepared list"):
                self._handles.pop(key).release()
        self._lists = [blocks for blocks in self._lists if blocks not in gone]

    def _handle(self, blocks: BlockList, side: str) -> Any:
        if (blocks, side) not in self._handles:
            import numpy as np  # noqa: PLC0415  NIXL brings it along; core does not need it

            span, size = blocks.span, blocks.block_bytes
            strided = [[span.address, size, span.device, size, span.size_bytes // size]]
            with nixl_errors(f"prepare blocks of {blocks.memory} for {blocks.backend}"):
                self._handles[blocks, side] = self._nixl.prep_xfer_dlist(
                    side, np.array(strided, dtype=np.uint64), str(blocks.memory), [blocks.backend]
                )
        return self._handles[blocks, side]
