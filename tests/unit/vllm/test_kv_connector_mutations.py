"""Mistakes in the code of vLLM's KV connector: each lets a request see wrong KV, or is an error.

The same walk over both sides, and what vLLM does beside them, must find every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from attrs import evolve, frozen
from tests.support.fake_vllm import BLOCK_TOKENS, WHOLE, FakeVllm
from tests.support.faults import damage
from tests.support.foreign_engine import dram, prompt

from commutator_engine_kit.connector_worker import RequestChains
from commutator_engine_kit.kv import KvGroup, KvKind
from commutator_vllm.kv_scheduler import TierScheduler
from commutator_vllm.kv_worker import TierWorkerSide

pytestmark = pytest.mark.long

_SLIDING = KvGroup(kind=KvKind.SLIDING, block_size=BLOCK_TOKENS, window=BLOCK_TOKENS + 3)
_CHUNKED = KvGroup(kind=KvKind.CHUNKED, block_size=BLOCK_TOKENS, window=2 * BLOCK_TOKENS)
_RECURRENT = KvGroup(kind=KvKind.RECURRENT, block_size=BLOCK_TOKENS)
_MODELS = (
    (WHOLE[0], _SLIDING, _CHUNKED),
    (_RECURRENT, WHOLE[0], evolve(_RECURRENT, layers=("other",))),
    (_SLIDING, WHOLE[0], evolve(_SLIDING, layers=("other",))),
)
_WALKS = 6
_MOST_WALKS = 60
"""Some mistakes show seldom: it also depends on how fast the tiers are."""
_STEPS = 120
_LONGEST = 30


def walk(seed: int) -> None:
    """Some 120 requests, steps, aborts, preemptions and damaged blocks. Raises for wrong KV."""
    random = Random(seed)
    groups = _MODELS[seed % len(_MODELS)]
    workers = 1 + seed // len(_MODELS) % 2
    turns = [prompt(0, 5), prompt(1, 5)]
    with FakeVllm(dram("200KB"), blocks=36, workers=workers, groups=groups) as vllm:
        for _ in range(_STEPS):
            _one_of_all(vllm, random, turns)
        vllm.settle()


def _one_of_all(vllm: FakeVllm, random: Random, turns: list[list[int]]) -> None:
    """``turns`` get the tokens of requests that have ended, for others to go on after."""
    what = random.choices(
        ("arrives", "goes on", "aborted", "preempted", "damaged"), (4, 10, 1, 1, 1)
    )[0]
    alive = [request for request in vllm.requests if request.status != "finished"]
    if what == "arrives" and len(vllm.requests) < 5:
        turn = random.choice(turns[-3:])
        part = random.randint(2 * BLOCK_TOKENS, 5 * BLOCK_TOKENS)
        cut = random.choice((len(turn), len(turn), part))
        tokens = [*turn[: min(cut, _LONGEST - 1)], 1]
        vllm.arrive(tokens, cache_salt=random.choice((None, None, "s")))
    elif what == "goes on":
        vllm.step()
        for request in vllm.running():
            if request.num_tokens > _LONGEST or random.random() < 0.2:
                vllm.finish(request)
                turns.append(list(request.all_token_ids))
    elif what == "aborted" and alive:
        vllm.finish(random.choice(alive))
    elif what == "preempted" and vllm.running():
        vllm.preempt(random.choice(vllm.running()))
    elif what == "damaged":
        connector = random.choice(vllm.engines).connector
        group = random.randrange(len(vllm.groups))
        keys = connector.lookups.keys(prompt(random.randrange(2), 5), group=group)
        (stored,) = connector.tiers[0].tier.lookup([random.choice(keys)])
        if stored is not None:
            damage(connector.tiers[0].tier, stored, 3)


@frozen
class Mistake:
    name: str
    patch: Callable[[], Any]


def _around(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[], Any]:
    """``change`` gets what it replaces, and its arguments."""
    right = getattr(owner, name)

    def wrong(*arguments: Any, **more: Any) -> Any:
        return change(right, *arguments, **more)

    return lambda: patch.object(owner, name, wrong)


def _loads(change: Callable[[TierScheduler, list[list[int]]], list[list[int]]]) -> Any:
    """Orders of loads into other blocks."""

    def wrong(right: Any, self: TierScheduler, *arguments: Any) -> Any:
        before = len(self._next.loads)
        right(self, *arguments)
        for at, load in enumerate(self._next.loads[before:], before):
            blocks = change(self, [list(those) for those in load.device_blocks])
            self._next.loads[at] = evolve(load, device_blocks=tuple(map(tuple, blocks)))

    return _around(TierScheduler, "allocated", wrong)


def _stores(**changes: Callable[[TierScheduler, Any], Any]) -> Any:
    """Orders of stores with other facts."""

    def wrong(right: Any, self: TierScheduler, *arguments: Any) -> Any:
        before = len(self._next.stores)
        right(self, *arguments)
        for at, store in enumerate(self._next.stores[before:], before):
            changed = {name: change(self, store) for name, change in changes.items()}
            self._next.stores[at] = evolve(store, **changed)

    return _around(TierScheduler, "_order_store", wrong)


def _like(self: TierScheduler, number: int) -> int:
    """The next group of the same kind."""
    groups = self._groups
    order = [*range(number + 1, len(groups)), *range(number + 1)]
    found: int = next(other for other in order if groups[other].kind is groups[number].kind)
    return found


def _states(change: Callable[[int, int, int], tuple[int, int, int]]) -> Any:
    def wrong(right: Any, self: Any, state: Any, computed: Any, now_s: float) -> None:
        right(self, state, [change(*one) for one in computed], now_s)

    return _around(TierScheduler, "_store_states", wrong)


def _no_gaps(right: Any, self: TierScheduler, state: Any, *more: Any) -> None:
    """Blocks after those that left the window, each stored as the one before it."""
    computed, blocks, now_s = more
    assert self.pool is not None
    null = self.pool.null_block
    closed = [[one for one in table if one != null] for table in blocks]
    right(self, state, computed, closed, now_s)


def _too_early(right: Any, self: Any, state: Any, computed: int, *more: Any) -> None:
    """As if the last token of an answer, which nothing was computed from, had KV."""
    right(self, state, computed + 1, *more)


def _nothing_failed(right: Any, self: Any, orders: Any) -> Any:
    over, _ = right(self, orders)
    return over, set()


def _over_at_once(right: Any, self: TierWorkerSide, orders: Any) -> Any:
    right(self, orders)
    over = {load.order.request_id for load in self._loading.values()}
    self._loading.clear()
    return over, set()


def _one_rank_is_enough(right: Any, self: TierScheduler, request: Any, computed: int) -> Any:
    state = self._requests.get(request.request_id)
    if state is not None and state.answers:
        best = max(answer.boundary for answer in state.answers)
        answer = evolve(state.answers[0], boundary=best)
        state.answers = [answer] * self._workers
    return right(self, request, computed)


def _device_has_more(right: Any, self: Any, lookup: Any) -> Any:
    return right(self, evolve(lookup, first=lookup.first + BLOCK_TOKENS))


def _beyond_the_prompt(right: Any, self: Any, state: Any, first: int, limit: int) -> None:
    right(self, state, first, limit + BLOCK_TOKENS)


def _without_salt(right: Any, self: Any, chain: Any) -> Any:
    return right(self, evolve(chain, cache_salt=None))


def _first_groups_keys(right: Any, self: Any, request_id: str, group: int = 0) -> Any:
    del group
    return right(self, request_id, 0)


def _tokens_again(right: Any, self: Any, state: Any, tokens: int) -> None:
    if tokens > state.sent_tokens:
        state.sent_tokens = max(0, state.sent_tokens - BLOCK_TOKENS)
    right(self, state, tokens)


def _narrower(right: Any, self: TierScheduler, *, groups: Sequence[KvGroup], **more: Any) -> None:
    right(self, groups=groups, **more)
    self._groups = tuple(
        evolve(group, window=group.window - BLOCK_TOKENS) if group.window else group
        for group in groups
    )


def _not_held(right: Any, self: TierScheduler, state: Any, *more: Any) -> None:
    right(self, state, *more)
    number, held = self._held.popitem()
    assert self.pool is not None
    self.pool.released(held.blocks)
    self._held[number] = evolve(held, blocks=())


MISTAKES = (
    Mistake("a group's blocks loaded backwards", _loads(lambda _, b: [one[::-1] for one in b])),
    Mistake(
        "groups loaded into each other's blocks",
        _loads(lambda self, b: [b[_like(self, n)] for n in range(len(b))]),
    ),
    Mistake("a load into the block before", _loads(lambda _, b: [[*o[1:], *o[:1]] for o in b])),
    Mistake("one block of a load forgotten", _loads(lambda _, b: [one[:-1] for one in b])),
    Mistake("a block stored as the next one", _stores(first=lambda _, one: one.first + 1)),
    Mistake("a block stored as the first", _stores(first=lambda _, one: 0)),
    Mistake("a store in another group", _stores(group=lambda self, one: _like(self, one.group))),
    Mistake(
        "blocks of a store in another order",
        _stores(device_blocks=lambda _, one: one.device_blocks[::-1]),
    ),
    Mistake("gaps in a table closed", _around(TierScheduler, "_store", _no_gaps)),
    Mistake("blocks stored before they are full", _around(TierScheduler, "_store", _too_early)),
    Mistake(
        "a state as that of the boundary before",
        _states(lambda group, block, tokens: (group, block, tokens - BLOCK_TOKENS or tokens)),
    ),
    Mistake(
        "a state within a block as that of its end",
        _states(lambda group, block, tokens: (group, block, -(-tokens // 4) * 4 + 4)),
    ),
    Mistake(
        "a state as another group's",
        _states(lambda group, block, tokens: (2 - group, block, tokens)),
    ),
    Mistake(
        "a failed load taken for good", _around(TierWorkerSide, "take_loaded", _nothing_failed)
    ),
    Mistake("a load over before it began", _around(TierWorkerSide, "take_loaded", _over_at_once)),
    Mistake("one rank's hit for all", _around(TierScheduler, "match", _one_rank_is_enough)),
    Mistake("more on the device than is", _around(TierWorkerSide, "_plan", _device_has_more)),
    Mistake("a hit beyond the prompt", _around(TierScheduler, "_look_up", _beyond_the_prompt)),
    Mistake("a salt forgotten", _around(RequestChains, "grow", _without_salt)),
    Mistake("one group's keys for all", _around(RequestChains, "keys", _first_groups_keys)),
    Mistake("tokens of a chain sent twice", _around(TierScheduler, "_extend_chain", _tokens_again)),
    Mistake("windows a block too short", _around(TierScheduler, "__init__", _narrower)),
    Mistake("blocks not held for a store", _around(TierScheduler, "_order_store", _not_held)),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.name)
def test_a_mistake_is_found(mistake: Mistake) -> None:
    for seed in range(_MOST_WALKS):
        try:
            with mistake.patch():
                walk(seed)
        except Exception as error:
            print(f"walk {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail("nothing noticed it")


@pytest.mark.parametrize("seed", range(_WALKS))
def test_without_a_mistake_all_is_right(seed: int) -> None:
    walk(seed)
