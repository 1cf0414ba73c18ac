"""What a front door knows of its workers' caches: from events, or by a guess."""

from __future__ import annotations

import asyncio
import logging

import pytest
from attrs import evolve

from commutator.contract.block import BlockStored
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.routing import Overlap, RouterConfig, WorkerRank
from commutator.contract.worker import EngineInfo, EventSource, WorkerRecord
from commutator.routing.prefix_index.health import Cause
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator_engine_kit import EventPublisher

PROMPT = list(range(100, 150))


def worker(name: str, events: EventSource | None = None) -> WorkerRecord:
    info = EngineInfo(
        kind="test",
        version="1",
        model="m",
        max_model_len=4096,
        block_size=16,
        kv_capacity_blocks=64,
        kv_events=events,
    )
    return WorkerRecord(
        worker_id=name, engine="e", kind="test", model="m", address="127.0.0.1:1", info=info
    )


def request() -> GenerateRequest:
    return GenerateRequest(request_id="r", token_ids=PROMPT, sampling=SamplingParams())


async def test_events_tell_exactly() -> None:
    publisher = EventPublisher()
    view = KvIndexer(RouterConfig(kind="kv"))
    await view.add(worker("w-0", publisher.source))
    hashes = view.hashes(request())
    assert len(hashes) == 3
    publisher.publish(
        [
            BlockStored(
                block_hashes=(1, 2),
                parent_block_hash=None,
                token_ids=tuple(PROMPT[:32]),
                block_size=16,
            )
        ]
    )
    async with asyncio.timeout(5):
        while not view.match(hashes):
            await asyncio.sleep(0.01)
    assert view.match(hashes) == {WorkerRank("w-0"): Overlap(device=2)}
    await view.remove("w-0")
    assert view.match(hashes) == {}
    await view.close()
    publisher.close()


async def test_without_events_what_was_routed_is_assumed_for_a_while() -> None:
    now_s = 0.0
    view = KvIndexer(RouterConfig(kind="kv", router_ttl_s=10.0), clock=lambda: now_s)
    await view.add(worker("w-0"))
    hashes = view.hashes(request())
    view.routed(worker("w-0"), 0, hashes)
    assert view.match(hashes) == {WorkerRank("w-0"): Overlap(device=3)}
    now_s = 11.0
    assert view.match(hashes) == {}
    await view.close()


async def test_each_rank_is_guessed_to_hold_what_it_was_sent() -> None:
    """Its memory is its own part of the worker's."""
    view = KvIndexer(RouterConfig(kind="kv"))
    record = worker("w-0")
    record = evolve(record, info=evolve(record.info, data_parallel_size=2, kv_capacity_blocks=4))
    await view.add(record)
    hashes = view.hashes(request())
    view.routed(record, 1, hashes[:1])
    assert view.match(hashes) == {WorkerRank("w-0", 1): Overlap(device=1)}
    view.routed(record, 0, hashes)
    assert view.match(hashes)[WorkerRank("w-0", 0)] == Overlap(device=2)
    await view.remove("w-0")
    assert view.match(hashes) == {}
    await view.close()


async def test_guesses_are_kept_where_the_capacity_is_not_known() -> None:
    view = KvIndexer(RouterConfig(kind="kv"))
    record = worker("w-0")
    record = evolve(record, info=evolve(record.info, kv_capacity_blocks=0))
    await view.add(record)
    view.routed(record, 0, view.hashes(request()))
    assert view.match(view.hashes(request())) == {WorkerRank("w-0"): Overlap(device=3)}
    await view.close()


async def test_a_worker_whose_events_cannot_be_read_is_guessed() -> None:
    view = KvIndexer(RouterConfig(kind="kv"))
    record = worker("w-0", EventSource(endpoint="no address"))
    await view.add(record)
    assert view.exact == frozenset()
    assert [warning.worker_id for warning in view.warnings()] == ["w-0"]
    view.routed(record, 0, view.hashes(request()))
    assert view.match(view.hashes(request())) == {WorkerRank("w-0"): Overlap(device=3)}
    await view.close()


async def test_events_can_be_ignored() -> None:
    publisher = EventPublisher()
    view = KvIndexer(RouterConfig(kind="kv", use_kv_events=False))
    record = worker("w-0", publisher.source)
    await view.add(record)
    hashes = view.hashes(request())
    view.routed(record, 0, hashes)
    assert view.match(hashes) == {WorkerRank("w-0"): Overlap(device=3)}
    await view.close()
    publisher.close()


async def test_a_worker_that_should_publish_events_and_does_not_is_named() -> None:
    view = KvIndexer(RouterConfig(kind="kv"))
    await view.add(worker("w-0"))
    [warning] = view.warnings()
    assert (warning.worker_id, warning.cause) == ("w-0", Cause.NO_SOURCE)
    assert "guessed" in warning.message
    view.routed(worker("w-0"), 0, view.hashes(request()))
    assert view.statistics()["w-0"].blocks == (3, 0, 0, 0)
    await view.remove("w-0")
    assert view.warnings() == []
    assert view.statistics() == {}
    await view.close()


async def test_guessing_by_configuration_is_shown_and_no_problem(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "commutator.routing")
    publisher = EventPublisher()
    view = KvIndexer(RouterConfig(kind="kv", use_kv_events=False))
    await view.add(worker("w-0"))
    await view.add(worker("w-1", publisher.source))
    assert view.warnings() == []
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all("guessed" in line and "use_kv_events" in line for line in told)
    await view.close()
    publisher.close()


@pytest.mark.parametrize("use_kv_events", [True, False])
@pytest.mark.parametrize(("block_size", "named"), [(16, False), (8, False), (24, True), (32, True)])
async def test_blocks_that_hold_less_than_is_guessed_are_named(
    block_size: int, named: bool, use_kv_events: bool
) -> None:
    view = KvIndexer(RouterConfig(kind="kv", use_kv_events=use_kv_events))
    record = worker("w-0")
    await view.add(evolve(record, info=evolve(record.info, block_size=block_size)))
    found = {warning.cause: warning.message for warning in view.warnings()}
    assert (Cause.NO_SOURCE in found) == use_kv_events
    assert (Cause.BLOCK_SIZE in found) == named
    if named:
        assert f"{block_size} tokens where the router counts 16" in found[Cause.BLOCK_SIZE]
    await view.close()


async def test_a_salted_prompt_matches_what_its_own_salt_routed() -> None:
    view = KvIndexer(RouterConfig(kind="kv"))
    await view.add(worker("w-0"))
    salted = evolve(request(), cache_salt="tenant-1")
    view.routed(worker("w-0"), 0, view.hashes(salted))
    assert view.match(view.hashes(salted)) == {WorkerRank("w-0"): Overlap(device=3)}
    assert view.match(view.hashes(request())) == {}
    assert view.match(view.hashes(evolve(request(), cache_salt="tenant-2"))) == {}
    await view.close()
