"""Look-ups: which blocks of a prompt the tiers have, and which are worth onboarding."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

from attrs import define, evolve, field

from commutator.contract.block import BlockKey, CacheIdentity, block_keys
from commutator.contract.tier import StoredBlock
from commutator.contract.worker import BlockExplanation
from commutator_engine_kit.kv.block_manager.actions import Action, JobUrgency
from commutator_engine_kit.kv.loads import Loads
from commutator_engine_kit.kv.tier_stack import OnboardTicket, TierStack
from commutator_engine_kit.kv.tiers.executor import TierExecutor, TierThread

__all__ = ["Lookups"]

ResultT = TypeVar("ResultT")

_TIMEOUT_S = 1.0
"""Shared tiers that do not answer in this time count as empty."""


@define(eq=False)
class _Lookup:
    waiting: int
    """The number of tiers that have not answered."""
    deadline_s: float
    then: list[tuple[Future[Any], Callable[[], None]]] = field(factory=list)
    """Calls to make once all tiers have answered, each with the future that it completes."""


class Lookups:
    """Finds the blocks of prompts in the tiers.

    Asks shared tiers for blocks that no tier is known to have, once for each request.
    """

    def __init__(
        self,
        identity: CacheIdentity,
        tiers: TierStack,
        loads: Loads,
        carry_out: Callable[[Iterable[Action]], None],
    ) -> None:
        """``identity`` and ``carry_out`` as for ``Stores`` and ``Loads``."""
        self._identity = identity
        self._tiers = tiers
        self._queue = tiers.queue
        self._loads = loads
        self._carry_out = carry_out
        self._shared = {
            number: thread
            for number, thread in enumerate(tiers.threads)
            if thread.worker.setup.tier.shared
        }
        self._lookups: dict[str, _Lookup] = {}
        """Of requests that wait for answers, or whose answers are remembered."""

    def keys(
        self,
        token_ids: Sequence[int],
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        known: Sequence[BlockKey] = (),
    ) -> list[BlockKey]:
        """The key of every full block of a prompt; ``known`` has the keys of its first blocks."""
        identity = evolve(self._identity, adapter=adapter, cache_salt=cache_salt)
        return block_keys(identity, token_ids, known)

    def key_of(self, name: bytes) -> BlockKey:
        """The key of the block that the engine calls ``name``.

        The name must depend on the block's tokens, on all tokens before them, and on what else
        keeps requests apart.
        """
        return sha256(b"named" + self._identity.digest + name).digest()

    def plan(
        self,
        keys: Sequence[BlockKey],
        *,
        first: int = 0,
        tokens_per_s: float | None = None,
        request_id: str | None = None,
    ) -> Future[OnboardTicket]:
        """Choose the blocks of a prompt, from ``first`` on, to onboard rather than to compute.

        ``tokens_per_s`` is the engine's speed at prompts; None: onboard every block that is found.
        Shared tiers are asked for blocks that are not known here, which takes at most a second;
        without such a look-up, the future is done at once. Cancel it when the answer is no longer
        needed. ``prefetch`` and ``plan`` with the same ``request_id`` ask shared tiers once.
        """
        compute_s = self._identity.block_size / tokens_per_s if tokens_per_s else None
        name = uuid.uuid4().hex if request_id is None else request_id

        def decide() -> OnboardTicket:
            return self._loads.plan(name, keys, first, compute_s)

        cancel = self._loads.cancel
        return self._after_answers(keys, first, name, decide, forget=True, unwanted=cancel)

    def look_up(self, keys: Sequence[BlockKey], *, first: int = 0) -> Future[None]:
        """Ask shared tiers for the blocks from ``first`` on that no tier is known to have."""
        return self._after_answers(keys, first, None, lambda: None)

    def prefetch(
        self, keys: Sequence[BlockKey], *, first: int = 0, request_id: str | None = None
    ) -> Future[None]:
        """Copy a prompt's blocks from slower tiers to the fastest, as they may be needed soon.

        Done when the copies have begun. With a ``request_id``, the answers of shared tiers are
        remembered for ``plan``; call ``forget`` if no ``plan`` follows.
        """

        def copy() -> None:
            self._carry_out(self._tiers.manager.prefetch(keys, first, time.monotonic()))

        return self._after_answers(keys, first, request_id, copy)

    def explain(self, keys: Sequence[BlockKey], first: int = 0) -> list[BlockExplanation]:
        """Say of each block of a prompt which tiers have it, and whether it would be reused."""
        with self._queue:
            return self._tiers.manager.explain(keys, time.monotonic(), first)

    def forget(self, request_id: str) -> None:
        """Cancel the request's look-ups in shared tiers, and forget their answers."""
        with self._queue:
            self._forget(request_id)

    # What follows is for the connector, and called with the lock held.

    def forget_all(self) -> None:
        """Forget every request."""
        for request_id in list(self._lookups):
            self._forget(request_id)

    def expire(self, now_s: float) -> None:
        """Decide without the tiers that take too long to answer."""
        for lookup in list(self._lookups.values()):
            if lookup.then and now_s >= lookup.deadline_s:
                _decide(lookup)

    def _after_answers(
        self,
        keys: Sequence[BlockKey],
        first: int,
        request_id: str | None,
        decide: Callable[[], ResultT],
        *,
        forget: bool = False,
        unwanted: Callable[[ResultT], None] = lambda _: None,
    ) -> Future[ResultT]:
        """A future of the result of ``decide``, which is called once shared tiers have answered.

        ``forget``: forget the request's answers then, as always without a ``request_id``.
        ``unwanted`` gets the result if the future was cancelled in the meantime.
        """
        future: Future[ResultT] = Future()
        name = uuid.uuid4().hex if request_id is None else request_id

        def complete(result: ResultT) -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(result)
            else:
                unwanted(result)

        def answered() -> None:
            if forget or request_id is None:
                self._forget(name)
            if not future.cancelled():
                self._queue.after(partial(complete, decide()))

        with self._queue:
            known = first + len(self._tiers.manager.match(keys, first))
            self._ask(name, keys, known, future, answered)
        return future

    def _ask(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        known: int,
        future: Future[Any],
        decide: Callable[[], None],
    ) -> None:
        """Call ``decide`` once all tiers have answered; at once if there is nothing to ask.

        ``known`` is how many of the first ``keys`` some tier is known to have.
        """
        now_s = time.monotonic()
        lookup = self._lookups.get(request_id)
        usable: list[tuple[int, TierThread]] = []
        if lookup is None and known < len(keys):
            usable = [(number, thread) for number, thread in self._shared.items() if thread.usable]
            if usable:
                lookup = self._lookups[request_id] = _Lookup(len(usable), now_s + _TIMEOUT_S)
        if lookup is None or not lookup.waiting or now_s >= lookup.deadline_s:
            decide()
            return
        lookup.then.append((future, decide))
        for number, thread in usable:
            thread.submit(JobUrgency.LOAD, partial(self._probe, number, lookup, keys))

    def _forget(self, request_id: str) -> None:
        if (lookup := self._lookups.pop(request_id, None)) is not None:
            waiting, lookup.then = lookup.then, []
            for future, _ in waiting:
                self._queue.after(future.cancel)

    def _probe(
        self, tier: int, lookup: _Lookup, keys: Sequence[BlockKey], worker: TierExecutor | None
    ) -> None:
        """The job of one tier."""
        found: Sequence[StoredBlock] = ()
        try:
            found = () if worker is None else worker.probe(keys)
        finally:
            with self._queue:
                lookup.waiting -= 1
                if found:
                    manager, now_s = self._tiers.manager, time.monotonic()
                    self._carry_out(manager.found(tier, found, now_s))
                if not lookup.waiting:
                    _decide(lookup)


def _decide(lookup: _Lookup) -> None:
    waiting, lookup.then = lookup.then, []
    for _, decide in waiting:
        decide()
