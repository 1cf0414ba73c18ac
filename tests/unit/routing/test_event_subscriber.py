"""Events over real sockets; each case that broke others has a test of its own."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq
from attrs import evolve
from tests.unit.routing.fake_engine import (
    HASHES,
    SIZE,
    TIMES,
    TOKENS,
    FakeEngine,
    device,
    info,
    known,
    record,
    stored,
    until,
)

from commutator.contract.block import BlockRemoved, BlocksCleared, BlockStored
from commutator.contract.routing import RouterConfig, WorkerRank
from commutator.contract.worker import EventSource
from commutator.kv_events.subscriber import SourceTimes
from commutator.routing.prefix_index.health import Cause
from commutator.routing.prefix_index.indexer import KvIndexer, WorkerSnapshot
from commutator_engine_kit import EventPublisher

ONLY_ON_CONNECTING = SourceTimes(replay_timeout_s=0.3, settle_s=60, check_interval_s=60)


async def test_events_before_and_after_the_subscription(subscriber: KvIndexer) -> None:
    publisher = EventPublisher()
    try:
        publisher.publish([stored(0, 2)])
        await subscriber.add(record("w0", info(publisher.source)))
        await known(subscriber, 2)
        publisher.publish([stored(2, 4), BlockRemoved(block_hashes=(1003,))])
        await known(subscriber, 3)
        publisher.publish([BlocksCleared()])
        await known(subscriber, 0)
        assert subscriber.warnings() == []
        events = subscriber.statistics()["w0"]
        assert (events.messages, events.decode_errors, events.sources[0].gaps) == (3, 0, 0)
    finally:
        await asyncio.to_thread(publisher.close)


@pytest.mark.parametrize("turns", range(1, 6))
async def test_a_removal_that_a_newer_change_cancels_unsubscribes_all_the_same(
    subscriber: KvIndexer, engine: FakeEngine, turns: int
) -> None:
    """Otherwise the old subscription asks for missed events for ever, and nobody answers."""
    await subscriber.add(record("w0", info(engine.source)))
    (old,) = subscriber._workers["w0"].subscribers
    removing = asyncio.create_task(subscriber.remove("w0"))
    for _ in range(turns):
        await asyncio.sleep(0)
    removing.cancel()
    await asyncio.gather(removing, return_exceptions=True)
    await until(lambda: not old._tasks)
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(0, 2))
    await known(subscriber, 2)


async def test_a_gap_is_noticed(subscriber: KvIndexer, engine: FakeEngine) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await until(lambda: bool(engine.requests))
    await engine.publish(stored(0, 2))
    await known(subscriber, 2)
    await engine.publish(stored(2, 4), lost=True)
    await engine.publish(BlockRemoved(block_hashes=(1005,)), stored(4, 5))
    await known(subscriber, 5)
    assert subscriber.statistics()["w0"].sources[0].lost == 0


async def test_a_message_lost_before_a_silence_is_noticed(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(0, 2))
    await known(subscriber, 2)
    await engine.publish(stored(2, 4), lost=True)
    await known(subscriber, 4)


async def test_a_gap_that_replay_cannot_fill_means_a_full_resync(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    engine.keep = 2
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(0, 4))
    await known(subscriber, 4)
    await engine.publish(BlockRemoved(block_hashes=(1000,)), lost=True)
    await engine.publish(BlocksCleared(), lost=True)
    await engine.publish(stored(0, 1), lost=True)
    await engine.publish(stored(1, 3))
    await known(subscriber, 3)
    assert subscriber.index.statistics().blocks == 3, "what was known before is gone"
    [warning] = subscriber.warnings()
    assert warning.cause is Cause.LOST
    assert "replay" in warning.message


async def test_a_gap_without_replay_drops_the_workers_blocks(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    source = EventSource(endpoint=engine.source.endpoint)
    await subscriber.add(record("w0", info(source)))
    await engine.subscribed()
    await engine.publish(stored(0, 4))
    await known(subscriber, 4)
    await engine.publish(BlocksCleared(), lost=True)
    await engine.publish(stored(0, 1))
    await known(subscriber, 1)
    assert [warning.cause for warning in subscriber.warnings()] == [Cause.LOST]


async def test_a_silent_replay_endpoint_does_not_stop_live_events(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    engine.answers = False
    await subscriber.add(record("w0", info(engine.source)))
    await until(lambda: bool(engine.requests))
    await engine.publish(stored(0, 2))
    await known(subscriber, 2)
    assert subscriber.statistics()["w0"].sources[0].replays_failed >= 1


async def test_an_engine_restarts_and_its_old_blocks_go(
    subscriber: KvIndexer, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine() as first:
        await subscriber.add(record("w0", info(first.source)))
        await first.publish(stored(0, 4))
        await first.publish(stored(4, 6))
        await known(subscriber, 6)
    async with FakeEngine(first.source) as second:
        await known(subscriber, 0)
        await second.publish(stored(0, 2))
        await known(subscriber, 2)
    assert "worker w0: the engine restarted" in caplog.text


async def test_without_a_replay_endpoint_a_restart_is_noticed_though_the_numbers_go_on(
    subscriber: KvIndexer,
) -> None:
    async with FakeEngine() as first:
        await subscriber.add(record("w0", info(silent(first.source))))
        await first.subscribed()
        await first.publish(stored(0, 4))
        await known(subscriber, 4)
    async with FakeEngine(first.source) as second:
        await second.publish(stored(0, 1), lost=True)
        await known(subscriber, 0)
        await second.subscribed()
        await second.publish(stored(0, 2))
        await known(subscriber, 2)


async def test_an_engine_restarts_and_has_sent_more_than_before() -> None:
    """Its sequence goes on beyond the old one, so only the messages themselves tell."""
    subscriber = KvIndexer(RouterConfig(kind="kv", block_size=SIZE), times=ONLY_ON_CONNECTING)
    try:
        async with FakeEngine() as first:
            await first.publish(stored(0, 4))
            await subscriber.add(record("w0", info(first.source)))
            await known(subscriber, 4)
        async with FakeEngine(first.source) as second:
            for _ in range(3):
                await second.publish(stored(0, 1), lost=True)
            await known(subscriber, 1)
    finally:
        await subscriber.close()


async def test_a_long_history_is_replayed_whole(subscriber: KvIndexer) -> None:
    publisher = EventPublisher()
    try:
        for number in range(5_000):
            first = BlockStored(
                block_hashes=(number,),
                parent_block_hash=None,
                token_ids=tuple(range(number, number + SIZE)),
                block_size=SIZE,
            )
            publisher.publish([first])
        await subscriber.add(record("w0", info(publisher.source)))
        await until(lambda: subscriber.index.statistics().blocks == 5_000)
        assert subscriber.statistics()["w0"].sources[0].resyncs == 0
    finally:
        await asyncio.to_thread(publisher.close)


async def test_replay_racing_live_events(subscriber: KvIndexer, engine: FakeEngine) -> None:
    """A block is stored and removed again and again while replays run."""
    await subscriber.add(record("w0", info(engine.source)))
    for turn in range(200):
        await engine.publish(stored(0, 4), lost=turn % 7 == 3)
        await engine.publish(BlockRemoved(block_hashes=(1003, 1002)), lost=turn % 11 == 5)
        if turn % 10 == 0:
            await asyncio.sleep(0.001)
    await engine.publish(stored(2, 3))
    await known(subscriber, 3)
    [counters] = subscriber.statistics()["w0"].sources
    assert counters.applied == 401
    assert (counters.restarts, counters.lost) == (0, 0)


async def test_a_child_arrives_whose_parent_is_unknown(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(2, 4))
    await until(lambda: subscriber.index.statistics().orphans == 2)
    assert subscriber.index.match(HASHES) == {}
    await engine.publish(stored(0, 2))
    await known(subscriber, 4)


async def test_removed_for_a_block_never_stored(subscriber: KvIndexer, engine: FakeEngine) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(BlockRemoved(block_hashes=(1000, -5, b"?")), stored(0, 2))
    await known(subscriber, 2)
    assert subscriber.index.worker_ranks("w0")[0].sizes[0] == 2


async def test_older_engines_write_events_as_arrays(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    event = ["BlockStored", [-7, -8], None, list(TOKENS[: 2 * SIZE]), SIZE, None]
    await engine.send(msgspec.msgpack.encode([0.0, [event]]))
    await known(subscriber, 2)


async def test_what_cannot_be_decoded_is_counted_and_the_next_is_read(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(0, 1))
    await known(subscriber, 1)
    await engine.send(b"no MessagePack")
    await engine.send(msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}]]))
    wrong = {"type": "BlockStored", "block_hashes": [1], "token_ids": [-1] * SIZE, "block_size": 4}
    await engine.send(msgspec.msgpack.encode([0.0, [wrong]]))
    await engine.send_frames([b"", b"three frames are needed"])
    await engine.publish(stored(1, 2))
    await known(subscriber, 2)
    assert subscriber.statistics()["w0"].decode_errors == 4
    assert [warning.cause for warning in subscriber.warnings()] == [Cause.MALFORMED]


async def test_each_rank_publishes_on_a_port_of_its_own(subscriber: KvIndexer) -> None:
    context = zmq.Context()
    for port in range(20_000, 60_000, 7):
        pubs = [context.socket(zmq.XPUB) for _ in range(2)]
        try:
            for rank, pub in enumerate(pubs):
                pub.bind(f"tcp://127.0.0.1:{port + rank}")
            break
        except zmq.ZMQError:
            for pub in pubs:
                pub.close()
    source = EventSource(endpoint=f"tcp://127.0.0.1:{port}")
    await subscriber.add(record("w0", info(source, ranks=2)))
    await until(lambda: all(pub.poll(0) for pub in pubs))  # subscriptions
    event = ["BlockStored", [1], None, list(TOKENS[:SIZE]), SIZE]
    for rank, pub in enumerate(pubs):
        for turn in range(rank + 1):
            body = msgspec.msgpack.encode([0.0, [event]])
            pub.send_multipart([b"", turn.to_bytes(8, "big"), body])
    expected = {WorkerRank("w0", 0), WorkerRank("w0", 1)}
    await until(lambda: set(subscriber.index.match(HASHES)) == expected)
    await subscriber.remove("w0")
    assert list(subscriber.index._ranks) == []
    for pub in pubs:
        pub.close(linger=0)
    context.term()


async def test_a_lapsed_worker_is_forgotten_and_may_come_again(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(0, 2))
    await known(subscriber, 2)
    await subscriber.remove("w0")
    await subscriber.remove("w0")
    assert subscriber.index.statistics().blocks == 0
    assert subscriber.statistics() == {}
    await subscriber.add(record("w0", info(engine.source)))
    await known(subscriber, 2)


def taken(subscriber: KvIndexer, worker_id: str) -> WorkerSnapshot:
    """A snapshot on its way from one front door to another."""
    packed = msgspec.msgpack.encode(subscriber.snapshot(worker_id))
    return msgspec.msgpack.decode(packed, type=WorkerSnapshot)


def silent(source: EventSource) -> EventSource:
    """The same without replay: it tells only what is new."""
    return evolve(source, replay_endpoint=None)


async def test_a_new_front_door_starts_warm_from_a_snapshot(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    for worker in ("w0", "w1"):
        await subscriber.add(record(worker, info(engine.source)))
    await engine.publish(stored(0, 2))
    await until(lambda: len(subscriber.index.match(HASHES)) == 2)
    snapshots = [taken(subscriber, worker) for worker in subscriber.exact]
    await engine.publish(stored(2, 4))
    other = KvIndexer(RouterConfig(kind="kv", block_size=SIZE), times=TIMES)
    try:
        for snapshot in snapshots:
            other.restore(snapshot)
        assert other.index.match(HASHES) == {}, "no worker can be routed to yet"
        await other.add(record("w0", info(engine.source)))
        assert other.index.match(HASHES) == device(2), "at once, without w1"
        await known(other, 4)
        events = other.statistics()["w0"]
        assert events.sources[0].applied == 1, "only what is new"
        assert events.messages == 2, "so it is not called silent"
        other.forget_snapshots()
        await other.add(record("w1", info(silent(engine.source))))
        assert set(other.index.match(HASHES)) == {WorkerRank("w0")}, "w1 came too late"
    finally:
        await other.close()


async def test_a_rank_that_never_spoke_costs_the_others_nothing(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    async with FakeEngine() as quiet:
        both = info(evolve(engine.source, further_ranks=(quiet.source,)), ranks=2)
        await subscriber.add(record("w0", both))
        await engine.publish(stored(0, 2))
        await known(subscriber, 2)
        other = KvIndexer(RouterConfig(kind="kv", block_size=SIZE), times=TIMES)
        try:
            other.restore(taken(subscriber, "w0"))
            await other.add(record("w0", both))
            assert other.index.match(HASHES) == device(2)
            await quiet.publish(stored(0, 1))
            await until(lambda: WorkerRank("w0", 1) in other.index.match(HASHES))
            assert other.statistics()["w0"].sources[0].resyncs == 0
        finally:
            await other.close()


async def test_a_snapshot_of_a_worker_that_restarted_is_not_believed(
    subscriber: KvIndexer, engine: FakeEngine
) -> None:
    await subscriber.add(record("w0", info(engine.source)))
    await engine.publish(stored(0, 2))
    await known(subscriber, 2)
    other = KvIndexer(RouterConfig(kind="kv", block_size=SIZE), times=TIMES)
    try:
        other.restore(taken(subscriber, "w0"))
        async with FakeEngine() as elsewhere:
            await other.add(record("w0", info(elsewhere.source)))
            assert other.index.match(HASHES) == {}
    finally:
        await other.close()
