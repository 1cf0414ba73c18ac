"""The other agents that one agent may read from and write to, known by their metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field

from commutator.errors import TransferError
from commutator.transfer.nixl_library import nixl_errors

__all__ = ["Peers"]


@define
class Peers:
    """Loads each peer's metadata once.

    NIXL answers at once when a peer is removed or replaced during a transfer, but the peer's bytes
    still arrive afterwards. So neither is done while anything moves to or from that peer.
    """

    _nixl: Any
    _is_busy: Callable[[str], bool]
    _by_metadata: dict[bytes, str] = field(factory=dict)

    def knows(self, metadata: bytes) -> bool:
        return metadata in self._by_metadata

    def metadata(self) -> bytes:
        """What another agent must be given before it can reach what is registered here."""
        with nixl_errors("export its metadata"):
            exported: bytes = self._nixl.get_agent_metadata()
        return exported

    def add(self, metadata: bytes) -> str:
        """Make a peer known, or refresh what is known of it, and return its name.

        Raises TransferError when the metadata cannot be read, or are news of a peer with which
        a transfer is under way.
        """
        known = self._by_metadata.get(metadata)
        if known is not None:
            return known
        # The name is in the metadata, but only NIXL can read where.
        for name in set(self._by_metadata.values()):
            if name.encode() in metadata:
                self.refuse_while_busy(name)
        with nixl_errors("read a peer's metadata (is it the same version of NIXL?)"):
            raw = self._nixl.add_remote_agent(metadata)
        name = raw.decode() if isinstance(raw, bytes) else str(raw)
        self._forget(name)
        self._by_metadata[metadata] = name
        return name

    def remove(self, name: str) -> None:
        """Forget a peer and disconnect. Raises TransferError while a transfer with it goes on."""
        self.refuse_while_busy(name)
        with nixl_errors(f"disconnect from {name}"):
            self._nixl.remove_remote_agent(name)
        self._forget(name)

    def remove_all(self) -> None:
        for name in set(self._by_metadata.values()):
            self.remove(name)

    def refuse_while_busy(self, name: str) -> None:
        if self._is_busy(name):
            raise TransferError(f"peer {name}: a transfer is under way; wait until it is reaped")

    def _forget(self, name: str) -> None:
        self._by_metadata = {m: n for m, n in self._by_metadata.items() if n != name}
