"""The KV manager under random histories: whatever happens, in whatever order, it stays right."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.kv_integrity import check_integrity
from tests.support.kv_world import KvWorld, stored

from commutator.contract.block import BlockDescriptor, RetentionHints
from commutator.contract.eviction import EvictionPolicy
from commutator.contract.tier import AdmissionConfig
from commutator_engine_kit.kv.block_manager.actions import Announce, FreeBlocks, LoadResult
from commutator_engine_kit.kv.block_manager.block_pool import TierSpec
from commutator_eviction.arc import Arc
from commutator_eviction.leaf_first import LeafFirst
from commutator_eviction.lru import Lru
from commutator_eviction.s3fifo import S3Fifo
from commutator_eviction.tinylfu import TinyLfu
from commutator_testing.eviction import tree_block

BLOCKS = 24
KEYS = [tree_block(number)[0] for number in range(1, BLOCKS + 1)]
POLICIES: list[Callable[[int], EvictionPolicy]] = [
    lambda _: Lru(),
    lambda _: LeafFirst(),
    Arc,
    S3Fifo,
    TinyLfu,
]
RULES = [
    AdmissionConfig(),
    AdmissionConfig(min_hits=2),
    AdmissionConfig(max_blocks=3),
    AdmissionConfig(prompt_only=True),
]

numbers = st.integers(1, BLOCKS)
retentions = st.builds(
    RetentionHints,
    priority=st.sampled_from([0, 0, 0, 1, -1, 99]),
    ttl_s=st.sampled_from([None, None, 3.0]),
    pinned=st.sampled_from([False, False, False, True]),
    is_prompt=st.booleans(),
)


@st.composite
def chains(draw: st.DrawFn) -> list[BlockDescriptor]:
    """A path of the tree of prefixes, from somewhere down to ``number``."""
    number, kept, facts = draw(numbers), draw(st.integers(1, 5)), draw(retentions)
    path = [number]
    while path[0] > 1:
        path.insert(0, path[0] // 2)
    return [offer(number, facts) for number in path[-kept:]]


def offer(number: int, facts: RetentionHints) -> BlockDescriptor:
    key, parent, place = tree_block(number)
    tenant = [None, "a", "b"][number % 3]  # a key belongs to one tenant
    whole = RetentionHints(
        priority=facts.priority,
        ttl_s=facts.ttl_s,
        pinned=facts.pinned,
        is_prompt=facts.is_prompt,
        tenant=tenant,
        depth=place.depth,
    )
    return BlockDescriptor(key=key, parent=parent, token_ids=(number,), facts=whole)


@st.composite
def specs(draw: st.DrawFn) -> list[TierSpec]:
    made = []
    for number in range(draw(st.integers(1, 3))):
        capacity = draw(st.integers(0, 7))
        made.append(
            TierSpec(
                name=f"tier-{number}",
                medium=["CPU", "NVME", "EXTERNAL"][number],
                capacity_blocks=capacity,
                shared=draw(st.booleans()),
                eviction=draw(st.sampled_from(POLICIES)),
                admission=draw(st.sampled_from(RULES)),
                write=draw(
                    st.sampled_from(["through", "through", "on_evict", "on_evict", "never"])
                ),
                prefetch=draw(st.booleans()),
                tenant_share=draw(st.sampled_from([None, None, 0.4])),
            )
        )
    return made


def chain_of(number: int) -> list[bytes]:
    """Its keys from the root of the tree on."""
    keys = [KEYS[number - 1]]
    while number > 1:
        number //= 2
        keys.insert(0, KEYS[number - 1])
    return keys


class ManagerMachine(RuleBasedStateMachine):
    """Offers, loads and their ends in any order, between failures and evictions."""

    @initialize(specs=specs(), found=st.lists(numbers), most_waiting=st.sampled_from([2, 100]))
    def start(self, specs: list[TierSpec], found: list[int], most_waiting: int) -> None:
        self.world = KvWorld(specs, most_waiting=most_waiting, probe_interval_s=5.0, remembered=9)
        self.manager = self.world.manager
        self.now_s = 0.0
        self.last_load = 0
        keys = [tree_block(number)[0] for number in found]
        self.world.committed[0] = set(keys)
        self.world.do(self.manager.recovered(0, [stored(key) for key in keys], self.now_s))

    @rule(chain=chains())
    def offer(self, chain: list[BlockDescriptor]) -> None:
        self.world.held.update(block.key for block in chain)
        self.world.do(self.manager.offer(chain, self.now_s))

    @rule(chain=chains())
    def offload_evicted(self, chain: list[BlockDescriptor]) -> None:
        self.world.held.update(block.key for block in chain)
        self.world.do(self.manager.offload_evicted(chain, self.now_s))

    @precondition(lambda self: self.world.moves)
    @rule(data=st.data())
    def finish_store(self, data: st.DataObject) -> None:
        move = data.draw(st.sampled_from(list(self.world.moves.values())))
        outcome = data.draw(st.sampled_from(["stored", "failed", "mixed"]))
        good = {"stored": list(move.keys), "failed": []}.get(
            outcome, data.draw(st.lists(st.sampled_from(move.keys), unique=True))
        )
        failed = {key: "full" for key in move.keys[::2] if key not in good}
        written = self.world.written(move, good)
        self.world.do(self.manager.finish_store(move.move_id, written, failed, self.now_s))

    @rule(
        number=numbers,
        first=st.integers(0, 2),
        tokens_per_s=st.sampled_from([None, 1.0, 100.0, 1e6]),
    )
    def begin_onboard(self, number: int, first: int, tokens_per_s: float | None) -> None:
        keys = chain_of(number)
        self.last_load += 1
        compute_s = 16 / tokens_per_s if tokens_per_s else None
        matched = self.manager.match(keys, first)
        plan = self.manager.begin_onboard(
            f"load-{self.last_load}", keys, first, self.now_s, compute_s=compute_s
        )
        expected = list(zip(keys[first:], matched, strict=False))
        assert list(plan.blocks) == expected[: len(plan.blocks)]
        assert plan.reason
        if tokens_per_s is None:
            assert list(plan.blocks) == expected
        if plan.blocks:
            self.world.loads[plan.load_id] = plan

    @rule(number=numbers, first=st.integers(0, 2))
    def prefetch(self, number: int, first: int) -> None:
        keys = chain_of(number)
        known = {tier: set(there) for tier, there in enumerate(self.world.announced)}
        self.world.do(self.manager.prefetch(keys, first, self.now_s))
        for tier, there in enumerate(self.world.announced):
            assert set(keys) & known[tier] <= there, "what is wanted is not evicted for it"

    @precondition(lambda self: self.world.loads)
    @rule(data=st.data())
    def finish_onboard(self, data: st.DataObject) -> None:
        plan = self.world.loads.pop(data.draw(st.sampled_from(list(self.world.loads))))
        outcomes = st.sampled_from([None, *LoadResult, LoadResult.LOADED, LoadResult.LOADED])
        drawn = {key: data.draw(outcomes) for key, _ in plan.blocks}
        results = {key: result for key, result in drawn.items() if result is not None}
        self.world.do(self.manager.finish_onboard(plan.load_id, results, self.now_s))
        for key, tier in plan.blocks:
            if results.get(key) in {LoadResult.CORRUPT, LoadResult.MISSING}:
                assert key not in self.world.announced[tier], "bad blocks are not offered again"

    @rule(tier=st.integers(0, 2), there=st.lists(numbers, unique=True, max_size=5))
    def found(self, tier: int, there: list[int]) -> None:
        if tier < len(self.world.committed):
            keys = [KEYS[number - 1] for number in there]
            actions = self.manager.found(tier, [stored(key) for key in keys], self.now_s)
            for action in actions:
                if isinstance(action, Announce) and action.what == "stored":
                    self.world.committed[action.tier] |= {block.key for block in action.blocks}
                if isinstance(action, FreeBlocks) and action.reason == "over capacity":
                    self.world.committed[action.tier] |= set(action.keys)  # it has slots for them
                self.world.do([action])

    @rule(tier=st.integers(0, 2))
    def tier_down(self, tier: int) -> None:
        if tier < len(self.world.committed):
            self.world.down.add(tier)
            self.world.do(self.manager.tier_down(tier, self.now_s))

    @rule(tier=st.integers(0, 2))
    def tier_up(self, tier: int) -> None:
        if tier < len(self.world.committed):
            self.world.down.discard(tier)
            self.world.do(self.manager.tier_up(tier, self.now_s))

    @rule(
        tier=st.none() | st.integers(0, 2),
        those=st.none() | st.lists(numbers, unique=True, max_size=5),
    )
    def evict(self, tier: int | None, those: list[int] | None) -> None:
        if tier is not None and tier >= len(self.world.committed):
            return
        keys = None if those is None else [KEYS[number - 1] for number in those]
        self.world.do(self.manager.evict(self.now_s, keys=keys, tier=tier))
        for number, announced in enumerate(self.world.announced):
            if tier in {None, number}:
                assert not announced & set(KEYS if keys is None else keys)

    @rule(seconds=st.sampled_from([0.5, 4.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "world"):
            return
        check_integrity(self.manager)
        for tier in range(len(self.world.capacities)):
            self.world.check_room(tier)
        for key in KEYS:
            assert self.manager.match([key]) == self.world.fastest(key)
        for why in self.manager.explain(KEYS, self.now_s):
            assert why.reason
        for tier, state in enumerate(self.manager.statistics().tiers):
            assert state.published == len(self.world.announced[tier])
            assert state.retained <= state.capacity / 2

    def teardown(self) -> None:
        """Once everything that runs has ended, nothing is held any more."""
        if not hasattr(self, "world"):
            return
        for plan in list(self.world.loads.values()):
            del self.world.loads[plan.load_id]
            self.world.do(self.manager.finish_onboard(plan.load_id, {}, self.now_s))
        while self.world.moves:
            move = next(iter(self.world.moves.values()))
            written = self.world.written(move, move.keys)
            self.world.do(self.manager.finish_store(move.move_id, written, {}, self.now_s))
        statistics = self.manager.statistics()
        assert not +self.world.held, "a device block was never released"
        assert statistics.held_on_device == 0
        assert all(tier.waiting == tier.staged == tier.leaving == 0 for tier in statistics.tiers)
        check_integrity(self.manager)


TestKvManager = ManagerMachine.TestCase
TestKvManager.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
