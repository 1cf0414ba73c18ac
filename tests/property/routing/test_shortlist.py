"""A pool with an index leads to the same decisions as a look at each worker."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator.contract.block import CacheLevel
from commutator.contract.request import RequestSummary
from commutator.contract.routing import (
    BusyConfig,
    Candidate,
    Cost,
    Decision,
    Overlap,
    RouterConfig,
    RouteRequest,
    RoutingPolicy,
    ScannedPool,
    Scorer,
    WorkerLoad,
    WorkerRank,
    ranks_of,
)
from commutator.routing.load import InFlightLoad, Ticket
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.router import ModelRouter, Route
from commutator.routing.shortlist import IndexedPool, RankTable
from commutator.routing.workers import LiveWorker
from commutator_balance import LeastLoaded, PowerOfTwo, RandomChoice
from commutator_kv_router import KvRouter, KvRouterConfig
from commutator_pipeline.policy import Pipeline, PipelineConfig
from commutator_pipeline.stages import (
    BestPicker,
    DrawPicker,
    FewestPrefillTokens,
    LoadScorer,
    MaxRequests,
    PrefixScorer,
)
from commutator_replay.fleet import virtual_live_worker
from commutator_round_robin import RoundRobin
from commutator_session_affinity import SessionAffinity, SessionAffinityConfig

BLOCK_SIZE = 16
BUSY = BusyConfig(max_active_requests=4, active_prefill_tokens_threshold=3_000)


class World:
    """Workers whose loads and caches change by chance, often to equal values."""

    def __init__(self, seed: int, workers: int) -> None:
        self.chance = random.Random(seed)
        self.load = InFlightLoad()
        self.indexer = KvIndexer(RouterConfig(kind="kv", block_size=BLOCK_SIZE))
        self.blocks = self.chance.randrange(1, 6)
        self.paths = [[10 * path + block for block in range(self.blocks)] for path in range(3)]
        self.ranks = self.chance.choice([1, 1, 3])
        self.tiers = self.chance.choice([[CacheLevel.DEVICE], list(CacheLevel)])
        self.workers: tuple[LiveWorker, ...] = ()
        self._tickets: list[Ticket] = []
        names = [f"w-{number}" for number in range(workers)]
        self.chance.shuffle(names)
        for name in names:
            self.join(name)

    def join(self, name: str) -> None:
        worker = virtual_live_worker(name, BLOCK_SIZE)
        info = evolve(worker.record.info, data_parallel_size=self.ranks)
        worker.record = evolve(worker.record, info=info)
        joined = [*(w for w in self.workers if w.record.worker_id != name), worker]
        self.workers = tuple(sorted(joined, key=lambda one: one.record.worker_id))
        for rank in range(self.ranks):
            for path in self.paths:
                held = path[: self.chance.choice([0, 0, len(path), self.chance.randrange(9)])]
                level = self.chance.choice(self.tiers)
                cut = self.chance.randrange(len(held) + 1)
                self.indexer.index.store(name, held[:cut], rank=rank)
                self.indexer.index.store(name, held[cut:], rank=rank, tier=level)

    def change(self) -> None:
        """A few requests begin, go on and end; sometimes a worker comes, leaves, or loses KV."""
        chance = self.chance
        for _ in range(chance.randrange(2 * len(self.workers) + 2)):
            member = chance.choice(chance.choice(self.members()))
            match chance.randrange(4):
                case 0 | 1:
                    tokens = chance.choice([16, 100, 1_000])
                    cached = chance.choice([0, 0, 100])
                    self._tickets.append(self.load.dispatch(member, tokens, BLOCK_SIZE, cached))
                case 2 if self._tickets:
                    self.load.progress(chance.choice(self._tickets), chance.choice([1, 20]))
                case 3 if self._tickets:
                    ticket = self._tickets.pop(chance.randrange(len(self._tickets)))
                    self.load.release(ticket)
        if chance.random() < 0.2:
            names = [name for ranks in self.members() for name in ranks if chance.random() < 0.5]
            loads = {name: WorkerLoad(active_requests=chance.randrange(3)) for name in names}
            self.load.set_peers(loads, 1)
        if chance.random() < 0.3:
            name = chance.choice(self.workers).record.worker_id
            self.indexer.index.remove_worker(name)
            self.join(name)
        if chance.random() < 0.2 and len(self.workers) > 1:
            gone = chance.choice(self.workers)
            self.workers = tuple(worker for worker in self.workers if worker is not gone)
            self.indexer.index.remove_worker(gone.record.worker_id)

    def members(self) -> list[list[str]]:
        return [[n for _, n in ranks_of(w.record.worker_id, self.ranks)] for w in self.workers]

    def prompt(self) -> list[int]:
        path = self.chance.choice(self.paths)
        return [*path, 999] if self.chance.random() < 0.5 else path

    def router(self, policy: RoutingPolicy, *, scanned: int) -> ModelRouter:
        indexer = self.indexer if policy.uses_overlap else None
        rng = random.Random(1)
        return ModelRouter(
            policy, indexer, self.load, rng, BLOCK_SIZE, strict=True, scanned=scanned
        )


class ByHand(RoutingPolicy):
    """A policy of before there were pools: it looks at each candidate."""

    uses_overlap = True

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        costs = {c.worker_id: c.load.active_requests - c.overlap.blocks for c in candidates}
        least = min(costs.values())
        chosen = rng.choice([name for name, cost in costs.items() if cost == least])
        scores = {name: {"cost": float(cost)} for name, cost in costs.items()}
        return Decision(worker_id=chosen, policy="by_hand", reason="cheapest", scores=scores)


@frozen(kw_only=True)
class OddFirst(Scorer):
    """A scorer of before there were pools."""

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        return {c.worker_id: float(c.worker_id[-1] in "13579") for c in candidates}


@frozen(kw_only=True)
class Upside(LoadScorer):
    """Replaces ``score`` of a scorer that has a ``rating``."""

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        return {name: 1 - its for name, its in super().score(request, candidates).items()}


def kv(**options: Any) -> Callable[[], RoutingPolicy]:
    return lambda: KvRouter(KvRouterConfig(kind="kv", **options))


def pipeline(*scorers: Scorer, **options: Any) -> Callable[[], RoutingPolicy]:
    return lambda: Pipeline(PipelineConfig(kind="pipeline", scorers=scorers, **options))


PREFIX, LOAD = PrefixScorer(kind="prefix", weight=2.0), LoadScorer(kind="load")
POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "kv": kv(),
    "kv, guard": kv(imbalance_requests=1, imbalance_ratio=1.0),
    "kv, host first": kv(host_cache_hit_weight=3.0),
    "kv, cost": kv(formula="cost"),
    "kv, cost, no cache": kv(formula="cost", overlap_score_weight=0.0),
    "kv, cost, host first": kv(formula="cost", host_cache_hit_weight=3.0, overlap_score_weight=0.3),
    "kv, product": kv(formula="product"),
    "kv, warm": kv(router_temperature=0.5),
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "session_affinity": lambda: SessionAffinity(SessionAffinityConfig(kind="session_affinity")),
    "pipeline": pipeline(PREFIX, LOAD),
    "pipeline, filters": pipeline(
        PREFIX,
        FewestPrefillTokens(kind="prefill_queue", weight=0.7),
        filters=(MaxRequests(kind="max_requests", limit=2),),
        picker=BestPicker(kind="best"),
    ),
    "pipeline, draw": pipeline(PREFIX, LOAD, picker=DrawPicker(kind="draw")),
    "pipeline, a third party's scorer": pipeline(OddFirst(kind="odd"), LOAD),
    "pipeline, a scorer that is replaced": pipeline(Upside(kind="load"), PREFIX),
    "by hand": ByHand,
}


def summary(number: int) -> RequestSummary:
    return RequestSummary(
        request_id=f"r-{number}",
        model="model",
        prompt_tokens=BLOCK_SIZE * 5 + number,
        max_tokens=16,
        session_id=f"s-{number % 3}",
    )


def check_equal(indexed: Route | None, scanned: Route | None) -> None:
    if indexed is None or scanned is None:
        assert indexed is scanned
        return
    chosen, other = indexed.decision, scanned.decision
    assert chosen.worker_id == other.worker_id
    assert indexed.worker is scanned.worker
    assert indexed.candidate == scanned.candidate
    assert indexed.best_overlap_blocks == scanned.best_overlap_blocks
    assert chosen.scores.items() <= other.scores.items()
    assert len(chosen.scores) + chosen.not_scored == len(other.scores)
    shown = {candidate.worker_id: candidate for candidate in scanned.candidates}
    assert all(shown[one.worker_id] == one for one in indexed.candidates)
    assert len(indexed.candidates) + indexed.others == len(scanned.candidates)
    assert sum(indexed.too_busy.values()) == len(scanned.busy)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), workers=st.sampled_from([1, 2, 5, 9, 30, 80]))
def test_decisions_equal_those_of_a_full_scan(name: str, seed: int, workers: int) -> None:
    world = World(seed, workers)
    indexed = world.router(POLICIES[name](), scanned=0)
    scanned = world.router(POLICIES[name](), scanned=1 << 30)
    for number in range(6):
        world.change()
        hashes, request = world.prompt(), summary(number)
        assert indexed.hits(world.workers, BUSY) == scanned.hits(world.workers, BUSY)
        routes = [router.route(request, hashes, world.workers) for router in (indexed, scanned)]
        check_equal(*routes)
        free = [router.route_to_free(request, hashes, world.workers, BUSY)
                for router in (indexed, scanned)]  # fmt: skip
        check_equal(*free)


weights = st.sampled_from([0.0, 0.25, 1.0, 1 / 3, 7.0])


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    requests, tokens, blocks, device, lower, worst = (draw(weights) for _ in range(6))
    product = draw(st.booleans())

    def cost(load: WorkerLoad, overlap: Overlap) -> float:
        saved = device * overlap.device + lower * (overlap.host + overlap.disk + overlap.external)
        prefill = max(0.0, (load.active_prefill_tokens + 100) / BLOCK_SIZE - saved)
        if product:
            return max(prefill, worst) * (load.active_requests + 1)
        rest = blocks * load.active_decode_blocks + requests * load.active_requests
        return max(tokens * prefill + rest, worst)

    return cost


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 4, 12, 90]), costs(), st.integers(0, 5))
def test_a_pool_equals_a_list(seed: int, workers: int, cost: Cost, limit: int) -> None:
    world = World(seed, workers)
    table = RankTable(world.workers, world.load, world.indexer.index, BLOCK_SIZE)
    for _ in range(2):
        for _ in range(3):
            world.load.dispatch(world.chance.choice(world.members()[0]), 100, BLOCK_SIZE)
        pool = IndexedPool(table, world.indexer.find(world.prompt()))
        check_pool(pool, cost)
        part = pool.at_most_requests(limit)
        assert list(part) == [one for one in pool if one.load.active_requests <= limit]
        if part:
            check_pool(part, cost)


def check_pool(pool: IndexedPool, cost: Cost) -> None:
    scan = ScannedPool(list(pool))
    assert [pool[number] for number in range(len(pool))] == list(scan)
    assert pool[-1] == scan[-1]
    assert pool[1:3] == list(scan[1:3])
    with pytest.raises(IndexError):
        pool[len(pool)]
    assert pool.fewest_requests == scan.fewest_requests
    assert pool.total_requests == scan.total_requests
    for amount in (lambda load: load.active_decode_blocks, lambda load: cost(load, Overlap())):
        assert pool.most(amount) == scan.most(amount)
    found, expected = pool.least(cost), scan.least(cost)
    assert found.cost == expected.cost
    assert list(found.candidates) == list(expected.candidates)
    names = {one.worker_id for one in found.compared}
    rest = [cost(one.load, one.overlap) for one in scan if one.worker_id not in names]
    assert all(its >= found.others_cost for its in rest)
    assert (found.others_cost == float("inf")) == (not rest)


def test_an_empty_pool_says_so() -> None:
    world = World(1, 2)
    table = RankTable(world.workers, world.load, world.indexer.index, BLOCK_SIZE)
    for pool in (IndexedPool(table, among=0), ScannedPool([])):
        assert not pool
        assert pool.total_requests == 0
        with pytest.raises(ValueError, match=r"."):
            pool.least(lambda load, _: load.active_requests)
        with pytest.raises(ValueError, match=r"."):
            _ = pool.fewest_requests


@pytest.mark.parametrize("shared", [False, True], ids=["few hold it", "all hold some"])
@pytest.mark.parametrize("spread", [1, 8], ids=["idle", "loaded"])
def test_few_of_4096_workers_are_looked_at(spread: int, shared: bool) -> None:
    chance, load = random.Random(3), InFlightLoad()
    indexer = KvIndexer(RouterConfig(kind="kv", block_size=BLOCK_SIZE))
    hashes = list(range(100))
    workers = tuple(virtual_live_worker(f"w-{number:04}", BLOCK_SIZE) for number in range(4096))
    for number, worker in enumerate(workers):
        name = worker.record.worker_id
        if shared:
            indexer.index.store(name, hashes[:10])
        if number % 400 == 0:
            indexer.index.store(name, hashes[: chance.randrange(10, 100)])
        for _ in range(chance.randrange(spread)):
            load.dispatch(name, chance.randrange(1, 4_000), BLOCK_SIZE)
    pool = IndexedPool(RankTable(workers, load, indexer.index, BLOCK_SIZE), indexer.find(hashes))
    asked = 0

    def cost(load: WorkerLoad, overlap: Overlap) -> float:
        nonlocal asked
        asked += 1
        prefill = (load.active_prefill_tokens + 1_600) / BLOCK_SIZE - overlap.device
        return max(0.0, prefill) + load.active_decode_blocks

    pool.least(cost)
    assert asked < 100
    assert len(pool.made) < 10


def test_a_member_keeps_its_number_and_loses_its_blocks() -> None:
    """While a worker's blocks are removed in slices, no other worker is taken for it."""
    indexer = KvIndexer(RouterConfig(kind="kv", block_size=BLOCK_SIZE))
    index, hashes = indexer.index, list(range(5_000))
    index.store("old", hashes)
    slot = index.slot_of(WorkerRank("old"))
    slices = index.detach("old")
    assert index.match(hashes) == {}
    assert not index.holds("old", 0)
    assert index.slot_of(WorkerRank("new")) != slot
    index.store("old", hashes[:3])
    assert index.match(hashes) == {WorkerRank("old"): Overlap(device=3)}
    assert sum(1 for _ in slices) > 1, "a worker with many blocks is removed in several slices"
    assert index.match(hashes) == {WorkerRank("old"): Overlap(device=3)}
    assert index.statistics().blocks == 3
    assert index.slot_of(WorkerRank("newest")) == slot
    assert index.match(hashes) == {WorkerRank("old"): Overlap(device=3)}
