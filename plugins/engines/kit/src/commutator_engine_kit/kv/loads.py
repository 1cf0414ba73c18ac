"""Loads: the blocks that an engine onboards from its tiers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import takewhile

from attrs import define, field

from commutator.contract.block import BlockKey
from commutator.contract.tier import Span
from commutator.errors import TierError
from commutator_engine_kit.kv.block_manager.actions import Action, JobUrgency, LoadResult
from commutator_engine_kit.kv.block_manager.onboard import GroupChain
from commutator_engine_kit.kv.groups import KvGroup
from commutator_engine_kit.kv.tier_stack import (
    FinishedOnboard,
    OnboardTicket,
    TierStack,
    settle,
    uncancellable,
)
from commutator_engine_kit.kv.tiers.executor import TierExecutor
from commutator_engine_kit.kv.tiers.mover import IoContext

_GRACE_S = 0.5
"""What a tier's thread takes to give up a load, unless it waits in the kernel."""


@define(eq=False)
class _Part:
    """The blocks of an onboard that one tier reads, in one job."""

    tier: int
    positions: Sequence[int]
    """The blocks' positions in the onboard."""
    begun: bool = False
    given_up: bool = False
    """Before it began, its job does nothing; afterwards its result is not waited for."""


@define(eq=False)
class _Onboard:
    """An onboard from its plan until its last block is released."""

    ticket: OnboardTicket
    blocks: tuple[tuple[BlockKey, int], ...]
    """The key and the tier of each block."""
    device_blocks: Sequence[int] = ()
    spans: Sequence[Span] = ()
    """The device blocks' memory."""
    unreleased: int = 0
    results: dict[BlockKey, LoadResult] = field(factory=dict)
    seconds: dict[int, float] = field(factory=dict)
    """The duration of each tier's job."""
    parts: list[_Part] = field(factory=list)
    """The parts that have not ended."""
    deadline_s: float = float("inf")
    """Parts that have not begun by this time are given up."""
    cancelled: bool = False
    good: int | None = None
    """How many of the first blocks were loaded; None until the last part has ended."""
    future: Future[list[bool]] = field(factory=uncancellable)


