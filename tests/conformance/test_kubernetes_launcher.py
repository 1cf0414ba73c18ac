"""The launcher `kubernetes` passes the shipped suite, with a small API server and kubelet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from attrs import evolve
from tests.support.fake_kubelet import FakeKubelet
from tests.support.fake_kubernetes import FakeKubernetes

from commutator.contract.launcher import AgentLauncher, AgentPlan, AgentState
from commutator.errors import LauncherError
from commutator_kubernetes.config import KubernetesLauncherConfig
from commutator_kubernetes.launcher import KubernetesLauncher
from commutator_testing.launchers import AgentLauncherContract

PODS = "/api/v1/namespaces/default/pods"
PLAN = AgentPlan(name="w-0", engine="w", generation="a1", module="nothing", grace_s=10)


def launcher_at(api: FakeKubernetes, folder: Path) -> KubernetesLauncher:
    config = KubernetesLauncherConfig(
        kind="kubernetes", cluster="c", image="i", kubeconfig=api.kubeconfig(folder)
    )
    return KubernetesLauncher(config)


class TestKubernetes(AgentLauncherContract):
    patience_s = 30.0

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_launcher(self) -> AgentLauncher:
        return launcher_at(self.api, self.folder)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[AgentLauncher]:
        async with FakeKubernetes() as self.api, FakeKubelet(self.api), super().opened() as one:
            yield one


@asynccontextmanager
async def opened(api: FakeKubernetes, folder: Path) -> AsyncIterator[KubernetesLauncher]:
    launcher = launcher_at(api, folder)
    await launcher.open()
    try:
        yield launcher
    finally:
        await launcher.close()


async def test_a_pod_that_somebody_deletes_or_a_node_evicts_is_made_again(tmp_path: Path) -> None:
    async with FakeKubernetes() as api, opened(api, tmp_path) as launcher:
        await launcher.place(PLAN)
        first = api.objects[f"{PODS}/c-w-0"]
        api.remove(f"{PODS}/c-w-0")
        (agent,) = await launcher.agents()
        assert (agent.state, agent.cause) == (
            AgentState.WAITING,
            "its pod is gone, and is made again",
        )
        second = api.objects[f"{PODS}/c-w-0"]
        assert second["metadata"]["uid"] != first["metadata"]["uid"]
        assert second["spec"] == first["spec"]
        status = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
        api.put(f"{PODS}/c-w-0", {**second, "status": status})
        (agent,) = await launcher.agents()
        assert agent.cause == "The node was low on memory."
        assert f"{PODS}/c-w-0" not in api.objects
        await launcher.agents()
        assert f"{PODS}/c-w-0" in api.objects


async def test_the_cluster_says_why_a_pod_waits(tmp_path: Path) -> None:
    async with (
        FakeKubernetes() as api,
        FakeKubelet(api) as node,
        opened(api, tmp_path) as launcher,
    ):
        node.has_room = False
        await launcher.place(PLAN)
        await asyncio.sleep(0.05)
        (agent,) = await launcher.agents()
        assert agent.state is AgentState.WAITING
        assert agent.cause is not None
        assert "Insufficient cpu" in agent.cause
        await launcher.remove("w-0", 1)
        assert await launcher.agents() == []
        assert not api.objects


async def test_a_name_is_not_placed_twice_with_different_things(tmp_path: Path) -> None:
    async with FakeKubernetes() as api, opened(api, tmp_path) as launcher:
        await launcher.place(PLAN)
        await launcher.place(PLAN)
        with pytest.raises(LauncherError, match="another generation"):
            await launcher.place(evolve(PLAN, generation="b2"))


async def test_what_the_server_refuses_is_said(tmp_path: Path) -> None:
    async with FakeKubernetes() as api, opened(api, tmp_path) as launcher:
        api.fault = lambda _: web.json_response({"message": "exceeded quota: pods"}, status=403)
        with pytest.raises(LauncherError, match="exceeded quota"):
            await launcher.place(PLAN)
        with pytest.raises(LauncherError):
            await launcher.agents()


async def test_a_node_that_does_not_answer_keeps_no_name(tmp_path: Path) -> None:
    """Kubernetes deletes its pods, which its kubelet cannot confirm."""
    now_s = 0.0
    async with FakeKubernetes() as api, opened(api, tmp_path) as launcher:
        launcher._clock = lambda: now_s
        await launcher.place(PLAN)
        pod = api.objects[f"{PODS}/c-w-0"]
        pod["metadata"] |= {"deletionTimestamp": "t", "deletionGracePeriodSeconds": 15}
        pod["spec"]["nodeName"] = "lost"
        await launcher.agents()
        now_s = 29.0
        await launcher.agents()
        assert f"{PODS}/c-w-0" in api.objects
        now_s = 31.0
        await launcher.agents()
        assert f"{PODS}/c-w-0" not in api.objects
        await launcher.agents()
        assert "deletionTimestamp" not in api.objects[f"{PODS}/c-w-0"]["metadata"]


def test_a_pod_is_never_cut_off() -> None:
    with pytest.raises(ValueError, match="never cut off"):
        KubernetesLauncherConfig(kind="kubernetes", image="i", cut_off_s=30.0)
