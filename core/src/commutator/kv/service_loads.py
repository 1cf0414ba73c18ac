"""The service's loads: from a plan to jobs of the tiers' threads, and back to one result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from commutator.kv.actions import Action
from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult
from commutator.kv.manager import KvManager
from commutator.kv.scattered_arena import Arena
from commutator.kv.service_jobs import load_job
from commutator.kv.service_state import FinishedLoad, Load, LoadPart, Outbox
from commutator.kv.tier_setup import TierSetup
from commutator.kv.tier_thread import JobUrgency, TierThread

__all__ = ["ServiceLoads"]


class ServiceLoads:
    """Methods are called with the lock of ``outbox`` held, those of jobs take it themselves."""

    def __init__(
        self,
        manager: KvManager,
        setups: Sequence[TierSetup],
        threads: Sequence[TierThread],
        arena: Arena,
        outbox: Outbox,
        carry_out: Callable[[Iterable[Action]], None],
    ) -> None:
        self._manager = manager
        self._setups = setups
        self._threads = threads
        self._arena = arena
        self._outbox = outbox
        self._carry_out = carry_out
        self._loads: dict[str, Load] = {}

    def planned(self, load_id: str, blocks: tuple[tuple[BlockKey, int], ...]) -> None:
        """The manager keeps these blocks for a load that is to be started or dropped."""
        self._loads[load_id] = Load(blocks)

    def tiers_of(self, load_id: str) -> tuple[int, ...]:
        """Where each block of a planned load lies."""
        return tuple(tier for _, tier in self._loads[load_id].blocks)

    def start(self, load_id: str, device_blocks: Sequence[int], skip: int = 0) -> None:
        """Give each tier its part of the planned blocks from number ``skip`` on.

        Raises ValueError unless there are so many, and at least one.
        """
        load = self._loads[load_id]
        chosen = load.blocks[skip : skip + len(device_blocks)]
        if not chosen or len(chosen) != len(device_blocks):
            count = len(load.blocks)
            raise ValueError(f"{count} blocks were planned, not {skip} + {len(device_blocks)}")
        load.blocks = chosen
        load.device_blocks = tuple(device_blocks)
        by_tier: dict[int, list[int]] = {}
        for position, (_, tier) in enumerate(load.blocks):
            by_tier.setdefault(tier, []).append(position)
        timeout_s = max(self._setups[tier].load_timeout_s for tier in by_tier)
        load.deadline_s = time.monotonic() + timeout_s
        load.parts = [LoadPart(tier, positions) for tier, positions in by_tier.items()]
        for part in list(load.parts):
            self._submit(load_id, load, part)

    def drop(self, load_id: str) -> None:
        """Nobody wants it any more. Parts that have not begun are over at once."""
        load = self._loads.get(load_id)
        if load is None:
            return
        load.cancelled = True
        if load.device_blocks:
            self._give_up_waiting(load_id, load)
        else:
            del self._loads[load_id]
            now_s = time.monotonic()
            self._carry_out(self._manager.finish_load(load_id, {}, now_s, seconds={}))

    def drop_all(self) -> None:
        """The service ends."""
        for load_id in list(self._loads):
            self.drop(load_id)

    def expire(self, now_s: float) -> None:
        """Give up what waited too long for its tier's thread: computing is faster by now."""
        late = [(load_id, load) for load_id, load in self._loads.items() if now_s > load.deadline_s]
        for load_id, load in late:
            self._give_up_waiting(load_id, load)

    def _submit(self, load_id: str, load: Load, part: LoadPart) -> None:
        def begin() -> bool:
            with self._outbox:
                part.begun = not part.given_up
                return part.begun

        blocks = [load.device_blocks[position] for position in part.positions]
        keys = [load.blocks[position][0] for position in part.positions]
        job = load_job(
            keys,
            [self._arena.span(block) for block in blocks],
            timeout_s=self._setups[part.tier].load_timeout_s,
            begin=begin,
            cancelled=lambda: load.cancelled,
            on_let_go=lambda index: self._outbox.released([blocks[index]]),
            done=partial(self._part_done, load_id, load, part, keys),
        )
        self._threads[part.tier].submit(JobUrgency.LOAD, job)

    def _part_done(
        self,
        load_id: str,
        load: Load,
        part: LoadPart,
        keys: Sequence[BlockKey],
        results: list[LoadResult],
        seconds: float,
    ) -> None:
        with self._outbox:
            load.results.update(zip(keys, results, strict=True))
            load.seconds[part.tier] = seconds
            self._over(load_id, load, part)

    def _give_up_waiting(self, load_id: str, load: Load) -> None:
        for part in [part for part in load.parts if not part.begun]:
            part.given_up = True
            self._outbox.released(load.device_blocks[position] for position in part.positions)
            self._over(load_id, load, part)

    def _over(self, load_id: str, load: Load, part: LoadPart) -> None:
        # By identity: two parts that look alike are two.
        load.parts = [other for other in load.parts if other is not part]
        if load.parts:
            return
        del self._loads[load_id]
        good = 0
        for key, _ in load.blocks:
            if load.results.get(key) is not LoadResult.LOADED:
                break
            good += 1
        self._outbox.finished(FinishedLoad(load_id, good))
        self._carry_out(
            self._manager.finish_load(load_id, load.results, time.monotonic(), seconds=load.seconds)
        )
