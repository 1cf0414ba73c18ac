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
from commutator_engine_kit.kv.block_manager.onboard import GroupChain
from commutator_engine_kit.kv.groups import alignment, usable_boundary
from commutator_engine_kit.kv.loads import Loads
from commutator_engine_kit.kv.tier_stack import OnboardTicket, TierStack
from commutator_engine_kit.kv.tiers.executor import TierExecutor, TierThread

ResultT = TypeVar("ResultT")

_Ask = Callable[[Future[Any], Callable[[], None]], None]
_Search = Callable[[TierExecutor], Sequence[StoredBlock]]
_Holders = Callable[[Sequence[BlockKey]], Sequence[int | None]]

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
        identities: Sequence[CacheIdentity],
        tiers: TierStack,
        loads: Loads,
        carry_out: Callable[[Iterable[Action]], None],
    ) -> None:
        """``identities`` and ``carry_out`` as for ``Stores`` and ``Loads``."""
        self._identities = identities
        self._identity = identities[0]
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
        group: int = 0,
    ) -> list[BlockKey]:
        """The key of every full block of a prompt; ``known`` has the keys of its first blocks.

        ``group`` is the number of one of the connector's groups: each has keys of its own.
        """
        identity = evolve(self._identities[group], adapter=adapter, cache_salt=cache_salt)
        return block_keys(identity, token_ids, known)

    def key_of(self, name: bytes, group: int = 0) -> BlockKey:
        """The key of the block of a group that the engine calls ``name``.

        The name must depend on the block's tokens, on all tokens before them, and on what else
        keeps requests apart.
        """
        return sha256(b"named" + self._identities[group].digest + name).digest()

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

        return self._planned(partial(self._ask, name, keys, first), name, decide)

    def plan_groups(
        self,
        chains: Sequence[GroupChain],
        limit_tokens: int,
        *,
        tokens_per_s: float | None = None,
        request_id: str | None = None,
    ) -> Future[OnboardTicket]:
        """As ``plan``, for a model with several groups: one chain for each of the connector's.

        The ticket's boundary, at most ``limit_tokens``, is one that every group can serve, with
        what the chains say the device has and what the tickets' blocks bring.
        """
        name = uuid.uuid4().hex if request_id is None else request_id

        def decide() -> OnboardTicket:
            token_s = 1 / tokens_per_s if tokens_per_s else None
            return self._loads.plan_groups(name, chains, limit_tokens, token_s)

        return self._planned(partial(self._ask_groups, name, chains, limit_tokens), name, decide)

    def prefetch_groups(
        self, chains: Sequence[GroupChain], limit_tokens: int, *, request_id: str | None = None
    ) -> Future[None]:
        """As ``prefetch``, for a model with several groups."""

        def copy() -> None:
            manager = self._tiers.manager
            self._carry_out(manager.prefetch_groups(chains, limit_tokens, time.monotonic()))

        name = uuid.uuid4().hex if request_id is None else request_id
        ask = partial(self._ask_groups, name, chains, limit_tokens)
        return self._after_answers(ask, name, copy, forget=request_id is None)

    def look_up(self, keys: Sequence[BlockKey], *, first: int = 0) -> Future[None]:
        """Ask shared tiers for the blocks from ``first`` on that no tier is known to have."""
        name = uuid.uuid4().hex
        return self._after_answers(
            partial(self._ask, name, keys, first), name, lambda: None, forget=True
        )

    def prefetch(
        self, keys: Sequence[BlockKey], *, first: int = 0, request_id: str | None = None
    ) -> Future[None]:
        """Copy a prompt's blocks from slower tiers to the fastest, as they may be needed soon.

        Done when the copies have begun. With a ``request_id``, the answers of shared tiers are
        remembered for ``plan``; call ``forget`` if no ``plan`` follows.
        """

        def copy() -> None:
            self._carry_out(self._tiers.manager.prefetch(keys, first, time.monotonic()))

        name = uuid.uuid4().hex if request_id is None else request_id
        ask = partial(self._ask, name, keys, first)
        return self._after_answers(ask, name, copy, forget=request_id is None)

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

    def _planned(
        self, ask: _Ask, name: str, decide: Callable[[], OnboardTicket]
    ) -> Future[OnboardTicket]:
        cancel = self._loads.cancel
        return self._after_answers(ask, name, decide, forget=True, unwanted=cancel)

    def _after_answers(
        self,
        ask: _Ask,
        name: str,
        decide: Callable[[], ResultT],
        *,
        forget: bool,
        unwanted: Callable[[ResultT], None] = lambda _: None,
    ) -> Future[ResultT]:
        """The result of ``decide``, which ``ask`` calls once shared tiers have answered.

        ``forget``: forget then the answers for ``name``, the request. ``unwanted`` gets the result
        if the future was cancelled in the meantime.
        """
        future: Future[ResultT] = Future()

        def complete(result: ResultT) -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(result)
            else:
                unwanted(result)

        def answered() -> None:
            if forget:
                self._forget(name)
            if not future.cancelled():
                self._queue.after(partial(complete, decide()))

        with self._queue:
            ask(future, answered)
        return future

    def _ask(
        self,
        name: str,
        keys: Sequence[BlockKey],
        first: int,
        future: Future[Any],
        decide: Callable[[], None],
    ) -> None:
        """Call ``decide`` once all tiers have answered; at once if there is nothing to ask."""
        known = first + len(self._tiers.manager.match(keys, first))
        self._submit(name, known < len(keys), lambda tier: tier.probe(keys), future, decide)

    def _ask_groups(
        self,
        name: str,
        chains: Sequence[GroupChain],
        limit_tokens: int,
        future: Future[Any],
        decide: Callable[[], None],
    ) -> None:
        """As ``_ask``, for the blocks of a model with several groups."""
        step = alignment([chain.group for chain in chains])
        usable = _usable(chains, limit_tokens, self._known)
        search = partial(_search, chains, limit_tokens, self._known)
        self._submit(name, usable + step <= limit_tokens, search, future, decide)

    def _known(self, keys: Sequence[BlockKey]) -> list[int | None]:
        with self._queue:
            return self._tiers.manager.holders(keys)

    def _submit(
        self,
        request_id: str,
        incomplete: bool,
        search: _Search,
        future: Future[Any],
        decide: Callable[[], None],
    ) -> None:
        """Have every shared tier search, if something is missing and they were not asked yet."""
        now_s = time.monotonic()
        lookup = self._lookups.get(request_id)
        usable: list[tuple[int, TierThread]] = []
        if lookup is None and incomplete:
            usable = [(number, thread) for number, thread in self._shared.items() if thread.usable]
            if usable:
                lookup = self._lookups[request_id] = _Lookup(len(usable), now_s + _TIMEOUT_S)
        if lookup is None or not lookup.waiting or now_s >= lookup.deadline_s:
            decide()
            return
        lookup.then.append((future, decide))
        for number, thread in usable:
            thread.submit(JobUrgency.LOAD, partial(self._probe, number, lookup, search))

    def _forget(self, request_id: str) -> None:
        if (lookup := self._lookups.pop(request_id, None)) is not None:
            waiting, lookup.then = lookup.then, []
            for future, _ in waiting:
                self._queue.after(future.cancel)

    def _probe(
        self, tier: int, lookup: _Lookup, search: _Search, worker: TierExecutor | None
    ) -> None:
        """The job of one tier."""
        found: Sequence[StoredBlock] = ()
        try:
            found = () if worker is None else search(worker)
        finally:
            with self._queue:
                lookup.waiting -= 1
                if found:
                    manager, now_s = self._tiers.manager, time.monotonic()
                    self._carry_out(manager.found(tier, found, now_s))
                if not lookup.waiting:
                    _decide(lookup)


