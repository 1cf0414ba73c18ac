"""Guards around a tier's I/O (circuit breaker, bandwidth limit, retries) and its exceptions.

``GuardedTier`` and ``GuardedIo`` catch every exception that a plugin's tier raises: it fails
neither a request nor the tier's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from attrs import define, field, frozen

from commutator.contract.block import BlockKey
from commutator.contract.tier import (
    UNBOUNDED,
    ExportOptions,
    Region,
    Slot,
    SlotGeometry,
    StorageTier,
    StoredBlock,
)
from commutator.errors import TierError
from commutator_engine_kit.kv.block_manager.actions import LoadResult
from commutator_engine_kit.kv.tiers.block_io import (
    BlockIo,
    LoadBlock,
    StoreBlock,
    StoreResult,
    Unstored,
)
from commutator_engine_kit.kv.tiers.mover import IoContext

log = logging.getLogger(__name__)


class BreakerState(Enum):
    """CLOSED admits every job, OPEN none, HALF_OPEN one trial job."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@define
class Breaker:
    """Opens after ``max_failures`` failed jobs in a row. Pure: the time is passed in.

    It stays open for ``pause_s``, and twice as long after each failed trial, up to ``max_pause_s``.
    """

    max_failures: int = 3
    pause_s: float = 1.0
    max_pause_s: float = 30.0
    _failures: int = 0
    _opened_s: float | None = None
    _now_pause_s: float = 0.0
    _trying: bool = False

    def state(self, now_s: float) -> BreakerState:
        if self._opened_s is None:
            return BreakerState.CLOSED
        if self._trying or now_s >= self._opened_s + self._now_pause_s:
            return BreakerState.HALF_OPEN
        return BreakerState.OPEN

    def allows(self, now_s: float) -> bool:
        """Whether a job may run; report its outcome with one of the methods below."""
        state = self.state(now_s)
        if state is BreakerState.HALF_OPEN:
            if self._trying:
                return False
            self._trying = True
        return state is not BreakerState.OPEN

    def succeeded(self) -> None:
        self._failures, self._opened_s, self._now_pause_s, self._trying = 0, None, 0.0, False

    def failed(self, now_s: float) -> None:
        self._failures += 1
        if self._trying or self._failures >= self.max_failures:
            longer_s = self._now_pause_s * 2 if self._now_pause_s else self.pause_s
            self._now_pause_s = min(longer_s, self.max_pause_s)
            self._opened_s, self._trying = now_s, False

    def given_up(self) -> None:
        """The job was cancelled: it neither succeeded nor failed."""
        self._trying = False


@define
class Bandwidth:
    """One tier's limit of bytes per second. Pure: the time is passed in."""

    bytes_per_s: float
    _free_s: float = float("-inf")
    """When the bytes moved so far are within the limit."""

    def pause_s(self, now_s: float) -> float:
        """Seconds to wait before the next transfer."""
        return max(0.0, self._free_s - now_s)

    def taken(self, size_bytes: int, now_s: float) -> None:
        """Count ``size_bytes``, requested at ``now_s`` and moved next."""
        self._free_s = max(self._free_s, now_s) + size_bytes / self.bytes_per_s


@define
class RetryBudget:
    """Limits retries to a share of the blocks that succeeded, so that retries cause no overload.

    Each success adds ``ratio`` of a retry; at most ``most`` accumulate. Pure.
    """

    ratio: float = 0.1
    most: float = 64.0
    saved: float = 16.0

    def earned(self, successes: int) -> None:
        self.saved = min(self.most, self.saved + self.ratio * successes)

    def take(self, wanted: int) -> int:
        """How many of ``wanted`` blocks may be retried."""
        granted = min(wanted, int(self.saved))
        self.saved -= granted
        return granted


@define(kw_only=True)
class IoGuards:
    """What guards the I/O of one tier. All of it shares them."""

    breaker: Breaker
    max_attempts: int = 1
    """How often a block is tried in total."""
    budget: RetryBudget = field(factory=RetryBudget)
    bandwidth: Bandwidth | None = None
    """None: no limit."""


