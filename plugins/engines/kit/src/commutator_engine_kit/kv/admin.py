"""Inspection and administration of one engine's storage tiers; serves ``commutator kv``."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future

from attrs import frozen

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
from commutator_engine_kit.kv.tiers.executor import Job, TierExecutor
from commutator_engine_kit.kv.tiers.mover import IoContext
from commutator_engine_kit.kv.tiers.setup import TierSetup

_COUNT_TIMEOUT_S = 3.0
"""Limit for a tier's count of its bytes."""

_LOOK_UP_TIMEOUT_S = 2.0
"""Limit for look-ups of a prompt's blocks in shared tiers."""

_NO_ROOM_PAUSE_S = 0.002
VERIFY_REASON = "found corrupt by verify"
_READ = (LoadResult.LOADED, LoadResult.CORRUPT)

_Verified = tuple[TierVerification, Sequence[BlockKey]]
"""With the blocks that are corrupt."""


@frozen
class LocatedPrompt:
    """A prompt's blocks, as the engine identifies them."""

    keys: Sequence[BlockKey]
    """Of every full block that could be reused."""
    on_device: int
    """How many of the first blocks are in the engine's own memory."""
    block_size: int
    """Tokens in a block."""


class KvAdmin:
    """Call methods from any thread but the engine's and the tiers' own.

    ``locate`` maps a prompt to the engine's block keys; ``device`` tells of the engine's own KV
    memory, for ``contents``. Methods raise EngineError for an unknown tier.
    """

    def __init__(
        self,
        connector: KvConnector,
        locate: Callable[[KvPrompt], LocatedPrompt],
        device: Callable[[], TierContents] | None = None,
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
        device = [] if self._device is None else [self._device()]
        return device + [
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
            answers = [self._verify(number) for number in numbers]
            return [self._without_corrupt(*answer.result()) for answer in answers]
        finally:
            self._verifying.release()

    def set_peers(self, addresses: Sequence[str]) -> None:
        """Set the addresses at which other workers of the same model lend blocks."""
        self._connector.use_peers(addresses)

    def _wait(self, lookup: Future[None]) -> None:
        """Wait for shared tiers' answers, at most ``_LOOK_UP_TIMEOUT_S``: they may be down."""
        try:
            lookup.result(_LOOK_UP_TIMEOUT_S)
        except TimeoutError:
            lookup.cancel()

    def _verify(self, number: int) -> Future[_Verified]:
        answer: Future[_Verified] = Future()
        job = _verification(self._connector.tiers[number], answer)
        self._connector.on_tier(number, JobUrgency.VERIFY, job)
        return answer

    def _without_corrupt(
        self, verification: TierVerification, corrupt: Sequence[BlockKey]
    ) -> TierVerification:
        if corrupt:
            self._connector.stores.evict(corrupt, tier=verification.tier, reason=VERIFY_REASON)
        return verification

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


def _verification(setup: TierSetup, answer: Future[_Verified]) -> Job:
    """The job that reads a tier's blocks on its own thread, in parts, and then answers."""

    def run(worker: TierExecutor | None) -> Generator[None, None, None]:
        started_s = time.monotonic()
        sizes: dict[BlockKey, int] = {}
        results: dict[BlockKey, LoadResult] = {}
        problem: str | None = "the tier is down"
        try:
            if worker is None:
                return
            committed = worker.committed()
            if committed is None:
                problem = "the tier cannot list its blocks; see the worker's log"
                return
            sizes = {stored.key: stored.size_bytes for stored in committed}
            keys = list(sizes)
            problem = "the worker was stopped, or the tier was closed"
            while len(results) < len(keys) and worker.is_open:
                context = IoContext(time.monotonic() + setup.config.load_timeout_s)
                at = len(results)
                found = worker.verify(keys[at : at + PART_BLOCKS], context)
                if not found:
                    time.sleep(_NO_ROOM_PAUSE_S)
                results |= found
                yield
            closed = len(results) < len(keys)
            problem = "the tier was closed during the verification" if closed else None
        finally:
            count = Counter(results.values())
            read = [key for key, result in results.items() if result in _READ]
            verification = TierVerification(
                tier=setup.name,
                blocks=len(sizes),
                intact=count[LoadResult.LOADED],
                corrupt=count[LoadResult.CORRUPT],
                gone=count[LoadResult.MISSING],
                unreadable=count[LoadResult.FAILED],
                bytes=sum(sizes[key] for key in read),
                seconds=time.monotonic() - started_s,
                problem=problem,
            )
            corrupt = [key for key in read if results[key] is LoadResult.CORRUPT]
            answer.set_result((verification, corrupt))

    return run
