"""A subscriber and an engine for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.unit.routing.fake_engine import SIZE, TIMES, FakeEngine

from commutator.routing.event_subscriber import EventSubscriber
from commutator.routing.prefix_index import PrefixIndex


@pytest.fixture
async def subscriber() -> AsyncIterator[EventSubscriber]:
    made = EventSubscriber(PrefixIndex(SIZE), TIMES)
    yield made
    await made.close()


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as made:
        yield made
