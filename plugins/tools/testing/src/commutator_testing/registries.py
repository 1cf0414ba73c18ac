"""The conformance suite for registries: subclass it, define a registry, run pytest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import pytest
from attrs import evolve

from commutator import EventSource, WorkerRecord
from commutator.contract.registry import (
    LAPSED,
    MAX_DOCUMENT_BYTES,
    RETIRED,
    Change,
    Document,
    Registry,
    WorkerDown,
    WorkerUp,
)
from commutator.contract.worker import Role
from commutator.errors import NameTakenError, RegistryError
from commutator_testing.shared import TEST_ENGINE, make_record, until

_LONG_S = 60.0


def make_worker(worker_id: str, port: int = 1, instance: str = "") -> WorkerRecord:
    """A record with nested values, like those of engines."""
    events = EventSource(endpoint="tcp://127.0.0.1:1", topic="kv")
    return make_record(
        worker_id,
        evolve(TEST_ENGINE, kv_events=events, pid=7),
        address=f"127.0.0.1:{port}",
        role=Role.DECODE,
        instance=instance,
        host="h1" if instance else "",
    )


async def _renewed(registry: Registry, lease_id: int, every_s: float) -> None:
    while await registry.keep_alive(lease_id):  # noqa: ASYNC110
        await asyncio.sleep(every_s)


async def _registered(registry: Registry, record: WorkerRecord) -> bool:
    try:
        await registry.register(record, _LONG_S)
    except RegistryError:
        return False
    return True


def _age_is_above(registry: Registry, limit_s: float) -> bool:
    """Of a registry that tells no age it is not asked."""
    age_s = registry.view_age_s()
    return age_s is not None and age_s > limit_s


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

    documented_in = "Registry in docs/reference/contract/registry.md"

    lease_s = 0.6
    """A short lease that the registry can hold, in seconds; some tests wait until it lapses."""

    def open_registry(self) -> AbstractAsyncContextManager[Registry]:
        """A context that makes a registry and closes it."""
        raise NotImplementedError("return a context manager with the registry under test")

    def cut_off(self) -> AbstractAsyncContextManager[None] | None:
        """A context in which the open registry cannot be reached, and after which it can again.

        Leases may lapse or not meanwhile. None, as here: the registry is always within reach.
        """
        return None

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

    async def test_an_instance_that_registers_again_has_one_lease(self) -> None:
        async with self.open_registry() as registry:
            first = await registry.register(make_worker("a-0", instance="i"), _LONG_S)
            async with watching(registry) as watcher:
                await watcher.next()
                second = await registry.register(make_worker("a-0", instance="i"), _LONG_S)
                assert second != first
                assert not await registry.keep_alive(first)
                await registry.deregister(first, "failed")
                assert await registry.keep_alive(second)
                await registry.deregister(second, "stopped")
                assert await watcher.next() == [WorkerDown(worker_id="a-0", reason="stopped")]

    async def test_a_name_belongs_to_the_instance_that_holds_it(self) -> None:
        async with self.open_registry() as registry:
            lease = await registry.register(make_worker("a-0", instance="i"), self.lease_s)
            renewing = asyncio.create_task(_renewed(registry, lease, self.lease_s / 5))
            try:
                with pytest.raises(NameTakenError, match=r"a-0 .*host h1"):
                    await registry.register(make_worker("a-0", 2, instance="j"), self.lease_s)
                assert not renewing.done()
            finally:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)

    async def test_a_name_is_free_once_the_lease_of_its_holder_lapsed(self) -> None:
        async with self.open_registry() as registry:
            await registry.register(make_worker("a-0", instance="i"), self.lease_s)
            async with watching(registry) as watcher:
                await watcher.next()
                lease = await registry.register(make_worker("a-0", 2, instance="j"), _LONG_S)
                changes = await watcher.next()
                while WorkerUp(record=make_worker("a-0", 2, instance="j")) not in changes:
                    changes += await watcher.next()
                assert changes[0] == WorkerDown(worker_id="a-0", reason=LAPSED)
                assert await registry.keep_alive(lease)

    async def test_the_view_has_an_age_once_it_is_there(self) -> None:
        async with self.open_registry() as registry, watching(registry) as watcher:
            await watcher.next()
            await until(lambda: not _age_is_above(registry, _LONG_S))
            assert (registry.view_age_s() or 0.0) >= 0.0

    async def test_out_of_reach_nothing_changes_but_the_age(self) -> None:
        async with self.open_registry() as registry:
            cut_off = self.cut_off()
            if cut_off is None:
                pytest.skip("the registry is always within reach")
            lease = await registry.register(make_worker("a-0"), self.lease_s)
            async with watching(registry) as watcher:
                await watcher.next()
                async with cut_off:
                    with pytest.raises(RegistryError):
                        await registry.keep_alive(lease)
                    with pytest.raises(RegistryError):
                        await registry.set_draining("a-0", True)
                    if registry.view_age_s() is not None:
                        await until(lambda: _age_is_above(registry, self.lease_s + 1.0))
                    assert watcher.batches.empty(), "silence removes nobody"
                record = make_worker("a-0", port=2)
                while not await _registered(registry, record):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                changes: list[Change] = []
                while WorkerUp(record=record) not in changes:
                    changes += await watcher.next(timeout_s=30.0)

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
            await self._stays(registry, registry.set_draining, "draining", True)

    async def test_a_role_stays_when_the_worker_registers_again(self) -> None:
        async with self.open_registry() as registry:
            await self._stays(registry, registry.set_role, "role", Role.PREFILL)

    async def _stays(
        self, registry: Registry, change: Callable[[str, Any], Awaitable[bool]], name: str, to: Any
    ) -> None:
        """What ``change`` does to the field ``name`` outlives a registration, and can be undone."""
        first, second = make_worker("a-0"), make_worker("a-0", port=2)
        assert not await change("a-0", to), "there is no such worker"
        await registry.register(first, _LONG_S)
        async with watching(registry) as watcher:
            await watcher.next()
            assert await change("a-0", to)
            assert await watcher.next() == [WorkerUp(record=evolve(first, **{name: to}))]
            await registry.register(second, _LONG_S)
            assert await watcher.next() == [
                WorkerDown(worker_id="a-0", reason="failed"),
                WorkerUp(record=evolve(second, **{name: to})),
            ]
            assert await change("a-0", getattr(second, name))
            assert await watcher.next() == [WorkerUp(record=second)]

    async def test_draining_outlives_the_worker(self) -> None:
        async with self.open_registry() as registry, watching(registry) as watcher:
            await watcher.next()
            lease = await registry.register(make_worker("a-0", instance="i"), _LONG_S)
            await watcher.next()
            assert await registry.set_draining("a-0", True)
            await watcher.next()
            await registry.deregister(lease, "failed")
            assert await watcher.next() == [WorkerDown(worker_id="a-0", reason="failed")]
            await registry.register(make_worker("a-0", instance="j"), _LONG_S)
            drained = evolve(make_worker("a-0", instance="j"), draining=True)
            assert await watcher.next() == [WorkerUp(record=drained)]

    async def test_draining_and_role_end_with_a_worker_that_is_retired(self) -> None:
        """Another worker may get its id, and serves as it registers."""
        async with self.open_registry() as registry, watching(registry) as watcher:
            await watcher.next()
            lease = await registry.register(make_worker("w-0", instance="a"), _LONG_S)
            await registry.set_draining("w-0", True)
            await registry.set_role("w-0", Role.PREFILL)
            await registry.deregister(lease, RETIRED)
            await registry.register(make_worker("w-0", 2, instance="b"), _LONG_S)
            last = None
            while last is None or last.instance != "b" or last.draining:
                for change in await watcher.next():
                    if isinstance(change, WorkerUp):
                        last = change.record
            assert last.role is Role.DECODE

    async def test_a_document_is_read_as_it_was_written(self) -> None:
        async with self.open_registry() as registry:
            assert await registry.read_document("plan") is None
            for value in (b"", bytes(range(256)), b"x" * MAX_DOCUMENT_BYTES):
                before = await registry.read_document("plan")
                expected = 0 if before is None else before.version
                version = await registry.write_document("plan", value, expected=expected)
                assert version is not None
                assert version > 0
                written = Document(name="plan", version=version, value=value)
                assert await registry.read_document("plan") == written
            assert await registry.read_document("plan-b") is None
            assert await registry.read_document("pla") is None

    async def test_a_document_is_changed_only_as_it_was_read(self) -> None:
        async with self.open_registry() as registry:
            first = await registry.write_document("d", b"1", expected=0)
            assert first is not None
            assert await registry.write_document("d", b"2", expected=0) is None
            assert await registry.write_document("d", b"2", expected=first + 1) is None
            second = await registry.write_document("d", b"1", expected=first)
            assert second not in (None, first), "an equal value is a write as well"
            assert not await registry.delete_document("d", expected=first)
            assert not await registry.delete_document("d", expected=0)
            assert (await registry.read_document("d")) is not None
            assert second is not None
            assert await registry.delete_document("d", expected=second)
            assert not await registry.delete_document("d", expected=second)
            assert await registry.read_document("d") is None
            assert await registry.write_document("d", b"3", expected=second) is None
            third = await registry.write_document("d", b"3", expected=0)
            assert third not in (None, first, second), "no version comes again"

    async def test_of_writers_that_race_each_change_counts_once(self) -> None:
        async with self.open_registry() as registry:

            async def count() -> None:
                for _ in range(10):
                    while True:
                        known = await registry.read_document("n")
                        value = b"0" if known is None else known.value
                        expected = 0 if known is None else known.version
                        following = str(int(value) + 1).encode()
                        if await registry.write_document("n", following, expected=expected):
                            break

            await asyncio.gather(*(count() for _ in range(3)))
            counted = await registry.read_document("n")
            assert counted is not None
            assert counted.value == b"30"

    async def test_watchers_of_a_document_get_its_latest_state(self) -> None:
        async with self.open_registry() as registry, aclosing(_states(registry, "d")) as states:
            assert await _next(states) is None
            version = await registry.write_document("d", b"0", expected=0)
            assert version is not None
            assert await _next(states) == Document(name="d", version=version, value=b"0")
            await registry.write_document("dd", b"another", expected=0)
            async with aclosing(_states(registry, "d")) as late:
                assert await _next(late) == Document(name="d", version=version, value=b"0")
            for number in range(1, 4):
                written = str(number).encode()
                version = await registry.write_document("d", written, expected=version)
                assert version is not None
            while (state := await _next(states)) is not None and state.value != b"3":
                assert state.value in (b"1", b"2"), "states may be left out, not repeated"
            assert state is not None
            assert await registry.delete_document("d", expected=version)
            assert await _next(states) is None

    async def test_names_and_values_that_are_not_legal_are_refused(self) -> None:
        async with self.open_registry() as registry:
            for name in ("", "A", "a b", "/a", "a" * 129, "\n"):
                with pytest.raises(ValueError, match="document"):
                    await registry.read_document(name)
            with pytest.raises(ValueError, match="at most"):
                await registry.write_document("d", b"x" * (MAX_DOCUMENT_BYTES + 1), expected=0)
            assert await registry.read_document("d") is None


async def _states(registry: Registry, name: str) -> AsyncGenerator[Document | None, None]:
    async for document in registry.watch_document(name):
        yield document


async def _next(states: AsyncGenerator[Document | None, None]) -> Document | None:
    async with asyncio.timeout(10):
        return await anext(states)
