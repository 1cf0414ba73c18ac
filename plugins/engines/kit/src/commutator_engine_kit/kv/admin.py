"""Inspection and administration of one engine's storage tiers; serves ``commutator kv``."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future

from attrs import define, field, frozen

from commutator.contract.block import BlockKey
from commutator.contract.tier import UNBOUNDED
from commutator.contract.worker import (
    KvPrompt,
    KvStatistics,
    PromptExplanation,
    TierContents,
    TierVerification,
)
from commutator.errors import EngineError
from commutator_engine_kit.kv.block_manager.actions import JobUrgency, LoadResult
from commutator_engine_kit.kv.connector import KvConnector
from commutator_engine_kit.kv.stores import PART_BLOCKS
from commutator_engine_kit.kv.tiers.executor import TierExecutor
from commutator_engine_kit.kv.tiers.mover import IoContext

__all__ = ["DeviceBlocks", "KvAdmin", "LocatedPrompt"]

_COUNT_TIMEOUT_S = 3.0
"""Limit for a tier's count of its bytes."""

_LOOK_UP_TIMEOUT_S = 2.0
"""Limit for look-ups of a prompt's blocks in shared tiers."""

_NO_ROOM_PAUSE_S = 0.002
VERIFY_REASON = "found corrupt by verify"


@frozen
class LocatedPrompt:
    """A prompt's blocks, as the engine identifies them."""

    keys: Sequence[BlockKey]
    """Of every full block that could be reused."""
    on_device: int
    """How many of the first blocks are in the engine's own memory."""
    block_size: int
    """Tokens in a block."""


@frozen
class DeviceBlocks:
    """The engine's own KV memory."""

    medium: str
    """Its name in KV events."""
    held: int
    """Blocks that running requests use."""
    cached: int
    """Reusable blocks that no request uses."""
    capacity: int
    block_bytes: int


