"""The registry `etcd` passes the shipped suite against a real etcd, and what else it promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aetcd import rpc
from tests.support.etcd import EtcdServer, fresh_cluster
from tests.support.registries import announce_to_another_process, list_more_than_fit_on_a_page

from commutator.contract.registry import Registry, WorkerDown, WorkerUp
from commutator.errors import NameTakenError, RegistryError
from commutator.trust import RunSecret, adopt
from commutator_etcd.config import EtcdConfig, EtcdTls
from commutator_etcd.registry import EtcdRegistry
from commutator_testing.registries import RegistryContract, make_worker, watching

pytestmark = pytest.mark.slow


@asynccontextmanager
async def opened(
    server: EtcdServer, cluster: str, *, resync_s: float = 60.0, call_timeout_s: float = 1.5
) -> AsyncIterator[EtcdRegistry]:
    config = EtcdConfig(
        kind="etcd",
        endpoints=tuple(server.urls),
        cluster=cluster,
        resync_s=resync_s,
        call_timeout_s=call_timeout_s,
    )
    registry = EtcdRegistry(config)
    try:
        yield registry
    finally:
        await registry.close()


@asynccontextmanager
async def raw_kv(server: EtcdServer) -> AsyncIterator[rpc.KVStub]:
    async with rpc.insecure_channel(server.urls[0].removeprefix("http://")) as channel:
        yield rpc.KVStub(channel)


class TestEtcd(RegistryContract):
    lease_s = 2.0

    @pytest.fixture(autouse=True)
    def _server(self, etcd: EtcdServer) -> None:
        self.server = etcd

    @asynccontextmanager
    async def open_registry(self) -> AsyncIterator[Registry]:
        async with opened(self.server, fresh_cluster(), call_timeout_s=0.5) as registry:
            yield registry

    @asynccontextmanager
    async def cut_off(self) -> AsyncIterator[None]:
        self.server.pause()
        try:
            yield
        finally:
            self.server.resume()


async def test_two_processes_share_what_one_of_them_announces(etcd: EtcdServer) -> None:
    cluster = fresh_cluster()
    async with opened(etcd, cluster) as one, opened(etcd, cluster) as other:
        await announce_to_another_process(one, other, "a-0")
    async with opened(etcd, fresh_cluster()) as stranger, watching(stranger) as watcher:
        assert await watcher.next() == [], "another cluster's workers are not seen"


async def test_more_workers_than_fit_on_a_page_are_listed(etcd: EtcdServer) -> None:
    async with opened(etcd, fresh_cluster()) as registry:
        await list_more_than_fit_on_a_page(registry)


@pytest.mark.security
async def test_who_does_not_know_the_secret_announces_and_drains_nobody(
    etcd: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = fresh_cluster()
    async with opened(etcd, cluster) as mine, opened(etcd, cluster) as foreign:
        with adopt(RunSecret.new()):
            await foreign.register(make_worker("theirs"), 60.0)
            await foreign.register(make_worker("taken"), 60.0)
        with adopt(RunSecret.new()):
            await mine.register(make_worker("a-0"), 60.0)
            async with raw_kv(etcd) as kv:  # a copy under another key does not count either
                prefix = f"/commutator/{cluster}/v1/workers/".encode()
                answer = await kv.Range(rpc.RangeRequest(key=prefix + b"a-0"))
                await kv.Put(rpc.PutRequest(key=prefix + b"a-1", value=answer.kvs[0].value))
                await kv.Put(
                    rpc.PutRequest(
                        key=prefix.replace(b"workers", b"desired") + b"a-0",
                        value=b'{"draining": true}',
                    )
                )
            async with watching(mine) as watcher:
                assert await watcher.next() == [WorkerUp(record=make_worker("a-0"))]
            assert "workers/theirs is ignored" in caplog.text
            assert not await mine.set_draining("theirs", True)
            with pytest.raises(NameTakenError, match=r"another runtime\.secret"):
                await mine.register(make_worker("taken"), 1.0)


async def test_a_lease_that_etcd_ends_too_early_costs_nothing(etcd: EtcdServer) -> None:
    """A leader that was stopped and wakes up ends leases that were renewed meanwhile."""
    cluster = fresh_cluster()
    async with (
        opened(etcd, cluster) as holder,
        opened(etcd, cluster) as other,
        watching(holder) as own,
        watching(other) as watcher,
    ):
        assert (await own.next(), await watcher.next()) == ([], [])
        lease = await holder.register(make_worker("a-0", instance="i"), 60.0)
        up = [WorkerUp(record=make_worker("a-0", instance="i"))]
        assert (await own.next(), await watcher.next()) == (up, up)
        await other._client.revoke(lease)
        async with asyncio.timeout(10.0):
            while holder._held[lease].lease == lease:
                await asyncio.sleep(0.01)
        assert await holder.keep_alive(lease)
        await holder.register(make_worker("b-0"), 60.0)
        assert await watcher.next() == [WorkerUp(record=make_worker("b-0"))]
        await holder.deregister(lease, "stopped")
        assert await watcher.next() == [WorkerDown(worker_id="a-0", reason="stopped")]


async def test_a_compaction_while_nobody_watches_loses_no_delete(etcd: EtcdServer) -> None:
    cluster = fresh_cluster()
    async with opened(etcd, cluster, resync_s=3600.0) as registry:
        await registry.register(make_worker("stays"), 60.0)
        lease = await registry.register(make_worker("goes"), 60.0)
        listing = await registry._client.list(b"/commutator/")
        async with watching(registry) as watcher, raw_kv(etcd) as kv:
            assert len(await watcher.next()) == 2
            await registry.deregister(lease, "stopped")
            assert await watcher.next() == [WorkerDown(worker_id="goes", reason="stopped")]
            answer = await kv.Put(rpc.PutRequest(key=b"elsewhere", value=b""))
            await kv.Compact(rpc.CompactionRequest(revision=answer.header.revision))
            # A watch from a revision that is gone says so instead of leaving changes out.
            async with registry._client.watch(b"/commutator/", listing.revision) as watch:
                message = await watch.read()
                while not message.compacted:
                    message = await watch.read()
            await registry.register(make_worker("new"), 60.0)
            assert await watcher.next() == [WorkerUp(record=make_worker("new"))]


async def test_a_key_that_is_deleted_by_hand_is_announced_by_the_next_list(
    etcd: EtcdServer,
) -> None:
    """The view is what etcd holds, also when a watch was not told: lists are compared."""
    cluster = fresh_cluster()
    async with (
        opened(etcd, cluster) as holder,
        opened(etcd, cluster, resync_s=0.5) as registry,
        raw_kv(etcd) as kv,
    ):
        await holder.register(make_worker("a-0"), 60.0)
        async with watching(registry) as watcher:
            await watcher.next()
            registry._follower.received = (  # type: ignore[method-assign]
                lambda message, now_s: {}  # a watch that loses everything
            )
            await kv.DeleteRange(
                rpc.DeleteRangeRequest(key=f"/commutator/{cluster}/v1/workers/a-0".encode())
            )
            assert await watcher.next() == [WorkerDown(worker_id="a-0", reason="lease expired")]


async def test_an_endpoint_that_is_not_there_is_passed_over(etcd: EtcdServer) -> None:
    dead = "http://127.0.0.1:9"
    config = EtcdConfig(kind="etcd", endpoints=(dead, etcd.urls[0], dead), cluster=fresh_cluster())
    for _ in range(3):  # each begins at an endpoint chosen by chance
        registry = EtcdRegistry(config)
        lease = await registry.register(make_worker("a-0"), 60.0)
        assert await registry.keep_alive(lease)
        async with watching(registry) as watcher:
            assert await watcher.next(30.0) == [WorkerUp(record=make_worker("a-0"))]
        await registry.deregister(lease, "stopped")
        await registry.close()


async def test_without_etcd_the_error_names_the_endpoint() -> None:
    registry = EtcdRegistry(EtcdConfig(kind="etcd", endpoints=("http://127.0.0.1:9",)))
    with pytest.raises(RegistryError, match=r"etcd at http://127\.0\.0\.1:9: "):
        await registry.register(make_worker("a-0"), 60.0)
    await registry.close()


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    import trustme

    files: dict[str, str] = {}
    for name in ("ours", "theirs"):
        authority = trustme.CA()
        authority.cert_pem.write_to_path(tmp_path / f"{name}-ca.pem")
        issued = authority.issue_cert("127.0.0.1", common_name="worker-host")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        files |= {f"{name}-ca": str(tmp_path / f"{name}-ca.pem")}
        files |= {f"{name}-key": str(tmp_path / f"{name}.key")}
        files |= {f"{name}-cert": str(tmp_path / f"{name}.pem")}
    return files


async def test_tls_with_certificates_on_both_sides(
    tmp_path: Path, certificates: dict[str, str]
) -> None:
    flags = (
        "--cert-file", certificates["ours-cert"], "--key-file", certificates["ours-key"],
        "--trusted-ca-file", certificates["ours-ca"], "--client-cert-auth",
    )  # fmt: skip
    with EtcdServer(tmp_path / "data", flags=flags, tls=True) as server:

        async def try_with(ca: str, whose: str | None) -> int:
            tls = {"ca_file": certificates[ca]}
            if whose is not None:
                tls |= {f"{part}_file": certificates[f"{whose}-{part}"] for part in ("cert", "key")}
            config = EtcdConfig(
                kind="etcd", endpoints=tuple(server.urls), cluster="c", tls=EtcdTls(**tls)
            )
            registry = EtcdRegistry(config)
            try:
                return await registry.register(make_worker("a-0"), 60.0)
            finally:
                await registry.close()

        assert await try_with("ours-ca", "ours")
        for ca, whose in (("theirs-ca", "ours"), ("ours-ca", "theirs"), ("ours-ca", None)):
            with pytest.raises(RegistryError, match="etcd at https"):
                await try_with(ca, whose)
