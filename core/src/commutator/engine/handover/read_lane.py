"""One thread that reads blocks out of other workers' memory by NIXL, and verifies them."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import xxhash
from attrs import define, field

from commutator.engine.handover.geometry import BlockShapes
from commutator.engine.handover.mover import PromptBlock, Target
from commutator.engine.handover.pull_words import Source
from commutator.engine.handover.read_plan import ReadPlan, plan_reads
from commutator.errors import CommutatorError, TransferError, TransferTimeoutError
from commutator.kv.arena import BlockArena, bytes_at
from commutator.kv.checksum import checksum
from commutator.transfer import (
    BlockMoves,
    Direction,
    Memory,
    Span,
    TransferAgent,
)
from commutator.transfer.transfer import poll_pause_s

__all__ = ["ReadLane"]

log = logging.getLogger(__name__)

_BACKEND = "UCX"
_BATCH_BYTES = 4 << 20
"""Verified when it has arrived, while the next one moves: some of it is then still in the CPU's
caches."""
_REAP_S = 0.02
"""Between two looks at reads that were given up."""
_never_freed: list[object] = []
"""Arenas that NIXL may still write to: they stay while the process lives."""


@define(eq=False)
class _Fetch:
    source: Source
    blocks: Sequence[PromptBlock]
    shapes: BlockShapes
    target: Target
    deadline_s: float
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[list[str | None]]
    cancelled: bool = False
    moving: BlockMoves | None = None
    plan: ReadPlan = field(factory=ReadPlan)
    outcomes: list[str | None] = field(factory=list)


class ReadLane:
    """Has an agent of its own, as an agent belongs to one thread."""

    def __init__(
        self, arena: BlockArena, *, agent_name: str, parameters: Mapping[str, str]
    ) -> None:
        self._arena = arena
        self._agent_name = agent_name
        self._parameters = parameters
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._metadata: Future[bytes] = Future()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Touched on the lane's thread only.
        self._agent: TransferAgent | None = None
        self._running: list[_Fetch] = []
        self._pinned: dict[int, list[_Fetch]] = {}
        """Reads that were given up, by the transfer's token, and who waits for its end."""

    def metadata(self) -> bytes:
        """What another agent must know to read our arena. Waits; raises TransferError."""
        self._begin()
        return self._metadata.result()

    async def fetch(
        self,
        source: Source,
        blocks: Sequence[PromptBlock],
        shapes: BlockShapes,
        target: Target,
        timeout_s: float,
    ) -> list[str | None]:
        """As ``BlockMover.fetch``; ``shapes`` are the source's blocks and ours."""
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
        """What NIXL's own telemetry says it has moved. Any thread may ask."""
        return 0 if self._agent is None else self._agent.moved_bytes

    def forget(self, source: Source) -> None:
        """That process will not be read from again."""
        self._commands.put(lambda: self._forget(source.agent))

    def close(self) -> None:
        """Wait for what is under way, a few seconds at most; from any thread but the lane's."""
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
            log.warning("KV cannot be handed over: %s", error)
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
        """Do what was asked; waits when there is nothing else to do. False at the end."""
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
            self._tell(fetch)
            self._let_go(fetch)
            return
        missing = [len(pieces) for pieces in plan.pieces]

        def arrived(positions: Sequence[int]) -> None:
            done = []
            for position in positions:
                missing[plan.owners[position]] -= 1
                if not missing[plan.owners[position]]:
                    done.append(plan.owners[position])
            self._check(fetch, done)

        fetch.moving = BlockMoves(
            self._agent,
            Direction.READ,
            plan.moves,
            local_memory=Memory.DRAM,
            remote_memory=Memory(fetch.source.memory),
            backend=_BACKEND,
            timeout_s=fetch.deadline_s - time.monotonic(),
            peer=peer,
            on_done=arrived,
            cancelled=lambda: fetch.cancelled,
            batch_bytes=_BATCH_BYTES,
            max_in_flight_bytes=2 * _BATCH_BYTES,
        )
        self._running.append(fetch)

    def _check(self, fetch: _Fetch, owners: Sequence[int]) -> None:
        for owner in reversed(owners):  # the last one is the likeliest to be in a cache still
            spans = fetch.plan.pieces[owner]
            if len(spans) == 1:
                found = checksum(bytes_at(spans[0]))
            else:
                state = xxhash.xxh3_64()
                for span in spans:
                    state.update(bytes_at(span))
                found = state.intdigest()
            if found != fetch.blocks[owner][1].checksum:
                fetch.outcomes[owner] = "its checksum is not what the prefill worker said"

    def _moved(self, fetch: _Fetch, moving: BlockMoves) -> None:
        tokens = set()
        for owner, error in zip(fetch.plan.owners, moving.results, strict=True):
            if error is not None:
                fetch.outcomes[owner] = str(error)
            if isinstance(error, TransferTimeoutError) and error.token is not None:
                tokens.add(error.token)
        self._tell(fetch)
        for token in tokens:
            self._pinned.setdefault(token, []).append(fetch)
        if not tokens:
            self._let_go(fetch)

    def _reap(self) -> None:
        assert self._agent is not None
        for token in self._agent.reap():
            for fetch in self._pinned.pop(token, ()):
                if not any(fetch in waiting for waiting in self._pinned.values()):
                    self._let_go(fetch)

    def _tell(self, fetch: _Fetch) -> None:
        def tell() -> None:
            if not fetch.result.done():
                fetch.result.set_result(fetch.outcomes)

        _in_loop(fetch.loop, tell)

    def _let_go(self, fetch: _Fetch) -> None:
        _in_loop(fetch.loop, fetch.target.end)

    def _forget(self, agent_name: str) -> None:
        try:
            if self._agent is not None:
                self._agent.remove_peer(agent_name)
        except TransferError as error:
            log.debug("a prefill worker that is gone is not forgotten: %s", error)

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
        log.debug("the event loop has ended; nobody waits any more")