BlockT = TypeVar("BlockT")
ResultT = TypeVar("ResultT")


def _logged(tier: str, what: str, call: Callable[[], ResultT]) -> ResultT | None:
    """The call's result; None when it raises, which is logged: a TierError without traceback."""
    try:
        return call()
    except TierError as error:
        log.warning("tier %s: %s: %s", tier, what, error)
    except Exception:
        log.exception("tier %s: %s", tier, what)
    return None


_BACKOFF_S = 0.02
"""Pause before the first retry; each further one is twice as long."""


class GuardedIo(BlockIo):
    """Waits for the bandwidth limit, asks the breaker, and retries what failed.

    Returns a result for each block also when the tier or a transfer raises an exception. A job that
    cannot begin before its deadline fails at once. For the breaker, a job failed when none of its
    blocks was moved. Failed blocks are retried, but not missing or corrupt ones.
    """

    def __init__(
        self,
        inner: BlockIo,
        tier: str,
        guards: IoGuards,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._tier = tier
        self._guards = guards
        self._clock = clock
        self._sleep = sleep

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[StoreResult]:
        size_bytes = sum(block.local.size_bytes for block in blocks)
        return self._guarded(self._inner.store, blocks, context, size_bytes, Unstored, "stored")

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        size_bytes = sum(block.stored.size_bytes for block in blocks)
        return self._guarded(self._inner.load, blocks, context, size_bytes, _not_loaded, "loaded")

    def _guarded(
        self,
        attempt: Callable[[Sequence[BlockT], IoContext], list[ResultT]],
        blocks: Sequence[BlockT],
        context: IoContext,
        size_bytes: int,
        failure: Callable[[str], ResultT],
        what: str,
    ) -> list[ResultT]:
        breaker = self._guards.breaker

        def run() -> list[ResultT]:
            if not self._wait(size_bytes, context):
                return [failure("the tier's bandwidth limit leaves no time")] * len(blocks)
            if not breaker.allows(self._clock()):
                return [failure("the tier is paused after failures")] * len(blocks)
            try:
                results = self._with_retries(attempt, blocks, context)
            except BaseException:
                breaker.failed(self._clock())
                raise
            if not all(map(_failed, results)):
                breaker.succeeded()
            elif context.cancelled() or not results:
                breaker.given_up()
            else:
                breaker.failed(self._clock())
            return results

        moved = _logged(self._tier, f"{len(blocks)} blocks are not {what}", run)
        return moved or [failure("the tier raised an exception")] * len(blocks)

    def _wait(self, size_bytes: int, context: IoContext) -> bool:
        """Wait until earlier jobs are within the limit. False when there is no time for that."""
        if (bandwidth := self._guards.bandwidth) is None:
            return True
        now_s = self._clock()
        pause_s = bandwidth.pause_s(now_s)
        if pause_s > context.remaining_s or context.over:
            return False
        if pause_s:
            self._sleep(pause_s)
        bandwidth.taken(size_bytes, now_s)
        return True

    def _with_retries(
        self,
        attempt: Callable[[Sequence[BlockT], IoContext], list[ResultT]],
        blocks: Sequence[BlockT],
        context: IoContext,
    ) -> list[ResultT]:
        budget = self._guards.budget
        results = attempt(blocks, context)
        if len(results) != len(blocks):
            raise ValueError(f"{len(results)} results for {len(blocks)} blocks")
        for number in range(self._guards.max_attempts - 1):
            again = [index for index, result in enumerate(results) if _failed(result)]
            budget.earned(len(results) - len(again))
            again = again[: budget.take(len(again))]
            pause_s = _BACKOFF_S * 2**number
            if not again or context.over or context.remaining_s < pause_s:
                break
            self._sleep(pause_s)
            retried = attempt([blocks[index] for index in again], context)
            for index, result in zip(again, retried, strict=True):
                results[index] = result
        return results


def _failed(result: object) -> bool:
    return result is LoadResult.FAILED or isinstance(result, Unstored)


def _not_loaded(_: str) -> LoadResult:
    return LoadResult.FAILED


@frozen
class OpenedTier:
    """A tier's answers when it was opened."""

    blocks: Sequence[StoredBlock]
    """Blocks that an earlier process committed."""
    regions: Sequence[Region]
    backend_parameters: Mapping[str, str]


class GuardedTier:
    """Calls a plugin's tier, and logs the exceptions that it raises.

    An exception costs only the blocks of that call. ``GuardedIo`` does the same for transfers;
    there is no other place that catches a tier's exceptions.
    """

    def __init__(self, tier: StorageTier, name: str) -> None:
        self._tier = tier
        self._name = name

    def use_peers(self, find: Callable[[], Sequence[str]]) -> None:
        """As ``StorageTier.use_peers``."""
        self._does("does not take the addresses of other workers", self._tier.use_peers, find)

    def export_options(self) -> ExportOptions | None:
        """How this worker lends its blocks to others; None also when the tier failed."""
        what = "cannot say how blocks are lent, so none are"
        return _logged(self._name, what, lambda: self._tier.export_options)

    def open(self, geometry: SlotGeometry) -> OpenedTier:
        """Open the tier. Closes it and raises TierError when that fails with any exception."""
        try:
            return OpenedTier(
                self._tier.open(geometry), self._tier.regions(), self._tier.backend_parameters
            )
        except TierError:
            self.close()
            raise
        except Exception as error:
            log.exception("tier %s: open failed", self._name)
            self.close()
            raise TierError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._does("close failed", self._tier.close)

    def reserve(self, keys: Sequence[BlockKey]) -> Sequence[Slot | None] | None:
        """A slot for each key, None for those without room; None alone when the tier failed."""
        return _logged(self._name, "cannot reserve slots", lambda: self._tier.reserve(keys))

    def commit(self, blocks: Sequence[StoredBlock]) -> bool:
        """Whether the blocks are committed. If not, their slots are released."""
        committed = self._does("cannot commit blocks", self._tier.commit, blocks)
        if not committed:
            self.release([stored.slot for stored in blocks])
        return committed

    def release(self, slots: Sequence[Slot]) -> None:
        self._does("cannot release slots", self._tier.release, slots)

    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[StoredBlock | None] | None:
        """The stored block of each key, if any; None alone when the tier failed."""
        return _logged(self._name, "cannot look up blocks", lambda: self._tier.lookup(keys))

    def probe(self, keys: Sequence[BlockKey]) -> list[StoredBlock] | None:
        """Blocks of a chain that the medium has; None when the tier failed."""

        def found() -> list[StoredBlock]:
            return [stored for stored in self._tier.probe(keys) if stored is not None]

        return _logged(self._name, "cannot look up blocks on the medium", found)

    def committed(self) -> list[StoredBlock] | None:
        """Every committed block; None when the tier failed."""
        return _logged(self._name, "cannot list blocks", lambda: list(self._tier.committed()))

    def capacity(self) -> int:
        """In blocks; UNBOUNDED while the tier is not open, or when it failed."""
        try:
            return self._tier.statistics().capacity
        except TierError:  # not open
            return UNBOUNDED
        except Exception:
            log.exception("tier %s: cannot read its capacity", self._name)
            return UNBOUNDED

    def pin(self, slot: Slot) -> bool:
        """Whether the slot is pinned."""
        return self._does("cannot pin a slot", self._tier.pin, slot)

    def unpin(self, slot: Slot) -> None:
        self._does("cannot unpin a slot", self._tier.unpin, slot)

    def free(self, keys: Sequence[BlockKey], *, makes_room: bool) -> bool:
        """Whether the blocks are removed; ``makes_room`` leaves blocks of others on the medium."""
        remove = self._tier.make_room if makes_room else self._tier.evict
        return self._does("cannot evict blocks", remove, keys)

    def _does(self, what: str, call: Callable[..., object], *arguments: object) -> bool:
        """Whether the call raised nothing."""

        def run() -> bool:
            call(*arguments)
            return True

        return _logged(self._name, what, run) is not None
