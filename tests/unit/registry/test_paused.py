"""A registry whose process stood still: nobody could renew a lease meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest

from commutator.registry import memory
from commutator.registry.memory import MemoryRegistry
from commutator_testing.registries import make_worker


async def test_a_registry_that_was_paused_loses_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_BEAT_S", 0.05)
    registry = MemoryRegistry()
    lease_id = await registry.register(make_worker("w-0"), 0.3)
    time.sleep(0.6)  # noqa: ASYNC251 - the whole process stands, as on a paused machine
    await asyncio.sleep(0.01)  # timers that are due run before what was sent is read
    assert await registry.keep_alive(lease_id)
    await asyncio.sleep(0.6)
    assert not await registry.keep_alive(lease_id), "without a renewal it lapses"
    await registry.close()
