"""The conformance suite for event buses: subclass it, define how one is opened, run pytest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Self

import pytest
from attrs import evolve, frozen

from commutator import EventSource
from commutator.contract.block import BlockStored
from commutator.contract.event_bus import EventBus, EventChannel, Message
from commutator.kv_events import decode_batch
from commutator.kv_events.relay import EventRelay
from commutator.kv_events.sequence import SequenceCounters
from commutator.kv_events.subscriber import EventSubscriber, SourceTimes
from commutator_engine_kit import EventPublisher
from commutator_testing.shared import TEST_ENGINE, make_record, until

_TIMES = SourceTimes(replay_timeout_s=2.0, settle_s=0.2, check_interval_s=0.5)
_NO_CHECKS = SourceTimes(replay_timeout_s=2.0, settle_s=60.0, check_interval_s=60.0)
_BLOCK = 4


class WorkerEvents:
    """A worker that publishes numbered blocks, and its host's part of the bus."""

    def __init__(
        self, bus: EventBus, worker_id: str = "w-0", instance: str = "i", model: str = "m"
    ) -> None:
        self._publisher = EventPublisher()
        self._relay = EventRelay(bus, _TIMES)
        info = evolve(TEST_ENGINE, model=model, block_size=_BLOCK, kv_events=self._publisher.source)
        self._record = make_record(worker_id, info, instance=instance)
        self.published = 0
        """Blocks so far; they are numbered from 0."""

    async def __aenter__(self) -> Self:
        self._record = await self._relay.announced(self._record)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._relay.close()
        await asyncio.to_thread(self._publisher.close)

    @property
    def source(self) -> EventSource:
        """What front doors read."""
        source = self._record.info.kv_events
        assert source is not None
        return source

    def publish(self, blocks: int = 1, *, tokens: int = _BLOCK) -> None:
        """Publish a message for each of the next ``blocks`` blocks, of ``tokens`` tokens each."""
        for number in range(self.published, self.published + blocks):
            stored = BlockStored(
                block_hashes=(number,),
                parent_block_hash=None,
                token_ids=tuple(range(70_000, 70_000 + tokens)),
                block_size=tokens,
            )
            self._publisher.publish([stored])
        self.published += blocks


class EventReader:
    """A front door that reads one worker, and notes the blocks in their order."""

    def __init__(self, bus: EventBus, source: EventSource, times: SourceTimes = _TIMES) -> None:
        self.blocks: list[int] = []
        """Their numbers, since the last reset."""
        self.resets: list[str] = []
        """The reasons of resets."""
        self.malformed = 0
        self._subscriber = EventSubscriber(bus, source, self, times)

    @property
    def counters(self) -> SequenceCounters:
        return self._subscriber.sequence.counters

    async def __aenter__(self) -> Self:
        self._subscriber.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._subscriber.close()

    async def has(self, blocks: int, timeout_s: float = 60.0) -> None:
        """Wait until it has read exactly the first ``blocks`` blocks, in order, each once."""
        with suppress(TimeoutError):
            await until(lambda: len(self.blocks) >= blocks, timeout_s)
        assert self.blocks == list(range(blocks)), (self.blocks[-3:], blocks, self.counters)

    def message(self, body: bytes) -> None:
        for event in decode_batch(body).events:
            assert isinstance(event, BlockStored)
            (number,) = event.block_hashes
            assert isinstance(number, int)
            self.blocks.append(number)

    def reset(self, reason: str) -> None:
        self.blocks.clear()
        self.resets.append(reason)

    def undecodable(self, error: Exception) -> None:
        self.malformed += 1


@frozen
class BusFaults:
    """How often live messages suffer; replays do not."""

    lost: float = 0.0
    """The fraction of messages that do not come."""
    copied: float = 0.0
    """The fraction that comes twice."""
    late: float = 0.0
    """The fraction that comes after its successor."""
    delay_s: float = 0.0
    """Seconds before each reception, as of a front door that is busy with other things."""


