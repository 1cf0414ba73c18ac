"""One NIXL agent: its registered regions, the peers it knows, and its transfers under way."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from commutator.contract.tier import Memory, Region, Span
from commutator.errors import TransferError, TransferTimeoutError
from commutator_engine_kit.nixl.library import (
    create_backend,
    make_agent,
    make_gpu_current,
    nixl_errors,
)
from commutator_engine_kit.nixl.transfer import (
    POLL_S,
    BlockList,
    BlockLists,
    Request,
    Transfer,
    TransferPath,
)

__all__ = ["TransferAgent"]

_tokens = itertools.count(1)
_still_writing: list[object] = []
"""Agents closed with transfers under way, kept because destroying them would release those."""


class TransferAgent:
    """Moves bytes with NIXL. For one thread at a time; NIXL's own threads serve reading peers.

    Messages about a backend's parameters never contain their values.
    """

    def __init__(self, name: str, backends: Mapping[str, Mapping[str, str]]) -> None:
        """Create the backends, each with its parameters.

        Raises TransferError when NIXL is not installed, when a backend is missing or does not load,
        and for a parameter that the backend does not have.
        """
        self.name = name
        """Unique among all agents that may know each other."""
        self._nixl = make_agent(name)
        for backend, parameters in backends.items():
            create_backend(self._nixl, backend, parameters)
        self.moved_bytes = 0
        """Bytes moved in both directions, from NIXL's telemetry; any thread may read it."""
        self._registered: dict[tuple[str, Region], tuple[Any, int]] = {}
        """NIXL's list for a region of a backend, and its users, which NIXL does not count."""
        self._lists = BlockLists(self._nixl)
        self._peers: dict[bytes, str] = {}
        """Names of the peers that were added, by their metadata."""
        self._under_way: dict[int, Transfer] = {}
        self._reaped: list[int] = []

    def register(self, regions: Sequence[Region], backend: str) -> None:
        """Register regions with a backend. They must stay allocated or open until ``deregister``.

        If it raises TransferError, none of them is registered.
        """
        added: list[Region] = []
        try:
            for region in regions:
                self._register(region, backend)
                added.append(region)
        except TransferError:
            self._deregister(added, backend)
            raise

    def deregister(self, regions: Sequence[Region], backend: str) -> None:
        """The inverse of ``register``. Raises TransferError for a region not registered."""
        for region in regions:
            self._lists.remove_within(region.memory, region.span, self.name)
        self._deregister(regions, backend)

    def prepare(
        self, memory: Memory, span: Span, block_bytes: int, backend: str, peer: str | None = None
    ) -> None:
        """Declare that a registered region, ours or a peer's, is moved in whole blocks.

        Transfers of such blocks then cost less to begin; nothing else changes.
        """
        self._lists.add(BlockList(memory, span, block_bytes, backend, peer or self.name))

    def metadata(self) -> bytes:
        """The metadata with which a peer reaches the regions registered here now."""
        with nixl_errors("export its metadata"):
            exported: bytes = self._nixl.get_agent_metadata()
        return exported

    def add_peer(self, metadata: bytes) -> str:
        """Add a peer, or replace its metadata, and return its name.

        Known metadata cost nothing; new ones drop the lists prepared for that peer. Raises
        TransferError when the metadata cannot be read, or during a transfer with that peer.
        """
        known = self._peers.get(metadata)
        if known is not None:
            return known
        # The metadata contain the name, at a place that only NIXL knows.
        for name in set(self._peers.values()):
            if name.encode() in metadata:
                self._refuse_while_busy(name)
        for _, region in self._registered:
            if region.memory is Memory.VRAM:
                make_gpu_current(region.span.device)
                break
        with nixl_errors("read a peer's metadata (is it the same version of NIXL?)"):
            raw = self._nixl.add_remote_agent(metadata)
        name = raw.decode() if isinstance(raw, bytes) else str(raw)
        self._forget_peer(name)
        self._peers[metadata] = name
        self._lists.remove_owner(name)
        return name

    def remove_peer(self, name: str) -> None:
        """Disconnect from a peer. Raises TransferError while a transfer with it is under way."""
        self._refuse_while_busy(name)
        self._lists.remove_owner(name)
        with nixl_errors(f"disconnect from {name}"):
            self._nixl.remove_remote_agent(name)
        self._forget_peer(name)

    def start(
        self,
        path: TransferPath,
        local: Sequence[Span],
        remote: Sequence[Span],
        own_regions: Sequence[Region] = (),
    ) -> Transfer:
        """Begin to move spans, each to or from the one at the same position, of the same size.

        ``own_regions`` are registered for this transfer alone. A failure that NIXL reports at once
        is raised by the transfer's ``done``, like any later one. Raises TransferError when NIXL
        refuses the request: memory is not registered, or sizes differ.
        """
        request = Request(path, local, remote, own_regions)
        self.register(own_regions, path.backend)
        try:
            handle = request.make_handle(self._nixl, self.name, self._lists)
        except TransferError:
            self._deregister(own_regions, path.backend)
            raise
        transfer = Transfer(next(_tokens), request, self._nixl, handle, self._end)
        # Referenced here, because Python releases a collected handle even while bytes move.
        self._under_way[transfer.token] = transfer
        transfer.post()
        return transfer

    def reap(self) -> list[int]:
        """The tokens of abandoned transfers that have ended since the last call."""
        for transfer in list(self._under_way.values()):
            if transfer.abandoned:
                with contextlib.suppress(TransferError):  # its result does not matter
                    transfer.done()
        reaped, self._reaped = self._reaped, []
        return reaped

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for transfers under way, then drop peers, lists and regions.

        Raises TransferTimeoutError when a transfer is still under way: its memory, files and
        objects must then stay as they are until another call returns without an error.
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
        for name in set(self._peers.values()):
            self.remove_peer(name)
        while self._registered:
            (backend, region), (listed, _) = self._registered.popitem()
            with nixl_errors(f"deregister {region.memory} from {backend}"):
                self._nixl.deregister_memory(listed, [backend])
        if self in _still_writing:
            _still_writing.remove(self)

    def _is_busy(self, peer: str) -> bool:
        return any(transfer.request.path.peer == peer for transfer in self._under_way.values())

    def _refuse_while_busy(self, peer: str) -> None:
        """NIXL drops or replaces a peer at once, while bytes of a transfer may still arrive."""
        if self._is_busy(peer):
            raise TransferError(f"peer {peer}: a transfer is under way; wait until it is reaped")

    def _forget_peer(self, name: str) -> None:
        self._peers = {m: n for m, n in self._peers.items() if n != name}

    def _register(self, region: Region, backend: str) -> None:
        listed, users = self._registered.get((backend, region), (None, 0))
        if listed is None:
            span = region.span
            described = [(span.address, span.size_bytes, span.device, region.name)]
            with nixl_errors(f"register {span.size_bytes} B of {region.memory} with {backend}"):
                listed = self._nixl.register_memory(described, str(region.memory), [backend])
            if listed is None:
                raise TransferError(f"NIXL refused to register {region} with {backend}")
        self._registered[backend, region] = listed, users + 1

    def _deregister(self, regions: Sequence[Region], backend: str) -> None:
        """Raises TransferError for a region that is not registered."""
        for region in regions:
            if (backend, region) not in self._registered:
                raise TransferError(f"not registered with {backend}: {region}")
            listed, users = self._registered.pop((backend, region))
            if users > 1:
                self._registered[backend, region] = listed, users - 1
                continue
            with nixl_errors(f"deregister {region.memory} from {backend}"):
                self._nixl.deregister_memory(listed, [backend])

    def _end(self, transfer: Transfer) -> None:
        del self._under_way[transfer.token]
        self.moved_bytes += transfer.moved_bytes
        if transfer.abandoned:
            self._reaped.append(transfer.token)
        self._deregister(transfer.request.own_regions, transfer.request.path.backend)
