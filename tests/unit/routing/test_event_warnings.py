"""What would make overlap silently zero is said: in the log, once, and for as long as it holds."""

from __future__ import annotations

import logging
import re

import pytest
from tests.unit.routing.conftest import Clock
from tests.unit.routing.fake_engine import (
    HASHES,
    SIZE,
    TOKENS,
    FakeEngine,
    info,
    known,
    record,
    stored,
    until,
)

from commutator.contract.block import BlockRemoved, BlockStored
from commutator.contract.worker import EventSource
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.health import Cause
from commutator.routing.prefix_index.indexer import KvIndexer


async def test_a_worker_that_publishes_nothing_is_named(
    subscriber: KvIndexer, engine: FakeEngine, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await subscriber.add(record("w1", info(None)))
    for _ in range(3):
        subscriber.computed("w0", HASHES)
    assert [warning.cause for warning in subscriber.warnings()] == [Cause.NO_SOURCE]
    clock.now_s = 10.0
    for _ in range(2):
        causes = [(warning.worker_id, warning.cause) for warning in subscriber.warnings()]
        assert causes == [("w0", Cause.SILENT), ("w1", Cause.NO_SOURCE)]
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 2, "each is said once"
    assert engine.source.endpoint in said[1]


@pytest.mark.parametrize(("block_size", "words"), [(6, "does not divide"), (8, "whole blocks")])
async def test_a_block_size_that_differs_is_said_loudly(
    subscriber: KvIndexer, engine: FakeEngine, block_size: int, words: str
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    assert subscriber.warnings() == []
    await engine.publish(stored(0, 2, block_size=block_size))
    await until(lambda: bool(subscriber.warnings()))
    [warning] = subscriber.warnings()
    assert warning.cause is Cause.BLOCK_SIZE
    assert f"{block_size} tokens" in warning.message
    assert words in warning.message


async def test_an_announced_block_size_is_compared_before_any_event(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    await subscriber.add(record("w0", info(engine.source, block_size=6)))
    assert [warning.cause for warning in subscriber.warnings()] == [Cause.BLOCK_SIZE]


async def test_tokens_that_differ_make_overlap_silently_zero_so_it_is_said(
    subscriber: KvIndexer, engine: FakeEngine, clock: Clock
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(0, 4))
    await known(subscriber, 4)
    other = sequence_hashes(range(32), SIZE)
    for _ in range(8):
        subscriber.computed("w0", other)
    subscriber.computed("w0", [])  # shorter than a block: says nothing
    clock.now_s = 10.0
    [warning] = subscriber.warnings()
    assert warning.cause is Cause.NEVER_MATCHES
    assert "8 prompts" in warning.message
    subscriber.computed("w0", HASHES)
    await engine.publish(stored(4, 8))
    await known(subscriber, 8)
    clock.now_s = 20.0
    assert subscriber.warnings() == []


def prompt(number: int) -> list[int]:
    """It begins as the prompt of the events does."""
    return sequence_hashes((*TOKENS[: 4 * SIZE], *(number,) * SIZE), SIZE)


async def test_events_that_stop_are_reported_though_all_prompts_begin_alike(
    subscriber: KvIndexer, engine: FakeEngine, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(0, 4))
    await known(subscriber, 4)
    for number in range(20):
        clock.now_s += 1.0
        subscriber.computed("w0", prompt(number))
        subscriber.computed("w0", HASHES[:4])  # an old one, of which nothing has to come
        subscriber.warnings()
    clock.now_s = 40.0
    [warning] = subscriber.warnings()
    assert warning.cause is Cause.STOPPED
    assert engine.source.endpoint in warning.message
    assert "20 prompts" in warning.message
    [said] = caplog.records
    assert "since its last KV event" in said.message, "and nothing else before"
    await engine.publish(stored(4, 8))
    await known(subscriber, 8)
    subscriber.computed("w0", HASHES)
    clock.now_s = 50.0
    assert subscriber.warnings() == []


async def test_prompts_that_part_from_the_events_later_on_are_reported(
    subscriber: KvIndexer, engine: FakeEngine, clock: Clock
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    for number in range(8):
        clock.now_s = float(number)
        await engine.publish(stored(0, number + 1))
        await known(subscriber, number + 1)
        subscriber.computed("w0", prompt(number))
    clock.now_s = 20.0
    assert [warning.cause for warning in subscriber.warnings()] == [Cause.NEVER_MATCHES]


async def test_a_prompts_end_that_may_be_evicted_already_says_nothing(
    subscriber: KvIndexer, engine: FakeEngine, clock: Clock
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(0, 8))
    await known(subscriber, 8)
    for _ in range(8):
        subscriber.computed("w0", HASHES)
    await engine.publish(BlockRemoved(block_hashes=(1007,)))
    await known(subscriber, 7)
    clock.now_s = 20.0
    assert subscriber.warnings() == []


async def test_what_fills_no_block_of_the_engine_is_not_expected(
    subscriber: KvIndexer, engine: FakeEngine, clock: Clock
) -> None:
    await subscriber.add(record("w0", info(engine.source, block_size=2 * SIZE)))
    event = BlockStored(
        block_hashes=(1, 2),
        parent_block_hash=None,
        token_ids=TOKENS[: 4 * SIZE],
        block_size=2 * SIZE,
    )
    await engine.publish(event)
    await known(subscriber, 4)
    for _ in range(8):
        subscriber.computed("w0", HASHES[:5])
        subscriber.computed("w0", HASHES[:1])
    clock.now_s = 20.0
    assert [warning.cause for warning in subscriber.warnings()] == [Cause.BLOCK_SIZE]


async def test_of_very_many_prompts_some_are_looked_up(
    subscriber: KvIndexer, engine: FakeEngine, clock: Clock
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    for _ in range(1000):  # fifty a second
        clock.now_s += 0.02
        subscriber.computed("w0", HASHES)
        subscriber.warnings()
    [warning] = subscriber.warnings()
    assert warning.cause is Cause.SILENT
    assert int(re.findall(r"(\d+) prompts", warning.message)[0]) > 50


async def test_a_replay_endpoint_that_stops_answering_is_reported(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(0, 2))
    await known(subscriber, 2)
    engine.answers = False
    await until(lambda: bool(subscriber.warnings()))
    [warning] = subscriber.warnings()
    assert warning.cause is Cause.NO_REPLAY
    assert str(engine.source.replay_endpoint) in warning.message
    engine.answers = True
    await until(lambda: not subscriber.warnings())


async def test_tiers_that_do_not_match_the_events_are_said(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    offloaded = BlockStored(
        block_hashes=(1001, 1009),
        parent_block_hash=1000,
        token_ids=(),
        block_size=SIZE,
        medium="CPU",
    )
    await engine.publish(stored(0, 2), stored(2, 3, medium="TAPE"), offloaded)
    await until(lambda: len(subscriber.warnings()) == 2)
    medium, untraceable = subscriber.warnings()
    assert medium.cause is Cause.UNKNOWN_MEDIUM
    assert "TAPE" in medium.message
    assert untraceable.cause is Cause.UNTRACEABLE
    assert "without their tokens" in untraceable.message


async def test_blocks_whose_parent_never_comes_are_said(
    subscriber: KvIndexer, engine: FakeEngine, clock: Clock
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(1, 4))
    await until(lambda: subscriber.index.statistics().orphans == 3)
    assert subscriber.warnings() == [], "it may still come"
    clock.now_s = 29.0
    assert subscriber.warnings() == []
    clock.now_s = 30.0
    [warning] = subscriber.warnings()
    assert warning.cause is Cause.ORPHANS
    assert "has 3 blocks" in warning.message
    await engine.publish(stored(0, 1))
    await known(subscriber, 4)
    assert subscriber.warnings() == []


@pytest.mark.parametrize(
    ("endpoint", "ranks"), [("tcp://*:5557", 1), ("nonsense", 1), ("ipc:///tmp/x", 2)]
)
async def test_an_address_that_cannot_be_connected_to_is_named(
    subscriber: KvIndexer, endpoint: str, ranks: int
) -> None:
    await subscriber.add(record("w0", info(EventSource(endpoint=endpoint), ranks=ranks)))
    [warning] = subscriber.warnings()
    assert warning.cause is Cause.UNREADABLE
    assert endpoint in warning.message
