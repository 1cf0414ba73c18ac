"""What is done with one tier, on the tier's own thread: open, store, load, free, ask."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from attrs import frozen

from commutator.errors import CommutatorError, TierError
from commutator.kv.block_io import BlockIo, IoContext, LoadBlock, StoreBlock, Unstored
from commutator.kv.careful_tier import CarefulTier
from commutator.kv.guards import Bandwidth, RetryBudget
from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult
from commutator.kv.offer import Offer
from commutator.kv.scattered_arena import Arena
from commutator.kv.staging import Staging
from commutator.kv.tier import Slot, SlotGeometry, Stored
from commutator.kv.tier_mover import LOCAL_BACKEND, TierMover
from commutator.kv.tier_setup import TierSetup, build_io
from commutator.transfer import Memory, Span, TransferAgent, lane_names

__all__ = ["StoreOutcome", "TierWorker"]

log = logging.getLogger(__name__)

_MOST_FAILURES = 3
_never_freed: list[object] = []
"""Tiers that were closed while NIXL still moved bytes: their memory stays while the process lives.
"""


@frozen
class StoreOutcome:
    """What became of a list of blocks."""

    stored: list[Stored]
    failed: dict[BlockKey, str]


class TierWorker:
    """``arena`` is the engine's memory, ``scratch`` holds blocks between two tiers.

    ``staging`` is this tier's alone, so that one that hangs does not keep it from others.
    ``agent_name`` must be unique among all processes that exchange blocks.
    """

    def __init__(
        self,
        setup: TierSetup,
        geometry: SlotGeometry,
        arena: Arena,
        staging: Staging,
        scratch: Staging,
        *,
        agent_name: str,
        on_open: Callable[[Sequence[Stored]], None],
    ) -> None:
        self.setup = setup
        self.geometry = geometry
        self._arena = arena
        self._staging = staging
        self._scratch = scratch
        self.agent_name = agent_name
        self._on_open = on_open
        self._budget = RetryBudget()
        rate = setup.max_bytes_per_s
        self._bandwidth = None if rate is None else Bandwidth(rate)
        self._agents: list[TransferAgent] = []
        self._engine: tuple[BlockIo, TierMover] | None = None
        self._memory: tuple[BlockIo, TierMover] | None = None
        self._tier = CarefulTier(setup.tier, setup.name)
        self._unfreed: dict[BlockKey, bool] = {}
        """Blocks that nobody knows any more, but that the tier could not forget yet; True for those
        that are only to make room."""
        self._failures = 0
        """How often in a row the tier's own records could not be written."""
        self._probes_fail = False

    @property
    def is_open(self) -> bool:
        """Whether the tier can be used. One whose records cannot be written has to be reopened."""
        return self._engine is not None and self._failures < _MOST_FAILURES

    def metadata(self) -> bytes:
        """What another process's agent needs to read from this one's. Raises TierError."""
        if not self._agents:
            raise TierError("the tier is not open")
        return self._agents[0].metadata()

    def open(self) -> None:
        """Open the tier and its NIXL agent, anew if need be.

        Raises TierError, TransferError or OSError; then nothing of it is open.
        """
        self._shut()
        tier = self.setup.tier
        found = tier.open(self.geometry)
        try:
            self._connect()
        except Exception:
            self._shut()
            raise
        self._failures = 0
        unfreed, self._unfreed = self._unfreed, {}
        self._on_open([stored for stored in found if stored.key not in unfreed])
        self._unfreed = unfreed
        self._free_pending()

    def _connect(self) -> None:
        setup, tier = self.setup, self.setup.tier
        backends = {tier.backend: dict(tier.backend_parameters)}
        backends.setdefault(LOCAL_BACKEND, {})
        scratch = self._scratch.arena
        arenas: list[Arena] = [self._arena, scratch]
        local = [region for arena in arenas for region in arena.regions]
        if not all(setup.is_direct(arena) for arena in arenas):
            local.append(self._staging.arena.region)
        in_memory = tier.memory is Memory.DRAM
        for name in lane_names(self.agent_name) if in_memory else [self.agent_name]:
            agent = TransferAgent(name, backends)
            self._agents.append(agent)
            agent.register(tier.regions(), tier.backend)
            for backend in {tier.backend, LOCAL_BACKEND}:
                # Storage reaches a GPU's memory by way of staging.
                fit = [r for r in local if backend == LOCAL_BACKEND or r.memory is Memory.DRAM]
                agent.register(fit, backend)
        self._engine, self._memory = (
            build_io(setup, self._agents, arena, self._staging, self._budget, self._bandwidth)
            for arena in arenas
        )

    def store(
        self,
        offers: Sequence[Offer],
        sources: Sequence[Span],
        context: IoContext,
        *,
        from_engine: bool,
    ) -> StoreOutcome:
        """Reserve, write, verify, commit. What is not stored leaves nothing behind."""
        io, mover = self._stack(from_engine=from_engine)
        if self._unfreed:
            self._free_pending()  # their slots, and perhaps their keys, are needed
        outcome = StoreOutcome([], {})
        blocks: list[StoreBlock] = []
        slots = self._reserve([offer.key for offer in offers])
        for offer, source, slot in zip(offers, sources, slots, strict=True):
            if slot is None:
                outcome.failed[offer.key] = "no free slot"
                continue
            blocks.append(StoreBlock(offer=offer, slot=slot, local=source))
        written: list[Stored] = []
        for block, result in zip(blocks, io.store(blocks, context), strict=True):
            if isinstance(result, Unstored):
                outcome.failed[block.key] = "write failed"
                self._let_go(mover, block.slot)
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
        on_let_go: Callable[[int], None] = lambda _: None,
    ) -> list[LoadResult]:
        """Read blocks and verify them.

        ``on_let_go`` is told each position once NIXL cannot touch its span any more: mostly before
        this returns.
        """
        io, mover = self._stack(from_engine=to_engine)
        known = self._located(keys)
        results = [LoadResult.FAILED if known is None else LoadResult.MISSING] * len(keys)
        blocks: dict[int, LoadBlock] = {}
        for position, stored in enumerate(known or [None] * len(keys)):
            if stored is not None and self._tier.pin(stored.slot):
                blocks[position] = LoadBlock(stored=stored, local=spans[position])
            else:
                on_let_go(position)
        outcomes = io.load(list(blocks.values()), context)
        for (position, block), result in zip(blocks.items(), outcomes, strict=True):
            results[position] = result
            slot = block.stored.slot

            def over(slot: Slot = slot, position: int = position) -> None:
                self._tier.unpin(slot)
                on_let_go(position)

            mover.when_let_go(slot, over)
        return results

    def verify(self, keys: Sequence[BlockKey], context: IoContext) -> dict[BlockKey, LoadResult]:
        """Read and check the first of these blocks: as many as there is scratch memory for."""
        slots = self._scratch.take(len(keys))
        results = self.load(
            keys[: len(slots)],
            [self._scratch.arena.span(slot) for slot in slots],
            context,
            to_engine=False,
            on_let_go=lambda position: self._scratch.give_back([slots[position]]),
        )
        return dict(zip(keys, results, strict=False))

    def free(self, keys: Iterable[BlockKey], *, makes_room: bool = False) -> None:
        """Forget committed blocks; those that the tier cannot forget now, later.

        With ``makes_room`` those of them that others stored on a shared medium stay there.
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

    def probe(self, keys: Sequence[BlockKey]) -> list[Stored]:
        """Which of a chain's blocks the medium has, whoever stored them.

        A medium that cannot be asked fails, as one that cannot be read.
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
            breaker.given_up()  # that it can be asked does not tell that it can be read
        self._probes_fail = False
        return found

    def _located(self, keys: Sequence[BlockKey]) -> Sequence[Stored | None] | None:
        """What is to be read; None when the tier cannot tell.

        Others may have brought back what a shared tier's books lack.
        """
        known = self._tier.lookup(keys)
        if known is not None and self.setup.tier.shared and None in known:
            self.probe(keys)
            known = self._tier.lookup(keys)
        return known

    def reap(self) -> None:
        """Give back what NIXL has let go of since."""
        movers = [stack[1] for stack in (self._engine, self._memory) if stack is not None]
        if not any(mover.has_held for mover in movers):
            return
        # An agent tells each only once, and the movers share them.
        over = {token for agent in self._agents for token in agent.reap()}
        for mover in movers:
            mover.let_go(over)

    def close(self) -> None:
        """Close the agent, then the tier. Waits a few seconds for moves under way."""
        try:
            for agent in self._agents:
                agent.close()
            self._shut()
        except CommutatorError as error:
            log.warning("tier %s: %s", self.setup.name, error)
            _never_freed.append(self)

    def _shut(self) -> None:
        """Raises TierError or TransferError while NIXL has not let go of everything."""
        self.reap()
        if any(stack[1].has_held for stack in (self._engine, self._memory) if stack is not None):
            raise TierError("it cannot be closed: transfers that were given up have not ended")
        self._engine = self._memory = None
        while self._agents:
            self._agents[-1].close()  # while it cannot be, the tier's memory has to stay
            self._agents.pop()
        self.setup.tier.close()

    def _stack(self, *, from_engine: bool) -> tuple[BlockIo, TierMover]:
        stack = self._engine if from_engine else self._memory
        assert stack is not None, "the tier is open"
        return stack

    def _let_go(self, mover: TierMover, slot: int) -> None:
        """Release a reserved slot once nothing writes there."""
        if mover.is_held(slot):
            if not self._tier.pin(slot):
                return  # rather lost than written to by two
            mover.when_let_go(slot, lambda: self._tier.unpin(slot))
        self._tier.release([slot])
