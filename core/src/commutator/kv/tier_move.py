"""Carries blocks from one tier to another through scratch memory, verified on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from commutator.kv.block_io import IoContext
from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult
from commutator.kv.offer import Offer
from commutator.kv.service_jobs import PART_BLOCKS, Stores, store_job
from commutator.kv.staging import Staging
from commutator.kv.tier import Stored
from commutator.kv.tier_thread import JobUrgency, TierThread
from commutator.kv.tier_worker import TierWorker

__all__ = ["TierMove"]


class TierMove:
    """Some blocks at a time: read on the source's thread, then stored on the target's.

    ``done`` is called exactly once, on either thread.
    """

    def __init__(
        self,
        offers: Sequence[Offer],
        source: TierThread,
        target: TierThread,
        scratch: Staging,
        *,
        load_timeout_s: float,
        store_timeout_s: float,
        urgency: JobUrgency,
        done: Stores,
    ) -> None:
        self._offers = list(offers)
        self._source = source
        self._target = target
        self._scratch = scratch
        self._load_timeout_s = load_timeout_s
        self._store_timeout_s = store_timeout_s
        self._urgency = urgency
        self._done = done
        self._stored: list[Stored] = []
        self._failed: dict[BlockKey, str] = {}

    def start(self) -> None:
        """Read the next blocks, or report that all is over."""
        if self._offers:
            self._source.submit(self._urgency, self._read)
        else:
            self._done(self._stored, self._failed)

    def _read(self, worker: TierWorker | None) -> Generator[None, None, None]:
        if worker is None:
            self._failed |= {offer.key: "tier is down" for offer in self._offers}
            self._offers.clear()
            self.start()
            yield from ()
            return
        slots = self._scratch.take(min(PART_BLOCKS, len(self._offers)))
        if not slots:
            self._scratch.take_later(self.start)
            yield from ()
            return
        batch = self._offers[: len(slots)]
        del self._offers[: len(slots)]
        spans = [self._scratch.arena.span(slot) for slot in slots]
        users = dict.fromkeys(slots, 2)  # the read, and what comes after it

        def done_with(slot: int) -> None:
            users[slot] -= 1
            if not users[slot]:
                self._scratch.give_back([slot])

        results = [LoadResult.FAILED] * len(batch)
        try:
            results = worker.load(
                [offer.key for offer in batch],
                spans,
                IoContext(time.monotonic() + self._load_timeout_s),
                to_engine=False,
                on_let_go=lambda position: done_with(slots[position]),
            )
        finally:
            self._write(batch, results, slots, done_with)
        yield from ()

    def _write(
        self,
        batch: Sequence[Offer],
        results: Sequence[LoadResult],
        slots: Sequence[int],
        done_with: Callable[[int], None],
    ) -> None:
        """Store what was read, then go on with the next blocks."""
        good: list[int] = []
        for position, (offer, result) in enumerate(zip(batch, results, strict=True)):
            if result is LoadResult.LOADED:
                good.append(position)
            else:
                self._failed[offer.key] = f"{result.value} at its source"
                done_with(slots[position])

        def written(stored: list[Stored], failed: dict[BlockKey, str]) -> None:
            self._stored += stored
            self._failed |= failed
            for position in good:
                done_with(slots[position])
            self.start()

        self._target.submit(
            self._urgency,
            store_job(
                [batch[position] for position in good],
                [self._scratch.arena.span(slots[position]) for position in good],
                timeout_s=self._store_timeout_s,
                from_engine=False,
                done=written,
            ),
        )