class FaultyBus(EventBus):
    """Another bus, whose live messages suffer ``faults``, repeatably by ``seed``."""

    def __init__(self, inner: EventBus, faults: BusFaults, seed: int) -> None:
        self._inner = inner
        self._faults = faults
        self._rng = random.Random(seed)

    def subscribe(
        self, source: EventSource, on_malformed: Callable[[Exception], None]
    ) -> EventChannel:
        inner = self._inner.subscribe(source, on_malformed)
        return _FaultyChannel(inner, self._faults, self._rng)

    async def close(self) -> None:
        """The other bus stays open."""


class _FaultyChannel(EventChannel):
    def __init__(self, inner: EventChannel, faults: BusFaults, rng: random.Random) -> None:
        self.numbers_start_again = inner.numbers_start_again  # type: ignore[misc]
        self._inner = inner
        self._faults = faults
        self._rng = rng
        self._late: Message | None = None

    async def receive(self) -> Sequence[Message]:
        while True:
            await asyncio.sleep(self._faults.delay_s)
            if came := list(self._suffered(await self._inner.receive())):
                return came

    def _suffered(self, messages: Iterable[Message]) -> Iterable[Message]:
        faults, chance = self._faults, self._rng.random
        for message in messages:
            if chance() < faults.lost:
                continue
            if self._late is None and chance() < faults.late:
                self._late = message
                continue
            yield message
            if chance() < faults.copied:
                yield message
            if self._late is not None:
                late, self._late = self._late, None
                yield late

    async def missed(self) -> None:
        await self._inner.missed()

    def replay(self, first: int, timeout_s: float) -> AsyncGenerator[Sequence[Message], None]:
        return self._inner.replay(first, timeout_s)

    async def close(self) -> None:
        await self._inner.close()


