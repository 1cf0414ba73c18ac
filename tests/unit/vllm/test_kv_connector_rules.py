"""What vLLM's KV connector does with one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.fake_vllm import BLOCK_TOKENS, WHOLE, FakeRequest, FakeVllm
from tests.support.faults import damage
from tests.support.foreign_engine import dram, prompt

from commutator_vllm.connector_metadata import LookupResult, WorkerReport
from commutator_vllm.kv_scheduler import PrefillClock, TierScheduler

PROMPT = [*prompt(1, 4), 1]


def served(vllm: FakeVllm, tokens: list[int], **facts: str) -> int:
    """The tokens that were loaded for a request."""
    request = vllm.run(vllm.arrive(tokens, **facts))
    vllm.finish(request)
    while vllm.scheduler.busy:
        vllm.step()
    return request.hits


def test_a_prompt_that_comes_again_is_loaded() -> None:
    with FakeVllm(dram()) as vllm:
        assert served(vllm, PROMPT) == 0
        assert served(vllm, PROMPT) == 4 * BLOCK_TOKENS
        assert served(vllm, PROMPT, cache_salt="other") == 0
        vllm.settle()


def test_the_last_token_is_computed_always() -> None:
    with FakeVllm(dram()) as vllm:
        served(vllm, PROMPT)
        assert served(vllm, PROMPT[:-1]) == 3 * BLOCK_TOKENS
        vllm.settle()


def test_all_ranks_must_have_a_block() -> None:
    with FakeVllm(dram(), workers=2) as vllm:
        served(vllm, PROMPT)
        engine = vllm.engines[1]
        engine.connector.stores.evict([engine.connector.lookups.keys(PROMPT)[2]])
        assert served(vllm, PROMPT) == 2 * BLOCK_TOKENS
        vllm.settle()


def test_a_damaged_block_is_computed() -> None:
    with FakeVllm(dram()) as vllm:
        served(vllm, PROMPT)
        (setup,) = vllm.engines[0].connector.tiers
        (stored,) = setup.tier.lookup(vllm.engines[0].connector.lookups.keys(PROMPT)[1:2])
        assert stored is not None
        damage(setup.tier, stored, 0)
        request = vllm.run(vllm.arrive(PROMPT))
        vllm.finish(request)  # compares its blocks
        assert vllm.engines[0].connector.statistics().tiers[0].loads["corrupt"] == 1
        vllm.settle()


def test_reset_forgets_what_is_in_the_tiers() -> None:
    with FakeVllm(dram()) as vllm:
        served(vllm, PROMPT)
        vllm.scheduler.reset()
        assert vllm.scheduler.busy
        vllm.step()
        assert served(vllm, PROMPT) == 0
        vllm.settle()


def test_what_vllm_knows_by_pictures_is_left_to_it() -> None:
    with FakeVllm(dram()) as vllm:
        request = vllm.arrive(PROMPT)
        vllm.finish(request)
        request.mm_features = ["a picture"]
        vllm.scheduler.arrived(request)
        assert vllm.scheduler.match(request, 0) == 0
        vllm.settle()


class Pool:
    """Records which blocks are held."""

    null_block = 0

    def __init__(self) -> None:
        self.held: list[int] = []

    def hold(self, blocks: Sequence[int]) -> None:
        self.held += blocks

    def released(self, blocks: Sequence[int]) -> None:
        self.held = [block for block in self.held if block not in blocks]


def alone(workers: int = 1) -> tuple[TierScheduler, Pool, FakeRequest]:
    """The scheduler's side alone, with a request of four blocks and one token."""
    scheduler = TierScheduler(groups=WHOLE, num_blocks=16, workers=workers, lag=0)
    scheduler.pool = pool = Pool()
    request = FakeRequest("r", list(PROMPT), len(PROMPT))
    scheduler.arrived(request)
    return scheduler, pool, request


def test_what_is_being_loaded_is_not_kept() -> None:
    scheduler, pool, request = alone()
    assert scheduler.match(request, 0) is None
    (lookup,) = scheduler.orders({}, lambda _: (), 0.0).lookups
    scheduler.reported(
        WorkerReport(answers=(LookupResult(lookup.number, 4 * BLOCK_TOKENS, ("CPU",) * 4),))
    )
    assert scheduler.match(request, 0) == 4 * BLOCK_TOKENS
    scheduler.allocated(request, [[1, 2, 3, 4, 5]], 4 * BLOCK_TOKENS)
    request.num_computed_tokens = 4 * BLOCK_TOKENS  # as vLLM says before they are there
    (load,) = scheduler.orders({}, lambda _: (), 0.0).loads
    assert load.device_blocks == ((1, 2, 3, 4),)
    scheduler.finished(request, [[1, 2, 3, 4, 5]], 0.0)
    orders = scheduler.orders({}, lambda _: (), 0.0)
    assert orders.drops == [lookup.number]
    assert not orders.stores
    assert not pool.held


