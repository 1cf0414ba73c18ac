"""One NIXL agent: what it may touch, whom it knows, and what it has under way."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence

from commutator.errors import TransferError, TransferTimeoutError
from commutator.transfer.backends import create_backend
from commutator.transfer.block_lists import BlockList, BlockLists
from commutator.transfer.nixl_library import make_agent
from commutator.transfer.peers import Peers
from commutator.transfer.registrations import Registrations
from commutator.transfer.request import Request
from commutator.transfer.spans import Direction, Memory, Region, Span
from commutator.transfer.transfer import POLL_S, Transfer

__all__ = ["TransferAgent"]

_tokens = itertools.count(1)
_still_writing: list[object] = []
"""Agents that were closed with transfers under way: to destroy them would release those."""


class TransferAgent:
    """Moves bytes by NIXL. For one thread at a time; NIXL's own threads serve the peers that read.

    Messages about a backend's parameters never hold their values.
    """

    def __init__(self, name: str, backends: Mapping[str, Mapping[str, str]]) -> None:
        """Create the backends, each with its parameters.

        Raises TransferError when NIXL is not installed, when a backend is not there or does not
        load, and for a parameter that the backend does not know.
        """
        self.name = name
        """Unique among all agents that may know each other."""
        self._nixl = make_agent(name)
        for backend, parameters in backends.items():
            create_backend(self._nixl, backend, parameters)
        self.moved_bytes = 0
        """By NIXL's own telemetry, both directions; any thread may read it."""
        self._registrations = Registrations(self._nixl)
        self._lists = BlockLists(self._nixl)
        self._peers = Peers(self._nixl, self._is_busy)
        self._under_way: dict[int, Transfer] = {}
        self._reaped: list[int] = []

    def register(self, regions: Sequence[Region], backend: str) -> None:
        """Let a backend touch these. They must stay allocated or open until ``deregister``.

        All are registered or, when it raises TransferError, none.
        """
        self._registrations.add(regions, backend)

    def deregister(self, regions: Sequence[Region], backend: str) -> None:
        """The inverse of ``register``. Raises TransferError for what is not registered."""
        for region in regions:
            self._lists.remove_within(region.memory, region.span, self.name)
        self._registrations.remove(regions, backend)

    def prepare(
        self, memory: Memory, span: Span, block_bytes: int, backend: str, peer: str | None = None
    ) -> None:
        """Say that a registered region, ours or a peer's, will be moved in whole blocks.

        Transfers of such blocks then cost less to begin; nothing else changes.
        """
        self._lists.add(BlockList(memory, span, block_bytes, backend, peer or self.name))

    def metadata(self) -> bytes:
        """What a peer must be given to reach what is registered here now."""
        return self._peers.metadata()

    def add_peer(self, metadata: bytes) -> str:
        """Make a peer known, or refresh what is known of it, and return its name.

        Metadata that are known already cost nothing; new ones end what was prepared of that peer.
        Raises TransferError when they cannot be read, or while a transfer with that peer goes on.
        """
        if self._peers.knows(metadata):
            return self._peers.add(metadata)
        name = self._peers.add(metadata)
        self._lists.remove_owner(name)
        return name

    def remove_peer(self, name: str) -> None:
        """Disconnect. Raises TransferError while a transfer with the peer is under way."""
        self._peers.refuse_while_busy(name)
        self._lists.remove_owner(name)
        self._peers.remove(name)

    def start(
        self,
        direction: Direction,
        local: Sequence[Span],
        remote: Sequence[Span],
        *,
        local_memory: Memory,
        remote_memory: Memory,
        backend: str,
        own_regions: Sequence[Region] = (),
        peer: str | None = None,
    ) -> Transfer:
        """Begin to move spans, each to or from the one beside it, of the same size.

        ``own_regions`` are registered for this transfer alone. A failure that NIXL reports at once
        is raised by the transfer's ``done``, as any later one. Raises TransferError when NIXL does
        not accept the request: something is not registered, or sizes differ.
        """
        request = Request(
            direction=direction, local=local, remote=remote, local_memory=local_memory,
            remote_memory=remote_memory, backend=backend, own_regions=own_regions, peer=peer,
        )  # fmt: skip
        self._registrations.add(own_regions, backend)
        try:
            handle = request.make_handle(self._nixl, self.name, self._lists)
        except TransferError:
            self._registrations.remove(own_regions, backend)
            raise
        transfer = Transfer(next(_tokens), request, self._nixl, handle, self._end)
        # Kept here, since a handle that Python collects is released, whatever still moves.
        self._under_way[transfer.token] = transfer
        transfer.post()
        return transfer

    def reap(self) -> list[int]:
        """The tokens of transfers that were given up and that NIXL has let go of since."""
        for transfer in list(self._under_way.values()):
            if transfer.abandoned:
                with contextlib.suppress(TransferError):  # It ended, which is all that is asked.
                    transfer.done()
        reaped, self._reaped = self._reaped, []
        return reaped

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for what is under way, then let go of peers, lists and regions.

        Raises TransferTimeoutError when something is still under way: the memory, files and objects
        of it must then stay as they are until it was called again, and did not raise.
        """
        deadline_s = time.monotonic() + timeout_s
        for transfer in self._under_way.values():
            transfer.abandoned = True
        while self._under_way and time.monotonic() < deadline_s:
            self.reap()
            time.sleep(POLL_S)
        if self._under_way:
            if self not in _still_writing:
                _still_writing.append(self)
            raise TransferTimeoutError(
                f"agent {self.name}: {len(self._under_way)} transfers did not end within "
                f"{timeout_s} s; their memory stays pinned",
                next(iter(self._under_way)),
            )
        self._lists.remove_all()
        self._peers.remove_all()
        self._registrations.remove_all()
        if self in _still_writing:
            _still_writing.remove(self)

    def _is_busy(self, peer: str) -> bool:
        return any(transfer.request.peer == peer for transfer in self._under_way.values())

    def _end(self, transfer: Transfer) -> None:
        del self._under_way[transfer.token]
        self.moved_bytes += transfer.moved_bytes
        if transfer.abandoned:
            self._reaped.append(transfer.token)
        self._registrations.remove(transfer.request.own_regions, transfer.request.backend)