class KvAdmin:
    """Call methods from any thread but the engine's and the tiers' own.

    ``locate`` maps a prompt to the engine's block keys; ``device`` counts the engine's own KV
    memory for ``contents``, where the engine can. Methods raise EngineError for an unknown tier.
    """

    def __init__(
        self,
        connector: KvConnector,
        locate: Callable[[KvPrompt], LocatedPrompt],
        device: Callable[[], DeviceBlocks] | None = None,
    ) -> None:
        self._connector = connector
        self._locate = locate
        self._device = device
        self._verifying = threading.Lock()

    def statistics(self) -> KvStatistics:
        """The block manager's counters and states."""
        return self._connector.statistics()

    def contents(self) -> list[TierContents]:
        """How full the device and each tier are. Waits up to 3 s for each busy tier."""
        sizes = [self._stored_bytes(number) for number in range(len(self._connector.tiers))]
        return self._on_device() + [
            TierContents(
                tier=state.name,
                medium=state.medium,
                up=state.up,
                blocks=state.published,
                pinned=state.retained,
                bytes=size,
                capacity_blocks=None if state.capacity >= UNBOUNDED else state.capacity,
            )
            for state, size in zip(self._connector.statistics().tiers, sizes, strict=True)
        ]

    def explain(self, prompt: KvPrompt) -> PromptExplanation:
        """Which blocks of a prompt would be reused; includes a look-up in shared tiers."""
        located = self._locate(prompt)
        keys, on_device = located.keys, located.on_device
        self._wait(self._connector.lookups.look_up(keys, first=on_device))
        return PromptExplanation(
            prompt_tokens=len(prompt.token_ids),
            block_size=located.block_size,
            blocks=tuple(self._connector.lookups.explain(keys, on_device)),
        )

    def prefetch(self, prompt: KvPrompt) -> None:
        """Start to copy a prompt's blocks up from slower tiers."""
        located = self._locate(prompt)
        keys, on_device = located.keys, located.on_device
        if on_device < len(keys):
            self._wait(self._connector.lookups.prefetch(keys, first=on_device))

    def evict(self, tier: str | None = None) -> Mapping[str, int]:
        """Remove every block of one tier or of all. Returns the number of blocks by tier."""
        self._numbers(tier)
        before = self._connector.statistics()
        self._connector.stores.evict(tier=tier)
        after = self._connector.statistics()
        return {
            old.name: old.published - new.published
            for old, new in zip(before.tiers, after.tiers, strict=True)
            if tier in (None, old.name)
        }

    def verify(self, tier: str | None = None) -> list[TierVerification]:
        """Read every block of one tier or of all, and remove corrupt ones.

        Returns after the last block. Raises EngineError while another verification runs.
        """
        numbers = self._numbers(tier)
        if not self._verifying.acquire(blocking=False):
            raise EngineError("a verification of the blocks is running; wait for its end")
        try:
            jobs = {
                number: _VerifyJob(self._connector.tiers[number].config.load_timeout_s)
                for number in numbers
            }
            for number, job in jobs.items():
                self._connector.on_tier(number, JobUrgency.VERIFY, job.run)
            return [self._verified(number, job) for number, job in jobs.items()]
        finally:
            self._verifying.release()

    def set_peers(self, addresses: Sequence[str]) -> None:
        """Set the addresses at which other workers of the same model lend blocks."""
        self._connector.use_peers(addresses)

    def _on_device(self) -> list[TierContents]:
        if self._device is None:
            return []
        device = self._device()
        blocks = device.held + device.cached
        return [
            TierContents(
                tier="device",
                medium=device.medium,
                up=True,
                blocks=blocks,
                pinned=device.held,
                bytes=blocks * device.block_bytes,
                capacity_blocks=device.capacity,
            )
        ]

    def _wait(self, lookup: Future[None]) -> None:
        """Wait for shared tiers' answers, at most ``_LOOK_UP_TIMEOUT_S``: they may be down."""
        try:
            lookup.result(_LOOK_UP_TIMEOUT_S)
        except TimeoutError:
            lookup.cancel()

    def _verified(self, number: int, job: _VerifyJob) -> TierVerification:
        job.over.wait()
        name = self._connector.tiers[number].name
        if job.corrupt:
            self._connector.stores.evict(job.corrupt, tier=name, reason=VERIFY_REASON)
        return TierVerification(
            tier=name,
            blocks=job.blocks,
            intact=job.results[LoadResult.LOADED],
            corrupt=job.results[LoadResult.CORRUPT],
            gone=job.results[LoadResult.MISSING],
            unreadable=job.results[LoadResult.FAILED],
            bytes=job.size_bytes,
            seconds=job.seconds,
            problem=job.problem,
        )

    def _numbers(self, tier: str | None) -> list[int]:
        names = [setup.name for setup in self._connector.tiers]
        if tier is None:
            return list(range(len(names)))
        if tier not in names:
            raise EngineError(f"no tier {tier!r} here; the tiers are: {', '.join(names)}")
        return [names.index(tier)]

    def _stored_bytes(self, tier: int) -> int | None:
        """Counted on the tier's own thread. None when the tier is down, busy or fails."""
        answer: Future[int | None] = Future()

        def count(worker: TierExecutor | None) -> None:
            stored = None if worker is None else worker.committed()
            answer.set_result(None if stored is None else sum(b.size_bytes for b in stored))

        self._connector.on_tier(tier, JobUrgency.OFFLOAD, count)
        try:
            return answer.result(_COUNT_TIMEOUT_S)
        except TimeoutError:
            return None


@define
class _VerifyJob:
    """The verification of one tier on its own thread, with the result."""

    timeout_s: float
    """Limit for a part of ``PART_BLOCKS`` blocks."""
    blocks: int = 0
    size_bytes: int = 0
    """Total size of the blocks that were read."""
    results: Counter[LoadResult] = field(factory=Counter)
    corrupt: list[BlockKey] = field(factory=list)
    seconds: float = 0.0
    problem: str | None = None
    """Why it ended early; None if it did not."""
    over: threading.Event = field(factory=threading.Event)

    def run(self, worker: TierExecutor | None) -> Generator[None, None, None]:
        """The job for ``TierThread``."""
        started_s = time.monotonic()
        self.problem = "the tier is down"
        try:
            if worker is None:
                return
            committed = worker.committed()
            if committed is None:
                self.problem = "the tier cannot list its blocks; see the worker's log"
                return
            self.blocks = len(committed)
            sizes = {stored.key: stored.size_bytes for stored in committed}
            keys = list(sizes)
            at = 0
            self.problem = "the worker was stopped, or the tier was closed"
            while at < len(keys) and worker.is_open:
                context = IoContext(time.monotonic() + self.timeout_s)
                found = worker.verify(keys[at : at + PART_BLOCKS], context)
                if not found:
                    time.sleep(_NO_ROOM_PAUSE_S)
                for key, result in found.items():
                    self.results[result] += 1
                    if result is LoadResult.CORRUPT:
                        self.corrupt.append(key)
                    if result in (LoadResult.LOADED, LoadResult.CORRUPT):
                        self.size_bytes += sizes[key]
                at += len(found)
                yield
            self.problem = (
                None if at == len(keys) else "the tier was closed during the verification"
            )
        finally:
            self.seconds = time.monotonic() - started_s
            self.over.set()
