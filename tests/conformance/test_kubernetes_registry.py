"""The registry `kubernetes` passes the shipped suite, against a small API server of the tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.registries import announce_to_another_process, list_more_than_fit_on_a_page

from commutator.contract.registry import Registry, WorkerDown, WorkerUp
from commutator.errors import NameTakenError, RegistryError
from commutator.trust import RunSecret, adopt
from commutator_kubernetes.config import KubernetesRegistryConfig
from commutator_kubernetes.registry import KubernetesRegistry
from commutator_testing.registries import RegistryContract, make_worker, watching

MEMBERS = "/apis/commutator.dev/v1alpha1/namespaces/default/commutatormembers"


@asynccontextmanager
async def opened(
    api: FakeKubernetes,
    folder: Path,
    *,
    cluster: str = "c",
    lease_s: float = 1.0,
    call_timeout_s: float = 0.5,
) -> AsyncIterator[KubernetesRegistry]:
    config = KubernetesRegistryConfig(
        kind="kubernetes",
        cluster=cluster,
        kubeconfig=api.kubeconfig(folder),
        lease_s=lease_s,
        call_timeout_s=call_timeout_s,
    )
    registry = KubernetesRegistry(config)
    try:
        yield registry
    finally:
        await registry.close()


@asynccontextmanager
async def two_processes(
    folder: Path,
) -> AsyncIterator[tuple[FakeKubernetes, KubernetesRegistry, KubernetesRegistry]]:
    """An API server, and the registries of two processes that share it."""
    async with (
        FakeKubernetes() as api,
        opened(api, folder) as one,
        opened(api, folder) as other,
    ):
        yield api, one, other


class TestKubernetes(RegistryContract):
    lease_s = 1.0

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.api: FakeKubernetes | None = None

    @asynccontextmanager
    async def open_registry(self) -> AsyncIterator[Registry]:
        async with FakeKubernetes() as self.api, opened(self.api, self.folder) as registry:
            yield registry

    @asynccontextmanager
    async def cut_off(self) -> AsyncIterator[None]:
        assert self.api is not None
        self.api.stop()
        self.api.cut()
        try:
            yield
        finally:
            self.api.go_on()


async def test_processes_share_what_one_announces_and_clusters_do_not(tmp_path: Path) -> None:
    async with two_processes(tmp_path) as (api, one, other):
        await announce_to_another_process(one, other, "A_0")
        await one.register(make_worker("a-1"), 60.0)
        async with opened(api, tmp_path, cluster="d") as stranger, watching(stranger) as watcher:
            assert await watcher.next() == []


async def test_workers_of_a_process_that_ends_without_a_word_lapse(tmp_path: Path) -> None:
    """One that was only paused comes back under the same name, with its lease."""
    async with two_processes(tmp_path) as (_, one, other), watching(other) as watcher:
        await watcher.next()
        lease = await one.register(make_worker("a-0"), 1.0)
        assert await watcher.next() == [WorkerUp(record=make_worker("a-0"))]
        assert one._minding is not None
        one._minding.cancel()  # it is frozen, and so cannot say that nobody keeps the lease
        assert await watcher.next() == [WorkerDown(worker_id="a-0", reason="lease expired")]
        assert await one.keep_alive(lease)
        assert await watcher.next() == [WorkerUp(record=make_worker("a-0"))]


async def test_a_renewal_serves_all_workers_of_a_process(tmp_path: Path) -> None:
    async with FakeKubernetes() as api, opened(api, tmp_path, lease_s=60.0) as registry:
        leases = [await registry.register(make_worker(f"w-{n}"), 5.0) for n in range(20)]
        assert await registry.keep_alive(leases[-1])
        api.requests.clear()
        for _ in range(10):
            assert all([await registry.keep_alive(lease) for lease in leases])
        assert api.requests == []


async def test_a_server_that_was_away_removes_nobody_when_it_is_back(tmp_path: Path) -> None:
    """For longer than a lease lasts: nobody could renew, and nobody could see."""
    async with two_processes(tmp_path) as (api, one, other), watching(other) as watcher:
        await watcher.next()
        lease = await one.register(make_worker("a-0"), 1.0)
        await watcher.next()
        api.stop()
        api.cut()
        for _ in range(4):
            with pytest.raises(RegistryError):
                await one.keep_alive(lease)
        assert (other.view_age_s() or 0.0) > 1.5
        api.go_on()
        assert await one.keep_alive(lease)
        new = await one.register(make_worker("a-1"), 60.0)
        assert await watcher.next() == [WorkerUp(record=make_worker("a-1"))]
        assert await one.keep_alive(new)


async def test_who_waits_for_an_answer_keeps_its_lease(tmp_path: Path) -> None:
    """Also where a call may take longer than the lease lasts."""
    async with (
        FakeKubernetes() as api,
        opened(api, tmp_path, lease_s=0.3, call_timeout_s=0.8) as registry,
    ):
        lease = await registry.register(make_worker("a-0"), 0.3)
        api.stop()
        with pytest.raises(RegistryError):
            await registry.keep_alive(lease)
        api.go_on()
        assert await registry.keep_alive(lease)


async def test_a_delete_that_no_watch_told_of_is_found(tmp_path: Path) -> None:
    async with FakeKubernetes() as api, opened(api, tmp_path) as registry:
        await registry.register(make_worker("stays"), 60.0)
        await registry.register(make_worker("goes"), 60.0)
        async with watching(registry) as watcher:
            assert len(await watcher.next()) == 2
            api.quietly_delete(f"{MEMBERS}/worker.c-goes")
            api.compact()
            api.cut()
            gone = WorkerDown(worker_id="goes", reason="lease expired")
            assert await watcher.next() == [gone]


async def test_a_watch_that_went_deaf_is_found_by_what_was_written(tmp_path: Path) -> None:
    """Its connection lives, and its bookmarks are a minute apart."""
    async with (
        FakeKubernetes() as api,
        opened(api, tmp_path) as registry,
        watching(registry) as watcher,
    ):
        await watcher.next()
        api.frozen = True
        await registry.register(make_worker("a-0"), 60.0)
        assert await watcher.next(15.0) == [WorkerUp(record=make_worker("a-0"))]
        api.frozen = False


async def test_an_object_deleted_by_hand_ends_the_lease(tmp_path: Path) -> None:
    async with FakeKubernetes() as api, opened(api, tmp_path, lease_s=0.3) as registry:
        lease = await registry.register(make_worker("a-0"), 60.0)
        assert await registry.keep_alive(lease)
        api.remove(f"{MEMBERS}/worker.c-a-0")
        await asyncio.sleep(0.3)
        assert not await registry.keep_alive(lease)


async def test_more_workers_than_fit_on_a_page_are_listed(tmp_path: Path) -> None:
    async with FakeKubernetes() as api, opened(api, tmp_path, call_timeout_s=10.0) as registry:
        await list_more_than_fit_on_a_page(registry)


@pytest.mark.security
async def test_who_does_not_know_the_secret_announces_and_drains_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_processes(tmp_path) as (api, mine, foreign):
        with adopt(RunSecret.new()):
            await foreign.register(make_worker("theirs"), 60.0)
        with adopt(RunSecret.new()):
            await mine.register(make_worker("a-0"), 60.0)
            worker = api.objects[f"{MEMBERS}/worker.c-a-0"]
            copy = {**worker, "metadata": {"name": "worker.c-a-1", "labels": _labels(worker)}}
            api.put(f"{MEMBERS}/worker.c-a-1", copy)  # under another name it does not count
            wish = {"metadata": {"name": "wish.c-a-0", "labels": _labels(worker)}}
            api.put(f"{MEMBERS}/wish.c-a-0", {**wish, "spec": {"type": "wish", "draining": True}})
            async with watching(mine) as watcher:
                assert await watcher.next() == [WorkerUp(record=make_worker("a-0"))]
            assert "worker.c-theirs is ignored" in caplog.text
            assert not await mine.set_draining("theirs", True)
            with pytest.raises(NameTakenError, match=r"another runtime\.secret"):
                await mine.register(make_worker("theirs", instance="j"), 1.0)


def _labels(item: dict[str, dict[str, dict[str, str]]]) -> dict[str, str]:
    return dict(item["metadata"]["labels"])


async def test_errors_say_what_was_asked_and_what_to_do(tmp_path: Path) -> None:
    async with FakeKubernetes(kinds=set()) as api, opened(api, tmp_path) as registry:
        with pytest.raises(RegistryError, match=r"commutatormembers.*custom resources installed"):
            await registry.register(make_worker("a-0"), 60.0)
        api.fault = lambda _: web.json_response({"message": "u cannot get"}, status=403)
        with pytest.raises(RegistryError, match=r"403 u cannot get; the account needs this right"):
            await registry.set_draining("a-0", True)
    with pytest.raises(RegistryError, match=r"http://127\.0\.0\.1:\d+/apis/commutator\.dev"):
        async with opened(api, tmp_path) as registry:
            await registry.register(make_worker("a-0"), 60.0)


async def test_a_busy_server_is_asked_again_and_a_token_is_read_again(tmp_path: Path) -> None:
    async with FakeKubernetes() as api, opened(api, tmp_path) as registry:
        left = [429, 429]

        def busy(_: web.Request) -> web.Response | None:
            return (
                web.Response(status=left.pop(), headers={"Retry-After": "0.05"}) if left else None
            )

        api.fault = busy
        await registry.register(make_worker("a-0"), 60.0)
        assert not left
        api.fault = lambda _: web.Response(status=500)
        with pytest.raises(RegistryError, match="500"):
            await registry.set_draining("a-0", True)
