"""A worker's host memory, and what was loaded into it before the engine counts on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial

from commutator.engine import EmbeddedTiers, TierPlan
from commutator_trtllm.kv_words import Stage, Staged

__all__ = ["Claims", "HostBlocks"]

_GRACE = 0.5
"""A load that was stopped may end within this share of the time that it had."""


class HostBlocks:
    """The numbers of the host memory's blocks that are free. Any thread may call it."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._lock = threading.Lock()
        self.count = count

    def take(self, count: int, *, leave: int = 0) -> list[int]:
        """As many as there are, but ``leave`` stay free."""
        with self._lock:
            count = max(0, min(count, len(self._free) - leave))
            taken = self._free[len(self._free) - count :]
            del self._free[len(self._free) - count :]
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        with self._lock:
            self._free += blocks

    @property
    def free(self) -> int:
        return len(self._free)


class Claims:
    """``stage`` runs on the thread that hears the scheduler, the others on the engine's."""

    def __init__(self, tiers: EmbeddedTiers, host: HostBlocks) -> None:
        self._tiers = tiers
        self._host = host
        self._lock = threading.Lock()
        self._staged: dict[int, list[int]] = {}
        self._unwanted: set[int] = set()
        """Dropped before they were staged."""

    def stage(self, wanted: Stage) -> Staged:
        """Load what there is in time. Only what was verified is counted, and held until the end."""
        end_s = time.monotonic() + wanted.wait_s
        blocks = self._load(wanted, end_s)
        with self._lock:
            if wanted.number not in self._unwanted:
                self._staged[wanted.number] = blocks
                return Staged(wanted.number, len(blocks))
            # Numbers come in order, so that nobody will ask for smaller ones.
            self._unwanted = {number for number in self._unwanted if number > wanted.number}
        self._host.give(blocks)
        return Staged(wanted.number, 0)

    def take(self, number: int) -> list[int]:
        """The blocks of a claim, in order; the caller gives them back."""
        with self._lock:
            return self._staged.pop(number)

    def drop(self, number: int) -> None:
        """Nobody wants these blocks, or will."""
        with self._lock:
            blocks = self._staged.pop(number, None)
            if blocks is None:
                self._unwanted.add(number)
                return
        self._host.give(blocks)

    def _load(self, wanted: Stage, end_s: float) -> list[int]:
        keys = self._tiers.keys(wanted.token_ids, cache_salt=wanted.cache_salt)
        plan = self._plan(self._tiers.plan(keys, first=wanted.first), end_s)
        if plan is None or not plan.blocks:
            return []
        blocks = self._host.take(plan.blocks)
        if not blocks:
            self._tiers.drop(plan)
            return []
        load = self._tiers.load(plan, blocks)
        good = _within(load, end_s - time.monotonic())
        if good is None:
            self._tiers.drop(plan)
            good = _within(load, wanted.wait_s * _GRACE)
        if good is None:  # the tier may still write there
            load.add_done_callback(partial(self._ended, blocks))
            return []
        count = good.index(False) if False in good else len(good)
        self._host.give(blocks[count:])
        return blocks[:count]

    def _ended(self, blocks: Iterable[int], load: Future[list[bool]]) -> None:
        if load.exception() is None:  # otherwise it still may
            self._host.give(blocks)

    def _plan(self, question: Future[TierPlan], end_s: float) -> TierPlan | None:
        try:
            return question.result(max(0.0, end_s - time.monotonic()))
        except (FutureTimeout, CancelledError):
            if not question.cancel():
                self._tiers.drop(question.result())
            return None


def _within(load: Future[list[bool]], wait_s: float) -> list[bool] | None:
    """None when it goes on."""
    try:
        return load.result(max(0.0, wait_s))
    except FutureTimeout:
        return None
