"""One NIXL agent: its registered regions, the peers it knows, and its transfers under way."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

from commutator.contract.tier import Direction, Memory, Region, Span
from commutator.errors import TransferError, TransferTimeoutError
from commutator_engine_kit.nixl.library import (
    create_backend,
    make_agent,
    make_gpu_current,
    nixl_errors,
)

log = logging.getLogger(__name__)

POLL_S = 100e-6
"""The pause between two checks of transfers: short beside a disk's time for a megabyte, and long
enough for other threads to run."""

_LONGEST_POLL_S = 1e-3
_CHECKS_PER_WAIT = 10


def poll_pause_s(waited_s: float) -> float:
    """The pause before the next check, ``waited_s`` after the last change.

    A tenth of the wait so far delays a result by a tenth at most. Checking an object store's slow
    transfers every 100 us would cost as much CPU as the transfers themselves.
    """
    return min(_LONGEST_POLL_S, max(POLL_S, waited_s / _CHECKS_PER_WAIT))


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
        """The blocks in these spans; None unless every span consists of whole blocks."""
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
    """The lists of one agent. NIXL prepares a list separately for each side of a transfer."""

    _nixl: Any
    _lists: list[BlockList] = field(factory=list)
    _handles: dict[tuple[BlockList, str], Any] = field(factory=dict)

    def add(self, blocks: BlockList) -> None:
        """Prepare this list once its blocks are first moved."""
        if blocks not in self._lists:
            self._lists.append(blocks)

    def select(
        self, spans: Sequence[Span], memory: Memory, backend: str, owner: str, *, local: bool
    ) -> tuple[Any, list[int]] | None:
        """The NIXL handle of a list with all these blocks, and their indices; None without such.

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
        """Forget the lists within a region."""
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
            import numpy as np

            span, size = blocks.span, blocks.block_bytes
            strided = [[span.address, size, span.device, size, span.size_bytes // size]]
            with nixl_errors(f"prepare blocks of {blocks.memory} for {blocks.backend}"):
                self._handles[blocks, side] = self._nixl.prep_xfer_dlist(
                    side, np.array(strided, dtype=np.uint64), str(blocks.memory), [blocks.backend]
                )
        return self._handles[blocks, side]


@frozen
class TransferPath:
    """Between which kinds of memory bytes move, which way, and by which backend of NIXL."""

    direction: Direction
    local_memory: Memory
    remote_memory: Memory
    backend: str
    peer: str | None = None
    """The agent whose memory the remote side is; None: this agent's own, or a medium."""


@frozen
class Request:
    """Spans to be moved, each to or from the one at the same position on the other side."""

    path: TransferPath
    local: Sequence[Span]
    remote: Sequence[Span]
    own_regions: Sequence[Region] = ()

    def __str__(self) -> str:
        path, size_bytes = self.path, sum(span.size_bytes for span in self.local)
        where = f" of peer {path.peer}" if path.peer else ""
        return f"{path.direction} {size_bytes} B of {path.remote_memory}{where} by {path.backend}"

    def make_handle(self, nixl: Any, name: str, lists: BlockLists) -> Any:
        """Make the NIXL handle, from prepared lists where both sides have them.

        Raises TransferError when memory is not registered, or sizes differ.
        """
        path = self.path
        direction, backend, owner = str(path.direction), path.backend, path.peer or name
        with nixl_errors(self):
            ours = lists.select(self.local, path.local_memory, backend, name, local=True)
            if ours is not None:
                theirs = lists.select(self.remote, path.remote_memory, backend, owner, local=False)
                if theirs is not None:
                    return nixl.make_prepped_xfer(direction, *ours, *theirs, b"", [backend])
            local = nixl.get_xfer_descs(list(self.local), str(path.local_memory))
            remote = nixl.get_xfer_descs(list(self.remote), str(path.remote_memory))
            return nixl.initialize_xfer(direction, local, remote, owner, b"", [backend])


@define(eq=False)
class Transfer:
    """Bytes under way. Both sides must stay as they are until it is done.

    A transfer is never released early: NIXL allows that while bytes still arrive, and a file read
    released so makes later reads on the same agent end too early. To give up on a transfer only
    means to wait for it elsewhere, in ``TransferAgent.reap``.
    """

    token: int
    """The transfer's number, unique within the process."""
    request: Request
    _nixl: Any = field(repr=False)
    _handle: Any = field(repr=False)
    _on_end: Callable[[Transfer], None] = field(repr=False)
    moved_bytes: int = 0
    """Bytes moved, from NIXL's telemetry; set on success if the telemetry has it."""
    abandoned: bool = False
    """The caller has given up; the memory stays pinned until ``TransferAgent.reap``."""
    _ended: bool = False
    _error: TransferError | None = None

    def done(self) -> bool:
        """Whether every byte has arrived. Never waits.

        Raises TransferError when it failed. The destination may then be partly overwritten, but
        nothing writes to it any more.
        """
        if not self._ended:
            self._check(lambda: self._nixl.check_xfer_state(self._handle))
        if self._error is not None:
            raise self._error
        return self._ended

    def wait(self, timeout_s: float) -> None:
        """Return when every byte has arrived.

        Raises TransferError when it failed, TransferTimeoutError after ``timeout_s``; then the
        memory stays pinned until ``TransferAgent.reap`` returns the token.
        """
        started_s = time.monotonic()
        while not self.done():
            waited_s = time.monotonic() - started_s
            if waited_s >= timeout_s:
                self.abandoned = True
                raise TransferTimeoutError(f"{self.request} took over {timeout_s} s", self.token)
            time.sleep(poll_pause_s(waited_s))

    def post(self) -> None:
        """Begin. Called once, by the agent."""
        self._check(lambda: self._nixl.transfer(self._handle))

    def _check(self, call: Callable[[], str]) -> None:
        try:
            with nixl_errors(self.request):
                state = call()
            if state == "PROC":
                return
            if state != "DONE":
                self._error = TransferError(f"NIXL could not {self.request}: {state}")
        except TransferError as error:
            self._error = error
        self._ended = True
        if self._error is None:
            self.moved_bytes = self._telemetry_bytes()
        try:
            with nixl_errors("release a transfer"):
                self._handle.release()
        finally:
            self._on_end(self)

    def _telemetry_bytes(self) -> int:
        try:
            return int(self._nixl.get_xfer_telemetry(self._handle).totalBytes)
        except Exception:
            # The bytes have arrived; only their count is too low.
            log.debug("NIXL cannot count the bytes that it moved", exc_info=True)
            return 0


_LOCAL_SIDE = "NIXL_INIT_AGENT"


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

    def _refuse_while_busy(self, peer: str) -> None:
        """NIXL drops or replaces a peer at once, while bytes of a transfer may still arrive."""
        if any(transfer.request.path.peer == peer for transfer in self._under_way.values()):
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
