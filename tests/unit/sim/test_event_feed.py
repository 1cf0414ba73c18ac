"""KV events gathered over several ticks have the same effect as one message for each tick."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import cast

import pytest
from tests.support.sim_config import sim_config

from commutator.contract.block import BlockRemoved, BlockStored, CacheLevel, KvEvent
from commutator.routing.prefix_index.index import PrefixIndex
from commutator_engine_kit import EventPublisher
from commutator_sim.events import DEVICE, Offloaded, Removed, Stored
from commutator_sim.kv_events import EventFeed, block_keys
from commutator_sim.model import SimModel
from commutator_sim.request import SimRequest

SIZE = 4


class Publisher:
    """Keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[list[KvEvent]] = []

    def publish(self, events: Sequence[KvEvent]) -> None:
        if events:
            self.messages.append(list(events))


def feed(gather_s: float = 60.0) -> tuple[EventFeed, Publisher]:
    publisher = Publisher()
    made = EventFeed(cast(EventPublisher, publisher), SIZE, has_tiers=False, gather_s=gather_s)
    return made, publisher


async def test_blocks_of_one_request_are_one_event() -> None:
    gathering, publisher = feed()
    token_ids = list(range(16))
    keys = block_keys(token_ids, SIZE, 0)
    for first, last in ((0, 2), (2, 3), (3, 4)):
        event = Stored(0, 1, first, tuple(keys[first:last]))
        gathering.stored(event, keys, token_ids, "adapter", None)
        gathering.publish()
    assert publisher.messages == []
    gathering.flush()
    whole = BlockStored(
        block_hashes=tuple(keys),
        parent_block_hash=None,
        token_ids=tuple(token_ids),
        block_size=SIZE,
        adapter="adapter",
    )
    assert publisher.messages == [[whole]]


async def test_a_block_that_went_meanwhile_comes_back_after_it() -> None:
    gathering, publisher = feed()
    token_ids = list(range(8))
    keys = block_keys(token_ids, SIZE, 0)
    gathering.stored(Stored(0, 1, 0, (keys[0],)), keys, token_ids, None, None)
    gathering.moved(Removed(0, DEVICE, (keys[1],)))
    gathering.stored(Stored(0, 1, 1, (keys[1],)), keys, token_ids, None, None)
    gathering.flush()
    assert publisher.messages == [
        [
            BlockStored(
                block_hashes=(keys[0],),
                parent_block_hash=None,
                token_ids=tuple(token_ids[:4]),
                block_size=SIZE,
            ),
            BlockRemoved(block_hashes=(keys[1],)),
            BlockStored(
                block_hashes=(keys[1],),
                parent_block_hash=keys[0],
                token_ids=tuple(token_ids[4:]),
                block_size=SIZE,
            ),
        ]
    ]


async def test_what_was_gathered_is_sent_in_time() -> None:
    gathering, publisher = feed(gather_s=0.001)
    gathering.moved(Removed(0, DEVICE, (1,)))
    gathering.publish()
    async with asyncio.timeout(30):
        while not publisher.messages:
            await asyncio.sleep(0.001)
    assert publisher.messages == [[BlockRemoved(block_hashes=(1,))]]


@pytest.mark.parametrize("seed", range(8))
def test_an_index_learns_the_same(seed: int) -> None:
    rng = random.Random(seed)
    model = SimModel(
        sim_config(
            block_size=SIZE, kv_capacity_blocks=12, max_running_requests=4, max_tokens_per_step=16
        )
    )
    token_ids, keys = {}, {}
    (each, told), (gathering, gathered) = feed(gather_s=0.0), feed()
    for key in range(60):
        prompt = [*range(SIZE * rng.randrange(3)), *rng.choices(range(100, 103), k=3)]
        answer = rng.randrange(1, 20)
        token_ids[key] = prompt + rng.choices(range(100, 103), k=answer)
        keys[key] = block_keys(token_ids[key], SIZE, 0)
        model.submit(key, SimRequest(len(prompt), answer, keys[key]))
        for event in model.advance(max_steps=rng.randrange(1, 6)):
            for one in (each, gathering):
                if isinstance(event, Stored):
                    one.stored(event, keys[event.key], token_ids[event.key], None, None)
                elif isinstance(event, Offloaded | Removed):
                    one.moved(event)
            each.flush()
        if key % 5 == 4:
            gathering.flush()
            assert indexed(gathered) == indexed(told) != {}
    assert sum(map(len, gathered.messages)) < sum(map(len, told.messages))


def indexed(publisher: Publisher) -> dict[int, int]:
    """The index after all messages: each block's name and sequence hash."""
    index = PrefixIndex(SIZE)
    for message in publisher.messages:
        for event in message:
            index.apply("worker", event, 0)
    assert index.statistics().orphans == 0
    found: dict[int, int] = {}
    for rank in index.snapshot("worker"):
        for name, known in rank.held.get(CacheLevel.DEVICE, {}).items():
            assert isinstance(name, int)
            found[name] = known
    return found