def _usable(
    chains: Sequence[GroupChain], limit_tokens: int, holders: _Holders, *, prefix: bool = False
) -> int:
    """The largest boundary with the blocks that are held; ``prefix``: of groups that need all."""
    chosen = [chain for chain in chains if chain.group.keeps_prefix or not prefix]
    there = [
        chain.there(holders(chain.keys[: limit_tokens // chain.group.block_size]))
        for chain in chosen
    ]
    return usable_boundary([chain.group for chain in chosen], there, limit_tokens)


_BOUNDARIES = 4
"""How many boundaries a shared tier is asked for, where groups need only blocks before one."""


def _search(
    chains: Sequence[GroupChain], limit_tokens: int, known: _Holders, worker: TierExecutor
) -> list[StoredBlock]:
    """What a shared tier has: of a prefix all, else what is needed at the last boundaries."""
    found: list[StoredBlock] = []
    step = alignment([chain.group for chain in chains])
    keeping = [chain for chain in chains if chain.group.keeps_prefix]
    for chain in keeping:
        found += worker.probe(chain.keys[: limit_tokens // chain.group.block_size])
    names = {block.key for block in found}

    def holders(keys: Sequence[BlockKey]) -> list[int | None]:
        return [0 if key in names else held for key, held in zip(keys, known(keys), strict=True)]

    last = limit_tokens // step * step
    if keeping:
        last = _usable(chains, limit_tokens, holders, prefix=True)
    for boundary in range(last, max(0, last - _BOUNDARIES * step), -step):
        complete = True
        for chain in chains:
            if chain.group.keeps_prefix:
                continue
            wanted = chain.group.needed(boundary)
            keys = [chain.keys[number] for number in wanted if number not in chain.on_device]
            asked = [key for key, held in zip(keys, holders(keys), strict=True) if held is None]
            got = worker.probe(asked) if asked else []
            found += got
            names.update(block.key for block in got)
            complete = complete and len({block.key for block in got}) == len(asked)
        if complete:
            break
    return found


def _decide(lookup: _Lookup) -> None:
    waiting, lookup.then = lookup.then, []
    for _, decide in waiting:
        decide()
