"""What one transfer is to do, and how NIXL is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from commutator.transfer.block_lists import BlockLists
from commutator.transfer.nixl_library import nixl_errors
from commutator.transfer.spans import Direction, Memory, Region, Span

__all__ = ["Request"]


@frozen(kw_only=True)
class Request:
    """Spans to be moved, each to or from the one beside it."""

    direction: Direction
    local: Sequence[Span]
    remote: Sequence[Span]
    local_memory: Memory
    remote_memory: Memory
    backend: str
    own_regions: Sequence[Region] = ()
    peer: str | None = None

    def __str__(self) -> str:
        size_bytes = sum(span.size_bytes for span in self.local)
        where = f" of peer {self.peer}" if self.peer else ""
        return f"{self.direction} {size_bytes} B of {self.remote_memory}{where} by {self.backend}"

    def make_handle(self, nixl: Any, name: str, lists: BlockLists) -> Any:
        """NIXL's handle, by prepared lists where both sides have them.

        Raises TransferError when something is not registered, or sizes differ.
        """
        direction, backend, owner = str(self.direction), self.backend, self.peer or name
        with nixl_errors(self):
            ours = lists.select(self.local, self.local_memory, backend, name, local=True)
            if ours is not None:
                theirs = lists.select(self.remote, self.remote_memory, backend, owner, local=False)
                if theirs is not None:
                    return nixl.make_prepped_xfer(direction, *ours, *theirs, b"", [backend])
            local = nixl.get_xfer_descs(list(self.local), str(self.local_memory))
            remote = nixl.get_xfer_descs(list(self.remote), str(self.remote_memory))
            return nixl.initialize_xfer(direction, local, remote, owner, b"", [backend])