class Loads:
    """Onboards what look-ups found.

    Splits each onboard into jobs of the tiers' threads, and joins their results.
    """

    def __init__(
        self,
        tiers: TierStack,
        groups: Sequence[KvGroup],
        carry_out: Callable[[Iterable[Action]], None],
    ) -> None:
        """``carry_out`` gets what the block manager wants done."""
        self._tiers = tiers
        self._groups = groups
        self._queue = tiers.queue
        self._carry_out = carry_out
        self._numbers = itertools.count(1)
        self._onboards: dict[str, _Onboard] = {}

    def onboard(
        self, ticket: OnboardTicket, device_blocks: Sequence[int], *, skip: int = 0
    ) -> Future[list[bool]]:
        """Read the ticket's blocks from number ``skip`` on into device blocks.

        The result has True for each block that was read and verified; no True follows a False. The
        ticket's other blocks are not onboarded. Blocks for which a tier's thread has no time before
        their deadline are given up. Done when no tier touches the device blocks any more;
        ``Polled.onboards`` has the result earlier if a transfer was abandoned. Raises TierError
        once the tiers are closed, ValueError when the ticket does not have these blocks or was used
        before, IndexError for a device block that is not in the arena.
        """
        with self._queue:
            self._tiers.must_be_open()
            positions = range(skip, skip + len(device_blocks))
            return self._begin(ticket, positions, device_blocks)

    def onboard_groups(
        self,
        ticket: OnboardTicket,
        device_blocks: Sequence[Sequence[int]],
        *,
        first_tokens: int = 0,
    ) -> Future[list[bool]]:
        """As ``onboard``, of a ticket from ``Lookups.plan_groups``: all blocks or none are good.

        ``device_blocks`` has, for each group, one for each of its blocks in ``ticket.places`` that
        ends after ``first_tokens``, the boundary that the device serves by now. Raises ValueError
        also where no block is left to load: cancel the ticket instead.
        """
        with self._queue:
            self._tiers.must_be_open()
            chosen = [
                position
                for position, (group, number) in enumerate(ticket.places)
                if (number + 1) * self._groups[group].block_size > first_tokens
            ]
            targets = [iter(blocks) for blocks in device_blocks]
            blocks = [next(targets[ticket.places[position][0]], None) for position in chosen]
            if None in blocks or any(next(rest, None) is not None for rest in targets):
                raise ValueError(f"{len(chosen)} blocks are to be loaded, not {device_blocks}")
            return self._begin(ticket, chosen, [block for block in blocks if block is not None])

    def cancel(self, ticket: OnboardTicket) -> None:
        """Cancel a planned or started onboard. The future of a started one is done soon."""
        with self._queue:
            self._cancel(ticket.id)

    # What follows is for the connector, and called with the lock held.

    def plan(
        self, request_id: str, keys: Sequence[BlockKey], first: int, compute_s: float | None
    ) -> OnboardTicket:
        """Choose blocks from ``first`` on to onboard; the block manager pins them."""
        ticket_id, now_s = str(next(self._numbers)), time.monotonic()
        plan = self._tiers.manager.begin_onboard(ticket_id, keys, first, now_s, compute_s=compute_s)
        media = self._media(plan.blocks)
        ticket = OnboardTicket(id=ticket_id, request_id=request_id, first=first, media=media)
        if plan.blocks:
            self._onboards[ticket.id] = _Onboard(ticket, plan.blocks)
        return ticket

    def plan_groups(
        self,
        request_id: str,
        chains: Sequence[GroupChain],
        limit_tokens: int,
        token_s: float | None,
    ) -> OnboardTicket:
        """As ``plan``, for a model with several groups."""
        ticket_id, now_s = str(next(self._numbers)), time.monotonic()
        plan = self._tiers.manager.begin_group_onboard(
            ticket_id, chains, limit_tokens, now_s, token_s=token_s
        )
        ticket = OnboardTicket(
            id=ticket_id,
            request_id=request_id,
            first=0,
            media=self._media(plan.blocks),
            boundary=plan.boundary,
            shared=plan.shared,
            places=plan.places,
        )
        if plan.blocks:
            self._onboards[ticket.id] = _Onboard(ticket, plan.blocks)
        return ticket

    def cancel_all(self) -> None:
        """Cancel every onboard."""
        for ticket_id in list(self._onboards):
            self._cancel(ticket_id)

    def expire(self, now_s: float) -> None:
        """Give up parts that waited too long for their tier's thread: computing is faster now.

        Those, too, whose tier's thread is silent, be it with a store. And those that have begun,
        where the thread does not come back to give up by itself, as it waits in the kernel for a
        disk: their device blocks stay with it until it does. Such a tier is paused meanwhile.
        """
        for onboard in list(self._onboards.values()):
            begun = [part for part in onboard.parts if part.begun]
            for part in [part for part in begun if self._lost(part.tier, now_s)]:
                part.given_up = onboard.cancelled = True
                self._pause(part.tier)
                self._ended(onboard, part)
            if now_s > onboard.deadline_s:
                onboard.deadline_s = float("inf")
                for part in onboard.parts:
                    if self._late_s(part.tier, now_s) > 0:
                        self._pause(part.tier)
                self._give_up_waiting(onboard)
                continue
            waiting = [part for part in onboard.parts if not part.begun]
            if any(self._silent_s(part.tier, now_s) > 0 for part in waiting):
                self._give_up_waiting(onboard)

    def _lost(self, tier: int, now_s: float) -> bool:
        """Whether the tier's thread should have given up its load by itself."""
        return max(self._late_s(tier, now_s), self._silent_s(tier, now_s)) > _GRACE_S

    def _late_s(self, tier: int, now_s: float) -> float:
        """For how long the tier's thread has been busy, beyond what a load may take."""
        since_s = self._tiers.threads[tier].busy_since_s
        return 0.0 if since_s is None else now_s - since_s - self._timeout_s(tier)

    def _silent_s(self, tier: int, now_s: float) -> float:
        """For how long no block has arrived at the tier's busy thread, beyond what a load may wait.

        The thread of a tier with ``max_bytes_per_s`` pauses by itself, which is no silence.
        """
        thread = self._tiers.threads[tier]
        config, since_s = thread.worker.setup.config, thread.busy_since_s
        if since_s is None or config.max_bytes_per_s is not None:
            return 0.0
        return now_s - max(since_s, thread.worker.news_s) - config.stall_timeout_s

    def _pause(self, tier: int) -> None:
        self._tiers.threads[tier].pause("its storage does not answer")

    def fail(self, error: TierError) -> None:
        """Fail the futures of all onboards: no thread is left to end them."""
        for onboard in self._onboards.values():
            self._queue.after(partial(settle, onboard.future, error))

    def _media(self, blocks: Sequence[tuple[BlockKey, int]]) -> tuple[str, ...]:
        return tuple(self._tiers.threads[tier].worker.setup.tier.medium for _, tier in blocks)

    def _begin(
        self, ticket: OnboardTicket, positions: Sequence[int], device_blocks: Sequence[int]
    ) -> Future[list[bool]]:
        onboard = self._onboards.get(ticket.id)
        if onboard is None or onboard.device_blocks:
            raise ValueError(f"onboard {ticket.id} was started or cancelled before")
        count = len(onboard.blocks)
        if not positions or len(positions) != len(device_blocks) or positions[-1] >= count:
            raise ValueError(f"{count} blocks were planned, not {positions}")
        chosen = tuple(onboard.blocks[position] for position in positions)
        onboard.spans = [self._tiers.arena.span(block) for block in device_blocks]
        onboard.blocks = chosen
        onboard.device_blocks = tuple(device_blocks)
        onboard.unreleased = len(device_blocks)
        by_tier: dict[int, list[int]] = {}
        for position, (_, tier) in enumerate(chosen):
            by_tier.setdefault(tier, []).append(position)
        onboard.deadline_s = time.monotonic() + max(map(self._timeout_s, by_tier))
        onboard.parts = [_Part(tier, positions) for tier, positions in by_tier.items()]
        for part in list(onboard.parts):
            self._tiers.threads[part.tier].submit(
                JobUrgency.LOAD, partial(self._load, onboard, part)
            )
        return onboard.future

    def _cancel(self, ticket_id: str) -> None:
        onboard = self._onboards.get(ticket_id)
        if onboard is None:
            return
        onboard.cancelled = True
        if onboard.device_blocks:
            self._give_up_waiting(onboard)
        else:
            del self._onboards[ticket_id]
            self._finish(ticket_id, {}, {})

    def _timeout_s(self, tier: int) -> float:
        return self._tiers.threads[tier].worker.setup.config.load_timeout_s

    def _load(self, onboard: _Onboard, part: _Part, worker: TierExecutor | None) -> None:
        """The job of a part."""
        with self._queue:
            if part.given_up:
                return
            part.begun = True
        keys = [onboard.blocks[position][0] for position in part.positions]
        results, started_s = [LoadResult.FAILED] * len(keys), time.monotonic()

        def released(index: int) -> None:
            with self._queue:
                self._release(onboard, [part.positions[index]])

        try:
            if worker is None:
                for index in range(len(keys)):
                    released(index)
            else:
                results = worker.load(
                    keys,
                    [onboard.spans[position] for position in part.positions],
                    IoContext(
                        started_s + self._timeout_s(part.tier),
                        lambda: onboard.cancelled,
                        worker.setup.config.stall_timeout_s,
                    ),
                    to_engine=True,
                    on_released=released,
                )
        finally:
            with self._queue:
                if not part.given_up:
                    onboard.results.update(zip(keys, results, strict=True))
                    onboard.seconds[part.tier] = time.monotonic() - started_s
                    self._ended(onboard, part)

    def _give_up_waiting(self, onboard: _Onboard) -> None:
        for part in [part for part in onboard.parts if not part.begun]:
            part.given_up = True
            self._release(onboard, part.positions)
            self._ended(onboard, part)

    def _ended(self, onboard: _Onboard, part: _Part) -> None:
        onboard.parts.remove(part)
        if onboard.parts:
            return
        results = (onboard.results.get(key) for key, _ in onboard.blocks)
        good = sum(1 for _ in takewhile(lambda result: result is LoadResult.LOADED, results))
        if onboard.ticket.places and good < len(onboard.blocks):
            good = 0  # one group without its blocks makes those of the others useless
        onboard.good = good
        self._queue.report(onboards=[FinishedOnboard(ticket=onboard.ticket, blocks=good)])
        self._finish(onboard.ticket.id, onboard.results, onboard.seconds)
        self._settle(onboard)

    def _release(self, onboard: _Onboard, positions: Sequence[int]) -> None:
        self._queue.report(released=[onboard.device_blocks[position] for position in positions])
        onboard.unreleased -= len(positions)
        self._settle(onboard)

    def _settle(self, onboard: _Onboard) -> None:
        """Complete the future once the result is known and every block is released."""
        if onboard.unreleased or onboard.good is None:
            return
        del self._onboards[onboard.ticket.id]
        loaded = [position < onboard.good for position in range(len(onboard.device_blocks))]
        self._queue.after(partial(settle, onboard.future, loaded))

    def _finish(
        self, ticket_id: str, results: dict[BlockKey, LoadResult], seconds: dict[int, float]
    ) -> None:
        manager, now_s = self._tiers.manager, time.monotonic()
        self._carry_out(manager.finish_onboard(ticket_id, results, now_s, seconds=seconds))
