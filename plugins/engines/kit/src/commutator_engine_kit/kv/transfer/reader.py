"""Reads blocks from other workers' arenas with NIXL, and verifies each of them."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import xxhash
from attrs import define, field, frozen

from commutator.contract.tier import Direction, Memory, Span
from commutator.errors import CommutatorError, TransferError, TransferTimeoutError
from commutator_engine_kit.kv.arena import BlockArena, bytes_at, checksum
from commutator_engine_kit.kv.transfer.protocol import BlockShapes, ExportedMemory, ReadyBlock
from commutator_engine_kit.nixl.agent import TransferAgent, TransferPath, poll_pause_s
from commutator_engine_kit.nixl.moves import (
    BlockMove,
    BlockMoves,
    MoveLimits,
    lane_names,
    lanes_worth,
    shares,
    when_whole,
)

log = logging.getLogger(__name__)

_BACKEND = "UCX"
_BATCH_BYTES = 4 << 20
"""A batch is verified when it has arrived, partly still in the CPU's caches, while the next one
moves."""
_REAP_S = 0.02
"""Pause between two checks of reads that were given up."""
_never_freed: list[object] = []
"""Lanes whose arenas NIXL may still write to. They are kept until the process ends."""

PromptBlock = tuple[int, ReadyBlock]
"""A block, and its index in the prompt in the source's block size."""


@frozen
class ReadPlan:
    """The moves of one fetch."""

    moves: list[BlockMove] = field(factory=list)
    owners: list[int] = field(factory=list)
    """For each move, the number of its block."""
    pieces: list[list[Span]] = field(factory=list)
    """For each block, its pieces in our memory, in their order in the source's block."""


@define(eq=False)
class ReadTarget:
    """Our blocks, into which a prompt's blocks are read. For use in one event loop."""

    first_token: int
    """Position in the prompt at which the first block begins; a source block begins there, too."""
    end_token: int
    """Position in the prompt at which the last block ends."""
    blocks: Sequence[int]
    positions: Sequence[int] | None = None
    """Of a model with groups: which of the published blocks is read into each of ``blocks``, in
    ascending order. They are of the source's size, and of use only together."""
    on_released: Callable[[], None] = lambda: None
    """Called whenever the last read into the blocks has ended."""
    under_way: int = 0
    """Reads that may write to the blocks."""

    def begin(self) -> None:
        """Count a read that may write to the blocks."""
        self.under_way += 1

    def end(self) -> None:
        """Undo one ``begin``."""
        self.under_way -= 1
        if not self.under_way:
            self.on_released()


class BlockMover(Protocol):
    """Reads blocks for a ``Puller``: ``BlockReader``, or a simulation of it."""

    async def fetch(
        self,
        source: ExportedMemory,
        blocks: Sequence[PromptBlock],
        target: ReadTarget,
        timeout_s: float,
    ) -> list[str | None]:
        """Read these blocks and verify each. Returns None for each, or why it was not read.

        Several calls may run at a time. A cancelled call gives up its reads. ``target.begin`` is
        called before the first write to the target, and ``target.end`` after the last one.
        """
        ...

    @property
    def nixl_bytes(self) -> int:
        """Bytes moved, from NIXL's telemetry; any thread may read it."""
        ...

    def forget(self, source: ExportedMemory) -> None:
        """Disconnect from a process that has ended."""


@define(eq=False)
class _Fetch:
    source: ExportedMemory
    blocks: Sequence[PromptBlock]
    shapes: BlockShapes
    target: ReadTarget
    deadline_s: float
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[list[str | None]]
    cancelled: bool = False
    moving: BlockMoves | None = None
    plan: ReadPlan = field(factory=ReadPlan)
    outcomes: list[str | None] = field(factory=list)