def test_what_another_connector_brings_is_kept_once_it_is_there() -> None:
    """The tiers are asked for its blocks only if the transfer fails."""
    scheduler, pool, request = alone()
    request.kv_transfer_params = {"do_remote_prefill": True}
    assert scheduler.match(request, 0) == 0
    request.kv_transfer_params["do_remote_prefill"] = False  # as that one does when it begins
    scheduler.allocated(request, [[1, 2, 3, 4, 5]], 0)
    request.num_computed_tokens = len(PROMPT)  # as vLLM says before they are there
    assert not scheduler.orders({}, lambda _: (), 0.0).lookups
    aborted = FakeRequest("aborted", list(PROMPT), len(PROMPT), kv_transfer_params={})
    scheduler.arrived(aborted)
    aborted.num_computed_tokens = len(PROMPT)
    scheduler.finished(aborted, [[6, 7, 8, 9, 10]], 0.0)
    assert not scheduler.orders({}, lambda _: (), 0.0).stores
    assert not pool.held

    request.num_computed_tokens = len(PROMPT) - 1
    (store,) = scheduler.orders({"r": 1}, lambda _: [[1, 2, 3, 4, 5]], 0.0).stores
    assert store.device_blocks == (1, 2, 3, 4)


def test_the_tiers_are_asked_when_the_prefill_server_is_lost() -> None:
    scheduler, _, request = alone()
    request.kv_transfer_params = {"do_remote_prefill": True}
    assert scheduler.match(request, 0) == 0
    request.kv_transfer_params["do_remote_prefill"] = False
    scheduler.allocated(request, [[1, 2, 3, 4, 5]], 0)
    assert scheduler.match(request, 0) is None
    (lookup,) = scheduler.orders({}, lambda _: (), 0.0).lookups
    assert (lookup.first, lookup.limit) == (0, 4 * BLOCK_TOKENS)


def test_blocks_are_held_until_every_worker_has_stored_them() -> None:
    scheduler, pool, request = alone(workers=2)
    (store,) = scheduler.orders({"r": len(PROMPT)}, lambda _: [[1, 2, 3, 4, 5]], 0.0).stores
    assert pool.held == [1, 2, 3, 4] == list(store.device_blocks)
    scheduler.finished(request, [[1, 2, 3, 4, 5]], 0.0)
    scheduler.reported(WorkerReport(stored=(store.number,)))
    assert pool.held == [1, 2, 3, 4]
    assert scheduler.busy
    scheduler.reported(WorkerReport(stored=(store.number,)))
    assert not pool.held


def test_a_part_that_vllm_has_meanwhile_is_not_loaded() -> None:
    scheduler, _, request = alone()
    assert scheduler.match(request, 0) is None
    (lookup,) = scheduler.orders({}, lambda _: (), 0.0).lookups
    scheduler.reported(
        WorkerReport(
            answers=(LookupResult(lookup.number, 4 * BLOCK_TOKENS, ("CPU", "CPU", "NVME", "S3")),)
        )
    )
    assert scheduler.match(request, 2 * BLOCK_TOKENS) == 2 * BLOCK_TOKENS
    scheduler.allocated(request, [[1, 2, 3, 4, 5]], 2 * BLOCK_TOKENS)
    (load,) = scheduler.orders({}, lambda _: (), 0.0).loads
    assert (load.first, load.device_blocks) == (2 * BLOCK_TOKENS, ((3, 4),))
    sources = scheduler.sources_of(request, 2 * BLOCK_TOKENS)
    assert sources == {"NVME": BLOCK_TOKENS, "S3": BLOCK_TOKENS}


def test_speed_is_measured_between_steps_of_one_request() -> None:
    clock = PrefillClock()
    measured = []
    for tokens, request, now_s in (
        (100, "a", 1.0),
        (0, "b", 9.0),  # it may have been waited for
        (100, "b", 10.0),
        (1, "b", 12.0),
        (1, "b", 13.0),  # a single token tells nothing
    ):
        clock.step(tokens, [request], now_s)
        measured.append(clock.tokens_per_s)
    assert measured == [None, None, None, 50.0, 50.0]


def test_overlapping_steps_take_the_time_of_the_one_before() -> None:
    clock = PrefillClock(lag=1)
    for tokens, now_s in ((100, 1.0), (200, 1.1), (1, 3.1)):
        clock.step(tokens, ["a"], now_s)
    assert clock.tokens_per_s == 50.0
