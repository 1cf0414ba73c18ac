"""One tier at work: what opens it and moves its blocks, and the thread that all of that runs on."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial

from attrs import frozen

from commutator.contract.block import BlockDescriptor, BlockKey
from commutator.contract.tier import Memory, Slot, SlotGeometry, Span, StoredBlock
from commutator.errors import CommutatorError, TierError
from commutator_engine_kit.kv.arena import Arena
from commutator_engine_kit.kv.block_manager.actions import JobUrgency, LoadResult
from commutator_engine_kit.kv.tiers.block_io import (
    PAGE_BYTES,
    STAGING_BLOCKS,
    BlockIo,
    LoadBlock,
    Staging,
    StoreBlock,
    Unstored,
)
from commutator_engine_kit.kv.tiers.codecs import identity_with, seals_of
from commutator_engine_kit.kv.tiers.guards import Bandwidth, BreakerState, IoGuards, OpenedTier
from commutator_engine_kit.kv.tiers.mover import GPU_COPIES, LOCAL_BACKEND, IoContext, TierMover
from commutator_engine_kit.kv.tiers.setup import TierSetup, build_io
from commutator_engine_kit.nixl.agent import TransferAgent
from commutator_engine_kit.nixl.moves import lane_names

log = logging.getLogger(__name__)

_MOST_FAILURES = 3
_never_freed: list[object] = []
"""Tiers closed during transfers that did not end: their memory is never freed."""


@frozen
class StoreOutcome:
    """The result of storing a list of blocks."""

    stored: list[StoredBlock]
    failed: dict[BlockKey, str]


class TierExecutor:
    """Opens one tier, and moves its blocks.

    ``arena`` is the engine's memory; ``scratch`` holds blocks on their way between two tiers. The
    tier has staging memory of its own besides, so that a tier that hangs takes none from others.
    ``identity`` is that of the blocks, before codecs, in hex. ``agent_name`` must be unique among
    all processes that exchange blocks.
    """

    def __init__(
        self,
        setup: TierSetup,
        arena: Arena,
        scratch: Staging,
        *,
        block_tokens: int,
        identity: str,
        agent_name: str,
        on_open: Callable[[Sequence[StoredBlock]], None],
    ) -> None:
        self.setup = setup
        slot_bytes = setup.slot_bytes(arena.block_bytes)
        self.geometry = SlotGeometry(
            block_bytes=arena.block_bytes,
            slot_bytes=slot_bytes,
            identity=identity_with(setup.codecs, identity),
            seals=seals_of(setup.codecs, identity),
            block_tokens=block_tokens,
        )
        self._arena = arena
        # Whole pages: some tiers read and write nothing else.
        self._staging = Staging(-(-slot_bytes // PAGE_BYTES) * PAGE_BYTES, STAGING_BLOCKS)
        self._scratch = scratch
        self.agent_name = agent_name
        self._on_open = on_open
        rate = setup.config.max_bytes_per_s
        self._guards = IoGuards(
            breaker=setup.breaker,
            max_attempts=setup.config.max_attempts,
            bandwidth=None if rate is None else Bandwidth(rate),
        )
        self._agents: list[TransferAgent] = []
        self._stacks: dict[bool, tuple[BlockIo, TierMover]] = {}
        """The I/O for the engine's memory (True) and for other memory (False), while it is open."""
        self._tier = setup.guarded
        self._unfreed: dict[BlockKey, bool] = {}
        """Removed blocks that the tier failed to free so far. True: freed only to make room."""
        self._failures = 0
        """Number of consecutive failures to write the tier's own records."""
        self._probes_fail = False

    @property
    def is_open(self) -> bool:
        """Whether the tier can be used. After repeated failures it must be opened again."""
        return bool(self._stacks) and self._failures < _MOST_FAILURES

    @property
    def news_s(self) -> float:
        """When blocks last arrived, on ``time.monotonic``'s clock; to be asked on any thread."""
        return max((mover.news_s for _, mover in list(self._stacks.values())), default=0.0)

    def metadata(self) -> bytes:
        """What other processes' agents need to read from this tier. Raises TierError."""
        if not self._agents:
            raise TierError("the tier is not open")
        return self._agents[0].metadata()

    def open(self) -> None:
        """Open the tier and its NIXL agents; closes them first if they are open.

        Raises TierError, TransferError or OSError; then neither is open.
        """
        self._shut()
        opened = self._tier.open(self.geometry)
        try:
            self._connect(opened)
        except Exception:
            self._shut()
            raise
        self._failures = 0
        unfreed, self._unfreed = self._unfreed, {}
        self._on_open([stored for stored in opened.blocks if stored.key not in unfreed])
        self._unfreed = unfreed
        self._free_pending()

    def _connect(self, opened: OpenedTier) -> None:
        setup, tier = self.setup, self.setup.tier
        backends = {tier.backend: opened.backend_parameters}
        # A connection to a peer must notice the peer's end, which GPU_COPIES leaves out.
        on_gpu = self._arena.memory is Memory.VRAM
        copies = GPU_COPIES if on_gpu and not tier.asks_peers else {}
        backends[LOCAL_BACKEND] = {**copies, **backends.get(LOCAL_BACKEND, {})}
        scratch = self._scratch.arena
        arenas: list[Arena] = [self._arena, scratch]
        local = [region for arena in arenas for region in arena.regions]
        if not all(setup.is_direct(arena) for arena in arenas):
            local.append(self._staging.arena.region)
        in_memory = tier.memory is Memory.DRAM
        for name in lane_names(self.agent_name) if in_memory else [self.agent_name]:
            agent = TransferAgent(name, backends)
            self._agents.append(agent)
            agent.register(opened.regions, tier.backend)
            for backend in {tier.backend, LOCAL_BACKEND}:
                # Storage reaches GPU memory only through staging memory.
                fit = [r for r in local if backend == LOCAL_BACKEND or r.memory is Memory.DRAM]
                agent.register(fit, backend)
        lanes, copying = list(self._agents), self._agents[0]
        if on_gpu and tier.asks_peers:
            copying = TransferAgent(f"{self.agent_name}-local", {LOCAL_BACKEND: GPU_COPIES})
            self._agents.append(copying)
            copying.register(local, LOCAL_BACKEND)
        self._stacks = {
            arena is self._arena: build_io(
                setup, lanes, copying, arena, self._staging, self._guards
            )
            for arena in arenas
        }

    def store(
        self,
        offers: Sequence[BlockDescriptor],
        sources: Sequence[Span],
        context: IoContext,
        *,
        from_engine: bool,
    ) -> StoreOutcome:
        """Reserve slots, write the blocks, commit them. Slots of blocks that fail are released."""
        io, mover = self._stacks[from_engine]
        if self._unfreed:
            self._free_pending()  # the new blocks may need their slots, and have their keys
        outcome = StoreOutcome([], {})
        blocks: list[StoreBlock] = []
        slots = self._reserve([offer.key for offer in offers])
        for offer, source, slot in zip(offers, sources, slots, strict=True):
            if slot is None:
                outcome.failed[offer.key] = "no free slot"
                continue
            blocks.append(StoreBlock(offer=offer, slot=slot, local=source))
        written: list[StoredBlock] = []
        for block, result in zip(blocks, io.store(blocks, context), strict=True):
            if isinstance(result, Unstored):
                outcome.failed[block.key] = "write failed"
                self._release_slot(mover, block.slot)
            else:
                written.append(result)
        if self._tier.commit(written):
            outcome.stored.extend(written)
            self._failures = 0 if written else self._failures
        else:
            outcome.failed.update({stored.key: "not committed" for stored in written})
            self._failures += 1
        return outcome

    def _reserve(self, keys: Sequence[BlockKey]) -> Sequence[Slot | None]:
        slots = self._tier.reserve(keys)
        if slots is None:
            self._failures += 1
        return [None] * len(keys) if slots is None else slots

    def load(
        self,
        keys: Sequence[BlockKey],
        spans: Sequence[Span],
        context: IoContext,
        *,
        to_engine: bool,
        on_released: Callable[[int], None] = lambda _: None,
    ) -> list[LoadResult]:
        """Read blocks and verify them.

        ``on_released`` gets each position once NIXL can no longer touch its span, mostly before
        this returns.
        """
        io, mover = self._stacks[to_engine]
        known = self._located(keys)
        results = [LoadResult.FAILED if known is None else LoadResult.MISSING] * len(keys)
        blocks: dict[int, LoadBlock] = {}
        for position, stored in enumerate(known or [None] * len(keys)):
            if stored is not None and self._tier.pin(stored.slot):
                blocks[position] = LoadBlock(stored=stored, local=spans[position])
            else:
                on_released(position)
        outcomes = io.load(list(blocks.values()), context)
        for (position, block), result in zip(blocks.items(), outcomes, strict=True):
            results[position] = result
            slot = block.stored.slot

            def over(slot: Slot = slot, position: int = position) -> None:
                self._tier.unpin(slot)
                on_released(position)

            mover.on_released(slot, over)
        return results

    def committed(self) -> list[StoredBlock] | None:
        """Every committed block of the tier; None when the tier cannot list them."""
        return self._tier.committed()

    def verify(self, keys: Sequence[BlockKey], context: IoContext) -> dict[BlockKey, LoadResult]:
        """Read and check the first of these blocks, as many as fit into free scratch memory."""
        slots = self._scratch.take(len(keys))
        results = self.load(
            keys[: len(slots)],
            [self._scratch.arena.span(slot) for slot in slots],
            context,
            to_engine=False,
            on_released=lambda position: self._scratch.give_back([slots[position]]),
        )
        return dict(zip(keys, results, strict=False))

    def free(self, keys: Iterable[BlockKey], *, makes_room: bool = False) -> None:
        """Remove committed blocks; retry later those that the tier fails to remove now.

        With ``makes_room``, blocks that others use stay on a shared medium.
        """
        self._unfreed.update(dict.fromkeys(keys, makes_room))
        self._free_pending()

    def _free_pending(self) -> None:
        for makes_room in (True, False):
            those = [key for key, for_room in self._unfreed.items() if for_room is makes_room]
            if not those:
                continue
            if self._tier.free(those, makes_room=makes_room):
                for key in those:
                    del self._unfreed[key]
            else:
                self._failures += 1

    def probe(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        """The blocks of a chain that the medium has, also those of other workers.

        A failed look-up counts as a failure of the tier, as a failed read does.
        """
        breaker = self.setup.breaker
        if not breaker.allows(time.monotonic()):
            return []
        found = self._tier.probe(keys)
        if found is None:
            breaker.failed(time.monotonic())
            self._probes_fail = True
            return []
        if self._probes_fail:
            breaker.succeeded()
        else:
            breaker.given_up()  # a look-up does not show that reads succeed
        self._probes_fail = False
        return found

    def _located(self, keys: Sequence[BlockKey]) -> Sequence[StoredBlock | None] | None:
        """The stored block of each key, if any; None alone when the tier failed.

        Asks a shared medium for unknown blocks: other workers may have stored them.
        """
        known = self._tier.lookup(keys)
        if known is not None and self.setup.tier.shared and None in known:
            self.probe(keys)
            known = self._tier.lookup(keys)
        return known

    def reap(self) -> None:
        """Release memory of given-up transfers that have ended since the last call."""
        movers = [mover for _, mover in self._stacks.values()]
        if not any(mover.has_held for mover in movers):
            return
        # An agent reports each transfer once, and the movers share the agents.
        over = {token for agent in self._agents for token in agent.reap()}
        for mover in movers:
            mover.released(over)

    def close(self) -> None:
        """Close the agents, then the tier. Waits a few seconds for running transfers."""
        try:
            for agent in self._agents:
                agent.close()
            self._shut()
        except CommutatorError as error:
            log.warning("tier %s: %s", self.setup.name, error)
            _never_freed.append(self)

    def _shut(self) -> None:
        """Raises TierError or TransferError while transfers have not ended."""
        self.reap()
        if any(mover.has_held for _, mover in self._stacks.values()):
            raise TierError("it cannot be closed: transfers that timed out have not ended")
        self._stacks.clear()
        while self._agents:
            self._agents[-1].close()  # raises: then the tier's memory must not be freed
            self._agents.pop()
        self._tier.close()

    def _release_slot(self, mover: TierMover, slot: int) -> None:
        """Release a reserved slot once no transfer writes to it."""
        if mover.in_flight(slot):
            if not self._tier.pin(slot):
                return  # better lost than written to by two transfers
            mover.on_released(slot, lambda: self._tier.unpin(slot))
        self._tier.release([slot])


_IDLE_S = 0.05
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0

Job = Callable[[TierExecutor | None], Generator[None, None, None] | None]
"""A call, or a generator of parts: a more urgent job may run between two of them.

Its argument is None while the tier is not open: then the job reports failure at once.
"""

_Job = Job | Generator[None, None, None]
"""A job, or the rest of a started one."""


class TierThread:
    """Runs one tier's jobs.

    Calls ``on_up`` and ``on_down`` on this thread when the tier becomes usable or unusable.
    """

    def __init__(
        self, worker: TierExecutor, *, on_up: Callable[[], None], on_down: Callable[[str], None]
    ) -> None:
        self.worker = worker
        self._on_up = on_up
        self._on_down = on_down
        self._jobs: list[tuple[JobUrgency, int, _Job]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False
        self._next_try_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self.tried = threading.Event()
        """Set after the first attempt to open the tier."""
        self.usable = False
        """Whether the tier is open and its breaker admits jobs."""
        self.busy_since_s: float | None = None
        """When it began the part of a job that runs; None between two of them."""
        self._thread = threading.Thread(
            target=self._run, name=f"tier-{worker.setup.name}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def submit(self, urgency: JobUrgency, job: Job) -> None:
        """Queue a job, from any thread. After ``stop`` it runs at once, as on a closed tier."""
        with self._changed:
            if not self._stopping:
                heapq.heappush(self._jobs, (urgency, next(self._order), job))
                self._changed.notify()
                return
        _fail(job)

    def pause(self, reason: str) -> None:
        """Call ``on_down``: the thread does not come back from a job. It resumes once it does."""
        if self.usable:
            self.usable = False
            self._on_down(reason)

    def stop(self) -> None:
        """Begin to stop: finish the running part, fail the queued jobs, and close the tier."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end after ``stop``."""
        if self._thread.ident is None:
            return  # never started
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("tier %s did not stop within %.1f s", self.worker.setup.name, timeout_s)

    def _run(self) -> None:
        while not self._stopping:
            self._guarded(self._turn)
        for job in self._take_jobs():
            self._guarded(partial(_fail, job))
        self.worker.close()

    def _guarded(self, call: Callable[[], None]) -> None:
        """Log an exception of a job, so that the queued jobs still run."""
        try:
            call()
        except Exception:
            log.exception("tier %s: a job failed", self.worker.setup.name)

    def _turn(self) -> None:
        self._open_when_due()
        self._see_state()
        self.tried.set()
        self._run_part()
        self.worker.reap()

    def _open_when_due(self) -> None:
        if self.worker.is_open or time.monotonic() < self._next_try_s:
            return
        name, pause_s = self.worker.setup.name, self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        try:
            self.worker.open()
        except (CommutatorError, OSError) as error:
            log.warning("tier %s cannot be opened; next try in %.1f s: %s", name, pause_s, error)
        else:
            self._pause_s = _FIRST_PAUSE_S
        finally:
            self._next_try_s = time.monotonic() + pause_s

    def _see_state(self) -> None:
        """Call ``on_up`` or ``on_down`` on a change. A half-open breaker counts as usable."""
        usable = self.worker.is_open and (
            self.worker.setup.breaker.state(time.monotonic()) is not BreakerState.OPEN
        )
        if usable != self.usable:
            self.usable = usable
            if usable:
                self._on_up()
            else:
                self._on_down("it failed too often")

    def _run_part(self) -> None:
        with self._changed:
            if not self._jobs:
                self._changed.wait(_IDLE_S)
                return
            urgency, order, job = heapq.heappop(self._jobs)
        self.busy_since_s = time.monotonic()
        try:
            parts = job(self.worker if self.worker.is_open else None) if callable(job) else job
            if parts is None:
                return
            next(parts)
        except StopIteration:
            return
        finally:
            self.busy_since_s = None
        with self._changed:
            heapq.heappush(self._jobs, (urgency, order, parts))

    def _take_jobs(self) -> list[_Job]:
        with self._changed:
            jobs, self._jobs = self._jobs, []
        return [job for _, _, job in sorted(jobs, key=lambda job: job[:2])]


def _fail(job: _Job) -> None:
    if callable(job):
        for _ in job(None) or ():
            pass
    else:
        job.close()