class BlockReader:
    """Reads with UCX into an arena, and exports the arena's metadata.

    Threads and agents are made when they are first needed, as some workers transfer no KV. Blocks
    are read in lanes (see ``lane_names``): one lane's blocks move while another one's are verified.
    """

    def __init__(
        self,
        arena: BlockArena,
        *,
        block_tokens: int,
        runs: int,
        agent_name: str,
        parameters: Mapping[str, str] | None = None,
        host_bytes: Callable[[Span], memoryview] | None = None,
    ) -> None:
        """``agent_name`` must be unique among all processes that exchange blocks.

        ``parameters`` are for NIXL's backend UCX. ``host_bytes`` returns the bytes of a span of the
        arena, to verify what was read; without it the arena is in host memory. Lanes call it from
        their threads.
        """
        if host_bytes is None and arena.memory is not Memory.DRAM:
            raise ValueError(f"blocks in {arena.memory} can be verified with host_bytes only")
        self._block_tokens = block_tokens
        self._runs = runs
        self._lanes = [
            _Lane(
                arena,
                agent_name=name,
                parameters=dict(parameters or {}),
                host_bytes=host_bytes or bytes_at,
            )
            for name in lane_names(agent_name)
        ]
        self._next = 0

    def metadata(self) -> bytes:
        """The metadata with which another agent reads the arena. Waits; raises TransferError."""
        return self._lanes[0].metadata()

    async def fetch(
        self,
        source: ExportedMemory,
        blocks: Sequence[PromptBlock],
        target: ReadTarget,
        timeout_s: float,
    ) -> list[str | None]:
        info = source.info
        shapes = BlockShapes(info.block_size, self._block_tokens, info.token_bytes, self._runs)
        size_bytes = len(blocks) * source.block_bytes
        fetches = []
        for part in shares(len(blocks), lanes_worth(len(blocks), size_bytes, len(self._lanes))):
            lane = self._lanes[self._next % len(self._lanes)]
            self._next += 1
            mine = blocks[part.start : part.stop]
            fetches.append(lane.fetch(source, mine, shapes, target, timeout_s))
        found = await asyncio.gather(*fetches)
        return [outcome for part in found for outcome in part]

    @property
    def nixl_bytes(self) -> int:
        return sum(lane.nixl_bytes for lane in self._lanes)

    def forget(self, source: ExportedMemory) -> None:
        for lane in self._lanes:
            lane.forget(source)

    def close(self) -> None:
        """Wait a few seconds at most for running reads. Call this from no lane's thread."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """A thread that reads, with an agent of its own: an agent is for one thread."""

    def __init__(
        self,
        arena: BlockArena,
        *,
        agent_name: str,
        parameters: Mapping[str, str],
        host_bytes: Callable[[Span], memoryview],
    ) -> None:
        self._arena = arena
        self._host_bytes = host_bytes
        self._agent_name = agent_name
        self._parameters = parameters
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._metadata: Future[bytes] = Future()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # For the lane's thread only.
        self._agent: TransferAgent | None = None
        self._running: list[_Fetch] = []
        self._pinned: dict[int, list[_Fetch]] = {}
        """Fetches whose reads were given up, by the transfers' tokens."""

    def metadata(self) -> bytes:
        """As ``BlockReader.metadata``."""
        self._begin()
        return self._metadata.result()

    async def fetch(
        self,
        source: ExportedMemory,
        blocks: Sequence[PromptBlock],
        shapes: BlockShapes,
        target: ReadTarget,
        timeout_s: float,
    ) -> list[str | None]:
        """As ``BlockReader.fetch``; ``shapes`` relates the source's blocks to ours."""
        loop = asyncio.get_running_loop()
        self._begin()
        deadline_s = time.monotonic() + timeout_s
        fetch = _Fetch(source, blocks, shapes, target, deadline_s, loop, loop.create_future())
        target.begin()
        self._commands.put(lambda: self._start(fetch))
        try:
            return await fetch.result
        finally:
            fetch.cancelled = True

    @property
    def nixl_bytes(self) -> int:
        """Bytes moved, from NIXL's telemetry; any thread may read it."""
        return 0 if self._agent is None else self._agent.moved_bytes

    def forget(self, source: ExportedMemory) -> None:
        """Disconnect from a process that has ended."""
        self._commands.put(lambda: self._forget(source.agent))

    def close(self) -> None:
        """Wait a few seconds at most for running reads. Call this from another thread."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            self._commands.put(None)
            thread.join()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="handover", daemon=True)
                self._thread.start()

    # What follows runs on the lane's thread.

    def _run(self) -> None:
        try:
            self._agent = TransferAgent(self._agent_name, {_BACKEND: self._parameters})
            self._agent.register([self._arena.region], _BACKEND)
            self._agent.prepare(
                self._arena.memory, self._arena.region.span, self._arena.block_bytes, _BACKEND
            )
            self._metadata.set_result(self._agent.metadata())
        except TransferError as error:
            log.warning("KV cannot be transferred: %s", error)
            self._metadata.set_exception(error)
        news_s = 0.0
        while self._take_commands():
            news = False
            for fetch in list(self._running):
                assert fetch.moving is not None
                news |= fetch.moving.step()
                if fetch.moving.over:
                    self._running.remove(fetch)
                    self._moved(fetch, fetch.moving)
            if self._pinned:
                self._reap()
            if news:
                news_s = time.monotonic()
            elif self._running:
                time.sleep(poll_pause_s(time.monotonic() - news_s))
        self._end()

    def _take_commands(self) -> bool:
        """Run the queued commands; wait for one when nothing runs. False once it is closed."""
        wait = not self._running
        while True:
            try:
                command = self._commands.get(wait, _REAP_S if self._pinned else None)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _start(self, fetch: _Fetch) -> None:
        fetch.outcomes = [None] * len(fetch.blocks)
        try:
            if self._agent is None:
                self._metadata.result()
            assert self._agent is not None
            source = fetch.source
            peer = self._agent.add_peer(source.metadata)
            whole = Span(source.address, source.blocks * source.block_bytes, source.device)
            self._agent.prepare(Memory(source.memory), whole, source.block_bytes, _BACKEND, peer)
            fetch.plan = plan = plan_reads(
                fetch.source, fetch.blocks, fetch.target, fetch.shapes, self._arena
            )
        except (CommutatorError, ValueError, IndexError) as error:
            fetch.outcomes = [str(error)] * len(fetch.blocks)
            self._report(fetch)
            self._release(fetch)
            return
        fetch.moving = BlockMoves(
            self._agent,
            TransferPath(Direction.READ, self._arena.memory, Memory(source.memory), _BACKEND, peer),
            plan.moves,
            MoveLimits(
                timeout_s=fetch.deadline_s - time.monotonic(),
                batch_bytes=_BATCH_BYTES,
                max_in_flight_bytes=2 * _BATCH_BYTES,
                cancelled=lambda: fetch.cancelled,
            ),
            when_whole(plan.owners, partial(self._check, fetch)),
        )
        self._running.append(fetch)

    def _check(self, fetch: _Fetch, owners: Sequence[int]) -> None:
        for owner in reversed(owners):  # the last one is the likeliest to be in a cache
            spans = fetch.plan.pieces[owner]
            if len(spans) == 1:
                found = checksum(self._host_bytes(spans[0]))
            else:
                state = xxhash.xxh3_64()
                for span in spans:
                    state.update(self._host_bytes(span))
                found = state.intdigest()
            if found != fetch.blocks[owner][1].checksum:
                fetch.outcomes[owner] = "its checksum is wrong"

    def _moved(self, fetch: _Fetch, moving: BlockMoves) -> None:
        tokens = set()
        for owner, error in zip(fetch.plan.owners, moving.results, strict=True):
            if error is not None:
                fetch.outcomes[owner] = str(error)
            if isinstance(error, TransferTimeoutError) and error.token is not None:
                tokens.add(error.token)
        self._report(fetch)
        for token in tokens:
            self._pinned.setdefault(token, []).append(fetch)
        if not tokens:
            self._release(fetch)

    def _reap(self) -> None:
        assert self._agent is not None
        for token in self._agent.reap():
            for fetch in self._pinned.pop(token, ()):
                if not any(fetch in waiting for waiting in self._pinned.values()):
                    self._release(fetch)

    def _report(self, fetch: _Fetch) -> None:
        def report() -> None:
            if not fetch.result.done():
                fetch.result.set_result(fetch.outcomes)

        _in_loop(fetch.loop, report)

    def _release(self, fetch: _Fetch) -> None:
        _in_loop(fetch.loop, fetch.target.end)

    def _forget(self, agent_name: str) -> None:
        try:
            if self._agent is not None:
                self._agent.remove_peer(agent_name)
        except TransferError as error:
            log.debug("cannot disconnect from agent %s: %s", agent_name, error)

    def _end(self) -> None:
        for fetch in self._running:
            assert fetch.moving is not None
            fetch.moving.abandon()
        if self._agent is None:
            return
        try:
            self._agent.close()
        except TransferError as error:
            log.warning("%s", error)
            _never_freed.append(self)


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        log.debug("the event loop has ended")


def plan_reads(
    source: ExportedMemory,
    blocks: Sequence[PromptBlock],
    target: ReadTarget,
    shapes: BlockShapes,
    arena: BlockArena,
) -> ReadPlan:
    """The moves that read these blocks.

    Raises ValueError or IndexError for blocks that the source or the target does not have.
    """
    plan = ReadPlan()
    first = target.first_token // shapes.target_tokens
    # Nothing moves while thousands of blocks are planned: compute once what repeats.
    patterns = [shapes.pieces(phase) for phase in range(shapes.period)]
    addresses = [arena.address_of(block) for block in target.blocks]
    device = arena.device
    places = None
    if target.positions is not None:
        places = {position: place for place, position in enumerate(target.positions)}
        if source.block_bytes != arena.block_bytes:
            raise ValueError(
                f"blocks of {source.block_bytes} bytes cannot be read into {arena.block_bytes}"
            )
    for owner, (position, ready) in enumerate(blocks):
        if not 0 <= ready.index < source.blocks:
            raise ValueError(f"the prefill worker has no block {ready.index}")
        remote_address = source.address + ready.index * source.block_bytes
        if places is not None:
            span = Span(addresses[places[position]], arena.block_bytes, device)
            plan.moves.append(
                BlockMove(span, Span(remote_address, arena.block_bytes, source.device))
            )
            plan.owners.append(owner)
            plan.pieces.append([span])
            continue
        target_block = shapes.target_block(position) - first
        pieces = []
        for offset, block, target_offset, size_bytes in patterns[position % shapes.period]:
            place = target_block + block
            if not 0 <= place < len(addresses):
                raise ValueError(f"block {position} of the prompt is outside the target")
            local = Span(addresses[place] + target_offset, size_bytes, device)
            remote = Span(remote_address + offset, size_bytes, source.device)
            plan.moves.append(BlockMove(local, remote))
            plan.owners.append(owner)
            pieces.append(local)
        plan.pieces.append(pieces)
    return plan