@pytest.mark.asyncio
class EventBusContract:
    """What every event bus must do, for workers and front doors as core has them."""

    documented_in = "EventBus in docs/reference/contract/event_bus.md"

    def open_bus(self) -> AbstractAsyncContextManager[EventBus]:
        """A context that makes one process's bus, and closes it.

        Each test opens one for the workers' host and one for each front door: all of one cluster,
        which no other test uses.
        """
        raise NotImplementedError("return a context manager with the event bus under test")

    def cut_off(self) -> AbstractAsyncContextManager[None] | None:
        """A context in which the open buses are away, and after which they are back.

        None, as here: nothing stands between hosts and front doors that could be away.
        """
        return None

    @asynccontextmanager
    async def buses(self) -> AsyncIterator[tuple[EventBus, EventBus]]:
        """The bus of the workers' host, and that of a front door."""
        async with AsyncExitStack() as stack:
            host = await stack.enter_async_context(self.open_bus())
            yield host, await stack.enter_async_context(self.open_bus())

    async def test_messages_come_in_order_and_each_once(self) -> None:
        async with self.buses() as (host, door), WorkerEvents(host) as worker:
            worker.publish(50)
            async with EventReader(door, worker.source) as reader:
                await reader.has(50)
                worker.publish(200)
                await reader.has(250)
            assert (reader.resets, reader.malformed) == ([], 0)

    async def test_every_front_door_gets_every_message(self) -> None:
        async with (
            self.buses() as (host, door),
            self.open_bus() as other,
            WorkerEvents(host) as worker,
            EventReader(door, worker.source) as one,
            EventReader(other, worker.source) as two,
            EventReader(other, worker.source) as three,
        ):
            worker.publish(100)
            for reader in (one, two, three):
                await reader.has(100)

    async def test_who_comes_late_gets_what_is_kept(self) -> None:
        async with self.buses() as (host, door), WorkerEvents(host) as worker:
            async with EventReader(door, worker.source) as first:
                worker.publish(3_000)
                await first.has(3_000)
            async with EventReader(door, worker.source) as late:
                await late.has(3_000)
            assert late.resets == []

    async def test_workers_whose_names_look_alike_are_not_mixed_up(self) -> None:
        names = [("a.b", "c"), ("a", "b.c"), ("a/b *", "c>"), ("a%2Eb", "c")]
        async with self.buses() as (host, door), AsyncExitStack() as stack:
            readers = []
            for number, (model, worker_id) in enumerate(names):
                worker = WorkerEvents(host, worker_id, "i", model)
                await stack.enter_async_context(worker)
                reader = EventReader(door, worker.source)
                await stack.enter_async_context(reader)
                worker.publish(10 + number)
                readers.append((reader, worker))
            for reader, worker in readers:
                await reader.has(worker.published)
                assert reader.resets == []

    async def test_a_worker_that_starts_anew_begins_anew(self) -> None:
        """Nothing of the worker before comes, even though its numbers went further."""
        async with self.buses() as (host, door):
            async with (
                WorkerEvents(host, instance="i") as before,
                EventReader(door, before.source) as reader,
            ):
                before.publish(100)
                await reader.has(100)
            async with (
                WorkerEvents(host, instance="j") as after,
                EventReader(door, after.source) as reader,
            ):
                after.publish(20)
                await reader.has(20)
                after.publish(100)
                await reader.has(120)

    async def test_large_messages_come_whole(self) -> None:
        """As of a prompt of a million tokens."""
        async with (
            self.buses() as (host, door),
            WorkerEvents(host) as worker,
            EventReader(door, worker.source) as reader,
        ):
            for tokens in (4, 1_000_000, 16, 400_000):
                worker.publish(tokens=tokens)
            await reader.has(4)
            async with EventReader(door, worker.source) as late:
                await late.has(4)

    async def test_a_front_door_that_reads_slowly_gets_it_all_in_the_end(self) -> None:
        async with (
            self.buses() as (host, door),
            WorkerEvents(host) as worker,
            EventReader(FaultyBus(door, BusFaults(delay_s=0.02), 0), worker.source) as reader,
        ):
            worker.publish(3_000)
            await reader.has(3_000)

    async def test_lost_messages_are_asked_for(self) -> None:
        async with (
            self.buses() as (host, door),
            WorkerEvents(host) as worker,
            EventReader(FaultyBus(door, BusFaults(lost=0.1), 1), worker.source) as reader,
        ):
            await _in_waves(worker, reader)
            assert (reader.counters.lost, reader.resets) == (0, [])
            assert reader.counters.replays > 1

    async def test_copies_and_late_messages_do_no_harm(self) -> None:
        async with self.buses() as (host, door), WorkerEvents(host) as worker:
            faulty = FaultyBus(door, BusFaults(lost=0.05, copied=0.1, late=0.1), 2)
            channel = door.subscribe(worker.source, lambda _: None)
            starts_again = channel.numbers_start_again
            await channel.close()
            if starts_again:
                pytest.skip("its connections neither copy messages nor change their order")
            async with EventReader(faulty, worker.source) as reader:
                await _in_waves(worker, reader)
                assert reader.resets == []
                assert reader.counters.passed_over > 0

    async def test_out_of_reach_nothing_stops_and_afterwards_nothing_is_missing(self) -> None:
        async with (
            self.buses() as (host, door),
            WorkerEvents(host) as worker,
            EventReader(door, worker.source, _NO_CHECKS) as reader,
        ):
            cut_off = self.cut_off()
            if cut_off is None:
                pytest.skip("nothing stands between hosts and front doors")
            worker.publish(100)
            await reader.has(100)
            async with cut_off:
                worker.publish(100)
                async with WorkerEvents(host, "w-1") as new, EventReader(door, new.source):
                    pass  # neither waits for the bus
            await reader.has(200)
            worker.publish(100)
            await reader.has(300)
            assert reader.resets == []
            assert reader.counters.interruptions

    async def test_the_source_of_another_bus_is_refused(self) -> None:
        async with self.open_bus() as bus:
            foreign = EventSource(endpoint="no-bus-has://this", replay_endpoint="no-bus-has://that")
            with pytest.raises(ValueError, match=r"cluster\.events"):
                bus.subscribe(foreign, lambda _: None)


async def _in_waves(worker: WorkerEvents, reader: EventReader) -> None:
    """Each wave suffers live, as everything before it has been read."""
    for _ in range(4):
        worker.publish(150)
        await reader.has(worker.published)
