"""What each registry outside of this project is tried with, beside the shipped suite."""

from __future__ import annotations

import asyncio

import pytest

from commutator.contract.registry import Registry, WorkerDown, WorkerUp
from commutator.errors import NameTakenError
from commutator_testing.registries import make_worker, watching


async def announce_to_another_process(one: Registry, other: Registry, worker_id: str) -> None:
    """What ``one`` announces is seen, refused and drained by ``other``, until it is gone."""
    async with watching(other) as watcher:
        assert await watcher.next() == []
        lease = await one.register(make_worker(worker_id, instance="i"), 60.0)
        assert await watcher.next() == [WorkerUp(record=make_worker(worker_id, instance="i"))]
        with pytest.raises(NameTakenError, match="host h1"):
            await other.register(make_worker(worker_id, 2, instance="j"), 1.0)
        assert await other.set_draining(worker_id, True)
        (drained,) = await watcher.next()
        assert isinstance(drained, WorkerUp)
        assert drained.record.draining
        await one.deregister(lease, "stopped")
        assert await watcher.next() == [WorkerDown(worker_id=worker_id, reason="stopped")]


async def list_more_than_fit_on_a_page(registry: Registry) -> None:
    names = [f"w-{number}" for number in range(620)]
    for start in range(0, len(names), 62):
        some = names[start : start + 62]
        await asyncio.gather(*(registry.register(make_worker(name), 60.0) for name in some))
    async with watching(registry) as watcher:
        listed = await watcher.next()
        assert {up.record.worker_id for up in listed if isinstance(up, WorkerUp)} == set(names)
