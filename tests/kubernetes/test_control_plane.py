"""Registry and launcher of kind `kubernetes` against a real control plane (`make test-kube`)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.real_kubernetes import RealKubernetes

from commutator.contract.launcher import AgentPlan, AgentState
from commutator.contract.registry import Registry, WorkerDown, WorkerUp
from commutator.contract.worker import Role
from commutator.errors import LauncherError, RegistryError
from commutator_kubernetes.access import find_access
from commutator_kubernetes.client import ApiClient
from commutator_kubernetes.config import KubernetesLauncherConfig, KubernetesRegistryConfig
from commutator_kubernetes.custom_resources import custom_resources, roles
from commutator_kubernetes.launcher import KubernetesLauncher
from commutator_kubernetes.registry import KubernetesRegistry
from commutator_kubernetes.view import Places
from commutator_testing.registries import RegistryContract, make_worker, watching

pytestmark = [pytest.mark.slow, pytest.mark.long]

_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_numbers = itertools.count()


def fresh_cluster() -> str:
    return f"test-{next(_numbers)}"


@pytest.fixture(scope="session")
def kube(real_kubernetes: RealKubernetes) -> RealKubernetes:
    """With our custom resources."""
    for one in custom_resources():
        real_kubernetes.ask("POST", _CRDS, one)
    for one in custom_resources():
        name = one["metadata"]["name"]
        for _ in range(300):
            said = real_kubernetes.ask("GET", f"{_CRDS}/{name}").get("status") or {}
            if {"type": "Established", "status": "True"}.items() <= {
                k: v
                for c in said.get("conditions") or []
                if c["type"] == "Established"
                for k, v in c.items()
            }.items():
                break
            time.sleep(0.1)
    return real_kubernetes


@asynccontextmanager
async def opened(
    kubeconfig: str, cluster: str, *, lease_s: float = 2.0, call_timeout_s: float = 2.0
) -> AsyncIterator[KubernetesRegistry]:
    registry = KubernetesRegistry(
        KubernetesRegistryConfig(
            kind="kubernetes",
            cluster=cluster,
            namespace="default",
            kubeconfig=kubeconfig,
            lease_s=lease_s,
            call_timeout_s=call_timeout_s,
        )
    )
    try:
        yield registry
    finally:
        await registry.close()


@asynccontextmanager
async def without(kube: RealKubernetes, how: str) -> AsyncIterator[None]:
    """Kill or stop the API server meanwhile; it says that it is ready at the end."""
    if how == "killed":
        kube.kill()
    else:
        kube.pause()
    try:
        yield
    finally:
        if how == "stopped":
            kube.resume()
        await asyncio.to_thread(kube.start)


class TestRealKubernetes(RegistryContract):
    lease_s = 2.0

    @pytest.fixture(autouse=True)
    def _cluster(self, kube: RealKubernetes, tmp_path: Path) -> Iterator[None]:
        with FaultProxy(kube.port) as self.proxy:
            self.kubeconfig = kube.kubeconfig(tmp_path, port=self.proxy.port)
            yield

    @asynccontextmanager
    async def open_registry(self) -> AsyncIterator[Registry]:
        async with opened(self.kubeconfig, fresh_cluster(), call_timeout_s=1.0) as registry:
            yield registry

    @asynccontextmanager
    async def cut_off(self) -> AsyncIterator[None]:
        self.proxy.set(Fault(hang=True))
        try:
            yield
        finally:
            self.proxy.set(Fault())


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_without_its_api_server_nothing_changes(
    kube: RealKubernetes, tmp_path: Path, how: str
) -> None:
    """And within seconds of its return everybody sees the same, also what ended meanwhile."""
    cluster, kubeconfig = fresh_cluster(), kube.kubeconfig(tmp_path)
    async with (
        opened(kubeconfig, cluster) as one,
        opened(kubeconfig, cluster) as other,
        watching(other) as watcher,
    ):
        await watcher.next()
        stays = await one.register(make_worker("stays"), 2.0)
        await one.register(make_worker("ends"), 2.0)  # nobody keeps it alive
        for _ in range(2):
            await watcher.next()
        alive: list[bool] = []

        async def keep() -> None:
            while True:
                with suppress(RegistryError):
                    alive.append(await one.keep_alive(stays))
                await asyncio.sleep(0.2)

        keeping = asyncio.create_task(keep())
        async with without(kube, how):
            await asyncio.sleep(10.0)
            assert watcher.batches.empty()
            assert (other.view_age_s() or 0.0) > 5.0
        back_s = time.monotonic()
        (down,) = await watcher.next(30.0)
        assert isinstance(down, WorkerDown)
        assert down.worker_id == "ends"
        took_s = time.monotonic() - back_s
        print(f"{how}: equal {took_s:.2f} s after the first /readyz 200")
        assert took_s < 5.0
        known = len(alive)
        while len(alive) < known + 3:
            await asyncio.sleep(0.1)
        keeping.cancel()
        assert all(alive)
        assert watcher.batches.empty()


async def test_what_was_compacted_while_nobody_watched_is_found(
    kube: RealKubernetes, tmp_path: Path
) -> None:
    cluster = fresh_cluster()
    with FaultProxy(kube.port) as proxy:
        through = kube.kubeconfig(tmp_path, port=proxy.port)
        async with (
            opened(kube.kubeconfig(tmp_path), cluster) as holder,
            opened(through, cluster, call_timeout_s=1.0) as cut,
        ):
            lease = await holder.register(make_worker("goes", instance="i"), 60.0)
            await holder.register(make_worker("stays", instance="i"), 60.0)
            async with watching(cut) as watcher:
                assert len(await watcher.next()) == 2
                proxy.set(Fault(refuse=True))
                await holder.deregister(lease, "stopped")
                path = Places(cluster, "default").members.path
                version = kube.ask("GET", path)["metadata"]["resourceVersion"]
                kube.compact(int(version))
                proxy.set(Fault())
                (down,) = await watcher.next(30.0)
                assert isinstance(down, WorkerDown)
                assert down.worker_id == "goes"


async def test_a_version_that_is_gone_is_an_error_in_the_stream(
    kube: RealKubernetes, tmp_path: Path
) -> None:
    cluster = fresh_cluster()
    places = Places(cluster, "default")
    client = ApiClient(find_access(kube.kubeconfig(tmp_path)), 5.0)
    async with opened(kube.kubeconfig(tmp_path), cluster) as registry:
        await registry.register(make_worker("a-0"), 60.0)
    try:
        listing = await client.list(places.members)
        kube.compact(int(listing.version))
        async with client.watch(places.members, "1", 10.0) as events:
            event = await anext(events)
        assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
    finally:
        await client.close()


async def test_a_role_has_the_rights_that_are_used_and_no_other(
    kube: RealKubernetes, tmp_path: Path
) -> None:
    namespace, account = "default", f"registry-{next(_numbers)}"
    base = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    kube.ask("POST", base, {"metadata": {"name": account}})
    (role,) = roles(account)
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    kube.ask("POST", f"{rbac}/roles", role)
    binding: dict[str, Any] = {
        "metadata": {"name": account},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }
    kube.ask("POST", f"{rbac}/rolebindings", binding)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    said = kube.ask("POST", f"{base}/{account}/token", request)
    mine = kube.kubeconfig(tmp_path, token=said["status"]["token"])
    async with opened(mine, fresh_cluster()) as registry, watching(registry) as watcher:
        await watcher.next()
        lease = await registry.register(make_worker("a-0"), 60.0)
        await registry.register(make_worker("a-0"), 60.0)
        lease = await registry.register(make_worker("a-0"), 60.0)
        assert await registry.keep_alive(lease)
        assert await registry.set_draining("a-0", True)
        assert await registry.set_role("a-0", Role.PREFILL)
        version = await registry.write_document("d", b"1", expected=0)
        assert version is not None
        version = await registry.write_document("d", b"2", expected=version)
        assert version is not None
        assert await registry.delete_document("d", expected=version)
        await registry.deregister(lease, "retired")
    granted = {
        (plural, verb)
        for rule in role["rules"]
        for plural in rule["resources"]
        for verb in rule["verbs"]
    }
    user = f"system:serviceaccount:{namespace}:{account}"
    assert kube.audited(user) == granted


async def test_a_thousand_workers_are_listed_within_two_seconds(
    kube: RealKubernetes, tmp_path: Path
) -> None:
    cluster, kubeconfig = fresh_cluster(), kube.kubeconfig(tmp_path)
    async with opened(kubeconfig, cluster, lease_s=60.0, call_timeout_s=20.0) as registry:
        began_s = time.monotonic()
        for start in range(0, 1000, 50):
            await asyncio.gather(
                *(registry.register(make_worker(f"w-{n}"), 60.0) for n in range(start, start + 50))
            )
        wrote_s = time.monotonic() - began_s
        async with opened(kubeconfig, cluster, call_timeout_s=20.0) as other:
            began_s = time.monotonic()
            async with watching(other) as watcher:
                listed = await watcher.next(30.0)
                took_s = time.monotonic() - began_s
                assert len(listed) == 1000
                delays = []
                for n in range(50):
                    began_s = time.monotonic()
                    await registry.set_draining(f"w-{n}", True)
                    (up,) = await watcher.next()
                    assert isinstance(up, WorkerUp)
                    delays.append(time.monotonic() - began_s)
        delays.sort()
        print(
            f"1,000 workers: written in {wrote_s:.1f} s, listed in {took_s:.2f} s; a drain is seen "
            f"after {1e3 * delays[25]:.0f} ms (p50), {1e3 * delays[-1]:.0f} ms (longest of 50)"
        )
        assert took_s < 2.0


async def test_the_scheduler_says_why_a_worker_waits(kube: RealKubernetes, tmp_path: Path) -> None:
    """Without a node; the API server takes the pod as it is, and owns it by its plan."""
    config = KubernetesLauncherConfig(
        kind="kubernetes",
        cluster=fresh_cluster(),
        namespace="default",
        image="i",
        kubeconfig=kube.kubeconfig(tmp_path),
    )
    launcher = KubernetesLauncher(config)
    await launcher.open()
    try:
        plan = AgentPlan(name="w-0", engine="w", generation="a1", module="m", grace_s=10)
        for _ in range(100):
            try:
                await launcher.place(plan)
            except LauncherError:  # the namespace has no service account at first
                await asyncio.sleep(0.2)
                continue
            (agent,) = await launcher.agents()
            assert agent.state is AgentState.WAITING
            if agent.cause is not None and "Unschedulable: " in agent.cause:
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError(agent)
        await launcher.remove("w-0", 1)
        assert await launcher.agents() == []
    finally:
        await launcher.close()
