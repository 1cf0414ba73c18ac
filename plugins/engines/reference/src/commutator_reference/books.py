"""Who holds which block: the scheduler, and all that keep blocks beside the requests that run."""

from __future__ import annotations

from commutator.engine.handover import DecodeWords, PrefillWords
from commutator.kv import CacheIdentity, KvEvent, KvService
from commutator_reference.block_identity import ANONYMOUS
from commutator_reference.blocks import BlockPool
from commutator_reference.exporting import Exporting
from commutator_reference.handover import Handover
from commutator_reference.options import EngineOptions
from commutator_reference.pulling import Pulling
from commutator_reference.scheduler import BlockLoads, Scheduler
from commutator_reference.sequence import Sequence
from commutator_reference.tiering import Tiering

__all__ = ["Books"]


class Books:
    """Begun anew when they cannot be trusted; on the engine's thread."""

    def __init__(self, options: EngineOptions, max_model_len: int) -> None:
        self._options = options
        self._max_model_len = max_model_len
        self._service: KvService | None = None
        self._handover: Handover | None = None
        self.identity: CacheIdentity = ANONYMOUS
        """What decides a block's bytes, but for tokens, adapter and salt."""
        self.tiering: Tiering | None = None
        self.exporting: Exporting | None = None
        self.pulling: Pulling | None = None
        self.broken = False
        """Whether they wait to begin anew."""
        self.scheduler = self._begin()

    def use_tiers(self, service: KvService, identity: CacheIdentity) -> None:
        """Before the first request."""
        self._service, self.identity = service, identity
        self.scheduler = self._begin()

    def use_handover(self, handover: Handover) -> None:
        """Before the first request."""
        self._handover = handover
        self.scheduler = self._begin()

    def add(self, sequence: Sequence, words: PrefillWords | DecodeWords | None) -> str | None:
        """Take a request. None, or why there is nothing to be done for it."""
        if isinstance(words, PrefillWords):
            assert self.exporting is not None
            if (problem := self.exporting.begin(sequence, words)) is not None:
                return problem
        self.scheduler.add(sequence)
        if isinstance(words, DecodeWords):
            assert self.pulling is not None
            self.pulling.begin(sequence, words)
        return None

    def skip(self, words: PrefillWords | DecodeWords | None) -> None:
        """A request was aborted before it could be taken."""
        if isinstance(words, PrefillWords):
            assert self.exporting is not None
            self.exporting.skip(words)

    def update(self) -> tuple[list[KvEvent], list[tuple[int, str]]]:
        """Once a step: take what tiers and other workers have brought.

        Returns what routers are to be told, and requests whose KV did not arrive, with the reason.
        """
        events = [] if self.tiering is None else self.tiering.update()
        failed = [] if self.pulling is None else self.pulling.update()
        return events, failed

    def look_ahead(self) -> None:
        """Once a step was planned: bring blocks up in the tiers that will be needed soon."""
        if self.tiering is None:
            return
        if self.scheduler.queue:
            self.tiering.waiting(self.scheduler.queue)
        elif not self.scheduler.running:
            self.tiering.look_ahead.idle()

    def ended(self, sequence: Sequence) -> None:
        """Its answer is complete."""
        if self.tiering is not None:
            self.tiering.look_ahead.ended(sequence)

    def hand_over(self) -> list[Sequence]:
        """Hand over what is in place now; prefills that are done by this are forgotten.

        What comes after the last full block is never computed for somebody else.
        """
        done = [] if self.exporting is None else self.exporting.advance()
        sequences = [sequence for key in done if (sequence := self.scheduler.get(key)) is not None]
        for sequence in sequences:
            self.scheduler.remove(sequence.key)
        return sequences

    def give_up(self) -> None:
        """They cannot be trusted: forget every request, and every block when that is safe.

        Blocks that are on their way to or from somewhere must arrive before they are used again.
        """
        self.broken = True
        for keeper in (self.tiering, self.exporting, self.pulling):
            if keeper is not None:
                keeper.give_up()

    def recovered(self) -> tuple[bool, list[KvEvent]]:
        """Whether everything could begin anew, and what routers are to be told."""
        settled, events = True, list[KvEvent]()
        if self.tiering is not None:
            settled, events = self.tiering.settled()
        if self.pulling is not None:
            settled &= self.pulling.settled()
        if not settled:
            return False, events
        events = events + self.scheduler.pool.abandon()
        self.scheduler = self._begin(self.scheduler.preemptions)
        self.broken = False
        return True, events

    def _begin(self, preemptions: int = 0) -> Scheduler:
        options = self._options
        pool = BlockPool(
            options.num_blocks, options.block_size, prefix_caching=options.prefix_caching
        )
        loads: list[BlockLoads] = []
        if self._handover is not None:
            self.exporting = Exporting(self._handover, pool)
            self.pulling = Pulling(self._handover, pool)
            # First what another worker computes: what is there then, no tier is asked for.
            loads += [self.exporting, self.pulling]
        if self._service is not None:
            self.tiering = Tiering(self._service, pool)
            loads.append(self.tiering)
        scheduler = Scheduler(pool, options.limits, self._max_model_len, loads)
        scheduler.preemptions = preemptions
        return scheduler
