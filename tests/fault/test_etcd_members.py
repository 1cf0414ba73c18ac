"""Three members of etcd: killed, paused, without quorum, restored from a backup."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.etcd import EtcdServer, etcd_program, fresh_cluster

from commutator.contract.registry import Change, WorkerDown, WorkerUp
from commutator.errors import RegistryError
from commutator_etcd.config import EtcdConfig
from commutator_etcd.registry import EtcdRegistry
from commutator_testing.registries import make_worker

pytestmark = pytest.mark.long

LEASE_S = 5.0
WORKERS = 20


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd") / "data", members=3) as server:
        yield server


class Fleet:
    """Workers that renew their leases as agents do, and a watcher in another process's place."""

    def __init__(self, holder: EtcdRegistry, watcher: EtcdRegistry) -> None:
        self.holder = holder
        self.watcher = watcher
        self.view: dict[str, WorkerUp] = {}
        self.departed: list[WorkerDown] = []
        self.registrations = 0

    async def follow(self) -> None:
        async for changes in self.watcher.watch():
            for change in changes:
                self.take(change)

    async def follow_own(self) -> None:
        """Supervisors do, for their front doors."""
        async for _ in self.holder.watch():
            pass

    def take(self, change: Change) -> None:
        if isinstance(change, WorkerUp):
            self.view[change.record.worker_id] = change
        else:
            del self.view[change.worker_id]
            self.departed.append(change)

    async def work(self, number: int) -> None:
        record = make_worker(f"w-{number}", instance="i")
        lease: int | None = None
        while True:
            try:
                if lease is None or not await self.holder.keep_alive(lease):
                    lease = await self.holder.register(record, LEASE_S)
                    self.registrations += 1
            except RegistryError:
                pass
            await asyncio.sleep(LEASE_S / 3)

    async def until(self, true: Callable[[], bool], timeout_s: float) -> float:
        """How long it took; raises TimeoutError."""
        began_s = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while not true():
                await asyncio.sleep(0.02)
        return time.monotonic() - began_s

    def is_complete(self) -> bool:
        return len(self.view) == WORKERS


@asynccontextmanager
async def fleet(server: EtcdServer) -> AsyncIterator[Fleet]:
    config = EtcdConfig(
        kind="etcd", endpoints=tuple(server.urls), cluster=fresh_cluster(), resync_s=10.0
    )
    one, other = EtcdRegistry(config), EtcdRegistry(config)
    running = Fleet(one, other)
    tasks = [asyncio.create_task(running.follow()), asyncio.create_task(running.follow_own())]
    tasks += [asyncio.create_task(running.work(number)) for number in range(WORKERS)]
    try:
        await running.until(running.is_complete, 30.0)
        yield running
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await one.close()
        await other.close()


async def off_loop(do: Callable[..., object], *arguments: object) -> None:
    await asyncio.to_thread(do, *arguments)


async def test_each_member_killed_in_turn_costs_no_worker(three: EtcdServer) -> None:
    async with fleet(three) as running:
        for member in (0, 1, 2, 0, 1, 2):  # the leader is among them
            await off_loop(three.kill, member)
            await asyncio.sleep(4.0)
            await off_loop(three.start)
        assert running.departed == []
        assert running.registrations == WORKERS
        age_s = running.watcher.view_age_s()
        assert age_s is not None
        assert age_s < 10.0


async def test_each_member_paused_in_turn_costs_no_worker(three: EtcdServer) -> None:
    async with fleet(three) as running:
        for member in (0, 1, 2):
            three.pause(member)
            await asyncio.sleep(8.0)
            three.resume(member)
            await asyncio.sleep(2.0)
        assert running.departed == []
        assert running.registrations == WORKERS


async def test_without_quorum_nobody_is_removed_and_everybody_is_back(three: EtcdServer) -> None:
    async with fleet(three) as running:
        await off_loop(three.kill, 0)
        await off_loop(three.kill, 1)
        await running.until(lambda: (running.watcher.view_age_s() or 0.0) > 10.0, 60.0)
        assert running.is_complete(), "silence removes nobody"
        await off_loop(three.start)
        back_s = await running.until(lambda: (running.watcher.view_age_s() or 99.0) < 2.0, 30.0)
        print(f"fresh {back_s:.1f} s after quorum was back")
        await asyncio.sleep(2 * LEASE_S)
        await running.until(running.is_complete, 10.0)


async def test_a_worker_that_stops_renewing_is_gone_after_its_lease(three: EtcdServer) -> None:
    async with fleet(three) as running:
        await running.holder.register(make_worker("short", instance="i"), LEASE_S)
        await running.until(lambda: "short" in running.view, 5.0)
        gone_s = await running.until(lambda: "short" not in running.view, LEASE_S + 10.0)
        print(f"gone {gone_s:.1f} s after its last renewal")
        assert running.departed == [WorkerDown(worker_id="short", reason="lease expired")]


async def test_a_restored_backup_ends_in_the_right_view(tmp_path: Path) -> None:
    with EtcdServer(tmp_path / "data") as server:
        async with fleet(server) as running:
            saved = tmp_path / "backup.db"
            ctl = str(Path(etcd_program()).with_name("etcdctl"))

            def save() -> None:
                subprocess.run(
                    [ctl, "--endpoints", server.urls[0], "snapshot", "save", str(saved)],
                    check=True,
                    capture_output=True,
                )

            await off_loop(save)
            late = await running.holder.register(make_worker("late", instance="i"), 60.0)
            await running.until(lambda: "late" in running.view, 5.0)
            await off_loop(server.kill)
            shutil.rmtree(tmp_path / "data" / "m0")
            await off_loop(server.restore, saved)
            # The backup knows nothing of it. Its holder puts it back, or is told to register again.
            if not await running.holder.keep_alive(late):
                await running.holder.register(make_worker("late", instance="i"), 60.0)
            everyone = {"late", *(f"w-{number}" for number in range(WORKERS))}
            await running.until(lambda: set(running.view) == everyone, 30.0)
