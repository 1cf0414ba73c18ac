"""The conformance suite for registries: subclass it, define a registry, run pytest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from attrs import evolve

from commutator import EngineInfo, EventSource, WorkerRecord
from commutator.registry import LAPSED, Change, Registry, Role, WorkerDown, WorkerUp

__all__ = [
    "RegistryContract",
    "RegistryWatcher",
    "make_worker",
    "watching",
]

_LONG_S = 60.0


def make_worker(worker_id: str, port: int = 1) -> WorkerRecord:
    """A record with nested values, like those of engines."""
    events = EventSource(endpoint="tcp://127.0.0.1:1", topic="kv")
    info = EngineInfo(
        kind="fake",
        version="1",
        model="m",
        max_model_len=128,
        block_size=16,
        kv_capacity_blocks=100,
        kv_events=events,
        pid=7,
    )
    return WorkerRecord(
        worker_id=worker_id,
        engine="e",
        kind="fake",
        model="m",
        address=f"127.0.0.1:{port}",
        info=info,
        role=Role.DECODE,
    )


class RegistryWatcher:
    """Collects the batches of ``Registry.watch`` in the background."""

    def __init__(self, registry: Registry) -> None:
        self.batches: asyncio.Queue[Sequence[Change]] = asyncio.Queue()
        self.task = asyncio.create_task(self._run(registry))

    async def next(self, timeout_s: float = 10.0) -> list[Change]:
        """The next batch; raises TimeoutError when none comes."""
        async with asyncio.timeout(timeout_s):
            return list(await self.batches.get())

    async def _run(self, registry: Registry) -> None:
        async for batch in registry.watch():
            self.batches.put_nowait(batch)


@asynccontextmanager
async def watching(registry: Registry) -> AsyncIterator[RegistryWatcher]:
    """A watcher that stops at the end of its ``async with`` block."""
    watcher = RegistryWatcher(registry)
    try:
        yield watcher
    finally:
        watcher.task.cancel()
        await asyncio.gather(watcher.task, return_exceptions=True)


@pytest.mark.asyncio
class RegistryContract:
    """What every registry must do. Each test gets a registry without workers."""

    documented_in = "Registry in docs/reference/contract.md"

    lease_s = 0.6
    """A short lease that the registry can hold, in seconds; some tests wait until it lapses."""

    def open_registry(self) -> AbstractAsyncContextManager[Registry]:
        """A context that makes a registry and closes it."""
        raise NotImplementedError("return a context manager with the registry under test")

    async def test_watchers_get_what_is_there_and_every_change(self) -> None:
        async with self.open_registry() as registry:
            await registry.register(make_worker("a-0"), _LONG_S)
            async with watching(registry) as watcher:
                assert await watcher.next() == [WorkerUp(record=make_worker("a-0"))]
                lease = await registry.register(make_worker("a-1"), _LONG_S)
                assert await watcher.next() == [WorkerUp(record=make_worker("a-1"))]
                await registry.deregister(lease, "stopped")
                assert await watcher.next() == [WorkerDown(worker_id="a-1", reason="stopped")]
                await registry.register(make_worker("a-0", port=2), _LONG_S)
                assert await watcher.next() == [
                    WorkerDown(worker_id="a-0", reason="failed"),
                    WorkerUp(record=make_worker("a-0", port=2)),
                ]

    async def test_the_first_batch_comes_even_without_workers(self) -> None:
        async with self.open_registry() as registry, watching(registry) as watcher:
            assert await watcher.next() == []

    async def test_a_lease_lasts_while_it_is_kept_alive_and_then_lapses(self) -> None:
        async with self.open_registry() as registry, watching(registry) as watcher:
            await watcher.next()
            lease = await registry.register(make_worker("a-0"), self.lease_s)
            assert await watcher.next() == [WorkerUp(record=make_worker("a-0"))]
            for _ in range(6):
                await asyncio.sleep(self.lease_s / 5)
                assert await registry.keep_alive(lease)
            assert watcher.batches.empty()
            assert await watcher.next() == [WorkerDown(worker_id="a-0", reason=LAPSED)]
            assert not await registry.keep_alive(lease)
            await registry.deregister(lease, "stopped")
            assert watcher.batches.empty()

    async def test_a_drained_worker_stays_drained_when_it_registers_again(self) -> None:
        async with self.open_registry() as registry:
            assert not await registry.set_draining("a-0", True), "there is no such worker"
            await registry.register(make_worker("a-0"), _LONG_S)
            async with watching(registry) as watcher:
                await watcher.next()
                assert await registry.set_draining("a-0", True)
                drained = evolve(make_worker("a-0"), draining=True)
                assert await watcher.next() == [WorkerUp(record=drained)]
                await registry.register(make_worker("a-0", port=2), _LONG_S)
                again = evolve(make_worker("a-0", port=2), draining=True)
                assert await watcher.next() == [
                    WorkerDown(worker_id="a-0", reason="failed"),
                    WorkerUp(record=again),
                ]
                assert await registry.set_draining("a-0", False)
                assert await watcher.next() == [WorkerUp(record=make_worker("a-0", port=2))]

    async def test_a_role_stays_when_the_worker_registers_again(self) -> None:
        async with self.open_registry() as registry:
            assert not await registry.set_role("a-0", Role.PREFILL), "there is no such worker"
            await registry.register(make_worker("a-0"), _LONG_S)
            async with watching(registry) as watcher:
                await watcher.next()
                assert await registry.set_role("a-0", Role.PREFILL)
                changed = evolve(make_worker("a-0"), role=Role.PREFILL)
                assert await watcher.next() == [WorkerUp(record=changed)]
                await registry.register(make_worker("a-0", port=2), _LONG_S)
                again = evolve(make_worker("a-0", port=2), role=Role.PREFILL)
                assert await watcher.next() == [
                    WorkerDown(worker_id="a-0", reason="failed"),
                    WorkerUp(record=again),
                ]
                assert await registry.set_role("a-0", Role.DECODE)
                assert await watcher.next() == [WorkerUp(record=make_worker("a-0", port=2))]
