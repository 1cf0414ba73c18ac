"""A subscriber and an engine for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.unit.routing.fake_engine import SIZE, TIMES, FakeEngine

from commutator.contract.routing import RouterConfig
from commutator.routing.prefix_index.indexer import KvIndexer

__all__ = ["Clock"]


class Clock:
    """Stands still until a test moves it."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def subscriber() -> AsyncIterator[KvIndexer]:
    made = KvIndexer(RouterConfig(kind="kv", block_size=SIZE), times=TIMES)
    yield made
    await made.close()


@pytest.fixture
def clock(subscriber: KvIndexer) -> Clock:
    """The subscriber's."""
    subscriber._clock = made = Clock()
    return made


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as made:
        yield made
